"""Converts the words of a command line or a recipe to the values of fields, and checks their limits.

The value of an unknown name is never quoted in an error: it may be a secret in the wrong place.
"""

import dataclasses
import difflib
import math
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal, get_args, get_origin

from recipe.config.fields import ROOT
from recipe.utils.errors import UserError

Fields = Mapping[str, dataclasses.Field]

_LIMITS = {
    "min": (operator.ge, "at least"),
    "above": (operator.gt, "above"),
    "max": (operator.le, "at most"),
    "below": (operator.lt, "below"),
}


def converted(values: Mapping, fields: Fields, origin: str = "") -> dict:
    """`values`, converted to the types of `fields`. Raises UserError, which starts with `origin`, for an unknown name,
    and for a value of another type or outside its field's limits."""
    results = {name: _converted(str(name), value, fields, origin) for name, value in values.items()}
    for name, value in results.items():
        limits = fields[name].metadata["limits"]
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{origin}{name} is {value}; it must be a finite number")
        if isinstance(value, (int, float)) and not all(_LIMITS[k][0](value, n) for k, n in limits.items()):
            requirement = " and ".join(f"{_LIMITS[k][1]} {n}" for k, n in limits.items())
            requirement = " or ".join([requirement, *(word for word in kinds(fields[name]) if isinstance(word, str))])
            raise UserError(f"{origin}{name} is {value}; it must be {requirement}")
    return results


def _converted(name: str, value, fields: Fields, origin: str):
    if name not in fields:
        raise UserError(f"{origin}unknown key {name!r}{hint(name, fields)}")
    if isinstance(value, (dict, list)):
        raise UserError(f"{origin}{name} takes one value, found a {type(value).__name__}")
    word, field = "" if value is None else str(value), fields[name]
    if field.metadata["path"]:
        if "://" in word:  # gs://, s3://, hf://: would create a local directory of that name
            raise UserError(f"{origin}{name} is a URL, but must be a path on this disk or a name on the Hub")
        return os.path.expanduser(word)  # a shell does not expand --val_data=~/shards
    for kind in kinds(field):
        if word == kind:
            return word
        with suppress(KeyError, ValueError):  # kind is a word itself, or the word is not of this type
            return _FROM_WORD[kind](word)
    raise UserError(f"{origin}{name} is {word!r}; it must be {metavar(field)}")


def _integer(word: str) -> int:
    """As int(), but also accepts 1e3 and 1000.0."""
    value = float(word)
    return int(value) if value.is_integer() and abs(value) < 2**53 else int(word)


def _boolean(word: str) -> bool:
    return {"true": True, "false": False}[word.lower()]


_FROM_WORD = {str: str, int: _integer, float: float, bool: _boolean}
_NAMES = {str: "TEXT", int: "INTEGER", float: "NUMBER", bool: "true|false"}


def kinds(field: dataclasses.Field) -> list:
    """The types and words that a field accepts: [int, "auto"] for int | Literal["auto"]."""
    annotations = [field.type] if get_origin(field.type) in (None, Literal) else get_args(field.type)
    return [kind for annotation in annotations for kind in get_args(annotation) or [annotation]]


def metavar(field: dataclasses.Field) -> str:
    """What a field accepts, for --help and errors: INTEGER|auto."""
    return "|".join(_NAMES.get(kind, kind) for kind in kinds(field))


def hint(name: str, fields: Fields) -> str:
    """The end of an error message that suggests what an unknown name may mean: in another program, or here."""
    name = name.replace("-", "_")
    if ours := _name_here(name):
        here = "" if ours.startswith("nothing") else "here: "
        return f"; {here}{ours} (docs/migrating.md)"
    if close := difflib.get_close_matches(name, fields, n=1, cutoff=0.7):
        return f"; did you mean {close[0]!r}?"
    return "; see --help, or docs/migrating.md for the names in other programs"


def _name_here(name: str) -> str:
    """What the table of docs/migrating.md has for another program's name; empty if the name is not in it."""
    with suppress(OSError):
        for row in (ROOT / "docs" / "migrating.md").read_text().splitlines():
            theirs, _, ours = row.removesuffix("|").rpartition("|")
            if f"`{name}`" in theirs:
                return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", ours).replace("`", "").strip()
    return ""
