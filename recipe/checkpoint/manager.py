"""Saves checkpoints: every process takes part in gathering the state, and the main one writes it in the background."""

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
from recipe.config import Config
from recipe.data.tokenizer import GPT2Tokenizer, open_tokenizer
from recipe.engine.strategy import Strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import steps_taken
from recipe.utils.errors import Permanent, UserError, first_line, writing
from recipe.utils.redaction import redacted
from recipe.utils.units import plural

logger = logging.getLogger(__name__)
RETRY_WINDOW_S, RETRY_PAUSE_S = 60.0, 5.0  # how long a run's last save is retried, and the pause between attempts
_TOKENIZER_FIELDS = ("name", "digest", "end_of_text", "end_of_text_token")  # saved in a checkpoint


class CheckpointManager:
    """Saves one checkpoint at a time, and prunes the older ones.

    Training waits only for the copy of the tensors and for the previous save. A failed save does not end the run: it is
    logged, and every line shows a warning until a later save succeeds. The lines of metrics.jsonl are flushed to disk
    before a checkpoint is committed, since a run resumed from it does not write them again.
    """

    def __init__(
        self,
        config: Config,
        strategy: Strategy,
        model_and_optimizer: tuple[GPT2LMHeadModel, torch.optim.Optimizer],
        stateful: dict[str, Any],
        metrics: Any,
        descriptor: int,
        checkpoint: Checkpoint | None,
    ):
        """The model comes without wrappers, the optimizer prepared. `stateful` are the further components whose
        state_dict(), a collective call that returns JSON, is saved; `metrics` is the run's Metrics (of a higher layer);
        `descriptor` is that of `run_directory`, on the main process; `checkpoint` is the one from which the run
        resumes."""
        self._config, self._strategy, self._metrics = config, strategy, metrics
        self._model, self._optimizer = model_and_optimizer
        self._stateful, self._run_dir, self._descriptor = stateful, Path(config.run.output_dir), descriptor
        self._saved_step = checkpoint.step if checkpoint else 0
        self._thread: threading.Thread | None = None
        self._unsaved: Checkpoint | None = None  # the checkpoint that the last save failed to write
        self._error: Exception | None = None  # the error of that save
        if strategy.runtime.processes.is_main:
            tokenizer = open_tokenizer(config.data.tokenizer)
            self._files = _model_files(self._model, tokenizer)
            self._provenance = {
                "config": redacted(config.flat()),
                "engine": str(strategy),
                "about": about(config, strategy, self._saved_step, checkpoint.state["about"] if checkpoint else []),
                "tokenizer": {name: getattr(tokenizer, name) for name in _TOKENIZER_FIELDS},
            }

    def save(self, step: int, record: dict) -> None:
        """Starts to write a checkpoint of this step, unless it is saved already. `record` holds what was measured at
        this step; its line of metrics.jsonl is written after the evaluations. A collective call. Raises
        Permanent."""
        if step <= self._saved_step:
            return
        processes, self._saved_step = self._strategy.runtime.processes, step
        self._metrics.unwritten = dict(record)  # a copy, since the loop adds evaluations to `record` meanwhile
        state: dict = {
            "tokens": step * self._config.optimizer.total_batch_tokens,
            "optimizer_steps": steps_taken(self._optimizer),
        } | {name: component.state_dict() for name, component in self._stateful.items()}
        with self._metrics.paused("saving"):
            start = time.monotonic()
            self.join()
            self._unsaved = None  # frees its memory for this checkpoint
            if processes.anywhere(processes.is_main and self._is_lost()):
                raise Permanent(
                    f"{self._run_dir} was moved or replaced during this run, so nothing more is written there; to "
                    "continue, pass the directory that now holds the checkpoints as --output_dir"
                )
            tensors = self._strategy.gather(self._model, self._optimizer)
            if processes.is_main:
                state["metrics"]["lines_sha256"] = self._metrics.lines_sha256(step)
                path = checkpoint_path(self._run_dir, step)
                checkpoint = Checkpoint(path, step, *tensors, self._provenance | state)
                # A daemon: a second Ctrl-C, which ends the process at once, does not wait for it.
                self._thread = threading.Thread(
                    target=self._write, args=(checkpoint, time.monotonic() - start), name="checkpoint", daemon=True
                )
                self._thread.start()

    def _is_lost(self) -> bool:
        """Whether the run's directory is no longer at its path. Ask before writing or deleting anything there."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), self._run_dir.stat())
        except OSError as error:  # any other is the disk's, and may pass
            return isinstance(error, FileNotFoundError | NotADirectoryError)

    def wait(self) -> None:
        """Waits for the save in progress, so that a kill during a long evaluation does not lose the checkpoint."""
        with self._metrics.paused("saving"):
            self.join()

    def finish(self) -> bool:
        """Whether the run's last checkpoint is committed; if the disk failed, the save is retried for a minute. Prunes
        once more, now that all evaluations are known. A collective call."""
        processes = self._strategy.runtime.processes
        self.wait()
        if processes.is_main:
            if self._unsaved and isinstance(self._error, OSError):
                self._retry(self._unsaved)
            if not self._error:
                self._prune(self._saved_step)
        return processes.broadcast_object(not self._error)

    def _retry(self, checkpoint: Checkpoint) -> None:
        """Retries the last save until it succeeds, RETRY_WINDOW_S is over or Ctrl-C ends it. On a full disk it first
        deletes the unprotected checkpoints, except for the newest intact one: a stopped process may not have a
        minute."""
        stop, path = self._strategy.runtime.stop, self._run_dir
        was_requested = stop.requested  # a stop that ended training must not end the retries
        if getattr(self._error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            with suppress(UserError):  # if none is intact, none is deleted
                if newest := newest_intact(path):
                    n_before = len(checkpoints(path))
                    self._prune(step_of(newest), limit=1)
                    if deleted := n_before - len(checkpoints(path)):
                        text = plural(deleted, "checkpoint")
                        logger.warning("deleted    %s before %s, to make room for the last save", text, newest.name)
                        self._write(checkpoint, 0.0, is_retry=True)
        deadline = time.monotonic() + RETRY_WINDOW_S
        if isinstance(self._error, OSError):
            way_out = f"free some space or repair {path}; Ctrl-C gives up"
            logger.warning("retrying   the last save, for up to %.0f s: %s", RETRY_WINDOW_S, way_out)
        while isinstance(self._error, OSError) and time.monotonic() < deadline and stop.requested == was_requested:
            time.sleep(RETRY_PAUSE_S)
            self._write(checkpoint, 0.0, is_retry=True)

    def join(self) -> None:
        """Waits for the save in progress."""
        if self._thread:
            self._thread.join()

    def _write(self, checkpoint: Checkpoint, wait_seconds: float, *, is_retry: bool = False) -> None:
        start = time.monotonic()
        try:
            if self._is_lost():
                raise UserError("the run's directory was moved or replaced")
            self._metrics.sync()
            save_checkpoint(checkpoint, self._files)
        except Exception as error:  # whatever the error, the run goes on
            self._unsaved, self._error, self._metrics.warning = checkpoint, error, f"step {checkpoint.step} not saved"
            if not is_retry:
                reason = getattr(error, "strerror", None) or first_line(error)
                paths = checkpoints(self._run_dir)
                newest = f"{paths[-1].name} is the newest" if paths else "there is no other"
                newest += f" checkpoint in {self._run_dir}"
                logger.warning("step %d: NOT SAVED: %s; %s", checkpoint.step, reason, newest)
            return
        self._unsaved, self._error, self._metrics.warning = None, None, ""
        seconds, size = time.monotonic() - start, sum(file.stat().st_size for file in checkpoint.path.iterdir()) / 1e6
        timing = f"{size:,.0f} MB in {seconds:.1f} s, training waited {wait_seconds:.2f} s"
        logger.info("step %d: saved %s, %s", checkpoint.step, checkpoint.path, timing)
        self._prune(checkpoint.step)

    def _prune(self, step: int, limit: int | None = None) -> None:
        try:
            if not self._is_lost():
                prune(self._run_dir, step, self._config, self._metrics.val_losses, limit)
        except OSError as error:
            logger.warning("WARNING    older checkpoints could not be deleted: %s", error)


def _model_files(model: GPT2LMHeadModel, tokenizer: GPT2Tokenizer) -> dict[str, bytes]:
    """{file name: content} of what transformers needs besides the weights: the configuration and the tokenizer."""
    way_out = "free some space, or set TMPDIR to another directory"
    with writing(Path(os.environ.get("TMPDIR", "/tmp")), way_out), TemporaryDirectory() as directory:
        model.save_config(Path(directory))
        tokenizer.save(Path(directory), model.config.n_positions)
        return {path.name: path.read_bytes() for path in sorted(Path(directory).iterdir())}
