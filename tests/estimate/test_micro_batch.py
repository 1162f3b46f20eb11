"""`micro_batch_size: auto`: on imaginary devices, and in runs on a CPU that pretends to be one."""

import json
import re
import shutil

import pytest
from safetensors.torch import load_file

from recipe.config import parse_config
from recipe.engine.factory import open_strategy
from recipe.estimate.fused_loss import resolve_fused_loss
from recipe.estimate.micro_batch import resolve_micro_batch
from recipe.utils.errors import UserError
from tests import processes as programs
from tests.conftest import TINY, flags, forget_after, ok, recorded, run_train

SETTINGS = TINY | {"total_batch_tokens": 256, "sequence_length": 32, "dropout": 0.1, "micro_batch_size": "auto"}
SETTINGS |= {"max_steps": 6, "save_steps": 4, "eval_steps": "end"}


def run(shards, directory, memory: str, processes: int = 0, **fields):
    """A run on a CPU that pretends to be a device with `memory` bytes."""
    arguments = flags(**SETTINGS | {"dataset_name": shards, "output_dir": directory} | fields)
    command = ("-m", "tests.estimate.micro_batch_probe", *arguments)
    return ok(programs.run(*command, env={"FIT_MEMORY": memory}, processes=processes))


@pytest.fixture(scope="module")
def automatic(shards, once):
    return once("automatic", lambda directory: run(shards, directory, "150e6").stdout)


def test_a_run_with_auto_equals_one_with_the_number_it_chooses(shards, automatic, tmp_path):
    directory, output = automatic
    assert re.search(r"\nmicro      4 sequences a device: [\d.]+ MB of 150 MB, an estimate\n", output)
    assert "batch      256 tokens = 1 process x 2 micro-steps x 4 sequences x 32" in output
    fixed = run(shards, tmp_path / "run", "150e6", micro_batch_size=4)
    assert "micro   " not in fixed.stdout
    assert recorded(directory, "loss", "grad_norm") == recorded(tmp_path / "run", "loss", "grad_norm")
    weights = [load_file(d / "step_00000006" / "model.safetensors") for d in (directory, tmp_path / "run")]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    state = json.loads((directory / "step_00000006" / "trainer_state.json").read_text())
    assert state["config"]["micro_batch_size"] == 4


@pytest.mark.slow
def test_a_resumed_run_keeps_its_micro_batch_size(shards, automatic, tmp_path):
    directory = forget_after(4, shutil.copytree(automatic[0], tmp_path / "run"))
    result = run(shards, directory, "90e6")
    assert "micro      4 sequences a device: as in the run's newest checkpoint" in result.stdout
    assert recorded(directory, "loss", "grad_norm") == recorded(automatic[0], "loss", "grad_norm")
    # A changed micro_batch_size is reported; a change that affects memory leads to a new choice.
    forget_after(4, directory)
    assert "micro_batch_size 4 -> 2" in run(shards, directory, "90e6", micro_batch_size=2).stdout
    forget_after(4, directory)
    assert "of 90 MB, an estimate" in run(shards, directory, "90e6", gradient_checkpointing="true").stdout


def test_a_run_that_moves_to_another_device_chooses_again(whole_run):
    config = parse_config(flags(**TINY | {"micro_batch_size": "auto", "output_dir": whole_run[0]}))
    _, line = resolve_micro_batch(config, open_strategy("fp32", "h100"))
    assert line.endswith("of 80 GB, an estimate"), "not as on the CPU, whose checkpoint has another micro-batch"


@pytest.mark.slow
def test_all_processes_use_the_micro_batch_that_fits_each(shards, tmp_path):
    result = run(shards, tmp_path / "run", "150e6,100e6", processes=2)
    assert "batch      256 tokens = 2 processes x 2 micro-steps x 2 sequences x 32" in result.stdout
    assert re.search(r"micro      2 sequences a device: [\d.]+ MB of 150 MB, an estimate", result.stdout)


XL = "--config=gpt2-xl --dataset_name=x --total_batch_tokens=131072 "
MEDIUM = "--config=gpt2-medium --dataset_name=x "


@pytest.mark.parametrize(
    ("options", "sequences", "checkpointing"),
    [
        (XL + "--dry_run=h100", 16, False),
        (XL + "--dry_run=l40s", 64, True),  # 8 would not fit without
        (XL + "--dry_run=h100 --micro_batch_size=32", 32, True),
        (XL + "--dry_run=h100 --gradient_checkpointing", 128, True),
        # 64 sequences have more than 2**31 logits
        (XL + "--dry_run=h100 --gradient_checkpointing --fused_loss=false", 32, True),
        (XL + "--dry_run --precision=bf16", 8, True),  # unknown memory
        (MEDIUM + "--dry_run=v3-8", 4, False),  # compiled ahead of time, 4 fit a core and 8 do not
        (MEDIUM + "--dry_run=v5e-8", 2, False),  # DDP's buckets leave no room for 4, which fit a single chip
        (MEDIUM + "--dry_run=v5e-1", 4, False),
        (MEDIUM + "--dry_run=v4-8", 8, False),
        (MEDIUM + "--dry_run=v6e-8 --gradient_checkpointing=true", 8, True),  # never more: a TPU takes no trial
        # The user's values stay.
        (MEDIUM + "--dry_run=v5e-8 --micro_batch_size=16 --gradient_checkpointing=auto", 16, True),
        (MEDIUM + "--dry_run=2xT4", 4, False),
    ],
)
def test_a_dry_run_chooses_by_the_estimate(options, sequences, checkpointing):
    """Gradient checkpointing is off where a useful micro-batch fits without it."""
    config = parse_config(options.split())
    strategy = open_strategy(config.run.precision, config.run.plan_device)
    result, line = resolve_micro_batch(resolve_fused_loss(config, strategy)[0], strategy)
    assert result.optimizer.micro_batch_size == sequences
    assert result.run.gradient_checkpointing is checkpointing
    assert "an estimate" in line or "a step does not fit without it" in line or "the default of auto" in line
    assert ("gradient checkpointing" in line) == (config.run.gradient_checkpointing == "auto")


@pytest.mark.parametrize(("free", "sequences"), [(79e9, 16), (60e9, 8)])
def test_memory_that_another_program_uses_is_left_to_it(free, sequences, monkeypatch):
    config, strategy = parse_config(XL.split()), open_strategy("bf16", "h100")
    monkeypatch.setattr("recipe.engine.hardware.free_memory", lambda device: free)
    chosen, line = resolve_micro_batch(config, strategy)
    assert chosen.optimizer.micro_batch_size == sequences
    assert line.endswith(f"B of 80 GB ({free / 1e9:.1f} GB free), an estimate"), "why it is not more"


@pytest.mark.parametrize(
    ("free", "advice"),
    [(7e9, "what helps: --gradient_checkpointing true"), (0, "weights, .* alone take 5.7 GB: what ")],
)
def test_a_gpu_that_another_program_fills_is_named_as_full(free, advice, monkeypatch):
    """Of a GPU without any free memory an earlier version took all."""
    config, strategy = parse_config(MEDIUM.split()), open_strategy("bf16", "h100")
    monkeypatch.setattr("recipe.engine.hardware.free_memory", lambda device: free)
    room = rf"of the device's 80\.0 GB \({free / 1e9:.1f} GB free\) may be used"
    with pytest.raises(UserError, match=f"^not even one sequence per device fits: .* {room}; {advice}"):
        resolve_micro_batch(config, strategy)


@pytest.mark.parametrize(("batch", "suggested"), [(524_288, "516096, 573440"), (10_240, "7168, 14336")])
def test_the_batch_that_is_suggested_lets_each_device_take_eight_sequences(batch, suggested):
    """Unless it is smaller than that."""
    config = parse_config(["--config=gpt2", "--dry_run=7xh100", f"--total_batch_tokens={batch}"])
    with pytest.raises(UserError, match=f"7 processes x sequence_length 1024 = 7168; nearest valid: {suggested}$"):
        resolve_micro_batch(config, open_strategy(config.run.precision, config.run.plan_device))


def test_a_cpu_uses_a_fixed_number(shards, tmp_path):
    fields = SETTINGS | {"dataset_name": shards, "output_dir": tmp_path / "run", "total_batch_tokens": 768}
    result = run_train(*flags(**fields), "--dry_run")
    assert "micro      8 sequences a device: the default of auto where the memory is not known" in result.stdout
    assert "\ntime       about " in result.stdout
    assert "learning_rate:" not in result.stdout  # the summary is printed, not the configuration
    assert not (tmp_path / "run").exists()
