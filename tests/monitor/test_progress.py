"""What a user sees of a run: the bar on a terminal, lines where there is none."""

import io
import re
import sys

import pytest
from tqdm import tqdm

from recipe.monitor import progress as module
from recipe.monitor.progress import Progress
from recipe.utils.log import set_up_logging

RECORD = {
    "step": 500,
    "tokens": 500 * 2**19,
    "loss": 3.41239,
    "val_loss": None,
    "learning_rate": 5.7e-4,
    "tokens_per_second": 187_234.0,
    "mfu": 0.4712,
    "data_wait": 0.004,
    "skipped_steps": 0,
    "seconds": 1400.0,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `clock(seconds)` moves it."""
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


class Terminal(io.StringIO):
    """A terminal of so many columns in the place of standard output and error."""

    def __init__(self, monkeypatch, columns: int):
        super().__init__()
        for name in ("stderr", "stdout"):
            monkeypatch.setattr(sys, name, self)
        monkeypatch.setenv("TERM", "xterm")

        class Bar(tqdm):
            def __init__(self, **options):
                super().__init__(**options | {"ncols": columns, "dynamic_ncols": False})

        monkeypatch.setattr(module, "tqdm", Bar)
        set_up_logging()

    def isatty(self) -> bool:
        return True

    @property
    def bar(self) -> str:
        """The bar that was drawn last."""
        return [text for text in re.split(r"[\r\n]", self.getvalue()) if "%|" in text][-1].rstrip()


def step(progress: Progress, clock, seconds: float, steps: int = 1) -> None:
    for _ in range(steps):
        clock(seconds)
        progress.advance()


def test_the_bar_shows_everything_that_matters_in_eighty_columns(clock, monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    progress = Progress(19_073, 2**19, 498, show=True)
    assert terminal.bar.startswith("first step: 3%|")
    step(progress, clock, 100.0)  # with compilation
    step(progress, clock, 11.0, 9)  # slow too: the time left counts neither
    assert " left" not in terminal.bar
    step(progress, clock, 2.8)
    progress.report(RECORD)  # and 18,564 more steps of 2.8 s
    for figure in ("3%|", "267M/10.0G", "loss 3.412", "lr 5.7e-04", "187k tokens/s", "MFU 47.1 %", "14h26m l"):
        assert figure in terminal.bar, terminal.bar
    assert len(terminal.bar) <= 80
    progress.close()


def test_the_bar_shows_pauses_and_warnings_and_keeps_the_validation_losses_above_it(clock, monkeypatch):
    terminal = Terminal(monkeypatch, 120)
    progress = Progress(1000, 64, 0, show=True)
    step(progress, clock, 1.0, 2)
    with progress.during("validating"):
        assert terminal.bar.startswith("validating: 0%|")
        clock(1.0)
        progress.tick(12, 40)
        assert terminal.bar.startswith("validating 12/40: 0%|")
    assert terminal.bar.startswith("0%|")
    progress.report(RECORD | {"step": 2, "val_loss": 3.50149}, "step 2 not saved")
    assert terminal.bar.startswith("WARNING: step 2 not saved: 0%|")
    assert "val 3.501" in terminal.bar
    assert "step 2       0 %  validation loss 3.5015" in terminal.getvalue()
    progress.close()


def test_lines_of_a_log_begin_with_the_first_step(capsys, clock):
    set_up_logging()
    progress = Progress(1000, 2**19, 0, show=True)
    none = dict.fromkeys(RECORD)
    with progress.during("validating"):
        clock(30.0)
    progress.report(none | {"step": 0, "tokens": 0, "learning_rate": 1e-6, "val_loss": 10.95})
    step(progress, clock, 9.0)
    progress.report(none | {"step": 1, "loss": 10.98})
    step(progress, clock, 2.0, 499)
    progress.report(RECORD | {"val_loss": 3.50149, "data_wait": 0.12, "skipped_steps": 1}, "step 500 not saved")
    with progress.during("validating"):
        progress.tick(1, 9)
        clock(61.0)
        progress.tick(2, 9)
        progress.tick(3, 9)
    assert capsys.readouterr().out.splitlines() == [
        "step 0       0 %  lr 1.0e-06  val 10.9500",
        "step 1       0 %  first step after 9.0 s",
        "step 1       0 %  loss 10.9800",
        "step 500    50 %  loss 3.4124  lr 5.7e-04  187,234 tokens/s  MFU 47.1 %  17 min left  val 3.5015  "
        "12 % waiting for data  1 step skipped  WARNING: step 500 not saved",
        "step 500: validating, 2 of 9 batches",
    ]
    silent = Progress(1000, 2**19, 0, show=False)  # of another process
    step(silent, clock, 1.0)
    silent.report(RECORD)
    assert capsys.readouterr() == ("", "")
