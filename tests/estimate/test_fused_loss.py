"""`fused_loss: auto`: whole runs on a CPU that pretends to have the kernel, and the kernel itself by Triton's
interpreter."""

import json
import math
import re
import shlex
import shutil
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import torch

from recipe import audit
from recipe.checkpoint.format import checkpoints, state_of
from recipe.config import parse_config
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.estimate.fused_loss import GRADIENT_TOLERANCE, LOSS_TOLERANCE, compare, resolve_fused_loss
from tests import processes as programs
from tests.conftest import TINY, by_step, flags, forget_after, interpreted, ok

PROBE = ("-m", "tests.estimate.fused_loss_probe")
SHORT = TINY | {"max_steps": 8, "save_steps": 4}


def run(shards, directory, kernel: str, processes: int = 0, **fields) -> str:
    """The summary's line on the loss of a run whose kernel is right, wrong or slow; "" if it has none."""
    command = *PROBE, *flags(**SHORT | {"dataset_name": shards, "output_dir": directory} | fields)
    result = ok(programs.run(*command, env={"FUSED": kernel}, processes=processes))
    return next((line for line in result.stdout.splitlines() if line.startswith("loss  ")), "")


def losses(directory) -> list:
    return [line["loss"] for step, line in by_step(directory).items() if step]


def fused(directory) -> bool:
    return state_of(checkpoints(directory)[-1])["config"]["fused_loss"]


@pytest.fixture(scope="module")
def unfused_run(shards, once):
    directory, line = once("unfused", lambda directory: run(shards, directory, "right", fused_loss="false"))
    assert line == ""
    return directory


@pytest.fixture(scope="module")
def fused_run(shards, once):
    return once("fused", lambda directory: run(shards, directory, "right"))


def test_a_kernel_that_is_right_and_faster_is_used(fused_run, unfused_run):
    directory, line = fused_run
    match = re.fullmatch(r"loss       fused kernel, checked on this device: (\S+) from PyTorch's, 4.1x as fast", line)
    assert match, line
    assert 0 < float(match[1]) < 1e-5
    assert fused(directory) is True
    assert losses(directory) == pytest.approx(losses(unfused_run), abs=1e-4)
    assert losses(directory) != losses(unfused_run)  # the kernel was used


def test_a_resumed_run_keeps_the_choice_without_another_trial(shards, fused_run, tmp_path):
    directory = forget_after(4, shutil.copytree(fused_run[0], tmp_path / "run"))
    assert run(shards, directory, "slow") == "loss       fused, as in the run's newest checkpoint"
    assert fused(directory) is True
    assert losses(directory) == losses(fused_run[0])


def test_an_audit_replays_the_choice(fused_run, capsys, monkeypatch):
    monkeypatch.setattr(audit, "subprocess", programs.forking)
    monkeypatch.setenv("FUSED", "slow")
    launcher = f"{shlex.quote(sys.executable)} {' '.join(PROBE)}"
    assert audit.main([str(fused_run[0]), "--last", "2", "--launch", launcher]) == 0
    assert capsys.readouterr().out.count("4 steps equal to the bit") == 2
    assert audit.main([str(fused_run[0])]) == 69  # this device has no such kernel
    assert "fused_loss true needs a CUDA GPU and Triton; use auto" in capsys.readouterr().out


def test_a_wrong_kernel_is_not_used_and_the_summary_gives_the_reason(shards, unfused_run, tmp_path):
    line = run(shards, tmp_path / "run", "wrong")
    assert line == "loss       not fused: the kernel is wrong here: 1e-02 from PyTorch's, 4.1x as fast"
    assert fused(tmp_path / "run") is False
    assert losses(tmp_path / "run") == losses(unfused_run)


@pytest.mark.parametrize(
    ("outcome", "options", "line"),
    [
        (((math.nan, 0.0), 2.0), [], "loss       not fused: the kernel is wrong here: "),
        (((0.0, math.nan), 2.0), [], "loss       not fused: the kernel is wrong here: "),
        (((0.0, 0.0), 0.9), [], "loss       not fused: the kernel is slow here: 0e+00 from PyTorch's, 0.9x as fast"),
        (RuntimeError("no ptxas\nand"), [], "loss       not fused: the kernel fails here, RuntimeError: no ptxas"),
        # Not by a timing.
        (((0.0, 0.0), 0.9), ["--deterministic=true"], "loss       fused kernel, checked on this device: "),
    ],
)
def test_a_kernel_that_is_slow_or_fails_is_not_used_and_a_deterministic_run_does_not_time_it(
    outcome, options, line, monkeypatch
):
    monkeypatch.setattr("recipe.estimate.fused_loss.can_fuse", lambda device_type: True)
    monkeypatch.setattr("recipe.estimate.fused_loss.compare", Mock(side_effect=[outcome]))
    config, printed = resolve_fused_loss(parse_config(["--config=gpt2", *options]), open_strategy("fp32"))
    assert printed.startswith(line)
    assert config.run.fused_loss is line.endswith("checked on this device: ")


def test_a_larger_vocabulary_takes_a_trial_no_more_memory(monkeypatch):
    """Llama 3's and Qwen's would have taken three times as much as GPT-2's."""
    monkeypatch.setattr("recipe.estimate.fused_loss.can_fuse", lambda device_type: True)
    trial = Mock(return_value=((0.0, 0.0), 2.0))
    monkeypatch.setattr("recipe.estimate.fused_loss.compare", trial)
    for vocab_size in (4096, 50_257, 151_936):
        resolve_fused_loss(parse_config(["--config=gpt2"]).replace(vocab_size=vocab_size), open_strategy("fp32"))
    sizes = [math.prod(call.args[2]) for call in trial.call_args_list]
    assert sizes[0] < sizes[1] < 4096 * 50_400
    assert 0.99 * sizes[1] < sizes[2] < 1.01 * sizes[1]


def test_no_process_uses_a_kernel_that_is_wrong_on_one(shards, tmp_path):
    line = run(shards, tmp_path / "run", "right,wrong", processes=2, total_batch_tokens=128)
    assert line.startswith("loss       not fused: process 1: the kernel is wrong here: ")
    assert fused(tmp_path / "run") is False


@pytest.mark.parametrize(("devices", "expected"), [("8xh100", True), ("8xt4", True), ("v5e-8", False)])
def test_a_dry_run_expects_the_kernel_on_cuda_only(devices, expected):
    config = parse_config(["--config=gpt2", f"--dry_run={devices}"])
    config, line = resolve_fused_loss(config, open_strategy("auto", config.run.plan_device))
    assert config.run.fused_loss is expected
    assert line == ("loss       fused kernel, if a trial finds it correct and faster" if expected else "")


def test_a_cpu_uses_no_kernel_and_prints_no_line(whole_run):
    assert "\nloss " not in whole_run[2]
    assert fused(whole_run[0]) is False


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which PyTorch's builds for CPUs come without")
def test_the_trial_detects_a_kernel_that_includes_the_padding():
    program = "from tests.estimate.test_fused_loss import print_errors; print_errors()"
    for dtype, (errors, wrong_errors) in interpreted("-c", program).items():
        tolerances = LOSS_TOLERANCE, GRADIENT_TOLERANCE[getattr(torch, dtype)]
        assert all(error < tolerance / 5 for error, tolerance in zip(errors, tolerances, strict=True)), dtype
        assert all(error > tolerance for error, tolerance in zip(wrong_errors, tolerances, strict=True)), dtype


def print_errors() -> None:
    """Prints by dtype the errors of loss and gradient, of the kernel and of one that includes the padding."""
    from recipe.model import loss_kernel

    hardware.seconds_of = lambda call: 1.0
    kernel, errors = loss_kernel.cross_entropy_, {}

    def wrong_kernel(logits, targets, vocab_size, need_grad):
        return kernel(logits, targets, logits.shape[1], need_grad)

    for name in ("float32", "float16"):  # the interpreter truncates to bf16 instead of rounding
        errors[name], dtype = [], getattr(torch, name)
        for loss_kernel.cross_entropy_ in (kernel, wrong_kernel):
            errors[name].append(compare(torch.device("cpu"), dtype, (24, 9088), 9001, compiled=False)[0])
    print(json.dumps(errors))
