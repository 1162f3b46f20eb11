"""The table of faults: what is done to a run, where, how often, and how the run must end.

`make test-faults` runs all of it, with the tests of bad inputs, of secrets and of a Hub that fails; `make test` runs
the cases that are marked as the sample.
"""

import itertools
import os
import random
import shutil
import signal
import time
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, newest_valid, step_of, verify
from recipe.data.dataset import TokenDataset, check_data
from recipe.data.shards import find_shards
from recipe.errors import ExitCode, UserError
from tests.conftest import by_step
from tests.faults.lab import HANG, WORLD, Lab, Run, curve, newest_whole
from tests.faults.plugin import FILES, POINTS
from tests.hub import TOKEN, Hub
from tests.hub.server import Fault

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the plugin needs /proc")
SEEDS = (1, 2, 3, 4, 5)


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


# 1. kill -9: eleven points and an upload, x {1 process, DDP} x 5 seeds


def _when(name: str, whens: str, times: tuple[int, ...]) -> list[tuple[str, int]]:
    return [(f"{name}.{when}", n) for when, n in zip(whens.split(), times, strict=True)]


_SAVES, _WHENS = (1, 2, 3, 2, 3), "before during after during before"
KILLS: dict[str, list[tuple[str, int]]] = {  # for each seed a point and the time that it is reached
    **{name: _when(f"save.{name}", _WHENS, _SAVES) for name in FILES},
    "before the rename": [("save.rename.before", n) for n in _SAVES],
    "after the rename": [("save.rename.after", n) for n in _SAVES],
    "pruning": [("save.prune", n) for n in (1, 2, 1, 2, 1)],
    "an evaluation": [
        ("evaluate.validation", 1),
        ("evaluate.hellaswag", 1),
        ("evaluate.validation", 4),
        ("evaluate.hellaswag", 2),
        ("evaluate.validation", 6),
    ],
    "a step": [("step.begin", 1), ("step.micro", 5), ("step.begin", 3), ("step.micro", 7), ("step.begin", 6)],
    "a line of metrics": [("log.write", n) for n in (1, 2, 4, 5, 7)],
    "a shard": [("data.shard", n) for n in SEEDS],
}


@pytest.mark.parametrize(
    ("engine", "seed", "point", "n"),
    table(
        [
            (e, seed, *where)
            for e, places in itertools.product(WORLD, KILLS.values())
            for seed, where in enumerate(places, 1)
        ],
        sample={
            ("one", 2, "save.optimizer.safetensors.during", 2),
            ("ddp", 2, "step.micro", 5),
            ("one", 4, "evaluate.hellaswag", 2),
        },
    ),
)
def test_kill(lab, tmp_path, engine, seed, point, n):
    """A process dies in the middle; the same command again ends as if it had not."""
    rank = seed % WORLD[engine] if point.startswith(("step.", "evaluate.")) else 0  # the rest is the main process's
    fields = {"seed": seed}
    own = {"dataset_name": tmp_path / "shards"} if point == "data.shard" else {}  # the run prepares them itself
    result = lab.run(tmp_path, engine, f"kill@{point}:{n}/{rank}", **fields, **own)
    assert result.codes[rank] == -signal.SIGKILL, result.output
    assert "Traceback" not in result.output  # of a survivor
    # from the first commit on there is always one
    committed = ": saved " in result.output or point == "save.prune" or (point.startswith("save.") and n > 1)
    newest = newest_whole(tmp_path, at_least=int(committed))
    if (point, n) == ("evaluate.hellaswag", 2):
        assert newest == 6  # saved before its long evaluation
    lab.run(tmp_path, engine, **fields, **own).expect(0)
    lab.same_end(tmp_path, engine, **fields)


# The request of an upload that the Hub does not answer (before, during and after a file), and how many come before it.
UPLOADS = [("*/preupload/*", 0), ("/lfs/*", 0), ("*/commit/*", 0), ("/lfs/*", 2), ("*/commit/*", 1)]


@pytest.mark.parametrize(
    ("engine", "seed"), table([(engine, seed) for engine in WORLD for seed in SEEDS], sample={("one", 2)})
)
def test_kill_in_an_upload(lab, tmp_path, engine, seed):
    """The Hub does not answer, and the run is killed: the same command again uploads what is missing."""
    with Hub(tmp_path / "hub", TOKEN) as hub:
        run = stalled_upload(lab, tmp_path, engine, hub, *UPLOADS[seed - 1], seed=seed)
        run.ranks[0].send_signal(signal.SIGKILL)
        assert run.end().codes[0] == -signal.SIGKILL
        newest_whole(tmp_path, at_least=1)
        uploads_the_rest(lab, tmp_path, engine, hub, seed=seed)


PUSH = {"push_to_hub": True, "hub_model_id": "acme/gpt2", "milestone_steps": 2}


def stalled_upload(lab: Lab, directory: Path, engine: str, hub: Hub, path: str, skip: int, **fields) -> Run:
    """A run that has sent a request which the Hub does not answer."""
    hub.faults.append(Fault(path=path, kind="stall", skip=skip, times=10**6))
    run = lab.start(directory, engine, hub=hub, **PUSH, **fields)
    deadline = time.monotonic() + HANG
    while sum(fnmatch(request.path, path) for request in hub.requests) <= skip:
        assert time.monotonic() < deadline, f"no upload came so far\n{run.stdout}{run.stderr}"
        time.sleep(0.02)
    return run


def uploads_the_rest(lab: Lab, directory: Path, engine: str, hub: Hub, **fields) -> None:
    """Fails unless the same command, with a Hub that answers, ends with every checkpoint there."""
    hub.faults.clear()
    lab.run(directory, engine, hub=hub, **PUSH, **fields).expect(0)
    for branch, step in {"step-000002": 2, "step-000004": 4, "step-000006": 6, "main": 6}.items():
        weights = (directory / "run" / f"step_{step:08d}" / "model.safetensors").read_bytes()
        assert hub.files("acme/gpt2", branch)["model.safetensors"] == weights, branch
    lab.same_end(directory, engine, **fields)


# 2. SIGTERM

LONG = {"max_steps": 24, "save_steps": 12, "eval_steps": 0, "hellaswag_steps": 0}  # time to send a signal


def stopped(lab: Lab, run: Run, engine: str, finished: int, **changes) -> None:
    """Fails unless SIGTERM ended the run with a checkpoint at most one step old, `finished` steps or more being done,
    without leaving a process behind, and the same command ends as if it had not been stopped."""
    result = run.end(together=False).expect(ExitCode.RUN_AGAIN)
    assert run.leftovers() == []
    finished = max([finished, *result.steps])
    assert newest_whole(run.directory, at_least=int(finished > 1)) >= finished - 1
    lab.run(run.directory, engine, **changes).expect(0)
    lab.same_end(run.directory, engine, **{k: v for k, v in changes.items() if k not in ("dataset_name", "streaming")})


@pytest.mark.parametrize(
    ("engine", "fault", "finished"),
    table(
        [
            ("one", "term@step.begin:1", 0),
            ("one", "term@step.begin:4", 3),
            ("one", "term@step.micro:14", 3),
            ("one", "term@evaluate.validation:5", 2),
            ("one", "term@save.model.safetensors.during:2", 4),
            ("ddp", "term@step.begin:4/0", 3),
            ("ddp", "term@step.begin:4", 3),
            ("ddp", "term@step.micro:7/1", 3),
            ("ddp", "term@evaluate.validation:3", 2),
            ("ddp", "term@save.manifest.json.during:2/0", 4),
        ],
        sample={("one", "term@evaluate.validation:5", 2), ("ddp", "term@step.micro:7/1", 3)},
    ),
)
def test_sigterm(lab, tmp_path, engine, fault, finished):
    """At a point, to one rank or to all."""
    stopped(lab, lab.start(tmp_path, engine, fault), engine, finished)


@pytest.mark.parametrize("engine", [pytest.param(e, marks=pytest.mark.whole_table) for e in WORLD])
def test_sigterm_while_waiting_for_data(lab, tmp_path, engine):
    """To the last rank, where the builder of a stream never finishes its next shard."""
    changes = LONG | {"streaming": True, "dataset_name": tmp_path / "shards"}
    run = lab.start(tmp_path, engine, "stall@data.shard:3", **changes)
    run.until("\nstep 15 ")
    time.sleep(1)
    os.kill(run.ranks[-1].pid, signal.SIGTERM)
    stopped(lab, run, engine, 15, **changes)


@pytest.mark.whole_table
@pytest.mark.parametrize("engine", WORLD)
def test_sigterm_while_uploading(lab, tmp_path, engine):
    """To the last rank, while the Hub does not answer: nobody waits for it, and the next run uploads the rest."""
    with Hub(tmp_path / "hub", TOKEN) as hub:
        run = stalled_upload(lab, tmp_path, engine, hub, "/lfs/*", 0)
        run.ranks[-1].send_signal(signal.SIGTERM)
        run.end(together=False).expect(ExitCode.DONE, ExitCode.RUN_AGAIN)  # all steps may have been done by then
        assert run.leftovers() == []
        uploads_the_rest(lab, tmp_path, engine, hub)


@pytest.mark.whole_table
def test_sigterm_while_compiling(lab, tmp_path):
    run = lab.start(tmp_path, "one", torch_compile=True)
    run.until("data       ")
    time.sleep(2)
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    result = run.end().expect(ExitCode.RUN_AGAIN)
    assert not any(result.steps), "the first step was done"
    assert run.leftovers() == []


# 3. A disk that fails

ERRORS = {"enospc": "No space left on device", "eacces": "Permission denied", "eio": "Input/output error"}
WRITES = (*(f"save.{name}.during" for name in FILES), "save.rename.before", "log.write")


@pytest.mark.parametrize(
    ("error", "point"),
    table(
        list(itertools.product(ERRORS, WRITES)),
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
    newest_whole(tmp_path)
    lab.same_end(tmp_path, "one")


@pytest.mark.whole_table
def test_disk_that_fails_before_a_kill(lab, tmp_path):
    """Where one checkpoint is kept, it is kept until there is another."""
    fault = "enospc@save.trainer_state.json.during:2,kill@step.begin:6/0"
    lab.run(tmp_path, "one", fault)
    assert newest_whole(tmp_path, at_least=1) == 2
    lab.run(tmp_path, "one").expect(0)
    lab.same_end(tmp_path, "one")


@pytest.mark.whole_table
@pytest.mark.parametrize("engine", WORLD)
def test_disk_that_stays_full(lab, tmp_path, engine):
    """Every save but the first fails, the last one however often it is tried: the exit code says so."""
    run = lab.start(tmp_path, engine, "enospc@save.optimizer.safetensors.during:2-")
    result = run.end(together=False, timeout=3 * HANG).expect(ExitCode.NOT_SAVED)
    assert ERRORS["enospc"] in result.output
    assert "NOT SAVED" in result.stdout.splitlines()[-1]
    assert newest_whole(tmp_path, at_least=1) == 2
    lab.run(tmp_path, engine).expect(0)
    lab.same_end(tmp_path, engine)


# 4. Corruption: 500 in all


def _flip(offset: float, bit: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[int(offset * len(data))] ^= 1 << bit
    _replace(path, data)


def _truncate(share: float, path: Path) -> None:
    data = path.read_bytes()
    _replace(path, data[: min(int(share * len(data)), len(data) - 1)])


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # a hard link to a file that other cases read
    path.write_bytes(data)


def _damages(name: str, flips: int, cuts: int) -> list[tuple]:
    """Bits flipped at the file's beginning, at its end and in between; lengths cut; the file deleted."""
    rng = random.Random(name)
    offsets = [0.0, 1 - 1e-12, *(rng.random() for _ in range(flips - 2))]
    shares = [0.0, 1.0, *(rng.random() for _ in range(cuts - 2))]
    flipped = [(f"bit flipped at {offset:.6f}", partial(_flip, offset, rng.randrange(8))) for offset in offsets]
    cut = [(f"cut to {share:.4f}", partial(_truncate, share)) for share in shares]
    return [(name, *damage) for damage in [*flipped, *cut, ("deleted", Path.unlink)]]


def _corruptions(counts: dict[str, int]) -> list:
    """Parameters, of which every twentieth is in the sample."""
    cases = [case for name, flips in counts.items() for case in _damages(name, flips, max(2, flips // 5))]
    return [
        pytest.param(*case, id=" ".join(case[:2]), marks=[pytest.mark.whole_table] if i % 20 else [])
        for i, case in enumerate(cases)
    ]


CHECKPOINT_FILES = dict.fromkeys(FILES[:3], 60) | {"manifest.json": 102}
CHECKPOINT_FILES |= dict.fromkeys(
    ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"), 14
)
SHARD_FILES = {f"train_{i:06d}.bin": 18 for i in (0, 1, 3)} | {"val_000000.bin": 18}


@pytest.mark.parametrize(("name", "how", "damage"), _corruptions(CHECKPOINT_FILES))
def test_corruption_of_a_checkpoint(lab, tmp_path, caplog, capsys, name, how, damage):
    """Of a file of the newest one: it is found and named, and the checkpoint before is taken."""
    run = tmp_path / "run"
    shutil.copytree(lab.reference("one", save_total_limit=2) / "run", run, copy_function=os.link)
    damage(run / "step_00000006" / name)
    problems = verify(run / "step_00000006")
    assert problems
    assert name == "manifest.json" or any(name in problem for problem in problems)
    assert newest_valid(run) == run / "step_00000004"
    assert "step_00000006" in caplog.text + capsys.readouterr().out


@pytest.mark.parametrize(("name", "how", "damage"), _corruptions(SHARD_FILES))
def test_corruption_of_a_shard(lab, tmp_path, name, how, damage):
    """It is found when the data are opened or the shard is first read, before its tokens are given out."""
    data = shutil.copytree(lab.data, tmp_path / "shards", copy_function=os.link)
    damage(data / name)

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
    _flip(0.7, 3, tmp_path / "run" / "step_00000006" / "model.safetensors")
    result = lab.run(tmp_path, "one", save_total_limit=2).expect(0)
    assert "skipping" in result.output
    assert "from step 4" in result.output
    lab.same_end(tmp_path, "one", tidy=False)  # the damaged one, replaced at the end, goes at the next start


@pytest.mark.whole_table
def test_corruption_run_on_a_damaged_shard(lab, tmp_path):
    """Exit code 2 before a step is taken."""
    data = shutil.copytree(lab.data, tmp_path / "shards")
    _truncate(0.5, data / "train_000000.bin")
    result = lab.run(tmp_path, "ddp", dataset_name=data).expect(ExitCode.USER_ERROR)
    assert "train_000000.bin" in result.output
    assert not any(result.steps)


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
    changes = SHORT | {"max_steps": 12, "max_skipped_steps": 3, "save_steps": 3}
    result = lab.run(tmp_path, engine, f"nan@step.loss:{first}-/0", **changes).expect(ExitCode.USER_ERROR)
    assert result.output.count("error: ") == 1
    assert newest_whole(tmp_path, at_least=1) >= 3
    assert all(t.isfinite().all() for t in _state(tmp_path, 3).values())
