"""The run on one device with which the other engines are compared, and checks of several engines' runs."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.conftest import EQUAL, assert_equal_tensors, by_step, flags, forget_after, launch, ok, tensors

# Everything that may shift dropout's masks.
EVALUATED = {"max_steps": 8, "warmup_steps": 2, "dropout": 0.1, "eval_steps": 4, "save_steps": 4}
EVALUATED |= {"hellaswag_steps": 4, "hellaswag_limit": 9, "sample_steps": 4}


def settings(shards, **fields) -> list[str]:
    """Flags of recipe/train.py: 50 steps of 8 sequences, with checkpoints at 20, 40 and 50."""
    return flags(**(EQUAL | {"dataset_name": shards, "save_steps": 20} | fields))


def assert_same_losses(lines: dict, expected: dict, first: int = 1, last: int = 50, within: float = 1e-4) -> None:
    """Up to 1e-5 in the first ten steps, then up to `within`, since differences of rounding grow."""
    for step in range(first, last + 1):
        assert abs(lines[step]["loss"] - expected[step]["loss"]) <= (1e-5 if step < first + 10 else within), step


def check_resumed_run(train: Callable[[Path], dict], tmp_path: Path, capsys) -> dict:
    """Fails unless a run of EVALUATED that is resumed from step 4 ends as the uninterrupted run, to the bit. `train`
    takes a run's directory and returns its metrics by step; so does this function, of the uninterrupted run."""
    full, resumed = tmp_path / "full", tmp_path / "resumed"
    lines = train(full)
    assert capsys.readouterr().out.count(": sample ") == 3
    forget_after(4, shutil.copytree(full, resumed))
    resumed_lines = train(resumed)
    assert "from step 4" in capsys.readouterr().out
    assert_equal_tensors(resumed / "step_00000008", full / "step_00000008")
    for key in ("loss", "val_loss", "learning_rate", "grad_norm", "hellaswag_llmc_acc"):
        assert [line.get(key) for line in resumed_lines.values()] == [line.get(key) for line in lines.values()]
    return lines


def assert_fp32(checkpoint: Path) -> None:
    """The bits are checked, since torch_xla can hold bf16 values in tensors that it calls float32."""
    for name, tensor in tensors(checkpoint).items():
        assert tensor.dtype == torch.float32
        assert tensor.ndim < 2 or not torch.equal(tensor, tensor.bfloat16().float()), name


@pytest.fixture(scope="session")
def one_device(shards, once):
    """(directory, metrics by step)."""

    def make(directory):
        ok(launch("single", 1, "recipe/train.py", *settings(shards, output_dir=directory, micro_batch_size=8)))

    directory, _ = once("one-device", make)
    lines = by_step(directory)
    assert list(lines) == list(range(51))
    assert lines[50]["loss"] < lines[1]["loss"] - 0.5  # it learns: equal losses are no accident
    return directory, lines
