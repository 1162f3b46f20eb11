"""Learning rates and momentum as pure functions of the step, without a scheduler object.

A scheduler prepared by Accelerate would advance num_processes times a step, and its state would have to be restored.
"""

import math

import torch

from recipe.config import OptimizerConfig

MUON_MOMENTUM = 0.95
_INITIAL_MOMENTUM, _MOMENTUM_WARMUP_STEPS = 0.85, 300  # of Muon


def lr_at(step: int, config: OptimizerConfig) -> float:
    """Learning rate of AdamW in optimizer step `step` (0-based); matrix_learning_rate follows in proportion.

    Linear warm-up, then lr_scheduler_type. Warm-up starts above 0, at 1/warmup_steps of the peak, as in llm.c.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    return config.learning_rate * _decay_factor(step, config, config.warmup_steps)


def muon_lr_at(step: int, config: OptimizerConfig) -> float:
    """Learning rate of Muon in optimizer step `step`: the same schedule without warm-up, because its step length does
    not depend on the scale of the gradients."""
    return config.muon_learning_rate * _decay_factor(step, config, 0)


def muon_momentum_at(step: int) -> float:
    """Momentum of Muon in optimizer step `step`: linear from 0.85 to 0.95 over 300 steps, as in modded-nanogpt."""
    return _INITIAL_MOMENTUM + (MUON_MOMENTUM - _INITIAL_MOMENTUM) * min(1.0, step / _MOMENTUM_WARMUP_STEPS)


def _decay_factor(step: int, config: OptimizerConfig, warmup_steps: int) -> float:
    """The fraction of the peak learning rate, from 1 down to min_lr_fraction. With wsd it depends on max_steps only
    after the constant phase, so that a run can be extended from a checkpoint of that phase. `warmup_steps` is 0 for
    Muon."""
    start, end, floor = warmup_steps, config.max_steps, config.min_lr_fraction
    if config.lr_scheduler_type == "wsd":
        start = config.decay_start
    progress = min(1.0, max(0, step - start) / max(1, end - start))
    match config.lr_scheduler_type:
        case "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        case "linear" | "wsd":
            return floor + (1 - floor) * (1 - progress)


def set_lr(optimizer: torch.optim.Optimizer, step: int, config: OptimizerConfig) -> None:
    """Sets each parameter group's learning rate, and Muon's momentum, for `step`."""
    for group in optimizer.param_groups:
        if group.get("muon"):
            _set(group, "lr", muon_lr_at(step, config))
            _set(group, "momentum", muon_momentum_at(step))
        else:
            ratio = config.matrix_learning_rate / config.learning_rate if group.get("matrices") else 1.0
            _set(group, "lr", ratio * lr_at(step, config))


def _set(group: dict, key: str, value: float) -> None:
    """Sets a value; a tensor stays a tensor, because a lazy device would compile a number into its program. The tensor
    is never exactly 0: a capturable AdamW divides by it, and weights without a gradient would become 0/0."""
    current = group[key]
    is_tensor = isinstance(current, torch.Tensor)
    group[key] = torch.tensor([max(value, 1e-30)]).to(current.device) if is_tensor else value
