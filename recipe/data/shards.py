"""Token shards: llm.c's .bin files, and the manifest that `recipe.data.prepare` keeps beside them.

A shard is a header of 256 little-endian int32 (magic number, version, number of tokens, zeros) and then the tokens as
little-endian uint16, or uint32 for more than 65,536: karpathy/llm.c, dev/data/data_common.py. Each project reads the
other's files.
nanoGPT's train.bin and val.bin, the tokens without a header, and arrays like build-nanogpt's (.npy) are read too.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from recipe.config.catalog import text_files, unknown_data
from recipe.data.tokenizer import END_OF_TEXT, GPT2, VOCAB_SIZE, GPT2Tokenizer
from recipe.utils.errors import UserError, reading, writing
from recipe.utils.files import fsync, replace_file, sha256_of
from recipe.utils.schema import COUNT, SHA256, check
from recipe.utils.shards import FORMATS, HEADER_BYTES, SUFFIXES, UINT16, ShardReader, shards_in
from recipe.utils.units import si

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_SAMPLE_SIZE = 1 << 20  # tokens to inspect if no manifest names the tokenizer
_MIN_SAMPLE = 100_000  # tokens to judge by their maximum: every 1,000 of tiny Shakespeare have one above 48,000
_USUAL_MAXIMUM = 37_692  # exceeded by samples of all languages, code, digits and DNA, but not by chess moves or sums
FORMAT_VERSION = 1
_RETRY_HINT = "fix that; the same command continues after the last finished shard"


@dataclass(frozen=True)
class Shard:
    """A file of token ids, its number of tokens and its checksum, and the number of tokens of the run's tokenizer."""

    path: Path
    tokens: int
    sha256: str | None  # None without a manifest, until the file is first read
    vocab_size: int = VOCAB_SIZE


def open_shard(shard: Shard, stop: threading.Event | None = None) -> ShardReader:
    """Opens a shard and verifies its SHA-256 if it is known: about 0.2 s for 100M tokens. Raises UserError, also if
    `stop` is set meanwhile."""
    reader = ShardReader(shard.path, shard.vocab_size)
    if (size := reader.dtype.itemsize * len(reader)) > 2e9:  # OpenWebText's train.bin takes half a minute, or minutes
        logger.info("data       verifying %s, %sB", shard.path, si(size))
    reader.sha256 = sha256_of(shard.path, stop)
    if shard.sha256 not in (None, reader.sha256):
        raise UserError(
            f"{shard.path}: its SHA-256 is {reader.sha256[:16]}..., but was {shard.sha256[:16]}... when prepared "
            "or first read: the file has changed; restore it, or delete its directory and prepare it again"
        )
    return reader


class ShardWriter:
    """A shard that is being written to the file `part`, which `commit` renames; without a commit it is deleted. `dtype`
    is that of its tokens."""

    def __init__(self, part: Path, dtype: np.dtype = UINT16):
        self.part, self.dtype, self.tokens = part, dtype, 0

    def __enter__(self) -> ShardWriter:
        self.part.unlink(missing_ok=True)
        self._file = open(self.part, "xb", buffering=1 << 20)
        self._file.write(bytes(HEADER_BYTES))  # the header is written last
        return self

    def append(self, tokens: np.ndarray) -> None:
        """Appends tokens, (n,)."""
        with writing(self.part, _RETRY_HINT):
            self._file.write(np.ascontiguousarray(tokens, self.dtype).data)
        self.tokens += len(tokens)

    def commit(self, path: Path) -> str:
        """Writes the header, flushes the file to the disk and renames it to `path`; returns its SHA-256."""
        header = np.zeros(256, "<i4")
        header[:3] = *FORMATS[self.dtype], self.tokens
        with writing(self.part, _RETRY_HINT):
            self._file.seek(0)
            self._file.write(header.tobytes())
            self._file.flush()
            os.fsync(self._file.fileno())
        sha256 = sha256_of(self.part)
        os.replace(self.part, path)
        fsync(path.parent)
        return sha256

    def __exit__(self, *_) -> None:
        with suppress(OSError):  # on a full disk: the buffered tokens are not needed anymore
            self._file.close()
        self.part.unlink(missing_ok=True)


_SCHEMA = {
    "source": {"commit": (None, str), "files": (None, [{"name": str}])},
    "options": dict,
    "complete": bool,
    "shards": [
        {
            "file": str,
            "split": re.compile("train|val"),
            "tokens": range(1, 1 << 31),
            "sha256": SHA256,
            "next": {"document": COUNT, "tokens": COUNT, "stream": (None, {"document": COUNT, "state": (COUNT, dict)})},
        }
    ],
    **dict.fromkeys(("documents", "format_version", "vocab_size", "end_of_text"), COUNT),
    **dict.fromkeys(("tokenizer", "dtype"), str),
}


@dataclass
class Manifest:
    """The shards of a directory, the text and settings that made them, and where an interrupted preparation continues.

    `shards` are {file, split, tokens, sha256, next} in the order in which they were finished; `next` is the position in
    the text after the shard (producer.py). A manifest, or a checkpoint with one, may come from somebody else, and a
    stream deletes the files that it names, so each field is checked: ValueError, or TypeError for an unknown one.
    """

    source: dict
    options: dict
    complete: bool = False
    documents: int = 0
    shards: list[dict] = field(default_factory=list)
    format_version: int = FORMAT_VERSION
    tokenizer: str = GPT2  # its digest
    vocab_size: int = VOCAB_SIZE
    end_of_text: int = END_OF_TEXT
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        check(vars(self), _SCHEMA)
        for split in ("train", "val"):
            for number, entry in enumerate(self.of(split)):
                if entry["file"] != (name := f"{split}_{number:06d}.bin"):
                    raise ValueError(f"shards: {entry['file']!r:.80} is not {name}")

    def save(self, directory: Path) -> None:
        """Writes the manifest into `directory`, replacing the one there atomically."""
        with writing(directory / MANIFEST, _RETRY_HINT):
            replace_file(directory / MANIFEST, json.dumps(asdict(self), indent=1).encode() + b"\n")

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """The manifest of a directory, None if it has none. Raises UserError if this version cannot read it."""
        path = directory / MANIFEST
        with reading(path, f"fix that, or delete {directory} and prepare again"):
            if not path.exists():
                return None
            manifest = cls(**json.loads(path.read_bytes()))
            if manifest.format_version != FORMAT_VERSION:
                raise ValueError(f"format {manifest.format_version}; expected {FORMAT_VERSION}")
        return manifest

    @property
    def validation(self) -> str:
        """Which part of the text was held out, if the preparation chose it: " (of the text: the end)"."""
        return f" (of the text: {self.options['validation']})" if "validation" in self.options else ""

    def tokens(self, split: str) -> int:
        """Tokens in the shards of a split."""
        return sum(shard["tokens"] for shard in self.of(split))

    def of(self, split: str) -> list[dict]:
        """The shards of a split, in order."""
        return [shard for shard in self.shards if shard["split"] == split]

    def shards_in(self, directory: Path, split: str) -> list[Shard]:
        """The shards of a split as files of `directory`, in order."""
        return [Shard(directory / entry["file"], entry["tokens"], entry["sha256"]) for entry in self.of(split)]


def check_tokenizer(name: str, shards: list[Shard], tokenizer: GPT2Tokenizer) -> None:
    """Raises UserError for shards of another tokenizer: by the manifests beside them, also if `name` is a glob; or
    without one if the largest token of a long sample is below a sixteenth of the vocabulary, as where tokens are
    characters, or beyond the vocabulary. Warns if it could be from a vocabulary other than GPT-2's, such as Llama 2's
    of 32,000."""
    for directory, shard in {shard.path.parent: shard for shard in reversed(shards)}.items():  # its first shard
        manifest = None
        with suppress(UserError):  # files that a glob names are taken as they are, whosever manifest.json this is
            manifest = Manifest.load(directory)
        if manifest and manifest.tokenizer != tokenizer.digest:
            origin = "GPT-2's tokenizer" if manifest.tokenizer == GPT2 else f"another tokenizer ({manifest.tokenizer})"
            raise UserError(
                f"{name} holds shards of {origin}, but tokenizer is {tokenizer.name}; prepare its text again in "
                "another directory, or set tokenizer to the one that made them"
            )
        sample, vocab_size = ShardReader(shard.path, shard.vocab_size).read(_SAMPLE_SIZE), tokenizer.vocab_size
        if manifest or len(sample) < _MIN_SAMPLE:
            continue
        largest = int(sample.max())
        if largest >= vocab_size:
            raise not_in_vocabulary(shard.path, largest, vocab_size)
        problem = f"{shard.path}: no token of its first {len(sample):,} is above {largest:,}"
        if largest < vocab_size // 16:
            raise UserError(
                f"{problem}, but {tokenizer.name} has {vocab_size:,} tokens: another tokenizer made them, perhaps one "
                "of characters; train on the text itself, with GPT-2's tokenizer or your own (docs/data.md)"
            )
        if tokenizer.digest == GPT2 and largest < _USUAL_MAXIMUM:
            logger.warning("data       %s, and GPT-2's text usually has larger ones: is --tokenizer theirs?", problem)


def not_in_vocabulary(path: Path, token: int, vocab_size: int) -> UserError:
    """The error for a shard with a token that is not in the vocabulary."""
    vocabulary = "GPT-2's vocabulary" if vocab_size == VOCAB_SIZE else "the tokenizer's vocabulary"
    return UserError(
        f"{path}: holds token {token}, but {vocabulary} ends at {vocab_size - 1}: it was made with another tokenizer, "
        "type or byte order; prepare it again"
    )


def find_shards(name: str, split: str, vocab_size: int = VOCAB_SIZE) -> list[Shard]:
    """The shards of `split` ("train" or "val") in the order of their file names, for a tokenizer of `vocab_size`.

    `name` is a directory with a manifest; or one without, where file names contain the split, as in
    fineweb_val_000000.bin; or such a file or a glob of them, taken as they are. Raises UserError if there are none.
    """
    directory = Path(name)
    if (manifest := Manifest.load(directory)) is None:
        paths = _files_of(name, split)
        return [Shard(path, len(ShardReader(path, vocab_size)), None, vocab_size) for path in paths]
    if not manifest.complete:
        raise UserError(f"{name}: its preparation was interrupted; run the same prepare command again to continue")
    shards = manifest.shards_in(directory, split)
    if not shards:
        raise UserError(
            f"{name}: prepared without a {split} split; delete it and prepare it again, with val_fraction above 0"
        )
    for shard in shards:
        if not shard.path.is_file():
            raise UserError(
                f"{shard.path}: listed in {MANIFEST}, but the file is gone; a streamed run deletes what it has read: "
                f"pass --streaming true, or delete {name} and prepare it again"
            )
    return shards


def _files_of(name: str, split: str) -> list[Path]:
    """The shards of a split of a directory without a manifest, or of a glob."""
    directory = Path(name)
    paths = shards_in(directory) if directory.is_dir() else map(Path, glob.glob(name, recursive=True))
    files = sorted(path for path in paths if path.is_file() and path.suffix in SUFFIXES)
    if not files:
        raise unknown_data(name, "dataset_name" if split == "train" else "val_data")
    matches = [path for path in files if split in path.name or not directory.is_dir()]
    if not matches:
        way_out = "prepare the text: python -m recipe.data.prepare --dataset_name TEXT"
        if texts := text_files(name).files:
            way_out = f"to use its text alone, name '{directory}/*{texts[0].suffix}'"
        way_out += "; or name validation files in val_data" if split == "val" else ""
        raise UserError(
            f"{name}: holds {files[0].name}, but no manifest.json and no *{split}*{files[0].suffix}; {way_out}"
        )
    return matches
