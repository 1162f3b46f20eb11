"""Whole runs with Muon and with wsd: on one device and on two, resumed, extended, refused."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints
from tests.conftest import EQUAL, by_step, flags, launch, run_train, train

WSD = {"lr_scheduler_type": "wsd", "decay_fraction": 0.4}
MUON = {"optim": "muon"} | WSD


def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


@pytest.fixture(scope="session")
def long_run(shards, once):
    """20 steps, the last 8 of which decay."""
    return once("muon", lambda run: train(shards, run, **MUON)[1])


def test_muon_takes_the_same_steps_on_two_processes_and_checkpoints_move(shards, tmp_path):
    settings = EQUAL | MUON | {"dataset_name": shards, "save_steps": 40}
    runs = []
    for config, processes in (("single", 1), ("ddp", 2)):
        runs.append(tmp_path / config)
        result = launch(config, processes, "recipe/train.py", *flags(**settings, output_dir=runs[-1]))
        assert result.returncode == 0, result.stdout + result.stderr
    one, two = map(by_step, runs)
    assert [two[s]["loss"] for s in range(1, 51)] == pytest.approx([one[s]["loss"] for s in range(1, 51)], abs=1e-4)
    assert one[50]["loss"] < one[1]["loss"] - 0.5
    shutil.rmtree(runs[1] / "step_00000050")
    result = run_train(*flags(**settings, output_dir=runs[1]))
    assert "from step 40" in result.stdout, result.stdout + result.stderr
    moved = by_step(runs[1])
    assert [moved[s]["loss"] for s in range(41, 51)] == pytest.approx([one[s]["loss"] for s in range(41, 51)], abs=1e-4)


def test_a_run_extended_from_the_constant_phase_is_the_longer_run_to_the_bit(shards, long_run, tmp_path):
    """10 steps decay after the sixth, whose checkpoint is kept; from there, 20 steps are as from the start."""
    long, _ = long_run
    train(shards, tmp_path / "short", max_steps=10, save_total_limit=1, **MUON)
    assert [path.name for path in checkpoints(tmp_path / "short")] == ["step_00000006", "step_00000010"]
    extended = tmp_path / "extended"
    shutil.copytree(tmp_path / "short" / "step_00000006", extended / "step_00000006")
    lines, output = train(shards, extended, **MUON)
    assert "from step 6" in output
    end, expected = tensors(extended / "step_00000020"), tensors(long / "step_00000020")
    assert end.keys() == expected.keys()
    assert sum(name.startswith("momentum.") for name in end) == 8  # four matrices in each of two blocks
    assert all(torch.equal(end[name], expected[name]) for name in end)
    before = by_step(long)
    assert [lines[s]["loss"] for s in range(7, 21)] == [before[s]["loss"] for s in range(7, 21)]


def test_a_run_that_has_decayed_says_so_when_it_is_extended(shards, long_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(long_run[0], run)
    _, output = train(shards, run, **MUON | {"max_steps": 22})
    assert "has decayed already" in output
    assert "step_00000012" in output


def test_a_checkpoint_of_another_optimizer_is_refused(shards, long_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(long_run[0], run)
    settings = flags(output_dir=run, dataset_name=shards, optim="adamw", max_steps=30)
    result = run_train(*[*flags(**EQUAL | {"total_batch_tokens": 64}), *settings])
    assert result.returncode == 2
    assert "optim 'muon' -> 'adamw'" in result.stderr


@pytest.mark.parametrize("engine", ["zero1", "fsdp"])
def test_muon_is_refused_in_a_sentence_where_it_does_not_run(shards, tmp_path, engine):
    settings = EQUAL | MUON | {"dataset_name": shards, "output_dir": tmp_path / "run", "dry_run": "true"}
    result = launch(engine, 1, "recipe/train.py", *flags(**settings))
    assert result.returncode == 2
    assert "optim muon is not supported on CPU" in result.stderr
    assert "--optim adamw" in result.stderr
