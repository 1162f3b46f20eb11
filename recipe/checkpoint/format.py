"""Portable checkpoints: a `from_pretrained` directory plus the optimizer's state by name, atomic and verified.

    step_00005000/
      model.safetensors       weights under transformers' names, fp32
      optimizer.safetensors   <state>.<parameter name>, such as exp_avg.transformer.wte.weight, fp32
      trainer_state.json      step, configuration, and the state of what the loop drives
      config.json, generation_config.json, tokenizer files
      manifest.json           size and SHA-256 of each file above

Nothing here depends on the engine or on the number of processes, and nothing is pickled. A checkpoint is written into a
temporary directory, flushed to the disk and renamed: a directory with its final name is complete.
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

from recipe.config import FIELDS, Config, RunConfig, counts_in
from recipe.config.values import converted
from recipe.data.shards import Manifest
from recipe.utils.checkpoints import checkpoints, manifest_of, problem_of, step_of
from recipe.utils.errors import UserError, reading
from recipe.utils.files import fsync, sha256_of
from recipe.utils.schema import COUNT, SHA256, check

logger = logging.getLogger(__name__)

_FOR_TRAINING = {"optimizer.safetensors", "trainer_state.json"}  # from_pretrained does not read these
_SAVING, _DELETING = ".saving-", ".deleting-"
_KEEP = ".keep"  # marks a checkpoint that a plan of its run has named, even an earlier plan: never pruned
_NEEDED = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json")

# What trainer_state.json holds, as far as anything reads it (recipe/utils/schema.py).
_TEXT = (None, str)
_PATHS: dict[str, object] = {name: _TEXT for name, field in FIELDS.items() if field.metadata["path"]}
_SOURCE: dict[str, object] = dict.fromkeys(("train_text", "commit", "dataset_config", "dataset_split", "shards"), _TEXT)
_SOURCE |= {"files": (None, [{"name": str}]), "of": (None, COUNT)}
_PART: dict[str, object] = dict.fromkeys(("from_step", "processes", "nodes"), COUNT) | {
    "compiled": bool,
    "packages": {...: str},
}
_PART |= dict.fromkeys(("device", "engine", "precision", "python", "recipe"), str) | {"commit": _TEXT}
_CONFIG = _PATHS | {"dataset_name": (str, [{"name": str, "weight": float}])}
_PART |= {"config": _CONFIG, "data": _SOURCE | {"mixture": (None, [_SOURCE | {"name": str, "share": float}])}}
_STATE = {
    **dict.fromkeys(("step", "tokens", "optimizer_steps"), COUNT),
    "engine": str,
    "about": [_PART],
    "config": _CONFIG,
    "tokenizer": {"name": str, "digest": str, "end_of_text": COUNT, "end_of_text_token": str},
    "grad_scaler": {...: float},
    "spike_filter": {...: (COUNT, [(None, float)])},
    "tracker": {"run_id": _TEXT},
    "metrics": dict.fromkeys(("seconds", "first_steps", "pauses", "save_wait"), float)
    | {"lines_sha256": SHA256, "running_loss": {"sum": float, "count": COUNT}, "unwritten": {...: (None, str, float)}},
    "data": {"mixture": (None, list)},
}
_DATA = {"shards": [[str, COUNT, (None, SHA256)]], "complete": bool, "manifest": (None, dict)}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory, its tensors fp32 on the CPU.

    Attributes:
        optimizer_state: {"<state>.<parameter name>": tensor}.
        state: trainer_state.json.
    """

    path: Path
    step: int
    weights: dict[str, torch.Tensor]
    optimizer_state: dict[str, torch.Tensor]
    state: dict


def save_checkpoint(checkpoint: Checkpoint, files: dict[str, bytes]) -> None:
    """Commits a checkpoint to its `path` in the run's directory; on one process, with tensors that do not change
    meanwhile.

    `files` is what transformers needs beside the weights: {file name: content}. Whatever is raised, such as OSError, or
    UserError where a tensor is not finite, leaves earlier checkpoints as they are and nothing of this one.
    """
    final = checkpoint.path
    temporary = final.with_name(f"{_SAVING}{final.name}")
    for name, tensor in (*checkpoint.weights.items(), *checkpoint.optimizer_state.items()):
        if not tensor.isfinite().all():
            way_out = "lower learning_rate and continue from an earlier checkpoint, of which the best is kept"
            raise UserError(f"{name} holds inf or NaN; {way_out}")
    sweep(final.parent)
    try:
        temporary.mkdir()
        state = json.dumps(checkpoint.state | {"step": checkpoint.step}, indent=2).encode()
        for name, content in (files | {"trainer_state.json": state}).items():
            (temporary / name).write_bytes(content)
        _save_tensors(checkpoint.weights, temporary / "model.safetensors", {"format": "pt"})
        _save_tensors(checkpoint.optimizer_state, temporary / "optimizer.safetensors")
        written = sorted(temporary.iterdir())
        manifest = {file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)} for file in written}
        (temporary / "manifest.json").write_text(json.dumps({"files": manifest}, indent=2))
        for path in (*temporary.iterdir(), temporary):
            fsync(path)
        temporary.rename(final)
        fsync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:  # "Error while serializing: I/O error: ... (os error 28)"
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        raise


def prune(run_dir: Path, newest: int, config: Config, val_losses: dict[int, float], limit: int | None = None) -> None:
    """Deletes checkpoints up to step `newest`, just committed, but keeps the last `save_total_limit` (or `limit`),
    those at multiples of `milestone_steps`, the one at `decay_start`, and the one with the best validation loss, so
    that a run that diverges does not replace all its good ones. What a plan has named stays when the plan changes.

    `val_losses` is {step: validation loss}. Raises OSError.
    """
    milestone, decay_start = config.run.milestone_steps, config.optimizer.decay_start
    older = [path for path in checkpoints(run_dir) if step_of(path) <= newest and not path.is_symlink()]
    evaluated = [path for path in older if step_of(path) in val_losses]
    best = min(evaluated, key=lambda path: val_losses[step_of(path)], default=None)
    for path in older:
        if step_of(path) == decay_start or (milestone and step_of(path) % milestone == 0):
            protect(path)
    for path in older[: -(limit or config.run.save_total_limit)]:
        if path != best and not (path / _KEEP).exists():
            # Renamed first: a deletion that is cut short leaves nothing that looks like a checkpoint.
            shutil.rmtree(path.rename(path.with_name(f"{_DELETING}{path.name}")))


def protect(checkpoint: Path) -> None:
    """Marks a checkpoint so that it is never pruned. Raises OSError."""
    (checkpoint / _KEEP).touch()
    fsync(checkpoint)


def sweep(run_dir: Path) -> None:
    """Deletes what an interrupted save or deletion has left."""
    for leftover in [*run_dir.glob(f"{_DELETING}*"), *run_dir.glob(f"{_SAVING}*")]:
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where a run's checkpoint of a step is, or would be."""
    return run_dir / f"step_{step:08d}"


def state_of(checkpoint: Path) -> dict:
    """The trainer_state.json of a checkpoint, each field checked, since it may come from others. Raises UserError."""
    path = checkpoint / "trainer_state.json"
    with reading(path, f"try again, or move {checkpoint.name} away to continue from an earlier checkpoint"):
        state = json.loads(path.read_bytes())
        check(state, _STATE)
        config, data = state["config"], state["data"].get("mixture") or [state["data"]]
        if not state["about"]:
            raise ValueError("about is empty")
        if len(data) != len(counts_in(config["dataset_name"])):
            raise ValueError("data is not of the data sets in config.dataset_name")
        for part in data:
            check(part, _DATA, "data")
            if manifest := part.get("manifest"):
                Manifest(**manifest)
        values = {name: config[name] for name in FIELDS if name in config and name not in _PATHS}
        return state | {"config": config | converted(values, FIELDS, f"{path}: config: ")}


def newest_state(run: RunConfig) -> dict:
    """The trainer_state.json of a run's newest checkpoint that has a readable one; {} where there is none, or where the
    run starts over."""
    for path in [] if run.fresh else reversed(checkpoints(Path(run.output_dir))):
        with suppress(UserError):  # damaged ones are named where the run continues
            return state_of(path)
    return {}


def files_of(checkpoint: Path, *, state: bool = False) -> list[Path]:
    """The checkpoint's files that `from_pretrained` reads, or all of its own with `state`; none that was added
    later."""
    names = set(manifest_of(checkpoint))
    return sorted(checkpoint / name for name in (names | {"manifest.json"} if state else names - _FOR_TRAINING))


def newest_intact(run_dir: Path, *, locked: bool = False) -> Path | None:
    """The newest checkpoint whose files all verify; None where there is none at all. Damaged ones are skipped with a
    warning and, if the run is `locked`, renamed: they must not count among those that are kept. Raises UserError where
    one cannot be read, which may pass, or where all are damaged: whether to start over is for the user to decide."""
    while committed := checkpoints(run_dir):
        damage = ""
        for path in reversed(committed):
            try:
                problems = verify(path)
            except OSError as e:
                raise UserError(
                    f"{path} cannot be read: {e.strerror}; try again, or move it out of {run_dir} to continue from an "
                    "earlier one"
                ) from None
            if not os.path.lexists(path):  # pruned meanwhile, so there is a newer one
                break
            if not problems:
                for damaged in committed[committed.index(path) + 1 :] if locked else []:
                    aside = damaged.with_name(f"damaged_{damaged.name}")
                    shutil.rmtree(aside, ignore_errors=True)
                    logger.warning("damaged    %s is kept as %s", damaged, damaged.rename(aside).name)
                return path
            logger.warning("skipping %s: %s", path, problems[0])
            damage = damage or f"{path.name}: {problems[0]}"
        else:
            raise UserError(
                f"{run_dir}: none of its {len(committed)} checkpoints is intact; --fresh starts over, and keeps them "
                f"aside. The newest, {damage}"
            )
    return None


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file; empty if nothing is. Reads every byte. Raises OSError where a file
    is there and cannot be read."""
    if path.is_symlink() and not path.resolve().is_relative_to(path.parent.resolve()):
        return ["it is a link out of the run"]
    if problem := problem_of(path / "manifest.json"):
        return [f"manifest.json {problem}"]
    try:
        files = manifest_of(path)
    except UserError as error:
        return [str(error)]
    problems = [f"manifest.json does not list {name}" for name in _NEEDED if name not in files]
    by_file = {name: problem_of(path / name, written) for name, written in files.items()}
    return problems + [f"{name} {problem}" for name, problem in by_file.items() if problem]


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a verified checkpoint onto the CPU. Raises UserError where a file cannot be read."""
    state, loaded = state_of(path), []
    for name in ("model.safetensors", "optimizer.safetensors"):
        with reading(path / name, f"try again, or move {path.name} away to continue from an earlier checkpoint"):
            loaded.append(load_file(path / name))
    return Checkpoint(path, state["step"], *loaded, state)
