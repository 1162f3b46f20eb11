"""Runs with Muon and the WSD schedule: on one device and on several, resumed, extended, refused."""

import re
import shutil
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from recipe.checkpoint.format import checkpoints, load_checkpoint, state_of, step_of
from recipe.checkpoint.run_dir import continue_from, run_directory, set_aside
from recipe.config import parse_config
from recipe.monitor.metrics import MetricsLog
from tests.conftest import EQUAL, TINY, assert_equal_tensors, by_step, flags, forget_after, launch, ok, tensors, train

WSD = {"lr_scheduler_type": "wsd", "decay_fraction": 0.4}
MUON = {"optim": "muon"} | WSD
COUNTED = ("-m", "tests.optim.counted_run")


@pytest.fixture(scope="session")
def long_run(shards, once):
    """20 steps, the last 8 of which decay."""
    return once("muon", lambda run: train(shards, run, **MUON)[1])


@pytest.fixture(scope="session")
def one_device(shards, once):
    """STEPS of 12 sequences, which divide by two and by three processes: (directory, losses by step)."""

    def make(directory):
        return counts(ok(launch("single", 1, *COUNTED, *settings(shards, directory))).stdout)

    directory, orthogonalized = once("muon-one-device", make)
    assert orthogonalized == [STEPS * MATRICES]
    lines = losses(directory)
    assert lines[STEPS] < lines[1] - 0.5
    return directory, lines


def settings(shards, directory) -> list[str]:
    fields = EQUAL | MUON | {"total_batch_tokens": 192, "max_steps": STEPS, "save_steps": 5, "save_total_limit": 9}
    return flags(**fields, dataset_name=shards, output_dir=directory)


def losses(run) -> dict[int, float]:
    return {step: line["loss"] for step, line in by_step(run).items() if step}


def counts(output: str) -> list[int]:
    return [int(line.split()[1]) for line in output.splitlines() if line.startswith("ORTHOGONALIZED")]


STEPS = 25
MATRICES = 2 * (3 + 1 + 1 + 1)  # of two layers: query, key and value count as three


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("ddp", 3), ("fsdp", 3), ("zero1", 3), ("zero2", 2)])
def test_muon_takes_the_same_steps_on_any_engine(shards, one_device, tmp_path, config, processes):
    """In fp32; the processes together orthogonalize each matrix once a step."""
    result = ok(launch(config, processes, *COUNTED, *settings(shards, tmp_path / "run")))
    assert sum(counts(result.stdout)) == STEPS * MATRICES
    assert losses(tmp_path / "run") == pytest.approx(one_device[1], abs=1e-5)
    actual, expected = (tensors(run / f"step_{STEPS:08d}") for run in (tmp_path / "run", one_device[0]))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_muon_moves_from_engine_to_engine(shards, one_device, tmp_path):
    """From one device to FSDP, ZeRO-1, DDP and back to one device, each time five steps later; two processes
    orthogonalize equally many matrices."""
    run = shutil.copytree(one_device[0], tmp_path / "run")
    for step, config, processes in ((5, "fsdp", 2), (10, "zero1", 2), (15, "ddp", 2), (20, "single", 1)):
        forget_after(step, run)
        result = ok(launch(config, processes, *COUNTED, *settings(shards, run)))
        assert f"from step {step}" in result.stdout
        assert counts(result.stdout) == [(STEPS - step) * MATRICES // processes] * processes
        assert losses(run) == pytest.approx(one_device[1], abs=1e-5)


def steps(run):
    return [step_of(path) for path in checkpoints(run)]


@pytest.fixture(scope="session")
def decayed_run(shards, once):
    """10 steps, the last 4 of which decay."""
    fields = MUON | {"max_steps": 10, "save_steps": 2, "save_total_limit": 1, "milestone_steps": 2, "eval_steps": "end"}
    return once("decayed", lambda run: train(shards, run, **fields)[1])[0]


@pytest.mark.parametrize("processes", [1, 2])
def test_an_extended_run_continues_from_before_the_decay_as_the_longer_run_to_the_bit(
    shards, long_run, decayed_run, tmp_path, processes
):
    """10 steps, then 14, then 20: each time from the last step of the constant phase, and no checkpoint that one of
    the three configurations protects is lost."""
    run = shutil.copytree(decayed_run, tmp_path / "run")
    decayed_metrics = (run / "metrics.jsonl").read_bytes()
    fields = MUON | {"save_total_limit": 1, "save_steps": "end", "eval_steps": "end"}
    if processes == 1:
        _, output = train(shards, run, **fields | {"max_steps": 14, "dry_run": "true"})
        assert re.search(r"resume +from step 6 ", output)
    lines, output = train(shards, run, processes, **fields | {"max_steps": 14})
    assert "from step 6 " in output
    assert steps(run) == [2, 4, 6, 8, 14]  # 6 and 8: the starts of the first and the second decay
    assert steps(run / "decayed_00000010") == [8, 10]
    assert (run / "decayed_00000010" / "metrics.jsonl").read_bytes() == decayed_metrics
    ends = (run / "decayed_00000010" / "step_00000010", run / "step_00000014")
    assert len({state_of(end)["tracker"]["run_id"] for end in ends}) == 2  # a tracker accepts each step once
    assert [s for s, line in lines.items() if line["val_loss"] is not None] == [14]  # that of 10 was set aside
    _, output = train(shards, run, processes, **fields | {"max_steps": 14})
    assert "training is finished" in output
    train(shards, run, processes, **fields | {"max_steps": 20})
    assert steps(run) == [2, 4, 6, 8, 12, 20]
    assert steps(run / "decayed_00000014") == [14]
    _, output = train(shards, run / "decayed_00000010", **MUON | {"max_steps": 10})  # is a run directory of its own
    assert "training is finished" in output
    if processes == 1:
        lines, (long, _) = by_step(run), long_run
        assert_equal_tensors(run / "step_00000020", long / "step_00000020")
        momentum = [name for name in tensors(run / "step_00000020") if name.startswith("momentum.")]
        assert len(momentum) == 8  # four matrices in each of two blocks
        assert [lines[s]["loss"] for s in range(1, 21)] == [by_step(long)[s]["loss"] for s in range(1, 21)]


@pytest.mark.parametrize("operation", range(8))
def test_an_extension_that_is_killed_while_it_moves_the_decay_aside_ends_the_same(
    decayed_run, tmp_path, monkeypatch, operation
):
    """Killed before each of its file operations: the next process sets the same files aside."""
    config = parse_config(flags(**TINY | MUON | {"max_steps": 14})).flat()
    run = shutil.copytree(decayed_run, tmp_path / "run")
    decayed_metrics, calls = (run / "metrics.jsonl").read_bytes(), count()

    def start() -> Path:
        with run_directory(run):
            checkpoint = continue_from(run, config)
            set_aside(load_checkpoint(checkpoint))
            MetricsLog(run / "metrics.jsonl", step_of(checkpoint)).close()
        return checkpoint

    def killed(original):
        def call(*arguments, **options):
            if next(calls) == operation:
                raise KeyboardInterrupt
            return original(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        for name in ("mkdir", "rename", "replace", "touch"):
            patched.setattr(Path, name, killed(getattr(Path, name)))
        with suppress(KeyboardInterrupt):
            start()
    assert next(calls) > operation
    assert start().name == "step_00000006"
    assert steps(run) == [2, 4, 6]
    assert [path.name for path in run.glob("*decayed*")] == ["decayed_00000010"]
    assert steps(run / "decayed_00000010") == [8, 10]
    assert (run / "decayed_00000010" / "metrics.jsonl").read_bytes() == decayed_metrics
    assert max(by_step(run)) == 6


def test_without_the_checkpoint_before_the_decay_the_newest_continues_with_a_warning(shards, decayed_run, tmp_path):
    run = shutil.copytree(decayed_run, tmp_path / "run")
    shutil.rmtree(run / "step_00000006")
    _, output = train(shards, run, **MUON | {"max_steps": 14})
    assert "step_00000006, the last checkpoint before the decay, cannot be used" in output
    assert "from step 10 " in output
    assert "the learning rate at step 10 was 0 and is" in output
    assert 10 in steps(run)


def test_muon_is_refused_under_zero_3(shards, tmp_path):
    result = launch("zero3", 1, "recipe/train.py", *settings(shards, tmp_path / "run"), "--dry_run")
    assert result.returncode == 2
    assert re.search("optim muon is not supported on CPU.*--optim adamw", result.stderr)
