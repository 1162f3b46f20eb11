"""A Hub to upload to, and a run's directory as far as files go."""

import hashlib
import json
import logging
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils._http import default_client_factory

from tests.hub.push_server import TOKEN, PushHub


@pytest.fixture
def push_hub(tmp_path, monkeypatch):
    """A Hub that this process talks to; a request fails after two seconds without a byte."""
    constants = huggingface_hub.constants
    with PushHub(tmp_path / "hub") as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
        yield hub
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's directory with checkpoints of steps 10 and 20, both evaluated, of 2 MB of weights."""
    for step in (10, 20):
        make_checkpoint(tmp_path / "run" / f"step_{step:08d}", step)
    lines = [{"step": 10, "val_loss": 4.5}, {"step": 20, "val_loss": 4.25}]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "run"


def make_checkpoint(path: Path, step: int, weights: bytes | None = None, **config) -> None:
    """A whole checkpoint, in which no file is what its name promises."""
    config = {"run_name": "mine", "max_steps": 20, "milestone_steps": 10} | config
    files = {
        "model.safetensors": weights or bytes([step]) * 2_000_000,
        "config.json": json.dumps({"dtype": "float32", "step": step}).encode(),
        "optimizer.safetensors": b"the trainer's own",
        "trainer_state.json": json.dumps({"step": step, "config": config}).encode(),
    }
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    listed = {name: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for name, c in files.items()}
    (path / "manifest.json").write_text(json.dumps({"files": listed}))


class Lines(list):
    def have(self, text: str) -> int:
        return sum(text in line for line in self)


@pytest.fixture
def lines():
    """The messages of recipe/hub, as they come."""
    logger, found, handler = logging.getLogger("recipe.hub"), Lines(), logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
