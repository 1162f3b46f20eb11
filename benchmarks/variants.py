"""What can be timed: recipe/train.py with these flags or those, and its peers."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import GPT2Config

from recipe.config import ModelConfig, OptimizerConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.model.gpt2 import GPT2LMHeadModel

SEED = 1337  # of the weights that every variant starts from, and of the data's order
# The learning rate is constant, and small enough that rounding does not grow within the steps that are compared.
OPTIMIZER = OptimizerConfig(
    max_steps=10**9,
    learning_rate=1e-4,
    min_lr_fraction=1.0,
    warmup_steps=0,
    weight_decay=0.1,
    max_grad_norm=1.0,
)


@dataclass(frozen=True)
class Variant:
    """A way to do the same work: micro-steps of (micro_batch, T + 1) tokens, clip, AdamW.

    Attributes:
        name: as the tables show it.
        kind: recipe (recipe/train.py itself), hf-loop (transformers' model in a bare loop), hf-trainer (transformers'
            Trainer), nanogpt (its model and optimizer from a checkout, in a bare loop).
        sequences: of an optimizer step, over all processes.
        processes: of recipe/train.py, a GPU each.
        precision: fp32, tf32, bf16 or fp16.
        compile: "" for none, else a value of the recipe's torch_compile_mode.
        tuned: a peer gets the allocator and the threads that the recipe sets on a CPU.
        checkout: nanoGPT's directory.
    """

    name: str
    kind: Literal["recipe", "hf-loop", "hf-trainer", "nanogpt"] = "recipe"
    model: ModelConfig = field(default_factory=ModelConfig)
    sequence_length: int = 1024
    sequences: int = 8
    micro_batch: int = 8
    processes: int = 1
    precision: str = "fp32"
    compile: str = ""
    tuned: bool = True
    loss_chunk_size: int = 0
    fused_loss: bool = False
    gradient_checkpointing: bool = False
    checkout: str = ""

    @property
    def accumulation(self) -> int:
        """Micro-steps of an optimizer step."""
        return self.sequences // (self.micro_batch * self.processes)

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.sequences * self.sequence_length

    def but(self, **changes) -> Variant:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


def our_model(model: ModelConfig) -> GPT2LMHeadModel:
    """The weights that all variants start from, on the CPU."""
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    sizes = {k: v for k, v in dataclasses.asdict(model).items() if k.startswith("n_")}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **dropout), seed=SEED)


def transformers_model(variant: Variant) -> torch.nn.Module:
    """transformers' GPT2LMHeadModel with the same weights, on the CPU."""
    from transformers import GPT2LMHeadModel as Theirs

    ours = our_model(variant.model)
    config = ours.config
    config.use_cache = False
    config._attn_implementation = "sdpa"
    model = Theirs(config)
    missing, unexpected = model.load_state_dict(ours.state_dict(), strict=False)
    if unexpected or set(missing) > {"lm_head.weight"}:
        raise RuntimeError(f"transformers' names are others now: {missing}, {unexpected}")
    model.loss_type = "ForCausalLM"  # its own is None, about which it warns at every loss: a break in a compiled graph
    return model.train()


def nanogpt_model(variant: Variant) -> torch.nn.Module:
    """nanoGPT's GPT from the checkout, at the vocabulary of 50,304 that it trains from scratch with, with the same
    weights in its first 50,257 rows; the others are as it draws them."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", f"{variant.checkout}/model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    m = variant.model
    sizes = {"n_layer": m.n_layer, "n_head": m.n_head, "n_embd": m.n_embd, "block_size": m.n_positions}
    torch.manual_seed(SEED)
    model = module.GPT(module.GPTConfig(vocab_size=50304, dropout=m.dropout, bias=True, **sizes))
    own = model.state_dict()
    with torch.no_grad():
        for name, ours in our_model(m).state_dict().items():
            # Conv1D's weights are (in, out), nn.Linear's (out, in).
            ours = ours.t() if ours.ndim == 2 and ".h." in name else ours
            own[name][: ours.shape[0]].copy_(ours)
    return model.train()


def loss_of(variant: Variant, model: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A peer's (inputs, targets), each (B, T) -> mean loss in nats, the targets already shifted."""
    if variant.kind == "nanogpt":
        return lambda x, y: model(x, y.contiguous())[1]
    return lambda x, y: model(input_ids=x, labels=y, shift_labels=y.contiguous()).loss
