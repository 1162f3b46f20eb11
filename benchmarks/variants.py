"""What can be timed: our trainer, a bare loop around our model with a switch for every optimization, and the peers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from transformers import GPT2Config

from recipe.config import ModelConfig, OptimizerConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.model.attention import block_attention
from recipe.model.gpt2 import GPT2LMHeadModel, causal_attention

SEED = 1337  # of the weights that every variant starts from, and of the data's order
LEARNING_RATE = 1e-4  # constant, and small enough that rounding does not grow within the steps that are compared
OPTIMIZER = OptimizerConfig(
    max_steps=10**9,
    learning_rate=LEARNING_RATE,
    min_lr_fraction=1.0,
    warmup_steps=0,
    weight_decay=0.1,
    max_grad_norm=1.0,
)


@dataclass(frozen=True)
class Variant:
    """A way to do the same work: `accumulation` micro-steps of (micro_batch, T + 1) tokens, clip, AdamW.

    Attributes:
        name: as the tables show it.
        kind: recipe (recipe/train.py itself), loop (our model in a bare loop), hf-loop (transformers' model in one),
            hf-trainer (transformers' Trainer), nanogpt (its model and optimizer from a checkout, in a bare loop).
        precision: fp32, tf32, bf16 or fp16.
        compile: "" for none, else a value of the recipe's torch_compile_mode.
        tuned: the processor's allocator as the recipe sets it, and not as it comes.
        checkout: nanoGPT's directory.
    """

    name: str
    kind: Literal["recipe", "loop", "hf-loop", "hf-trainer", "nanogpt"]
    model: ModelConfig = field(default_factory=ModelConfig)
    sequence_length: int = 1024
    micro_batch: int = 8
    accumulation: int = 1
    precision: str = "fp32"
    compile: str = ""
    tuned: bool = True
    fused: bool = True
    attention: Literal["plain", "sdpa", "blocks"] = "sdpa"
    loss_by_rows: bool = False
    pad_vocab_to: int = 1
    loss_chunk_size: int = 0
    fused_loss: bool = False
    gradient_checkpointing: bool = False
    checkout: str = ""

    @property
    def sequences(self) -> int:
        """Of an optimizer step."""
        return self.micro_batch * self.accumulation

    @property
    def tokens(self) -> int:
        """Of an optimizer step."""
        return self.sequences * self.sequence_length

    def but(self, **changes) -> Variant:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **changes)


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal softmax attention over (B, H, T, K), written out: the (T, T) scores of every head exist in memory."""
    T = q.shape[-2]
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), dropout) @ v


ATTENTION = {"plain": plain_attention, "sdpa": causal_attention, "blocks": block_attention}


def _gpt2_config(model: ModelConfig) -> GPT2Config:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    sizes = {k: v for k, v in dataclasses.asdict(model).items() if k.startswith("n_")}
    return GPT2Config(vocab_size=VOCAB_SIZE, **sizes, **dropout)


def our_model(variant: Variant) -> GPT2LMHeadModel:
    """Our model with the variant's switches, on the CPU, with the weights that all variants start from."""
    return GPT2LMHeadModel(
        _gpt2_config(variant.model),
        gradient_checkpointing=variant.gradient_checkpointing,
        loss_chunk_size=variant.loss_chunk_size,
        fused_loss=variant.fused_loss,
        pad_vocab_to=variant.pad_vocab_to,
        seed=SEED,
        attention=ATTENTION[variant.attention],
    )


def transformers_model(variant: Variant) -> torch.nn.Module:
    """transformers' GPT2LMHeadModel with the same weights, on the CPU."""
    from transformers import GPT2LMHeadModel as Theirs

    config = _gpt2_config(variant.model)
    config.use_cache = False
    config._attn_implementation = "eager" if variant.attention == "plain" else "sdpa"
    model = Theirs(config)
    missing, unexpected = model.load_state_dict(our_model(variant).state_dict(), strict=False)
    if unexpected or set(missing) > {"lm_head.weight"}:
        raise RuntimeError(f"transformers' names are others now: {missing}, {unexpected}")
    model.loss_type = "ForCausalLM"  # its own is None, about which it warns at every loss: a break in a compiled graph
    return model.train()


def nanogpt_model(variant: Variant) -> torch.nn.Module:
    """nanoGPT's GPT from the checkout, at the vocabulary of 50,304 that it trains from scratch with, with the same
    weights in its first 50,257 rows; the others are as it draws them."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("nanogpt_model", f"{variant.checkout}/model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    m = variant.model
    torch.manual_seed(SEED)
    model = module.GPT(
        module.GPTConfig(
            block_size=m.n_positions,
            vocab_size=50304,
            n_layer=m.n_layer,
            n_head=m.n_head,
            n_embd=m.n_embd,
            dropout=m.dropout,
            bias=True,
        )
    )
    own = model.state_dict()
    with torch.no_grad():
        for name, ours in our_model(variant).state_dict().items():
            theirs = own[name]
            # Conv1D's weights are (in, out), nn.Linear's (out, in).
            ours = ours.t() if ours.ndim == 2 and ".h." in name else ours
            theirs[: ours.shape[0]].copy_(ours)
    return model.train()


def loss_of(variant: Variant, model: torch.nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """(inputs, targets), each (B, T) -> mean loss in nats, the targets already shifted."""
    if variant.kind == "hf-loop":
        return lambda x, y: model(input_ids=x, labels=y, shift_labels=y.contiguous()).loss
    if variant.kind == "nanogpt":
        return lambda x, y: model(x, y.contiguous())[1]
    return model
