"""Mixtures: a `dataset_name` that is a list of data sets with weights, written as YAML."""

from __future__ import annotations

import math
import re

from recipe.cli import load_yaml
from recipe.errors import UserError

BLOCK = 1000  # sequences over which the shares of a mixture are exact
_FORM = "[{name: A, weight: 0.7}, {name: B, weight: 0.3}]"


def entries(name: str) -> list[dict] | None:
    """The entries of a mixture, each with a "name", a "weight" as a float, and perhaps more; None where `name` is that
    of one data set, such as a glob. Raises UserError."""
    if not name.lstrip().startswith("["):
        return None
    try:
        found = load_yaml(name, "dataset_name", f"write a mixture as {_FORM}")
    except UserError:
        if re.match(r"\s*\[\s*\{", name):
            raise
        return None  # a glob
    if not found:
        raise UserError(f"dataset_name is an empty list; write a mixture as {_FORM}")
    for number, entry in enumerate(found, 1):
        if not isinstance(entry, dict):
            raise UserError(
                f"dataset_name, entry {number}, is a {type(entry).__name__}, not a mapping; write a mixture as {_FORM}"
            )
        _check_name(entry.get("name"), number)
        entry["weight"] = _weight(entry.get("weight"), f"dataset_name, entry {number} ({entry['name']})")
    if not any(entry["weight"] for entry in found):
        raise UserError("dataset_name: all weights are 0; give those that are to be trained on a weight above 0")
    return found


def _check_name(name, number: int) -> None:
    if not isinstance(name, str) or not name or name.startswith("["):
        raise UserError(f"dataset_name, entry {number}: name must be that of one data set; write {_FORM}")


def _weight(value, where: str) -> float:
    if value is None:
        raise UserError(f"{where} has no weight; add weight: and a number, in proportion to the other weights")
    try:
        weight = math.nan if isinstance(value, bool) else float(value)  # YAML reads 1e-3 as a string
    except (TypeError, ValueError):
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise UserError(f"{where}: weight is {value!r}; it must be a number of at least 0")
    return weight


def counts_of(found: list[dict]) -> list[int]:
    """How many of each 1,000 sequences come from each entry, by the largest remainders. Raises UserError for a weight
    too small for one of them."""
    total = sum(entry["weight"] for entry in found)
    exact = [BLOCK * entry["weight"] / total for entry in found]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(found)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    for entry, count in zip(found, counts, strict=True):
        if entry["weight"] and not count:
            raise UserError(
                f"dataset_name: weight {entry['weight']:g} of {entry['name']} is too small for even one sequence in "
                f"{BLOCK:,}; raise it, or remove the entry"
            )
    return counts


def counts_in(name: str) -> list[int]:
    """`counts_of` a `dataset_name`; [1000] where it names one data set."""
    found = entries(name)
    return [BLOCK] if found is None else counts_of(found)
