"""The report's pictures: matplotlib figures of one run or several. A legend names what is drawn, and nothing else."""

import math
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from eval.curves import HELLASWAG_ROWS, Reference, Run
from eval.diagnosis import distance, tokens
from eval.published import HELLASWAG, OPENAI_LOSS, OPENAI_LOSS_SOURCE, SOURCES

RC = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "legend.fontsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "text.parse_math": False,  # a $ in a run's name is a $
}
# Okabe and Ito's palette (jfly.uni-koeln.de/color), told apart with every kind of color blindness; runs differ in
# their markers too, for a print without colors.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
REFERENCE = {"color": "#333333", "linestyle": "--", "linewidth": 1.1, "zorder": 4}
OPENAI_STYLES = (":", "-.", (0, (1, 3)), (0, (5, 1)))
# Column of metrics.jsonl -> (title, unit of the y axis); drawn in this order where the log has them.
COLUMNS = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_second": "throughput (tokens/s)",
    "mfu": "MFU (share of the device's peak FLOP/s)",
    "data_wait": "waiting for data (share of the time)",
}


@dataclass(frozen=True)
class Picture:
    """A figure with what belongs under it; `name` is that of its file."""

    name: str
    title: str
    caption: str
    figure: Figure


def draw_pictures(runs: list[Run], references: list[Reference]) -> list[Picture]:
    """The pictures for which the runs have numbers."""
    with matplotlib.rc_context(RC):
        found = [draw_loss(runs, references), draw_hellaswag(runs, references), draw_training(runs)]
    return [picture for picture in found if picture]


def draw_loss(runs: list[Run], references: list[Reference]) -> Picture | None:
    """Training and validation loss against tokens: the whole run, and its last four fifths."""
    if not any(len(run.series(column)[0]) for run in runs for column in ("loss", "val_loss")):
        return None
    end = max(run.tokens for run in runs) or 1.0
    figure, panels = _figure(1, 2, (7.6, 3.7))
    references = [r for r in references if end >= r.val_loss[1, 0]]
    openai = dict.fromkeys((run.dataset, run.size) for run in runs if run.size in OPENAI_LOSS.get(run.dataset, {}))
    for axes in panels:
        for reference in references:
            _reference_loss(axes, reference, end)
        for i, run in enumerate(runs):
            _run_loss(axes, run, i, len(runs))
        for (dataset, size), line in zip(openai, OPENAI_STYLES, strict=False):
            loss = OPENAI_LOSS[dataset][size]
            label = f"OpenAI's GPT-2 {size} on {dataset}: {loss:.3f}"
            axes.axhline(loss, color="#222222", linewidth=1.1, linestyle=line, label=label, gid=f"openai-{size}")
        _token_axis(axes)
    whole, rest = panels
    whole.set(ylabel="loss (nats a token)", title="(a) whole run, logarithmic")
    rest.set_title("(b) last four fifths")
    first = min((x for run in runs for x in run.series("loss")[0] if x > 0), default=end)
    if first < end:
        whole.set_xscale("log", nonpositive="mask")
        whole.set_xlim(first / 1.15, end * 1.15)
        whole.xaxis.set_major_locator(LogLocator(subs=(1,) if end > 300 * first else (1, 2, 5)))
        whole.xaxis.set_major_formatter(FuncFormatter(_as_tokens))
        whole.xaxis.set_minor_formatter(NullFormatter())
    rest.set_xlim(0.2 * end, 1.02 * end)
    for axes in panels:
        _fit(axes)
    _legend(figure, whole)
    caption = "Loss in nats a token; faint: every line of the log; bold: their moving average."
    for r in references:
        caption += f" Reference: {r.source}; validation on {r.validation}. Gray: how far from it is usual."
    for dataset in dict.fromkeys(dataset for dataset, _ in openai):
        caption += f" OpenAI's weights on {dataset}: {OPENAI_LOSS_SOURCE[dataset]}."
    return Picture("loss", "Loss against tokens", caption, figure)


def _reference_loss(axes: Axes, reference: Reference, end: float) -> None:
    """A reference with its tolerance, as far as the runs have come."""
    known = reference.val_loss[reference.val_loss[:, 0] > 0]
    last = min(end, known[-1, 0])
    x = np.append(known[known[:, 0] < last, 0], last)
    y = np.interp(np.log(x), np.log(known[:, 0]), known[:, 1])
    tolerance = distance((x, y), reference)[2]
    axes.fill_between(x, y - tolerance, y + tolerance, color="#dfdfdf", linewidth=0)
    label = f"reference: {reference.name}, validation"
    axes.plot(x, y, label=label, gid=f"reference-{reference.presets[0]}", **REFERENCE)


def _run_loss(axes: Axes, run: Run, i: int, count: int) -> None:
    prefix = f"{_short(run.name)}, " if count > 1 else ""
    x, loss = run.series("loss")
    color = COLORS[i % len(COLORS)]
    axes.plot(x, loss, color=color, linewidth=0.5, alpha=0.3, gid=f"{i}-loss")
    mean = smooth(loss)
    axes.plot(x, mean, color=color, linewidth=1.1, alpha=0.8, label=f"{prefix}training", gid=f"{i}-loss-mean")
    x, val = run.series("val_loss")
    if len(x):
        axes.plot(x, val, linewidth=1.6, label=f"{prefix}validation", gid=f"{i}-val_loss", zorder=3, **_marked(i, x))


def draw_hellaswag(runs: list[Run], references: list[Reference]) -> Picture | None:
    """acc_norm against tokens, a panel for each way, beside OpenAI's models of the runs' sizes (else the smallest)."""
    ways = [way for way in ("A", "B") if any(run.hellaswag[way] for run in runs)]
    if not ways:
        return None
    figure, panels = _figure(1, len(ways), (3.8 * len(ways) + 0.8, 3.7))
    points = [point for run in runs for way in ways for point in run.hellaswag[way]]
    end, rows = max(point[0] for point in points), min(point[2] for point in points)
    sizes = list(dict.fromkeys(run.size for run in runs if run.size)) or ["124M"]
    for axes, way in zip(panels, ways, strict=True):
        for i, run in enumerate(runs):
            if run.hellaswag[way]:
                x, score, n = np.array(run.hellaswag[way]).T
                axes.plot(x, score, linewidth=1.4, label=_short(run.name), gid=f"{i}-hellaswag", **_marked(i, x))
                if len(runs) == 1:  # the bars of several runs would hide one another
                    axes.errorbar(x, score, _half(score, n), fmt="none", linewidth=0.8, ecolor=COLORS[0], alpha=0.5)
        for r in references if way == "A" else []:
            if r.hellaswag_A_acc_norm is not None and r.hellaswag_A_acc_norm[0, 0] <= end:
                axes.plot(*r.hellaswag_A_acc_norm.T, label=f"reference: {r.name}", gid="reference", **REFERENCE)
        for size, line in zip(sizes, OPENAI_STYLES, strict=False):
            if score := HELLASWAG[way].get(f"GPT-2 {size}, OpenAI", (None, None))[1]:
                half = _half(score, rows)
                axes.axhspan(score - half, score + half, color="#222222", alpha=0.07, linewidth=0)
                label = f"OpenAI's GPT-2 {size}"
                axes.axhline(score, color="#222222", linewidth=1.1, linestyle=line, label=label, gid=f"openai-{size}")
        axes.axhline(0.25, color="#666666", linewidth=0.8, label="chance")
        _token_axis(axes)
        axes.set_xlim(0, 1.04 * end or 1)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=" %"))
        axes.set_title({"A": "A: as llm.c and build-nanogpt score it", "B": "B: as lm-evaluation-harness does"}[way])
    panels[0].set_ylabel("accuracy, normalized by length")
    _legend(figure, panels[0])
    caption = f"HellaSwag, acc_norm on {rows:,} validation rows, with 95 % intervals. OpenAI's models"
    caption += ":" if rows == HELLASWAG_ROWS else f", on all {HELLASWAG_ROWS:,} rows:"
    caption += "".join(f" {way}: {_openai_source(way)}." for way in ways)
    return Picture("hellaswag", "HellaSwag against tokens", caption, figure)


def draw_training(runs: list[Run]) -> Picture | None:
    """Small panels: loss against time, and a column of the log each against tokens."""
    columns = [c for c in COLUMNS if any(run.series(c)[1].any() for run in runs)]
    seconds = max([0.0, *(run.last("seconds") for run in runs if math.isfinite(run.last("seconds")))])
    panels = (["seconds"] if seconds else []) + columns
    if not panels:
        return None
    figure, found = _figure(math.ceil(len(panels) / 2), 2 if panels[1:] else 1, (7.6, 2.5 * math.ceil(len(panels) / 2)))
    unit, unit_name = unit_of_time(seconds)
    for axes, column in zip(found, panels, strict=False):
        for i, run in enumerate(runs):
            x, y = run.series("loss", "seconds") if column == "seconds" else run.series(column)
            line = {"color": COLORS[i % len(COLORS)], "label": _short(run.name), "gid": f"{i}-{column}"}
            x = x / unit if column == "seconds" else x
            axes.plot(x, y if column == "learning_rate" else smooth(y), linewidth=1.3, **line, **_alone(x))
        if column == "seconds":
            axes.set(title="training loss", xlabel=f"training time ({unit_name})")
            continue
        axes.set_title(COLUMNS[column])
        _token_axis(axes)
        axes.set_ylim(bottom=0)
        if column in ("mfu", "data_wait"):
            axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    for axes in found[len(panels) :]:
        axes.remove()
    if len(runs) > 1:
        _legend(figure, found[0])
    caption = "Moving averages of the log's lines. Throughput and MFU are without evaluations and checkpoints."
    return Picture("training", "Training", caption, figure)


def smooth(y: np.ndarray) -> np.ndarray:
    """The mean over a fortieth of a curve's points around each, (N,) -> (N,); over fewer at the beginning, where a loss
    falls steeply, and at the end."""
    at = np.arange(len(y))
    half = np.minimum(at // 8, len(y) // 80)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    low, high = at - half, np.minimum(at + half, len(y) - 1) + 1
    return (sums[high] - sums[low]) / (high - low)


def unit_of_time(seconds: float) -> tuple[float, str]:
    """(seconds a unit, its name) in which a span of time is three or more."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds > 3 * size:
            return size, name
    return 1.0, "seconds"


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _marked(i: int, x: np.ndarray) -> dict:
    """The look of run i, its markers far enough apart to be seen."""
    look = {"color": COLORS[i % len(COLORS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4.5}
    return look | {"markeredgecolor": "white", "markeredgewidth": 0.6, "markevery": 0.05 if len(x) > 12 else None}


def _alone(x: np.ndarray) -> dict:
    return {"marker": "."} if len(x) == 1 else {}  # a single point makes no line


def _fit(axes: Axes) -> None:
    """The y axis over the lines between the limits of x, but for the faint ones and for references."""
    low, high = axes.get_xlim()
    values = []
    for line in axes.lines:
        x, y = (np.asarray(data, dtype=float) for data in line.get_data())
        gid = str(line.get_gid())
        if gid.startswith("openai"):
            values += list(y)
        elif not gid.startswith("reference") and not gid.endswith("-loss"):
            values += list(y[(x >= low) & (x <= high)])
    if values:
        room = 0.05 * (max(values) - min(values)) or 0.05
        axes.set_ylim(min(values) - room, max(values) + room)


def _legend(figure: Figure, axes: Axes) -> None:
    """Above the axes, where no curve is; as many columns as fit."""
    handles, labels = axes.get_legend_handles_labels()
    width = max((0.55 + 0.066 * len(label) for label in labels), default=1.0)  # inches, about
    columns = max(1, int(figure.get_figwidth() / width))
    figure.legend(handles, labels, loc="outside upper left", ncols=min(columns, len(labels) or 1))


def _token_axis(axes: Axes) -> None:
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_as_tokens))


def _as_tokens(value: float, _: object) -> str:
    return tokens(value) if value else "0"


def _short(name: str) -> str:
    name = name if len(name) <= 32 else f"{name[:15]}…{name[-15:]}"
    return f" {name}" if name.startswith("_") else name  # matplotlib gives names that begin with _ no legend


def _half(p: float | np.ndarray, n: float | np.ndarray) -> float | np.ndarray:
    """Half the 95 % interval of a share p of n rows, normal approximation."""
    return 1.96 * np.sqrt(p * (1 - p) / n)


def _openai_source(way: str) -> str:
    """The parts of SOURCES about OpenAI's models: those that begin with a size, or stand for all."""
    return "; ".join(p for p in SOURCES[way].split("; ") if p[0].isdigit() or ": " not in p)
