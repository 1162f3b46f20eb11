"""The optimizer: which parameters AdamW and Muon update, the gradient norm, and state by parameter name."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from recipe.config import OptimizerConfig
from recipe.optim.muon import Muon
from recipe.optim.schedule import MUON_MOMENTUM

EPSILON = 1e-8  # of AdamW


def make_optimizer(
    model: torch.nn.Module, config: OptimizerConfig, *, muon: Mapping | None = None, **adam
) -> torch.optim.AdamW:
    """AdamW, or with `optim: muon` Muon for the matrices inside the blocks and AdamW for the rest. set_lr sets the
    learning rates of each step.

    Weight decay is on tensors of two or more dimensions only (matrices and embeddings, as in nanoGPT and llm.c). `adam`
    chooses an implementation of AdamW (fused or capturable), `muon` holds Muon's own arguments (dtype, rank,
    world_size).
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    separate_matrices = config.optim == "muon" or config.matrix_learning_rate
    matrices = {name: p for name, p in params.items() if separate_matrices and _is_matrix(name)}
    others = [p for name, p in params.items() if name not in matrices]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    lr, betas = config.learning_rate, (config.adam_beta1, config.adam_beta2)
    if config.optim == "adamw":
        if matrices:
            groups.append({"params": [*matrices.values()], "weight_decay": config.weight_decay, "matrices": True})
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPSILON, **adam)
    muon_settings = {
        "muon": True,
        "lr": config.muon_learning_rate,
        "momentum": MUON_MOMENTUM,
        "weight_decay": config.muon_weight_decay,
    }
    for num_matrices in (1, 3):  # c_attn is query, key and value side by side
        group_params = [p for name, p in matrices.items() if (3 if "c_attn" in name else 1) == num_matrices]
        groups.append({"params": group_params, "num_matrices": num_matrices} | muon_settings)
    return Muon(groups, lr=lr, betas=betas, eps=EPSILON, **(muon or {}), **adam)


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Global gradient norm, () in fp32 on the device. A collective call where the gradients are sharded."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    is_sharded = hasattr(gradients[0], "full_tensor")  # a DTensor; importing the class takes a second
    if gradients[0].device.type == "cpu" and not is_sharded:
        return _norm_on_cpu(gradients)
    return unsharded(torch.nn.utils.get_total_norm(gradients))


def _norm_on_cpu(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Norm of all `tensors` together. torch sums a tensor's squares sequentially in fp32 on a CPU, which makes the norm
    of an embedding's gradient 2.7e-3 too low (torch 2.13). Here each row is summed in fp32, and the rows in fp64."""
    row_norms = [torch.linalg.vector_norm(tensor, dim=-1) for tensor in tensors]
    return torch.stack([torch.linalg.vector_norm(norms, dtype=torch.float64) for norms in row_norms]).norm().float()


def unsharded(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor. A collective call if `tensor` is sharded (a DTensor)."""
    return getattr(tensor, "full_tensor", lambda: tensor)()


def _is_matrix(name: str) -> bool:
    """Whether a parameter, by its name in transformers, is a matrix inside a block."""
    return ".h." in name and name.endswith(".weight") and ".ln_" not in name


def named_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer state as `<state>.<parameter>`, such as exp_avg.transformer.wte.weight or, for Muon,
    momentum.transformer.h.0.mlp.c_fc.weight: all its tensors but `step`. Empty before the first step."""
    return {
        f"{key}.{name}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if torch.is_tensor(value) and key != "step"
    }


def by_parameter(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of `named_state` as {parameter: {state: tensor}}; {} for another parameter."""
    states = defaultdict(dict)
    for key, tensor in tensors.items():
        state, _, name = key.partition(".")
        states[name][state] = tensor
    return states


def muon_parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Those that Muon updates; their only state is the momentum."""
    return [p for group in optimizer.param_groups if group.get("muon") for p in group["params"]]


def load_named_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor], steps: int
) -> None:
    """Restores the optimizer state after `steps` steps from the tensors of `named_state`."""
    if not tensors:
        return
    # A fused or capturable AdamW keeps its step on the parameter's device.
    on_device = any(optimizer.param_groups[0].get(option) for option in ("fused", "capturable"))
    saved_states, muon_ids = by_parameter(tensors), {id(p) for p in muon_parameters(optimizer)}
    for name, p in model.named_parameters():
        # FSDP's shards are copies already.
        state = {k: v.to(p.device, copy=not hasattr(v, "to_local")) for k, v in saved_states[name].items()}
        if id(p) not in muon_ids:
            step = torch.tensor(float(steps), dtype=torch.float32, device=p.device if on_device else "cpu")
            state = {"step": step} | state
        optimizer.state[p] = state


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """How many steps the optimizer has taken: fewer than the training loop if steps were skipped."""
    return next((int(state["step"]) for state in optimizer.state.values() if "step" in state), 0)
