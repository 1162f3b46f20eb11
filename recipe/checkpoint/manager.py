"""Checkpoints written in the background, so that training waits for the copy of the weights only."""

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from recipe.checkpoint.format import checkpoints, prune, save_checkpoint

_PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between attempts at a last checkpoint, a minute in all


class Saver:
    """Writes one checkpoint at a time, in a thread, and prunes the older ones; of the main process.

    A save that fails leaves the run as it was: it is said, shown in every line until one succeeds, and the next save is
    the next attempt.

    Attributes:
        failed: why the last save failed, for the progress line; empty if it did not.
        waited: seconds that training has stood still for its saves.
    """

    def __init__(
        self,
        run: Path,
        save_total_limit: int,
        milestone_steps: int,
        say: Callable[[str], None],
        *,
        before: Callable[[], None] = lambda: None,
        committed: Callable[[Path], None] = lambda path: None,
        patience: float | None = None,
    ):
        """In the thread `before` is called before each checkpoint is written, and `committed(path)` after it, before
        older ones are pruned; `patience` is how many seconds the launcher gives a run that is to stop."""
        self.run, self.save_total_limit, self.milestone_steps = run, save_total_limit, milestone_steps
        self.failed, self.waited, self._patience = "", 0.0, patience
        self._say, self._before, self._committed = say, before, committed
        self._thread: threading.Thread | None = None
        self._job: Callable[[], None] | None = None

    def save(
        self,
        step: int,
        weights: dict[str, torch.Tensor],
        moments: dict[str, torch.Tensor],
        state: dict,
        files: dict[str, bytes],
        *,
        since: float,
        pruning: bool = True,
    ) -> None:
        """Starts writing, after the save before it. The tensors are this object's from now on; `since` is when the loop
        stopped for this, of time.monotonic, for the time it is told to have waited. `pruning` false keeps all older
        checkpoints, for a run in trouble."""
        self.prepare()
        state = copy.deepcopy(state)

        def job() -> None:
            begun = time.monotonic()
            self._before()
            try:
                path = save_checkpoint(self.run, step, weights, moments, state, files)
            except Exception as error:  # the run goes on, whatever it is
                self.failed = f"step {step} not saved"
                self._warn(f"step {step}: NOT SAVED: {getattr(error, 'strerror', None) or repr(error)}")
                return
            self.failed, self._job = "", None
            seconds, size = time.monotonic() - begun, sum(p.stat().st_size for p in path.iterdir())
            self._say(
                f"step {step}: saved {path}, {size / 1e6:,.0f} MB in {seconds:.1f} s, training waited {waited:.2f} s"
            )
            if self._patience and seconds > 0.7 * self._patience:
                self._say(
                    f"note       a stop takes as long, and the launcher kills after {self._patience:.0f} s: "
                    "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 before accelerate launch"
                )
                self._patience = None  # once
            try:
                self._committed(path)
                if pruning:
                    prune(self.run, step, self.save_total_limit, self.milestone_steps)
            except OSError as error:
                self._say(f"warning    older checkpoints could not be deleted: {error}")

        self._job = job
        waited = time.monotonic() - since
        self.waited += waited
        self._start()

    def share_of(self, seconds: float) -> float:
        """What part of the time it has `waited`, beside `seconds` of training."""
        return self.waited / max(self.waited + seconds, 1e-9)

    def _start(self) -> None:
        # A daemon: who leaves at once, with a second Ctrl-C, does not wait for it.
        self._thread = threading.Thread(target=self._job, name="checkpoint", daemon=True)
        self._thread.start()

    def _warn(self, line: str) -> None:
        kept = checkpoints(self.run)
        newest = f"{kept[-1].name} is the newest" if kept else "there is no"
        self._say(
            f"{line}\nWARNING    training goes on, and the next save is the next attempt; until then {newest} "
            f"checkpoint in {self.run}"
        )

    def prepare(self) -> None:
        """Before the tensors of the next save are copied: waits for the one under way, and lets go of its copies."""
        self.finish()
        self._job = None

    def commit(self) -> None:
        """Waits for the save under way, as a part of what training has waited: before an evaluation that can take
        minutes, a kill in which must not cost the checkpoint."""
        since = time.monotonic()
        self.finish()
        self.waited += time.monotonic() - since

    def finish(self, seconds: float | None = None) -> bool:
        """Waits for the save under way, so long at most; whether the last one was committed."""
        if self._thread:
            self._thread.join(seconds)
        return not self.failed

    def conclude(self, enough: Callable[[], bool]) -> bool:
        """The same for the run's last save, which is tried again for a minute, or until `enough()`."""
        for pause in _PAUSES:
            if self.finish() or self._job is None:
                break
            until = time.monotonic() + pause
            while time.monotonic() < until and not enough():
                time.sleep(0.1)
            if enough() and pause != _PAUSES[0]:
                break
            self._say(f"trying again to save into {self.run}")
            self._start()
        return self.finish()
