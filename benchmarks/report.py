"""Results as JSON files and as bar charts."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

import torch
import transformers

from recipe.engine import device as hardware

KEPT, ASIDE = "#2f6f9f", "#c9d3da"  # bars: those that count, and those shown beside them


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
    rows = [r for r in results["rows"] if r["tokens_per_second"]]
    label = "speed over the first row, each row on top of those above it"
    if not all(r["kept"] for r in rows):
        label += " (gray: measured, but not part of the rows below)"
    bars = [
        {
            "name": r["name"],
            "value": r["total"],
            "text": f"{r['total']:.2f}x, {r['tokens_per_second']:,.0f} tokens/s",
            "color": KEPT if r["kept"] else ASIDE,
        }
        for r in rows
    ]
    size = f"GPT-2 {results['model']['parameters'] / 1e6:,.0f}M"
    _bar_chart(bars, f"{size}, {results['sequence_length']} tokens a sequence", label, results, path)


def peers_chart(results: dict, path: Path) -> None:
    """How many times as fast ours is as each peer, with the 95 % interval."""
    rows = [r for r in results["rows"] if r["ratio"]]
    label = "ratio of tokens a second for the same work, measured in turns (median, 95 % interval)"
    if any(r["environment"] == "our allocator" for r in rows):
        label += "; gray: with our allocator settings"
    bars = [
        {
            "name": ", ".join(filter(None, (r["name"], r["environment"]))),
            "value": r["ratio"],
            "interval": (r["low"], r["high"]),
            "text": f"{r['ratio']:.2f}x",
            "color": ASIDE if r["environment"] == "our allocator" else KEPT,
        }
        for r in rows
    ]
    size = f"GPT-2 {results['model']['parameters'] / 1e6:,.0f}M"
    _bar_chart(bars, f"{size}: recipe/train.py is so many times as fast as", label, results, path)


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


def _bar_chart(bars: list[dict], title: str, label: str, results: dict, path: Path) -> None:
    """Nothing where nothing could be measured."""
    if not bars:
        return
    if not (plt := pyplot()):
        return
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.36 * len(bars)), dpi=150)
    for y, bar in enumerate(bars):
        low, high = bar.get("interval", (bar["value"], bar["value"]))
        spread = [[bar["value"] - low], [high - bar["value"]]] if high > low else None
        axes.barh(y, bar["value"], xerr=spread, color=bar["color"], height=0.72, ecolor="#222222", capsize=2)
        axes.text(high, y, f"  {bar['text']}", va="center", fontsize=9, color="#222222")
    axes.set_yticks(range(len(bars)), [bar["name"] for bar in bars])
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_xlim(0, 1.35 * max(bar["value"] for bar in bars))
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(f"{label}\n{results['device']}, torch {results['torch']}", fontsize=8.5)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
