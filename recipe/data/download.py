"""Shards that somebody else has prepared and put on the Hub, downloaded one after the other."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Generator
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.hub import HubRepository, user_error
from recipe.data.producer import Producer, TextProducer
from recipe.data.shards import DTYPE, HEADER_BYTES, Manifest, move, of_tokenizer
from recipe.utils.errors import UserError

_DOWNLOADS = ".download"  # beside the shards, where they lie until they are whole
_URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")


def producer_of(data: DataConfig) -> Producer:
    """What makes the shards of `train_text` in the directory `dataset_name`. Raises UserError."""
    return (HubProducer if data.train_text.startswith("hf://") else TextProducer)(data, Path(data.dataset_name))


class HubProducer(Producer):
    """Downloads the shards of hf://datasets/ORG/NAME[@REVISION]/PATTERN."""

    source: HubRepository

    def __init__(self, data: DataConfig, out: Path):
        """Raises UserError for what is no such address, or where `out` holds something else."""
        self.name = f"dataset_name {data.train_text}"
        if not (match := _URI.fullmatch(data.train_text)):
            raise UserError(f"{self.name}: expected hf://datasets/ORG/NAME/PATTERN, as in hf://datasets/a/b/*.bin")
        repo, revision, self.pattern = match.groups()
        super().__init__(data, out, HubRepository(self.name, repo, revision))
        self.wanted = {"uri": data.train_text, "tokenizer": self.tokenizer.digest}

    def _new_manifest(self, version: dict) -> Manifest:
        source = {"uri": self.wanted["uri"], **version}
        shards = self._entries(version["commit"])
        return Manifest(source, {}, complete=True, shards=shards, **of_tokenizer(self.tokenizer))

    def _entries(self, commit: str) -> list[dict]:
        """The manifest's entries, {file, split, tokens, sha256, path}, in the order of the names."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        folder, _, pattern = self.pattern.rpartition("/")
        try:
            tree = HfApi().list_repo_tree(self.source.repo, folder or None, repo_type="dataset", revision=commit)
            files = [f for f in tree if isinstance(f, RepoFile) and fnmatch.fnmatchcase(Path(f.path).name, pattern)]
        except Exception as error:
            raise user_error(self.name, error) from None
        entries = [
            {
                "file": Path(f.path).name,
                "split": "val" if "val" in Path(f.path).name else "train",
                "tokens": (f.size - HEADER_BYTES) // DTYPE.itemsize,
                "sha256": f.lfs.sha256 if f.lfs else None,
                "path": f.path,
            }
            for f in sorted(files, key=lambda f: f.path)
        ]
        if all(entry["split"] == "val" for entry in entries):
            raise UserError(f"{self.name}: no file for training matches {self.pattern}; name the files of one folder")
        return entries

    def make(self, split: str, number: int) -> Generator[int, None, bool]:
        """Downloads a shard, all or nothing, unless it is here; its checksum is verified when it is opened. Yields 0:
        it makes no tokens. Raises UserError."""
        from huggingface_hub import hf_hub_download

        yield 0
        entry, aside = self.manifest.of(split)[number], self.out / _DOWNLOADS
        if (path := self.out / entry["file"]).exists():
            return True
        shutil.rmtree(aside, ignore_errors=True)  # nothing continues a killed download, which would stay for ever
        while not path.exists():
            try:
                repo, commit = self.source.repo, self.source.commit
                found = hf_hub_download(repo, entry["path"], repo_type="dataset", revision=commit, local_dir=aside)
                move(Path(found), path)
            except Exception as error:
                self.source.wait_after(error)
        shutil.rmtree(aside, ignore_errors=True)
        return True
