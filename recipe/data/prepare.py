"""Command: text files or a Hub data set -> token shards with a manifest.

    python -m recipe.data.prepare --train_text mine.jsonl --out data/mine
    python -m recipe.data.prepare --train_text HuggingFaceFW/fineweb-edu --dataset_config sample-10BT --out data/edu

If it is killed at any moment, the same command continues after the last finished shard and makes the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shutil
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import filelock
from tqdm import tqdm

from recipe.config import DataConfig, data_sets, parse_config
from recipe.data.documents import TextFiles
from recipe.data.producer import Producer
from recipe.data.shards import Manifest, find_shards, open_shard
from recipe.utils.errors import ExitCode, UserError, writing
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact
from recipe.utils.units import plural, si

logger = logging.getLogger("recipe.data.prepare")  # as a command this module is called __main__

LOCK = ".preparing.lock"
_BETWEEN_LINES = 60.0  # seconds


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.data.prepare",
        description="Text -> token shards.",
        epilog="--config and all other flags are those of a run: recipe/train.py --help, under Data.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", default="", help="directory of the shards (default: where a run looks for them)")
    parser.add_argument(
        "--format",
        choices=("llm.c", "nanogpt"),
        default="llm.c",
        help="nanogpt: write train.bin and val.bin, the tokens without a header, besides the shards",
    )
    asked, flags = parser.parse_known_args(argv)
    set_up_logging()
    try:
        sets = [one.data for one in data_sets(parse_config(flags).data)]
        if not any(data.train_text for data in sets):
            find_shards(name := sets[0].dataset_name, "train")  # raises where there is nothing of that name
            raise UserError(f"dataset_name {name} holds shards, which need no preparing; name text")
        if asked.out and len(sets) > 1:
            raise UserError(f"--out is one directory, and dataset_name lists {len(sets)} data sets; remove --out")
        for data in sets:
            if data.train_text:  # else they are shards
                out = Path(asked.out or data.dataset_name)
                manifest = prepare(dataclasses.replace(data, dataset_name=str(out)))
                if asked.format == "nanogpt":
                    write_nanogpt(out, manifest)
    except (UserError, OSError) as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues after the last finished shard", file=sys.stderr)
        return ExitCode.LEFT_AT_ONCE
    return ExitCode.DONE


def prepare(data: DataConfig, threads: int | None = None) -> Manifest:
    """Makes the shards of `train_text` in the directory `dataset_name`, or finishes making them; returns the manifest.

    End-of-text stands before each document; empty documents are skipped. `threads` tokenize, by default one a core.
    Raises UserError.
    """
    out = Path(data.dataset_name)
    producer = Producer(data, threads)
    if manifest := producer.finished():
        logger.info("data       %s is complete already: %s", out, _summary(manifest))
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        manifest = producer.open()
        continuing = f", continuing after {len(manifest.shards)} finished shards" if manifest.shards else ""
        logger.info("data       tokenizing %s into %s%s", producer.source, out, continuing)
        start = time.monotonic()
        with _progress(producer):
            producer.everything()
        seconds = time.monotonic() - start
    speed = producer.made / seconds / 1e6
    logger.info("data       %s in %.1f s (%.2f M tokens/s)", _summary(manifest), seconds, speed)
    return manifest


def write_nanogpt(out: Path, manifest: Manifest) -> None:
    """Writes the tokens of each split into one file as nanoGPT reads them: uint16 without a header."""
    for split in dict.fromkeys(shard["split"] for shard in manifest.shards):
        part, path = out / f"{split}.bin.part", out / f"{split}.bin"
        with writing(path, "free some disk"), open(part, "wb") as file:
            for shard in manifest.shards_in(out, split):
                open_shard(shard).read().tofile(file)
        part.replace(path)
        logger.info("data       %s has the same tokens for nanoGPT", path)


def must_prepare(data: DataConfig) -> bool:
    """Whether local text is to be prepared before a run.

    Raises UserError where the directory holds shards of another text, or made with other settings; and for a Hub data
    set that is not prepared, which takes hours, too long for the other processes to wait.
    """
    if not data.train_text:
        return False
    producer = Producer(data)
    if producer.finished():
        return False
    if not isinstance(producer.source, TextFiles):
        raise UserError(
            f"{data.train_text}, on the Hub because this disk has no such path, is not prepared in {data.dataset_name} "
            "yet; first run python -m recipe.data.prepare with the same flags, or pass --streaming true, to tokenize "
            "while the model trains"
        )
    return True


@contextmanager
def alone_in(out: Path, seconds: float = 0) -> Generator[None, None, None]:
    """Holds the lock of a directory of shards, for which it waits `seconds`: two producers would overwrite each other's
    open shards. The lock ends with its process. Raises UserError."""
    try:
        with filelock.FileLock(out / LOCK, timeout=seconds):
            yield
    except filelock.Timeout:
        raise UserError(
            f"{out}: another process is making shards in this directory; wait for it, or give another directory"
        ) from None


@contextmanager
def _progress(producer: Producer) -> Generator[None, None, None]:
    """A bar on a terminal, else a line a minute: of the bytes that were read, or of the tokens of a Hub's data set."""
    source, start = producer.source, time.monotonic()
    unit, logged = "B" if source.size else " tokens", start
    ncols, nrows = shutil.get_terminal_size()  # which has sizes for a terminal of none, where tqdm would be silent
    shape = {"ncols": ncols, "nrows": nrows}
    with tqdm(total=source.size or None, unit=unit, unit_scale=True, disable=None, **shape) as bar:

        def show() -> None:
            nonlocal logged
            now, tokens = time.monotonic(), f"{si(producer.made, 'B')} tokens"
            bar.set_postfix_str(tokens if source.size else "", refresh=False)
            bar.update((source.position if source.size else producer.made) - bar.n)
            if bar.disable and now - logged >= _BETWEEN_LINES:
                logged = now
                part = f"{100 * source.position / source.size:.0f} % of {si(source.size)}B, " if source.size else ""
                logger.info("data       %s%s, %s tokens/s", part, tokens, si(producer.made / (now - start)))

        producer.show = show
        yield


def _summary(manifest: Manifest) -> str:
    tokens = ", ".join(f"{manifest.tokens(split):,} {split}" for split in ("train", "val"))
    return (
        f"{len(manifest.shards)} shards, {tokens} tokens{manifest.validation}, {plural(manifest.documents, 'document')}"
    )


if __name__ == "__main__":
    sys.exit(main())
