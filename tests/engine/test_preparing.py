"""Several processes: one prepares the text for all, and they end together."""

import signal
import time

import pytest

from recipe.utils.processes import Processes
from tests import processes as programs
from tests.conftest import tiny_flags

PROGRAM = """
import sys, time
from unittest import mock
from recipe import train
from recipe.utils.errors import UserError

def prepare(data):
    print("preparing", flush=True)
    {body}

with mock.patch("recipe.data.open.prepare", prepare):
    sys.exit(train.main())
"""


@pytest.fixture
def start(tmp_path):
    """start(body) -> train.py in three processes, whose prepare() is `body`."""

    def start(body: str) -> programs.Running:
        (tmp_path / "program.py").write_text(PROGRAM.format(body=body))
        (tmp_path / "my.txt").write_text("To be, or not to be.\n")
        fields = tiny_flags(tmp_path / "my.txt", tmp_path / "run", total_batch_tokens=192)
        return programs.Running(tmp_path / "program.py", *fields, cwd=tmp_path, processes=3)

    return start


def test_what_one_process_could_not_prepare_is_not_tried_by_the_others(start):
    running = start("raise UserError('my.txt: not UTF-8 text')")
    assert running.wait(60) == 2
    assert running.stdout.count("preparing") == 1
    assert running.stderr.count("error: my.txt: not UTF-8 text\n") == 1
    assert "lost  " not in running.output


def test_ctrl_c_while_one_process_prepares_text_is_no_lost_process(start):
    running = start("time.sleep(60)")
    running.until("preparing")
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 75
    assert "stopped before the first step; there is nothing to save" in running.stderr
    assert "lost  " not in running.output


CLOSE = """
import os, time
from recipe.engine.factory import open_strategy
strategy = open_strategy("fp32")
if strategy.runtime.processes.is_main:
    time.sleep(2)
    print("main ends", flush=True)
strategy.runtime.close()
print("closed", flush=True)
"""


def test_no_process_ends_before_the_main_one_does(tmp_path):
    """The launcher would kill it 30 s later, for example while wandb still uploads."""
    (tmp_path / "program.py").write_text(CLOSE)
    running = programs.Running(tmp_path / "program.py", processes=2)
    while "main ends" not in running.output:
        assert "closed" not in running.output
        time.sleep(0.02)
    assert running.wait(60) == 0
    assert running.output.count("closed") == 2


@pytest.mark.parametrize(
    ("place", "turn"), [({}, 1), ({"is_main": False, "local_rank": 0}, 2), ({"is_main": False, "local_rank": 1}, 3)]
)
def test_other_nodes_take_their_turn_after_the_main_process(place, turn, monkeypatch):
    turns, shared_error = [], Processes.shared_error
    monkeypatch.setattr(Processes, "shared_error", lambda *args: turns.append(1) or shared_error(*args))
    assert Processes(**place).in_turns(lambda: len(turns), "") == turn
