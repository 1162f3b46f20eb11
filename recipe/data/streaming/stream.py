"""Shards made just in time: the process that makes them is kept alive, and the reader waits for it, aloud."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from recipe.config import ROOT, DataConfig
from recipe.data.dataset import LocalSource, too_large
from recipe.data.prepare.pipeline import alone_in
from recipe.data.shards import MANIFEST, Manifest, Shard
from recipe.data.streaming.builder import FAILED
from recipe.data.streaming.status import EARLIER, POLL, STATUS, read_json, reader_path, write_json
from recipe.errors import UserError

LOG = "builder.log"
_RESTARTS = 3  # of a builder that died without having made a shard in between
_STALLED = 300  # seconds without a sign of life after which it is taken for dead
_SILENCE = 2.0  # seconds of waiting before the first line about it
_BETWEEN_LINES = 10.0


class Builder:
    """The builder process of this machine, watched and restarted by a thread until `close`.

    Attributes:
        budget: bytes of disk that it may use.
    """

    def __init__(self, data: DataConfig, readers: int, commit: str | None, earlier: dict | None):
        """`readers` processes of this machine will read; `earlier` is the manifest that a checkpoint kept. Raises
        UserError where another process uses the directory."""
        self.out = Path(data.dataset_name)
        self.out.mkdir(parents=True, exist_ok=True)
        self._closing, self._lock = threading.Event(), ExitStack()
        self._lock_file = self._lock.enter_context(alone_in(self.out))
        for leftover in [self.out / STATUS, self.out / EARLIER, *self.out.glob(".reader-*")]:
            leftover.unlink(missing_ok=True)
        if earlier:  # for another machine than before, or an emptied disk
            write_json(self.out / EARLIER, earlier)
        self.budget = min(int(data.disk_budget_gb * 1e9), _affordable(self.out))
        self._job = json.dumps(
            {"data": dataclasses.asdict(data), "readers": readers, "budget": self.budget, "commit": commit}
        )
        self._process = self._start()
        self._watch = threading.Thread(target=self._keep_alive, name="builder", daemon=True)
        self._watch.start()

    def _start(self) -> subprocess.Popen:
        command = [sys.executable, "-m", "recipe.data.streaming.builder", self._job]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with open(self.out / LOG, "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C reaches the whole terminal; the trainer decides what it means
                pass_fds=[self._lock_file],  # nobody else comes in while it is on its way out
            )

    def _keep_alive(self) -> None:
        deaths, sign, since = 0, None, time.monotonic()
        while not self._closing.wait(POLL):
            try:
                status = read_json(self.out / STATUS)
                if status.get("made"):
                    deaths = 0
                if status.get("time") != sign:
                    sign, since = status.get("time"), time.monotonic()
                if (code := self._process.poll()) is None and time.monotonic() - since > _STALLED:
                    self._process.kill()
                    code = self._process.wait()
                if code is None:
                    continue
                if code == FAILED:
                    return  # the cause is in the status
                cause = f"killed by signal {-code}" if code < 0 else self._last_words()
                deaths += 1
                if deaths > _RESTARTS:
                    error = f"the process that makes the shards in {self.out} died {deaths} times: {cause}"
                    write_json(self.out / STATUS, {"error": f"{error}; see {self.out / LOG}", "time": time.time()})
                    return
                message = f"the process that makes the shards died ({cause}); started again"
                write_json(self.out / STATUS, {"message": message, "message_time": time.time(), "time": time.time()})
                self._process, since = self._start(), time.monotonic()
            except (OSError, UserError):  # a full disk, no memory for a process: perhaps not for ever
                self._closing.wait(1)

    def _last_words(self) -> str:
        lines = (self.out / LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "without a word"

    def close(self) -> None:
        self._closing.set()
        self._watch.join()
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._lock.close()


def _affordable(out: Path) -> int:
    """Bytes that the directory may take without filling the disk: what it has, and nine tenths of what is free."""
    has = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    return has + shutil.disk_usage(out).free * 9 // 10


class Waiting:
    """Waits for the builder, saying what it does; ends with its error, or when the run ends."""

    def __init__(self, out: Path, say: Callable[[str], None]):
        self.out, self.say, self.closed = out, say, False
        self._heard = 0.0

    def until(self, ready: Callable[[], object], what: str):
        """`ready()` once it is true. Raises UserError with the builder's error."""
        start = time.monotonic()
        said = start + _SILENCE - _BETWEEN_LINES
        while not (found := ready()):
            status = read_json(self.out / STATUS)
            if status.get("error"):
                raise UserError(status["error"])
            if time.time() - status.get("time", time.time()) > 2 * _STALLED:
                raise UserError(
                    f"the process that makes the shards in {self.out} gives no sign of life; see {self.out / LOG}"
                )
            if self.closed:
                raise UserError("the run ended while it waited for data")
            if status.get("message_time", 0) > self._heard:
                self._heard = status["message_time"]
                self.say(f"data       {status['message']}")
            elif time.monotonic() - said > _BETWEEN_LINES:
                said = time.monotonic()
                self.say(f"data       waiting {said - start:.0f} s for {what}: {_doing(status)}")
            time.sleep(POLL)
        return found


def _doing(status: dict) -> str:
    state = status.get("state", "the builder is starting")
    if state == "tokenising":
        rate = status["tokens"] / max(status["seconds"], 1e-9)
        return (
            f"{status['tokens'] / 1e6:.1f} of {status['of'] / 1e6:.1f} M tokens of {status['split']} shard "
            f"{status['shard']} made, {rate / 1e6:.2f} M tokens/s"
        )
    if state == "downloading":
        return f"{status['done'] / 1e6:.0f} of {status['of'] / 1e6:.0f} MB of {status['shard']} downloaded"
    return state


class StreamedSource(LocalSource):
    """LocalSource over shards that come and go, for a run from `first_step` to `steps`. `rank` is this reader's number
    on its machine."""

    def __init__(
        self,
        out: Path,
        sequence_length: int,
        batch_size: int,
        seed: int,
        *,
        rank: int,
        first_step: int,
        steps: int,
        say: Callable[[str], None],
    ):
        self.out, self.rank, self.steps = out, rank, steps
        self._waiting = Waiting(out, say)
        self._seen, self._at = None, -1
        super().__init__([], sequence_length, batch_size, seed)
        self._refresh()
        self._pass_to(self._shard_of(first_step * batch_size))

    def _refresh(self) -> bool:
        """Read the manifest if it has changed."""
        stamp = (self.out / MANIFEST).stat()
        stamp = (stamp.st_mtime_ns, stamp.st_ino)
        if stamp == self._seen:
            return False
        self._seen, self.manifest = stamp, Manifest.load(self.out)
        self._set_shards([Shard(self.out / e["file"], e["tokens"], e["sha256"]) for e in self.manifest.of("train")])
        return True

    @property
    def complete(self) -> bool:
        return self.manifest.complete

    def rows(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64; waits for shards."""
        wanted = step * self.batch_size + np.arange(lo, hi, dtype=np.int64)  # (N,) windows since the run's start
        parts = []
        while True:
            # Each shard is read before the next is waited for: the builder may delete those that are passed.
            known = wanted if self.complete else wanted[wanted < self.windows]
            parts.append(self._windows_at(known))
            wanted = wanted[len(known) :]
            if not len(wanted):
                return np.concatenate(parts)
            if not self._refresh():
                number = len(self.shards)
                self._pass_to(number)  # or to an earlier one of the next epoch, if the stream ends here
                self._waiting.until(self._refresh, f"shard {number}")
            if self.complete and self.batch_size > self.windows:
                raise UserError(too_large(self.batch_size, self.sequence_length, self.windows))

    def _windows_of(self, epoch: int, s: int) -> np.ndarray:
        self._pass_to(epoch * len(self.shards) + s if self.complete else s)
        while True:
            if s not in self._open and not self.shards[s].path.exists():
                self._verified.pop(s, None)  # what comes is another file
                self._waiting.until(self.shards[s].path.exists, f"shard {s}")
            try:
                return super()._windows_of(epoch, s)
            except FileNotFoundError:  # gone again: this reader went back behind what it had passed
                self._verified.pop(s, None)

    def _shard_of(self, window: int) -> int:
        """The shard, counted over all epochs, of a window since the run's start; the next one where it is not known."""
        if window >= self.windows and not self.complete:
            return len(self.shards)
        epoch, window = divmod(window, self.windows)
        return epoch * len(self.shards) + int(np.searchsorted(self._starts, window, side="right")) - 1

    def _pass_to(self, sequence: int) -> None:
        """Tell the builder that shards before `sequence`, counted over all epochs, may go."""
        if sequence == self._at:
            return
        here = sequence % len(self.shards) if self.complete else sequence
        for s in [s for s in self._open if s != here]:
            del self._open[s]  # or the disk would still hold it
        for s in [s for s in self._verified if s < here or s > here + 1]:
            del self._verified[s]  # when it comes again, it is another file
        run = {"windows": self.steps * self.batch_size, "sequence_length": self.sequence_length}
        write_json(reader_path(self.out, self.rank), {"shard": sequence, **run})
        self._at = sequence

    def state(self) -> dict:
        """As LocalSource's, and the manifest, from which another machine can build the shards again."""
        manifest = self.manifest
        shards = [[e["file"], e["tokens"], e["sha256"]] for e in manifest.of("train")]
        return {"shards": shards, "complete": manifest.complete, "manifest": dataclasses.asdict(manifest)}

    def close(self) -> None:
        self._waiting.closed = True
        super().close()
