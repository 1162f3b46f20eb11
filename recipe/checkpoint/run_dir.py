"""A run's directory: whether the run may use it, its lock, and the checkpoint from which the run continues."""

import dataclasses
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from filelock import FileLock, Timeout

from recipe.checkpoint.format import (
    Checkpoint,
    checkpoint_path,
    checkpoints,
    newest_intact,
    protect,
    state_of,
    step_of,
    sweep,
    verify,
)
from recipe.config import SHAPE_FIELDS, UNDECIDED, OptimizerConfig, counts_in
from recipe.data.tokenizer import GPT2Tokenizer
from recipe.optim.schedule import lr_at
from recipe.utils.errors import UserError, writing
from recipe.utils.files import fsync, replace_file
from recipe.utils.units import some

logger = logging.getLogger(__name__)

LOCK, OWNER = ".lock", ".owner"
LOCK_TIMEOUT_S = 5.0  # seconds in which a process that was killed is gone

# What a run writes before its first line of metrics, and what people put beside it: notes, a recipe, a log.
_TRACKERS = {"tensorboard", "wandb", "lost+found"}
_BESIDE = {".log", ".out", ".err", ".md", ".txt", ".yaml", ".yml"}


class DirectoryLost(UserError):
    """What lies at the path of a run's directory is not that directory any more."""


class RunDirectory:
    """The directory of a run, locked for this process; for the main process only. What is owned is the directory and
    not its path, to which another can be moved while the run goes on."""

    def __init__(self, path: Path):
        self.path, self._lock = path, FileLock(path / LOCK, timeout=LOCK_TIMEOUT_S)

    def acquire(self) -> None:
        """Creates the directory and locks it. Raises OSError, and UserError, naming the owner, where it is locked."""
        target = self.path.resolve()  # what a link points to need not be there
        missing = [path for path in (target, *target.parents) if not path.exists()]
        target.mkdir(parents=True, exist_ok=True)
        for path in missing:
            fsync(path.parent)
        try:
            self._lock.acquire()
        except Timeout:
            owner = f" ({(self.path / OWNER).read_text()})" if (self.path / OWNER).exists() else ""
            raise UserError(
                f"{self.path}: another run writes there{owner}; wait for it, or choose another output_dir"
            ) from None
        self._held = (self.path / LOCK).open("rb")  # as long as it is open, no other file has its number
        replace_file(self.path / OWNER, f"process {os.getpid()} on {socket.gethostname()}".encode(), flush=False)

    def check(self) -> None:
        """Raises DirectoryLost where the lock that lies there is not the one that is held, and OSError where that
        cannot be found out. Call it before anything there is written, moved or deleted."""
        with suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(os.fstat(self._held.fileno()), (self.path / LOCK).stat()):
                return
        raise DirectoryLost(
            f"{self.path} was moved or replaced while this run was going on, so nothing is written there; continue it "
            "with --output_dir where its checkpoints are now"
        )

    def release(self, moved_to: Path | None = None) -> None:
        """Unlocks the directory, if it is locked, and removes it, if it is empty: where it was, or was `moved_to`."""
        if not self._lock.is_locked:
            return
        try:
            if not moved_to:
                self.check()
            for name in (OWNER, LOCK):
                ((moved_to or self.path) / name).unlink(missing_ok=True)
        finally:
            self._held.close()
            self._lock.release()


@contextmanager
def run_directory(path: Path, *, fresh: bool = False) -> Generator[RunDirectory, None, None]:
    """Context: the directory of a run, locked for this process; for the main process only. The system releases the lock
    of a process that dies.

    Raises UserError where the directory belongs to another process or to something else. With `fresh` what an earlier
    run left is moved aside. A directory into which the run wrote nothing is removed at the end.
    """
    directory = RunDirectory(path)
    try:
        with writing(path, "mend that, or choose another output_dir"):
            _check_free(path)
            directory.acquire()
            if fresh and any(other.name not in (LOCK, OWNER) for other in path.iterdir()):
                target = path.resolve() if path.is_symlink() else path  # a link stays, and the new run on its disk
                numbered = (target.with_name(f"{target.name}.old-{n}") for n in count(1))
                old = next(other for other in numbered if not os.path.lexists(other))  # not even a broken link
                target.rename(old)
                directory.release(old)
                directory.acquire()
                logger.info("fresh      the earlier run is kept in %s", old)
            sweep(path)
        yield directory
    finally:
        with suppress(OSError, UserError):  # moved meanwhile, or not empty, as it should be
            directory.release()
            path.rmdir()


def _check_free(run_dir: Path) -> None:
    """Raises UserError where the directory is another program's: it is not empty and holds no run, by its names."""
    if not run_dir.is_dir() or checkpoints(run_dir) or (run_dir / "metrics.jsonl").exists():
        return
    others = [p for p in run_dir.iterdir() if not (p.name.startswith(".") or p.suffix in _BESIDE)]
    if names := sorted({path.name for path in others} - _TRACKERS):
        held = some(names)
        raise UserError(f"output_dir {run_dir} is not a run's: it holds {held}. Choose one that is new or empty")


def continue_from(run_dir: Path, config: dict, *, locked: bool = False) -> tuple[Path | None, bool]:
    """The checkpoint from which a run with `config` (a flat dict) continues, every byte verified, None where there is
    none, and whether there are newer ones, of an earlier plan. It is the newest or, if max_steps has grown since wsd
    lowered the learning rate, the last one before that. `locked` as in `newest_intact`, as which it raises, and
    OSError."""
    newest = newest_intact(run_dir, locked=locked)
    if newest is None or config["lr_scheduler_type"] != "wsd":
        return newest, False
    plan = _optimizer(state_of(newest)["config"])
    if not 0 < plan.decay_start < step_of(newest) or config["max_steps"] <= plan.max_steps:
        return newest, False
    start = checkpoint_path(run_dir, plan.decay_start)
    if problems := verify(start):
        logger.warning("decayed    %s, the last checkpoint before the decay, cannot be used: %s", start, problems[0])
        return newest, False
    return start, True


# Fields that make it another run: the same step would mean other weights or other data. Not the path of the data, since
# shards may move, or be streamed instead; they are known by their checksums.
_IDENTITY = (*SHAPE_FIELDS, "sequence_length", "total_batch_tokens", "seed", "optim")
# Fields whose change is not worth a message.
HARMLESS = {"config", "output_dir", "run_name", "fresh", "max_hours", "price_per_hour", "dry_run"}


def check_same_run(state: dict, config: dict, tokenizer: GPT2Tokenizer, run_dir: Path) -> None:
    """Compares the trainer state of a checkpoint with `config` (a flat dict) and its tokenizer; logs harmless
    differences.

    Raises UserError, naming the fields, where architecture, tokenizer, data or batch differ: that is another run.
    """
    way_out = "choose another output_dir, or start over with --fresh"
    before, trained_with = state["config"], state["tokenizer"]
    differing = {k: f"{k} {before[k]!r} -> {v!r}" for k, v in config.items() if k in before and before[k] != v}
    if "run_name" in differing:
        raise UserError(
            f"{run_dir} holds another run: {differing['run_name']}; continue that one by its name, {way_out}"
        )
    changed = [differing[k] for k in _IDENTITY if k in differing]
    if trained_with["digest"] != tokenizer.digest:
        old, new = trained_with["name"], tokenizer.name
        changed.append(f"tokenizer {old} -> {new if new != old else 'another of that name'}")
    weights = [counts_in(c["dataset_name"]) for c in (before, config)]
    if weights[0] != weights[1]:
        changed.append(f"dataset_name's weights, of 1,000, {weights[0]} -> {weights[1]}")
    if changed:
        raise UserError(f"{run_dir} holds a run with other settings: {', '.join(changed)}; put those back, {way_out}")
    if before["max_steps"] == UNDECIDED:  # as now, or it has just been decided
        differing.pop("max_steps", None)
    for difference in (text for k, text in differing.items() if k not in HARMLESS):
        logger.info("resuming with %s", difference)
    step = state["step"]
    rates = [lr_at(step, _optimizer(c)) for c in (before, config)]
    if rates[0] != rates[1] and step < config["max_steps"]:
        now = "the learning rate at step %d was %.3g and is %.3g now"
        logger.warning(f"schedule   {now}: the run ends differently from one with these settings", step, *rates)


def _optimizer(config: dict) -> OptimizerConfig:
    """The optimizer's part of a flat configuration, also of an older version."""
    return OptimizerConfig(**{f.name: config[f.name] for f in dataclasses.fields(OptimizerConfig) if f.name in config})


def set_aside(directory: RunDirectory, checkpoint: Checkpoint) -> bool:
    """Moves what is newer than `checkpoint`, from which the run continues, into the next free `decayed_<newest step>`,
    with a copy of metrics.jsonl: a run directory of its own. Returns whether anything is. Raises UserError.

    The newest is moved last: if this process is killed before, the next one finds the same newest, and goes on.
    """
    run_dir = directory.path
    if not (newer := [path for path in checkpoints(run_dir) if step_of(path) > checkpoint.step]):
        return False
    directory.check()
    name, log = f"decayed_{step_of(newer[-1]):08d}", run_dir / "metrics.jsonl"
    numbered = (run_dir / (name if n == 1 else f"{name}-{n}") for n in count(1))
    aside = next(path for path in numbered if not (path / newer[-1].name).exists())  # one without it is unfinished
    with writing(run_dir, f"mend that, or copy {checkpoint.path.name} into a new output_dir and continue there"):
        protect(checkpoint.path)
        aside.mkdir(exist_ok=True)
        if log.is_file():
            replace_file(aside / log.name, log.read_bytes())
        for path in newer:
            path.rename(aside / path.name)
        fsync(aside)
        fsync(run_dir)  # before the lines of these steps are dropped from metrics.jsonl
    logger.info("extended   continues from before the decay, of which the checkpoints are in %s now", aside)
    return True
