"""AdamW: parameter groups, clipping folded into the fused step, and the optimizer state by parameter name."""

from collections.abc import Iterable

import torch

from recipe.config import OptimizerConfig
from recipe.errors import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's two tensors a parameter, as torch names them


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig, **options) -> torch.optim.AdamW:
    """AdamW with weight decay on tensors of two or more dimensions only (matrices and embeddings, as in GPT-3).

    `options` choose an implementation of the same update: fused or capturable.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_epsilon, **options)


def check_is_adamw(optimizer: torch.optim.Optimizer, engine: str) -> None:
    """Raises UserError for any other optimizer: `engine` creates and shards AdamW's state itself, and would train or
    resume another optimizer as something else."""
    if type(optimizer) is not torch.optim.AdamW:
        raise UserError(
            f"{engine} supports AdamW only, not {type(optimizer).__name__}; launch with accelerate_configs/"
            "single.yaml or ddp.yaml"
        )


def norm_and_divisor(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Global gradient norm, and the number by which clipping to `max_norm` divides the gradients (1 where max_norm is
    0), computed as torch's clip_grad_norm_ does; both () on the device.

    A fused AdamW takes the divisor as its `grad_scale` and divides while it reads the gradients, where clip_grad_norm_
    would read and write all of them once more.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    divisor = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm else torch.ones_like(norm)
    return norm, divisor


def named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer state as `exp_avg.<name>` and `exp_avg_sq.<name>`; empty before the first step."""
    state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
    return {f"{moment}.{name}": s[moment] for moment in MOMENTS for name, s in state.items()}


def load_named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], steps: int
) -> None:
    """Sets the state that AdamW has after `steps` steps from the tensors of `named_state` (KeyError for a missing
    name)."""
    # A fused or capturable AdamW keeps its step on the parameter's device.
    on_device = any(optimizer.param_groups[0].get(option) for option in ("fused", "capturable"))
    for name, p in model.named_parameters() if tensors else ():
        step = torch.tensor(float(steps), dtype=torch.float32, device=p.device if on_device else "cpu")
        moments = {moment: tensors[f"{moment}.{name}"].to(p.device, p.dtype) for moment in MOMENTS}
        optimizer.state[p] = {"step": step} | moments


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """Steps that AdamW has made: fewer than the loop's where steps were skipped."""
    return int(next(iter(optimizer.state.values()))["step"]) if optimizer.state else 0
