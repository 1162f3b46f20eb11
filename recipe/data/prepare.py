"""Command: text files or a Hub data set -> token shards with a manifest.

    python -m recipe.data.prepare --dataset_name mine.jsonl
    python -m recipe.data.prepare --train_text HuggingFaceFW/fineweb-edu --dataset_name data/edu

If it is killed at any moment, the same command continues after the last finished shard and makes the same bytes.
"""

import logging
import os
import sys
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import filelock
from tqdm import tqdm

from recipe.config import DataConfig, data_sets, parse_config
from recipe.config.catalog import MADE_HERE
from recipe.data.documents import TextFiles
from recipe.data.producer import Producer
from recipe.data.shards import Manifest, find_shards
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.errors import ExitCode, UserError, in_words, writing
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact
from recipe.utils.units import plural, si

logger = logging.getLogger("recipe.data.prepare")  # run as a command, this module is __main__

BETWEEN_BARS_S = 60.0  # seconds


def main(argv: list[str] | None = None) -> int:
    """Runs the command, which takes the flags of a run; returns its exit code."""
    set_up_logging()
    try:
        data_configs = [entry.data for entry in data_sets(parse_config(argv).data)]
        if not (texts := [text for data in data_configs for text in texts_of(data)]):
            find_shards(name := data_configs[0].dataset_name, "train")  # raises if there is nothing of that name
            raise UserError(f"dataset_name {name} holds shards, which need no preparation; name text")
        for data in data_configs:
            if data.val_data and not data.val_text:  # shards: raises if there are none, before hours of preparation
                find_shards(data.val_data, "val", open_tokenizer(data.tokenizer).vocab_size)
        for text in texts:
            prepare(text)
    except (UserError, OSError) as error:
        print(f"error: {redact(in_words(error))}", file=sys.stderr)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues after the last finished shard", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


def texts_of(data: DataConfig, *, streamed: bool = False) -> list[DataConfig]:
    """What `prepare` makes of a data set: its validation text, first since it is short and may be missing, and its
    training text, unless it is `streamed`."""
    texts = [data] if data.train_text and not streamed else []
    if data.val_text:  # with val_data, nothing of a text is held out
        names = {"train_text": data.val_text, "dataset_name": os.path.dirname(data.val_data)}
        texts.insert(0, replace(data, **names, dataset_config="", dataset_split="train"))
    return texts


def prepare(data: DataConfig) -> Manifest:
    """Makes the shards of `train_text` in the directory `dataset_name`, or finishes them; returns the manifest. Raises
    UserError."""
    out = Path(data.dataset_name)
    producer = Producer(data)
    if manifest := producer.finished():
        logger.info("data       %s is complete already: %s", out, _summary(manifest))
        return manifest
    with writing(out, "name another directory with --train_text TEXT --dataset_name DIRECTORY"):
        out.mkdir(parents=True, exist_ok=True)
    with directory_lock(out):
        if manifest := producer.finished():
            logger.info("data       the other process has made %s", _summary(manifest))
            return manifest
        manifest = producer.open()
        continuing = f", continuing after {plural(len(manifest.shards), 'finished shard')}" if manifest.shards else ""
        logger.info("data       tokenizing %s into %s%s", producer.source, out, continuing)
        start = time.monotonic()
        with _progress(producer):
            producer.everything()
        seconds = time.monotonic() - start
    speed = si(producer.made / seconds, "B")
    logger.info("data       %s in %.1f s (%s tokens/s)", _summary(manifest), seconds, speed)
    return manifest


def must_prepare(data: DataConfig) -> bool:
    """Whether local text must be prepared before a run. Raises UserError if the directory holds shards of another text
    or with other settings, and for a Hub data set: it takes hours, too long for the other processes to wait."""
    producer = Producer(data)
    if producer.finished():
        return False
    if not isinstance(producer.source, TextFiles):
        raise UserError(
            f"{data.train_text} (on the Hub: this disk has no such path) is not prepared in {data.dataset_name} yet; "
            "run python -m recipe.data.prepare with the same flags first, or pass --streaming true to tokenize while "
            "the model trains"
        )
    return True


def directory_lock(out: Path, seconds: float | None = None) -> AbstractContextManager[object]:
    """Context: the lock of a directory of shards, already acquired: two producers would overwrite each other's
    unfinished shards. The lock ends with its process. Waits for it without a limit, or up to `seconds` and then raises
    UserError."""
    lock, other = filelock.FileLock(out / MADE_HERE), "another process is making shards in this directory"
    with suppress(filelock.Timeout):
        return lock.acquire(timeout=seconds or 0)
    if seconds is not None:
        way_out = "wait for it, or give another directory: --train_text TEXT --dataset_name DIRECTORY"
        raise UserError(f"{out}: {other}; {way_out}")
    logger.info("waiting    %s: %s", out, other)
    return lock.acquire()


@contextmanager
def _progress(producer: Producer) -> Generator[None, None, None]:
    """A progress bar of the bytes read, for each split, since both may read all of the text; or of the tokens of a Hub
    data set. Without a terminal, once a minute."""
    source, interval = producer.source, 0.1 if sys.stderr.isatty() else BETWEEN_BARS_S
    unit, pace = "B" if source.size else " tokens", {"mininterval": interval, "delay": interval, "miniters": 0}
    with ExitStack() as stack:
        bars: dict[str, tqdm] = {}

        def show(split: str) -> None:
            name = split if source.size else ""
            if name not in bars:
                stack.close()
                bar = tqdm(desc=name or None, total=source.size or None, unit=unit, unit_scale=True, **pace)
                bars[name] = stack.enter_context(bar)
            bar = bars[name]
            bar.set_postfix_str(f"{si(producer.made, 'B')} tokens" if source.size else "", refresh=False)
            bar.update((source.position if source.size else producer.made) - bar.n)

        producer.show = show
        yield


def _summary(manifest: Manifest) -> str:
    train, val = manifest.tokens("train"), manifest.tokens("val")
    sizes = plural(len(manifest.shards), "shard"), plural(manifest.documents, "document")
    tokens = f"{train:,} training and {val:,} validation tokens{manifest.validation}" if val else f"{train:,} tokens"
    return f"{' of '.join(sizes)}: {tokens}"


if __name__ == "__main__":
    sys.exit(main())
