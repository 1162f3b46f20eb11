"""Steps that are left out: which ones, and that nothing of them remains."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from recipe.config import OptimizerConfig
from recipe.engine.base import Engine
from recipe.errors import UserError
from recipe.optim.spike_filter import Guard

CPU = torch.device("cpu")


def judged(guard: Guard, losses, norms) -> list[bool]:
    pairs = zip(losses, norms, strict=True)
    return [bool(guard.judge(torch.tensor(loss), torch.tensor(norm))) for loss, norm in pairs]


def test_a_gradient_that_is_not_finite_is_left_out_and_counted():
    guard = Guard(CPU, OptimizerConfig(max_skipped_steps=3))
    norms = [1.0, float("nan"), float("inf"), 1.0, float("-inf")]
    assert judged(guard, [1.0] * 5, norms) == [False, True, True, False, True]
    assert guard.check(5) == 3
    assert guard.in_a_row == 1
    judged(guard, [1.0] * 2, [float("nan")] * 2)  # the third in a row, over two readings
    with pytest.raises(UserError, match="3 steps in a row, by step 7, were left out"):
        guard.check(7)


def test_a_streak_that_ended_between_two_readings_is_not_missed():
    guard = Guard(CPU, OptimizerConfig(max_skipped_steps=2))
    judged(guard, [1.0] * 4, [1.0, float("nan"), float("nan"), 1.0])
    with pytest.raises(UserError, match="2 steps in a row"):
        guard.check(4)


def z_scores(values: list[float], window: int = 128) -> list[float]:
    """llm.c's, plainly: nothing until the window is full, then of each value among the last ones, itself included."""
    scores = []
    for i, value in enumerate(values):
        last = np.asarray(values[max(0, i + 1 - window) : i + 1], np.float64)
        scores.append((value - last.mean()) / last.std() if i >= window else float("nan"))
    return scores


@pytest.mark.parametrize("what", ["skip_loss_z", "skip_grad_z"])
def test_spikes_are_those_of_the_z_score_and_survive_a_checkpoint(what):
    rng = np.random.default_rng(0)
    values = rng.normal(3.0, 0.1, 400).astype(np.float32)
    values[[50, 200, 300]] += 1.0  # the first one falls into the time of learning what is usual
    values = values.tolist()
    config = OptimizerConfig(**{what: 4.0})
    guard, steady = Guard(CPU, config), [1.0] * 400
    arguments = (values, steady) if what == "skip_loss_z" else (steady, values)
    first = judged(guard, *(a[:150] for a in arguments))
    again = Guard(CPU, config, json.loads(json.dumps(guard.state())))
    found = first + judged(again, *(a[150:] for a in arguments))
    assert (
        [i for i, skip in enumerate(found) if skip]
        == [i for i, z in enumerate(z_scores(values)) if z > 4.0]
        == [200, 300]
    )
    assert again.check(400) == 2


def test_what_is_not_finite_leaves_the_window_as_it_was():
    guard = Guard(CPU, OptimizerConfig(skip_loss_z=3.0))
    values = np.random.default_rng(1).normal(3.0, 0.1, 129).tolist()
    judged(guard, values, [1.0] * 129)
    before = guard.state()["loss"]
    assert judged(guard, [float("nan")], [float("nan")]) == [True]
    assert guard.state()["loss"] == before
    assert judged(guard, [9.0], [1.0]) == [True]


@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16's scaler"])
def test_a_step_that_is_left_out_changes_neither_weights_nor_moments(scaled):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    raw = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None

    class Wrapped:  # what Accelerate's optimizer does
        optimizer, zero_grad = raw, staticmethod(raw.zero_grad)

        @staticmethod
        def step():
            scaler.step(raw) if scaler else raw.step()
            if scaler:
                scaler.update()

    def clip(parameters, max_norm):
        if scaler:
            scaler.unscale_(raw)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    engine = Engine.__new__(Engine)
    engine.device = CPU
    engine.accelerator = SimpleNamespace(clip_grad_norm_=clip, scaler=scaler)

    def step(spike: bool = False, factor: float = 1.0) -> tuple[float, float]:
        loss = model(torch.ones(2, 4)).square().mean() * factor
        (scaler.scale(loss) if scaler else loss).backward()
        norm, skip = engine.update(
            model, Wrapped, 1.0, lambda norm: (~torch.isfinite(norm) | torch.tensor(spike)).to(torch.float32)
        )
        return norm.item(), skip.item()

    def everything() -> list[torch.Tensor]:
        state = [t.clone() for p in model.parameters() for t in raw.state[p].values()]
        return [*(p.detach().clone() for p in model.parameters()), *state]

    step()
    for spike, factor in ((True, 1.0), (False, float("nan")), (False, float("inf"))):
        before, scale = everything(), scaler and scaler.get_scale()
        assert step(spike, factor)[1] == 1.0
        assert not scaler or scaler.get_scale() == (scale if spike else scale / 2)  # a spike says nothing of the scale
        assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    before = everything()
    norm, skip = step()
    assert (norm > 0, skip) == (True, 0.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
