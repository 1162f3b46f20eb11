"""Shards made just in time: the process that makes them is kept alive, and the dataset waits for its shards."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recipe.config import ROOT, DataConfig
from recipe.data.dataset import TokenDataset, too_large
from recipe.data.hub import DOWNLOADS
from recipe.data.shards import MANIFEST, Manifest
from recipe.data.streaming.builder import FAILED
from recipe.data.streaming.status import POLL, STATUS, directory_bytes, read_json, reader_path, write_json
from recipe.errors import UserError

logger = logging.getLogger(__name__)

LOG = ".builder.log"
_RESTARTS = 3  # of a builder that died without having made a shard in between
_STALLED = 600  # seconds without a sign of life after which it is taken for dead
_SILENCE = 2.0  # seconds of waiting before the first line about it
_BETWEEN_LINES = 10.0


class BuilderProcess:
    """The builder of this node, watched by a thread and restarted if it dies, until `close`.

    Attributes:
        budget: bytes of disk that it may use.
    """

    def __init__(self, data: DataConfig, readers: int, windows: int, commit: str | None, earlier: dict | None):
        """`readers` processes of this node will read, `windows` in the whole run; `commit` is the version of a data set
        on the Hub, None for the newest; `earlier` is the manifest that a checkpoint kept."""
        self.out = Path(data.dataset_name)
        self.out.mkdir(parents=True, exist_ok=True)
        for leftover in [self.out / STATUS, *self.out.glob(".reader-*")]:
            leftover.unlink(missing_ok=True)
        self.budget = min(int(data.disk_budget_gb * 1e9), _affordable(self.out))
        job = {"data": dataclasses.asdict(data), "readers": readers, "windows": windows}
        job |= {"budget": self.budget, "commit": commit, "earlier": earlier}
        self._job = json.dumps(job).encode() + b"\n"
        self._closing = threading.Event()
        self._process = self._start()
        self._watch = threading.Thread(target=self._keep_alive, name="builder", daemon=True)
        self._watch.start()

    def _start(self) -> subprocess.Popen:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        (self.out / LOG).unlink(missing_ok=True)
        with open(self.out / LOG, "xb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "recipe.data.streaming.builder"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches the whole terminal; the trainer decides what it means
            )
        process.stdin.write(self._job)
        process.stdin.flush()
        return process

    def _keep_alive(self) -> None:
        deaths, sign, since = 0, None, time.monotonic()
        while not self._closing.wait(POLL):
            try:
                status = read_json(self.out / STATUS)
                if status.get("made"):
                    deaths = 0
                now = status.get("pid"), status.get("changes"), directory_bytes(self.out / DOWNLOADS)
                if now != sign:
                    sign, since = now, time.monotonic()
                if time.monotonic() - since > _STALLED:
                    self._process.kill()
                    self._process.wait()
                code = self._process.poll()
                if code == FAILED:
                    return  # the cause is in the status
                if code is None:
                    continue
                cause = f"killed by signal {-code}" if code < 0 else self._last_line()
                deaths += 1
                if deaths > _RESTARTS:
                    error = f"the process that makes the shards in {self.out} died {deaths} times: {cause}"
                    write_json(self.out / STATUS, {"error": f"{error}; see {self.out / LOG}"})
                    return
                logger.warning("data       the process that makes the shards died (%s); it is started again", cause)
                self._process, since = self._start(), time.monotonic()
            except OSError:  # a full disk, or no memory for a process: perhaps not for ever
                self._closing.wait(1)

    def _last_line(self) -> str:
        lines = (self.out / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a message"

    def close(self) -> None:
        self._closing.set()
        self._watch.join()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _affordable(out: Path) -> int:
    """Bytes that the directory may take without filling the disk: what it has, and nine tenths of what is free."""
    return directory_bytes(out) + shutil.disk_usage(out).free * 9 // 10


class Waiting:
    """Waits for the builder, and logs what it is doing. Ends with its error, or when `closed` is set."""

    def __init__(self, out: Path):
        self.out, self.closed = out, False
        self._heard = None

    def until(self, ready: Callable[[], object], what: str):
        """`ready()` once it is true. Raises UserError with the builder's error."""
        start = time.monotonic()
        logged = start + _SILENCE - _BETWEEN_LINES
        while not (found := ready()):
            status = read_json(self.out / STATUS)
            message = status.get("message")
            if message and message[:2] != self._heard:
                self._heard = message[:2]
                logger.warning("%s", message[2])
            if status.get("error"):
                raise UserError(status["error"])
            if self.closed:
                raise UserError("the run ended while it waited for data")
            if time.monotonic() - logged > _BETWEEN_LINES:
                logged = time.monotonic()
                doing = status.get("state", "the builder is starting")
                if downloaded := directory_bytes(self.out / DOWNLOADS):
                    doing = f"{downloaded / 1e6:.0f} MB downloaded"
                logger.info("data       waiting %.0f s for %s: %s", logged - start, what, doing)
            time.sleep(POLL)
        return found


class StreamedDataset(TokenDataset):
    """A TokenDataset over shards that come and go, for a run of `windows` in all that begins at window `first`. `rank`
    is this reader's number on its node."""

    def __init__(self, out: Path, sequence_length: int, batch_size: int, seed: int, *, rank: int, first: int):
        self.out, self.rank = out, rank
        self._waiting = Waiting(out)
        self._seen, self._at = None, -1
        super().__init__([], sequence_length, batch_size, seed)
        self._refresh()
        self._pass_to(self._shard_of(first))

    def _refresh(self) -> bool:
        """Reads the manifest if it has changed."""
        stamp = (self.out / MANIFEST).stat()
        stamp = (stamp.st_mtime_ns, stamp.st_ino)
        if stamp == self._seen:
            return False
        self._seen, self.manifest = stamp, Manifest.load(self.out)
        self._set_shards(self.manifest.shards_in(self.out, "train"))
        return True

    def rows(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64; waits for shards."""
        wanted = step * self.batch_size + np.arange(lo, hi, dtype=np.int64)  # (N,) windows since the run's start
        parts = []
        while True:
            # Each shard is read before the next is waited for: the builder may delete those that are passed.
            known = wanted if self.manifest.complete else wanted[wanted < self.windows]
            parts.append(self._windows_at(known))
            wanted = wanted[len(known) :]
            if not len(wanted):
                return np.concatenate(parts)
            if not self._refresh():
                number = len(self.shards)
                self._pass_to(number)  # or to an earlier one of the next epoch, if the stream ends here
                self._waiting.until(self._refresh, f"shard {number}")
            if self.manifest.complete and self.batch_size > self.windows:
                raise UserError(too_large(self.batch_size, self.sequence_length, self.windows))

    def _windows_of(self, epoch: int, s: int) -> np.ndarray:
        self._pass_to(epoch * len(self.shards) + s if self.manifest.complete else s)
        while True:
            if (epoch, s) not in self._open and not self.shards[s].path.exists():
                self._verified.pop((epoch, s), None)  # what comes is another file
                self._waiting.until(self.shards[s].path.exists, f"shard {s}")
            try:
                return super()._windows_of(epoch, s)
            except FileNotFoundError:  # deleted again: this reader went back behind what it had passed
                self._verified.pop((epoch, s), None)

    def _shard_of(self, window: int) -> int:
        """The shard, counted over all epochs, of a window since the run's start; the next one where it is not known."""
        if window >= self.windows and not self.manifest.complete:
            return len(self.shards)
        epoch, window = divmod(window, self.windows)
        return epoch * len(self.shards) + int(np.searchsorted(self._starts, window, side="right")) - 1

    def _pass_to(self, sequence: int) -> None:
        """Tells the builder that shards before `sequence`, counted over all epochs, may go."""
        if sequence == self._at:
            return
        epoch, here = divmod(sequence, len(self.shards)) if self.manifest.complete else (0, sequence)
        for key in [key for key in self._open if key != (epoch, here)]:
            del self._open[key]  # or the disk would still hold it
        for key in [key for key in self._verified if key not in ((epoch, here), (epoch, here + 1))]:
            del self._verified[key]  # when it comes again, it is another file
        write_json(reader_path(self.out, self.rank), {"shard": sequence})
        self._at = sequence

    def state(self) -> dict:
        """As TokenDataset's, and the manifest, from which another node can build the shards again."""
        shards = [shard.identity for shard in self.shards]
        return {"shards": shards, "complete": self.manifest.complete, "manifest": dataclasses.asdict(self.manifest)}

    def close(self) -> None:
        self._waiting.closed = True
        super().close()
