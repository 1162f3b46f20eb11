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
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from eval.published import HELLASWAG_ROWS
from recipe.checkpoint.format import Checkpoint, checkpoint_path, load_checkpoint, state_of, verify
from recipe.checkpoint.provenance import descends, segments
from recipe.config import FIELDS, ROOT, data_sets, parse_config
from recipe.config.catalog import is_on_hub
from recipe.data.dataset import check_same_data
from recipe.data.producer import Producer
from recipe.engine.launch import fail
from recipe.hub.download import checkpoints_on_the_hub, fetch
from recipe.model.build import build_model
from recipe.monitor.metrics import read_metrics, sha256_before
from recipe.utils.checkpoints import checkpoints, newest_run, step_of
from recipe.utils.errors import ExitCode, UserError

DIFFERENT = 1
# What must be the same for two runs to be equal to the bit; dropout's masks; and where numbers are cast to 16 bits.
MASKS = {"device", "method", "processes", "compiled", "micro_batch_size", "packages", "precision"}
CASTS = {"device", "method", "compiled", "fused_loss", "packages", "precision"}
CODE = {"recipe", "commit"}
CIRCUMSTANCES = MASKS | CASTS | CODE | {"engine", "deterministic", "loss_chunk_size", "gradient_checkpointing"}
CIRCUMSTANCES |= {"torch_compile_mode"}
FACTOR = 8  # a run may be so many times as far from its replay as two replays are from each other
# Up to this rounding, of the loss, a gradient norm, HellaSwag and the weights' update, a comparison is tight; beyond it
# rounding has grown by itself, one replay more says little of the next, and the comparison is a gross one.
TIGHT = {"loss": 5e-5, "grad": 1e-3, "hellaswag": 0.02, "end": 1e-3}
GROSS = {"loss": 0.05, "grad": 1.0, "hellaswag": 0.1, "end": 0.5}
# The least rounding, relative: a mean of losses in fp32; a norm, which engines add up in more or less exact ways.
LEAST = {"loss": 1e-6, "grad": 1e-4, "hellaswag": 0.0}
# Columns of metrics.jsonl that no replay repeats, and fields that are paths or names on the Hub.
TIMES = {"seconds", "save_wait", "tokens_per_second", "mfu", "data_wait", "peak_memory_bytes", "compilations"}
PATHS = ("dataset_name", "val_data", "train_text", "init_from", "tokenizer")
Numbers = dict[tuple[int, str], Any]  # (step, column): value
Tensors = dict[str, torch.Tensor]


class Different(Exception):
    """In what a run differs from its replay."""


class NotComparable(Exception):
    """Why a run and its replay here cannot be compared, and the way out."""


@dataclass(frozen=True)
class Interval:
    """The steps between two checkpoints of a run; no `start` where they are its first. `is_last`: the run has no newer
    checkpoint."""

    start: Path | None
    end: Path
    is_last: bool

    @property
    def first(self) -> int:
        """The step of its start."""
        return step_of(self.start) if self.start else 0

    @property
    def last(self) -> int:
        """The step of its end."""
        return step_of(self.end)

    @property
    def parts(self) -> list[tuple[int, dict]]:
        """The parts of the run in it, as the run has recorded them, each with its last step."""
        return segments(state_of(self.end)["about"], self.first, self.last)


@dataclass(frozen=True)
class Replays:
    """What every replay is given: the audit's own directory, the repository if it is one that is audited, what starts a
    program here, and the fields that differ here."""

    directory: Path
    repo: str
    launch: str
    flags: list[str]

    def config(self, part: dict) -> dict:
        """The configuration with which a part of a run is replayed. Shards that must be made first are made in the
        audit's directory. Raises UserError for another author's paths, unless flags name them."""
        values = {name: value for name, value in part["config"].items() if name in FIELDS}
        if self.repo:
            self._check_paths(values)
        parsed = parse_config(["--config", self.written(values | {"precision": part["precision"]}), *self.flags])
        config = {name: value for name, value in parsed.flat().items() if name in FIELDS}
        entries = config["dataset_name"] if parsed.data.mixture else [config]
        for number, (one, entry) in enumerate(zip(data_sets(parsed.data), entries, strict=True)):
            if one.data.train_text and (self.repo or Producer(one.data).finished() is None):
                entry["name" if parsed.data.mixture else "dataset_name"] = str(self.directory / f"shards-{number}")
        return config | {"report_to": "none", "push_to_hub": False}

    def _check_paths(self, values: dict) -> None:
        named = {flag.partition("=")[0].removeprefix("--") for flag in self.flags}
        if named & {"dataset_name", "train_text"}:
            named |= {"dataset_name", "train_text", "val_data"}
        entries = values["dataset_name"] if isinstance(values["dataset_name"], list) else [values]
        for entry in entries:
            entry = values | entry | ({"dataset_name": entry["name"]} if "name" in entry else {})
            made = {"dataset_name"} if entry["train_text"] else set()
            for name in (name for name in PATHS if name not in named | made):
                if entry[name] not in ("", FIELDS[name].default) and not is_on_hub(entry[name]):
                    found = f"{name} {entry[name]!r} of {self.repo} is a path of its author"
                    raise UserError(f"{found}; name yours with --flags '--{name} PATH'")

    def first_weights(self, interval: Interval) -> Tensors:
        """The weights from which the run went on: those of the interval's start, or by the seed."""
        if interval.start:
            return load_checkpoint(interval.start).weights
        part = interval.parts[0][1]
        parsed = parse_config(["--config", self.written(self.config(part))])
        model = replace(parsed.model, vocab_size=part["config"]["vocab_size"])
        return {name: p.detach() for name, p in build_model(replace(parsed, model=model)).named_parameters()}

    def written(self, values: dict) -> str:
        """The path of a recipe with these values."""
        (recipe := self.directory / "recipe.yaml").write_text(yaml.safe_dump(values))
        return str(recipe)

    def replay(self, interval: Interval, name: str, processes: int = 0) -> tuple[Checkpoint, list[dict]]:
        """Trains from the interval's start to its end in a directory of its own, part by part; with `processes`, the
        number of them here, in another order of additions. Returns the checkpoint, and what was recorded of each part.
        Raises NotComparable where the trainer ends before."""
        (run := self.directory / name).mkdir()
        if interval.start:
            shutil.copytree(interval.start, run / interval.start.name)
        parts = []
        for last, part in interval.parts:
            for newer in [
                path for path in checkpoints(run) if step_of(path) >= last
            ]:  # it stops a little after its end
                shutil.rmtree(newer)
            config = self.config(part) | {"output_dir": str(run), "save_steps": last, "milestone_steps": last}
            self._train(config | (_other_order(config, processes) if processes else {}), run, last)
            parts.append(state_of(checkpoint_path(run, last))["about"][-1])
        return load_checkpoint(checkpoint_path(run, last)), parts

    def _train(self, config: dict, run: Path, last: int) -> None:
        """Trains until the checkpoint of step `last` and the line of this step, or of a later one, are there."""
        program = [*(shlex.split(self.launch) or [sys.executable]), str(ROOT / "recipe/train.py")]
        checkpoint, log = checkpoint_path(run, last), self.directory / "log"
        with log.open("w") as output:
            command = [*program, "--config", self.written(config)]
            trainer = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                while trainer.poll() is None:
                    if checkpoint.exists() and read_metrics(run / "metrics.jsonl")[-1]["step"] >= last:
                        break
                    time.sleep(0.1)
            finally:
                _stop(trainer)
        if not checkpoint.exists():
            errors = [line for line in log.read_text().splitlines() if line.startswith("error:")]
            why = errors[-1] if errors else "it printed no error"
            raise NotComparable(f"the replay ended with exit code {trainer.returncode}; {why}")


def _stop(trainer: subprocess.Popen) -> None:
    """Ends the trainer and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(trainer.pid, number)
            trainer.wait(60)
            return


def _other_order(config: dict, processes: int) -> dict:
    """Fields with which the same is computed, but added in another order."""
    sequences = config["total_batch_tokens"] // config["sequence_length"] // processes
    micro, chunk = min(config["micro_batch_size"], sequences), config["loss_chunk_size"]
    others = [size for size in range(1, sequences + 1) if sequences % size == 0 and size != micro]
    if others and not config["dropout"]:  # whose masks depend on the micro-batch
        return {"micro_batch_size": max((size for size in others if size < micro), default=min(others))}
    return {"loss_chunk_size": max(1, (chunk or micro * config["sequence_length"]) // 2)}


def numbers_of(checkpoint: Checkpoint, first: int) -> Numbers:
    """The columns of metrics.jsonl from step `first` to a checkpoint of its run, and the checkpoint's own numbers."""
    found: Numbers = {}
    for line in read_metrics(checkpoint.path.parent / "metrics.jsonl"):
        step = line["step"]
        if first <= step <= checkpoint.step:
            there = "there twice" if (step, "the line") in found else "there"
            found |= {(step, name): n for name, n in line.items() if n is not None and name not in TIMES}
            found[step, "the line"] = there
    state, metrics = checkpoint.state, checkpoint.state["metrics"]
    own = {name: state[name] for name in ("tokens", "optimizer_steps")} | state["grad_scaler"]
    for name, value in (state["spike_filter"] | metrics["running_loss"]).items():
        own |= {f"{name} {i}": number for i, number in enumerate(value if isinstance(value, list) else [value])}
    return found | {(checkpoint.step, f"the checkpoint's {name}"): n for name, n in own.items() if n is not None}


def _kind(column: str) -> str:
    """The columns whose rounding is alike; "" for one that is not rounded."""
    column = column.replace("sum", "loss").replace("count", "")
    return next((kind for kind in ("loss", "grad", "hellaswag") if kind in column), "")


def rounding(here: Numbers, again: Numbers, rows: int, first: int) -> Numbers:
    """What rounding does to each number: the largest difference of its kind between two replays, and at least LEAST, or
    one of HellaSwag's `rows`. Up to twice as far from step `first`, since it grows with the steps, and a run may be
    ahead."""
    apart = [
        (step, _kind(name), abs(here[step, name] - again.get((step, name), here[step, name])))
        for step, name in here
        if _kind(name)
    ]
    found = {}
    for (step, name), value in here.items():
        if kind := _kind(name):
            largest = max(n for at, other, n in apart if other == kind and at <= 2 * step - first + 1)
            found[step, name] = max(largest, 1 / rows if kind == "hellaswag" else LEAST[kind] * abs(value))
    return found


def limit(kind: str, rounding: float, scale: float) -> float:
    """How far a number of a run, or a tensor, may be from the replay's."""
    tight = rounding <= TIGHT[kind] * scale
    return max(FACTOR * rounding, (TIGHT if kind == "end" else LEAST)[kind] * scale if tight else GROSS[kind] * scale)


def first_difference(ran: Numbers, here: Numbers, limits: Numbers, neighbors: set[int]) -> str:
    """The first number of the run that is farther from the replay's than its limit, in words; "" where none is. At the
    steps of `neighbors` another part of the run may have measured what this one has not."""
    for key in sorted(ran.keys() | here.keys(), key=lambda key: (key[0], key[1] != "the line")):
        (step, name), a, b = key, ran.get(key), here.get(key)
        if a == b or (b is None and step in neighbors) or (limits and name == "sample"):
            continue
        numbers = isinstance(a, int | float) and isinstance(b, int | float)
        if not (numbers and abs(a - b) <= limits.get(key, 1e-12 * abs(b))):  # so that NaN is different
            run, replay = ("missing" if n is None else f"{n:.8g}" if isinstance(n, float) else n for n in (a, b))
            return f"{name} of step {step:,} is {run}, and {replay} in the replay"
    return ""


def distances(one: Tensors, other: Tensors) -> dict[str, float]:
    """The norm of the difference of each tensor, infinite where they are no such tensors. Without the biases of keys,
    whose gradient is nothing but rounding."""
    found = dict.fromkeys(one.keys() ^ other.keys(), math.inf)
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        alike = (a.shape, a.dtype) == (b.shape, b.dtype)
        if alike and name.endswith("attn.c_attn.bias"):
            a, b = (torch.stack(t.chunk(3))[::2] for t in (a, b))
        found[name] = float((a.double() - b.double()).norm()) if alike else math.inf
    return found


def _tensors(checkpoint: Checkpoint) -> Tensors:
    return checkpoint.weights | checkpoint.optimizer_state


def _neighbors(interval: Interval) -> set[int]:
    return ({interval.first} if interval.start else set()) | (set() if interval.is_last else {interval.last})


def audit(interval: Interval, replays: Replays) -> str:
    """What was compared of an interval, and how tightly. Raises Different and NotComparable."""
    for path in filter(None, (interval.start, interval.end)):
        if sha256_before(path.parent / "metrics.jsonl", step_of(path)) != state_of(path)["metrics"]["lines_sha256"]:
            raise Different(
                f"the lines of metrics.jsonl before step {step_of(path):,} are not those that the run wrote"
            )
    run, (replay, parts) = load_checkpoint(interval.end), replays.replay(interval, "replay")
    ran, here = (numbers_of(checkpoint, interval.first) for checkpoint in (run, replay))
    if interval.is_last and (interval.last, "the line") in here.keys() - ran.keys():
        raise NotComparable("metrics.jsonl has no line of this last step; continue the run, which writes it")
    difference = first_difference(ran, here, {}, _neighbors(interval))
    try:
        check_same_data(run.state["data"], replay.state["data"], "")
    except UserError:
        raise Different(difference or "the checkpoint says that the run read other shards") from None
    bits = [name for name, tensor in _tensors(replay).items() if not torch.equal(tensor, _tensors(run)[name])]
    if not difference and not bits:
        return f"{interval.last - interval.first:,} steps to the bit"
    pairs = [(a["config"] | a, b["config"] | b) for (_, a), b in zip(interval.parts, parts, strict=True)]
    changed = {
        n: f"{n} {a[n]!r} in the run, {b[n]!r} here" for a, b in pairs for n in sorted(CIRCUMSTANCES) if a[n] != b[n]
    }
    if not changed and all(part["deterministic"] for part, _ in pairs):
        raise Different(difference or f"the logged numbers are equal, and {min(bits)} is not")
    circumstances = "; ".join(changed.values()) or "this device is not deterministic"
    way_out = "start the replay as the run was, with --launch and --flags, from its commit"
    if changed.keys() & MASKS and any(part["dropout"] for part, _ in pairs):
        raise NotComparable(f"dropout draws other masks ({circumstances}); {way_out}")
    if changed.keys() & CASTS and any(part["precision"] != "fp32" for part, _ in pairs):
        raise NotComparable(f"half precision is rounded elsewhere ({circumstances}); {way_out}")
    again, _ = replays.replay(interval, "again", parts[-1]["processes"])
    rounded = rounding(
        here, numbers_of(again, interval.first), pairs[0][1]["hellaswag_limit"] or HELLASWAG_ROWS, interval.first
    )
    limits = {key: limit(_kind(key[1]), n, abs(here[key])) for key, n in rounded.items()}
    difference = first_difference(ran, here, limits, _neighbors(interval))
    scales = {name: float(tensor.double().norm()) for name, tensor in replay.optimizer_state.items()}
    scales |= distances(run.weights, replays.first_weights(interval))  # of the weights, their updates
    apart, near = (distances(_tensors(one), _tensors(replay)) for one in (run, again))
    largest: dict[str, float] = defaultdict(float)  # of the weights, and of each state of the optimizer
    for name, scale in scales.items():
        largest[_state(name)] = max(largest[_state(name)], near[name] / max(scale, 1e-30))
    far = [name for name, n in apart.items() if not n <= scales.get(name, 0) * limit("end", largest[_state(name)], 1.0)]
    if far:
        name = min(far)
        difference = (
            difference
            or f"{name} is {apart[name] / max(scales.get(name, 0), 1e-30):.1e} of its update, or of its norm, away"
        )
    if difference:
        raise (NotComparable if changed.keys() & CODE else Different)(f"{difference} ({circumstances})")
    losses = [(abs(ran[key] - n) / n, rounded[key] / n) for key, n in here.items() if key[1] == "loss" and key in ran]
    tight, says = [loss for loss in losses if loss[1] <= TIGHT["loss"]], []
    if tight:
        says.append(f"{len(tight)} lines within {max(tight)[0]:.0e}, rounding here is {max(n for _, n in tight):.0e}")
    if largest[""] <= TIGHT["end"]:
        share = max(apart[name] / max(scales[name], 1e-30) for name in run.weights)
        says.append(f"weights within {share:.0e} of their update, rounding here is {largest['']:.0e}")
    if not says:
        raise NotComparable(f"rounding has grown to {largest['']:.0e} of the update ({circumstances}); {way_out}")
    return f"holds: {'; '.join(says)} ({circumstances})"


def _state(name: str) -> str:
    """exp_avg. of an optimizer state's name, "" of a weight's."""
    return name.partition("transformer.")[0]


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
    repo, run = arguments.repo, directory / "run"
    if not repo:
        run = arguments.run or newest_run()
    if (arguments.last if arguments.random is None else arguments.random) < 1:
        raise UserError("--last and --random count intervals, from 1 on")
    found = checkpoints_on_the_hub(repo, run) if repo else checkpoints(run)
    if not found:
        raise UserError(f"{repo or run}: no checkpoint there; name a run, such as runs/shakespeare")
    chosen = found[-arguments.last :]
    if arguments.random:
        chosen = sorted(random.sample(found, min(arguments.random, len(found))), key=step_of)
    print(f"audit      {repo or run}: {len(chosen)} of {len(found)} intervals between its checkpoints", flush=True)
    codes = set()
    for end in chosen:
        interval = Interval(_ancestor(end, found, repo), end, end == found[-1])
        for path in filter(None, (interval.start, end) if repo else ()):
            fetch(repo, path)
        with tempfile.TemporaryDirectory(dir=directory) as at:
            code, sentence = _verdict(interval, Replays(Path(at), repo, arguments.launch, shlex.split(arguments.flags)))
        print(f"step {interval.first:,} to {interval.last:,}: {sentence}", flush=True)
        codes.add(code)
    return next(code for code in (DIFFERENT, ExitCode.NOT_COMPARABLE, ExitCode.DONE) if code in codes)


def _ancestor(end: Path, found: list[Path], repo: str) -> Path | None:
    """The newest of the checkpoints through which the run came to `end`: it may have gone on from an older one."""

    def parts(path: Path) -> list[dict]:
        if repo:
            fetch(repo, path, only="trainer_state.json")
        with suppress(OSError, ValueError, KeyError):  # damaged, as the verdict will say
            return state_of(path)["about"]
        return []

    earlier = (path for path in reversed(found) if step_of(path) < step_of(end))
    return next((path for path in earlier if descends(parts(end), step_of(path), parts(path))), None)


def _verdict(interval: Interval, replays: Replays) -> tuple[int, str]:
    """The exit code, and the sentence of an interval."""
    for path in filter(None, (interval.start, interval.end)):
        if problems := verify(path):
            return DIFFERENT, f"{path} is damaged: {problems[0]}"
    try:
        return ExitCode.DONE, audit(interval, replays)
    except Different as error:
        return DIFFERENT, f"different: {error}"
    except NotComparable as error:
        return ExitCode.NOT_COMPARABLE, f"cannot be compared here: {error}"
    except KeyError as error:
        return ExitCode.NOT_COMPARABLE, f"cannot be compared here: another version wrote it, without {error}"


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
