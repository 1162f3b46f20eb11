"""Results as a JSON file and as pictures."""

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

FLOPS_FORMULA = "6 N + 12 L D T a token (PaLM, appendix B), N without position embeddings, the true vocabulary"


def circumstances() -> dict:
    """What figures need beside them to mean anything."""
    return {
        "device": hardware.device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "threads": None if torch.accelerator.is_available() else torch.get_num_threads(),
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    }


def write(results: dict, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def bars(results: dict, path: Path) -> None:
    """The scoreboard as a bar chart: each row's speed over the first row."""
    rows = [r for r in results["rows"] if r["tokens_per_second"]]
    if not rows:
        return
    plt, figure, axes = _figure(len(rows))
    totals = [r["total"] for r in rows]
    axes.barh(range(len(rows)), totals, color=["#2f6f9f" if r["kept"] else "#c9d3da" for r in rows], height=0.72)
    for y, r in enumerate(rows):
        label = f" {r['total']:.2f}x, {r['tokens_per_second']:,.0f} tokens/s"
        axes.text(r["total"], y, label, va="center", fontsize=9, color="#222222")
    axes.set_yticks(range(len(rows)), [r["name"] for r in rows])
    axes.set_xlim(0, 1.35 * max(totals))
    m = results["model"]
    title = f"GPT-2 {m['parameters'] / 1e6:,.0f}M, {results['sequence_length']} tokens a sequence"
    label = "speed over the first row, each row on top of those above it"
    if not all(r["kept"] for r in rows):
        label += " (gray: measured, but not part of the rows below)"
    _finish(plt, figure, axes, results, title, label, path)


def ratios(results: dict, path: Path) -> None:
    """Peers as a bar chart: how many times as fast ours is, with the 95 % interval."""
    rows = [r for r in results["rows"] if r["ratio"]]
    if not rows:
        return
    plt, figure, axes = _figure(len(rows))
    values = [r["ratio"] for r in rows]
    spread = [[r["ratio"] - r["low"] for r in rows], [r["high"] - r["ratio"] for r in rows]]
    colors = ["#c9d3da" if r["environment"] == "our allocator" else "#2f6f9f" for r in rows]
    axes.barh(range(len(rows)), values, xerr=spread, color=colors, height=0.72, ecolor="#222222", capsize=2)
    for y, r in enumerate(rows):
        axes.text(r["high"], y, f"  {r['ratio']:.2f}x", va="center", fontsize=9)
    names = [", ".join(filter(None, (r["name"], r["environment"]))) for r in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.axvline(1, color="#222222", linewidth=0.8)
    axes.set_xlim(0, 1.2 * max(r["high"] for r in rows))
    label = "ratio of tokens a second for the same work, measured in turns (median, 95 % interval)"
    if any(r["environment"] == "our allocator" for r in rows):
        label += "; gray: with our allocator settings"
    title = f"GPT-2 {results['model']['parameters'] / 1e6:,.0f}M: recipe/train.py is so many times as fast as"
    _finish(plt, figure, axes, results, title, label, path)


def _figure(rows: int):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.36 * rows), dpi=150)
    return plt, figure, axes


def _finish(plt, figure, axes, results: dict, title: str, label: str, path: Path) -> None:
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(f"{label}\n{results['device']}, torch {results['torch']}", fontsize=8.5)
    axes.tick_params(axis="y", length=0, labelsize=9)
    axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    axes.spines[["top", "right", "left"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _short(value: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"
