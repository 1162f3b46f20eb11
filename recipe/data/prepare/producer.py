"""Text to shards, one after the other: what a preparation does before training, and a stream while the model trains.

The bytes of a shard depend on the text and the settings alone. The manifest, which is replaced after each shard, holds
where the next one begins, so that a producer killed at any moment continues from its last shard with the same bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recipe.config import DataConfig
from recipe.config.catalog import text_suffix, unknown_data
from recipe.data.hub import HubText
from recipe.data.prepare.documents import TextFiles, in_pieces, open_files
from recipe.data.prepare.tokenize import Piece, tokenized
from recipe.data.shards import DTYPE, HEADER_BYTES, MANIFEST, Manifest, OpenShard, Shard, of_tokenizer, open_shard
from recipe.data.tokenizer import GPT2Tokenizer, open_tokenizer
from recipe.utils.errors import UserError

HUB_VAL_DOCUMENTS = 10_000  # about 10 M tokens of FineWeb
START = {"document": 0, "tokens": 0, "stream": None}  # the position before the first document


def open_text(data: DataConfig) -> TextFiles | HubText:
    """The text that `train_text` names. Raises UserError if it cannot be one."""
    if files := open_files(data.train_text, data.text_column):
        return files
    if re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", data.train_text) and not text_suffix(Path(data.train_text)):
        return HubText(data)
    raise unknown_data(data.train_text, "train_text")


def options_of(data: DataConfig, text: TextFiles | HubText) -> dict:
    """The settings that decide what the shards hold, as the manifest keeps them. For validation are so many documents
    at the beginning, or such a fraction of the tokens, at the end; the other is None, or both are."""
    documents = data.val_documents or (HUB_VAL_DOCUMENTS if isinstance(text, HubText) else None)
    without = documents or (data.streaming and data.val_data)
    return {
        "val_fraction": None if without else data.val_fraction or None,
        "val_documents": documents,
        "shard_tokens": data.shard_tokens,
    }


def _difference(manifest: Manifest, wanted: dict) -> str:
    """What of the text and the settings differs from those that the shards of `manifest` were made from, or nothing."""
    found = {**manifest.source, **manifest.options, "tokenizer": manifest.tokenizer}
    name = next((name for name, value in wanted.items() if found.get(name) != value), "")
    was = f"{name} was {found.get(name)!r}, and is {wanted.get(name)!r} now" if name else ""
    return "the text files differ" if name == "files" else was


def check_same(out: Path, manifest: Manifest, wanted: dict) -> None:
    """Raises UserError where the shards of `manifest` were made from another text or with other settings."""
    if was := _difference(manifest, wanted):
        raise UserError(
            f"{out} holds shards of another text or with other settings: {was}. Delete {out} to make them again, name "
            "another directory, or train on them as they are with --train_text ''"
        )


def continued(out: Path, earlier: Manifest | None, wanted: dict) -> Manifest | None:
    """The manifest in `out`, or the `earlier` one that a checkpoint kept if it knows more of the same shards: a run may
    continue on another node or an emptied disk. None where no shard is known. Raises UserError as `check_same`."""
    manifest = Manifest.load(out)
    if earlier and not _difference(earlier, wanted) and len(earlier.shards) > len(manifest.shards if manifest else []):
        manifest = earlier
    if not (manifest and manifest.shards):
        return None
    check_same(out, manifest, wanted)
    return manifest


def check_own_directory(out: Path) -> None:
    """Raises UserError where shards would come among files that are not this recipe's."""
    if out.is_file():
        raise UserError(f"{out} is a file, and the shards need a directory; name another one")
    if out.is_dir() and not (out / MANIFEST).exists():
        others = sorted(p.name for p in out.iterdir() if not p.name.startswith(".") and p.suffix != ".part")
        if others:
            raise UserError(
                f"{out} holds other files ({others[0]}{' and more' if len(others) > 1 else ''}), and shards are not "
                "mixed with them; name an empty or a new directory"
            )


@dataclass(frozen=True)
class Run:
    """Tokens of a document, in a row: `start` of its tokens are before them."""

    document: int
    start: int
    tokens: np.ndarray
    stream: dict | None

    def after(self, n: int) -> Run:
        """What is left of it without its first `n` tokens."""
        return Run(self.document, self.start + n, self.tokens[n:], self.stream)

    @property
    def position(self) -> dict:
        """Where in the text the run begins, as the manifest records it."""
        return {"document": self.document, "tokens": self.start, "stream": self.stream}


class TextProducer:
    """Makes shards of a text in `out`, in order or, those that the manifest knows already, in any order.

    `make` is a generator so that its caller can show progress; a shard is finished when it ends.
    """

    def __init__(self, data: DataConfig, out: Path, threads: int | None = None):
        """Raises UserError where the text cannot be read, or `out` holds something else."""
        if data.shard_tokens >= 1 << 31:
            raise UserError(f"shard_tokens {data.shard_tokens}: a shard holds at most {(1 << 31) - 1} tokens")
        self.text, self.out, self._threads = open_text(data), out, threads
        self.options, self.tokenizer = options_of(data, self.text), open_tokenizer(data.tokenizer)
        self.val_documents, self.val_fraction = self.options["val_documents"], self.options["val_fraction"]
        self._next: tuple[str, int] | None = None  # the shard whose tokens `_runs` gives next
        self._runs: Iterator[Run] = iter(())
        self._rest: Run | None = None  # what the shard before has left of a run
        self._documents = 0  # read so far
        check_own_directory(out)

    def newest(self) -> dict:
        """The text's newest version, as the manifest records it. Raises UserError."""
        return self.text.newest()

    def finished(self) -> Manifest | None:
        """The manifest in `out` if nothing is left to do. Raises UserError for shards of other text or settings."""
        manifest = Manifest.load(self.out)
        if not (manifest and manifest.complete):
            return None
        check_same(self.out, manifest, self._wanted())
        return None if self._missing(manifest.shards) else manifest

    def open(self, commit: str | None = None, earlier: Manifest | None = None) -> Manifest:
        """The manifest to continue (`continued`), or a new one; it is kept in `self.manifest`. `commit` is the version
        of a data set on the Hub to begin with, None for the newest."""
        self.manifest = continued(self.out, earlier, self._wanted())
        if self.manifest is None:
            version = {"commit": commit} if commit else self.newest()
            self.manifest = Manifest({**self.text.identity(), **version}, self.options, **of_tokenizer(self.tokenizer))
        self.text.pin(self.manifest)
        self.manifest.save(self.out)
        return self.manifest

    def _wanted(self) -> dict:
        return {**self.text.identity(), **self.options, "tokenizer": self.tokenizer.digest}

    def _missing(self, entries: list[dict]) -> list[int]:
        return [i for i, entry in enumerate(entries) if not (self.out / entry["file"]).exists()]

    def bytes_of(self, number: int) -> int:
        """The size of training shard `number`; of one that is not known yet, if it is not the last."""
        return HEADER_BYTES + self._size("train", number) * DTYPE.itemsize

    def _size(self, split: str, number: int) -> int:
        """Tokens of a shard. The first one for training is a tenth of `shard_tokens`, so that training can begin while
        the next is made, and each has twice the tokens of the one before, up to `shard_tokens`."""
        entries, whole = self.manifest.of(split), self.options["shard_tokens"]
        if number < len(entries):
            return entries[number]["tokens"]
        return whole if split == "val" else min(whole, max(1, whole // 10) << min(number, 31))

    @property
    def largest(self) -> int:
        """The size in bytes of the largest training shard that may come."""
        return HEADER_BYTES + self.options["shard_tokens"] * DTYPE.itemsize

    def everything(self) -> Iterator[int]:
        """Makes what is missing, and yields the tokens that were added. Raises UserError where a split stays empty."""
        if self.val_fraction and self.manifest.complete:  # where the end begins is known when all was read
            self.manifest.shards, self.manifest.complete = [], False
        yield from self.make_validation()
        for number in self._missing(self.manifest.of("train")):  # which a streamed run has deleted
            yield from self.make("train", number)
        while not self.manifest.complete:
            yield from self.make("train", len(self.manifest.of("train")))

    def make_validation(self) -> Iterator[int]:
        """Makes the validation shards, unless they are here."""
        known = self.manifest.of("val")
        here = not self._missing(known)
        if not self.val_documents or (here and (self.manifest.of("train") or self.manifest.complete)):
            return
        number = len(known) if here else 0
        while (yield from self.make("val", number)):
            number += 1
        if not self.manifest.of("val"):
            raise UserError(f"{self.text}: holds no text")

    def make(self, split: str, number: int) -> Iterator[int]:
        """Makes a shard, or finds that the text ends before it. Yields the tokens that were added, and returns whether
        more of the split may follow. Raises UserError where a shard that the manifest knows comes out different."""
        known = self.manifest.of(split)[number : number + 1]
        if self._next != (split, number):
            self._go_to(split, number)
        self._next = None  # until this one is finished
        size, position = self._size(split, number), START
        with OpenShard(self.out / f"{split}.part") as shard:
            while shard.tokens < size and (run := self._rest or next(self._runs, None)):
                taken = run.tokens[: size - shard.tokens]
                shard.append(taken)
                run = run.after(len(taken))
                position, self._rest = run.position, run if len(run.tokens) else None
                yield len(taken)
            ended = shard.tokens < size
            if shard.tokens or known:
                self._commit(shard, split, number, position)
                self.manifest.save(self.out)
        if not ended:
            self._next = split, number + 1
        elif split == "train" and not self.manifest.complete:
            self._complete()
        return not ended

    def _complete(self) -> None:
        if not self.manifest.of("train"):
            others = " besides the documents for validation; lower val_documents" if self.val_documents else ""
            raise UserError(f"{self.text}: holds no text{others}")
        if self.val_fraction:
            self._hold_out_the_end()
        self.manifest.documents, self.manifest.complete = self._documents, True
        self.manifest.save(self.out)

    def _hold_out_the_end(self) -> None:
        """Divides the last training shards again: the last `val_fraction` of all tokens become validation shards."""
        tokens, last = self.manifest.tokens("train"), self.manifest.shards_in(self.out, "train")
        held_out = int(tokens * self.val_fraction)
        if not 0 < held_out < tokens:
            raise UserError(
                f"{self.text}: val_fraction {self.val_fraction} of {tokens:,} tokens leaves none for one of "
                f"the splits; raise it to {min(0.5, 2 / max(tokens, 4)):.2g} or more, or give more text"
            )
        while sum(shard.tokens for shard in last[1:]) >= held_out:
            del last[0]
        end = np.concatenate([open_shard(shard) for shard in last])
        del self.manifest.shards[-len(last) :]
        self.manifest.save(self.out)  # a producer that is killed from here on makes these shards again
        for shard in last:
            shard.path.unlink()
        for split, rest in (("val", end[-held_out:]), ("train", end[:-held_out])):
            while len(rest):
                number = len(self.manifest.of(split))
                with OpenShard(self.out / f"{split}.part") as shard:
                    shard.append(rest[: self._size(split, number)])
                    self._commit(shard, split, number, START)
                rest = rest[shard.tokens :]

    def _commit(self, shard: OpenShard, split: str, number: int, position: dict) -> None:
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

    def _go_to(self, split: str, number: int) -> None:
        val, position = self.manifest.of("val"), START
        if number:
            position = self.manifest.of(split)[number - 1]["next"]
        elif split == "train" and self.val_documents and val:  # whose documents come first
            position = {"document": self.val_documents, "tokens": 0, "stream": val[-1]["next"]["stream"]}
        self._rest, self._runs = None, self._read(split, position)

    def _read(self, split: str, position: dict) -> Iterator[Run]:
        """The tokens of a split from a position on."""
        document, start = position["document"], 0  # a document that is continued is tokenized from its beginning
        for piece, tokens in tokenized(self._pieces(split, position), self.tokenizer, self._threads):
            if piece.document != document:
                document, start = piece.document, 0
            run = Run(document, start, tokens, piece.stream)
            start += len(tokens)
            if document == position["document"] and run.start < position["tokens"]:
                run = run.after(position["tokens"] - run.start)
            if len(run.tokens):
                yield run

    def _pieces(self, split: str, position: dict) -> Iterator[Piece]:
        """The documents of a split from the position's on, in pieces; none with the text of a validation document."""
        held_out: set[bytes] = set()
        if split == "train" and self.val_documents:
            held_out = _digests_of(self.manifest.shards_in(self.out, "val"), self.tokenizer)
        for document in self.text.documents(position["stream"]):
            self._documents = document.index + 1
            if split == "val" and document.index >= self.val_documents:
                return
            if document.index < position["document"] or (held_out and document.digest() in held_out):
                continue
            for number, text in enumerate(in_pieces(document.chunks())):
                yield Piece(document.index, number == 0, text, document.stream)


def _digests_of(shards: list[Shard], tokenizer: GPT2Tokenizer) -> set[bytes]:
    """The digests of the documents that shards hold."""
    tokens = np.concatenate([open_shard(shard) for shard in shards])
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.end_of_text))
    texts = (tokenizer.decode(document[1:].tolist()) for document in documents)
    return {hashlib.blake2b(text, digest_size=8).digest() for text in texts}
