"""The tests of recipe/data."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import DataConfig
from recipe.data.shards import ShardReader, ShardWriter, find_shards
from recipe.data.tokenizer import END_OF_TEXT, encode, encoding
from recipe.utils.shards import UINT16
from tests.conftest import SHAKESPEARE

TEXT = SHAKESPEARE.read_text()
# 300 documents of 2 to 850 characters, two of them odd and two empty
DOCUMENTS = [TEXT[i * 900 : i * 900 + 2 + (i * 37) % 849] for i in range(300)]
DOCUMENTS[7], DOCUMENTS[8], DOCUMENTS[70], DOCUMENTS[71] = "naïve\r\n日本", "a<|endoftext|>b", "", ""


def write_jsonl(path, texts=DOCUMENTS, opener=open):
    with opener(path, "wb") as file:
        for text in texts:
            file.write(json.dumps({"id": 1, "text": text}).encode() + b"\n")
    return path


def write_tokens(path, texts=DOCUMENTS, **options):
    """The texts as a column of GPT-2's tokens, as nvidia/ClimbMix has it; some with end-of-text at one of the ends."""
    rows = [encoding().encode(text, allowed_special="all") for text in texts]
    rows = [[END_OF_TEXT] * (i % 3 == 1) + row + [END_OF_TEXT] * (i % 3 == 2) for i, row in enumerate(rows)]
    table = pa.table({"tokens": rows, "token_count": list(map(len, rows))})
    if path.suffix == ".parquet":
        pq.write_table(table, path, **options)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


def write_shard(path, tokens, dtype=UINT16) -> str:
    """A shard of `tokens`; returns its file's SHA-256."""
    with ShardWriter(path.with_name(f"{path.name}.part"), dtype) as shard:
        shard.append(np.asarray(tokens, dtype))
        return shard.commit(path)


def data_of(text, out, **changes) -> DataConfig:
    return DataConfig(**({"train_text": str(text), "dataset_name": str(out), "val_fraction": 0.1} | changes))


def tokens_in(out, split) -> list[int]:
    return np.concatenate([ShardReader(shard.path).read() for shard in find_shards(str(out), split)]).tolist()


def tokens_of(texts) -> list[int]:
    """Of local texts, in which a literal end-of-text separates documents."""
    documents = [document for text in texts for document in text.split("<|endoftext|>") if document]
    return [token for document in documents for token in [END_OF_TEXT, *encode(document).tolist()]]


def contents(out) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}
