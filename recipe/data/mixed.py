"""Which data set of a mixture each sequence comes from: a pure function of (seed, window)."""

from functools import lru_cache

import numpy as np

from recipe.config import MIXTURE_PERIOD, MixtureEntry
from recipe.data.dataset import TokenDataset, permutation

# Shapes: N requested windows. `g` are windows numbered from the start of the run.


class MixedDataset:
    """Several datasets read as one. Each supplies its exact count of every 1,000 windows of the run, and keeps its own
    epochs and permutations. `parts` is (name, share, dataset) of each."""

    def __init__(self, entries: list[MixtureEntry], datasets: list[TokenDataset], batch_size: int, seed: int):
        """`entries` and `datasets` correspond, in the mixture's order; `batch_size` is for all of them together."""
        self.parts = [(entry.name, entry.share, dataset) for entry, dataset in zip(entries, datasets, strict=True)]
        self._counts = tuple(entry.count for entry in entries)
        self._datasets, self._batch_size, self._seed = datasets, batch_size, seed

    def sequences(self, step: int, lo: int, hi: int) -> np.ndarray:
        """Like TokenDataset's; waits for streams."""
        start = step * self._batch_size
        for dataset, window in zip(self._datasets, windows_before(start + lo, self._counts, self._seed), strict=True):
            dataset.advance_to(window)
        g = start + np.arange(lo, hi, dtype=np.int64)
        sources, windows = deal(g, self._counts, self._seed)
        out = np.empty((len(g), self._datasets[0].sequence_length + 1), np.int64)
        for k, dataset in enumerate(self._datasets):
            out[sources == k] = dataset.windows_at(windows[sources == k])
        return out

    def state_dict(self) -> dict:
        """What a checkpoint saves: {"mixture": [{"name", "share"} and the dataset's own state, ...]}"""
        return {"mixture": [{"name": name, "share": share} | data.state_dict() for name, share, data in self.parts]}

    def load_state_dict(self, state: dict) -> None:
        """Like TokenDataset's."""
        for dataset, dataset_state in zip(self._datasets, state["mixture"], strict=True):
            dataset.load_state_dict(dataset_state)

    def close(self) -> None:
        """Interrupts a read that waits for a stream."""
        for dataset in self._datasets:
            dataset.close()


Dataset = TokenDataset | MixedDataset  # what a run reads


def deal(g: np.ndarray, counts: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For windows `g`, (N,): the index of the dataset that supplies each, and its number among that dataset's windows,
    (N,), int64 each. In a block of 1,000 windows, a permutation keyed by (seed, block) gives each dataset its count."""
    sources = [_places(number // MIXTURE_PERIOD, counts, seed)[number % MIXTURE_PERIOD] for number in g.tolist()]
    windows = [windows_before(number, counts, seed)[k] for number, k in zip(g.tolist(), sources, strict=True)]
    return np.array(sources, np.int64), np.array(windows, np.int64)


def windows_before(g: int, counts: tuple[int, ...], seed: int) -> list[int]:
    """How many windows each dataset has supplied before window `g`."""
    block, place = divmod(g, MIXTURE_PERIOD)
    counts_in_block = np.bincount(_places(block, counts, seed)[:place], minlength=len(counts))
    return (block * np.array(counts) + counts_in_block).tolist()


@lru_cache(maxsize=4)
def _places(block: int, counts: tuple[int, ...], seed: int) -> np.ndarray:
    """The index of the dataset at each place of a block, (1000,), int64."""
    return np.searchsorted(np.cumsum(counts), permutation(MIXTURE_PERIOD, seed, block), side="right")
