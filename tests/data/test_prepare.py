"""From text to shards: each format, interruptions, validation data, and what is refused."""

import bz2
import csv
import gzip
import hashlib
import io
import json
import lzma
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from filelock import FileLock

from recipe.config import DataConfig
from recipe.data.documents import MAX_PIECE, Column
from recipe.data.hub_text import HubText
from recipe.data.prepare import directory_lock, main, prepare
from recipe.data.shards import Manifest, ShardWriter, find_shards
from recipe.data.tokenizer import encoding, open_tokenizer
from recipe.utils.errors import Unreachable, UserError
from recipe.utils.log import set_up_logging
from tests import processes
from tests.conftest import ROOT, by_step, flags, launch, ok, tiny_flags
from tests.data import DOCUMENTS, TEXT, contents, data_of, tokens_in, tokens_of, write_jsonl, write_tokens


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The shards of DOCUMENTS, 3000 tokens each, made without an interruption."""
    directory = tmp_path_factory.mktemp("reference")
    text = write_jsonl(directory / "d.jsonl")
    manifest = prepare(data_of(text, directory / "out", shard_tokens=3000))
    return SimpleNamespace(text=text, out=directory / "out", manifest=manifest, contents=contents(directory / "out"))


def test_shards_are_the_documents_in_order_each_after_end_of_text(reference):
    """The last tenth of the tokens is for validation. The first shards are smaller than `shard_tokens`."""
    train, val = tokens_in(reference.out, "train"), tokens_in(reference.out, "val")
    assert train + val == tokens_of(DOCUMENTS)
    assert len(val) == len(train + val) // 10
    counts = [shard.tokens for shard in find_shards(str(reference.out), "train")]
    assert counts[:6] == [300, 600, 1200, 2400, 3000, 3000]
    assert len(counts) > 10
    assert set(counts[4:-1]) == {3000}
    assert 0 < counts[-1] < 3000
    assert (reference.manifest.complete, reference.manifest.documents) == (True, 299)  # two are empty, one is two
    assert {path.name for path in reference.out.glob("*.bin")} == {e["file"] for e in reference.manifest.shards}


OPENERS = {"gz": gzip.open, "bz2": bz2.open, "zst": lambda path, mode: pa.output_stream(str(path), compression="zstd")}


@pytest.mark.parametrize(
    "kind",
    [
        *("ndjson", "jsonl.gz", "json.bz2", "JSONL.ZST", "array.json", "csv", "semicolons.csv", "tabs.csv", "TSV.gz"),
        *("parquet", "arrow", "saved", "cached", "directory", "glob"),
    ],
)
def test_every_format_gives_the_same_bytes(reference, tmp_path, kind, capsys):
    """A directory's other files are skipped, and logged; a glob reads all that it matches."""
    set_up_logging()
    text = tmp_path / f"d.{kind}"
    opener = OPENERS.get(kind.split(".")[-1].lower(), open)
    if kind == "parquet":
        pq.write_table(pa.table({"id": range(300), "text": [d or None for d in DOCUMENTS]}), text, row_group_size=50)
    elif kind == "arrow":
        table = pa.table({"id": range(300), "text": [d or None for d in DOCUMENTS]})
        feather.write_feather(table, text, chunksize=70)
    elif kind == "saved":
        rows = {"id": [*range(300)], "text": [d or None for d in DOCUMENTS]}
        datasets.Dataset.from_dict(rows).save_to_disk(text, num_shards=3)
        saved = datasets.load_from_disk(str(text))
        saved.map(lambda row: {"text": "another"})  # which leaves its result beside the data
        assert list(text.glob("cache-*.arrow"))
    elif kind == "cached":  # by load_dataset
        write_jsonl(tmp_path / "d.jsonl")
        cached = datasets.load_dataset("json", data_files=str(tmp_path / "d.jsonl"), cache_dir=str(tmp_path / "cache"))
        text = Path(cached["train"].cache_files[0]["filename"]).parent
        cached["train"].shuffle()
        assert list(text.glob("cache-*.arrow"))
    elif kind in ("directory", "glob"):
        (tmp_path / "d" / "sub").mkdir(parents=True)
        (tmp_path / "d" / "sub" / "circle").symlink_to("..")
        write_jsonl(tmp_path / "d" / "a.jsonl", DOCUMENTS[:100])
        write_jsonl(tmp_path / "d" / "b.jsonl.gz", DOCUMENTS[100:170], gzip.open)
        pq.write_table(pa.table({"text": DOCUMENTS[170:]}), tmp_path / "d" / "c.parquet")
        for name in ("README.md", "b.text", "b.png", "LICENSE", *["dataset_infos.json"][: kind == "directory"]):
            (tmp_path / "d" / name).write_text("something else")
        text = tmp_path / "d" if kind == "directory" else tmp_path / "d" / "*.[jp][sa]*"
    elif kind == "array.json":
        text.write_text(json.dumps([{"text": document} for document in DOCUMENTS], indent=1))
    elif "sv" in kind.lower():
        with opener(text, "wb") as file, io.TextIOWrapper(file, newline="") as lines:
            lines.write("\n" if "T" in kind else "")  # before the header
            delimiter = {"TSV.gz": "\t", "tabs.csv": "\t", "semicolons.csv": ";", "csv": ","}[kind]
            table = csv.writer(lines, delimiter=delimiter)
            table.writerows([["id", "text"], *([1, document] for document in DOCUMENTS)])
    else:
        write_jsonl(text, opener=opener)
    prepare(data_of(text, tmp_path / "out", shard_tokens=3000))
    assert contents(tmp_path / "out") == reference.contents
    skipped = "4 files skipped: .png .text LICENSE circle/ (.txt, .md, .jsonl,"
    assert (skipped in capsys.readouterr().out) == (kind == "directory")


@pytest.mark.parametrize("name", ["tokens.parquet", "tokens.jsonl"])
def test_a_column_of_tokens_gives_the_bytes_of_its_text(reference, tmp_path, name):
    """Whether or not documents begin or end with end-of-text."""
    tokens = write_tokens(tmp_path / name)
    prepare(data_of(tokens, tmp_path / "out", shard_tokens=3000, text_column="tokens"))
    assert contents(tmp_path / "out") == reference.contents
    for column, message in (("text", "no column 'text'; there are: tokens"), ("token_count", "holds int, neither")):
        with pytest.raises(UserError, match=message):
            prepare(data_of(tokens, tmp_path / "other", text_column=column))
    (tmp_path / "other.jsonl").write_text(json.dumps({"ids": [17, 50257]}))
    with pytest.raises(UserError, match=r"column 'ids' holds token 50257, .* gpt2 ends at 50256; set tokenizer"):
        prepare(data_of(tmp_path / "other.jsonl", tmp_path / "other", text_column="ids"))


def test_text_files_are_one_document_each(tmp_path):
    """Without the byte-order mark. A file name or glob accepts any suffix."""
    for name, text in (("b.py", "second\r\n"), ("a.TXT", "\ufefffirst"), ("c.txt.gz", "third")):
        data = text.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    prepare(data_of(tmp_path / "*.*", tmp_path / "out", val_documents=1))
    assert tokens_in(tmp_path / "out", "val") == tokens_of(["first"])
    assert tokens_in(tmp_path / "out", "train") == tokens_of(["second\r\n", "third"])
    (tmp_path / "noext").write_text(TEXT[:2000])
    (tmp_path / "d.jsonl").write_text('{"text": "a\\ud800b"}')  # JSON may hold a lone surrogate, and UTF-8 may not
    for name, text in (("noext", TEXT[:2000]), ("d.jsonl", "a\ufffdb")):
        prepare(data_of(tmp_path / name, tmp_path / f"{name}.out", val_fraction=0))
        assert tokens_in(tmp_path / f"{name}.out", "train") == tokens_of([text])


STORIES = [TEXT[i * 5000 : i * 5000 + 4990] for i in range(220)]  # more than a reader's chunk of 1 Mi characters


def test_the_manifest_of_many_files_is_short_and_every_one_may_change_it(tmp_path):
    """Each shard writes it, and each checkpoint of a stream holds it: a list of 100,000 files took seconds each."""
    (tmp_path / "text").mkdir()
    for number in range(300):
        (tmp_path / "text" / f"{number:03d}.txt").write_text(f"Text {number}")
    prepare(data := data_of(tmp_path / "text", tmp_path / "out", val_documents=1))
    assert (tmp_path / "out" / "manifest.json").stat().st_size < 5000
    assert prepare(data).source["of"] == 300
    (tmp_path / "text" / "299.txt").write_text("Text 300")
    with pytest.raises(UserError, match="another text or with other settings: the text files differ"):
        prepare(data)


def test_a_literal_end_of_text_separates_documents(tmp_path, monkeypatch):
    """As in tiktoken, wherever a reader's chunks end. A long document has the tokens of its unsplit text, also if the
    preparation is interrupted in the middle of it; the first documents are for validation."""
    text = "<|endoftext|>".join(["", *STORIES[:60], TEXT[:1_111_542], *STORIES[60:], "last" * 300_000, "\n"])
    assert text[2 * MAX_PIECE - 6 :].startswith("<|endoftext|>")  # the end of the second chunk is in a separator
    expected = encoding().encode(text, allowed_special="all")
    (tmp_path / "d.txt").write_text(f"{text}<|endoftext|><|endoftext|>")  # two empty documents
    write_jsonl(tmp_path / "d.jsonl", [text, "<|endoftext|>"])
    for name in ("d.txt", "d.jsonl"):
        data = data_of(tmp_path / name, tmp_path / f"{name}.out", val_documents=30, shard_tokens=50_000)
        for _ in range(2):
            interrupted_at(monkeypatch, data, 6)
            position = Manifest.load(tmp_path / f"{name}.out").shards[-1]["next"]
            assert (position["document"], position["tokens"] > 0) == (60, True)
        assert prepare(data).documents == 223
        val = tokens_in(data.dataset_name, "val")
        assert val == tokens_of(STORIES[:30])
        assert val + tokens_in(data.dataset_name, "train") == expected


def test_the_shards_of_the_shipped_text_never_change(tmp_path):
    """338,025 tokens, as nanoGPT and llm.c count too, and one end-of-text."""
    words = ["--config=shakespeare", "--train_text=recipe/data/tiny_shakespeare.txt", f"--dataset_name={tmp_path}"]
    assert main(words) == 0
    assert tokens_in(tmp_path, "train") + tokens_in(tmp_path, "val") == tokens_of([TEXT])
    shards = {shard["file"]: (shard["tokens"], shard["sha256"][:16]) for shard in Manifest.load(tmp_path).shards}
    assert shards == {"train_000000.bin": (304_224, "72da7942a37d421e"), "val_000000.bin": (33_802, "82c0204e8b499d72")}


def interrupted_at(monkeypatch, data, number):
    """Prepares until the commit of the `number`-th shard, which fails."""
    remaining, commit = iter(range(number - 1)), ShardWriter.commit

    def failing(*arguments):
        if next(remaining, None) is None:
            raise OSError("pulled the plug")
        return commit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "commit", failing)
        with pytest.raises(OSError, match="plug"):
            prepare(data)


def killed_at(data, number):
    """Prepares in a child that is killed at its `number`-th rename, deletion or sync; False if it ends before that."""
    child = os.fork()
    if child == 0:
        remaining = iter(range(number - 1))

        def counted(function):
            def call(*arguments):
                if next(remaining, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments)

            return call

        for name in ("replace", "rename", "fsync", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        prepare(data)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("changes", [{"val_documents": 9}, {"val_fraction": 0.3}])  # at the start; at the end, 2 shards
def test_killed_anywhere_and_run_again_gives_the_same_bytes(tmp_path, changes):
    text = write_jsonl(tmp_path / "d.jsonl", [*DOCUMENTS[:110], *DOCUMENTS[3:12]])
    options = {"shard_tokens": 6000} | changes
    prepare(data_of(text, tmp_path / "uninterrupted", **options))
    number = 1
    while killed_at(data := data_of(text, out := tmp_path / f"out{number}", **options), number):
        killed_at(data, 7)  # and a second time
        prepare(data)
        assert contents(out) == contents(tmp_path / "uninterrupted")
        assert not list(out.glob("*.part"))
        number += 7
    assert number > 20


def test_a_file_is_on_the_disk_before_it_gets_its_name(reference, tmp_path, monkeypatch):
    """Otherwise a power failure could leave an empty shard or manifest."""
    flushed, fsync = set(), os.fsync

    def named() -> set[tuple[int, int]]:
        infos = [path.stat() for name in ("*.bin", "*.json") for path in tmp_path.glob(name)]
        return {(info.st_ino, info.st_size) for info in infos}

    def recorded(descriptor: int) -> None:
        fsync(descriptor)
        info = os.fstat(descriptor)
        flushed.update({(info.st_ino, info.st_size)} - named())

    monkeypatch.setattr(os, "fsync", recorded)
    prepare(data_of(reference.text, tmp_path, shard_tokens=30_000))
    assert len(named()) > 2
    assert named() <= flushed


@pytest.mark.parametrize("changes", [{"val_documents": 9}, {"val_fraction": 0.99}])
def test_a_shard_that_is_damaged_during_an_interruption_is_refused(tmp_path, monkeypatch, changes):
    data = data_of(write_jsonl(tmp_path / "d.jsonl"), tmp_path / "out", shard_tokens=6000, **changes)
    interrupted_at(monkeypatch, data, 4)
    shard = tmp_path / "out" / Manifest.load(tmp_path / "out").shards[0]["file"]
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x00\x01")
    with pytest.raises(UserError, match=rf"{shard}: its SHA-256 is"):
        prepare(data)


def test_complete_shards_are_left_alone_and_other_settings_are_refused(reference, capsys):
    set_up_logging()
    mtime = (reference.out / "manifest.json").stat().st_mtime_ns
    assert prepare(data_of(reference.text, reference.out, shard_tokens=3000)) == reference.manifest
    assert "complete already" in capsys.readouterr().out
    for name, value in {"val_fraction": 0.2, "shard_tokens": 4000, "val_documents": 9}.items():
        changes = {"shard_tokens": 3000} | {name: value}
        with pytest.raises(UserError, match=rf"with other settings: {name} was|val_fraction was 0\.1.*Delete"):
            prepare(data_of(reference.text, reference.out, **changes))
    assert (reference.out / "manifest.json").stat().st_mtime_ns == mtime


def test_of_two_preparations_into_one_directory_one_waits_for_the_other(reference, tmp_path, capsys):
    """As two jobs of an array that are started at once."""
    set_up_logging()
    data = data_of(reference.text, tmp_path / "out", shard_tokens=3000)
    (tmp_path / "out").mkdir()
    acquire = mock.patch.object(FileLock, "acquire", autospec=True, side_effect=FileLock.acquire)
    with ThreadPoolExecutor() as pool, acquire as acquired:
        with directory_lock(tmp_path / "out"):
            waiting = [pool.submit(prepare, data) for _ in range(2)]
            time.sleep(0.5)
            assert not any(future.done() for future in waiting)
            assert not list((tmp_path / "out").glob("*.bin"))
        assert [future.result(timeout=60) for future in waiting] == [reference.manifest] * 2
    assert acquired.call_args_list.count(mock.call(mock.ANY)) == 2  # without a limit
    output = capsys.readouterr().out
    assert output.count("waiting ") == 2
    assert output.count("tokenizing ") == output.count("the other process has made ") == 1


REPEATED = [*DOCUMENTS[:100], *DOCUMENTS[20:60], *DOCUMENTS[100:150], DOCUMENTS[149], *DOCUMENTS[5:9]]


def test_validation_documents_are_never_trained_on(tmp_path, monkeypatch):
    """Nor are their duplicates, also after an interruption, and of documents that lie in two shards."""
    data = data_of(write_jsonl(tmp_path / "d.jsonl", REPEATED), tmp_path / "out", val_documents=31, shard_tokens=1000)
    interrupted_at(monkeypatch, data, 8)
    manifest = prepare(data)
    assert manifest.shards[0]["split"] == "val"  # validation can begin before training ends
    assert tokens_in(tmp_path / "out", "val") == tokens_of(REPEATED[:30])  # 31 documents: one of them is two
    assert tokens_in(tmp_path / "out", "train") == tokens_of(t for t in REPEATED[30:] if t not in REPEATED[:30])


def test_validation_documents_of_a_long_text_come_from_all_over_it(tmp_path, monkeypatch, capsys):
    """Those of docs/data.md, none of which is trained on; the same ones when a lost shard is made again."""
    set_up_logging()
    texts = [f"{i} {TEXT[i * 50 : i * 50 + 200]}" for i in range(2000)] + ["7 again"] * 40
    data = data_of(write_jsonl(tmp_path / "d.jsonl", ["", *texts]), tmp_path / "out", shard_tokens=20_000)
    interrupted_at(monkeypatch, data, 4)
    manifest = prepare(data)
    summary = r" of 2,040 documents: .* validation tokens \(of the text: documents from all over it\) in "
    assert re.search(summary, capsys.readouterr().out)
    documents = {}
    for split in ("train", "val"):
        text = encoding().decode(tokens_in(tmp_path / "out", split))
        documents[split] = text.split("<|endoftext|>")[1:]
    hashes = (hashlib.blake2b(str(d).encode(), digest_size=8).digest() for d in range(len(texts)))
    held_out = [text for text, h in zip(texts, hashes, strict=True) if int.from_bytes(h, "big") / 2**64 < 0.1]
    assert documents["val"] == held_out
    assert not set(documents["val"]) & set(documents["train"])
    assert set(documents["val"]) | set(documents["train"]) == set(texts)
    expected = contents(tmp_path / "out")
    (tmp_path / "out" / manifest.of("train")[2]["file"]).unlink()
    prepare(data)
    assert contents(tmp_path / "out") == expected


def test_files_without_text_do_not_leave_validation_empty(tmp_path):
    """A thousand files are not a thousand documents, of which some would be held out."""
    (tmp_path / "in").mkdir()
    for number in range(1000):
        (tmp_path / "in" / f"{number}.txt").touch()
    write_jsonl(tmp_path / "in" / "text.jsonl", [TEXT[:20_000]])
    manifest = prepare(data_of(tmp_path / "in", tmp_path / "out"))
    assert manifest.validation == " (of the text: the end)"
    train, val = (tokens_in(tmp_path / "out", split) for split in ("train", "val"))
    assert train + val == tokens_of([TEXT[:20_000]])
    assert len(val) == len(train + val) // 10


@pytest.fixture
def clock(monkeypatch):
    """[seconds], which only sleeping moves."""
    seconds = [0.0]
    monkeypatch.setattr(time, "sleep", lambda duration: seconds.__setitem__(0, seconds[0] + duration))
    return seconds


def failing_hub_text(monkeypatch, documents: int) -> HubText:
    """A Hub that fails after this many documents, in each attempt."""

    def rows(_, stream):
        yield from ((number, {"text": "document"}, stream) for number in range(documents))
        raise ConnectionError("gone")

    monkeypatch.setattr(HubText, "_rows", rows)
    return HubText(DataConfig(train_text="a/b"), Column("text", open_tokenizer("gpt2")))


def test_retries_of_the_hub_end_after_15_minutes(clock, monkeypatch):
    """If it has answered before; otherwise there are none."""
    hub = failing_hub_text(monkeypatch, 0)
    with pytest.raises(UserError, match="data set a/b: no such path on this disk, and the Hub reports ConnectionError"):
        next(hub.pieces())
    assert clock[0] == 0
    hub.pin(SimpleNamespace(source={"commit": "a"}, shards=[{}]))  # made from its earlier answers
    with pytest.raises(Unreachable, match="a/b: the Hub, which answered before, reports ConnectionError: gone; the"):
        next(hub.pieces())
    assert 900 <= clock[0] <= 960


def test_documents_that_a_retry_repeats_do_not_extend_the_retries(clock, monkeypatch):
    """A retry resumes at one of every 256 documents, so it may repeat some before it fails at the same one."""
    pieces = failing_hub_text(monkeypatch, 1).pieces()
    assert next(pieces).content == "document"
    with pytest.raises(Unreachable, match="the Hub, which answered before, reports ConnectionError: gone"):
        next(pieces)
    assert 900 <= clock[0] <= 960


def test_each_document_has_retries_of_its_own(clock, monkeypatch, caplog):
    """However many failures a long stream has met before."""
    failing = set(range(1, 30))

    def rows(_, stream):
        for number in range(30):
            if number in failing:
                failing.remove(number)
                raise ConnectionError("gone")
            yield number, {"text": f"document {number}"}, stream

    monkeypatch.setattr(HubText, "_rows", rows)
    pieces = HubText(DataConfig(train_text="a/b"), Column("text", open_tokenizer("gpt2"))).pieces()
    assert [piece.content for piece in pieces] == [f"document {number}" for number in range(30)]
    assert caplog.text.count("a/b: ConnectionError: gone; trying again in 1 s from where it stopped") == 29


def zipped(data: bytes) -> bytes:
    """Without the time: the bytes are part of a test's name, on which pytest-xdist's workers must agree."""
    return gzip.compress(data, mtime=0)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("d.jsonl", b'{"text": "a"}\n{"text"', r", line 2: not a JSON object on one line \("),
        ("d.json", b'{\n "text": "a"\n}\n', ", line 1: not a JSON object on one line .*; expected one object per line"),
        ("d.jsonl", b"[1]\n", ", line 1: a JSON list; expected one object per line"),
        ("d.jsonl", b'{"text": [{"role": "user"}]}\n', r"'text' holds list, .* \(docs/data\.md converts chats"),
        ("d.jsonl.gz", zipped(b'{"text": "a"}\n' * 9000)[:-20], " cannot be read .*complete"),
        ("d.parquet", b"nonsense", r" cannot be read \(.*\); copy or download it again$"),
        ("d.arrow", b"nonsense", r" cannot be read \(.*\); copy or download it again$"),
        ("d.parquet", LFS_POINTER, r" is a pointer of Git LFS: fetch the file by git lfs pull or hf download$"),
        ("d.txt", LFS_POINTER, " is a pointer of Git LFS: "),
        ("d.json.gz", LFS_POINTER, " is a pointer of Git LFS: "),
        ("d.json", b'[{"text": "a"}, 5]', r", item 2: a JSON int; expected one object per line, or in \.json"),
        ("d.csv", b'id,text\n1,"a', ", line 2: unexpected end of data; is a quote not closed"),
        ("d.csv", b"id,text\n1,a,\n2,b,c\n", ", line 3: fields unlike the header; quote texts .* ','"),
        ("d.tsv", b"id\ttext\n1\ta\n2\n", r", line 3: fields unlike the header; quote .* '\\t'"),
        ("d.csv", b"y" * 3000 + b"\n", r"no column 'text'; there are: y{40}\. Choose"),
        (
            "d.csv",
            b"id;body;note\n1;a;b\n",
            r"there are: id;body;note\. .*--text_column; the first line must name the columns, separated by ',' or ",
        ),
        ("d.csv", b"id,text\r1,a\r", r": its lines end in CR; convert it: tr '\\r' '\\n' < FILE > NEW"),
        ("d.tsv", b"id,text\n1,a\n", r": no column 'text'; there are: id,text\. .* separated by '\\t'"),
        ("d.csv", b"text,text\na,b\n", "2 columns are called 'text'; rename one"),
        ("d.csv", b"", "holds no text"),
        ("thesis.docx", b"PK\x03\x04...", r" is a ZIP archive, as \.docx, .* save its text as \.txt$"),
        ("thesis.pdf", b"%PDF-1.7", r" is a PDF: convert it by pdftotext$"),
        (
            "d.txt",
            b"caf\xe9",
            r" cannot be read \(not UTF-8: byte 0xe9\); .* iconv -f ENCODING -t UTF-8 .* -c .*drops",
        ),
        ("d.txt", "plain".encode("utf-16"), r" is text in UTF-16: convert it by iconv -f UTF-16 -t UTF-8 FILE > NEW$"),
        (
            "d.txt",
            "plain".encode("utf-16-le"),
            r" cannot be read \(it holds NUL .* iconv -f UTF-16LE -t UTF-8 .* tr -d",
        ),
        ("d.txt.xz", lzma.compress(b"plain"), r" is compressed by xz: unpack it by xz -dk$"),
        ("d.txt", b"plain " * 400 + bytes(2000), r" cannot be read \(it holds NUL characters\)"),
        ("d.txt", zipped(b"plain"), r" cannot be read \(not UTF-8: byte 0x8b\); .* Unpack it, or convert it"),
        ("d.txt.zst", b"nonsense", " cannot be read"),
        ("d.tar.gz", zipped(b"a.txt" + bytes(507) + b"text" * 9000), r" cannot be read \(it holds NUL .* unpack it"),
        ("d.txt", b"\xef\xbb\xbf", "holds no text"),
        ("d.txt", b"a few words", r": val_fraction 0\.0001 of 4 tokens is less than one; give more text, or raise "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_a_way_out(tmp_path, name, data, message):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    with pytest.raises(UserError, match=rf"(?s){re.escape(name)}.*{message}"):
        prepare(data_of(tmp_path / "in" / name, tmp_path / "out", val_fraction=1e-4))


def test_a_row_without_the_key_is_an_empty_document_unless_the_first_100_lack_it(tmp_path, capsys):
    """As logs, and the exports of Spark and BigQuery, omit what is empty."""
    set_up_logging()
    (tmp_path / "d.jsonl").write_text('{"id": 1}\n' * 100 + '{"text": "a"}')
    with pytest.raises(UserError, match=r"d\.jsonl, line 100: no column 'text'; there are: id"):
        prepare(data_of(tmp_path / "d.jsonl", tmp_path / "out", val_fraction=0))
    (tmp_path / "d.jsonl").write_text('{"id": 2}\n{"text": "a"}\n{"text": null}\n{"text": "b"}\n')
    prepare(data_of(tmp_path / "d.jsonl", tmp_path / "out", val_fraction=0))
    assert tokens_in(tmp_path / "out", "train") == tokens_of(["a", "b"])
    assert "d.jsonl: 1 of 4 rows have no 'text'\n" in capsys.readouterr().out


def test_of_several_files_one_that_cannot_be_used_need_not_be(tmp_path):
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    message = r"package\.json, line 1: no column 'text'; .* \(a quoted glob can name the files without this one\)"
    with pytest.raises(UserError, match=message):
        prepare(data_of(tmp_path, tmp_path / "out"))


def test_the_documented_way_to_make_text_of_chats(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 2)
    page = (ROOT / "docs" / "data.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "chats" in block]
    exec(code, {})
    prepare(data_of("texts.jsonl", tmp_path / "out", val_fraction=0))
    assert tokens_in(tmp_path / "out", "train") == tokens_of(["user: Hi\nassistant: Hello"] * 2)


def test_the_command_makes_the_same_shards_and_summarizes_them(reference, tmp_path, capsys):
    command = ["--train_text", str(reference.text), "--val_fraction", "0.1", "--shard_tokens", "3000"]
    result = ok(processes.run("-m", "recipe.data.prepare", *command, "--dataset_name", str(tmp_path / "out")))
    start, summary = result.stdout.splitlines()
    assert start.startswith(f"data       tokenizing {reference.text} into {tmp_path}")
    assert f"{len(reference.contents)} shards of 299 documents: " in summary
    assert " validation tokens (of the text: the end) in " in summary
    assert contents(tmp_path / "out") == reference.contents
    assert main([*command, "--dataset_name", str(reference.out.parent)]) == 2
    assert "holds other files" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["d.txt", "d.txt.gz", "d.jsonl", "d.parquet"])
def test_progress_moves_within_a_file(tmp_path, monkeypatch, capsys, name):
    """In bytes. Without a terminal, the bar is printed once a minute; here, each time."""
    monkeypatch.setattr("recipe.data.prepare.BETWEEN_BARS_S", 0)
    monkeypatch.setattr("recipe.data.documents.usable_cores", lambda: 1)  # more would read all before they tokenize
    if name == "d.jsonl":
        write_jsonl(tmp_path / name, STORIES * 3)
    elif name == "d.parquet":
        pq.write_table(pa.table({"text": STORIES * 3}), tmp_path / name)
    else:
        with (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wb") as file:
            file.write((TEXT * 3).encode())
    prepare(data_of(tmp_path / name, tmp_path / "out"))
    percentages = [int(number) for number in re.findall(r"(\d+)%\|", capsys.readouterr().err)]
    assert percentages == sorted(percentages)
    assert len(set(percentages)) >= 3
    assert percentages[-1] == 100


def test_progress_of_documents_held_out_is_not_that_of_the_training_text(tmp_path, monkeypatch, capsys):
    """Both read all of the text: with one bar, it would be at 100 % before any training text is tokenized."""
    monkeypatch.setattr("recipe.data.prepare.BETWEEN_BARS_S", 0)
    monkeypatch.setattr("recipe.data.documents.usable_cores", lambda: 1)
    write_jsonl(tmp_path / "d.jsonl", [f"{story} {i}" for i, story in enumerate(STORIES * 20)])
    manifest = prepare(data_of(tmp_path / "d.jsonl", tmp_path / "out", val_fraction=0.1))
    assert manifest.validation.endswith("documents from all over it)")
    printed = [line for line in re.split("[\r\n]", capsys.readouterr().err) if "%|" in line]
    for split in ("val", "train"):
        percentages = [int(line.split(":")[1].split("%")[0]) for line in printed if line.startswith(f"{split}:")]
        assert percentages == sorted(percentages)
        assert len(percentages) >= 3
        assert percentages[-1] == 100


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_memory_does_not_grow_with_the_text(tmp_path):
    """600 MB are enough for one document of 40 MB, and for 40 MB of documents."""
    (tmp_path / "one.txt").write_text(TEXT * 36)
    write_jsonl(tmp_path / "many.jsonl", [TEXT[i : i + 20_000] for i in range(2000)])
    for name in ("one.txt", "many.jsonl"):
        code = (
            "import sys; from recipe.data.prepare import main\n"
            "assert main(sys.argv[1:]) == 0\n"
            "print(open('/proc/self/status').read())"
        )
        words = flags(train_text=tmp_path / name, dataset_name=tmp_path / f"{name}.out")
        command = [sys.executable, "-c", code, *words]
        result = ok(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300))
        assert int(re.search(r"VmHWM:\s+(\d+) kB", result.stdout)[1]) < 600_000, name


SLOW = """
import sys, time
from datetime import timedelta
import recipe.data.open
import recipe.engine.strategy
from recipe.train import main

def prepare(data, prepare=recipe.data.open.prepare):
    time.sleep(20)
    prepare(data)

def start(*arguments, start=recipe.data.open.BuilderProcess):
    time.sleep(20)
    return start(*arguments)

recipe.engine.strategy.TIMEOUT, recipe.data.open.prepare = timedelta(seconds=10), prepare
recipe.data.open.BuilderProcess = start
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_other_processes_wait_for_a_text_longer_than_for_a_collective_call(tmp_path, streaming):
    """The main process prepares it, or starts its stream, for 20 s, and a collective call times out after 10 s (by
    default, 40 minutes)."""
    (tmp_path / "d.txt").write_text(f"{TEXT[:10_000]}<|endoftext|>{TEXT[10_000:]}")
    (tmp_path / "train.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{SLOW}")
    command = tiny_flags(tmp_path / "d.txt", tmp_path / "run", max_steps=2, warmup_steps=1)
    command += ["--streaming=true", "--val_documents=1"] if streaming else []
    ok(launch("ddp", 2, tmp_path / "train.py", *command, cwd=tmp_path))
    assert by_step(tmp_path / "run")[2]["val_loss"] > 0
