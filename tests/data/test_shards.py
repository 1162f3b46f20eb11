"""The shard format, the manifest, and files that are refused."""

import hashlib
import json
import os

import numpy as np
import pytest

from recipe.data.shards import Manifest, ShardReader, find_shards
from recipe.utils.errors import UserError
from recipe.utils.shards import UINT16, UINT32, dtype_of
from tests.data import write_shard


def header(*numbers, order="<"):
    return np.array([*numbers] + [0] * (256 - len(numbers)), f"{order}i4").tobytes()


def test_a_shard_has_the_bytes_of_llm_c(tmp_path):
    path = tmp_path / "a.bin"
    digest = write_shard(path, [1, 50256, 258])
    assert path.read_bytes() == header(20240520, 1, 3) + bytes([1, 0, 0x50, 0xC4, 2, 1])
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert ShardReader(path).read().tolist() == [1, 50256, 258]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_shard_of_a_larger_vocabulary_has_the_bytes_of_llm_c_for_llama_3(tmp_path):
    path, tokens = tmp_path / "a.bin", [1, 128_000, 258, 7]
    write_shard(path, tokens, UINT32)
    assert path.read_bytes() == header(20240801, 7, 4) + np.array(tokens, "<i4").tobytes()
    assert ShardReader(path).read(3).tolist() == tokens[:3]
    assert ShardReader(path).spans(np.array([0, 2]), 2).tolist() == [tokens[:2], tokens[2:]]
    np.save(tmp_path / "a.npy", np.array(tokens * 99, np.uint32))
    assert ShardReader(tmp_path / "a.npy").spans(np.array([5]), 3).tolist() == [[128_000, 258, 7]]
    assert [dtype_of(size) for size in (50_257, 65_536, 65_537)] == [UINT16, UINT16, UINT32]


GOOD = np.arange(1, 1000, dtype="<u2")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(4711, 1, 999) + GOOD.tobytes(), "begins with 4711, 1, not 20240520, 1 or 20240801, 7.*another tok"),
        (header(20240801, 7, 999) + GOOD.tobytes(), r"999 tokens \(3996 bytes\), but 1998 .* not uint32"),
        (header(20240520, 2, 999) + GOOD.tobytes(), "begins with 20240520, 2, not 20240520, 1 or"),
        (GOOD.astype("<i4").tobytes(), r"type \(without a header uint16 is read\) or byte order"),
        (GOOD.astype(">u2").tobytes(), "byte order"),
        (header(20240520, 1, 999, order=">") + GOOD.tobytes(), "byte order"),
        (header(20240520, 1, 0), "1,024 bytes are too few for a shard"),
        (header(20240520, 1, 999) + GOOD.tobytes()[:-1], r"999 tokens \(1998 bytes\), but 1997 bytes .*cut short"),
        (header(20240520, 1, 999) + GOOD.astype("<u4").tobytes(), "tokens are not uint16"),
        (GOOD.tobytes()[:-1], "1,997 bytes for tokens of two each: the file was cut short"),
    ],
)
def test_a_file_that_is_no_shard_is_refused(tmp_path, content, message):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"{tmp_path}/a\.bin: .*{message}"):
        ShardReader(tmp_path / "a.bin")


def test_files_of_fewer_bits_than_a_vocabulary_needs_are_refused(tmp_path):
    """GPT-2's of llm.c; and nanoGPT's of 32 bits, which look like twice as many tokens of 16."""
    write_shard(tmp_path / "gpt2.bin", GOOD)
    np.arange(66_000, 70_000, dtype=np.uint32).tofile(tmp_path / "nano.bin")
    messages = {"gpt2": "its tokens have 16 bits, too few for a vocabulary of 70,000", "nano": "not a shard of llm.c"}
    for name, message in messages.items():
        with pytest.raises(UserError, match=rf"{name}\.bin: {message}"):
            ShardReader(tmp_path / f"{name}.bin", 70_000)


def test_shards_without_a_manifest_are_found_by_name(tmp_path):
    for name in ("fineweb_train_000002.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        write_shard(tmp_path / name, range(7))
    train = find_shards(str(tmp_path), "train")
    assert [(shard.path.name, shard.tokens, shard.sha256) for shard in train] == [
        ("fineweb_train_000001.bin", 7, None),
        ("fineweb_train_000002.bin", 7, None),
    ]
    assert [shard.path.name for shard in find_shards(str(tmp_path), "val")] == ["fineweb_val_000000.bin"]
    by_glob = find_shards(str(tmp_path / "*_val_*.bin"), "train")  # a glob is taken as it is
    assert [shard.path.name for shard in by_glob] == ["fineweb_val_000000.bin"]
    with pytest.raises(UserError, match=r"val_data .*none: no such file"):
        find_shards(str(tmp_path / "none"), "val")
    (tmp_path / "fineweb_val_000000.bin").unlink()
    with pytest.raises(UserError, match=r"but no manifest\.json and no \*val\*\.bin; prepare the text"):
        find_shards(str(tmp_path), "val")
    (tmp_path / "mine.txt").write_text("text beside a file of something else")
    with pytest.raises(UserError, match=r"train_000001\.bin, .*; to use its text alone, name '.*/\*\.txt'"):
        find_shards(str(tmp_path), "val")


def test_the_shards_of_build_nanogpt_are_read(tmp_path):
    for name, tokens in (("val_000000", GOOD[:600]), ("train_000001", GOOD)):
        np.save(tmp_path / f"edufineweb_{name}.npy", tokens)
    (shard,) = find_shards(str(tmp_path), "train")
    assert (shard.path.name, shard.tokens) == ("edufineweb_train_000001.npy", 999)
    assert ShardReader(shard.path).spans(np.array([0, 990]), 9).tolist() == [GOOD[:9].tolist(), GOOD[990:].tolist()]
    assert ShardReader(shard.path).read().tolist() == GOOD.tolist()
    np.save(tmp_path / "a.npy", GOOD.astype(np.int64))
    with pytest.raises(UserError, match=r"a\.npy: an array of int64 with 1 dimensions; a \.npy shard must have one"):
        ShardReader(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(shard.path.read_bytes()[:1500])
    with pytest.raises(UserError, match=r"a\.npy cannot be read .* copy it again"):
        ShardReader(tmp_path / "a.npy")


# Fields of a shard in a manifest
BAD = [("file", name) for name in ("../train_000000.bin", "/etc/passwd", "train_000001.bin", "a.bin", "", None, 3)]
BAD += [("split", ".."), ("tokens", 0), ("tokens", "9"), ("tokens", True), ("sha256", None), ("sha256", "0")]
BAD += [("next", None), ("next", {"document": -1, "tokens": 0})]


def test_shards_with_a_manifest_are_those_it_lists(tmp_path):
    def manifest_of(**changes):
        entries = []
        for name in ("train_000000.bin", "train_000001.bin"):
            digest, start = write_shard(tmp_path / name, range(9)), {"document": 0, "tokens": 0, "stream": None}
            entries.append({"file": name, "split": "train", "tokens": 9, "sha256": digest, "next": start})
        manifest = Manifest(**({"source": {}, "options": {}, "complete": True, "shards": entries} | changes))
        manifest.save(tmp_path)
        return manifest

    manifest = manifest_of()
    write_shard(tmp_path / "train_999999.bin", range(9))  # not of this manifest
    assert Manifest.load(tmp_path) == manifest
    shards = find_shards(str(tmp_path), "train")
    assert [shard.path.name for shard in shards] == ["train_000000.bin", "train_000001.bin"]
    assert shards[0].sha256 == manifest.shards[0]["sha256"]
    with pytest.raises(UserError, match="without a val split"):
        find_shards(str(tmp_path), "val")
    (tmp_path / "train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"train_000001\.bin: listed in manifest\.json, but the file is gone"):
        find_shards(str(tmp_path), "train")
    manifest_of(complete=False)
    with pytest.raises(UserError, match="interrupted; run the same prepare command again"):
        find_shards(str(tmp_path), "train")
    manifest_of(format_version=2)
    with pytest.raises(UserError, match="format 2"):
        find_shards(str(tmp_path), "train")
    good = json.loads((tmp_path / "manifest.json").read_text()) | {"format_version": 1}
    entry = good["shards"][0]
    bad = ['{"complete": tr', "{}", "[" * 100_000, "3", json.dumps(good | {"pickle": ""})]
    bad += [json.dumps(good | {"shards": [entry | {name: value}]}) for name, value in BAD]
    for content in bad:
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=r"manifest\.json cannot be read \(.+\); .*delete .* and prepare again$"):
            find_shards(str(tmp_path), "train")
