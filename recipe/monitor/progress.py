"""Progress of a run: a tqdm bar on a terminal, log lines elsewhere, nothing on the other processes."""

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

from tqdm import tqdm

from recipe.utils.units import duration, plural

logger = logging.getLogger(__name__)

# tqdm's format with our own speed and remaining time, which exclude compilation and an earlier process's steps.
_FORMAT = "{desc}{percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} tok{postfix}"
_BETWEEN_LINES = 60.0  # seconds between log lines in a long pause
# (column of a record, format, factor of its unit), in display order.
_FIGURES = (
    ("loss", "loss {:.4f}", 1),
    ("learning_rate", "lr {:.1e}", 1),
    ("tokens_per_second", "{:,.0f} tok/s", 1),
    ("mfu", "MFU {:.1f} %", 100),
    ("val_loss", "val {:.4f}", 1),
)
_NOT_ON_THE_BAR = {"learning_rate", "val_loss"}  # which has 80 columns; validation losses are lines above it


class Progress:
    """A bar in tokens on a terminal, otherwise a line for each record; silent if `show` is false."""

    def __init__(self, steps: int, step_tokens: int, first_step: int, *, hours: float = 0.0, show: bool):
        """For a run of `steps` steps of `step_tokens` tokens each, or of `hours`, that has done `first_step`."""
        self._seconds = 3600 * hours
        self._steps, self._step_tokens, self._first_step, self._show = steps, step_tokens, first_step, show
        self._newest: dict[str, float] = {}  # the newest value of each column on the bar
        self._warning = ""
        on_terminal = sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = tqdm(
            desc="first steps: ",  # in which a compilation can take minutes
            total=None if hours else steps * step_tokens,
            initial=first_step * step_tokens,
            unit_scale=True,
            bar_format=_FORMAT,
            dynamic_ncols=True,
            leave=False,
            disable=not (show and on_terminal),
        )

    def advance(self) -> None:
        """Counts a finished step."""
        self._bar.update(self._step_tokens)

    def report(self, record: dict, warning: str = "", elapsed: float = 0.0) -> None:
        """Shows a record of metrics.jsonl, and a warning that must not scroll away, after `elapsed` seconds."""
        share = record["step"] / self._steps
        if self._seconds:
            share = min(1.0, elapsed / self._seconds)
            self._bar.total = int(self._bar.n / share) if share else None
        self._newest |= {k: value for k, value in record.items() if value is not None and k not in _NOT_ON_THE_BAR}
        self._warning = f"WARNING: {warning}" if warning else ""
        self._bar.set_description(self._warning, refresh=False)
        self._bar.set_postfix_str(self._figures(self._newest, elapsed))
        width = len(str(self._steps)) if not self._seconds else 6
        step = f"step {record['step']:<{width}}  {100 * share:3.0f} %"
        figures = list(filter(None, (self._figures(record, elapsed), self._warning)))
        if self._show and self._bar.disable and figures:
            logger.info("  ".join([step, *figures]))
        elif self._show and record["val_loss"] is not None:
            logger.info("%s  validation loss %.4f", step, record["val_loss"])

    @contextmanager
    def during(self, what: str) -> Generator[Callable[[int, int], None], None, None]:
        """A context for an interruption of the training: `what` is "validating", "saving"... Yields a function that
        shows how many of how many batches are done."""
        last_line = time.monotonic()

        def tick(done: int, of: int) -> None:
            nonlocal last_line
            self._bar.set_description(f"{self._warning} {what} {done}/{of}".strip())
            if self._show and self._bar.disable and time.monotonic() - last_line > _BETWEEN_LINES:
                last_line = time.monotonic()
                logger.info("%s, %d of %d batches", what, done, of)

        self._bar.set_description(f"{self._warning} {what}".strip())
        try:
            yield tick
        finally:
            self._bar.set_description(self._warning)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _figures(self, record: dict, elapsed: float) -> str:
        known = {k: v for k, v in record.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        parts = [form.format(known[column] * factor) for column, form, factor in _FIGURES if column in known]
        if known.get("tokens_per_second") and self._first_step + 1 < known["step"] < self._steps:  # the first compiles
            seconds = (self._steps - known["step"]) * self._step_tokens / known["tokens_per_second"]
            parts.append(f"{duration(max(0.0, self._seconds - elapsed) if self._seconds else seconds)} left")
        if known.get("data_wait", 0) > 0.01:
            parts.append(f"{100 * known['data_wait']:.0f} % waiting for data")
        if known.get("skipped_steps"):
            parts.append(f"{plural(known['skipped_steps'], 'step')} skipped")
        return "  ".join(parts)
