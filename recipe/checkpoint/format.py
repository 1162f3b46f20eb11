"""Portable checkpoints: a `from_pretrained` directory plus the optimizer's state by parameter, atomic and verified.

    step_00005000/
      model.safetensors       weights under transformers' names, fp32
      optimizer.safetensors   <state>.<parameter name>, such as exp_avg.transformer.wte.weight (fp32)
      trainer_state.json      step, configuration, provenance, and the state of each component of the run
      config.json, generation_config.json, tokenizer files
      manifest.json           size and SHA-256 of each file above

Nothing here depends on the engine or the number of processes, and nothing is pickled. A checkpoint is written into a
temporary directory, flushed to disk and renamed, so a directory with its final name is complete.
"""

import json
import logging
import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from recipe.config import FIELDS, Config, RunConfig, counts_in, entries_in
from recipe.config.values import converted
from recipe.data.shards import Manifest
from recipe.utils.checkpoints import checkpoints, manifest_of, problem_of, step_of
from recipe.utils.errors import UserError, reading
from recipe.utils.files import fsync, sha256_of
from recipe.utils.schema import COUNT, SHA256, check

logger = logging.getLogger(__name__)

_TRAINING_FILES = {"optimizer.safetensors", "trainer_state.json"}  # from_pretrained does not read these
_SAVING, _DELETING = ".saving-", ".deleting-"
_KEEP = ".keep"  # marks a checkpoint that is never pruned, such as a milestone, even of an earlier configuration
_REQUIRED_FILES = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json")

# The schema (recipe/utils/schema.py) of those fields of trainer_state.json that are read.
_TEXT = (None, str)
_PATHS: dict[str, object] = {name: _TEXT for name, field in FIELDS.items() if field.metadata["path"]}
_CONFIG = _PATHS | {"dataset_name": (str, [{"name": str, "weight": float}])}
_SOURCE = {
    **dict.fromkeys(("train_text", "commit", "dataset_config", "dataset_split", "shards"), _TEXT),
    "files": (None, [{"name": str}]),
    "of": (None, COUNT),
}
_PART = {
    **dict.fromkeys(("from_step", "processes", "nodes"), COUNT),
    **dict.fromkeys(("device", "engine", "precision", "python", "recipe"), str),
    **dict.fromkeys(("commit", "code"), _TEXT),
    "compiled": bool,
    "packages": {...: str},
    "config": _CONFIG,
    "data": _SOURCE | {"mixture": (None, [_SOURCE | {"name": str, "share": float}])},
}
_STATE = {
    **dict.fromkeys(("step", "tokens", "optimizer_steps"), COUNT),
    "engine": str,
    "about": [_PART],
    "config": _CONFIG,
    "tokenizer": {"name": str, "digest": str, "end_of_text": COUNT, "end_of_text_token": str},
    "grad_scaler": {...: float},
    "spike_filter": {...: (COUNT, [(None, float)])},
    "tracker": {"run_id": _TEXT},
    "metrics": dict.fromkeys(("seconds", "first_steps", "pauses"), float)
    | {"lines_sha256": SHA256, "running_loss": {"sum": float, "count": COUNT}, "unwritten": {...: (None, str, float)}},
    "data": {"mixture": (None, list)},
}
_DATA = {"shards": [[str, COUNT, (None, SHA256)]], "complete": bool, "manifest": (None, dict)}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory; its tensors are on the CPU, those of the model in fp32.

    Attributes:
        optimizer_state: {"<state>.<parameter name>": tensor}.
        state: the content of trainer_state.json.
    """

    path: Path
    step: int
    weights: dict[str, torch.Tensor]
    optimizer_state: dict[str, torch.Tensor]
    state: dict


def save_checkpoint(checkpoint: Checkpoint, files: dict[str, bytes]) -> None:
    """Writes a checkpoint to its `path` in the run's directory, all of it or nothing; its tensors must not change
    meanwhile. On one process.

    `files` are the further files that transformers needs: {file name: content}. Any error, such as OSError, or
    UserError if a tensor is not finite, leaves earlier checkpoints intact and nothing of this one.
    """
    final_dir = checkpoint.path
    temporary_dir = final_dir.with_name(f"{_SAVING}{final_dir.name}")
    for name, tensor in (*checkpoint.weights.items(), *checkpoint.optimizer_state.items()):
        if not tensor.isfinite().all():
            way_out = "lower learning_rate and continue from an earlier checkpoint (the best one is kept)"
            raise UserError(f"{name} holds inf or NaN; {way_out}")
    sweep(final_dir.parent)
    try:
        temporary_dir.mkdir()
        state = json.dumps(checkpoint.state | {"step": checkpoint.step}, indent=2).encode()
        for name, content in (files | {"trainer_state.json": state}).items():
            (temporary_dir / name).write_bytes(content)
        _save_tensors(checkpoint.weights, temporary_dir / "model.safetensors", {"format": "pt"})
        _save_tensors(checkpoint.optimizer_state, temporary_dir / "optimizer.safetensors")
        for path in temporary_dir.glob("*.safetensors"):  # safetensors 0.8 lets only their owner read them
            shutil.copymode(temporary_dir / "trainer_state.json", path)
        paths = sorted(temporary_dir.iterdir())
        manifest = {path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in paths}
        (temporary_dir / "manifest.json").write_text(json.dumps({"files": manifest}, indent=2))
        for path in (*temporary_dir.iterdir(), temporary_dir):
            fsync(path)
        temporary_dir.rename(final_dir)
        fsync(final_dir.parent)
    except BaseException:
        shutil.rmtree(temporary_dir, ignore_errors=True)
        raise


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # "Error while serializing: I/O error: ... (os error 28)"
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def prune(run_dir: Path, step: int, config: Config, val_losses: dict[int, float], limit: int | None = None) -> None:
    """Deletes checkpoints up to `step`, the one just committed, except for the last `save_total_limit` (or
    `limit`), multiples of `milestone_steps`, the one at `decay_start`, and the one with the best validation loss, so
    that a diverging run does not replace all its good ones. Milestones and the one at `decay_start` stay when the
    configuration changes. With `limit`, to make room for the last save, the best one is deleted too if the last
    loss measured is lower.

    `val_losses` is {step: validation loss}. Raises OSError.
    """
    milestone, decay_start = config.run.milestone_steps, config.optimizer.decay_start
    paths = [path for path in checkpoints(run_dir) if step_of(path) <= step and not path.is_symlink()]
    evaluated_paths = [path for path in paths if step_of(path) in val_losses]
    best_path = min(evaluated_paths, key=lambda path: val_losses[step_of(path)], default=None)
    if limit and best_path and val_losses[step_of(best_path)] > val_losses[max(val_losses)]:
        best_path = None
    for path in paths:
        is_kept = step_of(path) == decay_start or (milestone and step_of(path) % milestone == 0)
        if is_kept and not (path / _KEEP).exists():  # each costs an fsync, and a long run has many
            protect(path)
    for path in paths[: -(limit or config.run.save_total_limit)]:
        if path != best_path and not (path / _KEEP).exists():
            # Renamed first, so that an interrupted deletion leaves nothing that looks like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{_DELETING}{path.name}")))


def protect(checkpoint: Path) -> None:
    """Marks a checkpoint that must never be pruned. Raises OSError."""
    (checkpoint / _KEEP).touch()
    fsync(checkpoint)


def sweep(run_dir: Path) -> None:
    """Deletes what interrupted saves and deletions left behind."""
    for path in [*run_dir.glob(f"{_DELETING}*"), *run_dir.glob(f"{_SAVING}*")]:
        shutil.rmtree(path, ignore_errors=True)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """The path of a run's checkpoint at `step`, whether or not it exists."""
    return run_dir / f"step_{step:08d}"


def state_of(checkpoint: Path) -> dict:
    """The trainer_state.json of a checkpoint. Each field is checked, since others may have written it: raises
    UserError."""
    path = checkpoint / "trainer_state.json"
    with reading(path, f"try again, or move {checkpoint.name} away to continue from an earlier checkpoint"):
        state = json.loads(path.read_bytes())
    with reading(path, "if another version wrote it, use that one ('commit' names it), or start over with --fresh"):
        check(state, _STATE)
        config, data_states = state["config"], entries_in(state["data"])
        if not state["about"]:
            raise ValueError("about is empty")
        if len(data_states) != len(counts_in(config["dataset_name"])):
            raise ValueError("data does not match the data sets in config.dataset_name")
        for data_state in data_states:
            check(data_state, _DATA, "data")
            if manifest := data_state.get("manifest"):
                Manifest(**manifest)
        values = {name: config[name] for name in FIELDS if name in config and name not in _PATHS}
        return state | {"config": config | converted(values, FIELDS, f"{path}: config: ")}


def newest_state(run: RunConfig) -> dict:
    """The trainer_state.json of a run's newest checkpoint that has a readable one; {} if there is none, or if the run
    starts over."""
    for path in [] if run.fresh else reversed(checkpoints(Path(run.output_dir))):
        with suppress(UserError):  # `newest_intact` reports the damaged ones
            return state_of(path)
    return {}


def files_of(checkpoint: Path, *, state: bool = False) -> list[Path]:
    """The checkpoint's files that `from_pretrained` reads or, with `state`, all of its files; never a file that was
    added later."""
    names = set(manifest_of(checkpoint))
    return sorted(checkpoint / name for name in (names | {"manifest.json"} if state else names - _TRAINING_FILES))


def newest_intact(run_dir: Path, *, locked: bool = False, to_resume: bool = True) -> Path | None:
    """The newest checkpoint that `verify` finds intact; None if there is none at all. Damaged ones are skipped with a
    warning and, if this process has `locked` the run, renamed, so that `save_total_limit` does not count them. Raises
    UserError if one cannot be read, which may be temporary, or if all are damaged: only the user may start over."""
    paths, newest_problem = checkpoints(run_dir), ""
    for path in reversed(paths):
        with reading(path, f"try again, or move it out of {run_dir} to continue from an earlier one"):
            problems = verify(path, to_resume=to_resume)
        if not os.path.lexists(path):  # pruned meanwhile, so there is a newer one
            return newest_intact(run_dir, locked=locked, to_resume=to_resume)
        if not problems:
            for damaged_path in paths[paths.index(path) + 1 :] if locked else []:
                new_path = damaged_path.with_name(f"damaged_{damaged_path.name}")
                shutil.rmtree(new_path, ignore_errors=True)
                logger.warning("damaged    %s is kept as %s", damaged_path, damaged_path.rename(new_path).name)
            return path
        logger.warning("skipping %s: %s", path, problems[0])
        newest_problem = newest_problem or f"{path.name}: {problems[0]}"
    if paths:
        way_out = "; --fresh moves them aside and starts over" if to_resume else ""
        raise UserError(
            f"{run_dir}: none of its {len(paths)} checkpoints is intact{way_out}. The newest is {newest_problem}"
        )
    return None


def verify(path: Path, *, to_resume: bool = True) -> list[str]:
    """The problems of a checkpoint, file by file; empty if it is intact. Reads every byte, except for the optimizer's
    state where it is not `to_resume` a run. Raises OSError if a file exists and cannot be read."""
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        return ["it is a link out of the run's directory"]
    if problem := problem_of(path / "manifest.json"):
        return [f"manifest.json {problem}"]
    try:
        files = manifest_of(path)
    except UserError as error:
        return [str(error)]
    problems = [f"manifest.json does not list {name}" for name in _REQUIRED_FILES if name not in files]
    for name, expected in files.items():
        is_needed = to_resume or name != "optimizer.safetensors"
        if is_needed and (problem := problem_of(path / name, expected)):
            problems.append(f"{name} {problem}")
    return problems


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a verified checkpoint onto the CPU. Raises UserError if a file cannot be read."""
    state, tensors = state_of(path), []
    for name in ("model.safetensors", "optimizer.safetensors"):
        with reading(path / name, f"try again, or move {path.name} away to continue from an earlier checkpoint"):
            tensors.append(load_file(path / name))
    return Checkpoint(path, state["step"], *tensors, state)
