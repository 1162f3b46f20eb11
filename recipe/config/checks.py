"""Fields that exclude each other, and names that cannot be ones; limits of single fields stand beside them."""

from __future__ import annotations

import re

from huggingface_hub.utils import HFValidationError, validate_repo_id

from recipe.config.fields import DEFAULTS, FIELDS, Config, DataConfig, ModelConfig, RunConfig, data_sets
from recipe.utils.errors import UserError


def check(config: Config) -> None:
    """Raises UserError for values that exclude each other, and for names that cannot be ones."""
    model, data, opt = config.model, config.data, config.optimizer
    _check_heads(model)
    if data.sequence_length > model.n_positions:
        raise UserError(
            f"sequence_length {data.sequence_length} is longer than n_positions {model.n_positions}; raise n_positions "
            "or shorten the sequences"
        )
    if opt.warmup_steps >= opt.max_steps:
        raise UserError(f"warmup_steps {opt.warmup_steps} must be below max_steps {opt.max_steps}; shorten the warm-up")
    values = config.flat()
    for name, its in FIELDS.items():
        other, needed = its.metadata["only"] or ("", None)
        if other and values[other] != needed and values[name] != DEFAULTS[name]:
            raise UserError(
                f"{name} is for {other} {needed}, but {other} is {values[other]}; remove {name}, or set {other} to "
                f"{needed}"
            )
    for one in data_sets(data):
        _check_data(one.data)
    _check_run(config.run)


def _check_heads(model: ModelConfig) -> None:
    width, heads = model.n_embd, model.n_head
    if width % heads:
        nearest = [(max(2, width // heads) + k) * heads for k in (-1, 0, 1)]
        raise UserError(
            f"n_embd {width} is not a multiple of n_head {heads}; nearest valid n_embd: {', '.join(map(str, nearest))}"
        )


def _check_data(data: DataConfig) -> None:
    if not data.dataset_name:
        raise UserError("dataset_name is empty; give a directory of shards or a glob of .bin files")
    if data.dataset_source:
        check_repo_name(data.dataset_source, "dataset_source")
        if data.train_text:
            raise UserError(f"dataset_source is for .bin files, and the data are {data.train_text}; remove it")
    names_text = bool(data.train_text) and not set("*?[") & set(data.dataset_name)
    if data.streaming and not names_text:
        raise UserError(
            f"streaming needs text, and dataset_name {data.dataset_name} is not text; name a data set, or give "
            "train_text"
        )


def _check_run(run: RunConfig) -> None:
    if not re.fullmatch(r"[\w][\w.-]*", run.run_name):
        raise UserError(
            f"run_name {run.run_name!r} must be letters, digits, '.', '_' and '-' only; use output_dir for a path"
        )
    if run.push_to_hub and not run.hub_model_id:
        raise UserError("push_to_hub needs hub_model_id, ORG/NAME on the Hub")
    if run.hub_model_id:
        check_repo_name(run.hub_model_id, "hub_model_id")


def check_repo_name(name: str, field: str) -> None:
    """Raises UserError where `name` cannot be the ORG/NAME of a repository on the Hub."""
    try:
        validate_repo_id(name)
        ok = re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None
    except HFValidationError:
        ok = False
    if not ok:
        raise UserError(f"{field} {name!r} must be ORG/NAME: letters, digits, '.', '_' and '-', with one slash")
