"""`micro_batch_size: auto`: the largest micro-batch that fits a device, by the estimate of a step's memory; and
`gradient_checkpointing: auto`: false where a useful micro-batch fits without."""

import math

from recipe.checkpoint.format import newest_state
from recipe.config import AUTO, Config, batch_arithmetic
from recipe.engine import hardware
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import HEADROOM, remedies, step_memory
from recipe.utils.errors import UserError
from recipe.utils.units import gb, plural, si

USEFUL_TOKENS = 8 * 1024  # a micro-batch that keeps a GPU busy, unless a device's share of the step is smaller
# Above this, Inductor's loss kernels use 64-bit indices, with a division for each element: by their instructions
# (docs/log.md) a larger micro-batch costs more than it gains. The fused loss and the chunked one are not affected.
MAX_LOGITS = 2**31
MAX_SEQUENCES = 8  # on a TPU, where no run has shown more to be faster, and on a CPU, where they are not
# Fields that may change within a run and that decide how much memory a step takes.
_KEYS = ("precision", "torch_compile", "torch_compile_mode", "gradient_checkpointing", "loss_chunk_size", "fused_loss")


def resolve_micro_batch(config: Config, strategy: Strategy) -> tuple[Config, str]:
    """`config` with a number and a bool in place of `auto`, the same on every process, and the line that explains them.

    Both come from the run's newest checkpoint if a step takes the same memory on the same devices; else from the
    estimate. Where the device's memory is not known, and on a TPU, auto takes at most MAX_SEQUENCES. A collective call.
    Raises UserError if not even one sequence fits.
    """
    requested, switch = config.optimizer.micro_batch_size, config.run.gradient_checkpointing
    if requested != AUTO and switch != "auto":
        return config, ""
    device, processes = strategy.device, strategy.runtime.processes
    single = config if requested == AUTO else config.replace(micro_batch_size=1)  # auto counts as 1
    share = batch_arithmetic(single, processes.world_size, device.count).accumulation
    sizes = [n for n in range(1, share + 1) if share % n == 0] if requested == AUTO else [min(requested, share)]
    saved_choice = processes.broadcast_object(_checkpoint_choice(config, strategy) if processes.is_main else None)
    limit = _largest_fast(config, strategy) if requested == AUTO else math.inf
    fast_sizes = [n for n in sizes if n <= limit] or sizes[:1]
    if saved_choice and saved_choice[0] in sizes:
        (size, checkpointing), basis = saved_choice, "as in the run's newest checkpoint"
    elif device.memory is None:
        size, checkpointing = fast_sizes[-1], bool(switch)
        basis = "the default of auto where the memory is not known"
    else:
        size, checkpointing, basis = _choose(config, strategy, device.memory, fast_sizes)
    suffix = f", with{'' if checkpointing else 'out'} gradient checkpointing" if switch == "auto" else ""
    line = f"micro      {plural(size, 'sequence')} a device{suffix}: {basis}"
    return config.replace(micro_batch_size=size, gradient_checkpointing=checkpointing), line


def _largest_fast(config: Config, strategy: Strategy) -> float:
    """The number of sequences beyond which a larger micro-batch is not faster."""
    limit = MAX_SEQUENCES if strategy.device.memory is None or strategy.device.type in ("tpu", "xla") else math.inf
    if config.run.fused_loss is True or config.run.loss_chunk_size:
        return limit
    return min(limit, MAX_LOGITS // (config.data.sequence_length * config.model.vocab_size))


def memory_kind(config: Config, strategy: Strategy) -> dict:
    """The arguments of step_memory that the device and the sharding decide."""
    # The estimate without compilation is 9 to 12 % above what XLA's compiler reports for a TPU (docs/log.md).
    compiled = config.run.torch_compile and not strategy.runtime.no_compile and strategy.device.type != "tpu"
    return {"precision": strategy.device.precision, "sharding": strategy.runtime.sharding, "compiled": compiled}


def _choose(config: Config, strategy: Strategy, memory: int, sizes: list[int]) -> tuple[int, bool, str]:
    """The largest of `sizes` (ascending) with which a step fits each process's device of `memory` bytes; whether to
    use gradient checkpointing; and the basis of the choice. A collective call. Raises UserError."""
    processes, switch = strategy.runtime.processes, config.run.gradient_checkpointing
    free = None if config.run.dry_run else hardware.free_memory(strategy.device.torch_device)
    available = memory if free is None else min(memory, free)
    room = f" ({gb(available)} free)" if available < memory else ""
    budget, kind = HEADROOM * available, memory_kind(config, strategy)
    candidates = [(size, bool(switch)) for size in reversed(sizes)]  # the best first
    if switch == "auto":
        useful_sizes = [n for n in sizes if n * config.data.sequence_length >= USEFUL_TOKENS] or sizes[-1:]
        candidates = [(size, False) for size in reversed(useful_sizes)] + candidates
    for size, checkpointing in candidates:
        trial = config.replace(micro_batch_size=size, gradient_checkpointing=checkpointing)
        batch = batch_arithmetic(trial, processes.world_size, strategy.device.count)
        peak = step_memory(trial, batch, **kind).peak
        if not processes.anywhere(peak > budget):
            return size, checkpointing, f"{si(peak)}B of {si(memory)}B{room}, an estimate"
    if config.optimizer.micro_batch_size != AUTO:
        return size, True, "a step does not fit without it"
    raise UserError(
        f"not even one sequence per device fits: it needs about {gb(peak)}, and {gb(budget)} of the device's "
        f"{gb(memory)}{room} may be used; {remedies(trial, batch, budget, strategy.device.type, **kind)}"
    )


def _checkpoint_choice(config: Config, strategy: Strategy) -> tuple[int, bool] | None:
    """Micro-batch and gradient checkpointing in this run's newest checkpoint, if a step takes the same memory."""
    state, flat = newest_state(config.run), config.flat()
    if not state or state["engine"] != str(strategy):
        return None
    saved = state["config"]
    if any(flat[name] not in (saved.get(name), AUTO) for name in _KEYS):
        return None
    return saved["micro_batch_size"], saved["gradient_checkpointing"]
