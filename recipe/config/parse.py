"""A recipe's YAML and the command line, merged: the command line wins."""

from __future__ import annotations

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
    PARTS,
    ROOT,
    Config,
)
from recipe.config.mixture import FORM, data_config
from recipe.config.values import converted, hint, metavar, names_elsewhere
from recipe.utils.errors import UserError, reading


def parse_config(argv: list[str] | None = None) -> Config:
    """The run's configuration from `--config FILE` and flags. Raises UserError for whatever is wrong with them."""
    argv = list(sys.argv[1:] if argv is None else argv)
    words = [word for word in argv if word not in ("-h", "--help")]
    given = _values(_flags(words))
    path = _find(given.pop("config", DEFAULTS["config"]))
    recipe = _values(_recipe(path), f"{path}: ")
    if words != argv:
        _parser(DEFAULTS | recipe | {"config": path}).print_help()
        raise SystemExit(0)
    values = _without_replaced(recipe, given) | given
    values["config"], values["run_name"] = str(path), values.get("run_name") or path.stem
    values["output_dir"] = values.get("output_dir") or f"runs/{values['run_name']}"

    def of(part: type) -> dict:
        return {its.name: values[its.name] for its in fields(part) if its.name in values}

    model, data, optimizer, run = PARTS.values()
    config = Config(model(**of(model)), data_config(of(data)), optimizer(**of(optimizer)), run(**of(run)))
    check(config)
    return config


def _values(given: dict, origin: str = "") -> dict:
    """The values of fields; a mixture stays the list that YAML has made of it."""
    listed = given.get("dataset_name")
    if isinstance(listed, str) and listed.lstrip().startswith("["):
        listed = _mixture(listed)
    if not isinstance(listed, list):
        return converted(given, FIELDS, origin)
    others = {name: value for name, value in given.items() if name != "dataset_name"}
    return converted(others, FIELDS, origin) | {"dataset_name": listed}


def _mixture(word: str) -> str | list:
    """The list that a word of the command line is; a word that is none may be a glob."""
    try:
        return _load(word, "dataset_name", FORM)
    except UserError:
        if re.match(r"\s*\[\s*\{", word):
            raise
        return word


def _without_replaced(recipe: dict, given: dict) -> dict:
    """The recipe's values without those about a data set, an optimizer or a schedule that the command line has
    replaced."""
    before, dropped = DEFAULTS | recipe, set()
    names = [given.get(name, "") for name in ("train_text", "dataset_name")]
    if any(name not in ("", before[field]) for name, field in zip(names, ("train_text", "dataset_name"), strict=True)):
        dropped |= set(OF_ONE_DATA_SET)
        name = names[0] or names[1]
        if isinstance(name, str) and not is_on_hub(name):
            dropped.add("streaming")  # what is on this disk is prepared at once
    for name, its in FIELDS.items():
        other, value = its.metadata["only"] or ("", None)
        if other in given and given[other] != value == before[other]:
            dropped.add(name)
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
    for title, part in PARTS.items():
        group = parser.add_argument_group(title)
        for its in fields(part):
            if its.name not in FIELDS:
                continue
            value = shown.get(its.name, "")
            default = f" (default: {value if str(value).isprintable() else repr(value)})" if value != "" else ""
            bare = {"nargs": "?", "const": "true"} if isinstance(its.default, bool) else {}
            text = f"{its.metadata['help']}{default}".replace("%", "%%")
            group.add_argument(f"--{its.name}", help=text, metavar=metavar(its.name), **bare)
    return parser


def _flags(words: list[str]) -> dict[str, str]:
    """Field -> word of the command line. Raises UserError."""
    given, unknown = _parser({}).parse_known_args(words)
    if not unknown:
        return vars(given)
    name = unknown[0].partition("=")[0]
    if name.startswith("--") or name in names_elsewhere():
        raise UserError(f"unknown {name!r}{hint(name.removeprefix('--'), FIELDS)}")
    before = [word.partition("=")[0] for word in words[: words.index(unknown[0])] if word.startswith("--")]
    after = f" after {before[-1]}" if before else ""
    raise UserError(f"a word{after} that belongs to no field; write fields as --NAME VALUE")


class _Loader(yaml.SafeLoader):
    """YAML with each key once."""

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise UserError(f"line {key.start_mark.line + 1}: {key.value!r} is given twice; remove one")
        return super().construct_mapping(node, deep)


def _load(text: str | bytes, origin: str, expected: str):
    """What a text in YAML holds. Raises UserError, which begins with `origin` and ends with what was `expected`."""
    try:
        return _Loader(text).get_single_data()
    except UserError as error:
        raise UserError(f"{origin}, {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # whose own words quote the text
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
    if "config" in values:
        raise UserError(f"{path}: config is given on the command line; remove it")
    return values
