"""The learning rate as a pure function of the step, without a scheduler object."""

import math

import torch

from recipe.config import OptimizerConfig


def lr_at(step: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then a cosine to min_lr_fraction.

    Warm-up starts above 0, at 1/warmup_steps of the peak (the schedule of llm.c and nanoGPT). A scheduler that
    Accelerate has prepared would advance num_processes times a step, and would have state to restore.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Writes `lr` into every parameter group.

    A tensor stays a tensor, because a lazy device would compile a number into its program. It is never exactly 0: a
    capturable AdamW divides by it, and weights without a gradient would become 0/0.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor([max(lr, 1e-30)]).to(group["lr"].device)
        else:
            group["lr"] = lr
