"""From text to shards: each format, interruptions, and what is refused. Numbers in names are QUALITY's bad inputs."""

import bz2
import dataclasses
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe.config import DataConfig
from recipe.data import shards
from recipe.data.hub import HubText
from recipe.data.prepare import pipeline as module
from recipe.data.prepare.documents import Document, TextFiles
from recipe.data.prepare.options import PrepareOptions
from recipe.data.prepare.pipeline import main, prepare, prepare_for_training
from recipe.data.prepare.select import Deduplicated, HeldOut
from recipe.data.shards import Manifest, find_shards, read_shard, unigram_loss
from recipe.data.tokenizer import END_OF_TEXT, encode
from recipe.errors import UserError
from tests.conftest import ASSETS, ROOT, SHAKESPEARE, environment

PARQUET = ASSETS / "text" / "enwik8-articles.parquet"

_text = SHAKESPEARE.read_text()
# 300 documents of 2 to 850 characters, two of them odd and two empty
DOCUMENTS = [_text[i * 900 : i * 900 + 2 + (i * 37) % 849] for i in range(300)]
DOCUMENTS[7], DOCUMENTS[8], DOCUMENTS[70], DOCUMENTS[71] = "naïve\r\n日本", "a<|endoftext|>b", "", ""


def quiet(line):
    pass


def write_jsonl(path, texts=DOCUMENTS, opener=open):
    with opener(path, "wb") as file:
        for text in texts:
            file.write(json.dumps({"id": 1, "text": text}).encode() + b"\n")
    return path


def options(source, out, **changes):
    return PrepareOptions(**({"train_text": str(source), "out": str(out), "val_fraction": 0.1, "workers": 2} | changes))


def stream(out, split):
    return np.concatenate([read_shard(shard.path) for shard in find_shards(str(out), split)]).tolist()


def chosen(text):
    """Whether a fraction of 0.1 holds a document out."""
    document = Document(0, 0, lambda: [text], None)
    return HeldOut(ROOT, None, 0.1, 1337).split(document) == "val"


def contents(out):
    return {path.name: path.read_bytes() for path in out.glob("*.bin")}


def tokens_of(texts):
    return [token for text in texts if text for token in [END_OF_TEXT, *encode(text).tolist()]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The shards of DOCUMENTS, 3000 tokens each, made in one go."""
    directory = tmp_path_factory.mktemp("reference")
    source = write_jsonl(directory / "d.jsonl")
    manifest = prepare(options(source, directory / "out", shard_tokens=3000), quiet)
    return SimpleNamespace(
        source=source, out=directory / "out", manifest=manifest, contents=contents(directory / "out")
    )


def test_streams_are_the_documents_in_order_each_after_end_of_text(reference):
    held_out = [i for i, document in enumerate(DOCUMENTS) if chosen(document)]
    assert 15 <= len(held_out) <= 45  # 30 +- 3 standard deviations
    assert stream(reference.out, "val") == tokens_of(DOCUMENTS[i] for i in held_out)
    assert stream(reference.out, "train") == tokens_of(d for i, d in enumerate(DOCUMENTS) if i not in held_out)
    counts = [s.tokens for s in find_shards(str(reference.out), "train")]
    assert len(counts) > 8
    assert set(counts[:-1]) == {3000}
    assert 0 < counts[-1] < 3000
    assert (reference.manifest.complete, reference.manifest.documents) == (True, 300)
    assert sorted(os.listdir(reference.out)) == sorted([*reference.contents, "manifest.json"])
    for shard in find_shards(str(reference.out), "train"):
        shards.verify(shard, read_shard(shard.path))


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.bz2", "json.gz", "parquet", "directory", "glob"])
def test_every_format_gives_the_same_bytes(reference, tmp_path, kind):
    source = tmp_path / f"d.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(300), "text": [d or None for d in DOCUMENTS]}), source, row_group_size=50)
    elif kind in ("directory", "glob"):
        (tmp_path / "d" / "sub").mkdir(parents=True)
        write_jsonl(tmp_path / "d" / "a.jsonl", DOCUMENTS[:100])
        write_jsonl(tmp_path / "d" / "b.jsonl.gz", DOCUMENTS[100:170], gzip.open)
        pq.write_table(pa.table({"text": DOCUMENTS[170:]}), tmp_path / "d" / "c.parquet")
        (tmp_path / "d" / "README.md").write_text("not text")
        source = tmp_path / "d" if kind == "directory" else tmp_path / "d" / "[a-c].*"
    else:
        write_jsonl(source, opener={"gz": gzip.open, "bz2": bz2.open}.get(kind.split(".")[-1], open))
    prepare(options(source, tmp_path / "out", shard_tokens=3000, workers=1), quiet)
    assert contents(tmp_path / "out") == reference.contents


def test_text_files_are_one_document_each(tmp_path):
    for name, text in (("b.txt", "second\r\n"), ("a.txt", "first"), ("c.txt.gz", "third")):
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    prepare(options(tmp_path / "*.txt*", tmp_path / "out", val_documents=1), quiet)
    assert stream(tmp_path / "out", "val") == tokens_of(["first"])
    assert stream(tmp_path / "out", "train") == tokens_of(["second\r\n", "third"])


def test_tiny_shakespeare(tmp_path):
    """One document: its last tenth of tokens is validation. 338,025 tokens is what nanoGPT and llm.c count too."""
    manifest = prepare(options(SHAKESPEARE, tmp_path, shard_tokens=100_000), quiet)
    assert (manifest.tokens("train"), manifest.tokens("val")) == (304_224, 33_802)
    assert stream(tmp_path, "train") + stream(tmp_path, "val") == tokens_of([_text])
    train, val = find_shards(str(tmp_path), "train"), find_shards(str(tmp_path), "val")
    assert [s.tokens for s in train] == [100_000] * 3 + [4224]
    assert unigram_loss(train, val) == pytest.approx(6.48653, abs=1e-5)


def test_long_documents_are_tokenised_as_a_whole(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "d.jsonl", [_text, "short", _text[:700_000]])
    prepare(options(source, tmp_path / "out", val_documents=0, shard_tokens=90_000), quiet)
    assert stream(tmp_path / "out", "train") == tokens_of([_text, "short", _text[:700_000]])


def interrupted_at(monkeypatch, opts, calls):
    """Run until the `calls`-th shard is to be finished, which fails."""
    left = iter(range(calls - 1))
    real = shards.finish_shard

    def finish(*arguments):
        if next(left, None) is None:
            raise OSError("pulled the plug")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("recipe.data.prepare.writer.finish_shard", finish)
        with pytest.raises(OSError, match="plug"):
            prepare(opts, quiet)


@pytest.mark.parametrize("calls", [1, 2, 5, 9])
def test_interrupted_and_run_again_gives_the_same_bytes(reference, tmp_path, monkeypatch, calls):
    opts = options(reference.source, tmp_path, shard_tokens=3000)
    interrupted_at(monkeypatch, opts, calls)
    assert len(Manifest.load(tmp_path).shards) == calls - 1
    with pytest.raises(UserError, match="interrupted"):
        find_shards(str(tmp_path), "train")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.bin")}
    prepare(opts, quiet)
    assert contents(tmp_path) == reference.contents
    assert Manifest.load(tmp_path) == reference.manifest
    assert all(path.stat().st_mtime_ns == mtime for path, mtime in times.items())  # finished shards stay as they are


def test_interrupted_within_a_long_document(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "d.jsonl", [_text, "short", _text[:700_000]])
    opts = options(source, tmp_path / "out", val_documents=0, shard_tokens=50_000)
    interrupted_at(monkeypatch, opts, 4)
    assert Manifest.load(tmp_path / "out").shards[-1]["next"]["piece"] > 0
    interrupted_at(monkeypatch, opts, 6)
    prepare(opts, quiet)
    assert stream(tmp_path / "out", "train") == tokens_of([_text, "short", _text[:700_000]])


def killed_after(opts, calls):
    """A child process that is killed with SIGKILL at its `calls`-th rename, truncation or sync; False if it ended."""
    child = os.fork()
    if child == 0:
        left = iter(range(calls - 1))

        def counted(function):
            def call(*arguments):
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return call

        for name in ("replace", "truncate", "fsync"):
            setattr(os, name, counted(getattr(os, name)))
        prepare(opts, quiet)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("source", ["documents", "single"])
def test_killed_anywhere_and_run_again_gives_the_same_bytes(tmp_path, source):
    path = write_jsonl(tmp_path / "d.jsonl", DOCUMENTS[:60] if source == "documents" else [_text[:30_000]])
    whole = options(path, tmp_path / "whole", shard_tokens=2000, val_fraction=0.5)
    prepare(whole, quiet)
    calls = 1
    while killed_after(opts := dataclasses.replace(whole, out=str(tmp_path / f"out{calls}")), calls):
        killed_after(opts, 7)  # and once more on the way
        prepare(opts, quiet)
        assert contents(tmp_path / f"out{calls}") == contents(tmp_path / "whole")
        assert not list((tmp_path / f"out{calls}").glob("*.part"))
        calls += 3
    assert calls > 30


def test_complete_output_returns_at_once_and_other_options_are_refused(reference, tmp_path, monkeypatch):
    said = []
    opts = options(reference.source, reference.out, shard_tokens=3000, workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_run", None)
        assert prepare(opts, said.append) == reference.manifest
    assert "complete already" in said[0]
    for change in ({"val_fraction": 0.2}, {"seed": 1}, {"shard_tokens": 4000}, {"max_documents": 9}):
        ((name, value),) = change.items()
        with pytest.raises(UserError, match=rf"made otherwise: {name} was .*, now {value}.*another --out, or delete"):
            prepare(options(reference.source, reference.out, **({"shard_tokens": 3000} | change)), quiet)
    changed = write_jsonl(tmp_path / "d.jsonl", [*DOCUMENTS[:-1], "changed"])
    with pytest.raises(UserError, match="source files have changed"):
        prepare(options(changed, reference.out, shard_tokens=3000), quiet)


def test_two_at_once_are_refused(reference, tmp_path):
    with module.alone_in(tmp_path), pytest.raises(UserError, match="another process is making shards"):
        prepare(options(reference.source, tmp_path), quiet)


@pytest.mark.skipif(not PARQUET.is_file(), reason=f"needs {PARQUET}")
def test_wikipedia_articles(tmp_path):
    for workers in (1, 2):
        prepare(
            options(PARQUET, tmp_path / str(workers), max_documents=200, workers=workers, shard_tokens=99_999), quiet
        )
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    batch = next(pq.ParquetFile(PARQUET).iter_batches(batch_size=200, columns=["text"]))
    texts = batch.column(0).to_pylist()
    assert stream(tmp_path / "1", "val") == tokens_of(t for t in texts if chosen(t))


@pytest.fixture
def hub(reference, monkeypatch):
    """A Hub whose one data set is DOCUMENTS; `asked` records what was asked of it."""
    asked = []

    def load(source, name, *, split, revision, streaming):
        assert streaming
        asked.append((source, name, split, revision))
        return real(
            "json", data_files=str(reference.source), split="train", streaming=True, cache_dir=str(reference.out.parent)
        )

    real = datasets.load_dataset
    monkeypatch.setattr(datasets, "load_dataset", load)
    commits = iter(["c0ffee", "later"])
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda *_, **__: SimpleNamespace(sha=next(commits)))
    return asked


def test_a_hub_data_set_streams_from_one_commit_and_goes_on_mid_stream(reference, hub, tmp_path, monkeypatch):
    local = prepare(options(reference.source, tmp_path / "local", val_documents=30, shard_tokens=3000), quiet)
    opts = options("someone/texts", tmp_path, dataset_config="sub", val_documents=30, shard_tokens=3000)
    interrupted_at(monkeypatch, opts, len(local.shards))
    position = Manifest.load(tmp_path).shards[-1]["next"]
    assert position["stream"]["document"] == 256 <= position["document"]
    prepare(opts, quiet)
    assert contents(tmp_path) == contents(tmp_path / "local")
    assert hub == [("someone/texts", "sub", "train", "c0ffee")] * 2
    assert Manifest.load(tmp_path).source["commit"] == "c0ffee"


def test_a_continued_stream_does_not_read_what_it_had(hub):
    text = HubText("someone/texts", None, "train", None, "text")
    late = [d for d in text.documents() if d.index >= 290]
    assert late[0].stream["document"] == 256
    again = list(text.documents(290, late[0].stream))
    assert [d.index for d in again] == list(range(290, 300))
    assert "".join(again[-1].pieces) == DOCUMENTS[-1]


def test_10_a_data_set_that_wants_remote_code(hub, tmp_path, monkeypatch):
    def load(*_, **__):
        raise RuntimeError("Dataset scripts are no longer supported, but found texts.py")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"someone/texts: this data set is a script .* refused; .*parquet"):
        prepare(options("someone/texts", tmp_path), quiet)


def test_9_no_text_column(reference, hub, tmp_path):
    pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), tmp_path / "d.parquet")
    (tmp_path / "d.jsonl").write_text('{"text": "a"}\n{"title": "a", "body": "b"}\n')
    for source, where in (("d.parquet", r"d\.parquet"), ("d.jsonl", r"d\.jsonl, line 2")):
        with pytest.raises(UserError, match=rf"{where}: no column 'text'; there are: title, body.*--text_column"):
            prepare(options(tmp_path / source, tmp_path / "out"), quiet)
    with pytest.raises(UserError, match=r"someone/texts: no column 'content'; there are: id, text"):
        prepare(options("someone/texts", tmp_path / "out", text_column="content"), quiet)
    # nothing was finished, so that the same directory takes the corrected command
    prepare(options(tmp_path / "d.parquet", tmp_path / "out", text_column="body", val_fraction=0), quiet)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text"', r"d\.jsonl, line 2: not JSON"),
        ("d.jsonl", b"[1]\n", r"line 1: a JSON list; expected one object a line"),
        ("d.jsonl", b'{"text": 5}\n', "column 'text' holds int, not text"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9000)[:-20], r"d\.jsonl\.gz: cannot be read .*whole"),
        ("d.jsonl.bz2", b"nonsense", r"d\.jsonl\.bz2: cannot be read"),
        ("d.parquet", b"nonsense", r"d\.parquet: not a parquet file"),
        ("d.txt", b"caf\xe9", r"d\.txt: cannot be read .*UTF-8"),
        ("d.csv", b"text\na", r"d\.csv is not \.txt, \.jsonl"),
        ("d.txt", b"", "leave none for the train split"),
        ("d.txt", b"a b", r"leave none for the val split; change --val_fraction"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        prepare(options(tmp_path / name, tmp_path / "out"), quiet)


def test_1_no_match(tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in (
        ("*.txt", "no file matches"),
        ("d.jsonl", "no file matches"),
        ("empty", "in this directory"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(options(tmp_path / source, tmp_path / "out"), quiet)


def test_options_out_of_range(tmp_path):
    for change in (
        {"val_fraction": 1.0},
        {"workers": 0},
        {"shard_tokens": 0},
        {"max_documents": 0},
        {"shard_tokens": 2**31},
    ):
        ((name, value),) = change.items()
        with pytest.raises(UserError, match=f"--{name} {value}: "):
            prepare(options(SHAKESPEARE, tmp_path, **change), quiet)


def test_prepare_for_training(reference, tmp_path, capsys):
    data = DataConfig(dataset_name=str(tmp_path / "out"), train_text=str(reference.source), val_fraction=0.1)
    prepare_for_training(data)
    assert "done: 2 shards" in capsys.readouterr().out
    prepare_for_training(data)
    assert capsys.readouterr().out == ""
    prepare_for_training(DataConfig(dataset_name=str(tmp_path / "out"), train_text=str(tmp_path / "gone.txt")))
    with pytest.raises(UserError, match=r"gone\.txt: no file matches"):
        prepare_for_training(DataConfig(dataset_name=str(tmp_path / "new"), train_text=str(tmp_path / "gone.txt")))
    command = (
        r"first run: python -m recipe\.data\.prepare --train_text a/b .* --dataset_config sub --val_fraction 0\.5\n"
    )
    with pytest.raises(UserError, match=command):
        prepare_for_training(
            DataConfig(dataset_name=str(tmp_path / "new"), train_text="a/b", dataset_config="sub", val_fraction=0.5)
        )
    prepare_for_training(
        DataConfig(dataset_name=str(tmp_path / "out"), train_text="a/b")
    )  # prepared: no network is needed
    prepare_for_training(DataConfig(dataset_name=str(tmp_path / "none")))


def command_line(*arguments):
    command = [sys.executable, "-m", "recipe.data.prepare", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=60)


def test_the_command(reference, tmp_path):
    ran = command_line(
        "--train_text", reference.source, "--out", tmp_path / "out", "--val_fraction", "0.1", "--shard_tokens", 3000
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    first, last = ran.stdout.splitlines()
    assert first.startswith(f"tokenising {reference.source} into {tmp_path}")
    assert last.startswith(f"done: {len(reference.contents)} shards, ")
    assert "300 documents in " in last
    assert contents(tmp_path / "out") == reference.contents


def test_the_command_refuses_without_a_traceback(tmp_path):
    ran = command_line("--train_text", "no/such-data-set", "--out", tmp_path / "out")  # the tests have no network
    assert ran.returncode == 2
    assert ran.stderr.startswith("error: --train_text no/such-data-set: no such local file, and the Hub says")
    assert "or give local .txt" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_the_command_in_this_process(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "d.parquet").write_bytes(b"nonsense")
    for source, out, message in (
        (tmp_path / "*.txt", tmp_path / "out", "error: --train_text"),  # 1
        (tmp_path / "d.parquet", tmp_path / "out", "error: .*not a parquet file"),
        (SHAKESPEARE, tmp_path / "file", "error: .*Not a directory|error: .*File exists"),
    ):
        assert main(["--train_text", str(source), "--out", str(out)]) == 2
        err = capsys.readouterr().err
        assert re.search(message, err)
    assert main(["--train_text", "x", "--out", "y", "--shard_token", "5"]) == 2
    assert "error: unknown '--shard_token'; did you mean 'shard_tokens'?" in capsys.readouterr().err


def test_workers_of_either_kind_give_the_same_bytes(reference, tmp_path):
    for crew in ({"workers": 1}, {"processes": 2}):
        out = tmp_path / str(crew)
        prepare(options(reference.source, out, shard_tokens=3000, **crew), quiet)
        assert contents(out) == reference.contents


REPEATED = [*DOCUMENTS[:100], *DOCUMENTS[20:60], *DOCUMENTS[100:150], DOCUMENTS[149], *DOCUMENTS[5:9]]


def test_documents_held_out_are_never_trained_on(tmp_path):
    """The first ones by number, the others by their text: equal texts are on one side."""
    source = write_jsonl(tmp_path / "d.jsonl", REPEATED)
    manifest = prepare(options(source, tmp_path / "first", val_documents=30), quiet)
    assert [e["split"] for e in manifest.shards] == ["val", "train"]  # validation can begin before training ends
    assert stream(tmp_path / "first", "val") == tokens_of(REPEATED[:30])
    assert stream(tmp_path / "first", "train") == tokens_of(d for d in REPEATED[30:] if d not in REPEATED[:30])
    prepare(options(source, tmp_path / "drawn", val_fraction=0.2), quiet)
    sides = {}
    for split in ("train", "val"):
        tokens = np.array(stream(tmp_path / "drawn", split))
        sides[split] = {tuple(d) for d in np.split(tokens, np.flatnonzero(tokens == END_OF_TEXT))[1:]}
    assert len(sides["val"]) >= 10
    assert not sides["train"] & sides["val"]


def test_duplicates_are_left_out(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "d.jsonl", REPEATED)
    opts = options(source, tmp_path / "out", val_documents=10, dedup=True, shard_tokens=2000)
    prepare(opts, quiet)
    unique = list(dict.fromkeys(REPEATED))
    assert stream(tmp_path / "out", "val") == tokens_of(REPEATED[:10])
    assert stream(tmp_path / "out", "train") == tokens_of(d for d in unique if d not in REPEATED[:10])
    again = dataclasses.replace(opts, out=str(tmp_path / "again"))
    interrupted_at(monkeypatch, again, 6)
    prepare(again, quiet)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


def test_shuffled_documents_are_the_same_ones(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "d.jsonl")
    opts = options(source, tmp_path / "out", val_documents=20, shuffle_buffer=64, shard_tokens=3000)
    prepare(opts, quiet)
    assert stream(tmp_path / "out", "val") == tokens_of(DOCUMENTS[:20])
    train = np.array(stream(tmp_path / "out", "train"))
    found = [tuple(d) for d in np.split(train, np.flatnonzero(train == END_OF_TEXT))[1:]]
    expected = [tuple(tokens_of([d])) for d in DOCUMENTS[20:] if d]
    assert found != expected
    for lo in range(0, 270, 64):  # within their block
        block = [tuple(tokens_of([d])) for d in DOCUMENTS[20 + lo : 20 + lo + 64] if d]
        assert sorted(found[: len(block)]) == sorted(block)
        assert found[: len(block)] != block
        found = found[len(block) :]
    assert found == []
    other = dataclasses.replace(opts, out=str(tmp_path / "other"), seed=7)
    prepare(other, quiet)
    assert stream(tmp_path / "other", "train") != train.tolist()
    again = dataclasses.replace(opts, out=str(tmp_path / "again"))
    interrupted_at(monkeypatch, again, 6)
    prepare(again, quiet)
    assert contents(tmp_path / "again") == contents(tmp_path / "out")


@pytest.mark.parametrize("changes", [{"dedup": True, "shuffle_buffer": 16}, {"dedup": True}, {"shuffle_buffer": 16}])
def test_killed_anywhere_with_selected_documents(tmp_path, changes):
    path = write_jsonl(tmp_path / "d.jsonl", [*DOCUMENTS[:60], *DOCUMENTS[20:40], *DOCUMENTS[60:80]])
    whole = options(path, tmp_path / "whole", shard_tokens=2000, val_documents=9, **changes)
    prepare(whole, quiet)
    calls = 1
    while killed_after(opts := dataclasses.replace(whole, out=str(tmp_path / f"out{calls}")), calls):
        killed_after(opts, 7)
        prepare(opts, quiet)
        assert contents(tmp_path / f"out{calls}") == contents(tmp_path / "whole")
        calls += 5
    assert calls > 30


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """One document of 40 MB, and 40 MB of documents: well under a gigabyte."""
    (tmp_path / "one.txt").write_text(_text * 36)
    write_jsonl(tmp_path / "many.jsonl", [_text[i : i + 20_000] for i in range(2000)])
    for name in ("one.txt", "many.jsonl"):
        code = (
            "import sys; from recipe.data.prepare.pipeline import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "print(open('/proc/self/status').read())"
        )
        command = [
            sys.executable,
            "-c",
            code,
            "--train_text",
            str(tmp_path / name),
            "--out",
            str(tmp_path / f"{name}.out"),
        ]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
        kilobytes = int(re.search(r"VmHWM:\s+(\d+) kB", ran.stdout).group(1))
        assert kilobytes < 600_000, name


def test_interrupted_within_the_validation_shards_of_shuffled_documents(tmp_path, monkeypatch):
    table = pa.table({"text": DOCUMENTS})
    pq.write_table(table, tmp_path / "d.parquet", row_group_size=30)
    opts = options(tmp_path / "d.parquet", tmp_path / "out", val_documents=200, shuffle_buffer=64, shard_tokens=3000)
    prepare(opts, quiet)
    for calls in (3, 7):
        again = dataclasses.replace(opts, out=str(tmp_path / f"again{calls}"))
        interrupted_at(monkeypatch, again, calls)
        assert Manifest.load(tmp_path / f"again{calls}").shards[-1]["split"] == "val"
        prepare(again, quiet)
        assert contents(tmp_path / f"again{calls}") == contents(tmp_path / "out")


class Failing(HubText):
    """A data set of DOCUMENTS whose connection breaks after some rows, each time it is opened."""

    def __init__(self, breaks, error, say=quiet):
        super().__init__("a/b", None, "train", None, "text", say)
        self.breaks, self.error, self._retries.worked = list(breaks), error, True

    def _rows(self, stream):
        left = self.breaks.pop(0) if self.breaks else 10_000
        start = stream["document"] if stream else 0
        for index in range(start, 300):
            if index - start == left:
                raise self.error
            stream = {"document": index, "state": None} if index % 64 == 0 else stream
            yield index, {"text": DOCUMENTS[index]}, stream


def test_a_broken_stream_gives_each_document_once(monkeypatch):
    waits, said = [], []
    monkeypatch.setattr(time, "sleep", waits.append)
    text = Failing([100, 0, 0, 70, 5], ConnectionError("gone"), said.append)
    assert [d.index for d in text.documents()] == list(range(300))
    assert waits == [1, 2, 4, 1, 1]  # longer while nothing comes
    assert said[0] == "--train_text a/b: ConnectionError: gone; trying again in 1 s from where it stopped"
    assert [d.index for d in Failing([100, 3], ConnectionError()).documents(90)] == list(range(90, 300))


@pytest.mark.parametrize(("error", "attempts"), [(ValueError("not parquet"), 4), (PermissionError("no"), 10_000)])
def test_patience_ends(monkeypatch, error, attempts):
    clock = [0.0]
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    text = Failing([0] * 10_000, error)
    with pytest.raises(UserError, match=rf"--train_text a/b: .*{type(error).__name__}: {error}"):
        next(text.documents())
    assert clock[0] <= 960
    assert 10_000 - len(text.breaks) <= attempts


def test_duplicates_are_told_by_who_has_not_read_what_came_before(tmp_path):
    source = TextFiles([write_jsonl(tmp_path / "d.jsonl", REPEATED)], "text")
    whole = [d.index for d in Deduplicated(source, tmp_path / "a.sqlite").documents()]
    assert [i for i in range(len(REPEATED)) if i not in whole] == [
        i for i, d in enumerate(REPEATED) if d in REPEATED[:i]
    ]
    for first in (30, 120, 193):
        late = Deduplicated(source, tmp_path / f"{first}.sqlite")
        assert [d.index for d in late.documents(first)] == [i for i in whole if i >= first]
        late.commit()
        again = Deduplicated(source, tmp_path / f"{first}.sqlite")
        assert [d.index for d in again.documents(10)] == [i for i in whole if i >= 10]
