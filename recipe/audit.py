"""Replays part of a run from its checkpoints, and compares what comes out with what the run has written.

    python -m recipe.audit runs/NAME
    python -m recipe.audit runs/NAME --random 3 --launch 'accelerate launch --config_file accelerate_configs/ddp.yaml'
    python -m recipe.audit --repo ORG/NAME                            a run on the Hub

Each interval is replayed in a temporary directory; the run is only read. In the run's own circumstances all must be
equal to the bit. Elsewhere a second replay, which adds in another order, measures what rounding does here, and the run
may be a few times as far from the first (docs/fault-tolerance.md). Exit code 0: it holds; 1: something is different;
69: something cannot be compared here.
"""

import argparse
import math
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from recipe.checkpoint.format import Checkpoint, checkpoint_path, files_of, load_checkpoint, state_of, verify
from recipe.checkpoint.provenance import descends
from recipe.components import with_vocabulary
from recipe.config import FIELDS, ROOT, parse_config
from recipe.config.catalog import is_on_hub
from recipe.engine.launch import fail
from recipe.hub.download import checkpoints_on_the_hub, fetch
from recipe.model.build import build_model
from recipe.monitor.metrics import sha256_before
from recipe.utils.checkpoints import checkpoints, newest_run, read_metrics, step_of
from recipe.utils.errors import ArgumentParser, ExitCode, UserError
from recipe.utils.processes import Processes

# Where numbers are cast to 16 bits; and what else must be the same for two runs to be equal to the bit.
CASTS = {"device", "method", "compiled", "fused_loss", "packages", "precision"}
CODE = {"recipe", "commit"}
CIRCUMSTANCES = {"engine", "processes", "micro_batch_size", "deterministic", "loss_chunk_size"} | CASTS | CODE
CIRCUMSTANCES |= {"gradient_checkpointing", "torch_compile_mode"}
WAY_OUT = "start the replay as the run was, with --launch and --flags, from its commit"
# Columns of metrics.jsonl that no replay repeats.
TIMES = {"seconds", "save_wait", "tokens_per_second", "mfu", "data_wait", "peak_memory_bytes", "compilations"}
UNROUNDED = 1e-12  # how far apart numbers that are not rounded may be here and there, such as a learning rate
GRACE = 60.0  # seconds in which a replay that is stopped ends
Key = tuple[int, str]  # step; column of metrics.jsonl, number of a checkpoint's state, or name of a tensor
Values = dict[Key, Any]
Weights = dict[str, torch.Tensor]
# Values whose rounding is alike: a pattern of their names, and three distances, `least`, `tight` and `gross`. Up to a
# rounding of `tight`, a run may be 8 times as far from its replay as two replays are from each other, or as `least`;
# beyond it rounding has grown by itself, one replay more says little of the next, and a run may be as far as `gross`.
KINDS = {
    "losses": ("loss|sum", 1e-6, 5e-5, 0.05),
    "weights by their update": (r"^transformer\.", 1e-4, 1e-3, 0.5),
    "gradients and averages of them": (r"grad|\.transformer\.", 1e-4, 1e-3, 1.0),
}


class Different(Exception):
    """In what a run differs from its replay."""

    code, verdict = 1, "different"


class NotComparable(Exception):
    """Why a run and its replay here cannot be compared, and the way out."""

    code, verdict = ExitCode.NOT_COMPARABLE, "cannot be compared here"


class Interval(NamedTuple):
    """The steps from `first` to `last` between two checkpoints of a run; no `start` where they are its first, and
    `is_last` where it has no newer checkpoint."""

    start: Path | None
    end: Path
    first: int
    last: int
    is_last: bool


def interval_to(end: Path, ends: list[Path], repo: str) -> Interval:
    """From the newest checkpoint through which the run came to `end`: it may have gone on from an older one."""

    def parts(path: Path) -> list[dict]:
        if repo:
            fetch(repo, path)
        return state_of(path)["about"]

    own, earlier = parts(end), reversed(ends[: ends.index(end)])
    start = next((path for path in earlier if descends(own, step_of(path), parts(path))), None)
    if repo:
        shutil.copy(end / "metrics.jsonl", end.parent)
    return Interval(start, end, step_of(start) if start else 0, step_of(end), end == ends[-1])


def options_of(interval: Interval, directory: Path, repo: str, flags: list[str]) -> list[str]:
    """The trainer's options: the configuration of the run, and the flags. What was streamed is streamed into
    `directory`. Raises NotComparable where there are several configurations, and UserError for paths of another author,
    unless flags name them."""
    state = state_of(interval.end)
    part = state["about"][-1]
    if part["from_step"] > interval.first:
        change = f"other settings, code or processes at step {part['from_step']:,}"
        raise NotComparable(f"the run went on with {change}, of which there is no checkpoint to start from")
    values = {name: value for name, value in part["config"].items() if name in FIELDS}
    values |= {"precision": part["precision"], "report_to": "none", "push_to_hub": False, "train_hours": 0.0}
    named = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    if named & {"dataset_name", "train_text"}:
        named |= {"dataset_name", "val_data"}
    listed, read = values["dataset_name"], state["data"].get("mixture") or [state["data"]]
    for number, data in enumerate(listed if isinstance(listed, list) else [values]):
        name = "dataset_name" if data is values else "name"
        sources = values | data | {"dataset_name": data.get("train_text") or data[name]}
        for field in ("dataset_name", "val_data", "init_from", "tokenizer"):
            path = sources.get(field, "")
            if repo and field not in named and path not in ("", FIELDS[field].default) and not is_on_hub(str(path)):
                theirs = f"{field} {path!r} of {repo} is a path of its author"
                raise UserError(f"{theirs}; name yours with --flags '--{field} PATH'")
        if repo or read[number].get("manifest"):
            data[name] = str(directory / f"shards-{number}" / Path(data[name]).name)  # after which columns are named
    (recipe := directory / "recipe.yaml").write_text(yaml.safe_dump(values))
    return ["--config", str(recipe), *flags]


def replay(interval: Interval, run: Path, command: list[str]) -> Checkpoint:
    """Trains from the interval's start to its end in the directory `run`. Raises NotComparable if the trainer fails."""
    if interval.start:
        shutil.copytree(interval.start, run / interval.start.name)
    own = {"output_dir": run, "save_steps": interval.last, "milestone_steps": interval.last}
    command = [*command, *(f"--{name}={value}" for name, value in own.items())]
    checkpoint, log = checkpoint_path(run, interval.last), run.with_suffix(".log")
    with log.open("w") as output:
        trainer = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while trainer.poll() is None:
                lines = read_metrics(run / "metrics.jsonl")
                if checkpoint.exists() and lines and lines[-1]["step"] >= interval.last:
                    break
                time.sleep(0.1)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(trainer.pid, number)
                    trainer.wait(GRACE)
    if not checkpoint.exists():
        lines = log.read_text().splitlines()
        why = next((line for line in lines if line.startswith("error:")), "it printed no error")
        raise NotComparable(f"the replay ended with exit code {trainer.returncode}; {why}")
    return load_checkpoint(checkpoint)


def values_of(checkpoint: Checkpoint, interval: Interval) -> Values:
    """What a run has computed in an interval: the columns of metrics.jsonl, and what its checkpoint holds."""
    values: Values = {}
    for line in read_metrics(checkpoint.path.parent / "metrics.jsonl"):
        step = line["step"]
        if (step > interval.first or not interval.start) and step <= interval.last:
            lines = values.get((step, "number of lines"), 0)
            values |= {(step, name): n for name, n in line.items() if n is not None and name not in TIMES}
            values[step, "number of lines"] = lines + 1
    state, last = checkpoint.state, checkpoint.weights | checkpoint.optimizer_state
    numbers = {name: state[name] for name in ("tokens", "optimizer_steps")} | state["grad_scaler"]
    for name, value in (numbers | state["spike_filter"] | state["metrics"]["running_loss"]).items():
        last[f"the checkpoint's {name}"] = torch.tensor([n or 0.0 for n in value]) if isinstance(value, list) else value
    return values | {(interval.last, name): value for name, value in last.items()}


def first_other_file(run: Path, replay: Path) -> str:
    """The first of the files for transformers beside the weights that is not the same in both; "" where none is."""
    theirs, here = (
        {path.name: path.read_bytes() for path in files_of(of) if path.name != "model.safetensors"}
        for of in (run, replay)
    )
    return next((name for name in sorted(theirs | here) if theirs.get(name) != here.get(name)), "")


def distance(name: str, run: Any, replay: Any, start: Weights) -> float:
    """How far two numbers or tensors are from each other, relative to the second, or to a weight's update from `start`
    on; infinite where they are unequal and that is 0."""
    if isinstance(run, torch.Tensor) and isinstance(replay, torch.Tensor) and run.shape == replay.shape:
        difference, scale = run.double() - replay.double(), float((replay - start.get(name, 0)).double().norm())
        if start and name.endswith("attn.c_attn.bias"):
            difference.view(3, -1)[1] *= 0  # of keys, whose gradient is nothing but rounding; NaN stays
        apart = float(difference.norm())
    elif isinstance(run, int | float) and isinstance(replay, int | float):
        apart, scale = abs(run - replay), abs(replay)
    else:
        return 0.0 if run is replay or (isinstance(run, str) and run == replay) else math.inf
    try:
        return float(apart / scale) if scale else math.inf if apart else 0.0
    except OverflowError:  # of an integer that no run has measured
        return math.inf


def distances(run: Values, replay: Values, start: Weights) -> dict[Key, float]:
    """The distance of each value, the first step's first."""
    keys = sorted(run | replay, key=lambda key: key[0])
    return {key: distance(key[1], run.get(key), replay.get(key), start) for key in keys}


def first_difference(run: Values, replay: Values, apart: dict[Key, float], limits: dict[Key, float] | None) -> str:
    """The first value of the run that is farther from the replay's than its limit, in words; "" where none is. Without
    `limits`, the first that is not equal."""
    for key, size in apart.items():
        if not size <= (0.0 if limits is None else limits.get(key, UNROUNDED)):  # so that NaN is different
            a, b = (values.get(key, "missing") for values in (run, replay))
            what = "not the replay's" if torch.Tensor in (type(a), type(b)) else f"{a}, and {b} in the replay"
            return f"{key[1]} of step {key[0]:,} is {what}"
    return ""


def compare(run: Values, replay: Values, again: Values, start: Weights, first: int) -> tuple[str, list[str]]:
    """The first value of a run that is farther from the replay's than rounding explains, as a second replay shows it,
    in words; and how near the others are where rounding is small."""
    apart, near = distances(run, replay, start), distances(again, replay, start)
    rounded = ("sample", "hellaswag")  # to whole tokens and answers
    limits, tightness = {key: math.inf for key in apart if key[1].startswith(rounded)}, []
    for what, (names, least, tight, gross) in KINDS.items():
        keys = [key for key in near if re.search(names, key[1])]
        # the largest up to twice as far from step `first`, since rounding grows with the steps, and a run may be ahead
        rounding = {key: max(near[at] for at in keys if at[0] <= 2 * key[0] - first + 1) for key in keys}
        counted = {key for key in keys if 0 < rounding[key] <= tight}  # at 0 the second replay has shown nothing
        for key in keys:
            limits[key] = 8 * max(rounding[key], least) if key in counted else max(8 * rounding[key], gross)
        if counted:
            far, size = (max(of[key] for key in counted) for of in (apart, rounding))
            tightness.append(f"{len(counted)} {what} within {far:.0e}, rounding here is {size:.0e}")
    return first_difference(run, replay, apart, limits), tightness


def audit(interval: Interval, directory: Path, arguments: argparse.Namespace) -> str:
    """What was compared of an interval, and how tightly. Raises Different and NotComparable."""
    log, state = interval.end.parent / "metrics.jsonl", state_of(interval.end)
    for path in filter(None, (interval.start, interval.end)):
        if problems := verify(path):
            raise Different(f"{path} is damaged: {problems[0]}")
    if sha256_before(log.read_bytes() if log.is_file() else b"", interval.last) != state["metrics"]["lines_sha256"]:
        raise Different(f"the lines of metrics.jsonl before step {interval.last:,} are not those of the run")
    options = options_of(interval, directory, arguments.repo, shlex.split(arguments.flags))
    config, trained_with = state["config"], state["about"][-1]["config"]
    if name := next((name for name, value in trained_with.items() if config.get(name) != value), ""):
        raise Different(
            f"the configuration says {name} {config.get(name)!r}, and the run's last part {trained_with[name]!r}"
        )
    command = [*(shlex.split(arguments.launch) or [sys.executable]), str(ROOT / "recipe/train.py"), *options]
    checkpoint, replayed = load_checkpoint(interval.end), replay(interval, directory / "replay", command)
    ran, here = values_of(checkpoint, interval), values_of(replayed, interval)
    besides = ""
    if not interval.is_last:  # the process that went on may have measured more at its first step
        more = sorted(name for step, name in ran.keys() - here.keys() if step == interval.last)
        besides = f", but for what it does not show: {', '.join(more)} of step {interval.last:,}" if more else ""
        ran = {key: value for key, value in ran.items() if key in here or key[0] != interval.last}
    elif (interval.last, "number of lines") in here.keys() - ran.keys():
        raise NotComparable("metrics.jsonl has no line of this last step; continue the run, which writes it")
    a, b = ({**part["config"], **part} for part in (state["about"][-1], replayed.state["about"][-1]))
    changed = {name for name in CIRCUMSTANCES if a.get(name) != b[name]}
    if not changed & {"packages", *CODE} and (file := first_other_file(checkpoint.path, replayed.path)):
        raise Different(f"{file} of step {interval.last:,} is not the replay's")
    if not (difference := first_difference(ran, here, distances(ran, here, {}), None)):
        return f"{interval.last - interval.first:,} steps to the bit{besides}"
    if not changed and b["deterministic"]:
        raise Different(difference)
    texts = [f"{name} {a.get(name)!r} in the run, {b[name]!r} here" for name in sorted(changed)]
    circumstances = "; ".join(texts) or "this device is not deterministic"
    if changed & CASTS and {a["precision"], b["precision"]} != {"fp32"}:
        raise NotComparable(f"half precision is rounded elsewhere ({circumstances}); {WAY_OUT}")
    micro = b["micro_batch_size"]
    other = micro // 2 if micro % 2 == 0 else 1 if micro > 1 else 2  # adds the same numbers in another order
    again = values_of(replay(interval, directory / "again", [*command, f"--micro_batch_size={other}"]), interval)
    if interval.start:
        start = load_checkpoint(interval.start).weights
    else:
        start = build_model(with_vocabulary(parse_config(options), Processes())).state_dict()
    difference, tightness = compare(ran, here, again, start, interval.first)
    if difference:
        raise (NotComparable if changed & CODE else Different)(f"{difference} ({circumstances})")
    if missing := [what for what in list(KINDS)[:2] if not any(what in text for text in tightness)]:
        raise NotComparable(f"two replays here are too far apart in {missing[0]} ({circumstances}); {WAY_OUT}")
    return f"holds: {'; '.join(tightness)} ({circumstances}){besides}"


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 it holds, 1 different, 69 not comparable here."""
    parser = ArgumentParser(prog="python -m recipe.audit", description=__doc__.partition("\n")[0])
    of_what = parser.add_mutually_exclusive_group()
    of_what.add_argument("run", type=Path, nargs="?", help="directory of the run (default: the newest run)")
    of_what.add_argument("--repo", default="", help="ORG/NAME on the Hub, of a run with --push_to_hub state")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, default=1, metavar="N", help="replay the last N intervals (default: 1)")
    which.add_argument("--random", type=int, metavar="N", help="replay N intervals, drawn at random")
    parser.add_argument("--launch", default="", help="what starts a program here (default: python, one process)")
    parser.add_argument("--flags", default="", help="of recipe/train.py that differ here: '--dataset_name DIRECTORY'")
    try:
        arguments = parser.parse_args(argv)
        with tempfile.TemporaryDirectory(prefix="audit-") as directory:
            return _main(arguments, Path(directory))
    except (UserError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("\nstopped; the run is as it was", file=sys.stderr)
        return ExitCode.LEFT_AT_ONCE


def _main(arguments: argparse.Namespace, directory: Path) -> int:
    repo = arguments.repo
    run = directory / "run" if repo else arguments.run or newest_run()
    number = arguments.last if arguments.random is None else arguments.random
    if number < 1:
        raise UserError("--last and --random count intervals, from 1 on")
    ends = checkpoints_on_the_hub(repo, run) if repo else checkpoints(run)
    if not ends:
        raise UserError(f"{repo or run}: no checkpoint there; name a run, such as runs/shakespeare")
    chosen = ends[-number:]
    if arguments.random:
        chosen = sorted(random.sample(ends, min(number, len(ends))), key=step_of)
    print(f"audit      {repo or run}: {len(chosen)} of {len(ends)} intervals between its checkpoints", flush=True)
    codes = set()
    for end in chosen:
        interval = interval_to(end, ends, repo)
        try:
            with tempfile.TemporaryDirectory(dir=directory) as own:
                code, sentence = ExitCode.DONE, audit(interval, Path(own), arguments)
        except (Different, NotComparable) as error:
            code, sentence = error.code, f"{error.verdict}: {error}"
        print(f"step {interval.first:,} to {interval.last:,}: {sentence}", flush=True)
        codes.add(code)
    return min(codes - {ExitCode.DONE}, default=ExitCode.DONE)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: the replay ends too, and leaves nothing
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
