"""One run a directory: a lock that its owner's death opens."""

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recipe.errors import UserError

LOCK = ".lock"
_BEAT = 5.0  # seconds between signs of life
_DEAD = 15.0  # seconds without one after which another machine's run is taken for dead
_LEASE = 120.0  # seconds for which a file server may hold a dead machine's lock; Linux's NFS holds it for 90


class RunLock:
    """Held from `RunLock(run, say)` to `release`, or to the process's end, however it comes.

    The file system's own lock tells the living from the dead on one machine, and on most file systems that several
    share. Where it does not reach other machines, the owner's signs of life in the file do.
    """

    def __init__(self, run: Path, say: Callable[[str], None]):
        """Raises UserError, naming the owner, where another process has it."""
        self._path, self._say = run / LOCK, say
        while True:
            run.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            alone = self._has_lock(run)
            if self._is_current():
                break
            os.close(self._fd)  # its owner has just taken it away
        earlier = self._read()
        if earlier:
            if not (alone and earlier.get("host") == socket.gethostname()):  # else its lock would have held
                self._see_whether_it_lives(run, earlier, say)
            say(f"lock       taken over from {_described(earlier)}, which ended without releasing it")
        self._released = threading.Event()
        self._owner = {"host": socket.gethostname(), "pid": os.getpid()}
        self._write()
        self._beating = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._beating.start()

    def _has_lock(self, run: Path) -> bool:
        """Whether the file system's lock is this process's now; False where there are no locks. Raises UserError where
        another process has it; the lock of a machine that is gone outlives it, and is waited for."""
        first, begun = None, time.monotonic()
        while True:
            try:
                # Of the process: unlike flock's, it does not pass to children, who might outlive it.
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    return False
            owner = self._read()
            if first is None and owner and owner.get("host") != socket.gethostname():
                first = owner
                self._say(
                    f"lock       {_described(owner)} has this directory; waiting for a sign of life or, "
                    f"{_LEASE:.0f} s at most, for the end of its lock"
                )
            if owner != first or time.monotonic() - begun > _LEASE:
                os.close(self._fd)
                gone = f"; or, if that machine is gone for certain, delete {self._path}" if owner == first else ""
                raise UserError(_taken(run, owner) + gone)
            time.sleep(1)

    def _is_current(self) -> bool:
        """Whether the file is still the one at its path."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _see_whether_it_lives(self, run: Path, earlier: dict, say: Callable[[str], None]) -> None:
        say(f"lock       {_described(earlier)} had this directory; waiting {_DEAD:.0f} s for a sign of life")
        deadline = time.monotonic() + _DEAD
        while time.monotonic() < deadline:
            time.sleep(1)
            if (now := self._read()) != earlier:
                os.close(self._fd)
                raise UserError(_taken(run, now))

    def _read(self) -> dict:
        try:
            value = json.loads(os.pread(self._fd, 4096, 0))
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _write(self) -> None:
        content = json.dumps(self._owner | {"alive": time.time()}).encode()
        os.pwrite(self._fd, content.ljust(256), 0)  # always as long: nobody reads half of it and half of the last

    def _beat(self) -> None:
        while not self._released.wait(_BEAT):
            with suppress(OSError):  # of a full disk, say: the lock itself holds
                now = self._read()
                if now and {k: now.get(k) for k in self._owner} != self._owner:  # after a machine's sleep
                    self._say(f"lock       {_described(now)} has taken this run over; this one ends at once")
                    os._exit(2)
                self._write()

    def release(self) -> None:
        self._released.set()
        self._beating.join()
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            if self._is_current() and os.listdir(self._path.parent) == [LOCK]:  # the run never began
                self._path.unlink()
                self._path.parent.rmdir()
        os.close(self._fd)


def _described(owner: dict) -> str:
    if not owner:
        return "unknown"
    return f"process {owner.get('pid')} on {owner.get('host')}"


def _taken(run: Path, owner: dict) -> str:
    return f"{run}: another run writes there ({_described(owner)}); wait for it, or choose another output_dir"
