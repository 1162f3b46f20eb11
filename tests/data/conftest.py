"""Prepared shards, to which the tests of streams compare."""

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.config import DataConfig
from recipe.data.prepare import prepare
from tests.data.streams import DOCUMENTS, T


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> SimpleNamespace:
    """The shards that `prepare` makes of DOCUMENTS; `data` is its configuration."""
    directory = tmp_path_factory.mktemp("prepared")
    text, out = directory / "d.parquet", directory / "out"
    pq.write_table(pa.table({"text": DOCUMENTS}), text, row_group_size=60)
    sizes = {"val_documents": 20, "shard_tokens": 8000, "sequence_length": T}
    data = DataConfig(dataset_name=str(out), train_text=str(text), **sizes)
    return SimpleNamespace(data=data, manifest=prepare(data), text=text, out=out)
