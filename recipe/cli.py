"""Words of the command line and of a YAML, made into dataclasses: what is unknown is refused, and never quoted."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import yaml
from transformers import HfArgumentParser
from transformers.hf_argparser import string_to_bool

from recipe.errors import UserError, reading
from recipe.redaction import looks_secret

AUTO = 0  # what a field of Sequences holds for `auto`


class Sequences(int):
    """A field's type: so many sequences, at least 1, or `auto`. What it makes of a word is a plain int, 0 for auto.

    A class because HfArgumentParser takes one type a field, and calls it with the word.
    """

    def __new__(cls, word: str) -> int:
        """The plain int that `word` means. Raises argparse's ArgumentTypeError."""
        if word == "auto":
            return AUTO
        if not (word.isascii() and word.isdecimal() and int(word) > 0):
            raise argparse.ArgumentTypeError(f"{word!r} is not a whole number of at least 1, nor auto")
        return int(word)


class Switch:
    """A field's type: true, false, or `auto`, which stays that word."""

    def __new__(cls, word: str) -> bool | str:
        """The bool that `word` means, or "auto". Raises argparse's ArgumentTypeError."""
        return word if word == "auto" else string_to_bool(word)


_MIGRATING = Path(__file__).parents[1] / "docs" / "migrating.md"


def _names_elsewhere() -> dict[str, str]:
    """Names that nanoGPT, llm.c and the Trainer have for something -> what docs/migrating.md's table says of it here,
    for the message that refuses them."""
    if not _MIGRATING.is_file():  # an installation without the repository
        return {}
    rows = [
        line.strip("| ").split("|") for line in _MIGRATING.read_text(encoding="utf-8").splitlines() if line[:1] == "|"
    ]
    return {
        name: row[-1].replace("`", "").strip() for row in rows for name in re.findall(r"`(-?\w+)", "|".join(row[:-1]))
    }


def _whole(word: str) -> int:
    """As int, but also of 1e3 and 1000.0. Raises ValueError."""
    try:
        return int(word)
    except ValueError:
        if (value := float(word)).is_integer():
            return int(value)
        raise


class Help(argparse.HelpFormatter):
    """Appends a field's value to its help, unless it is empty."""

    def _get_help_string(self, action: argparse.Action) -> str:
        value = "auto" if action.dest == "micro_batch_size" and action.default == AUTO else action.default
        if value in ("", None, argparse.SUPPRESS):
            return action.help or ""
        shown = str(value) if str(value).isprintable() else repr(value)
        return f"{action.help} (default: {shown.replace('%', '%%')})"


class Parser(HfArgumentParser):
    """Of a word that it does not know it says the name, not the value: that may be a secret in the wrong place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register("type", int, _whole)

    def error(self, message: str):
        """Raises UserError with argparse's message, without the value."""
        raise UserError(re.sub(r"(ignored explicit argument) .*", r"\1", message))

    def parse_known_args(self, args: list[str], namespace: argparse.Namespace | None = None) -> tuple:
        """As argparse's, which would make an empty list of the value in --NAME=--."""
        for name, _, value in (word.partition("=") for word in args):
            if value == "--":
                self.error(f"argument {name}: -- is not a value")
        return super().parse_known_args(args, namespace)

    def parse(self, argv: list[str], origin: str = "") -> tuple:
        """A dataclass of each type. Raises UserError, which begins with `origin`."""
        try:
            *parts, unknown = self.parse_args_into_dataclasses(
                args=argv, return_remaining_strings=True, look_for_args_file=False
            )
        except UserError as e:
            raise UserError(f"{origin}{e}") from None
        if not unknown:
            return tuple(parts)
        name = unknown[0].partition("=")[0]
        if not (name.startswith("--") or name in _names_elsewhere()):
            before = [word.partition("=")[0] for word in argv[: argv.index(unknown[0])] if word.startswith("--")]
            after = f" after {before[-1]}" if before else ""
            raise UserError(f"{origin}a word{after} that belongs to no field; write fields as --NAME VALUE")
        fields = {field.name for part in self.dataclass_types for field in dataclasses.fields(part)}
        raise UserError(f"{origin}unknown {name!r}{_nearest(name.removeprefix('--'), fields)}")


class _Loader(yaml.SafeLoader):
    """YAML with each key once and without aliases, by which a short text can hold itself, or a billion words."""

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            raise _Refused(
                problem="an alias (*) is not supported; repeat the value", problem_mark=self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = [key.value for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if key.value in keys[:number]:
                raise _Refused(problem=f"{key.value!r} is given twice; remove one", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)


class _Refused(yaml.MarkedYAMLError):
    """YAML that a recipe must not have. The problem is for the user."""


def load_yaml(text: str | bytes, origin: str, expected: str):
    """What a text in YAML holds. Raises UserError, which begins with `origin` and ends with what was `expected`."""
    try:
        return yaml.load(text, _Loader)
    except _Refused as e:
        raise UserError(f"{origin}, line {e.problem_mark.line + 1}: {e.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:  # whose own words quote the text
        at = getattr(e, "problem_mark", None)
        where = f"not valid YAML, line {at.line + 1}" if at else "not valid YAML in UTF-8"
        too_deep = "lists or mappings are nested too deeply"
        raise UserError(f"{origin}: {too_deep if isinstance(e, RecursionError) else where}; {expected}") from None


def yaml_flags(path: Path, fields: Iterable[str]) -> list[str]:
    """The YAML as flags, so that both ways in are checked and converted by the same parser. Raises UserError."""
    with reading(path, "give another recipe"):
        content = path.read_bytes()
    values = load_yaml(content, str(path), "expected `key: value` lines") or {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected `key: value` lines, found a {type(values).__name__}")
    if isinstance(mixture := values.get("dataset_name"), list):  # one word, as on the command line
        values["dataset_name"] = json.dumps(mixture, default=str)
    return flags_of(values, fields, str(path))


def flags_of(values: dict, fields: Iterable[str], origin: str) -> list[str]:
    """A mapping of a YAML as flags. Raises UserError, which begins with `origin`, for a key that is not one of
    `fields`, and for a list or a mapping as a value."""
    for key, value in values.items():
        if key not in fields:
            raise UserError(f"{origin}: unknown key {key!r}{_nearest(str(key), fields)}")
        if isinstance(value, (dict, list)):
            raise UserError(f"{origin}: {key} takes one value, found a {type(value).__name__}")
    return [f"--{key}={'' if value is None else value}" for key, value in values.items()]


def _nearest(name: str, fields: Iterable[str]) -> str:
    if here := _names_elsewhere().get(name):
        return f"; here: {here} (docs/migrating.md)"
    secret = looks_secret(name)
    close = difflib.get_close_matches(name, fields, n=1, cutoff=0.8 if secret else 0.6)
    if secret and not close:
        return "; a secret belongs in the environment, as HF_TOKEN or WANDB_API_KEY"
    return f"; did you mean {close[0]!r}?" if close else "; --help lists the fields"
