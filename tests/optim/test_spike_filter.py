"""Which steps are skipped, and that a skipped step changes nothing."""

import json
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from recipe.config import OptimizerConfig
from recipe.optim.optimizer import make_optimizer
from recipe.optim.spike_filter import SpikeFilter
from recipe.utils.errors import Permanent
from tests.engine import prepared_strategy
from tests.optim.test_optimizer import tiny_model

CPU = torch.device("cpu")


def skips(spike_filter: SpikeFilter, losses, norms) -> list[bool]:
    pairs = zip(losses, norms, strict=True)
    return [bool(spike_filter.should_skip(torch.tensor(norm), torch.tensor(loss))) for loss, norm in pairs]


def test_steps_that_are_not_finite_are_skipped_and_counted_and_too_many_in_a_row_end_the_run(monkeypatch):
    monkeypatch.setattr("recipe.optim.spike_filter.MAX_SKIPPED_STEPS", 3)
    spike_filter = SpikeFilter(CPU, OptimizerConfig())
    norms = [1.0, float("nan"), float("inf"), 1.0, float("-inf")]
    assert skips(spike_filter, [1.0] * 5, norms) == [False, True, True, False, True]
    assert spike_filter.check(5) == 3
    assert not spike_filter.skipping
    skips(spike_filter, [1.0] * 2, [float("nan")] * 2)  # three in a row, over two checks
    assert spike_filter.skipping
    skips(spike_filter, [1.0], [1.0])
    resumed = SpikeFilter(CPU, OptimizerConfig())
    resumed.load_state_dict(json.loads(json.dumps(spike_filter.state_dict())))
    for each in (spike_filter, resumed):
        assert not each.skipping
        with pytest.raises(Permanent, match="3 steps in a row were skipped up to step 8"):
            each.check(8)


def z_scores(values: list[float]) -> list[float]:
    """llm.c's definition: NaN until the window is full, then of each value among the last 128, itself included."""
    scores = [float("nan")] * 128
    for i in range(128, len(values)):
        window = np.asarray(values[i - 127 : i + 1], np.float64)
        scores.append((values[i] - window.mean()) / window.std())
    return scores


@pytest.mark.parametrize("field", ["skip_loss_z", "skip_grad_z"])
def test_spikes_are_those_of_the_z_score_also_after_a_checkpoint(field):
    rng = np.random.default_rng(0)
    values = rng.normal(3.0, 0.1, 400).astype(np.float32)
    values[[50, 200, 300]] += 1.0  # the first one comes before the window is full
    values[350] -= 3.0  # below the mean is no spike
    values = values.tolist()
    scores, steady = z_scores(values), [1.0] * 400
    limit = min(scores[200], scores[300]) - 0.01  # dividing by n - 1 would give scores 0.03 lower
    config = OptimizerConfig(**{field: limit})
    first, resumed = SpikeFilter(CPU, config), SpikeFilter(CPU, config)
    losses, norms = (values, steady) if field == "skip_loss_z" else (steady, values)
    skipped = skips(first, losses[:150], norms[:150])
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    skipped += skips(resumed, losses[150:], norms[150:])
    assert [i for i, skip in enumerate(skipped) if skip] == [200, 300]
    assert [i for i, z in enumerate(scores) if z > limit] == [200, 300]
    assert resumed.check(400) == 2


def test_a_value_that_is_not_finite_does_not_enter_the_window():
    spike_filter = SpikeFilter(CPU, OptimizerConfig(skip_loss_z=3.0))
    values = np.random.default_rng(1).normal(3.0, 0.1, 129).tolist()
    skips(spike_filter, values, [1.0] * 129)
    window = spike_filter.state_dict()["loss"]
    assert skips(spike_filter, [float("nan")], [float("nan")]) == [True]
    assert spike_filter.state_dict()["loss"] == window
    assert skips(spike_filter, [9.0], [1.0]) == [True]


def test_all_processes_judge_a_step_by_their_mean_loss():
    """By its own loss, a process would skip a step that another takes."""
    model, should_skip = torch.nn.Linear(1, 1), Mock(return_value=torch.zeros(()))
    model(torch.ones(1)).backward()
    optimizer = torch.optim.SGD(model.parameters())
    strategy = prepared_strategy(model, optimizer, processes=Mock(world_size=1, mean=lambda loss: loss + 1.0))
    strategy.spike_filter = Mock(limits={"loss": 3.0}, should_skip=should_skip)
    strategy.update(model, optimizer, torch.tensor(2.0))
    assert should_skip.call_args.args[1] == 3.0


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("scaled", [False, True], ids=["fp32", "fp16's scaler"])
def test_a_skipped_step_changes_neither_weights_nor_optimizer_state(optim, scaled):
    model, ids = tiny_model(), torch.arange(18).view(2, 9)
    optimizer = make_optimizer(model, OptimizerConfig(optim=optim, learning_rate=0.1), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    spike_filter = SimpleNamespace(limits={})
    strategy = prepared_strategy(model, optimizer, scaler=scaler)
    strategy.spike_filter = spike_filter
    optimizer.zero_grad()

    def step(spike: bool = False, factor: float = 1.0) -> tuple[float, float]:
        loss = model(ids[:, :-1], ids[:, 1:]) * factor
        (scaler.scale(loss) if scaler else loss).backward()
        spike_filter.should_skip = lambda norm, loss: (~torch.isfinite(norm) | torch.tensor(spike)).to(torch.float32)
        norm, skipped = strategy.update(model, optimizer, loss.detach())
        return norm.item(), skipped.item()

    def weights_and_state() -> list[torch.Tensor]:
        tensors = [*model.parameters(), *(t for state in optimizer.state.values() for t in state.values())]
        return [t.detach().clone() for t in tensors]

    step()  # creates the optimizer state
    for spike, factor in ((True, 1.0), (False, float("nan")), (False, float("inf"))):
        before, scale = weights_and_state(), scaler and scaler.get_scale()
        assert step(spike, factor)[1] == 1.0
        assert not scaler or scaler.get_scale() == scale / 2
        assert all(torch.equal(a, b) for a, b in zip(before, weights_and_state(), strict=True))
    norm, skipped = step()
    assert (norm > 0, skipped) == (True, 0.0)
    assert not any(torch.equal(a, b) for a, b in zip(before, weights_and_state(), strict=True))
