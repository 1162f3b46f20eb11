"""Streaming: starts the process that makes the shards during training, and waits for each shard to read it."""

import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from recipe.config import ROOT, DataConfig
from recipe.data.builder import POLL_S, STATUS, read_json, reader_path, write_json
from recipe.data.dataset import TokenDataset
from recipe.data.prepare import directory_lock
from recipe.data.shards import Manifest, ShardReader
from recipe.utils.errors import Unreachable, UserError

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 10.0  # seconds for a killed run to end
_FIRST_LINE_AFTER_S = 2.0  # seconds of waiting before the first log line
_LOG_INTERVAL_S = 10.0
# Like -m, but the working directory, which may have a tokenize.py or be another clone, is not searched for modules.
_BUILDER = "import sys; sys.path = [path for path in sys.path if path]; from recipe.data.builder import main; main()"


class BuilderProcess:
    """The builder of this node, until `close`. If it dies, every wait for a shard raises UserError. It logs to the
    output of this process."""

    def __init__(self, data: DataConfig, readers: int, commit: str | None, saved_manifest: dict | None):
        """`readers` processes of this node will read; `commit` is that of a Hub data set (None: the newest), and
        `saved_manifest` is from the checkpoint. Raises UserError if another run streams into the same directory."""
        self.out, self._closing, self._lock = Path(data.dataset_name), False, ExitStack()
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock.enter_context(directory_lock(self.out, seconds=LOCK_TIMEOUT_S))  # before touching a file in it
        for stale_file in self.out.glob(".reader-*"):
            stale_file.unlink(missing_ok=True)
        write_json(self.out / STATUS, {"opened": False})
        python_path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        no_progress_bars = dict.fromkeys(("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", _BUILDER],
            stdin=subprocess.PIPE,
            text=True,
            env=os.environ | no_progress_bars | {"PYTHONPATH": python_path},
            start_new_session=True,  # Ctrl-C signals the terminal's process group; only the trainer handles it
        )
        job = {"data": dataclasses.asdict(data), "readers": readers, "commit": commit, "saved_manifest": saved_manifest}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        threading.Thread(target=self._watch, name="builder", daemon=True).start()

    def _watch(self) -> None:
        code = self.process.wait()
        if not self._closing and "error" not in read_json(self.out / STATUS):
            logger.warning("data       the process that makes the shards ended with exit code %d", code)
            (self.out / STATUS).unlink(missing_ok=True)

    def close(self) -> None:
        """Kills the builder; the next one makes the unfinished shard again."""
        self._closing = True
        self.process.kill()
        self.process.communicate()  # closes its standard input, and waits
        self._lock.close()


def wait_for(out: Path, condition: Callable[[], object], awaited: str, closed: threading.Event | None = None) -> None:
    """Waits until `condition()` is true, and logs what is `awaited`. Raises UserError if the builder of `out` failed or
    the event `closed` is set."""
    start = time.monotonic()
    last_logged = start + _FIRST_LINE_AFTER_S - _LOG_INTERVAL_S
    while not condition():
        if not (status := read_json(out / STATUS)):
            raise Unreachable(f"the process that makes the shards in {out} died; the same command resumes")
        if error := status.get("error"):
            raise (Unreachable if status.get("is_transient") else UserError)(error)
        if closed and closed.is_set():
            raise UserError("the run ended while it waited for data")
        if time.monotonic() - last_logged > _LOG_INTERVAL_S:
            last_logged = time.monotonic()
            logger.info("data       waiting %.0f s for %s", last_logged - start, awaited)
        time.sleep(POLL_S)


def open_manifest(out: Path) -> Manifest:
    """The manifest of a stream, once readers can start: waits for the validation shards and the first training shard.
    Raises UserError if the builder fails."""
    wait_for(out, lambda: read_json(out / STATUS).get("opened"), "the first shards")
    manifest = Manifest.load(out)
    assert manifest
    return manifest


class StreamedDataset(TokenDataset):
    """A TokenDataset whose shards are made and deleted during the run: it must be read in the order of the steps, from
    window `first_window` of the run on. `rank` is this reader's rank on its node."""

    def __init__(self, out: Path, *settings: int, rank: int, first_window: int):
        """`settings` are TokenDataset's arguments after `shards`."""
        self.out, self.rank = out, rank
        self._current_shard: int | None = None  # counted over all epochs; the builder may delete those before it
        self.manifest = open_manifest(out)
        super().__init__(self.manifest.shards_in(out, "train"), *settings)
        self.advance_to(first_window)

    def _refresh(self) -> bool:
        """Reads the manifest; returns whether it has changed."""
        if (manifest := Manifest.load(self.out)) in (None, self.manifest):
            return False
        self.manifest = manifest
        self._set_shards(self.manifest.shards_in(self.out, "train"))
        return True

    def windows_at(self, g: np.ndarray) -> np.ndarray:
        """The windows `g`, (N,) ascending -> (N, T + 1), int64; waits for shards."""
        remaining, arrays = g, []
        while True:
            # Read each shard before waiting for the next: the builder may delete those that are passed.
            available = remaining if self.manifest.complete else remaining[remaining < self.windows]
            arrays.append(super().windows_at(available))
            remaining = remaining[len(available) :]
            if not len(remaining):
                return np.concatenate(arrays)
            next_shard = len(self.shards)  # the first one of the next epoch if the stream ends here
            self._pass_to(next_shard)
            wait_for(self.out, self._refresh, f"shard {next_shard}", self._closed)
            self.check_batch()

    def advance_to(self, window: int) -> None:
        """Like TokenDataset's: the builder must not wait for this reader at shards that it gets no window of."""
        if window >= self.windows and not self.manifest.complete:
            self._refresh()
        epoch, window = divmod(window, self.windows) if self.manifest.complete and self.windows else (0, window)
        # A window beyond the known ones is in the next shard or a later one.
        self._pass_to(epoch * len(self.shards) + int(np.searchsorted(self.starts, window, side="right")) - 1)

    def check_batch(self) -> None:
        """Like TokenDataset's, once all shards are known."""
        if self.manifest.complete:
            super().check_batch()

    def _open(self, epoch: int, shard: int) -> tuple[ShardReader, np.ndarray]:
        self._pass_to(epoch * len(self.shards) + shard)
        wait_for(self.out, self.shards[shard].path.exists, f"shard {shard}", self._closed)
        return super()._open(epoch, shard)

    def _pass_to(self, shard: int) -> None:
        """Lets the builder delete the shards before `shard`, counted over all epochs."""
        if shard != self._current_shard:
            self._opened = None  # an open file would keep its disk space after it is deleted
            write_json(reader_path(self.out, self.rank), {"shard": shard})
            self._current_shard = shard

    def state_dict(self) -> dict:
        """Like TokenDataset's, with the manifest, from which another node can make the shards again."""
        manifest = self.manifest  # read once, since the loader's thread replaces it
        shards = [[entry["file"], entry["tokens"], entry["sha256"]] for entry in manifest.of("train")]
        return {"shards": shards, "complete": manifest.complete, "manifest": dataclasses.asdict(manifest)}
