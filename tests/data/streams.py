"""A text of documents, its prepared shards, and streams that make the same ones."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config import DataConfig
from recipe.data.dataset import TokenDataset
from recipe.data.prepare.pipeline import prepare
from recipe.data.shards import Manifest, find_shards
from recipe.data.streaming.status import STATUS, read_json
from recipe.data.streaming.stream import BuilderProcess, StreamedDataset, Waiting
from recipe.errors import UserError
from tests.conftest import ROOT
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
        first_shard_tokens=1000,
        sequence_length=T,
    )
    return SimpleNamespace(data=data, manifest=prepare(data), text=text, out=directory / "out")


def local(prepared) -> TokenDataset:
    return TokenDataset(find_shards(str(prepared.out), "train"), T, BATCH, seed=1)


@contextmanager
def streaming(data, readers=1, earlier=None, first=0, steps=10_000, batch=BATCH):
    """Readers of a stream, and its builder."""
    builder = BuilderProcess(data, readers, windows=steps * batch, commit=None, earlier=earlier)
    out, datasets = builder.out, []
    try:
        waiting = Waiting(out)
        waiting.until(lambda: read_json(out / STATUS).get("opened"), "the validation shards")
        waiting.until(lambda: Manifest.load(out).of("train"), "the first shard")
        datasets += [StreamedDataset(out, T, batch, 1, rank=rank, first=first * batch) for rank in range(readers)]
        yield SimpleNamespace(datasets=datasets, builder=builder, out=out)
    finally:
        for dataset in datasets:
            dataset.close()
        builder.close()


def budget(prepared, shards) -> float:
    """GB for the validation shard and so many training shards of full size."""
    val = sum(1024 + 2 * e["tokens"] for e in prepared.manifest.of("val"))
    return (val + shards * (1024 + 2 * 8000) + 50_000) / 1e9


def at(prepared, out, **changes) -> DataConfig:
    return dataclasses.replace(prepared.data, dataset_name=str(out), streaming=True, **changes)


def pid_of(out) -> int:
    """Of the builder; of the next one, where it has just died."""
    return Waiting(out).until(lambda: read_json(out / STATUS).get("pid"), "the builder")


def kill_builder(out) -> bool:
    """False where it is dead already, and its successor has not written its status yet."""
    with suppress(ProcessLookupError):
        os.kill(pid_of(out), signal.SIGKILL)
        return True
    return False


def assert_refused(cases: dict) -> None:
    """{name: (data, message)}: the builder of each ends with that error. One process is enough for all of them."""
    jobs = {}
    for name, (data, _) in cases.items():
        Path(data.dataset_name).mkdir(exist_ok=True)
        job = {"data": dataclasses.asdict(data), "readers": 1, "windows": 9, "commit": None, "earlier": None}
        jobs[name] = job | {"budget": int(data.disk_budget_gb * 1e9)}
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tests.data.streams import refuse; refuse(sys.argv[2])"
    command = [sys.executable, "-c", code, str(ROOT), json.dumps(jobs)]
    errors = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True).stdout)
    for name, (_, message) in cases.items():
        assert re.search(message, errors[name]), errors[name]


def refuse(jobs: str) -> None:
    """Prints the builder's error for each of the jobs, as JSON."""
    from recipe.data.streaming.builder import Builder
    from recipe.data.streaming.status import Status

    errors = {}
    for name, job in json.loads(jobs).items():
        try:
            Builder(job, Status(Path(job["data"]["dataset_name"]))).run()
        except UserError as error:
            errors[name] = str(error)
    print(json.dumps(errors))
