"""The table: what is done to a run, where, how often, and what has to come of it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, newest_valid, step_of, verify
from recipe.data.dataset import LocalSource, check_data
from recipe.data.shards import find_shards
from recipe.errors import UserError
from recipe.faults import POINTS
from tests import canary
from tests.conftest import ROOT, environment
from tests.faults.runner import (
    ENGINES,
    HANG,
    Case,
    Lab,
    Result,
    curve,
    digests,
    expect,
    lines,
    processes,
    same_end,
    whole,
)
from tests.hub import upload_faults as faults_push
from tests.hub.push_server import PushHub

SEEDS = (1, 2, 3, 4, 5)
STOPPED, NOT_SAVED = 75, 74  # exit codes of recipe/train.py
FILES = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json")


# 1. kill -9


def _occurrences(point: str) -> tuple[int, ...]:
    """The time at which the process that comes by `point` dies, for each seed. Of three saves two prune."""
    if point == "save.prune":
        return (1, 2, 1, 2, 1)
    if point.startswith("save."):
        return (1, 2, 3, 2, 3)
    if point == "data.shard":
        return (1, 2, 3, 4, 5)
    if point == "evaluate.hellaswag":
        return (1, 2, 1, 2, 1)
    if point == "evaluate.validation":
        return (1, 3, 4, 6, 8)
    if point in ("start.model", "step.compile"):
        return (1,) * 5
    return (2, 5, 7, 9, 12)  # of steps, or lines


def killed(lab: Lab, directory: Path, engine: str, point: str, n: int, rank: int, *, real=False, **changes) -> None:
    """A process dies in the middle; the same command again ends as if it had not."""
    data = {"dataset_name": directory / "shards"} if point == "data.shard" else {}  # to be made by the run itself
    fault = f"kill@{point}:{n}/{rank}"
    result = lab.run(directory, engine, fault, real=real, **data, **changes)
    expect(not result.hung, f"hung\n{result.tail}")
    if real and engine != "one":
        expect(any(result.codes) and "Signal 9 (SIGKILL)" in result.output, f"not injected\n{result.tail}")
    else:
        expect(result.codes[rank] == -signal.SIGKILL, f"not injected: exit codes {result.codes}\n{result.tail}")
        expect("Traceback" not in result.output, f"a survivor's traceback\n{result.tail}")
    # from the first commit on there is always one
    committed = ": saved " in result.output or point == "save.prune" or (point.startswith("save.") and n > 1)
    whole(directory, at_least=int(committed))
    lab.run(directory, engine, **data, **changes).expect(0)
    same_end(directory, lab.reference(engine, **changes).directory)
    no_temporaries(directory)


def builder_killed(lab: Lab, directory: Path, engine: str, n: int, **changes) -> None:
    """The process that makes a stream's shards dies, and its successors too; the run goes on by itself."""
    result = lab.run(
        directory, engine, f"kill@data.shard:{n}", streaming=True, dataset_name=directory / "shards", **changes
    )
    result.expect(0)
    expect("died (killed by signal 9); started again" in result.output, f"not injected\n{result.output}")
    same_end(directory, lab.reference(engine, **changes).directory)


PUSH = {"push_to_hub": faults_push.REPO, "milestone_steps": 4}


def uploader_killed(lab: Lab, directory: Path, engine: str, point: str, n: int, **changes) -> None:
    """The process that uploads dies, and its successors too: training does not hear of it, the next run brings up what
    is queued."""
    with PushHub(directory / "hub") as hub:
        env = faults_push.variables(hub)
        result = lab.run(directory, engine, f"kill@{point}:{n}", env=env, **PUSH, **changes).expect(0)
        expect("the process that uploads died (killed by signal 9)" in result.output, f"not injected\n{result.output}")
        same_end(directory, lab.reference(engine, **changes).directory)
        lab.run(directory, engine, env=env, **PUSH, **changes).expect(0)
        problem = faults_push.missing(hub, directory / "run", {f"step-{n:06d}": n for n in (4, 8, 12)} | {"main": 12})
        expect(problem is None, str(problem))


def no_temporaries(directory: Path) -> None:
    left = [p.name for p in (directory / "run").iterdir() if p.name.startswith((".saving-", ".deleting-"))]
    expect(not left, f"left behind: {left}")


def kill_cases() -> list[Case]:
    points = [p for p in POINTS if p.startswith(("save.", "step.", "evaluate.")) or p in ("log.write", "data.shard")]
    points = [p for p in points if p not in ("step.loss", "step.gradient")]  # values
    cases = []
    for engine, point, (i, seed) in itertools.product(ENGINES, points, enumerate(SEEDS)):
        # saves, lines and shards are the main process's; in the rest each process has its turn
        everywhere = point.startswith(("step.", "evaluate."))
        rank = i % processes(engine) if everywhere else 0
        n = _occurrences(point)[i]
        sample = (engine, point, seed) in {
            ("one", "save.optimizer.safetensors.during", 2),
            ("one", "save.prune", 1),
            ("ddp", "save.rename.before", 2),
            ("ddp", "step.micro", 2),
        }
        check = partial(killed, engine=engine, point=point, n=n, rank=rank, seed=seed)
        cases.append(Case("kill", f"kill@{point}:{n}/{rank} {engine} seed {seed}", check, quick=sample))
    for engine, (i, seed) in itertools.product(ENGINES, enumerate(SEEDS)):
        for point in ("upload.begin", "upload.during", "upload.after") if seed == 1 else ("upload.during",):
            check = partial(uploader_killed, engine=engine, point=point, n=i + 1, seed=seed)
            cases.append(Case("kill", f"kill@{point}:{i + 1} {engine} seed {seed}", check))
    for engine, n in itertools.product(ENGINES, (3,)):
        check = partial(builder_killed, engine=engine, n=n)
        cases.append(Case("kill", f"kill@data.shard:{n} streaming {engine}", check))
    for engine, point in itertools.product(ENGINES, ("save.model.safetensors.during", "step.micro")):
        check = partial(killed, engine=engine, point=point, n=2, rank=0, real=True)
        cases.append(Case("kill", f"kill@{point}:2/0 {engine} by its launcher", check))
    return cases


# 2. SIGTERM


def stopped(lab: Lab, directory: Path, result: Result, engine: str, finished: int, codes=(STOPPED,), **changes) -> None:
    """What has to be true after a run that SIGTERM ended, `finished` steps or more being done."""
    result.expect(*codes)
    expect("Traceback" not in result.output, f"a traceback\n{result.output}")
    finished = max([finished, *result.steps])
    newest = whole(directory, at_least=int(finished > 1))
    expect(newest >= finished - 1, f"the newest checkpoint is of step {newest}, {finished} steps were done")
    lab.run(directory, engine, **changes).expect(0)
    changes = {k: v for k, v in changes.items() if k not in ("dataset_name", "streaming")}
    same_end(directory, lab.reference(engine, **changes).directory)
    no_temporaries(directory)


def terminated(lab: Lab, directory: Path, engine: str, fault: str, finished: int, **changes) -> None:
    """SIGTERM at a point, to one rank or several."""
    run = lab.start(directory, engine, fault, **changes)
    result = run.wait(together=False)
    left = run.leftovers()
    expect(not left, f"left behind: {left}")
    stopped(lab, directory, result, engine, finished, **changes)


def terminated_while_waiting(lab: Lab, directory: Path, engine: str, ranks: tuple[int, ...], **changes) -> None:
    """SIGTERM while the builder of a stream takes for ever."""
    changes |= {"streaming": True, "dataset_name": directory / "shards"}
    run = lab.start(directory, engine, "stall@data.shard:3", **changes)
    run.until("s for shard 1")
    for rank in ranks:
        os.kill(run.ranks[rank].pid, signal.SIGTERM)
    result = run.wait(together=False)
    left = run.leftovers()
    expect(not left, f"left behind: {left}")
    stopped(lab, directory, result, engine, 1, **changes)


def terminated_while_compiling(lab: Lab, directory: Path) -> None:
    """SIGTERM in the middle of the first, compiling call."""
    run = lab.start(directory, torch_compile=True)
    run.until("data       ")
    time.sleep(2)
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    result = run.wait().expect(STOPPED)
    expect("Traceback" not in result.output, f"a traceback\n{result.output}")
    expect(not any(result.steps), "not injected: the first step was done")
    left = run.leftovers()
    expect(not left, f"left behind: {left}")
    lab.run(directory).expect(0)  # as it would have without: compiled, the sums are others
    same_end(directory, lab.reference("one").directory)


def terminated_while_uploading(lab: Lab, directory: Path, engine: str, ranks: tuple[int, ...]) -> None:
    """SIGTERM while an upload makes no progress: nobody waits for it, and the next run brings it up."""
    changes = LONG | {"max_steps": 400}
    push = {"push_to_hub": faults_push.REPO, "milestone_steps": 50}
    with PushHub(directory / "hub") as hub:
        env = faults_push.variables(hub)
        run = lab.start(directory, engine, "stall@upload.during:2", env=env, **push, **changes)
        deadline = time.monotonic() + HANG
        while not hub.count("POST", "/preupload/"):
            expect(time.monotonic() < deadline, f"no upload has begun\n{run.output}")
            time.sleep(0.05)
        for rank in ranks:
            os.kill(run.ranks[rank].pid, signal.SIGTERM)
        result = run.wait(together=False)
        left = run.leftovers()
        expect(not left, f"left behind: {left}")
        stopped(lab, directory, result, engine, 50, **changes)
        lab.run(directory, engine, env=env, **push, **changes).expect(0)
        found = hub.repositories[faults_push.REPO].branches
        expect(len(found["main"]) == 2 and len(found["step-000050"]) == 2, f"not uploaded: {sorted(found)}")


LONG = {"max_steps": 150, "save_steps": 50, "eval_steps": 0, "hellaswag_steps": 0}  # time to send a signal


def launcher_terminated(lab: Lab, directory: Path, engine: str) -> None:
    """SIGTERM to `accelerate launch` alone."""
    run = lab.launch(directory, engine, launcher=True, **LONG)
    run.until("step 5  ")
    os.kill(run.ranks[0].pid, signal.SIGTERM)
    result = run.wait()
    left = run.leftovers()
    expect(not left, f"left behind: {left}")
    expect(result.codes[0] != 0, f"the launcher ended with {result.codes[0]}")
    newest = whole(directory, at_least=1)
    finished = max(Result(directory, [], run.output, 0, False).steps)
    expect(newest >= finished - 1, f"the newest checkpoint is of step {newest}, {finished} steps were done")
    lab.run(directory, engine, **LONG).expect(0)
    same_end(directory, lab.reference(engine, **LONG).directory)


def sigterm_cases() -> list[Case]:
    # point, occurrence on one process, on each of two, steps then done at least
    points = [
        ("step.begin", 6, 6, 5),
        ("step.micro", 22, 12, 5),
        ("step.end", 6, 6, 5),
        ("evaluate.validation", 5, 3, 4),
        ("evaluate.hellaswag", 1, 1, 6),
        *((f"save.{name}.during", 2, 2, 8) for name in FILES),
        ("save.rename.before", 2, 2, 8),
    ]
    cases = []
    for engine, (point, alone, each, finished) in itertools.product(ENGINES, points):
        n = alone if processes(engine) == 1 else each
        if processes(engine) == 1:
            who = [f"term@{point}:{n}"]
        elif point.startswith("save."):  # the main process's; the others hear of it in the step
            who = [f"term@{point}:{n}/0", f"term@{point}:{n}/0,term@step.begin:9/1"]
        else:
            who = [f"term@{point}:{n}/0", f"term@{point}:{n}/1", f"term@{point}:{n}"]
        for fault in who:
            sample = (engine, fault) in {
                ("one", "term@evaluate.validation:5"),
                ("ddp", "term@step.micro:12/1"),
                ("one", "term@save.model.safetensors.during:2"),
            }
            check = partial(terminated, engine=engine, fault=fault, finished=finished)
            cases.append(Case("sigterm", f"{fault} {engine}", check, quick=sample))
    for engine in ENGINES:
        for who in ("", "/1")[: processes(engine)]:
            check = partial(terminated, engine=engine, fault=f"term@step.compile:1{who}", finished=0)
            cases.append(Case("sigterm", f"term@step.compile:1{who} {engine}", check))
    cases.append(Case("sigterm", "SIGTERM while compiling one", terminated_while_compiling))
    for engine in ENGINES:
        everyone = tuple(range(processes(engine)))
        for ranks in {everyone, everyone[-1:]}:
            check = partial(terminated_while_waiting, engine=engine, ranks=ranks)
            cases.append(Case("sigterm", f"SIGTERM to {ranks} waiting for data {engine}", check))
            check = partial(terminated_while_uploading, engine=engine, ranks=ranks)
            cases.append(Case("sigterm", f"SIGTERM to {ranks} uploading {engine}", check))
        check = partial(launcher_terminated, engine=engine)
        cases.append(Case("sigterm", f"SIGTERM to accelerate launch {engine}", check))
    return cases


# 3. A disk that fails

ERRORS = {"enospc": "No space left on device", "eacces": "Permission denied", "eio": "Input/output error"}
WRITES = (*(f"save.{name}.during" for name in FILES), "save.rename.before", "log.write")


def disk_failed(lab: Lab, directory: Path, engine: str, error: str, point: str) -> None:
    """One write fails; the run goes on to its end, and says so."""
    fault = f"{error}@{point}:{5 if point == 'log.write' else 2}"
    result = lab.run(directory, engine, fault, save_total_limit=3).expect(0)
    _said(result, error)
    found = [step_of(p) for p in checkpoints(directory / "run")]
    expect(found == ([4, 8, 12] if point == "log.write" else [4, 12]), f"not injected? checkpoints of steps {found}")
    whole(directory)
    no_temporaries(directory)
    same_end(directory, lab.reference(engine).directory)


def last_line_failed(lab: Lab, directory: Path, engine: str, error: str) -> None:
    """The last line of metrics.jsonl has no next one to wait for; the same command again writes it."""
    _said(lab.run(directory, engine, f"{error}@log.write:13").expect(0), error)
    lab.run(directory, engine).expect(0)
    same_end(directory, lab.reference(engine).directory)


def _said(result: Result, error: str) -> None:
    expect("Traceback" not in result.output, f"a traceback\n{result.output}")
    expect(ERRORS[error] in result.output, f"no word of {ERRORS[error]!r}\n{result.output}")


def disk_failed_then_killed(lab: Lab, directory: Path, engine: str, error: str, point: str) -> None:
    """One write fails, where one checkpoint is kept; it is kept until there is another."""
    result = lab.run(directory, engine, f"{error}@{point}:2,kill@step.begin:12/0")
    expect(result.codes[0] == -signal.SIGKILL, f"not injected: exit codes {result.codes}\n{result.tail}")
    newest = whole(directory, at_least=1)
    expect(newest == 4, f"not injected? the newest checkpoint is of step {newest}")
    lab.run(directory, engine).expect(0)
    same_end(directory, lab.reference(engine).directory)
    no_temporaries(directory)


def disk_stays_full(lab: Lab, directory: Path, engine: str, error: str, point: str) -> None:
    """Every save but the first fails, and the last one however often it is tried: the exit code says so, and the first
    one stays."""
    result = lab.start(directory, engine, f"{error}@{point}:2-").wait(together=False, timeout=3 * HANG)
    _said(result.expect(NOT_SAVED), error)
    expect("NOT SAVED" in result.output.splitlines()[-1], f"the last line does not say so\n{result.tail}")
    expect(whole(directory, at_least=1) == 4, "the first checkpoint is gone")
    no_temporaries(directory)
    lab.run(directory, engine).expect(0)
    same_end(directory, lab.reference(engine).directory)


def disk_cases() -> list[Case]:
    cases = []
    for error, point in itertools.product(ERRORS, WRITES):
        sample = (error, point) in {("enospc", "save.optimizer.safetensors.during"), ("eio", "log.write")}
        check = partial(disk_failed, engine="one", error=error, point=point)
        cases.append(Case("disk", f"{error}@{point} one", check, quick=sample))
    for engine, point in itertools.product(("ddp", "zero1"), ("save.model.safetensors.during", "save.rename.before")):
        check = partial(disk_failed, engine=engine, error="enospc", point=point)
        cases.append(Case("disk", f"enospc@{point} {engine}", check))
    for point in WRITES[:-1]:
        check = partial(disk_failed_then_killed, engine="one", error="enospc", point=point)
        cases.append(Case("disk", f"enospc@{point}, then kill one", check))
    for engine, error in [("one", e) for e in ERRORS] + [("ddp", "enospc"), ("zero1", "enospc")]:
        point = "save.optimizer.safetensors.during"
        check = partial(disk_stays_full, engine=engine, error=error, point=point)
        cases.append(Case("disk", f"{error}@{point}:2- {engine}", check))
    check = partial(last_line_failed, engine="one", error="enospc")
    cases.append(Case("disk", "enospc@log.write:13 one, and again", check))
    return cases


# 4. Corruption


def _flip(offset: float, bit: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[int(offset * len(data))] ^= 1 << bit
    _replace(path, data)


def _truncate(share: float, path: Path) -> None:
    data = path.read_bytes()
    _replace(path, data[: min(int(share * len(data)), len(data) - 1)])


def _delete(path: Path) -> None:
    path.unlink()


def _replace(path: Path, data: bytes) -> None:
    path.unlink()  # the case has links to files that others read
    path.write_bytes(data)


def _damages(seed: str, flips: int, cuts: int) -> list[tuple[str, Callable[[Path], None]]]:
    """Bits flipped at the file's beginning, at its end and in between; lengths cut; the file gone."""
    rng = random.Random(seed)
    offsets = [0.0, 1 - 1e-12, *(rng.random() for _ in range(flips - 2))]
    shares = [0.0, 1.0, *(rng.random() for _ in range(cuts - 2))]
    found = [
        (f"bit {bit} at {offset:.6f}", partial(_flip, offset, bit))
        for offset, bit in ((o, rng.randrange(8)) for o in offsets)
    ]
    return [*found, *((f"cut to {share:.4f}", partial(_truncate, share)) for share in shares), ("deleted", _delete)]


def _linked(source: Path, into: Path) -> Path:
    shutil.copytree(source, into, copy_function=os.link)
    return into


def _two(lab: Lab) -> Path:
    """A run with checkpoints of steps 8 and 12."""
    return lab.reference("one", save_total_limit=2).directory / "run"


def checkpoint_damaged(lab: Lab, directory: Path, name: str, damage: Callable[[Path], None]) -> None:
    """In a file of the newest checkpoint: found, named, and the one before is taken."""
    run = _linked(_two(lab), directory / "run")
    newest, said = run / "step_00000012", []
    damage(newest / name)
    problems = verify(newest)
    expect(problems, f"{name} passes")
    expect(newest_valid(run, said.append) == run / "step_00000008", "the one before is not taken")
    expect(any("step_00000012" in line for line in said), f"not named: {said}")
    expect(name == "manifest.json" or any(name in line for line in said), f"{name} is not named: {said}")


def shard_damaged(lab: Lab, directory: Path, name: str, damage: Callable[[Path], None]) -> None:
    """Found when the data are opened or a shard is first read, before its tokens are given out."""
    data = _linked(lab.data, directory / "shards")
    damage(data / name)
    try:
        train, val = find_shards(str(data), "train"), find_shards(str(data), "val")
        check_data(train, val, 16, 8)
        source, validation = (LocalSource(shards, 16, 8, seed=1) for shards in (train, val))
        number = next((i for i, shard in enumerate(train) if shard.path.name == name), None)
        if number is None:
            validation.validation_rows(0, 1)
        else:
            first = sum((shard.tokens - 1) // 16 for shard in train[:number])
            source.rows(-(-first // 8), 0, 8)
    except UserError as error:
        expect(name in str(error), f"{name} is not named: {error}")
    else:
        expect(False, f"{name} passes")


def run_with_damaged_checkpoint(lab: Lab, directory: Path, engine: str, name: str, damage) -> None:
    """A whole run over it: the one before is taken, and the end is the same."""
    reference = lab.reference(engine, save_total_limit=2).directory
    _linked(reference / "run", directory / "run")
    damage(directory / "run" / "step_00000012" / name)
    result = lab.run(directory, engine, save_total_limit=2).expect(0)
    expect("skipping" in result.output and "from step 8" in result.output, f"not skipped\n{result.output}")
    same_end(directory, reference)


def run_with_damaged_shard(lab: Lab, directory: Path, engine: str, name: str, damage) -> None:
    """Exit code 2 before a step is taken."""
    data = _linked(lab.data, directory / "shards")
    damage(data / name)
    result = lab.run(directory, engine, dataset_name=data).expect(2)
    expect(name in result.output, f"{name} is not named\n{result.output}")
    expect(not any(result.steps), f"steps were taken: {result.steps}")


def corruption_cases() -> list[Case]:
    cases = []

    def add(check, what: str, name: str, flips: int, cuts: int) -> None:
        for i, (how, damage) in enumerate(_damages(f"{what} {name}", flips, cuts)):
            case = Case(
                "corruption", f"{what} {name}: {how}", partial(check, name=name, damage=damage), quick=i % 5 == 0
            )
            cases.append(case)

    for name, flips in {
        "model.safetensors": 60,
        "optimizer.safetensors": 60,
        "trainer_state.json": 50,
        "manifest.json": 90,
        "config.json": 15,
        "generation_config.json": 15,
        "tokenizer.json": 15,
        "tokenizer_config.json": 15,
    }.items():
        add(checkpoint_damaged, "checkpoint", name, flips, max(2, flips // 5))
    for name in ("train_000000.bin", "train_000001.bin", "train_000003.bin", "val_000000.bin"):
        add(shard_damaged, "shard", name, 20, 5)
    rng = random.Random("runs")
    for engine, name in (("one", FILES[0]), ("ddp", FILES[1]), ("zero1", FILES[3])):
        check = partial(run_with_damaged_checkpoint, engine=engine, name=name, damage=partial(_flip, rng.random(), 3))
        cases.append(Case("corruption", f"run over a flipped bit in {name} {engine}", check, quick=engine == "one"))
    first = "train_000000.bin"
    damages = {
        "one": (first, partial(_flip, 0.7, 1)),
        "ddp": (first, partial(_truncate, 0.5)),
        "zero1": ("val_000000.bin", _delete),
    }
    for engine, (name, damage) in damages.items():
        check = partial(run_with_damaged_shard, engine=engine, name=name, damage=damage)
        cases.append(Case("corruption", f"run on a damaged {name} {engine}", check))
    return cases


# 5. Values that are not finite

SHORT = {"max_steps": 6, "save_steps": 1, "save_total_limit": 10, "eval_steps": 0, "hellaswag_steps": 0}


def _state(directory: Path, step: int) -> dict[str, torch.Tensor]:
    checkpoint = directory / "run" / f"step_{step:08d}"
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def _fourth_step(engine: str) -> tuple[int, int]:
    """Its first and last micro-step, counted over the run."""
    accumulation = 8 // 2 // processes(engine)
    return 3 * accumulation + 1, 4 * accumulation


def _poisoned(engine: str, value: str, where: str, rank: int | None) -> str:
    """The last micro-step of the fourth step."""
    _, last = _fourth_step(engine)
    return f"{value}@step.{where}:{last}" + ("" if rank is None else f"/{rank}")


def not_finite(lab: Lab, directory: Path, engine: str, value: str, where: str, rank: int | None) -> None:
    """In the fourth step alone: it changes nothing, on any process, is counted, and the run goes on, also where it is
    stopped right after the step and resumed."""
    fault = _poisoned(engine, value, where, rank)
    result = lab.run(directory, engine, f"{fault},term@step.begin:4", **SHORT)
    result.expect(STOPPED)
    before, after = _state(directory, 3), _state(directory, 4)
    expect(
        before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before),
        "weights or moments changed in the step that was to be left out",
    )
    clean = lab.reference(engine, **SHORT).directory
    expect(
        digests(directory / "run" / "step_00000003") == digests(clean / "run" / "step_00000003"),
        "differs before the fault",
    )
    lab.run(directory, engine, **SHORT).expect(0)
    counted = {line["step"]: line["skipped_steps"] for line in lines(directory)}
    expect([counted.get(step) for step in range(1, 7)] == [0, 0, 0, 1, 1, 1], f"counted as {counted}")
    end = _state(directory, 6)
    expect(all(t.isfinite().all() for t in end.values()), "the last checkpoint has values that are not finite")
    expect(any(not torch.equal(before[k], end[k]) for k in before), "the run did not go on")
    # Uninterrupted, and of another kind: ranks that had not agreed would have gone different ways.
    other = lab.reference(engine, fault=_poisoned(engine, "nan", "loss", None), **SHORT).directory
    same_end(directory, other, metrics=False)
    for line, expected in zip(curve(directory), curve(other), strict=True):
        if line["step"] != 4:  # whose gradient norm is what the fault made of it
            expect(line == expected, f"metrics.jsonl: {line}, the uninterrupted run's: {expected}")


def too_many(lab: Lab, directory: Path, engine: str, value: str, where: str, rank: int | None) -> None:
    """In every step from the fourth on: the run ends, and says why once."""
    first, _ = _fourth_step(engine)
    fault = f"{value}@step.{where}:{first}-" + ("" if rank is None else f"/{rank}")
    changes = SHORT | {"max_steps": 12, "max_skipped_steps": 3, "save_steps": 3}
    result = lab.run(directory, engine, fault, **changes).expect(2)
    expect("Traceback" not in result.output, f"a traceback\n{result.output}")
    expect(result.output.count("error: ") == 1, f"not one error\n{result.output}")
    expect(whole(directory, at_least=1) >= 3, "the last good checkpoint is gone")
    state = _state(directory, 3)
    expect(all(t.isfinite().all() for t in state.values()), "a checkpoint has values that are not finite")


def nonfinite_cases() -> list[Case]:
    cases = []
    for engine, value, where, rank in itertools.product(ENGINES, ("nan", "inf"), ("loss", "gradient"), (None, 1)):
        if rank == 1 and processes(engine) == 1:
            continue
        check = partial(not_finite, engine=engine, value=value, where=where, rank=rank)
        who = "all" if rank is None else f"rank {rank}"
        sample = (engine, value, where, rank) in {("one", "nan", "loss", None), ("ddp", "inf", "gradient", 1)}
        cases.append(Case("non-finite", f"{value} {where} {who} {engine}", check, quick=sample))
    for engine, rank in (("one", None), ("ddp", 1), ("ddp", None), ("zero1", 1)):
        check = partial(too_many, engine=engine, value="nan", where="loss", rank=rank)
        who = "all" if rank is None else f"rank {rank}"
        cases.append(Case("non-finite", f"nan loss at every step {who} {engine}", check, quick=engine == "one"))
    return cases


# 6. The Hub


def hub_failed(lab: Lab, directory: Path, fault: str, mode: str) -> None:
    """What tests/hub/upload_faults.py does with an upload, and finds wrong."""
    with lab.once("push") as (made, empty):
        if empty:
            shutil.rmtree(made, ignore_errors=True)  # of a preparation that failed, which the next case tries again
            made.mkdir()
            faults_push.prepare(made, lab.data)
    prepared = faults_push.Prepared(lab.data, made / "plain", made / "queued")
    problem = faults_push.inject(fault, mode, directory, prepared)
    expect(problem is None, str(problem))


def hub_cases() -> list[Case]:
    return [
        Case("hub", f"{fault} {mode}", partial(hub_failed, fault=fault, mode=mode))
        for fault, mode in itertools.product(faults_push.FAULTS, faults_push.MODES)
    ]


# 7. Secrets


def secret_found(lab: Lab, directory: Path, search: Callable[[Path], list[str]]) -> None:
    """Secrets are put where people put them; tests/canary.py looks for them in all that is said and left."""
    found = search(lab, directory / "searched")
    expect(not found, f"found in {found}")


def secret_cases() -> list[Case]:
    searches = {
        **{
            f"a run with {tracker or 'no tracker'}": partial(_in_a_run, tracker=tracker)
            for tracker in ("", "tensorboard", "wandb", "trackio")
            if not tracker or find_spec(tracker)
        },
        "mistakes": lambda lab, directory: canary.in_a_mistake(directory),
        "a stream that fails": lambda lab, directory: canary.in_a_failing_stream(directory),
    }
    # tests/test_secrets.py runs them too
    return [Case("secrets", name, partial(secret_found, search=search)) for name, search in searches.items()]


def _in_a_run(lab: Lab, directory: Path, tracker: str) -> list[str]:
    return canary.in_a_run(directory, lab.data, tracker)


# 8. Bad inputs


def bad_input(lab: Lab, directory: Path, name: str) -> None:
    """A test of tests/test_bad_inputs.py. All of them run where the first one is asked for: pytest's start costs more
    than most of them."""
    with lab.once("bad-inputs") as (results, empty):
        report = results / "report.xml"
        if empty:
            results.mkdir()
            result = _pytest(f"--junitxml={report}")
            expect(report.exists(), result.stdout + result.stderr)
    case = next((case for case in xml.parse(report).iter("testcase") if case.get("name") == name), None)
    expect(case is not None, "not run")
    for problem in case:
        expect(problem.tag not in ("failure", "error"), f"{problem.get('message')}\n{problem.text}")


def _pytest(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *arguments, "tests/test_bad_inputs.py"]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


def bad_input_cases() -> list[Case]:
    """One for each test, as pytest collects them."""
    names = [line.partition("::")[2] for line in _pytest("--collect-only").stdout.splitlines() if "::" in line]
    return [Case("bad inputs", name, partial(bad_input, name=name)) for name in names]


GROUPS: dict[str, Callable[[], list[Case]]] = {
    "kill": kill_cases,
    "sigterm": sigterm_cases,
    "disk": disk_cases,
    "corruption": corruption_cases,
    "non-finite": nonfinite_cases,
    "hub": hub_cases,
    "secrets": secret_cases,
    "bad inputs": bad_input_cases,
}
