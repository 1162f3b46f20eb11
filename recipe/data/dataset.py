"""Which tokens an optimizer step reads: a pure function of (seed, step), whoever asks and however the step is cut."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Protocol

import numpy as np

from recipe.data.shards import Shard, read_shard, verify
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.errors import UserError

# Shapes: N rows asked for, T sequence_length.


class TokenSource(Protocol):
    """Where the trainer gets its tokens from."""

    sequence_length: int
    batch_size: int

    def rows(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64."""
        ...

    def state(self) -> dict:
        """What a checkpoint keeps of the data, so that a resumed run can tell them from others (`check_same_data`)."""
        ...

    def close(self) -> None:
        """Ends what waits or works in the background."""
        ...


class LocalSource:
    """Shards on this machine, cut into windows of T + 1 tokens at stride T that never cross a shard.

    Shards are read in order, the windows of each in a permutation of its own for (seed, epoch, shard). `batch_size` is
    the number of sequences of one optimizer step over all processes. A shard is verified once, in the background while
    the one before it is read. Raises UserError for a shard shorter than one window, and what `verify` raises.
    """

    def __init__(self, shards: list[Shard], sequence_length: int, batch_size: int, seed: int):
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self._open: dict[int, np.ndarray] = {}  # shard index -> its windows, (windows, T + 1)
        self._verified: dict[int, Future] = {}
        self._background = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._set_shards(shards)

    def _set_shards(self, shards: list[Shard]) -> None:
        for i, shard in enumerate(shards):
            # what a preparation leaves for its last shard may be short
            if shard.tokens < self.sequence_length + 1 and not (0 < i == len(shards) - 1 and shard.sha256):
                raise UserError(
                    f"{shard.path}: {shard.tokens} tokens, fewer than one sequence of sequence_length + 1 = "
                    f"{self.sequence_length + 1}; lower sequence_length or leave this file out"
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
        """The windows of shard `s`, (windows, T + 1), uint16; verified, once, before they are given out."""
        if s not in self._open:
            self._verify(s).result()
            tokens = read_shard(self.shards[s].path)
            if len(tokens) != self.shards[s].tokens:
                raise UserError(
                    f"{self.shards[s].path}: holds {len(tokens)} tokens and not {self.shards[s].tokens}, as a shard of "
                    "its size with a header would; was it changed, or made by nanoGPT?"
                )
            if len(self._open) == 4:  # a mapping holds a file descriptor, and a thousand shards are no rarity
                del self._open[next(iter(self._open))]
            T = self.sequence_length
            self._open[s] = np.lib.stride_tricks.sliding_window_view(tokens, T + 1)[::T]  # (windows, T + 1)
            if s + 1 < len(self.shards) and self.shards[s + 1].path.exists():
                self._verify(s + 1)
        return self._open[s]

    def _verify(self, s: int) -> Future:
        if s not in self._verified:
            shard = self.shards[s]
            self._verified[s] = self._background.submit(lambda: verify(shard, read_shard(shard.path)))
        return self._verified[s]

    def state(self) -> dict:
        """{"shards": [[name, tokens, sha256], ...], "complete": True}"""
        return {"shards": [shard.identity for shard in self.shards], "complete": True}

    def close(self) -> None:
        self._background.shutdown(wait=False, cancel_futures=True)


def permutation(index: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """Where a pseudo-random permutation of range(n), chosen by `key`, sends `index`: shape (N,), int64, O(1) each.

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
    """Refuse, with a UserError, data other than those of which a checkpoint keeps the `saved` state.

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
    """Refuse, with a UserError, data on which a run would mislead or could not take a step.

    That is a training shard which is also a validation shard, a shard shorter than a sequence, and fewer training
    windows than the `batch_size` sequences of one optimizer step.
    """
    check_disjoint(train, val)
    LocalSource(val, sequence_length, batch_size, seed=0)
    windows = LocalSource(train, sequence_length, batch_size, seed=0).windows
    if batch_size > windows:
        raise UserError(too_large(batch_size, sequence_length, windows))


def too_large(batch_size: int, sequence_length: int, windows: int) -> str:
    return (
        f"total_batch_tokens {batch_size * sequence_length} takes {batch_size} sequences a step, the training data "
        f"have {windows} in all; lower total_batch_tokens (or the number of processes), or prepare more text"
    )


def check_disjoint(train: list[Shard], val: list[Shard]) -> None:
    """Refuse, with a UserError, a training shard which is also a validation shard, by name or by its bytes."""
    for v in val:
        for t in train:
            if t.path.resolve() == v.path.resolve() or (t.tokens == v.tokens and _same_tokens(t, v)):
                raise UserError(
                    f"{t.path} (training) and {v.path} (validation) hold the same tokens: the validation loss would "
                    "mean nothing; give other files for one of them"
                )


def _same_tokens(a: Shard, b: Shard) -> bool:
    if a.sha256 and b.sha256:
        return a.sha256 == b.sha256
    if not (a.path.exists() and b.path.exists()):  # of a stream
        return False
    x, y = read_shard(a.path), read_shard(b.path)
    # the beginnings settle it for all but equal files, and reading a thousand whole shards would take minutes
    return np.array_equal(x[:4096], y[:4096]) and np.array_equal(x, y)
