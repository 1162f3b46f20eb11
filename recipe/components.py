"""What stands before the first step: the data opened, the checkpoint found, the model built."""

import hashlib
import logging
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from tqdm import tqdm

from recipe.checkpoint.format import Checkpoint, load_checkpoint
from recipe.checkpoint.run_dir import check_same_run, open_run
from recipe.cli import wrapped
from recipe.config import ROOT, Config
from recipe.data import tokenizer
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
