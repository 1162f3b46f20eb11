"""Documents to tokens: on threads of this process, or on processes of their own, a few batches ahead and in order."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.data.prepare.documents import Document, Text
from recipe.data.prepare.options import PrepareOptions
from recipe.data.prepare.select import SEEN, Deduplicated, HeldOut, Limited, Shuffled
from recipe.data.shards import DTYPE
from recipe.data.tokenizer import END_OF_TEXT, encode
from recipe.errors import UserError

BATCH = 1 << 17  # characters of documents that a worker takes at once, or one longer piece


@dataclass(frozen=True)
class Piece:
    """Some text of a document, its split and where it is: all that a shard needs to know to go on from here."""

    document: int  # its place
    number: int  # within the document
    text: str
    stream: dict | None
    split: str

    def position(self, tokens: int) -> dict:
        """Of what follows the first `tokens` tokens of this piece."""
        return {"document": self.document, "piece": self.number, "tokens": tokens, "stream": self.stream}


class Selection:
    """The tokens of a source from any position on, after all that the options say about its documents."""

    def __init__(self, options: PrepareOptions, text: Text, out: Path, heard: Callable[[], None] = lambda: None):
        """`heard` is called for each document that is read."""
        self.options = options
        self.val_documents = options.held_out(text)
        self.source = Limited(text, options.max_documents, heard)
        self.held_out = HeldOut(out, self.val_documents, options.val_fraction, options.seed)
        self.documents, self._seen = self.source, None
        if options.dedup:
            self.documents = self._seen = Deduplicated(self.source, out / SEEN)
        if options.shuffle_buffer:
            self.documents = Shuffled(self.documents, options.shuffle_buffer, options.seed, self.val_documents or 0)

    def pieces(self, start: dict) -> Iterator[tuple[Piece, np.ndarray]]:
        """Pieces and their tokens from the position `start` on."""
        if start["document"] > 0:
            self.held_out.recall(self.source)
        documents = self.documents.documents(start["document"], start["stream"])
        return tokenised(documents, self.held_out.split, start, self.options.workers, self.options.processes)

    def commit(self) -> None:
        """Before a position is committed: what was learnt on the way to it."""
        if self._seen:
            self._seen.commit()


def tokenised(
    documents: Iterable[Document],
    split: Callable[[Document], str | None],
    start: dict,
    workers: int,
    processes: int = 0,
) -> Iterator[tuple[Piece, np.ndarray]]:
    """Pieces from the position `start` on with their tokens, shape (tokens,), uint16, end-of-text first in a document.

    On `workers` threads, since tiktoken lets go of the GIL; or on `processes` processes, which scale further where
    there are many cores. Documents whose `split` is None, and empty ones, are left out.
    """
    waiting: deque = deque()
    with _pool(workers, processes) as pool:
        try:
            for batch in _batches(documents, split, start):
                waiting.append((batch, pool.submit(_tokens, [(piece.text, piece.number == 0) for piece in batch])))
                if len(waiting) > 2 * (processes or workers):
                    batch, future = waiting.popleft()
                    yield from zip(batch, future.result(), strict=True)
            for batch, future in waiting:
                yield from zip(batch, future.result(), strict=True)
        except BrokenProcessPool:
            raise UserError(
                "a tokenising process died (out of memory?); the same command goes on; lower --processes"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def _pool(workers: int, processes: int) -> Executor:
    # spawn: a fork would copy the locks of threads that are reading from the network
    return (
        ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        if processes
        else ThreadPoolExecutor(workers)
    )


def _tokens(batch: list[tuple[str, bool]]) -> list[np.ndarray]:
    end_of_text = np.array([END_OF_TEXT], DTYPE)
    return [np.concatenate([end_of_text, encode(text)]) if first else encode(text) for text, first in batch]


def _batches(
    documents: Iterable[Document], split: Callable[[Document], str | None], start: dict
) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for document in documents:
        if not (chosen := split(document)):
            continue
        for number, text in enumerate(document.pieces):
            if document.place == start["document"] and number < start["piece"]:
                continue
            batch.append(Piece(document.place, number, text, document.stream, chosen))
            size += len(text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch
