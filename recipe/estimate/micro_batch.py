"""`micro_batch_size: auto`: the largest micro-batch that fits a device, found by a few trial steps and then fixed.

A trial step is a real forward and backward of the run's own model, compiled if the run is, on made-up tokens. What is
allocated later (AdamW's moments, what ZeRO cuts up) is added by arithmetic. Nothing of a trial stays: its model is
thrown away and the random numbers go on as if there had been none.
"""

import dataclasses
import gc
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.checkpoint.format import checkpoints
from recipe.cli import AUTO
from recipe.config import Batch, Config, batch_arithmetic
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine import device as hardware
from recipe.engine.base import Engine
from recipe.errors import UserError
from recipe.estimate.memory import HEADROOM, gb, memory_estimate, plural, remedies, state_bytes
from recipe.model.build import build_model

UNMEASURED = 8  # sequences, at most, where memory is not measured: on a CPU more are no faster, and a TPU core holds 8
_SAME = (
    "n_layer",
    "n_head",
    "n_embd",
    "n_positions",
    "dropout",
    "sequence_length",
    "total_batch_tokens",
    "precision",
    "torch_compile",
    "torch_compile_mode",
    "gradient_checkpointing",
    "loss_chunk_size",
    "device_memory_gb",
)


@dataclass(frozen=True)
class Found:
    """The largest size that fits; the bytes it takes; the next size, 0 if there is none, and what that would take."""

    size: int
    peak: int
    over: int
    over_peak: int


def largest(
    sizes: list[int], budget: float, reckoned: Callable[[int], int], peak_of: Callable[[int], int | None]
) -> Found | None:
    """The largest of `sizes` (ascending) whose peak is at most `budget` bytes, or None if the first is not.

    `peak_of(size)` measures, None where memory ran out; no size is tried twice, and none above one that did not fit.
    `reckoned(size)`, of 0 too, says what to try first; from then on its distance from the last measured size counts,
    times the measured slope over the reckoned one.
    """
    tried: dict[int, int | None] = {}

    def expected(size: int) -> float:
        if tried.get(size):
            return tried[size]
        known = sorted((n for n, peak in tried.items() if peak), key=lambda n: abs(n - size))
        if not known:
            return reckoned(size)
        near = known[0]
        base, base_peak = (known[1], tried[known[1]]) if len(known) > 1 else (0, reckoned(0))
        slope = (tried[near] - base_peak) / ((reckoned(near) - reckoned(base)) or 1)
        return tried[near] + max(slope, 0) * (reckoned(size) - reckoned(near))

    def fits(size: int) -> bool:
        too_large = [n for n, peak in tried.items() if peak is None or peak > budget]
        return size < min(too_large, default=size + 1) and expected(size) <= budget

    while True:
        size = max(filter(fits, sizes), default=sizes[0])
        if size in tried:
            break
        tried[size] = peak_of(size)
    if not fits(size):
        return None
    over = next((n for n in sizes if n > size), 0)
    return Found(size, tried[size], over, int(expected(over)) if over else 0)


def micro_batch(config: Config, engine: Engine, say: Callable[[str], None]) -> tuple[Config, str]:
    """`config` with a number in place of `auto`, the same on every process, and the line that says where it is from.

    The number is that of the run's newest checkpoint if the run is the same on the same devices, else that of trial
    steps, reckoned in a dry run and under ZeRO-2 and 3, or UNMEASURED where the device's memory is not known. A
    collective call. Raises UserError where not even a micro-batch of 1 fits.
    """
    if config.optimizer.micro_batch_size != AUTO:
        return config, ""
    ones = batch_arithmetic(config, engine.world, engine.devices)
    share = ones.accumulation  # sequences a device and step
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    total, free = memory_of(config, engine), hardware.free_memory(engine.device)
    earlier = engine.from_main(_of_checkpoint(config, engine) if engine.is_main else None)
    if earlier in sizes:
        found, why = earlier, "as in the run's newest checkpoint"
    elif total is None or not (free or config.run.dry_run):
        found = max(n for n in sizes if n <= UNMEASURED)
        why = "auto tries what fits on a GPU, and takes this elsewhere"
    else:
        budget = HEADROOM * (total if config.run.dry_run else min(free, total))

        def reckoned(size: int) -> int:
            return memory_estimate(config, _of_size(ones, size), **engine_kind(config, engine))

        native = engine.zero_stage and engine.precision == "fp16"  # DeepSpeed cuts the model itself, or halves it first
        if config.run.dry_run or engine.zero_stage > 1 or native:
            best = largest(sizes, budget, reckoned, reckoned)
            tries = free and engine.zero_stage < 2 and not native
            how = "reckoned" + ("; the run itself tries it" if tries else "")
        else:
            say("micro      trying how many sequences a device holds at once")
            with ExitStack() as closing:
                best = largest(sizes, budget, reckoned, trials(config, engine, closing))
            how = "the peak of a trial step"
        found = _least(sizes, best.size if best else 0, engine)
        if not found:
            raise UserError(
                f"not even one sequence a device fits {gb(total)} of memory, of which {gb(budget)} may be taken: "
                f"about {gb(reckoned(1))} are needed. {remedies(config, ones, **engine_kind(config, engine))}"
            )
        why = f"{gb(best.peak)} of {gb(total)}, {how}"
        if best.size > found:
            why = f"all that fit another process ({why} would be those of {best.size} here)"
        elif best.over:
            why += f" ({best.over} would need {gb(best.over_peak)})"
    optimizer = dataclasses.replace(config.optimizer, micro_batch_size=found)
    return dataclasses.replace(config, optimizer=optimizer), f"micro      {plural(found, 'sequence')} a device: {why}"


def memory_of(config: Config, engine: Engine) -> int | None:
    """Bytes of a device that the run may take, None where that is not known."""
    return int(1e9 * config.run.device_memory_gb) or hardware.memory(engine.device)


def engine_kind(config: Config, engine: Engine) -> dict:
    """What memory_estimate asks of an engine."""
    return {
        "precision": engine.precision,
        "zero_stage": engine.zero_stage,
        "compiled": config.run.torch_compile and not engine.no_compile,
    }


def trials(config: Config, engine: Engine, closing: ExitStack) -> Callable[[int], int | None]:
    """A function of the micro-batch: peak bytes of a step with it on this process's device, or None where memory ran
    out. Its model, a process's own and unprepared, is gone after `closing`."""
    closing.enter_context(hardware.same_random_numbers(engine.device))
    model = build_model(config, load_init_from=False, **engine.model_options)
    engine.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
    model.train()
    # The trial holds whole fp32 weights and gradients; what else the run will hold, or hold less of.
    later = state_bytes(config.model, engine.world, engine.zero_stage, engine.precision) - 2 * sum(
        p.nbytes for p in model.parameters()
    )

    def step(micro: int) -> None:
        shape = (micro, config.data.sequence_length + 1)
        rows = (torch.arange(shape[0] * shape[1], device=engine.device) % VOCAB_SIZE).view(shape)
        for _ in range(2):  # in the second one gradients are there, as after the first micro-step of a run
            with engine.autocast():
                loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()

    def peak_of(micro: int) -> int | None:
        peak = hardware.peak_while(engine.device, lambda: step(micro))
        model.zero_grad()
        return None if peak is None else peak + later

    def forget() -> None:
        nonlocal model
        model = None
        torch.compiler.reset()  # or the run's model would be compiled beside this one, and not in place of it
        gc.collect()
        hardware.reset_peak_memory(engine.device)

    closing.callback(forget)
    return peak_of


def _of_size(ones: Batch, size: int) -> Batch:
    """The batch with micro-batches of `size` a device, from that of 1."""
    return dataclasses.replace(ones, micro=size * ones.devices, accumulation=ones.accumulation // max(1, size))


def _least(sizes: list[int], own: int, engine: Engine) -> int:
    """The largest size that is too large for no process, 0 if there is none. A collective call."""
    return next((n for n in reversed(sizes) if not engine.anywhere(own < n)), 0)


def _of_checkpoint(config: Config, engine: Engine) -> int | None:
    """The micro-batch in the newest checkpoint of this run, if it was saved by the same engine for the same model."""
    now = config.flat()
    found = [] if config.run.fresh else checkpoints(Path(config.run.output_dir))
    try:
        state = json.loads((found[-1] / "trainer_state.json").read_text())
        before = state["config"]
        same = state["engine"] == engine.name and all(before[k] == now[k] for k in _SAME)
        return int(before["micro_batch_size"]) if same else None
    except (IndexError, OSError, ValueError, KeyError, TypeError):
        return None  # none, or damaged: which of them is whole is not decided here
