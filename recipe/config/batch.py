"""How an optimizer step is divided over processes and micro-steps, and what is due after which step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from recipe.config.fields import AUTO, Config
from recipe.utils.errors import UserError
from recipe.utils.units import plural


@dataclass(frozen=True)
class BatchPlan:
    """How an optimizer step's sequences are divided: sequences = world_size x accumulation x micro.

    `micro` is what a process takes at once; it divides that evenly over its `devices`.
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
    """Derives accumulation for `world_size` processes that feed `devices` devices each; the only place that does.

    A device whose share of the step is smaller than micro_batch_size takes that share at once. Raises UserError,
    with a batch that does, where the step does not divide.
    """
    tokens, length = config.optimizer.total_batch_tokens, config.data.sequence_length
    sequences, replicas = tokens // length, world_size * devices
    size = config.optimizer.micro_batch_size
    wanted = 1 if size == AUTO else size  # auto that estimate/micro_batch.py has not resolved yet
    micro = min(wanted, max(1, sequences // replicas))
    unit = replicas * micro * length
    accumulation, rest = divmod(tokens, unit)
    if rest:
        owners = plural(replicas, "process", "es") if devices == 1 else plural(replicas, "device")
        raise UserError(
            f"total_batch_tokens {tokens} is not a multiple of {owners} x micro_batch_size {micro} x sequence_length "
            f"{length} = {unit}; {max(1, accumulation) * unit} is one"
        )
    return BatchPlan(sequences, world_size, micro * devices, accumulation, devices)


@dataclass(frozen=True)
class Due:
    """What is due at a step boundary, after so many optimizer steps."""

    last: bool
    log: bool
    eval: bool
    save: bool
    hellaswag: bool
    sample: bool

    def without(self, record: dict) -> Due:
        """What is still due where a `record` of the step has been made by an earlier process of the run."""
        scored = any(column.startswith("hellaswag") for column in record)
        measured = {"eval": "val_loss" in record, "hellaswag": scored, "sample": "sample" in record}
        return replace(self, **{name: False for name, known in measured.items() if known})


def due_at(step: int, config: Config) -> Due:
    """What is due after `step` optimizer steps: a field of 0 is never due, "end" after the last step, N after every Nth
    and the last. Nothing is saved before the first, nor is HellaSwag scored, which would only show chance. The first
    step is logged too, so that a user sees early that the run trains."""
    run, last = config.run, step == config.optimizer.max_steps

    def every(steps: int | Literal["end"]) -> bool:
        return last if steps == "end" else steps > 0 and (last or step % steps == 0)

    return Due(
        last=last,
        log=step == 1 or every(run.logging_steps),
        eval=every(run.eval_steps),
        save=step > 0 and (every(run.save_steps) or step == config.optimizer.decay_start),
        hellaswag=step > 0 and every(run.hellaswag_steps),
        sample=every(run.sample_steps),
    )
