"""Signals to one process; tests/faults tests that several agree on the step boundary at which they stop."""

import os
import signal
import time
from unittest import mock

import pytest

from recipe import train
from recipe.utils.errors import ExitCode
from tests import processes as programs

PROGRAM = """
import ctypes, os, signal, sys, time
from recipe.engine.shutdown import STOP, StopSignal
from recipe.utils.log import set_up_logging
set_up_logging()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
{setup}
stop = StopSignal()
stop.listen()
{boundary}
try:
    print("ready", flush=True)
    {body}
except KeyboardInterrupt:
    print("unwound", flush=True)
    sys.exit(75)
"""
LOOP = "while not stop.requested: time.sleep(0.01); stop.heartbeat()"


@pytest.fixture
def start(tmp_path):
    """start(body, ...) -> a process that has a StopSignal, past `boundary`, and runs `body`."""
    processes = []

    def start(body: str, *, setup: str = "", boundary: str = "stop.heartbeat()", **env: str):
        script = tmp_path / f"{len(processes)}.py"
        script.write_text(PROGRAM.format(body=body, setup=setup, boundary=boundary))
        processes.append(programs.Running(script, env=env))
        processes[-1].until("ready\n")
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


@pytest.mark.parametrize(
    ("number", "setup", "stops"),
    [
        (signal.SIGHUP, "", True),
        (signal.SIGHUP, "signal.signal(signal.SIGHUP, signal.SIG_IGN)", False),
        (signal.SIGUSR1, "", True),
    ],
)
def test_a_closed_terminal_except_under_nohup_and_slurms_warning_stop_the_run(start, number, setup, stops):
    running = start("time.sleep(0.5)", setup=setup)
    running.send_signal(number)
    assert running.wait(60) == 0
    assert ("stopping at the next step boundary; press" in running.stdout) == stops


def test_before_the_first_boundary_a_signal_ends_the_process_at_once(start):
    """Further signals do not interrupt its cleaning up."""
    clean_up = "time.sleep(0.5); print('cleaned up', flush=True)"
    running = start(f"try: time.sleep(60)\n    finally: {clean_up}", boundary="")
    for _ in range(10):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert running.wait(30) == 75
    assert running.stdout == "ready\ncleaned up\nunwound\n"


def test_a_signal_while_an_error_is_printed_causes_no_traceback(monkeypatch, capsys):
    """The launcher sends it if another process had the same error a moment before."""
    monkeypatch.setattr(train, "fail", mock.Mock(side_effect=KeyboardInterrupt))
    assert train.main(["--n_layer", "0"]) == ExitCode.RUN_AGAIN
    assert train.fail.call_count == 1
    assert "stopped before the first step" in capsys.readouterr().err


# A lock taken twice, in C: as in a collective, Python calls no signal handler.
DEADLOCK = "c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); "
DEADLOCK += "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["alone", "under torchrun"])
def test_a_second_ctrl_c_ends_the_process_at_once_wherever_it_is(start, second):
    """torchrun passes it on as a SIGTERM to processes in sessions of their own."""
    running = start(DEADLOCK)
    running.send_signal(signal.SIGINT)
    running.until("stopping")
    running.send_signal(signal.SIGINT)  # the same Ctrl-C, passed on by a launcher
    time.sleep(1.2)
    assert running.codes == [None]
    running.send_signal(second)
    assert running.wait(10) == 130
    assert "stopped at once; the same command, without --fresh, continues from the last checkpoint" in running.stdout


def test_a_launcher_that_dies_of_the_same_ctrl_c_does_not_press_it_again(start):
    """Accelerate's takes a second or two for it, and a step may take longer."""
    dying = "if os.fork():\n    try: time.sleep(60)\n    finally: time.sleep(1.2)"
    body = "while not stop.requested: time.sleep(0.01)\n    time.sleep(2.5); print('saved', flush=True)"
    running = start(body, setup=dying, ACCELERATE_MIXED_PRECISION="no")
    os.killpg(running.ranks[0].pid, signal.SIGINT)
    running.until("saved")


def test_ctrl_c_after_the_end_of_a_run_announces_no_checkpoint(start):
    running = start("StopSignal.stepping = stop.complete = True; time.sleep(1); print(stop.requested)")
    running.send_signal(signal.SIGINT)
    assert running.wait(10) == 0
    assert running.stdout.endswith("ready\nTrue\n")


@pytest.mark.parametrize("hours", [1e-9, 1e30])
def test_max_hours_that_have_passed_before_the_first_step_end_the_run_after_it(start, hours):
    boundaries = "stop.heartbeat(); assert not stop.requested; StopSignal.stepping = True; stop.heartbeat()"
    running = start(f"stop.stop_after({hours}); time.sleep(0.1); {boundaries}; print(stop.requested)")
    assert running.wait(60) == 0, running.stdout
    assert ("max_hours  1e-09 hours have passed\nTrue\n" in running.stdout) == (hours < 1)


def test_a_deadline_stops_a_run_also_where_its_decay_becomes_due_at_the_same_time(start):
    """It once made the run decay, without a deadline."""
    due = "StopSignal.stepping = True; stop.stop_after(1e-9); stop.decay_when(lambda: True); time.sleep(0.1)"
    running = start(f"{due}; print(stop.heartbeat() == STOP)")
    assert running.wait(60) == 0, running.stdout
    assert running.stdout.endswith("True\n")


@pytest.mark.parametrize("launched", [True, False])
def test_a_run_ends_when_its_launcher_is_killed(start, launched):
    """But not when its shell ends, since the run may have been started with nohup."""
    body = f"{LOOP}\n    print('stopped', flush=True)"
    env = {"ACCELERATE_MIXED_PRECISION": "no"} if launched else {}
    running = start(body, setup="if os.fork(): time.sleep(60)", **env)
    running.send_signal(signal.SIGKILL)
    try:
        if launched:
            running.until("stopped")
        else:
            time.sleep(1.5)
            assert "stopped" not in running.output
    finally:
        os.killpg(running.ranks[0].pid, signal.SIGKILL)
