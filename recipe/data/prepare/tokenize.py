"""Documents to tokens: on threads, since tiktoken releases the GIL, a few batches ahead and in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from recipe.data.shards import DTYPE
from recipe.data.tokenizer import END_OF_TEXT, encode

_BATCH = 1 << 17  # characters of documents that a thread takes at once, or one longer piece


@dataclass(frozen=True)
class Piece:
    """A part of a document; `first` where the document begins. `stream` is Document's."""

    document: int
    first: bool
    text: str
    stream: dict | None


def tokenized(pieces: Iterable[Piece], threads: int | None = None) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its tokens, shape (tokens,), uint16; end-of-text begins a document. `threads`: a core each."""
    threads = threads or os.cpu_count() or 1
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in _batches(pieces):
                waiting.append((batch, pool.submit(_tokens, batch)))
                if len(waiting) > 2 * threads:
                    batch, tokens = waiting.popleft()
                    yield from zip(batch, tokens.result(), strict=True)
            for batch, tokens in waiting:
                yield from zip(batch, tokens.result(), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _tokens(batch: list[Piece]) -> list[np.ndarray]:
    end_of_text = np.array([END_OF_TEXT], DTYPE)
    return [np.concatenate([end_of_text, encode(p.text)]) if p.first else encode(p.text) for p in batch]
