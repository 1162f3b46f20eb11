"""The TorchTPU strategy: a process a chip, DDP or FSDP2 by PyTorch itself. Imported by factory.py, where it is needed.

torch_tpu is a device "tpu" of PyTorch's own kind: operators run when they are called, each compiled once for its shapes
and numbers; the model is compiled as one graph. Accelerate 1.15 does not know the device. It starts one process, which
becomes torchrun with as many processes as there are chips (`start_processes`).

Run over XLA's CPU plugin (tests/tpu), with torch_tpu 0.2. It has not been run on a TPU.
"""

import ctypes
import os
import sys
import warnings
from dataclasses import dataclass

import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from recipe.config import BatchPlan
from recipe.engine import hardware
from recipe.engine.device import Device
from recipe.engine.fsdp import FsdpStrategy, take_settings
from recipe.engine.launch import wants_fsdp
from recipe.engine.runtime import Runtime
from recipe.engine.strategy import TIMEOUT, Strategy, processes_of, start_accelerator
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.errors import UserError

_LAUNCH = "launch one process on each host, with accelerate_configs/tpu.yaml, which starts one for each chip"
_BACKENDS = "cpu:gloo,tpu:tpu_dist"
# Importing torch imports torch_tpu, which takes seconds and is for the processes that torchrun starts, not for itself.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TORCHRUN = f"import os; from torch.distributed.run import main; del os.environ['{_AUTOLOAD}']; main()"
warnings.filterwarnings("ignore", "<TorchTpu/ApiStage/")  # all of torch.tpu is called experimental


@dataclass(frozen=True)
class TpuDevice(Device):
    """A TPU chip."""

    def counters(self) -> dict[str, int | None]:
        """As Device's, by torch_tpu's allocator; None where it does not report it."""
        return {"peak_memory_bytes": torch.accelerator.max_memory_allocated() or None}


class TpuStrategy(Strategy):
    """DDP over one process a chip, or one chip alone."""

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """As Strategy's; or, in the process that Accelerate has started, becomes the launcher of a process a chip."""
        precision = hardware.supported_precision(precision, "a TPU", gpu=False, bf16=True)
        world_size, several_hosts = (
            int(os.environ.get("WORLD_SIZE", 1)),
            "," in os.environ.get("TPU_WORKER_HOSTNAMES", ""),
        )
        if "TORCH_TPU_SLICEBUILDER_ADDRESSES" not in os.environ and (
            several_hosts or torch.accelerator.device_count() > 1
        ):
            if world_size > 1:
                raise UserError(f"{world_size} processes were launched, but torch_tpu must be told before; {_LAUNCH}")
            start_processes(several_hosts)
        if wants_fsdp():
            take_settings(precision)
            cls = TpuFsdpStrategy
        if world_size > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group(_BACKENDS, timeout=TIMEOUT)
        os.environ["ACCELERATE_USE_CPU"] = "true"  # the nearest that Accelerate knows: it moves nothing to its device
        kinds = (DistributedType.NO, DistributedType.MULTI_CPU)
        accelerator = start_accelerator(precision, "no", [], kinds)
        runtime = Runtime(processes_of(accelerator), cls._sharding)
        return cls(_device(precision), runtime, accelerator)

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """As Strategy's. A compiled graph of torch_tpu 0.2 takes no strided inputs, which the loop's are."""
        if compile != "regional":
            model.to(self.device.torch_device)
            forward = torch.compile(model.forward, dynamic=False) if compile else model.forward
            contiguous = lambda *inputs: forward(*(rows.contiguous() for rows in inputs))  # noqa: E731
            setattr(model, "forward", contiguous)  # noqa: B010
        else:
            super().place(model, compile=compile)

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        model.forward = self.device.autocast()(model.forward)
        if self.runtime.processes.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return model, optimizer


class TpuFsdpStrategy(FsdpStrategy, TpuStrategy):
    """FSDP2 over one process a chip."""


def _device(precision: str) -> TpuDevice:
    """This process's chip, by the data sheet."""
    # In bf16 no product is of fp32, and torch_tpu warns of "high" as slow.
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "medium")
    name = torch.get_device_module("tpu").get_device_name()  # such as TPU v5e
    known = hardware.known_name(name)
    return TpuDevice(
        "tpu",
        name,
        precision,
        torch.device("tpu"),
        chip=name,
        memory=int(1e9 * hardware.DEVICES[known].memory) if known else None,
        peak_flops=hardware.peak_flops(name),
        eval_multiples=(32, 64, 1024),  # few shapes, each of which is compiled
        sum_dtype=torch.float32,
    )


def start_processes(several_hosts: bool) -> None:
    """Replaces this process by torchrun, which starts this command once for each chip of the host. It never returns.

    On a slice of several hosts, whose names are in TPU_WORKER_HOSTNAMES, each host does the same.
    """
    chips = torch.accelerator.device_count()
    if several_hosts and "TPU_WORKER_ID" in os.environ:
        os.environ.setdefault("JOB_COMPLETION_INDEX", os.environ["TPU_WORKER_ID"])  # Kubernetes' name for it
    torch.get_device_module("tpu").distributed.set_tpu_launch_env(nproc_per_node=chips)
    words = [sys.executable, "-c", _TORCHRUN, f"--nproc_per_node={chips}"]
    if several_hosts:  # set_tpu_launch_env has set these
        words += [
            f"--{name}={os.environ[name.upper()]}" for name in ("nnodes", "node_rank", "master_addr", "master_port")
        ]
    else:
        words.append("--standalone")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "300")  # seconds for a checkpoint after SIGTERM
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM: Accelerate's launcher passes no signal on
    sys.stdout.flush()
    os.execve(sys.executable, [*words, *sys.argv], os.environ | {_AUTOLOAD: "0"})
