"""Streamed shards: the same bytes as prepared ones, within the disk budget, also after the builder fails."""

import dataclasses
import json
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from recipe.data.builder import STATUS, Builder, reader_path
from recipe.data.producer import Producer
from recipe.data.shards import Manifest, find_shards
from recipe.data.stream import BuilderProcess, wait_for
from recipe.utils.errors import Unreachable, UserError
from tests.checkpoint import change_state
from tests.conftest import ok, refused, run_train, tiny_flags
from tests.data.streams import BATCH, assert_rows, budget, config_of, dataset_of, streaming


def test_a_stream_gives_the_prepared_batches_within_its_disk_budget(prepared, tmp_path):
    """2.5 epochs with room for three shards: the same batches and manifest."""
    counts = [e["tokens"] for e in prepared.manifest.of("train")]
    # The first is ready soon, and training on each leaves time to make the next.
    assert counts[:5] == [800, 1600, 3200, 6400, 8000]
    assert set(counts[4:-1]) == {8000}
    assert len(counts) >= 8
    data = config_of(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    expected, sizes, read = dataset_of(prepared), [], threading.Event()

    def watch():
        while not read.wait(0.01):
            with suppress(FileNotFoundError):
                paths = (path for path in (tmp_path / "s").iterdir() if path.suffix in (".bin", ".part"))
                sizes.append(sum(path.stat().st_size for path in paths))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with streaming(data) as s:
        assert_rows(s, expected, range(int(2.5 * expected.windows / BATCH)))
        if Path("/proc/self/fd").exists():  # an open file would keep its disk space after it is deleted
            open_files = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
            assert not [file for file in open_files if str(s.out) in file and "(deleted)" in file]
        read.set()
        watcher.join()
        assert s.datasets[0].state_dict()["shards"] == expected.state_dict()["shards"]
    names = [path.name for path in s.out.glob("*.bin")]
    assert Manifest.load(tmp_path / "s") == Manifest.load(prepared.out)
    assert 0 < max(sizes) <= data.disk_budget_gb * 1e9
    assert len(names) < len(prepared.manifest.shards)  # it had to delete some
    for name in names:
        assert (tmp_path / "s" / name).read_bytes() == (prepared.out / name).read_bytes()
    with pytest.raises(UserError, match=r"gone; a streamed run deletes what it has read: .*--streaming"):
        find_shards(str(tmp_path / "s"), "train")


def test_a_resumed_stream_builds_only_what_it_needs(prepared, tmp_path, monkeypatch):
    """On the same disk, and on another one from the manifest in the checkpoint; from a directory with a module of a
    name in Python's library."""
    (tmp_path / "tokenize.py").write_text("raise SystemExit('mine')")
    monkeypatch.chdir(tmp_path)
    data = config_of(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 4))
    expected = dataset_of(prepared)
    middle = int(expected.starts[5] + expected.starts[6]) // 2 // BATCH  # a step in the middle of shard 5
    with streaming(data) as s:
        assert_rows(s, expected, range(middle + 1))
        state = s.datasets[0].state_dict()
    (tmp_path / "s" / "train_000005.bin").unlink()
    for out, saved_manifest in ((tmp_path / "s", None), (tmp_path / "other", state["manifest"])):
        resumed = dataclasses.replace(data, dataset_name=str(out))
        with streaming(resumed, saved_manifest=saved_manifest, first_step=middle) as s:
            assert_rows(s, expected, range(middle, middle + 3))
    made = sorted(path.name for path in (tmp_path / "other").glob("*.bin"))
    assert made[0] == "train_000005.bin"
    assert (tmp_path / "other" / "val_000000.bin").read_bytes() == (prepared.out / "val_000000.bin").read_bytes()


def test_a_run_resumed_on_another_disk_makes_only_the_shards_that_it_needs(prepared, whole_run, tmp_path):
    """Step 20 reads the second one."""
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    data = dataset_of(prepared).state_dict() | {"manifest": dataclasses.asdict(prepared.manifest)}
    change_state(run / "step_00000020", lambda state: state.update(data=data))
    sizes = {"val_documents": 20, "shard_tokens": 8000, "dropout": 0.1, "max_steps": 21, "eval_steps": 7}
    ok(run_train(*tiny_flags(tmp_path / "s", run, train_text=prepared.text, streaming="true", **sizes)))
    assert (tmp_path / "s" / "train_000001.bin").exists()
    assert not (tmp_path / "s" / "train_000000.bin").exists()


def test_a_shard_stays_until_every_reader_has_passed_it(prepared, tmp_path):
    expected = dataset_of(prepared)
    with streaming(config_of(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), readers=2) as s:
        fast, slow = s.datasets
        slow.sequences(0, 0, 1)
        for step in range(int(expected.starts[3]) // BATCH):
            fast.sequences(step, 0, BATCH // 2)
        reached = threading.Event()
        next_step = int(expected.starts[7]) // BATCH
        thread = threading.Thread(target=lambda: (fast.sequences(next_step, 0, BATCH // 2), reached.set()), daemon=True)
        thread.start()
        assert not reached.wait(1)  # there is no room for its shard while the slow reader is at the first one
        reader_path(s.out, 1).unlink()  # as of a reader that is still starting
        assert not reached.wait(1)
        assert (s.out / "train_000000.bin").exists()
        for step in range(next_step):
            rows = slow.sequences(step, BATCH // 2, BATCH)
            assert np.array_equal(rows, expected.sequences(step, BATCH // 2, BATCH))
        assert reached.wait(60)
        thread.join()


@pytest.mark.skipif(not hasattr(psutil.Process, "rlimit"), reason="psutil limits processes on Linux only")
def test_a_builder_with_a_full_disk_ends_the_run_which_can_be_resumed(prepared, tmp_path):
    """It can write neither a shard nor its error, and dies; tests/faults kills one."""
    data = config_of(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))
    expected = dataset_of(prepared)
    last_step = expected.windows // BATCH - 1
    with streaming(data) as s:
        assert_rows(s, expected, range(30))
        psutil.Process(s.builder.process.pid).rlimit(psutil.RLIMIT_FSIZE, (0, 0))
        with pytest.raises(Unreachable, match=r"that makes the shards in .*s died; the same"):  # for exit code 75
            assert_rows(s, expected, range(30, last_step))
    with streaming(data, first_step=30) as s:
        assert_rows(s, expected, range(30, last_step))


def test_a_stream_ignores_the_error_of_an_earlier_run_and_keeps_a_few_shards_ready(prepared, tmp_path):
    (tmp_path / STATUS).write_text(json.dumps({"error": "the disk was full", "is_transient": False}))
    with streaming(config_of(prepared, tmp_path)) as s:
        s.datasets[0].sequences(0, 0, 1)
        deadline = time.monotonic() + 30
        while not (tmp_path / "train_000003.bin").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert json.loads(reader_path(tmp_path, 0).read_text()) == {"shard": 0}


def test_a_second_stream_into_the_directory_is_refused_and_the_first_continues(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr("recipe.data.stream.LOCK_TIMEOUT_S", 0.2)
    data, expected = config_of(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), dataset_of(prepared)
    with streaming(data) as s:
        assert_rows(s, expected, range(2))
        with pytest.raises(UserError, match=r"making shards in this directory; .*: --train_text TEXT --dataset_name "):
            BuilderProcess(data, 1, commit=None, saved_manifest=None)
        assert_rows(s, expected, range(2, expected.windows // BATCH))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_documents": 0}, "streaming local text needs val_data, or val_documents"),
        ({"disk_budget_gb": 1e-5}, r"disk_budget_gb 1e-05: .* lower shard_tokens"),
        ({"val_documents": 10_000}, "no text beyond .*; lower val_documents"),
    ],
)
def test_a_stream_that_cannot_start_is_refused(prepared, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        Builder(config_of(prepared, tmp_path, **changes), readers=1).run(None, None)


@pytest.mark.parametrize(("is_transient", "kind"), [(True, Unreachable), (False, UserError)])
def test_readers_learn_whether_the_builders_error_may_pass(tmp_path, is_transient, kind):
    (tmp_path / STATUS).write_text(json.dumps({"error": "x", "is_transient": is_transient}))
    with pytest.raises(UserError, match=r"^x$") as error:
        wait_for(tmp_path, lambda: False, "a shard")
    assert type(error.value) is kind


def test_a_stream_shorter_than_a_step_is_refused(tmp_path):
    """Also if it has no full sequence."""
    (tmp_path / "d.txt").write_text(f"{'held out ' * 50}<|endoftext|>the rest")
    command = tiny_flags(tmp_path / "d.txt", tmp_path / "run", streaming="true", val_documents=1)
    error = refused(run_train(*command, cwd=tmp_path))
    assert "takes 4 sequences a step, but the training data have only 0; lower total_batch_tokens or" in error


def test_a_text_that_changed_since_the_checkpoint_is_refused(prepared, tmp_path):
    """By the SHA-256 of a shard that is made again."""
    manifest = Manifest(**dataclasses.asdict(prepared.manifest))
    manifest.shards[4] = manifest.shards[4] | {"sha256": "0" * 64}
    producer = Producer(config_of(prepared, tmp_path))
    producer.open(saved_manifest=manifest)
    producer.make_validation()
    with pytest.raises(UserError, match="built again, it differs"):
        producer.make("train", 3)
    assert list(tmp_path.glob("train*")) == []
