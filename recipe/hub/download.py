"""Downloads checkpoints that were uploaded to the Hugging Face Hub with the training state (upload.py)."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from recipe.checkpoint.format import checkpoint_path, step_of
from recipe.hub.access import limit_requests, reason
from recipe.hub.upload import branch_of
from recipe.utils.errors import UserError


def checkpoints_on_the_hub(repo: str, run: Path) -> list[Path]:
    """The paths in the run directory `run` where `fetch` puts a repository's checkpoints, oldest first. Raises
    UserError."""
    limit_requests()
    with _asking(repo):
        branches = [branch.name for branch in HfApi().list_repo_refs(repo).branches]
    steps = sorted(int(name.removeprefix("step-")) for name in branches if re.fullmatch(r"step-\d{6,}", name))
    return [checkpoint_path(run, step) for step in steps]


def fetch(repo: str, checkpoint: Path) -> None:
    """Downloads a checkpoint unless it exists, and its metrics.jsonl into the run's directory. Raises UserError."""
    if checkpoint.exists():
        return
    branch = branch_of(step_of(checkpoint))
    with _asking(f"{repo}, {branch}"):
        snapshot_download(repo, revision=branch, local_dir=checkpoint)
    metrics = checkpoint / "metrics.jsonl"
    if not metrics.is_file():
        raise UserError(f"{repo}, {branch}: no metrics.jsonl there; only uploads of --push_to_hub state can be audited")
    metrics.replace(checkpoint.parent / metrics.name)


@contextmanager
def _asking(what: str) -> Generator[None, None, None]:
    try:
        yield
    except Exception as error:
        raise UserError(
            f"{what} cannot be read from the Hub ({reason(error)}); check the name and the network"
        ) from None
