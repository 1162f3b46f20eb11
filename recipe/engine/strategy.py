"""Strategy: one device or DDP through Accelerate. deepspeed.py, fsdp.py, tpu.py and xla.py override what differs.

Accelerate decides which device and how many processes; the recipe decides everything else. What Accelerate would do
silently and wrongly (processes that are not connected, a model without its wrapper) is refused. Strategies agree: the
same recipe gives the same losses on all of them (docs/status.md), but with dropout, whose masks depend on the process.
"""

from __future__ import annotations

import os
import warnings
from contextlib import nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.optim import Optimizer

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine import hardware
from recipe.engine.device import Device, local_device
from recipe.engine.host_copies import HostCopies
from recipe.engine.launch import check_accelerator, wants_cpu
from recipe.engine.runtime import Runtime
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import load_named_state, named_state, norm_and_divisor, state_names, unsharded
from recipe.optim.spike_filter import SpikeFilter
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes

TIMEOUT = timedelta(minutes=40)  # for a collective; when a process dies, the others end at once, not after this


class Strategy:
    """How a step is taken on the devices of a run, and the trained state, whose form depends on that.

    Attributes:
        device: facts of this process's device.
        runtime: the processes, and how they stop.
        spike_filter: which steps are skipped; set by `prepare`.
        grad_scaler: with the state of the fp16 loss scale, which is {} in other precisions.
    """

    spike_filter: SpikeFilter
    _sharding = ""  # of the Runtime that `open` makes
    _accelerator: Accelerator

    def __init__(self, device: Device, runtime: Runtime, accelerator: Accelerator | None = None):
        """Without an accelerator it stands for devices that are not here, and only its facts can be read."""
        self.device, self.runtime = device, runtime
        if accelerator:
            self._accelerator = accelerator

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """The strategy of this launch. A collective call. Raises UserError for a launch that it cannot train."""
        precision = hardware.resolve_precision(precision, cpu=wants_cpu())
        half = precision if precision in ("bf16", "fp16") else "no"
        handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]  # saves one copy of the gradients
        handlers.append(InitProcessGroupKwargs(timeout=TIMEOUT))
        kinds = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        accelerator = start_accelerator(precision, half, handlers, kinds)
        runtime = Runtime(processes_of(accelerator), cls._sharding)
        return cls(local_device(accelerator.device, precision, runtime), runtime, accelerator)

    def __str__(self) -> str:
        """The device and how processes share the work, in words."""
        return ", ".join(filter(None, (self.device.name, self.runtime.how)))

    # Preparing

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """Moves the model to the device and compiles it if `compile` names a mode; before the optimizer is created."""
        model.to(self.device.torch_device)
        if compile and not self.device.no_compile:
            # regional: a block at a time, where all blocks run the code of the first
            for module in model.transformer.h if compile == "regional" else [model]:
                hardware.compile_graph(module, compile)

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan, config: OptimizerConfig
    ) -> tuple[nn.Module, Optimizer]:
        """Returns the wrapped (model, optimizer) to train with. A collective call. Raises UserError if they cannot."""
        self._max_grad_norm = config.max_grad_norm
        self.spike_filter = SpikeFilter(self.device.torch_device, config)
        names = state_names(model, optimizer)
        saved = sum(p.numel() * (1 + len(names[name])) for name, p in model.named_parameters())
        self._copies = HostCopies(self.device.torch_device, saved)
        return self._wrap(model, optimizer, batch)

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        prepared = self._accelerator.prepare(model)
        world_size = self.runtime.processes.world_size
        if world_size > 1 and not isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            raise UserError(f"{world_size} processes without DDP; launch with accelerate_configs/ddp.yaml")
        return prepared, optimizer

    # A step: micro-steps, each with a forward and a backward pass, and then the update

    def seed_dropout(self, seed: int, step: int) -> None:
        """Makes the masks of a step a function of (seed, step, rank), so that a resumed run draws the same ones."""
        self.device.seed(((seed * 1_000_003 + step) * 65_537 + self.runtime.processes.rank) % 2**63)

    def micro_step(self, model: nn.Module, *, last: bool):
        """Context of a forward and a backward; collective in the last one, which averages the gradients."""
        return nullcontext() if last else self._accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Runs backward of a loss, (), that is already divided by the accumulation. Collective in the last one."""
        self._accelerator.backward(loss)

    def update(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Ends a step, whose gradients the last micro-step has averaged over processes: clips them, updates the weights
        unless `spike_filter` skips the step, and clears the gradients. A collective call.

        `loss` is this process's mean loss of the step. Returns the gradients' global norm before clipping, and 1.0 for
        a skipped step, else 0.0: both () on the device, nothing waits for them.
        """
        scaler, fused = self._accelerator.scaler, self._is_fused(optimizer)
        if scaler:
            scaler.unscale_(optimizer)
        if fused:  # it divides the gradients by its grad_scale as it reads them: no further pass over all of them
            grad_norm, divisor = norm_and_divisor(model.parameters(), self._max_grad_norm)
            setattr(optimizer, "grad_scale", divisor)  # noqa: B010  no attribute of Optimizer's
        else:
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._max_grad_norm or float("inf"))
        skip = self._should_skip(grad_norm, loss)
        if scaler:  # a spike is skipped as an overflow is, and halves the scale too
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.copy_(torch.maximum(found_inf, skip))
            scaler.step(optimizer)
            scaler.update()
        elif fused:  # its found_inf tells it on the device to change nothing, so that the host need not wait
            setattr(optimizer, "found_inf", skip)  # noqa: B010
            optimizer.step()
        elif not bool(skip):
            optimizer.step()
        optimizer.zero_grad()
        return grad_norm, skip

    def _is_fused(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer can divide the gradients and skip a step by itself: torch's fused ones on a CPU and on
        CUDA. The one on MPS claims it too, but ignores the divisor; and fp16's scaler does both by itself."""
        able = getattr(optimizer, "_step_supports_amp_scaling", False)
        return able and self.device.type != "mps" and not self._accelerator.scaler

    def _should_skip(self, grad_norm: Tensor, loss: Tensor) -> Tensor:
        mean_loss = self.runtime.processes.mean(loss) if "loss" in self.spike_filter.limits else None
        return self.spike_filter.should_skip(grad_norm, mean_loss)

    # State, unsharded and by name, however it is divided

    @property
    def grad_scaler(self):
        """See the class: its state_dict() is that of torch's GradScaler, whatever the strategy."""
        return self._accelerator.scaler or torch.amp.GradScaler(enabled=False)

    @torch.no_grad()
    def gather(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
        """Copies of the weights and the optimizer state by name, on the CPU of the main process; ({}, {}) on the
        others. The next call overwrites them. A collective call."""
        copies = {}, {}
        for parts, into in zip((dict(model.named_parameters()), named_state(model, optimizer)), copies, strict=True):
            for name, part in parts.items():  # one unsharded tensor at a time is on the device
                tensor = unsharded(part)
                if self.runtime.processes.is_main:  # copied on a CPU too: the next steps change the original
                    into[name] = self._copies.add(tensor)
        self._copies.complete()
        return copies

    def scatter(self, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """Sets the optimizer state that `gather` returned, as after `steps` optimizer steps; after `prepare`."""
        load_named_state(model, optimizer, tensors, steps)

    def unsharded_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """All weights, on every process, where the live model is sharded; else None. A collective call."""
        return None


def start_accelerator(
    precision: str, mixed_precision: str, handlers: list, kinds: tuple[DistributedType, ...]
) -> Accelerator:
    """Accelerate, which has started the process group and chosen the device. `mixed_precision` is what it is told of
    the recipe's precision. Raises UserError unless it is one of `kinds`, as launched."""
    # DeepSpeed 0.19 and Muon use the old names of collectives, which torch before 2.13 has alone.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    AcceleratorState._reset_state()  # an earlier strategy of this process may have had another precision
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers)
    accelerator.gradient_accumulation_steps = 1  # the loop itself divides the loss, whatever the environment
    check_accelerator(accelerator, kinds, precision)
    return accelerator


def processes_of(accelerator: Accelerator) -> Processes:
    """The processes that Accelerate has connected. A collective call."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    hosts = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if world_size > 1 else None
    return Processes(rank, world_size, *local, is_main=rank == 0, hosts=hosts)
