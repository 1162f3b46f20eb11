"""`micro_batch_size: auto`: the largest micro-batch that fits a device, found by a few trial steps and then fixed; and
`gradient_checkpointing: auto`: false where a useful micro-batch fits without.

A trial step is a real forward and backward of the run's own model, compiled if the run is, on dummy tokens. What is
allocated later (AdamW's moments, DDP's buckets) is added by arithmetic. A trial has no side effects: its model is
deleted and the state of the random generators restored.
"""

import gc
import logging
from functools import partial

import torch

from recipe.checkpoint.format import newest_state
from recipe.config import AUTO, Config, batch_arithmetic
from recipe.engine import hardware
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import ACCURACY, HEADROOM, remedies, state_bytes, step_memory, update_bytes
from recipe.model.build import build_model
from recipe.utils.errors import UserError
from recipe.utils.units import gb, plural, si

logger = logging.getLogger(__name__)

USEFUL_TOKENS = 8 * 1024  # a micro-batch that keeps a GPU busy, unless a device's share of the step is smaller
# Above this, Inductor's loss kernels use 64-bit indices, with a division for each element: by their instructions
# (docs/log.md) a larger micro-batch costs more than it gains. The fused loss and the chunked one are not affected.
MAX_LOGITS = 2**31
MAX_UNMEASURED = 8  # sequences where a step's memory cannot be measured: on a CPU more are no faster
# Fields that may change within a run and that decide how much memory a step takes.
_KEYS = ("precision", "torch_compile", "torch_compile_mode", "gradient_checkpointing", "loss_chunk_size", "fused_loss")


def micro_batch(config: Config, strategy: Strategy) -> tuple[Config, str]:
    """`config` with a number and a bool in place of `auto`, the same on every process, and the line that explains them.

    Both come from the run's newest checkpoint if a step takes the same memory on the same devices; else from trial
    steps, or from the estimate in a dry run, under ZeRO and FSDP, and on a TPU (there at most MAX_UNMEASURED). Where
    the device's memory is not known, they are MAX_UNMEASURED and true. A collective call. Raises UserError if not even
    one sequence fits.
    """
    requested, switch = config.optimizer.micro_batch_size, config.run.gradient_checkpointing
    if requested != AUTO and switch != "auto":
        return config, ""
    device, processes = strategy.device, strategy.runtime.processes
    share = batch_arithmetic(config.replace(micro_batch_size=1), processes.world_size, device.count).accumulation
    sizes = [n for n in range(1, share + 1) if share % n == 0] if requested == AUTO else [min(requested, share)]
    saved_choice = processes.broadcast_object(_checkpoint_choice(config, strategy) if processes.is_main else None)
    if saved_choice and saved_choice[0] in sizes:
        (size, checkpointing), basis = saved_choice, "as in the run's newest checkpoint"
    else:
        if requested == AUTO and (device.memory is None or device.type in ("tpu", "xla")):
            sizes = [n for n in sizes if n <= MAX_UNMEASURED]
        if requested == AUTO and not (config.run.fused_loss is True or config.run.loss_chunk_size):
            logits = config.data.sequence_length * config.model.vocab_size
            sizes = [n for n in sizes if n * logits <= MAX_LOGITS] or sizes[:1]
        if device.memory is None:
            size, checkpointing = sizes[-1], bool(switch)
            basis = "auto tries what fits on a GPU, and takes this elsewhere"
        else:
            size, checkpointing, basis = _Search(strategy, device.memory).choose(config, sizes)
    suffix = f", with{'' if checkpointing else 'out'} gradient checkpointing" if switch == "auto" else ""
    line = f"micro      {plural(size, 'sequence')} a device{suffix}: {basis}"
    return config.replace(micro_batch_size=size, gradient_checkpointing=checkpointing), line


def memory_kind(config: Config, strategy: Strategy) -> dict:
    """The arguments of step_memory that the device and the sharding decide."""
    # The estimate without compilation is 4 to 7 % above what XLA's compiler reports for a TPU (docs/log.md).
    compiled = config.run.torch_compile and not strategy.device.no_compile and strategy.device.type != "tpu"
    return {"precision": strategy.device.precision, "sharding": strategy.runtime.sharding, "compiled": compiled}


class _Search:
    """The search for the micro-batch that fits into `memory` bytes on the device of each process. Collective calls."""

    def __init__(self, strategy: Strategy, memory: int):
        self.strategy, self.memory, self.device = strategy, memory, strategy.device
        self.processes, self.sharding = strategy.runtime.processes, strategy.runtime.sharding

    def choose(self, config: Config, sizes: list[int]) -> tuple[int, bool, str]:
        """One of `sizes`, whether to use gradient checkpointing, and the basis of the choice. Raises UserError."""
        switch = config.run.gradient_checkpointing
        if switch == "auto":
            useful_sizes = [n for n in sizes if n * config.data.sequence_length >= USEFUL_TOKENS] or sizes[-1:]
            size, basis = self._largest_fitting(config.replace(gradient_checkpointing=False), useful_sizes)
            if size:
                return size, False, basis
            if config.optimizer.micro_batch_size != AUTO:
                return sizes[0], True, "without it a step does not fit"
        config = config.replace(gradient_checkpointing=bool(switch))
        size, basis = self._largest_fitting(config, sizes)
        if not size:
            smallest, kind = config.replace(micro_batch_size=1), memory_kind(config, self.strategy)
            batch = batch_arithmetic(smallest, self.processes.world_size, self.device.count)
            way_out = remedies(smallest, batch, HEADROOM * self.memory, **kind)
            raise UserError(f"not even one sequence per device fits: {basis}; {way_out}")
        return size, bool(switch), basis

    def _largest_fitting(self, config: Config, sizes: list[int]) -> tuple[int, str]:
        """The largest of `sizes` (ascending) that fits the devices of all processes, 0 if none does, and the basis of
        that. A size whose estimate exceeds the budget by more than the estimate's accuracy is not tried."""
        dry_run, free = config.run.dry_run, hardware.free_memory(self.device.torch_device)
        budget = HEADROOM * (self.memory if dry_run or free is None else min(free, self.memory))
        kind, devices = memory_kind(config, self.strategy), (self.processes.world_size, self.device.count)
        estimates = {
            n: step_memory(config, batch_arithmetic(config.replace(micro_batch_size=n), *devices), **kind).peak
            for n in (1, *sizes)
        }
        can_try = free and not self.sharding  # ZeRO and FSDP shard the model, or cast it to half precision
        limit = (1 + ACCURACY) * budget if can_try and not dry_run else budget
        candidates = [n for n in reversed(sizes) if not self.processes.anywhere(estimates[n] > limit)]
        size, peak, basis = 0, 0, "the peak of a trial step"
        if candidates and can_try and not dry_run:
            size, peak = self._try_sizes(config, candidates, budget)
        elif candidates:
            size, peak = candidates[0], estimates[candidates[0]]
            basis = "an estimate; the run itself tries it" if can_try else "an estimate"
        if size:
            return size, f"{si(peak)}B of {si(self.memory)}B, {basis}"
        return 0, f"it needs about {gb(estimates[1])}, and {gb(budget)} of the device's {gb(self.memory)} may be used"

    def _try_sizes(self, config: Config, sizes: list[int], budget: float) -> tuple[int, int]:
        """The first of `sizes` with which a step takes at most `budget` bytes on the device of each process, 0 if none
        does, and the peak bytes of that step here. Each process tries with a model of its own, deleted at the end."""
        logger.info("micro      trying how many sequences fit a device")
        device, kind = self.device.torch_device, (self.processes.world_size, self.sharding, self.device.precision)
        with torch.random.fork_rng([device] if self.device.type == "cuda" else []):
            model = build_model(config, load_init_from=False, **self.device.model_options)
            self.strategy.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
            model.train()
            # The trial holds fp32 weights and gradients: add what else the run will hold.
            trial_state = 2 * sum(p.nbytes for p in model.parameters())
            missing_state = state_bytes(config, *kind) - trial_state
            update = trial_state + update_bytes(config, self.processes.world_size, self.device.precision)
            for size in sizes:
                trial_peak = hardware.peak_while(device, partial(self._trial_step, config, model, size))
                peak = 0 if trial_peak is None else max(trial_peak, update) + missing_state
                model.zero_grad()
                if not self.processes.anywhere(trial_peak is None or peak > budget):
                    break
            else:
                size = 0
            del model
            torch.compiler.reset()  # drops this model's graphs, or the run's would be compiled as further variants
            gc.collect()
            hardware.reset_peak_memory(device)
        return size, peak

    def _trial_step(self, config: Config, model: torch.nn.Module, size: int) -> None:
        shape = (size, config.data.sequence_length + 1)
        tokens = torch.arange(shape[0] * shape[1], device=self.device.torch_device)
        rows = (tokens % config.model.vocab_size).view(shape)
        for _ in range(2):  # the second with gradients in memory, as after the first micro-step of a run
            with self.device.autocast():
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()


def _checkpoint_choice(config: Config, strategy: Strategy) -> tuple[int, bool] | None:
    """Micro-batch and gradient checkpointing in this run's newest checkpoint, if a step takes the same memory."""
    state, flat = newest_state(config.run), config.flat()
    if not state or state["engine"] != str(strategy):
        return None
    saved = state["config"]
    if any(flat[name] not in (saved.get(name), AUTO) for name in _KEYS):
        return None
    return saved["micro_batch_size"], saved["gradient_checkpointing"]
