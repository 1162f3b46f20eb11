"""When a run is to end before its end: Ctrl-C, SIGTERM, a closed terminal, a launcher that is gone."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
_SAME = 1.0  # seconds within which a second SIGINT is the first one's echo: a launcher passes on what all have received
_UNWINDING = 10.0  # seconds that a run without progress may take to end
_LEAST_PATIENCE = 20.0  # seconds that a run gets to come to its next boundary


class Interrupted(Exception):
    """The run is to stop, all processes have agreed to it, and between two steps nothing is lost."""


class Stop:
    """Hears the signals, in a thread of its own: the main thread may be waiting in a collective for a process that
    will never come, or for the device.

    Until `begin` there is nothing to lose: the main thread gets a KeyboardInterrupt. After it, `requested` is set, and
    the loop stops at its next boundary with a checkpoint. A second Ctrl-C leaves at once.
    """

    def __init__(self, *, speaks: bool):
        """`speaks`: whether this process is the one that tells the user."""
        self.requested = False
        self._speaks, self._graceful, self._leaving = speaks, False, False
        self._heard = 0.0  # when the first signal came
        self._polled, self._longest, self._patient = time.monotonic(), 0.0, False
        self.before_leaving: Callable[[], object] = lambda: None  # of a run that cannot stop as it should
        self.say: Callable[[str, bool], None] = _on_stderr  # a line, and whether it is the last one of the process
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._in_main_thread)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(reading,), name="signals", daemon=True).start()
        if "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
            threading.Thread(target=self._follow, args=(os.getppid(),), name="launcher", daemon=True).start()

    def begin(self) -> None:
        """From now on there is progress to be saved."""
        if not self._graceful:
            self._graceful, self._polled = True, time.monotonic()

    def polled(self) -> None:
        """The loop is at a boundary, or somewhere else where it looks whether it is to stop."""
        now = time.monotonic()
        self._longest, self._polled = max(self._longest, now - self._polled), now

    @contextmanager
    def patient(self) -> Iterator[None]:
        """Context of what takes longer than a step, and of which no end can be told."""
        self._patient = True
        try:
            yield
        finally:
            self._patient, self._polled = False, time.monotonic()

    def leave(self) -> None:
        """The loop stops: what is left to do takes its time."""
        self._leaving = True

    def _in_main_thread(self, number: int, _frame) -> None:
        if not self._graceful:
            raise KeyboardInterrupt

    def _listen(self, pipe: int) -> None:
        while True:
            number = os.read(pipe, 1)[0]
            if number not in _SIGNALS:
                continue
            if number == signal.SIGHUP:  # nobody is reading any more, and writing would fail
                nowhere = os.open(os.devnull, os.O_WRONLY)
                for fd in (1, 2):
                    if os.isatty(fd):
                        os.dup2(nowhere, fd)
            now = time.monotonic()
            if not self._graceful:
                overdue = threading.Timer(_UNWINDING, self._overdue)
                overdue.daemon = True
                overdue.start()
            elif not self.requested:
                self._heard, self.requested = now, True
                self._say("stopping after this step, with a checkpoint; Ctrl-C again leaves at once")
                threading.Thread(target=self._watch, name="patience", daemon=True).start()
            elif number == signal.SIGINT and now - self._heard > _SAME:
                self._say(
                    "left at once; the same command, without --fresh, goes on from the last checkpoint if there is one",
                    last=True,
                )
                os._exit(130)

    def _overdue(self) -> None:
        """The main thread did not unwind; or `begin` came between the signal and its handler."""
        if self._graceful:
            self.requested = True
        else:
            os._exit(75)

    def _watch(self) -> None:
        """Leaves where no boundary comes: a process that has died lets the others wait in a collective for ever."""
        while not self._leaving:
            time.sleep(0.5)
            patience = max(_LEAST_PATIENCE, 3 * self._longest)
            waited = time.monotonic() - max(self._polled, self._heard)
            if not self._leaving and not self._patient and waited > patience:
                self._say(f"no end of the step after {patience:.0f} s; left without a checkpoint of it", last=True)
                self.before_leaving()
                os._exit(75)

    def _follow(self, launcher: int) -> None:
        """A launcher that dies without a word, as by kill -9, would leave this process to itself."""
        while os.getppid() == launcher:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, text: str, last: bool = False) -> None:
        if self._speaks:
            with suppress(OSError, ValueError):
                self.say(text, last)


def _on_stderr(text: str, last: bool) -> None:
    print(f"\n{text}", file=sys.stderr, flush=True)
