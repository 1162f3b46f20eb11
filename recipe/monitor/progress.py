"""What a user sees while a run goes on: one bar on a terminal, plain lines elsewhere, nothing on other processes.

The bar is tqdm's as far as locking, clearing and lines above it go; its text is ours, fitted to the terminal's width.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from tqdm import tqdm
from tqdm.std import Bar

from recipe.cli import emit, wrapped
from recipe.estimate.memory import duration, money, plural, si

_TICK = 1.0  # seconds after which the bar is drawn anew in any case: the terminal may have another width now
_BETWEEN_LINES = 60.0  # seconds, of a long pause where there is no terminal
_LEAST_GRAPH = 8  # cells; a shorter one says nothing that the percentage does not
_SMOOTHING = 0.3  # share of the newest reading in the pace from which the time left is reckoned


def fitted(parts: Sequence[tuple[int, str, ...]], width: int, graph: Callable[[int], str], at: int) -> str:
    """`parts` beside each other in at most `width` columns; `graph(cells)` stands before part `at`, in the room left.

    A part is (worth, form, shorter form, ...). What does not fit goes in this order: the graph; each part takes its
    next form, the one least worth keeping first; gaps of two spaces become one; the third forms; then parts are left
    out, the least worth first. What is worth most is cut rather than left out.
    """
    chosen, gap = [forms[0] for _, *forms in parts], "  "
    order = sorted(range(len(parts)), key=lambda i: parts[i][0])

    def length() -> int:
        return len(gap.join(filter(None, chosen)))

    def shorten(level: int) -> None:
        for i in order:
            if length() > width:
                forms = parts[i][1:]
                chosen[i] = forms[min(level, len(forms) - 1)]

    shorten(1)
    if length() > width:
        gap = " "
    shorten(2)
    for i in order[:-1]:
        if length() > width:
            chosen[i] = ""
    room = width - length() - len(gap)
    before, after = (list(filter(None, some)) for some in (chosen[:at], chosen[at:]))
    return gap.join([*before, *([graph(room)] if room >= _LEAST_GRAPH else []), *after])[:width]


def amount(done: float, total: float) -> tuple[str, str]:
    """3.1e9, 5e9 -> ("3.10/5.00 B tokens", "3.10/5.00B")."""
    unit, size = next(((u, s) for u, s in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)) if total >= s), ("", 1))
    digits = 0 if size == 1 else 2 if total < 100 * size else 1
    both = f"{done / size:.{digits}f}/{total / size:.{digits}f}"
    return f"{both} {unit} tokens".replace("  ", " "), f"{both}{unit}"


def _columns(file) -> int:
    """What may be written in a row of the terminal: the last column stays free, since some wrap when it is filled."""
    with suppress(OSError, ValueError, AttributeError):
        return (os.get_terminal_size(file.fileno()).columns or 80) - 1
    return 79


class _TerminalBar(tqdm):
    """A bar whose line is a function of (columns, whether the terminal takes ASCII only).

    The cursor waits in front of the line: a terminal that is made narrower moves both, and what it made of the line,
    be it several rows, is erased from there on before the next drawing.
    """

    def __init__(self, line: Callable[[int, bool], str], **options):
        self._line = line
        super().__init__(**options)

    def __str__(self) -> str:
        with suppress(ValueError, ArithmeticError):  # raised, it would leave tqdm's lock behind
            return self._line(_columns(self.fp), bool(self.ascii))
        return ""

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        with self.get_lock():  # which close() holds to erase the bar: nothing is drawn after it
            return not (self.disable and msg is None) and super().display(msg, pos)

    @staticmethod
    def status_printer(file) -> Callable[[str], None]:
        drawn = 0

        def draw(text: str) -> None:
            nonlocal drawn
            blanks = " " * (min(drawn, _columns(file)) - len(text))  # for a notebook, which knows no erasing
            with suppress(OSError, ValueError):  # raised, it would leave tqdm's lock behind
                file.write(f"\r\x1b[J{text}{blanks}\r")
                file.flush()
            drawn = len(text)

        return draw


class Progress:
    """A bar in tokens where standard output and error are a terminal, elsewhere a plain line a logged step; silent
    where `show` is false. Nothing of it raises.

    Attributes:
        terminal: whether there is a bar.
    """

    def __init__(self, steps: int, step_tokens: int, step: int, *, show: bool, price: float = 0.0):
        """Of a run of `steps` steps of `step_tokens` tokens each that has done `step` of them; `price` is dollars a
        second of the whole world."""
        self._steps, self._step_tokens, self._price = steps, step_tokens, price
        self._first = self._done = step
        self._show = show
        self.terminal = show and sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._begun = self._told = time.monotonic()
        self._doing, self._tick = "", ""
        self._shown: dict[str, float] = {}  # the newest of each figure
        self._warning = ""
        self._pace: float | None = None  # training seconds a token
        self._readings = 0
        self._seconds = self._pauses = self._seconds_before = self._pauses_before = 0.0
        self._pauses_a_second = 0.0
        self._closed = threading.Event()
        self._bar = None
        if self.terminal:
            # A terminal that tells no rows (docker's) has none for tqdm, and TQDM_DISABLE would leave nothing at all.
            self._bar = _TerminalBar(
                self.line, total=self.total, initial=self.done, leave=False, mininterval=0.25, nrows=20, disable=False
            )
            self._thread = threading.Thread(target=self._keep_drawing, name="bar", daemon=True)
            self._thread.start()

    @property
    def total(self) -> int:
        return self._steps * self._step_tokens

    @property
    def done(self) -> int:
        return self._done * self._step_tokens

    # What the loop tells

    def advance(self) -> None:
        """A step is done."""
        self._done += 1
        if (bar := self._bar) is not None:  # which another thread may close
            bar.update(self._step_tokens)

    def first(self, loss: float) -> None:
        """A sign of life after the first step of this process; `loss` may be the mean over some before it."""
        took, known = time.monotonic() - self._begun, math.isfinite(loss)  # which a step that was left out has not
        self._shown |= {"loss": loss} if known else {}
        if not self._redraw() and self._show:
            emit(f"{self._step(self._done)}{f'  loss {loss:.4f}' if known else ''}  first step after {duration(took)}")

    def report(self, record: dict, warning: str = "", pauses: float = 0.0) -> None:
        """Shows a record of metrics.jsonl, and a warning that must not scroll away. `pauses` is the run's seconds so
        far that were no training."""
        names = ("loss", "val_loss", "learning_rate", "tokens_per_second", "mfu", "data_wait", "skipped_steps")
        self._shown |= {name: record[name] for name in names if record.get(name) is not None}
        self._warning, self._seconds, self._pauses = warning, record.get("seconds") or 0.0, pauses
        self._reckon(record.get("tokens_per_second"), pauses)
        if self.terminal and record["val_loss"] is not None:
            self.say(self._history(record))
        if not self._redraw() and self._show:
            emit(self._plain(record))

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Context of what interrupts the training: `what` is "validating", "saving"..."""
        self._doing, self._tick, self._told = what, "", time.monotonic()
        self._redraw()
        try:
            yield
        finally:
            self._doing, self._begun = "", time.monotonic()

    def tick(self, done: int, of: int) -> None:
        """How far that is. The bar shows it when it is next drawn, so that this costs nothing."""
        self._tick = f" {done}/{of}"
        if self._show and not self.terminal and time.monotonic() - self._told > _BETWEEN_LINES:
            self._told = time.monotonic()
            emit(f"step {self._done}: {self._doing}, {done} of {of} batches")

    def say(self, text: str, last: bool = False) -> None:
        """A line of its own, above the bar; after the `last` one there is no bar any more."""
        if last:
            self.close()
        if self._bar is not None:
            with suppress(OSError, ValueError):
                tqdm.write(wrapped(text))
                sys.stdout.flush()
        elif self._show:
            emit(text)

    def close(self) -> None:
        """Takes the bar away. Lines may still be said."""
        self._closed.set()
        bar, self._bar = self._bar, None
        if bar is not None:
            with suppress(OSError, ValueError):
                bar.close()

    # What it shows

    def line(self, width: int, ascii: bool = False) -> str:
        """The bar's text, at most `width` columns."""
        shown, left = self._shown, self.seconds_left()
        share = self.done / self.total
        parts = [(20, f"WARNING: {self._warning}" if self._warning else "")]
        if self._doing:
            parts.append((19, f"{self._doing}{self._tick}", self._doing))
        elif self._done == self._first:
            parts.append((19, "first step"))  # in which a compilation can take minutes
        else:
            parts.append((0, "training", ""))
        parts += [(3, f"{100 * share:.0f}%"), (12, *amount(self.done, self.total))]
        if "loss" in shown:
            parts.append((11, f"loss {shown['loss']:.3f}", f"loss {shown['loss']:.3f}", f"loss {shown['loss']:.2f}"))
        if "val_loss" in shown:
            val = shown["val_loss"]
            parts.append((8, f"val {val:.3f}", f"val {val:.3f}", f"val {val:.2f}"))
        if "learning_rate" in shown:
            rate = f"lr {shown['learning_rate']:.1e}"
            parts.append((7, rate, rate.replace("e-0", "e-")))
        if "tokens_per_second" in shown:
            rate = shown["tokens_per_second"]
            short = si(rate, "G").replace(" ", "")
            parts.append((10, f"{rate:,.0f} tokens/s", f"{short} tok/s", f"{short}/s"))
        if "mfu" in shown:
            parts.append((9, f"MFU {100 * shown['mfu']:.1f} %", f"MFU {100 * shown['mfu']:.0f}%"))
        if left:
            parts.append((13, f"{duration(left)} left", f"{duration(left, short=True)} left"))
        if (wait := shown.get("data_wait", 0)) > 0.01:
            parts.append((2, f"{100 * wait:.0f} % waiting for data", f"data wait {wait:.0%}"))
        if skipped := shown.get("skipped_steps"):
            parts.append((4, f"{plural(skipped, 'step')} skipped", f"{skipped} skipped"))
        if self._price and left is not None:
            paid = self._seconds + self._pauses
            spent, in_all = (money(seconds * self._price) for seconds in (paid, paid + left))
            parts.append((1, f"cost {spent} of {in_all}", f"{spent} of {in_all}"))
        charset = Bar.ASCII if ascii else Bar.UTF
        return fitted(parts, width, lambda cells: f"|{Bar(share, cells - 2, charset)}|", at=3)

    def seconds_left(self) -> float | None:
        """Until the end of the run, at the pace of late, with pauses as they were so far; None before it is known."""
        if self._pace is None:
            return None
        return (self.total - self.done) * self._pace * (1 + self._pauses_a_second)

    def _reckon(self, rate: float | None, pauses: float) -> None:
        """The pace follows what metrics.jsonl says: training seconds alone, of this process, never of the steps that
        earlier ones did. The first reading has compilation in it, and counts only until there is a second."""
        if rate and self._done > self._first:  # a resumed run begins with a record of the process before
            self._readings += 1
            older = self._pace if self._readings > 2 else 1 / rate
            self._pace = _SMOOTHING / rate + (1 - _SMOOTHING) * older
        if self._readings < 2:  # a validation before the first steps says nothing of those to come
            self._seconds_before, self._pauses_before = self._seconds, pauses
        elif (trained := self._seconds - self._seconds_before) > 0:
            self._pauses_a_second = (pauses - self._pauses_before) / trained

    def _step(self, step: int) -> str:
        """In columns, so that the eye can follow those after it."""
        return f"step {step:<{len(str(self._steps))}}  {100 * step / self._steps:3.0f} %"

    def _history(self, record: dict) -> str:
        loss = f"  training loss {record['loss']:.4f}" if record["loss"] is not None else ""
        return f"{self._step(record['step'])}  validation loss {record['val_loss']:.4f}{loss}"

    def _plain(self, record: dict) -> str:
        parts = [self._step(record["step"])]
        parts += [f"loss {record['loss']:.4f}"] if record["loss"] is not None else []
        parts += [f"lr {record['learning_rate']:.1e}"]
        parts += [f"{rate:,.0f} tokens/s"] if (rate := record["tokens_per_second"]) else []
        parts += [f"MFU {100 * record['mfu']:.1f} %"] if record["mfu"] else []
        parts += [f"{duration(left)} left"] if rate and (left := self.seconds_left()) else []
        parts += [f"val {record['val_loss']:.4f}"] if record["val_loss"] is not None else []
        parts += [f"{100 * wait:.0f} % waiting for data"] if (wait := record.get("data_wait") or 0) > 0.01 else []
        parts += [f"{plural(skipped, 'step')} skipped"] if (skipped := record.get("skipped_steps")) else []
        parts += [f"WARNING: {self._warning}"] if self._warning else []
        return "  ".join(parts)

    def _redraw(self) -> bool:
        """Draws the bar; whether there is one."""
        if (bar := self._bar) is not None:
            bar.refresh()
        return bar is not None

    def _keep_drawing(self) -> None:
        while not self._closed.wait(_TICK):
            self._redraw()
