"""Command: how many tokens Muon needs for AdamW's validation loss, at small sizes of plain GPT-2.

    python -m benchmarks optimizers --dataset_name 'books/*.jsonl'

Both learning rates are swept with one seed; the best of each runs again with a second one, and Muon also with half the
steps. Each run is recipe/train.py itself in a directory of its own under --out, so that an interrupted command goes on
where it was. Writes optimizers.json and optimizers.png.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import report
from recipe.config import ROOT
from recipe.monitor.metrics import read_metrics

SIZES = {  # of a run: the model, and its length
    "2x32": {"n_layer": 2, "n_head": 2, "n_embd": 32, "max_steps": 480},
    "2x64": {"n_layer": 2, "n_head": 2, "n_embd": 64, "max_steps": 480},
    "4x128": {"n_layer": 4, "n_head": 4, "n_embd": 128, "max_steps": 960},
}
SHARED = {
    "n_positions": 128,
    "sequence_length": 128,
    "total_batch_tokens": 1024,
    "micro_batch_size": 8,
    "eval_tokens": 32768,
    "precision": "fp32",
    "save_total_limit": 1,
    "logging_steps": 40,
}
SEEDS = (1, 2)
SWEPT = {  # what differs between the two, and the learning rates of the sweep
    "adamw": ("learning_rate", (1.5e-3, 3e-3, 6e-3), {"lr_scheduler_type": "cosine"}),
    "muon": (
        "muon_learning_rate",
        (0.01, 0.02, 0.04),
        {"optim": "muon", "learning_rate": 3e-3, "lr_scheduler_type": "wsd", "decay_fraction": 0.4},
    ),
}


class Runs:
    """Runs of one size on one data set; each is made once, and read back afterwards."""

    def __init__(self, size: str, dataset_name: str, out: Path):
        self.size, self.dataset_name, self.out = size, dataset_name, out

    def curve(self, optimizer: str, lr: float, seed: int, share: float = 1.0) -> dict[int, float]:
        """Tokens -> validation loss of a run with this share of the steps."""
        rate, _, fields = SWEPT[optimizer]
        steps = round(share * SIZES[self.size]["max_steps"])
        directory = self.out / f"{self.size}-{optimizer}-{lr:g}-seed{seed}-{steps}"
        fields = SHARED | SIZES[self.size] | fields | {rate: lr, "seed": seed, "max_steps": steps}
        # AdamW alone needs a long warm-up at these lengths (docs/log.md); beside Muon it moves only the embeddings.
        fields |= {"warmup_steps": steps // 3 if optimizer == "adamw" else steps // 15}
        fields |= {"eval_steps": steps // 12, "save_steps": 0}
        fields |= {"dataset_name": self.dataset_name, "output_dir": directory, "run_name": directory.name}
        lines = read_metrics(directory / "metrics.jsonl")
        if not lines or lines[-1]["step"] != steps or lines[-1].get("val_loss") is None:
            command = [sys.executable, ROOT / "recipe/train.py", *(f"--{k}={v}" for k, v in fields.items())]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            lines = read_metrics(directory / "metrics.jsonl")
        found = {line["tokens"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
        length = f"{max(found):>9,} tokens"
        print(f"{self.size:<6} {optimizer:<6} {lr:<7g} seed {seed}  {length}  {found[max(found)]:.4f}", flush=True)
        return found


def final(curve: dict[int, float]) -> float:
    return curve[max(curve)]


def tokens_to_reach(curve: dict[int, float], loss: float) -> float | None:
    """Tokens after which the validation loss was this for the first time, between two validations by a straight line;
    None where it never was. A run that ended there would have decayed by then, so it would need fewer."""
    for (t0, l0), (t1, l1) in itertools.pairwise(sorted(curve.items())):
        if l1 <= loss:
            return t0 + (t1 - t0) * (l0 - loss) / (l0 - l1)
    return None


def compare(runs: Runs) -> dict:
    """Sweeps both learning rates, repeats the best with every seed, and compares each pair of seeds."""
    best, swept, curves = {}, [], {}
    for optimizer, (_, rates, _) in SWEPT.items():
        ends = {lr: final(runs.curve(optimizer, lr, SEEDS[0])) for lr in rates}
        best[optimizer] = min(ends, key=ends.get)
        swept += [{"optimizer": optimizer, "learning_rate": lr, "val_loss": end} for lr, end in ends.items()]
        curves[optimizer] = [runs.curve(optimizer, best[optimizer], seed) for seed in SEEDS]
    halves = [runs.curve("muon", best["muon"], seed, 0.5) for seed in SEEDS]
    ratios = []
    for baseline, muon in itertools.product(curves["adamw"], curves["muon"]):
        reached = tokens_to_reach(muon, final(baseline))
        ratios.append(reached and reached / max(baseline))
    return {
        "size": runs.size,
        "sweep": swept,
        "best": best,
        "curves": {name: [list(c.items()) for c in found] for name, found in (curves | {"muon, half": halves}).items()},
        "final": {name: [final(c) for c in found] for name, found in (curves | {"muon, half": halves}).items()},
        "share_of_tokens": ratios,
    }


def lines(results: list[dict]) -> list[str]:
    """The table, as Markdown."""
    out = [
        "| model | AdamW: learning rate, loss | Muon: learning rate, loss | Muon, half the steps | share of AdamW's "
        "tokens at which Muon has its loss |",
        "|---|---|---|---|---|",
    ]
    for r in results:
        ends = {name: " and ".join(f"{loss:.3f}" for loss in found) for name, found in r["final"].items()}
        shares = [s for s in r["share_of_tokens"] if s]
        whole = len(shares) == len(r["share_of_tokens"])
        share = f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})" if whole else "not reached"
        a, m = r["best"]["adamw"], r["best"]["muon"]
        out.append(f"| {r['size']} | {a:g}: {ends['adamw']} | {m:g}: {ends['muon']} | {ends['muon, half']} | {share} |")
    return out


def picture(results: list[dict], path: Path) -> None:
    """Validation loss against tokens, one panel a size; a line a seed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(5 * len(results), 4), dpi=150, squeeze=False)
    colors = {"adamw": "#8a99a5", "muon": "#2f6f9f", "muon, half": "#d98032"}
    names = {"adamw": "AdamW, cosine", "muon": "Muon, wsd", "muon, half": "Muon, wsd, half the steps"}
    for axes, r in zip(panels[0], results, strict=True):
        for name, found in r["curves"].items():
            for at, curve in enumerate(found):
                tokens, losses = zip(*curve, strict=True)
                axes.plot([t / 1e6 for t in tokens], losses, color=colors[name], label=names[name] if not at else None)
        low = min(loss for found in r["final"].values() for loss in found)
        axes.set_ylim(low - 0.1, low + 1.5)
        axes.set_title(f"GPT-2, {r['size'].replace('x', ' layers x ')} wide", loc="left", fontsize=11)
        axes.set_xlabel("million tokens", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("validation loss, nats a token", fontsize=9)
    panels[0][0].legend(frameon=False, fontsize=9)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "--dataset_name", default="recipe/data/tiny_shakespeare.txt", help="text, or a directory of shards"
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="layers x width")
    parser.add_argument("--out", default="bench/optimizers", help="directory of the runs and the results")
    arguments = parser.parse_args(argv)
    out, results = Path(arguments.out), []
    for size in arguments.sizes:
        results.append(compare(Runs(size, arguments.dataset_name, out)))
        report.write(report.circumstances() | {"shared": SHARED, "sizes": results}, out / "optimizers.json")
        picture(results, out / "optimizers.png")
    print("\n" + "\n".join(lines(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
