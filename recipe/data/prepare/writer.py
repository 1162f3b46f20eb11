"""From tokens to committed shards: the part of a preparation that a kill at any moment must not harm."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recipe import faults
from recipe.data.shards import DTYPE, HEADER_BYTES, Manifest, finish_shard
from recipe.errors import UserError


def shard_sizes(number: int, shard_tokens: int, first_shard_tokens: int) -> int:
    """Tokens of training shard `number`: the first one is small, so that training can begin while the next is made,
    and each is twice the one before, up to `shard_tokens`."""
    return shard_tokens if number >= 31 else min(shard_tokens, first_shard_tokens << number)


class OpenShard:
    """A shard being written, in <split>.part, which takes its name when it is full."""

    def __init__(self, path: Path, filled: int = 0):
        """`filled` tokens that the file holds already are kept, what comes after them is cut off."""
        self.path, self.filled = path, filled
        path.touch()
        size = HEADER_BYTES + filled * DTYPE.itemsize
        if filled and path.stat().st_size < size:
            raise UserError(f"{path}: the open shard was shortened; delete {path.parent} and prepare it again")
        os.truncate(path, size)  # the header is written last
        self._file = open(path, "ab", buffering=1 << 20)  # noqa: SIM115  (closed by `close` or `commit`)

    def append(self, tokens: np.ndarray) -> None:
        self._file.write(tokens)
        self.filled += len(tokens)

    def flush(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def commit(self, path: Path) -> str:
        """Give the shard its header, bring it to the disk and to `path`; returns its SHA-256."""
        self.close()
        faults.at("data.shard")
        return finish_shard(self.path, path, self.filled)


class ShardWriter:
    """One open shard a split, and the way from there to committed shards.

    The manifest, written last, holds how many tokens of each open shard count; what a kill leaves behind is cut off.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        shard_tokens: int,
        first_shard_tokens: int,
        before_commit: Callable[[], None] = lambda: None,
    ):
        self.out, self.manifest, self.before_commit = out, manifest, before_commit
        self.shard_tokens, self.first_shard_tokens = shard_tokens, first_shard_tokens
        self.skip = manifest.position()["tokens"]  # tokens of the next piece that are in shards already
        self.open: dict[str, OpenShard] = {}

    def __enter__(self) -> ShardWriter:
        filled = self.manifest.shards[-1]["next"]["open"] if self.manifest.shards else {}
        for split in ("train", "val"):
            part, committed = self._part(split), self._next_path(split)
            if committed.exists():  # killed between the renaming of the shard and the writing of the manifest
                os.replace(committed, part)
            self.open[split] = OpenShard(part, filled.get(split, 0))
        return self

    def __exit__(self, *_) -> None:
        for shard in self.open.values():
            shard.close()

    def _part(self, split: str) -> Path:
        return self.out / f"{split}.part"

    def _number(self, split: str) -> int:
        return sum(shard["split"] == split for shard in self.manifest.shards)

    def _next_path(self, split: str) -> Path:
        return self.out / shard_name(split, self._number(split))

    def _size(self, split: str) -> int:
        if split == "val":
            return self.shard_tokens
        return shard_sizes(self._number(split), self.shard_tokens, self.first_shard_tokens)

    def append(self, split: str, tokens: np.ndarray, position: dict) -> None:
        """Add a piece's tokens, shape (tokens,), uint16, to the open shard of `split`, and commit it whenever full."""
        done, self.skip = self.skip, 0
        while True:
            shard, size = self.open[split], self._size(split)
            taken = tokens[done : done + size - shard.filled]
            shard.append(taken)
            done += len(taken)
            if shard.filled < size:
                return
            self.commit(split, {**position, "tokens": done})

    def commit(self, split: str, position: dict) -> None:
        """Commit the open shard of `split`; a preparation would go on at `position`."""
        self.before_commit()
        for shard in self.open.values():
            shard.flush()
        path, count = self._next_path(split), self.open[split].filled
        sha256 = self.open[split].commit(path)
        filled = {name: 0 if name == split else shard.filled for name, shard in self.open.items()}
        entry = {"file": path.name, "split": split, "tokens": count, "sha256": sha256}
        self.manifest.shards.append({**entry, "next": {**position, "open": filled}})
        self.manifest.save(self.out)
        self.open[split] = OpenShard(self._part(split))

    def commit_rest(self, split: str, position: dict) -> None:
        """Commit what is left of a split as a shorter last shard."""
        if self.open[split].filled:
            self.commit(split, position)

    def holds(self, split: str) -> bool:
        return self.open[split].filled > 0 or self.manifest.tokens(split) > 0

    def finish(self, position: dict) -> None:
        """Commit what is left of both splits, and call the manifest complete."""
        for split in self.open:
            self.commit_rest(split, position)
        for shard in self.open.values():  # empty by now
            shard.close()
            shard.path.unlink()
        self.manifest.documents, self.manifest.complete = position["document"], True
        self.manifest.save(self.out)


def shard_name(split: str, number: int) -> str:
    return f"{split}_{number:06d}.bin"
