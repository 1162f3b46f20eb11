"""A recipe's YAML and the command line, merged: the command line wins."""

import argparse
import re
import sys
from dataclasses import fields
from pathlib import Path

import yaml

from recipe.config.catalog import is_on_hub
from recipe.config.checks import check
from recipe.config.fields import (
    DEFAULT_RECIPE,
    DEFAULTS,
    FIELDS,
    OF_ONE_DATA_SET,
    ONLY,
    PARTS,
    ROOT,
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Part,
    RunConfig,
)
from recipe.config.mixture import FORM, data_config
from recipe.config.values import converted, hint, metavar
from recipe.utils.errors import UserError, reading


def parse_config(argv: list[str] | None = None) -> Config:
    """The run's configuration from `--config FILE` and flags. Raises UserError for whatever is wrong with them."""
    argv = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in argv if word not in ("-h", "--help")]
    flags = _values(_flags(words))
    path = _find(flags.pop("config", DEFAULTS["config"]))
    recipe = _values(_recipe(path), f"{path}: ")
    if words != argv:
        _parser(DEFAULTS | recipe | {"config": path}).print_help()
        raise SystemExit(0)
    values = _without_replaced(recipe, flags) | flags
    values["config"], values["run_name"] = str(path), values.get("run_name") or path.stem
    values["output_dir"] = values.get("output_dir") or f"runs/{values['run_name']}"

    def of(part: type[Part]) -> dict:
        return {field.name: values[field.name] for field in fields(part) if field.name in values}

    model, optimizer = ModelConfig(**of(ModelConfig)), OptimizerConfig(**of(OptimizerConfig))
    config = Config(model, data_config(of(DataConfig)), optimizer, RunConfig(**of(RunConfig)))
    check(config)
    return config


def _values(words: dict, origin: str = "") -> dict:
    """The values of fields; a mixture stays the list that YAML has made of it."""
    listed = words.get("dataset_name")
    if isinstance(listed, str) and re.match(r"\s*\[\s*\{", listed):  # else it may be a glob
        listed = _load(listed, "dataset_name", FORM)
    if not isinstance(listed, list):
        return converted(words, FIELDS, origin)
    return converted(words | {"dataset_name": ""}, FIELDS, origin) | {"dataset_name": listed}


def _without_replaced(recipe: dict, flags: dict) -> dict:
    """The recipe's values without those about a data set, an optimizer or a schedule that the command line has
    replaced."""
    before = DEFAULTS | recipe
    dropped = {name for name, (other, value) in ONLY.items() if flags.get(other, value) != value == before[other]}
    replaced = [flags[name] for name in ("train_text", "dataset_name") if flags.get(name, "") not in ("", before[name])]
    if replaced:
        dropped |= {"dataset_name", *OF_ONE_DATA_SET}
        if isinstance(replaced[0], str) and not is_on_hub(replaced[0]):
            dropped.add("streaming")  # what is on this disk is prepared at once
    return {name: value for name, value in recipe.items() if name not in dropped}


def _find(config: str) -> Path:
    """A recipe's path, from the working directory or, for those that ship, from anywhere and by name alone."""
    for path in (Path(config), ROOT / config, DEFAULT_RECIPE.parent / f"{config}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(path.stem for path in DEFAULT_RECIPE.parent.glob("*.yaml")))
    raise UserError(f"--config {config}: no such file; recipe/configs/ has {shipped}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UserError(message)


def _parser(shown: dict) -> argparse.ArgumentParser:
    """A flag for each field; --help shows the values `shown`."""
    parser = _Parser(
        description="Train GPT-2.",
        usage="%(prog)s [--config RECIPE] [--FIELD VALUE ...]",
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    groups = {title: parser.add_argument_group(title) for title in PARTS}
    for title, part in PARTS.items():
        for field in fields(part):
            if field.name in FIELDS:
                default = f" (default: {shown[field.name]})" if shown.get(field.name, "") != "" else ""
                nargs, const = ("?", "true") if isinstance(field.default, bool) else (None, None)
                text = f"{field.metadata['help']}{default}".replace("%", "%%")
                groups[title].add_argument(
                    f"--{field.name}", help=text, metavar=metavar(field), nargs=nargs, const=const
                )
    return parser


def _flags(words: list[str]) -> dict[str, str]:
    """Field -> word of the command line. Raises UserError."""
    flags, unknown = _parser({}).parse_known_args(words)
    if not unknown:
        return vars(flags)
    name = unknown[0].partition("=")[0]
    if name.startswith("--"):
        raise UserError(f"unknown {name!r}{hint(name.removeprefix('--'), FIELDS)}")
    before = [word.partition("=")[0] for word in words[: words.index(unknown[0])] if word.startswith("--")]
    after = f" after {before[-1]}" if before else ""
    raise UserError(f"a word{after} that belongs to no field; write fields as --NAME VALUE")


def _load(text: str | bytes, origin: str, expected: str):
    """What a text in YAML holds. Raises UserError, which begins with `origin` and ends with what was `expected`."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # whose messages quote the text
        at = getattr(error, "problem_mark", None)
        where = f", line {at.line + 1}" if at else " in UTF-8"
        raise UserError(f"{origin}: not valid YAML{where}; {expected}") from None


def _recipe(path: Path) -> dict:
    """Field -> value of a recipe's YAML. Raises UserError."""
    with reading(path, "give another recipe"):
        content = path.read_bytes()
    values = _load(content, str(path), "expected `key: value` lines") or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    return values
