"""Streamed shards: the same bytes as prepared ones, within the disk budget, whatever happens to the builder."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

from recipe.data.builder import Builder
from recipe.data.producer import Producer
from recipe.data.shards import Manifest, find_shards
from recipe.data.stream import BuilderProcess, open_manifest
from recipe.utils.errors import UserError
from tests.checkpoint import change_state
from tests.conftest import ROOT, TINY, flags, ok, run_train
from tests.data.streams import BATCH, assert_rows, at, budget, local, streaming


def test_streamed_is_prepared_within_the_budget(prepared, tmp_path):
    """Two epochs and a half through room for three shards: the same manifest, the same batches."""
    counts = [e["tokens"] for e in prepared.manifest.of("train")]
    assert counts[:5] == [800, 1600, 3200, 6400, 8000]  # the first is there soon, and each gives time for the next
    assert set(counts[4:-1]) == {8000}
    assert len(counts) >= 8
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    expected, most, done = local(prepared), [0], threading.Event()

    def watch():
        while not done.wait(0.01):
            with suppress(FileNotFoundError):
                most[0] = max(most[0], sum(p.stat().st_size for p in data_files(tmp_path / "s")))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with streaming(data) as s:
        assert_rows(s, expected, range(int(2.5 * expected.windows / BATCH)))
        if os.path.exists("/proc/self/fd"):  # what is deleted must not be held open
            links = [os.path.join("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
            held = [os.readlink(link) for link in links if os.path.lexists(link)]
            assert not [file for file in held if str(s.out) in file and "(deleted)" in file]
        done.set()
        watcher.join()
        assert s.datasets[0].state_dict()["shards"] == expected.state_dict()["shards"]
        here = [path.name for path in s.out.glob("*.bin")]
    assert Manifest.load(tmp_path / "s") == Manifest.load(prepared.out)
    assert 0 < most[0] <= data.disk_budget_gb * 1e9
    assert len(here) < len(prepared.manifest.shards)  # it had to delete some
    for name in here:
        assert (tmp_path / "s" / name).read_bytes() == (prepared.out / name).read_bytes()
    with pytest.raises(UserError, match=r"gone; a streamed run deletes what it has read: .*--streaming"):
        find_shards(str(tmp_path / "s"), "train")


def data_files(out):
    return [*out.glob("*.bin"), *out.glob("*.part")]


def test_a_resumed_stream_builds_only_what_it_needs(prepared, tmp_path):
    """On the same disk; and on another one, from what the checkpoint keeps."""
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 4))
    expected = local(prepared)
    middle = int(expected.starts[5] + expected.starts[6]) // 2 // BATCH  # a step in the middle of shard 5
    with streaming(data) as s:
        assert_rows(s, expected, range(middle + 1))
        state = s.datasets[0].state_dict()
    (tmp_path / "s" / "train_000005.bin").unlink()
    for out, saved_manifest in ((tmp_path / "s", None), (tmp_path / "other", state["manifest"])):
        there = dataclasses.replace(data, dataset_name=str(out))
        with streaming(there, saved_manifest=saved_manifest, first=middle) as s:
            assert_rows(s, expected, range(middle, middle + 3))
    made = sorted(path.name for path in (tmp_path / "other").glob("*.bin"))
    assert made[0] == "train_000005.bin"
    assert (tmp_path / "other" / "val_000000.bin").read_bytes() == (prepared.out / "val_000000.bin").read_bytes()


def test_a_shard_stays_until_every_reader_has_passed_it(prepared, tmp_path):
    expected = local(prepared)
    with streaming(at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), readers=2) as s:
        fast, slow = s.datasets
        slow.sequences(0, 0, 1)
        for step in range(int(expected.starts[3]) // BATCH):
            fast.sequences(step, 0, BATCH // 2)
        reached = threading.Event()
        far = int(expected.starts[7]) // BATCH
        thread = threading.Thread(target=lambda: (fast.sequences(far, 0, BATCH // 2), reached.set()), daemon=True)
        thread.start()
        assert not reached.wait(1)  # there is no room for what it wants while the other is at the first shard
        assert (s.out / "train_000000.bin").exists()
        for step in range(far):
            rows = slow.sequences(step, BATCH // 2, BATCH)
            assert np.array_equal(rows, expected.sequences(step, BATCH // 2, BATCH))
        assert reached.wait(60)
        thread.join()


def test_a_builder_that_dies_ends_the_run_which_can_be_resumed(prepared, tmp_path):
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))
    expected = local(prepared)
    last = expected.windows // BATCH - 1
    with streaming(data) as s:
        assert_rows(s, expected, range(30))
        s.builder.process.kill()
        with pytest.raises(UserError, match=r"that makes the shards in .*s died \(exit code -9\); the same"):
            assert_rows(s, expected, range(30, last))
    with streaming(data, first=30) as s:
        assert_rows(s, expected, range(30, last))


def test_a_second_run_that_streams_into_the_directory_is_refused_and_the_first_goes_on(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("recipe.data.stream.LOCK_TIMEOUT_S", 0.2)
    data, expected = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), local(prepared)
    with streaming(data) as s:
        assert_rows(s, expected, range(2))
        with pytest.raises(UserError, match="another process is making shards in this directory"):
            BuilderProcess(data, 1, commit=None, saved_manifest=None)
        assert_rows(s, expected, range(2, expected.windows // BATCH))


def test_a_builder_ends_with_the_process_that_started_it(prepared, tmp_path):
    data, out = at(prepared, tmp_path / "s"), tmp_path / "s"
    command = [sys.executable, "-c", STARTS, json.dumps(dataclasses.asdict(data))]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    builder = int(child.stdout.readline())
    open_manifest(out)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 30
    while alive(builder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


STARTS = """
import json, sys, time
from recipe.config import DataConfig
from recipe.data.stream import BuilderProcess

data = DataConfig(**json.loads(sys.argv[1]))
print(BuilderProcess(data, 1, commit=None, saved_manifest=None).process.pid, flush=True)
time.sleep(600)
"""


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_documents": 0}, "streaming local text needs val_documents"),
        ({"disk_budget_gb": 1e-5}, r"disk_budget_gb 1e-05: .* lower shard_tokens"),
        ({"val_documents": 10_000}, "no text besides .*; lower val_documents"),
        ({"text_column": "body"}, r"no column 'body'; there are: text"),
    ],
)
def test_what_cannot_be_streamed_is_refused(prepared, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        Builder(at(prepared, tmp_path, **changes), readers=1).run(None, None)


def test_a_shard_that_is_rebuilt_differently_is_refused(prepared, tmp_path):
    """Because the text has changed since the checkpoint."""
    manifest = Manifest(**dataclasses.asdict(prepared.manifest))
    manifest.shards[4] = manifest.shards[4] | {"sha256": "0" * 64}
    producer = Producer(at(prepared, tmp_path))
    producer.open(saved_manifest=manifest)
    producer.make_validation()
    with pytest.raises(UserError, match="built again, it differs"):
        producer.make("train", 3)
    assert list(tmp_path.glob("train*")) == []


@pytest.mark.parametrize("whose", ["manifest.json", "trainer_state.json"])
def test_no_file_outside_its_directory_is_touched_for_a_manifest(prepared, tmp_path, whose):
    """A streamed run makes room by deleting the shards that it has passed: from a checkpoint of others, or in a
    directory of theirs, any file could be named as one."""
    out, thesis = tmp_path / "s", tmp_path / "thesis.tex"
    thesis.write_text("three years")

    def run(steps):
        fields = {"dataset_name": out, "output_dir": tmp_path / "run", "train_text": prepared.text, "streaming": "true"}
        sizes = {"val_documents": 20, "shard_tokens": 200, "disk_budget_gb": 23e-6}  # room for four
        return run_train(*flags(**TINY | fields | sizes | {"max_steps": steps, "save_steps": 20}), timeout=60)

    def point_outside(manifest, number):
        [e for e in manifest["shards"] if e["split"] == "train"][number]["file"] = "../thesis.tex"

    def of_others(state):
        point_outside(state["data"]["manifest"], 0)
        state["data"]["shards"][0][0] = thesis.name

    ok(run(20))
    if whose == "manifest.json":
        shutil.rmtree(tmp_path / "run")
        manifest = json.loads((out / whose).read_text())
        point_outside(manifest, -1)
        (out / whose).write_text(json.dumps(manifest))
    else:
        shutil.rmtree(out)
        change_state(tmp_path / "run" / "step_00000020", of_others)
    result = run(60)
    assert thesis.exists()
    assert result.returncode == 2
    (error,) = result.stderr.splitlines()
    assert re.fullmatch(rf"error: .*/{whose} cannot be read \(.*shards.*'\.\./thesis\.tex'.*\); .*", error)
