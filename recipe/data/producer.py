"""Turns text into shards, one after the other: all before training (prepare.py), or during training (builder.py).

The bytes of a shard depend on the text and the settings alone. The manifest, replaced after each shard, records where
the next one begins, so that a producer killed at any moment continues after its last shard with the same bytes.
"""

import hashlib
import os
import shlex
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from pathlib import Path

import numpy as np

from recipe.config import DataConfig
from recipe.config.catalog import REPO_NAME, text_suffix, unknown_data
from recipe.data.documents import Column, Piece, TextFiles, tokenized
from recipe.data.hub_text import HubText
from recipe.data.shards import MANIFEST, Manifest, ShardWriter, open_shard
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.errors import UserError
from recipe.utils.units import some

HUB_VAL_DOCUMENTS = 10_000  # about 10 M tokens of FineWeb
SPREAD_FROM = 1000  # documents; local text of fewer has its end held out
SPREAD = "documents from all over it"
# The position in the text where a shard begins: document, number of its tokens before the shard, Piece's `stream`.
START = {"document": 0, "tokens": 0, "stream": None}
Span = tuple[dict, np.ndarray]  # the position and the tokens, (tokens,), of a document or a part of one


def open_text(data: DataConfig) -> TextFiles | HubText:
    """The text that `train_text` names. Raises UserError if it names none."""
    column = Column(data.text_column, open_tokenizer(data.tokenizer))
    files = TextFiles(data.train_text, column, data.dataset_config, data.dataset_split)
    path = Path(data.train_text)
    if files.paths:
        return files
    if REPO_NAME.fullmatch(data.train_text) and not path.exists() and not text_suffix(path):
        return HubText(data, column)
    raise unknown_data(data.train_text, "train_text")


class Producer:
    """Makes the shards of a text in the directory `dataset_name`: new ones in order, those of its manifest in any.

    It holds out for validation the first `val_documents`; or a fraction `val_fraction` of local text, taken from its
    documents if there are many, otherwise from the tokens at its end; or nothing, as of local text with `val_data`.
    """

    manifest: Manifest  # set by `open`

    def __init__(self, data: DataConfig):
        """Raises UserError if the text cannot be read, or if the directory holds files that are not this recipe's."""
        self.source, self.tokenizer = open_text(data), open_tokenizer(data.tokenizer)
        self.out = out = Path(data.dataset_name)
        if out.exists() and not (out / MANIFEST).exists():
            names = [path.name for path in out.iterdir()] if out.is_dir() else [out.name]
            if strays := [name for name in names if not name.startswith(".") and not name.endswith(".part")]:
                raise UserError(
                    f"dataset_name {out} is to hold the shards of train_text {data.train_text}, but "
                    f"{f'holds other files ({some(sorted(strays), 1)})' if out.is_dir() else 'is a file'}; name an "
                    f"empty or a new directory, or remove train_text to train on {out} itself"
                )
        flags = f"--train_text '' --dataset_name {shlex.quote(str(out))}"
        self._other_ways = f"name another directory, or train on them as they are with {flags}"
        if data.train_text == data.val_text:
            self._other_ways = f"or validate on them as they are with --val_data {shlex.quote(data.val_data)}"
        self.shard_tokens = data.shard_tokens
        if isinstance(self.source, HubText):  # with val_data, too: the shards do not depend on it
            self.val_documents = data.val_documents or HUB_VAL_DOCUMENTS
        else:
            self.val_documents = 0 if data.val_data else data.val_documents
        self.val_fraction = 0.0 if self.val_documents or data.val_data else data.val_fraction
        self.options = {
            "val_fraction": self.val_fraction or None,
            "val_documents": self.val_documents or None,
            "shard_tokens": data.shard_tokens,
        }
        self.made = 0  # tokens
        self.show: Callable[[str], object] = lambda split: None  # progress: called whenever `made` has grown
        self._next: tuple[str, int] | None = None  # the shard whose tokens are next in `_spans`
        self._spans: Iterator[Span] = iter(())
        self._leftover: Span | None = None  # the rest of a span that did not fit into the previous shard
        self._document_count = 0  # read so far

    def finished(self) -> Manifest | None:
        """The manifest in `out` if all shards are made. Raises UserError for shards of another text or settings."""
        manifest = Manifest.load(self.out)
        if not (manifest and manifest.complete):
            return None
        self._check_same(manifest)
        return None if self.missing(manifest.shards) else manifest

    def open(self, commit: str | None = None, saved_manifest: Manifest | None = None) -> Manifest:
        """Sets and returns `manifest`: the one in `out`; or a checkpoint's `saved_manifest` if it has more of the same
        shards, since a run may continue on another node or an emptied disk; or a new one, for a Hub data set at
        `commit` (None: the newest). Raises UserError for shards of another text or settings."""
        manifest = Manifest.load(self.out)
        if saved_manifest and not self._difference(saved_manifest):
            manifest = max(manifest or saved_manifest, saved_manifest, key=lambda candidate: len(candidate.shards))
        if manifest and manifest.shards:
            self._check_same(manifest)
        else:
            manifest = Manifest(
                self.source.identity() | ({"commit": commit} if commit else self.source.newest()),
                self.options | ({"validation": self._validation_kind()} if self.val_fraction else {}),
                tokenizer=self.tokenizer.digest,
                vocab_size=self.tokenizer.vocab_size,
                end_of_text=self.tokenizer.end_of_text,
                dtype=self.tokenizer.dtype.name,
            )
        self.manifest, self._spread = manifest, manifest.options.get("validation") == SPREAD
        self.source.pin(manifest)
        manifest.save(self.out)
        return manifest

    def _validation_kind(self) -> str:
        assert isinstance(self.source, TextFiles)
        has_many = self.source.has_documents(SPREAD_FROM)
        return SPREAD if has_many and any(map(self._is_val, range(SPREAD_FROM))) else "the end"

    def _is_val(self, document: int) -> bool:
        """Whether a document is held out: a fixed function of its number, so that shards are reproducible."""
        digest = hashlib.blake2b(str(document).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.val_fraction * 2**64

    def _check_same(self, manifest: Manifest) -> None:
        if difference := self._difference(manifest):
            raise UserError(
                f"{self.out} holds shards of another text or with other settings: {difference}. Delete {self.out} to "
                f"make them again, {self._other_ways}"
            )

    def _difference(self, manifest: Manifest) -> str:
        """How the text and the settings differ from those of `manifest`; empty if they are the same."""
        current = self.source.identity() | self.options | {"tokenizer": self.tokenizer.digest}
        made_with = manifest.source | manifest.options | {"tokenizer": manifest.tokenizer}
        for name, value in current.items():
            if made_with.get(name) != value:
                change = f"{name} was {made_with.get(name)!r} and is {value!r} now"
                return "the text files differ" if name in ("files", "of", "files_sha256") else change
        return ""

    def missing(self, entries: list[dict]) -> list[int]:
        """The indices of the shards that are not on the disk."""
        names = {file.name for file in os.scandir(self.out) if file.is_file()}  # a builder asks ten times a second
        return [i for i, entry in enumerate(entries) if entry["file"] not in names]

    def tokens_of(self, split: str, number: int) -> int:
        """Tokens of a shard; one that is not in the manifest yet is assumed not to be the last. The first for training
        has a tenth of `shard_tokens`, so that training can start while the next is made; each later one has twice the
        tokens of the one before, up to `shard_tokens`."""
        entries = self.manifest.of(split)
        if number < len(entries):
            return entries[number]["tokens"]
        first_size = max(1, self.shard_tokens // 10)
        return self.shard_tokens if split == "val" else min(self.shard_tokens, first_size << min(number, 31))

    def everything(self) -> None:
        """Makes all missing shards. Raises UserError if a split is empty."""
        if self.val_fraction and not self._spread and self.manifest.complete:
            # Start over: where the held-out end begins is known only once all text is read.
            self.manifest.shards, self.manifest.complete = [], False
        self.make_validation()
        for number in self.missing(self.manifest.of("train")):  # deleted by a streamed run
            self.make("train", number)
        while not self.manifest.complete:
            self.make("train", len(self.manifest.of("train")))

    def make_validation(self) -> None:
        """Makes the validation shards, unless they are on the disk; none if the text is empty."""
        entries = self.manifest.of("val")
        on_disk, finished = not self.missing(entries), self.manifest.of("train") or self.manifest.complete
        if not (self.val_documents or self._spread) or (on_disk and finished):
            return
        number = len(entries) if on_disk else 0
        while self.make("val", number):
            number += 1

    def make(self, split: str, number: int) -> bool:
        """Makes a shard, unless the text ends before it; returns whether more of the split may follow. Raises UserError
        if a shard of the manifest comes out different."""
        is_known = number < len(self.manifest.of(split))
        if self._next != (split, number):
            self._seek(split, number)
        self._next = None  # until this shard is finished
        size, position = self.tokens_of(split, number), START
        with ShardWriter(self.out / f"{split}.part", self.tokenizer.dtype) as shard:
            while shard.tokens < size and (span := self._leftover or next(self._spans, None)):
                position, tokens = span
                chunk = tokens[: size - shard.tokens]
                shard.append(chunk)
                position = position | {"tokens": position["tokens"] + len(chunk)}
                self._leftover = (position, tokens[len(chunk) :]) if len(chunk) < len(tokens) else None
                self.made += len(chunk)
                self.show(split)
            text_ended = shard.tokens < size
            if shard.tokens or is_known:
                self._commit(shard, split, number, position)
                self.manifest.save(self.out)
        if not text_ended:
            self._next = split, number + 1
        elif split == "train" and not self.manifest.complete:
            self._complete()
        return not text_ended

    def _complete(self) -> None:
        if not self.manifest.of("train"):
            field = "val_fraction" if self._spread else "val_documents"
            detail = f" beyond the held-out documents; lower {field}" if self.manifest.of("val") else ""
            raise UserError(f"{self.source}: holds no text{detail}")
        if self.val_fraction and not self._spread:
            self._hold_out_end()
        self.manifest.documents, self.manifest.complete = self._document_count, True
        self.manifest.save(self.out)

    def _hold_out_end(self) -> None:
        """Splits the last training shards again: the last `val_fraction` of all tokens become validation shards."""
        total, last_shards = self.manifest.tokens("train"), self.manifest.shards_in(self.out, "train")
        val_count = int(total * self.val_fraction)
        if not val_count:
            problem = f"val_fraction {self.val_fraction:g} of {total:,} tokens is less than one"
            raise UserError(f"{self.source}: {problem}; give more text, or raise val_fraction")
        while sum(shard.tokens for shard in last_shards[1:]) >= val_count:
            del last_shards[0]
        tokens = np.concatenate([open_shard(shard).read() for shard in last_shards])
        del self.manifest.shards[-len(last_shards) :]
        self.manifest.save(self.out)  # a producer that is killed from here on makes these shards again
        for shard in last_shards:
            shard.path.unlink()
        for split, remaining in (("val", tokens[-val_count:]), ("train", tokens[:-val_count])):
            while len(remaining):
                number = len(self.manifest.of(split))
                with ShardWriter(self.out / f"{split}.part", self.tokenizer.dtype) as shard:
                    shard.append(remaining[: self.tokens_of(split, number)])
                    self._commit(shard, split, number, START)
                remaining = remaining[shard.tokens :]

    def _commit(self, shard: ShardWriter, split: str, number: int, position: dict) -> None:
        path, tokens = self.out / f"{split}_{number:06d}.bin", shard.tokens
        entries, sha256 = self.manifest.of(split), shard.commit(path)
        if number == len(entries):
            entry = {"file": path.name, "split": split, "tokens": tokens, "sha256": sha256, "next": position}
            self.manifest.shards.append(entry)
        elif (tokens, sha256) != (entries[number]["tokens"], entries[number]["sha256"]):
            path.unlink()
            raise UserError(
                f"{path}: built again, it differs ({tokens} tokens, {entries[number]['tokens']} before): "
                f"the text has changed; delete {self.out} and start over with --fresh"
            )

    def _seek(self, split: str, number: int) -> None:
        val_entries, position = self.manifest.of("val"), START
        if number:
            position = self.manifest.of(split)[number - 1]["next"]
        elif split == "train" and self.val_documents and val_entries:  # validation comes first in the text
            position = {"document": self.val_documents, "tokens": 0, "stream": val_entries[-1]["next"]["stream"]}
        self._leftover, self._spans = None, self._read(split, position)

    def _read(self, split: str, position: dict) -> Iterator[Span]:
        """Yields the tokens of a split from a position on, piece by piece."""
        for number, pieces in self._documents(split, position):
            offset = 0
            for piece, tokens in pieces:
                skip = max(0, position["tokens"] - offset) if number == position["document"] else 0
                if skip < len(tokens):
                    yield {"document": number, "tokens": offset + skip, "stream": piece.stream}, tokens[skip:]
                offset += len(tokens)

    def _documents(self, split: str, position: dict) -> Iterator[tuple[int, Iterator[tuple[Piece, np.ndarray]]]]:
        """Yields the number of each document, from that of a position on, and its pieces with their tokens, after an
        end-of-text; for training, only documents that equal no held-out one."""
        is_filtered = split == "train" and (self.val_documents or self._spread)
        digests, max_bytes = self._held_out() if is_filtered else (set(), 0)
        pieces = tokenized(self._pieces_from(split, position), self.tokenizer)
        end_of_text = np.array([self.tokenizer.end_of_text], self.tokenizer.dtype)
        for number, group in groupby(pieces, key=lambda piece: piece[0].document):
            first_piece, tokens = next(document := iter(group))
            head = [(first_piece, np.concatenate([end_of_text, tokens]))]
            # A document longer than all held-out ones equals none, so the rest of it need not be in memory.
            while sum(tokens.nbytes for _, tokens in head) <= max_bytes and (piece := next(document, None)):
                head.append(piece)
            if not digests or _digest(b"".join(tokens.tobytes() for _, tokens in head)) not in digests:
                yield number, chain(head, document)

    def _held_out(self) -> tuple[set[bytes], int]:
        """The digests of the held-out documents, which may not fit into memory themselves, and the longest's bytes."""
        digests, max_bytes, rest = set(), 0, np.empty(0, self.tokenizer.dtype)
        for shard in self.manifest.shards_in(self.out, "val"):
            tokens = np.concatenate([rest, open_shard(shard).read()])
            *documents, rest = np.split(tokens, np.flatnonzero(tokens == self.tokenizer.end_of_text))
            digests.update(_digest(document.tobytes()) for document in documents)
            max_bytes = max([max_bytes, *(document.nbytes for document in documents)])
        return digests | {_digest(rest.tobytes())}, max(max_bytes, rest.nbytes)

    def _pieces_from(self, split: str, position: dict) -> Iterator[Piece]:
        for piece in self.source.pieces(position["stream"]):
            number = piece.document
            self._document_count = number + 1
            if split == "val" and self.val_documents and number >= self.val_documents:
                return
            if self._spread and self._is_val(number) != (split == "val"):
                continue
            if number >= position["document"]:
                yield piece


def _digest(document: bytes) -> bytes:
    return hashlib.blake2b(document, digest_size=16).digest()
