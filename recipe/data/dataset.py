"""Which tokens an optimizer step reads: a pure function of (seed, step), however the step is divided."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache

import numpy as np

from recipe.data.shards import Shard, ShardReader, open_shard
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.utils.errors import UserError

# Shapes: N windows asked for, T sequence_length.


class TokenDataset:
    """Shards on this machine as windows of T + 1 tokens at stride T that never cross a shard.

    Shards are read in order, the windows of each in a permutation of its own for (seed, epoch, shard). `batch_size` is
    the number of sequences of one optimizer step over all processes, `vocab_size` that of the tokenizer's tokens. One
    shard is open at a time, and is verified when it is opened. Reading raises what `open_shard` raises, and UserError
    for a token that is not below `vocab_size`.
    """

    def __init__(
        self, shards: list[Shard], sequence_length: int, batch_size: int, seed: int, vocab_size: int = VOCAB_SIZE
    ):
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self._vocab_size = vocab_size
        self._opened: tuple[tuple[int, int], ShardReader] | None = None  # (epoch, shard): each epoch verifies again
        self._set_shards(shards)

    def _set_shards(self, shards: list[Shard]) -> None:
        self.shards = shards
        # first window of each shard, and the end
        self._starts = np.cumsum([0] + [(shard.tokens - 1) // self.sequence_length for shard in shards])

    @property
    def parts(self) -> list[tuple[str, float, TokenDataset]]:
        """(name, share, dataset) of each data set: this is the only one, and needs no name."""
        return [("", 1.0, self)]

    @property
    def windows(self) -> int:
        """Windows in one epoch."""
        return int(self._starts[-1])

    def sequences(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64."""
        return self.windows_at(step * self.batch_size + np.arange(lo, hi, dtype=np.int64))

    def windows_at(self, g: np.ndarray) -> np.ndarray:
        """Windows by their number since the run's start, (N,) -> (N, T + 1), int64."""
        return self._gather(g // self.windows, g % self.windows, permuted=True)

    def pass_to(self, window: int) -> None:
        """Notes that windows before `window`, counted since the run's start, will not be read again."""

    def validation_windows(self, lo: int, hi: int) -> np.ndarray:
        """Windows [lo, hi) in plain order, shape (hi - lo, T + 1), int64; hi is at most `windows`."""
        window = np.arange(lo, hi, dtype=np.int64)
        return self._gather(np.zeros_like(window), window, permuted=False)

    def _gather(self, epoch: np.ndarray, window: np.ndarray, permuted: bool) -> np.ndarray:
        out = np.empty((len(window), self.sequence_length + 1), np.int64)  # (N, T + 1)
        shard = np.searchsorted(self._starts, window, side="right") - 1  # (N,)
        changes = np.flatnonzero(np.diff(epoch) | np.diff(shard)) + 1  # windows of one epoch and shard are neighbors
        for group in np.split(np.arange(len(window)), changes):
            if len(group) == 0:
                continue
            e, s = int(epoch[group[0]]), int(shard[group[0]])
            index = window[group] - self._starts[s]
            if permuted:
                index = permutation(index, int(self._starts[s + 1] - self._starts[s]), (self.seed, e, s))
            windows = self._open(e, s).runs(index * self.sequence_length, self.sequence_length + 1)  # (group, T + 1)
            if (largest := windows.max()) >= self._vocab_size:
                whose = "GPT-2's vocabulary" if self._vocab_size == VOCAB_SIZE else "the tokenizer's vocabulary"
                raise UserError(
                    f"{self.shards[s].path}: holds token {largest}, {whose} ends at {self._vocab_size - 1}: another "
                    "tokenizer, type or byte order"
                )
            out[group] = windows
        return out

    def _open(self, epoch: int, s: int) -> ShardReader:
        if self._opened is None or self._opened[0] != (epoch, s):
            self._opened = None  # closes it
            self._opened = (epoch, s), open_shard(self.shards[s])
            self.shards[s] = replace(self.shards[s], sha256=self._opened[1].sha256)
        return self._opened[1]

    def state_dict(self) -> dict:
        """What a checkpoint keeps, so that a resumed run can tell these data, wherever they lie, from others
        (`check_same_data`): {"shards": [[name, tokens, sha256], ...], "complete": True}"""
        return {"shards": [[shard.path.name, shard.tokens, shard.sha256] for shard in self.shards], "complete": True}

    def load_state_dict(self, state: dict) -> None:
        """Takes over the SHA-256 of files that have no manifest, so that each is compared when it is opened."""
        for s, (shard, (_, _, sha256)) in enumerate(zip(self.shards, state["shards"], strict=False)):
            self.shards[s] = replace(shard, sha256=shard.sha256 or sha256)

    def check_batch(self) -> None:
        """Raises UserError for fewer windows than one optimizer step takes."""
        if self.batch_size > self.windows:
            raise UserError(
                f"{self.shards[0].path.parent}: total_batch_tokens takes {self.batch_size} sequences a step, but the "
                f"training data have only {self.windows}; lower total_batch_tokens, or prepare more text"
            )

    def close(self) -> None:
        """Ends a waiting read; only a streamed dataset's reads can wait."""


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
def _round_keys(key: tuple[int, ...]) -> list[tuple[np.uint64, np.uint64]]:
    """An odd multiplier and an offset for each of 8 rounds, from BLAKE2b: neighboring keys have nothing in common."""
    messages = (" ".join(map(str, (*key, round))) for round in range(8))
    digests = (hashlib.blake2b(message.encode(), digest_size=16).digest() for message in messages)
    return [(m | np.uint64(1), c) for m, c in (np.frombuffer(digest, "<u8") for digest in digests)]


def check_same_data(saved: dict, now: dict, where: str) -> None:
    """Raises UserError for data other than those whose `saved` state a checkpoint keeps.

    A stream that has not come to its end knows its first shards only; those must be the same.
    """
    if "mixture" in now:
        for then, today in zip(saved["mixture"], now["mixture"], strict=True):
            check_same_data(then, today, today["name"])
        return
    then, today = saved["shards"], now["shards"]
    changed = [a[0] for a, b in zip(then, today, strict=False) if a[:2] != b[:2] or (a[2] and b[2] and a[2] != b[2])]
    more, fewer = len(today) > len(then) and saved["complete"], len(today) < len(then) and now["complete"]
    if changed or more or fewer:
        what = f" ({changed[0]} differs)" if changed else ""
        raise UserError(
            f"{where} no longer holds the shards that the checkpoint was trained on{what}; prepare the "
            "same text again, or start over with --fresh"
        )


def check_data(train: list[TokenDataset], validation: list[TokenDataset]) -> None:
    """Raises UserError for data on which a run would mislead or could not take a step: validation data without a whole
    window, fewer training windows than a step takes, and a training shard that is also one for validation."""
    for one, dataset in zip(train, validation, strict=True):
        if not dataset.windows:
            tokens, least = sum(shard.tokens for shard in one.shards + dataset.shards), 2 * dataset.sequence_length + 2
            way_out = "raise val_fraction" if tokens > least else f"give more text (these are {tokens:,} tokens in all)"
            raise UserError(
                f"{dataset.shards[0].path}: {dataset.shards[0].tokens} tokens, fewer than one sequence of "
                f"sequence_length + 1 = {dataset.sequence_length + 1}; {way_out}, or lower sequence_length"
            )
    for dataset in train:
        dataset.check_batch()
    for v in (shard for dataset in validation for shard in dataset.shards):
        for t in (shard for dataset in train for shard in dataset.shards):
            if t.path.resolve() == v.path.resolve() or (t.sha256 and t.sha256 == v.sha256):
                raise UserError(
                    f"{t.path} (training) and {v.path} (validation) hold the same tokens: the validation loss would "
                    "mean nothing; name other files in dataset_name or val_data"
                )
