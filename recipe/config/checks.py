"""Fields that exclude each other, and names that are not valid; limits of single fields stand beside them."""

import re

from recipe.config.catalog import REPO_NAME
from recipe.config.fields import DEFAULTS, ONLY, Config, DataConfig, RunConfig, data_sets
from recipe.utils.errors import UserError


def check(config: Config) -> None:
    """Raises UserError for values that exclude each other, and for names that are not valid."""
    model, data, opt = config.model, config.data, config.optimizer
    if model.n_embd % model.n_head:
        below = max(1, model.n_embd // model.n_head) * model.n_head
        raise UserError(
            f"n_embd {model.n_embd} is not a multiple of n_head {model.n_head}; nearest valid n_embd: {below}, "
            f"{below + model.n_head}"
        )
    if data.sequence_length > model.n_positions:
        raise UserError(
            f"sequence_length {data.sequence_length} is longer than n_positions {model.n_positions}; raise n_positions "
            "or shorten the sequences"
        )
    if opt.warmup_steps >= opt.max_steps:
        raise UserError(f"warmup_steps {opt.warmup_steps} must be below max_steps {opt.max_steps}; shorten the warm-up")
    values = config.flat()
    for name, (other, needed) in ONLY.items():
        if values[other] != needed and values[name] != DEFAULTS[name]:
            raise UserError(f"{name} is for {other} {needed}, but {other} is {values[other]}; remove {name}")
    for one in data_sets(data):
        _check_data(one.data)
    _check_run(config.run)


def _check_data(data: DataConfig) -> None:
    if not data.dataset_name:
        raise UserError("dataset_name is empty; give a directory of shards or a glob of .bin files")
    if data.dataset_source:
        check_repo_name(data.dataset_source, "dataset_source")
        if data.train_text:
            raise UserError(f"dataset_source is for .bin files, and the data are {data.train_text}; remove it")
    if data.streaming and not data.train_text:
        raise UserError(
            f"streaming needs text, and dataset_name {data.dataset_name} is not text; name a data set of it"
        )


def _check_run(run: RunConfig) -> None:
    if not re.fullmatch(r"\w[\w.-]*", run.run_name):
        raise UserError(
            f"run_name {run.run_name!r} must be letters, digits, '.', '_' and '-' only; use output_dir for a path"
        )
    if run.push_to_hub and not run.hub_model_id:
        raise UserError("push_to_hub needs hub_model_id, ORG/NAME on the Hub")
    if run.hub_model_id:
        check_repo_name(run.hub_model_id, "hub_model_id")


def check_repo_name(name: str, field: str) -> None:
    """Raises UserError where `name` cannot be the ORG/NAME of a repository on the Hub."""
    if not REPO_NAME.fullmatch(name):
        raise UserError(f"{field} {name!r} must be ORG/NAME: letters, digits, '.', '_' and '-', with one slash")
