"""From tokens to committed shards: the part of a preparation that a kill at any moment must not harm."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from recipe.config import UserError
from recipe.data.shards import DTYPE, Manifest, write_shard


class ShardWriter:
    """One open shard a split, in <split>.part, and the way from there to committed shards.

    The manifest, written last, holds how many tokens of each .part file count; what a kill leaves behind is cut off.
    """

    def __init__(self, out: Path, manifest: Manifest, shard_tokens: int):
        self.out, self.manifest, self.shard_tokens = out, manifest, shard_tokens
        self.filled = {"train": 0, "val": 0}
        self.skip = 0  # tokens of the next piece that are in shards already
        if manifest.shards:
            self.filled = dict(manifest.shards[-1]["next"]["open"])
            self.skip = manifest.shards[-1]["next"]["tokens"]
        self.parts = {split: out / f"{split}.part" for split in self.filled}

    def __enter__(self) -> ShardWriter:
        self.files = {}
        for split, path in self.parts.items():
            size = self.filled[split] * DTYPE.itemsize
            path.touch()
            if path.stat().st_size < size:
                raise UserError(f"{path}: the open shard was shortened; delete {self.out} and prepare it again")
            os.truncate(path, size)
            self.files[split] = open(path, "ab", buffering=1 << 20)
        return self

    def __exit__(self, *_) -> None:
        for file in self.files.values():
            file.close()

    def append(self, split: str, tokens: np.ndarray, position: dict) -> None:
        """Add a piece's tokens, shape (tokens,), uint16, to the open shard of `split`, and commit it whenever full."""
        done, self.skip = self.skip, 0
        while True:
            taken = tokens[done : done + self.shard_tokens - self.filled[split]]
            self.files[split].write(taken)
            self.filled[split] += len(taken)
            done += len(taken)
            if self.filled[split] < self.shard_tokens:
                return
            self.commit(split, {**position, "tokens": done})

    def commit(self, split: str, position: dict) -> None:
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        name = f"{split}_{sum(shard['split'] == split for shard in self.manifest.shards):06d}.bin"
        sha256 = write_shard(self.out / name, np.memmap(self.parts[split], DTYPE, mode="r"))
        count, self.filled[split] = self.filled[split], 0
        entry = {"file": name, "split": split, "tokens": count, "sha256": sha256}
        self.manifest.shards.append({**entry, "next": {**position, "open": dict(self.filled)}})
        self.manifest.save(self.out)
        self.files[split].truncate(0)

    def holds(self, split: str) -> bool:
        return self.filled[split] > 0 or self.manifest.tokens(split) > 0

    def finish(self, position: dict) -> None:
        """Commit what is left as shorter last shards, and call the manifest complete."""
        for split, filled in self.filled.items():
            if filled:
                self.commit(split, position)
        for path in self.parts.values():  # empty by now
            path.unlink()
        self.manifest.documents, self.manifest.complete = position["document"], True
        self.manifest.save(self.out)
