"""Engine: one device or DDP through Accelerate. deepspeed.py, fsdp.py and xla.py override what differs.

Accelerate decides which device and how many processes; the recipe decides everything else. What Accelerate would do
silently and wrongly (processes that are not connected, a model without its wrapper) is refused with the command to run
instead. No other package imports Accelerate's Accelerator.

Engines agree: the same recipe gives the same losses on one device, DDP, ZeRO-1, 2 and 3, FSDP and XLA, in fp32 within
1e-4 over the first 50 steps of the tests' schedule. A learning rate high enough to amplify rounding widens that on
any engine, and dropout breaks it: its masks depend on the process and the micro-batch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine import device as hardware
from recipe.engine.launch import check_accelerator, wants_cpu
from recipe.engine.shutdown import Agreement, ReadAhead, StopSignal
from recipe.model.attention import block_attention
from recipe.optim import optimizer as optimizers
from recipe.optim.spike_filter import SpikeFilter
from recipe.utils.errors import UserError

TIMEOUT = timedelta(minutes=40)  # of a collective; a process that died ends the others at once, without it


class Engine:
    """Device, processes, precision, and the calls whose right form depends on them.

    Attributes:
        device: of this process.
        rank, world_size: this process among all of them; `is_main` is the one that writes.
        local_rank, local_world_size: this process among those of its node.
        devices: how many this process drives: 1, except for the TPU cores behind one process.
        precision: resolved: fp32, tf32, bf16 or fp16.
        peak_flops: peak of this process's devices together in FLOP/s; None where it is not known.
        pad_vocab_to: the rows of the head's product are rounded up to a multiple of this.
        idle_gpus: GPUs of this node that the launch does not use.
        stop: the signals heard by this process.
        max_grad_norm, spike_filter: what `optimizer_step` clips to, and skips; set by `prepare`.
    """

    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    devices = 1
    optimizers: tuple[str, ...] | None = None  # which values of `optim` it can run; None: any
    adamw_options = MappingProxyType({"fused": True})
    attention = checkpoint = None  # functions that replace the model's own where the device has better ones
    no_compile = note = ""  # why torch.compile is ignored; what else to tell the user
    sharding = ""  # what the memory estimate asks: zero1, zero2, zero3, fsdp, or nothing
    sum_dtype = torch.float64  # for sums over many steps
    eval_multiples = (1, 1, 1)  # an evaluation's sequences, positions and scored tokens are padded to these

    def __init__(self, precision: str):
        self.precision = self._resolve_precision(precision)
        self.accelerator = Accelerator(mixed_precision=self._mixed_precision(), kwargs_handlers=self._kwargs_handlers())
        acc = self.accelerator
        self.device, self.rank, self.world_size = acc.device, acc.process_index, acc.num_processes
        self.is_main = acc.is_main_process
        self.local_rank, self.local_world_size = (
            int(os.environ.get(f"LOCAL_{n}", d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        check_accelerator(acc, self.supported, self.precision)
        self.peak_flops, self.pad_vocab_to = hardware.peak_of(self.device), hardware.pad_vocab_to(self.device)
        self.idle_gpus = hardware.idle_gpus(self.device, self.local_world_size)
        if self.device.type in ("mps", "xla"):
            self.sum_dtype = torch.float32
        if self.device.type != "xla":
            torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        if self.device.type == "cuda":
            self.eval_multiples = (1, 64, 1)  # few lengths: cuDNN plans attention with a mask for each of them
        if self.device.type == "cpu":
            hardware.tune_cpu(local_world_size=self.local_world_size)
            self.attention = block_attention if self.precision == "bf16" else None
        # A group of the hosts: what they agree on must not wait for the devices.
        self._hosts = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if self.world_size > 1 else None
        self.stop = StopSignal()
        self._agreement = Agreement(self.stop, self._hosts)

    # What other engines override for construction

    def _resolve_precision(self, precision: str) -> str:
        return hardware.resolve_precision(precision, cpu=wants_cpu())

    def _mixed_precision(self) -> str:
        return self.precision if self.precision in ("bf16", "fp16") else "no"

    def _kwargs_handlers(self) -> list:
        # Views save one copy of the gradients.
        return [DistributedDataParallelKwargs(gradient_as_bucket_view=True), InitProcessGroupKwargs(timeout=TIMEOUT)]

    # The device

    @property
    def name(self) -> str:
        """The device and how processes share the work, for the run's summary."""
        return self._device_name() + ("" if self.world_size == 1 else f", DDP over {self.world_size} processes")

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        if self.device.type == "cpu":
            threads = torch.get_num_threads()
            return f"CPU ({threads} thread{'s' * (threads > 1)} a process)"
        return self.device.type.upper()

    @property
    def memory(self) -> int | None:
        """Bytes of the device's own memory; None where it has none or it is not known."""
        return hardware.memory(self.device)

    @property
    def model_options(self) -> dict:
        """Arguments of GPT2LMHeadModel that depend on the device."""
        return {"attention": self.attention, "checkpoint": self.checkpoint, "pad_vocab_to": self.pad_vocab_to}

    @property
    def optimizer_options(self) -> dict:
        """Arguments of make_optimizer: how AdamW and Muon do their work here."""
        half = self.precision == "bf16" and self.device.type != "cpu"  # a CPU's small products in bf16 are slow
        dtype = torch.bfloat16 if half else torch.float32
        return {"muon": {"dtype": dtype, "rank": self.rank, "world_size": self.world_size}, **self.adamw_options}

    def counters(self) -> dict[str, int | None]:
        """Columns of metrics.jsonl: peak_memory_bytes, the most a CUDA device's allocator has held, elsewhere (CPU,
        MPS) the process's largest resident set; None where it is not known."""
        return {"peak_memory_bytes": hardware.peak_memory(self.device)}

    # Preparing and stepping

    def place(self, model: torch.nn.Module, *, compile: str) -> None:
        """Moves the model to the device, in place, and compiles it if `compile` names a mode; call it before the
        optimizer is created."""
        model.to(self.device)
        if compile and not self.no_compile:
            hardware.compile_model(model, compile)

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: BatchPlan, config: OptimizerConfig
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """The wrapped (model, optimizer) to train with; from now on `spike_filter` is there. A collective call. Raises
        UserError where several processes would train without a wrapper that connects them."""
        self.max_grad_norm, self.spike_filter = config.max_grad_norm, SpikeFilter(self.device, config)
        return self._prepare(model, optimizer, batch)

    def _prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: BatchPlan):
        prepared, optimizer = self.accelerator.prepare(model, optimizer)
        if self.world_size > 1 and not isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            raise UserError(f"{self.world_size} processes without DDP; launch with accelerate_configs/ddp.yaml")
        return prepared, optimizer

    def micro_step(self, model: torch.nn.Module, *, last: bool):
        """Context of one micro-step's forward and backward. A collective call in the last one, which averages the
        gradients over processes."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    def backward(self, loss: torch.Tensor) -> None:
        """Collective within the last `micro_step`. `loss`, (), is divided by the accumulation count already."""
        self.accelerator.backward(loss)

    def optimizer_step(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ends a step, whose gradients are averaged over processes by now: clips to max_grad_norm (0: does not), moves
        the weights, and clears the gradients; changes neither weights nor optimizer state where `spike_filter` skips
        the step. A collective call.

        `loss` is this process's mean loss of the step. Returns the gradients' global norm before clipping, and 1.0 for
        a skipped step, else 0.0: both on the device, nothing waits for them.
        """
        grad_norm = self._clip(model, optimizer)
        skip = self._should_skip(grad_norm, loss)
        self._update(optimizer, skip)
        self._zero_grad(optimizer)
        return grad_norm, skip

    def _clip(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The gradients' norm before clipping; a fused optimizer itself divides by grad_scale, while it reads them."""
        if self._fused(optimizer):
            grad_norm, optimizer.optimizer.grad_scale = optimizers.norm_and_divisor(
                model.parameters(), self.max_grad_norm
            )
            return grad_norm
        return self.accelerator.clip_grad_norm_(model.parameters(), self.max_grad_norm or float("inf"))

    def _should_skip(self, grad_norm: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        loss = self.mean(loss) if self.spike_filter.needs_loss else None
        return self.spike_filter.should_skip(grad_norm, loss)

    def _update(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Moves the weights, unless `skip` is 1."""
        if scaler := self.accelerator.scaler:
            _scaled_step(optimizer, scaler, skip)
        elif self._fused(optimizer):
            optimizer.optimizer.found_inf = skip  # so torch's GradScaler tells a fused optimizer to change nothing
            optimizer.step()
        elif not bool(skip):
            optimizer.step()

    def _zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()

    def _fused(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer can divide the gradients and skip a step by itself: torch's fused ones on a CPU and on
        CUDA. The one on MPS claims it too, but ignores the divisor; and fp16's scaler does both by itself."""
        able = getattr(optimizer.optimizer, "_step_supports_amp_scaling", False)
        return able and self.device.type != "mps" and not self.accelerator.scaler

    def autocast(self):
        """Context: the run's precision, for parts of the model that are called by themselves."""
        return self.accelerator.autocast()

    def seed_dropout(self, seed: int, step: int) -> None:
        """Makes the masks of a step a function of (seed, step, rank), so that a resumed run draws the same ones."""
        self._seed(((seed * 1_000_003 + step) * 65_537 + self.rank) % 2**63)

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def flush(self) -> None:
        """Makes a lazy device run what it has recorded so far; others already do."""

    # State, whole and by name, whatever the sharding

    def snapshot(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
        """Copies of the weights and the optimizer state by name, on the CPU of the main process; ({}, {}) on the
        others. A collective call."""
        if not self.is_main:
            return {}, {}
        parts = model.state_dict(), optimizers.named_state(model, optimizer)
        # Copies on a CPU too: they are written while the next steps change the originals.
        copy = torch.clone if self.device.type == "cpu" else torch.Tensor.cpu
        return tuple({k: copy(v.detach()).contiguous() for k, v in part.items()} for part in parts)

    def load_optimizer_state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], steps: int
    ) -> None:
        """Sets the optimizer state of a snapshot, as after `steps` optimizer steps; call it after `prepare`."""
        optimizers.load_named_state(model, optimizer, tensors, steps)

    def full_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """All weights, on every process, where the live model is sharded; else None. A collective call."""
        return None

    def state_dict(self) -> dict:
        """State of the fp16 loss scale, as torch's GradScaler writes it; {} in other precisions."""
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler else {}

    def load_state_dict(self, state: dict) -> None:
        """Sets what `state_dict` returned, from this engine or another."""
        if state and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state)

    # Between processes

    def to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """A micro-batch (micro, ...) on the device, or its rows divided over the devices of this process."""
        return rows.to(self.device, non_blocking=self.device.type == "cuda")

    def check_stop(self) -> None:
        """Raises Interrupted on all processes if one has been told to stop. A collective call."""
        self._agreement.check_stop()

    def wait_for_batches(self, batches: ReadAhead) -> None:
        """Returns once every process has the data of the next step. Raises Interrupted on all processes if one has been
        told to stop, or cannot read its data. A collective call."""
        self._agreement.wait_for_batches(batches)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Mean over processes. A collective call."""
        return self.accelerator.reduce(value, reduction="mean")

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over processes. A collective call."""
        return self.accelerator.reduce(value, reduction="sum")

    def broadcast_object(self, value):
        """The main process's `value` (any small picklable object) on every process. A collective call."""
        values = [value]
        if self._hosts is not None:
            torch.distributed.broadcast_object_list(values, src=0, group=self._hosts)
        return values[0]

    def anywhere(self, condition: bool) -> bool:
        """Whether `condition` holds on any process. A collective call, which does not wait for the device."""
        return self._agreement.anywhere(condition)

    @contextmanager
    def shared_error(self, what: str) -> Iterator[None]:
        """Context that raises one process's UserError or OSError on all of them, as a UserError; `what` has failed, as
        the others print it. A collective call."""
        error = ""
        try:
            yield
        except (UserError, OSError) as e:
            error = str(e)
        if self.anywhere(bool(error)):
            raise UserError(error or f"{what} on another process; its error message has the cause")

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Context: the main process goes first, then one process of each other node, which may or may not share its
        disk, then the rest. A collective call."""
        turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        for _ in range(turn):
            self.anywhere(False)
        try:
            yield
        finally:
            for _ in range(2 - turn):
                self.anywhere(False)

    def close(self) -> None:
        """Leaves the process group. A collective call."""
        self.accelerator.end_training()


def _scaled_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, skipped: torch.Tensor) -> None:
    """A step with a loss scale, which skips what overflowed; this adds what is `skipped` for a spike, whose finite
    gradients are no reason to lower the scale."""
    overflow = torch.zeros_like(skipped)
    for found in scaler._found_inf_per_device(optimizer.optimizer).values():
        overflow = torch.maximum(overflow, found)
        found.copy_(torch.maximum(found, skipped))
    kept = [(t, t.clone()) for t in (scaler._scale, scaler._growth_tracker)]
    optimizer.step()
    for tensor, before in kept:
        tensor.copy_(torch.where((skipped > 0) & (overflow == 0), before, tensor))
