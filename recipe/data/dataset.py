"""Which tokens an optimizer step reads: a pure function of (seed, step), however processes split the step."""

from __future__ import annotations

import filecmp
import threading
from dataclasses import replace

import numpy as np

from recipe.data.shards import Shard, ShardReader, not_in_vocabulary, open_shard
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.utils.errors import UserError

# Shapes: N requested windows, T sequence_length. `g` are windows numbered from the start of the run.


class TokenDataset:
    """Local token shards, read as windows of T + 1 tokens at stride T that never cross a shard boundary.

    Shards are read in order, and the windows of a shard in a permutation keyed by (seed, epoch, shard). `batch_size` is
    the number of sequences per optimizer step over all processes, `vocab_size` the number of tokens of the tokenizer.
    One shard is open at a time; it is verified when it is opened. Reading raises what `open_shard` raises, and
    UserError for a token id outside the vocabulary.
    """

    def __init__(
        self, shards: list[Shard], sequence_length: int, batch_size: int, seed: int, vocab_size: int = VOCAB_SIZE
    ):
        self.sequence_length, self.batch_size, self.seed = sequence_length, batch_size, seed
        self._vocab_size, self._closed = vocab_size, threading.Event()
        # (epoch, shard), its reader, the order of its windows; every epoch opens and verifies it again
        self._opened: tuple[tuple[int, int], ShardReader, np.ndarray] | None = None
        self._set_shards(shards)

    def _set_shards(self, shards: list[Shard]) -> None:
        self.shards = shards
        # first window of each shard, then the total
        self.starts = np.cumsum([0] + [(shard.tokens - 1) // self.sequence_length for shard in shards])

    @property
    def parts(self) -> list[tuple[str, float, TokenDataset]]:
        """(name, share, dataset) of each data set of the run: only this one, which needs no name."""
        return [("", 1.0, self)]

    @property
    def windows(self) -> int:
        """Windows per epoch."""
        return int(self.starts[-1])

    def sequences(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Sequences [lo, hi) of the batch of optimizer step `step`, shape (hi - lo, T + 1), int64."""
        return self.windows_at(step * self.batch_size + np.arange(lo, hi, dtype=np.int64))

    def windows_at(self, g: np.ndarray) -> np.ndarray:
        """The windows `g`, (N,) -> (N, T + 1), int64."""
        return self._gather(g // self.windows, g % self.windows, permuted=True)

    def advance_to(self, window: int) -> None:
        """Declares that windows before `window` of the run will not be read again; only streams need to know."""

    def validation_windows(self, lo: int, hi: int) -> np.ndarray:
        """Windows [lo, hi) in plain order, shape (hi - lo, T + 1), int64; hi is at most `windows`."""
        windows = np.arange(lo, hi, dtype=np.int64)
        return self._gather(np.zeros_like(windows), windows, permuted=False)

    def _gather(self, epochs: np.ndarray, windows: np.ndarray, permuted: bool) -> np.ndarray:
        out = np.empty((len(windows), self.sequence_length + 1), np.int64)  # (N, T + 1)
        shards = np.searchsorted(self.starts, windows, side="right") - 1  # (N,)
        changes = np.flatnonzero(np.diff(epochs) | np.diff(shards)) + 1  # windows of one epoch and shard are neighbors
        for group in np.split(np.arange(len(windows)), changes):
            if len(group) == 0:
                continue
            epoch, shard = int(epochs[group[0]]), int(shards[group[0]])
            reader, order = self._open(epoch, shard)
            index = windows[group] - self.starts[shard]
            index = order[index] if permuted else index
            rows = reader.spans(index * self.sequence_length, self.sequence_length + 1)  # (group, T + 1)
            if (largest := rows.max()) >= self._vocab_size:
                raise not_in_vocabulary(self.shards[shard].path, largest, self._vocab_size)
            out[group] = rows
        return out

    def _open(self, epoch: int, shard: int) -> tuple[ShardReader, np.ndarray]:
        if self._opened is None or self._opened[0] != (epoch, shard):
            self._opened = None  # closes it
            reader = open_shard(self.shards[shard], self._closed)
            count = int(self.starts[shard + 1] - self.starts[shard])
            self.shards[shard] = replace(self.shards[shard], sha256=reader.sha256)
            self._opened = (epoch, shard), reader, permutation(count, self.seed, epoch, shard)
        return self._opened[1:]

    def state_dict(self) -> dict:
        """What a checkpoint saves so that `check_same_data` can recognize these data in any directory:
        {"shards": [[name, tokens, sha256], ...], "complete": True}"""
        return {"shards": [[shard.path.name, shard.tokens, shard.sha256] for shard in self.shards], "complete": True}

    def load_state_dict(self, state: dict) -> None:
        """Restores the SHA-256 of shards without a manifest, so that they are verified when they are opened."""
        for i, (shard, (_, _, sha256)) in enumerate(zip(self.shards, state["shards"], strict=False)):
            self.shards[i] = replace(shard, sha256=shard.sha256 or sha256)

    def check_batch(self) -> None:
        """Raises UserError if an epoch has fewer windows than one optimizer step takes."""
        if self.batch_size > self.windows:
            raise UserError(
                f"{self.shards[0].path.parent}: total_batch_tokens takes {self.batch_size} sequences a step, but the "
                f"training data have only {self.windows}; lower total_batch_tokens or val_fraction, or give more text"
            )

    def close(self) -> None:
        """Interrupts every read that waits for a shard, or verifies one."""
        self._closed.set()


def permutation(n: int, seed: int, *key: int) -> np.ndarray:
    """The pseudo-random permutation of range(n) keyed by (seed, *key), (n,), int64: 7 ms and 0.8 MB for a shard of
    100M tokens. From numpy's RandomState, whose streams are frozen (NEP 19); those of Generator may change."""
    return np.random.RandomState([seed % 2**32, seed // 2**32, *key]).permutation(n)


def check_same_data(saved: dict, current: dict, name: str) -> None:
    """Raises UserError if the `current` data are not those whose state a checkpoint `saved`. An incomplete stream knows
    only its first shards, so only those are compared."""
    if "mixture" in current:
        for saved_part, part in zip(saved["mixture"], current["mixture"], strict=True):
            check_same_data(saved_part, part, part["name"])
        return
    saved_shards, shards = saved["shards"], current["shards"]
    pairs = zip(saved_shards, shards, strict=False)  # each shard is [name, tokens, sha256]
    changed = [old[0] for old, new in pairs if old[:2] != new[:2] or (old[2] and new[2] and old[2] != new[2])]
    added = len(shards) > len(saved_shards) and saved["complete"]
    removed = len(shards) < len(saved_shards) and current["complete"]
    if changed or added or removed:
        detail = f" ({changed[0]} differs)" if changed else ""
        raise UserError(
            f"{name} does not hold the shards that the checkpoint was trained on{detail}; choose another run_name for "
            "another text, prepare the same text again, or start over with --fresh"
        )


def check_data(train: list[TokenDataset], validation: list[TokenDataset]) -> None:
    """Raises UserError for data that cannot train or validate a model: validation data without a full window, fewer
    training windows than a step takes, or a shard that is used for both training and validation."""
    for dataset in validation:
        if not dataset.windows:
            raise UserError(
                f"{dataset.shards[0].path}: {dataset.shards[0].tokens} tokens, fewer than one sequence of "
                f"sequence_length + 1 = {dataset.sequence_length + 1}; give more text, hold out more of it "
                "(val_fraction, val_documents or val_data), or lower sequence_length"
            )
    for dataset in train:
        dataset.check_batch()
    shards = [shard for dataset in train for shard in dataset.shards]
    training = {shard.path.resolve(): shard for shard in shards} | {shard.sha256: shard for shard in shards}
    for val_shard in (shard for dataset in validation for shard in dataset.shards):
        same = [training[key] for key in (val_shard.path.resolve(), val_shard.sha256) if key and key in training]
        if val_shard.sha256 is None:  # nor have others without a manifest a checksum yet
            alike = (shard for shard in shards if (shard.sha256, shard.tokens) == (None, val_shard.tokens))
            same += [shard for shard in alike if filecmp.cmp(shard.path, val_shard.path, shallow=False)]
        if same:
            raise UserError(
                f"{same[0].path} (training) and {val_shard.path} (validation) hold the same tokens: the validation "
                "loss would be meaningless; name other files in dataset_name or val_data"
            )
