"""Builds the model that a configuration describes, with its initial weights."""

import json
import logging
import shlex
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer
from transformers import GPT2Config

from recipe.config import SHAPE_FIELDS, Config
from recipe.data.tokenizer import open_tokenizer
from recipe.model.gpt2 import WEIGHT_FILES, GPT2LMHeadModel, check_supported, read_config, read_weights, weight_files
from recipe.model.loss import next_token_loss
from recipe.utils.checkpoints import checkpoints
from recipe.utils.download import local_copy
from recipe.utils.errors import UserError, reading

logger = logging.getLogger(__name__)

_CONFIG_FILES = ["config.json", "tokenizer.json", "vocab.json"]
_local_copy = partial(local_copy, field="init_from", required="config.json and model.safetensors", weights=True)


def build_model(
    config: Config, *, load_init_from: bool = True, pad_vocab_to: int = 1, **device_options
) -> GPT2LMHeadModel:
    """The recipe's model on the CPU, with random weights or those of `init_from`.

    `load_init_from=False` leaves the weights random, for a caller that will replace them. `pad_vocab_to`, for the loss,
    and `device_options`, for GPT2LMHeadModel, depend on the device (`Device.model_options`). Raises UserError if
    `init_from` cannot be loaded or has another architecture.
    """
    fields, run = config.model, config.run
    tokenizer = open_tokenizer(config.data.tokenizer)
    gpt2_config = GPT2Config(
        **{name: getattr(fields, name) for name in SHAPE_FIELDS},
        bos_token_id=tokenizer.end_of_text,
        eos_token_id=tokenizer.end_of_text,
        pad_token_id=tokenizer.padding,
        resid_pdrop=fields.dropout,
        embd_pdrop=fields.dropout,
        attn_pdrop=fields.dropout,
    )
    fused = run.fused_loss is True  # an unresolved "auto" counts as off
    model = GPT2LMHeadModel(
        gpt2_config,
        gradient_checkpointing=bool(run.gradient_checkpointing),  # an unresolved "auto" counts as on
        loss=partial(next_token_loss, chunk_size=run.loss_chunk_size, pad_vocab_to=pad_vocab_to, fused=fused),
        seed=run.seed,
        **device_options,
    )
    if fields.init_from and load_init_from:
        directory = _local_copy(fields.init_from, patterns=[*_CONFIG_FILES, *WEIGHT_FILES])
        _check_config(config, directory)
        model.load_weights(read_weights(directory), fields.init_from)
    return model


def check_init_from(config: Config) -> None:
    """Checks `init_from` before a run. Raises UserError if it is missing or has another architecture or vocabulary,
    and Unreachable if the Hub does not answer. Weights are neither read nor downloaded."""
    if name := config.model.init_from:
        directory = _local_copy(name, patterns=_CONFIG_FILES)
        _check_config(config, directory)
        if not any((Path(directory) / file).is_file() for file in _CONFIG_FILES[1:]):
            problem, tokenizer = f"init_from {name} has no tokenizer.json", open_tokenizer(config.data.tokenizer).name
            logger.warning("note       not checked: %s, so it must be a model of tokenizer %s", problem, tokenizer)


def _check_config(config: Config, directory: str) -> None:
    model, tokenizer = config.model, open_tokenizer(config.data.tokenizer)
    if not (Path(directory) / "config.json").is_file() and (steps := checkpoints(Path(directory))):
        raise UserError(f"init_from {model.init_from} is a run; name a checkpoint of it, such as {steps[-1]}")
    if directory == model.init_from:  # first: a missing config.json would be read as GPT-2's
        weight_files(directory)
    init_config = read_config(directory)
    differences, flags = list[str](), list[str]()
    paths = (Path(directory) / name for name in _CONFIG_FILES[1:])
    if path := next((path for path in paths if path.is_file()), None):
        with reading(path, "copy or download it again"):  # vocab.json is how older versions of transformers save it
            is_old = path.name == "vocab.json"
            tokens = (json.loads(path.read_bytes()) if is_old else Tokenizer.from_file(str(path)).get_vocab()).items()
        own_tokens = tokenizer.vocabulary().items()  # either may have more, such as a padding token
        if not (tokens <= own_tokens or own_tokens <= tokens):
            differences.append(f"was trained with another tokenizer than {tokenizer.name}")
            flags.append(f"--tokenizer {shlex.quote(model.init_from)}")
    if not flags and init_config.vocab_size != model.vocab_size:
        raise UserError(
            f"init_from {model.init_from} has {init_config.vocab_size:,} embeddings, and tokenizer {tokenizer.name} "
            f"{model.vocab_size:,} tokens; set tokenizer to that of the weights, or cut or extend the embeddings with "
            f"transformers: model.resize_token_embeddings({model.vocab_size})"
        )
    shape = {name: getattr(init_config, name) for name in SHAPE_FIELDS if name != "vocab_size"}
    shape = {name: value for name, value in shape.items() if value != getattr(model, name)}
    if shape:
        values = (f"{name} {value} (recipe: {getattr(model, name)})" for name, value in shape.items())
        differences.append(f"has {', '.join(values)}")
        if init_config.n_positions < config.data.sequence_length:
            shape["sequence_length"] = init_config.n_positions
        flags += [f"--{name} {value}" for name, value in shape.items()]
    if flags:
        raise UserError(f"init_from {model.init_from} {' and '.join(differences)}; add {' '.join(flags)}")
    if init_config.n_inner not in (None, 4 * model.n_embd):
        raise UserError(f"init_from {model.init_from} has n_inner {init_config.n_inner}; a recipe's is 4 n_embd")
    check_supported(init_config, f"init_from {model.init_from}")
