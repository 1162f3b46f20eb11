"""What is done to a run, where, how often, and how the run must end. The same faults met by smaller parts: those of a
checkpoint's files in tests/checkpoint, of shards in tests/data, of the Hub in tests/hub."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, step_of
from recipe.utils.errors import ExitCode
from tests.conftest import by_step
from tests.faults.lab import Lab, Run, curve, newest_step

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the plugin needs /proc")


@pytest.fixture(scope="session")
def lab(once) -> Lab:
    return Lab(once)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("processes", "point", "saved"),
    [
        (2, "step.micro:9/1", 2),
        (1, "evaluate.hellaswag:2", 6),  # saved before its long evaluation
        (1, "save.optimizer.safetensors.during:2", 2),
        slow(2, "save.model.safetensors.during:1", 0),
        slow(2, "save.rename.before:2", 2),
        slow(1, "save.rename.after:2", 4),
        slow(2, "save.prune:1", 4),
        slow(1, "log.write:6", 2),
        slow(2, "data.shard:2", 0),
    ],
)
def test_kill(lab, tmp_path, processes, point, saved):
    """A process dies at a point, `saved` being the last step that is certain; the same command ends as if it had
    not."""
    own = {"dataset_name": tmp_path / "shards"} if "shard" in point else {}  # the run prepares them itself
    assert -signal.SIGKILL in lab.start(tmp_path, processes, f"kill@{point}", **own).end().codes
    assert newest_step(tmp_path) >= saved
    lab.start(tmp_path, processes, **own).end(0)
    lab.check_same_end(tmp_path, processes)
    assert not list((tmp_path / "run").glob(".*step_*"))


def check_stopped(lab: Lab, run: Run, **changes) -> None:
    """Fails unless SIGTERM ended the run with a checkpoint of its last step, without leaving a process behind, and the
    same command ends as if it had not been stopped."""
    run.end(ExitCode.RUN_AGAIN, together=False)
    assert run.leftovers() == []
    assert newest_step(run.directory) >= run.last_step > 0
    lab.start(run.directory, len(run.ranks), **changes).end(0)


@pytest.mark.parametrize(
    ("processes", "point", "save_steps"),
    [
        slow(1, "step.micro:5", 10),
        (1, "evaluate.validation:5", 10),
        slow(1, "save.model.safetensors.during:2", 2),
        slow(2, "step.micro:7", 10),
        (2, "step.micro:7/1", 10),
    ],
)
def test_sigterm(lab, tmp_path, processes, point, save_steps):
    """At a point, to one process or to all."""
    check_stopped(lab, lab.start(tmp_path, processes, f"term@{point}", save_steps=save_steps), save_steps=save_steps)
    lab.check_same_end(tmp_path, processes, save_steps=save_steps)


@pytest.mark.slow
def test_sigterm_while_waiting_for_data(lab, tmp_path):
    """To one of two processes, where the builder of a stream never finishes its next shard."""
    long = {"max_steps": 24, "save_steps": 12, "eval_steps": 0, "hellaswag_steps": 0}
    streamed = long | {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, 2, "stall@data.shard:3", **streamed)
    run.until("\nstep 15 ")
    time.sleep(1)
    run.send_signal(signal.SIGTERM, rank=1)
    check_stopped(lab, run, **streamed)
    lab.check_same_end(tmp_path, 2, **long)


@pytest.mark.parametrize(
    ("fault", "message", "saved"),
    [
        ("enospc@save.optimizer.safetensors.during:2", "No space left on device", [2, 6]),
        slow("eacces@save.rename.before:2", "Permission denied", [2, 6]),
        ("eio@log.write:3", "Input/output error", [2, 4, 6]),
    ],
)
def test_a_write_that_fails_is_reported_and_costs_nothing_older(lab, tmp_path, fault, message, saved):
    run = lab.start(tmp_path, 1, fault, save_total_limit=3).end(0)
    assert message in run.output
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == saved
    lab.check_same_end(tmp_path, 1, lost=int("log" in fault))


def test_a_disk_that_stays_full(lab, tmp_path):
    """Every save but the first fails, the last one however often it is tried: the exit code says so. A signal ends the
    minute in which it is tried."""
    run = lab.start(tmp_path, 1, "enospc@save.optimizer.safetensors.during:2-")
    run.until("trying again")
    run.send_signal(signal.SIGTERM)
    run.end(ExitCode.NOT_SAVED)
    assert newest_step(tmp_path) == 2
    lab.start(tmp_path, 1).end(0)
    lab.check_same_end(tmp_path, 1)


def test_where_the_newest_checkpoint_is_damaged_the_one_before_is_taken(lab, tmp_path):
    shutil.copytree(lab.reference(1, save_total_limit=2) / "run", tmp_path / "run")
    weights = tmp_path / "run" / "step_00000006" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    run = lab.start(tmp_path, 1, save_total_limit=2).end(0)
    assert "skipping" in run.output
    assert "from step 4" in run.output
    lab.check_same_end(tmp_path, 1)


def state(directory: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = directory / "run" / f"step_{step:08d}"
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


@pytest.mark.parametrize(("processes", "fault"), [(1, "nan@step.loss:16"), (2, "inf@step.gradient:8/1")])
def test_non_finite(lab, tmp_path, processes, fault):
    """On one process, in the last micro-step of the fourth step alone: none changes anything in that step, which is
    counted, and the run continues."""
    short = {"save_steps": 1, "save_total_limit": 10, "eval_steps": 0, "hellaswag_steps": 0}
    lab.start(tmp_path, processes, fault, max_steps=4, **short).end(0)
    before, after = state(tmp_path, 3), state(tmp_path, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    # The steps before are those of a run without the fault: processes that disagreed would have gone different ways.
    assert curve(tmp_path)[:4] == curve(lab.reference(processes, max_steps=4, **short))[:4]
    lab.start(tmp_path, processes, **short).end(0)
    assert [line["skipped_steps"] for line in by_step(tmp_path / "run").values()][1:] == [0, 0, 0, 1, 1, 1]
    end = state(tmp_path, 6)
    assert all(t.isfinite().all() for t in end.values())
    assert any(not torch.equal(before[k], end[k]) for k in before)
