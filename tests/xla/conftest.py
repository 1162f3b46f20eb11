"""The TPU engine's tests: run by `make test-xla` on XLA's CPU client; where torch_xla is missing they skip.

No file here imports torch_xla at its top: the tests are collected, and say why they skip, in the other environment.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import EQUAL, by_step, flags, ok

# Four devices for what runs within this process; before torch_xla is imported.
os.environ.setdefault("CPU_NUM_DEVICES", "4")

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent


def pytest_collection_modifyitems(items):
    if find_spec("torch_xla") and os.environ.get("PJRT_DEVICE") == "CPU":
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs torch_xla and PJRT_DEVICE=CPU: make test-xla"))


def launch(config: str, *command, devices: int = 1):
    """What a user types: `accelerate launch --config_file ... recipe/train.py ...`, with or without torch_xla."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "XLA_USE_SPMD": "0"}  # not what an engine within this process set
    if "tpu" in config:
        env |= {"CPU_NUM_DEVICES": str(devices), "ACCELERATE_USE_CPU": "false"}
    else:
        env["USE_TORCH_XLA"] = "0"
    return conftest.launch(config, 1, "recipe/train.py", *command, env=env, real=True)


def train(shards, run: Path, *, config: str = "tpu", devices: int = 1, **fields):
    """A run of EQUAL's settings into `run`; its metrics by step, and its output."""
    settings = EQUAL | {"dataset_name": shards, "output_dir": run} | fields
    result = ok(launch(config, *flags(**settings), devices=devices))
    return by_step(run), result.stdout


def train_here(shards, run: Path, **fields):
    """The same within this process, on four devices: quicker, for programs are compiled once for all its runs."""
    from recipe import train

    settings = EQUAL | {"dataset_name": shards, "output_dir": run} | fields
    assert train.main(flags(**settings)) == 0
    return by_step(run)


def column(lines: dict, name: str, last: int = 10**9) -> list:
    return [line[name] for step, line in lines.items() if line[name] is not None and step <= last]


@pytest.fixture(scope="session")
def plain(shards, once):
    """The engine of one device, in the same environment: (directory, metrics)."""
    run, _ = once("plain", lambda run: train(shards, run, config="single")[1])
    return run, by_step(run)


@pytest.fixture(scope="session")
def strategy():
    """A strategy of four devices within this process."""
    from recipe.engine.factory import open_strategy

    return open_strategy("fp32")


@pytest.fixture
def compilations(strategy):
    """A function that counts the programs compiled so far."""
    return lambda: strategy.device.counters()["compilations"]
