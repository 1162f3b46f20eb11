"""One run a directory."""

import json
import os
import subprocess
import sys
import time

import pytest

from recipe.checkpoint import lock as locks
from recipe.checkpoint.lock import LOCK, RunLock
from recipe.errors import UserError
from tests.conftest import ROOT

HOLD = """
import sys, time
from pathlib import Path
from recipe.checkpoint.lock import RunLock
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


LOCKED = """
import fcntl, json, os, sys, time
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.lockf(fd, fcntl.LOCK_EX)
print("held", flush=True)
for i in range(int(sys.argv[2])):
    os.pwrite(fd, json.dumps({"host": "elsewhere", "pid": 7, "alive": i * int(sys.argv[3])}).encode(), 0)
    time.sleep(0.5)
"""


@pytest.mark.parametrize(
    ("halves", "beats", "lease", "refusal"),
    [
        (6, 0, 60.0, ""),  # the file server lets go of what the dead machine held
        (100, 1, 60.0, "process 7 on elsewhere); wait for it, or choose another output_dir"),
        (100, 0, 2.0, r"if that machine is gone for certain, delete "),
    ],
)
def test_a_lock_of_a_machine_that_is_gone_is_waited_for(tmp_path, monkeypatch, halves, beats, lease, refusal):
    monkeypatch.setattr(locks, "_LEASE", lease)
    monkeypatch.setattr(locks, "_DEAD", 1.0)
    command = [sys.executable, "-c", LOCKED, str(tmp_path / LOCK), str(halves), str(beats)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    said, begun = [], time.monotonic()
    try:
        assert process.stdout.readline() == "held\n"
        time.sleep(0.2)
        if refusal:
            with pytest.raises(UserError) as refused:
                RunLock(tmp_path, said.append)
            assert refusal in str(refused.value)
            assert ("for certain" in str(refused.value)) == (not beats)
        else:
            RunLock(tmp_path, said.append).release()
            assert "taken over from process 7 on elsewhere" in said[-1]
    finally:
        process.kill()
        process.wait()
    assert "process 7 on elsewhere has this directory; waiting for a sign of life" in said[0]
    assert time.monotonic() - begun < 15


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
