"""Decides which steps are skipped, on the device and from numbers that are the same on every process."""

import math

import torch

from recipe.config import OptimizerConfig
from recipe.utils.errors import Permanent

MAX_SKIPPED_STEPS = 20  # in a row, after which the run ends
_SUSPECT_STREAK = 3  # skipped steps in a row: no longer one bad batch, or one gradient that overflows in fp16
_WINDOW = 128  # values that a z-score is computed from, as in llm.c (llmc/outlier_detector.h)
WAY_OUT = (
    "Lower learning_rate or lengthen warmup_steps, and continue from an earlier checkpoint: "
    "`python -m recipe.checkpoint RUN` lists checkpoints; delete those after the last good one and rerun"
)


class SpikeFilter:
    """Skips a step whose gradient is not finite or, if the configuration sets limits, whose loss or gradient norm is
    too many standard deviations above the recent ones. It counts on the device, so that the host need not wait.

    Attributes:
        limits: on the z-scores of "loss" and "grad", if the configuration sets them.
    """

    def __init__(self, device: torch.device, config: OptimizerConfig):
        limits = {"loss": config.skip_loss_z, "grad": config.skip_grad_z}
        self.limits = {name: limit for name, limit in limits.items() if limit}
        # skipped steps: the total, the current streak, and the longest streak since the last `check`
        self._counts = torch.zeros(3, dtype=torch.float32, device=device)
        self._windows = {name: torch.full((_WINDOW,), math.nan, device=device) for name in self.limits}

    def should_skip(self, grad_norm: torch.Tensor, loss: torch.Tensor | None = None) -> torch.Tensor:
        """1.0 to skip the step, else 0.0: (), float32, on the device. `loss` is the mean over all processes; it is
        needed only if `limits` has one on it."""
        values = {"loss": loss, "grad": grad_norm}
        skip = ~torch.isfinite(grad_norm)
        for name, limit in self.limits.items():
            value = values[name]
            assert value is not None
            skip = skip | (self._z_score(name, value.detach().float()) > limit)
        skip = skip.to(self._counts.device, torch.float32).view(())
        total, streak, longest_streak = self._counts.unbind()
        streak = (streak + 1) * skip
        self._counts.copy_(torch.stack((total + skip, streak, torch.maximum(longest_streak, streak))))
        return skip

    def _z_score(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The z-score of `value` among the last 128, itself included; NaN, which exceeds no limit, until there are 129.
        Values that are not finite do not enter the window."""
        window, value = self._windows[name], value.to(self._counts.device).view(1)
        shifted = torch.cat((window[1:], value))
        next_window = torch.where(torch.isfinite(value), shifted, window)
        is_full = torch.isfinite(window).all()
        mean, std = shifted.mean(), shifted.std(correction=0)
        z = torch.where(is_full & (std > 0), (value[0] - mean) / std, torch.full_like(mean, math.nan))
        window.copy_(next_window)
        return z

    def check(self, step: int) -> int:
        """Returns the total of skipped steps; waits for the device. Raises Permanent after MAX_SKIPPED_STEPS in a row.
        It is called only at logged steps, by which time more may have been skipped."""
        total, _, longest_streak = (int(x) for x in self._counts.tolist())
        if longest_streak >= MAX_SKIPPED_STEPS:
            raise Permanent(
                f"{longest_streak} steps in a row were skipped up to step {step}, for a spike or a gradient that is "
                f"not finite. {WAY_OUT}"
            )
        self._counts[2] = self._counts[1]
        return total

    @property
    def skipping(self) -> bool:
        """Whether the current streak is so long that a spike may have damaged the weights; waits for the device."""
        return self._counts.tolist()[1] >= _SUSPECT_STREAK

    def state_dict(self) -> dict:
        """The state for the checkpoint, as JSON; waits for the device."""
        total, streak, longest_streak = (int(x) for x in self._counts.tolist())
        windows = {k: [x if math.isfinite(x) else None for x in w.tolist()] for k, w in self._windows.items()}
        return {"skipped": total, "in_a_row": streak, "longest": longest_streak} | windows

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned; a window whose limit was not set before the checkpoint stays empty."""
        self._counts.copy_(torch.tensor([float(state[k]) for k in ("skipped", "in_a_row", "longest")]))
        for name, window in self._windows.items():
            if name in state:
                window.copy_(torch.tensor([math.nan if x is None else x for x in state[name]]))
