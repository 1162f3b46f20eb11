"""Documents to tokens: on threads, since tokenizers release the GIL, a few batches ahead and in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from recipe.data.shards import DTYPE
from recipe.data.tokenizer import GPT2Tokenizer

_BATCH = 1 << 17  # characters of documents that a thread takes at once, or one longer piece


@dataclass(frozen=True)
class Piece:
    """A part of a document; `first` where the document begins. `stream` is Document's."""

    document: int
    first: bool
    text: str
    stream: dict | None


def tokenized(
    pieces: Iterable[Piece], tokenizer: GPT2Tokenizer, threads: int | None = None
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Each piece with its tokens, shape (tokens,), uint16; end-of-text begins a document. `threads`: a core each."""
    threads = threads or os.cpu_count() or 1
    waiting: deque = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for batch in _batches(pieces):
                waiting.append((batch, pool.submit(_tokens, batch, tokenizer)))
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


def _tokens(batch: list[Piece], tokenizer: GPT2Tokenizer) -> list[np.ndarray]:
    end_of_text = np.array([tokenizer.end_of_text], DTYPE)
    encoded = tokenizer.encode([piece.text for piece in batch])
    pairs = zip(batch, encoded, strict=True)
    return [np.concatenate([end_of_text, tokens]) if piece.first else tokens for piece, tokens in pairs]
