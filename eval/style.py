"""How the report's pictures look: colours, lines, legends and ticks, so that each of them is drawn alike."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from eval.curves import Run
from eval.diagnosis import tokens

RC = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "axes.edgecolor": "#444444",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "legend.columnspacing": 1.6,
    "figure.facecolor": "white",
    "text.parse_math": False,  # a $ in a run's name is a $
    "svg.hashsalt": "report",
}
# Okabe and Ito's palette (jfly.uni-koeln.de/color), told apart with every kind of colour blindness; runs differ in
# their markers too, for a print without colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P")
PALE, GREY, BLACK = "#dfdfdf", "#666666", "#222222"
OPENAI = {"color": BLACK, "linestyle": ":", "linewidth": 1.1}
REFERENCE = {"color": GREY, "linestyle": "--", "linewidth": 1.1}


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def mark(i: int) -> dict:
    """The marker of run i, for plot and legend."""
    return {"marker": MARKERS[i % len(MARKERS)], "markersize": 4.5, "markeredgecolor": "white", "markeredgewidth": 0.6}


def alone(x: np.ndarray) -> dict:
    """A single point is no line."""
    return {"marker": "."} if len(x) == 1 else {}


def new_figure(panels: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    """A figure of so many panels side by side; size in inches."""
    figure = Figure(figsize=size, layout="constrained")
    return figure, list(figure.subplots(1, panels, squeeze=False)[0])


def key_of_runs(runs: list[Run], marked: bool = True) -> list[Line2D]:
    """A line of the legend for each run."""
    return [
        Line2D([], [], color=colour(i), linewidth=1.8, label=short(run.name), **(mark(i) if marked else {}))
        for i, run in enumerate(runs)
    ]


def key_of_reference(text: str, corridor: bool = False) -> tuple[Patch | Line2D, ...]:
    line = Line2D([], [], label=text, **REFERENCE)
    return (Patch(color=PALE, linewidth=0), line) if corridor else (line,)


def legend(figure: Figure, key: list[Line2D | tuple]) -> None:
    """Above the axes, where no curve is; as many columns as fit. What is drawn over each other is a tuple."""
    labels = [(item[-1] if isinstance(item, tuple) else item).get_label() for item in key]
    widths = [0.55 + 0.066 * len(label) for label in labels]  # inches, about
    for columns in range(len(key), 0, -1):
        # as matplotlib deals them out: column by column, the first ones one longer
        if sum(part.max() for part in np.array_split(widths, columns)) <= figure.get_figwidth() or columns == 1:
            figure.legend(handles=key, labels=labels, loc="outside upper left", ncols=columns)
            break


def short(name: str) -> str:
    name = name if len(name) <= 32 else f"{name[:15]}…{name[-15:]}"
    return f" {name}" if name.startswith("_") else name  # matplotlib leaves out what begins with _


def ticks_in_tokens(axes: Axes, label: str = "tokens") -> None:
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(FuncFormatter(as_tokens))
    if axes.get_xscale() == "linear":
        axes.xaxis.set_major_locator(MaxNLocator(5))


def log_x(axes: Axes, first: float, end: float) -> None:
    """A logarithmic x axis from `first` to `end`, with as many labels as there is room for."""
    axes.set_xscale("log", nonpositive="mask")
    axes.set_xlim(first / 1.15, end * 1.15)
    axes.xaxis.set_major_locator(_decades(end / first))
    axes.xaxis.set_minor_locator(LogLocator(subs=range(2, 10)))
    axes.xaxis.set_minor_formatter("")


def log_y(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(_decades(high / low) if high / low > 5 else MaxNLocator(6))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _decades(ratio: float) -> LogLocator:
    return LogLocator(subs=(1,) if ratio > 300 else (1, 2, 5), numticks=20)


def as_tokens(value: float, _: object = None) -> str:
    return tokens(value) if value else "0"


def as_power(value: float, _: object = None) -> str:
    """3e-4, 2.5e-4, 0."""
    if not value:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    return f"{value / 10**exponent:.3g}e{exponent}"


def unit_of_time(seconds: float) -> tuple[float, str]:
    """(seconds a unit, its name) in which a span of time is three or more."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds > 3 * size:
            return size, name
    return 1.0, "seconds"
