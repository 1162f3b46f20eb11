"""GPT-2 with transformers' parameter names and shapes, so that a saved model IS a `GPT2LMHeadModel`.

If you change what it computes, its config.json must say so, or everybody else will compute GPT-2 with its weights:
CONTRIBUTING.md, "The model itself".

Shapes: B batch, T positions, D n_embd, H heads, K = D / H, V vocabulary.
Architecture: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

import copy
import json
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils import checkpoint as torch_checkpoint
from transformers import GenerationConfig, GPT2Config

from recipe.model.gelu import gelu
from recipe.model.linear import linear
from recipe.model.loss import next_token_loss
from recipe.utils.errors import UserError, no_safetensors, reading
from recipe.utils.units import plural

# A model in one file; a larger one has an index and parts.
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
# Causal masks that old checkpoints carry as buffers. The leading dot matters: without it c_attn.bias matches too.
_OLD_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")

# The function between the two layers of an MLP, by transformers' names, of which GELU has two.
ACTIVATIONS = {"gelu_new": gelu, "gelu_pytorch_tanh": gelu}

# Fields of GPT2Config, and the values that this module supports.
_SUPPORTED = {
    "activation_function": tuple(ACTIVATIONS),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
    "layer_norm_epsilon": (1e-5,),
}


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal softmax attention over (B, H, T, K)."""
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as in OpenAI's release and in transformers."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        return linear(x, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm in fp32 on a CPU and a TPU, whatever the residual stream's type; torch's epsilon, 1e-5, is GPT-2's.

    Their autocast, unlike CUDA's, does not run layer norm in fp32. torch's CPU backward is inaccurate for bf16 input
    (torch 2.13, one thread, a 4 x 128 model: gradients are off by up to 14 % at 1,024 rows and 36 % at 8,192), and
    torch_tpu 0.2 compiles no layer norm of bf16 input and fp32 weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """(..., D) -> (..., D), in the weight's type on a CPU and a TPU."""
        if input.device.type not in ("cpu", "tpu"):
            return super().forward(input)
        # The parameters are fp32, except under DeepSpeed's fp16, where the next layer expects half precision too.
        y = F.layer_norm(input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps)
        return y.to(self.weight.dtype)


class Attention(nn.Module):
    """Causal self-attention of H heads, computed by `attend` unless a mask is given."""

    def __init__(self, config: GPT2Config, attend: Callable):
        super().__init__()
        self.attend = attend
        self.n_head = config.n_head
        self.attn_pdrop, self.resid_pdrop = config.attn_pdrop, config.resid_pdrop
        self.c_attn = Conv1D(config.n_embd, 3 * config.n_embd)
        self.c_proj = Conv1D(config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, D) -> (B, T, D); `mask` is the Transformer's."""
        B, T, D = x.shape
        # split, not unbind: the backward of split is one concatenation.
        q, k, v = self.c_attn(x).split(D, dim=2)
        q, k, v = (t.view(B, T, self.n_head, D // self.n_head).transpose(1, 2) for t in (q, k, v))  # (B, H, T, K)
        if mask is None:
            y = self.attend(q, k, v, self.attn_pdrop if self.training else 0.0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = self.c_proj(y.transpose(1, 2).reshape(B, T, D))
        return F.dropout(y, self.resid_pdrop, self.training)


class MLP(nn.Module):
    """Two linear layers with an activation in between, four times as wide unless n_inner is given."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.resid_pdrop = config.resid_pdrop
        self.activation = ACTIVATIONS[config.activation_function]
        inner = config.n_inner or 4 * config.n_embd
        self.c_fc = Conv1D(config.n_embd, inner)
        self.c_proj = Conv1D(inner, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, D) -> (B, T, D)."""
        y = self.c_proj(self.activation(self.c_fc(x)))
        return F.dropout(y, self.resid_pdrop, self.training)


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: GPT2Config, attend: Callable):
        super().__init__()
        self.ln_1 = LayerNorm(config.n_embd)
        self.attn = Attention(config, attend)
        self.ln_2 = LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """(B, T, D) -> (B, T, D); `mask` is the Transformer's."""
        x = x + self.attn(self.ln_1(x), mask)
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Token and position embeddings, the blocks, and the last layer norm."""

    def __init__(self, config: GPT2Config, gradient_checkpointing: bool, attend: Callable, checkpoint: Callable):
        super().__init__()
        self.embd_pdrop = config.embd_pdrop
        self.gradient_checkpointing, self.checkpoint = gradient_checkpointing, checkpoint
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.h = nn.ModuleList(Block(config, attend) for _ in range(config.n_layer))
        self.ln_f = LayerNorm(config.n_embd)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Final hidden states (B, T, D) of `input_ids` (B, T).

        `positions` (B, T) and `mask` (B, 1, T, T), true where a query may see a key, are for evaluations that put
        several continuations of one context into a row; without them a row is one text.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)  # (B, T, D)
        device_type = x.device.type
        # Autocast keeps embeddings, and so the residual stream, in fp32: one cast here halves its memory traffic. Not
        # for fp16, whose range the residual stream can exceed.
        if torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type) == torch.bfloat16:
            x = x.to(torch.bfloat16)
        x = F.dropout(x, self.embd_pdrop, self.training)
        for block in self.h:
            if self.gradient_checkpointing and self.training:
                x = self.checkpoint(block, x)
            else:
                x = block(x, mask)
        return self.ln_f(x)


class GPT2LMHeadModel(nn.Module):
    """GPT-2 with a language-model head; `state_dict()` holds transformers' keys without the tied `lm_head.weight`.

    Args:
        config: a transformers GPT2Config. Raises UserError where it asks for an unsupported variant.
        gradient_checkpointing: recompute each block's activations in backward instead of keeping them.
        loss: of (hidden (B, T, D), head (V, D), targets (B, T)), 0-d.
        seed: of the initial weights, which are drawn on the CPU to be the same on every device.
        attention, checkpoint: replace SDPA and torch's checkpoint where a device has better ones: (q, k, v, dropout)
            -> y over (B, H, T, K), and (block, x) -> block(x).
    """

    def __init__(
        self,
        config: GPT2Config,
        *,
        gradient_checkpointing: bool = False,
        loss: Callable = next_token_loss,
        seed: int = 0,
        attention: Callable | None = None,
        checkpoint: Callable | None = None,
    ):
        super().__init__()
        check_supported(config)
        self.config = config
        self.loss = loss
        checkpoint = checkpoint or partial(torch_checkpoint.checkpoint, use_reentrant=False)
        self.transformer = Transformer(config, gradient_checkpointing, attention or causal_attention, checkpoint)
        self._init_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _init_weights(self, generator: torch.Generator) -> None:
        """N(0, 0.02), biases 0, as in transformers and nanoGPT (in OpenAI's code positions have 0.01); projections into
        the residual stream scaled by 1/sqrt(2 n_layer) (GPT-2 paper, section 2.3)."""
        std = self.config.initializer_range
        for name, p in self.named_parameters():
            if p.ndim < 2:
                continue
            residual = name.endswith("c_proj.weight")
            p.normal_(0.0, std / math.sqrt(2 * self.config.n_layer) if residual else std, generator=generator)

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, D): the embedding. As a second Parameter it would silently be untied where a module moves to XLA."""
        return self.transformer.wte.weight

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of final hidden states (..., D)."""
        return F.linear(hidden, self.head_weight)

    def forward(self, input_ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Logits (B, T, V) of `input_ids` (B, T); with `targets` (B, T), the loss alone, also in validation.

        `targets[b, t]` is the token after `input_ids[b, t]`: already shifted, unlike transformers' `labels`.
        Training never returns logits: all of them would be kept in memory and converted to fp32.
        """
        hidden = self.transformer(input_ids)
        if targets is None:
            return self.head(hidden)
        return self.loss(hidden, self.head_weight, targets)

    def save_config(self, directory: Path) -> None:
        """Writes config.json and generation_config.json: with the weights, everything that transformers needs."""
        config = copy.deepcopy(self.config)
        config.architectures, config.dtype = ["GPT2LMHeadModel"], torch.float32
        config.n_ctx = config.n_positions  # llama.cpp's converter reads OpenAI's name for it
        config.save_pretrained(directory)
        tokens = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        # By default a pipeline generates 256 tokens. max_length is set only if the positions are too few for these and
        # a prompt: transformers 5 warns at each call with both max_length and max_new_tokens.
        limit = {"max_length": config.n_positions} if config.n_positions < 2 * 256 else {}
        GenerationConfig(**limit, **tokens).save_pretrained(directory)

    def load_weights(self, tensors: dict[str, torch.Tensor], origin: str) -> None:
        """Copies `tensors`, by transformers' names, into the parameters; `origin` is named in errors.

        Raises UserError for missing, unexpected or misshapen tensors, NaN or infinity, and a head that is not tied.
        """
        tensors = {k: v for k, v in tensors.items() if not _OLD_BUFFERS.search(k)}
        head = tensors.pop("lm_head.weight", None)
        if "wte.weight" in tensors:  # OpenAI's files on the Hub were saved from the bare GPT2Model
            tensors = {f"transformer.{k}": v for k, v in tensors.items()}
        if head is not None:  # safetensors' save_model writes only this one of the two names
            tensors.setdefault("transformer.wte.weight", head)
        shapes, own_shapes = ({k: tuple(v.shape) for k, v in named.items()} for named in (tensors, self.state_dict()))
        if wrong := [name for name in own_shapes | shapes if shapes.get(name) != own_shapes.get(name)]:
            shape, own_shape = (named.get(wrong[0], "missing") for named in (shapes, own_shapes))
            example = f"{wrong[0]} is {shape}, {own_shape} in the recipe's model"
            raise UserError(f"{origin}: {plural(len(wrong), 'tensor')} of another model ({example})")
        if head is not None and not torch.equal(head, tensors["transformer.wte.weight"]):
            raise UserError(f"{origin}: its lm_head.weight is not its embedding; GPT-2's head is tied to it")
        if damaged := next((name for name, tensor in tensors.items() if not tensor.isfinite().all()), ""):
            raise UserError(f"{origin}: {damaged} has values that are NaN or infinite")
        self.load_state_dict(tensors)


def check_supported(config: GPT2Config, origin: str = "model config") -> None:
    """Raises UserError, naming `origin`, for a variant of GPT-2 that this module does not compute."""
    for name, supported in _SUPPORTED.items():
        if (value := getattr(config, name)) not in supported:
            raise UserError(f"{origin}: {name} is {value!r}; only {supported[0]!r} is supported here")


def read_config(directory: str) -> GPT2Config:
    """The configuration of a model. Raises UserError if there is no readable one."""
    with reading(path := Path(directory) / "config.json", "name a model's directory, or a model on the Hub"):
        if (kind := json.loads(path.read_bytes()).get("model_type", "gpt2")) != "gpt2":
            raise ValueError(f"a {kind} model, not a GPT-2")
        return GPT2Config.from_pretrained(directory)


def read_weights(directory: str) -> dict[str, torch.Tensor]:
    """The tensors of a model, on the CPU. Raises UserError if there are none in safetensors."""
    tensors = {}
    for path in weight_files(directory):
        with reading(path, "copy or download it again"):
            tensors |= load_file(path)
    return tensors


def weight_files(directory: str) -> list[Path]:
    """The safetensors file of a model, or the parts in which transformers saves a large one, by their index. Raises
    UserError if one is missing."""
    file, index = (Path(directory) / name for name in WEIGHT_FILES[:2])
    if file.is_file():
        return [file]
    if not index.is_file():
        if parts := sorted(index.parent.glob(WEIGHT_FILES[2])):
            raise UserError(f"{directory} has {parts[0].name}, but no {index.name}; copy or download that too")
        raise no_safetensors(directory)
    with reading(index, "copy or download it again"):
        names = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
    if missing := sorted(name for name in names if not (index.parent / name).is_file()):
        raise UserError(f"{directory} lacks {missing[0]}, which {index.name} lists; copy or download it again")
    return [index.parent / name for name in sorted(names)]
