"""How messages are printed (recipe/log.py), and numbers in them (recipe/units.py)."""

import logging
import re
import sys

from recipe import log, units


def test_long_lines_are_aligned_on_a_terminal_and_left_whole_in_a_log(monkeypatch, capsys):
    text = "disk       1.49 GB a checkpoint, at most 3 at once, in runs/gpt2; 20 GB for every token once\nnext"
    assert log.wrap(text) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for columns in (40, 80):
        monkeypatch.setenv("COLUMNS", str(columns))
        first, *others, last = log.wrap(text).splitlines()
        assert max(map(len, (first, *others))) <= columns
        assert all(re.match(r" {11}\S", line) for line in others)
        assert " ".join([first, *map(str.strip, others)]) == text.splitlines()[0]
        assert last == "next"
    command = "  " + "a command that is to be copied " * 4
    assert log.wrap(command) == command


def test_messages_are_the_main_processs(capsys):
    logger = logging.getLogger("recipe.anything")
    log.set_up_logging()
    logger.info("data       %d tokens", 3)
    log.set_up_logging(main=False)
    logger.warning("WARNING    from another process")
    assert capsys.readouterr() == ("data       3 tokens\n", "")


def test_durations_and_money():
    seconds = (0.4, 59.4, 60, 200, 2820, 3599, 11_520, 180_000, 442_800)
    expected = ["0.4 s", "59 s", "1 min", "3 min 20 s", "47 min", "1 h", "3 h 12 min", "2 d 2 h", "5 d 3 h"]
    assert [units.duration(s) for s in seconds] == expected
    assert [units.duration(s, short=True) for s in (45, 200, 11_520, 442_800)] == ["45s", "3m20s", "3h12m", "5d3h"]
    assert [units.money(x) for x in (0.0042, 0.05, 20.917, 1234.4)] == ["$0.0042", "$0.05", "$20.92", "$1,234"]
