"""The data sets of a run: where their shards lie, and the shares of a mixture, which is a `dataset_name` that lists
data sets with weights."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from recipe.config.catalog import DATASETS, resolve, short_name
from recipe.config.fields import BLOCK, DEFAULTS, OF_AN_ENTRY, OF_ONE_DATA_SET, ROOT, DataConfig, DataSet
from recipe.config.values import converted
from recipe.utils.errors import UserError

FORM = "write a mixture as [{name: A, weight: 0.7}, {name: B, weight: 0.3}]"


@dataclass(frozen=True)
class _Entry:
    """One of a mixture: the words for messages, how often it is read, and its data set with the run's other fields."""

    where: str
    weight: float
    data: DataConfig


def data_config(values: dict) -> DataConfig:
    """The data's configuration from the values of its fields, with the directories of shards instead of names;
    `dataset_name` may be a list of mappings, as YAML has made them. Raises UserError."""
    listed = values.get("dataset_name")
    if not isinstance(listed, list):
        return _located(DataConfig(**values))
    run = DataConfig(**values | {"dataset_name": ""})
    entries = [_entry(entry, f"dataset_name, entry {number}", run) for number, entry in enumerate(listed, 1)]
    if not entries:
        raise UserError(f"dataset_name is an empty list; {FORM}")
    counts = counts_of([entry.weight for entry in entries])
    for entry, count in zip(entries, counts, strict=True):
        if entry.weight and not count:
            raise UserError(
                f"{entry.where}: weight {entry.weight:g} is too small for even one sequence in {BLOCK:,}; raise it, or "
                "remove the entry"
            )
    if len(entries) == 1:
        return entries[0].data
    for name in OF_ONE_DATA_SET[1:]:
        if getattr(run, name) != DEFAULTS[name]:
            raise UserError(
                f"{name} applies to one data set, but dataset_name lists {len(entries)}; move it into an entry"
            )
    return dataclasses.replace(run, mixture=tuple(_named(entries, counts)))


def _entry(entry, where: str, run: DataConfig) -> _Entry:
    if not isinstance(entry, dict):
        raise UserError(f"{where}, is a {type(entry).__name__}, not a mapping; {FORM}")
    name = entry.get("name")
    if not isinstance(name, str) or not name or name.startswith("["):
        raise UserError(f"{where}: name must be that of one data set; {FORM}")
    where = f"{where} ({name})"
    own = {key: value for key, value in entry.items() if key not in ("name", "weight")}
    values = converted({"dataset_name": name}, ["dataset_name"]) | converted(own, OF_AN_ENTRY, f"{where}: ")
    try:
        return _Entry(where, _weight(entry.get("weight")), _located(dataclasses.replace(run, **values)))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def _weight(value) -> float:
    if value is None:
        raise UserError("it has no weight; add weight: and a number, in proportion to the other weights")
    try:
        weight = math.nan if isinstance(value, bool) else float(value)  # YAML reads 1e-3 as a string
    except (TypeError, ValueError):
        weight = math.nan
    if not (math.isfinite(weight) and weight >= 0):
        raise UserError(f"weight is {value!r}; it must be a number of at least 0")
    return weight


def _named(entries: list[_Entry], counts: list[int]) -> list[DataSet]:
    sets: list[DataSet] = []
    for number, (entry, count) in enumerate(zip(entries, counts, strict=True), 1):
        directory = entry.data.dataset_name
        if Path(directory).resolve() in [Path(one.data.dataset_name).resolve() for one in sets]:
            raise UserError(
                f"dataset_name lists {directory} twice; remove one of the two, and give the other their weight"
            )
        name = short_name(directory)
        unique = f"{name}-{number}" if name in [one.name for one in sets] else name
        sets.append(DataSet(unique, count, entry.data))
    return sets


def _located(data: DataConfig) -> DataConfig:
    if data.train_text and not Path(data.train_text).exists() and (ROOT / data.train_text).exists():
        data = dataclasses.replace(data, train_text=str(ROOT / data.train_text))  # text that ships, from anywhere
    source = DATASETS.get(data.dataset_source, (data.dataset_source,))[0]
    return resolve(dataclasses.replace(data, dataset_source=source))


def counts_of(weights: list[float]) -> list[int]:
    """How many of each 1,000 sequences come from each data set, by the largest remainders. Raises UserError where all
    weights are 0."""
    if not (total := sum(weights)):
        raise UserError("dataset_name: all weights are 0; give those that are to be trained on a weight above 0")
    exact = [BLOCK * weight / total for weight in weights]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: BLOCK - sum(counts)]:
        counts[i] += 1
    return counts


def counts_in(dataset_name: str | list[dict]) -> list[int]:
    """`counts_of` the `dataset_name` of a flat configuration; [1000] where it names one data set."""
    if isinstance(dataset_name, str):
        return [BLOCK]
    return [round(BLOCK * entry["weight"]) for entry in dataset_name]
