"""The report's plots: matplotlib figures of one or more runs. A legend names only what is drawn."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from eval.curves import Reference, Run
from eval.diagnosis import distance
from eval.published import HELLASWAG, HELLASWAG_ROWS, OPENAI_LOSS, OPENAI_LOSS_SOURCE, SOURCES, STYLES
from eval.scores import ci95
from recipe.utils.units import si

WIDTH = 7.6  # inches
REFERENCE = {"color": "#333333", "linestyle": "--", "linewidth": 1.1, "zorder": 4, "gid": "reference"}
OPENAI = {"color": "#222222", "linestyle": ":", "linewidth": 1.1, "gid": "openai"}
TIMES = {"seconds": 1, "minutes": 60, "hours": 3600}
TRAINING = {"tokens_per_second": "(b) tokens/s", "learning_rate": "(c) learning rate", "grad_norm": "(d) gradient norm"}
STYLE = Path(__file__).parent / "data" / "report.mplstyle"
LINES, MARKERS = ("-", "--", "-.", ":"), "os^D"  # in this order, for as many runs as there are colors


@dataclass(frozen=True)
class Plot:
    """A figure with its caption; `name` is the file name without its suffix."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw_plots(runs: list[Run], references: list[Reference]) -> list[Plot]:
    """All plots for which the runs have data. Call this and save the figures within STYLE."""
    # matplotlib's legends have no label that begins with "_".
    runs = [replace(run, name=f" {run.name}") if run.name.startswith("_") else run for run in runs]
    plots = {"loss": (draw_loss, 2), "training": (draw_training, 4)}
    if any(len(run.series("hellaswag_llmc_acc_norm")[0]) for run in runs):
        plots["hellaswag"] = draw_hellaswag, 2
    pictures = []
    for name, (draw, panels) in plots.items():
        figure = Figure(figsize=(WIDTH, 1.6 + 1.1 * panels), layout="constrained")
        title, caption = draw(np.ravel(figure.subplots(panels // 2, 2)), runs, references)
        pictures.append(Plot(name, title, caption, figure))
    return pictures


def draw_loss(panels: np.ndarray, runs: list[Run], references: list[Reference]) -> tuple[str, str]:
    """Training and validation loss over tokens: the full run, and its last four fifths. Returns title and caption."""
    end = max(run.tokens for run in runs) or 1
    tail_starts = [min(0.2 * end, 0.8 * run.tokens) for run in runs]  # of the second panel, which shows short runs too
    full_axes, tail_axes = panels
    references = [r for r in references if end >= r.val_loss[1, 0]]
    openai = {(run.dataset, run.size): loss for run in runs if (loss := OPENAI_LOSS.get(run.dataset, {}).get(run.size))}
    tail_losses = [*openai.values()]  # values that the second panel must include
    for axes in (full_axes, tail_axes):
        for reference in references:
            x, y = reference.val_loss[(reference.val_loss[:, 0] > 0) & (reference.val_loss[:, 0] <= end)].T
            tolerance = distance((x, y), reference)[2]
            axes.fill_between(x, y - tolerance, y + tolerance, color="#dfdfdf", linewidth=0)
            axes.plot(x, y, label=f"reference: {reference.name}, validation", **REFERENCE)
        for (dataset, size), loss in openai.items():
            axes.axhline(loss, label=f"OpenAI's GPT-2 {size} on {dataset}: {loss:.3f}", **OPENAI)
        for i, run in enumerate(runs):
            (x, y), (val_x, val) = run.series("loss"), run.series("val_loss")
            line, marker = _look(i)
            axes.plot(x, y, linewidth=0.5, alpha=0.3, gid=f"{i}-loss", color=line["color"])
            axes.plot(x, smooth(y), linewidth=1.1, alpha=0.8, label=f"{run.name}, training", **line)
            axes.plot(val_x, val, marker=marker, label=f"{run.name}, validation", gid=f"{i}-val_loss", **line)
            tail_losses += [*smooth(y)[x >= tail_starts[i]], *val[val_x >= tail_starts[i]]]
        _token_axis(axes)
    full_axes.set(ylabel="loss (nats per token)", title="(a) full run, logarithmic")
    if logged_tokens := [x for run in runs for x in run.series("loss")[0]]:
        full_axes.set_xscale("log", nonpositive="mask")
        full_axes.xaxis.set_major_locator(LogLocator(subs=(1,) if end > 300 * min(logged_tokens) else (1, 2, 5)))
        full_axes.xaxis.set_major_formatter(FuncFormatter(_as_tokens))
        full_axes.xaxis.set_minor_formatter(NullFormatter())
    tail_axes.set(title="(b) last four fifths", xlim=(min(tail_starts), 1.02 * end))
    if tail_losses:
        margin = 0.05 * (max(tail_losses) - min(tail_losses)) + 0.01
        tail_axes.set_ylim(min(tail_losses) - margin, max(tail_losses) + margin)
    _legend(full_axes)
    caption = "Loss in nats per token; faint: every line of the log; bold: their moving average."
    for r in references:
        caption += f" Reference: {r.source}; validation on {r.validation}. Gray band: the expected deviation."
    for dataset in dict.fromkeys(dataset for dataset, _ in openai):
        caption += f" OpenAI's weights on {dataset}: {OPENAI_LOSS_SOURCE[dataset]}."
    return "Loss against tokens", caption


def draw_training(panels: np.ndarray, runs: list[Run], _: list[Reference]) -> tuple[str, str]:
    """The loss over time; speed, learning rate and gradient norm over tokens. Returns title and caption."""
    time_axes, *token_axes = panels
    late_losses: list[float] = []  # after a twentieth of the time: the first panel's range
    unit, seconds = [item for item in TIMES.items() if item[1] <= max(1, *(run.seconds for run in runs))][-1]
    for i, run in enumerate(runs):
        look, marker = _look(i)
        line = look | {"linewidth": 1.0}
        for column, options in (("loss", {}), ("val_loss", {"marker": marker, "label": run.name})):
            x, y = run.series(column, "seconds")
            time_axes.plot(x / seconds, y if options else smooth(y), gid=f"{i}-{column}-by-time", **line | options)
            late_losses += y[x >= 0.05 * run.seconds].tolist()
        for axes, column in zip(token_axes, TRAINING, strict=True):
            axes.plot(*run.series(column), gid=f"{i}-{column}", **line)
    time_axes.set(xlabel=f"{unit} of training", ylabel="loss (nats per token)", title="(a) loss by time")
    if late_losses:
        time_axes.set_ylim(min(late_losses) - 0.05, max(late_losses) + 0.05)
    for axes, title in zip(token_axes, TRAINING.values(), strict=True):
        _token_axis(axes)
        axes.set_title(title)
        axes.set_ylim(bottom=0)
    _legend(time_axes)
    caption = "Time is training time, without validation and saving. Dots: the validation loss. (a) shows the losses "
    caption += "after a twentieth of the time."
    return "Loss by time, speed, learning rate and gradient norm", caption


def draw_hellaswag(panels: np.ndarray, runs: list[Run], references: list[Reference]) -> tuple[str, str]:
    """acc_norm during training, one panel per scoring style, beside OpenAI's models of the runs' sizes (by default the
    smallest). Returns title and caption."""
    counts: set[int] = set()
    for axes, style in zip(panels, STYLES, strict=True):
        for i, run in enumerate(runs):
            x, accuracy, rows = run.hellaswag(style)
            half_width = np.array([ci95(p, int(n)) for p, n in zip(accuracy, rows, strict=True)])
            counts.update(rows.astype(int).tolist())
            line, marker = _look(i)
            axes.plot(x, accuracy, marker=marker, label=run.name, gid=f"{i}-hellaswag", **line)
            axes.fill_between(x, accuracy - half_width, accuracy + half_width, color=line["color"], alpha=0.1)
        for r in references:
            if style == "llmc" and r.hellaswag_llmc_acc_norm is not None:
                axes.plot(*r.hellaswag_llmc_acc_norm.T, label=f"reference: {r.hellaswag_name or r.name}", **REFERENCE)
        for size in sorted({run.size for run in runs if run.size} or {"124M"}):
            if accuracy := HELLASWAG[style].get(f"GPT-2 {size}, OpenAI", (None, None))[1]:
                axes.axhline(accuracy, label=f"OpenAI's GPT-2 {size}", **OPENAI)
                placement = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "bottom", "fontsize": 8}
                axes.text(1, accuracy, f"{accuracy:.1%}", **placement)  # differs between the panels
        axes.axhline(0.25, color="#666666", linewidth=0.8, label="chance")
        _token_axis(axes)
        axes.set_xlim(0, 1.04 * max(run.tokens for run in runs) or 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        axes.set_title(STYLES[style])
        axes.set_ylabel("accuracy, normalized by length")
    _legend(panels[0])
    caption = f"HellaSwag, acc_norm on {' or '.join(f'{n:,}' for n in sorted(counts))} of {HELLASWAG_ROWS:,} "
    caption += "validation rows, with 95 % intervals; OpenAI's models on all rows."
    caption += "".join(f" {STYLES[style]}: {SOURCES[style]}." for style in STYLES)
    return "HellaSwag against tokens", caption


def smooth(y: np.ndarray) -> np.ndarray:
    """Moving average over a fortieth of the points, (N,) -> (N,); over fewer at the start, where a loss falls steeply,
    and at the end."""
    index = np.arange(len(y))
    half_width = np.minimum(index // 8, len(y) // 80)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    low, high = index - half_width, np.minimum(index + half_width, len(y) - 1) + 1
    return (sums[high] - sums[low]) / (high - low)


def _look(i: int) -> tuple[dict[str, str], str]:
    """The color and the line of run i's curves, and the marker of its evaluations: no two of 24 runs look alike."""
    turn = i // len(matplotlib.rcParams["axes.prop_cycle"]) % len(LINES)
    return {"color": f"C{i}", "linestyle": LINES[turn]}, MARKERS[turn]


def _legend(axes: Axes) -> None:
    """Puts the legend above the axes, clear of the curves, in two columns if they fit. More than six rows of it make
    the figure higher, not the axes lower."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.get_figure(root=True)
    assert figure
    columns = 2 if max(map(len, labels)) < 48 else 1
    figure.legend(handles, labels, loc="outside upper left", ncols=columns)
    figure.set_figheight(figure.get_figheight() + 0.19 * max(0, math.ceil(len(labels) / columns) - 6))


def _token_axis(axes: Axes) -> None:
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_as_tokens))


def _as_tokens(value: float, _: object) -> str:
    return si(value, "B") if value else "0"
