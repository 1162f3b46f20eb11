"""What a stream's builder and its readers tell one another, in small files beside the shards."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from recipe.redaction import redacted

STATUS = ".builder.json"
POLL = 0.1  # seconds


class Status:
    """What the builder is doing, for whoever waits for it: {pid, state, version, opened, made, error, message}."""

    def __init__(self, out: Path):
        self.path, self.values, self._written = out / STATUS, {"pid": os.getpid(), "changes": 0}, 0.0
        self._lock = threading.Lock()

    def set(self, *, now: bool = True, **values) -> None:
        """Changes some values. Each change is also the sign of life; those with `now=False` are written twice a
        second."""
        with self._lock:
            self.values |= values | {"changes": self.values["changes"] + 1}
            if now or time.monotonic() - self._written > 0.5:
                self._written = time.monotonic()
                write_json(self.path, self.values)


class ToStatus(logging.Handler):
    """Passes the builder's messages to the status, from which the trainer logs them."""

    def __init__(self, status: Status):
        super().__init__()
        self._status, self._number = status, 0

    def emit(self, record: logging.LogRecord) -> None:
        self._number += 1
        with suppress(OSError):  # a full disk
            self._status.set(message=[os.getpid(), self._number, record.getMessage()])


def write_json(path: Path, values: dict) -> None:
    """Replaces a file as a whole, without waiting for the disk, and without what is secret."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
    with open(temporary, "x") as file:
        json.dump(redacted(values), file)
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    """Empty where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def reader_path(out: Path, rank: int) -> Path:
    """Where a reader, by its rank on this node, writes {"shard"} that it is at, counted over all epochs."""
    return out / f".reader-{rank}"


def directory_bytes(path: Path) -> int:
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total
