"""Where a checkpoint comes from: configuration, device, processes, versions, code and data, in trainer_state.json."""

import glob
import platform
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import recipe
from recipe.checkpoint.run_dir import HARMLESS
from recipe.config import ROOT, Config, DataConfig, batch_arithmetic, data_sets
from recipe.data.shards import Manifest
from recipe.engine.strategy import Strategy
from recipe.utils.errors import UserError
from recipe.utils.redaction import redact, redacted

_FILES = 10  # how many names of a local text's files are kept
# Packages on whose versions a run's numbers may depend.
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "deepspeed",
    "torch_tpu",
    "torch_xla",
    "datasets",
    "tiktoken",
    "safetensors",
)
# Fields that decide no number of a run: a change of one is no new part of it.
_OUTSIDE = HARMLESS - {"run_name"} | {"report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_license"}


def about(config: Config, strategy: Strategy, step: int, earlier: list[dict] | None) -> list[dict]:
    """The parts of a run, each {"from_step", "device", "engine", "processes", ...}: the `earlier` ones and, if anything
    differs from the last of them, a new one from `step` on."""
    device, processes = strategy.device, strategy.runtime.processes
    now = {
        "device": device.chip,
        "engine": str(strategy),
        "method": strategy.runtime.method,
        "processes": processes.world_size,
        "nodes": processes.nodes,
        "precision": device.precision,
        "compiled": bool(config.run.torch_compile and not device.no_compile),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "micro_batch_size": batch_arithmetic(config, processes.world_size, device.count).micro,
        "python": platform.python_version(),
        "packages": versions(),
        "recipe": recipe.__version__,
        "commit": _commit(),
        "data": _data(config.data),
        "config": {name: value for name, value in config.flat().items() if name not in _OUTSIDE},
    }
    parts = list(earlier or [])
    if not parts or {k: v for k, v in parts[-1].items() if k not in ("from_step", "init_from")} != redacted(now):
        parts.append({"from_step": step} | redacted(now))
    if step == 0 and config.model.init_from:  # a path is private: only that there was one
        parts[0]["init_from"] = "" if Path(config.model.init_from).exists() else config.model.init_from
    return parts


def descends(parts: list[dict], step: int, earlier: list[dict]) -> bool:
    """Whether a run with these `parts` went through the checkpoint of `step` with the parts `earlier`: it has them too,
    and what came after them did not begin before."""
    return parts[: len(earlier)] == earlier and all(part["from_step"] >= step for part in parts[len(earlier) :])


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    known = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def _commit() -> str | None:
    """The commit of this code, with "+" if files were changed since; None where it is no clone."""
    if not (ROOT / ".git").exists():  # installed, perhaps within another repository
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _data(data: DataConfig) -> dict:
    """The text and the options that the shards were made from, by their manifest. Without a manifest of this recipe's,
    {"shards": the name of their directory}, with the "train_text" that dataset_source declares: the configuration may
    name another text. For a mixture, {"mixture": [{"name", "share"} and the same of each data set, ...]}."""
    sets = data_sets(data)
    if len(sets) > 1:
        return {"mixture": [{"name": one.name, "share": one.share} | _data(one.data) for one in sets]}
    name = data.dataset_name
    try:
        manifest = None if glob.has_magic(name) else Manifest.load(Path(name))
    except (UserError, OSError):
        manifest = None
    if manifest is None or not manifest.source:
        declared = {"train_text": data.dataset_source} if data.dataset_source else {}
        return {"shards": Path(redact(name)).name} | declared
    files = manifest.source.get("files", [])
    some = {"files": files[:_FILES], "of": len(files)} if files else {}
    return manifest.source | some | {"options": manifest.options}
