"""Results: the conditions of a measurement, JSON files, and bar charts."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from datetime import date
from pathlib import Path

import torch
import transformers

from recipe.config import Config
from recipe.engine import hardware
from recipe.estimate.memory import flops_per_token, parameter_count

FLOPS_FORMULA = "6 N + 12 L D T a token (PaLM, appendix B), N without position embeddings, the true vocabulary"
BLUE, GRAY = "#2f6f9f", "#c9d3da"


def circumstances() -> dict:
    """The conditions without which the numbers mean nothing."""
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


def measured_model(config: Config) -> dict:
    """The trained model, and its FLOPs per token by FLOPS_FORMULA."""
    m, length = config.model, config.data.sequence_length
    return {
        "model": {"recipe": Path(config.run.config).stem, "parameters": parameter_count(m), "n_layer": m.n_layer},
        "sequence_length": length,
        "flops_per_token": flops_per_token(m, length),
    }


def write(results: dict, path: Path) -> None:
    """Writes the results as JSON. Raises ValueError for a number that is not finite."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


def new_figure(size: tuple[float, float]):
    """An empty figure of this size in inches; None, with a message, where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no chart, since matplotlib is not installed")
        return None
    return Figure(size, dpi=150)


def bar_chart(rows: list[tuple[str, str]], panels: dict[str, list], path: Path, logarithmic: bool = False) -> None:
    """Horizontal bars: `rows` has each row's name and color; `panels` maps a title to each row's value and the text
    beside it, or None. The first panel may have a logarithmic axis. Draws nothing if there are no rows."""
    size = (4.5 + 3.5 * len(panels), 1.2 + 0.26 * len(rows))
    if not rows or not (figure := new_figure(size)):
        return
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    for panel, (title, bars) in zip(axes[0], panels.items(), strict=True):
        for y, (bar, (_, color)) in enumerate(zip(bars, rows, strict=True)):
            if bar:
                panel.barh(y, bar[0], color=color, height=0.75)
                panel.text(bar[0], y, f" {bar[1]}", va="center", fontsize=8)
        panel.set_title(title, loc="left", fontsize=10)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0, labelsize=8)
        panel.margins(x=0.3)
    if logarithmic:
        axes[0][0].set_xscale("log")
    axes[0][0].set_yticks(range(len(rows)), [name for name, _ in rows])
    axes[0][0].invert_yaxis()
    figure.savefig(path, bbox_inches="tight")
