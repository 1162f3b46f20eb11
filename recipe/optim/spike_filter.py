"""Decides which steps are skipped, on the device and from numbers that are the same on every process."""

import math

import torch

from recipe.config import OptimizerConfig
from recipe.utils.errors import UserError

MAX_SKIPPED_STEPS = 20  # in a row, until the run ends
_MANY = 3  # in a row: more than one batch, or one gradient that fp16 could not hold
_WINDOW = 128  # values that a z-score is computed from, as in llm.c (llmc/outlier_detector.h)
WAY_OUT = (
    "Lower learning_rate or lengthen warmup_steps, and continue from an earlier checkpoint: "
    "`python -m recipe.checkpoint RUN` lists checkpoints; delete those after the last good one and rerun"
)


class SpikeFilter:
    """Skips a step whose gradient is not finite or, if the configuration sets limits, whose loss or gradient norm is
    too many standard deviations above the recent ones. It counts on the device, so that no step waits for it.

    Attributes:
        limits: on the z-scores of "loss" and "grad", if the configuration sets them.
    """

    def __init__(self, device: torch.device, config: OptimizerConfig):
        limits = {"loss": config.skip_loss_z, "grad": config.skip_grad_z}
        self.limits = {name: limit for name, limit in limits.items() if limit}
        # steps skipped in total, in a row up to now, and the longest row since the last `check`
        self._counts = torch.zeros(3, dtype=torch.float32, device=device)
        self._windows = {name: torch.full((_WINDOW,), math.nan, device=device) for name in self.limits}

    def should_skip(self, grad_norm: torch.Tensor, loss: torch.Tensor | None = None) -> torch.Tensor:
        """1.0 if the step is to be skipped, else 0.0: (), float32, on the device. `loss` is the mean over all
        processes; it is needed only where `limits` has one on it."""
        values = {"loss": loss, "grad": grad_norm}
        skip = ~torch.isfinite(grad_norm)
        for name, limit in self.limits.items():
            value = values[name]
            assert value is not None
            skip = skip | (self._z_score(name, value.detach().float()) > limit)
        skip = skip.to(self._counts.device, torch.float32).view(())
        skipped, in_a_row, longest = self._counts.unbind()
        in_a_row = (in_a_row + 1) * skip
        self._counts.copy_(torch.stack((skipped + skip, in_a_row, torch.maximum(longest, in_a_row))))
        return skip

    def _z_score(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The z-score of `value` among the last 128, itself included; NaN, which exceeds no limit, until there are 129.
        Values that are not finite do not enter the window."""
        window, value = self._windows[name], value.to(self._counts.device).view(1)
        longer = torch.cat((window[1:], value))
        window_after = torch.where(torch.isfinite(value), longer, window)
        full = torch.isfinite(window).all()
        mean, std = longer.mean(), longer.std(correction=0)
        z = torch.where(full & (std > 0), (value[0] - mean) / std, torch.full_like(mean, math.nan))
        window.copy_(window_after)
        return z

    def check(self, step: int) -> int:
        """Returns the total of skipped steps; waits for the device. Raises UserError after MAX_SKIPPED_STEPS in a row.
        It is called only at logged steps, by which time more may have been skipped."""
        skipped, _, longest = (int(x) for x in self._counts.tolist())
        if longest >= MAX_SKIPPED_STEPS:
            raise UserError(
                f"{longest} steps in a row were skipped up to step {step}, for a spike or a gradient that is not "
                f"finite. {WAY_OUT}"
            )
        self._counts[2] = self._counts[1]
        return skipped

    @property
    def skipping(self) -> bool:
        """Whether so many steps in a row were skipped up to now that the weights may be those of a spike; waits for the
        device."""
        return self._counts.tolist()[1] >= _MANY

    def state_dict(self) -> dict:
        """The state for the checkpoint, as JSON; waits for the device."""
        skipped, in_a_row, longest = (int(x) for x in self._counts.tolist())
        windows = {k: [x if math.isfinite(x) else None for x in w.tolist()] for k, w in self._windows.items()}
        return {"skipped": skipped, "in_a_row": in_a_row, "longest": longest} | windows

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned; a window whose limit was not set before the checkpoint stays empty."""
        self._counts.copy_(torch.tensor([float(state[k]) for k in ("skipped", "in_a_row", "longest")]))
        for name, window in self._windows.items():
            if name in state:
                window.copy_(torch.tensor([math.nan if x is None else x for x in state[name]]))
