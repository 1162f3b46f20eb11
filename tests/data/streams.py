"""Documents, and streams that make the same shards of them as the fixture `prepared` has."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from recipe.config import DataConfig
from recipe.data.dataset import TokenDataset
from recipe.data.shards import find_shards
from recipe.data.stream import BuilderProcess, StreamedDataset, open_manifest
from tests.data import TEXT

T, BATCH = 32, 8
# 600 documents of 2 to 850 characters; every 50th repeats an earlier one, some of them validation documents
DOCUMENTS = [TEXT[i * 900 : i * 900 + 2 + (i * 37) % 849] for i in range(600)]
DOCUMENTS[50::50] = DOCUMENTS[7:18]


def dataset_of(prepared) -> TokenDataset:
    return TokenDataset(find_shards(str(prepared.out), "train"), T, BATCH, seed=1)


@contextmanager
def streaming(data, readers=1, saved_manifest=None, first_step=0):
    """The builder of a stream, and its readers from step `first_step` on."""
    builder = BuilderProcess(data, readers, commit=None, saved_manifest=saved_manifest)
    out, datasets = builder.out, []
    try:
        open_manifest(out)
        datasets += [StreamedDataset(out, T, BATCH, 1, rank=i, first_window=first_step * BATCH) for i in range(readers)]
        yield SimpleNamespace(datasets=datasets, builder=builder, out=out)
    finally:
        for dataset in datasets:
            dataset.close()
        builder.close()


def assert_rows(stream, expected, steps):
    """The first reader's batches of `steps` are the `expected` ones."""
    for step in steps:
        assert np.array_equal(stream.datasets[0].sequences(step, 0, BATCH), expected.sequences(step, 0, BATCH)), step


def budget(prepared, shards) -> float:
    """GB for the validation shard and this many full-sized training shards."""
    val = sum(1024 + 2 * e["tokens"] for e in prepared.manifest.of("val"))
    return (val + shards * (1024 + 2 * 8000)) / 1e9


def config_of(prepared, out, **changes) -> DataConfig:
    """The configuration that streams the same shards into `out`."""
    return dataclasses.replace(prepared.data, dataset_name=str(out), streaming=True, **changes)
