"""The process that makes a streamed run's shards: a few ahead of those who read them, within a disk budget.

stream.py starts one on each machine, with its job as JSON. They talk through files beside the shards: the readers say
in .reader-RANK which shard they are at, this process says in .builder.json what it is doing. It ends when its standard
input does, that is with the process that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recipe.config import DataConfig, UserError
from recipe.data.makers import HubMaker, Maker, TextMaker
from recipe.data.prepare import alone_in
from recipe.data.select import SEEN
from recipe.data.shards import DTYPE, HEADER_BYTES, MANIFEST, Manifest
from recipe.data.status import POLL, Status, directory_bytes, read_json, reader_path

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
        ahead = []
        for sequence in range(low, low + (n or len(train) + 1)):
            number = sequence % n if n else sequence
            if number not in here:
                break
            ahead.append(number)
        else:
            return None
        if last is not None and sequence > last:
            return None
        if n is None and low > len(train):
            raise AssertionError(f"a reader is at shard {low} of {len(train)}")
        need = size_of(number) + self.reserve()
        while directory_bytes(self.out) + need > self.budget:
            spare = here - set(ahead)
            if not spare:
                return None
            oldest = max(spare, key=lambda i: (low - i) % n if n else (i < low, abs(low - i)))
            (self.out / train[oldest]["file"]).unlink()
            here.remove(oldest)
        return number

    def reserve(self) -> int:
        """Bytes beside the shards that making one may take for a while: the files that are replaced, a journal."""
        kept = sum(p.stat().st_size for p in (self.out / MANIFEST, self.out / SEEN) if p.exists())
        return 2 * kept + (1 << 13)

    def _span(self) -> tuple[int | None, int | None]:
        """The shard, counted over all epochs, that the last reader is at, None until all of them have said; and the
        one with which the run ends, None until that is known."""
        readers = [read_json(reader_path(self.out, rank)) for rank in range(self.readers)]
        if not all(readers):
            return None, None
        lasts = [reader["last"] for reader in readers]
        return min(reader["shard"] for reader in readers), None if None in lasts else max(lasts)


def build(data: DataConfig, readers: int, budget: int, commit: str | None, status: Status) -> None:
    """Make shards until the process is ended. Raises UserError."""
    out = Path(data.data)
    status.set(state="starting", pid=os.getpid(), error=None)
    with alone_in(out):
        maker_type = HubMaker if data.source.startswith("hf://") else TextMaker
        maker = maker_type(data, out, commit, status)
        status.set(version=maker.manifest.source)
        for part in out.glob("*.part"):
            part.unlink()
        room = Room(out, maker.manifest, readers, budget)
        maker.validation()
        _check_budget(maker, room, data)
        status.set(opened=True)
        while True:
            number = room.wanted(maker.size_of)
            if number is None:
                status.set(now=False, state="waiting for the readers")
                time.sleep(POLL)
                continue
            status.set(state="starting", split="train", shard=number)
            maker.make(number)
            status.set(state="made", split="train", shard=number, bytes=directory_bytes(out))


def _check_budget(maker: Maker, room: Room, data: DataConfig) -> None:
    held = sum(HEADER_BYTES + e["tokens"] * DTYPE.itemsize for e in maker.manifest.of("val"))
    train = maker.manifest.of("train")
    if isinstance(maker, HubMaker):
        largest = max((maker.size_of(i) for i in range(len(train))), default=0)
    else:
        largest = HEADER_BYTES + maker.options.shard_tokens * DTYPE.itemsize
    rest = sum(p.stat().st_size for p in room.out.iterdir() if p.is_file() and p.suffix != ".bin")
    if (least := held + 2 * largest + rest + room.reserve()) > room.budget:
        raise UserError(
            f"disk_budget_gb {data.disk_budget_gb:g}: {room.budget / 1e9:.3g} GB are too few for the validation shards "
            f"and two training shards, {least / 1e9:.3g} GB; raise it, free some disk, or lower shard_tokens"
        )


def main() -> int:
    job = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the trainer decides what it means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(10)  # the step comes first
    data = DataConfig(**job["data"])
    status = Status(Path(data.data))
    try:
        build(data, job["readers"], job["budget"], job["commit"], status)
    except (UserError, OSError) as error:
        status.set(error=str(error) if isinstance(error, UserError) else f"{data.data}: {error}")
        return FAILED
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # what it leaves open is cut off or built again


if __name__ == "__main__":
    sys.exit(main())
