"""The process that makes a streamed run's shards: a few ahead of those who read them, within a disk budget.

stream.py starts one on each machine, with its job as JSON. They talk through files beside the shards: the readers say
in .reader-RANK which shard they are at, this process says in .builder.json what it is doing. It ends when its standard
input does, that is with the process that started it, however that ends.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from recipe.config import DataConfig
from recipe.data.hub import DOWNLOADS, PATIENCE
from recipe.data.prepare.select import SEEN
from recipe.data.prepare.writer import shard_name
from recipe.data.shards import DTYPE, HEADER_BYTES, MANIFEST, Manifest
from recipe.data.streaming.producers import HubMaker, Maker, TextMaker
from recipe.data.streaming.status import POLL, Status, directory_bytes, read_json, reader_path
from recipe.errors import UserError
from recipe.redaction import keep_secrets

_FULL = 5.0  # seconds between attempts on a full disk
FAILED = 3  # exit code of an error that another attempt would meet again; it is in the status


class Room:
    """Which shard is to be made next, and the room for it on the disk."""

    def __init__(self, out: Path, manifest: Manifest, readers: int, budget: int):
        self.out, self.manifest, self.readers, self.budget = out, manifest, readers, budget

    def wanted(self, size_of: Callable[[int], int]) -> int | None:
        """The nearest shard ahead of the readers which is not here, once there is room for it; None: nothing to do yet.

        `size_of(number)` is a shard's size in bytes, if it is not known to be the last. Shards that all readers have
        passed make room, the oldest first.
        """
        train = self.manifest.of("train")
        n = len(train) if self.manifest.complete else None
        low, last = self._span()
        if low is None:  # who resumes will say where; who begins, begins here
            if train:
                return None
            low = 0
        here = {i for i, entry in enumerate(train) if (self.out / entry["file"]).exists()}
        ahead, number = [], None
        for sequence in range(low, low + (n or len(train) + 1)):
            if last is not None and sequence > last:
                break
            if (i := sequence % n if n else sequence) not in here:
                number = i
                break
            ahead.append(i)
        spare = here - set(ahead)
        need = 0 if number is None else size_of(number) + self.reserve()
        while directory_bytes(self.out) + need > self.budget:
            if not spare:
                if number is not None and not ahead:
                    taken = f"{directory_bytes(self.out) / 1e9:.3g} of the {self.budget / 1e9:.3g} GB of the budget"
                    raise UserError(
                        f"{self.out}: the next shard needs {need / 1e9:.3g} GB, and {taken} are taken; raise "
                        "disk_budget_gb, or free some disk"
                    )
                return None
            # the one that is needed again last; in a first epoch, of which nobody knows the end, the oldest
            victim = max(spare, key=lambda i: (i - low) % n if n else (i < low, abs(low - i)))
            (self.out / train[victim]["file"]).unlink()
            spare.remove(victim)
        return number

    def reserve(self) -> int:
        """Bytes beside the shards that making one may take for a while: the files that are replaced, a journal."""
        manifest, seen = (p.stat().st_size if p.exists() else 0 for p in (self.out / MANIFEST, self.out / SEEN))
        return 2 * manifest + seen + seen // 8 + (1 << 13)

    def _span(self) -> tuple[int | None, int | None]:
        """The shard, counted over all epochs, that the last reader is at, None until all of them have said; and the
        one with which the run ends, None until that is known."""
        readers = [read_json(reader_path(self.out, rank)) for rank in range(self.readers)]
        if not all(readers):
            return None, None
        ends = np.cumsum([(e["tokens"] - 1) // readers[0]["sequence_length"] for e in self.manifest.of("train")])
        windows, known = readers[0]["windows"], int(ends[-1]) if len(ends) else 0
        last = None
        if self.manifest.complete or windows <= known:
            epoch, window = divmod(windows - 1, max(1, known))
            last = epoch * len(ends) + int(np.searchsorted(ends, window, side="right"))
        return min(reader["shard"] for reader in readers), last


def build(data: DataConfig, readers: int, budget: int, commit: str | None, status: Status) -> None:
    """Make shards until the process is ended. Raises UserError."""
    out = Path(data.dataset_name)
    status.set(state="starting", pid=os.getpid(), error=None)
    if Manifest.load(out) is None and list(out.glob("*.bin")):
        raise UserError(f"{out} holds shards of another program; stream into another directory")
    maker_type = HubMaker if data.train_text.startswith("hf://") else TextMaker
    maker = maker_type(data, out, commit, status)
    status.set(version=maker.manifest.source)
    _sweep(out, maker.manifest)
    room = Room(out, maker.manifest, readers, budget)
    _check_budget(maker, room, data)
    maker.validation()
    _check_budget(maker, room, data)
    status.set(opened=True)
    made = 0
    while True:
        number = room.wanted(maker.size_of)
        if number is None:
            status.set(now=False, state="waiting for the readers")
            time.sleep(POLL)
            continue
        status.set(state="starting", split="train", shard=number)
        maker.make(number)
        made += 1
        status.set(state="made", split="train", shard=number, made=made)


def _sweep(out: Path, manifest: Manifest) -> None:
    """Delete what a killed builder left: open shards, downloads, a shard that it had not entered into the manifest."""
    known = {entry["file"] for entry in manifest.shards}
    for path in out.glob("*.part"):
        path.unlink()
    for split in ("train", "val"):
        path = out / shard_name(split, len(manifest.of(split)))
        if path.name not in known:
            path.unlink(missing_ok=True)
    shutil.rmtree(out / DOWNLOADS, ignore_errors=True)


def _check_budget(maker: Maker, room: Room, data: DataConfig) -> None:
    sizes = {e["file"]: HEADER_BYTES + e["tokens"] * DTYPE.itemsize for e in maker.manifest.shards}
    held = sum(sizes[e["file"]] for e in maker.manifest.of("val"))
    largest = maker.largest()
    rest = directory_bytes(room.out) - sum(size for name, size in sizes.items() if (room.out / name).exists())
    if (least := held + 2 * largest + rest + room.reserve()) > room.budget:
        raise UserError(
            f"disk_budget_gb {data.disk_budget_gb:g}: {room.budget / 1e9:.3g} GB are too few for the validation shards "
            f"and two training shards, {least / 1e9:.3g} GB; raise it, free some disk, or lower shard_tokens"
        )


def main() -> int:
    job = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(10)  # the step comes first
    data = DataConfig(**job["data"])
    status = Status(Path(data.dataset_name))
    full_since = None
    while True:
        try:
            status.set(made=0)
            build(data, job["readers"], job["budget"], job["commit"], status)
        except UserError as error:
            status.set(error=str(error))
            return FAILED
        except OSError as error:
            now = time.monotonic()
            full_since = now if status.made or full_since is None else full_since
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or now - full_since > PATIENCE:
                status.set(error=f"{data.dataset_name}: {error}")
                return FAILED
            with suppress(OSError):
                status.say(f"{data.dataset_name}: {error.strerror}; trying again in {_FULL:.0f} s, free some disk")
            time.sleep(_FULL)


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # what it leaves open is cut off or built again


if __name__ == "__main__":
    keep_secrets()  # what it writes to its standard error is kept, in builder.log
    sys.exit(main())
