"""Engine: one device or DDP through Accelerate. deepspeed.py, fsdp.py and xla.py override what differs.

Accelerate decides which device and how many processes; the recipe decides everything else. What Accelerate would do
silently and wrongly (processes that are not connected, a model without its wrapper) is refused with the command to run
instead. No other package imports Accelerate's Accelerator.

Engines agree: the same recipe gives the same losses on one device, DDP, ZeRO-1, 2 and 3, FSDP and XLA, in fp32 within
1e-4 over the first 50 steps of the tests' schedule. A learning rate high enough to amplify rounding widens the
difference on any engine. With dropout they do not agree: its masks depend on the process and the micro-batch.
"""

import os
from contextlib import nullcontext
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine import device as hardware
from recipe.engine.launch import check_accelerator, wants_cpu
from recipe.engine.shutdown import Agreement, StopSignal
from recipe.model.attention import block_attention
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim import optimizer as optimizers
from recipe.optim.spike_filter import SpikeFilter
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from recipe.utils.units import plural

TIMEOUT = timedelta(minutes=40)  # for a collective; when a process dies, the others end at once, not after this


class Engine:
    """Device and precision, the calls of a step, and the trained state, whose form depends on them.

    Attributes:
        processes: this process among all of them.
        stop: the signals that this process has received.
        agreement: what the processes decide between two steps.
        device: this process's device.
        precision: resolved: fp32, tf32, bf16 or fp16.
        max_grad_norm, spike_filter: what `clip_gradients` clips to, and which steps are skipped; set by `prepare`.
    """

    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    devices = 1  # how many this process drives: more are the TPU cores behind one process
    optimizers: tuple[str, ...] | None = None  # which values of `optim` it can run; None: any
    adamw = "fused"  # which of torch's implementations of AdamW
    attention = checkpoint = None  # functions that replace the model's own where the device has better ones
    no_compile = note = ""  # why torch.compile is ignored; what else to tell the user
    method = "DDP"  # how processes share the work, in words
    sharding = ""  # for the memory estimate: zero1, zero2, zero3, fsdp, fsdp_gathered, or empty
    memory: int | None = None  # bytes of the device's own memory; None where it has none or it is not known
    peak_flops: float | None = None  # of this process's devices together in FLOP/s; None where it is not known
    pad_vocab_to = 1  # the rows of the head's product are rounded up to a multiple of this
    idle_gpus = 0  # GPUs of this node that the launch does not use
    sum_dtype = torch.float64  # for sums over many steps
    eval_multiples = (1, 1, 1)  # an evaluation's sequences, positions and scored tokens are padded to these

    def __init__(self, precision: str, *, mixed_precision: str | None = None, handlers: list | None = None):
        """`mixed_precision` is what Accelerate is given instead of the recipe's precision; `handlers` configure how it
        starts the process group."""
        self.precision = hardware.resolve_precision(precision, cpu=wants_cpu())
        if mixed_precision is None:
            mixed_precision = self.precision if self.precision in ("bf16", "fp16") else "no"
        if handlers is None:  # gradients that are views of DDP's buckets save one copy
            handlers = [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
            handlers.append(InitProcessGroupKwargs(timeout=TIMEOUT))
        self.accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers)
        self.accelerator.gradient_accumulation_steps = 1  # the loop itself divides the loss, whatever the environment
        check_accelerator(self.accelerator, self.supported, self.precision)
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        local = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        hosts = torch.distributed.new_group(backend="gloo", timeout=TIMEOUT) if world_size > 1 else None
        self.processes = Processes(rank, world_size, *local, is_main=rank == 0, hosts=hosts)
        self.stop = StopSignal()
        self.agreement = Agreement(self.stop, hosts)
        self.device = self.accelerator.device
        hardware.check_kernels(self.device)
        self._set_up_device()

    def _set_up_device(self) -> None:
        self.device_name = self.device.type.upper()
        if self.device.type in ("mps", "xla"):
            self.sum_dtype = torch.float32
        if self.device.type != "xla":
            torch.set_float32_matmul_precision("highest" if self.precision == "fp32" else "high")
        if self.device.type == "cuda":
            self.device_name = torch.cuda.get_device_name(self.device)
            self.memory = torch.cuda.get_device_properties(self.device).total_memory
            self.peak_flops = hardware.peak_flops(self.device_name)
            self.pad_vocab_to = 128  # for tensor cores; on a CPU it costs 7 %, and a TPU gains nothing
            self.idle_gpus = max(0, torch.cuda.device_count() - self.processes.local_world_size)
            self.eval_multiples = (1, 64, 1)  # few lengths: cuDNN plans attention with a mask for each of them
        if self.device.type == "cpu":
            hardware.use_deterministic_algorithms()
            hardware.tune_cpu(local_world_size=self.processes.local_world_size)
            self.device_name = f"CPU ({plural(torch.get_num_threads(), 'thread')} a process)"
            self.attention = block_attention if self.precision == "bf16" else None

    # The device

    @property
    def name(self) -> str:
        """The device and how processes share the work, for the run's summary."""
        world_size = self.processes.world_size
        if world_size == 1 and self.method == "DDP":
            return self.device_name
        return f"{self.device_name}, {self.method} over {plural(world_size, 'process', 'es')}"

    @property
    def model_options(self) -> dict:
        """Arguments of build_model that depend on the device."""
        return {"attention": self.attention, "checkpoint": self.checkpoint, "pad_vocab_to": self.pad_vocab_to}

    @property
    def optimizer_options(self) -> dict:
        """Arguments of make_optimizer: how AdamW and Muon compute on this device."""
        half = self.precision == "bf16" and self.device.type != "cpu"  # a CPU's small products in bf16 are slow
        dtype = torch.bfloat16 if half else torch.float32
        muon = {"dtype": dtype, "rank": self.processes.rank, "world_size": self.processes.world_size}
        return {"muon": muon, self.adamw: True}

    def counters(self) -> dict[str, int | None]:
        """Columns of metrics.jsonl: peak_memory_bytes, the peak of a CUDA device's allocator or, elsewhere (CPU, MPS),
        the process's largest resident set; None where it is not known."""
        return {"peak_memory_bytes": hardware.peak_memory(self.device)}

    def to_device(self, rows: torch.Tensor) -> torch.Tensor:
        """A micro-batch (micro, ...) on the device, or its rows divided over the devices of this process."""
        return rows.to(self.device, non_blocking=self.device.type == "cuda")

    def autocast(self):
        """Context: the run's precision, for parts of the model that are called by themselves."""
        return self.accelerator.autocast()

    def flush(self) -> None:
        """Makes a lazy device run what it has recorded so far; others already do."""

    def close(self) -> None:
        """Leaves the process group. A collective call."""
        self.accelerator.end_training()

    # Preparing

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """Moves the model to the device, in place, and compiles it if `compile` names a mode; call it before the
        optimizer is created."""
        model.to(self.device)
        if compile and not self.no_compile:
            # regional: a block at a time, where all blocks run the code of the first
            for module in model.transformer.h if compile == "regional" else [model]:
                hardware.compile_graph(module, compile)

    def prepare(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: BatchPlan, config: OptimizerConfig
    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Returns the wrapped (model, optimizer) to train with, and sets `spike_filter`. A collective call. Raises
        UserError where several processes would train without a wrapper that connects them."""
        self.max_grad_norm, self.spike_filter = config.max_grad_norm, SpikeFilter(self.device, config)
        return self._prepare(model, optimizer, batch)

    def _prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: BatchPlan):
        prepared = self.accelerator.prepare(model)
        world_size = self.processes.world_size
        if world_size > 1 and not isinstance(prepared, torch.nn.parallel.DistributedDataParallel):
            raise UserError(f"{world_size} processes without DDP; launch with accelerate_configs/ddp.yaml")
        return prepared, optimizer

    # A step: micro-steps, each with a forward and a backward pass, and then the four calls of train.optimizer_step

    def seed_dropout(self, seed: int, step: int) -> None:
        """Makes the masks of a step a function of (seed, step, rank), so that a resumed run draws the same ones."""
        self._seed(((seed * 1_000_003 + step) * 65_537 + self.processes.rank) % 2**63)

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def micro_step(self, model: torch.nn.Module, *, last: bool):
        """Context of one micro-step's forward and backward. A collective call in the last one, which averages the
        gradients over processes."""
        return nullcontext() if last else self.accelerator.no_sync(model)

    def backward(self, loss: torch.Tensor) -> None:
        """Runs backward; `loss`, (), is already divided by the accumulation count. Collective in the last
        `micro_step`."""
        self.accelerator.backward(loss)

    def clip_gradients(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Clips the gradients, by now averaged over processes, to max_grad_norm (0: no clipping). Returns their global
        norm before clipping, () on the device, without waiting for it. Collective where gradients are sharded."""
        if self._fused(optimizer):  # the optimizer divides the gradients as it reads them
            grad_norm, divisor = optimizers.norm_and_divisor(model.parameters(), self.max_grad_norm)
            setattr(optimizer, "grad_scale", divisor)  # noqa: B010  no attribute of Optimizer's, but fused ones read it
            return grad_norm
        if scaler := self.accelerator.scaler:
            scaler.unscale_(optimizer)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm or float("inf"))

    def should_skip(self, grad_norm: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """1.0 where `spike_filter` skips the step, else 0.0, () on the device; `loss` is the step's mean here.
        A collective call."""
        mean_loss = self.processes.mean(loss) if "loss" in self.spike_filter.limits else None
        return self.spike_filter.should_skip(grad_norm, mean_loss)

    def step(self, optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
        """Updates the weights; where `skip` is 1, changes neither weights nor optimizer state."""
        if scaler := self.accelerator.scaler:
            _scaled_step(optimizer, scaler, skip)
        elif self._fused(optimizer):
            setattr(optimizer, "found_inf", skip)  # noqa: B010  so torch's GradScaler tells it to change nothing
            optimizer.step()
        elif not bool(skip):
            optimizer.step()

    def zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        """Clears the gradients."""
        optimizer.zero_grad()

    def _fused(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer can divide the gradients and skip a step by itself: torch's fused ones on a CPU and on
        CUDA. The one on MPS claims it too, but ignores the divisor; and fp16's scaler does both by itself."""
        able = getattr(optimizer, "_step_supports_amp_scaling", False)
        return able and self.device.type != "mps" and not self.accelerator.scaler

    # State, whole and by name, whatever the sharding

    @torch.no_grad()
    def snapshot(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict, dict]:
        """Copies of the weights and the optimizer state by name, on the CPU of the main process; ({}, {}) on the
        others. A collective call."""
        whole = {}, {}
        tensors = dict(model.named_parameters()), optimizers.named_state(model, optimizer)
        for parts, into in zip(tensors, whole, strict=True):
            for name, part in parts.items():  # one whole tensor at a time is on the device
                tensor = optimizers.whole(part)
                if self.processes.is_main:  # copied on a CPU too: the next steps change the original
                    into[name] = tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
        return whole

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


def _scaled_step(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, skip: torch.Tensor) -> None:
    """A step with a loss scale, which is skipped on overflow. It is also skipped where `skip` is 1 for a spike, whose
    finite gradients are no reason to lower the scale."""
    overflow = torch.zeros_like(skip)
    for found in scaler._found_inf_per_device(optimizer).values():
        overflow = torch.maximum(overflow, found)
        found.copy_(torch.maximum(found, skip))
    scale, growth = scaler._scale, scaler._growth_tracker
    assert scale is not None  # since the first backward pass
    assert growth is not None
    kept = [(t, t.clone()) for t in (scale, growth)]
    scaler.step(optimizer)
    scaler.update()
    for tensor, before in kept:
        tensor.copy_(torch.where((skip > 0) & (overflow == 0), before, tensor))
