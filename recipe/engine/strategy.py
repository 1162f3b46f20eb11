"""Strategy: one device or DDP through Accelerate. deepspeed.py, fsdp.py, tpu.py and xla.py override what differs.

Accelerate decides which device and how many processes; the recipe decides everything else. A launch under which
Accelerate would silently train something else (processes that are not connected, another precision) raises UserError.
A recipe gives the same losses with every strategy (docs/status.md), except with dropout, whose masks depend on the
process.
"""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine import hardware
from recipe.engine.device import Device, local_device
from recipe.engine.launch import check_accelerator, check_options, wants
from recipe.engine.runtime import Runtime
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import gradient_norm, load_named_state, named_state, unsharded
from recipe.optim.spike_filter import SpikeFilter
from recipe.utils.errors import UserError, first_line
from recipe.utils.processes import Processes

START_TIMEOUT = timedelta(minutes=10)  # until all processes have found each other; their imports take a while
TIMEOUT = timedelta(minutes=40)  # of a collective: another node may wait for it when a process has died


class Strategy:
    """How a step runs on the devices of a run, and access to the trained state, however it is sharded.

    Attributes:
        device: facts of this process's device.
        runtime: the processes, and how they stop.
        spike_filter: which steps are skipped; set by `prepare`.
        grad_scaler: holds the state of the fp16 loss scale; that of other precisions is {}.
    """

    spike_filter: SpikeFilter
    _sharding = ""  # see Runtime
    _accelerator: Accelerator

    def __init__(self, device: Device, runtime: Runtime, accelerator: Accelerator | None = None):
        """Without an accelerator it describes devices that are not here, and nothing can run on it."""
        self.device, self.runtime = device, runtime
        if accelerator:
            self._accelerator = accelerator

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """The strategy of this launch. A collective call. Raises UserError for a launch that it cannot train."""
        precision = hardware.resolve_precision(precision, cpu=wants("CPU"))
        mixed_precision = precision if precision in ("bf16", "fp16") else "no"
        handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]  # saves a copy of the gradients
        handlers.append(InitProcessGroupKwargs(timeout=START_TIMEOUT))
        supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
        accelerator = start_accelerator(precision, mixed_precision, handlers, supported)
        runtime = Runtime(processes_of(accelerator, START_TIMEOUT), cls._sharding)
        set_timeouts()
        device = local_device(accelerator.device, precision, runtime.processes)
        if device.type == "cuda" and torch.cuda.get_device_capability(device.torch_device) < (7, 0):
            runtime.no_compile = f"Triton does not support {device.name}"
        return cls(device, runtime, accelerator)

    def __str__(self) -> str:
        """The device and how processes share the work, in words."""
        return ", ".join(filter(None, (self.device.name, self.runtime.how)))

    # Preparing

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """Moves the model to the device and compiles it if `compile` names a mode. Call it before make_optimizer."""
        model.to(self.device.torch_device)
        if compile and not self.runtime.no_compile:
            # regional: block by block, and all blocks run the code compiled for the first
            for module in model.transformer.h if compile == "regional" else [model]:
                hardware.compile_in_place(module, compile)

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan, config: OptimizerConfig
    ) -> tuple[nn.Module, Optimizer]:
        """Returns the wrapped (model, optimizer) to train with. A collective call."""
        self._max_grad_norm = config.max_grad_norm
        self.spike_filter = SpikeFilter(self.device.torch_device, config)
        return self._wrap(model, optimizer, batch)

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        wrapped = self._accelerator.prepare(model)
        is_ddp = isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
        assert is_ddp or self.runtime.processes.world_size == 1
        return wrapped, optimizer

    def release(self) -> None:
        """Frees the model and the optimizer of a run that has ended: Accelerate keeps them, as do reference cycles. The
        next run starts with the first loss scale."""
        if self._accelerator.scaler:
            self._accelerator.scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
        self._accelerator.free_memory()  # collects garbage too, but before it lets go of them (accelerate 1.15)
        gc.collect()

    # A step: micro-steps, each with a forward and a backward pass, and then the update

    def seed_dropout(self, seed: int, step: int) -> None:
        """Makes a step's dropout masks a function of (seed, step, rank), so that a resumed run draws the same ones."""
        self.device.seed(((seed * 1_000_003 + step) * 65_537 + self.runtime.processes.rank) % 2**63)

    def micro_step(self, model: nn.Module, *, last: bool):
        """Context of a forward and a backward pass. Collective in the last micro-step, which averages the gradients."""
        return nullcontext() if last else self._accelerator.no_sync(model)

    def backward(self, loss: Tensor) -> None:
        """Backward pass of a loss, (), already divided by the number of micro-steps. Collective in the last one."""
        self._accelerator.backward(loss)

    def update(self, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clips the gradients, which the last micro-step has averaged over processes, updates the weights unless
        `spike_filter` skips the step, and clears the gradients. A collective call.

        `loss` is this process's mean loss of the step. Returns the gradients' global norm before clipping, and 1.0 for
        a skipped step, else 0.0: both () on the device, so that the host need not wait.
        """
        scaler = self._accelerator.scaler
        if scaler:
            scaler.unscale_(optimizer)
        grad_norm = gradient_norm(model.parameters())
        if self._max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), self._max_grad_norm, grad_norm)
        skip = self._should_skip(grad_norm, loss)
        # On MPS a fused AdamW claims to skip steps by itself, but ignores the attributes of torch's GradScaler.
        skips_itself = getattr(optimizer, "_step_supports_amp_scaling", False) and self.device.type != "mps"
        if scaler:  # a spike is treated as an overflow: it halves the scale too
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                found_inf.copy_(torch.maximum(found_inf, skip))
            scaler.step(optimizer)
            scaler.update()
        elif skips_itself:  # found_inf, on the device, tells it to change nothing
            setattr(optimizer, "found_inf", skip)  # noqa: B010  no attribute of Optimizer's
            optimizer.step()
        elif not bool(skip):
            optimizer.step()
        optimizer.zero_grad()
        return grad_norm, skip

    def _should_skip(self, grad_norm: Tensor, loss: Tensor) -> Tensor:
        mean_loss = self.runtime.processes.mean(loss) if "loss" in self.spike_filter.limits else None
        return self.spike_filter.should_skip(grad_norm, mean_loss)

    # State, unsharded and by name, however it is sharded

    @property
    def grad_scaler(self):
        """The fp16 loss scale; its state_dict() is that of torch's GradScaler with every strategy."""
        return self._accelerator.scaler or torch.amp.GradScaler(enabled=False)

    @torch.no_grad()
    def gather(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
        """Copies of the weights and the optimizer state by name, on the CPU of the main process; ({}, {}) on the
        others. A collective call."""
        weights, state = {}, {}
        for tensors, copies in ((dict(model.named_parameters()), weights), (named_state(model, optimizer), state)):
            for name, tensor in tensors.items():
                full = unsharded(tensor)  # one at a time is on the device
                if self.runtime.processes.is_main:  # copied on a CPU too: the next steps change the original
                    copies[name] = full.to("cpu", copy=True)
        return weights, state

    def scatter(self, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """Restores the optimizer state that `gather` returned after `steps` optimizer steps; after `prepare`."""
        load_named_state(model, optimizer, tensors, steps)

    def unsharded_weights(self, model: nn.Module) -> dict[str, Tensor] | None:
        """All weights, on every process, if the model being trained is sharded; else None. A collective call."""
        return None


def start_accelerator(
    precision: str, mixed_precision: str, handlers: list, supported: tuple[DistributedType, ...]
) -> Accelerator:
    """Creates the Accelerator, which starts the process group and chooses the device. `mixed_precision` is its own
    argument, `precision` the recipe's. Raises UserError if Accelerate cannot start the launch, or unless its type is in
    `supported` and matches the launch."""
    # DeepSpeed 0.19 and Muon use the old names of collectives, the only ones before torch 2.13.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    check_options(precision)
    AcceleratorState._reset_state()  # an earlier strategy of this process may have had another precision
    try:
        accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers)
    except (ValueError, ImportError) as error:  # as for MEGATRON_LM, or mpirun without MASTER_ADDR
        advice = "use a file of accelerate_configs/"
        if isinstance(error, ModuleNotFoundError):  # a package that DeepSpeed needs
            advice = f"install {error.name}"
        raise UserError(f"this launch cannot start ({first_line(error)}); {advice}") from error
    accelerator.gradient_accumulation_steps = 1  # the loop itself divides the loss, whatever the environment says
    check_accelerator(accelerator, supported)
    return accelerator


def set_timeouts() -> None:
    """Gives all process groups TIMEOUT, and the store through which they connect."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(TIMEOUT, group)
    if torch.distributed.is_initialized():
        distributed_c10d._get_default_store().set_timeout(TIMEOUT)


def processes_of(accelerator: Accelerator, timeout: timedelta = TIMEOUT) -> Processes:
    """The processes that Accelerate has connected. A collective call, for which GPUs wait here first, until `timeout`:
    NCCL connects later."""
    rank, world_size = accelerator.process_index, accelerator.num_processes
    local_rank, local_world_size = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    cpu_group = torch.distributed.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    return Processes(rank, world_size, local_rank, local_world_size, is_main=rank == 0, cpu_group=cpu_group)
