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

import torch

from recipe.data.prefetch import BatchLoader
from recipe.utils.errors import ExitCode
from recipe.utils.processes import Processes

logger = logging.getLogger(__name__)

_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
_ECHO = 1.0  # seconds within which a second SIGINT is the same Ctrl-C, passed on by a launcher that heard it too
_POLL = 0.2  # seconds between two looks: at the launcher, and at the signals while a step waits for its data


class Interrupted(Exception):
    """All processes have agreed to stop, between two steps."""


class StopSignal:
    """Listens for SIGINT, SIGTERM, SIGHUP and the death of the launcher, in a thread: the main thread may be waiting
    for the device, or in a collective for a process that will never come.

    Before the first boundary there is nothing to save, and the main thread gets a KeyboardInterrupt, once. Afterwards
    `requested` is set, and the loop stops at its next boundary with a checkpoint. A second Ctrl-C ends the process at
    once.

    Attributes:
        told: whether this process has heard a signal; of the class, since an error may be reported without an instance.
        requested: whether this process has been told to stop.
        decay_due: whether it was its clock that told it to, so that wsd's decay can begin.
        stepping: whether the first step has begun: `max_hours` never ends a run before it, because a run that is
            started again and again must make progress each time.
    """

    told = False

    def __init__(self):
        self._ctrl_c = False
        self.requested = self.decay_due = self.stepping = self._begun = False
        self._heard = self._deadline = math.inf  # when the first signal came; when the hours are over
        self._is_time: Callable[[], bool] = lambda: False

    def listen(self) -> None:
        """Takes over the signals of this process; call it in the main thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, self._in_main_thread)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        launched = "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ
        launcher = os.getppid() if launched else None
        threading.Thread(target=self._listen, args=(reading, launcher), name="signals", daemon=True).start()

    def stop_after(self, hours: float) -> None:
        """Requests a stop at the first boundary `hours` from now."""
        self._hours, self._deadline = hours, time.monotonic() + 3600 * hours

    def decay_when(self, is_time: Callable[[], bool]) -> None:
        """Requests a stop, as `decay_due`, at the first boundary at which `is_time()`."""
        self._is_time = is_time

    def heartbeat(self) -> None:
        """Call it wherever the main thread can stop."""
        self._begun = True
        if self.stepping and not self.requested and self._is_time():
            self.requested, self.decay_due, self._is_time = True, True, lambda: False
        if self.stepping and time.monotonic() > self._deadline:
            logger.warning("max_hours  %g hours have passed", self._hours)
            self.requested, self._deadline = True, math.inf

    def _in_main_thread(self, number: int, _frame) -> None:
        if not self._begun:
            for each in _SIGNALS:  # another signal would interrupt this one's shutdown, even the interpreter's own exit
                signal.signal(each, signal.SIG_IGN)
            raise KeyboardInterrupt

    def _listen(self, pipe: int, launcher: int | None) -> None:
        while True:
            if select.select([pipe], [], [], _POLL)[0]:
                self._hear(os.read(pipe, 1)[0])
            if launcher and os.getppid() != launcher:  # killed, as by kill -9; this process would go on by itself
                launcher = None
                os.kill(os.getpid(), signal.SIGTERM)
            if self._heard < math.inf and self._begun and not self.requested:
                self.requested, self._heard = True, time.monotonic()  # also a signal from before the first boundary
                logger.warning(
                    "stopping at the next step boundary, with a checkpoint; press Ctrl-C again to quit immediately"
                )

    def _hear(self, number: int) -> None:
        if number not in _SIGNALS:
            return
        if number == signal.SIGHUP:  # the terminal is gone, and writing to it would fail
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for fd in (1, 2):
                if os.isatty(fd):
                    os.dup2(nowhere, fd)
        now, again = time.monotonic(), number == signal.SIGINT or self._ctrl_c  # torchrun passes a second on as SIGTERM
        StopSignal.told, self._ctrl_c = True, number == signal.SIGINT or self._ctrl_c
        if self.requested and again and now - self._heard > _ECHO:
            logger.warning(
                "stopped at once; the same command, without --fresh, continues from the last checkpoint if there is one"
            )
            if sys.stderr.isatty():  # on the line below a progress bar
                print(file=sys.stderr, flush=True)
            os._exit(ExitCode.LEFT_AT_ONCE)
        self._heard = min(self._heard, now)


class Agreement:
    """What the processes decide together at a step boundary: whether to stop, and whether all have the step's data.

    Each process sends two flags, `stop` and `late`, over `hosts` (see Processes). They travel while the step computes
    and are read at the next boundary, so that agreeing costs no step. The price is that a signal stops several
    processes one step later than it stops one.
    """

    def __init__(self, signal: StopSignal, hosts: torch.distributed.ProcessGroup | None):
        self._signal, self._hosts = signal, hosts
        self._clear()

    def _clear(self) -> None:
        self._flags, self._sent = torch.tensor([0, 1], dtype=torch.int32), None

    def check_stop(self) -> None:
        """Raises Interrupted on all processes if any had been told to stop at the call before. A collective call."""
        self._receive()
        self._send(late=True)

    def wait_for_batches(self, batches: BatchLoader) -> None:
        """Returns once every process has the data of the next step: no process starts a step that another cannot
        finish. Raises Interrupted on all processes, also where the data of one cannot be read. A collective call.
        """
        while self._receive():
            self._send(late=not batches.ready(_POLL), failed=batches.error() is not None)
        self._send(late=not batches.ready(0.0, ahead=1), failed=batches.error(ahead=1) is not None)
        self._signal.stepping = True

    def to_decay(self, processes: Processes) -> bool:
        """After Interrupted: whether it was the clock of a process that stopped them all, to begin the decay. Its
        request is then taken back; a signal that came after it is heard at the next boundary. A collective call."""
        signal = self._signal
        told = processes.anywhere(signal.requested and not signal.decay_due)
        if agreed := processes.anywhere(signal.decay_due) and not told:
            signal.requested = signal.decay_due = False
            self._clear()
        return agreed

    def _send(self, *, late: bool, failed: bool = False) -> None:
        self._flags = torch.tensor([self._signal.requested or failed, late], dtype=torch.int32)
        if self._hosts is not None:
            maximum = torch.distributed.ReduceOp.MAX
            self._sent = torch.distributed.all_reduce(self._flags, maximum, group=self._hosts, async_op=True)

    def _receive(self) -> bool:
        """Whether any process was late at the last `_send`, or nothing was sent. Raises Interrupted."""
        self._signal.heartbeat()
        if self._sent is not None:
            self._sent.wait()
        stop, late = self._flags.tolist()
        if stop or (self._hosts is None and self._signal.requested):
            raise Interrupted
        return bool(late)
