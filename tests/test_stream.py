"""Shards made just in time: the same bytes as prepared ones, within the budget, whatever happens to their maker."""

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.config import DataConfig
from recipe.data.dataset import LocalSource
from recipe.data.prepare.options import options_of
from recipe.data.prepare.pipeline import prepare
from recipe.data.shards import Manifest, find_shards, read_shard
from recipe.data.streaming import stream as module
from recipe.data.streaming.status import STATUS, directory_bytes, read_json, reader_path, write_json
from recipe.data.streaming.stream import Builder, StreamedSource
from recipe.errors import UserError
from tests.conftest import ROOT, SHAKESPEARE

T, BATCH = 32, 8
_text = SHAKESPEARE.read_text()
# 1100 documents of 2 to 850 characters; every 50th is one that came before
DOCUMENTS = [_text[i * 900 : i * 900 + 2 + (i * 37) % 849] for i in range(1100)]
DOCUMENTS[50::50] = DOCUMENTS[7:28]


def quiet(line):
    pass


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The shards as `prepare` makes them: `data` is the configuration that streams the same."""
    directory = tmp_path_factory.mktemp("prepared")
    source = directory / "d.parquet"
    pq.write_table(pa.table({"text": DOCUMENTS}), source, row_group_size=60)
    data = DataConfig(
        dataset_name=str(directory / "out"),
        train_text=str(source),
        val_documents=20,
        shard_tokens=8000,
        first_shard_tokens=1000,
    )
    manifest = prepare(options_of(data), quiet)
    return SimpleNamespace(data=data, manifest=manifest, source=source, out=directory / "out")


def local(prepared):
    return LocalSource(find_shards(str(prepared.out), "train"), T, BATCH, seed=1)


@contextmanager
def streaming(data, readers=1, commit=None, earlier=None, say=quiet, first=0, steps=10_000, batch=BATCH):
    """Readers of a stream, and its builder."""
    builder = Builder(data, readers, commit, earlier)
    out = builder.out
    sources = []
    try:
        waiting = module.Waiting(out, say)
        waiting.until(lambda: read_json(out / STATUS).get("opened"), "the validation shards")
        waiting.until(lambda: Manifest.load(out).of("train"), "the first shard")
        span = {"first_step": first, "steps": steps}
        sources += [StreamedSource(out, T, batch, 1, rank=rank, say=say, **span) for rank in range(readers)]
        yield SimpleNamespace(sources=sources, builder=builder, out=out)
    finally:
        for source in sources:
            source.close()
        builder.close()


def budget(prepared, shards):
    """GB for the validation shard and so many training shards of full size."""
    val = sum(1024 + 2 * e["tokens"] for e in prepared.manifest.of("val"))
    return (val + shards * (1024 + 2 * 8000) + 50_000) / 1e9


def at(prepared, out, **changes):
    return dataclasses.replace(prepared.data, dataset_name=str(out), streaming=True, **changes)


def pid_of(out):
    """Of the builder; of the next one, where it has just died."""
    return module.Waiting(out, quiet).until(lambda: read_json(out / STATUS).get("pid"), "the builder")


def kill_builder(out) -> bool:
    """False where it is dead already, and its successor has not spoken yet."""
    with suppress(ProcessLookupError):
        os.kill(pid_of(out), signal.SIGKILL)
        return True
    return False


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
        steps = int(2.5 * expected.windows / BATCH)
        for step in range(steps):
            assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
            if step % 50 == 0 and os.path.exists("/proc/self/maps"):  # what is deleted must not be held open
                maps = Path("/proc/self/maps").read_text().splitlines()
                assert not [line for line in maps if str(s.out) in line and "(deleted)" in line]
        done.set()
        watcher.join()
        assert s.sources[0].state()["shards"] == expected.state()["shards"]
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
    starts = expected._starts
    middle = int(starts[5] + starts[6]) // 2 // BATCH  # a step in the middle of shard 5
    with streaming(data) as s:
        for step in range(middle + 1):
            s.sources[0].rows(step, 0, BATCH)
        state = s.sources[0].state()
    (tmp_path / "s" / "train_000005.bin").unlink()
    for out, earlier in ((tmp_path / "s", None), (tmp_path / "other", state["manifest"])):
        with streaming(
            dataclasses.replace(data, dataset_name=str(out)), earlier=earlier, first=middle, steps=middle + 3
        ) as s:
            for step in range(middle, middle + 3):
                assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH))
            time.sleep(0.5)
            if earlier:
                assert [path.name for path in out.glob("train_*.bin")] == ["train_000005.bin"]
                assert (out / "val_000000.bin").read_bytes() == (prepared.out / "val_000000.bin").read_bytes()


def test_a_shard_stays_until_every_reader_has_passed_it(prepared, tmp_path):
    expected = local(prepared)
    with streaming(at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3)), readers=2) as s:
        fast, slow = s.sources
        slow.rows(0, 0, 1)
        ahead = int(expected._starts[3]) // BATCH
        for step in range(ahead):
            fast.rows(step, 0, BATCH // 2)
        reached = threading.Event()
        far = int(expected._starts[7]) // BATCH
        thread = threading.Thread(target=lambda: (fast.rows(far, 0, BATCH // 2), reached.set()), daemon=True)
        thread.start()
        assert not reached.wait(2)  # there is no room for what it wants while the other is at the first shard
        assert (s.out / "train_000000.bin").exists()
        for step in range(far):
            rows = slow.rows(step, BATCH // 2, BATCH)
            assert np.array_equal(rows, expected.rows(step, BATCH // 2, BATCH))
        assert reached.wait(30)
        thread.join()


def test_a_killed_builder_is_started_again_and_nothing_is_lost(prepared, tmp_path):
    said = []
    expected = local(prepared)
    with streaming(at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2)), say=said.append) as s:
        for step in range(expected.windows // BATCH):
            if step % 40 == 20:
                kill_builder(s.out)
            assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    assert Manifest.load(tmp_path / "s").shards == prepared.manifest.shards[: len(Manifest.load(tmp_path / "s").shards)]
    assert any("died (killed by signal 9); started again" in line for line in said)


def test_a_full_disk_is_waited_for(prepared, tmp_path, monkeypatch):
    """Twice, at the validation shard and at the second for training."""
    monkeypatch.setenv("RECIPE_FAULT", "enospc@data.shard:1,enospc@data.shard:4")
    said, expected = [], local(prepared)
    with streaming(at(prepared, tmp_path / "s"), say=said.append) as s:
        for step in range(0, expected.windows // BATCH, 20):
            assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    assert any("No space left on device; trying again in 5 s, free some disk" in line for line in said)
    assert not list((tmp_path / "s").glob("*.part"))


def test_a_builder_that_keeps_dying_is_an_error_with_its_cause(prepared, tmp_path, monkeypatch):
    def start(self):
        with open(self.out / module.LOG, "ab") as log:
            code = "import sys; print('MemoryError: the cause', file=sys.stderr); sys.exit(1)"
            return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=log)

    monkeypatch.setattr(Builder, "_start", start)
    with (
        pytest.raises(UserError, match=r"that makes the shards in .* died 4 times: MemoryError: the cause; see .*log"),
        streaming(at(prepared, tmp_path / "s")),
    ):
        pass


def test_a_builder_ends_with_the_process_that_started_it(prepared, tmp_path):
    code = (
        "import json, sys, time; from recipe.config import DataConfig; from recipe.data.streaming.stream import Builder\n"  # noqa: E501
        "Builder(DataConfig(**json.loads(sys.argv[1])), 1, None, None); time.sleep(600)"
    )
    data = at(prepared, tmp_path / "s")
    parent = subprocess.Popen([sys.executable, "-c", code, module.json.dumps(dataclasses.asdict(data))], cwd=ROOT)
    module.Waiting(tmp_path / "s", quiet).until(lambda: read_json(tmp_path / "s" / STATUS).get("opened"), "it")
    pid = pid_of(tmp_path / "s")
    parent.kill()
    parent.wait()
    for _ in range(100):
        if not alive(pid):
            break
        time.sleep(0.1)
    assert not alive(pid)


def alive(pid):
    try:
        return "Z" not in open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def test_waiting_is_said(tmp_path, monkeypatch):
    """With what the builder is doing; its messages at once; its error ends the wait."""
    monkeypatch.setattr(module, "_SILENCE", 0.0)
    monkeypatch.setattr(module, "_BETWEEN_LINES", 0.3)
    said, waiting = [], None

    def say(line):
        said.append(line)
        if len(said) == 2:
            write_json(tmp_path / STATUS, {"message": "the Hub says 429", "message_time": time.time(), "state": "x"})
        if len(said) == 4:
            write_json(tmp_path / STATUS, {"error": "no more"})

    waiting = module.Waiting(tmp_path, say)
    progress = {"state": "tokenising", "split": "train", "shard": 3, "tokens": 41e6, "of": 100e6, "seconds": 20}
    write_json(tmp_path / STATUS, progress)
    with pytest.raises(UserError, match="no more"):
        waiting.until(lambda: False, "shard 3")
    assert said[0].startswith(
        "data       waiting 0 s for shard 3: 41.0 of 100.0 M tokens of train shard 3 made, 2.05 M"
    )
    assert said[2] == "data       the Hub says 429"
    waiting = module.Waiting(tmp_path, quiet)
    write_json(tmp_path / STATUS, {})
    threading.Timer(0.3, lambda: setattr(waiting, "closed", True)).start()
    with pytest.raises(UserError, match="the run ended"):
        waiting.until(lambda: False, "shard 3")


def test_what_cannot_be_streamed_is_refused(prepared, tmp_path):
    cases = [
        (at(prepared, tmp_path / "a", val_documents=0), "streaming needs val_documents"),
        (at(prepared, tmp_path / "b", disk_budget_gb=1e-5), r"disk_budget_gb 1e-05: .* too few .* lower shard_tokens"),
        (at(prepared, tmp_path / "c", val_documents=10_000), "leave none for training; lower val_documents"),
        (at(prepared, tmp_path / "d", text_column="body"), r"no column 'body'; there are: text"),
        (at(prepared, prepared.out, shard_tokens=4000), "shards made otherwise: shard_tokens was 8000, now 4000"),
    ]
    for data, message in cases:
        with pytest.raises(UserError, match=message), streaming(data):
            pass


def test_two_streams_cannot_share_a_directory(prepared, tmp_path):
    data = at(prepared, tmp_path / "s")
    expected = local(prepared)
    with streaming(dataclasses.replace(data, disk_budget_gb=budget(prepared, 2))) as s:
        s.sources[0].rows(0, 0, BATCH)
        with pytest.raises(UserError, match="another process is making shards in this directory"):
            Builder(data, 1, None, None)
        with pytest.raises(UserError, match="another process is making shards in this directory"):
            prepare(options_of(data), quiet)
        for step in range(expected.windows // BATCH):  # the first one does not notice
            s.sources[0].rows(step, 0, BATCH)


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("shuffle_buffer", [0, 64])
def test_selected_documents_stream_as_they_are_prepared(prepared, tmp_path, dedup, shuffle_buffer):
    """Also when the stream begins in the middle, on a disk that has seen none of the documents before."""
    changes = {"dedup": dedup, "shuffle_buffer": shuffle_buffer}
    whole = prepare(options_of(dataclasses.replace(prepared.data, dataset_name=str(tmp_path / "p"), **changes)), quiet)
    expected = LocalSource(find_shards(str(tmp_path / "p"), "train"), T, BATCH, seed=1)
    step = int(expected._starts[6]) // BATCH
    data = at(prepared, tmp_path / "s", **changes)
    with streaming(data, earlier=dataclasses.asdict(whole), first=step, steps=step + 2) as s:
        assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH))
        assert not (s.out / "train_000000.bin").exists()
    found = sorted((tmp_path / "s").glob("train_*.bin"))
    assert len(found) >= 1
    for path in found:
        assert path.read_bytes() == (tmp_path / "p" / path.name).read_bytes()
    assert (
        read_shard(tmp_path / "p" / "val_000000.bin").tolist() == read_shard(prepared.out / "val_000000.bin").tolist()
    )
    assert (reader_path(tmp_path / "s", 0)).exists()


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


def test_steps_larger_than_shards_within_a_tight_budget(prepared, tmp_path):
    """A step reads the end of one shard before it waits for the next: no shard is made twice."""
    batch = 96  # three of the first shard
    expected = LocalSource(find_shards(str(prepared.out), "train"), T, batch, seed=1)
    steps = expected.windows // batch
    for room in (2, 3):
        out = tmp_path / str(room)
        data = at(prepared, out, disk_budget_gb=budget(prepared, room))
        with streaming(data, batch=batch, steps=steps) as s:
            stop = files_made(out)
            for step in range(steps):
                for lo in range(0, batch, 32):
                    rows = s.sources[0].rows(step, lo, lo + 32)
                    assert np.array_equal(rows, expected.rows(step, lo, lo + 32))
            made = stop()
        assert made <= len(prepared.manifest.of("train"))


def test_deaths_far_apart_do_not_add_up(prepared, tmp_path):
    """In a second epoch, too, when the manifest no longer grows."""
    expected, deaths = local(prepared), 0
    epoch = -(-expected.windows // BATCH)
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 2))
    with streaming(data, earlier=dataclasses.asdict(prepared.manifest), first=epoch) as s:
        for step in range(epoch, 2 * epoch - 1):
            if step % 30 == 10:
                deaths += kill_builder(s.out)
            assert np.array_equal(s.sources[0].rows(step, 0, BATCH), expected.rows(step, 0, BATCH)), step
    assert deaths > 6


def test_the_shard_that_is_needed_last_makes_room(prepared, tmp_path):
    """Read over and over with room for all shards but one, few are made again."""
    n = len(prepared.manifest.of("train"))
    expected = local(prepared)
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, n - 4))
    with streaming(data, steps=3 * expected.windows // BATCH) as s:
        stop = files_made(s.out)
        for step in range(3 * expected.windows // BATCH):
            assert np.array_equal(s.sources[0].rows(step, 0, 1), expected.rows(step, 0, 1))
        assert stop() < 2 * n


def test_a_budget_that_is_used_up_is_an_error(prepared, tmp_path):
    data = at(prepared, tmp_path / "s", disk_budget_gb=budget(prepared, 3))
    expected = local(prepared)

    def read(source):
        for step in range(expected.windows // BATCH):
            source.rows(step, 0, BATCH)

    with streaming(data) as s:
        (s.out / "something").write_bytes(bytes(200_000))
        with pytest.raises(UserError, match=r"the next shard needs .* GB, and .* of the budget are taken; raise disk_"):
            read(s.sources[0])
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "fineweb_train_000001.bin").write_bytes(bytes(5000))
    with pytest.raises(UserError, match="holds shards of another program"), streaming(at(prepared, tmp_path / "t")):
        pass


def test_another_runs_directory_is_left_alone(prepared, tmp_path):
    """A checkpoint's manifest takes the place of a shorter one of the same shards, never of others."""
    data = at(prepared, tmp_path / "s", shard_tokens=4000)
    with streaming(data, steps=2):
        pass
    before = Manifest.load(tmp_path / "s")
    with (
        pytest.raises(UserError, match="shards made otherwise: shard_tokens was 4000, now 8000"),
        streaming(at(prepared, tmp_path / "s"), earlier=dataclasses.asdict(prepared.manifest)),
    ):
        pass
    assert Manifest.load(tmp_path / "s") == before


def test_a_shard_that_comes_out_otherwise_is_refused(prepared, tmp_path):
    manifest = dataclasses.asdict(prepared.manifest)
    manifest["shards"][4]["sha256"] = "0" * 64
    data = at(prepared, tmp_path / "s")
    step = int(local(prepared)._starts[3]) // BATCH + 1
    with (
        streaming(data, earlier=manifest, first=step) as s,
        pytest.raises(UserError, match="built again, it is not what"),
    ):
        s.sources[0].rows(step, 0, BATCH)
