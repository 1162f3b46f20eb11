"""Shards that somebody else has prepared and put on the Hub, downloaded one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.hub import HubShards
from recipe.data.prepare.producer import check_own_directory, continued
from recipe.data.shards import DTYPE, HEADER_BYTES, Manifest, of_tokenizer
from recipe.data.tokenizer import open_tokenizer


class HubProducer:
    """TextProducer's counterpart for hf://datasets/ORG/NAME/PATTERN."""

    def __init__(self, data: DataConfig, out: Path):
        self.text, self.out, self.tokenizer = HubShards(data.train_text), out, open_tokenizer(data.tokenizer)
        check_own_directory(out)

    def open(self, commit: str | None = None, earlier: Manifest | None = None) -> Manifest:
        """As TextProducer's. Raises UserError."""
        identity = self.text.identity()
        self.manifest = continued(self.out, earlier, {**identity, "tokenizer": self.tokenizer.digest})
        if self.manifest is None:
            version = {"commit": commit} if commit else self.text.newest()
            self.manifest = Manifest({**identity, **version}, {}, complete=True, **of_tokenizer(self.tokenizer))
            self.manifest.shards = self.text.entries(version["commit"])
        self.text.pin(self.manifest)
        self.manifest.save(self.out)
        return self.manifest

    def bytes_of(self, number: int) -> int:
        """The size of training shard `number`."""
        return HEADER_BYTES + self.manifest.of("train")[number]["tokens"] * DTYPE.itemsize

    @property
    def largest(self) -> int:
        """The size in bytes of the largest training shard."""
        return max(self.bytes_of(i) for i in range(len(self.manifest.of("train"))))

    def make_validation(self) -> Iterator[int]:
        """Downloads the validation shards that are not here."""
        for number in range(len(self.manifest.of("val"))):
            yield from self.make("val", number)

    def make(self, split: str, number: int) -> Iterator[int]:
        """Downloads a shard unless it is here. Yields 0: it makes no tokens. Raises UserError."""
        entry = self.manifest.of(split)[number]
        yield 0
        if not (self.out / entry["file"]).exists():
            self.text.download(entry, self.out / entry["file"])
