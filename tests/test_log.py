"""How messages are printed (recipe/utils/log.py), and the numbers in them (recipe/utils/units.py)."""

import io
import logging
import os
import shlex
import subprocess
import sys

import pytest

from recipe.utils import log, units
from tests.conftest import ROOT, environment


def test_only_the_main_process_prints_messages(capsys):
    logger = logging.getLogger("recipe.anything")
    log.set_up_logging()
    logger.info("data       %d tokens", 3)
    log.set_up_logging(main=False)
    logger.warning("WARNING    from another process")
    assert capsys.readouterr() == ("data       3 tokens\n", "")


def test_a_full_disk_under_standard_output_raises_no_error(monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        log.set_up_logging()
        logging.getLogger("recipe.train").info("step 1")
        with pytest.raises(OSError, match="No space left"):
            stdout.flush()  # shows that the line was not written
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # to close it without an error


TRAIN = "recipe/train.py --learning_rate fast"
# What it does then, without its imports
FAIL = "-c 'import sys; from recipe.utils.log import print_error; print_error(5); sys.exit(2)'"


@pytest.mark.parametrize(
    ("program", "redirection"), [(TRAIN, "2> /dev/full"), (TRAIN, ">&- 2>&-"), (FAIL, "2>&1 >&- | true")]
)
def test_an_error_that_cannot_be_printed_keeps_the_exit_code(program, redirection):
    script = f"set -o pipefail; {shlex.quote(sys.executable)} {program} {redirection}"
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), capture_output=True, timeout=60)
    assert result.returncode == 2


COMMAND = "from eval.common import run_main; run_main(lambda: print('text\\n' * 10**5, flush=True))"


def test_a_command_ends_silently_when_its_reader_does():
    script = f"{shlex.quote(sys.executable)} -c {shlex.quote(COMMAND)} | head -1"
    result = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), capture_output=True, timeout=60)
    assert (result.stdout, result.stderr) == (b"text\n", b"")


def test_a_message_keeps_what_the_terminal_cannot_show_as_escapes(monkeypatch):
    screen = io.TextIOWrapper(written := io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", screen)
    log.set_up_logging()
    logging.getLogger("recipe.train").info("schön 今")
    screen.flush()
    assert written.getvalue() == b"sch\xf6n \\u4eca\n"


def test_a_closed_standard_output_raises_no_error(monkeypatch):
    monkeypatch.setattr("sys.stdout", None)
    log.set_up_logging()
    monkeypatch.setattr(logging, "raiseExceptions", True)
    logging.getLogger("recipe.train").info("step 1")


def test_durations():
    seconds = (0.4, 59.4, 60, 200, 2820, 3599, 11_520, 180_000, 442_800)
    expected = ["0.4 s", "59 s", "1 min", "3 min 20 s", "47 min", "59 min 59 s", "3 h 12 min", "2 d 2 h", "5 d 3 h"]
    assert [units.duration(s) for s in seconds] == expected


def test_sizes():
    """Three digits, also where rounding reaches the next unit: 1,907 steps of 524,288 tokens are 1 B."""
    sizes = {7: "7", 999_400: "999 k", 999_500: "1 M", 1_234_567: "1.23 M", 1907 * 524_288: "1 B", 10**13: "10 T"}
    assert {size: units.si(size, "B") for size in sizes} == sizes
