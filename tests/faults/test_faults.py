"""The table of faults: what is done to a run, where, how often, and how the run must end.

`make test-faults` runs all of it, with the tests of bad inputs, of secrets and of a Hub that fails; `make test` runs
the cases that are marked as the sample.
"""

import itertools
import os
import shutil
import signal
import time
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, step_of
from recipe.data.dataset import TokenDataset, check_data
from recipe.data.shards import find_shards
from recipe.utils.errors import ExitCode, UserError
from tests.conftest import by_step
from tests.faults.lab import HANG, WORLD, Lab, Run, curve, newest_step
from tests.faults.plugin import POINTS
from tests.hub import TOKEN, Hub
from tests.hub.server import Fault

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the plugin needs /proc")


@pytest.fixture(scope="session")
def lab(once) -> Lab:
    return Lab(once)


def table(cases: list[tuple], sample: set[tuple]):
    """Parameters of which those that are no sample run in `make test-faults` only."""
    assert sample <= set(cases), sample - set(cases)
    return [pytest.param(*case, marks=() if case in sample else pytest.mark.whole_table) for case in cases]


def test_every_point_is_reached_by_a_run(lab, tmp_path):
    """Otherwise the table would inject nothing there. The run prepares its shards itself."""
    every = ",".join(f"note@{point}" for point in POINTS)
    lab.run(tmp_path, "one", every, dataset_name=tmp_path / "shards").expect(0)
    lab.same_end(tmp_path, "one")  # and the plugin itself changes nothing


# 1. kill -9

KILLS = {  # where, and the time that it is reached
    "a step": ("step.micro", 5),
    "an evaluation": ("evaluate.validation", 4),
    "a long evaluation": ("evaluate.hellaswag", 2),
    "the first file of the first checkpoint": ("save.model.safetensors.during", 1),
    "a file": ("save.optimizer.safetensors.during", 2),
    "the last file": ("save.manifest.json.after", 2),
    "before the rename": ("save.rename.before", 2),
    "after the rename": ("save.rename.after", 2),
    "pruning": ("save.prune", 1),
    "a line of metrics": ("log.write", 4),
    "a shard": ("data.shard", 2),
}


@pytest.mark.parametrize(
    ("engine", "point", "n"),
    table(
        [(engine, *where) for engine, where in itertools.product(WORLD, KILLS.values())],
        sample={
            ("one", "save.optimizer.safetensors.during", 2),
            ("ddp", "step.micro", 5),
            ("one", "evaluate.hellaswag", 2),
        },
    ),
)
def test_kill(lab, tmp_path, engine, point, n):
    """A process dies in the middle; the same command again ends as if it had not."""
    rank = WORLD[engine] - 1 if point.startswith(("step.", "evaluate.")) else 0  # the rest is the main process's
    own = {"dataset_name": tmp_path / "shards"} if point == "data.shard" else {}  # the run prepares them itself
    result = lab.run(tmp_path, engine, f"kill@{point}:{n}/{rank}", **own)
    assert result.codes[rank] == -signal.SIGKILL, result.output
    assert "Traceback" not in result.output  # of a survivor
    # from the first commit on there is always one
    committed = ": saved " in result.output or point == "save.prune" or (point.startswith("save.") and n > 1)
    newest = newest_step(tmp_path, at_least=int(committed))
    if point == "evaluate.hellaswag":
        assert newest == 6  # saved before its long evaluation
    lab.run(tmp_path, engine, **own).expect(0)
    lab.same_end(tmp_path, engine)


# 2. SIGTERM

LONG = {"max_steps": 24, "save_steps": 12, "eval_steps": 0, "hellaswag_steps": 0}  # time to send a signal


def stopped(lab: Lab, run: Run, engine: str, finished: int, **changes) -> None:
    """Fails unless SIGTERM ended the run with a checkpoint at most one step old, `finished` steps or more being done,
    without leaving a process behind, and the same command ends as if it had not been stopped."""
    result = run.end(together=False).expect(ExitCode.RUN_AGAIN)
    assert run.leftovers() == []
    finished = max([finished, *result.steps])
    assert newest_step(run.directory, at_least=int(finished > 1)) >= finished - 1
    lab.run(run.directory, engine, **changes).expect(0)
    lab.same_end(run.directory, engine, **{k: v for k, v in changes.items() if k not in ("dataset_name", "streaming")})


@pytest.mark.parametrize(
    ("engine", "fault", "finished"),
    table(
        [
            ("one", "term@step.begin:1", 0),
            ("one", "term@evaluate.validation:5", 2),
            ("one", "term@save.model.safetensors.during:2", 4),
            ("ddp", "term@step.begin:4", 3),
            ("ddp", "term@step.micro:7/1", 3),
        ],
        sample={("one", "term@evaluate.validation:5", 2), ("ddp", "term@step.micro:7/1", 3)},
    ),
)
def test_sigterm(lab, tmp_path, engine, fault, finished):
    """At a point, to one rank or to all."""
    stopped(lab, lab.start(tmp_path, engine, fault), engine, finished)


@pytest.mark.whole_table
@pytest.mark.parametrize("engine", WORLD)
def test_sigterm_while_waiting_for_data(lab, tmp_path, engine):
    """To the last rank, where the builder of a stream never finishes its next shard."""
    changes = LONG | {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, engine, "stall@data.shard:3", **changes)
    run.until("\nstep 15 ")
    time.sleep(1)
    os.kill(run.ranks[-1].pid, signal.SIGTERM)
    stopped(lab, run, engine, 15, **changes)


PUSH = {"push_to_hub": True, "hub_model_id": "acme/gpt2", "milestone_steps": 2}


@pytest.mark.whole_table
def test_sigterm_while_uploading(lab, tmp_path):
    """To one rank of two, while the Hub does not answer: nobody waits for it, and the next run uploads the rest."""
    with Hub(tmp_path / "hub", TOKEN) as hub:
        hub.faults.append(Fault(path="/lfs/*", kind="stall", times=10**6))
        run = lab.start(tmp_path, "ddp", hub=hub, **PUSH)
        deadline = time.monotonic() + HANG
        while not any(fnmatch(request.path, "/lfs/*") for request in hub.requests):
            assert time.monotonic() < deadline, f"no upload came\n{run.stdout}{run.stderr}"
            time.sleep(0.02)
        run.ranks[-1].send_signal(signal.SIGTERM)
        run.end(together=False).expect(ExitCode.DONE, ExitCode.RUN_AGAIN)  # all steps may have been done by then
        assert run.leftovers() == []
        hub.faults.clear()
        lab.run(tmp_path, "ddp", hub=hub, **PUSH).expect(0)
        for branch, step in {"step-000002": 2, "step-000004": 4, "step-000006": 6, "main": 6}.items():
            weights = (tmp_path / "run" / f"step_{step:08d}" / "model.safetensors").read_bytes()
            assert hub.files("acme/gpt2", branch)["model.safetensors"] == weights, branch
        lab.same_end(tmp_path, "ddp")


# 3. A disk that fails

ERRORS = {"enospc": "No space left on device", "eacces": "Permission denied", "eio": "Input/output error"}
WRITES = ("save.model.safetensors.during", "save.optimizer.safetensors.during", "save.rename.before", "log.write")


@pytest.mark.parametrize(
    ("error", "point"),
    table(
        [*itertools.product(("enospc",), WRITES), ("eacces", "save.rename.before"), ("eio", "log.write")],
        sample={("enospc", "save.optimizer.safetensors.during"), ("eio", "log.write")},
    ),
)
def test_disk(lab, tmp_path, error, point):
    """One write fails: the run trains to its end, says so, and keeps the older checkpoint."""
    fault = f"{error}@{point}:{3 if point == 'log.write' else 2}"
    result = lab.run(tmp_path, "one", fault, save_total_limit=3).expect(0)
    assert ERRORS[error] in result.output
    found = [step_of(path) for path in checkpoints(tmp_path / "run")]
    assert found == ([2, 4, 6] if point == "log.write" else [2, 6])
    newest_step(tmp_path)
    lab.same_end(tmp_path, "one", lost=int(point == "log.write"))


@pytest.mark.whole_table
@pytest.mark.parametrize("engine", WORLD)
def test_disk_that_stays_full(lab, tmp_path, engine):
    """Every save but the first fails, the last one however often it is tried: the exit code says so."""
    run = lab.start(tmp_path, engine, "enospc@save.optimizer.safetensors.during:2-")
    result = run.end(together=False, timeout=3 * HANG).expect(ExitCode.NOT_SAVED)
    assert ERRORS["enospc"] in result.output
    assert "NOT SAVED" in result.stdout.splitlines()[-1]
    assert newest_step(tmp_path, at_least=1) == 2
    lab.run(tmp_path, engine).expect(0)
    lab.same_end(tmp_path, engine)


# 4. Corruption; each file of a checkpoint: tests/checkpoint/test_format.py


@pytest.mark.parametrize("name", ["train_000000.bin", "train_000003.bin", "val_000000.bin"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "deleted"])
def test_corruption_of_a_shard(lab, tmp_path, name, damage):
    """It is found when the data are opened or the shard is first read, before its tokens are given out."""
    data = shutil.copytree(lab.data, tmp_path / "shards")
    content = bytearray((data / name).read_bytes())
    content[-5] ^= 4
    (data / name).unlink()
    if damage != "deleted":
        (data / name).write_bytes(content if damage == "flipped" else content[: len(content) // 2])

    def read() -> None:
        train, val = find_shards(str(data), "train"), find_shards(str(data), "val")
        check_data(train, val, 8, 8)
        source, validation = (TokenDataset(shards, 8, 8, seed=1) for shards in (train, val))
        if name.startswith("val"):
            validation.validation_rows(0, 1)
        before = sum((shard.tokens - 1) // 8 for shard in train if shard.path.name < name)  # windows
        source.rows(-(-before // 8), 0, 8)

    with pytest.raises(UserError, match=name):
        read()


def test_corruption_run_over_a_damaged_checkpoint(lab, tmp_path):
    """A whole run: the checkpoint before is taken, and the end is the same."""
    shutil.copytree(lab.reference("one", save_total_limit=2) / "run", tmp_path / "run")
    weights = tmp_path / "run" / "step_00000006" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 4
    weights.write_bytes(content)
    result = lab.run(tmp_path, "one", save_total_limit=2).expect(0)
    assert "skipping" in result.output
    assert "from step 4" in result.output
    lab.same_end(tmp_path, "one", tidy=False)  # the damaged one, replaced at the end, goes at the next start


# 5. Values that are not finite

SHORT = {"save_steps": 1, "save_total_limit": 10, "eval_steps": 0, "hellaswag_steps": 0}


def _state(directory: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = directory / "run" / f"step_{step:08d}"
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("engine", "value", "where"),
    table(
        list(itertools.product(WORLD, ("nan", "inf"), ("loss", "gradient"))),
        sample={("one", "nan", "loss"), ("ddp", "inf", "gradient")},
    ),
)
def test_non_finite(lab, tmp_path, engine, value, where):
    """On the last rank, in the last micro-step of the fourth step alone: no rank changes anything in that step, which
    is counted, and the run continues, resumed right after the step."""
    accumulation = 4 // WORLD[engine]
    fault, four = f"{value}@step.{where}:{4 * accumulation}/{WORLD[engine] - 1}", SHORT | {"max_steps": 4}
    lab.run(tmp_path, engine, fault, **four).expect(0)
    before, after = _state(tmp_path, 3), _state(tmp_path, 4)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    lab.run(tmp_path, engine, **SHORT).expect(0)
    counted = [by_step(tmp_path / "run")[step]["skipped_steps"] for step in range(1, 7)]
    assert counted == [0, 0, 0, 1, 1, 1]
    end = _state(tmp_path, 6)
    assert all(t.isfinite().all() for t in end.values())
    assert any(not torch.equal(before[k], end[k]) for k in before)
    # The steps before are those of a run without the fault: ranks that had not agreed would have gone different ways.
    clean = curve(lab.reference(engine, **four))
    assert curve(tmp_path)[:4] == clean[:4]


@pytest.mark.parametrize("engine", table([("one",), ("ddp",)], sample={("one",)}))
def test_non_finite_at_every_step(lab, tmp_path, engine):
    """From the fourth step on, on one rank: the run ends, says why once, and keeps its last good checkpoint."""
    first = 3 * 4 // WORLD[engine] + 1
    changes = SHORT | {"max_steps": 30, "save_steps": 3}
    result = lab.run(tmp_path, engine, f"nan@step.loss:{first}-/0", **changes).expect(ExitCode.USER_ERROR)
    assert result.output.count("error: ") == 1
    assert newest_step(tmp_path, at_least=1) >= 3
    assert all(t.isfinite().all() for t in _state(tmp_path, 3).values())
