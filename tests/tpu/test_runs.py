"""Runs on the device "tpu" have the losses of the same run on a CPU."""

import pytest

from tests.conftest import by_step, forget_after, launch
from tests.engine.conftest import EVALUATED, assert_fp32, check_resumed_run
from tests.tpu.conftest import assert_same, settings, train


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_one_chip_takes_the_cpus_steps(shards, on_cpu, tmp_path, optim):
    expected = on_cpu(optim)
    assert expected[50]["loss"] < expected[1]["loss"] - 0.5  # it learns: equal losses are no accident
    lines = train(shards, tmp_path / "run", optim=optim, torch_compile="true")
    assert_same(lines, expected)
    for name, within in (("learning_rate", 0), ("grad_norm", 1e-5)):
        values = {step: line[name] for step, line in expected.items() if line[name] is not None}
        assert {step: lines[step][name] for step in values} == pytest.approx(values, rel=within)


def test_bf16_keeps_fp32_weights_and_follows_the_fp32_curve(shards, on_cpu, tmp_path):
    fields = {"precision": "bf16", "torch_compile": "true", "gradient_checkpointing": "true"}
    lines, expected = train(shards, tmp_path / "run", **fields), on_cpu("adamw")
    assert_same(lines, expected, within=1e-2)
    assert max(abs(lines[step]["loss"] - expected[step]["loss"]) for step in range(1, 51)) > 1e-5
    assert_fp32(tmp_path / "run" / "step_00000050")


def test_a_run_resumes_bit_for_bit(shards, tmp_path, capsys):
    """Dropout, HellaSwag and samples included."""
    check_resumed_run(lambda run: train(shards, run, torch_compile="true", **EVALUATED), tmp_path, capsys)


def test_checkpoints_move_to_ddp_and_back(shards, tmp_path, capsys):
    """Saved on a chip, five steps on two CPU processes, five on a chip: the losses of never having moved.

    Not compiled, so that operators which are called one by one are compared as well.
    """
    fields = {"torch_compile": "false", "max_steps": 15, "save_steps": 5, "save_total_limit": 9, "eval_steps": "end"}
    run = tmp_path / "run"
    expected = train(shards, run, **fields)
    forget_after(5, run)
    env = {"TPU_CHIPS": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # the second: torch_tpu is slow to import
    result = launch("ddp", 2, "recipe/train.py", *settings(shards, run, **fields), env=env)
    assert "from step 5" in result.stdout, result.stdout + result.stderr
    assert_same(by_step(run), expected)
    forget_after(10, run)
    assert_same(train(shards, run, **fields), expected)
    assert "from step 10" in capsys.readouterr().out
