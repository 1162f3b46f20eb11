"""What a user sees of a run: a progress bar on a terminal, and lines in a log."""

import io
import re
import sys
from types import SimpleNamespace

from tqdm import tqdm

from recipe.config import UNDECIDED
from recipe.monitor import progress as module
from recipe.monitor.progress import Progress
from recipe.utils.log import set_up_logging

RECORD = {"step": 500, "tokens": 500 * 2**19, "loss": 3.41239, "val_loss": None, "learning_rate": 5.7e-4}
RECORD |= {"tokens_per_second": 187_234.0, "mfu": 0.4712, "data_wait": 0.004, "skipped_steps": 0, "seconds": 1400.0}


class Terminal(io.StringIO):
    """A terminal of `columns` columns in place of standard output and error."""

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


def test_the_bar_shows_loss_tokens_speed_and_time_left_in_eighty_columns(monkeypatch):
    terminal = Terminal(monkeypatch, 80)
    progress = Progress(19_073, 2**19, 480, show=True)
    assert terminal.bar.startswith("first steps: 3%|")
    for step in (480, 490):  # of an earlier process, and of the first steps of this one, which may have compiled
        progress.report(RECORD | {"step": step, "seconds": 1372.0}, elapsed=1372.0)
        assert " left" not in terminal.bar
    for _ in range(498 - 480):
        progress.advance()
    progress.report(RECORD, elapsed=1400.0)  # and 18,573 more steps of 2.8 s
    for figure in ("3%|", "loss 3.4124", "261M/10.0G tok", "187,234 tok/s", "MFU 47.1 %", "14 h 27 min left"):
        assert figure in terminal.bar, terminal.bar
    assert len(terminal.bar) <= 80
    with progress.during("validating") as tick:
        assert terminal.bar.startswith("validating: 3%|")
        tick(12, 40)
        assert terminal.bar.startswith("validating 12/40: 3%|")
    assert terminal.bar.startswith("3%|")
    progress.report(RECORD | {"val_loss": 3.50149}, "step 500 not saved", elapsed=1400.0)
    assert terminal.bar.startswith("WARNING: step 500 not saved: 3%|")
    assert "step 500      3 %  validation loss 3.5015" in terminal.getvalue()  # above the bar
    progress.close()


def test_the_time_left_includes_pauses_like_those_so_far(capsys):
    """Of 100 steps of 1 s, each tenth is followed by 20 s of validation; compilation took 50 s."""
    set_up_logging()
    progress = Progress(100, 1000, 0, show=True)
    pauses = 30.0  # for the validation before the first step
    for step in (1, *range(5, 101, 5)):
        pauses += 20.0 * (step % 10 == 0)
        record = RECORD | {"step": step, "tokens_per_second": 1000.0, "seconds": 50.0 + step}
        progress.report(record, elapsed=record["seconds"] + pauses)
    lines = capsys.readouterr().out.splitlines()
    left = {int(line.split()[1]): line.partition("MFU 47.1 %  ")[2] for line in lines}
    assert (left[1], left[5]) == ("", "1 min 35 s left")  # nothing is known of the validation yet
    assert left[50] == "2 min 32 s left"  # 50 s and five times 20 s, less 2 s: the first step does not count
    assert left[100] == ""


def test_a_log_has_a_line_for_each_record_and_one_a_minute_in_a_long_pause(capsys, monkeypatch):
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.seconds)
    set_up_logging()
    progress = Progress(1000, 2**19, 0, show=True)
    empty = dict.fromkeys(RECORD)
    progress.report(empty | {"step": 0, "tokens": 0, "learning_rate": 1e-6, "val_loss": 10.95})
    progress.report(empty | {"step": 2, "tokens": 2**20})  # only a checkpoint was due: no line
    progress.report(RECORD | {"step": 490, "learning_rate": None, "mfu": None, "seconds": 1372.0}, elapsed=1372.0)
    record = RECORD | {"val_loss": 3.50149, "data_wait": 0.12, "skipped_steps": 1}
    progress.report(record, "step 500 not saved", elapsed=1400.0)
    with progress.during("validating") as tick:
        for batches_done in range(1, 4):
            tick(batches_done, 9)
            clock.seconds += 31.0
    Progress(1000, 2**19, 0, show=False).report(RECORD)  # of another process: no line
    progress = Progress(UNDECIDED, 2**19, 0, hours=0.5, show=True)
    for step, elapsed in ((490, 1200.0), (500, 1350.0), (510, 1900.0)):  # half an hour and 100 s
        progress.report(empty | {"step": step, "loss": 3.41239, "tokens_per_second": 187_234.0}, elapsed=elapsed)
    assert capsys.readouterr().out.splitlines() == [
        "step 0       0 %  lr 1.0e-06  val 10.9500",
        "step 490    49 %  loss 3.4124  187,234 tok/s",
        "step 500    50 %  loss 3.4124  lr 5.7e-04  187,234 tok/s  MFU 47.1 %  val 3.5015  23 min 20 s left  "
        "12 % waiting for data  1 step skipped  WARNING: step 500 not saved",
        "validating, 3 of 9 batches",
        "step 490      67 %  loss 3.4124  187,234 tok/s",
        "step 500      75 %  loss 3.4124  187,234 tok/s  7 min 30 s left",
        "step 510     100 %  loss 3.4124  187,234 tok/s  0.0 s left",
    ]
