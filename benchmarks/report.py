"""Results as JSON files and as bar charts, and those of several commands as one.

    python -m benchmarks merge first/*.json second/*.json --out docs/results --name h200

Files of the same name become NAME-<file>: the rows of all, and of two of the same row the later one that has a result.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

import torch
import transformers

from recipe.engine import device as hardware
from recipe.utils.errors import UserError

KEPT, ASIDE = "#2f6f9f", "#c9d3da"  # bars: those that count, and those shown beside them
# Rows of files that differ in one of these mean different things.
_SAME = ("device", "torch", "model", "sequence_length", "micro_batch_size", "precision")


def circumstances() -> dict:
    """What figures need beside them to mean anything."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else str(accelerator).upper()
    return {
        "device": gpu if accelerator else hardware.processor(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": None if accelerator else torch.get_num_threads(),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


def write(results: dict, path: Path) -> None:
    """Writes the results as JSON. Raises ValueError for a number that is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def scoreboard_chart(results: dict, path: Path) -> None:
    """Each row's speed over the first row."""
    bars = [
        (r["name"], r["total"], None, f"{r['total']:.2f}x, {r['tokens_per_second']:,.0f} tokens/s", r["kept"])
        for r in results["rows"]
        if r["tokens_per_second"]
    ]
    title = f"{results['sequence_length']} tokens a sequence"
    label = "speed over the first row, each row on top of those above it"
    _bar_chart(bars, title, f"{label} (gray: measured, but not part of the rows below)", results, path)


def peers_chart(results: dict, path: Path) -> None:
    """How many times as fast ours is as each peer, with the 95 % interval."""
    bars = [
        (
            ", ".join(filter(None, (r["name"], r["environment"]))),
            r["ratio"],
            (r["low"], r["high"]),
            f"{r['ratio']:.2f}x",
            r["environment"] != "our allocator",
        )
        for r in results["rows"]
        if r["ratio"]
    ]
    label = "ratio of tokens a second for the same work, measured in turns (median, 95 % interval)"
    if not all(bar[-1] for bar in bars):
        label += "; gray: with our allocator settings"
    _bar_chart(bars, "recipe/train.py is so many times as fast as", label, results, path)


def pyplot():
    """matplotlib's pyplot; None, with a message, where it is missing: `merge` draws the JSON elsewhere."""
    try:
        import matplotlib
    except ImportError:
        print("no chart, since matplotlib is not installed")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _bar_chart(bars: list[tuple], title: str, label: str, results: dict, path: Path) -> None:
    """`bars`: name, value, interval or None, text, whether it counts. Nothing where nothing could be measured."""
    if not bars or not (plt := pyplot()):
        return
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.36 * len(bars)), dpi=150)
    for y, (_, value, interval, text, counts) in enumerate(bars):
        low, high = interval or (value, value)
        spread = [[value - low], [high - value]] if high > low else None
        axes.barh(y, value, xerr=spread, color=KEPT if counts else ASIDE, height=0.72, capsize=2)
        axes.text(high, y, f"  {text}", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_xlim(0, 1.35 * max(value for _, value, *_ in bars))
    axes.invert_yaxis()
    axes.set_title(f"GPT-2 {results['model']['parameters'] / 1e6:,.0f}M: {title}", loc="left", fontsize=11)
    axes.set_xlabel(f"{label}\n{results['device']}, torch {results['torch']}", fontsize=8.5)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def merged(paths: list[Path]) -> dict:
    """One result of several. Raises UserError where they are of different devices, versions or models."""
    results, rows = [json.loads(path.read_text()) for path in paths], {}
    for path, result in zip(paths, results, strict=True):
        if differs := [field for field in _SAME if result.get(field) != results[0].get(field)]:
            raise UserError(f"{path} and {paths[0]} differ in {', '.join(differs)}; give a --name to each")
        for row in result.get("rows", []):
            key = (row["name"], row.get("environment"))
            measured = row.get("ratio") or row.get("tokens_per_second") or row.get("outcome") in ("passed", "failed")
            if measured or key not in rows:
                rows[key] = row
    return results[-1] | ({"rows": list(rows.values())} if rows else {})


def main(argv: list[str]) -> int:
    """Writes the merged results with their charts, and returns the exit code."""
    from benchmarks import optimizers

    charts = {"peers": peers_chart, "scoreboard": scoreboard_chart, "optimizers": optimizers.picture}
    parser = argparse.ArgumentParser(prog="python -m benchmarks merge", allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, help="peers.json, gpu_tests.json, ... of any directories")
    parser.add_argument("--name", default="gpu", help="what the merged files' names begin with")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="directory of the results")
    arguments = parser.parse_args(argv)
    try:
        for stem in dict.fromkeys(path.stem for path in arguments.files):
            result = merged([path for path in arguments.files if path.stem == stem])
            target = arguments.out / f"{arguments.name}-{stem}.json"
            write(result, target)
            print(target)
            if stem in charts:
                charts[stem](result, target.with_suffix(".png"))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
