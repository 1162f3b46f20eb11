"""The XLA engine's tests, run by `make test-xla` on XLA's CPU client; they skip without torch_xla.

No file here imports torch_xla at module level: an environment without it collects the tests and reports why they skip.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import conftest
from tests.conftest import EQUAL, by_step, flags, ok

# Devices of this process; read when torch_xla is imported.
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
    """Runs `accelerate launch --config_file ... recipe/train.py ...`, with torch_xla for tpu.yaml only."""
    env = {"PATH": f"{BIN}:{os.environ['PATH']}", "XLA_USE_SPMD": "0"}  # an engine in this process may have set it
    if "tpu" in config:
        env |= {"CPU_NUM_DEVICES": str(devices), "ACCELERATE_USE_CPU": "false"}
    else:
        env["USE_TORCH_XLA"] = "0"
    return conftest.launch(config, 1, "recipe/train.py", *command, env=env, real=True)


def train(shards, run: Path, *, config: str = "tpu", devices: int = 1, **fields):
    """Trains with EQUAL's settings; returns the metrics by step, and the output."""
    settings = EQUAL | {"dataset_name": shards, "output_dir": run} | fields
    result = ok(launch(config, *flags(**settings), devices=devices))
    return by_step(run), result.stdout


def train_here(shards, run: Path, **fields):
    """The same in this process, on four devices: faster, because programs are compiled once for all runs."""
    from recipe import train

    settings = EQUAL | {"dataset_name": shards, "output_dir": run} | fields
    assert train.main(flags(**settings)) == 0
    return by_step(run)


def column(lines: dict, name: str) -> list:
    return [line[name] for line in lines.values() if line[name] is not None]


@pytest.fixture(scope="session")
def plain(shards, once):
    """Metrics by step of the one-device engine, in the same environment."""
    return by_step(once("plain", lambda run: train(shards, run, config="single")[1])[0])


@pytest.fixture(scope="session")
def strategy():
    """The strategy of four devices in this process."""
    from recipe.engine.factory import open_strategy

    return open_strategy("fp32")


@pytest.fixture
def compilations(strategy):
    """A function that returns the number of programs compiled so far."""
    return lambda: strategy.device.counters()["compilations"]
