"""Shards that somebody else has prepared and put on the Hub, downloaded one after the other."""

from __future__ import annotations

import fnmatch
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.hub import HubRepository, Retries, user_error
from recipe.data.prepare.producer import check_own_directory, continued
from recipe.data.shards import DTYPE, HEADER_BYTES, Manifest, move, of_tokenizer
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.errors import UserError

_DOWNLOADS = ".download"  # beside the shards, where they lie until they are whole
_URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")


class HubProducer(HubRepository):
    """TextProducer's counterpart for hf://datasets/ORG/NAME[@REVISION]/PATTERN."""

    val_fraction = None

    def __init__(self, data: DataConfig, out: Path):
        """Raises UserError for what is no such address, or where `out` holds something else."""
        self.uri, self.out, self.tokenizer = data.train_text, out, open_tokenizer(data.tokenizer)
        if not (match := _URI.fullmatch(self.uri)):
            raise UserError(
                f"dataset_name {self.uri}: expected hf://datasets/ORG/NAME/PATTERN, as in hf://datasets/a/b/*.bin"
            )
        self.repo, self.revision, self.pattern = match.groups()
        self.retries = Retries(f"dataset_name {self.uri}")
        check_own_directory(out)

    def open(self, commit: str | None = None, earlier: Manifest | None = None) -> Manifest:
        """As TextProducer's. Raises UserError."""
        self.manifest = continued(self.out, earlier, {"uri": self.uri, "tokenizer": self.tokenizer.digest})
        if self.manifest is None:
            source = {"uri": self.uri} | ({"commit": commit} if commit else self.newest())
            shards = self._entries(source["commit"])
            self.manifest = Manifest(source, {}, complete=True, shards=shards, **of_tokenizer(self.tokenizer))
        self.pin(self.manifest)
        self.manifest.save(self.out)
        return self.manifest

    def _entries(self, commit: str) -> list[dict]:
        """The manifest's entries, {file, split, tokens, sha256, path}, in the order of the names."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        try:
            tree = HfApi().list_repo_tree(self.repo, repo_type="dataset", revision=commit, recursive=True)
            files = [f for f in tree if isinstance(f, RepoFile) and _matches(f.path, self.pattern)]
        except Exception as error:
            raise user_error(self.retries.name, error) from None
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
        if not entries:
            raise UserError(f"dataset_name {self.uri}: no file of the data set matches {self.pattern}")
        if len({Path(e["path"]).parent for e in entries}) > 1:
            raise UserError(
                f"dataset_name {self.uri}: files in several folders match; narrow the pattern to one folder"
            )
        if all(e["split"] == "val" for e in entries):
            raise UserError(f"dataset_name {self.uri}: only validation files match {self.pattern}; widen the pattern")
        return entries

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
        """Downloads a shard, all or nothing, unless it is here; its checksum is verified when it is opened. Yields 0:
        it makes no tokens. Raises UserError."""
        from huggingface_hub import hf_hub_download

        yield 0
        entry, aside = self.manifest.of(split)[number], self.out / _DOWNLOADS
        if (path := self.out / entry["file"]).exists():
            return
        shutil.rmtree(aside, ignore_errors=True)  # nothing continues a killed download, which would stay for ever
        while not path.exists():
            try:
                options = {"repo_type": "dataset", "revision": self.commit, "local_dir": aside}
                move(Path(hf_hub_download(self.repo, entry["path"], **options)), path)
            except Exception as error:
                self.retries.failed(error)
        shutil.rmtree(aside, ignore_errors=True)


def _matches(path: str, pattern: str) -> bool:
    """As in a shell, * stays within a folder."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
