"""Progress of a run: on the main process a tqdm bar on a terminal, or log lines elsewhere; nothing on the others."""

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

# tqdm's format with our own speed and remaining time, which exclude compilation and the steps of earlier processes; the
# time left includes pauses such as validation in proportion to those so far.
_FORMAT = "{desc}{percentage:.0f}%|{bar}| {n_fmt}/{total_fmt} tok{postfix}"
_PAUSE_LOGGING_S = 60.0  # between log lines in a long pause
# (column of a record, format, factor to the displayed unit), in display order.
_FIGURES = (
    ("loss", "loss {:.4f}", 1),
    ("learning_rate", "lr {:.1e}", 1),
    ("tokens_per_second", "{:,.0f} tok/s", 1),
    ("mfu", "MFU {:.1f} %", 100),
    ("val_loss", "val {:.4f}", 1),
)
_NOT_ON_BAR = {"learning_rate", "val_loss"}  # to fit 80 columns; validation losses are printed above the bar


class Progress:
    """A progress bar in tokens on a terminal, otherwise a line for each record; prints nothing unless `show`."""

    def __init__(self, steps: int, step_tokens: int, first_step: int, *, hours: float = 0.0, show: bool):
        """For a run of `steps` steps of `step_tokens` tokens each, or of `hours`, that starts after `first_step`."""
        self._total_seconds = 3600 * hours
        self._steps, self._step_tokens, self._first_step, self._show = steps, step_tokens, first_step, show
        self._first_reading = math.inf  # its step; the speed up to it includes compilation
        self._trained, self._elapsed = 0.0, 0.0  # seconds of training, and with the pauses, at the first reading
        self._newest: dict[str, float] = {}  # the newest value of each column on the bar
        self._warning = ""
        on_terminal = sys.stderr.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._bar = tqdm(
            desc="first steps: ",  # compilation can take minutes
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
        if self._first_reading > record["step"] > self._first_step and record["tokens_per_second"]:
            self._first_reading, self._trained, self._elapsed = record["step"], record["seconds"], elapsed
        fraction = record["step"] / self._steps
        if self._total_seconds:
            fraction = min(1.0, elapsed / self._total_seconds)
            self._bar.total = int(self._bar.n / fraction) if fraction else None
        self._newest |= {k: value for k, value in record.items() if value is not None and k not in _NOT_ON_BAR}
        self._warning = f"WARNING: {warning}" if warning else ""
        self._bar.set_description(self._warning, refresh=False)
        self._bar.set_postfix_str(self._figures(self._newest, elapsed))
        width = len(str(self._steps)) if not self._total_seconds else 6
        step = f"step {record['step']:<{width}}  {100 * fraction:3.0f} %"
        texts = list(filter(None, (self._figures(record, elapsed), self._warning)))
        if self._show and self._bar.disable and texts:
            logger.info("  ".join([step, *texts]))
        elif self._show and record["val_loss"] is not None:
            logger.info("%s  validation loss %.4f", step, record["val_loss"])

    @contextmanager
    def during(self, activity: str) -> Generator[Callable[[int, int], None], None, None]:
        """Context: a pause in training for an `activity` such as "validating" or "saving". Yields a function of
        (batches done, batches in all) that shows progress."""
        logged_at = time.monotonic()

        def tick(count: int, total: int) -> None:
            nonlocal logged_at
            self._bar.set_description(f"{self._warning} {activity} {count}/{total}".strip())
            if self._show and self._bar.disable and time.monotonic() - logged_at > _PAUSE_LOGGING_S:
                logged_at = time.monotonic()
                logger.info("%s, %d of %d batches", activity, count, total)

        self._bar.set_description(f"{self._warning} {activity}".strip())
        try:
            yield tick
        finally:
            self._bar.set_description(self._warning)

    def close(self) -> None:
        """Removes the bar."""
        self._bar.close()

    def _figures(self, record: dict, elapsed: float) -> str:
        values = {k: v for k, v in record.items() if isinstance(v, (int, float)) and math.isfinite(v)}
        texts = [form.format(values[column] * factor) for column, form, factor in _FIGURES if column in values]
        speed = values.get("tokens_per_second")
        if speed and self._first_reading < values["step"] < self._steps:
            if self._total_seconds:
                seconds = max(0.0, self._total_seconds - elapsed)
            else:
                seconds = (self._steps - values["step"]) * self._step_tokens / speed
                seconds *= (elapsed - self._elapsed) / max(1e-3, values["seconds"] - self._trained)
            texts.append(f"{duration(seconds)} left")
        if values.get("data_wait", 0) > 0.01:
            texts.append(f"{100 * values['data_wait']:.0f} % waiting for data")
        if values.get("skipped_steps"):
            texts.append(f"{plural(values['skipped_steps'], 'step')} skipped")
        return "  ".join(texts)
