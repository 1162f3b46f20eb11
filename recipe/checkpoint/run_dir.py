"""A run's directory: whether the run may use it, its lock, and the checkpoint from which the run resumes."""

import dataclasses
import logging
import os
import shlex
import socket
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
from recipe.config import DEFAULTS, UNDECIDED, ModelConfig, OptimizerConfig, counts_in
from recipe.data.tokenizer import GPT2Tokenizer
from recipe.optim.schedule import lr_at
from recipe.utils.errors import UserError, writing
from recipe.utils.files import fsync, replace_file, unused_path
from recipe.utils.units import some

logger = logging.getLogger(__name__)

LOCK, OWNER = ".lock", ".owner"
# Time for a killed process to disappear, and for a file server to drop the lock of a node that died: NFS 4 takes 90 s.
LOCK_TIMEOUT_S, NODE_LOCK_TIMEOUT_S = 5.0, 180.0

# Names and suffixes that do not make a directory another program's: what a run writes before its first line of
# metrics, a disk's lost+found, and what people add, such as notes, a recipe or a log.
_ALLOWED_NAMES = {"tensorboard", "wandb", "lost+found"}
_ALLOWED_SUFFIXES = {".log", ".out", ".err", ".md", ".txt", ".yaml", ".yml"}


@contextmanager
def run_directory(path: Path, *, fresh: bool = False) -> Generator[int, None, None]:
    """Context: the directory of a run, locked for this process; for the main process only. The operating system
    releases the lock of a process that dies. Yields a descriptor of the directory, by which the run notices that it was
    moved or replaced.

    Raises UserError if the directory belongs to another process or to another program. With `fresh`, that of an earlier
    run is renamed first. A directory that is empty at the end is removed.
    """
    target = path.resolve()  # the target of a link may not exist yet
    if fresh and target.is_dir() and {entry.name for entry in target.iterdir()} - {LOCK, OWNER}:
        with run_directory(path), writing(path, "fix that, or choose another output_dir"):
            old_path = unused_path(target.with_name(f"{target.name}.old-"))
            target.rename(old_path)
        logger.info("fresh      moved the earlier run to %s", old_path)
    with ExitStack() as stack:
        with writing(path, "fix that, or choose another output_dir"):
            _check_free(path)
            new_dirs = [directory for directory in (target, *target.parents) if not directory.exists()]
            target.mkdir(parents=True, exist_ok=True)
            for directory in new_dirs:
                fsync(directory.parent)
            descriptor = os.open(target, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            stack.enter_context(_lock(path))
            stack.callback(_clean_up, path, descriptor)
            replace_file(path / OWNER, f"process {os.getpid()} on {socket.gethostname()}".encode(), flush=False)
            sweep(path)
        yield descriptor


def _lock(path: Path) -> AbstractContextManager[FileLock]:
    """Context: the run's lock, which is already acquired. Raises UserError if another process keeps it."""
    lock, owner = FileLock(path / LOCK), ""
    for timeout in (LOCK_TIMEOUT_S, NODE_LOCK_TIMEOUT_S):
        with suppress(Timeout):
            return lock.acquire(timeout)
        owner = (path / OWNER).read_text() if (path / OWNER).exists() else ""
        if not owner or owner.endswith(f" on {socket.gethostname()}"):
            break
        if timeout == LOCK_TIMEOUT_S:
            logger.info("waiting    up to %g s for the lock of %s, in case that node died", NODE_LOCK_TIMEOUT_S, owner)
    raise UserError(
        f"{path}: another run is writing there{f' ({owner})' if owner else ''}; wait for it, stop it (`kill` lets it "
        "save a checkpoint), or choose another output_dir"
    )


def _clean_up(path: Path, descriptor: int) -> None:
    """Deletes the lock files, also if the directory was moved, and a directory that is empty without them."""
    with suppress(OSError):  # not empty, which is normal
        for name in (OWNER, LOCK):
            os.unlink(name, dir_fd=descriptor)
        path.rmdir()


def _check_free(run_dir: Path) -> None:
    """Raises UserError if the directory is another program's: not empty, and without a run's files."""
    if not run_dir.is_dir() or checkpoints(run_dir) or (run_dir / "metrics.jsonl").exists():
        return
    paths = [p for p in run_dir.iterdir() if not (p.name.startswith(".") or p.suffix in _ALLOWED_SUFFIXES)]
    if names := sorted({path.name for path in paths} - _ALLOWED_NAMES):
        raise UserError(
            f"output_dir {run_dir} is not the directory of a run: it holds {some(names)}. Choose a new or empty one"
        )


def continue_from(run_dir: Path, config: dict, *, locked: bool = False) -> Path | None:
    """The checkpoint from which a run with `config` (a flat dict) resumes, with every byte verified, or None. It is the
    newest one or, if max_steps was raised after wsd's decay began, the last one before the decay. `locked` and errors
    are those of `newest_intact`; also raises OSError."""
    newest = newest_intact(run_dir, locked=locked)
    if newest is None or config["lr_scheduler_type"] != "wsd":
        return newest
    saved_optimizer = _optimizer_config(state_of(newest)["config"])
    decay_start = saved_optimizer.decay_start
    if not 0 < decay_start < step_of(newest) or config["max_steps"] <= saved_optimizer.max_steps:
        return newest
    path = checkpoint_path(run_dir, decay_start)
    if problem := ", ".join(verify(path)[:1]) if path.exists() else "it was not saved":
        logger.warning("decayed    %s, the last checkpoint before the decay, cannot be used: %s", path, problem)
        return newest
    return path


# Fields that identify a run: with another value, the same step would mean other weights or other data. The path of the
# data is not one of them: shards, which their checksums identify, may move or be streamed instead.
_IDENTITY = (
    *(field.name for field in dataclasses.fields(ModelConfig) if field.name not in ("dropout", "init_from")),
    *("sequence_length", "total_batch_tokens", "seed", "optim"),
)
# Fields that a resumed run may change without a note: they affect no number.
HARMLESS = {"config", "output_dir", "run_name", "fresh", "max_hours", "price_per_hour", "dry_run"}


def check_same_run(state: dict, config: dict, tokenizer: GPT2Tokenizer, run_dir: Path) -> None:
    """Compares the trainer state of a checkpoint with `config` (a flat dict) and its tokenizer; logs harmless
    differences.

    Raises UserError, naming the fields, if architecture, tokenizer, data or batch differ: that is another run.
    """
    way_out = "choose another run_name (or output_dir), or start over with --fresh"
    # A field that an older version did not have had its default.
    saved_config = DEFAULTS | state["config"]
    saved_tokenizer = state["tokenizer"]
    changes = {
        k: f"{k} {saved_config[k]!r} -> {v!r}" for k, v in config.items() if k in saved_config and saved_config[k] != v
    }
    if "run_name" in changes and config["run_name"] != run_dir.name:  # which older versions did not name a run by
        renamed = f"--run_name {saved_config['run_name']} --output_dir {shlex.quote(str(run_dir))}"
        raise UserError(f"{run_dir} holds another run: {changes['run_name']}; {way_out}, or continue it: {renamed}")
    conflicts = [changes[k] for k in _IDENTITY if k in changes]
    # The path of the weights that the run began with may change, or be omitted.
    if "init_from" in changes and config["init_from"] and "init_from" not in state["about"][0]:
        conflicts.append(changes["init_from"])
    if saved_tokenizer["digest"] != tokenizer.digest:
        old_name, new_name = saved_tokenizer["name"], tokenizer.name
        conflicts.append(f"tokenizer {old_name} -> {new_name if new_name != old_name else 'another of that name'}")
    weights = [counts_in(c["dataset_name"]) for c in (saved_config, config)]
    if weights[0] != weights[1]:
        conflicts.append(f"dataset_name's weights (of 1,000) {weights[0]} -> {weights[1]}")
    if conflicts:
        raise UserError(f"{run_dir} holds a run with other settings: {', '.join(conflicts)}; restore those, {way_out}")
    if saved_config["max_steps"] == UNDECIDED:  # it still is, or train_hours has just decided it
        changes.pop("max_steps", None)
    for name, change in changes.items():
        if name not in HARMLESS:
            effect = ", which has no effect: the weights come from the checkpoint" if name == "init_from" else ""
            logger.info("resuming with %s%s", change, effect)
    step = state["step"]
    if validation := ", ".join(changes[k] for k in ("val_data", "eval_tokens") if k in changes):
        message = "validation losses up to step %d cannot be compared with those that follow: %s"
        logger.warning(f"validation {message}", step, validation)
    rates = [lr_at(step, _optimizer_config(c)) for c in (saved_config, config)]
    if rates[0] != rates[1] and step < config["max_steps"]:
        message = "the learning rate at step %d was %.3g and is %.3g now"
        logger.warning(f"schedule   {message}: the result differs from a run with these settings", step, *rates)


def _optimizer_config(config: dict) -> OptimizerConfig:
    """The OptimizerConfig of a flat configuration, which an older version may have saved with fewer fields."""
    return OptimizerConfig(**{f.name: config[f.name] for f in dataclasses.fields(OptimizerConfig) if f.name in config})


def set_aside(checkpoint: Checkpoint) -> bool:
    """Moves the checkpoints newer than `checkpoint`, from which the run resumes, into the next free
    `decayed_<newest step>`, with a copy of metrics.jsonl: a run directory of its own. Returns whether there are any.
    Raises UserError.

    The newest is moved last: if this process is killed earlier, the next one sees the same newest and finishes the
    move.
    """
    run_dir = checkpoint.path.parent
    if not (newer_paths := [path for path in checkpoints(run_dir) if step_of(path) > checkpoint.step]):
        return False
    newest, log = newer_paths[-1], run_dir / "metrics.jsonl"
    name = f"decayed_{step_of(newest):08d}"
    numbered_paths = (run_dir / (name if n == 1 else f"{name}-{n}") for n in count(1))
    decayed_dir = next(p for p in numbered_paths if not (p / newest.name).exists())  # new, or of an unfinished move
    with writing(run_dir, f"fix that, or copy {checkpoint.path.name} into a new output_dir and continue there"):
        protect(checkpoint.path)
        decayed_dir.mkdir(exist_ok=True)
        if log.is_file():
            replace_file(decayed_dir / log.name, log.read_bytes())
        for path in newer_paths:
            path.rename(decayed_dir / path.name)
        fsync(decayed_dir)
        fsync(run_dir)  # before the lines of these steps are dropped from metrics.jsonl
    logger.info("extended   continues from before the decay; the decayed checkpoints are now in %s", decayed_dir)
    return True
