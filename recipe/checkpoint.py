"""Portable checkpoints: a `from_pretrained` directory plus the optimizer's moments by name, atomic and verified.

    step_00005000/
      model.safetensors       weights under transformers' names, fp32
      optimizer.safetensors   exp_avg.<name> and exp_avg_sq.<name>, fp32
      trainer_state.json      step, configuration, what else the loop needs to go on
      config.json, generation_config.json, tokenizer files
      manifest.json           size and SHA-256 of each file above

Nothing here depends on the engine or on how many processes there were, and nothing is pickled. A checkpoint is
written under a temporary name, flushed to the disk and renamed: what bears its final name is whole.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from recipe.config import UserError

_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY, _DELETING = ".saving-", ".deleting-"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    step: int
    weights: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    state: dict


def save_checkpoint(
    run: Path,
    step: int,
    weights: dict[str, torch.Tensor],
    moments: dict[str, torch.Tensor],
    state: dict,
    write_model_files: Callable[[Path], None],
) -> Path:
    """Commits `run`/step_XXXXXXXX and returns it. Call on one process; OSError leaves earlier checkpoints untouched.

    `write_model_files(directory)` adds what `transformers` needs beside the weights: config and tokenizer.
    """
    final = run / f"step_{step:08d}"
    temporary = run / f"{_TEMPORARY}{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write_model_files(temporary)
        manifest = {p.name: _entry(p.read_bytes()) for p in sorted(temporary.iterdir())}
        files = {
            "model.safetensors": lambda: save(_on_cpu(weights), metadata={"format": "pt"}),
            "optimizer.safetensors": lambda: save(_on_cpu(moments)),
            "trainer_state.json": lambda: json.dumps(state | {"step": step}, indent=2).encode(),
        }
        for name, content in files.items():
            data = content()
            manifest[name] = _entry(data)  # from memory: what is on the disk is judged by what was meant
            (temporary / name).write_bytes(data)
        (temporary / "manifest.json").write_text(json.dumps({"files": manifest}, indent=2))
        for path in temporary.iterdir():
            _fsync(path)
        _fsync(temporary)
        if final.exists():  # damaged, and passed over at resume: the same step, made again
            final.rename(run / f"{_DELETING}{final.name}")
        temporary.rename(final)
        _fsync(run)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def prune(run: Path, keep_last: int, milestone_every: int) -> list[Path]:
    """Deletes all but the newest `keep_last` checkpoints and those at multiples of `milestone_every` (0: none)."""
    old = checkpoints(run)[:-keep_last]
    old = [p for p in old if not (milestone_every and step_of(p) % milestone_every == 0)]
    for path in old:
        # Renamed first, so that a deletion cut short leaves nothing that looks like a checkpoint.
        doomed = path.rename(run / f"{_DELETING}{path.name}")
        shutil.rmtree(doomed)
    for leftover in [*run.glob(f"{_DELETING}*"), *run.glob(f"{_TEMPORARY}*")]:
        shutil.rmtree(leftover, ignore_errors=True)
    return old


def checkpoints(run: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first, unverified."""
    return sorted((p for p in run.glob("step_*") if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(_NAME.fullmatch(path.name).group(1))


def newest_valid(run: Path, say: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint whose every file verifies; each damaged one passed over is named through `say`."""
    for path in reversed(checkpoints(run)):
        if not (problems := verify(path)):
            return path
        say(f"skipping {path}: {problems[0]}")
    return None


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file; empty if nothing is. Reads every byte."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        return [f"manifest.json unreadable ({e})"]
    problems = []
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {file.stat().st_size} bytes, {expected['bytes']} were written")
        elif _sha256(file) != expected["sha256"]:
            problems.append(f"{name} does not have the checksum it was written with")
    return problems


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a verified checkpoint onto the CPU."""
    state = json.loads((path / "trainer_state.json").read_text())
    weights, moments = load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors")
    return Checkpoint(path, state["step"], weights, moments, state)


# Fields that make it another run: the same step would mean other weights or other data.
# Not the path of the data: shards may move, or be streamed instead, and are known by their checksums.
_IDENTITY = ("n_layer", "n_head", "n_embd", "n_positions", "sequence_length", "total_batch_tokens", "seed")


def check_same_run(state: dict, config: dict, run: Path) -> list[str]:
    """Compares a checkpoint's configuration with `config` (flat dicts); returns a line for each harmless difference.

    Raises UserError, naming the fields, where architecture, data or batch differ: that is another run.
    """
    before = state["config"]

    def differing(names) -> list[str]:
        return [f"{k} {before[k]!r} -> {config[k]!r}" for k in names if k in before and before[k] != config[k]]

    if changed := differing(_IDENTITY):
        raise UserError(
            f"{run} holds a run with other settings: {', '.join(changed)}. Put those back, choose another output_dir, "
            "or start over with --fresh (make train FRESH=1)"
        )
    silent = {"config", "output_dir", "run_name", "fresh", "dry_run"}
    return [f"resuming with {line}" for line in differing(k for k in config if k not in _IDENTITY and k not in silent)]


def move_aside(run: Path) -> Path:
    """Renames a run's directory to the next free `<run>.old-N`; nothing of it is deleted."""
    n = next(n for n in range(1, 10**6) if not run.with_name(f"{run.name}.old-{n}").exists())
    return run.rename(run.with_name(f"{run.name}.old-{n}"))


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}


def _entry(data: bytes) -> dict:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
