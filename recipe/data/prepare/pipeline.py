"""Command: text files or a Hub data set -> token shards with a manifest.

    python -m recipe.data.prepare --train_text mine.jsonl --out data/mine
    python -m recipe.data.prepare --train_text HuggingFaceFW/fineweb-edu --dataset_config sample-10BT --out data/edu

Killed at any moment, the same command goes on after the last finished shard and makes the same bytes.
"""

from __future__ import annotations

import fcntl
import glob
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from recipe.cli import Parser
from recipe.config import parse_config
from recipe.data.prepare.documents import Text, TextFiles
from recipe.data.prepare.options import PrepareOptions, check_same, flags, options_of
from recipe.data.prepare.select import HELD_OUT, SEEN
from recipe.data.prepare.tokenize import Selection, tokenised
from recipe.data.prepare.writer import ShardWriter
from recipe.data.shards import DTYPE, START, Manifest
from recipe.errors import UserError
from recipe.redaction import redact

if TYPE_CHECKING:
    from recipe.config import DataConfig


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 done, 2 a mistake of the user's."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(PrepareOptions, description="Text or a Hub data set -> token shards.", allow_abbrev=False)
    parser.epilog = "--config RECIPE.yaml stands for the source and all else that a recipe says of its data."
    try:
        if "--config" in argv:
            at = argv.index("--config")
            wanted = vars(options_of(parse_config(argv[at : at + 2]).data))
            argv[at : at + 2] = flags({k: v for k, v in wanted.items() if v is not None})
        (options,) = parser.parse(argv)
        prepare(options)
    except (UserError, OSError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on after the last finished shard", file=sys.stderr)
        return 130
    return 0


def prepare(options: PrepareOptions, say: Callable[[str], None] = print) -> Manifest:
    """Make the shards of `options.train_text` in `options.out`, or finish making them; returns the manifest.

    End-of-text stands before each document; empty documents are left out. Raises UserError.
    """
    options.check()
    text = options.open_text(tqdm.write if say is print else say)
    out = Path(options.out)
    manifest = Manifest.load(out)
    if manifest and manifest.complete:
        check_same(out, manifest, {**text.identity(), **options.fixed(text)})
        say(f"{out} is complete already: {_summary(manifest)}")
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        manifest = open_manifest(options, text, out)
        gone = [e["file"] for e in manifest.shards if not (out / e["file"]).exists()]
        if gone and manifest.position()["document"]:
            raise UserError(
                f"{out}: {gone[0]} is gone; a streamed run deletes what it has read: give another --out, or delete "
                f"{out}"
            )
        going_on = f", going on after {len(manifest.shards)} finished shards" if manifest.shards else ""
        crew = f"{options.processes} processes" if options.processes else f"{options.workers} threads"
        say(f"tokenising {text} into {out}, {crew}{going_on}")
        start, before = time.monotonic(), manifest.tokens("train") + manifest.tokens("val")
        _run(options, text, manifest)
        seconds = time.monotonic() - start
        rate = (manifest.tokens("train") + manifest.tokens("val") - before) / seconds
        say(f"done: {_summary(manifest)} in {seconds:.1f} s ({rate / 1e6:.2f} M tokens/s)")
    return manifest


def open_manifest(options: PrepareOptions, text: Text, out: Path) -> Manifest:
    """The manifest of `out` that goes on, its source fixed to the version it began with, or a new one. Raises UserError
    where it was made otherwise."""
    manifest = Manifest.load(out)
    if manifest and manifest.shards:
        check_same(out, manifest, {**text.identity(), **options.fixed(text)})
        text.pin(manifest.source)
        return manifest
    for leftover in (HELD_OUT, SEEN):
        (out / leftover).unlink(missing_ok=True)
    manifest = Manifest({**text.identity(), **text.pin(None)}, options.fixed(text))
    manifest.save(out)
    return manifest


def prepare_for_training(data: DataConfig, say: Callable[[str], None] = print) -> None:
    """Prepare `data.train_text`, if its files are here, into `data.dataset_name`, where there are no shards yet.

    Shards that are there are used, and differences from what `data` asks for are said. Raises UserError for a Hub
    data set that is not prepared: hours of work, which no other process should wait for.
    """
    if not data.train_text or glob.has_magic(data.dataset_name):
        return
    options = options_of(data)
    manifest = Manifest.load(Path(options.out))
    if manifest is None and glob.glob(f"{options.out}/*.bin"):  # made by another program
        return
    try:
        text = options.open_text()
    except UserError:
        if manifest and manifest.complete:  # shards travel without their source
            return
        raise
    if manifest and manifest.complete:
        try:
            check_same(Path(options.out), manifest, {**text.identity(), **options.fixed(text)})
        except UserError as difference:
            say(f"note       {str(difference).split(';')[0]}; training on them as they are")
    elif isinstance(text, TextFiles):
        prepare(options, say)
    else:
        raise UserError(
            f"{options.out}: not prepared yet; first run: {options.command()}\n"
            "       or pass --streaming true, which tokenises while the model trains"
        )


@contextmanager
def alone_in(out: Path) -> Iterator[int]:
    """Two preparations would mix their tokens in the open shards. The lock goes with its process, and those it gave the
    file descriptor to, however they end."""
    directory = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield directory
    except BlockingIOError:
        raise UserError(
            f"{out}: another process is making shards in this directory; wait for it, or give another directory"
        ) from None
    finally:
        os.close(directory)


def _summary(manifest: Manifest) -> str:
    tokens = ", ".join(f"{manifest.tokens(split):,} {split}" for split in ("train", "val"))
    documents = f"{manifest.documents:,} document{'' if manifest.documents == 1 else 's'}"
    return f"{len(manifest.shards)} shards, {tokens} tokens, {documents}"


def _run(options: PrepareOptions, text: Text, manifest: Manifest) -> None:
    out = Path(options.out)
    selection = Selection(options, text, out)
    start = manifest.position()
    single = (
        selection.val_documents is None
        and start["document"] == 0
        and len(list(islice(selection.source.documents(), 2))) == 1
    )
    if single:
        manifest.shards.clear()  # where its validation tokens begin is known at its end only: made in one go
    with ExitStack() as stack:
        bar = stack.enter_context(tqdm(unit=" tokens", unit_scale=True, disable=None))
        writer = ShardWriter(out, manifest, options.shard_tokens, options.first_shard_tokens, selection.commit)
        stack.enter_context(writer)
        if single:
            _write_single(text, writer, options, bar)
            end = {**START, "document": 1}
        else:
            end = _write(selection, start, writer, bar)
        held_out = options.val_fraction if selection.val_documents is None else selection.val_documents
        for split in ["train", "val"] if held_out else ["train"]:
            if not writer.holds(split):
                raise UserError(
                    f"{text}: {end['document']} documents leave none for the {split} split; change --val_fraction or "
                    "--val_documents"
                )
        writer.finish(end)


def _write(selection: Selection, start: dict, writer: ShardWriter, bar: tqdm) -> dict:
    """Hand each document's tokens to its split; returns the position after the last document."""
    end, in_front = start, selection.val_documents is not None
    for piece, tokens in selection.pieces(start):
        if in_front and piece.split == "train":  # the documents held out stood in front, and are whole
            selection.held_out.save()
            writer.commit_rest("val", piece.position(0))
            in_front = False
        writer.append(piece.split, tokens, piece.position(0))
        end = {**START, "document": piece.document + 1}
        bar.update(len(tokens))
    return end


def _write_single(text: Text, writer: ShardWriter, options: PrepareOptions, bar: tqdm) -> None:
    """A source of one document: its last `val_fraction` of tokens are the validation split."""
    path = writer.out / "document.part"
    with open(path, "wb") as file:
        for _, tokens in tokenised(text.documents(), lambda _: "train", START, options.workers, options.processes):
            file.write(tokens)
            bar.update(len(tokens))
    count = path.stat().st_size // DTYPE.itemsize
    if count:
        tokens = np.memmap(path, DTYPE, mode="r")
        train = count - int(count * options.val_fraction)
        for split, part in (("train", tokens[:train]), ("val", tokens[train:])):
            writer.append(split, part, START)
    path.unlink()
