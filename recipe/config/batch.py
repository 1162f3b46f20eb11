"""How an optimizer step is divided among processes and micro-steps, and what is due after each step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from recipe.config.fields import AUTO, Config
from recipe.utils.errors import UserError
from recipe.utils.units import plural


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step's sequences are divided: sequences = world_size x accumulation x micro.

    `micro` is the number of sequences in a process's micro-step, divided evenly among its `devices`.
    """

    sequences: int
    world_size: int
    micro: int
    accumulation: int
    devices: int = 1

    def slice(self, micro_step: int, rank: int) -> tuple[int, int]:
        """[lo, hi) of the step's sequences that `rank` takes in `micro_step`."""
        lo = (micro_step * self.world_size + rank) * self.micro
        return lo, lo + self.micro


def batch_arithmetic(config: Config, world_size: int, devices: int = 1) -> BatchPlan:
    """Derives the accumulation for `world_size` processes with `devices` devices each; nothing else computes it.

    A device whose share of the step is smaller than micro_batch_size takes all of that share at once. Raises UserError,
    with the nearest valid total_batch_tokens, if the step does not divide evenly.
    """
    tokens, length = config.optimizer.total_batch_tokens, config.data.sequence_length
    sequences, replicas = tokens // length, world_size * devices
    size = config.optimizer.micro_batch_size
    micro = min(1 if size == AUTO else size, max(1, sequences // replicas))  # auto: estimate/micro_batch.py resolves it
    unit = replicas * micro * length
    accumulation, remainder = divmod(tokens, unit)
    if remainder:
        factor = plural(replicas, "process", "es") if devices == 1 else plural(replicas, "device")
        if micro == size:
            factor += f" x micro_batch_size {micro}"
        else:  # all of a device's share, whatever it is
            unit = replicas * length
        # With auto the step of the suggestion also divides by 8 sequences a device.
        good_unit = 8 * unit if size == AUTO and tokens >= 8 * unit else unit
        lower = tokens // good_unit * good_unit
        nearest = ", ".join(str(valid) for valid in (lower, lower + good_unit) if valid)
        text = f"total_batch_tokens {tokens} is not a multiple of {factor} x sequence_length {length} = {unit}"
        raise UserError(f"{text}; nearest valid: {nearest}")
    return BatchPlan(sequences, world_size, micro * devices, accumulation, devices)


@dataclass(frozen=True)
class Due:
    """What is due after an optimizer step."""

    last: bool
    log: bool
    eval: bool
    save: bool
    hellaswag: bool
    sample: bool

    def without(self, record: dict) -> Due:
        """What is still due, given the `record` of the step that an earlier process of the run has made."""
        has_hellaswag = any(column.startswith("hellaswag") for column in record)
        is_measured = {"eval": "val_loss" in record, "hellaswag": has_hellaswag, "sample": "sample" in record}
        return replace(self, **{name: False for name in is_measured if is_measured[name]})


def due_at(step: int, config: Config) -> Due:
    """What is due after `step` optimizer steps: a field of 0 is never due, "end" after the last step, N after every Nth
    and the last. Step 0 has no checkpoint and no HellaSwag score, which would be at chance. The first step is logged
    too, so that a user soon sees that the run trains, and so is every step with an evaluation, during which the
    training clock stops."""
    run, last = config.run, step == config.optimizer.max_steps

    def every(steps: int | Literal["end"]) -> bool:
        return last if steps == "end" else steps > 0 and (last or step % steps == 0)

    evaluations = {
        "eval": every(run.eval_steps),
        "hellaswag": step > 0 and every(run.hellaswag_steps),
        "sample": every(run.sample_steps),
    }
    return Due(
        last=last,
        log=step == 1 or every(run.logging_steps) or any(evaluations.values()),
        save=step > 0 and (every(run.save_steps) or every(run.milestone_steps) or step == config.optimizer.decay_start),
        **evaluations,
    )
