"""What a user sees of a run: the bar at every width, lines where there is no terminal, the panels, the price."""

import codecs
import fcntl
import json
import os
import pty
import re
import select
import shlex
import signal
import struct
import sys
import termios
import time

import pytest

from eval import sample
from recipe import cli
from recipe.config import batch_arithmetic, parse_config
from recipe.errors import UserError
from recipe.estimate import memory as plan
from recipe.monitor import summary as panel
from recipe.monitor.progress import Progress, amount
from tests.conftest import ROOT, TINY, environment, flags

RECORD = {
    "step": 500,
    "tokens": 500 * 2**19,
    "loss": 3.41239,
    "val_loss": 3.50149,
    "learning_rate": 5.7e-4,
    "tokens_per_second": 187_234.0,
    "mfu": 0.4712,
    "data_wait": 0.004,
    "skipped_steps": 0,
    "seconds": 1400.0,
}


def after(*records: dict, step: int = 0, warning: str = "", price: float = 0.0, steps: int = 19_073) -> Progress:
    """A main process's progress without a terminal that has reported `records`, which print nothing."""
    progress = Progress(steps, 2**19, step, show=False, price=price)
    for record in records:
        while progress._done < record["step"]:
            progress.advance()
        progress.report(record, warning)
    return progress


@pytest.mark.parametrize("width", [30, 60, 79, 119, 199])
@pytest.mark.parametrize("mfu", [0.4712, None])
@pytest.mark.parametrize("doing", ["", "validating"])
@pytest.mark.parametrize("warning", ["", "step 20 not saved"])
def test_the_bar_fits(width, mfu, doing, warning):
    extras = {"mfu": mfu, "data_wait": 0.12, "skipped_steps": 3}
    for record in (RECORD | {"mfu": mfu}, RECORD | extras):
        progress = after(record, warning=warning, price=0.004)
        progress._doing, progress._tick = doing, " 12/40" if doing else ""
        for ascii in (False, True):
            line = progress.line(width, ascii)
            assert len(line) <= width
            assert line.isascii() or not ascii
            assert warning in line
            assert width < 60 or doing in line
            # The time left, the tokens and the loss outlast all else that is not a warning or a pause.
            if width >= 79 or (width >= 60 and not (doing and warning)):
                assert all(word in line for word in (" left", "0.26/10.00", "loss 3.41"))


def test_eighty_columns_show_everything_that_matters():
    line = after(RECORD).line(79)
    assert line.split(" ") == [
        *("3%", "0.26/10.00B", "loss", "3.412", "val", "3.501", "lr", "5.7e-4", "187k", "tok/s", "MFU", "47%"),
        *("14h27m", "left"),
    ]
    # What comes on top pushes aside what is worth less: first the percentage, never a figure of the training.
    line = after(RECORD | {"skipped_steps": 3}).line(79)
    assert "3 skipped" in line
    for part in ("0.26/10.00B", "loss 3.4", "val 3.5", "lr 5.7e-4", "187k", "MFU 47%", "14h27m left"):
        assert part in line


def test_a_wide_terminal_gets_long_words_and_a_graph_in_the_room_left():
    line = after(RECORD | {"data_wait": 0.12, "skipped_steps": 1}, price=0.004).line(199)
    assert len(line) == 199
    assert re.fullmatch(
        r"training  3%  \|[^|]+\|  0\.26/10\.00 B tokens  loss 3\.412  val 3\.501  lr 5\.7e-04  187,234 tokens/s  "
        r"MFU 47\.1 %  14 h 27 min left  12 % waiting for data  1 step skipped  cost \$5\.60 of \$213\.\d\d",
        line,
    )
    bare = after(RECORD | {"mfu": None, "val_loss": None}).line(119)
    assert "MFU" not in bare and "val" not in bare  # noqa: PT018
    assert "|" in bare
    assert "|" not in after(RECORD).line(79)  # the graph goes first


def test_a_warning_outlasts_all_else_and_is_cut_where_there_is_no_room():
    progress = after(RECORD, warning="step 20 not saved")
    assert progress.line(30) == "WARNING: step 20 not saved"
    assert progress.line(15) == "WARNING: step 2"


def test_amounts_have_one_unit():
    assert amount(3.114e9, 5e9) == ("3.11/5.00 B tokens", "3.11/5.00B")
    assert amount(1.2e7, 5.243e8)[0] == "12.0/524.3 M tokens"
    assert amount(32, 640)[0] == "32/640 tokens"


def test_the_time_left_is_of_this_process_at_the_pace_of_late():
    reading = {"tokens_per_second": 2**19 / 2.0, "seconds": 0.0}  # two seconds a step
    slow = RECORD | {"step": 10, "tokens_per_second": 2**19 / 60.0, "seconds": 600.0}  # with compilation
    assert after(slow, steps=1000).seconds_left() == pytest.approx(990 * 60)
    progress = after(slow, RECORD | reading | {"step": 20, "seconds": 620.0}, steps=1000)
    assert progress.seconds_left() == pytest.approx(980 * 2)  # the first reading is forgotten
    progress.report(RECORD | {"tokens_per_second": 2**19 / 4.0, "seconds": 660.0})
    assert progress.seconds_left() == pytest.approx(980 * (0.3 * 4 + 0.7 * 2))
    # A resumed run: 900 steps done by others, of whose hours nothing is known here.
    resumed = after(RECORD | reading | {"step": 902, "seconds": 90_000.0}, step=900, steps=1000)
    assert resumed.seconds_left() == pytest.approx(98 * 2)
    # Validation and saves take half as long again as the training since the first reading.
    resumed = Progress(1000, 2**19, 900, show=False)
    resumed.report(RECORD | slow | {"seconds": 89_000.0}, pauses=4000.0)  # of the process before: its last line
    assert resumed.seconds_left() is None
    resumed.advance()
    resumed.report(RECORD | reading | {"seconds": 90_000.0}, pauses=5000.0)
    resumed.report(RECORD | reading | {"seconds": 90_040.0}, pauses=5020.0)
    assert resumed.seconds_left() == pytest.approx(99 * 2 * 1.5)
    waiting = Progress(10, 1, 0, show=False)
    assert waiting.seconds_left() is None
    assert waiting.line(79).startswith("first step  0%")


def test_lines_of_a_log_begin_with_the_first_step(capsys):
    progress = Progress(1000, 2**19, 0, show=True)
    assert not progress.terminal
    none = dict.fromkeys(RECORD)
    progress.report(none | {"step": 0, "tokens": 0, "learning_rate": 1e-6, "val_loss": 10.95})
    progress.advance()
    progress.first(10.98)
    progress.first(float("nan"))
    for _ in range(499):
        progress.advance()
    progress.report(RECORD | {"data_wait": 0.12, "skipped_steps": 1}, "step 500 not saved")
    with progress.during("validating"):
        progress.tick(1, 9)  # as often as you like
        progress._told -= 100
        progress.tick(2, 9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 0       0 %  lr 1.0e-06  val 10.9500"
    assert re.fullmatch(r"step 1       0 %  loss 10\.9800  first step after 0\.\d s", lines[1])
    assert re.fullmatch(r"step 1       0 %  first step after 0\.\d s", lines.pop(2))
    assert lines[2] == (
        "step 500    50 %  loss 3.4124  lr 5.7e-04  187,234 tokens/s  MFU 47.1 %  23 min left  val 3.5015  "
        "12 % waiting for data  1 step skipped  WARNING: step 500 not saved"
    )
    assert lines[3:] == ["step 500: validating, 2 of 9 batches"]


def test_long_lines_are_aligned_on_a_terminal_and_left_whole_in_a_log(monkeypatch, capsys):
    text = "disk       1.49 GB a checkpoint, at most 3 at once, in runs/gpt2; 20 GB for every token once\nnext"
    assert cli.wrapped(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        first, *others, last = cli.wrapped(text).splitlines()
        assert max(map(len, (first, *others))) <= columns
        assert first.startswith("disk       1.49 GB")
        assert others
        assert all(re.match(r" {11}\S", line) for line in others)
        assert " ".join([first, *map(str.strip, others)]) == text.splitlines()[0]
        assert last == "next"
    cli.emit("a command that is to be copied " * 4, wrap=False)
    assert "\n" not in capsys.readouterr().out.strip()


def describe(*arguments: str, world: int = 1, **options) -> dict[str, str]:
    """The opening panel's lines by their labels."""
    config = parse_config(["--dataset_name=x", *arguments])
    known = {"device": "GPU", "precision": "bf16", "peak_flops": 312e12} | options
    lines = panel.describe(config, batch_arithmetic(config, world), **known)
    return {line[:11].strip(): line[11:] for line in lines}


def test_the_forecast_is_llm_cs_published_run_at_its_mfu():
    """10 B tokens of the 124M model on 8 A100s: 18,865 steps of 300 ms, 94 minutes, which the author calls about 90
    minutes and $20 (karpathy/llm.c, discussion 481). By flops_per_token that is 60 % MFU."""
    model = parse_config(["--dataset_name=x", "--config=gpt2"]).model
    flops = plan.flops_per_token(model, 1024)
    assert flops == 6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024 == 855_166_464
    seconds = plan.training_seconds(18_865 * 2**19, flops, 8 * 312e12, mfu=0.6)
    assert seconds == pytest.approx(18_865 * 0.3, rel=0.01)
    # 855,166,464 FLOP x 9,890,693,120 tokens / (0.6 x 2.496e15 FLOP/s) = 5,647.8 s
    assert seconds == pytest.approx(5647.8, abs=0.1)
    assert plan.price(seconds, 8, 20 / 1.5 / 8) == pytest.approx(20.92, abs=0.01)  # $13.33 an hour for all
    assert plan.price(3600, 8, 2.0) == 16.0


def test_the_opening_panel_tells_time_and_price_where_the_peak_is_known():
    run = ["--config=gpt2", "--max_steps=18865", "--total_batch_tokens=524288", "--price_per_hour=1.75"]
    # 855,166,464 x 18,865 x 524,288 / (0.5 x 8 x 312e12) = 6,777 s = 1.8826 h, x 8 x $1.75 = $26.36
    eight = describe(*run, world=8, device="NVIDIA A100-SXM4-80GB, DDP over 8 processes", machines=2)
    assert eight["device"] == "NVIDIA A100-SXM4-80GB, bf16 (auto)"
    assert eight["engine"] == "DDP over 8 processes on 2 machines"
    assert eight["time"].startswith("about 1 h 53 min at 50 % MFU, assumed")
    assert eight["price"] == "about $26.36: $1.75 an hour of each of 8 devices"
    one = describe(*run)
    assert one["engine"] == "one device"
    assert one["time"].startswith("about 15 h 4 min at 50 % MFU")
    assert one["price"] == "about $26.36: $1.75 an hour of the device"  # an eighth of the devices, eight times as long
    assert "price" not in describe(*run[:-1])
    # A TPU's process has 8 devices, whose peaks come added up.
    cores = parse_config(["--dataset_name=x", *run])
    lines = panel.describe(
        cores,
        batch_arithmetic(cores, 1, 8),
        device="TPU v3, 8 devices behind one process",
        precision="bf16",
        peak_flops=8 * 312e12,
    )
    assert "price      about $26.36: $1.75 an hour of each of 8 devices" in lines


def test_the_opening_panel_says_where_it_cannot_know():
    unknown = describe("--price_per_hour=0.5", peak_flops=None)
    assert unknown["time"] == "the peak of this device is not known; the progress tells after the first steps"
    assert unknown["price"] == "$0.50 an hour of the device"
    assert "its peak in fp32 is not known" in describe("--precision=fp32", precision="fp32")["time"]
    assert describe(precision="fp32")["time"].startswith("about ")  # the best that the device has
    with pytest.raises(UserError, match=r"price_per_hour is -1\.0; it must not be negative"):
        parse_config(["--dataset_name=x", "--price_per_hour=-1"])


def test_the_closing_panel():
    config = parse_config(
        [
            "--dataset_name=x",
            "--config=gpt2",
            "--max_steps=19073",
            "--total_batch_tokens=524288",
            "--price_per_hour=1.75",
            "--hellaswag_limit=500",
        ]
    )
    lines = [
        {"step": 0, "val_loss": 10.9},
        {"step": 250, "val_loss": 3.1234},
        {"step": 260},
        {"step": 19073, "val_loss": 3.2},
    ]
    lines[2] |= {"hellaswag_A_acc_norm": 0.31, "hellaswag_B_acc_norm": 0.295}
    result = panel.Result(3.2, True, seconds=5720.0, pauses=280.0)
    said = panel.outcome(config, batch_arithmetic(config, 8), result, 7.5, lines, 312e12)
    assert said == [
        "\ndone       10 B tokens in 19,073 steps; validation loss 3.2000 (unigram baseline 7.5000)",
        "best       validation loss 3.1234 at step 250",
        "HellaSwag  acc_norm 0.3100 (way A), 0.2950 (way B) at step 260, 500 rows",
        "took       1 h 35 min of training, 1,748,207 tokens/s, MFU 59.9 %; 4 min 40 s more for validation, saving and "
        "the like",
        "price      $23.33: 1 h 40 min x 8 devices x $1.75 an hour, without start-up",  # 6,000 s: 1.6667 h x 8 x 1.75
    ]
    plain = parse_config(["--dataset_name=x", "--config=gpt2"])
    lines[1]["val_loss"] = 3.2
    said = panel.outcome(plain, batch_arithmetic(plain, 1), result, 7.5, lines[:2], None)
    assert [line.split()[0] for line in said] == ["done", "took"]  # nothing else is known, or worth a line
    assert "MFU" not in said[1]


def test_commands_of_the_closing_panel_work_as_they_stand(whole_run, monkeypatch, tmp_path):
    run, _, output = whole_run
    found = [shlex.split(line) for line in output.splitlines() if line.startswith("  ")]
    assert [os.path.basename(words[1]) for words in found[:3]] == ["sample.py", "hellaswag.py", "report.py"]
    model = run / "step_00000020"
    for words in found[:3]:
        assert (ROOT / words[0]).exists() or "/" not in words[0]
        assert (ROOT / words[1]).exists()
    assert sample.arguments().parse_args(found[0][2:]).model_option == str(model)
    assert found[1][2:] == ["--model", str(model), "--limit", "500"]
    assert found[2][2:] == [str(run)]
    assert found[3][1:] == ["-m", "recipe.hub.export", str(run), "--out", f"{run}-model"]
    monkeypatch.chdir(tmp_path)  # from elsewhere: by their whole paths
    elsewhere = [shlex.split(line) for line in panel.commands(run, model)]
    assert [words[1] for words in elsewhere] == [f"{ROOT}/eval/{n}.py" for n in ("sample", "hellaswag", "report")]


def test_durations_and_money():
    assert [plan.duration(s) for s in (0.4, 59.4, 60, 200, 2820, 3599, 11_520, 180_000, 442_800)] == [
        "0.4 s",
        "59 s",
        "1 min",
        "3 min 20 s",
        "47 min",
        "1 h",
        "3 h 12 min",
        "2 d 2 h",
        "5 d 3 h",
    ]
    assert [plan.duration(s, short=True) for s in (45, 200, 11_520, 442_800)] == ["45s", "3m20s", "3h12m", "5d3h"]
    assert [plan.money(x) for x in (0.0042, 0.05, 20.917, 1234.4)] == ["$0.0042", "$0.05", "$20.92", "$1,234"]


class Screen:
    """As much of a terminal as a run needs: \\r, \\n, ESC [ J, and wrapping, with its width as it is at each moment."""

    def __init__(self, columns: int):
        self.rows, self.y, self.x, self.columns = [""], 0, 0, columns
        self.wrapped = 0

    def feed(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[\d;?]*[A-Za-z]|.", text, re.DOTALL):
            if token == "\r":
                self.x = 0
            elif token == "\n":
                self._down()
            elif token == "\x1b[J":
                self.rows = [*self.rows[: self.y], self.rows[self.y][: self.x]]
            else:
                assert len(token) == 1, f"unexpected {token!r}"
                if self.x >= self.columns:
                    self.x, self.wrapped = 0, self.wrapped + 1
                    self._down()
                row = self.rows[self.y].ljust(self.x)
                self.rows[self.y] = row[: self.x] + token + row[self.x + 1 :]
                self.x += 1

    def _down(self) -> None:
        self.y += 1
        self.rows += [""] * (self.y + 1 - len(self.rows))

    def resize(self, columns: int) -> None:
        """Rows that are longer become several, as most terminals do it, and the cursor stays on its character."""
        rows, at = [], (0, 0)
        for y, row in enumerate(self.rows):
            row = row.rstrip()
            if y == self.y:
                at = (len(rows) + self.x // columns, self.x % columns)
            rows += [row[i : i + columns] for i in range(0, max(len(row), 1), columns)]
        self.rows, self.columns, (self.y, self.x) = rows, columns, at


def test_a_run_on_a_terminal_is_resized_and_stopped_and_leaves_it_clean(shards, tmp_path):
    run = tmp_path / "run"
    settings = TINY | {
        "dataset_name": shards,
        "output_dir": run,
        "max_steps": 100_000,
        "save_steps": 0,
        "eval_steps": 4,
    }
    child, main = pty.fork()
    if child == 0:
        try:
            os.chdir(ROOT)
            os.execve(sys.executable, [sys.executable, "recipe/train.py", *flags(**settings)], environment())
        finally:
            os._exit(127)
    screen, output, code = Screen(100), "", None
    decoder = codecs.getincrementaldecoder("utf-8")()

    def read(seconds: float) -> bool:
        """Takes what comes within so many seconds; whether there was anything."""
        nonlocal output
        if not select.select([main], [], [], seconds)[0]:
            return False
        try:
            text = decoder.decode(os.read(main, 65536))
        except OSError:  # how Linux says that the other end was closed
            return False
        output += text
        screen.feed(text)
        return True

    def read_until(pattern: str) -> None:
        start, deadline = len(output), time.monotonic() + 120
        while not re.search(pattern, output[start:], re.DOTALL):
            assert read(1) or time.monotonic() < deadline, output[start:]

    def resize(columns: int) -> None:
        while read(0):  # what was drawn for the old width
            pass
        fcntl.ioctl(main, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        screen.resize(columns)

    try:
        resize(100)
        before = termios.tcgetattr(main)
        read_until("validation loss.*validation loss")
        for columns in (60, 140, 80):
            resize(columns)
            begun = len(output)
            read_until("left.*left.*left")
            drawn = [len(text) for text in re.findall(r"\x1b\[J([^\r]*)\r", output[begun:])[1:]]
            assert max(drawn) < columns  # the last column is free
            assert columns != 140 or max(drawn) == 139  # the graph takes the room that is left
        os.write(main, b"\x03")  # what the terminal makes of Ctrl-C: an echo, and SIGINT for who is in front
        read_until("stopped    before the end")
        assert termios.tcgetattr(main) == before
        while read(30):
            pass
        code = os.waitpid(child, 0)[1]
    finally:
        if code is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(main)
    assert os.waitstatus_to_exitcode(code) == 75
    assert "validating" in output
    assert "\x1b[?25l" not in output  # the cursor was never hidden
    rows = [row.rstrip() for row in screen.rows]
    assert rows[-1] == ""  # where the prompt comes
    assert screen.x == 0
    stopping = next(i for i, row in enumerate(rows) if row.startswith("stopping at the next step boundary"))
    assert re.match(r"step \d+: saved", rows[stopping + 1])
    assert not [row for row in rows if "█" in row or "tok/s" in row or "^C" in row or row.startswith("training")]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    shown = [row for row in rows if "validation loss" in row]
    validated = [line for line in steps if line["val_loss"] is not None]
    assert len(shown) in (len(validated), len(validated) - 1)
    row = (
        f"step 4         0 %  validation loss {validated[1]['val_loss']:.4f}  training loss {validated[1]['loss']:.4f}"
    )
    assert row.startswith(shown[1])  # the rest was moved to the next row when the terminal became narrower
