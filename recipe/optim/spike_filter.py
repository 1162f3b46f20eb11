"""Which steps are left out: decided on the device, from numbers that are the same on every process."""

import math

import torch

from recipe.config import OptimizerConfig
from recipe.errors import UserError

_WINDOW = 128  # values that a z-score is reckoned from, as in llm.c (llmc/outlier_detector.h)
WAY_OUT = (
    "Lower learning_rate or lengthen warmup_steps, and go on from the last good checkpoint: "
    "`python -m recipe.checkpoint list RUN` names them; delete those after it"
)


class Guard:
    """Leaves out a step whose gradient is not finite or, where the configuration has limits for them, whose loss or
    gradient norm lies too many standard deviations above those of late. Counts on the device, so that nothing waits
    for it; `check` reads."""

    def __init__(self, device: torch.device, config: OptimizerConfig, state: dict | None = None):
        self.config = config
        state = state or {"skipped": 0, "in_a_row": 0, "longest": 0}
        # skipped steps in all, up to now without a break, and the most without a break since the last check
        self._counts = torch.tensor(
            [float(state[k]) for k in ("skipped", "in_a_row", "longest")], dtype=torch.float32, device=device
        )
        limits = {"loss": config.skip_loss_z, "grad_norm": config.skip_grad_z}
        self._limits = {name: limit for name, limit in limits.items() if limit}
        nothing = [math.nan] * _WINDOW
        self._windows = {
            name: torch.tensor([math.nan if x is None else x for x in state.get(name, nothing)], device=device)
            for name in self._limits
        }

    @property
    def needs_loss(self) -> bool:
        """Whether `judge` wants the mean over all processes, and not this one's loss."""
        return "loss" in self._limits

    def judge(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """1.0 where the step is to be left out, else 0.0: (), float32, on the device."""
        skip = ~torch.isfinite(grad_norm)
        for name, value in (("loss", loss), ("grad_norm", grad_norm)):
            if name in self._limits:
                skip = skip | (self._z_score(name, value.detach().float()) > self._limits[name])
        skip = skip.to(self._counts.device, torch.float32).view(())
        skipped, in_a_row, longest = self._counts.unbind()
        in_a_row = (in_a_row + 1) * skip
        self._counts.copy_(torch.stack((skipped + skip, in_a_row, torch.maximum(longest, in_a_row))))
        return skip

    def _z_score(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Of a value among the last 128, itself included; NaN, which is above nothing, until there are 129. What is not
        finite does not count."""
        window, value = self._windows[name], value.to(self._counts.device).view(1)
        longer = torch.cat((window[1:], value))
        window_after = torch.where(torch.isfinite(value), longer, window)
        full = torch.isfinite(window).all()
        mean, std = longer.mean(), longer.std(correction=0)
        z = torch.where(full & (std > 0), (value[0] - mean) / std, torch.full_like(mean, math.nan))
        window.copy_(window_after)
        return z

    def check(self, step: int) -> int:
        """Skipped steps in all; waits for the device. Raises UserError after too many in a row."""
        skipped, _, longest = (int(x) for x in self._counts.tolist())
        if longest >= self.config.max_skipped_steps:
            raise UserError(
                f"{longest} steps in a row, by step {step}, were left out: their gradient was not finite, or a spike; "
                f"max_skipped_steps sets the limit. {WAY_OUT}"
            )
        self._counts[2] = self._counts[1]
        return skipped

    @property
    def in_a_row(self) -> int:
        """Steps left out up to now without a break; waits for the device."""
        return int(self._counts.tolist()[1])

    def state(self) -> dict:
        """For the checkpoint, as JSON; waits for the device."""
        skipped, in_a_row, longest = (int(x) for x in self._counts.tolist())
        windows = {k: [x if math.isfinite(x) else None for x in w.tolist()] for k, w in self._windows.items()}
        return {"skipped": skipped, "in_a_row": in_a_row, "longest": longest} | windows
