"""The TorchTPU strategy: one process per chip, with PyTorch's own DDP or FSDP2. Imported by factory.py only if needed.

With torch_tpu, "tpu" is an ordinary device of PyTorch: operators run when they are called, each compiled once for its
shapes and numbers; the model is compiled as one graph. Accelerate 1.15 does not know the device: it starts one process,
which becomes torchrun with one process for each chip (`start_processes`).

Tested with torch_tpu 0.2 on XLA's CPU plugin (tests/tpu). It has not been run on a TPU.
"""

import ctypes
import os
import signal
import sys
import warnings

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recipe.config import BatchPlan
from recipe.engine import hardware
from recipe.engine.device import Device
from recipe.engine.fsdp import FsdpStrategy, take_settings
from recipe.engine.launch import wants
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import TIMEOUT, Strategy, processes_of, start_accelerator
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.errors import UserError

_LAUNCH = "launch one process on each host, with accelerate_configs/tpu.yaml, which starts one for each chip"
_BACKENDS = "cpu:gloo,tpu:tpu_dist"
# Importing torch imports torch_tpu, which takes seconds and is needed by torchrun's processes, but not by torchrun.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
# SIGUSR1 says that Accelerate's launcher is gone. If it died of the Ctrl-C that torchrun got too, no further signal may
# follow, which would be a second Ctrl-C.
_TORCHRUN = f"""
import os, signal
from torch.distributed.run import main

def terminate_unless_signaled(*_):
    if {{*os.read(read_fd, 100)}} == {{signal.SIGUSR1}}:
        os.kill(os.getpid(), signal.SIGTERM)

read_fd, write_fd = os.pipe()
os.set_blocking(write_fd, False)
signal.set_wakeup_fd(write_fd)  # gets the number of each signal
signal.signal(signal.SIGUSR1, terminate_unless_signaled)
del os.environ["{_AUTOLOAD}"]
main()
"""
warnings.filterwarnings("ignore", "<TorchTpu/ApiStage/")  # all of torch.tpu is called experimental


class TpuStrategy(Strategy):
    """DDP with one process per chip, or a single chip."""

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """As Strategy's; with several chips, torchrun with one process per chip replaces the process of Accelerate."""
        precision = hardware.supported_precision(precision, "a TPU", gpu=False, bf16=True)
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        multi_host = "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        is_launched = "TORCH_TPU_SLICEBUILDER_ADDRESSES" in os.environ  # set_tpu_launch_env sets it
        if not is_launched and (multi_host or torch.accelerator.device_count() > 1):
            if world_size > 1:
                raise UserError(f"{world_size} processes were launched without torch_tpu's settings; {_LAUNCH}")
            start_processes(multi_host)
        if wants("FSDP"):
            take_settings(precision)
            cls = TpuFsdpStrategy
        if world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(_BACKENDS, timeout=TIMEOUT)
        os.environ["ACCELERATE_USE_CPU"] = "true"  # Accelerate does not know the TPU; nothing is moved to its device
        supported = (DistributedType.NO, DistributedType.MULTI_CPU)
        accelerator = start_accelerator(precision, "no", [], supported)
        runtime = Runtime(processes_of(accelerator), cls._sharding)
        return cls(_device(precision), runtime, accelerator)

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """As Strategy's. A graph compiled by torch_tpu 0.2 takes contiguous inputs only; the loop's are not."""
        if compile == "regional":
            return super().place(model, compile=compile)
        model.to(self.device.torch_device)
        forward = torch.compile(model.forward, dynamic=False) if compile else model.forward
        contiguous = lambda *inputs: forward(*(rows.contiguous() for rows in inputs))  # noqa: E731
        setattr(model, "forward", contiguous)  # noqa: B010

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        model.forward = self.device.autocast()(model.forward)
        if self.runtime.processes.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, optimizer


class TpuFsdpStrategy(FsdpStrategy, TpuStrategy):
    """FSDP2 with one process per chip."""

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """As Strategy's. torch_tpu's compiler has one mode."""
        super().place(model, compile="default" if compile else "")


def _device(precision: str) -> Device:
    """This process's chip, with the facts of its data sheet."""
    # In bf16 no product is in fp32, and torch_tpu warns that "high" is slow.
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    name = torch.get_device_module("tpu").get_device_name()  # such as TPU v5e
    model = hardware.known_name(name)
    return Device(
        "tpu",
        name,
        precision,
        torch.device("tpu"),
        chip=name,
        memory=int(1e9 * hardware.DEVICES[model].memory) if model else None,
        peak_flops=hardware.peak_flops(name),
        eval_multiples=(32, 64, 1024),  # few shapes, each of which is compiled
        sum_dtype=torch.float32,
    )


def start_processes(multi_host: bool) -> None:
    """Replaces this process by torchrun, which starts this command once for each chip of the host. It never returns.

    On a slice of several hosts, whose names are in TPU_WORKER_HOSTNAMES, each host does the same.
    """
    chips = torch.accelerator.device_count()
    if multi_host and "TPU_WORKER_ID" in os.environ:
        os.environ.setdefault("JOB_COMPLETION_INDEX", os.environ["TPU_WORKER_ID"])  # Kubernetes' name for it
    if multi_host and not {"JOB_COMPLETION_INDEX", "NODE_RANK"} & os.environ.keys():
        raise UserError("TPU_WORKER_HOSTNAMES is set without TPU_WORKER_ID, this host's number among them; set it too")
    torch.get_device_module("tpu").distributed.set_tpu_launch_env(nproc_per_node=chips)
    command = [sys.executable, "-c", _TORCHRUN, f"--nproc_per_node={chips}"]
    if multi_host:  # set_tpu_launch_env has set these
        options = ("nnodes", "node_rank", "master_addr", "master_port")
        command += [f"--{option}={os.environ[option.upper()]}" for option in options]
    else:
        command.append("--standalone")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # seconds for a checkpoint after SIGTERM
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG: Accelerate's launcher passes no signal on
    sys.stdout.flush()
    os.execve(sys.executable, [*command, *sys.argv], os.environ | {_AUTOLOAD: "0"})
