"""Signals, heard by a process that may be deep in something: each test is a small process of its own."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import ROOT

PROGRAM = """
import os, signal, sys, time
from recipe.log import set_up_logging
set_up_logging()
from recipe.engine import shutdown as stopping
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
{before}
stop = stopping.StopSignal()
{begin}
try:
    print("ready", flush=True)
    {body}
except KeyboardInterrupt:
    print("unwound")
    sys.exit(75)
sys.exit(0)
"""
LOOP = "while not stop.requested: time.sleep(0.01); stop.at_boundary()"


def start(body: str, *, before: str = "", begun: bool = True, env: dict | None = None) -> subprocess.Popen:
    """A process with a `Stop`, past its first step if `begun`, that has said it is ready."""
    code = PROGRAM.format(body=body, before=before, begin="stop.begin()" if begun else "")
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | (env or {}),
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_of_them_asks_for_a_stop_and_says_so(number):
    process = start(LOOP)
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "stopping at the next step boundary, with a checkpoint" in output


def test_nohup_stays_nohup():
    process = start("time.sleep(1)", before="signal.signal(signal.SIGHUP, signal.SIG_IGN)")
    process.send_signal(signal.SIGHUP)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (0, "")


def test_before_the_first_step_there_is_nothing_to_wait_for():
    process = start("time.sleep(60)", begun=False)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert (process.returncode, output) == (75, "unwound\n")


DEADLOCK = "import ctypes; c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); "
DEADLOCK += "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


@pytest.mark.parametrize("body", ["time.sleep(60)", DEADLOCK], ids=["Python", "C"])
def test_a_second_ctrl_c_leaves_at_once_whatever_the_main_thread_does(body):
    """Also outside of Python, as in a collective: there no handler of Python's would be called."""
    process = start(body)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)  # of a launcher that passes on what the terminal has sent to all
    time.sleep(1.2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=5)
    assert process.returncode == 130
    assert "stopped at once" in output


def test_who_waits_for_a_process_that_has_died_leaves_after_a_while():
    process = start("time.sleep(60)", before="stopping._LEAST_PATIENCE = 1.0")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 75
    assert 1 < time.monotonic() - begun < 10
    assert "the step did not end within 1 s" in output


def test_what_is_being_saved_is_waited_for():
    process = start("time.sleep(0.3); stop.leave(); time.sleep(3)", before="stopping._LEAST_PATIENCE = 1.0")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("launched", [True, False])
def test_a_launcher_that_is_killed_takes_the_run_along(launched, tmp_path):
    """Only a launcher: a shell that ends leaves what was started with nohup."""
    body = f"{LOOP}\n    open({str(tmp_path / 'stopped')!r}, 'w').close()"
    code = PROGRAM.format(body=body, before="", begin="stop.begin()")
    env = os.environ | ({"ACCELERATE_MIXED_PRECISION": "no"} if launched else {})
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, code],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
    )
    assert launcher.stdout.readline() == "ready\n"
    launcher.kill()
    try:
        deadline = time.monotonic() + (10 if launched else 2)
        while not (tmp_path / "stopped").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert (tmp_path / "stopped").exists() == launched
    finally:
        launcher.wait()
        if not launched:
            os.killpg(launcher.pid, signal.SIGKILL)
