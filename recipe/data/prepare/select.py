"""Which documents are written, to which split and in which order: held out, dropped as duplicates, shuffled.

Each choice depends on the documents alone, not on who reads them or where a reader began, so that a preparation which
was interrupted, or a streamed shard which is built again, gives the same bytes.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from recipe.data.dataset import permutation
from recipe.data.prepare.documents import Document, Text
from recipe.data.shards import replacing
from recipe.errors import UserError

SEEN = "seen.sqlite"
HELD_OUT = "held_out.digests"


class HeldOut:
    """Tells the split of each document.

    With `val_documents` the source's first so many are validation; later documents with the same text are left out.
    Otherwise a hash of the text decides, so that equal documents are on the same side.
    """

    def __init__(self, out: Path, val_documents: int | None, val_fraction: float, seed: int):
        self.path, self.val_documents, self.val_fraction, self.seed = out / HELD_OUT, val_documents, val_fraction, seed
        self._digests: set[int] = set()

    def recall(self, text: Text) -> None:
        """Learn the digests of the documents held out, for a reader that begins after them."""
        if not self.val_documents:
            return
        if self.path.is_file():
            self._digests = set(np.fromfile(self.path, "<i8").tolist())
            return
        for document in Limited(text, self.val_documents).documents():
            self._digests.add(document.digest())
        self.save()

    def save(self) -> None:
        """Once all of them have been seen, and before the first position after them is committed."""
        if self.val_documents and not self.path.is_file():
            with replacing(self.path) as file:
                file.write(np.array(sorted(self._digests), "<i8").tobytes())

    def split(self, document: Document) -> str | None:
        """ "train", "val", or None for a document that must not be trained on."""
        if self.val_documents is None:
            return "val" if self.chosen(document.digest()) else "train"
        if document.index < self.val_documents:
            self._digests.add(document.digest())
            return "val"
        return None if self._digests and document.digest() in self._digests else "train"

    def chosen(self, digest: int) -> bool:
        """Whether `val_fraction` takes a document of this digest."""
        drawn = hashlib.blake2b(f"{self.seed} {digest}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "little") < self.val_fraction * 2**64


class Limited:
    """The first `limit` documents of a source, or all; `heard` is called for each of them."""

    def __init__(self, text: Text, limit: int | None, heard: Callable[[], None] = lambda: None):
        self.text, self.limit, self.heard = text, limit, heard

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        if self.limit is not None and first >= self.limit:
            return
        for document in self.text.documents(first, stream):
            if self.limit is not None and document.index >= self.limit:
                return
            self.heard()
            yield document


class Deduplicated:
    """A source without the documents whose text came before, kept track of in `path`.

    The table says where each text stands first. What it says of a document does not change when later ones are added,
    so it may be ahead of the shards. Twenty bytes a document, on the disk.
    """

    def __init__(self, text: Text, path: Path):
        self.text = text
        try:
            self._table = sqlite3.connect(path)
            self._table.execute("CREATE TABLE IF NOT EXISTS seen (digest INTEGER PRIMARY KEY, first INTEGER)")
            self._table.execute("CREATE TABLE IF NOT EXISTS covered (documents INTEGER)")
            row = self._table.execute("SELECT max(documents) FROM covered").fetchone()
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path}: cannot be used ({error}); delete {path.parent} and prepare it again") from None
        self._covered = self._committed = row[0] or 0  # documents [0, covered) are in the table

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        if self._covered < first:  # on another machine than before: all texts up to `first` must be seen again
            first_read, stream = self._covered, None
        else:
            first_read = first
        for document in self.text.documents(first_read, stream):
            if self._is_first(document) and document.index >= first:
                yield document

    def _is_first(self, document: Document) -> bool:
        digest = document.digest()
        if document.index >= self._covered:
            self._table.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (digest, document.index))
            self._covered = document.index + 1
        return self._table.execute("SELECT first FROM seen WHERE digest = ?", (digest,)).fetchone()[0] == document.index

    def commit(self) -> None:
        """Before a position is committed that relies on what was seen."""
        if self._covered > self._committed:
            self._table.execute("INSERT INTO covered VALUES (?)", (self._covered,))
            self._table.commit()
            self._committed = self._covered


class Shuffled:
    """A source whose documents from `begin` on are shuffled in blocks of `buffer`, each in an order of its own for
    (seed, the block's first document). A block is read again from its start when a reader begins within it."""

    def __init__(self, text: Text, buffer: int, seed: int, begin: int):
        self.text, self.buffer, self.seed, self.begin = text, buffer, seed, begin

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        start, inner = (stream["document"], stream["state"]) if stream else (0, None)
        block: list[Document] = []
        end = None  # index of the first document of the next block
        for document in self.text.documents(start, inner):
            if document.index < self.begin:
                if document.place >= first:
                    inner = document.stream
                    stream = {"document": inner["document"], "state": inner} if inner else None
                    yield Document(document.index, document.place, document.chunks, stream)
                continue
            if end is None:
                end = max(start, self.begin) + self.buffer
            while document.index >= end:
                yield from self._in_order(block, end - self.buffer, first)
                block, end = [], end + self.buffer
            block.append(document)
        if block:
            yield from self._in_order(block, end - self.buffer, first)

    def _in_order(self, block: list[Document], start: int, first: int) -> Iterator[Document]:
        n = len(block)
        stream = {"document": start, "state": block[0].stream} if block and start else None
        for place, i in enumerate(permutation(np.arange(n), n, (self.seed, start)).tolist() if n else [], start):
            if place >= first:
                d = block[i]
                yield Document(d.index, place, d.chunks, stream)
