"""The only file that knows Accelerate's ways: builds the Accelerator, prepares, and checks what came out.

Accelerate decides which device and how many processes; the recipe decides everything else. What Accelerate would do
silently and wrongly (unconnected processes, a model without its wrapper) is refused here with what to run instead.
`Engine` is one device or DDP; zero.py (DeepSpeed) and xla.py (TPU) override what they do otherwise.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import MappingProxyType

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)

from recipe.config import Batch
from recipe.data.prefetch import Batches
from recipe.engine import device as hardware
from recipe.engine.launch import check_accelerator, check_launch, wants_cpu, wants_deepspeed, wants_xla
from recipe.engine.shutdown import Interrupted, Stop
from recipe.errors import UserError
from recipe.model.attention import block_attention
from recipe.optim import adamw as optim

TIMEOUT = timedelta(minutes=40)  # of a collective; a process that died ends the others at once, without it
_POLL = 0.2  # seconds between looks at the signals while a step waits for its data


def open_engine(precision: str = "auto") -> "Engine":
    """The engine that the launch asked for. Raises UserError for a launch that would train something else."""
    check_launch()
    if wants_deepspeed():
        from recipe.engine.deepspeed import ZeroEngine as engine
    elif wants_xla():
        from recipe.engine.xla import XlaEngine as engine
    else:
        engine = Engine
    return engine(precision)


Judge = Callable[[torch.Tensor], torch.Tensor]  # gradient norm -> 1.0 to leave the step out, else 0.0; on the device


class Engine:
    """Device, processes, precision and the calls whose right form depends on them.

    Attributes:
        device: of this process.
        rank, world: this process among all of them; `is_main` is the one that writes.
        local_rank, local_world: this process among those of its machine.
        devices: that this process feeds: 1, but for a TPU's cores behind one process.
        stop: what was heard of signals.
        precision: resolved: fp32, tf32, bf16 or fp16.
    """

    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    devices = 1
    optimizer_options = MappingProxyType({"fused": True})  # of torch.optim.AdamW
    attention = checkpoint = None  # functions that replace the model's own, where a device has better ones
    no_compile = note = ""  # why torch.compile is left out although the recipe asks for it; what else is to be said
    zero_stage = 0
    sum_dtype = torch.float64  # of what is summed over many steps
    eval_multiples = (1, 1, 1)  # an evaluation's sequences, positions and scored tokens are filled up to these

    def __init__(self, precision: str):
        self.precision = self._resolve_precision(precision)
        self.accelerator = Accelerator(
            mixed_precision=self._mixed_precision(),
            kwargs_handlers=self._kwargs_handlers(),
        )
        acc = self.accelerator
        self.device, self.rank, self.world = acc.device, acc.process_index, acc.num_processes
        self.is_main = acc.is_main_process
        self.local_rank, self.local_world = (
            int(os.environ.get(f"LOCAL_{n}", d)) for n, d in (("RANK", 0), ("WORLD_SIZE", 1))
        )
        check_accelerator(acc, self.supported, self.precision)
        if self.device.type in ("mps", "xla"):
            self.sum_dtype = torch.float32
        if self.device.type != "xla":
            torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        self.stop = Stop(speaks=self.is_main)
        # Of the hosts alone: asking for a signal must not wait for the device.
        self._hosts = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if self.world > 1 else None
        if self.device.type == "cpu":
            hardware.tune_cpu(local_world=self.local_world)
            self.attention = block_attention if self.precision == "bf16" else None

    # What another engine does otherwise while it is built

    def _resolve_precision(self, precision: str) -> str:
        return hardware.resolve_precision(precision, cpu=wants_cpu())

    def _mixed_precision(self) -> str:
        return self.precision if self.precision in ("bf16", "fp16") else "no"

    def _kwargs_handlers(self) -> list:
        # Views save one copy of the gradients. The others wait for a rank whose data are late as long as it does.
        return [DistributedDataParallelKwargs(gradient_as_bucket_view=True), InitProcessGroupKwargs(timeout=TIMEOUT)]

    # What the device is

    @property
    def name(self) -> str:
        return self._device_name() + ("" if self.world == 1 else f", DDP over {self.world} processes")

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        if self.device.type == "cpu":
            threads = torch.get_num_threads()
            return f"CPU ({threads} thread{'s' * (threads > 1)} a process)"
        return self.device.type.upper()

    @property
    def idle_gpus(self) -> int:
        """GPUs of this machine that the launch leaves unused."""
        return max(0, torch.cuda.device_count() - self.local_world) if self.device.type == "cuda" else 0

    @property
    def peak_flops(self) -> float | None:
        """Peak of this process's devices together in FLOP/s, or None where it is not known."""
        return hardware.peak_of(self.device)

    @property
    def pad_vocab_to(self) -> int:
        """Rows of the head's product are rounded up to a multiple of this."""
        return hardware.pad_vocab_to(self.device)

    @property
    def model_options(self) -> dict:
        """Arguments of the model that depend on the device."""
        return {"attention": self.attention, "checkpoint": self.checkpoint, "pad_vocab_to": self.pad_vocab_to}

    def peak_memory(self) -> int:
        """Bytes: the most the device's allocator has held, or the process's largest resident set on a CPU."""
        return hardware.peak_memory(self.device)

    def counters(self) -> dict[str, int]:
        """Further columns of metrics.jsonl."""
        return {}

    # Preparing and stepping

    def place(self, model: torch.nn.Module, *, compile: str) -> None:
        """Moves the model to the device, in place, and has it compiled if `compile` names a mode; before its optimizer
        is made."""
        model.to(self.device)
        if compile and not self.no_compile:
            hardware.compile_model(model, compile)

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, max_grad_norm: float):
        """Accelerate's prepare, and the check that more than one process really is wrapped."""
        prepared, optimizer = self.accelerator.prepare(model, optimizer)
        if self.world > 1 and not isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            raise UserError(f"{self.world} processes without DDP; launch with accelerate_configs/ddp.yaml")
        return prepared, optimizer

    def micro_step(self, model: torch.nn.Module, *, last: bool):
        """Context of one micro-step's forward and backward; gradients are averaged over processes in the last only."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    def backward(self, loss: torch.Tensor) -> None:
        self.accelerator.backward(loss)

    def update(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, max_norm: float, judge: Judge
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips, steps and clears the gradients; weights and moments stay as they are if `judge` leaves the step out.

        max_norm 0 measures only. Returns the gradients' global norm before clipping and what `judge` made of it, both
        on the device.
        """
        raw, scaler = optimizer.optimizer, self.accelerator.scaler
        # As torch's fused optimizers on a CPU and on CUDA do; the one on MPS says so too, but takes no notice.
        divides = self.device.type != "mps" and getattr(raw, "_step_supports_amp_scaling", False)
        if scaler or not divides:
            grad_norm = self.accelerator.clip_grad_norm_(model.parameters(), max_norm or float("inf"))
        else:
            grad_norm, raw.grad_scale = optim.norm_and_divisor(model.parameters(), max_norm)
        skip = judge(grad_norm)
        if scaler:  # it leaves out what overflowed; this adds what is left out for a spike
            overflow = torch.zeros_like(skip)
            for found in scaler._found_inf_per_device(raw).values():
                overflow = torch.maximum(overflow, found)
                found.copy_(torch.maximum(found, skip))
            kept = [(t, t.clone()) for t in (scaler._scale, scaler._growth_tracker)]
            optimizer.step()
            for tensor, before in kept:  # a spike says nothing of the scale
                tensor.copy_(torch.where((skip > 0) & (overflow == 0), before, tensor))
        elif not divides:
            if not bool(skip):
                optimizer.step()
        else:  # the way of torch's GradScaler to tell a fused optimizer, which then changes nothing
            raw.found_inf = skip
            optimizer.step()
        optimizer.zero_grad()
        return grad_norm, skip

    def autocast(self):
        """Context: the run's arithmetic, for parts of the model called by themselves."""
        return self.accelerator.autocast()

    def seed(self, seed: int) -> None:
        """Of dropout's masks."""
        torch.manual_seed(seed)

    def flush(self) -> None:
        """Has a lazy device run what it was told so far; others already do."""

    # Weights and optimizer state, whole and by name, whatever the sharding

    def snapshot(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
        """Copies of the weights and AdamW's moments by name, on the CPU of the main process, ({}, {}) elsewhere. A
        collective call."""
        if not self.is_main:
            return {}, {}
        parts = model.state_dict(), optim.named_moments(model, optimizer)
        # Copies, on the CPU too: they are written while the next steps change what they were taken from.
        copy = torch.clone if self.device.type == "cpu" else torch.Tensor.cpu
        return tuple({k: copy(v.detach()).contiguous() for k, v in part.items()} for part in parts)

    def load_moments(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, moments: dict, steps: int) -> None:
        """Sets AdamW's state after `steps` optimizer steps from a snapshot's moments; after prepare."""
        optim.load_moments(model, optimizer, moments, steps)

    def whole_weights(self, model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
        """All weights, on every process, where the live model is cut up (ZeRO-3); else None. A collective call."""
        return None

    def scaler_state(self) -> dict | None:
        return self.accelerator.scaler.state_dict() if self.accelerator.scaler else None

    def load_scaler_state(self, state: dict | None) -> None:
        if state and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state)

    # Stopping, and batches

    def check_stop(self, waiting: bool = False, failed: bool = False) -> bool:
        """Raises Interrupted on all processes if a signal has reached any, or any has `failed`; returns whether any is
        `waiting`. A collective call."""
        self.stop.polled()
        stop, anyone_waits = self._any_host(self.stop.requested or failed, waiting)
        if stop:
            self.stop.leave()
            raise Interrupted
        return anyone_waits

    def _any_host(self, *conditions: bool) -> list[bool]:
        flags = torch.tensor(conditions, dtype=torch.int32)
        if self._hosts is not None:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self._hosts)
        return flags.bool().tolist()

    def batches(self, source, batch: Batch, start: int, stop: int) -> Batches:
        """This process's micro-batches of steps [start, stop) in order, (micro, T + 1) int64 on the device."""
        pin = self.device.type == "cuda"
        return Batches(source, batch, self.rank, start, stop, to_device=self.to_device, pin=pin)

    def await_step(self, batches: Batches) -> None:
        """Returns once every process has its data for the next step: none begins one that another cannot finish.
        Raises Interrupted, also where there will be none. A collective call."""
        while self.check_stop(waiting=not batches.ready(_POLL), failed=batches.error() is not None):
            pass

    def to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """A micro-batch, (micro, ...), on the device, or cut over the devices of this process."""
        return rows.to(self.device, non_blocking=self.device.type == "cuda")

    # Talking between processes

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="mean")

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(value, reduction="sum")

    def from_main(self, value):
        """The main process's `value` (any small picklable object) on every process."""
        return broadcast_object_list([value])[0]

    def anywhere(self, condition: bool) -> bool:
        """Whether `condition` holds on any process. A collective call."""
        return self.sum(torch.tensor(float(condition), device=self.device)).item() > 0

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Context: the main process goes through, then the first of each other machine, which may share its disk or
        not, then the rest."""
        with self.accelerator.main_process_first(), self.accelerator.local_main_process_first():
            yield

    # The end

    def close(self) -> None:
        self.accelerator.end_training()
