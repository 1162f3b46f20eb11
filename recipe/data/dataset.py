"""Which tokens an optimizer step reads: a pure function of (seed, step), however the step is divided."""

from __future__ import annotations

import hashlib
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

import numpy as np

from recipe.data.shards import Shard, read_shard, verify
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.errors import UserError

# Shapes: N rows asked for, T sequence_length.


class TokenDataset:
    """Shards on this machine as windows of T + 1 tokens at stride T that never cross a shard.

    Shards are read in order, the windows of each in a permutation of its own for (seed, epoch, shard). `batch_size` is
    the number of sequences of one optimizer step over all processes. A shard is verified at its first use in an epoch,
    in the background while the one before it is read, and compared with that file's size and time at each later use.
    Raises UserError for a shard shorter than one window, and what `verify` raises.
    """

    def __init__(self, shards: list[Shard], sequence_length: int, batch_size: int, seed: int):
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        # By (epoch, shard), so that an epoch verifies its shards again.
        self._open: dict[tuple[int, int], _OpenWindows] = {}
        self._verified: dict[tuple[int, int], Future] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._set_shards(shards)

    def _set_shards(self, shards: list[Shard]) -> None:
        for i, shard in enumerate(shards):
            # what a preparation leaves for its last shard may be short
            if shard.tokens < self.sequence_length + 1 and not (0 < i == len(shards) - 1 and shard.sha256):
                raise UserError(
                    f"{shard.path}: {shard.tokens} tokens, fewer than one sequence of sequence_length + 1 = "
                    f"{self.sequence_length + 1}; lower sequence_length or remove this file"
                )
        self.shards = shards
        # first window of each shard, and the end
        self._starts = np.cumsum([0] + [(shard.tokens - 1) // self.sequence_length for shard in shards])

    @property
    def windows(self) -> int:
        """Windows in one epoch."""
        return int(self._starts[-1])

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    def epochs(self, step: int) -> float:
        """Epochs read before optimizer step `step`."""
        return step * self.batch_size / self.windows

    def rows(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64."""
        return self._windows_at(step * self.batch_size + np.arange(lo, hi, dtype=np.int64))

    def _windows_at(self, g: np.ndarray) -> np.ndarray:
        """Windows by their number since the run's start, (N,) -> (N, T + 1)."""
        n = max(1, self.windows)
        return self._gather(g // n, g % n, permuted=True)

    def validation_rows(self, lo: int, hi: int) -> np.ndarray:
        """Windows [lo, hi) in plain order, shape (hi - lo, T + 1), int64; hi is at most `windows`."""
        window = np.arange(lo, hi, dtype=np.int64)
        return self._gather(np.zeros_like(window), window, permuted=False)

    def _gather(self, epoch: np.ndarray, window: np.ndarray, permuted: bool) -> np.ndarray:
        out = np.empty((len(window), self.sequence_length + 1), np.int64)  # (N, T + 1)
        shard = np.searchsorted(self._starts, window, side="right") - 1  # (N,)
        changes = np.flatnonzero(np.diff(epoch) | np.diff(shard)) + 1  # rows of one epoch and shard are neighbours
        for group in np.split(np.arange(len(window)), changes):
            if len(group) == 0:
                continue
            e, s = int(epoch[group[0]]), int(shard[group[0]])
            index = window[group] - self._starts[s]
            if permuted:
                index = permutation(index, int(self._starts[s + 1] - self._starts[s]), (self.seed, e, s))
            rows = self._windows_of(e, s)[index]  # (rows, T + 1)
            if (largest := rows.max()) >= VOCAB_SIZE:  # of a file without a checksum, too large to read beforehand
                raise UserError(
                    f"{self.shards[s].path}: holds token {largest}, GPT-2's vocabulary ends at "
                    f"{VOCAB_SIZE - 1}: another tokenizer, type or byte order"
                )
            out[group] = rows
        return out

    def _windows_of(self, epoch: int, s: int) -> np.ndarray:
        """The windows of shard `s`, (windows, T + 1), uint16; verified before their first use in an epoch."""
        key = epoch, s
        if key not in self._open:
            stamp = self._verify(*key).result()
            for old in [k for k in self._verified if k < key]:
                del self._verified[old]
            if len(self._open) == 4:  # a mapping holds a file descriptor, and a run may have thousands of shards
                del self._open[next(iter(self._open))]
            self._open[key] = _OpenWindows(self.shards[s], stamp, self.sequence_length)
            following = (epoch, s + 1) if s + 1 < len(self.shards) else (epoch + 1, 0)
            if self.shards[following[1]].path.exists():
                self._verify(*following)
        self._open[key].check_unchanged()
        return self._open[key].windows

    def _verify(self, epoch: int, s: int) -> Future:
        if (epoch, s) not in self._verified:
            self._verified[epoch, s] = self._background.submit(_verified_stamp, self.shards[s])
        return self._verified[epoch, s]

    def check_unchanged(self) -> None:
        """Raises UserError if a file that is in use was changed, shortened or deleted. `rows` and `validation_rows`
        check the files that they read."""
        for opened in list(self._open.values()):
            opened.check_unchanged()

    def state(self) -> dict:
        """What a checkpoint keeps, so that a resumed run can tell these data from others (`check_same_data`):
        {"shards": [[name, tokens, sha256], ...], "complete": True}"""
        return {"shards": [shard.identity for shard in self.shards], "complete": True}

    def close(self) -> None:
        """Ends what waits or works in the background."""
        self._background.shutdown(wait=False, cancel_futures=True)


class _OpenWindows:
    """A shard that is mapped into memory."""

    def __init__(self, shard: Shard, stamp: tuple[int, int], sequence_length: int):
        """`stamp` is the file's size and time when it was verified."""
        self._path, self._stamp = shard.path, stamp
        tokens = read_shard(shard.path)
        if len(tokens) != shard.tokens:
            raise UserError(
                f"{shard.path}: holds {len(tokens)} tokens and not {shard.tokens}, as a shard of its size with a "
                "header would; was it changed, or made by nanoGPT?"
            )
        self.windows = np.lib.stride_tricks.sliding_window_view(tokens, sequence_length + 1)[::sequence_length]

    def check_unchanged(self) -> None:
        """Raises UserError where the file is not the one that was verified: reading on might end the process (SIGBUS,
        of a shortened file) or train on damaged tokens. Costs a microsecond."""
        try:
            now = _stamp(self._path)
        except FileNotFoundError:
            raise UserError(f"{self._path}: deleted while the run reads it; put it back, and resume the run") from None
        if now != self._stamp:
            raise UserError(
                f"{self._path}: changed while the run reads it (it has {now[0]:,} bytes, and had {self._stamp[0]:,}); "
                "put back the file that was prepared, and resume the run"
            )


def _verified_stamp(shard: Shard) -> tuple[int, int]:
    stamp = _stamp(shard.path)
    verify(shard, read_shard(shard.path))
    return stamp


def _stamp(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def permutation(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """The values at `index` of a pseudo-random permutation of range(n) chosen by `key`: shape (N,), int64, O(1) each.

    A Feistel network on Z_a x Z_b with a b >= n, walking the cycle for what falls outside n: Black and Rogaway,
    "Ciphers with arbitrary finite domains" (2002). Counter-based, so that any step is reached without the ones before;
    and integer arithmetic alone, since the streams of numpy's Generator may change between numpy's versions.
    """
    a = np.uint64(int(np.ceil(np.sqrt(n))))
    b = np.uint64(-(-n // int(a)))
    out = _feistel(index.astype(np.uint64), a, b, key)
    while len(outside := np.flatnonzero(out >= n)):
        out[outside] = _feistel(out[outside], a, b, key)
    return out.astype(np.int64)


def _feistel(x: np.ndarray, a: np.uint64, b: np.uint64, key: tuple[int, ...]) -> np.ndarray:
    left, right = x // b, x % b  # (N,) each
    for round, (multiplier, offset) in enumerate(_round_keys(key)):
        if round % 2 == 0:
            left = (left + _mix(right, multiplier, offset)) % a
        else:
            right = (right + _mix(left, multiplier, offset)) % b
    return left * b + right


def _mix(x: np.ndarray, multiplier: np.uint64, offset: np.uint64) -> np.ndarray:
    """32 pseudo-random bits; products wrap at 2^64. The constant is that of splitmix64's last step."""
    x = x * multiplier + offset
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(32)


@lru_cache(maxsize=64)
def _round_keys(key: tuple[int, ...], rounds: int = 8) -> list[tuple[np.uint64, np.uint64]]:
    """An odd multiplier and an offset a round, from BLAKE2b: neighbouring keys have nothing in common."""
    message = " ".join(map(str, key))
    words = np.frombuffer(
        b"".join(hashlib.blake2b(f"{message} {r}".encode(), digest_size=16).digest() for r in range(rounds)), "<u8"
    )
    return [(np.uint64(words[2 * r] | np.uint64(1)), np.uint64(words[2 * r + 1])) for r in range(rounds)]


def check_same_data(saved: dict, now: dict, where: str) -> None:
    """Raises UserError for data other than those whose `saved` state a checkpoint keeps.

    A stream that has not come to its end knows its first shards only; those must be the same.
    """
    then, today = saved["shards"], now["shards"]
    changed = [a[0] for a, b in zip(then, today, strict=False) if a[:2] != b[:2] or (a[2] and b[2] and a[2] != b[2])]
    more, fewer = len(today) > len(then) and saved["complete"], len(today) < len(then) and now["complete"]
    if changed or more or fewer:
        what = f" ({changed[0]} differs)" if changed else ""
        raise UserError(
            f"{where} no longer holds the shards that the checkpoint was trained on{what}; prepare the "
            "same text again, or start over with --fresh"
        )


def check_data(train: list[Shard], val: list[Shard], sequence_length: int, batch_size: int) -> None:
    """Raises UserError for data on which a run would mislead or could not take a step: a training shard that is also a
    validation shard, a split shorter than a sequence, and fewer training windows than one optimizer step takes."""
    check_disjoint(train, val)
    tokens, held_out = (sum(shard.tokens for shard in shards) for shards in (train, val))
    if val[0].tokens <= sequence_length and val[0].sha256:
        raise UserError(f"{val[0].path}: {too_short(tokens, held_out, sequence_length)}")
    for shards in (val, train):
        dataset = TokenDataset(shards, sequence_length, batch_size, seed=0)
    if batch_size > dataset.windows:
        raise UserError(too_large(batch_size, sequence_length, dataset.windows))


def too_large(batch_size: int, sequence_length: int, windows: int) -> str:
    return (
        f"total_batch_tokens {batch_size * sequence_length} takes {batch_size} sequences a step, the training data "
        f"have {windows} in all; lower total_batch_tokens (or the number of processes), or prepare more text"
    )


def too_short(train_tokens: int, val_tokens: int, sequence_length: int) -> str:
    """What is wrong with validation data that hold no sequence, and a val_fraction that would give one."""
    total = train_tokens + val_tokens
    fraction = math.ceil(100 * (sequence_length + 2) / total) / 100
    way_out = (
        f"prepare the text again with --val_fraction {fraction:g} (and val_documents 0)"
        if fraction <= 0.5
        else f"the text has {total:,} tokens, so lower sequence_length or add text"
    )
    return (
        f"{val_tokens:,} validation tokens are fewer than one sequence of sequence_length + 1 = {sequence_length + 1}; "
        f"{way_out}"
    )


def check_disjoint(train: list[Shard], val: list[Shard]) -> None:
    """Raises UserError for a training shard that is also a validation shard, by name or by its bytes."""
    for v in val:
        for t in train:
            if t.path.resolve() == v.path.resolve() or (t.tokens == v.tokens and _same_tokens(t, v)):
                raise UserError(
                    f"{t.path} (training) and {v.path} (validation) hold the same tokens: the validation loss would "
                    "mean nothing; name other files in dataset_name or val_data"
                )


def _same_tokens(a: Shard, b: Shard) -> bool:
    if a.sha256 and b.sha256:
        return a.sha256 == b.sha256
    if not (a.path.exists() and b.path.exists()):  # of a stream
        return False
    x, y = read_shard(a.path), read_shard(b.path)
    # The beginnings decide for all but equal files, and reading a thousand whole shards would take minutes.
    return np.array_equal(x[:4096], y[:4096]) and np.array_equal(x, y)
