"""Builds the model that a configuration describes, with its first weights."""

import dataclasses
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from transformers import GPT2Config

from recipe.config import Config
from recipe.errors import UserError
from recipe.model.gpt2 import GPT2LMHeadModel

_FILES = ["config.json", "model.safetensors", "model.safetensors.index.json", "model-*.safetensors"]
_TIMEOUT = 5.0  # seconds for the Hub's first answer


def build_model(config: Config, *, load_init_from: bool = True, **device_options) -> GPT2LMHeadModel:
    """The recipe's model on the CPU, with random weights or those of `init_from`.

    `load_init_from=False` leaves the weights random, for a caller that will replace them. `device_options` are those
    arguments of GPT2LMHeadModel that depend on the device (`Engine.model_options`). Raises UserError where `init_from`
    cannot be loaded or has another architecture.
    """
    model = config.model
    sizes = {k: v for k, v in dataclasses.asdict(model).items() if k.startswith("n_")}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout)
    wanted = GPT2Config(**sizes, **dropout)  # the vocabulary is GPT-2's, transformers' default
    built = GPT2LMHeadModel(
        wanted,
        gradient_checkpointing=config.run.gradient_checkpointing,
        loss_chunk_size=config.run.loss_chunk_size,
        seed=config.run.seed,
        **device_options,
    )
    if model.init_from and load_init_from:
        pretrained = GPT2LMHeadModel.from_pretrained(_on_this_disk(model.init_from))
        found = {k: getattr(pretrained.config, k) for k in (*sizes, "vocab_size")}
        if wrong := [f"{k} {v} (recipe: {getattr(wanted, k)})" for k, v in found.items() if v != getattr(wanted, k)]:
            raise UserError(f"init_from {model.init_from} has {', '.join(wrong)}; set the recipe's fields to match")
        built.load_weights(pretrained.state_dict(), model.init_from)
    return built


def _on_this_disk(name: str) -> str:
    """The directory `name`, or the Hub's model of that name in its local cache, downloaded if need be.

    Asks the Hub once, with a short timeout: the libraries' own retries take most of a minute without a network.
    """
    if Path(name).exists():
        return name
    problem = f"init_from {name} is no directory here, and"
    try:
        HfApi().model_info(name, timeout=_TIMEOUT)
        return snapshot_download(name, allow_patterns=_FILES)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(f"{problem} there is no model of that name on the Hub ({_first_line(error)})") from None
    except Exception as error:  # without a network: of httpx or httpx2, going by huggingface_hub's version
        try:
            return snapshot_download(name, allow_patterns=_FILES, local_files_only=True)
        except LocalEntryNotFoundError:
            raise UserError(
                f"{problem} the Hub cannot be reached ({_first_line(error)}). Is this machine offline? Connect it, or "
                "give a directory that holds config.json and model.safetensors"
            ) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
