"""`micro_batch_size: auto`: the largest micro-batch that fits a device, found by a few trial steps and then fixed; and
`gradient_checkpointing: auto`: false where a useful micro-batch fits without.

A trial step is a real forward and backward of the run's own model, compiled if the run is, on dummy tokens. What is
allocated later (AdamW's moments, DDP's buckets) is added by arithmetic. A trial has no side effects: its model is
deleted, and the random numbers continue as if there had been none.
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
from recipe.utils.units import gb, plural

logger = logging.getLogger(__name__)

USEFUL = 8 * 1024  # tokens: a micro-batch that keeps a GPU busy, unless a device's share of the step is smaller
# Logits of a micro-batch: with more, Inductor's kernels of the loss count in 64 bits, a division for each of them. By
# their instructions (docs/log.md) that costs more than it brings. The fused loss and chunks do without.
MOST_LOGITS = 2**31
UNMEASURED = 8  # sequences, at most, where a step's memory cannot be measured: on a CPU more are no faster
# Fields that may change within a run and that decide how much memory a step takes.
_SAME = ("precision", "torch_compile", "torch_compile_mode", "gradient_checkpointing", "loss_chunk_size", "fused_loss")


def micro_batch(config: Config, strategy: Strategy) -> tuple[Config, str]:
    """`config` with a number and a bool in place of `auto`, the same on every process, and the line that explains them.

    Both come from the run's newest checkpoint if a step takes the same memory on the same devices; else from trial
    steps; or from the estimate in a dry run, under ZeRO and FSDP, and on a TPU (there at most UNMEASURED). Where
    the device's memory is not known, they are UNMEASURED and true. A collective call. Raises UserError where not even a
    micro-batch of 1 fits.
    """
    wanted, switch = config.optimizer.micro_batch_size, config.run.gradient_checkpointing
    if wanted != AUTO and switch != "auto":
        return config, ""
    device, processes = strategy.device, strategy.runtime.processes
    share = batch_arithmetic(config.replace(micro_batch_size=1), processes.world_size, device.count).accumulation
    sizes = [n for n in range(1, share + 1) if share % n == 0] if wanted == AUTO else [min(wanted, share)]
    earlier = processes.broadcast_object(_of_checkpoint(config, strategy) if processes.is_main else None)
    if earlier and earlier[0] in sizes:
        (size, checkpointing), why = earlier, "as in the run's newest checkpoint"
    else:
        if wanted == AUTO and (device.memory is None or device.type in ("tpu", "xla")):
            sizes = [n for n in sizes if n <= UNMEASURED]
        if wanted == AUTO and not (config.run.fused_loss is True or config.run.loss_chunk_size):
            logits = config.data.sequence_length * config.model.vocab_size
            sizes = [n for n in sizes if n * logits <= MOST_LOGITS] or sizes[:1]
        if device.memory is None:
            size, checkpointing = sizes[-1], bool(switch)
            why = "auto tries what fits on a GPU, and takes this elsewhere"
        else:
            size, checkpointing, why = _Search(strategy, device.memory).chosen(config, sizes)
    how = f", with{'' if checkpointing else 'out'} gradient checkpointing" if switch == "auto" else ""
    line = f"micro      {plural(size, 'sequence')} a device{how}: {why}"
    return config.replace(micro_batch_size=size, gradient_checkpointing=checkpointing), line


def memory_kind(config: Config, strategy: Strategy) -> dict:
    """The arguments of step_memory that the device and the sharding decide."""
    # On a TPU the plain estimate is 4 to 7 % above what was compiled for one (docs/log.md).
    compiled = config.run.torch_compile and not strategy.device.no_compile and strategy.device.type != "tpu"
    return {"precision": strategy.device.precision, "sharding": strategy.runtime.sharding, "compiled": compiled}


class _Search:
    """The search for what fits into `memory` bytes on the device of each process. Collective calls."""

    def __init__(self, strategy: Strategy, memory: int):
        self.strategy, self.memory, self.device = strategy, memory, strategy.device
        self.processes, self.sharding = strategy.runtime.processes, strategy.runtime.sharding

    def chosen(self, config: Config, sizes: list[int]) -> tuple[int, bool, str]:
        """One of `sizes`, whether with gradient checkpointing, and how both were found. Raises UserError."""
        switch = config.run.gradient_checkpointing
        if switch == "auto":
            useful = [n for n in sizes if n * config.data.sequence_length >= USEFUL] or sizes[-1:]
            size, why = self._fitting(config.replace(gradient_checkpointing=False), useful)
            if size:
                return size, False, why
            if config.optimizer.micro_batch_size != AUTO:
                return sizes[0], True, "without it a step does not fit"
        config = config.replace(gradient_checkpointing=bool(switch))
        size, why = self._fitting(config, sizes)
        if not size:
            one, kind = config.replace(micro_batch_size=1), memory_kind(config, self.strategy)
            batch = batch_arithmetic(one, self.processes.world_size, self.device.count)
            way_out = remedies(one, batch, HEADROOM * self.memory, **kind)
            raise UserError(f"not even one sequence per device fits: {why}; {way_out}")
        return size, bool(switch), why

    def _fitting(self, config: Config, sizes: list[int]) -> tuple[int, str]:
        """The largest of `sizes` (ascending) that fits the devices of all processes, 0 where none does, and how it was
        found. What is estimated to take more than the memory by more than the estimate's accuracy is not tried."""
        dry, free = config.run.dry_run, hardware.free_memory(self.device.torch_device)
        budget = HEADROOM * (self.memory if dry or free is None else min(free, self.memory))
        kind, devices = memory_kind(config, self.strategy), (self.processes.world_size, self.device.count)
        estimates = {
            n: step_memory(config, batch_arithmetic(config.replace(micro_batch_size=n), *devices), **kind).peak
            for n in (1, *sizes)
        }
        # ZeRO and FSDP shard the model itself, or halve it first.
        can_try = free and not self.sharding
        most = (1 + ACCURACY) * budget if can_try and not dry else budget
        likely = [n for n in reversed(sizes) if not self.processes.anywhere(estimates[n] > most)]
        size, peak, how = 0, 0, "the peak of a trial step"
        if likely and can_try and not dry:
            size, peak = self._tried(config, likely, budget)
        elif likely:
            size, peak = likely[0], estimates[likely[0]]
            how = "an estimate; the run itself tries it" if can_try else "an estimate"
        if size:
            return size, f"{gb(peak)} of {gb(self.memory)}, {how}"
        return 0, f"it needs about {gb(estimates[1])}, and {gb(budget)} of the device's {gb(self.memory)} may be used"

    def _tried(self, config: Config, sizes: list[int], budget: float) -> tuple[int, int]:
        """The first of `sizes` with which a step takes at most `budget` bytes on the device of each process, 0 where
        none does, and the peak bytes of that step here. The model is the process's own, and deleted at the end."""
        logger.info("micro      trying how many sequences a device holds at once")
        device, kind = self.device.torch_device, (self.processes.world_size, self.sharding, self.device.precision)
        with torch.random.fork_rng([device] if self.device.type == "cuda" else []):
            model = build_model(config, load_init_from=False, **self.device.model_options)
            self.strategy.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
            model.train()
            # The trial holds fp32 weights and gradients: add what else the run will hold.
            held = 2 * sum(p.nbytes for p in model.parameters())
            later = state_bytes(config, *kind) - held
            update = held + update_bytes(config, self.processes.world_size, self.device.precision)
            for size in sizes:
                measured = hardware.peak_while(device, partial(self._step, config, model, size))
                peak = 0 if measured is None else max(measured, update) + later
                model.zero_grad()
                if not self.processes.anywhere(measured is None or peak > budget):
                    break
            else:
                size = 0
            del model
            torch.compiler.reset()  # or the run's model would be compiled beside this one
            gc.collect()
            hardware.reset_peak_memory(device)
        return size, peak

    def _step(self, config: Config, model: torch.nn.Module, size: int) -> None:
        shape = (size, config.data.sequence_length + 1)
        tokens = torch.arange(shape[0] * shape[1], device=self.device.torch_device)
        rows = (tokens % config.model.vocab_size).view(shape)
        for _ in range(2):  # in the second one gradients are there, as after the first micro-step of a run
            with self.device.autocast():
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()


def _of_checkpoint(config: Config, strategy: Strategy) -> tuple[int, bool] | None:
    """Micro-batch and gradient checkpointing in this run's newest checkpoint, if strategy and model are the same."""
    state, now = newest_state(config.run), config.flat()
    if not state or state["engine"] != str(strategy):
        return None
    before = state["config"]
    same = all(now[name] in (before.get(name), AUTO) for name in _SAME)
    return (before["micro_batch_size"], before["gradient_checkpointing"]) if same else None
