"""Saves what the loop drives: its state, taken on every process, and written in the background by the main one."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from recipe.checkpoint.format import Checkpoint, checkpoint_path, checkpoints, prune, save_checkpoint
from recipe.checkpoint.provenance import about
from recipe.config import Config
from recipe.data.tokenizer import GPT2Tokenizer, open_tokenizer
from recipe.engine.base import Engine
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import steps_taken
from recipe.utils.errors import UserError, writing
from recipe.utils.redaction import redacted

if TYPE_CHECKING:
    from recipe.monitor.metrics import Metrics

logger = logging.getLogger(__name__)
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
        engine: Engine,
        trained: tuple[GPT2LMHeadModel, torch.optim.Optimizer],
        metrics: Metrics,
        others: dict,
        resumed: Checkpoint | None,
    ):
        """`trained` are the model without wrappers and its prepared optimizer; `others` are the further components, by
        name, whose `state_dict` a checkpoint keeps, besides these and the metrics'."""
        self._config, self._engine, self._metrics = config, engine, metrics
        self._model, self._optimizer = trained
        self._components = {**others, "metrics": metrics}
        self._run_dir = Path(config.run.output_dir)
        self._saved_step = resumed.step if resumed else 0
        self._thread: threading.Thread | None = None
        self._failed = False  # the last save
        if engine.processes.is_main:
            tokenizer = open_tokenizer(config.data.tokenizer)
            self._files = _model_files(self._model, tokenizer)
            self._origin = {
                "config": redacted(config.flat()),
                "engine": engine.name,
                "about": about(config, engine, self._saved_step, resumed.state["about"] if resumed else []),
                "tokenizer": {name: getattr(tokenizer, name) for name in _OF_TOKENIZER},
            }

    def save(self, step: int, record: dict) -> None:
        """Begins to write a checkpoint of this step, unless there is one. `record` is what was measured at this step,
        whose line of metrics.jsonl is written after its evaluations. A collective call."""
        if step <= self._saved_step:
            return
        self._saved_step = step
        state = {
            "record": dict(record),
            "tokens": step * self._config.optimizer.total_batch_tokens,
            "optimizer_steps": steps_taken(self._optimizer),
        } | {name: component.state_dict() for name, component in self._components.items()}
        with self._metrics.paused("saving"):
            began = time.monotonic()
            self.join()
            tensors = self._engine.snapshot(self._model, self._optimizer)
            if self._engine.processes.is_main:
                checkpoint = Checkpoint(checkpoint_path(self._run_dir, step), step, *tensors, self._origin | state)
                # A daemon: a second Ctrl-C, which ends the process at once, does not wait for it.
                self._thread = threading.Thread(
                    target=self._write, args=(checkpoint, time.monotonic() - began), name="checkpoint", daemon=True
                )
                self._thread.start()

    def wait(self) -> None:
        """Waits until the save under way has ended: before an evaluation that can take minutes, because a kill in it
        must not cost the checkpoint."""
        with self._metrics.paused("saving"):
            self.join()

    def finish(self) -> bool:
        """Whether the run's last checkpoint is committed. Prunes once more, now that all evaluations are known. A
        collective call."""
        self._engine.stop.leave()
        self.wait()
        if self._engine.processes.is_main and not self._failed:
            self._prune(self._saved_step)
        return self._engine.processes.broadcast_object(not self._failed)

    def join(self) -> None:
        """Waits for the save under way."""
        if self._thread:
            self._thread.join()

    def _write(self, checkpoint: Checkpoint, waited: float) -> None:
        began = time.monotonic()
        try:
            with self._engine.stop.patient():  # a signal waits for it, even where the step hangs
                self._metrics.sync()
                save_checkpoint(checkpoint, self._files)
        except Exception as error:  # whatever the error, the run goes on
            self._failed, self._metrics.warning = True, f"step {checkpoint.step} not saved"
            reason = error if isinstance(error, UserError) else getattr(error, "strerror", None) or repr(error)
            found = checkpoints(self._run_dir)
            newest = f"{found[-1].name} is the newest" if found else "there is no other"
            continues = f"Training continues; {newest} checkpoint in {self._run_dir}"
            logger.warning("step %d: NOT SAVED: %s. %s", checkpoint.step, reason, continues)
            return
        self._failed, self._metrics.warning = False, ""
        seconds, size = time.monotonic() - began, sum(file.stat().st_size for file in checkpoint.path.iterdir()) / 1e6
        how_long = f"{size:,.0f} MB in {seconds:.1f} s, training waited {waited:.2f} s"
        logger.info("step %d: saved %s, %s", checkpoint.step, checkpoint.path, how_long)
        self._prune(checkpoint.step)

    def _prune(self, newest: int) -> None:
        try:
            prune(self._run_dir, newest, self._config, self._metrics.val_losses)
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
