"""`fused_loss: auto`: whole runs on a CPU that pretends to have the kernel, and the kernel itself by Triton's
interpreter."""

import json
import re
import shutil
import sys
from importlib.util import find_spec

import pytest
import torch

from recipe import audit
from recipe.checkpoint.format import checkpoints, state_of
from recipe.config import parse_config
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.estimate.fused_loss import GRADIENT_TOLERANCE, LOSS_TOLERANCE, compare, fused_loss
from tests import processes as programs
from tests.conftest import TINY, by_step, flags, forget_after, interpreted, ok

PROBE = ("-m", "tests.estimate.fused_loss_probe")
SHORT = TINY | {"max_steps": 8, "save_steps": 4}


def run(shards, directory, kernel: str, processes: int = 0, **fields) -> str:
    """The loss's line in the panel of a run where the kernel is right, wrong, slow or broken; "" if it has none."""
    command = *PROBE, *flags(**SHORT | {"dataset_name": shards, "output_dir": directory} | fields)
    result = ok(programs.run(*command, env={"FUSED": kernel}, processes=processes))
    return next((line for line in result.stdout.splitlines() if line.startswith("loss  ")), "")


def losses(directory) -> list:
    return [line["loss"] for step, line in by_step(directory).items() if step]


def fused(directory) -> bool:
    return state_of(checkpoints(directory)[-1])["config"]["fused_loss"]


@pytest.fixture(scope="module")
def plain(shards, tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / "run"
    assert run(shards, directory, "right", fused_loss="false") == ""
    return directory


@pytest.fixture(scope="module")
def chosen(shards, tmp_path_factory):
    directory = tmp_path_factory.mktemp("chosen") / "run"
    return directory, run(shards, directory, "right")


def test_a_kernel_that_is_right_and_faster_is_used(chosen, plain):
    directory, line = chosen
    apart = re.fullmatch(r"loss       fused kernel, checked here: (\S+) from PyTorch's, 4.1x its speed", line)
    assert apart, line
    assert 0 < float(apart[1]) < 1e-5
    assert fused(directory) is True
    assert losses(directory) == pytest.approx(losses(plain), abs=1e-4)
    assert losses(directory) != losses(plain)  # or it was not used


def test_a_resumed_run_keeps_the_choice_and_does_not_check_it_again(shards, chosen, tmp_path):
    directory = forget_after(4, shutil.copytree(chosen[0], tmp_path / "run"))
    assert run(shards, directory, "slow") == "loss       fused, as in the run's newest checkpoint"
    assert fused(directory) is True
    assert losses(directory) == losses(chosen[0])


def test_an_audit_replays_the_choice(chosen, capsys, monkeypatch):
    monkeypatch.setattr(audit, "subprocess", programs.forking)
    monkeypatch.setenv("FUSED", "slow")
    launcher = f"{sys.executable} {' '.join(PROBE)}"
    assert audit.main([str(chosen[0]), "--last", "2", "--launch", launcher]) == 0
    assert capsys.readouterr().out.count("4 steps equal to the bit") == 2
    assert audit.main([str(chosen[0])]) == 69  # here is no such kernel
    assert "fused_loss needs a GPU with CUDA, and Triton; remove fused_loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("wrong", r"the kernel is wrong here: 1e-02 from PyTorch's, 4\.1x its speed"),
        ("slow", r"the kernel is slow here: \S+ from PyTorch's, 0\.9x its speed"),
        ("broken", "the kernel fails here, RuntimeError: ptxas: no such device"),
    ],
)
def test_a_kernel_that_is_wrong_slow_or_broken_is_not_used_and_the_panel_says_why(
    shards, plain, tmp_path, kernel, said
):
    line = run(shards, tmp_path / "run", kernel)
    assert re.fullmatch(f"loss       not fused: {said}", line), line
    assert fused(tmp_path / "run") is False
    assert losses(tmp_path / "run") == losses(plain)


def test_no_process_uses_what_is_wrong_on_one(shards, tmp_path):
    line = run(shards, tmp_path / "run", "right,wrong", processes=2, total_batch_tokens=128)
    assert line == "loss       not fused: the kernel fails on another process"
    assert fused(tmp_path / "run") is False


@pytest.mark.parametrize(
    ("given", "expected"),
    [("--dry_run=8xh100", True), ("--dry_run=8xt4", True), ("--dry_run=v5e-8", False)],
)
def test_a_plan_counts_with_it_on_cuda_and_other_devices_do_without(given, expected):
    config = parse_config(["--config=gpt2", *given.split()])
    config, line = fused_loss(config, open_strategy("auto", config.run.plan_device))
    assert config.run.fused_loss is expected
    assert line == ("loss       fused kernel, if the run finds it right and faster" if expected else "")


def test_a_cpu_says_nothing(whole_run):
    assert "\nloss " not in whole_run[2]
    assert fused(whole_run[0]) is False


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which PyTorch's builds for CPUs come without")
def test_the_check_tells_the_kernel_from_one_that_counts_the_padding():
    """By Triton's interpreter."""
    program = "from tests.estimate.test_fused_loss import print_distances; print_distances()"
    for dtype, (right, wrong) in interpreted("-c", program).items():
        tolerances = LOSS_TOLERANCE, GRADIENT_TOLERANCE[getattr(torch, dtype)]
        assert all(error < tolerance / 5 for error, tolerance in zip(right, tolerances, strict=True)), dtype
        assert all(error > tolerance for error, tolerance in zip(wrong, tolerances, strict=True)), dtype


def print_distances() -> None:
    """Prints by type how far the loss and the gradient are, and how far those of the wrong kernel."""
    from recipe.model import loss_kernel

    hardware.seconds_of = lambda call: 1.0
    right, found = loss_kernel.cross_entropy_, {}

    def wrong(logits, targets, vocab_size, need_grad):
        return right(logits, targets, logits.shape[1], need_grad)

    for dtype in ("float32", "float16"):  # the interpreter does not round to bf16, it truncates
        found[dtype] = []
        for loss_kernel.cross_entropy_ in (right, wrong):
            shape, kind = (24, 9088), getattr(torch, dtype)
            found[dtype].append(compare(torch.device("cpu"), kind, shape, 9001, compiled=False)[0])
    print(json.dumps(found))
