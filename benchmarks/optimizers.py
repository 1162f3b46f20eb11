"""Command: measures how many tokens Muon needs to reach AdamW's validation loss, with plain GPT-2.

    python -m benchmarks optimizers --dataset_name 'books/*.jsonl' --tokenizer own-tokenizer

Both optimizers have the same schedule, and both are tuned: from the size's starting values, each searched field moves
by one step (a rate by a factor of two) as long as the loss falls by more than MIN_GAIN, until no neighbor is better.
AdamW's runs have all steps, Muon's half of them, since that is about as many as it needs. The two best settings are
trained with every seed, Muon's with more or fewer steps until AdamW's loss lies between those of two lengths.

Each run is recipe/train.py itself. OUT/optimizers.json holds all finished runs, and no run is repeated: an interrupted
command continues where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks import report
from benchmarks.runs import train_to_end
from recipe.config import QUIET
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ArgumentParser, ExitCode, UserError

MIN_GAIN = 0.005  # nats per token: a smaller difference is noise (about the standard deviation over seeds)
LENGTHS = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)  # of Muon's runs, as fractions of AdamW's steps
TUNING_LENGTH = 0.5  # of the runs that tune Muon
Fields = dict[str, float]
Curve = list[tuple[int, float]]  # tokens, validation loss


@dataclass(frozen=True)
class Size:
    """A model, the length of its runs, and how its optimizers are tuned: an entry of optimizers.yaml."""

    recipe: dict
    steps: int
    start: dict[str, Fields]
    search: dict[str, dict[str, list[float]]]
    seeds: Sequence[int] = (1, 2)


SIZES = {
    name: Size(**fields) for name, fields in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
SCHEDULE = {"lr_scheduler_type": "wsd", "decay_fraction": 0.7, "weight_decay": 0.1}


class TimeUp(Exception):
    """A run could not finish in time."""


class Runs:
    """Runs of one size. Each is trained once; its curve goes into `results`, which is then written to `path`."""

    def __init__(self, name: str, arguments: argparse.Namespace, results: dict, path: Path, deadline: float):
        """`name` is the size's; `arguments` are the command's; `deadline` is in time.monotonic's seconds."""
        self.name, self.size, self.results, self._path = name, SIZES[name], results, path
        self._directory, self._deadline = Path(arguments.runs), deadline

    def curve(self, optimizer: str, fields: Fields, seed: int, share: float) -> Curve:
        """Validation losses of a run with this fraction of the steps. Raises TimeUp."""
        steps = round(share * self.size.steps)
        values = "-".join(f"{name}={value:g}" for name, value in fields.items())
        name = f"{self.name}-{optimizer}-{values}-seed={seed}-steps={steps}"
        if name not in self.results["runs"]:
            directory = self._directory / name
            self._train(optimizer, fields, {"seed": seed, "max_steps": steps, "output_dir": directory})
            lines = read_metrics(directory / "metrics.jsonl")
            losses = [(line["tokens"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
            self.results["runs"][name] = losses
            report.write(self.results, self._path)
            print(f"{name}: {losses[-1][1]:.4f} after {losses[-1][0]:,} tokens", flush=True)
        return self.results["runs"][name]

    def final(self, optimizer: str, fields: Fields) -> float:
        """The final loss of a run with the first seed and the length at which the optimizer is tuned."""
        share = TUNING_LENGTH if optimizer == "muon" else 1.0
        return mean_end([self.curve(optimizer, fields, self.size.seeds[0], share)])

    def _train(self, optimizer: str, fields: Fields, run: dict) -> None:
        if (seconds_left := self._deadline - time.monotonic()) < 60:
            raise TimeUp
        steps, warmup = run["max_steps"], round(run["max_steps"] * fields["warmup"])
        flags = QUIET | self.size.recipe | SCHEDULE | self.results["data"] | fields | run
        flags |= {"optim": optimizer, "warmup_steps": warmup}
        flags |= {"config": "recipe/configs/gpt2.yaml", "streaming": False, "save_total_limit": 1}
        flags |= dict.fromkeys(("save_steps", "eval_steps"), max(1, steps // 5)) | {"max_hours": seconds_left / 3600}
        del flags["warmup"]
        if train_to_end(flags) == ExitCode.RUN_AGAIN:
            raise TimeUp


def mean_end(curves: list[Curve]) -> float:
    """The final loss, averaged over the seeds."""
    return statistics.mean(curve[-1][1] for curve in curves)


def tune(runs: Runs, optimizer: str) -> Fields:
    """Searches for fields from which no single step lowers the loss by more than MIN_GAIN."""
    fields = runs.size.start[optimizer]
    improved = True
    while improved:
        improved = False
        for name, values in runs.size.search.get(optimizer, {}).items():
            for step in (1, -1):
                while (value := neighbor(fields[name], values, step)) is not None:
                    if runs.final(optimizer, fields | {name: value}) > runs.final(optimizer, fields) - MIN_GAIN:
                        break
                    fields, improved = fields | {name: value}, True
    return fields


def neighbor(value: float, values: Sequence[float], step: int) -> float | None:
    """The value one step (1 or -1) from this one, a factor of two without `values`; None beyond their end."""
    if not values:
        return value * 2.0**step
    index = values.index(value) + step
    return values[index] if 0 <= index < len(values) else None


def share_of_tokens(ends: dict[float, float], loss: float) -> float | None:
    """The share of the tokens that reaches this loss, given `ends` (share -> final loss): interpolated linearly in the
    logarithm of the share between the two neighbors. None if the loss lies outside of all."""
    for (shorter, high), (longer, low) in itertools.pairwise(sorted(ends.items())):
        if low <= loss <= high:
            return shorter * (longer / shorter) ** ((high - loss) / (high - low))
    return None


def compare(runs: Runs) -> dict:
    """Tunes both optimizers and determines the share of AdamW's tokens that Muon needs."""
    best = {optimizer: tune(runs, optimizer) for optimizer in runs.size.start}

    def curves_of_seeds(optimizer: str, length: float) -> list[Curve]:
        return [runs.curve(optimizer, best[optimizer], seed, length) for seed in runs.size.seeds]

    curves = {"AdamW": curves_of_seeds("adamw", 1.0)}
    loss, end_losses, share = mean_end(curves["AdamW"]), {}, None
    length: float | None = TUNING_LENGTH
    while length and not share:
        seed_curves = curves_of_seeds("muon", length)
        curves[f"Muon, {length:g} of the tokens"], end_losses[length] = seed_curves, mean_end(seed_curves)
        share = share_of_tokens(end_losses, loss)
        length = neighbor(length, LENGTHS, -1 if end_losses[length] <= loss else 1)
    result = {"size": runs.name, "steps": runs.size.steps, "best": best, "curves": curves, "share_of_tokens": share}
    if len(runs.size.seeds) > 1:  # the standard deviation of the final loss over the seeds
        variances = [statistics.variance(curve[-1][1] for curve in seed_curves) for seed_curves in curves.values()]
        result["seed_noise"] = statistics.mean(variances) ** 0.5
    return result


def lines(result: dict) -> list[str]:
    """The lines to print for a size's result."""
    size, share = f"{result['size']}, {result['steps']:,} steps", result["share_of_tokens"]
    sentences = [f"{size}: {optimizer} {fields}" for optimizer, fields in result["best"].items()]
    for name, curves in result["curves"].items():
        sentences.append(f"{size}: {name}: {' and '.join(f'{curve[-1][1]:.3f}' for curve in curves)}")
    needed_share = f"{share:.2f}" if share else "none of the tried shares"
    noise = f"; the loss varies over seeds by {result['seed_noise']:.3f}" if "seed_noise" in result else ""
    return [*sentences, f"{size}: Muon reaches AdamW's loss with {needed_share} of its tokens{noise}"]


def main(argv: list[str]) -> int:
    """Tunes and compares the optimizers at every size, and writes optimizers.json; returns the exit code."""
    parser = ArgumentParser(prog="python -m benchmarks optimizers", allow_abbrev=False)
    parser.add_argument("--dataset_name", default="recipe/data/tiny_shakespeare.txt", help="text or shards")
    parser.add_argument("--tokenizer", default="gpt2", help="gpt2 or a directory (docs/data.md trains one)")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["4x128"], help="layers x width; gpt2: 124M")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after this time; the same command continues")
    parser.add_argument("--runs", default="runs/optimizers", help="directory of the runs")
    parser.add_argument("--out", default="bench", help="directory of the results, including those to continue from")
    arguments = parser.parse_args(argv)
    path, deadline = Path(arguments.out) / "optimizers.json", time.monotonic() + 60 * arguments.minutes
    data = {"dataset_name": arguments.dataset_name, "tokenizer": arguments.tokenizer}
    earlier = json.loads(path.read_text()) if path.exists() else {"data": data, "runs": {}}
    if earlier.get("data") != data:
        raise UserError(f"{path} has runs on other data, {earlier.get('data')}; give another --out and --runs")
    size_results: list[dict] = []
    results = report.circumstances() | {"data": data, "sizes": size_results, "runs": earlier["runs"]}
    for size in arguments.sizes:
        try:
            size_results.append(compare(Runs(size, arguments, results, path, deadline)))
        except TimeUp:
            print(f"time is up; the same command continues from {path} and {arguments.runs}")
            return ExitCode.RUN_AGAIN
        report.write(results, path)
    print("\n" + "\n".join(line for result in size_results for line in lines(result)))
    return 0
