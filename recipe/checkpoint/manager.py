"""Saves what the loop drives: its state, taken on every process, and written in the background by the main one."""

import errno
import logging
import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from recipe.checkpoint.format import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    newest_intact,
    prune,
    save_checkpoint,
    step_of,
)
from recipe.checkpoint.provenance import about
from recipe.checkpoint.run_dir import DirectoryLost, RunDirectory
from recipe.config import Config
from recipe.data.tokenizer import GPT2Tokenizer, open_tokenizer
from recipe.engine.strategy import Strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import steps_taken
from recipe.utils.errors import UserError, first_line, writing
from recipe.utils.redaction import redacted

logger = logging.getLogger(__name__)
RETRY_WINDOW_S, RETRY_PAUSE_S = 60.0, 5.0  # in which the last save of a run is tried again, and between two attempts
_OF_TOKENIZER = ("name", "digest", "end_of_text", "end_of_text_token")  # what a checkpoint keeps of it


class CheckpointManager:
    """Saves one checkpoint at a time, and prunes the older ones.

    Training waits only for the copy of the tensors, and for the previous save. A save that fails does not end the run:
    it is logged, and every line shows a warning until a later save succeeds. Before a checkpoint is committed, the
    lines of the metrics are on the disk: a run resumed from it will not write them again.
    """

    def __init__(
        self,
        config: Config,
        strategy: Strategy,
        trained: tuple[GPT2LMHeadModel, torch.optim.Optimizer],
        stateful: dict[str, Any],
        log: Any,
        directory: RunDirectory,
        resumed: Checkpoint | None,
    ):
        """`trained` are the model without wrappers and its prepared optimizer, `stateful` the further components of
        which a checkpoint keeps the state_dict(), JSON by a collective call; `log` is the run's Metrics, of a higher
        layer, and `directory` the run's, which the main process has locked."""
        self._config, self._strategy, self._log = config, strategy, log
        self._model, self._optimizer = trained
        self._stateful, self._directory = stateful, directory
        self._saved_step = resumed.step if resumed else 0
        self._thread: threading.Thread | None = None
        self._unsaved: Checkpoint | None = None  # what the last save has failed to write
        self._error: Exception | None = None  # its error
        if strategy.runtime.processes.is_main:
            tokenizer = open_tokenizer(config.data.tokenizer)
            self._files = _model_files(self._model, tokenizer)
            self._origin = {
                "config": redacted(config.flat()),
                "engine": str(strategy),
                "about": about(config, strategy, self._saved_step, resumed.state["about"] if resumed else []),
                "tokenizer": {name: getattr(tokenizer, name) for name in _OF_TOKENIZER},
            }

    def save(self, step: int, record: dict) -> None:
        """Begins to write a checkpoint of this step, unless there is one. `record` is what was measured at this step,
        whose line of metrics.jsonl is written after its evaluations. A collective call."""
        if step <= self._saved_step:
            return
        self._saved_step = step
        self._log.unwritten = record
        state = {
            "tokens": step * self._config.optimizer.total_batch_tokens,
            "optimizer_steps": steps_taken(self._optimizer),
        } | {name: part.state_dict() for name, part in self._stateful.items()}
        with self._log.paused("saving"):
            began = time.monotonic()
            self.join()
            self._unsaved = None  # its memory is for this one
            tensors = self._strategy.gather(self._model, self._optimizer)
            if self._strategy.runtime.processes.is_main:
                path = checkpoint_path(self._directory.path, step)
                checkpoint = Checkpoint(path, step, *tensors, self._origin | state)
                # A daemon: a second Ctrl-C, which ends the process at once, does not wait for it.
                self._thread = threading.Thread(
                    target=self._write, args=(checkpoint, time.monotonic() - began), name="checkpoint", daemon=True
                )
                self._thread.start()

    def wait(self) -> None:
        """Waits for the save under way: a kill in an evaluation of minutes must not cost the checkpoint."""
        with self._log.paused("saving"):
            self.join()

    def finish(self) -> bool:
        """Whether the run's last checkpoint is committed; where the disk has failed, it is tried again for a minute.
        Prunes once more, now that all evaluations are known. A collective call. Raises UserError where the run's
        directory is not there any more."""
        processes = self._strategy.runtime.processes
        self.wait()
        with processes.shared_error("the last checkpoint cannot be saved"):
            if processes.is_main:
                if self._unsaved and isinstance(self._error, OSError):
                    self._try_again(self._unsaved)
                if isinstance(self._error, DirectoryLost):
                    raise self._error
                if not self._error:
                    self._prune(self._saved_step)
        return processes.broadcast_object(not self._error)

    def _try_again(self, checkpoint: Checkpoint) -> None:
        """Tries the last save again until it succeeds, the window is over or Ctrl-C ends it; at last, on a full disk,
        with the room of the older checkpoints that nothing protects, except for the newest intact one."""
        stop, path, deadline = self._strategy.runtime.stop, self._directory.path, time.monotonic() + RETRY_WINDOW_S
        stopped = stop.requested  # before: it is this save that must be tried
        way_out = f"free some space or mend {path}; Ctrl-C gives up"
        logger.warning("waiting    the last save is tried again for %.0f s: %s", RETRY_WINDOW_S, way_out)
        while isinstance(self._error, OSError) and time.monotonic() < deadline and stop.requested == stopped:
            time.sleep(RETRY_PAUSE_S)
            self._write(checkpoint, 0.0, again=True)
        if getattr(self._error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) and stop.requested == stopped:
            with suppress(UserError):  # where none is intact, none goes
                if newest := newest_intact(path):
                    logger.warning("room       only %s and what is protected stay, for the last save", newest.name)
                    self._prune(step_of(newest), limit=1)
                    self._write(checkpoint, 0.0, again=True)

    def join(self) -> None:
        """Waits for the save under way."""
        if self._thread:
            self._thread.join()

    def _write(self, checkpoint: Checkpoint, waited: float, *, again: bool = False) -> None:
        began = time.monotonic()
        try:
            self._directory.check()
            self._log.sync()
            save_checkpoint(checkpoint, self._files)
        except Exception as error:  # whatever the error, the run goes on, unless it has lost its directory
            self._unsaved, self._error, self._log.warning = checkpoint, error, f"step {checkpoint.step} not saved"
            if isinstance(error, DirectoryLost):
                self._strategy.runtime.stop.requested = True
                logger.warning("step %d: NOT SAVED: %s", checkpoint.step, error)
            elif not again:
                reason = getattr(error, "strerror", None) or first_line(error)
                earlier = checkpoints(self._directory.path)
                newest = f"{earlier[-1].name} is the newest" if earlier else "there is no other"
                newest += f" checkpoint in {self._directory.path}"
                logger.warning("step %d: NOT SAVED: %s; %s", checkpoint.step, reason, newest)
            return
        self._unsaved, self._error, self._log.warning = None, None, ""
        seconds, size = time.monotonic() - began, sum(file.stat().st_size for file in checkpoint.path.iterdir()) / 1e6
        how_long = f"{size:,.0f} MB in {seconds:.1f} s, training waited {waited:.2f} s"
        logger.info("step %d: saved %s, %s", checkpoint.step, checkpoint.path, how_long)
        self._prune(checkpoint.step)

    def _prune(self, newest: int, limit: int | None = None) -> None:
        try:
            self._directory.check()
            prune(self._directory.path, newest, self._config, self._log.val_losses, limit)
        except (OSError, UserError) as error:  # the latter where metrics.jsonl cannot be read
            logger.warning("WARNING    older checkpoints could not be deleted: %s", error)


def _model_files(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer) -> dict[str, bytes]:
    """What transformers needs beside the weights, by file name: configuration and tokenizer."""
    way_out = "free some space, or set TMPDIR to another directory"
    with writing(Path(os.environ.get("TMPDIR", "/tmp")), way_out), TemporaryDirectory() as directory:
        model.save_config(Path(directory))
        tokenizer.save(Path(directory), model.config.n_positions)
        # A tokenizer may come with a directory of chat templates, which a model that only continues text does not need.
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir()) if path.is_file()}
