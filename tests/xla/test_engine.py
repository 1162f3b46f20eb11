"""The XLA engine in this process, on four devices of XLA's CPU client."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from recipe.config import BatchPlan, OptimizerConfig
from recipe.optim.optimizer import make_optimizer, steps_taken
from recipe.optim.schedule import set_lr
from recipe.utils.errors import UserError
from tests.engine.conftest import EVALUATED, check_resumed_run
from tests.xla.conftest import train_here


class Toy(torch.nn.Module):
    """A least-squares problem; `unused` never has a gradient other than 0."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, 4, generator=generator))
        self.unused = torch.nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (x @ self.weight + 0 * self.unused.sum() - 1).square().mean()


def train_toy(strategy, module, config, *, accumulation, steps, spike_filter=None, after_step=lambda: None):
    """Trains as the training loop does; returns the optimizer."""
    rows = torch.ones(8, 4)
    strategy.place(module, compile=False)
    optimizer = make_optimizer(module, config, **strategy.device.optimizer_options(strategy.runtime.processes))
    batch = BatchPlan(accumulation * len(rows), 1, len(rows), accumulation, strategy.device.count)
    module, optimizer = strategy.prepare(module, optimizer, batch, config)
    strategy.spike_filter = spike_filter or strategy.spike_filter
    for step in range(steps):
        set_lr(optimizer, step, config)
        for micro_step in range(accumulation):
            with strategy.micro_step(module, last=micro_step == accumulation - 1):
                loss = module(strategy.device.put(rows)) / accumulation
                strategy.backward(loss)
        strategy.update(module, optimizer, loss)
        strategy.device.flush()
        after_step()
    return optimizer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_skipped_step_changes_nothing_and_compiles_nothing(strategy, compilations, accumulation):
    """Two of six steps are skipped: the weights and AdamW's count are those of four steps."""
    config = OptimizerConfig(learning_rate=0.1, lr_scheduler_type="wsd")
    module, skips, weights, counts = Toy(), [0.0, 0.0, 1.0, 0.0, 1.0, 0.0], [], []

    def should_skip(norm, loss):  # a tensor of 0 or of 1 alone would become a constant of the program
        return torch.tensor([skips[len(weights)], 2.0]).to(norm.device)[0]

    def after_step():
        weights.append(module.weight.detach().cpu().clone())
        counts.append(compilations())

    options = {"spike_filter": SimpleNamespace(limits={}, should_skip=should_skip), "after_step": after_step}
    optimizer = train_toy(strategy, module, config, accumulation=accumulation, steps=6, **options)
    assert [torch.equal(a, b) for a, b in pairwise(weights)] == [False, True, False, True, False]
    assert steps_taken(optimizer) == 4
    assert len(set(counts[1:])) == 1
    unskipped = Toy()
    train_toy(strategy, unskipped, config, accumulation=accumulation, steps=4)
    assert torch.equal(unskipped.weight.detach().cpu(), weights[-1])


def test_rows_are_sharded_across_the_devices_and_all_else_is_replicated(strategy):
    from torch_xla import _XLAC

    module = Toy()
    optimizer = train_toy(strategy, module, OptimizerConfig(learning_rate=0.1, max_steps=3), accumulation=2, steps=3)
    assert _XLAC._get_xla_sharding_spec(strategy.device.put(torch.ones(8, 4))) == "{devices=[4,1]0,1,2,3}"
    tensors = [*module.parameters(), *(p.grad for p in module.parameters())]
    tensors += [t for state in optimizer.state.values() for t in state.values()]
    assert len(tensors) == 2 + 2 + 6
    assert {_XLAC._get_xla_sharding_spec(t) for t in tensors} == {"{replicated}"}


def test_dropout_masks_differ_between_devices_and_repeat_with_the_seed(strategy, compilations):
    def mask(seed):
        strategy.seed_dropout(seed, 0)
        rows = strategy.device.put(torch.ones(8, 256))
        with strategy.micro_step(None, last=True):
            return F.dropout(rows, 0.5)

    mask(7)
    strategy.device.flush()
    count = compilations()
    masks = [mask(87_654_321_012_345_678 + i) for i in (0, 0, 1, 2, 3)]
    assert compilations() == count  # before the masks are fetched, which compiles
    first, same_seed, *other_seeds = (m.cpu() for m in masks)
    assert 0.4 < (first == 0).float().mean() < 0.6
    assert len({tuple(row.tolist()) for row in first}) == 8
    assert torch.equal(same_seed, first)
    assert all(not torch.equal(m, first) for m in other_seeds)


def test_a_run_resumes_bit_for_bit_compiles_nothing_twice_and_runs_every_operation_on_xla(
    strategy, shards, tmp_path, capsys
):
    """torch_xla would do an operation that it lacks on the CPU, with transfers, and count it under aten::."""
    from torch_xla.debug import metrics as xla_metrics

    xla_metrics.clear_counters()
    fields = EVALUATED | {"gradient_checkpointing": "true"}
    lines = check_resumed_run(lambda run: train_here(shards, run, **fields), tmp_path, capsys)
    # The second evaluation reuses the programs of the first.
    assert lines[4]["compilations"] == lines[8]["compilations"]
    assert lines[8]["hellaswag_llmc_acc"] * 9 == pytest.approx(round(lines[8]["hellaswag_llmc_acc"] * 9), abs=1e-5)
    names = xla_metrics.counter_names()
    assert "xla::mm" in names or "xla::addmm" in names
    assert {name for name in names if name.startswith("aten::")} <= {"aten::_local_scalar_dense"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"XLA_USE_BF16": "1"}, "unset XLA_USE_BF16: it keeps the weights and AdamW's state in bf16"),
        ({"XLA_DOWNCAST_BF16": "1"}, "unset XLA_DOWNCAST_BF16"),
        ({"FORK_LAUNCHED": "1"}, "distributed_type XLA starts one process per core"),
        ({"WORLD_SIZE": "2"}, "2 processes, but torch_xla is installed; launch with accelerate_configs/tpu.yaml"),
    ],
)
def test_launches_that_torch_xla_would_change_are_refused(strategy, monkeypatch, variables, message):
    from recipe.engine.xla import check_xla_launch

    check_xla_launch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        check_xla_launch()
