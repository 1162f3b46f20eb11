"""Checkpoints written in the background, so that training waits only for the copy of the weights."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recipe.checkpoint.format import (
    Checkpoint,
    NotFiniteError,
    Retention,
    checkpoint_path,
    checkpoints,
    prune,
    save_checkpoint,
)

logger = logging.getLogger(__name__)
_PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between attempts at a last checkpoint, a minute in all


class CheckpointManager:
    """Writes one checkpoint at a time, in a thread, and prunes the older ones; of the main process. A context manager:
    at its end the save under way is finished.

        checkpoints.begin()                       # the save before has ended, and its copies are gone
        tensors = engine.snapshot(...)
        checkpoints.save(step, *tensors, trainer_state, files)

    A save that fails does not end the run: it is logged, `failed` is shown in every line until one succeeds, and the
    next save is the next attempt. Before a checkpoint is committed the lines of the log are on the disk: a run resumed
    from it will not write them again.

    Attributes:
        failed: why the last save failed, for the progress line; empty if it did not.
        save_wait: seconds that training has stood still for its saves.
    """

    def __init__(self, run_dir: Path, keep: Retention, log):
        """`log`: metrics.jsonl, with `val_losses`, {step: validation loss}, and `sync()`, which brings its lines to the
        disk."""
        self._run_dir, self._keep, self._log = run_dir, keep, log
        self.failed, self.save_wait = "", 0.0
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._unsaved: tuple[Checkpoint, dict[str, bytes]] | None = None  # what the last save wrote, until it succeeds
        self._retry = False  # whether the same save may succeed later
        self._committed: int | None = None  # the newest step

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *exception) -> None:
        self.join()

    def begin(self) -> None:
        """Begins a save: waits for the one before it and frees its copies of the tensors. From here on to the end of
        `save`, training waits."""
        self._began = time.monotonic()
        self.join()
        self._unsaved = None

    def save(
        self,
        step: int,
        weights: dict[str, torch.Tensor],
        optimizer_state: dict[str, torch.Tensor],
        trainer_state: dict,
        files: dict[str, bytes],
    ) -> None:
        """Starts writing a checkpoint. The tensors, fp32 on the CPU, must not be changed by the caller from now on;
        `files` is what transformers needs beside the weights, {name: content}."""
        path = checkpoint_path(self._run_dir, step)
        checkpoint = Checkpoint(path, step, weights, optimizer_state, copy.deepcopy(trainer_state))
        self._unsaved = checkpoint, files
        waited = time.monotonic() - self._began
        self.save_wait += waited
        self._start(waited)

    def wait(self) -> None:
        """Waits until the save under way has ended: before an evaluation that can take minutes, because a kill in it
        must not cost the checkpoint."""
        began = time.monotonic()
        self.join()
        self.save_wait += time.monotonic() - began

    def conclude(self, give_up: Callable[[], bool]) -> bool:
        """Waits for the run's last save, which is tried again for a minute, or until `give_up()`; returns whether the
        last checkpoint is committed. Prunes once more, now that all evaluations are known."""
        self.join()
        for number, pause in enumerate(_PAUSES):
            if not (self.failed and self._retry) or (number > 0 and give_up()):
                break
            deadline = time.monotonic() + pause
            while time.monotonic() < deadline and not give_up():
                time.sleep(0.1)
            logger.info("trying again to save into %s", self._run_dir)
            self._start(0.0)
            self.join()
        if self._committed is not None:
            self._prune(self._committed)
        return not self.failed

    def join(self, seconds: float | None = None) -> None:
        """Waits for the save under way, so many seconds at most; not counted in `save_wait`."""
        if self._thread:
            self._thread.join(seconds)

    def _start(self, waited: float) -> None:
        # A daemon: a second Ctrl-C, which ends the process at once, does not wait for it.
        self._thread = threading.Thread(target=self._write, args=(waited,), name="checkpoint", daemon=True)
        self._thread.start()

    def _write(self, waited: float) -> None:
        checkpoint, files = self._unsaved
        began = time.monotonic()
        try:
            self._log.sync()
            path = save_checkpoint(self._run_dir, checkpoint, files)
        except Exception as error:  # the run goes on, whatever it is
            self._report_failure(checkpoint.step, error)
            return
        self.failed, self._unsaved, self._committed = "", None, checkpoint.step
        seconds, size = time.monotonic() - began, sum(file.stat().st_size for file in path.iterdir()) / 1e6
        how_long = f"{size:,.0f} MB in {seconds:.1f} s, training waited {waited:.2f} s"
        logger.info("step %d: saved %s, %s", checkpoint.step, path, how_long)
        self._prune(checkpoint.step)

    def _prune(self, newest: int) -> None:
        try:
            prune(self._run_dir, newest, self._keep, dict(self._log.val_losses))
        except OSError as error:
            logger.warning("WARNING    older checkpoints could not be deleted: %s", error)

    def _report_failure(self, step: int, error: Exception) -> None:
        self.failed, self._retry = f"step {step} not saved", not isinstance(error, NotFiniteError)
        reason = getattr(error, "strerror", None) or repr(error)
        goes_on = "training continues, and the next save tries again"
        if isinstance(error, NotFiniteError):
            reason = f"{error}; lower learning_rate and continue from an earlier checkpoint: the best one is kept"
            goes_on = "training continues"
        found = checkpoints(self._run_dir)
        newest = f"{found[-1].name} is the newest" if found else "there is no"
        logger.warning(
            f"step {step}: NOT SAVED: {reason}\nWARNING    {goes_on}; {newest} checkpoint in {self._run_dir}"
        )
