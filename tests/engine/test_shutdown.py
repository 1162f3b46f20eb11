"""Signals: a busy process stops at a step boundary; tests/faults has several, which agree to stop at the same one."""

import os
import signal
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from recipe import train
from recipe.engine.shutdown import Agreement
from recipe.utils.errors import ExitCode
from tests import processes as programs

PROGRAM = """
import ctypes, os, signal, sys, time
from recipe.engine.shutdown import StopSignal
from recipe.utils.log import set_up_logging
set_up_logging()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
{before}
stop = StopSignal()
stop.listen()
{begin}
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
    """start(body, ...) -> a process with a StopSignal that is ready, past its first boundary if `begun`."""
    started = []

    def start(body: str, *, before: str = "", begun: bool = True, **env: str):
        script = tmp_path / f"{len(started)}.py"
        begin = "stop.heartbeat()" if begun else ""
        script.write_text(PROGRAM.format(body=body, before=before, begin=begin))
        started.append(programs.Running(script, env=env))
        started[-1].until("ready\n")
        return started[-1]

    yield start
    for running in started:
        running.kill()


@pytest.mark.parametrize(("before", "asked"), [("", True), ("signal.signal(signal.SIGHUP, signal.SIG_IGN)", False)])
def test_a_terminal_that_closes_asks_for_a_stop_except_under_nohup(start, before, asked):
    running = start("time.sleep(0.5)", before=before)
    running.send_signal(signal.SIGHUP)
    assert running.wait(60) == 0
    assert ("stopping at the next step boundary, with a checkpoint" in running.stdout) == asked


def test_before_the_first_boundary_there_is_nothing_to_wait_for(start):
    """And more signals, while the process ends, do not cut that short."""
    clean_up = "time.sleep(0.5); print('cleaned up', flush=True)"
    running = start(f"try: time.sleep(60)\n    finally: {clean_up}", begun=False)
    for _ in range(10):
        running.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert running.wait(30) == 75
    assert running.stdout == "ready\ncleaned up\nunwound\n"


def test_a_signal_while_an_error_is_being_reported_leaves_no_traceback(monkeypatch, capsys):
    """As the launcher's, where another process has met the same error a moment before."""
    monkeypatch.setattr(train, "fail", mock.Mock(side_effect=KeyboardInterrupt))
    assert train.main(["--n_layer", "0"]) == ExitCode.RUN_AGAIN
    assert train.fail.call_count == 1
    assert "stopped before the first step" in capsys.readouterr().err


# A lock taken twice, in C: no handler of Python's is called there, as in a collective.
DEADLOCK = "c, m = ctypes.CDLL(None), ctypes.create_string_buffer(64); "
DEADLOCK += "c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM], ids=["alone", "under torchrun"])
def test_a_second_ctrl_c_ends_the_process_at_once_wherever_it_is(start, second):
    """Of which torchrun makes a SIGTERM, for processes in sessions of their own."""
    running = start(DEADLOCK)
    running.send_signal(signal.SIGINT)
    running.until("stopping")
    running.send_signal(signal.SIGINT)  # the same Ctrl-C, passed on by a launcher
    time.sleep(1.2)
    assert running.codes == [None]
    running.send_signal(second)
    assert running.wait(10) == 130
    assert "stopped at once; the same command, without --fresh, continues from the last checkpoint" in running.stdout


@pytest.mark.parametrize("hours", [1e-9, 1e30])
def test_hours_that_are_over_before_the_first_step_end_the_run_after_it(start, hours):
    boundaries = "stop.heartbeat(); assert not stop.requested; stop.stepping = True; stop.heartbeat()"
    running = start(f"stop.stop_after({hours}); time.sleep(0.1); {boundaries}; print(stop.requested)")
    assert running.wait(60) == 0, running.stdout
    assert ("max_hours  1e-09 hours have passed\nTrue\n" in running.stdout) == (hours < 1)


@pytest.mark.parametrize("launched", [True, False])
def test_a_launcher_that_is_killed_takes_the_run_along(start, launched):
    """Only a launcher: a shell that ends leaves what was started with nohup."""
    body = f"{LOOP}\n    print('stopped', flush=True)"
    env = {"ACCELERATE_MIXED_PRECISION": "no"} if launched else {}
    running = start(body, before="if os.fork(): time.sleep(60)", **env)
    running.send_signal(signal.SIGKILL)
    try:
        if launched:
            running.until("stopped")
        else:
            time.sleep(1.5)
            assert "stopped" not in running.output
    finally:
        os.killpg(running.ranks[0].pid, signal.SIGKILL)


def test_agreeing_costs_no_step():
    """The flags for a step are sent before the step before it computes, and waited for after it."""
    signals = SimpleNamespace(requested=False, stepping=False, heartbeat=lambda: None)
    batches = SimpleNamespace(ready=lambda seconds, ahead=0: True, error=lambda ahead=0: None)
    agreement = Agreement(signals, "the hosts")
    events = []
    work = SimpleNamespace(wait=lambda: events.append("wait"))
    with mock.patch("torch.distributed.all_reduce", side_effect=lambda *_, **__: events.append("send") or work):
        for _ in range(3):
            agreement.wait_for_batches(batches)
            events.append("step")
    assert events == ["send", "wait", *["send", "step", "wait"] * 2, "send", "step"]
