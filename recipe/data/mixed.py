"""Which data set of a mixture each sequence comes from: a pure function of (seed, window)."""

from functools import lru_cache

import numpy as np

from recipe.config import MIXTURE_PERIOD, MixtureEntry
from recipe.data.dataset import TokenDataset, permutation

# Shapes: N windows asked for, K data sets.


class MixedDataset:
    """Datasets read as one: of each 1,000 windows of the run every dataset gives its count, in an order of their own,
    one after the other, so that it keeps its own epochs and permutation. `parts` is (name, share, dataset) of each."""

    def __init__(self, entries: list[MixtureEntry], datasets: list[TokenDataset], batch_size: int, seed: int):
        """`entries` and `datasets` belong together, in the mixture's order; `batch_size` is TokenDataset's."""
        self.parts = [(entry.name, entry.share, dataset) for entry, dataset in zip(entries, datasets, strict=True)]
        self._counts = tuple(entry.count for entry in entries)
        self._datasets, self._batch_size, self._seed = datasets, batch_size, seed

    def sequences(self, step: int, lo: int, hi: int) -> np.ndarray:
        """As TokenDataset's; waits for streams."""
        start = step * self._batch_size
        for dataset, window in zip(self._datasets, windows_before(start + lo, self._counts, self._seed), strict=True):
            dataset.pass_to(window)
        g = start + np.arange(lo, hi, dtype=np.int64)
        sources, windows = dealt(g, self._counts, self._seed)
        out = np.empty((len(g), self._datasets[0].sequence_length + 1), np.int64)
        for k, dataset in enumerate(self._datasets):
            out[sources == k] = dataset.windows_at(windows[sources == k])
        return out

    def state_dict(self) -> dict:
        """What a checkpoint keeps: {"mixture": [{"name", "share"} and the dataset's own state, ...]}"""
        return {"mixture": [{"name": name, "share": share} | data.state_dict() for name, share, data in self.parts]}

    def load_state_dict(self, state: dict) -> None:
        """As TokenDataset's."""
        for dataset, dataset_state in zip(self._datasets, state["mixture"], strict=True):
            dataset.load_state_dict(dataset_state)

    def close(self) -> None:
        """Ends a read that waits for a stream."""
        for dataset in self._datasets:
            dataset.close()


Dataset = TokenDataset | MixedDataset  # what a run reads


def dealt(g: np.ndarray, counts: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """For windows of the run, (N,), which dataset gives them, and which of its own windows they are: (N,), int64 each.
    A permutation keyed (seed, block) deals the places of each block of 1,000 windows, `counts` of them to each."""
    sources = [_places(number // MIXTURE_PERIOD, counts, seed)[number % MIXTURE_PERIOD] for number in g.tolist()]
    windows = [windows_before(number, counts, seed)[k] for number, k in zip(g.tolist(), sources, strict=True)]
    return np.array(sources, np.int64), np.array(windows, np.int64)


def windows_before(g: int, counts: tuple[int, ...], seed: int) -> list[int]:
    """How many windows each dataset has given before window `g` of the run."""
    block, place = divmod(g, MIXTURE_PERIOD)
    counts_in_block = np.bincount(_places(block, counts, seed)[:place], minlength=len(counts))
    return (block * np.array(counts) + counts_in_block).tolist()


@lru_cache(maxsize=4)
def _places(block: int, counts: tuple[int, ...], seed: int) -> np.ndarray:
    """The dataset at each place of a block: (1000,), int64."""
    return np.searchsorted(np.cumsum(counts), permutation(MIXTURE_PERIOD, seed, block), side="right")
