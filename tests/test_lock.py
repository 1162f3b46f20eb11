"""One run a directory."""

import json
import os
import subprocess
import sys
import time

import pytest

from recipe import lock as locks
from recipe.config import UserError
from recipe.lock import LOCK, RunLock
from tests.conftest import ROOT

HOLD = """
import sys, time
from pathlib import Path
from recipe.lock import RunLock
lock = RunLock(Path(sys.argv[1]), print)
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_and_told_who_has_it(tmp_path, holder):
    with pytest.raises(UserError, match=rf"another run writes there \(process {holder.pid} on .+\); wait for it"):
        RunLock(tmp_path, print)


def test_a_dead_owners_lock_is_taken_over_and_that_is_said(tmp_path, holder):
    holder.kill()
    holder.wait()
    said = []
    RunLock(tmp_path, said.append).release()
    assert len(said) == 1
    assert f"taken over from process {holder.pid}" in said[0]
    RunLock(tmp_path, said.append).release()  # released: nothing to say
    assert len(said) == 1


@pytest.mark.parametrize("alive", [True, False])
def test_where_the_lock_does_not_reach_another_machine_its_signs_of_life_do(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(locks, "_DEAD", 3.0)
    owner = {"host": "elsewhere", "pid": 7, "alive": time.time()}
    (tmp_path / LOCK).write_text(json.dumps(owner))
    said = []

    def sleep(seconds, real=time.sleep):
        real(seconds)
        if alive:
            (tmp_path / LOCK).write_text(json.dumps(owner | {"alive": time.time()}))

    monkeypatch.setattr(locks.time, "sleep", sleep)
    if alive:
        with pytest.raises(UserError, match="process 7 on elsewhere"):
            RunLock(tmp_path, said.append)
    else:
        RunLock(tmp_path, said.append).release()
        assert "taken over from process 7 on elsewhere" in said[-1]
    assert "waiting 3 s for a sign of life" in said[0]


def test_the_owner_shows_that_it_lives(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "_BEAT", 0.05)
    lock = RunLock(tmp_path, print)
    first = json.loads((tmp_path / LOCK).read_text())
    assert first["pid"] == os.getpid()
    time.sleep(0.5)
    assert json.loads((tmp_path / LOCK).read_text())["alive"] > first["alive"]
    (tmp_path / "metrics.jsonl").touch()
    lock.release()
    assert (tmp_path / LOCK).read_text() == ""


def test_a_run_that_was_refused_leaves_no_directory(tmp_path):
    RunLock(tmp_path / "run", print).release()
    assert not (tmp_path / "run").exists()
