"""Streams from a Hub that fails at times: no document is lost or read twice."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data.shards import Manifest
from tests.conftest import ROOT, recorded, train
from tests.data import write_tokens
from tests.data.streams import BATCH, DOCUMENTS, assert_rows, budget, config_of, dataset_of, streaming
from tests.hub import Fault, Hub

README = """---
configs:
- config_name: sample-10BT
  data_files: [{split: train, path: "sample/*"}]
---
"""
TOKEN = "canary-hf-token"


@pytest.fixture
def hub(prepared, tmp_path):
    """a/text holds the documents as parquet, a/tokens their tokens as compressed JSON lines."""
    root = tmp_path / "hub"
    text, tokens = root / "a" / "text", root / "a" / "tokens"
    for directory in (text, tokens):
        (directory / "sample").mkdir(parents=True)
        (directory / "README.md").write_text(README)
    for i, lo in enumerate(range(0, len(DOCUMENTS), 200)):
        documents = DOCUMENTS[lo : lo + 200]
        table = pa.table({"text": documents, "id": range(lo, lo + len(documents))})
        pq.write_table(table, text / "sample" / f"{i:03d}.parquet", row_group_size=50)
        lines = write_tokens(tmp_path / "lines.jsonl", documents).read_bytes()
        (tokens / "sample" / f"{i:03d}.jsonl.zst").write_bytes(pa.compress(lines, "zstd", asbytes=True))
    with Hub(root) as server:
        server.token = TOKEN
        yield server


@pytest.fixture
def at_the_hub(hub, monkeypatch):
    """The environment in which child processes read from the Hub."""
    for name, value in (hub.environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_TOKEN": TOKEN}).items():
        monkeypatch.setenv(name, value)


def from_hub(prepared, out, **changes):
    return config_of(prepared, out, **({"train_text": "a/text", "dataset_config": "sample-10BT"} | changes))


FAILURES = [
    {"status": 429, "headers": {"Retry-After": "1"}},
    {"status": 500, "skip": 2},
    {"kind": "reset", "after": 5000, "skip": 2},
    {"kind": "stall", "after": 3000, "skip": 2},
    {"status": 409, "skip": 1},  # the libraries do not retry it
]


def assert_streamed(data, expected, epochs, first_step=0):
    with streaming(data, first_step=first_step) as s:
        assert_rows(s, expected, range(first_step, int(epochs * expected.windows) // BATCH))


@pytest.mark.parametrize(
    ("name", "column", "failures"), [("a/text", "text", FAILURES), ("a/tokens", "tokens", FAILURES[:2])]
)
def test_a_stream_survives_a_hub_that_fails(prepared, hub, at_the_hub, tmp_path, capfd, name, column, failures):
    """The faults begin after the first file; halfway, the stream is stopped and resumed."""
    hub.faults += [Fault(path="*/00[12].*", method="GET", **failure) for failure in failures]
    data = from_hub(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3), train_text=name, text_column=column)
    expected = dataset_of(prepared)
    middle = int(0.5 * expected.windows) // BATCH
    assert_streamed(data, expected, 0.5)
    assert_streamed(data, expected, 1, first_step=middle)
    assert [fault.kind for fault in hub.faults] == []  # each of them happened
    manifest = Manifest.load(tmp_path / "s")
    shas = [e["sha256"] for e in prepared.manifest.shards]
    assert [e["sha256"] for e in manifest.shards] == shas[: len(manifest.shards)]
    assert manifest.source["commit"] == hub.commit  # pinned
    assert all("/main/" not in path for _, path in hub.requests if "/sample/" in path)
    printed = capfd.readouterr()
    if name == "a/text":  # the others are retried by huggingface_hub
        assert re.search(r"^data       a/text: .* trying again in ", printed.out, re.MULTILINE)
    assert "canary" not in printed.out + printed.err
    for path in (path for path in (tmp_path / "s").rglob("*") if path.is_file()):
        assert b"canary" not in path.read_bytes(), path


REFUSE = """
import json, sys
from pathlib import Path
from recipe.config import DataConfig
from recipe.data.builder import Builder
from recipe.utils.errors import UserError

def refused(fields):
    Path(fields["dataset_name"]).mkdir()
    try:
        Builder(DataConfig(**fields), 1).run(None, None)
    except UserError as error:
        return f"{type(error).__name__}: {error}"

print(json.dumps([refused(fields) for fields in json.loads(sys.argv[1])]))
"""


def test_what_the_hub_does_not_have_is_an_error_without_a_retry(prepared, hub, at_the_hub, tmp_path):
    (hub.root / "a" / "script").mkdir()
    (hub.root / "a" / "script" / "script.py").write_text("import os\n")
    for name in ("en", "de"):
        shutil.copytree(hub.root / "a" / "text" / "sample", hub.root / "a" / "several" / name)
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/*\n" for name in ("en", "de"))
    (hub.root / "a" / "several" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    shutil.copytree(hub.root / "a" / "several" / "en", hub.root / "a" / "converted" / "en" / "train")
    shutil.copytree(hub.root / "a" / "several" / "de", hub.root / "a" / "converted" / "de" / "train")
    converted = {"train_text": "a/converted", "dataset_revision": "refs/convert/parquet"}
    choose = "^UserError: data set a/converted, refs/convert/parquet: choose a subset with --dataset_config: de, en$"
    cases = [
        (converted, choose),
        (converted | {"dataset_config": "fr"}, choose),
        ({"train_text": "a/several"}, r"data set a/several: .*\['en', 'de'\].*; check the name, --dataset_config, "),
        ({"train_text": "a/none"}, r"^UserError: data set a/none: .*the Hub reports .*RepositoryNotFound"),
        ({"dataset_config": "sample-1BT"}, r"data set a/text: .*sample-1BT.*(?s:.*)check the name"),
        ({"dataset_revision": "v9"}, r"data set a/text: .*the Hub reports .*RevisionNotFound"),
        ({"text_column": "body"}, "a/text: no column 'body'; there are: text, id"),
        ({"train_text": "a/script"}, r"data set a/script: .* scripts are .*: --dataset_revision refs/convert/parquet$"),
        ({"train_text": "a/tokens"}, r"^UserError: data set a/tokens: .*Invalid credentials"),
        ({"train_text": "a/gated"}, r"^UserError: data set a/gated: "),
    ]
    expired = {"status": 401, "headers": {"X-Error-Message": "Invalid credentials in Authorization header"}}
    hub.faults.append(Fault(path="*/a/tokens*", **expired, times=1000))
    hub.faults.append(Fault(path="*/a/gated*", status=403, times=1000))
    data = [
        from_hub(prepared, tmp_path / str(i), **({"dataset_config": ""} if "train_text" in changes else {}) | changes)
        for i, (changes, _) in enumerate(cases)
    ]
    command = [sys.executable, "-c", REFUSE, json.dumps([dataclasses.asdict(fields) for fields in data])]
    errors = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout
    for error, (_, message) in zip(json.loads(errors), cases, strict=True):
        assert re.search(message, error), error
        assert "canary" not in error


def test_of_a_script_that_the_hub_has_converted_one_subset_is_read(prepared, hub, at_the_hub, tmp_path):
    """Not all of them, one after the other: the converted copy has no README.md."""
    shutil.copytree(hub.root / "a" / "text" / "sample", hub.root / "a" / "converted" / "en" / "train")
    (german := hub.root / "a" / "converted" / "de" / "train").mkdir(parents=True)
    pq.write_table(pa.table({"text": ["Deutsch"] * 20}), german / "0000.parquet")
    changes = {"dataset_config": "en", "dataset_revision": "refs/convert/parquet"}
    data = from_hub(prepared, tmp_path / "s", train_text="a/converted", **changes)
    assert_streamed(data, dataset_of(prepared), 0.5)


@pytest.mark.slow
def test_a_streamed_run_has_the_losses_of_a_run_on_prepared_shards(prepared, tmp_path):
    """Also if it is stopped in the middle of a shard and resumed with two processes on an empty disk."""
    stop, steps = 12, 24
    tiny = {"total_batch_tokens": 256, "max_steps": steps, "save_steps": stop, "eval_steps": stop}
    sizes = {"val_documents": 20, "shard_tokens": 8000}
    streamed = sizes | {"train_text": prepared.text, "streaming": "true", "disk_budget_gb": budget(prepared, 2)}

    train(prepared.out, tmp_path / "prepared", train_text=prepared.text, **tiny, **sizes)
    assert "data       streaming" in train(tmp_path / "s", tmp_path / "streamed", **tiny, **streamed)[1]
    columns = ("loss", "val_loss", "grad_norm")
    expected = recorded(tmp_path / "prepared", *columns)
    assert recorded(tmp_path / "streamed", *columns) == expected
    shutil.rmtree(tmp_path / "streamed" / f"step_{steps:08d}")
    _, output = train(tmp_path / "e", tmp_path / "streamed", processes=2, **tiny, **streamed)
    assert f"resume     from step {stop}" in output
    for line, expected_line in zip(recorded(tmp_path / "streamed", *columns), expected, strict=True):
        assert line == (expected_line[0], *(pytest.approx(number, abs=1e-5) for number in expected_line[1:]))
    for directory in ("s", "e"):  # deleted once it was passed, or never made
        assert not (tmp_path / directory / "train_000000.bin").exists()
