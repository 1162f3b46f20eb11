"""The data sets of a run: where their shards lie, and the shares of a mixture, a `dataset_name` that is a list of data
sets with weights."""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from recipe.config.catalog import DATASETS, is_on_hub, resolve, short_name
from recipe.config.fields import (
    DATA_SET_FIELDS,
    DEFAULTS,
    ENTRY_FIELDS,
    FIELDS,
    MIXTURE_PERIOD,
    ROOT,
    DataConfig,
    Entry,
    MixtureEntry,
)
from recipe.config.values import converted
from recipe.utils.errors import UserError

SYNTAX = "write a mixture as [{name: A, weight: 0.7}, {name: B, weight: 0.3}]"
_ENTRY = {field.name: field for field in dataclasses.fields(Entry)} | {name: FIELDS[name] for name in ENTRY_FIELDS}


def data_config(values: dict) -> DataConfig:
    """The DataConfig of these values of its fields, with names resolved to the directories of their shards;
    `dataset_name` may be a list of dicts (parsed YAML). Raises UserError."""
    dataset_name = values.get("dataset_name")
    if not isinstance(dataset_name, list):
        return _located(DataConfig(**values))
    run = DataConfig(**{name: value for name, value in values.items() if name != "dataset_name"})
    for name in DATA_SET_FIELDS:
        if getattr(run, name) != DEFAULTS[name]:
            raise UserError(f"{name} applies to one data set, but dataset_name is a list; move it into an entry")
    entries = [_entry(entry, f"dataset_name, entry {number}", run) for number, entry in enumerate(dataset_name, 1)]
    total = sum(weight for weight, _ in entries)
    mixture: dict[Path, MixtureEntry] = {}
    for (weight, data), count in zip(entries, counts_of([weight for weight, _ in entries]), strict=True):
        if weight and not count:  # none of its text would be read
            raise UserError(
                f"dataset_name gives {data.train_text or data.dataset_name} less than one of {MIXTURE_PERIOD:,} "
                f"sequences; raise its weight {weight:g} above {total / MIXTURE_PERIOD:g}, or make it 0"
            )
        directory, name = Path(data.dataset_name).resolve(), short_name(data.dataset_name)
        if directory in mixture:
            raise UserError(f"dataset_name lists {data.dataset_name} twice; remove one of the two")
        unique_name = f"{name}-{len(mixture) + 1}" if name in [entry.name for entry in mixture.values()] else name
        mixture[directory] = MixtureEntry(unique_name, count, data)
    return entries[0][1] if len(entries) == 1 else dataclasses.replace(run, mixture=tuple(mixture.values()))


def _entry(entry, origin: str, run: DataConfig) -> tuple[float, DataConfig]:
    """The weight of an entry, and its DataConfig, which has the run's values for the other fields."""
    if not (isinstance(entry, dict) and {"name", "weight"} <= entry.keys()):
        raise UserError(f"{origin}, is not a data set with a name and a weight; {SYNTAX}")
    values = converted(entry, _ENTRY, f"{origin} ({entry['name']}): ")
    weight, name = values.pop("weight"), values.pop("name")
    is_local = not is_on_hub(values.get("train_text") or name)
    if is_local and "streaming" not in values and not values.get("val_documents"):
        values["streaming"] = False  # the run's value is for the data sets on the Hub
    return weight, _located(dataclasses.replace(run, dataset_name=name, **values))


def _located(data: DataConfig) -> DataConfig:
    if data.train_text and not Path(data.train_text).exists() and (ROOT / data.train_text).exists():
        data = dataclasses.replace(data, train_text=str(ROOT / data.train_text))  # text in the repository
    source = DATASETS.get(data.dataset_source, (data.dataset_source,))[0]
    return resolve(dataclasses.replace(data, dataset_source=source))


def counts_of(weights: Sequence[float]) -> list[int]:
    """How many of each 1,000 sequences come from each data set, by the largest-remainder method. Raises UserError."""
    fractions = [Fraction(str(weight)) for weight in weights]  # exact decimals, so that equal remainders stay equal
    if not (total := sum(fractions)):
        raise UserError(f"dataset_name has no entry with a weight above 0; {SYNTAX}")
    exact = [MIXTURE_PERIOD * fraction / total for fraction in fractions]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: MIXTURE_PERIOD - sum(counts)]:
        counts[i] += 1
    return counts


def entries_in(data: dict) -> list[dict]:
    """The data sets in a section of trainer_state.json: those of a mixture, or the only one."""
    return data.get("mixture") or [data]


def counts_in(dataset_name: str | list[dict]) -> list[int]:
    """`counts_of` the `dataset_name` of a flat configuration; [1000] if it names one data set."""
    if isinstance(dataset_name, str):
        return [MIXTURE_PERIOD]
    return [round(MIXTURE_PERIOD * entry["weight"]) for entry in dataset_name]
