"""A text of documents, its prepared shards, and streams that make the same ones."""

import dataclasses
from contextlib import contextmanager
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import DataConfig
from recipe.data.dataset import TokenDataset
from recipe.data.prepare import prepare
from recipe.data.shards import find_shards
from recipe.data.stream import BuilderProcess, StreamedDataset, open_manifest
from tests.data import TEXT

T, BATCH = 32, 8
# 600 documents of 2 to 850 characters; every 50th has the text of an earlier one, of a validation document among them
DOCUMENTS = [TEXT[i * 900 : i * 900 + 2 + (i * 37) % 849] for i in range(600)]
DOCUMENTS[50::50] = DOCUMENTS[7:18]


def make_prepared(directory) -> SimpleNamespace:
    """The shards as `prepare` makes them: `data` is the configuration that streams the same."""
    text = directory / "d.parquet"
    pq.write_table(pa.table({"text": DOCUMENTS}), text, row_group_size=60)
    data = DataConfig(
        dataset_name=str(directory / "out"),
        train_text=str(text),
        val_documents=20,
        shard_tokens=8000,
        sequence_length=T,
    )
    return SimpleNamespace(data=data, manifest=prepare(data), text=text, out=directory / "out")


def local(prepared) -> TokenDataset:
    return TokenDataset(find_shards(str(prepared.out), "train"), T, BATCH, seed=1)


@contextmanager
def streaming(data, readers=1, earlier=None, first=0):
    """Readers of a stream, from step `first` on, and its builder."""
    builder = BuilderProcess(data, readers, commit=None, earlier=earlier)
    out, datasets = builder.out, []
    try:
        open_manifest(out)
        datasets += [StreamedDataset(out, T, BATCH, 1, rank=rank, first=first * BATCH) for rank in range(readers)]
        yield SimpleNamespace(datasets=datasets, builder=builder, out=out)
    finally:
        for dataset in datasets:
            dataset.close()
        builder.close()


def budget(prepared, shards) -> float:
    """GB for the validation shard and so many training shards of full size."""
    val = sum(1024 + 2 * e["tokens"] for e in prepared.manifest.of("val"))
    return (val + shards * (1024 + 2 * 8000)) / 1e9


def at(prepared, out, **changes) -> DataConfig:
    return dataclasses.replace(prepared.data, dataset_name=str(out), streaming=True, **changes)
