"""The process that makes the shards of a streamed run, a few ahead of its readers and within a disk budget.

stream.py starts one on each node. It reads its job, one line of JSON, from standard input, and exits when that closes,
which happens however its parent ends. It exchanges small files beside the shards with its parent and the readers.
"""

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.producer import Producer
from recipe.data.shards import HEADER_BYTES, Manifest
from recipe.utils.errors import UserError, is_transient
from recipe.utils.files import replace_file
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact, redacted

# {"opened": whether readers can start}, or {"error": message} if the builder fails. Deleted if it dies, which a full
# disk cannot prevent.
STATUS = ".builder.json"
POLL_S = 0.1
_LOOKAHEAD = 8  # shards to keep ready, from the one being read on


def write_json(path: Path, values: dict) -> None:
    """Replaces a file atomically, without fsync and with secrets redacted."""
    replace_file(path, json.dumps(redacted(values)).encode(), flush=False)


def read_json(path: Path) -> dict:
    """The contents of a file, {} if it does not exist."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def reader_path(out: Path, rank: int) -> Path:
    """The file in which the reader of a local rank writes {"shard": the one it reads, counted over all epochs}."""
    return out / f".reader-{rank}"


class Builder:
    """Makes the shards for the readers of this node, in the order in which they are read."""

    def __init__(self, data: DataConfig, readers: int):
        """Raises UserError for text that cannot be streamed."""
        self.data, self.out, self.readers = data, Path(data.dataset_name), readers
        self.producer = Producer(data)
        if self.producer.val_fraction:
            raise UserError(
                "streaming local text needs val_data, or val_documents, the number of documents at its start to hold "
                "out for validation (val_fraction would need all of the text first), or set streaming to false"
            )

    def run(self, commit: str | None, saved_manifest: Manifest | None) -> None:
        """Makes shards until the process ends. Raises UserError."""
        self.manifest = self.producer.open(commit, saved_manifest)
        self.producer.make_validation()
        val_bytes, used_bytes = (sum(p.stat().st_size for p in self.out.glob(name)) for name in ("val_*.bin", "*.bin"))
        shard_bytes = HEADER_BYTES + self.producer.tokenizer.dtype.itemsize * self.data.shard_tokens
        budget = min(int(self.data.disk_budget_gb * 1e9), used_bytes + shutil.disk_usage(self.out).free * 9 // 10)
        if (min_bytes := val_bytes + 2 * shard_bytes) > budget:
            raise UserError(
                f"disk_budget_gb {self.data.disk_budget_gb:g}: only {budget / 1e9:.3g} GB may be used, but the "
                f"validation shards and two training shards need {min_bytes / 1e9:.3g} GB; raise it, free disk "
                "space, or lower shard_tokens"
            )
        if not self.manifest.of("train"):
            self.producer.make("train", 0)
        write_json(self.out / STATUS, {"opened": True})
        while True:
            number = self._next_shard((budget - val_bytes) // shard_bytes)
            if number is None:
                time.sleep(POLL_S)
            else:
                self.producer.make("train", number)

    def _next_shard(self, capacity: int) -> int | None:
        """The first shard ahead of the readers that is not on the disk; None if there is none, or a reader is still
        starting. Deletes shards that are not needed before it, so that with it there are at most `capacity`."""
        train = self.manifest.of("train")
        total = len(train) if self.manifest.complete else None
        positions = [read_json(reader_path(self.out, rank)) for rank in range(self.readers)]
        if not all(positions):  # a starting reader will write its position
            return None
        on_disk = set(range(len(train))).difference(self.producer.missing(train))
        slowest = min(position["shard"] for position in positions)  # counted over all epochs
        upcoming = [i % total if total else i for i in range(slowest, slowest + min(_LOOKAHEAD, capacity))]
        number = next((i for i in upcoming if i not in on_disk), None)
        if number is None:
            return None
        deletable = on_disk - set(upcoming[: upcoming.index(number)])
        # evict the shards with the farthest next use; in epoch 0, whose length is unknown, the oldest
        victims = sorted(deletable, key=lambda i: (i - slowest) % total if total else -i, reverse=True)
        for victim in victims[: max(0, len(on_disk) + 1 - capacity)]:
            (self.out / train[victim]["file"]).unlink()
        return number


def main() -> None:
    """Makes the shards of the job on stdin until the trainer ends. An error goes to the status file."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job: the trainer may need one more shard
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(10)  # training comes first
    set_up_logging()
    data, saved_manifest = DataConfig(**job["data"]), job["saved_manifest"]
    out = Path(data.dataset_name)
    try:
        Builder(data, job["readers"]).run(job["commit"], Manifest(**saved_manifest) if saved_manifest else None)
    except (UserError, OSError) as error:
        text = str(error) if isinstance(error, UserError) else f"{out}: {error}"
        try:
            write_json(out / STATUS, {"error": text, "is_transient": is_transient(error)})
        except OSError:  # a full disk
            sys.exit(f"error: {redact(text)}")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # the unfinished shard is made again by the next builder
