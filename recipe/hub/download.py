"""Downloads checkpoints that upload.py uploaded to the Hugging Face Hub with the training state."""

import re
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.hf_api import RepoFile

from recipe.checkpoint.format import checkpoint_path, step_of
from recipe.hub.access import REQUEST_TIMEOUT_S, limit_requests
from recipe.hub.upload import MAIN, STATE, branch_of
from recipe.utils.download import within
from recipe.utils.errors import UserError, reading

_WAY_OUT = "check the name and the network"


def checkpoints_on_the_hub(repo: str, run: Path) -> list[Path]:
    """The paths in `run` where `fetch` puts a repository's checkpoints, oldest first. Raises UserError."""
    limit_requests()
    with reading(repo, _WAY_OUT, "read from the Hub"):
        refs = within(REQUEST_TIMEOUT_S, lambda: HfApi().list_repo_refs(repo))
    names = [branch.name for branch in refs.branches]
    steps = sorted(int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d{6,}", name))
    return [checkpoint_path(run, step) for step in steps]


def step_of_main(repo: str, checkpoints: list[Path]) -> int | None:
    """The step of the newest of these checkpoints whose model is that of `main`, which from_pretrained loads;
    0 if `main` has no model, None if its model is none of theirs. Raises UserError."""
    with reading(repo, _WAY_OUT, "read from the Hub"):
        if "model.safetensors" not in (main := _model_files(repo, MAIN)):
            return 0
        for step in reversed([step_of(path) for path in checkpoints]):
            if _model_files(repo, branch_of(step)) == main:
                return step
    return None


def _model_files(repo: str, branch: str) -> dict[str, str]:
    """{name: the Hub's digest} of a branch's files of the kinds that make a model, without the training's state."""
    files = within(REQUEST_TIMEOUT_S, lambda: [*HfApi().list_repo_tree(repo, revision=branch)])
    digests = {f.path: f.lfs.sha256 if f.lfs else f.blob_id for f in files if isinstance(f, RepoFile)}
    kinds, others = (".json", ".safetensors", ".bin", ".py", ".txt", ".jinja"), STATE | {"results.json"}
    return {name: digest for name, digest in digests.items() if name.endswith(kinds) and name not in others}


def fetch(repo: str, checkpoint: Path) -> None:
    """Downloads a checkpoint and metrics.jsonl up to its step, unless it exists. Raises UserError."""
    if (checkpoint / "manifest.json").exists():
        return
    branch = branch_of(step_of(checkpoint))
    with reading(f"{repo}, {branch}", _WAY_OUT, "read from the Hub"):
        snapshot_download(repo, revision=branch, local_dir=checkpoint)
    if not (checkpoint / "metrics.jsonl").is_file():
        raise UserError(f"{repo}, {branch}: no metrics.jsonl; only a run with --push_to_hub state can be audited")
