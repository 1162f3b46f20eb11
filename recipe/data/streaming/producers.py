"""Makers of a streamed run's shards: by tokenising text, or by downloading what somebody else has tokenised."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Protocol

from recipe.config import DataConfig
from recipe.data.hub import DOWNLOADS, HubShards, HubText
from recipe.data.prepare.options import check_same, options_of
from recipe.data.prepare.pipeline import open_manifest
from recipe.data.prepare.tokenize import Selection
from recipe.data.prepare.writer import OpenShard, shard_name, shard_sizes
from recipe.data.shards import DTYPE, HEADER_BYTES, START, Manifest
from recipe.data.streaming.status import EARLIER, POLL, Status, directory_bytes, read_json
from recipe.errors import UserError


class Maker(Protocol):
    """Makes shards by number, the known ones again with the same bytes."""

    def validation(self) -> None:
        """See that the validation shards are here."""
        ...

    def size_of(self, number: int) -> int:
        """Bytes of training shard `number`."""
        ...

    def largest(self) -> int:
        """Bytes of the largest training shard that may come."""
        ...

    def make(self, number: int) -> None:
        """Make training shard `number`, or find that the source ends before it."""
        ...


def _adopt(out: Path, wanted: dict) -> None:
    """Go on with what a checkpoint knows of the shards, if it knows more of the same ones than this disk does."""
    if not (earlier := read_json(out / EARLIER)):
        return
    here, before = Manifest.load(out), Manifest(**earlier)
    try:
        check_same(out, before, wanted)
    except UserError:  # shards made another way; that they are the same ones, the reader sees to
        return
    same = here and (here.source, here.options) == (before.source, before.options)
    if not here or not here.shards or (same and len(here.shards) < len(before.shards)):
        before.save(out)


class TextMaker:
    """Tokenises a source; what it makes is what `recipe.data.prepare` makes of it."""

    def __init__(self, data: DataConfig, out: Path, commit: str | None, status: Status):
        self.options = options_of(data)
        self.options.check()
        self.text = self.options.open_text(status.say)
        if commit and isinstance(self.text, HubText):
            self.text.commit = commit
        if self.options.held_out(self.text) is None and data.val_data:
            self.options = dataclasses.replace(self.options, val_documents=0)
        if self.options.held_out(self.text) is None:
            raise UserError(
                "streaming needs val_documents: the first so many documents are held out, since a fraction of a stream "
                "is known at its end only"
            )
        _adopt(out, {**self.text.identity(), **self.options.fixed(self.text)})
        self.manifest = open_manifest(self.options, self.text, out)
        self.selection = Selection(self.options, self.text, out, heard=lambda: status.set(now=False))
        self.out, self.status = out, status
        self._at: int | None = None  # the training shard that `_pieces` gives next
        self._pieces, self._rest, self._last = None, None, -1

    def validation(self) -> None:
        known = self.manifest.of("val")
        whole = bool(known) and (self.manifest.of("train") or self.manifest.complete)
        if not self.selection.val_documents or (whole and all((self.out / e["file"]).exists() for e in known)):
            return
        self._go_to(START)
        number = 0
        while self._take("val", number, known[number] if number < len(known) else None):
            number += 1
        self._at = 0

    def size_of(self, number: int) -> int:
        train = self.manifest.of("train")
        tokens = (
            train[number]["tokens"]
            if number < len(train)
            else shard_sizes(number, self.options.shard_tokens, self.options.first_shard_tokens)
        )
        return HEADER_BYTES + tokens * DTYPE.itemsize

    def largest(self) -> int:
        return HEADER_BYTES + self.options.shard_tokens * DTYPE.itemsize

    def make(self, number: int) -> None:
        train = self.manifest.of("train")
        if self._at != number:
            entries = self.manifest.shards
            before = train[number - 1] if number else next((e for e in reversed(entries) if e["split"] == "val"), None)
            self._go_to(before["next"] if before else START)
        self._at = None
        known = train[number] if number < len(train) else None
        if self._take("train", number, known):
            self._at = number + 1

    def _go_to(self, position: dict) -> None:
        if self._pieces:
            self._pieces.close()
        self._pieces, self._rest, self._last = self.selection.pieces(position), None, position["document"] - 1
        self._skip = position["tokens"]

    def _take(self, split: str, number: int, known: dict | None) -> bool:
        """Make shard `number` of a split from here on; False where there are no tokens left for it."""
        size = self.options.shard_tokens if split == "val" else self.size_of(number) // DTYPE.itemsize - 512
        shard, position, ended = OpenShard(self.out / f"{split}.part"), None, False
        start = time.monotonic()
        try:
            while shard.filled < size:
                item = self._rest or self._next()
                if item is None:
                    position, ended = {**START, "document": self._last + 1}, True
                    break
                piece, tokens, done = item
                if piece.split == "val" != split:  # the last one, which is in its shard already
                    self._rest = None
                    continue
                if piece.split != split:  # the documents held out stand in front, and are whole
                    self._rest, position = item, piece.position(0)
                    break
                taken = tokens[done : done + size - shard.filled]
                shard.append(taken)
                done += len(taken)
                self._rest = (piece, tokens, done) if done < len(tokens) else None
                position = piece.position(done)
                self.status.set(
                    now=False,
                    state="tokenising",
                    split=split,
                    shard=number,
                    tokens=shard.filled,
                    of=size,
                    seconds=time.monotonic() - start,
                )
            if split == "val" and shard.filled < size:
                self.selection.held_out.save()
            if shard.filled:
                self._commit(shard, split, number, position, known)
            else:
                shard.path.unlink()
        finally:
            shard.close()
        if ended and known is None and not self.manifest.complete:
            if not self.manifest.of("train"):
                raise UserError(f"{self.text}: its documents leave none for training; lower val_documents")
            self.manifest.documents, self.manifest.complete = self._last + 1, True
            self.manifest.save(self.out)
        return shard.filled > 0

    def _next(self):
        piece, tokens = next(self._pieces, (None, None))
        if piece is None:
            return None
        self._last = piece.document
        done, self._skip = self._skip, 0
        return piece, tokens, done

    def _commit(self, shard: OpenShard, split: str, number: int, position: dict, known: dict | None) -> None:
        self.selection.commit()
        path = self.out / shard_name(split, number)
        sha256 = shard.commit(path)
        if known is None:
            entry = {"file": path.name, "split": split, "tokens": shard.filled, "sha256": sha256}
            self.manifest.shards.append({**entry, "next": {**position, "open": {"train": 0, "val": 0}}})
            self.manifest.save(self.out)
        elif (shard.filled, sha256) != (known["tokens"], known["sha256"]):
            path.unlink()
            raise UserError(
                f"{path}: built again, it is not what it was ({shard.filled} tokens, {known['tokens']} before): the "
                f"source has changed; delete {self.out} and start over with --fresh"
            )


class HubMaker:
    """Downloads shards that somebody else has prepared."""

    def __init__(self, data: DataConfig, out: Path, commit: str | None, status: Status):
        self.shards, self.out, self.status = HubShards(data.train_text, status.say), out, status
        self.shards.commit = commit
        _adopt(out, self.shards.identity())
        manifest = Manifest.load(out)
        if manifest and manifest.shards:
            check_same(out, manifest, self.shards.identity())
            self.shards.pin(manifest.source)
            self.manifest = manifest
            return
        source = {**self.shards.identity(), **self.shards.pin(None)}
        self.manifest = Manifest(source, {}, complete=True, shards=self.shards.entries())
        self.manifest.save(out)

    def validation(self) -> None:
        for entry in self.manifest.of("val"):
            self._fetch(entry)

    def size_of(self, number: int) -> int:
        return HEADER_BYTES + self.manifest.of("train")[number]["tokens"] * DTYPE.itemsize

    def largest(self) -> int:
        return max(self.size_of(i) for i in range(len(self.manifest.of("train"))))

    def make(self, number: int) -> None:
        self._fetch(self.manifest.of("train")[number])

    def _fetch(self, entry: dict) -> None:
        if not (self.out / entry["file"]).exists():
            done = threading.Event()
            watch = threading.Thread(target=self._report, args=(entry, done), daemon=True)
            watch.start()
            try:
                self.shards.download(entry, self.out / entry["file"])
            finally:
                done.set()
                watch.join()

    def _report(self, entry: dict, done: threading.Event) -> None:
        last, size = -1, HEADER_BYTES + entry["tokens"] * DTYPE.itemsize
        while not done.wait(POLL):
            if (here := directory_bytes(self.out / DOWNLOADS)) != last:
                last = here
                self.status.set(state="downloading", split=entry["split"], shard=entry["file"], done=here, of=size)
