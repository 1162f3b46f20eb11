"""A local Hub, and a run to upload to it."""

import os
import shutil
import threading
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.utils._http import default_client_factory

from tests.checkpoint import change_state
from tests.hub import TOKEN, Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that this process uses; a request fails after two seconds without a byte."""
    constants = huggingface_hub.constants
    with Hub(tmp_path / "hub", TOKEN) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        url_template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url_template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "2")
        yield hub
    for thread in threading.enumerate():  # an unfinished upload would go to the next test's Hub
        if thread.name == "upload":
            thread.join(30)
            assert not thread.is_alive()
    huggingface_hub.set_client_factory(default_client_factory)


@pytest.fixture
def run(whole_run, tmp_path) -> Path:
    """The directory of a run of 20 steps with milestones every 10."""
    run = shutil.copytree(whole_run[0], tmp_path / "run", copy_function=os.link)
    for checkpoint in run.glob("step_*"):
        change(checkpoint, milestone_steps=10)
    return run


def change(checkpoint: Path, **config) -> None:
    """Changes the configuration in a checkpoint, which stays intact."""

    def update(state: dict) -> None:
        for recorded in (state["config"], state["about"][-1]["config"]):
            recorded.update(config)

    change_state(checkpoint, update)
