"""What a stream's builder and its readers tell one another, in small files beside the shards."""

from __future__ import annotations

import json
from pathlib import Path

from recipe.utils.files import replace_file
from recipe.utils.redaction import redacted

STATUS = ".builder.json"  # {"state": what the builder is doing, "opened": readers can begin, "error": why it ended}
POLL = 0.1  # seconds


def write_json(path: Path, values: dict) -> None:
    """Replaces a file as a whole, without waiting for the disk, and without what is secret."""
    replace_file(path, json.dumps(redacted(values)).encode(), flush=False)


def read_json(path: Path) -> dict:
    """Empty where there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def reader_path(out: Path, rank: int) -> Path:
    """Where a reader, by its rank on this node, writes {"shard"} that it is at, counted over all epochs."""
    return out / f".reader-{rank}"
