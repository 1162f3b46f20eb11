"""Launches that are refused, and what several processes print if one has died or was launched differently."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from recipe.engine import factory
from recipe.engine.launch import EXIT_GRACE_S, check_launch, fail
from recipe.engine.shutdown import StopSignal
from recipe.utils.errors import UserError
from tests.conftest import ROOT, environment, ok, run_train

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = GLOO + "pair.cc:553] Connection closed by peer [10.0.0.2]:5555. This is typically caused by a remote crash."


def ended(monkeypatch, error: str, **environment: str) -> int:
    """The exit code of a process of two, the one that reports, for an error of torch's."""

    def leave(code: int):
        raise SystemExit(code)

    for name, value in ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"} | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("recipe.engine.launch.os._exit", leave)
    with pytest.raises(SystemExit) as left:
        fail(RuntimeError(error))
    return left.value.code


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (CLOSED, "(Connection closed by peer [10.0.0.2]:5555)"),
        (GLOO + "unbound_buffer.cc:81] Timed out waiting 2400000ms for recv", "(Timed out waiting 2400000ms for recv)"),
        ("NCCL error in: nccl.cpp:1\nncclRemoteError: A call failed.\nLast error:\nremote peer", "(ncclRemoteError)"),
    ],
)
def test_the_loss_of_another_process_is_reported_in_a_line(monkeypatch, capsys, error, seen):
    assert ended(monkeypatch, error) == 75
    printed = capsys.readouterr().err
    assert printed.count("\n") == 2  # of which one ends the progress bar
    assert f"or its node, is gone or does not answer {seen}; its own output has the cause" in printed
    assert "The same command on every node, without --fresh, or torchrun's next restart continues" in printed


def test_a_process_that_was_told_to_end_does_so_at_once_whatever_it_has_lost_by_then(monkeypatch, capsys):
    """The launcher tells all where one has ended, and then this one loses it."""
    monkeypatch.setattr(StopSignal, "received", True)
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waits"))
    assert ended(monkeypatch, CLOSED, LOCAL_RANK="1") == 75
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(time, "sleep", lambda seconds: waited.append(seconds))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    waited: list[float] = []
    with pytest.raises(SystemExit):  # not of an error of its own, which all others wait for
        fail(UserError("what another process has not met"))
    assert waited == [EXIT_GRACE_S]


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        ("1", "Connection reset by peer"),  # a download's
        ("2", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        ("2", "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out: Connection refused"),
    ],
)
def test_any_other_error_keeps_its_traceback(monkeypatch, world_size, message):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(RuntimeError, match=r"^(Connection reset|CUDA out|Gloo connect)"):
        fail(RuntimeError(message))


def test_a_gpu_that_pytorch_cannot_use_is_no_reason_to_train_on_the_cpu_unnoticed(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidia0")
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"built for CUDA 13\.0; .*driver is too old.*ACCELERATE_USE_CPU=true"):
        check_launch()
    for name, value in (("ACCELERATE_USE_CPU", "true"), ("CUDA_VISIBLE_DEVICES", "")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            check_launch()


NO_TPU = pytest.mark.skipif(find_spec("torch_xla") is not None, reason="needs an environment without torch_xla")


@NO_TPU
def test_the_tpu_line_of_the_readme_never_trains_on_the_cpu():
    """A promise: who names tpu.yaml gets a TPU or an error, whatever becomes of the engines behind it."""
    lines = re.findall(r"`(accelerate launch .*accelerate_configs/tpu.yaml [^`]+)`", (ROOT / "README.md").read_text())
    assert len(lines) == 1
    env = environment({"ACCELERATE_USE_CPU": "false", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    result = subprocess.run(lines[0].split(), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == [
        "error: the Accelerate file asks for a TPU, which cannot be used: found no chip, no torch_xla, no torch_tpu. "
        "On a machine with a TPU run pip install -e '.[tpu]'; elsewhere use another file, such as "
        "accelerate_configs/single.yaml"
    ]
    assert "exit status 2" in result.stderr  # the launcher itself ends with 1
    assert result.stdout == ""


@NO_TPU
@pytest.mark.parametrize(
    ("asked", "there", "message"),
    [
        ({"PJRT_DEVICE": "TPU"}, (), "PJRT_DEVICE=TPU asks .* no torch_xla, .* elsewhere unset PJRT_DEVICE$"),
        ({"TPU_ACCELERATOR_TYPE": "v5e-8"}, (), "found a chip, no torch_xla, no torch_tpu. On"),
        ({}, ("torch_tpu",), r"no chip, no torch_xla, torch_tpu\. On"),
        ({}, ("torch_xla",), "no chip, torch_xla, no torch_tpu"),  # which would take the CPU for its device
    ],
)
def test_what_is_missing_for_a_tpu_is_named(monkeypatch, asked, there, message):
    for name, value in ({"CUDA_VISIBLE_DEVICES": "tpu"} | asked).items():  # what tpu.yaml sets
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("recipe.engine.launch.find_spec", lambda name: name in there or None)
    monkeypatch.setattr("recipe.engine.launch.is_torch_xla_available", lambda: "torch_xla" in there)
    with pytest.raises(UserError, match=message):
        check_launch()


def test_a_tpu_that_another_file_leaves_idle_is_named():
    result = ok(run_train("--dry_run", env={"TPU_ACCELERATOR_TYPE": "v5e-8"}))
    assert "note       this machine's TPU is idle; accelerate_configs/tpu.yaml uses it" in result.stdout


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "the Accelerate file sets mixed_precision bf16, the recipe fp32"),
        ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, "compiles with inductor (dynamo_config); remove that, and pass"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "start DeepSpeed with accelerate launch"),
    ],
)
def test_an_environment_that_would_change_the_run_is_refused(variables, message):
    result = run_train("--precision", "fp32", "--dry_run", env=variables)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_mpirun_and_srun_that_do_not_know_of_each_other_are_told(name):
    """They may be meant so, with a run each."""
    result = ok(run_train("--dry_run", env={name: "2", "ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}))
    assert "note       mpirun or srun has started 2 processes, each of which trains alone; use acc" in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_zero_without_a_gpu_must_be_asked_for(monkeypatch):
    from recipe.engine.deepspeed import ZeroStrategy

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    with pytest.raises(UserError, match="no GPU was found; for ZeRO on the CPU put ACCELERATE_USE_CPU=true"):
        ZeroStrategy.open("fp32")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"FSDP_VERSION": "1"}, "the Accelerate file sets fsdp_version 1; set fsdp_version: 2"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "sets fsdp_offload_params true; set fsdp_offload_params: false, as"),
        ({}, "precision fp16 is not supported under FSDP; launch with accelerate_configs/ddp.yaml"),
    ],
)
def test_an_fsdp_launch_that_would_not_be_honored_is_refused(monkeypatch, asked, message):
    monkeypatch.setattr("recipe.engine.hardware.resolve_precision", lambda precision, cpu: precision)  # as on a GPU
    for name, value in ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"} | asked).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        factory.open_strategy("fp16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 64}, "train_batch_size is not about sharding and belongs to the recipe; remove it"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is not about sharding and belongs to the recipe; remove it"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0; 1, 2 and 3 are supported"),
    ],
)
def test_a_sharding_file_that_decides_more_than_sharding_is_refused(tmp_path, change, message):
    from recipe.engine.deepspeed import stage_in

    shipped = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    (tmp_path / "zero.json").write_text(json.dumps(shipped))
    assert stage_in(tmp_path / "zero.json") == 1
    (tmp_path / "zero.json").write_text(json.dumps(shipped | change))
    with pytest.raises(UserError, match=message):
        stage_in(tmp_path / "zero.json")


def test_kaggles_address_of_the_tpu_is_dropped_before_torch_xla_starts(monkeypatch):
    """The image's TPU_PROCESS_ADDRESSES=local names no host, and libtpu would wait for it."""
    addresses = []
    engine = ModuleType("recipe.engine.xla")
    opened = SimpleNamespace(runtime=SimpleNamespace(stop=SimpleNamespace(listen=lambda: None)))
    record = lambda precision: addresses.append(os.environ.get("TPU_PROCESS_ADDRESSES")) or opened  # noqa: E731
    engine.XlaStrategy = SimpleNamespace(open=record)
    monkeypatch.setitem(sys.modules, "recipe.engine.xla", engine)
    monkeypatch.setattr(factory, "check_launch", lambda: None)
    monkeypatch.setattr(factory, "is_torch_xla_available", lambda: True)
    for value in ("local", "10.0.0.1:8476"):
        monkeypatch.setenv("TPU_PROCESS_ADDRESSES", value)
        factory.open_strategy()
    assert addresses == [None, "10.0.0.1:8476"]
