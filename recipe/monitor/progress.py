"""What a user sees while a run goes on: a tqdm bar on a terminal, log lines elsewhere, nothing on other processes."""

import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from recipe.utils.units import duration, plural

logger = logging.getLogger(__name__)

# tqdm's, with our own speed and time left behind it: they do not count compilation, nor an earlier process's steps.
_FORMAT = "{desc}{percentage:.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
_SETTLING = 10  # steps of a process that the time left does not count: several times as slow as those after them
_BETWEEN_DRAWINGS, _BETWEEN_LINES = 0.25, 60.0  # seconds, in a long pause


class Progress:
    """A bar in tokens where standard output and error are a terminal, otherwise a line for each record; silent where
    `show` is false."""

    def __init__(self, steps: int, step_tokens: int, step: int, *, show: bool):
        """For a run of `steps` steps of `step_tokens` tokens each that has done `step` of them."""
        self._steps, self._step_tokens, self._show = steps, step_tokens, show
        self._first = self._done = step
        self._begun = self._settled = self._last_shown = time.monotonic()
        self._doing = "first step"  # in which a compilation can take minutes
        self._newest: dict[str, float] = {}  # of each column that the bar shows
        self._warning = ""
        on_terminal = sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = tqdm(
            total=steps * step_tokens,
            initial=step * step_tokens,
            unit_scale=True,
            bar_format=_FORMAT,
            dynamic_ncols=True,
            leave=False,
            disable=not (show and on_terminal),
        )
        self._draw()

    def advance(self) -> None:
        """Counts a step that is done."""
        self._done += 1
        if self._done == self._first + 1:
            self._doing = ""
            self._line(f"{self._step(self._done)}  first step after {duration(time.monotonic() - self._begun)}")
            self._draw()
        if self._done == self._first + _SETTLING:
            self._settled = time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(self._figures(self._newest, short=True), refresh=False)
            self._bar.update(self._step_tokens)

    def report(self, record: dict, warning: str = "") -> None:
        """Shows a record of metrics.jsonl, and a warning that must not scroll away."""
        self._newest |= {name: value for name, value in record.items() if value is not None}
        self._warning = f"WARNING: {warning}" if warning else ""
        self._draw()
        self._line("  ".join(filter(None, (self._step(record["step"]), self._figures(record), self._warning))))
        if not self._bar.disable and record["val_loss"] is not None:
            logger.info("%s  validation loss %.4f", self._step(record["step"]), record["val_loss"])

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """A context for an interruption of the training: `what` is "validating", "saving"..."""
        before, self._doing, self._last_shown = self._doing, what, time.monotonic()
        self._draw()
        try:
            yield
        finally:
            self._doing = before
            if self._done == self._first:
                self._begun = time.monotonic()
            self._draw()

    def tick(self, done: int, of: int) -> None:
        """Shows that `done` of `of` batches of the interruption are done."""
        now = time.monotonic()
        if now - self._last_shown > (_BETWEEN_LINES if self._bar.disable else _BETWEEN_DRAWINGS):
            self._last_shown = now
            self._draw(f" {done}/{of}")
            self._line(f"step {self._done}: {self._doing}, {done} of {of} batches")

    def seconds_left(self) -> float | None:
        """Until the end of the run, at the mean pace of this process, pauses included, without its first _SETTLING
        steps; None until one more is done."""
        steps = self._done - self._first - _SETTLING
        if steps < 1:
            return None
        return (self._steps - self._done) * (time.monotonic() - self._settled) / steps

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _figures(self, values: dict, *, short: bool = False) -> str:
        def figure(form: str, column: str, factor: float = 1, at_least: float = -math.inf) -> None:
            value = values.get(column)
            if value is not None and math.isfinite(value) and value > at_least:
                parts.append(form.format(value * factor))

        parts, left = [], self.seconds_left()
        figure("loss {:.3f}" if short else "loss {:.4f}", "loss")
        figure("lr {:.1e}", "learning_rate")
        if short and values.get("tokens_per_second"):
            parts.append(f"{tqdm.format_sizeof(values['tokens_per_second'])} tokens/s")
        else:
            figure("{:,.0f} tokens/s", "tokens_per_second")
        figure("MFU {:.1f} %", "mfu", 100)
        if left:
            parts.append(f"{duration(left, short=short)} left")
        figure("val {:.3f}" if short else "val {:.4f}", "val_loss")
        figure("{:.0f} % waiting for data", "data_wait", 100, at_least=0.01)
        if skipped := values.get("skipped_steps"):
            parts.append(f"{plural(skipped, 'step')} skipped")
        return "  ".join(parts)

    def _step(self, step: int) -> str:
        """In columns, so that the eye can follow those after it."""
        return f"step {step:<{len(str(self._steps))}}  {100 * step / self._steps:3.0f} %"

    def _line(self, text: str) -> None:
        """Logs a line where there is no bar."""
        if self._show and self._bar.disable:
            logger.info(text)

    def _draw(self, how_far: str = "") -> None:
        if not self._bar.disable:
            doing = f"{self._doing}{how_far}" if self._doing else ""
            self._bar.set_description(f"{self._warning} {doing}".strip(), refresh=False)
            self._bar.set_postfix_str(self._figures(self._newest, short=True))
