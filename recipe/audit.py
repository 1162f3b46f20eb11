"""Replays part of a run from its checkpoints, and compares the results with what the run has recorded.

    python -m recipe.audit runs/NAME
    python -m recipe.audit runs/NAME --random 3 --launch 'accelerate launch --config_file accelerate_configs/ddp.yaml'
    python -m recipe.audit --repo ORG/NAME                            a run on the Hub

Each interval is replayed in a temporary directory; the run is only read. Under the run's own circumstances everything
must be equal to the bit. Elsewhere a second replay, which adds in another order, measures the effect of rounding here,
and the run may differ from the first replay by a few times that (docs/fault-tolerance.md). Exit code 0: the run holds;
1: something is different; 69: something cannot be compared here.
"""

import argparse
import copy
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
from bisect import bisect_right
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from recipe.checkpoint.format import Checkpoint, checkpoint_path, files_of, load_checkpoint, state_of, verify
from recipe.checkpoint.provenance import descends
from recipe.components import with_vocabulary
from recipe.config import DEFAULTS, FIELDS, ROOT, entries_in, hyperparameters, parse_config
from recipe.config.catalog import is_on_hub
from recipe.data.dataset import check_same_data
from recipe.engine.launch import fail
from recipe.hub.download import checkpoints_on_the_hub, fetch, step_of_main
from recipe.model.build import build_model
from recipe.monitor.metrics import sha256_before
from recipe.utils.checkpoints import checkpoints, manifest_of, newest_run, read_metrics, step_of
from recipe.utils.errors import ArgumentParser, ExitCode, UserError
from recipe.utils.log import escape_output
from recipe.utils.processes import Processes
from recipe.utils.redaction import redact
from recipe.utils.units import plural

# What decides where numbers are cast to 16 bits, and (CIRCUMSTANCES) all that must be the same for equal bits.
CASTS = {"device", "method", "compiled", "fused_loss", "packages", "precision"}
CODE = {"code"}
CIRCUMSTANCES = {"engine", "processes", "micro_batch_size", "deterministic", "loss_chunk_size"} | CASTS | CODE
CIRCUMSTANCES |= {"gradient_checkpointing", "torch_compile_mode"}
WAY_OUT = "replay with the run's own launch (--launch), options (--flags) and commit"
# Columns of metrics.jsonl that differ from replay to replay.
UNREPEATABLE = {"seconds", "tokens_per_second", "mfu", "data_wait", "peak_memory_bytes", "compilations"}
EXACT_TOLERANCE = 1e-12  # relative; for values that rounding hardly affects, such as the learning rate
EXIT_GRACE_S = 60.0  # seconds in which a replay must exit once it is stopped
Key = tuple[int, str]  # step; column of metrics.jsonl, number of a checkpoint's state, or name of a tensor
Values = dict[Key, Any]
Weights = dict[str, torch.Tensor]


class Kind(NamedTuple):
    """Values that round alike, by a pattern of their names, and what relative differences mean for them. If two replays
    differ by at most `tight`, a run may differ from its replay by 8 times as much, or by `floor`. Beyond `tight`,
    errors have amplified themselves, a second replay says little about the run, and it may differ by `loose`. An audit
    proves nothing if no value of an `essential` kind is tight."""

    name: str
    pattern: str
    floor: float
    tight: float
    loose: float
    essential: bool = True


KINDS = (
    Kind("losses", "loss|sum", 1e-6, 5e-5, 0.05),
    Kind("weights by their update", r"^transformer\.", 1e-4, 1e-3, 0.5),
    Kind("gradients and averages of them", r"grad|\.transformer\.", 1e-4, 1e-3, 1.0, essential=False),
)


class Different(Exception):
    """How a run differs from its replay."""

    code, verdict = 1, "different"


class NotComparable(Exception):
    """Why a run cannot be compared with its replay here, and the way out."""

    code, verdict = ExitCode.NOT_COMPARABLE, "cannot be compared here"


class Interval(NamedTuple):
    """The steps from `first` to `last` between the checkpoints `start` (None: from the run's beginning) and `end`;
    `is_last`: the run has no newer checkpoint."""

    start: Path | None
    end: Path
    first: int
    last: int
    is_last: bool


def interval_to(end: Path, paths: list[Path], repo: str) -> Interval:
    """The interval up to `end`, one of the run's checkpoints `paths`. It starts at the newest earlier one that the run
    went through: a resumed run may have continued from an older one."""

    def parts(path: Path) -> list[dict]:
        if repo:
            fetch(repo, path)
        return state_of(path)["about"]

    end_parts, candidates = parts(end), reversed(paths[: paths.index(end)])
    start = next((path for path in candidates if descends(end_parts, step_of(path), parts(path))), None)
    if repo:
        shutil.copy(end / "metrics.jsonl", end.parent)
    return Interval(start, end, step_of(start) if start else 0, step_of(end), end == paths[-1])


def options_of(interval: Interval, directory: Path, repo: str, flags: list[str]) -> list[str]:
    """The trainer's options: the configuration of the run, and the flags. Data that the run streamed are
    streamed again, into `directory`. Raises NotComparable if the configuration changed within the interval, UserError
    for a path of the run's author that no flag replaces, and Different if two records of the configuration differ."""
    state = state_of(interval.end)
    part = state["about"][-1]
    if part["from_step"] > interval.first:
        step = f"{part['from_step']:,}"
        raise NotComparable(f"settings, code or processes changed at step {step}, of which there is no checkpoint")
    values = {name: copy.deepcopy(value) for name, value in part["config"].items() if name in {*FIELDS, "val_text"}}
    values |= {"precision": part["precision"], "report_to": "none", "push_to_hub": False, "train_hours": 0.0}
    replaced = {flag.partition("=")[0].removeprefix("--") for flag in flags}
    if replaced & {"dataset_name", "train_text"}:
        replaced |= {"dataset_name", "val_data"}
    is_mixture = isinstance(values["dataset_name"], list)
    name_field = "name" if is_mixture else "dataset_name"
    data_states, data_parts = entries_in(state["data"]), entries_in(part["data"])
    start_states = entries_in(state_of(interval.start)["data"]) if interval.start else [{}] * len(data_states)
    for number, entry in enumerate(values["dataset_name"] if is_mixture else [values]):  # changed in place
        if val_text := entry.pop("val_text", ""):
            entry["val_data"] = val_text
        if repo:
            data = values | entry | {"dataset_name": entry.get("train_text") or entry[name_field]}
            check_paths({name: value for name, value in data.items() if name not in replaced}, repo)
        if repo or data_states[number].get("manifest"):
            entry[name_field] = str(directory / f"shards-{number}" / Path(entry[name_field]).name)  # columns' names too
            commit = data_parts[number].get("commit")
            # A stream that resumes has its commit in the checkpoint; for others the data set may have a newer one.
            if commit and not start_states[number].get("manifest") and "dataset_revision" not in replaced:
                entry["dataset_revision"] = commit
    check_config(state["config"], part["config"])
    (recipe := directory / "recipe.yaml").write_text(yaml.safe_dump(values))
    return ["--config", str(recipe), *flags]


def check_paths(config: dict, repo: str) -> None:
    """Raises UserError for a path in a configuration from the Hub: it is one of the author's computer."""
    for field in ("dataset_name", "val_data", "init_from", "tokenizer"):
        path = config.get(field, "")
        if path not in ("", DEFAULTS[field]) and not is_on_hub(str(path)):
            problem = f"{field} {path!r} is a path on the computer of {repo}'s author"
            raise UserError(f"{problem}; name your copy: --flags '--{field} PATH'")


def check_config(config: dict, trained_with: dict) -> None:
    """Raises Different if the configuration that a checkpoint shows is not the one that its part was trained with. A
    field that either lacks has its default."""
    for name in dict.fromkeys([*trained_with, *hyperparameters(trained_with)]):
        default = DEFAULTS.get(name)
        if (value := config.get(name, default)) != (trained_value := trained_with.get(name, default)):
            raise Different(f"the configuration records {name} {value!r}, but training used {trained_value!r}")


def replay(interval: Interval, run: Path, command: list[str]) -> Checkpoint:
    """Trains from the interval's start to its end in the directory `run`. Raises NotComparable if the trainer fails."""
    if interval.start:
        shutil.copytree(interval.start, run / interval.start.name)
    options = {"output_dir": run, "save_steps": interval.last, "milestone_steps": interval.last}
    command = [*command, *(f"--{name}={value}" for name, value in options.items())]
    checkpoint, log = checkpoint_path(run, interval.last), run.with_suffix(".log")
    with log.open("w") as output:
        trainer = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while trainer.poll() is None:
                if checkpoint.exists():
                    lines = read_metrics(run / "metrics.jsonl")
                    if lines and lines[-1]["step"] >= interval.last:
                        break
                time.sleep(0.1)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(trainer.pid, number)
                    trainer.wait(EXIT_GRACE_S)
    if not checkpoint.exists():
        lines = log.read_text().splitlines()
        message = next((line for line in lines if line.startswith("error:")), "it printed no error")
        raise NotComparable(f"the replay ended with exit code {trainer.returncode}; {message}")
    return load_checkpoint(checkpoint)


def values_of(checkpoint: Checkpoint, interval: Interval) -> Values:
    """What a run computed in an interval: the columns of metrics.jsonl, and the values in its last checkpoint."""
    values: Values = {}
    for line in read_metrics(checkpoint.path.parent / "metrics.jsonl"):
        step = line["step"]
        if (step > interval.first or not interval.start) and step <= interval.last:
            lines = values.get((step, "number of lines"), 0)
            values |= {(step, name): v for name, v in line.items() if v is not None and name not in UNREPEATABLE}
            values[step, "number of lines"] = lines + 1
    state, saved_values = checkpoint.state, checkpoint.weights | checkpoint.optimizer_state
    numbers = {name: state[name] for name in ("tokens", "optimizer_steps")} | state["grad_scaler"]
    for name, value in (numbers | state["spike_filter"] | state["metrics"]["running_loss"]).items():
        number = torch.tensor([n or 0.0 for n in value]) if isinstance(value, list) else value
        saved_values[f"the checkpoint's {name}"] = number
    return values | {(interval.last, name): value for name, value in saved_values.items()}


def distance(name: str, run: Any, replay: Any, start: Weights) -> float:
    """The difference of two numbers or tensors, relative to the second or, for a weight, to its update since `start`.
    If that is 0, the result is 0 for equal values and infinite for others."""
    if isinstance(run, torch.Tensor) and isinstance(replay, torch.Tensor) and run.shape == replay.shape:
        delta, scale = run.double() - replay.double(), float((replay - start.get(name, 0)).double().norm())
        # The keys' bias has no effect, and its gradient is nothing but rounding. More than an update, and NaN, stay.
        if start and name.endswith("attn.c_attn.bias") and (keys := delta.view(3, -1)[1]).norm() <= scale:
            keys.zero_()
        difference = float(delta.norm())
    elif isinstance(run, int | float) and isinstance(replay, int | float):
        difference, scale = abs(run - replay), abs(replay)
    else:
        return 0.0 if run is replay or (isinstance(run, str) and run == replay) else math.inf
    try:
        return float(difference / scale) if scale else math.inf if difference else 0.0
    except OverflowError:  # an integer too large for any run to have computed
        return math.inf


def distances(run: Values, replay: Values, start: Weights) -> dict[Key, float]:
    """The distance of each value, in the order of the steps."""
    keys = sorted(run | replay, key=lambda key: key[0])
    return {key: distance(key[1], run.get(key), replay.get(key), start) for key in keys}


def first_difference(run: Values, replay: Values, sizes: dict[Key, float], limits: dict[Key, float]) -> str:
    """A sentence about the first value whose distance from the replay's, in `sizes`, exceeds its limit; "" if there is
    none."""
    for key, size in sizes.items():
        if not size <= limits.get(key, EXACT_TOLERANCE):  # NaN is different
            a, b = (values.get(key, "missing") for values in (run, replay))
            is_tensor = torch.Tensor in (type(a), type(b))
            text = "differs from the replay's" if is_tensor else f"is {a}, and {b} in the replay"
            return f"{key[1]} of step {key[0]:,} {text}"
    return ""


def compare(run: Values, replay: Values, replay_2: Values, start: Weights, first: int) -> tuple[str, list[str]]:
    """A sentence about the first value of a run that differs from the replay's by more than rounding explains, which a
    second replay measures; and how close the others are where rounding is small, and which were not compared."""
    run_distances, replay_distances = distances(run, replay, start), distances(replay_2, replay, start)
    discrete = ("sample", "hellaswag")  # made of tokens and answers, which rounding can change
    limits, tightness = {key: math.inf for key in run.keys() & replay.keys() if key[1].startswith(discrete)}, []
    not_compared = sorted({key[1] for key in limits})
    for kind in KINDS:
        keys = [key for key in replay_distances if re.search(kind.pattern, key[1])]  # in the order of the steps
        steps, largest = [key[0] for key in keys], [*accumulate((replay_distances[key] for key in keys), max)]
        # The largest up to twice as far from `first`: it grows with the steps, in some runs faster.
        rounding = {key: largest[bisect_right(steps, 2 * key[0] - first + 1) - 1] for key in keys}
        # At 0 the second replay has measured nothing.
        tight_keys = {key for key, size in rounding.items() if 0 < size <= kind.tight}
        for key, size in rounding.items():
            limits[key] = 8 * max(size, kind.floor) if key in tight_keys else max(8 * size, kind.loose)
        if tight_keys:
            worst, noise = (max(sizes[key] for key in tight_keys) for sizes in (run_distances, rounding))
            tightness.append(f"{len(tight_keys)} {kind.name} within {worst:.0e}, rounding here is {noise:.0e}")
    tightness += [f"{', '.join(not_compared)} not compared"] if not_compared else []
    return first_difference(run, replay, run_distances, limits), tightness


def check_intact(interval: Interval) -> None:
    """Raises Different if the interval's checkpoints or its lines of metrics.jsonl are not those that the run wrote."""
    for path in filter(None, (interval.start, interval.end)):
        if problems := verify(path):
            raise Different(f"{path} is damaged: {problems[0]}")
    log, digest = interval.end.parent / "metrics.jsonl", state_of(interval.end)["metrics"]["lines_sha256"]
    if sha256_before(log.read_bytes() if log.is_file() else b"", interval.last) != digest:
        raise Different(f"the lines of metrics.jsonl before step {interval.last:,} are not those that the run wrote")


def without_later_values(run: Values, replay: Values, interval: Interval) -> tuple[Values, str]:
    """A run's values without those at the last step that its continuation may have added, and a sentence that names
    these. Raises NotComparable if the run's end was not recorded."""
    if interval.is_last:
        if (interval.last, "number of lines") in replay.keys() - run.keys():
            raise NotComparable("metrics.jsonl has no line for the last step; the same training command writes it")
        return run, ""
    kept = {key: value for key, value in run.items() if key in replay or key[0] != interval.last}
    names = sorted(name for _, name in run.keys() - kept.keys())
    return kept, f", not checked: {', '.join(names)} of step {interval.last:,}" if names else ""


def names_other_data(part: dict, replayed: dict) -> bool:
    """Whether a part of a run records other data than its replay, by checksums and names. Names are not compared if the
    replay read shards without a manifest."""
    texts, replayed_texts = entries_in(part["data"]), entries_in(replayed["data"])
    if len(texts) != len(replayed_texts):
        return True
    names = ["train_text", "dataset_config", "dataset_split"]
    names += ["commit"] if replayed["config"]["streaming"] else []  # shards prepared again may be of a newer one
    for text, replayed_text in zip(texts, replayed_texts, strict=True):
        files = zip(text.get("files", []), replayed_text.get("files", []), strict=False)
        if any(file.get(key) != other.get(key) for file, other in files for key in ("name", "size", "sha256")):
            return True
        if "shards" not in replayed_text and any(text.get(name) != replayed_text.get(name) for name in names):
            return True
    return False


def check_record(run: dict, replay: dict, flags: str) -> None:
    """Raises Different if the trainer state `run`, which the model card shows, differs in step, tokenizer or data from
    that of its replay, which had these flags."""
    if run["step"] != replay["step"]:
        raise Different(f"trainer_state.json records step {run['step']:,}")
    names = ("digest", "end_of_text") if "--tokenizer" in flags else ("digest", "end_of_text", "name")
    if any(run["tokenizer"][name] != replay["tokenizer"][name] for name in names):
        raise Different("the checkpoint records another tokenizer than its replay used")
    is_elsewhere = re.search("dataset_name|dataset_revision|train_text", flags)  # the same shards may have other names
    try:
        for pair in zip(entries_in(run["data"]), entries_in(replay["data"]), strict=True):
            if is_elsewhere:
                pair = (data | {"shards": [["", *shard[1:]] for shard in data["shards"]]} for data in pair)
            check_same_data(*pair, "")
    except (UserError, LookupError, ValueError):
        raise Different("the checkpoint records other shards than it was trained on") from None
    if not is_elsewhere and names_other_data(run["about"][-1], replay["about"][-1]):
        raise Different("the checkpoint records other data than it was trained on")


def audit(interval: Interval, directory: Path, arguments: argparse.Namespace) -> str:
    """Replays an interval in `directory`; returns a sentence on what holds, and how tightly. Raises Different and
    NotComparable."""
    check_intact(interval)
    options = options_of(interval, directory, arguments.repo, arguments.flags)
    command = [*(arguments.launch or [sys.executable]), str(ROOT / "recipe/train.py"), *options]
    checkpoint, replayed = load_checkpoint(interval.end), replay(interval, directory / "replay", command)
    replay_values = values_of(replayed, interval)
    run_values, unchecked = without_later_values(values_of(checkpoint, interval), replay_values, interval)
    parts = [state["about"][-1] for state in (checkpoint.state, replayed.state)]
    run_part, replay_part = ({**part["config"], **part} for part in parts)
    changed = {name for name in CIRCUMSTANCES if run_part.get(name) != replay_part[name]}
    if changed & {"packages", *CODE}:
        unchecked += "; configuration and tokenizer files not compared"
    else:
        run_files, replay_files = (manifest_of(path) for path in (checkpoint.path, replayed.path))
        files = {*files_of(checkpoint.path), *files_of(replayed.path)}  # for transformers
        for name in sorted({path.name for path in files} - {"model.safetensors"}):
            if run_files.get(name) != replay_files.get(name):
                raise Different(f"{name} of step {interval.last:,} differs from the replay's")
    texts = [f"{name} {run_part.get(name)!r} in the run, {replay_part[name]!r} here" for name in sorted(changed)]
    sizes = distances(run_values, replay_values, {})
    difference = first_difference(run_values, replay_values, sizes, dict.fromkeys(sizes, 0.0))
    if difference and not changed and replay_part["deterministic"]:
        raise Different(difference)
    check_record(checkpoint.state, replayed.state, " ".join(arguments.flags))
    if not difference:
        sentence = f"{plural(interval.last - interval.first, 'step')} equal to the bit{unchecked}"
        return f"{sentence} ({'; '.join(texts)})" if texts else sentence
    circumstances = "; ".join(texts) or "this device is not deterministic"
    if changed & CASTS and {run_part["precision"], replay_part["precision"]} != {"fp32"}:
        raise NotComparable(f"half precision rounds differently here ({circumstances}); {WAY_OUT}")
    # A second replay, which adds the same numbers in another order, measures what rounding does here.
    micro = replay_part["micro_batch_size"]
    micro = micro // 2 if micro % 2 == 0 else 1 if micro > 1 else 2
    replayed_2 = replay(interval, directory / "replay-2", [*command, f"--micro_batch_size={micro}"])
    if interval.start:
        start = load_checkpoint(interval.start).weights
    else:
        start = build_model(with_vocabulary(parse_config(options), Processes())).state_dict()
    values_2 = values_of(replayed_2, interval)
    difference, tightness = compare(run_values, replay_values, values_2, start, interval.first)
    if difference:
        raise (NotComparable if changed & CODE else Different)(f"{difference} ({circumstances})")
    if kinds := [k.name for k in KINDS if k.essential and not any(k.name in text for text in tightness)]:
        raise NotComparable(f"two replays here already differ too much in {kinds[0]} ({circumstances}); {WAY_OUT}")
    return f"holds: {'; '.join(tightness)} ({circumstances}){unchecked}"


def _words(text: str) -> list[str]:
    """An argparse type: the words of a command line."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error} in {text}: close the quote, or put a backslash before it") from None


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0 it holds, 1 different, 69 not comparable here."""
    escape_output()
    parser = ArgumentParser(prog="python -m recipe.audit", description=__doc__.partition("\n")[0])
    target = parser.add_mutually_exclusive_group()
    target.add_argument("run", type=Path, nargs="?", help="directory of the run (default: the newest run)")
    target.add_argument("--repo", default="", help="ORG/NAME on the Hub, of a run with --push_to_hub state")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--last", type=int, default=1, metavar="N", help="replay the last N intervals (default: 1)")
    choice.add_argument("--random", type=int, metavar="N", help="replay N intervals, drawn at random")
    launch_help = "command that launches the replay (default: python, one process)"
    parser.add_argument("--launch", type=_words, default=[], help=launch_help)
    flags_help = "flags of recipe/train.py to change: '--dataset_name DIRECTORY'"
    parser.add_argument("--flags", type=_words, default=[], help=flags_help)
    try:
        arguments = parser.parse_args(argv)
        with tempfile.TemporaryDirectory(prefix="audit-") as directory:
            return _main(arguments, Path(directory))
    except (UserError, OSError) as error:
        return fail(error)
    except KeyboardInterrupt:
        print("\nstopped; the run is unchanged", file=sys.stderr)
        return ExitCode.INTERRUPTED


def _main(arguments: argparse.Namespace, directory: Path) -> int:
    repo = arguments.repo
    run = directory / "run" if repo else arguments.run or newest_run()
    number = arguments.last if arguments.random is None else arguments.random
    if number < 1:
        raise UserError("--last and --random take a number of intervals, 1 or more")
    paths = checkpoints_on_the_hub(repo, run) if repo else checkpoints(run)
    if not paths:
        raise UserError(f"{repo or run}: no checkpoint there; name a run, such as runs/shakespeare")
    ends = paths[-number:]
    if arguments.random:
        ends = sorted(random.sample(paths, min(number, len(paths))), key=step_of)
    print(f"audit      {repo or run}: {len(ends)} of {len(paths)} intervals between its checkpoints", flush=True)
    step_on_main = step_of_main(repo, paths) if repo else 0
    codes = set()
    for end in ends:
        interval = interval_to(end, paths, repo)
        try:
            with tempfile.TemporaryDirectory(dir=directory) as interval_dir:
                code, sentence = ExitCode.DONE, audit(interval, Path(interval_dir), arguments)
        except (Different, NotComparable) as error:
            code, sentence = error.code, f"{error.verdict}: {error}"
        # What the run's author has written may not look like another line, here or after a control character.
        sentence = " ".join(redact(sentence).split())
        print(f"step {interval.first:,} to {interval.last:,}: {sentence}", flush=True)
        codes.add(code)
    if repo and step_on_main is None:
        print("main: cannot be compared: no branch step-... has the same model", flush=True)
        codes.add(ExitCode.NOT_COMPARABLE)
    elif step_on_main:
        note = "" if step_on_main in {step_of(end) for end in ends} else ", which was not replayed"
        print(f"main: the model of step {step_on_main:,}{note}", flush=True)
    return min(codes - {ExitCode.DONE}, default=ExitCode.DONE)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: stop the replay, delete its files
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
