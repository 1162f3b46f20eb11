"""Replays part of a run from its checkpoints, and compares what comes out with what the run has written.

    python -m recipe.audit runs/NAME
    python -m recipe.audit runs/NAME --random 3 --launch 'accelerate launch --config_file accelerate_configs/ddp.yaml'
    python -m recipe.audit --repo ORG/NAME                            a run on the Hub

The data of a step follow from (seed, step), and a checkpoint holds the whole state: from one checkpoint the ordinary
trainer must arrive at the next. Each interval is replayed in a temporary directory; the run is only read. In the run's
own circumstances all must be equal to the bit. Elsewhere a second replay, which adds in another order, measures what
rounding does here, and the run may be a few times as far from the first (docs/fault-tolerance.md). Exit code 0: it
holds; 1: something is different; 69: something cannot be compared here.
"""

from __future__ import annotations

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
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from recipe.checkpoint.format import Checkpoint, checkpoint_path, load_checkpoint, state_of, verify
from recipe.checkpoint.provenance import descends
from recipe.config import FIELDS, ROOT, Config, data_sets, parse_config
from recipe.config.catalog import is_on_hub
from recipe.data.dataset import check_same_data
from recipe.data.producer import Producer
from recipe.engine.launch import fail
from recipe.hub.download import checkpoints_on_the_hub, fetch
from recipe.model.build import build_model
from recipe.monitor.metrics import sha256_before
from recipe.utils.checkpoints import checkpoints, newest_run, read_metrics, step_of
from recipe.utils.errors import ExitCode, UserError

DIFFERENT = 1
# What must be the same for two runs to be equal to the bit; dropout's masks; and where numbers are cast to 16 bits.
MASKS = {"device", "method", "processes", "compiled", "micro_batch_size", "packages", "precision"}
CASTS = {"device", "method", "compiled", "fused_loss", "packages", "precision"}
CODE = {"recipe", "commit"}
CIRCUMSTANCES = {"engine", "deterministic", "loss_chunk_size", "gradient_checkpointing", "torch_compile_mode"}
CIRCUMSTANCES |= MASKS | CASTS | CODE
WAY_OUT = "start the replay as the run was, with --launch and --flags, from its commit"
# Columns of metrics.jsonl that no replay repeats, and fields that are paths or names on the Hub.
TIMES = {"seconds", "save_wait", "tokens_per_second", "mfu", "data_wait", "peak_memory_bytes", "compilations"}
PATHS = {"dataset_name", "val_data", "init_from", "tokenizer"}
Key = tuple[int, str]  # step; column of metrics.jsonl, number of a checkpoint's state, or name of a tensor
Values = dict[Key, Any]
Distances = dict[Key, float]
UNROUNDED = 1e-12  # how far apart numbers that are not rounded may be here and there, such as a learning rate


class Kind(NamedTuple):
    """Values whose rounding is alike, by a pattern of their names. Distances are relative: to the number, to the norm
    of the optimizer's state, to a weight's update. Up to a rounding of `tight`, a run may be 8 times as far from its
    replay as two replays are from each other, or as `least`; beyond it rounding has grown by itself, one replay more
    says little of the next, and a run may be as far as `gross`."""

    names: str
    least: float
    tight: float
    gross: float

    def limit(self, rounding: float) -> float:
        """How far a value of the run may be from the replay's."""
        return 8 * max(rounding, self.least) if rounding <= self.tight else max(8 * rounding, self.gross)


WEIGHT = Kind(r"^transformer\.", least=1e-4, tight=1e-3, gross=0.5)
STATE = Kind(r"\.transformer\.", least=1e-4, tight=1e-3, gross=0.5)
LOSS = Kind("loss|sum", least=1e-6, tight=5e-5, gross=0.05)
NORM = Kind("grad", least=1e-4, tight=1e-3, gross=1.0)  # which engines add up in more or less exact ways
LEFT_OUT = Kind("sample|hellaswag", least=math.inf, tight=math.inf, gross=math.inf)  # where numbers are rounded


@cache
def kind_of(name: str) -> Kind | None:
    """The kind of a value; None where it is not rounded."""
    return next((kind for kind in (WEIGHT, STATE, LOSS, NORM, LEFT_OUT) if re.search(kind.names, name)), None)


class Different(Exception):
    """In what a run differs from its replay."""


class NotComparable(Exception):
    """Why a run and its replay here cannot be compared, and the way out."""


@dataclass(frozen=True)
class Interval:
    """The steps `first` to `last` between two checkpoints of a run; no `start` where they are its first. `is_last`: the
    run has no newer checkpoint."""

    start: Path | None
    end: Path
    first: int
    last: int
    is_last: bool

    @property
    def parts(self) -> list[tuple[int, dict]]:
        """The parts of the run in it, as the run has recorded them, each with its last step."""
        parts = state_of(self.end)["about"]
        ends = [part["from_step"] for part in parts[1:]] + [self.last]
        return [(end, part) for end, part in zip(ends, parts, strict=True) if end > self.first]


@dataclass(frozen=True)
class Replays:
    """What every replay is given: the audit's own directory, the repository if it is one that is audited, what starts a
    program here, and the fields that differ here."""

    directory: Path
    repo: str
    launch: str
    flags: list[str]

    def parsed(self, part: dict) -> Config:
        """The configuration of a part of a run, with the flags. Raises UserError for another author's paths, unless
        flags name them."""
        values = {name: value for name, value in part["config"].items() if name in FIELDS}
        if self.repo:
            self._check_paths(values)
        return parse_config(["--config", self._written(values | {"precision": part["precision"]}), *self.flags])

    def _check_paths(self, values: dict) -> None:
        named = {flag.partition("=")[0].removeprefix("--") for flag in self.flags}
        if named & {"dataset_name", "train_text"}:
            named |= {"dataset_name", "val_data"}
        for entry in values["dataset_name"] if isinstance(values["dataset_name"], list) else [{}]:
            data = values | entry
            data["dataset_name"] = data["train_text"] or data.get("name", data["dataset_name"])
            for name in sorted(PATHS - named):
                if data[name] not in ("", FIELDS[name].default) and not is_on_hub(data[name]):
                    found = f"{name} {data[name]!r} of {self.repo} is a path of its author"
                    raise UserError(f"{found}; name yours with --flags '--{name} PATH'")

    def config(self, part: dict) -> dict:
        """The fields with which a part of a run is replayed. Shards that must be made first are made in the audit's
        directory."""
        parsed = self.parsed(part)
        config = {name: value for name, value in parsed.flat().items() if name in FIELDS}
        entries = config["dataset_name"] if parsed.data.mixture else [config]
        for number, (one, entry) in enumerate(zip(data_sets(parsed.data), entries, strict=True)):
            if one.data.train_text and (self.repo or Producer(one.data).finished() is None):
                entry["name" if parsed.data.mixture else "dataset_name"] = str(self.directory / f"shards-{number}")
        return config | {"report_to": "none", "push_to_hub": False}

    def scales(self, interval: Interval, replay: Checkpoint) -> dict[str, float]:
        """What the distances of tensors are relative to: the norms of the optimizer's state, and of the weights'
        updates, from those of the interval's start or, by the seed, of the run's."""
        if interval.start:
            start = load_checkpoint(interval.start).weights
        else:
            part = interval.parts[0][1]
            config = self.parsed(part)
            model = replace(config.model, vocab_size=part["config"]["vocab_size"])
            start = dict(build_model(replace(config, model=model)).named_parameters())
        updates = {name: weight - start[name].detach() for name, weight in replay.weights.items()}
        return {name: float(tensor.double().norm()) for name, tensor in (updates | replay.optimizer_state).items()}

    def _written(self, values: dict) -> str:
        (recipe := self.directory / "recipe.yaml").write_text(yaml.safe_dump(values))
        return str(recipe)

    def replay(
        self, interval: Interval, name: str, changes: Iterable[dict] = repeat({})
    ) -> tuple[Checkpoint, list[dict]]:
        """Trains from the interval's start to its end in a directory of its own, part by part, each with its `changes`
        of fields. Returns the checkpoint, and what was recorded of each part. Raises NotComparable where the trainer
        ends before."""
        (run := self.directory / name).mkdir()
        if interval.start:
            shutil.copytree(interval.start, run / interval.start.name)
        parts = []
        for (last, part), change in zip(interval.parts, changes, strict=False):
            own = {"output_dir": str(run), "save_steps": last, "milestone_steps": last}
            self._train(self.config(part) | own | change, run, last)
            parts.append(state_of(checkpoint_path(run, last))["about"][-1])
            for path in checkpoints(run):
                if step_of(path) > last:  # it stops a little after its end
                    shutil.rmtree(path)
        return load_checkpoint(checkpoint_path(run, last)), parts

    def _train(self, config: dict, run: Path, last: int) -> None:
        """Trains until the checkpoint of step `last` and the line of this step, or of a later one, are there."""
        program = [*(shlex.split(self.launch) or [sys.executable]), str(ROOT / "recipe/train.py")]
        command = [*program, "--config", self._written(config)]
        checkpoint, log = checkpoint_path(run, last), self.directory / "log"
        with log.open("w") as output:
            trainer = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while trainer.poll() is None:
                    if checkpoint.exists() and read_metrics(run / "metrics.jsonl")[-1]["step"] >= last:
                        break
                    time.sleep(0.1)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(trainer.pid, signal.SIGTERM)
                trainer.wait()
        if not checkpoint.exists():
            errors = [line for line in log.read_text().splitlines() if line.startswith("error:")]
            why = errors[-1] if errors else "it printed no error"
            raise NotComparable(f"the replay ended with exit code {trainer.returncode}; {why}")


def _other_order(part: dict) -> dict:
    """Fields with which the same is computed as in this part of a replay, but added in another order."""
    config, micro = part["config"], part["micro_batch_size"]
    sequences = config["total_batch_tokens"] // config["sequence_length"] // part["processes"]
    other = 2 if micro == 1 else 1 if micro % 2 else micro // 2
    if sequences % other == 0 and not config["dropout"]:  # whose masks depend on the micro-batch
        return {"micro_batch_size": other}
    return {"loss_chunk_size": max(1, (config["loss_chunk_size"] or micro * config["sequence_length"]) // 2)}


def values_of(checkpoint: Checkpoint, interval: Interval) -> Values:
    """What a run has computed in an interval: the columns of metrics.jsonl, and what its checkpoint holds."""
    values: Values = {}
    for line in read_metrics(checkpoint.path.parent / "metrics.jsonl"):
        step = line["step"]
        if (step > interval.first or not interval.start) and step <= interval.last:
            line["the line"] = "there twice" if (step, "the line") in values else "there"
            values |= {(step, name): n for name, n in line.items() if n is not None and name not in TIMES}
    state, own = checkpoint.state, checkpoint.weights | checkpoint.optimizer_state
    numbers = {name: state[name] for name in ("tokens", "optimizer_steps")} | state["grad_scaler"]
    for name, value in (numbers | state["spike_filter"] | state["metrics"]["running_loss"]).items():
        each = enumerate(value if isinstance(value, list) else [value])
        own |= {f"the checkpoint's {name} {i}": number for i, number in each if number is not None}
    return values | {(interval.last, name): value for name, value in own.items()}


def distance(name: str, run: Any, replay: Any, scale: float) -> float:
    """How far two numbers are from each other, relative to the second, or two tensors, relative to `scale`; infinite
    where they are unequal and neither, or the scale is 0."""
    if isinstance(run, torch.Tensor) and isinstance(replay, torch.Tensor) and run.shape == replay.shape:
        difference = run.double() - replay.double()
        if scale and name.endswith("attn.c_attn.bias"):
            difference.view(3, -1)[1] *= 0  # of keys, whose gradient is nothing but rounding; NaN stays
        apart = float(difference.norm())
    elif isinstance(run, int | float) and isinstance(replay, int | float):
        apart, scale = abs(run - replay), abs(replay)
    else:
        return 0.0 if run is replay or (isinstance(run, str) and run == replay) else math.inf
    return apart / scale if scale else math.inf if apart else 0.0


def distances(run: Values, replay: Values, scales: dict[str, float], interval: Interval) -> Distances:
    """The distance of each value, the first step's first. At the end of an interval that is not the last, the next may
    have measured what the replay has not."""
    order = sorted(run.keys() | replay.keys(), key=lambda at: (at[0], "transformer." in at[1], at[1] != "the line", at))
    return {
        (step, name): distance(name, run.get((step, name)), replay.get((step, name)), scales.get(name, 0.0))
        for step, name in order
        if (step, name) in replay or interval.is_last or step != interval.last
    }


def first_difference(run: Values, replay: Values, apart: Distances, limits: Distances) -> str:
    """The first value of the run that is farther from the replay's than its limit, in words; "" where none is."""
    for key, size in apart.items():
        if not size <= limits.get(key, UNROUNDED):  # so that NaN is different
            step, name = key
            if "transformer." in name:
                return f"{name} of step {step:,} is not the replay's" + (f", by {size:.0e}" if limits else "")
            a, b = (values.get(key, "missing") for values in (run, replay))
            a, b = (f"{n:.8g}" if isinstance(n, float) else n for n in (a, b))
            return f"{name} of step {step:,} is {a}, and {b} in the replay"
    return ""


def check_files(interval: Interval) -> None:
    """Raises Different where checkpoints are damaged, or metrics.jsonl is not the one whose hash they keep."""
    for path in filter(None, (interval.start, interval.end)):
        if problems := verify(path):
            raise Different(f"{path} is damaged: {problems[0]}")
        step, written = step_of(path), state_of(path)["metrics"]["lines_sha256"]
        if sha256_before(path.parent / "metrics.jsonl", step) != written:
            raise Different(f"the lines of metrics.jsonl before step {step:,} are not those that the run wrote")


def audit(interval: Interval, replays: Replays) -> str:
    """What was compared of an interval, and how tightly. Raises Different and NotComparable."""
    check_files(interval)
    run, (replay, parts) = load_checkpoint(interval.end), replays.replay(interval, "replay")
    ran, here = values_of(run, interval), values_of(replay, interval)
    if interval.is_last and (interval.last, "the line") in here.keys() - ran.keys():
        raise NotComparable("metrics.jsonl has no line of this last step; continue the run, which writes it")
    difference = first_difference(ran, here, distances(ran, here, {}, interval), {})
    try:
        check_same_data(run.state["data"], replay.state["data"], "")
    except UserError:
        raise Different(difference or "the checkpoint says that the run read other shards") from None
    if not difference:
        return f"{interval.last - interval.first:,} steps to the bit"
    pairs = [(a["config"] | a, b["config"] | b) for (_, a), b in zip(interval.parts, parts, strict=True)]
    circumstances = compare_circumstances(pairs, difference)
    again, _ = replays.replay(interval, "again", [_other_order(part) for part in parts])
    scales = replays.scales(interval, replay)
    apart = distances(ran, here, scales, interval)
    rounding = rounding_of(distances(values_of(again, interval), here, scales, interval), interval.first)
    limits = {key: kind.limit(size) for key, size in rounding.items() if (kind := kind_of(key[1]))}
    if difference := first_difference(ran, here, apart, limits):
        other_code = any(a[name] != b[name] for a, b in pairs for name in CODE)
        raise (NotComparable if other_code else Different)(f"{difference} ({circumstances})")
    return f"holds: {tightness(apart, rounding)} ({circumstances})"


def compare_circumstances(pairs: list[tuple[dict, dict]], difference: str) -> str:
    """In what a run and its replay were computed otherwise, in words. Raises Different if in nothing, and NotComparable
    where rounding alone does not explain a `difference`."""
    changed = {
        name: f"{name} {a[name]!r} in the run, {b[name]!r} here"
        for a, b in pairs
        for name in sorted(CIRCUMSTANCES)
        if a[name] != b[name]
    }
    if not changed and all(run["deterministic"] for run, _ in pairs):
        raise Different(difference)
    circumstances = "; ".join(changed.values()) or "this device is not deterministic"
    if changed.keys() & MASKS and any(run["dropout"] for run, _ in pairs):
        raise NotComparable(f"dropout draws other masks ({circumstances}); {WAY_OUT}")
    if changed.keys() & CASTS and any(run["precision"] != "fp32" for run, _ in pairs):
        raise NotComparable(f"half precision is rounded elsewhere ({circumstances}); {WAY_OUT}")
    return circumstances


def rounding_of(near: Distances, first: int) -> Distances:
    """What rounding does to each value, by the distances of two replays: the largest of its kind, up to twice as far
    from step `first`, since it grows with the steps, and a run may be ahead."""
    kinds = {(step, name): kind for step, name in near if (kind := kind_of(name))}
    return {
        (step, name): max(near[at] for at in kinds if kinds[at] is kind and at[0] <= 2 * step - first + 1)
        for (step, name), kind in kinds.items()
    }


def tightness(apart: Distances, rounding: Distances) -> str:
    """How near a run is to its replay where rounding is small. Raises NotComparable where it is nowhere."""
    says = []
    for kind, what in ((LOSS, "losses"), (WEIGHT, "weights by their update")):
        tight = [key for key, size in rounding.items() if kind_of(key[1]) is kind and size <= kind.tight]
        if tight:
            far, size = (max(of[key] for key in tight) for of in (apart, rounding))
            says.append(f"{len(tight)} {what} within {far:.0e}, rounding here is {size:.0e}")
    if not says:
        raise NotComparable(f"rounding has grown too large to compare; {WAY_OUT}")
    return "; ".join(says)


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 it holds, 1 different, 69 not comparable here."""
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
    repo = arguments.repo
    run = directory / "run" if repo else arguments.run or newest_run()
    number = arguments.last if arguments.random is None else arguments.random
    if number < 1:
        raise UserError("--last and --random count intervals, from 1 on")
    found = checkpoints_on_the_hub(repo, run) if repo else checkpoints(run)
    if not found:
        raise UserError(f"{repo or run}: no checkpoint there; name a run, such as runs/shakespeare")
    chosen = found[-number:]
    if arguments.random:
        chosen = sorted(random.sample(found, min(number, len(found))), key=step_of)
    print(f"audit      {repo or run}: {len(chosen)} of {len(found)} intervals between its checkpoints", flush=True)
    codes = set()
    for end in chosen:
        start = _ancestor(end, found, repo)
        interval = Interval(start, end, step_of(start) if start else 0, step_of(end), end == found[-1])
        for path in filter(None, (start, end) if repo else ()):
            fetch(repo, path)
        try:
            with tempfile.TemporaryDirectory(dir=directory) as own:
                replays = Replays(Path(own), repo, arguments.launch, shlex.split(arguments.flags))
                code, sentence = ExitCode.DONE, audit(interval, replays)
        except Different as error:
            code, sentence = DIFFERENT, f"different: {error}"
        except NotComparable as error:
            code, sentence = ExitCode.NOT_COMPARABLE, f"cannot be compared here: {error}"
        except KeyError as error:
            code = ExitCode.NOT_COMPARABLE
            sentence = f"cannot be compared here: another version wrote it, without {error}"
        print(f"step {interval.first:,} to {interval.last:,}: {sentence}", flush=True)
        codes.add(code)
    return next(code for code in (DIFFERENT, ExitCode.NOT_COMPARABLE, ExitCode.DONE) if code in codes)


def _ancestor(end: Path, found: list[Path], repo: str) -> Path | None:
    """The newest of the checkpoints through which the run came to `end`: it may have gone on from an older one."""

    def parts(path: Path) -> list[dict]:
        if repo:
            fetch(repo, path, only="trainer_state.json")
        with suppress(UserError):  # damaged, as the verdict will say
            return state_of(path)["about"]
        return []

    earlier = (path for path in reversed(found) if step_of(path) < step_of(end))
    return next((path for path in earlier if descends(parts(end), step_of(path), parts(path))), None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipe.audit", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    of_what = parser.add_mutually_exclusive_group()
    of_what.add_argument("run", type=Path, nargs="?", help="directory of the run (default: the newest run)")
    of_what.add_argument("--repo", default="", help="ORG/NAME on the Hub, of a run with --push_to_hub state")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--last", type=int, default=1, metavar="N", help="replay the last N intervals (default: 1)")
    which.add_argument("--random", type=int, metavar="N", help="replay N intervals, drawn at random")
    add("--launch", default="", help="what starts a program here (default: python, one process)")
    add("--flags", default="", help="of recipe/train.py that differ here, such as '--dataset_name DIRECTORY'")
    return parser


if __name__ == "__main__":
    sys.exit(main())
