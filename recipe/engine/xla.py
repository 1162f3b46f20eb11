"""The torch_xla strategy: one process drives all of its TPU cores (SPMD). Imported by factory.py only if needed.

The model is written for one device with a large batch. The rows of the batch are sharded across the devices, weights
and optimizer state are replicated, and XLA's partitioner adds the all-reduce of the gradients: no replica can drift.

torch_xla records operations and compiles them at a `sync`: the operations between two syncs are a program, which is
cached by its hash. So a run syncs at fixed points and keeps the values that change from step to step (learning rate,
seed, running loss) in tensors: a Python number would be part of the program. There are three large programs: a
micro-step, an optimizer step, a validation batch.

Tested with torch_xla 2.9 on XLA's CPU client (`PJRT_DEVICE=CPU CPU_NUM_DEVICES=4`). It has not been run on a TPU.
"""

import logging
import math
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch_xla._internal import tpu
from torch_xla.debug import metrics as xla_metrics
from torch_xla.distributed import xla_backend  # noqa: F401  (registers xla://)
from torch_xla.utils.checkpoint import checkpoint

from recipe.config import BatchPlan
from recipe.engine import hardware
from recipe.engine.device import Device
from recipe.engine.runtime import XLA_COMPILES, Runtime
from recipe.engine.strategy import Strategy, start_accelerator
from recipe.optim.optimizer import muon_parameters
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from recipe.utils.units import plural

_LAUNCH = "launch with accelerate_configs/tpu.yaml: one process drives all of a machine's TPU cores"


@dataclass(frozen=True)
class XlaDevice(Device):
    """TPU cores, or XLA's CPU devices, behind one process; `mesh` holds all of them."""

    mesh: xs.Mesh | None = None

    def put(self, rows: Tensor) -> Tensor:
        """Shards the rows of (micro, ...) across the devices."""
        spec = xs.ShardingSpec(self.mesh, ("data",) + (None,) * (rows.ndim - 1))
        return xm.send_cpu_data_to_device(rows, self.torch_device, spec)[0]

    def seed(self, seed: int) -> None:
        """One seed for all devices: a mask is drawn for the full batch and sharded like its rows."""
        torch_xla.manual_seed(seed, str(self.torch_device))

    def flush(self) -> None:
        """As Device's."""
        torch_xla.sync()

    def counters(self) -> dict[str, int | None]:
        """Also compilations, the number of programs compiled so far: if it keeps growing, time is wasted. The peak
        memory of a TPU is not known."""
        compile_times = xla_metrics.metric_data("CompileTime")
        memory = {"peak_memory_bytes": None} if xr.device_type() == "TPU" else super().counters()
        return memory | {"compilations": compile_times[0] if compile_times else 0}


class XlaStrategy(Strategy):
    """Devices behind one process; on a pod one process per host, each with the same rows.

    `processes.world_size` is 1 whatever the number of hosts: each runs the same program on the same global batch.
    """

    device: XlaDevice

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """As Strategy's."""
        check_xla_launch()
        xr.use_spmd()  # before anything is on the device
        generation = tpu_generation()
        if xr.device_type() == "TPU":  # the CPU client cannot read its programs back (torch_xla 2.9)
            keep_programs(os.environ.get("XLA_PERSISTENT_CACHE_PATH", "~/.cache/gpt2-recipe/xla"))
        precision = hardware.supported_precision(precision, "a TPU", gpu=False, bf16=bool(generation))
        # With bf16 Accelerate sets XLA_USE_BF16 on a TPU: weights and optimizer state in bf16 that claim to be fp32.
        # If torch_xla is installed, Accelerate makes XLA of the distributed_type NO too.
        accelerator = start_accelerator(precision, "no", [], (DistributedType.XLA,))
        if precision == "fp32":
            logging.getLogger("torch_xla.backends").setLevel(logging.ERROR)  # the first call warns of a second one
            torch_xla.backends.set_mat_mul_precision("highest")  # by default a TPU multiplies fp32 as bf16
        device = _device(accelerator.device, generation, precision)
        hosts, processes = xr.process_count(), Processes()  # every host computes the loss of the global batch
        how = f"{plural(device.count, 'device')} behind one process"
        if hosts > 1:  # one process per host; not tested: no pod was available
            torch.distributed.init_process_group("gloo", init_method="xla://")
            processes = Processes(is_main=xr.process_index() == 0, cpu_group=torch.distributed.group.WORLD)
            how = f"{plural(device.count, 'device')}, a process on each of {hosts} hosts"
        optimizers = ("adamw", "muon")  # whose state `_wrap` creates
        runtime = Runtime(processes, how=how, optimizers=optimizers, no_compile=XLA_COMPILES)
        return cls(device, runtime, accelerator)

    def place(self, model: nn.Module, *, compile: str) -> None:
        """As Strategy's, replicated on the devices; XLA compiles every step anyway."""
        model.to(self.device.torch_device)
        self._replicate(model.parameters())

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        """Creates the optimizer's state and, for accumulation, the gradients, so that all steps are one program."""
        if self.device.precision == "bf16":
            model.forward = self.device.autocast()(model.forward)
        muon_ids, zeros = {id(p) for p in muon_parameters(optimizer)}, {}
        for name, p in model.named_parameters():
            for key in ("momentum",) if id(p) in muon_ids else ("exp_avg", "exp_avg_sq"):
                zeros[f"{key}.{name}"] = torch.zeros_like(p)
        self.scatter(model, optimizer, zeros, 0)
        for group in optimizer.param_groups:
            for key in {"lr", "momentum"} & group.keys():
                group[key] = torch.zeros(1, device=self.device.torch_device)
        # Accumulation adds to zeroed gradients: with None, the first micro-step would be a program of its own.
        # A step of one micro-step does not accumulate, and the memory of its gradients is freed between steps.
        self._accumulates = batch.accumulation > 1
        if self._accumulates:
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            self._replicate(p.grad for p in model.parameters())
        self.device.flush()
        return model, optimizer

    @contextmanager
    def micro_step(self, model: nn.Module, *, last: bool) -> Generator[None, None, None]:
        """The gradients' all-reduce is part of each micro-step's program."""
        # Operations recorded between steps (a running loss set to 0) must not become part of this program.
        self.device.flush()
        yield
        self.device.flush()

    def backward(self, loss: Tensor) -> None:
        """A plain backward pass: SPMD averages the gradients in the same program."""
        loss.backward()

    def update(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> tuple[Tensor, Tensor]:
        """As Strategy's, without waiting to know whether the step is skipped."""
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_grad_norm or float("inf"))
        skip = self._should_skip(grad_norm, loss)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [*parameters, *(tensor for state in optimizer.state.values() for tensor in state.values())]
        old_values = [tensor.detach().clone() for tensor in tensors]  # recorded only: the program copies nothing
        optimizer.step()
        with torch.no_grad():
            for tensor, old_value in zip(tensors, old_values, strict=True):
                tensor.copy_(torch.where(skip > 0, old_value, tensor))
        optimizer.zero_grad(set_to_none=not self._accumulates)  # see `_wrap`
        return grad_norm, skip

    def _replicate(self, tensors) -> None:
        """Marks tensors as replicated, as the outputs of a program are; otherwise the first step is compiled twice."""
        for t in tensors:
            xs.mark_sharding(t, self.device.mesh, (None,) * t.ndim)

    # Weights and optimizer state

    def scatter(self, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """As Strategy's, replicated on the devices."""
        super().scatter(model, optimizer, tensors, steps)
        self._replicate(tensor for state in optimizer.state.values() for tensor in state.values())
        self.device.flush()


@cache
def keep_programs(directory: str) -> None:
    """Keeps compiled programs in `directory`, for later processes. torch_xla accepts the call once per process."""
    xr.initialize_cache(str(Path(directory).expanduser()))


def _device(device: torch.device, generation: str, precision: str) -> XlaDevice:
    """The devices of the run, with the facts of their data sheet: torch_xla 2.9 does not report those behind SPMD's
    single device."""
    count, model = xr.global_runtime_device_count(), hardware.known_name(f"TPU {generation}")
    mesh = xs.Mesh(np.arange(count), (count,), ("data",))
    name = f"TPU {generation}" if generation else "XLA's CPU client"
    return XlaDevice(
        "xla",
        name,
        precision,
        device,
        chip=name,
        count=count,
        memory=int(1e9 * hardware.DEVICES[model].memory) if model else None,
        peak_flops=hardware.DEVICES[model].peak * count if model else None,
        checkpoint=checkpoint,
        adamw="capturable",  # keeps the step count in tensors
        eval_multiples=(math.lcm(32, count), 64, 1024),  # few shapes, each of which is compiled
        sum_dtype=torch.float32,
        mesh=mesh,
    )


def check_xla_launch() -> None:
    """Raises UserError for launches with which torch_xla trains wrongly, as observed with Accelerate 1.15."""
    for name in ("XLA_USE_BF16", "XLA_DOWNCAST_BF16"):
        if os.environ.get(name, "0") not in ("", "0"):
            raise UserError(f"unset {name}: it keeps the weights and AdamW's state in bf16; use --precision bf16")
    if "FORK_LAUNCHED" in os.environ:  # distributed_type: XLA; with accumulation its replicas drift apart
        raise UserError(f"distributed_type XLA starts one process per core, whose weights drift apart; {_LAUNCH}")
    if (processes := int(os.environ.get("WORLD_SIZE", 1))) > 1:
        raise UserError(f"{processes} processes, but torch_xla is installed; {_LAUNCH}, or set USE_TORCH_XLA=0")


def tpu_generation() -> str:
    """v2, v3, v4, v5e, v5p, v6e; "of unknown kind" if a TPU does not report it; empty on the CPU client."""
    if xr.device_type() != "TPU":
        return ""
    try:
        tpu_type = tpu.get_tpu_type()  # from TPU_ACCELERATOR_TYPE or the machine's metadata: v3, v5litepod, v6e
    except (OSError, KeyError, TypeError):
        return "of unknown kind"
    return {"v5litepod": "v5e", "v5lite": "v5e"}.get(tpu_type, tpu_type)
