"""What stands before the first step: the data opened, the checkpoint found, the model built."""

import hashlib
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from recipe.checkpoint.format import Checkpoint, load_checkpoint
from recipe.checkpoint.run_dir import check_same_run, open_run
from recipe.cli import wrapped
from recipe.config import ROOT, Batch, Config, DataConfig
from recipe.data import tokenizer
from recipe.data.dataset import LocalSource, check_data, check_disjoint
from recipe.data.prepare.pipeline import prepare_for_training
from recipe.data.shards import Manifest, Shard, describe_shards, find_shards
from recipe.data.streaming.status import STATUS, read_json
from recipe.data.streaming.stream import Builder, StreamedSource, Waiting
from recipe.engine.base import Engine
from recipe.engine.launch import restarts
from recipe.errors import UserError
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.redaction import redacted

logger = logging.getLogger(__name__)

# Of a machine rather than of the run: where things lie, and how much memory there is.
_OF_A_MACHINE = {"config", "dataset_name", "val_data", "train_text", "init_from", "output_dir", "device_memory_gb"}


def check_alike(config: Config, engine: Engine) -> None:
    """Raises UserError, on all processes, where one was launched with other settings or other code than the main one:
    each would train something else, or wait for ever. And where a restart would start over."""
    if config.run.fresh and (limit := restarts()[0]):
        raise UserError(
            f"--fresh would start over at each of the {limit} restarts that --max_restarts allows; leave out one of "
            f"them, or move {config.run.output_dir} away"
        )
    mine = {k: v for k, v in redacted(config.flat()).items() if k not in _OF_A_MACHINE}
    mine |= {"precision": engine.precision, "torch": torch.__version__, "code of recipe/": _digest_of_code()}
    others = engine.from_main(mine)
    differing = [f"{k} {mine.get(k)!r}, there {others.get(k)!r}" for k in mine | others if mine.get(k) != others.get(k)]
    if engine.anywhere(bool(differing)):
        raise UserError(
            f"this machine was launched otherwise than the main process: {'; '.join(differing)}. Launch the same "
            "command from the same code on every machine"
            if differing
            else "another machine was launched otherwise than the main process; what it says there is the cause"
        )


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for path in sorted((ROOT / "recipe").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def open_data(
    config: Config,
    batch: Batch,
    engine: Engine,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
    closing: ExitStack,
) -> tuple[LocalSource, LocalSource]:
    """Training and validation data; a source on this disk is prepared now, if it was not before. What works in the
    background is ended by `closing`. Raises UserError."""
    data, cut = config.data, (config.data.sequence_length, batch.sequences, config.run.seed)
    if (data.streaming or data.train_text.startswith("hf://")) and not _all_there(data):
        train, val_shards = _open_stream(config, cut, engine, checkpoint, say, closing)
    else:
        if not data.train_text.startswith("hf://"):
            error = ""
            with engine.main_first():
                try:
                    prepare_for_training(data, say)
                except (UserError, OSError) as e:  # raised below, where no other process waits for this one any more
                    error = str(e)
            if engine.anywhere(bool(error)):
                raise UserError(error or "the data could not be prepared on another process, which says why")
        train_shards = find_shards(data.dataset_name, "train")
        val_shards = find_shards(data.val_data or data.dataset_name, "val")
        check_data(train_shards, val_shards, *cut[:2])
        train = LocalSource(train_shards, *cut)
        say(f"data       {data.dataset_name}: {describe_shards(train_shards)}; held out {describe_shards(val_shards)}")
    closing.callback(train.close)
    validation = LocalSource(val_shards, *cut)
    closing.callback(validation.close)
    return train, validation


def _open_stream(
    config: Config,
    cut: tuple,
    engine: Engine,
    checkpoint: Checkpoint | None,
    say: Callable[[str], None],
    closing: ExitStack,
) -> tuple[StreamedSource, list[Shard]]:
    """Starts this machine's builder and waits for its first shards."""
    data, out = config.data, Path(config.data.dataset_name)
    earlier = checkpoint.state["data"].get("manifest") if checkpoint else None
    aloud = _above_the_bar if engine.local_rank == 0 else say  # each machine has a stream of its own
    waiting, error, version = Waiting(out, aloud), "", {}

    def start(commit: str | None) -> dict:
        builder = Builder(data, engine.local_world, commit, earlier)
        closing.callback(builder.close)
        what = " ".join(filter(None, (data.train_text, data.dataset_config)))
        say(f"data       streaming {what} into {out}, at most {builder.budget / 1e9:.3g} GB")
        return waiting.until(lambda: read_json(out / STATUS).get("version"), "the data set's version")

    # The main process's builder fixes the data set's version, which those of other machines are given.
    try:
        if engine.is_main:
            version = start(None)
    except (UserError, OSError) as e:
        error = str(e)
    error, version = engine.from_main((error, version))
    try:
        if engine.local_rank == 0 and not engine.is_main and not error:
            start(version.get("commit"))
    except (UserError, OSError) as e:
        error = str(e)
    if engine.anywhere(bool(error)):  # and nobody goes on to read the status of an earlier run
        raise UserError(error or "the stream of another machine did not start; what it says there is the cause")
    waiting.until(lambda: read_json(out / STATUS).get("opened"), "the validation shards")
    waiting.until(lambda: Manifest.load(out).of("train"), "the first training shard")
    manifest = Manifest.load(out)
    if data.val_data:
        val_shards = find_shards(data.val_data, "val")
    elif not manifest.of("val"):
        raise UserError(f"{data.train_text} has no validation shards; name some with val_data")
    else:
        val_shards = [Shard(out / e["file"], e["tokens"], e["sha256"]) for e in manifest.of("val")]
    first_step, steps = checkpoint.step if checkpoint else 0, config.optimizer.max_steps
    train = StreamedSource(out, *cut, rank=engine.local_rank, first_step=first_step, steps=steps, say=aloud)
    check_disjoint(train.shards, val_shards)
    return train, val_shards


def _all_there(data: DataConfig) -> bool:
    """Whether all shards of what would be streamed are on this disk: prepared before, or small enough to stay."""
    manifest = Manifest.load(Path(data.dataset_name))
    return bool(manifest and manifest.complete) and all(
        (Path(data.dataset_name) / e["file"]).exists() for e in manifest.shards
    )


def _above_the_bar(line: str) -> None:
    with suppress(OSError, ValueError):
        tqdm.write(wrapped(line))
        sys.stdout.flush()


def find_checkpoint(config: Config, engine: Engine, closing: ExitStack) -> Checkpoint | None:
    """The newest whole checkpoint of this run, chosen and verified by the main process for all of them, in a directory
    that is this run's alone until `closing`. A collective call. Raises UserError."""
    chosen, error = None, ""
    if engine.is_main:
        try:
            chosen = closing.enter_context(open_run(config)).newest_checkpoint()
        except UserError as e:
            error = str(e)
    chosen, error = engine.from_main((chosen, error))
    if error:
        raise UserError(error)
    if chosen is None:
        return None
    if engine.anywhere(not chosen.exists()):
        raise UserError(f"{chosen} is not on every node: output_dir must be on a file system that all of them see")
    checkpoint = load_checkpoint(chosen)
    check_same_run(checkpoint.state, redacted(config.flat()), Path(config.run.output_dir))
    if checkpoint.step < config.optimizer.max_steps:
        logger.info("resume     from step %d (%s)", checkpoint.step, chosen)
    return checkpoint


def model_files(model: GPT2LMHeadModel) -> dict[str, bytes]:
    """What transformers needs beside the weights, by file name: configuration and tokenizer."""
    with TemporaryDirectory() as directory:
        model.save_config(Path(directory))
        tokenizer.save_tokenizer(Path(directory), model.config.n_positions)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}
