"""Shards that somebody else has prepared and put on the Hub, downloaded one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.hub import HubShards
from recipe.data.prepare.producer import check_own_directory, check_same, newest_manifest, sweep
from recipe.data.shards import DTYPE, HEADER_BYTES, Manifest


class HubProducer:
    """As TextProducer, of hf://datasets/ORG/NAME/PATTERN."""

    def __init__(self, data: DataConfig, out: Path):
        self.shards, self.out = HubShards(data.train_text), out
        check_own_directory(out)

    def open(self, commit: str | None = None, earlier: Manifest | None = None) -> Manifest:
        manifest = newest_manifest(self.out, earlier, self.shards.identity())
        if manifest and manifest.shards:
            check_same(self.out, manifest, self.shards.identity())
            self.shards.pin(manifest.source)
        else:
            pinned = self.shards.pin({"commit": commit} if commit else None)
            source = {**self.shards.identity(), **pinned}
            manifest = Manifest(source, {}, complete=True, shards=self.shards.entries())
        manifest.save(self.out)
        self.manifest = manifest
        sweep(self.out, manifest)
        return manifest

    def bytes_of(self, number: int) -> int:
        return HEADER_BYTES + self.manifest.of("train")[number]["tokens"] * DTYPE.itemsize

    @property
    def largest(self) -> int:
        return max(self.bytes_of(i) for i in range(len(self.manifest.of("train"))))

    def make_validation(self) -> Iterator[int]:
        for entry in self.manifest.of("val"):
            yield from self._fetch(entry)

    def make(self, split: str, number: int) -> Iterator[int]:
        yield from self._fetch(self.manifest.of(split)[number])

    def _fetch(self, entry: dict) -> Iterator[int]:
        yield 0
        if not (self.out / entry["file"]).exists():
            self.shards.download(entry, self.out / entry["file"])
