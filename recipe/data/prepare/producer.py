"""Text to shards, one after the other: what a preparation does before training, and a stream while the model trains.

The bytes of a shard depend on the text and the settings alone. The manifest, which is replaced after each shard, holds
where the next one begins, so that a producer killed at any moment continues from its last shard with the same bytes.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice, takewhile
from math import ceil
from pathlib import Path

import numpy as np

from recipe.config import DataConfig
from recipe.data.hub import HubText
from recipe.data.prepare.documents import Document, Text, as_integer, open_files
from recipe.data.prepare.tokenize import BATCH, Piece, Workers, tokenized
from recipe.data.shards import DTYPE, HEADER_BYTES, MANIFEST, Manifest, OpenShard, read_shard
from recipe.data.tokenizer import END_OF_TEXT, encoding
from recipe.errors import UserError

logger = logging.getLogger(__name__)

HUB_VAL_DOCUMENTS = 10_000  # about 10 M tokens of FineWeb
START = {"document": 0, "piece": 0, "tokens": 0, "stream": None}  # the position before the first document
_EXPECTED = 10  # documents for validation; where a choice by hash would give fewer, the end of the text is taken
_SKIPPED = 1000  # documents between two signs of life


def open_text(data: DataConfig) -> Text:
    """The text that `train_text` names. Raises UserError if it cannot be one."""
    if files := open_files(data.train_text, data.text_column):
        return files
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", data.train_text) and not Path(data.train_text).suffix:
        return HubText(data)
    if re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", data.train_text):  # some data sets have a dot in their name
        return HubText(data)
    raise UserError(
        f"train_text {data.train_text}: no file matches; give a file, a quoted glob, a directory or a Hub data set id"
    )


def val_documents(data: DataConfig, text: Text) -> int | None:
    """The number of documents at the beginning that are for validation; None where val_fraction decides."""
    if data.val_documents or isinstance(text, HubText):
        return data.val_documents or HUB_VAL_DOCUMENTS
    return 0 if data.val_fraction == 0 or (data.streaming and data.val_data) else None


def options_of(data: DataConfig, text: Text, max_documents: int | None = None) -> dict:
    """The settings that decide what the shards hold, as the manifest keeps them."""
    first = val_documents(data, text)
    return {
        "val_fraction": data.val_fraction if first is None else None,
        "val_documents": first,
        "max_documents": max_documents,
        "shard_tokens": data.shard_tokens,
        "first_shard_tokens": min(data.shard_tokens, data.first_shard_tokens),
    }


def check_same(out: Path, manifest: Manifest, wanted: dict) -> None:
    """Raises UserError where the shards of `manifest` were made from another text or with other settings."""
    found = {**manifest.source, **manifest.options}
    for name, value in wanted.items():
        if found.get(name) != value:
            was = (
                "the text files differ" if name == "files" else f"{name} was {found.get(name)!r}, and is {value!r} now"
            )
            raise UserError(
                f"{out} holds shards of another text or with other settings: {was}. Delete {out} to make them again, "
                "name another directory, or train on them as they are with --train_text ''"
            )


def check_own_directory(out: Path) -> None:
    """Raises UserError where shards would come among files that are not this recipe's."""
    if (out / MANIFEST).is_symlink() or out.is_file():
        raise UserError(
            f"{out / MANIFEST if out.is_dir() else out} is in the way of the shards; name another directory"
        )
    if out.is_dir() and not (out / MANIFEST).exists():
        others = sorted(p.name for p in out.iterdir() if not p.name.startswith(".") and p.suffix != ".part")
        if others:
            raise UserError(
                f"{out} holds other files ({others[0]}{' and more' if len(others) > 1 else ''}), and shards are not "
                "mixed with them; name an empty or a new directory"
            )


def shard_size(number: int, options: dict) -> int:
    """Tokens of training shard `number`: the first is small, so that training can begin while the next is made, and
    each has twice the tokens of the one before, up to `shard_tokens`."""
    return min(options["shard_tokens"], options["first_shard_tokens"] << min(number, 31))


class TextProducer:
    """Makes shards of a text in `out`, in order or, those that the manifest knows already, in any order.

    `make` is a generator so that its caller can show progress; a shard is finished when it ends.
    """

    def __init__(self, data: DataConfig, out: Path, workers: Workers | None = None, max_documents: int | None = None):
        """Raises UserError where the text cannot be read, or `out` holds shards of another one."""
        self.text, self.out, self.workers = open_text(data), out, workers or Workers()
        self.options = options_of(data, self.text, max_documents)
        self.val_documents, self.val_fraction = self.options["val_documents"], data.val_fraction
        self._max_documents = max_documents
        self._digests: set[int] = set()  # of the validation documents
        self._at: tuple[str, int] | None = None  # the shard that `_pieces` gives next
        self._pieces: Iterator[list] = iter(())
        self._rest: deque[tuple[Piece, np.ndarray, int]] = deque()  # pieces, their tokens, and how many are used
        self._skip = 0  # tokens of the next piece that are in an earlier shard
        self._documents = 0  # read so far
        check_own_directory(out)

    def open(self, commit: str | None = None, earlier: Manifest | None = None) -> Manifest:
        """The manifest to continue, which is kept in `self.manifest`: the one in `out`, or `earlier` if that knows more
        of the same shards, or a new one. Deletes what a killed producer left. `commit` is that of a Hub data set."""
        wanted = {**self.text.identity(), **self.options}
        manifest = newest_manifest(self.out, earlier, wanted)
        if manifest and manifest.shards:
            check_same(self.out, manifest, wanted)
            self.text.pin(manifest.source)
        else:
            pinned = self.text.pin({"commit": commit} if commit else None)
            manifest = Manifest({**self.text.identity(), **pinned}, self.options)
        manifest.save(self.out)
        self.manifest = manifest
        sweep(self.out, manifest)
        return manifest

    def bytes_of(self, number: int) -> int:
        """The size of training shard `number`; of one that is not known yet, if it is not the last."""
        train = self.manifest.of("train")
        tokens = train[number]["tokens"] if number < len(train) else shard_size(number, self.options)
        return HEADER_BYTES + tokens * DTYPE.itemsize

    @property
    def largest(self) -> int:
        """The size in bytes of the largest training shard that may come."""
        return HEADER_BYTES + self.options["shard_tokens"] * DTYPE.itemsize

    def everything(self) -> Iterator[int]:
        """Makes what is missing, and yields the tokens that were added. Raises UserError where a split stays empty."""
        if self._has_few_documents():
            yield from self._hold_out_the_end()
            return
        yield from self.make_validation()
        while not self.manifest.complete:
            yield from self.make("train", len(self.manifest.of("train")))

    def make_validation(self) -> Iterator[int]:
        """Makes the validation shards, unless they are here."""
        known = self.manifest.of("val")
        done = bool(self.manifest.of("train")) or self.manifest.complete
        here = all((self.out / entry["file"]).exists() for entry in known)
        if self.val_documents == 0 or (done and here):
            return
        number = len(known) if here else 0
        while (yield from self.make("val", number)):
            number += 1
        if not self.manifest.of("val"):
            raise UserError(f"{self.text}: no text is left for validation; raise val_fraction or val_documents")

    def make(self, split: str, number: int) -> Iterator[int]:
        """Makes a shard, or finds that the text ends before it. Yields the tokens that were added, and returns whether
        more of the split may follow. Raises UserError where a shard that the manifest knows comes out different."""
        entries = self.manifest.of(split)
        known = entries[number] if number < len(entries) else None
        if self._at != (split, number):
            self._go_to(split, entries[number - 1]["next"] if number else START)
        size = self.options["shard_tokens"] if split == "val" else self.bytes_of(number) // DTYPE.itemsize - 512
        ended, position = False, START
        with OpenShard(self.out / f"{split}.part") as shard:
            while shard.tokens < size and not ended:
                if not self._rest:
                    batch = next(self._pieces, None)
                    ended, position = batch is None, {**START, "document": self._documents}
                    for piece, tokens in batch or []:
                        self._rest.append((piece, tokens, self._skip))
                        self._skip = 0
                    yield 0
                    continue
                piece, tokens, done = self._rest[0]
                if piece.split != split:
                    ended, position = True, piece.position(0)  # the validation documents, which come first, end here
                    break
                taken = tokens[done : done + size - shard.tokens]
                shard.append(taken)
                done += len(taken)
                position = piece.position(done)
                if done == len(tokens):
                    self._rest.popleft()
                else:
                    self._rest[0] = (piece, tokens, done)
                yield len(taken)
            if shard.tokens:
                self._commit(shard, split, number, position, known)
        self._at = (split, number + 1) if not ended else ("train", 0) if self._rest else None
        if ended and split == "train" and known is None and not self.manifest.complete:
            self._complete()
        return not ended

    def _complete(self) -> None:
        if not self.manifest.of("train"):
            raise UserError(
                f"{self.text}: its {self._documents} documents leave none for training; lower val_documents or "
                "val_fraction"
            )
        self.manifest.documents, self.manifest.complete = self._documents, True
        self.manifest.save(self.out)

    def _commit(self, shard: OpenShard, split: str, number: int, position: dict | None, known: dict | None) -> None:
        path, tokens = self.out / shard_name(split, number), shard.tokens
        sha256 = shard.commit(path)
        if known is None:
            entry = {"file": path.name, "split": split, "tokens": tokens, "sha256": sha256, "next": position}
            self.manifest.shards.append(entry)
            self.manifest.save(self.out)
        elif (tokens, sha256) != (known["tokens"], known["sha256"]):
            path.unlink()
            raise UserError(
                f"{path}: built again, it is not what it was ({tokens} tokens, {known['tokens']} before): the text has "
                f"changed; delete {self.out} and start over with --fresh"
            )

    def _go_to(self, split: str, position: dict) -> None:
        if close := getattr(self._pieces, "close", None):
            close()  # ends its threads
        self._rest.clear()
        self._skip, self._documents = position["tokens"], position["document"]
        if self.val_documents and position["document"] and not self._digests:
            self._digests = _digests_of([self.out / entry["file"] for entry in self.manifest.of("val")])
        self._pieces = tokenized(self._batches(split, position), self.workers)

    def _read(self, stream: dict | None = None) -> Iterator[Document]:
        limit = self._max_documents
        documents = self.text.documents(stream)
        return documents if limit is None else takewhile(lambda document: document.index < limit, documents)

    def _batches(self, split: str, position: dict) -> Iterator[list[Piece]]:
        """Pieces of the documents of a split, from a position on. The training documents follow the first
        `val_documents` without a break, so that the text is read once."""
        batch, size, first = [], 0, position["document"]
        for document in self._read(position["stream"]):
            self._documents = document.index + 1
            if document.index % _SKIPPED == 0:
                yield []
            if document.index < first:
                continue
            its = self._split_of(document)
            if its != split and not (its == "train" and self.val_documents):
                continue
            for number, text in enumerate(document.pieces):
                if document.index == first and number < position["piece"]:
                    continue
                batch.append(Piece(document.index, number, text, document.stream, its))
                size += len(text)
                if size >= BATCH:
                    yield batch
                    batch, size = [], 0
        yield batch

    def _split_of(self, document: Document) -> str | None:
        """ "train", "val", or None for a document with the text of a validation document."""
        if self.val_documents is None:  # equal documents are in the same split
            return "val" if document.digest() < self.val_fraction * 2**63 else "train"
        if document.index < self.val_documents:
            self._digests.add(document.digest())
            return "val"
        return None if self._digests and document.digest() in self._digests else "train"

    def _has_few_documents(self) -> bool:
        if self.val_documents is not None:
            return False
        return next(islice(self._read(), ceil(_EXPECTED / self.val_fraction) - 1, None), None) is None

    def _hold_out_the_end(self) -> Iterator[int]:
        """A text of few documents: its last `val_fraction` of tokens are for validation. Where they begin is known at
        the end of the text only, so that this is done in one go."""
        self.manifest.shards.clear()
        self.val_documents = 0
        self._go_to("train", START)
        with OpenShard(self.out / "text.part") as whole:
            for batch in self._pieces:
                for _, tokens in batch:
                    whole.append(tokens)
                    yield len(tokens)
            held_out = int(whole.tokens * self.val_fraction)
            if not 0 < held_out < whole.tokens:
                raise UserError(
                    f"{self.text}: val_fraction {self.val_fraction} of {whole.tokens:,} tokens leaves none for one of "
                    f"the splits; raise it to {min(0.5, 2 / max(whole.tokens, 4)):.2g} or more, or give more text"
                )
            tokens = whole.read()
            self._cut("val", tokens[-held_out:])
            self._cut("train", tokens[:-held_out])
        self._complete()

    def _cut(self, split: str, tokens: np.ndarray) -> None:
        number = 0
        while len(tokens):
            size = self.options["shard_tokens"] if split == "val" else shard_size(number, self.options)
            with OpenShard(self.out / f"{split}.part") as shard:
                shard.append(tokens[:size])
                self._commit(shard, split, number, START, None)
            tokens, number = tokens[size:], number + 1


def newest_manifest(out: Path, earlier: Manifest | None, wanted: dict) -> Manifest | None:
    """The manifest in `out`, or the `earlier` one that a checkpoint kept if it knows more of the same shards: a run may
    continue on another node or an emptied disk."""
    here = Manifest.load(out)
    if earlier is None:
        return here
    try:
        check_same(out, earlier, wanted)
    except UserError:  # made with other settings; the reader checks that its shards are the checkpoint's
        return here
    same = here and (here.source, here.options) == (earlier.source, earlier.options)
    more = not here or not here.shards or (same and len(here.shards) < len(earlier.shards))
    return earlier if more else here


def sweep(out: Path, manifest: Manifest) -> None:
    """Deletes what a killed producer left: open shards, and a shard that the manifest does not know yet."""
    known = {entry["file"] for entry in manifest.shards}
    numbered = [out / shard_name(split, len(manifest.of(split))) for split in ("train", "val")]
    for path in [*out.glob("*.part"), *(p for p in numbered if p.name not in known)]:
        path.unlink(missing_ok=True)


def shard_name(split: str, number: int) -> str:
    return f"{split}_{number:06d}.bin"


def _digests_of(paths: list[Path]) -> set[int]:
    """The digests of the documents that shards hold."""
    tokens = np.concatenate([read_shard(path) for path in paths]) if paths else np.empty(0, DTYPE)
    found = set()
    for document in np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT)):
        text = encoding().decode_bytes(document[1:].tolist())
        found.add(as_integer(hashlib.blake2b(text, digest_size=8).digest()))
    return found
