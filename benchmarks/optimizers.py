"""Command: how many tokens Muon needs for AdamW's validation loss, with plain GPT-2.

    python -m benchmarks optimizers --dataset_name 'books/*.jsonl'

AdamW has a cosine, as published; Muon has wsd. Both learning rates are swept with one seed, on until the best is not
the lowest or the highest that was tried; the best runs again with the other seeds, and that of Muon also with half the
steps. Each run is recipe/train.py itself in a directory of its own under --runs, so that a command that was interrupted
goes on where it was. Writes optimizers.json and optimizers.png.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from recipe.config import ROOT
from recipe.monitor.metrics import read_metrics
from recipe.utils.errors import ExitCode, UserError


@dataclass(frozen=True)
class Size:
    """A model and its data, how long it trains, and what is tried: `rates` are learning_rate for adamw,
    muon_learning_rate for muon, beside which AdamW moves the embeddings at `beside_muon`."""

    recipe: dict
    steps: int
    warmup: dict[str, float]  # share of the steps
    rates: dict[str, tuple[float, ...]]
    beside_muon: float
    seeds: tuple[int, ...]


def _small(layers: int, width: int, steps: int) -> Size:
    model = {"n_layer": layers, "n_head": width // 32, "n_embd": width, "n_positions": 128}
    batch = {"sequence_length": 128, "total_batch_tokens": 1024, "micro_batch_size": 8}
    return Size(
        model | batch | {"eval_tokens": 32768, "precision": "fp32"},
        steps,
        # At these lengths AdamW alone needs a long warm-up (docs/log.md); beside Muon it moves only the embeddings.
        {"adamw": 1 / 3, "muon": 1 / 15},
        {"adamw": (1.5e-3, 3e-3, 6e-3), "muon": (0.01, 0.02, 0.04)},
        3e-3,
        (1, 2),
    )


SIZES = {
    "2x32": _small(2, 32, 480),
    "2x64": _small(2, 64, 480),
    "4x128": _small(4, 128, 960),
    # For a GPU: 42 M tokens a run. The rates are llm.c's and modded-nanogpt's.
    "gpt2": Size(
        {"config": "gpt2", "total_batch_tokens": 65536, "eval_tokens": 327680, "milestone_steps": 0},
        640,
        {"adamw": 0.1, "muon": 0.05},
        {"adamw": (6e-4, 1.8e-3), "muon": (0.02,)},
        1.8e-3,
        (1,),
    ),
}
OPTIMIZERS = {
    "adamw": {"optim": "adamw", "lr_scheduler_type": "cosine"},
    "muon": {"optim": "muon", "lr_scheduler_type": "wsd", "decay_fraction": 0.4},
}


class TimeUp(Exception):
    """A run could not be finished in time."""


class Runs:
    """Runs of one size on one data set; each is made once, and read back afterwards."""

    def __init__(self, size: str, dataset_name: str, directory: Path, ends: float = math.inf):
        """`ends`: when the runs should stop, by time.monotonic()."""
        self.name, self.size, self.dataset_name, self.directory = size, SIZES[size], dataset_name, directory
        self.ends = ends

    def curve(self, optimizer: str, rate: float, seed: int, share: float = 1.0) -> dict[int, float]:
        """Tokens -> validation loss of a run with this share of the steps. Raises TimeUp."""
        steps = round(share * self.size.steps)
        run = self.directory / f"{self.name}-{optimizer}-{rate:g}-seed{seed}-{steps}"
        fields = self.size.recipe | OPTIMIZERS[optimizer] | {"learning_rate": rate}
        if optimizer == "muon":
            fields |= {"muon_learning_rate": rate, "learning_rate": self.size.beside_muon}
        fields |= {"weight_decay": 0.1, "seed": seed}
        fields |= {"max_steps": steps, "warmup_steps": round(steps * self.size.warmup[optimizer])}
        fields |= {"save_total_limit": 1, "save_steps": 0, "eval_steps": steps // 12, "logging_steps": 40}
        fields |= {"dataset_name": self.dataset_name, "output_dir": run, "run_name": run.name}
        lines = read_metrics(run / "metrics.jsonl")
        if not lines or lines[-1]["step"] != steps or lines[-1].get("val_loss") is None:
            self._train(fields)
            lines = read_metrics(run / "metrics.jsonl")
        found = {line["tokens"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
        length = f"{max(found):>11,} tokens"
        print(f"{self.name:<6} {optimizer:<6} {rate:<7g} seed {seed}  {length}  {final(found):.4f}", flush=True)
        return found

    def _train(self, fields: dict) -> None:
        if math.isfinite(self.ends):
            if (left := self.ends - time.monotonic()) < 60:
                raise TimeUp
            fields = fields | {"max_hours": left / 3600}
        command = [sys.executable, ROOT / "recipe/train.py", *(f"--{k}={v}" for k, v in fields.items())]
        code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if code == ExitCode.RUN_AGAIN:
            raise TimeUp
        if code:
            raise UserError(f"recipe/train.py ended with exit code {code}; see its message above")


def final(curve: dict[int, float]) -> float:
    """The loss of a curve {step: loss} at its last step."""
    return curve[max(curve)]


def tokens_to_reach(curve: dict[int, float], loss: float) -> float | None:
    """Tokens after which the validation loss was this for the first time, between two validations by a straight line;
    None where it never was. A run that ended there would have decayed by then, so it would need fewer."""
    for (t0, l0), (t1, l1) in itertools.pairwise(sorted(curve.items())):
        if l1 <= loss:
            return t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


def sweep(runs: Runs, optimizer: str) -> dict[float, dict[int, float]]:
    """Learning rate -> curve with the first seed: of the size's rates and, where those are three or more, of twice the
    highest or half the lowest one as long as that is the best."""
    rates, seed = runs.size.rates[optimizer], runs.size.seeds[0]
    tried = {rate: runs.curve(optimizer, rate, seed) for rate in rates}
    while len(rates) > 2:
        best = min(tried, key=lambda rate: final(tried[rate]))
        if min(tried) < best < max(tried):
            break
        further = best * 2 if best == max(tried) else best / 2
        tried[further] = runs.curve(optimizer, further, seed)
    return dict(sorted(tried.items()))


def compare(runs: Runs) -> dict:
    """Sweeps both learning rates, repeats the best with every seed, and compares each pair of seeds."""
    seeds, best, swept, curves = runs.size.seeds, {}, [], {}
    for optimizer in runs.size.rates:
        tried = sweep(runs, optimizer)
        ends = {rate: final(curve) for rate, curve in tried.items()}
        best[optimizer] = min(ends, key=ends.get)
        swept += [{"optimizer": optimizer, "learning_rate": rate, "val_loss": end} for rate, end in ends.items()]
        again = [runs.curve(optimizer, best[optimizer], seed) for seed in seeds[1:]]
        curves[optimizer] = [tried[best[optimizer]], *again]
    curves["muon, half"] = [runs.curve("muon", best["muon"], seed, 0.5) for seed in seeds]
    shares = []
    for baseline, muon in itertools.product(curves["adamw"], curves["muon"]):
        reached = tokens_to_reach(muon, final(baseline))
        shares.append(reached and reached / max(baseline))
    return {
        "size": runs.name,
        "sweep": swept,
        "best": best,
        "curves": {name: [list(curve.items()) for curve in found] for name, found in curves.items()},
        "final": {name: [final(curve) for curve in found] for name, found in curves.items()},
        "share_of_tokens": shares,
    }


def line(r: dict) -> str:
    """A size's result."""
    ends = {name: " and ".join(f"{loss:.3f}" for loss in found) for name, found in r["final"].items()}
    best = ", ".join(f"{name} at {rate:g}: {ends[name]}" for name, rate in r["best"].items())
    shares = r["share_of_tokens"]
    share = "not reached" if None in shares else f"{statistics.median(shares):.2f} of its tokens"
    return f"{r['size']:<6} {best}, with half the tokens {ends['muon, half']}; Muon has AdamW's loss at {share}"


def picture(results: dict, path: Path) -> None:
    """Validation loss against tokens, one panel a size; a line a seed."""
    if not (plt := report.pyplot()):
        return
    sizes = results["sizes"]
    figure, panels = plt.subplots(1, len(sizes), figsize=(5 * len(sizes), 4), dpi=150, squeeze=False)
    colors = {"adamw": "#8a99a5", "muon": "#2f6f9f", "muon, half": "#d98032"}
    names = {"adamw": "AdamW, cosine", "muon": "Muon, wsd", "muon, half": "Muon, wsd, half the tokens"}
    for axes, r in zip(panels[0], sizes, strict=True):
        for name, found in r["curves"].items():
            for at, curve in enumerate(found):
                tokens, losses = zip(*curve, strict=True)
                axes.plot([t / 1e6 for t in tokens], losses, color=colors[name], label=names[name] if not at else None)
        low = min(loss for found in r["final"].values() for loss in found)
        axes.set_ylim(low - 0.1, low + 1.5)
        axes.set_title(f"GPT-2, {r['size'].replace('x', ' layers x ')}", loc="left", fontsize=11)
        axes.set_xlabel("million tokens", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("validation loss, nats a token", fontsize=9)
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str]) -> int:
    """Trains every size with each optimizer, and writes optimizers.json and optimizers.png; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks optimizers", allow_abbrev=False)
    parser.add_argument("--dataset_name", default="recipe/data/tiny_shakespeare.txt", help="text, or shards")
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=["2x32", "2x64"], help="layers x width; gpt2: 124M"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop then; the same command goes on")
    parser.add_argument("--runs", default="runs/optimizers", help="directory of the runs")
    parser.add_argument("--out", default="bench", help="directory of the results")
    arguments = parser.parse_args(argv)
    out, ends = Path(arguments.out), time.monotonic() + 60 * arguments.minutes
    results = report.circumstances() | {"sizes": []}
    for size in arguments.sizes:
        try:
            results["sizes"].append(compare(Runs(size, arguments.dataset_name, Path(arguments.runs), ends)))
        except TimeUp:
            print(f"the time is up; the same command goes on with what is in {arguments.runs}")
            return ExitCode.RUN_AGAIN
        report.write(results, out / "optimizers.json")
        picture(results, out / "optimizers.png")
    print("\n" + "\n".join(map(line, results["sizes"])))
    return 0
