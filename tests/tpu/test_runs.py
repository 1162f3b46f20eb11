"""Runs on the device "tpu" have the losses of the same run on a CPU."""

import shutil

import pytest
import torch

from tests.conftest import assert_equal_tensors, by_step, forget_after, launch, tensors
from tests.tpu.conftest import assert_same, settings, train


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_one_chip_takes_the_cpus_steps(shards, on_cpu, tmp_path, optim):
    expected = on_cpu(optim)
    assert expected[50]["loss"] < expected[1]["loss"] - 0.5  # it learns: equal losses are no accident
    lines = train(shards, tmp_path / "run", optim=optim, torch_compile="true")
    assert_same(lines, expected)
    for name, within in (("learning_rate", 0), ("grad_norm", 1e-5)):
        theirs = {step: line[name] for step, line in expected.items() if line[name] is not None}
        assert {step: lines[step][name] for step in theirs} == pytest.approx(theirs, rel=within)


def test_bf16_keeps_fp32_weights_and_follows_the_fp32_curve(shards, on_cpu, tmp_path):
    fields = {"precision": "bf16", "torch_compile": "true", "gradient_checkpointing": "true"}
    lines, expected = train(shards, tmp_path / "run", **fields), on_cpu("adamw")
    assert_same(lines, expected, within=1e-2)
    assert max(abs(lines[step]["loss"] - expected[step]["loss"]) for step in range(1, 51)) > 1e-5
    for name, tensor in tensors(tmp_path / "run" / "step_00000050").items():
        assert tensor.dtype == torch.float32
        assert tensor.ndim < 2 or not torch.equal(tensor, tensor.bfloat16().float()), name


def test_a_run_resumes_bit_for_bit(shards, tmp_path, capsys):
    """Dropout, HellaSwag and samples included."""
    fields = {
        "max_steps": 12,
        "eval_steps": 4,
        "save_steps": 4,
        "save_total_limit": 9,
        "hellaswag_steps": 4,
        "hellaswag_limit": 9,
        "sample_steps": 4,
        "dropout": 0.1,
        "torch_compile": "true",
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    lines = train(shards, whole, **fields)
    assert capsys.readouterr().out.count(": sample ") == 4
    forget_after(4, shutil.copytree(whole, resumed))
    again = train(shards, resumed, **fields)
    assert "from step 4" in capsys.readouterr().out
    assert_equal_tensors(resumed / "step_00000012", whole / "step_00000012")
    for key in ("loss", "val_loss", "learning_rate", "grad_norm", "hellaswag_llmc_acc"):
        assert [line.get(key) for line in again.values()] == [line.get(key) for line in lines.values()]


def test_checkpoints_move_to_ddp_and_back(shards, tmp_path):
    """Saved on a chip, five steps on two CPU processes, five on a chip: the losses of never having moved.

    Not compiled, so that operators which are called one by one are compared as well.
    """
    fields = {"torch_compile": "false", "max_steps": 15, "save_steps": 5, "save_total_limit": 9, "eval_steps": "end"}
    expected = train(shards, tmp_path / "run", **fields)
    there, back = tmp_path / "there", tmp_path / "back"
    for whole, moved, step in ((tmp_path / "run", there, 5), (there, back, 10)):
        forget_after(step, shutil.copytree(whole, moved))
        if moved == there:
            env = {"TPU_CHIPS": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # the second: torch_tpu is slow to import
            result = launch("ddp", 2, "recipe/train.py", *settings(shards, moved, **fields), env=env)
            assert "from step 5" in result.stdout, result.stdout + result.stderr
        else:
            train(shards, moved, **fields)
        assert_same(by_step(moved), expected)
