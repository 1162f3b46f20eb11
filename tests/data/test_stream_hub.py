"""Streams from a Hub on this machine that fails now and then: nothing is lost, nothing comes twice."""

import dataclasses
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.data.shards import Manifest
from recipe.errors import UserError
from recipe.log import set_up_logging
from tests.conftest import TINY, flags, metrics, run_train
from tests.data.streams import BATCH, DOCUMENTS, assert_refused, at, budget, local, make_prepared, streaming
from tests.hub import Fault, Hub

README = """---
configs:
- config_name: sample-10BT
  data_files: [{split: train, path: "sample/*.parquet"}]
---
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def hub(prepared, tmp_path, monkeypatch):
    """a/text holds the documents as parquet, a/shards the shards that were prepared from them."""
    root = tmp_path / "hub"
    text, shards = root / "a" / "text", root / "a" / "shards"
    (text / "sample").mkdir(parents=True)
    (text / "README.md").write_text(README)
    for i, lo in enumerate(range(0, len(DOCUMENTS), 200)):
        table = pa.table({"text": DOCUMENTS[lo : lo + 200], "id": range(lo, min(lo + 200, len(DOCUMENTS)))})
        pq.write_table(table, text / "sample" / f"{i:03d}.parquet", row_group_size=50)
    shutil.copytree(prepared.out, shards / "v1")
    with Hub(root) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "1")
        monkeypatch.setenv("HF_TOKEN", "canary-hf-token")
        server.token = "canary-hf-token"
        yield server


def from_hub(prepared, out, **changes):
    return at(prepared, out, **({"train_text": "a/text", "dataset_config": "sample-10BT"} | changes))


def shards_from_hub(prepared, out, **changes):
    return at(prepared, out, train_text="hf://datasets/a/shards/v1/*.bin", **changes)


FAULTS = [
    Fault(path="*.parquet", method="GET", status=429, headers={"Retry-After": "1"}, skip=4),
    Fault(path="*.parquet", method="GET", status=500, skip=2),
    Fault(path="*.parquet", method="GET", kind="reset", after=5000, skip=2),
    Fault(path="*.parquet", method="GET", kind="stall", after=3000, skip=2),
    Fault(path="*/api/datasets/*", status=503, skip=1),  # this one and the next the libraries do not try again
    Fault(path="*/README.md", kind="reset"),
]


def test_text_from_a_hub_that_fails(prepared, hub, tmp_path, capsys):
    hub.faults += [dataclasses.replace(fault) for fault in FAULTS]
    expected = local(prepared)
    set_up_logging()
    data = from_hub(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    with streaming(data) as s:
        for step in range(expected.windows // BATCH):
            assert np.array_equal(s.datasets[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    assert [fault.kind for fault in hub.faults] == []  # all of them happened
    manifest = Manifest.load(tmp_path / "s")
    assert [e["sha256"] for e in manifest.shards] == [
        e["sha256"] for e in prepared.manifest.shards[: len(manifest.shards)]
    ]
    assert manifest.source["commit"] == hub.commit  # pinned
    assert all("/main/" not in r.path for r in hub.requests if ".parquet" in r.path)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^data       train_text a/text: .* trying again in ", printed, re.MULTILINE)) >= 2, printed
    for path in [p for p in (tmp_path / "s").rglob("*") if p.is_file()]:
        assert b"canary" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_resumed_stream_reads_a_row_group_and_not_the_file(prepared, hub, tmp_path):
    expected = local(prepared)
    step = int(expected._starts[6]) // BATCH + 1
    with streaming(from_hub(prepared, tmp_path / "s")) as s:
        s.datasets[0].rows(expected.windows // BATCH - 1, 0, 1)
        earlier = s.datasets[0].state()["manifest"]
    (tmp_path / "s").rename(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "s", ignore=shutil.ignore_patterns("train_*"))
    hub.requests.clear()
    with streaming(from_hub(prepared, tmp_path / "s"), earlier=earlier, first=step, steps=step + 1) as s:
        assert np.array_equal(s.datasets[0].rows(step, 0, 1), expected.rows(step, 0, 1))
    asked = [r for r in hub.requests if r.method == "GET" and r.path.endswith(".parquet")]
    assert len(list((tmp_path / "s").glob("train_*"))) <= 2
    assert len(asked) <= 40, asked


@pytest.mark.slow
def test_shards_from_a_hub_that_fails(prepared, hub, tmp_path):
    hub.faults += [
        Fault(path="*.bin", method="GET", status=429, headers={"Retry-After": "1"}, skip=1),
        Fault(path="*.bin", method="GET", status=500, skip=2),
        Fault(path="*.bin", method="GET", kind="reset", after=9000, skip=3),
        Fault(path="*.bin", method="GET", kind="stall", after=3000, skip=4),
    ]
    expected = local(prepared)
    data = shards_from_hub(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    with streaming(data) as s:
        for step in range(int(1.5 * expected.windows) // BATCH):
            assert np.array_equal(s.datasets[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    assert hub.faults == []
    manifest = Manifest.load(tmp_path / "s")
    assert [e["sha256"] for e in manifest.of("train")] == [e["sha256"] for e in prepared.manifest.of("train")]
    assert manifest.source == {"uri": data.train_text, "commit": hub.commit}


def test_a_shard_that_comes_changed_is_refused(prepared, hub, tmp_path, monkeypatch):
    data = shards_from_hub(prepared, tmp_path / "s")
    with streaming(data) as s:
        s.datasets[0].rows(0, 0, BATCH)
    path = hub.root / "a" / "shards" / "v1" / "train_000001.bin"
    content = bytearray(path.read_bytes())
    content[3000] ^= 1
    path.write_bytes(content)
    (tmp_path / "s" / "train_000001.bin").unlink(missing_ok=True)
    with (
        pytest.raises(UserError, match=r"train_000001\.bin came with SHA-256 .* not "),
        streaming(data) as s,
    ):
        s.datasets[0].rows(5, 0, BATCH)


def test_what_the_hub_does_not_have_is_an_error_at_once(prepared, hub, tmp_path):
    (hub.root / "a" / "script").mkdir()
    (hub.root / "a" / "script" / "script.py").write_text("import os\n")
    cases = {
        "none": ({"train_text": "a/none"}, r"train_text a/none: .*the Hub reports .*RepositoryNotFound"),
        "config": ({"dataset_config": "sample-1BT"}, r"train_text a/text: .*sample-1BT.*(?s:.*)check the name"),
        "revision": ({"dataset_revision": "v9"}, r"train_text a/text: .*the Hub reports .*RevisionNotFound"),
        "column": ({"text_column": "body"}, "a/text: no column 'body'; there are: text, id"),
        "script": ({"train_text": "a/script"}, r"train_text a/script: this data set is a script .* refused"),
        "pattern": ({"train_text": "hf://datasets/a/shards/v2/*.bin"}, r"no file of the data set matches v2/\*\.bin"),
        "val": ({"train_text": "hf://datasets/a/shards/v1/val*.bin"}, "only validation files match"),
        "form": ({"train_text": "hf://datasets/shards"}, "expected hf://datasets/ORG/NAME/PATTERN"),
    }
    data = {}
    for name, (changes, _) in cases.items():
        config = {"dataset_config": ""} if "train_text" in changes else {}
        data[name] = from_hub(prepared, tmp_path / name, **(config | changes))
    assert_refused({name: (data[name], message) for name, (_, message) in cases.items()})


@pytest.mark.slow
def test_without_a_token(prepared, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-wrong")
    with (
        pytest.raises(UserError, match=r"train_text a/text: .*401") as error,
        streaming(from_hub(prepared, tmp_path / "s")),
    ):
        pass
    assert "canary" not in str(error.value)
    assert "canary" not in (tmp_path / "s" / ".builder.log").read_text()


def losses(run):
    return [(line["step"], line["loss"], line["val_loss"], line["grad_norm"]) for line in metrics(run)]


@pytest.mark.slow
def test_training_does_not_notice(prepared, hub, tmp_path):
    """The run on prepared shards, and the same streamed from a failing Hub within a small budget, stopped in the middle
    of a shard, which is deleted, and resumed with two processes on an emptied disk, and with downloaded shards."""
    stop, steps = 24, 48
    tiny = TINY | {"total_batch_tokens": 512, "max_steps": steps, "save_steps": stop, "eval_steps": stop}
    hub.faults += [dataclasses.replace(fault) for fault in FAULTS]
    env = {name: os.environ[name] for name in (*hub.environment, "HF_HUB_DOWNLOAD_TIMEOUT", "HF_TOKEN")}

    def train(run, processes=1, **fields):
        settings = tiny | {"output_dir": tmp_path / run} | fields
        result = run_train(*flags(**settings), processes=processes, env=env)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    sizes = {"val_documents": 20, "shard_tokens": 8000, "first_shard_tokens": 1000}
    text = sizes | {
        "train_text": "a/text",
        "dataset_config": "sample-10BT",
        "streaming": "true",
        "disk_budget_gb": budget(prepared, 2),
    }
    train("prepared", dataset_name=prepared.out, train_text=prepared.text, **sizes)
    expected = losses(tmp_path / "prepared")
    output = train("streamed", dataset_name=tmp_path / "s", **text)
    assert "data       streaming a/text sample-10BT into" in output
    assert losses(tmp_path / "streamed") == expected
    assert not (tmp_path / "s" / "train_000000.bin").exists()  # passed, and gone
    downloaded = {
        "dataset_name": tmp_path / "d",
        "train_text": "hf://datasets/a/shards/v1/*.bin",
        "disk_budget_gb": budget(prepared, 3),
    }
    for name, processes, data in (("two", 2, text | {"dataset_name": tmp_path / "e"}), ("downloaded", 1, downloaded)):
        shutil.copytree(tmp_path / "streamed", tmp_path / name)
        shutil.rmtree(tmp_path / name / f"step_{steps:08d}")
        output = train(name, processes, **data)
        assert f"resume     from step {stop}" in output
        if processes == 1:
            assert losses(tmp_path / name) == expected
        for a, b in zip(losses(tmp_path / name), expected, strict=True):
            assert a[0] == b[0]
            assert a[1:] == pytest.approx(b[1:], abs=1e-5)
    assert not (tmp_path / "e" / "train_000000.bin").exists()  # only what was needed was built
    for path in [p for p in tmp_path.rglob("*") if p.is_file() and hub.root not in p.parents]:
        assert b"canary" not in path.read_bytes(), path


@pytest.mark.slow
def test_7_a_training_shard_that_is_a_validation_shard(prepared, hub, tmp_path):
    same = hub.root / "a" / "same"
    same.mkdir()
    for name in ("a_train_0.bin", "a_val_0.bin"):
        shutil.copy(prepared.out / "train_000003.bin", same / name)
    env = {name: os.environ[name] for name in (*hub.environment, "HF_TOKEN")}
    settings = TINY | {
        "dataset_name": tmp_path / "s",
        "train_text": "hf://datasets/a/same/*.bin",
        "output_dir": tmp_path / "run",
    }
    result = run_train(*flags(**settings), env=env)
    assert result.returncode == 2
    assert re.search(
        r"^error: .*a_train_0\.bin \(training\) and .*a_val_0\.bin \(validation\) hold", result.stderr, re.M
    )
    assert "Traceback" not in result.stderr
