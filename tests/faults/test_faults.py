"""Faults in complete runs, and how each run must end. Faults in single parts are tested in tests/checkpoint (files of a
checkpoint), tests/data (shards) and tests/hub."""

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from recipe.checkpoint.format import checkpoints, newest_intact, state_of, step_of
from recipe.utils.errors import ExitCode
from tests.conftest import assert_equal_tensors, by_step, tensors
from tests.faults.lab import Lab, Run, curve, newest_step
from tests.faults.power import replay, write

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the shim needs /proc")


@pytest.fixture(scope="session")
def lab(once) -> Lab:
    return Lab(once)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("processes", "point", "saved_step"),
    [
        (2, "step.micro:9/1", 2),
        (1, "evaluate.hellaswag:2", 6),  # a step is saved before its long evaluation
        (1, "write(*/.saving-step_00000004/.tmp*):4", 2),  # half of the optimizer's state
        slow(2, "write(*/.saving-*/.tmp*):2", 0),
        slow(2, "rename(*/run/step_*):2", 2),
        slow(1, "fsync(*/run):3", 4),  # has its name: the first call is of metrics.jsonl
        slow(2, "unlink(*/.deleting-*):2", 4),
        slow(2, "rename(*_[0-9]*.bin):2", 0),
    ],
)
def test_a_killed_run_continues_to_the_same_end(lab, tmp_path, processes, point, saved_step):
    """One process is killed at a point, when `saved_step` is certain to have been saved."""
    changes = {"dataset_name": tmp_path / "shards"} if ".bin" in point else {}  # the run prepares them itself
    assert -signal.SIGKILL in lab.start(tmp_path, processes, f"kill@{point}", **changes).end().codes
    assert newest_step(tmp_path) >= saved_step
    lab.start(tmp_path, processes, **changes).end(0)
    lab.check_same_end(tmp_path, processes)
    assert not list((tmp_path / "run").glob(".*step_*"))


def check_stopped(lab: Lab, run: Run, **changes) -> None:
    """Fails unless SIGTERM ended the run and all its processes with a checkpoint of its last step. Then runs the same
    command to its end."""
    run.end(ExitCode.RUN_AGAIN, together=False)
    assert run.leftovers() == []
    assert newest_step(run.directory) >= run.last_step > 0
    lab.start(run.directory, len(run.ranks), **changes).end(0)


@pytest.mark.parametrize(
    ("processes", "point", "save_steps"),
    [
        slow(1, "step.micro:5", 10),
        (1, "evaluate.validation:5", 10),
        slow(1, "fsync(*/model.safetensors):2", 2),
        slow(2, "step.micro:7", 10),
        (2, "step.micro:7/1", 10),
    ],
)
def test_a_run_stopped_by_sigterm_continues_to_the_same_end(lab, tmp_path, processes, point, save_steps):
    """At a point, to one process or to all."""
    check_stopped(lab, lab.start(tmp_path, processes, f"term@{point}", save_steps=save_steps), save_steps=save_steps)
    lab.check_same_end(tmp_path, processes, save_steps=save_steps)


def test_ctrl_c_in_the_first_validation_promises_no_checkpoint(lab, tmp_path):
    run = lab.start(tmp_path, 1, "int@evaluate.validation").end(ExitCode.RUN_AGAIN)
    assert "stopping at the next step boundary; press Ctrl-C again" in run.output
    assert "without --fresh, starts again: no step was taken" in run.output
    assert not checkpoints(tmp_path / "run")


@pytest.mark.slow
def test_sigterm_while_waiting_for_data(lab, tmp_path):
    """To one of two processes, while the producer of a stream never finishes its next shard."""
    changes = {"max_steps": 24, "save_steps": 12, "eval_steps": "end", "hellaswag_steps": 0}
    streamed = changes | {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, 2, "stall@rename(*_[0-9]*.bin):3", **streamed)
    run.until("\nstep 15 ")
    time.sleep(1)
    run.send_signal(signal.SIGTERM, rank=1)
    check_stopped(lab, run, **streamed)
    lab.check_same_end(tmp_path, 2, **changes)


@pytest.mark.parametrize("processes", [1, slow(2)])
def test_a_stream_whose_producer_dies_is_to_be_run_again(lab, tmp_path, processes):
    """As after the Hub has been out of reach for a while: a script that repeats a command after code 75 goes on."""
    changes = {"max_steps": 24, "save_steps": 12, "eval_steps": "end", "hellaswag_steps": 0}
    streamed = changes | {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, processes, "stall@rename(*_[0-9]*.bin):3", **streamed)
    run.until("\nstep 15 ")
    for producer in (child for rank in run.ranks for child in psutil.Process(rank.pid).children()):
        producer.kill()
    run.end(ExitCode.RUN_AGAIN)
    assert "died; the same command resumes" in run.output
    assert newest_step(tmp_path) >= run.last_step >= 15
    lab.start(tmp_path, processes, **streamed).end(0)
    lab.check_same_end(tmp_path, processes, **changes)


def test_the_producer_of_a_stream_ends_with_a_run_that_is_killed(lab, tmp_path):
    """Although it is in the middle of a shard."""
    fields = {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, 1, "stall@rename(*_[0-9]*.bin):2", **fields)
    run.until("s for the first shards")
    assert len(psutil.Process(run.ranks[0].pid).children()) == 1
    run.send_signal(signal.SIGKILL)
    run.end(-signal.SIGKILL)
    assert run.leftovers() == []


@pytest.mark.parametrize(
    ("fault", "reason", "code", "saved_steps"),
    [
        ("enospc@write(*/.saving-*4/.tmp*):4", "No space left on device", 0, [2, 6]),
        ("enospc@write(*/.saving-*[46]/.tmp*):4-", "No space left on device", ExitCode.NOT_SAVED, [2]),
        slow("eio@fsync(*/.saving-step_00000004/config.json)", "Input/output error", 0, [2, 6]),
        slow("eio@rename(*/run/step_*):2", "Input/output error", 0, [2, 6]),
    ],
)
def test_a_failed_save_is_reported_and_costs_no_older_checkpoint(lab, tmp_path, fault, reason, code, saved_steps):
    """On a disk that fails once, or from then on: then Ctrl-C ends the retries of the last save, which the exit code
    reports as missing."""
    run = lab.start(tmp_path, 1, fault, save_total_limit=3)
    if code:
        run.until("retrying   the last save, for up to 60 s: free some space")
        run.send_signal(signal.SIGINT)
    run.end(code)
    assert f"step 4: NOT SAVED: {reason}; " in run.output
    assert "step_00000002 is the newest checkpoint" in run.output
    assert "to make room" not in run.output
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == saved_steps
    assert not list((tmp_path / "run").glob(".*step_*"))
    if code:
        lab.start(tmp_path, 1, save_total_limit=3).end(0)
    lab.check_same_end(tmp_path, 1)


@pytest.mark.parametrize("part", [0, *map(slow, range(1, 5))])
def test_a_power_cut_loses_no_committed_checkpoint(lab, once, tmp_path, part):
    """After any system call of a run, with the flushed content of each file, and with later names lost or not. From a
    sample of these states the same command continues to the same end."""
    milestone = {"milestone_steps": 4}

    def record(directory: Path) -> None:
        directory.mkdir()
        lab.start(directory, 1, f"record@({directory}*)", **milestone).end(0)

    directory, _ = once("power-cuts", record)
    states, renamed, committed = {}, 0, 0
    for call, path, trees in replay(directory / "faults.log", directory):
        if call == "rename" and path.startswith(f"{directory}/run/step_"):
            renamed = step_of(Path(path))
        if call == "fsync" and path == f"{directory}/run":
            committed = renamed
        for tree in trees:  # a state seen again replaces the earlier one, which had less committed
            states[frozenset((name, id(content)) for name, content in tree.items())] = committed, tree
    assert committed == 6
    assert {"run/step_00000004/.keep", "run/step_00000006/manifest.json"} < trees[0].keys()
    sample = list(states.values())[part::5]
    for number, (committed, tree) in enumerate(sample):
        cut = tmp_path / str(number)
        write(tree, cut)
        newest = newest_intact(cut / "run")
        assert (step_of(newest) if newest else 0) >= committed
        if number % (len(sample) // 3) == 0:
            lab.start(cut, 1, **milestone).end(0)
            lab.check_same_end(cut, 1)


@pytest.mark.parametrize(("processes", "fault", "step"), [(1, "nan@step.loss:12", 3), (2, "inf@step.gradient:8/1", 4)])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(lab, tmp_path, processes, fault, step):
    """In one micro-step of one process. The step is saved, as it may be a milestone or the last before the decay, and
    the run goes on."""
    changes = {"save_steps": 1, "save_total_limit": 10, "eval_steps": "end", "hellaswag_steps": 0}
    lab.start(tmp_path, processes, fault, max_steps=4, **changes).end(0)
    paths = [tmp_path / "run" / f"step_{n:08d}" for n in range(7)]
    assert_equal_tensors(paths[step], paths[step - 1])
    # Up to the fault the metrics are those of a run without it: the processes agreed.
    assert curve(tmp_path)[:step] == curve(lab.reference(processes, max_steps=4, **changes))[:step]
    lab.start(tmp_path, processes, **changes).end(0)
    skipped = [line["skipped_steps"] for line in by_step(tmp_path / "run").values()]
    assert skipped[1:] == [0] * (step - 1) + [1] * (7 - step)
    assert state_of(paths[6])["optimizer_steps"] == 5
    skipped_step, last_step = tensors(paths[step]), tensors(paths[6])
    assert all(t.isfinite().all() for t in last_step.values())
    assert any(not torch.equal(skipped_step[k], last_step[k]) for k in skipped_step)
