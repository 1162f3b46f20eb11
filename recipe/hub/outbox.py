"""Checkpoints that wait for the Hugging Face Hub: a queue on the disk, which outlives whoever works on it.

RUN/.push/step-005000/           the model's files of a checkpoint, hard links where the disk has them, and its card
RUN/.push/step-005000/push.json  {"repo", "private", "step", "todo": ["step-005000", "main"], "error", "held"}
RUN/.push/uploaded.json          {repo: [steps]}
RUN/.push/log                    last words of the process that uploads
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipe.data.streaming.status import read_json, write_json

QUEUE, LOG, MAIN = ".push", "log", "main"
_UPLOADED = "uploaded.json"
_ENTRY, _MAKING, _DONE = "push.json", ".making-", ".done-"
_POLL = 0.2  # seconds between attempts at the lock


@dataclass(frozen=True)
class Entry:
    """A checkpoint that waits: `todo` are the branches it is not on yet, `error` says why it waits for the user. One
    that is `held` is the trainer's still, which has not evaluated it yet."""

    path: Path
    repo: str
    private: bool
    step: int
    todo: tuple[str, ...]
    error: str | None = None
    held: bool = False

    def files(self) -> list[Path]:
        return sorted(p for p in self.path.iterdir() if p.name not in (_ENTRY, f"{_ENTRY}.tmp"))

    def put(self, name: str, content: bytes) -> None:
        """Changes a file of it, whole or not at all, and none that it has links to. Raises OSError."""
        temporary = self.path.with_name(f"{_MAKING}{self.path.name}-{name}")
        temporary.write_bytes(content)
        os.replace(temporary, self.path / name)

    def write(self, directory: Path | None = None) -> Entry:
        values = {k: v for k, v in dataclasses.asdict(self).items() if k != "path"}
        write_json((directory or self.path) / _ENTRY, values)
        return self

    def remove(self) -> None:
        """Of what is up; `is_new` knows of it from now on."""
        done = read_json(self.path.parent / _UPLOADED)
        write_json(self.path.parent / _UPLOADED, done | {self.repo: sorted({*done.get(self.repo, []), self.step})})
        # Renamed first, so that a deletion cut short leaves nothing that looks like an entry.
        doomed = self.path.with_name(f"{_DONE}{self.path.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        shutil.rmtree(self.path.rename(doomed), ignore_errors=True)


def entries(run: Path) -> list[Entry]:
    """What is queued, the oldest step first."""
    found = []
    for path in (run / QUEUE).glob("step-*"):
        try:
            values = read_json(path / _ENTRY)
        except ValueError:  # cut off by a power failure before it was on the disk
            continue
        if values:  # none: it has just been removed
            found.append(Entry(path, **values | {"todo": tuple(values["todo"])}))
    return sorted(found, key=lambda e: (e.step, e.path.name))


def enqueue(
    run: Path,
    files: list[Path],
    made: dict[str, bytes],
    step: int,
    repo: str,
    private: bool,
    todo: list[str],
    held: bool = False,
) -> Entry:
    """Puts `files`, and those `made` for it, into the queue, whole or not at all. Raises OSError."""
    queue = run / QUEUE
    queue.mkdir(parents=True, exist_ok=True)
    name = branch_of(step)
    temporary = queue / f"{_MAKING}{name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for file in files:
        try:
            os.link(file, temporary / file.name)  # costs nothing until the checkpoint is pruned
        except OSError:
            shutil.copyfile(file, temporary / file.name)
    for name_made, content in made.items():
        (temporary / name_made).write_bytes(content)
    # The same step again, of a resumed run, comes after the one that may be going up right now.
    numbers = (f"{name}.{n}" if n else name for n in range(1000))
    path = next(p for p in map(queue.joinpath, numbers) if not p.exists())
    entry = Entry(path, repo, private, step, tuple(todo), held=held).write(temporary)
    fd = os.open(temporary / _ENTRY, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    temporary.rename(path)
    return entry


def is_new(run: Path, repo: str, step: int) -> bool:
    """Whether a step was never queued for `repo`."""
    queued = {(e.repo, e.step) for e in entries(run)}
    return (repo, step) not in queued and step not in read_json(run / QUEUE / _UPLOADED).get(repo, [])


def sweep(run: Path) -> None:
    """Deletes what those who were killed left half made or half deleted."""
    for leftover in [*(run / QUEUE).glob(f"{_MAKING}*"), *(run / QUEUE).glob(f"{_DONE}*")]:
        leftover.unlink() if leftover.is_file() else shutil.rmtree(leftover, ignore_errors=True)


def branch_of(step: int) -> str:
    return f"step-{step:06d}"


@contextmanager
def alone(run: Path, patience: float) -> Iterator[None]:
    """One process at a time empties a queue. The lock goes with its process, however that ends. Raises BlockingIOError
    where another has it for `patience` seconds more."""
    (run / QUEUE).mkdir(parents=True, exist_ok=True)
    directory, deadline = os.open(run / QUEUE, os.O_RDONLY), time.monotonic() + patience
    try:
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL)
        yield
    finally:
        os.close(directory)
