"""A run's directory: whether the run may use it, its lock, and the checkpoint from which the run continues."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from recipe.checkpoint.format import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    newest_whole,
    protect,
    step_of,
    sweep,
    verify,
)
from recipe.config import OptimizerConfig, counts_in
from recipe.data.tokenizer import GPT2Tokenizer
from recipe.optim.schedule import lr_at
from recipe.utils.errors import UserError, writing
from recipe.utils.files import fsync_directory, replace_file
from recipe.utils.units import some

logger = logging.getLogger(__name__)

LOCK, OWNER = ".lock", ".owner"
_PATIENCE = 5.0  # seconds in which a process that was killed is gone

# What a run writes before its first line of metrics, and what people put beside it: notes, a recipe, a log.
_TRACKERS = {"tensorboard", "wandb", "lost+found"}
_BESIDE = {".log", ".out", ".err", ".md", ".txt", ".yaml", ".yml"}


class RunDirectory:
    """The directory of a run, locked for this process: a context manager, for the main process only.

    Entering it raises UserError where the directory belongs to another process or to something else. With `fresh` what
    an earlier run left is moved aside. A directory into which the run wrote nothing is removed at the end.

    The system releases the lock of a process that dies. (On a file system without such locks filelock makes one of a
    file's existence, and judges by its age.)
    """

    def __init__(self, path: Path, *, fresh: bool = False):
        self.path, self._fresh = path, fresh
        self._lock: BaseFileLock | None = None

    def __enter__(self) -> RunDirectory:
        try:
            _check_free(self.path)
            self._lock = _locked(self.path)
            if self._fresh and any(path.name not in (LOCK, OWNER) for path in self.path.iterdir()):
                self._move_aside()
            sweep(self.path)
        except OSError as error:
            self.__exit__()
            reason = error.strerror or error
            doing = "renamed, for --fresh" if self._fresh else "used"
            raise UserError(
                f"output_dir {self.path} cannot be {doing}: {reason}; mend that, or choose another output_dir"
            ) from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        with suppress(OSError):  # deleted or renamed meanwhile
            if self._lock:
                _unlock(self._lock, self.path)
        with suppress(OSError):  # not empty, as it should be
            self.path.rmdir()

    def _move_aside(self) -> None:
        """Renames the directory to the next free `<name>.old-N`; nothing in it is deleted."""
        number = next(n for n in range(1, 10**6) if not os.path.lexists(f"{self.path}.old-{n}"))
        old = self.path.with_name(f"{self.path.name}.old-{number}")
        self.path.rename(old)
        _unlock(self._lock, old)
        self._lock = _locked(self.path)
        logger.info("fresh      the earlier run is kept in %s", old)


def _check_free(run_dir: Path) -> None:
    """Raises UserError where the directory is another program's: it holds something, and no run. Looks at names alone,
    so that nothing is written there."""
    if not run_dir.is_dir() or checkpoints(run_dir) or (run_dir / "metrics.jsonl").exists():
        return
    others = [p for p in run_dir.iterdir() if not (p.name.startswith(".") or p.suffix in _BESIDE)]
    if names := sorted({path.name for path in others} - _TRACKERS):
        held = some(names)
        raise UserError(f"output_dir {run_dir} is not a run's: it holds {held}. Choose one that is new or empty")


def continue_from(run_dir: Path, config: dict) -> tuple[Path | None, bool]:
    """The checkpoint from which a run with `config` (a flat dict) continues, every byte verified, None where there is
    none, and whether it is rewound (see Checkpoint). Raises as `newest_whole` does, and OSError."""
    newest = newest_whole(run_dir)
    chosen = newest and _before_decay(newest, config)
    return chosen, chosen != newest


def _locked(run_dir: Path) -> BaseFileLock:
    """Creates the directory if need be and locks it. Raises UserError, naming the owner, where another process has it,
    and OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    lock = FileLock(run_dir / LOCK, timeout=_PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        owner = f" ({(run_dir / OWNER).read_text()})" if (run_dir / OWNER).exists() else ""
        raise UserError(
            f"{run_dir}: another run writes there{owner}; wait for it, or choose another output_dir"
        ) from None
    replace_file(run_dir / OWNER, f"process {os.getpid()} on {socket.gethostname()}".encode(), flush=False)
    return lock


def _unlock(lock: BaseFileLock, run_dir: Path) -> None:
    try:
        (run_dir / OWNER).unlink(missing_ok=True)
        (run_dir / LOCK).unlink(missing_ok=True)
    finally:
        lock.release()


# Fields that make it another run: the same step would mean other weights or other data. Not the path of the data, since
# shards may move, or be streamed instead; they are known by their checksums.
_IDENTITY = (
    "n_layer",
    "n_head",
    "n_embd",
    "n_positions",
    "vocab_size",
    "sequence_length",
    "total_batch_tokens",
    "seed",
    "optim",
)
# Fields whose change is not worth a message.
_HARMLESS = {"config", "output_dir", "run_name", "fresh", "max_hours", "dry_run"}


def check_same_run(state: dict, config: dict, tokenizer: GPT2Tokenizer, run_dir: Path) -> None:
    """Compares the trainer state of a checkpoint with `config` (a flat dict) and its tokenizer; logs a line for each
    harmless difference.

    Raises UserError, naming the fields, where architecture, tokenizer, data or batch differ: that is another run.
    """
    if missing := [key for key in ("config", "data", "metrics", "tokenizer") if key not in state]:
        raise UserError(
            f"{run_dir}: trainer_state.json of its newest checkpoint has no {missing[0]!r}: another version of this "
            "recipe wrote it. Choose another output_dir, or start over with --fresh"
        )
    before = state["config"]
    name, now = before["run_name"], config["run_name"]
    if name != now:
        raise UserError(
            f"{run_dir} holds another run: {name!r}, of {before['config']}, and not {now!r}. Choose another "
            f"output_dir, continue that run by --run_name {name}, or start over with --fresh"
        )

    def differing(names: Iterable[str]) -> list[str]:
        return [f"{k} {before[k]!r} -> {config[k]!r}" for k in names if k in before and before[k] != config[k]]

    changed, trained_with = differing(_IDENTITY), state["tokenizer"]
    if trained_with["digest"] != tokenizer.digest:
        changed.append(f"tokenizer {trained_with['name']} -> {tokenizer.name}")
    then, today = (counts_in(c["dataset_name"]) for c in (before, config))
    if then != today:
        changed.append(f"dataset_name's weights, of 1,000, {then} -> {today}")
    if changed:
        raise UserError(
            f"{run_dir} holds a run with other settings: {', '.join(changed)}. Put those back, choose another "
            "output_dir, or start over with --fresh (make train FRESH=1)"
        )
    for difference in differing(k for k in config if k not in _HARMLESS):
        logger.info("resuming with %s", difference)
    step = state["step"]
    rates = [lr_at(step, _optimizer(c)) for c in (before, config)]
    if rates[0] != rates[1] and step < config["max_steps"]:
        logger.warning(
            "schedule   the learning rate at step %d was %.3g and is %.3g now: the run ends differently from one that "
            "had these settings from the start",
            step,
            *rates,
        )


def _optimizer(config: dict) -> OptimizerConfig:
    """That of a flat configuration, be it an older version's."""
    return OptimizerConfig(**{f.name: config[f.name] for f in dataclasses.fields(OptimizerConfig) if f.name in config})


def _before_decay(newest: Path, config: dict) -> Path:
    """The checkpoint from which a run with `config` (a flat dict) continues, where `newest` is its newest: the last one
    before wsd lowered the learning rate, if max_steps is larger than when it did."""
    if config["lr_scheduler_type"] != "wsd":
        return newest
    plan = _optimizer(json.loads((newest / "trainer_state.json").read_text())["config"])
    if not 0 < plan.decay_start < step_of(newest) or config["max_steps"] <= plan.max_steps:
        return newest
    start = checkpoint_path(newest.parent, plan.decay_start)
    if problems := verify(start):
        logger.warning("decayed    %s, the last checkpoint before the decay, cannot be used: %s", start, problems[0])
        return newest
    return start


_ASIDE = ".decayed"  # what is being set aside, until all of it is there


def set_aside(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Moves what is newer than `checkpoint`, if that is rewound, into the next free `decayed_<newest step>`, with a
    copy of metrics.jsonl: a run directory of its own. Finishes what a process that was killed had begun. Raises
    UserError.

    The newest is moved last: where a process is killed before, the next one finds the same newest one, and rewinds too.
    """
    aside, log = run_dir / _ASIDE, run_dir / "metrics.jsonl"
    with writing(run_dir, f"mend that, or copy {checkpoint.path.name} into a new output_dir and continue there"):
        if checkpoint.rewound:
            protect(checkpoint.path)
            aside.mkdir(exist_ok=True)
            if log.exists() and not checkpoints(aside):  # all of its lines are there still
                replace_file(aside / log.name, log.read_bytes())
            for path in checkpoints(run_dir):
                if step_of(path) > checkpoint.step:
                    path.rename(aside / path.name)
            fsync_directory(aside)
            fsync_directory(run_dir)  # before the lines of these steps are dropped from metrics.jsonl
        if moved := checkpoints(aside):
            name = f"decayed_{step_of(moved[-1]):08d}"
            names = (name, *(f"{name}-{n}" for n in range(2, 10**6)))
            free = next(run_dir / one for one in names if not os.path.lexists(run_dir / one))
            aside.rename(free)
            logger.info("extended   continues from before the decay, of which the checkpoints are in %s now", free)
