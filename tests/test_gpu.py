"""What only a GPU can show: 50 steps in each precision against the CPU's fp32 curve. `make test ARGS="-k gpu"`

Several processes on one GPU are not possible with NCCL: DDP and ZeRO over several ranks are tested on CPU processes.
"""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import EQUAL, flags, launch, metrics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
BF16 = not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def curve(shards, run, config: str, cpu: bool, **fields) -> list[float]:
    settings = EQUAL | {"sequence_length": 32, "total_batch_tokens": 256, "data": shards, "output_dir": run} | fields
    arguments = flags(**settings)
    result = launch(config, 1, "recipe/train.py", *arguments, env={"ACCELERATE_USE_CPU": str(cpu).lower()})
    assert result.returncode == 0, result.stdout + result.stderr
    return [line["loss"] for line in metrics(run) if line["loss"] is not None]


@pytest.fixture(scope="module")
def reference(shards, tmp_path_factory):
    return curve(shards, tmp_path_factory.mktemp("cpu") / "run", "single", cpu=True)


@pytest.mark.parametrize("config", ["single", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize(("precision", "compiled", "tolerance"), [
    ("fp32", False, 1e-3), ("tf32", False, 2e-2), ("bf16", False, 2e-2), ("bf16", True, 2e-2), ("fp16", False, 2e-2),
    ("fp16", True, 2e-2),
])  # fmt: skip
def test_gpu_follows_the_cpu(shards, reference, tmp_path, config, precision, compiled, tolerance):
    if precision in ("bf16", "tf32") and not BF16:
        pytest.skip(f"{torch.cuda.get_device_name()} has no {precision}")
    # recomputation goes with compilation: the large recipes ask for both
    options = {"precision": precision, "compile": str(compiled).lower(), "recompute": str(compiled).lower()}
    losses = curve(shards, tmp_path / "run", config, cpu=False, **options)
    assert losses == pytest.approx(reference, abs=tolerance)
    assert all(t.dtype == torch.float32 for t in load_file(tmp_path / "run/step_00000050/model.safetensors").values())


@pytest.mark.parametrize("config", ["single", "zero1", "zero3"])
def test_gpu_resumes_what_the_cpu_saved(shards, reference, tmp_path, config):
    curve(shards, tmp_path / "run", "single", cpu=True)
    shutil.rmtree(tmp_path / "run" / "step_00000050")
    losses = curve(shards, tmp_path / "run", config, cpu=False)
    assert losses[25:] == pytest.approx(reference[25:], abs=1e-3)
