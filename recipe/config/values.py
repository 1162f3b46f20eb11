"""Words of a command line or a YAML as the values of fields, and what an unknown name probably meant.

The value of an unknown name is never quoted: it may be a secret in the wrong place.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Literal, get_args, get_origin, get_type_hints

from recipe.config.fields import FIELDS, PARTS, ROOT
from recipe.utils.errors import UserError
from recipe.utils.redaction import looks_secret

_MIGRATING = ROOT / "docs" / "migrating.md"


def converted(given: Mapping, names: Collection[str], origin: str = "") -> dict:
    """The values of fields that are `given` as words, or as what YAML has made of them. Raises UserError, which begins
    with `origin`, for a name that is not one of `names`, and for a value of another type than its field's."""
    values = {}
    for name, value in given.items():
        if name not in names:
            raise UserError(f"{origin}unknown key {name!r}{hint(str(name), names)}")
        if isinstance(value, (dict, list)):
            raise UserError(f"{origin}{name} takes one value, found a {type(value).__name__}")
        try:
            values[name] = _value(name, "" if value is None else str(value))
        except ValueError as error:
            raise UserError(f"{origin}{error}") from None
    return values


def _value(name: str, word: str):
    if FIELDS[name].metadata["path"]:
        return _path(name, word)
    for kind in _KINDS[name]:
        with suppress(KeyError, ValueError):
            return _CONVERT[kind](word) if kind in _CONVERT else {choice: choice for choice in get_args(kind)}[word]
    *others, last = _expected(name)
    expected = f"{', '.join(others)} or {last}" if others else last
    raise UserError(f"{name} is {word!r}; it must be {expected}")


def _path(name: str, word: str) -> str:
    """With ~ expanded, which a shell does not do in --val_data=~/shards."""
    if "://" in word and not (word.startswith("hf://") and name in ("dataset_name", "train_text")):
        raise UserError(
            f"{name} {word} is a URL, which is not read; download it and give the path, or name a Hub repository"
        )
    return os.path.expanduser(word)


def _whole(word: str) -> int:
    """As int, but also of 1e3 and 1000.0."""
    try:
        return int(word)
    except ValueError:
        if (value := float(word)).is_integer():
            return int(value)
        raise


def _truth(word: str) -> bool:
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[word.lower()]


_CONVERT = {str: str, int: _whole, float: float, bool: _truth}
_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


def _kinds(annotation) -> tuple:
    """(int, Literal["auto"]) of int | Literal["auto"]."""
    return (annotation,) if get_origin(annotation) in (None, Literal) else get_args(annotation)


_KINDS = {
    name: _kinds(annotation)
    for part in PARTS.values()
    for name, annotation in get_type_hints(part).items()
    if name in FIELDS
}


def _expected(name: str) -> list[str]:
    return [word for kind in _KINDS[name] for word in ([_NAMES[kind]] if kind in _NAMES else get_args(kind))]


def metavar(name: str) -> str:
    """What a field takes, for --help: INT, or adamw|muon."""
    return "|".join(word for kind in _KINDS[name] for word in get_args(kind) or [kind.__name__.upper()])


def hint(name: str, names: Collection[str]) -> str:
    """What an unknown name probably meant, as the end of an error's message."""
    if here := names_elsewhere().get(name):
        return f"; here: {here} (docs/migrating.md)"
    secret = looks_secret(name)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.8 if secret else 0.6)
    if secret and not close:
        return "; a secret belongs in the environment, as HF_TOKEN or WANDB_API_KEY"
    return f"; did you mean {close[0]!r}?" if close else "; --help lists the fields"


def names_elsewhere() -> dict[str, str]:
    """Names that nanoGPT, llm.c and the Trainer have for something -> what docs/migrating.md's table has for it
    here."""
    if not _MIGRATING.is_file():  # an installation without the repository
        return {}
    rows = [row.strip("| ").split("|") for row in _MIGRATING.read_text().splitlines() if row.startswith("|")]
    return {
        name: row[-1].replace("`", "").strip() for row in rows for name in re.findall(r"`(-?\w+)", "|".join(row[:-1]))
    }
