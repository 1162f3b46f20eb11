"""Whether a directory may be a run's: refused before anything is written among another's files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from recipe.checkpoint.format import checkpoints
from recipe.config import Config

# What other programs leave where they have trained.
_PICKLES = ("*.pt", "*.pth", "*.ckpt", "*.pkl", "pytorch_model*.bin", "checkpoint-*/pytorch_model*.bin")
# What a run makes before its first line of metrics, and what people put beside it: notes, a recipe, a log.
_TRACKERS = {"tensorboard", "wandb", "gpt2-recipe"}  # the last by version 0.1's way with TensorBoard
_BESIDE = {".log", ".out", ".err", ".md", ".txt", ".yaml", ".yml"}


def refusal(config: Config) -> str:
    """Why the run must not use its directory, with the way out; empty if it may. Looks at names alone."""
    run, directory, runs = config.run, Path(config.run.output_dir), Path("runs")
    if directory == runs / run.run_name and not directory.resolve().is_relative_to(runs.resolve()):
        return (
            f"run_name {run.run_name}: {directory} is a link out of {runs}/, to {directory.resolve()}; choose another "
            "run_name, or give that directory as output_dir"
        )
    if directory.exists() and not directory.is_dir():
        return f"output_dir {directory} is a file; choose another output_dir"
    if not directory.is_dir() or checkpoints(directory) or (directory / "metrics.jsonl").exists():
        return ""
    if pickles := sorted(p for pattern in _PICKLES for p in directory.glob(pattern)):
        return (
            f"output_dir {directory} holds {_some(pickles)}: a pickle, which can run any code when loaded, and is not "
            "read. Choose another output_dir; to go on from weights that you trust, save them as safetensors with "
            "transformers (model.save_pretrained) and give that directory as init_from"
        )
    own = [
        Path(name).resolve()
        for name in (config.data.dataset_name, config.data.val_data, config.data.train_text)
        if name
    ]
    if others := sorted(p for p in directory.iterdir() if not _may_stay(p, own)):
        return f"output_dir {directory} is not a run's: it holds {_some(others)}. Choose one that is new or empty"
    return ""


def _may_stay(path: Path, own: list[Path]) -> bool:
    return (
        path.name.startswith(".")
        or path.name in _TRACKERS | {"lost+found"}
        or path.suffix in _BESIDE
        or any(p.is_relative_to(path.resolve()) for p in own)
    )


def _some(paths: Iterable[Path]) -> str:
    names = [path.name for path in paths]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
