"""The fp16 loss scale in a checkpoint: a resumed run doubles it when the uninterrupted one does."""

import shutil
from importlib.util import find_spec
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from recipe.checkpoint.format import state_of
from recipe.engine.strategy import Strategy
from tests.checkpoint import change_state
from tests.conftest import ok, tiny_flags
from tests.engine import cpu_strategy

WINDOW = 4  # finite steps before it doubles


class Torch:
    """torch's scaler, which every engine but ZeRO uses."""

    def __init__(self):
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=WINDOW)
        self._weight = torch.nn.Parameter(torch.ones(1))
        self._optimizer = torch.optim.SGD([self._weight], lr=0.0)
        self.scaler.scale(self._weight)

    def step(self, grad: float) -> float:
        """The scale after a step with this gradient."""
        self._weight.grad = torch.full((1,), grad)
        self.scaler.step(self._optimizer)
        self.scaler.update()
        return self.scaler.get_scale()


class Zero:
    """DeepSpeed's scaler."""

    def __init__(self):
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

        from recipe.engine.deepspeed import _LossScale

        self._deepspeed = DynamicLossScaler(2.0**16, WINDOW, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
        self.scaler = _LossScale(self._deepspeed)

    def step(self, grad: float) -> float:
        """The same."""
        self._deepspeed.update_scale(grad == float("inf"))
        return self._deepspeed.cur_scale


def doublings(run: Torch | Zero, steps: range) -> list[int]:
    """The steps after which the scale has doubled."""
    scales = [run.scaler.state_dict()["scale"], *(run.step(0.0) for _ in steps)]
    return [step for step, (old, new) in zip(steps, pairwise(scales), strict=True) if new == 2 * old]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is installed on Linux only")
@pytest.mark.parametrize("overflow", [False, True])
@pytest.mark.parametrize(("saving", "resuming"), [(Zero, Zero), (Zero, Torch), (Torch, Zero), (Torch, Torch)])
def test_a_resumed_run_doubles_the_loss_scale_when_the_uninterrupted_one_does(monkeypatch, saving, resuming, overflow):
    """Whenever it was saved; between ZeRO and another engine too, which differ in the first doubling only: after an
    overflow DeepSpeed's scaler needs one finite step more than torch's."""
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: 0)  # it logs an overflow
    for saved_step in range(2 * WINDOW + 2):
        uninterrupted, resumed = saving(), resuming()
        if overflow:
            uninterrupted.step(float("inf"))
        doublings(uninterrupted, range(1, saved_step + 1))
        resumed.scaler.load_state_dict(uninterrupted.scaler.state_dict())
        steps = range(saved_step + 1, saved_step + 3 * WINDOW)
        expected = doublings(uninterrupted, steps)[:2]
        assert len(expected) == 2
        assert doublings(resumed, steps)[:2] == expected, saved_step


def test_a_resumed_run_goes_on_with_the_loss_scale_of_its_checkpoint(
    shards, whole_run, tmp_path, monkeypatch, in_process
):
    """Here on a CPU, whose steps leave it as it is."""
    run, scale = shutil.copytree(whole_run[0], tmp_path / "run"), torch.amp.GradScaler("cpu", init_scale=8.0)
    change_state(run / "step_00000020", lambda state: state.update(grad_scaler=scale.state_dict()))
    monkeypatch.setattr(Strategy, "grad_scaler", torch.amp.GradScaler("cpu"))
    ok(in_process(tiny_flags(shards, run, dropout=0.1, max_steps=21, eval_steps=7)))
    assert state_of(run / "step_00000021")["grad_scaler"] == scale.state_dict()


def test_a_second_run_of_a_process_starts_with_the_first_loss_scale():
    """`make best` trains several on a T4, and an audit replays its run in a process of its own."""
    first = Torch()
    accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"), free_memory=lambda: None)
    strategy = cpu_strategy(accelerator, precision="fp16")
    first.scaler = strategy.grad_scaler
    before = first.scaler.state_dict()
    first.scaler.scale(torch.ones(1))
    assert first.step(float("inf")) == before["scale"] / 2
    first.step(0.0)
    strategy.release()
    assert strategy.grad_scaler.state_dict() == before
    assert first.scaler.scale(torch.ones(1)) == before["scale"]
