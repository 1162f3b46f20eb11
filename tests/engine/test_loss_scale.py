"""The fp16 loss scale in a checkpoint: a resumed run doubles it when the uninterrupted one does."""

from importlib.util import find_spec

import pytest
import torch

WINDOW = 4  # good steps before it doubles


class Torch:
    """torch's scaler, of every engine but ZeRO."""

    def __init__(self):
        self.saved = torch.amp.GradScaler("cpu", growth_interval=WINDOW)
        self._weight = torch.nn.Parameter(torch.ones(1))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.0)
        self.saved.scale(self._weight)

    def step(self, grad: float) -> float:
        """The scale after a step with this gradient."""
        self._weight.grad = torch.full((1,), grad)
        self.saved.step(self._optimizer)
        self.saved.update()
        return self.saved.get_scale()


class Zero:
    """DeepSpeed's."""

    def __init__(self):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        from recipe.engine.deepspeed import _LossScale

        self._scaler = DynamicLossScaler(2.0**16, WINDOW, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
        self.saved = _LossScale(self._scaler)

    def step(self, grad: float) -> float:
        """The same."""
        self._scaler.update_scale(grad == float("inf"))
        return self._scaler.cur_scale


def doublings(scaler, steps: range) -> list[int]:
    """The steps after which the scale is twice what it was."""
    scales = [scaler.saved.state_dict()["scale"], *(scaler.step(0.0) for _ in steps)]
    return [step for step, before, after in zip(steps, scales, scales[1:], strict=False) if after == 2 * before]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is installed on Linux only")
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(("first", "then"), [(Zero, Zero), (Zero, Torch), (Torch, Zero), (Torch, Torch)])
def test_a_resumed_run_doubles_the_loss_scale_when_the_uninterrupted_one_does(monkeypatch, first, then, overflow):
    """Wherever it was saved; between ZeRO and another engine too. Only the first time differs between the two: after an
    overflow DeepSpeed's takes one good step more than torch's."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)  # it logs an overflow
    for saved in range(2 * WINDOW + 2):
        full = first()
        if overflow:
            full.step(float("inf"))
        doublings(full, range(1, saved + 1))
        resumed = then()
        resumed.saved.load_state_dict(full.saved.state_dict())
        rest = range(saved + 1, saved + 3 * WINDOW)
        expected, found = doublings(full, rest)[:2], doublings(resumed, rest)[:2]
        assert len(expected) == 2
        assert found == expected, saved
