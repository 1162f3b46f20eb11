"""Documents to tokens: on threads of this process or on processes of their own, a few batches ahead and in order."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from recipe.data.shards import DTYPE
from recipe.data.tokenizer import END_OF_TEXT, encode
from recipe.errors import UserError

BATCH = 1 << 17  # characters of documents that a worker takes at once, or one longer piece


@dataclass(frozen=True)
class Workers:
    """`threads` of this process, since tiktoken releases the GIL; or `processes`, which are faster on many cores."""

    threads: int = os.cpu_count() or 1
    processes: int = 0

    def __str__(self) -> str:
        return f"{self.processes} processes" if self.processes else f"{self.threads} threads"

    def pool(self) -> Executor:
        # spawn: a fork would copy the locks of threads that are reading from the network
        if self.processes:
            return ProcessPoolExecutor(self.processes, multiprocessing.get_context("spawn"))
        return ThreadPoolExecutor(self.threads)


@dataclass(frozen=True)
class Piece:
    """A part of a document, and where it is: all that a shard needs in order to continue from here."""

    document: int
    number: int  # within the document
    text: str
    stream: dict | None
    split: str

    def position(self, tokens: int) -> dict:
        """The position after the first `tokens` tokens of this piece."""
        return {"document": self.document, "piece": self.number, "tokens": tokens, "stream": self.stream}


def tokenized(batches: Iterable[list[Piece]], workers: Workers) -> Iterator[list[tuple[Piece, np.ndarray]]]:
    """The batches with the tokens of each piece, shape (tokens,), uint16; end-of-text begins a document."""
    waiting: deque = deque()
    with workers.pool() as pool:
        try:
            for batch in batches:
                waiting.append((batch, pool.submit(_tokens, [(piece.text, piece.number == 0) for piece in batch])))
                if len(waiting) > 2 * (workers.processes or workers.threads):
                    batch, future = waiting.popleft()
                    yield list(zip(batch, future.result(), strict=True))
            for batch, future in waiting:
                yield list(zip(batch, future.result(), strict=True))
        except BrokenProcessPool:
            raise UserError(
                "a tokenizing process died (out of memory?); lower --processes; the same command continues"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _tokens(batch: list[tuple[str, bool]]) -> list[np.ndarray]:
    end_of_text = np.array([END_OF_TEXT], DTYPE)
    return [np.concatenate([end_of_text, encode(text)]) if first else encode(text) for text, first in batch]
