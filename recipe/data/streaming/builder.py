"""The process that makes a streamed run's shards: a few ahead of those who read them, within a disk budget.

stream.py starts one on each node. Its standard input holds a line with its job, as JSON, and is closed when the process
that started it ends, however that ends; then this one ends too. It reads in .reader-RANK which shard each reader is at,
and writes into .builder.json what it is doing.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from recipe.config import DataConfig
from recipe.data.hub import DOWNLOADS, PATIENCE
from recipe.data.prepare.pipeline import alone_in
from recipe.data.prepare.producer import TextProducer
from recipe.data.shards import DTYPE, HEADER_BYTES, MANIFEST, Manifest
from recipe.data.streaming.download import HubProducer
from recipe.data.streaming.status import POLL, Status, ToStatus, directory_bytes, read_json, reader_path
from recipe.errors import UserError
from recipe.redaction import keep_secrets

logger = logging.getLogger("recipe.data.streaming.builder")  # __name__ is "__main__" here

FAILED = 3  # exit code of an error that another attempt would meet again; it is in the status
_FULL = 5.0  # seconds between attempts on a full disk


class Builder:
    """Makes the shards that the readers of `job` need, in the order in which they need them."""

    def __init__(self, job: dict, status: Status):
        self.data, self.job, self.status = DataConfig(**job["data"]), job, status
        self.out, self.budget = Path(self.data.dataset_name), job["budget"]
        hub = self.data.train_text.startswith("hf://")
        self.producer = HubProducer(self.data, self.out) if hub else TextProducer(self.data, self.out)
        if not hub and self.producer.val_documents is None:
            raise UserError(
                "streaming needs val_documents: the first so many documents are for validation, since a fraction of a "
                "stream is known at its end only"
            )
        earlier = Manifest(**job["earlier"]) if job["earlier"] else None
        self.manifest = self.producer.open(job["commit"], earlier)
        shutil.rmtree(self.out / DOWNLOADS, ignore_errors=True)

    def run(self) -> None:
        """Makes shards until the process is ended. Raises UserError."""
        self.status.set(version=self.manifest.source)
        self._check_budget()
        self._work(self.producer.make_validation(), "the validation shards")
        self._check_budget()
        self.status.set(opened=True)
        made = 0
        while True:
            number = self._next_shard()
            if number is None:
                self.status.set(now=False, state="waiting for the readers")
                time.sleep(POLL)
                continue
            self._work(self.producer.make("train", number), f"train shard {number}")
            made += 1
            self.status.set(made=made)

    def _work(self, making: Iterator[int], what: str) -> None:
        tokens, start = 0, time.monotonic()
        for added in making:
            tokens += added
            rate = tokens / max(time.monotonic() - start, 1e-9)
            self.status.set(now=False, state=f"{what}, {tokens / 1e6:.1f} M tokens made, {rate / 1e6:.2f} M tokens/s")

    def _next_shard(self) -> int | None:
        """The nearest shard ahead of the readers that is not here, once there is room for it; None: nothing to do yet.
        To make room, shards that all readers have passed are deleted."""
        train = self.manifest.of("train")
        n = len(train) if self.manifest.complete else None
        at = [read_json(reader_path(self.out, rank)).get("shard") for rank in range(self.job["readers"])]
        if None in at and train:  # a resumed run will say where it begins
            return None
        low, last = min((i for i in at if i is not None), default=0), self._last_shard(train)
        here = {i for i, entry in enumerate(train) if (self.out / entry["file"]).exists()}
        ahead, number = [], None
        for sequence in range(low, low + (n or len(train) + 1)):  # counted over all epochs
            if last is not None and sequence > last:
                break
            if (i := sequence % n if n else sequence) not in here:
                number = i
                break
            ahead.append(i)
        spare = here - set(ahead)
        need = self._reserve() + (0 if number is None else self.producer.bytes_of(number))
        while (taken := directory_bytes(self.out)) + need > self.budget:
            if not spare:
                if number is not None and not ahead:
                    raise UserError(
                        f"{self.out}: the next shard needs {need / 1e9:.3g} GB, and {taken / 1e9:.3g} of the "
                        f"{self.budget / 1e9:.3g} GB of the budget are taken; raise disk_budget_gb, or free some disk"
                    )
                return None
            # the one that is needed again last; in a first epoch, whose end nobody knows, the oldest
            victim = max(spare, key=lambda i: (i - low) % n if n else -i)
            (self.out / train[victim]["file"]).unlink()
            spare.remove(victim)
        return number

    def _last_shard(self, train: list[dict]) -> int | None:
        """The shard, counted over all epochs, with which the run ends; None until that is known."""
        ends = np.cumsum([0] + [(entry["tokens"] - 1) // self.data.sequence_length for entry in train])
        windows, known = self.job["windows"], int(ends[-1])
        if not known or not (self.manifest.complete or windows <= known):
            return None
        epoch, window = divmod(windows - 1, known)
        return epoch * len(train) + int(np.searchsorted(ends, window, side="right")) - 1

    def _reserve(self) -> int:
        """Bytes beside the shards: the manifest is replaced, and small files come and go."""
        return 2 * (self.out / MANIFEST).stat().st_size + (1 << 13)

    def _check_budget(self) -> None:
        sizes = {e["file"]: HEADER_BYTES + e["tokens"] * DTYPE.itemsize for e in self.manifest.shards}
        val = sum(sizes[e["file"]] for e in self.manifest.of("val"))
        others = directory_bytes(self.out) - sum(size for name, size in sizes.items() if (self.out / name).exists())
        if (least := val + 2 * self.producer.largest + others + self._reserve()) > self.budget:
            raise UserError(
                f"disk_budget_gb {self.data.disk_budget_gb:g}: {self.budget / 1e9:.3g} GB are too few for the "
                f"validation shards and two training shards, {least / 1e9:.3g} GB; raise it, free some disk, or lower "
                "shard_tokens"
            )


def main() -> int:
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(10)  # the step comes first
    out = Path(job["data"]["dataset_name"])
    status, full_since = Status(out), time.monotonic()
    recipe = logging.getLogger("recipe")
    recipe.handlers, recipe.propagate = [ToStatus(status)], False
    recipe.setLevel(logging.INFO)
    try:
        status.set(state="the builder is starting")
        with alone_in(out, seconds=10):  # the builder of a killed run may be about to end
            while True:
                try:
                    status.values["made"] = 0
                    Builder(job, status).run()
                except OSError as error:
                    if status.values["made"]:
                        full_since = time.monotonic()
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() - full_since > PATIENCE:
                        raise
                    logger.warning(
                        "data       %s: %s; trying again in %.0f s, free some disk", out, error.strerror, _FULL
                    )
                    time.sleep(_FULL)
    except (UserError, OSError) as error:
        status.set(error=str(error) if isinstance(error, UserError) else f"{out}: {error}")
    return FAILED


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # an open shard is made again


if __name__ == "__main__":
    keep_secrets()  # its standard error goes into builder.log
    sys.exit(main())
