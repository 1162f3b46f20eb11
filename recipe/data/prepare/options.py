"""What a preparation is asked for: the same options for the command, a recipe's `make data` and a streamed run."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipe.data.hub import HubText
from recipe.data.prepare.documents import Text, names_a_file, open_files
from recipe.data.shards import Manifest
from recipe.errors import UserError

if TYPE_CHECKING:
    from recipe.config import DataConfig

HUB_VAL_DOCUMENTS = 10_000  # about 10 M tokens of FineWeb


def _opt(default, help: str):
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class PrepareOptions:
    train_text: str = _opt(
        dataclasses.MISSING, "file, quoted glob or directory of .txt, .jsonl[.gz|.bz2], .parquet; or Hub id"
    )
    out: str = _opt(dataclasses.MISSING, "directory of the shards")
    dataset_config: str | None = _opt(None, "subset of a Hub data set, such as sample-10BT")
    dataset_split: str = _opt("train", "split of a Hub data set")
    dataset_revision: str | None = _opt(None, "branch, tag or commit of a Hub data set")
    text_column: str = _opt("text", "column, or key of the JSON objects, that holds the text")
    val_fraction: float = _opt(
        0.01, "share of local documents held out for validation, by their text; of a single document, its last tokens"
    )
    val_documents: int | None = _opt(
        None, f"hold out the first so many documents instead (of a Hub data set: {HUB_VAL_DOCUMENTS:,} unless given)"
    )
    max_documents: int | None = _opt(None, "stop after so many documents")
    dedup: bool = _opt(False, "leave out documents whose text came before")
    shuffle_buffer: int = _opt(0, "shuffle the training documents in blocks of so many (0: the source's order)")
    shard_tokens: int = _opt(100_000_000, "tokens a shard")
    first_shard_tokens: int = _opt(
        10_000_000, "tokens of the first shard; each has twice the tokens of the one before, up to shard_tokens"
    )
    seed: int = _opt(1337, "chooses the documents held out, and their order")
    workers: int = _opt(os.cpu_count() or 1, "threads that tokenise")
    processes: int = _opt(0, "processes that tokenise, instead of threads: faster where there are many cores")

    def check(self) -> None:
        """Raises UserError for a value out of range."""
        if not 0 <= self.val_fraction < 1:
            raise UserError(f"--val_fraction {self.val_fraction}: must be at least 0 and below 1")
        for name in ("shard_tokens", "first_shard_tokens", "workers", "max_documents"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name} {value}: must be at least 1")
        for name in ("shuffle_buffer", "processes", "val_documents"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"--{name} {getattr(self, name)}: must not be negative")
        if self.shard_tokens >= 1 << 31:
            raise UserError(f"--shard_tokens {self.shard_tokens}: a shard's header counts to {(1 << 31) - 1}")

    def open_text(self, say: Callable[[str], None] = print) -> Text:
        """The source. Raises UserError if it cannot be one."""
        if files := open_files(self.train_text, self.text_column):
            return files
        if not names_a_file(self.train_text) and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", self.train_text):
            return HubText(
                self.train_text, self.dataset_config, self.dataset_split, self.dataset_revision, self.text_column, say
            )
        raise UserError(
            f"--train_text {self.train_text}: no file matches; give a file, a quoted glob, a directory or "
            "a Hub data set id"
        )

    def held_out(self, text: Text) -> int | None:
        """The number of documents held out, or None where val_fraction decides."""
        hub = self.val_documents is None and isinstance(text, HubText)
        return HUB_VAL_DOCUMENTS if hub else self.val_documents

    def fixed(self, text: Text) -> dict:
        """The options that decide what the shards hold, as the manifest keeps them."""
        names = (
            "val_fraction",
            "max_documents",
            "shard_tokens",
            "first_shard_tokens",
            "seed",
            "dedup",
            "shuffle_buffer",
        )
        return {name: getattr(self, name) for name in names} | {"val_documents": self.held_out(text)}

    def command(self) -> str:
        default = PrepareOptions("", "")
        changed = {k: v for k, v in vars(self).items() if v != getattr(default, k)}
        return shlex.join(["python", "-m", "recipe.data.prepare", *flags(changed)])


def flags(values: dict) -> list[str]:
    return [word for k, v in values.items() for word in (f"--{k}", str(v))]


def options_of(data: DataConfig) -> PrepareOptions:
    """What a recipe asks to be prepared."""
    return PrepareOptions(
        train_text=data.train_text,
        out=data.dataset_name,
        dataset_config=data.dataset_config or None,
        dataset_split=data.dataset_split,
        dataset_revision=data.dataset_revision or None,
        text_column=data.text_column,
        val_fraction=data.val_fraction,
        val_documents=data.val_documents or None,
        dedup=data.dedup,
        shuffle_buffer=data.shuffle_buffer,
        shard_tokens=data.shard_tokens,
        first_shard_tokens=min(data.shard_tokens, data.first_shard_tokens),
    )


def check_same(out: Path, manifest: Manifest, wanted: dict) -> None:
    """Raises UserError where the shards of `manifest` were made from another source or with other options."""
    found = {**manifest.source, **manifest.options}
    for name, value in wanted.items():
        if found.get(name) != value:
            was = f"{name} was {found.get(name)!r}, now {value!r}"
            was = "the source files have changed" if name == "files" else was
            raise UserError(f"{out} holds shards made otherwise: {was}; give another --out, or delete {out}")
