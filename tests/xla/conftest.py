"""The TPU engine's tests: run by `make test-xla` on XLA's CPU client; where torch_xla is missing they skip.

No file here imports torch_xla at its top: the tests are collected, and say why they skip, in the other environment.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import EQUAL, ROOT, flags, metrics

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


def launch(
    *arguments: str, config: str, config_file: Path | None = None, devices: int = 1, processes: int | None = None
):
    """What a user types: `accelerate launch --config_file ... recipe/train.py ...`."""
    xla = config.startswith("tpu")
    command = [BIN / "accelerate", "launch", "--quiet", "--config_file"]
    command += [config_file or ROOT / f"accelerate_configs/{config}.yaml"]
    command += ["--num_processes", str(processes), "--main_process_port", "0"] if processes else []
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    variables |= {"CPU_NUM_DEVICES": str(devices)} if xla else {"USE_TORCH_XLA": "0"}
    if not config.startswith("zero") and not xla:
        variables["ACCELERATE_USE_CPU"] = "true"
    for name in ("PYTHONPATH", "XLA_USE_SPMD"):  # the latter is of the engines within this process
        variables.pop(name, None)
    return subprocess.run(
        [*command, "recipe/train.py", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=300
    )


def train(shards, run: Path, *, config: str = "tpu", devices: int = 1, processes: int | None = None, **fields):
    """A run of EQUAL's settings into `run`; its metrics by step, and its output."""
    settings = EQUAL | {"data": shards, "output_dir": run} | fields
    result = launch(*flags(**settings), config=config, devices=devices, processes=processes)
    assert result.returncode == 0, result.stdout + result.stderr
    return {line["step"]: line for line in metrics(run)}, result.stdout


def column(lines: dict, name: str, last: int = 10**9) -> list:
    return [line[name] for step, line in lines.items() if line[name] is not None and step <= last]


@pytest.fixture(scope="session")
def plain(shards, tmp_path_factory):
    """The engine of one device, in the same environment: (directory, metrics)."""
    run = tmp_path_factory.mktemp("plain") / "run"
    return run, train(shards, run, config="single")[0]


@pytest.fixture(scope="session")
def one_device(shards, tmp_path_factory):
    """XLA, one device, accumulation 4: (directory, metrics)."""
    run = tmp_path_factory.mktemp("one") / "run"
    return run, train(shards, run)[0]


@pytest.fixture(scope="session")
def engine():
    """An engine of four devices within this process."""
    from recipe.engine import open_engine

    return open_engine("fp32")


@pytest.fixture
def compilations(engine):
    """A function that counts the programs compiled so far."""
    return lambda: engine.counters()["compilations"]
