"""The report's pictures: matplotlib figures of one run or several."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from eval import style
from eval.curves import HELLASWAG_ROWS, Reference, Run, smooth, smoothing_width
from eval.diagnosis import distance
from eval.known_data import OPENAI_LOSS, OPENAI_LOSS_SOURCE, SHOWN
from eval.published import SOURCES

MANY = 4000  # points of a noisy line, above which the page holds it as an image: a vector each would be megabytes


@dataclass(frozen=True)
class Picture:
    """A figure with what belongs under it; `name` is that of its files."""

    name: str
    title: str
    caption: str
    figure: Figure


def pictures(runs: list[Run], references: list[Reference], published: dict) -> tuple[list[Picture], list[str]]:
    """(the pictures that the runs have numbers for, a sentence for each that they have none for).

    `published` is eval/published.py's: way -> "GPT-2 124M, OpenAI" -> (acc, acc_norm) of OpenAI's models.
    """
    parts = [
        partial(loss_over, runs, references, "tokens"),
        partial(loss_over, runs, [], "seconds"),
        partial(hellaswag, runs, references, published),
        *(partial(draw, runs) for draw in (learning_rate, gradient_norm, throughput, mfu, waits)),
    ]
    with matplotlib.rc_context(style.RC):
        results = [draw() for draw in parts]
    return [r for r in results if isinstance(r, Picture)], [r for r in results if isinstance(r, str)]


def loss_over(runs: list[Run], references: list[Reference], x: str) -> Picture | str:
    """Training and validation loss over "tokens" or "seconds" of training: the whole, and the last four fifths."""
    name, title = {"tokens": ("loss_tokens", "Loss against tokens"), "seconds": ("loss_time", "Loss against time")}[x]
    at = [run.series(column, x)[0] for run in runs for column in ("loss", "val_loss")]
    if not any(map(len, at)):
        return f"{title}: not a loss with its {x} is in the log yet."
    end = max(part.max(initial=0) for part in at)
    first = min(part[part > 0].min(initial=end) for part in at)
    unit, unit_name = (1.0, "tokens") if x == "tokens" else style.unit_of_time(end)
    figure, (whole, rest) = style.new_figure(2, (7.6, 3.7))
    lines, widths = _openai_loss(runs), [1]
    for axes in (whole, rest):
        for reference in references:
            _corridor(axes, reference)
        widths += [_loss_lines(axes, run, i, x, unit) for i, run in enumerate(runs)]
        for dataset, size in lines:
            axes.axhline(OPENAI_LOSS[dataset][size], gid=f"openai-{size}", zorder=2, **style.OPENAI)
    whole.set_ylabel("loss (nats a token)")
    whole.set_title("(a) whole run, logarithmic")
    rest.set_title("(b) last four fifths")
    if 0 < first < end:
        style.log_x(whole, first / unit, end / unit)
    rest.set_xlim(0.2 * end / unit, 1.02 * end / unit or 1)
    for axes in (whole, rest):
        style.ticks_in_tokens(axes)
        if x != "tokens":
            axes.set_xlabel(f"training time ({unit_name})")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _fit(axes)
    every = max([1.0, *(np.median(np.diff([r["step"] for r in run.records])) for run in runs if run.records[1:])])
    mean = f"mean of up to {max(widths) * every:,.0f} steps" if max(widths) > 1 else f"a point: {every:.0f} steps"
    plain = {"color": style.colour(0) if len(runs) == 1 else style.GREY}
    key = [
        *(style.key_of_runs(runs) if len(runs) > 1 else []),
        Line2D([], [], linewidth=1.1, alpha=0.75, label=f"training ({mean})", **plain),
        Line2D([], [], linewidth=1.6, label="validation", **plain, **style.mark(0)),
        *(style.key_of_reference(f"reference: {r.name}, validation", corridor=True) for r in references),
        *(
            Line2D(
                [],
                [],
                label=f"OpenAI's GPT-2 {size} on {SHOWN[dataset]}: {OPENAI_LOSS[dataset][size]:.3f}",
                **style.OPENAI,
            )
            for dataset, size in lines
        ),
    ]
    style.legend(figure, key)
    caption = "Loss in nats a token" + ("; faint: every line of the log." if max(widths) > 1 else ".")
    for r in references:
        caption += f" Reference: {r.source}; validation on {r.validation}. Grey: how far from it is usual."
    for dataset in dict.fromkeys(dataset for dataset, _ in lines):
        caption += f" OpenAI's weights on {SHOWN[dataset]}: {OPENAI_LOSS_SOURCE[dataset]}."
    return Picture(name, title, caption, figure)


def _corridor(axes: Axes, reference: Reference) -> None:
    x, y = reference.val_loss[reference.val_loss[:, 0] > 0].T
    tolerance = distance((x, y), reference.val_loss, reference.noise).tolerance
    axes.fill_between(x, y - tolerance, y + tolerance, color=style.PALE, linewidth=0, zorder=1)
    axes.plot(x, y, zorder=2.5, gid=f"reference-{reference.presets[0]}", **style.REFERENCE)


def _loss_lines(axes: Axes, run: Run, i: int, x: str, unit: float) -> int:
    """Draws a run's losses; returns the width of the smoothing."""
    at, loss = run.series("loss", x)
    width = smoothing_width(len(at))
    if width > 1:
        axes.plot(
            at / unit,
            loss,
            color=style.colour(i),
            linewidth=0.5,
            alpha=0.25,
            gid=f"{i}-loss",
            rasterized=len(at) > MANY,
        )
    if len(at):
        gid = f"{i}-loss-mean" if width > 1 else f"{i}-loss"
        line = {"color": style.colour(i), "linewidth": 1.1, "alpha": 0.75}
        axes.plot(at / unit, smooth(loss, width), gid=gid, **line, **style.alone(at))
    at, val = run.series("val_loss", x)
    _marked(axes, at / unit, val, i, gid=f"{i}-val_loss", linewidth=1.6, zorder=3)
    return width


def _openai_loss(runs: list[Run]) -> list[tuple[str, str]]:
    """(data set, size) of the lines that belong into a picture of these runs."""
    pairs = ((run.dataset, run.size) for run in runs)
    return list(dict.fromkeys((d, s) for d, s in pairs if s in OPENAI_LOSS.get(d, {})))


def hellaswag(runs: list[Run], references: list[Reference], published: dict) -> Picture | str:
    """acc_norm over tokens, a panel for each way, beside OpenAI's models of the runs' sizes (else the smallest)."""
    ways = [way for way in ("A", "B") if any(run.hellaswag[way] for run in runs)]
    if not ways:
        return "HellaSwag: not evaluated yet (make eval-hellaswag, or --hellaswag_steps when training)."
    figure, panels = style.new_figure(len(ways), (7.6 if len(ways) > 1 else 4.6, 3.7))
    points = [point for run in runs for way in ways for point in run.hellaswag[way]]
    end, rows = max(point[0] for point in points), min(point[2] for point in points)
    sizes = list(dict.fromkeys(run.size for run in runs if run.size)) or ["124M"]
    dashes = dict(zip(sizes, (":", "-.", (0, (1, 3)), (0, (5, 1))), strict=False))
    references = [r for r in references if r.hellaswag_A_acc_norm is not None and "A" in ways]
    for axes, way in zip(panels, ways, strict=True):
        for i, run in enumerate(runs):
            if run.hellaswag[way]:
                at, score, n = np.array(run.hellaswag[way]).T
                if len(runs) == 1:  # those of several runs would hide one another
                    axes.errorbar(
                        at, score, _half(score, n), fmt="none", linewidth=0.8, ecolor=style.colour(i), alpha=0.5
                    )
                _marked(axes, at, score, i, gid=f"{i}-hellaswag_{way}", linewidth=1.4)
        for reference in references if way == "A" else []:
            axes.plot(*reference.hellaswag_A_acc_norm.T, gid="reference-hellaswag", **style.REFERENCE)
        for size in sizes:
            if (score := published[way].get(f"GPT-2 {size}, OpenAI", (None, None))[1]) is not None:
                half = _half(score, rows)
                axes.axhspan(score - half, score + half, color=style.BLACK, alpha=0.07, linewidth=0)
                axes.axhline(score, gid=f"openai-{way}-{size}", **(style.OPENAI | {"linestyle": dashes[size]}))
        axes.axhline(0.25, color=style.GREY, linewidth=0.8)
        axes.set_xlim(0, 1.04 * end or 1)
        style.ticks_in_tokens(axes)
        axes.yaxis.set_major_locator(MaxNLocator(6))
        axes.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        axes.set_title({"A": "A: as llm.c and build-nanogpt score it", "B": "B: as lm-evaluation-harness does"}[way])
    panels[0].set_ylabel("accuracy, normalised by length")
    key = [
        *style.key_of_runs(runs),
        *(Line2D([], [], label=f"OpenAI's GPT-2 {s}", **(style.OPENAI | {"linestyle": dashes[s]})) for s in sizes),
        *(style.key_of_reference(f"reference: {r.name}") for r in references),
        Line2D([], [], color=style.GREY, linewidth=0.8, label="chance"),
    ]
    style.legend(figure, key)
    caption = f"HellaSwag, acc_norm on {rows:,} validation rows. {'Band' if len(runs) > 1 else 'Bars and band'}: 95 % "
    caption += "interval for so many rows. OpenAI's models"
    caption += ":" if rows == HELLASWAG_ROWS else ", on all 10,042 rows:"
    caption += "".join(f" {way}: {_openai_source(way)}." for way in ways)
    return Picture("hellaswag", "HellaSwag against tokens", caption, figure)


def _openai_source(way: str) -> str:
    """Of SOURCES what is of OpenAI's models: parts that begin with their sizes, or stand for all. A page is passed on
    alone, so that the name of a file of ours would tell nothing."""
    return "; ".join(p for p in SOURCES[way].split("; ") if p[0].isdigit() or ": " not in p)


def _half(p: float | np.ndarray, n: float | np.ndarray) -> float | np.ndarray:
    """Half the 95 % interval of a share p of n rows, normal approximation."""
    return 1.96 * np.sqrt(p * (1 - p) / n)


def learning_rate(runs: list[Run]) -> Picture | str:
    caption = "The learning rate at each line of the log."
    return _columns(
        runs, "learning_rate", "Learning rate", "learning rate", caption, form=FuncFormatter(style.as_power)
    )


def gradient_norm(runs: list[Run]) -> Picture | str:
    caption = "Norm of the whole gradient before clipping, of single steps, on a logarithmic scale."
    limits = {run.config.get("max_grad_norm") for run in runs}
    result = _columns(runs, "grad_norm", "Gradient norm", "gradient norm", caption, log=True)
    limit = limits.pop()
    if isinstance(result, Picture) and not limits and isinstance(limit, (int, float)) and limit > 0:
        axes = result.figure.axes[0]
        axes.axhline(limit, **style.OPENAI)
        axes.annotate(
            f"clipped at {limit:g}",
            (1, limit),
            xycoords=("axes fraction", "data"),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
        )
    return result


def throughput(runs: list[Run]) -> Picture | str:
    caption = "Tokens of training a second, without the time of evaluations and checkpoints."
    form = FuncFormatter(style.as_tokens)
    return _columns(runs, "tokens_per_second", "Throughput", "tokens a second", caption, zero=True, form=form)


def mfu(runs: list[Run]) -> Picture | str:
    caption = "Model FLOPs utilisation: the model's FLOPs a second, as a share of the device's peak."
    form = PercentFormatter(1, decimals=0, symbol=" %")
    result = _columns(runs, "mfu", "MFU", "MFU", caption, zero=True, form=form)
    return result if isinstance(result, Picture) else "MFU: not in the log, since this hardware's peak is not known."


def waits(runs: list[Run]) -> Picture | str:
    data = max(float(np.mean([0, *run.series("data_wait")[1]])) for run in runs)
    save = max(run.series("save_wait")[1].max(initial=0) for run in runs)
    if data < 0.01:
        return f"Waiting: {data:.2%} of the time for data, at most {save:.2%} for checkpoints."
    caption = (
        f"Share of the time that training waited for data, line by line; for checkpoints it was at most {save:.2%}."
    )
    form = PercentFormatter(1, symbol=" %")
    return _columns(runs, "data_wait", "Waiting for data", "share of the time", caption, zero=True, form=form)


def _columns(
    runs: list[Run],
    column: str,
    title: str,
    label: str,
    caption: str,
    *,
    log: bool = False,
    zero: bool = False,
    form: object = None,
) -> Picture | str:
    """A column of metrics.jsonl over tokens, with its mean where it is noisy."""
    if not any(len(run.series(column)[0]) for run in runs):
        return f"{title}: not in the log yet."
    figure, (axes,) = style.new_figure(1, (4.6, 3.0))
    widths = [1]
    for i, run in enumerate(runs):
        at, values = run.series(column)
        widths.append(smoothing_width(len(at)) if column != "learning_rate" else 1)
        # One over the other, as learning rates often are, all of them show.
        bold = {
            "color": style.colour(i),
            "linewidth": 1.3 if column != "learning_rate" else 1.3 + 1.5 * (len(runs) - 1 - i),
        }
        faint = {"color": style.colour(i), "linewidth": 0.5, "alpha": 0.35, "rasterized": len(at) > MANY}
        axes.plot(at, values, gid=f"{i}-{column}", **(faint if widths[-1] > 1 else bold | style.alone(at)))
        if widths[-1] > 1:
            axes.plot(at, smooth(values, widths[-1]), gid=f"{i}-{column}-mean", **bold)
    axes.set_xlim(0, 1.02 * max(run.tokens for run in runs) or 1)
    style.ticks_in_tokens(axes)
    axes.set_ylabel(label)
    if log and any((run.series(column)[1] > 0).any() for run in runs):
        style.log_y(axes)
    if zero:
        axes.set_ylim(0, 1.08 * max(run.series(column)[1].max(initial=0) for run in runs) or 1)
    if form:
        axes.yaxis.set_major_formatter(form)
    if len(runs) > 1:
        style.legend(figure, style.key_of_runs(runs, marked=False))
    if max(widths) > 1:
        caption = f"{caption.removesuffix('.')}; bold: mean of up to {max(widths)} lines of the log."
    return Picture(column, title, caption, figure)


def _marked(axes: Axes, x: np.ndarray, y: np.ndarray, i: int, **line) -> None:
    """A curve of run i with its markers, as far apart as to be seen (a share of the axes' diagonal)."""
    axes.plot(x, y, color=style.colour(i), markevery=0.05 if len(x) > 12 else None, **style.mark(i), **line)


def _fit(axes: Axes) -> None:
    """The y axis over what stands within the x axis' limits, and a little more."""
    low, high = axes.get_xlim()
    inside = [y for x, y in _points(axes) if low <= x <= high]
    if inside:
        room = 0.05 * (max(inside) - min(inside)) or 0.05
        axes.set_ylim(min(inside) - room, max(inside) + room)


def _points(axes: Axes) -> Iterator[tuple[float, float]]:
    lines = {str(line.get_gid()): line for line in axes.lines}
    for gid, line in lines.items():
        if gid.startswith("openai"):  # has its x in shares of the axis
            yield axes.get_xlim()[0], line.get_ydata()[0]
        elif f"{gid}-mean" not in lines and not gid.startswith(
            "reference"
        ):  # no single noisy steps, nor what is to come
            yield from zip(line.get_xdata(), line.get_ydata(), strict=True)
