"""The data sets of a run: where their shards lie, and the shares of a mixture, which is a `dataset_name` that lists
data sets with weights."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from recipe.config.catalog import DATASETS, is_on_hub, resolve, short_name
from recipe.config.fields import (
    DEFAULTS,
    FIELDS,
    MIXTURE_PERIOD,
    OF_AN_ENTRY,
    OF_ONE_DATA_SET,
    ROOT,
    DataConfig,
    Entry,
    MixtureEntry,
)
from recipe.config.values import converted
from recipe.utils.errors import UserError

FORM = "write a mixture as [{name: A, weight: 0.7}, {name: B, weight: 0.3}]"
_ENTRY = {field.name: field for field in dataclasses.fields(Entry)} | {name: FIELDS[name] for name in OF_AN_ENTRY}


def data_config(values: dict) -> DataConfig:
    """The data's configuration from the values of its fields, with the directories of shards instead of names;
    `dataset_name` may be a list of dicts (parsed YAML). Raises UserError."""
    listed = values.get("dataset_name")
    if not isinstance(listed, list):
        return _located(DataConfig(**values))
    run = DataConfig(**{name: value for name, value in values.items() if name != "dataset_name"})
    for name in OF_ONE_DATA_SET:
        if getattr(run, name) != DEFAULTS[name]:
            raise UserError(f"{name} applies to one data set, but dataset_name is a list; move it into an entry")
    entries = [_entry(entry, f"dataset_name, entry {number}", run) for number, entry in enumerate(listed, 1)]
    counts = counts_of([weight for weight, _ in entries])
    for (weight, data), count in zip(entries, counts, strict=True):
        if weight and not count:  # its text would not be read
            raise UserError(
                f"dataset_name gives {data.train_text or data.dataset_name} less than one of {MIXTURE_PERIOD:,} "
                f"sequences; raise its weight {weight:g} above "
                f"{sum(weight for weight, _ in entries) / MIXTURE_PERIOD:g}, or make it 0"
            )
    sets: dict[Path, MixtureEntry] = {}
    for number, ((_, data), count) in enumerate(zip(entries, counts, strict=True), 1):
        directory, name = Path(data.dataset_name).resolve(), short_name(data.dataset_name)
        if directory in sets:
            raise UserError(f"dataset_name lists {data.dataset_name} twice; remove one of the two")
        unique = f"{name}-{number}" if name in [one.name for one in sets.values()] else name
        sets[directory] = MixtureEntry(unique, count, data)
    return entries[0][1] if len(entries) == 1 else dataclasses.replace(run, mixture=tuple(sets.values()))


def _entry(entry, where: str, run: DataConfig) -> tuple[float, DataConfig]:
    """The weight of an entry, and its data set with the run's other fields."""
    if not (isinstance(entry, dict) and {"name", "weight"} <= entry.keys()):
        raise UserError(f"{where}, is not a data set with a name and a weight; {FORM}")
    where = f"{where} ({entry['name']}): "
    own = converted(entry, _ENTRY, where)
    weight, name = own.pop("weight"), own.pop("name")
    if "streaming" not in own and not is_on_hub(own.get("train_text") or name) and not own.get("val_documents"):
        own["streaming"] = False  # which is for the others: this one is on this disk
    return weight, _located(dataclasses.replace(run, dataset_name=name, **own))


def _located(data: DataConfig) -> DataConfig:
    if data.train_text and not Path(data.train_text).exists() and (ROOT / data.train_text).exists():
        data = dataclasses.replace(data, train_text=str(ROOT / data.train_text))  # text that ships, from anywhere
    source = DATASETS.get(data.dataset_source, (data.dataset_source,))[0]
    return resolve(dataclasses.replace(data, dataset_source=source))


def counts_of(weights: Sequence[float]) -> list[int]:
    """How many of each 1,000 sequences come from each data set, by the largest remainders. Raises UserError."""
    fractions = [Fraction(str(weight)) for weight in weights]  # as they were written: equal remainders stay equal
    if not (total := sum(fractions)):
        raise UserError(f"dataset_name has no entry with a weight above 0; {FORM}")
    exact = [MIXTURE_PERIOD * fraction / total for fraction in fractions]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: MIXTURE_PERIOD - sum(counts)]:
        counts[i] += 1
    return counts


def counts_in(dataset_name: str | list[dict]) -> list[int]:
    """`counts_of` the `dataset_name` of a flat configuration; [1000] where it names one data set."""
    if isinstance(dataset_name, str):
        return [MIXTURE_PERIOD]
    return [round(MIXTURE_PERIOD * entry["weight"]) for entry in dataset_name]
