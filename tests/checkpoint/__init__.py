"""Tests of recipe/checkpoint/."""

from pathlib import Path

import torch

from recipe.checkpoint.format import Checkpoint, checkpoint_path, save_checkpoint


def save(run_dir: Path, step: int, **state) -> Path:
    """A small whole checkpoint."""
    run_dir.mkdir(parents=True, exist_ok=True)
    weights = {"a.weight": torch.arange(6.0).view(2, 3) + step}
    moments = {"exp_avg.a.weight": torch.ones(2, 3), "exp_avg_sq.a.weight": torch.ones(2, 3)}
    state = {"config": {"n_layer": 2, "learning_rate": 1e-3}, "data": {}} | state
    checkpoint = Checkpoint(checkpoint_path(run_dir, step), step, weights, moments, state)
    save_checkpoint(checkpoint, {"config.json": b"{}"})
    return checkpoint.path
