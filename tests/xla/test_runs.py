"""Whole runs on XLA's CPU client, launched as a user does: the same numbers as the engine of one device."""

import shutil

import pytest
import torch

from tests.conftest import by_step, forget_after, tensors
from tests.xla.conftest import column, train, train_here


def assert_same_run(lines, expected, first_ten=1e-5, all_steps=1e-4, norm=1e-3):
    assert column(lines, "loss", last=10) == pytest.approx(column(expected, "loss", last=10), abs=first_ten)
    assert column(lines, "loss") == pytest.approx(column(expected, "loss"), abs=all_steps)
    assert column(lines, "val_loss") == pytest.approx(column(expected, "val_loss"), abs=all_steps)
    assert column(lines, "learning_rate") == column(expected, "learning_rate")
    # XLA's CPU client adds up a norm's squares one after the other, in fp32.
    assert column(lines, "grad_norm") == pytest.approx(column(expected, "grad_norm"), rel=norm)


@pytest.mark.parametrize(
    ("devices", "micro_batch_size", "batch"),
    [
        (1, 2, "1 process x 4 micro-steps x 2 sequences x"),
        (4, 1, "1 process x 2 micro-steps x 4 devices x 1 sequence x"),
    ],
)
def test_devices_take_the_plain_engines_steps(shards, plain, tmp_path, devices, micro_batch_size, batch):
    losses = column(plain[1], "loss")
    assert len(losses) == 50
    assert losses[-1] < losses[0] - 0.5  # it learns: equal losses are no accident
    assert max(column(plain[1], "grad_norm")) > 1  # and is clipped
    lines, output = train(shards, tmp_path / "run", devices=devices, micro_batch_size=micro_batch_size)
    assert batch in output
    assert_same_run(lines, plain[1])
    assert_compiles_no_more(lines)


def test_muon_on_four_devices_takes_the_plain_engines_steps(shards, tmp_path):
    """A schedule with a rate and a momentum that change from step to step compiles nothing."""
    fields = {"optim": "muon", "lr_scheduler_type": "wsd", "decay_fraction": 0.4}
    lines = train_here(shards, tmp_path / "run", **fields)
    expected, _ = train(shards, tmp_path / "plain", config="single", **fields)
    assert_same_run(lines, expected, first_ten=1e-4)
    counts = column(lines, "compilations")
    assert len(set(counts[3:25])) == 1


def assert_compiles_no_more(lines):
    """Validation's programs at step 0; a micro-step and an update; then nothing but zeros."""
    counts = column(lines, "compilations")
    assert counts[1] - counts[0] == 2  # a micro-step, an update
    assert counts[2] - counts[1] <= 2  # small ones: the running loss set to 0, the spike filter's count of a streak
    assert len(set(counts[2:25])) == 1  # log lines, learning rates
    assert counts[25] - counts[24] <= 3  # small ones, once: what a checkpoint reads, the zeros of a second validation
    assert len(set(counts[25:])) == 1


def test_bf16_and_gradient_checkpointing_follow_the_fp32_curve(shards, plain, tmp_path):
    fields = {"devices": 4, "precision": "bf16", "gradient_checkpointing": "true"}
    lines, _ = train(shards, tmp_path / "run", **fields)
    assert_same_run(lines, plain[1], first_ten=1e-2, all_steps=1e-2, norm=1e-2)
    assert column(lines, "loss") != pytest.approx(column(plain[1], "loss"), abs=1e-5)
    assert_compiles_no_more(lines)
    for name, tensor in tensors(tmp_path / "run" / "step_00000050").items():
        assert tensor.dtype == torch.float32
        if tensor.ndim > 1:  # torch_xla can hold bf16 and call it float32: the bits must be there
            assert not torch.equal(tensor, tensor.bfloat16().float()), name


@pytest.fixture(scope="module")
def base(shards, once):
    """A run on XLA from which one device goes on, and which goes on from its."""
    run, _ = once("base", lambda run: train_here(shards, run, **MOVES))
    return run, by_step(run)


MOVES = {"max_steps": 15, "save_steps": 5, "save_total_limit": 9, "eval_steps": "end"}


def test_checkpoints_move_to_and_from_one_device(shards, base, tmp_path, capsys):
    """Saved on XLA, five steps elsewhere, saved there, five steps on XLA: the losses of never having moved. To and from
    one device those of all other engines move (tests/engine)."""
    expected = column(base[1], "loss")
    there = forget_after(5, shutil.copytree(base[0], tmp_path / "there"))
    lines, output = train(shards, there, config="single", **MOVES)
    assert "from step 5" in output
    assert column(lines, "loss")[5:10] == pytest.approx(expected[5:10], abs=1e-5)
    back = forget_after(10, shutil.copytree(there, tmp_path / "back"))
    lines = train_here(shards, back, **MOVES)
    assert "from step 10" in capsys.readouterr().out
    assert column(lines, "loss")[10:] == pytest.approx(expected[10:], abs=1e-5)
