"""Launches that are refused, and what the other processes print if one has died."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from eval import common
from recipe.data import prepare
from recipe.engine import factory
from recipe.engine.launch import EXIT_GRACE_S, check_launch, fail
from recipe.engine.shutdown import StopSignal
from recipe.engine.strategy import start_accelerator
from recipe.utils.errors import Permanent, Unreachable, UserError, reading
from recipe.utils.processes import Processes
from tests.conftest import ROOT, SHAKESPEARE, environment, launch, ok, refused, run_train, tiny_flags
from tests.engine.conftest import settings

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = GLOO + "pair.cc:553] Connection closed by peer [10.0.0.2]:5555. This is typically caused by a remote crash."


def set_environment(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def exit_code(monkeypatch, error: Exception, local_rank: int = 0) -> int:
    """With which one of two processes ends for an error."""
    set_environment(monkeypatch, {"WORLD_SIZE": "2", "LOCAL_RANK": str(local_rank)})
    monkeypatch.setattr("recipe.engine.launch.os._exit", sys.exit)
    with pytest.raises(SystemExit) as system_exit:
        fail(error)
    return system_exit.value.code


# The group is kept, as DeepSpeed keeps it, and at the end of the program its threads still have sums to compute.
ENDS_WHILE_GLOO_WORKS = """
import sys, torch
from recipe.utils.processes import exit_process
rank, path = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=int(rank), world_size=2)
group = torch.distributed.group.WORLD
for _ in range(2_000):
    torch.distributed.all_reduce(torch.ones(10_000), async_op=True)
exit_process(int(rank))
"""


def test_processes_end_with_their_exit_code_while_gloo_still_works(tmp_path):
    command = [sys.executable, "-c", ENDS_WHILE_GLOO_WORKS]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "store"], cwd=ROOT, env=environment({"WORLD_SIZE": "2"}))
        for rank in range(2)
    ]
    assert [process.wait(60) for process in ranks] == [0, 1]


ENDS_SLOWLY = """
import atexit, time
from recipe.utils.processes import exit_process
atexit.register(lambda: (print("ending", flush=True), time.sleep(1)))
exit_process(75)
"""


def test_a_signal_during_the_end_of_the_interpreter_keeps_the_exit_code():
    """A supervisor repeats the command while it ends with 75."""
    command = [sys.executable, "-c", ENDS_SLOWLY]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ending\n"
        process.terminate()
        assert process.wait(30) == 75


def test_sigterm_during_the_imports_asks_for_another_start(tmp_path):
    importing = "import time; print('importing', flush=True)\nfor _ in range(300): time.sleep(0.1)"
    (tmp_path / "torch.py").write_text(importing)  # not one sleep: a signal just before it does not end it
    command, env = [sys.executable, "-u", "recipe/train.py"], environment() | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.terminate()
        assert process.wait(20) == 75


def test_a_file_of_somebody_else_is_named_without_an_errno(tmp_path, capsys, monkeypatch):
    """Root may read every file, so this error is made by hand."""
    error = PermissionError(13, "Permission denied", "data/shared/train_000000.bin")
    way_out = "the owner of the file, or of a directory above it, can permit that with chmod"
    assert fail(error) == 2
    assert capsys.readouterr().err == f"error: data/shared/train_000000.bin: Permission denied; {way_out}\n"
    with (
        pytest.raises(UserError, match=f"^m cannot be read \\(Permission denied\\); {way_out}$"),
        reading("m", "delete it"),
    ):
        raise error
    with (
        pytest.raises(UserError, match=r"^m cannot be written \(Permission denied\); choose another$"),
        reading("m", "choose another", "written"),
    ):
        raise error
    assert fail(OSError(28, "No space left on device")) == 2  # of no known file
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"

    def refuse(*_):
        raise error

    monkeypatch.setattr("recipe.data.prepare.parse_config", refuse)
    assert prepare.main([]) == 2
    with pytest.raises(SystemExit):
        common.run_main(refuse)
    assert capsys.readouterr().err == 2 * f"error: data/shared/train_000000.bin: Permission denied; {way_out}\n"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (CLOSED, "(Connection closed by peer [10.0.0.2]:5555)"),
        (GLOO + "unbound_buffer.cc:81] Timed out waiting 2400000ms for recv", "(Timed out waiting 2400000ms for recv)"),
        ("NCCL error in: nccl.cpp:1\nncclRemoteError: A call failed.\nLast error:\nremote peer", "(ncclRemoteError)"),
        (torch.distributed.DistStoreError("wait timeout after 600000ms\nmore"), "(wait timeout after 600000ms)"),
        (torch.distributed.DistNetworkError("The client socket has timed out"), "(The client socket has timed out)"),
    ],
)
def test_the_loss_of_another_process_is_reported_in_a_line(monkeypatch, capsys, error, cause):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(os, "kill", None)  # not even before the first step: torchrun is to restart it
    assert exit_code(monkeypatch, RuntimeError(error) if isinstance(error, str) else error) == 75
    stderr = capsys.readouterr().err
    assert stderr.count("\n") == 2  # one of them ends the progress bar
    assert f"or its node, is gone or does not answer {cause}; its own output has the cause" in stderr
    assert "The same command on every node, without --fresh, or torchrun's next restart continues" in stderr


def test_a_process_that_loses_another_while_the_launcher_ends_all_prints_nothing(monkeypatch, capsys):
    """It ends at once; for an error of its own it waits until the process that prints has ended."""
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(StopSignal, "received", True)
    assert exit_code(monkeypatch, RuntimeError(CLOSED), local_rank=1) == 75
    assert (capsys.readouterr().err, sleeps) == ("", [])
    assert exit_code(monkeypatch, UserError("only this process has it"), local_rank=1) == 2
    assert sleeps == [EXIT_GRACE_S]


@pytest.mark.parametrize(
    ("world_size", "message"),
    [
        ("1", "Connection reset by peer"),  # of a download
        ("2", "CUDA error: an illegal memory access was encountered"),
        ("2", "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out: Connection refused"),
    ],
)
def test_any_other_error_keeps_its_traceback(monkeypatch, world_size, message):
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        fail(RuntimeError(message))
    with pytest.raises(RuntimeError, match="EADDRINUSE"):  # another launch, to be named by its own message
        fail(torch.distributed.DistNetworkError("failed to listen (errno: 98, EADDRINUSE)"))


def test_a_gpu_that_pytorch_cannot_use_is_an_error_unless_the_cpu_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(Path, "glob", lambda path, _: ["/dev/nvidia3"] * (str(path) == "/dev"))  # a container's
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"built for CUDA 13\.0; .*driver is too old.*ACCELERATE_USE_CPU=true"):
        check_launch()
    for name, value in (("ACCELERATE_USE_CPU", "true"), ("CUDA_VISIBLE_DEVICES", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            check_launch()


# Without LOCAL_WORLD_SIZE each process would count as a node of its own, and take all cores. In the launcher's own
# store, as in a static rendezvous, restarted processes find the addresses of the dead: they hang, or use up restarts.
GPUS = {"ACCELERATE_USE_CPU": "false", "LOCAL_WORLD_SIZE": "8"}
RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
# As of a SLURM job whose other node has another time: this node's share of the devices would train alone.
NODES = {"RECIPE_NODES": "2"}
# As Accelerate starts one process; or mpirun several.
ONE = {"MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (GPUS | {"GROUP_WORLD_SIZE": "1"}, "^8 processes for 4 GPUs: pass --num_processes 4$"),
        # It counts those of all nodes.
        (GPUS | {"GROUP_WORLD_SIZE": "2"}, "^8 processes for 4 GPUs on each of 2 nodes: pass --num_processes 8$"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE is set without LOCAL_WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"WORLD_SIZE is set without LOCAL_RANK \(.* and LOCAL_WORLD_SIZE \(.*; set"),
        (RESTARTS, "--max_restarts needs --rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP"),
        (RESTARTS | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, ""),
        (NODES | {"GROUP_WORLD_SIZE": "1"}, "^1 of 2 nodes found each other.*synchronize the nodes' clocks$"),
        (NODES | {"GROUP_WORLD_SIZE": "2"}, ""),
        (ONE, "has started one process"),
        (ONE | {"OMPI_COMM_WORLD_SIZE": "2"}, ""),
    ],
)
def test_a_launch_whose_processes_cannot_work_together_is_refused(monkeypatch, variables, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("psutil.Process.cmdline", lambda self: ["pytest", ""])  # make passes on an empty ARGS
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    set_environment(monkeypatch, variables)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_launch()


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="needs an environment without torch_xla")
@pytest.mark.parametrize(
    ("variables", "installed", "message"),
    [
        ({}, (), r"^the Accelerate file asks .* nor torch_tpu\. On .* -e '\.\[tpu\]'; .* \S+/single\.yaml$"),
        ({"PJRT_DEVICE": "TPU"}, (), "PJRT_DEVICE=TPU asks .* neither torch_xla .* elsewhere unset PJRT_DEVICE$"),
        ({"TPU_ACCELERATOR_TYPE": "v5e-8"}, (), "has a chip; installed: neither torch_xla nor torch_tpu. On"),
        ({}, ("torch_tpu",), r"no chip; installed: torch_tpu\. On"),
        ({}, ("torch_xla",), r"no chip; installed: torch_xla\. On"),  # which would use the CPU
    ],
)
def test_what_is_missing_for_a_tpu_is_named(monkeypatch, variables, installed, message):
    """With tpu.yaml, of which Accelerate passes on gpu_ids; tests/tpu has the whole launch."""
    launch_file = yaml.safe_load((ROOT / "accelerate_configs" / "tpu.yaml").read_text())
    set_environment(monkeypatch, {"CUDA_VISIBLE_DEVICES": launch_file["gpu_ids"]} | variables)
    monkeypatch.setattr("recipe.engine.launch.find_spec", lambda name: name in installed or None)
    monkeypatch.setattr("recipe.engine.launch.is_torch_xla_available", lambda: "torch_xla" in installed)
    with pytest.raises(UserError, match=message):
        check_launch()


def test_a_note_names_a_tpu_that_the_launch_leaves_idle(monkeypatch, in_process):
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-8")
    note = "note       this machine's TPU is idle; accelerate_configs/tpu.yaml uses it"
    assert note in in_process(["--dry_run"]).stdout


@pytest.mark.parametrize(
    ("vendor", "directory", "file", "content"),
    [
        ("Nvidia", "/dev", "nvidia0", ""),
        ("AMD", "/sys/class/drm", "card0/device/mem_info_vram_total", "25753026560\n"),
        ("", "/sys/class/drm", "card0/device/mem_info_vram_total", "536870912\n"),  # a laptop's processor
    ],
)
def test_a_note_names_a_gpu_for_which_pytorch_is_not_built(
    monkeypatch, tmp_path, in_process, vendor, directory, file, content
):
    """PyPI's PyTorch is for Nvidia's GPUs, and beside others would train on the CPU without a word."""
    set_environment(monkeypatch, {"ACCELERATE_USE_CPU": "false"})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (path := tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    monkeypatch.setattr("recipe.engine.launch.Path", lambda name: tmp_path if name == directory else Path(name))
    notes = re.findall(
        r"note       this machine's (.+) GPU is idle: PyTorch .+ cannot use it", in_process(["--dry_run"]).stdout
    )
    assert notes == [vendor] * bool(vendor)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "start DeepSpeed with accelerate launch"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "sets mixed_precision bf16, which has no effect: .*; remove it from"),
        ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, "sets dynamo_backend inductor, which .*: --torch_compile decides"),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}, "deepspeed_zero_stage 1, .*: the deepspeed_config_file decides"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "sets use_parallelism_config true, .*: the distributed_type"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, "start FSDP with accelerate launch --config_file"),
        ({"RANK": "1", "WORLD_SIZE": "1", "LOCAL_RANK": "1"}, "RANK is 1, but WORLD_SIZE 1; unset RANK, LOCAL_RANK"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps 4, .*: total_batch_tokens"),
        ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "deepspeed_offload_optimizer_device cpu, .*file"),
    ],
)
def test_an_environment_that_would_change_the_run_is_refused(monkeypatch, in_process, variables, message):
    set_environment(monkeypatch, variables)
    assert re.search(message, refused(in_process(["--precision", "fp32", "--dry_run"])))


def test_an_environment_that_changes_nothing_is_accepted(monkeypatch, in_process):
    names = "GRADIENT_ACCUMULATION_STEPS=1 DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE=none DEEPSPEED_OFFLOAD_PARAM_DEVICE=none"
    set_environment(monkeypatch, dict(f"ACCELERATE_{name}".split("=") for name in names.split()))
    ok(in_process(["--dry_run"]))


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_note_says_that_processes_of_mpirun_and_srun_train_alone(monkeypatch, in_process, name):
    """It is no error: each may be meant to train a run of its own."""
    set_environment(monkeypatch, {name: "2", "ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""})
    note = "note       mpirun or srun has started 2 processes, each of which trains alone; use acc"
    assert note in in_process(["--dry_run"]).stdout


def test_accelerate_must_not_start_one_process_where_the_launch_asks_for_several(tmp_path):
    """distributed_type MULTI_CPU, as `accelerate config` writes it, is for mpirun. Type NO and --cpu take the same way
    through Accelerate."""
    settings = "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_machines: 1\nnum_processes: 2\n"
    (file := tmp_path / "mine.yaml").write_text(settings)
    argv = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--config_file", file]
    argv += ["recipe/train.py", "--dry_run"]
    result = subprocess.run(argv, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert "error: Accelerate has started one process, though its settings are for several: " in result.stderr
    assert result.returncode == 1  # the launcher's


def test_a_port_that_the_user_has_set_asks_for_no_processes():
    """As the scripts of clusters do. Where the launch asks for several, each finds a WORLD_SIZE."""
    env = {"ACCELERATE_USE_CPU": "true", "MASTER_PORT": "29500"}
    ok(launch("single", 1, "recipe/train.py", "--dry_run", env=env, real=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_zero_without_a_gpu_must_be_asked_for(monkeypatch):
    from recipe.engine.deepspeed import ZeroStrategy

    set_environment(monkeypatch, {"LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "false"})
    with pytest.raises(UserError, match="no GPU was found; for ZeRO on the CPU put ACCELERATE_USE_CPU=true"):
        ZeroStrategy.open("fp32")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FSDP_VERSION": "1"}, "the launch asks for fsdp_version 1; set fsdp_version: 2, as in fsdp.yaml"),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "asks for fsdp_offload_params true; set fsdp_offload_params: false, as"),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "fsdp_sharding_strategy HYBRID_SHARD; set .*: FULL_SHARD, as"),
        ({"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "true"}, "set fsdp_activation_checkpointing_offload: false, as"),
        ({}, "precision fp16 is not supported under FSDP; launch with accelerate_configs/ddp.yaml"),
    ],
)
def test_an_fsdp_launch_that_would_not_be_honored_is_refused(monkeypatch, variables, message):
    monkeypatch.setattr("recipe.engine.hardware.resolve_precision", lambda precision, cpu: precision)  # as on a GPU
    launch = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "LOCAL_RANK": "0"}
    set_environment(monkeypatch, launch | variables)
    with pytest.raises(UserError, match=message):
        factory.open_strategy("fp16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_batch_size": 64, "bf16": {"enabled": True}}, "json: remove train_batch_size, bf16; it may only set"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0; write a number: 1, 2 or 3"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage is True; write a number: 1, 2 or 3"),
        ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage is '2'; write a number: 1, 2 or 3"),
        ({"zero_optimization": {}}, r"zero.json cannot be read \(no 'stage'\); .* ds_configs/ has examples"),
        ({"zero_optimization": True}, r"zero.json cannot be read \('bool' object is not subscriptable\); the Accel"),
        # Accelerate would replace the optimizer, Muon too, by DeepSpeed's Adam for CPUs.
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": "nvme"}},
            "remove zero_optimization.offload_optimizer, zero_optimization.offload_param; .*, without offloading",
        ),
    ],
)
def test_a_deepspeed_file_that_sets_more_than_sharding_is_refused(monkeypatch, tmp_path, change, message):
    from recipe.engine.deepspeed import zero_stage

    file, shipped = tmp_path / "zero.json", json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    file.write_text(json.dumps(shipped | {"steps_per_print": 5}))
    assert zero_stage() == 1
    file.write_text(json.dumps(shipped | change))
    with pytest.raises(UserError, match=message):
        zero_stage()


def test_an_accelerate_file_needs_deepspeeds_file_and_sets_no_more(monkeypatch):
    """`accelerate config` writes one without it; and for more, Accelerate's error would not name the field."""
    from recipe.engine.deepspeed import zero_stage

    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", raising=False)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    with pytest.raises(UserError, match=r"^the launch names no deepspeed_config_file; .*/zero3\.yaml, or name ds_"):
        zero_stage()
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(ROOT / "ds_configs" / "zero1.json"))
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file,zero3_init_flag,gradient_clipping")
    with pytest.raises(UserError, match="sets gradient_clipping beside deepspeed_config_file; remove it"):
        zero_stage()


@pytest.mark.slow
def test_a_field_that_deepspeed_does_not_know_is_named_with_its_file(tmp_path):
    config = {"zero_optimization": {"stage": 1, "overlapcomm": True}}
    (file := tmp_path / "mine.json").write_text(json.dumps(config))
    fields = tiny_flags(SHAKESPEARE, tmp_path / "run")
    result = launch("zero1", 2, ROOT / "recipe/train.py", *fields, env={"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)})
    assert re.search(r"error: \S+/mine\.json is not accepted: .*overlapcomm", refused(result))


def test_kaggles_address_of_the_tpu_is_dropped_before_torch_xla_starts(monkeypatch):
    """The image's TPU_PROCESS_ADDRESSES=local names no host, and libtpu would wait for it."""
    addresses = []
    engine = mock.Mock()
    engine.XlaStrategy.open = lambda _: addresses.append(os.environ.get("TPU_PROCESS_ADDRESSES")) or mock.Mock()
    monkeypatch.setitem(sys.modules, "recipe.engine.xla", engine)
    monkeypatch.setattr(factory, "check_launch", lambda: None)
    monkeypatch.setattr(factory, "is_torch_xla_available", lambda: True)
    for value in ("local", "10.0.0.1:8476"):
        monkeypatch.setenv("TPU_PROCESS_ADDRESSES", value)
        factory.open_strategy()
    assert addresses == [None, "10.0.0.1:8476"]


def caused_by(cause: OSError) -> UserError:
    """As `reading` and `writing` raise it."""
    error = UserError(f"runs/gpt2 cannot be read ({cause})")
    error.__cause__ = cause
    return error


@pytest.mark.slow
def test_torchrun_does_not_restart_a_mistake(tmp_path):
    """It would meet the same error three times more, or train again from step 0 where the run's directory was moved."""
    script = [ROOT / "recipe/train.py", "--dataset_name", "nowhere.txt", "--output_dir", tmp_path / "run"]
    options = ["--num_processes", "2", "--max_restarts", "3", "--main_process_port", "0", "--rdzv_backend", "c10d"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *options]
    command += ["--config_file", ROOT / "accelerate_configs/ddp.yaml", *script]
    env = environment({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert result.returncode == 1
    assert result.stderr.count("error: dataset_name nowhere.txt: no such file") == 1


@pytest.mark.parametrize(
    ("error", "stepping", "is_restarted"),
    [
        (UserError("dataset_name nowhere.txt"), False, False),
        (UserError("shard.bin cannot be read (Stale file handle)"), True, True),
        (caused_by(OSError(5, "Input/output error")), False, True),
        (caused_by(FileNotFoundError(2, "No such file or directory")), False, False),
        (caused_by(gzip.BadGzipFile("Not a gzipped file")), False, False),
        (OSError(5, "Input/output error"), False, True),
        (torch.OutOfMemoryError("CUDA out of memory. GPU 0 has"), True, False),
        (Unreachable("the Hub does not answer"), False, True),
        (Permanent("runs/gpt2 has been moved"), True, False),
    ],
)
def test_torchrun_restarts_what_may_pass(monkeypatch, error, stepping, is_restarted):
    """A disk or the Hub may work again, and the run then continues from its checkpoint. Before the first step, that is
    told apart also after all processes have raised the error."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(StopSignal, "stepping", stepping)
    monkeypatch.setattr(os, "kill", kill := mock.Mock())
    assert fail(error) == 2
    assert kill.mock_calls == ([] if is_restarted else [mock.call(os.getppid(), signal.SIGTERM)])
    if not stepping:
        message = re.escape(str(error))
        with pytest.raises(UserError, match=message) as shared, Processes().shared_error("the data cannot be read"):
            raise error
        assert isinstance(shared.value, Unreachable) == is_restarted


COMMAND = "['/usr/bin/gcc', '/tmp/tmp1/cuda_utils.c', '-O3', '-shared', '-fPIC', '-I/usr/include/python3.12']"
COMPILER = "torch.compile needs a C++ compiler and Python's headers, and this machine lacks one of them: install them "
COMPILER += "(on Debian and Ubuntu: apt install g++ python3-dev), or add --torch_compile false"
NOEXEC = "torch.compile cannot load /tmp/a/b.so, most likely because /tmp, or the directory in its place, is mounted "
NOEXEC += "noexec: set TORCHINDUCTOR_CACHE_DIR to a directory elsewhere, or add --torch_compile false"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
CPU = "; lower --micro_batch_size (the line `batch` has it), or see what helps in docs/memory.md"
KERNEL = f"PyTorch {torch.__version__} is not built for this GPU: docs/troubleshooting.md names others, "
KERNEL += "at `no kernel image`"
GPU = CPU + "; nvidia-smi lists the programs that use the GPU"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("InvalidCxxCompiler: No working C++ compiler found in torch._inductor.config.cpp.cxx", COMPILER),
        ("CppCompileError: C++ compile error\n\nOutput:\nmain.c:5: fatal error: Python.h: No such file", COMPILER),
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable or set", COMPILER),
        (f"CalledProcessError: Command '{COMMAND}' returned non-zero exit status 1.", COMPILER),
        ("OSError: /tmp/a/b.so: failed to map segment from shared object.  The most common reason this", NOEXEC),
        ("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has", f"CUDA out of memory. Tried to allocate 2 GiB{GPU}"),
        # Outside PyTorch's allocator, where another program has taken the memory
        ("CUDA error: out of memory\nCUDA kernel errors might be reported", f"CUDA error: out of memory{GPU}"),
        (CUBLAS, CUBLAS + GPU),
        ("NCCL error in: x.cpp\nLast error:\nCuda failure 2 'out of memory'", f"Cuda failure 2 'out of memory'{GPU}"),
        ("HIP out of memory. Tried to allocate 2 GiB. GPU 0 has", f"HIP out of memory. Tried to allocate 2 GiB{CPU}"),
        ("CUDA error: no kernel image is available for execution on the device\nSearch for", KERNEL),  # on a V100
        ("HIP error: invalid device function\nHIP kernel errors might be", KERNEL),
        (1 << 60, f"can't allocate memory: you tried to allocate {1 << 60} bytes{CPU}"),  # of a CPU
    ],
)
def test_a_machine_that_cannot_compile_or_compute_or_has_no_memory_left_is_an_error_of_one_line(error, message, capsys):
    """In many containers PyTorch runs until torch.compile writes its first kernel. And no estimate of the memory knows
    the other programs that start to use it, or attention without a kernel for a device."""
    if isinstance(error, int):
        with pytest.raises(RuntimeError) as full:
            torch.empty(error, dtype=torch.uint8)
        error = full.value
    assert fail(RuntimeError(error)) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.slow
def test_a_compiled_run_without_a_compiler_says_so(shards, tmp_path):
    script = [ROOT / "recipe/train.py", *settings(shards), "--output_dir", tmp_path / "run", "--torch_compile", "true"]
    env = environment({"CXX": str(tmp_path / "g++"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")})
    result = subprocess.run([sys.executable, *script], env=env, capture_output=True, text=True, timeout=400)
    assert result.returncode == 2
    assert "\nerror: torch.compile needs a C++ compiler" in f"\n{result.stderr}"
    assert "Traceback" not in result.stderr


def test_all_processes_agree_on_whether_an_error_may_pass(monkeypatch):
    monkeypatch.setattr(Processes, "anywhere", lambda *_: True)
    with pytest.raises(Unreachable, match="on another process"), Processes().shared_error("the data cannot be read"):
        pass


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, "MASTER_ADDR"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "[Mm]egatron"),
    ],
)
def test_a_launch_that_accelerate_cannot_start_is_one_line(variables, message):
    error = refused(run_train("--config=shakespeare", env=variables))
    assert re.fullmatch(f"error: this launch cannot start \\(.*{message}.*accelerate_configs/\n", error)


def test_a_package_that_deepspeed_lacks_is_named(monkeypatch):
    error = ModuleNotFoundError("No module named 'hjson'", name="hjson")
    monkeypatch.setattr("recipe.engine.strategy.Accelerator", mock.Mock(side_effect=error))
    with pytest.raises(UserError, match=re.escape("cannot start (No module named 'hjson'); install hjson") + "$"):
        start_accelerator("fp32", "no", [], ())
