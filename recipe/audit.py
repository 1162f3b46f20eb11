"""Replays part of a run from its checkpoints, and compares what comes out with what the run has written.

    python -m recipe.audit runs/NAME
    python -m recipe.audit runs/NAME --random 3 --launch 'accelerate launch --config_file accelerate_configs/ddp.yaml'

The data of a step follow from (seed, step), and a checkpoint holds the whole state: from one checkpoint the ordinary
trainer must arrive at the next. Each interval is replayed in a directory of its own; the run is only read. Where the
device, the processes and the versions are those of the run, the losses, the weights and the optimizer's state must be
equal to the bit, elsewhere within a tolerance (docs/fault-tolerance.md). Exit code 0: all are equal; 1: one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from recipe.checkpoint.format import Checkpoint, checkpoint_path, checkpoints, load_checkpoint, step_of, verify
from recipe.config import FIELDS, ROOT
from recipe.engine.launch import fail
from recipe.monitor.metrics import read_metrics
from recipe.utils.errors import ExitCode, UserError

# Of how far the weights went in the interval: what other devices, engines or numbers of processes may differ by.
TOLERANCE = 0.01
# What must be as it was for two runs to be equal to the bit.
CIRCUMSTANCES = ("device", "engine", "processes", "precision", "compiled", "packages")
# A replay evaluates, shows and uploads nothing; it still validates at the run's steps, since a line of metrics.jsonl
# has the mean loss since the line before.
QUIET = {"hellaswag_steps": 0, "sample_steps": 0, "report_to": "none", "push_to_hub": False, "max_hours": 0}
QUIET |= {"fresh": False, "milestone_steps": 0}


@dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints of a run; no `start` where they are its first."""

    start: Path | None
    end: Path

    def __str__(self) -> str:
        return f"step {step_of(self.start) if self.start else 0:,} to {step_of(self.end):,}"


def intervals(run: Path) -> list[Interval]:
    """From the beginning to the first checkpoint that is kept, and from each to the next. Raises UserError."""
    found = checkpoints(run)
    if not found:
        raise UserError(f"{run}: no checkpoint there; name a run, such as runs/shakespeare")
    return [Interval(start, end) for start, end in zip([None, *found], found, strict=False)]


def replay(interval: Interval, directory: Path, launch: str) -> Checkpoint:
    """Trains from the interval's start to its end in `directory`, as the run was configured at its end, and returns
    the checkpoint. Raises UserError where the trainer ends before."""
    recorded = json.loads((interval.end / "trainer_state.json").read_text())
    config = {name: value for name, value in recorded["config"].items() if name in FIELDS} | QUIET
    config |= {"save_steps": recorded["step"], "eval_tokens": config["sequence_length"]}
    config["output_dir"] = str(directory / "run")
    for name in ("config", "dry_run"):
        config.pop(name)
    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config))
    if interval.start:
        shutil.copytree(interval.start, directory / "run" / interval.start.name)
    reached = checkpoint_path(directory / "run", recorded["step"])
    command = [*(shlex.split(launch) or [sys.executable]), str(ROOT / "recipe/train.py"), "--config", str(recipe)]
    with open(directory / "log", "w") as log:
        trainer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        while trainer.poll() is None and not reached.exists():
            time.sleep(0.2)
        _stop(trainer)
    if not reached.exists():
        lines = (directory / "log").read_text().splitlines()
        why = next((line for line in reversed(lines) if line.startswith("error:")), "it printed no error")
        raise UserError(f"{interval}: the replay ended with exit code {trainer.returncode}; {why}")
    return load_checkpoint(reached)


def _stop(trainer: subprocess.Popen) -> None:
    """Ends the trainer and its processes, which has done what was wanted of it unless it has ended by itself."""
    for number, patience in ((signal.SIGTERM, 60), (signal.SIGKILL, None)):
        if trainer.poll() is None:
            os.killpg(trainer.pid, number)
            try:
                trainer.wait(patience)
            except subprocess.TimeoutExpired:
                continue


@dataclass(frozen=True)
class Difference:
    """How a replay differs from the run.

    Attributes:
        step: the first logged step whose loss or gradient norm differs by more than the tolerance, if one does.
        tensor: the one that differs most, "" where all are equal to the bit.
        amount: by how much: its distance from the run's, as a share of how far the run moved it (the optimizer's
            state: of its norm).
    """

    step: int | None
    tensor: str
    amount: float


def compare(interval: Interval, replayed: Checkpoint, tolerance: float) -> Difference:
    """The run's losses, weights and optimizer state beside the replay's."""
    recorded = load_checkpoint(interval.end)
    before = load_checkpoint(interval.start).weights if interval.start else {}
    amounts = {}
    for ours, theirs in ((recorded.weights, replayed.weights), (recorded.optimizer_state, replayed.optimizer_state)):
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs:
                amounts[name] = float("inf")
            elif not torch.equal(ours[name], theirs[name]):
                way = ours[name] - before[name] if name in before else ours[name]
                amounts[name] = float((theirs[name] - ours[name]).norm() / way.norm().clamp(min=1e-30))
    tensor = max(amounts, key=amounts.get, default="")
    step = _first_difference(interval, replayed.path.parent, tolerance)
    return Difference(step, tensor, amounts.get(tensor, 0.0))


def _first_difference(interval: Interval, directory: Path, tolerance: float) -> int | None:
    first, last = step_of(interval.start) if interval.start else 0, step_of(interval.end)
    replayed = {line["step"]: line for line in read_metrics(directory / "metrics.jsonl")}
    for line in read_metrics(interval.end.parent / "metrics.jsonl"):
        if first < line["step"] <= last and (other := replayed.get(line["step"])):
            pairs = [(line[name], other[name]) for name in ("loss", "grad_norm")]
            if any(one != two and (None in (one, two) or abs(one - two) > tolerance * abs(one)) for one, two in pairs):
                return line["step"]
    return None


def audit(interval: Interval, directory: Path, launch: str, tolerance: float | None) -> tuple[bool, str]:
    """Whether the interval's end is what comes out of its start, and a sentence about it. Raises UserError."""
    for path in (interval.start, interval.end):
        if path and (problems := verify(path)):
            return False, f"{path} is damaged: {problems[0]}"
    replayed = replay(interval, directory, launch)
    ran = json.loads((interval.end / "trainer_state.json").read_text())["about"][-1]
    here = replayed.state["about"][-1]
    changed = [
        f"{name} {ran[name]!r} in the run, {here[name]!r} here" for name in CIRCUMSTANCES if ran[name] != here[name]
    ]
    allowed = (TOLERANCE if changed else 0.0) if tolerance is None else tolerance
    found = compare(interval, replayed, allowed)
    if not found.tensor and found.step is None:
        return True, "equal to the bit"
    where = f"{found.tensor or 'no tensor'} differs most, by {found.amount:.1e} of its way"
    if found.step is None and found.amount <= allowed:
        return True, f"equal within {allowed:g} ({where}; {'; '.join(changed) or 'as asked'})"
    since = f"losses differ from step {found.step:,} on" if found.step is not None else "the logged losses are equal"
    return False, f"different: {since}; {where}{'; ' * bool(changed)}{'; '.join(changed)}"


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 equal, 1 different."""
    parser = argparse.ArgumentParser(prog="python -m recipe.audit", description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, default=1, metavar="N", help="replay the last N intervals (default: 1)")
    which.add_argument("--random", type=int, metavar="N", help="replay N intervals, drawn at random")
    parser.add_argument("--launch", default="", help="what starts a program here (default: python, one process)")
    parser.add_argument(
        "--tolerance",
        type=float,
        help=f"share of its way that a tensor may differ by, where the "
        f"circumstances differ (default: {TOLERANCE}; 0 where they are the run's)",
    )
    parser.add_argument("--directory", type=Path, help="where to replay (default: a temporary directory)")
    arguments = parser.parse_args(argv)
    try:
        found = intervals(arguments.run)
        chosen = found[-arguments.last :]
        if arguments.random:
            chosen = sorted(random.sample(found, min(arguments.random, len(found))), key=lambda one: one.end)
        print(
            f"audit      {arguments.run}: {len(chosen)} of {len(found)} intervals between its checkpoints", flush=True
        )
        equal = True
        for interval in chosen:
            with tempfile.TemporaryDirectory(prefix="audit-", dir=arguments.directory) as directory:
                same, sentence = audit(interval, Path(directory), arguments.launch, arguments.tolerance)
            print(f"{interval}: {sentence}", flush=True)
            equal = equal and same
        return ExitCode.DONE if equal else 1
    except (UserError, OSError) as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
