"""Command: text files or a Hub data set -> token shards with a manifest.

    python -m recipe.data.prepare --train_text mine.jsonl --out data/mine
    python -m recipe.data.prepare --train_text HuggingFaceFW/fineweb-edu --dataset_config sample-10BT --out data/edu

Killed at any moment, the same command continues after the last finished shard and makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock
from tqdm import tqdm

from recipe.catalog import TEXT_SUFFIXES
from recipe.cli import Parser
from recipe.config import DataConfig, parse_config
from recipe.data.dataset import too_short
from recipe.data.prepare.documents import TextFiles
from recipe.data.prepare.producer import TextProducer, check_own_directory, check_same, open_text, options_of
from recipe.data.prepare.tokenize import Workers
from recipe.data.shards import Manifest
from recipe.errors import ExitCode, UserError
from recipe.log import set_up_logging
from recipe.redaction import redact

logger = logging.getLogger(__name__)

LOCK = ".preparing.lock"


@dataclass(frozen=True)
class PrepareConfig:
    """What the command takes beside the fields of a recipe's data."""

    out: str = dataclasses.field(default="", metadata={"help": "directory of the shards (default: one under data/)"})
    config: str = dataclasses.field(default="", metadata={"help": "recipe YAML whose data are prepared"})
    max_documents: int = dataclasses.field(default=0, metadata={"help": "stop after so many documents (0: all)"})
    workers: int = dataclasses.field(default=os.cpu_count() or 1, metadata={"help": "threads that tokenize"})
    processes: int = dataclasses.field(
        default=0, metadata={"help": "processes that tokenize, instead of threads: faster where there are many cores"}
    )


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    set_up_logging()
    parser = Parser((PrepareConfig, DataConfig), description="Text -> token shards.", allow_abbrev=False)
    try:
        recipe = parser.parse_known_args(argv)[0].config
        flags = [f"--{k}={v}" for k, v in vars(parse_config(["--config", recipe]).data).items()] if recipe else []
        asked, data = parser.parse([*flags, *argv])
        if not data.train_text:
            kinds = ", ".join(TEXT_SUFFIXES)
            raise UserError(f"train_text is empty; give a Hub data set, or a file, quoted glob or directory of {kinds}")
        if asked.out:
            data = dataclasses.replace(data, dataset_name=asked.out)
        if not data.dataset_name:
            raise UserError("out is empty; give the directory of the shards, such as --out data/mine")
        prepare(data, Workers(asked.workers, asked.processes), asked.max_documents or None)
    except (UserError, OSError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues after the last finished shard", file=sys.stderr)
        return ExitCode.LEFT_AT_ONCE
    return ExitCode.DONE


def prepare(data: DataConfig, workers: Workers | None = None, max_documents: int | None = None) -> Manifest:
    """Makes the shards of `train_text` in the directory `dataset_name`, or finishes making them; returns the manifest.

    End-of-text stands before each document; empty documents are skipped. Raises UserError.
    """
    _check(data, workers or Workers(), max_documents)
    out = Path(data.dataset_name)
    manifest = Manifest.load(out)
    if manifest and manifest.complete:
        text = open_text(data)
        check_same(out, manifest, {**text.identity(), **options_of(data, text, max_documents)})
        logger.info("data       %s is complete already: %s", out, _summary(manifest))
        return manifest
    check_own_directory(out)
    producer = TextProducer(data, out, workers, max_documents)
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        manifest = producer.open()
        gone = [e["file"] for e in manifest.shards if not (out / e["file"]).exists()]
        if gone:
            raise UserError(
                f"{out}: {gone[0]} is gone; a streamed run deletes what it has read: give another directory, or delete "
                f"{out}"
            )
        continuing = f", continuing after {len(manifest.shards)} finished shards" if manifest.shards else ""
        logger.info("data       tokenizing %s into %s, %s%s", producer.text, out, producer.workers, continuing)
        start, before = time.monotonic(), manifest.tokens("train") + manifest.tokens("val")
        with tqdm(unit=" tokens", unit_scale=True, disable=None) as bar:
            for tokens in producer.everything():
                bar.update(tokens)
        seconds = time.monotonic() - start
        rate = (manifest.tokens("train") + manifest.tokens("val") - before) / seconds
    logger.info("data       %s in %.1f s (%.2f M tokens/s)", _summary(manifest), seconds, rate / 1e6)
    train, val = manifest.tokens("train"), manifest.tokens("val")
    if 0 < val <= data.sequence_length:
        logger.warning("warning    %s: %s", out, too_short(train, val, data.sequence_length))
    return manifest


def _check(data: DataConfig, workers: Workers, max_documents: int | None) -> None:
    if not 0 <= data.val_fraction < 1:
        raise UserError(f"val_fraction {data.val_fraction}: must be at least 0 and below 1")
    counts = {"shard_tokens": data.shard_tokens, "first_shard_tokens": data.first_shard_tokens}
    counts |= {"workers": workers.threads, "max_documents": 1 if max_documents is None else max_documents}
    for name, value in counts.items():
        if value < 1:
            raise UserError(f"{name} {value}: must be at least 1")
    for name, value in (("processes", workers.processes), ("val_documents", data.val_documents)):
        if value < 0:
            raise UserError(f"{name} {value}: must not be negative")
    if data.shard_tokens >= 1 << 31:
        raise UserError(f"shard_tokens {data.shard_tokens}: a shard's header counts to {(1 << 31) - 1}")


def prepare_for_training(data: DataConfig) -> None:
    """Prepares `train_text`, if its files are here, into the directory `dataset_name`, unless that was done before.

    Raises UserError where the directory holds shards of another text, or made with other settings; and for a Hub data
    set that is not prepared, which takes hours that no other process should wait.
    """
    if not data.train_text:
        return
    out = Path(data.dataset_name)
    text, manifest = open_text(data), Manifest.load(out)
    if manifest and manifest.complete:
        check_same(out, manifest, {**text.identity(), **options_of(data, text, manifest.options.get("max_documents"))})
    elif isinstance(text, TextFiles):
        prepare(data)
    else:
        raise UserError(
            f"{out}: not prepared yet; first run: {command(data)}\n"
            "       or pass --streaming true, which tokenizes while the model trains"
        )


def command(data: DataConfig) -> str:
    """The command that prepares what a recipe's data name."""
    default = vars(DataConfig())
    ignored = ("train_text", "dataset_name", "val_data", "streaming", "disk_budget_gb", "sequence_length")
    changed = {k: v for k, v in vars(data).items() if k not in ignored and v != default[k]}
    flags = {"train_text": data.train_text, "out": data.dataset_name} | changed
    words = [word for k, v in flags.items() for word in (f"--{k}", str(v))]
    return shlex.join(["python", "-m", "recipe.data.prepare", *words])


@contextmanager
def alone_in(out: Path, seconds: float = 0) -> Iterator[None]:
    """Holds the lock of a directory of shards, for which it waits `seconds`: two producers would overwrite each other's
    open shards. The lock ends with its process. Raises UserError."""
    lock = filelock.FileLock(out / LOCK, timeout=seconds)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(
            f"{out}: another process is making shards in this directory; wait for it, or give another directory"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _summary(manifest: Manifest) -> str:
    tokens = ", ".join(f"{manifest.tokens(split):,} {split}" for split in ("train", "val"))
    documents = f"{manifest.documents:,} document{'' if manifest.documents == 1 else 's'}"
    return f"{len(manifest.shards)} shards, {tokens} tokens, {documents}"
