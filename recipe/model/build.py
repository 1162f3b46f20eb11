"""Builds the model that a configuration describes, with its first weights."""

import dataclasses

from transformers import GPT2Config

from recipe.config import Config
from recipe.data.tokenizer import open_tokenizer
from recipe.download import on_this_disk
from recipe.errors import UserError
from recipe.model.gpt2 import GPT2LMHeadModel, check_supported, read_config, read_weights

_FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
_NEEDED = "config.json and model.safetensors"


def build_model(config: Config, *, load_init_from: bool = True, **device_options) -> GPT2LMHeadModel:
    """The recipe's model on the CPU, with random weights or those of `init_from`.

    `load_init_from=False` leaves the weights random, for a caller that will replace them. `device_options` are those
    arguments of GPT2LMHeadModel that depend on the device (`Engine.model_options`). Raises UserError where `init_from`
    cannot be loaded or has another architecture.
    """
    model = config.model
    sizes = {k: v for k, v in dataclasses.asdict(model).items() if k.startswith("n_") or k == "vocab_size"}
    special = dict.fromkeys(("bos_token_id", "eos_token_id"), open_tokenizer(config.data.tokenizer).end_of_text)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    wanted = GPT2Config(**sizes, **special, **dropout)
    built = GPT2LMHeadModel(
        wanted,
        gradient_checkpointing=config.run.gradient_checkpointing,
        loss_chunk_size=config.run.loss_chunk_size,
        seed=config.run.seed,
        **device_options,
    )
    if model.init_from and load_init_from:
        directory = on_this_disk(model.init_from, "init_from", _FILES, _NEEDED)
        theirs = read_config(directory)
        found = {k: getattr(theirs, k) for k in sizes}
        if wrong := [f"{k} {v} (recipe: {getattr(wanted, k)})" for k, v in found.items() if v != getattr(wanted, k)]:
            raise UserError(f"init_from {model.init_from} has {', '.join(wrong)}; set the recipe's fields to match")
        check_supported(theirs)
        built.load_weights(read_weights(directory), model.init_from)
    return built
