"""Tests of recipe/checkpoint/."""

import hashlib
import json
from pathlib import Path

import torch

from recipe.checkpoint.format import Checkpoint, checkpoint_path, save_checkpoint


def save(run_dir: Path, step: int, **state) -> Path:
    """A small intact checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    weights = {"a.weight": torch.arange(6.0).view(2, 3) + step}
    moments = {"exp_avg.a.weight": torch.ones(2, 3), "exp_avg_sq.a.weight": torch.ones(2, 3)}
    state = {"config": {"n_layer": 2, "learning_rate": 1e-3}, "data": {}} | state
    checkpoint = Checkpoint(checkpoint_path(run_dir, step), step, weights, moments, state)
    save_checkpoint(checkpoint, {"config.json": b"{}"})
    return checkpoint.path


def flip_bit(path: Path, index: int = -1) -> None:
    """Damages a file, in its byte at `index`."""
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def replace_files(checkpoint: Path, files: dict[str, bytes]) -> None:
    """Replaces files of a checkpoint and updates its manifest, so that it stays intact, as a foreign one may be."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, content in files.items():
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    for name, content in (files | {"manifest.json": json.dumps(manifest).encode()}).items():
        (checkpoint / name).unlink()  # perhaps a link to a fixture's
        (checkpoint / name).write_bytes(content)


def change_state(checkpoint: Path, change) -> None:
    """Replaces the trainer_state.json after `change`, a function of its dict, has modified it."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    change(state)
    replace_files(checkpoint, {"trainer_state.json": json.dumps(state).encode()})
