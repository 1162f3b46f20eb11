"""What a stream's builder and its readers say to one another, in small files beside the shards."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from recipe.redaction import redacted

STATUS = ".builder.json"
EARLIER = ".checkpoint.json"  # the manifest that the checkpoint kept from which the run goes on
POLL = 0.1  # seconds


class Status:
    """What the builder is doing, for whoever waits for it."""

    def __init__(self, out: Path):
        self.path, self._values, self._written = out / STATUS, {}, 0.0
        self._lock = threading.Lock()

    def say(self, message: str) -> None:
        """A line that the user should see, beside the progress."""
        self.set(message=message, message_time=time.time())

    @property
    def made(self) -> int:
        """Shards made since the builder began or began again."""
        return self._values.get("made", 0)

    def set(self, *, now: bool = True, **values) -> None:
        """Changes some values; that they are written is also the sign of life."""
        with self._lock:
            self._values |= values | {"time": time.time()}
            if now or time.monotonic() - self._written > 0.5:
                self._written = time.monotonic()
                write_json(self.path, self._values)


def write_json(path: Path, values: dict) -> None:
    """All or nothing, not waiting for the disk, and without what is secret."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(json.dumps(redacted(values)))
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def reader_path(out: Path, rank: int) -> Path:
    return out / f".reader-{rank}"


def directory_bytes(path: Path) -> int:
    total = 0
    for directory, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                total += os.stat(os.path.join(directory, name)).st_size
    return total
