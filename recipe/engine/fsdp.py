"""FSDP2: weights, gradients and optimizer state sharded across processes by torch itself, on GPUs or on CPU processes.

`accelerate launch` reads a file with `distributed_type: FSDP` and sets environment variables. Accelerate's own FSDP
needs GPUs, so ACCELERATE_USE_FSDP is removed before Accelerate starts, and `place` calls torch's fully_shard.
"""

import os
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from recipe.config import BatchPlan
from recipe.engine import hardware
from recipe.engine.launch import wants
from recipe.engine.strategy import Strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.errors import UserError

# The only supported values of these fields of the file's fsdp_config; the launch sets them as environment variables.
_SUPPORTED = {
    "fsdp_version": "2",
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_activation_checkpointing": "false",  # the recipe's gradient_checkpointing decides that
    "fsdp_activation_checkpointing_offload": "false",
}


class FsdpStrategy(Strategy):
    """Each block's weights are gathered while it runs, in bf16 if that is the precision; the sharded weights, gradients
    and optimizer state are fp32.

    Gradients are reduced in every micro-step: kept unsharded until the last one, they would take as much memory as the
    weights before sharding.
    """

    _sharding = "fsdp"

    @classmethod
    def open(cls, precision: str) -> Strategy:
        """As Strategy's."""
        if "LOCAL_RANK" not in os.environ:
            raise UserError("start FSDP with accelerate launch --config_file accelerate_configs/fsdp.yaml")
        precision = hardware.resolve_precision(precision, cpu=wants("CPU"))
        take_settings(precision)
        return super().open(precision)

    def place(self, model: GPT2LMHeadModel, *, compile: str) -> None:
        """As Strategy's, and shards the model, in place. Blocks are compiled one by one whatever the mode, because
        weights are gathered between them. A collective call."""
        if compile and not self.runtime.no_compile:
            for block in model.transformer.h:
                hardware.compile_in_place(block, compile)
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if self.device.precision == "bf16" else None, reduce_dtype=torch.float32
        )
        if self.runtime.processes.nodes > 1:  # as DDP and ZeRO do: a node may have another init_from
            for p in model.parameters():
                torch.distributed.broadcast(p.detach(), src=0, group=self.runtime.processes.cpu_group)
        mesh = init_device_mesh(self.device.type, (self.runtime.processes.world_size,))
        # The root holds the embeddings and the last layer norm: the head reads the embedding too.
        for module in (*model.transformer.h, model):  # one by one: no device ever holds the full model
            fully_shard(module.to(self.device.torch_device), mesh=mesh, mp_policy=policy)

    def _wrap(self, model: nn.Module, optimizer: Optimizer, batch: BatchPlan):
        return model, optimizer

    def micro_step(self, model: nn.Module, *, last: bool):
        """Nothing to set. A collective call in every micro-step."""
        return nullcontext()

    def gather(self, model: nn.Module, optimizer: Optimizer) -> tuple[dict, dict]:
        """As Strategy's. A collective call."""
        _shards(model)
        return super().gather(model, optimizer)

    def scatter(self, model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor], steps: int) -> None:
        """As Strategy's; each process keeps its shard."""
        shards, sharded_state = _shards(model), {}
        for key, tensor in tensors.items():
            p, full = shards[key.partition(".")[2]], tensor.to(self.device.torch_device)
            if full.ndim:  # torch accepts a plain number beside a DTensor, but no other plain tensor
                full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
            sharded_state[key] = full
        super().scatter(model, optimizer, sharded_state, steps)

    @torch.no_grad()
    def unsharded_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """As Strategy's. A collective call."""
        return {name: p.full_tensor() for name, p in _shards(model).items()}


def _shards(model: nn.Module) -> dict[str, DTensor]:
    """This process's shard of each parameter, by name. Reshards first: a forward pass without a backward may leave
    parameters unsharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}


def take_settings(precision: str) -> None:
    """Hides from Accelerate that the launch asks for FSDP. Raises UserError if the file sets a field to a value that is
    not supported, and for the (resolved) precision fp16."""
    del os.environ["ACCELERATE_USE_FSDP"]
    for field, supported in _SUPPORTED.items():
        if (value := os.environ.get(field.upper(), supported)) != supported:
            raise UserError(f"the launch asks for {field} {value}; set {field}: {supported}, as in fsdp.yaml")
    if precision == "fp16":
        raise UserError(
            "precision fp16 is not supported under FSDP; launch with accelerate_configs/ddp.yaml or zero2.yaml, "
            "or choose --precision fp32"
        )
