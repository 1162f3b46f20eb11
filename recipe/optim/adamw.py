"""AdamW's parameter groups, the learning rate as a pure function of the step, and moments by parameter name."""

import math
from collections.abc import Iterable

import torch

from recipe.config import OptimizerConfig
from recipe.errors import UserError


def lr_at(step: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up, then a cosine to min_lr_fraction.

    Warm-up starts above 0, at 1/warmup_steps of the peak (llm.c's and nanoGPT's schedule). A pure function rather
    than a scheduler object: a prepared scheduler advances num_processes times a step, and has state to restore.
    """
    peak, floor = config.learning_rate, config.learning_rate * config.min_lr_fraction
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / (config.max_steps - config.warmup_steps)
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig, **options) -> torch.optim.AdamW:
    """AdamW with weight decay on tensors of two or more dimensions only (matrices and embeddings, as in GPT-3).

    `options` are AdamW's ways of doing the same sums: fused, capturable.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, **options)


def check_is_adamw(optimizer: torch.optim.Optimizer, where: str) -> None:
    """Raises UserError for an engine, `where`, that makes and shards AdamW's state by itself and would train another
    optimizer as something else, or resume it so."""
    if type(optimizer) is not torch.optim.AdamW:
        raise UserError(
            f"{where} knows AdamW alone, not {type(optimizer).__name__}; launch with accelerate_configs/"
            "single.yaml or ddp.yaml"
        )


def norm_and_divisor(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients' global norm, and what clipping to `max_norm` divides them by (0: 1), as torch's clip_grad_norm_
    reckons it; both () on the device.

    A fused AdamW takes the divisor as its `grad_scale` and divides while it reads the gradients, where clip_grad_norm_
    would read and write all of them once more.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm else torch.ones_like(norm)
    return norm, divisor


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """A tensor stays a tensor, for devices that would compile a number into the program. It is never quite 0: a
    capturable AdamW divides by it, and weights without a gradient would become 0/0."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"] = torch.tensor([max(lr, 1e-30)]).to(group["lr"].device)
        else:
            group["lr"] = lr


def named_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """AdamW's moments as `exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {f"{moment}.{name}": s[moment] for moment in ("exp_avg", "exp_avg_sq") for name, s in state.items()}


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps AdamW has really made: fewer than the loop's where fp16 overflowed and a step was skipped."""
    return int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0


def load_moments(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, moments: dict[str, torch.Tensor], steps: int
) -> None:
    """Sets AdamW's state after `steps` optimizer steps from `named_moments`' dict (KeyError for a missing name)."""
    # A fused or capturable AdamW keeps its step beside the parameter.
    beside = any(optimizer.param_groups[0].get(way) for way in ("fused", "capturable"))
    for name, p in model.named_parameters() if moments else ():
        optimizer.state[p] = {
            "step": torch.tensor(float(steps), dtype=torch.float32, device=p.device if beside else "cpu"),
            "exp_avg": moments[f"exp_avg.{name}"].to(p.device, p.dtype),
            "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(p.device, p.dtype),
        }
