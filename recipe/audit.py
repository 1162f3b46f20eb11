"""Replays part of a run from its checkpoints, and compares what comes out with what the run has written.

    python -m recipe.audit runs/NAME
    python -m recipe.audit runs/NAME --random 3 --launch 'accelerate launch --config_file accelerate_configs/ddp.yaml'
    python -m recipe.audit --repo ORG/NAME                            a run on the Hub

The data of a step follow from (seed, step), and a checkpoint holds the whole state: from one checkpoint the ordinary
trainer must arrive at the next. Each interval is replayed in a directory of its own; the run is only read. Where the
device, the processes and the versions are those of the run, the losses, the weights and the optimizer's state must be
equal to the bit, elsewhere within a tolerance (docs/fault-tolerance.md). Exit code 0: all are equal; 1: one differs.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from recipe.checkpoint.format import Checkpoint, checkpoints, load_checkpoint, state_of, step_of, verify
from recipe.config import FIELDS, ROOT
from recipe.engine.launch import fail
from recipe.hub.download import checkpoints_on_the_hub, fetch
from recipe.monitor.metrics import read_metrics
from recipe.utils.checkpoints import newest_run
from recipe.utils.errors import ExitCode, UserError

# Tolerance for other devices, engines or numbers of processes, as a share of how far the weights moved in the interval.
TOLERANCE = 0.01
# What must be the same for two runs to be equal to the bit.
CIRCUMSTANCES = ("device", "engine", "processes", "precision", "compiled", "packages")
# Fields that a replay leaves at their defaults, so that it evaluates, uploads and stops no more than it has to. It does
# validate at the run's steps, since a line of metrics.jsonl has the mean loss since the line before.
NOT_REPLAYED = {"config", "dry_run", "fresh", "max_hours", "report_to", "push_to_hub"}
NOT_REPLAYED |= {"hellaswag_steps", "sample_steps"}


@dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints of a run; no `start` where they are its first."""

    start: Path | None
    end: Path

    def __str__(self) -> str:
        return f"step {step_of(self.start) if self.start else 0:,} to {step_of(self.end):,}"


def replay(interval: Interval, directory: Path, launch: str, flags: str) -> Checkpoint:
    """Trains from the interval's start to its end in `directory`, as the run was configured at its end except for
    `flags`, and returns the checkpoint. Raises UserError where the trainer ends before."""
    recorded = state_of(interval.end)
    config = {name: value for name, value in recorded["config"].items() if name in FIELDS and name not in NOT_REPLAYED}
    config |= {"save_steps": recorded["step"], "eval_tokens": config["sequence_length"]}
    config["output_dir"] = str(directory / "run")
    recipe = directory / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config))
    if interval.start:
        shutil.copytree(interval.start, directory / "run" / interval.start.name)
    reached = directory / "run" / interval.end.name
    program = [*(shlex.split(launch) or [sys.executable]), str(ROOT / "recipe/train.py")]
    command = [*program, "--config", str(recipe), *shlex.split(flags)]
    with open(directory / "log", "w") as log:
        trainer = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while trainer.poll() is None and not reached.exists():
                time.sleep(0.2)
        finally:
            _stop(trainer)
    if not reached.exists():
        lines = (directory / "log").read_text().splitlines()
        why = next((line for line in reversed(lines) if line.startswith("error:")), "it printed no error")
        raise UserError(f"{interval}: the replay ended with exit code {trainer.returncode}; {why}")
    return load_checkpoint(reached)


def _stop(trainer: subprocess.Popen) -> None:
    """Ends the trainer and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(trainer.pid, number)
            trainer.wait(60)
            return


def different_tensor(recorded: Checkpoint, replayed: Checkpoint, start: Path | None) -> tuple[str, float]:
    """The weight or optimizer state that differs most from the run's, "" where all are equal to the bit, and its
    distance from the run's, as a share of how far the run moved it since `start` (the optimizer's state: of its
    norm)."""
    before = load_checkpoint(start).weights if start else {}
    amounts = {}
    for ours, theirs in ((recorded.weights, replayed.weights), (recorded.optimizer_state, replayed.optimizer_state)):
        for name in ours.keys() | theirs.keys():
            if name not in ours or name not in theirs:
                amounts[name] = float("inf")
            elif not torch.equal(ours[name], theirs[name]):
                way = ours[name] - before[name] if name in before else ours[name]
                amounts[name] = float((theirs[name] - ours[name]).norm() / way.norm().clamp(min=1e-30))
    return max(amounts.items(), key=lambda item: item[1], default=("", 0.0))


def different_step(interval: Interval, directory: Path, tolerance: float) -> int | None:
    """The first logged step whose loss or gradient norm differs by more than the tolerance from that of the replay in
    `directory`, if one does."""
    first, last = step_of(interval.start) if interval.start else 0, step_of(interval.end)
    replayed = {line["step"]: line for line in read_metrics(directory / "metrics.jsonl")}
    for line in read_metrics(interval.end.parent / "metrics.jsonl"):
        if first < line["step"] <= last and (other := replayed.get(line["step"])):
            pairs = [(line[name], other[name]) for name in ("loss", "grad_norm")]
            if any(one != two and (None in (one, two) or abs(one - two) > tolerance * abs(one)) for one, two in pairs):
                return line["step"]
    return None


def audit(interval: Interval, replayed: Checkpoint, tolerance: float | None) -> tuple[bool, str]:
    """Whether the interval's end is what came out of its start, and a sentence about it."""
    recorded = load_checkpoint(interval.end)
    ran, here = recorded.state["about"][-1], replayed.state["about"][-1]
    changed = [
        f"{name} {ran[name]!r} in the run, {here[name]!r} here" for name in CIRCUMSTANCES if ran[name] != here[name]
    ]
    allowed = (TOLERANCE if changed else 0.0) if tolerance is None else tolerance
    tensor, amount = different_tensor(recorded, replayed, interval.start)
    step = different_step(interval, replayed.path.parent, allowed)
    if not tensor and step is None:
        return True, "equal to the bit"
    where = f"{tensor or 'no tensor'} differs most, by {amount:.1e} of its way"
    if step is None and amount <= allowed:
        return True, f"equal within {allowed:g} ({where}; {'; '.join(changed) or 'as asked'})"
    since = f"losses differ from step {step:,} on" if step is not None else "the logged losses are equal"
    return False, f"different: {since}; {'; '.join([where, *changed])}"


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 equal, 1 different."""
    arguments = _parser().parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="audit-") as directory:
            return _main(arguments, Path(directory))
    except (UserError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("\nstopped; the run is as it was", file=sys.stderr)
        return ExitCode.LEFT_AT_ONCE


def _main(arguments: argparse.Namespace, directory: Path) -> int:
    if not arguments.repo:
        arguments.run = arguments.run or newest_run()
    run, repo = arguments.run, arguments.repo
    if (arguments.last if arguments.random is None else arguments.random) < 1:
        raise UserError("--last and --random count intervals, from 1 on")
    found = checkpoints_on_the_hub(repo, directory / "run") if repo else checkpoints(run)
    if not found:
        raise UserError(f"{repo or run}: no checkpoint there; name a run, such as runs/shakespeare")
    intervals = [Interval(start, end) for start, end in zip([None, *found], found, strict=False)]
    chosen = intervals[-arguments.last :]
    if arguments.random:
        chosen = sorted(random.sample(intervals, min(arguments.random, len(intervals))), key=lambda one: one.end)
    print(f"audit      {repo or run}: {len(chosen)} of {len(intervals)} intervals between its checkpoints", flush=True)
    code = 0
    for number, interval in enumerate(chosen):
        paths = [path for path in (interval.start, interval.end) if path]
        if repo:
            for path in paths:
                fetch(repo, path)
        at = directory / f"replay-{number}"
        at.mkdir()
        if damaged := [f"{path} is damaged: {problem}" for path in paths for problem in verify(path)]:
            same, sentence = False, damaged[0]
        else:
            replayed = replay(interval, at, arguments.launch, arguments.flags)
            same, sentence = audit(interval, replayed, arguments.tolerance)
        shutil.rmtree(at)
        print(f"{interval}: {sentence}", flush=True)
        code = code if same else 1
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipe.audit", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    of_what = parser.add_mutually_exclusive_group()
    of_what.add_argument("run", type=Path, nargs="?", help="directory of the run (default: the newest run)")
    of_what.add_argument("--repo", help="ORG/NAME on the Hub, of a run with --push_to_hub state")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, default=1, metavar="N", help="replay the last N intervals (default: 1)")
    which.add_argument("--random", type=int, metavar="N", help="replay N intervals, drawn at random")
    add("--launch", default="", help="what starts a program here (default: python, one process)")
    add("--flags", default="", help="of recipe/train.py that differ here, such as '--dataset_name DIRECTORY'")
    equal = f"0 where the circumstances are the run's, else {TOLERANCE}"
    add("--tolerance", type=float, help=f"share of its way that a tensor may differ by (default: {equal})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
