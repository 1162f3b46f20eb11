"""Merges a recipe's YAML and the command line, which wins; checks names, and fields that depend on each other (the
limits of single fields are in fields.py)."""

import argparse
import glob
import os
import re
import sys
from dataclasses import fields
from pathlib import Path

import yaml

from recipe.config.catalog import DATA_NAMES, REPO_NAME, SHARD_FIELDS, is_on_hub
from recipe.config.fields import (
    DATA_SET_FIELDS,
    DEFAULT_RECIPE,
    DEFAULTS,
    FIELDS,
    LENGTH_FIELDS,
    PARTS,
    REQUIRES,
    ROOT,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    data_sets,
)
from recipe.config.mixture import SYNTAX, data_config
from recipe.config.values import converted, hint, kinds, metavar
from recipe.utils.errors import ArgumentParser, UserError, reading

MAX_DECAY_FRACTION = 0.8  # of a run of train_hours


def parse_config(argv: list[str] | None = None) -> Config:
    """The run's configuration from `--config FILE` and flags. Raises UserError for any mistake in them."""
    argv = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in argv if word not in ("-h", "--help")]
    flags = _values(_flags(words))
    path = _find(flags.pop("config", DEFAULTS["config"]))
    recipe = _values(_recipe(path), f"{path}: ")
    if words != argv:
        _parser(DEFAULTS | recipe | {"config": path}).print_help()
        raise SystemExit(0)
    values = _without_replaced(recipe, flags) | flags
    if len(lengths := [name for name in LENGTH_FIELDS if values.get(name)]) > 1:
        raise UserError(f"{' and '.join(lengths)} set the length of the run; give one of them")
    directory = re.search(r"(\w[\w.-]*)/recipe\.yaml$", path.as_posix())  # of a run, in which best.py has written it
    # Not by an output_dir in the recipe: a copy would continue the run of the recipe itself.
    stem = Path(flags.get("output_dir") or (directory[1] if directory else path.stem)).name
    default_name = re.sub(r"[^\w.-]+", "-", stem).strip("-.") or "run"
    if {"WANDB_SWEEP_ID", "WANDB_RUN_ID"} <= os.environ.keys():  # as `wandb agent` sets for each run
        default_name += f"-{os.environ['WANDB_RUN_ID']}"
    values["config"], values["run_name"] = str(path), values.get("run_name") or default_name
    values["output_dir"] = values.get("output_dir") or f"runs/{values['run_name']}"

    values.setdefault("deterministic", values.get("push_to_hub") == "state")  # for an audit that is exact to the bit
    model, data, optimizer, run = (
        {field.name: values[field.name] for field in fields(part) if field.name in values} for part in PARTS.values()
    )
    config = Config(ModelConfig(**model), data_config(data), OptimizerConfig(**optimizer), RunConfig(**run))
    check(config)
    shards = config.data.dataset_name
    if not (config.data.mixture or config.data.train_text) and (Path(shards).exists() or glob.glob(shards)):
        of_validation = {"text_column", "shard_tokens"} if config.data.val_text else set()
        for name in sorted(flags.keys() & {*SHARD_FIELDS, "disk_budget_gb"} - {"tokenizer", *of_validation}):
            raise UserError(f"--{name} applies to text, but dataset_name {shards} holds shards; remove it")
    return config


def _values(words: dict, origin: str = "") -> dict:
    """The values of fields; a mixture stays a list of dicts (parsed YAML)."""
    dataset_name = words.get("dataset_name")
    if isinstance(dataset_name, str) and re.match(r"\s*\[\s*\{", dataset_name):  # otherwise it may be a glob
        dataset_name = _load(dataset_name, "dataset_name", SYNTAX)
    if not isinstance(dataset_name, list):
        return converted(words, FIELDS, origin)
    return converted(words | {"dataset_name": ""}, FIELDS, origin) | {"dataset_name": dataset_name}


def _without_replaced(recipe: dict, flags: dict) -> dict:
    """The recipe's values without those that depend on something that the command line replaces."""
    base = DEFAULTS | recipe
    replaced = {name for name, value in flags.items() if value != base[name]}
    dropped = {name for name, (other, value) in REQUIRES.items() if base[other] == value and other in replaced}
    dropped -= {*LENGTH_FIELDS}  # without train_hours the run would have the default length
    if any(flags.get(name) for name in LENGTH_FIELDS):
        dropped |= {*LENGTH_FIELDS}
    if data_names := [flags[name] for name in ("train_text", "dataset_name") if name in replaced and flags[name]]:
        dropped |= {"dataset_name", *DATA_SET_FIELDS}
        if isinstance(data_names[0], str) and not is_on_hub(data_names[0]):
            dropped.add("streaming")  # data on this disk is prepared before training
    return {name: value for name, value in recipe.items() if name not in dropped}


def _find(config: str) -> Path:
    """A recipe's path: in the working directory or in the repository, or the name of a shipped recipe."""
    for path in (Path(config), ROOT / config, DEFAULT_RECIPE.parent / f"{config}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in DEFAULT_RECIPE.parent.glob("*.yaml")))
    raise UserError(f"--config {config}: no such file; recipe/configs/ has {shipped}")


def _parser(defaults: dict) -> argparse.ArgumentParser:
    """A parser with a flag for each field; --help shows the `defaults` and describes the module that was started."""
    command = sys.modules["__main__"]
    spec = getattr(command, "__spec__", None)  # missing under `python -m pdb`
    module = spec.name.removesuffix(".__main__") if spec else ""
    parser = ArgumentParser(
        prog=f"python -m {module}" if module else sys.argv[0],
        description=(command.__doc__ or "").partition("\n\n")[0],
        usage="%(prog)s [--config RECIPE] [--FIELD VALUE ...]",
        epilog="The defaults are those of the recipe: --config NAME --help prints another's.",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    for title, part in PARTS.items():
        group = parser.add_argument_group(title)
        for field in fields(part):
            if field.name in FIELDS:
                default = f" (default: {defaults[field.name]})" if defaults.get(field.name, "") != "" else ""
                nargs, const = ("?", "true") if bool in kinds(field) else (None, None)
                text = f"{field.metadata['help']}{default}".replace("%", "%%")
                group.add_argument(f"--{field.name}", help=text, metavar=metavar(field), nargs=nargs, const=const)
    return parser


def _flags(words: list[str]) -> dict[str, str]:
    """{field: word} of the command line. Raises UserError."""
    flags, unknown_words = _parser({}).parse_known_args(words)
    if not unknown_words:
        return vars(flags)
    name = unknown_words[0].partition("=")[0]
    if name.startswith("--"):
        raise UserError(f"unknown {name!r}{hint(name.removeprefix('--'), FIELDS)}")
    path = f": {unknown_words[0]!r}" if os.path.exists(unknown_words[0]) else ""  # anything else may be a secret
    flag = "--config" if name.endswith((".yaml", ".yml")) else "--NAME"
    raise UserError(
        f"unexpected argument{path}; write {flag} VALUE, and quote a glob or a name with spaces; "
        "docs/migrating.md has the names in other programs"
    )


class _StringLoader(yaml.SafeLoader):
    """Loads YAML with each scalar as the string that was written, as on a command line: `no` is Norwegian, 0100 is 100.
    A duplicate key is an error; PyYAML would take the last one."""

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                raise UserError(f"line {key.start_mark.line + 1}: {key.value} is given twice; remove one of them")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


_StringLoader.yaml_implicit_resolvers = {
    character: [(tag, pattern) for tag, pattern in resolvers if tag.endswith((":null", ":merge"))]
    for character, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _load(text: str | bytes, origin: str, expected: str):
    """Parses YAML. Raises UserError, which starts with `origin` and ends with what was `expected`."""
    try:
        return _StringLoader(text).get_single_data()
    except UserError as error:
        raise UserError(f"{origin}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not chained: its message quotes the text
        mark = getattr(error, "problem_mark", None)
        position = f", line {mark.line + 1}" if mark else " in UTF-8"
        raise UserError(f"{origin}: not valid YAML{position}; {expected}") from None


def _recipe(path: Path) -> dict:
    """{field: value} of a recipe's YAML. Raises UserError."""
    with reading(path, "give another recipe"):
        content = path.read_bytes()
    expected = "expected lines such as `n_layer: 2`, with a space after the colon"
    values = _load(content, str(path), expected) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: {expected}")
    if base := next((name for name in ("config", "extends") if name in values), ""):
        raise UserError(f"{path}: {base}: a recipe cannot extend another; copy it, or give flags beside --config NAME")
    return values


def check(config: Config) -> None:
    """Raises UserError for values that contradict each other, and for invalid names."""
    model, data, opt = config.model, config.data, config.optimizer
    if model.init_from in ("scratch", "resume"):
        raise UserError(f"init_from {model.init_from}: omit it; the same command starts a run and resumes it")
    if model.n_embd % model.n_head:
        lower = max(1, model.n_embd // model.n_head) * model.n_head
        raise UserError(
            f"n_embd {model.n_embd} is not a multiple of n_head {model.n_head}; nearest valid n_embd: {lower}, "
            f"{lower + model.n_head}"
        )
    if data.sequence_length > model.n_positions:
        raise UserError(
            f"sequence_length {data.sequence_length} is longer than n_positions {model.n_positions}; raise n_positions "
            "or shorten the sequences"
        )
    if opt.total_batch_tokens < data.sequence_length:
        raise UserError(
            f"total_batch_tokens {opt.total_batch_tokens} is less than one sequence of {data.sequence_length} tokens "
            "(sequence_length); it counts tokens, not sequences"
        )
    if opt.warmup_steps >= opt.max_steps and not (config.run.num_train_epochs or config.run.train_hours):
        raise UserError(
            f"warmup_steps {opt.warmup_steps} must be below max_steps {opt.max_steps}; add --warmup_steps "
            f"{opt.max_steps // 10}"
        )
    if config.run.train_hours and opt.decay_fraction > MAX_DECAY_FRACTION:
        raise UserError(
            f"decay_fraction {opt.decay_fraction:g} leaves too little time before the decay to measure how many steps "
            f"fit in train_hours {config.run.train_hours:g}; it may be at most {MAX_DECAY_FRACTION}"
        )
    values = config.flat()
    for name, (other, required_value) in REQUIRES.items():
        if values[other] != required_value and values[name] != DEFAULTS[name]:
            raise UserError(
                f"{name} needs {other} {required_value}, but {other} is {values[other]}; remove {name}, or set "
                f"{other} {required_value}"
            )
    for entry in data_sets(data):
        _check_data(entry.data)
    _check_run(config.run)


def _check_data(data: DataConfig) -> None:
    if not data.dataset_name:
        raise UserError(f"dataset_name is empty; give {DATA_NAMES}")
    if data.dataset_source:
        check_repo_name(data.dataset_source, "dataset_source")
        if data.train_text:
            raise UserError(f"dataset_source is for .bin files, but {data.train_text} is text; remove dataset_source")
    if data.streaming and not data.train_text:
        raise UserError(
            f"streaming needs text, and dataset_name {data.dataset_name} is not text; name text, or set streaming false"
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
