"""Graceful shutdown: signals, and what the processes agree on between two steps."""

import logging
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from recipe.utils.errors import ExitCode
from recipe.utils.processes import is_launched

logger = logging.getLogger(__name__)

# SIGUSR1 is the customary choice for Slurm's warning before the time limit.
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
_ECHO_S = 1.0  # within which a second SIGINT is the same Ctrl-C, passed on by a launcher that received it too
POLL_S = 0.2  # between two checks of the launcher, and of the signals while a step waits for its data
NOTHING, DECAY, STOP = range(3)  # what a process asks for; the greatest wins


class Interrupted(Exception):
    """All processes have agreed to stop between two steps."""


class StopSignal:
    """Listens for the signals that ask a process to end and for the death of the launcher, in a thread: the main thread
    may be waiting for the device, or in a collective call for a process that has died.

    Before the first step boundary there is nothing to save, and the main thread gets a KeyboardInterrupt, once.
    Afterwards `requested` is set, and the loop stops at its next boundary with a checkpoint. A second Ctrl-C ends the
    process at once.

    Attributes:
        received: whether this process has received a signal. It and `stepping` are attributes of the class, because an
            error may be reported without an instance.
        stepping: whether the first step has begun: `max_hours` never ends a run before it, because a run that is
            restarted again and again must make progress each time.
        complete: whether the run is finished and saved: from then on a signal only ends the wait for uploads.
        requested: whether this process has been asked to stop.
    """

    received = stepping = False
    _listening = ExitStack()  # undoes what `listen` has done

    def __init__(self):
        StopSignal.stepping = self.complete = self.requested = False
        self._reached_boundary = self._ctrl_c_pressed = False
        self._signal_time = self._deadline = math.inf  # of the first signal; the end of max_hours
        self._should_decay: Callable[[], bool] = lambda: False

    def listen(self) -> None:
        """Takes over the signals of this process until `release`; call both in the main thread."""
        read_fd, write_fd = os.pipe()
        os.set_blocking(write_fd, False)
        undo = StopSignal._listening
        undo.callback(os.close, write_fd)  # which ends the thread
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                undo.callback(signal.signal, number, signal.signal(number, self._interrupt) or signal.SIG_DFL)
        undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False))
        launcher = os.getppid() if is_launched() else None
        threading.Thread(target=self._listen, args=(read_fd, launcher), name="signals", daemon=True).start()

    @staticmethod
    def release() -> None:
        """Gives the signals back, if any have been taken over: a notebook that has called a command goes on."""
        StopSignal._listening.close()

    def stop_after(self, hours: float) -> None:
        """Requests a stop at the first boundary `hours` from now."""
        self._hours, self._deadline = hours, time.monotonic() + 3600 * hours

    def decay_when(self, should_decay: Callable[[], bool]) -> None:
        """Asks for the decay at the first boundary at which `should_decay()`."""
        self._should_decay = should_decay

    def heartbeat(self) -> int:
        """What this process asks for now. Call it wherever the main thread can stop."""
        self._reached_boundary = True
        if self.stepping and time.monotonic() > self._deadline:
            logger.warning("max_hours  %g hours have passed", self._hours)
            self.requested, self._deadline = True, math.inf
        if self.stepping and not self.requested and self._should_decay():
            self._should_decay = lambda: False  # once
            return DECAY
        return STOP if self.requested else NOTHING

    def _interrupt(self, *_) -> None:
        """The handler, which Python calls in the main thread."""
        if not self._reached_boundary:
            for number in _SIGNALS:  # another signal would interrupt the shutdown, even the interpreter's own exit
                signal.signal(number, signal.SIG_IGN)
            raise KeyboardInterrupt

    def _listen(self, read_fd: int, launcher: int | None) -> None:
        while True:
            if select.select([read_fd], [], [], POLL_S)[0]:
                if not (received := os.read(read_fd, 1)):
                    return os.close(read_fd)
                self._handle_signal(received[0])
            # Killed, as by kill -9: this process would go on by itself. After a signal it died of the same Ctrl-C.
            if launcher and not self.received and os.getppid() != launcher:
                launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if self._signal_time < math.inf and self._reached_boundary and not self.requested:
                self.requested, self._signal_time = True, time.monotonic()  # also for a signal before the boundary
                saving = ", with a checkpoint" if self.stepping else ""
                text = f"stopping at the next step boundary{saving}; press Ctrl-C again to quit immediately"
                logger.log(logging.DEBUG if self.complete else logging.WARNING, text)

    def _handle_signal(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        if number == signal.SIGHUP:  # the terminal is gone, and writing to it would fail
            devnull = os.open(os.devnull, os.O_WRONLY)
            for fd in (1, 2):
                if os.isatty(fd):
                    os.dup2(devnull, fd)
        StopSignal.received, now = True, time.monotonic()
        self._ctrl_c_pressed |= number == signal.SIGINT
        # A second signal of any kind: torchrun passes the second Ctrl-C on as SIGTERM.
        if self.requested and self._ctrl_c_pressed and now - self._signal_time > _ECHO_S:
            logger.warning(
                "stopped at once; the same command, without --fresh, continues from the last checkpoint if there is one"
            )
            if sys.stderr.isatty():  # on the line below a progress bar
                print(file=sys.stderr, flush=True)
            os._exit(ExitCode.INTERRUPTED)
        self._signal_time = min(self._signal_time, now)
