"""Shards made just in time: the same bytes as prepared ones, within the budget, whatever happens to their builder."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from recipe.data.prepare.pipeline import prepare
from recipe.data.shards import Manifest, find_shards
from recipe.data.streaming import stream as module
from recipe.data.streaming.status import STATUS, directory_bytes, read_json, write_json
from recipe.data.streaming.stream import BuilderProcess, Waiting
from recipe.errors import UserError
from recipe.log import set_up_logging
from tests.conftest import ROOT
from tests.data.streams import BATCH, assert_refused, at, budget, kill_builder, local, make_prepared, pid_of, streaming


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return make_prepared(tmp_path_factory.mktemp("prepared"))


def assert_rows(stream, expected, steps, kill_every=0):
    """The batches of `steps` are those of the prepared shards; kills the builder now and then, and counts that."""
    kills = 0
    for step in steps:
        if kill_every and step % kill_every == kill_every // 2:
            kills += kill_builder(stream.out)
        assert np.array_equal(stream.datasets[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    return kills


def test_the_shards_grow(prepared):
    """Doubling from the first: its tokens are there soon, and each gives time to make the next."""
    counts = [e["tokens"] for e in prepared.manifest.of("train")]
    assert counts[:5] == [1000, 2000, 4000, 8000, 8000]
    assert set(counts[3:-1]) == {8000}
    assert len(counts) >= 8


def test_streamed_is_prepared_within_the_budget(prepared, tmp_path):
    """Two epochs and a half through room for three shards: the same manifest, the same batches."""
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    expected, most, done = local(prepared), [0], threading.Event()

    def watch():
        while not done.wait(0.01):
            most[0] = max(most[0], directory_bytes(tmp_path / "s"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    with streaming(data) as s:
        assert_rows(s, expected, range(int(2.5 * expected.windows / BATCH)))
        if os.path.exists("/proc/self/maps"):  # what is deleted must not be held open
            maps = Path("/proc/self/maps").read_text().splitlines()
            assert not [line for line in maps if str(s.out) in line and "(deleted)" in line]
        done.set()
        watcher.join()
        assert s.datasets[0].state()["shards"] == expected.state()["shards"]
        here = {path.name for path in s.out.glob("*.bin")}
    assert Manifest.load(tmp_path / "s") == Manifest.load(prepared.out)
    assert most[0] <= data.disk_budget_gb * 1e9
    assert len(here) < len(prepared.manifest.shards)  # it had to delete some
    for name in here:
        assert (tmp_path / "s" / name).read_bytes() == (prepared.out / name).read_bytes()
    with pytest.raises(UserError, match=r"gone; a streamed run deletes what it has read: .*--streaming"):
        find_shards(str(tmp_path / "s"), "train")


def test_a_resumed_stream_builds_only_what_it_needs(prepared, tmp_path):
    """On the same disk; and on another one, from what the checkpoint keeps."""
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 4))
    expected = local(prepared)
    middle = int(expected._starts[5] + expected._starts[6]) // 2 // BATCH  # a step in the middle of shard 5
    with streaming(data) as s:
        assert_rows(s, expected, range(middle + 1))
        state = s.datasets[0].state()
    (tmp_path / "s" / "train_000005.bin").unlink()
    for out, earlier in ((tmp_path / "s", None), (tmp_path / "other", state["manifest"])):
        there = dataclasses.replace(data, dataset_name=str(out))
        with streaming(there, earlier=earlier, first=middle, steps=middle + 3) as s:
            assert_rows(s, expected, range(middle, middle + 3))
            time.sleep(0.5)
            if earlier:
                assert [path.name for path in out.glob("train_*.bin")] == ["train_000005.bin"]
                assert (out / "val_000000.bin").read_bytes() == (prepared.out / "val_000000.bin").read_bytes()


def test_a_shard_stays_until_every_reader_has_passed_it(prepared, tmp_path):
    expected = local(prepared)
    with streaming(at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), readers=2) as s:
        fast, slow = s.datasets
        slow.rows(0, 0, 1)
        for step in range(int(expected._starts[3]) // BATCH):
            fast.rows(step, 0, BATCH // 2)
        reached = threading.Event()
        far = int(expected._starts[7]) // BATCH
        thread = threading.Thread(target=lambda: (fast.rows(far, 0, BATCH // 2), reached.set()), daemon=True)
        thread.start()
        assert not reached.wait(1)  # there is no room for what it wants while the other is at the first shard
        assert (s.out / "train_000000.bin").exists()
        for step in range(far):
            rows = slow.rows(step, BATCH // 2, BATCH)
            assert np.array_equal(rows, expected.rows(step, BATCH // 2, BATCH))
        assert reached.wait(60)
        thread.join()


def test_a_killed_builder_is_started_again_and_nothing_is_lost(prepared, tmp_path, capsys):
    set_up_logging()
    with streaming(at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))) as s:
        expected = local(prepared)
        assert assert_rows(s, expected, range(expected.windows // BATCH), kill_every=100)
    made = Manifest.load(tmp_path / "s").shards
    assert made == prepared.manifest.shards[: len(made)]
    assert "the process that makes the shards died (killed by signal 9); it is started again" in capsys.readouterr().out


@pytest.mark.slow
def test_deaths_far_apart_do_not_add_up(prepared, tmp_path):
    """In a second epoch, too, when the manifest no longer grows."""
    expected = local(prepared)
    epoch = -(-expected.windows // BATCH)
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))
    with streaming(data, earlier=dataclasses.asdict(prepared.manifest), first=epoch) as s:
        assert assert_rows(s, expected, range(epoch, 2 * epoch - 1), kill_every=15) > 6


def test_a_full_disk_is_waited_for(prepared, tmp_path, capsys, monkeypatch):
    """Without a shard lost or made twice; the plugin of the fault tests fills the disk."""
    set_up_logging()
    monkeypatch.setenv("RECIPE_FAULT", "enospc@data.shard:3")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/tests/faults/load:{ROOT}")
    expected = local(prepared)
    with streaming(at(prepared, tmp_path / "s")) as s:
        assert_rows(s, expected, range(0, expected.windows // BATCH, 20))
    assert "No space left on device; trying again in 5 s, free some disk" in capsys.readouterr().out
    assert not list((tmp_path / "s").glob("*.part"))


def test_a_builder_that_keeps_dying_is_an_error_with_its_cause(prepared, tmp_path, monkeypatch):
    def start(self):
        with open(self.out / module.LOG, "ab") as log:
            code = "import sys; print('MemoryError: the cause', file=sys.stderr); sys.exit(1)"
            return subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stderr=log)

    monkeypatch.setattr(BuilderProcess, "_start", start)
    with (
        pytest.raises(UserError, match=r"that makes the shards in .* died 4 times: MemoryError: the cause; see .*log"),
        streaming(at(prepared, tmp_path / "s")),
    ):
        pass


def test_a_builder_ends_with_the_process_that_started_it(prepared, tmp_path):
    data, out = at(prepared, tmp_path / "s"), tmp_path / "s"
    child = os.fork()
    if child == 0:
        BuilderProcess(data, 1, windows=1000, commit=None, earlier=None)
        time.sleep(600)
    Waiting(out).until(lambda: read_json(out / STATUS).get("opened"), "it")
    pid = pid_of(out)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for _ in range(300):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)
    with streaming(data) as s:  # nothing is in the way of the next run
        s.datasets[0].rows(0, 0, BATCH)


def alive(pid):
    with suppress(FileNotFoundError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return False


def test_waiting_is_reported(tmp_path, monkeypatch, capsys):
    """With what the builder is doing; its messages at once; its error ends the wait, whatever the clock shows."""
    set_up_logging()
    monkeypatch.setattr(module, "_SILENCE", 0.0)
    monkeypatch.setattr(module, "_BETWEEN_LINES", 0.2)
    monkeypatch.setattr(time, "time", lambda: 1e12)  # a clock that was set, or a laptop that slept
    waiting, asked = Waiting(tmp_path), []

    def ready():
        asked.append(0)
        if len(asked) == 3:
            write_json(tmp_path / STATUS, {"message": [1, 1, "data       the Hub reports 429"], "state": "x"})
        if len(asked) == 8:
            write_json(tmp_path / STATUS, {"error": "no more"})

    write_json(tmp_path / STATUS, {"state": "train shard 3, 41.0 M tokens made, 2.05 M tokens/s"})
    with pytest.raises(UserError, match="no more"):
        waiting.until(ready, "shard 3")
    printed = capsys.readouterr().out
    assert "data       waiting 0 s for shard 3: train shard 3, 41.0 M tokens made, 2.05 M tokens/s\n" in printed
    assert printed.count("data       the Hub reports 429\n") == 1
    write_json(tmp_path / STATUS, {})
    threading.Timer(0.3, lambda: setattr(waiting, "closed", True)).start()
    with pytest.raises(UserError, match="the run ended"):
        waiting.until(lambda: False, "shard 3")


def test_what_cannot_be_streamed_is_refused(prepared, tmp_path):
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "diary.txt").write_text("mine")
    cases = {
        "a": (at(prepared, tmp_path / "a", val_documents=0), "streaming needs val_documents"),
        "b": (at(prepared, tmp_path / "b", disk_budget_gb=1e-5), r"disk_budget_gb 1e-05: .* lower shard_tokens"),
        "c": (at(prepared, tmp_path / "c", val_documents=10_000), "leave none for training; lower val_documents"),
        "d": (at(prepared, tmp_path / "d", text_column="body"), r"no column 'body'; there are: text"),
        "e": (at(prepared, tmp_path / "e"), r"holds other files \(diary\.txt\)"),
        "f": (at(prepared, prepared.out, shard_tokens=4000), "with other settings: shard_tokens was 8000"),
    }
    assert_refused(cases)


@pytest.mark.slow
def test_two_streams_cannot_share_a_directory(prepared, tmp_path, monkeypatch):
    data = at(prepared, tmp_path / "s")
    with streaming(dataclasses.replace(data, disk_budget_gb=budget(prepared, 2))) as s:
        s.datasets[0].rows(0, 0, BATCH)
        with pytest.raises(UserError, match="another process is making shards in this directory"):
            prepare(data)
        expected = local(prepared)
        assert_rows(s, expected, range(expected.windows // BATCH))  # the first one does not notice


@pytest.mark.slow
def test_steps_larger_than_shards_within_a_tight_budget(prepared, tmp_path):
    """A step reads the end of one shard before it waits for the next: no shard is made twice."""
    batch = 96  # three of the first shard
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))
    expected = local(prepared)
    expected.batch_size = batch
    with streaming(data, batch=batch, steps=expected.windows // batch) as s:
        stop = files_made(s.out)
        for step in range(expected.windows // batch):
            for lo in range(0, batch, 32):
                assert np.array_equal(s.datasets[0].rows(step, lo, lo + 32), expected.rows(step, lo, lo + 32))
        assert stop() <= len(prepared.manifest.of("train"))


@pytest.mark.slow
def test_the_shard_that_is_needed_last_makes_room(prepared, tmp_path):
    """Read over and over with room for all shards but a few, few are made again."""
    n, expected = len(prepared.manifest.of("train")), local(prepared)
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, n - 4))
    steps = 3 * expected.windows // BATCH
    with streaming(data, steps=steps) as s:
        stop = files_made(s.out)
        assert_rows(s, expected, range(steps))
        assert stop() < 2 * n


def files_made(out):
    """Counts the shards that come into `out` from now on; `stop()` gives the number."""
    seen, done = set(), threading.Event()

    def watch():
        while not done.wait(0.002):
            for path in out.glob("train_*.bin"):
                with suppress(FileNotFoundError):
                    seen.add((path.name, path.stat().st_ino, path.stat().st_mtime_ns))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()

    def stop():
        done.set()
        thread.join()
        return len(seen)

    return stop


@pytest.mark.slow
def test_a_budget_that_is_used_up_is_an_error(prepared, tmp_path):
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    expected = local(prepared)
    with streaming(data) as s:
        (s.out / "something").write_bytes(bytes(200_000))
        with pytest.raises(UserError, match=r"the next shard needs .* GB, and .* of the budget are taken; raise disk_"):
            assert_rows(s, expected, range(expected.windows // BATCH))


@pytest.mark.slow
def test_a_shard_that_is_rebuilt_differently_is_refused(prepared, tmp_path):
    """Because the text has changed since the checkpoint."""
    manifest = dataclasses.asdict(prepared.manifest)
    manifest["shards"][4]["sha256"] = "0" * 64
    step = int(local(prepared)._starts[3]) // BATCH + 1
    with (
        streaming(at(prepared, tmp_path / "s"), earlier=manifest, first=step) as s,
        pytest.raises(UserError, match="built again, it is not what"),
    ):
        s.datasets[0].rows(step, 0, BATCH)
