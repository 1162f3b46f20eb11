"""Where a checkpoint comes from: configuration, device, processes, versions, code and data, in trainer_state.json."""

import glob
import hashlib
import logging
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

logger = logging.getLogger(__name__)
# Packages whose versions may affect a run's numbers.
_PACKAGES = (
    *("torch", "transformers", "accelerate", "deepspeed", "torch_tpu", "torch_xla"),
    *("datasets", "tiktoken", "tokenizers", "safetensors"),
)
# Fields that do not affect a run's numbers; a change of one does not start a new part.
_IGNORED = HARMLESS - {"run_name"} | {"report_to", "push_to_hub", "hub_model_id", "hub_private_repo", "hub_license"}


def about(config: Config, strategy: Strategy, step: int, earlier_parts: list[dict]) -> list[dict]:
    """The parts of a run, each {"from_step", "device", "engine", "processes", ...}: the `earlier_parts` and, if
    anything differs from the last of them, a new one that starts at `step`."""
    device, processes = strategy.device, strategy.runtime.processes
    part = {
        "device": device.chip,
        "engine": str(strategy),
        "method": strategy.runtime.method,
        "processes": processes.world_size,
        "nodes": processes.nodes,
        "precision": device.precision,
        "compiled": bool(config.run.torch_compile and not strategy.runtime.no_compile),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "micro_batch_size": batch_arithmetic(config, processes.world_size, device.count).micro,
        "python": platform.python_version(),
        "packages": versions(),
        "recipe": recipe.__version__,
        "commit": _commit(),
        "code": code_sha256(),
        "data": _data(config.data),
        "config": {name: value for name, value in config.flat().items() if name not in _IGNORED},
    }
    parts = list(earlier_parts)
    if not parts or {k: v for k, v in parts[-1].items() if k not in ("from_step", "init_from")} != redacted(part):
        if parts and part["code"] != parts[-1].get("code"):
            commits = [parts[-1]["commit"], part["commit"]]  # None without a clone, as in a container
            change = f" (commit {commits[0]}, then {commits[1]})" if all(commits) else ""
            logger.warning("code       has changed since step %d was saved%s", step, change)
        parts.append({"from_step": step} | redacted(part))
    if step == 0 and config.model.init_from:  # a path is private: records only that there was one
        parts[0]["init_from"] = "" if Path(config.model.init_from).exists() else config.model.init_from
    return parts


def descends(parts: list[dict], step: int, ancestors: list[dict]) -> bool:
    """Whether a run with these `parts` passed through the checkpoint of `step` whose parts are `ancestors`: it has the
    same first parts, and the further ones start at `step` or later."""
    return parts[: len(ancestors)] == ancestors and all(part["from_step"] >= step for part in parts[len(ancestors) :])


def versions() -> dict[str, str]:
    """{package: version} of those that are installed."""
    installed_versions = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed_versions[name] = version(name)
    return installed_versions


def code_sha256() -> str:
    """The SHA-256 of all Python files that compute a run's numbers."""
    paths = sorted(path for package in ("recipe", "eval") for path in (ROOT / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def _commit() -> str | None:
    """The commit of this code, with "+" if files have changed since; None if it is not a clone."""
    if not (ROOT / ".git").exists():  # installed, perhaps inside another repository
        return None
    safe = f"safe.directory={ROOT}"  # the clone may belong to another user, as in a container
    command = ["git", "-c", safe, "-C", str(ROOT), "describe", "--always", "--abbrev=40", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _data(data: DataConfig) -> dict:
    """The text that the shards were made from and the options, from their manifest. Shards without a manifest give
    {"shards": the name of their directory} and, if dataset_source is set, "train_text"; the configuration's train_text
    may be another. A mixture gives {"mixture": [{"name", "share"} and the same for each data set, ...]}."""
    entries = data_sets(data)
    if len(entries) > 1:
        return {"mixture": [{"name": entry.name, "share": entry.share} | _data(entry.data) for entry in entries]}
    name = data.dataset_name
    try:
        manifest = None if glob.has_magic(name) else Manifest.load(Path(name))
    except (UserError, OSError):
        manifest = None
    if manifest is None or not manifest.source:
        source = {"train_text": data.dataset_source} if data.dataset_source else {}
        return {"shards": Path(redact(name)).name} | source
    files = manifest.source.get("files", [])
    count = {"of": len(files)} if files else {}
    return count | manifest.source | {"options": manifest.options}
