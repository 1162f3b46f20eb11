"""Command: text files or a Hub data set -> token shards with a manifest.

    python -m recipe.data.prepare --source recipe/data/tiny_shakespeare.txt --out data/shakespeare --val_fraction 0.1
    python -m recipe.data.prepare --source HuggingFaceFW/fineweb-edu --name sample-10BT --out data/fineweb-edu-10bt

Killed at any moment, the same command goes on after the last finished shard and makes the same bytes.
"""

from __future__ import annotations

import dataclasses
import fcntl
import glob
import hashlib
import os
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from recipe.config import UserError, parse_config
from recipe.data.documents import Document, HubText, TextFiles, open_text
from recipe.data.shards import DTYPE, Manifest
from recipe.data.tokenizer import END_OF_TEXT, encode
from recipe.data.writer import ShardWriter

if TYPE_CHECKING:
    from recipe.config import DataConfig

BATCH = 1 << 17  # characters of documents that a thread takes at once, or one longer piece


def _opt(default, help: str):
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class PrepareOptions:
    source: str = _opt(
        dataclasses.MISSING, "file, quoted glob or directory of .txt, .jsonl[.gz|.bz2], .parquet; or Hub id"
    )
    out: str = _opt(dataclasses.MISSING, "directory of the shards")
    name: str | None = _opt(None, "subset of a Hub data set, such as sample-10BT")
    split: str = _opt("train", "split of a Hub data set")
    revision: str | None = _opt(None, "branch, tag or commit of a Hub data set")
    text_column: str = _opt("text", "column, or key of the JSON objects, that holds the text")
    val_fraction: float = _opt(
        0.01, "share of documents held out for validation; of a single document, its last tokens"
    )
    val_documents: int | None = _opt(None, "hold out the first so many documents instead")
    max_documents: int | None = _opt(None, "stop after so many documents")
    shard_tokens: int = _opt(100_000_000, "tokens a shard")
    seed: int = _opt(1337, "chooses the documents held out")
    workers: int = _opt(os.cpu_count() or 1, "threads that tokenise")


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 done, 2 a mistake of the user's."""
    from transformers import HfArgumentParser

    argv = list(sys.argv[1:] if argv is None else argv)
    parser = HfArgumentParser(PrepareOptions, description="Text or a Hub data set -> token shards.", allow_abbrev=False)
    parser.epilog = "--config RECIPE.yaml stands for the source, out and val_fraction that a recipe names."
    try:
        if "--config" in argv:
            at = argv.index("--config")
            argv[at : at + 2] = _flags(_options(parse_config(argv[at : at + 2]).data))
        options = PrepareOptions(**vars(parser.parse_args(argv)))
        prepare(options)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on after the last finished shard", file=sys.stderr)
        return 130
    return 0


def prepare(options: PrepareOptions, say: Callable[[str], None] = print) -> Manifest:
    """Make the shards of `options.source` in `options.out`, or finish making them; returns the manifest.

    End-of-text stands before each document; empty documents are left out. Raises UserError.
    """
    _check(options)
    text = open_text(options.source, options.name, options.split, options.revision, options.text_column)
    out = Path(options.out)
    names = ("val_fraction", "val_documents", "max_documents", "shard_tokens", "seed")
    chosen = {name: getattr(options, name) for name in names}
    wanted = {**text.identity(), **chosen}
    manifest = Manifest.load(out)
    if manifest and manifest.complete:
        _check_same(out, manifest, wanted)
        say(f"{out} is complete already: {_summary(manifest)}")
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    with _alone_in(out):
        manifest = Manifest.load(out)
        if manifest and manifest.shards:
            _check_same(out, manifest, wanted)
            text.pin(manifest.source)
        else:
            manifest = Manifest({**text.identity(), **text.pin(None)}, chosen)
            manifest.save(out)
        going_on = f", going on after {len(manifest.shards)} finished shards" if manifest.shards else ""
        say(f"tokenising {text} into {out}, {options.workers} threads{going_on}")
        start, before = time.monotonic(), manifest.tokens("train") + manifest.tokens("val")
        _run(options, text, manifest)
        seconds = time.monotonic() - start
        rate = (manifest.tokens("train") + manifest.tokens("val") - before) / seconds
        say(f"done: {_summary(manifest)} in {seconds:.1f} s ({rate / 1e6:.2f} M tokens/s)")
    return manifest


def prepare_for_training(data: DataConfig, say: Callable[[str], None] = print) -> None:
    """Prepare `data.source`, if its files are here, into `data.data`, where there are no shards yet.

    Shards that are there are used, and differences from what `data` asks for are said. Raises UserError for a Hub
    data set that is not prepared: hours of work, which no other process should wait for.
    """
    if not data.source or glob.has_magic(data.data):
        return
    options = _options(data)
    manifest = Manifest.load(Path(options.out))
    if manifest is None and glob.glob(f"{options.out}/*.bin"):  # made by another program
        return
    try:
        text = open_text(options.source, options.name, options.split, options.revision, options.text_column)
    except UserError:
        if manifest and manifest.complete:  # shards travel without their source
            return
        raise
    if manifest and manifest.complete:
        try:
            _check_same(Path(options.out), manifest, {**text.identity(), "val_fraction": options.val_fraction})
        except UserError as difference:
            say(f"note       {str(difference).split(';')[0]}; training on them as they are")
    elif isinstance(text, TextFiles):
        prepare(options, say)
    else:
        command = shlex.join(["python", "-m", "recipe.data.prepare", *_flags(options)])
        raise UserError(f"{options.out}: not prepared yet; first run: {command}")


def _options(data: DataConfig) -> PrepareOptions:
    return PrepareOptions(
        source=data.source,
        out=data.data,
        name=data.source_name or None,
        split=data.source_split,
        text_column=data.text_column,
        val_fraction=data.val_fraction,
    )


def _flags(options: PrepareOptions) -> list[str]:
    default = PrepareOptions("", "")
    changed = {k: v for k, v in vars(options).items() if v != getattr(default, k)}
    return [word for k, v in changed.items() for word in (f"--{k}", str(v))]


def _check(options: PrepareOptions) -> None:
    if not 0 <= options.val_fraction < 1:
        raise UserError(f"--val_fraction {options.val_fraction}: must be at least 0 and below 1")
    for name in ("shard_tokens", "workers", "max_documents"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if options.shard_tokens >= 1 << 31:
        raise UserError(f"--shard_tokens {options.shard_tokens}: a shard's header counts to {(1 << 31) - 1}")


def _check_same(out: Path, manifest: Manifest, wanted: dict) -> None:
    found = {**manifest.source, **manifest.options}
    for name, value in wanted.items():
        if found.get(name) != value:
            was = f"{name} was {found.get(name)!r}, now {value!r}"
            was = "the source files have changed" if name == "files" else was
            raise UserError(f"{out} holds shards made otherwise: {was}; give another --out, or delete {out}")


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Two preparations would mix their tokens in the open shards. The lock goes with its process, however that ends."""
    directory = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise UserError(
            f"{out}: another process is preparing this directory; wait for it, or give another --out"
        ) from None
    finally:
        os.close(directory)


def _summary(manifest: Manifest) -> str:
    tokens = ", ".join(f"{manifest.tokens(split):,} {split}" for split in ("train", "val"))
    documents = f"{manifest.documents:,} document{'' if manifest.documents == 1 else 's'}"
    return f"{len(manifest.shards)} shards, {tokens} tokens, {documents}"


def _run(options: PrepareOptions, text: TextFiles | HubText, manifest: Manifest) -> None:
    out = Path(options.out)
    start = manifest.shards[-1]["next"] if manifest.shards else {"document": 0, "stream": None}
    documents = text.documents(start["document"], start["stream"])
    if options.max_documents is not None:
        documents = islice(documents, max(0, options.max_documents - start["document"]))
    first_two = list(islice(documents, 2))
    documents = chain(first_two, documents)
    single = start["document"] == 0 and len(first_two) == 1 and options.val_documents is None
    if single:
        manifest.shards.clear()  # where its validation tokens begin is known at its end only: made in one go
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(unit=" tokens", unit_scale=True, disable=None))
        writer = stack.enter_context(ShardWriter(out, manifest, options.shard_tokens))
        pieces = _tokenise(documents, options.workers, start)
        if single:
            last = _write_single(pieces, writer, out, options.val_fraction, bar)
        else:
            last = _write(pieces, writer, options, bar)
        end = {"document": max(start["document"], last + 1), "piece": 0, "tokens": 0, "stream": None}
        held_out = options.val_fraction if options.val_documents is None else options.val_documents
        for split in ["train", "val"] if held_out else ["train"]:
            if not writer.holds(split):
                raise UserError(
                    f"{text}: {end['document']} documents leave none for the {split} split; change --val_fraction or "
                    "--val_documents"
                )
        writer.finish(end)


@dataclass(frozen=True)
class _Piece:
    document: int
    number: int  # within the document
    text: str
    stream: dict | None

    def tokens(self) -> np.ndarray:
        tokens = encode(self.text)
        return np.concatenate([np.array([END_OF_TEXT], DTYPE), tokens]) if self.number == 0 else tokens


def _tokenise(documents: Iterable[Document], workers: int, start: dict) -> Iterator[tuple[_Piece, np.ndarray]]:
    """Pieces from the position `start` on and their tokens, in order, tokenised on threads a few batches ahead."""
    waiting: deque = deque()
    with ThreadPoolExecutor(workers) as pool:  # tiktoken lets go of the GIL
        try:
            for batch in _batches(documents, start):
                waiting.append((batch, pool.submit(lambda batch: [piece.tokens() for piece in batch], batch)))
                if len(waiting) > 2 * workers:
                    batch, future = waiting.popleft()
                    yield from zip(batch, future.result(), strict=True)
            for batch, future in waiting:
                yield from zip(batch, future.result(), strict=True)
        finally:
            pool.shutdown(cancel_futures=True)


def _batches(documents: Iterable[Document], start: dict) -> Iterator[list[_Piece]]:
    batch, size = [], 0
    for document in documents:
        for number, text in enumerate(document.pieces):
            if document.index == start["document"] and number < start.get("piece", 0):
                continue
            batch.append(_Piece(document.index, number, text, document.stream))
            size += len(text)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    yield batch


def _write(pieces: Iterator, writer: ShardWriter, options: PrepareOptions, bar: tqdm) -> int:
    """Hand each document's tokens to its split; returns the number of the last document."""
    last = -1
    for piece, tokens in pieces:
        last = piece.document
        split = "val" if _in_validation(last, options) else "train"
        writer.append(split, tokens, {"document": last, "piece": piece.number, "stream": piece.stream})
        bar.update(len(tokens))
    return last


def _in_validation(document: int, options: PrepareOptions) -> bool:
    if options.val_documents is not None:
        return document < options.val_documents
    digest = hashlib.blake2b(f"{options.seed} {document}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < options.val_fraction * 2**64


def _write_single(pieces: Iterator, writer: ShardWriter, out: Path, val_fraction: float, bar: tqdm) -> int:
    """A source of one document: its last `val_fraction` of tokens are the validation split."""
    path = out / "document.part"
    with open(path, "wb") as file:
        for _, tokens in pieces:
            file.write(tokens)
            bar.update(len(tokens))
    count = path.stat().st_size // DTYPE.itemsize
    if count:
        tokens = np.memmap(path, DTYPE, mode="r")
        train = count - int(count * val_fraction)
        for split, part in (("train", tokens[:train]), ("val", tokens[train:])):
            writer.append(split, part, {"document": 0, "piece": 0, "stream": None})
    path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
