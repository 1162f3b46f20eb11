"""Runs on XLA's CPU client have the losses of the one-device engine."""

import pytest

from tests.conftest import forget_after
from tests.engine.conftest import assert_fp32
from tests.xla.conftest import column, train, train_here


def assert_same_run(lines, expected, first_ten=1e-5, all_steps=1e-4, norm=1e-3):
    assert column(lines, "loss")[:10] == pytest.approx(column(expected, "loss")[:10], abs=first_ten)
    assert column(lines, "loss") == pytest.approx(column(expected, "loss"), abs=all_steps)
    assert column(lines, "val_loss") == pytest.approx(column(expected, "val_loss"), abs=all_steps)
    assert column(lines, "learning_rate") == column(expected, "learning_rate")
    # XLA's CPU client sums the squares of a norm sequentially in fp32.
    assert column(lines, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=norm)


@pytest.mark.parametrize(
    ("devices", "micro_batch_size", "batch"),
    [
        (1, 2, "1 process x 4 micro-steps x 2 sequences x"),
        (4, 1, "1 process x 2 micro-steps x 4 devices x 1 sequence x"),
    ],
)
def test_devices_take_the_plain_engines_steps(shards, plain, tmp_path, devices, micro_batch_size, batch):
    losses = column(plain, "loss")
    assert len(losses) == 50
    assert losses[-1] < losses[0] - 0.5  # it learns: equal losses are no accident
    assert max(column(plain, "grad_norm")) > 1  # gradients are clipped
    lines, output = train(shards, tmp_path / "run", devices=devices, micro_batch_size=micro_batch_size)
    assert batch in output
    assert_same_run(lines, plain)
    assert_compiles_no_more(lines)


def test_muon_on_four_devices_takes_the_plain_engines_steps(shards, tmp_path):
    """A learning rate and a momentum that change from step to step compile nothing."""
    fields = {"optim": "muon", "lr_scheduler_type": "wsd", "decay_fraction": 0.4}
    lines = train_here(shards, tmp_path / "run", **fields)
    expected, _ = train(shards, tmp_path / "plain", config="single", **fields)
    assert_same_run(lines, expected, first_ten=1e-4)
    counts = column(lines, "compilations")
    assert len(set(counts[3:25])) == 1


def assert_compiles_no_more(lines):
    counts = column(lines, "compilations")
    assert counts[1] - counts[0] == 2  # a micro-step, an update
    assert counts[2] - counts[1] <= 2  # small ones: the running loss is set to 0, a streak of skipped steps is counted
    assert len(set(counts[2:25])) == 1  # log lines and learning rates compile nothing
    assert counts[25] - counts[24] <= 3  # small ones, once: for the first checkpoint and the second validation
    assert len(set(counts[25:])) == 1


def test_bf16_and_gradient_checkpointing_follow_the_fp32_curve(shards, plain, tmp_path):
    lines = train_here(shards, tmp_path / "run", precision="bf16", gradient_checkpointing="true")
    assert_same_run(lines, plain, first_ten=1e-2, all_steps=1e-2, norm=1e-2)
    assert column(lines, "loss") != pytest.approx(column(plain, "loss"), abs=1e-5)
    assert_compiles_no_more(lines)
    assert_fp32(tmp_path / "run" / "step_00000050")


def test_checkpoints_move_to_and_from_one_device(shards, tmp_path, capsys):
    """Saved on XLA, five steps on one device, five on XLA: the losses of never having moved. The checkpoints of all
    other engines move to and from one device too (tests/engine)."""
    run = tmp_path / "run"
    fields = {"max_steps": 15, "save_steps": 5, "save_total_limit": 9, "eval_steps": "end"}
    expected = column(train_here(shards, run, **fields), "loss")
    forget_after(5, run)
    lines, output = train(shards, run, config="single", **fields)
    assert "from step 5" in output
    assert column(lines, "loss") == pytest.approx(expected, abs=1e-5)
    forget_after(10, run)
    lines = train_here(shards, run, **fields)
    assert "from step 10" in capsys.readouterr().out
    assert column(lines, "loss") == pytest.approx(expected, abs=1e-5)
