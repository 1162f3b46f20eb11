"""The shard format, the manifest, and what is refused. Numbers in names are QUALITY's bad inputs."""

import dataclasses
import hashlib
import os

import numpy as np
import pytest

from recipe.data import shards
from recipe.data.shards import (
    Manifest,
    Shard,
    describe_shards,
    find_shards,
    read_shard,
    unigram_loss,
    verify,
    write_shard,
)
from recipe.errors import UserError


def a_shard(path, tokens):
    return Shard(path, len(tokens), write_shard(path, np.array(tokens, np.uint16)))


def patch_file(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_bytes_on_disk_are_llm_c_s(tmp_path):
    path = tmp_path / "a.bin"
    digest = write_shard(path, np.array([1, 50256, 258], np.uint16))
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 3
    assert path.read_bytes() == header.tobytes() + bytes([1, 0, 0x50, 0xC4, 2, 1])
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert read_shard(path).tolist() == [1, 50256, 258]
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    write_shard(path, np.array([1], np.uint16))
    monkeypatch.setattr(shards.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_shard(path, np.array([2, 3], np.uint16))
    assert read_shard(path).tolist() == [1]
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.arange(1000, dtype="<i4").tobytes(), "bare tokens of 4 bytes each"),
        (np.array([4711, 1, 10] + [0] * 253, "<i4").tobytes() + bytes(20), "magic number 4711, expected 20240520"),
        (np.arange(1, 1000, dtype=">u2").tobytes(), "bare tokens in big-endian order"),
        (np.array([20240801, 7, 10] + [0] * 253, "<i4").tobytes() + bytes(40), "Llama 3 format with uint32"),
        (np.array([20240520, 1, 10] + [0] * 253, ">i4").tobytes() + bytes(20), "big-endian"),
        (b"PAR1" + b"\xff" * 2000, "not a token shard"),
        (b"short", "5 bytes, less than a shard's header"),
        (np.array([20240520, 2, 10] + [0] * 253, "<i4").tobytes() + bytes(20), "shard version 2, expected 1"),
    ],
)
def test_2_wrong_magic_or_version(tmp_path, content, message):
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read_shard(path)
    assert str(path) in str(error.value)
    assert "recipe.data.prepare" in str(error.value)


def test_nanogpts_files_without_a_header(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 50257, 3000).astype("<u2")
    tokens[::7] = 0  # "!"
    for name in ("train.bin", "val.bin"):
        tokens.tofile(tmp_path / name)
    (train,) = find_shards(str(tmp_path), "train")
    assert read_shard(train.path).tolist() == tokens.tolist()
    assert describe_shards([train]) == "3,000 tokens in 1 shard (nanoGPT's format: uint16 without a header)"
    assert describe_shards([a_shard(tmp_path / "a.bin", range(9))] * 2) == "18 tokens in 2 shards"
    verify(train, read_shard(train.path))


@pytest.mark.parametrize(
    ("resize", "message"),
    [
        (1024 + 19, "10 tokens .20 bytes., the file has 19 bytes.*cut short"),
        (1024 + 22, "22 bytes.*header is wrong"),
        (1024 + 40, "4 bytes each, not uint16"),
    ],
)
def test_3_and_5_count_differs_from_size(tmp_path, resize, message):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(10, dtype=np.uint16))
    path.write_bytes(path.read_bytes().ljust(resize, b"\0")[:resize])
    with pytest.raises(UserError, match=message):
        read_shard(path)


def test_4_a_token_beyond_the_vocabulary(tmp_path):
    shard = a_shard(tmp_path / "a.bin", [5, 50256, 50257, 60000])
    with pytest.raises(UserError, match=r"a\.bin: token 50257 at position 2.*50256"):
        verify(shard, read_shard(shard.path))


def test_5_byte_order_of_the_tokens(tmp_path):
    shard = a_shard(tmp_path / "a.bin", np.array([1, 250], ">u2").view("<u2"))  # 250 reads as 64000
    with pytest.raises(UserError, match="byte order"):
        verify(shard, read_shard(shard.path))


@pytest.mark.parametrize("offset", [1024 + 5, 500])  # in a token; in the unused part of the header
def test_8_checksum_differs(tmp_path, offset):
    shard = a_shard(tmp_path / "a.bin", range(100))
    verify(shard, read_shard(shard.path))
    patch_file(shard.path, offset, b"\x01")
    with pytest.raises(UserError, match=rf"a\.bin: its SHA-256 is .* {shard.sha256[:16]}\.\.\. in the manifest"):
        verify(shard, read_shard(shard.path))
    verify(dataclasses.replace(shard, sha256=None), read_shard(shard.path))


def test_find_without_a_manifest(tmp_path):
    for name in ("fineweb_train_000002.bin", "fineweb_train_000001.bin", "fineweb_val_000000.bin"):
        write_shard(tmp_path / name, np.arange(7, dtype=np.uint16))
    train = find_shards(str(tmp_path), "train")
    assert [s.path.name for s in train] == ["fineweb_train_000001.bin", "fineweb_train_000002.bin"]
    assert [(s.tokens, s.sha256) for s in train] == [(7, None)] * 2
    assert [s.path.name for s in find_shards(str(tmp_path), "val")] == ["fineweb_val_000000.bin"]
    by_glob = find_shards(str(tmp_path / "*_val_*.bin"), "train")  # a glob is taken as it is
    assert [s.path.name for s in by_glob] == ["fineweb_val_000000.bin"]


def test_1_nothing_matches(tmp_path):
    for data in (tmp_path / "none", tmp_path / "*.bin"):
        with pytest.raises(
            UserError, match=r"no such directory, and no \.bin file matches.*recipe\.data\.prepare"
        ) as error:
            find_shards(str(data), "train")
        assert str(data) in str(error.value)
    with pytest.raises(UserError, match=r"no file matches \*val\*\.bin"):
        find_shards(str(tmp_path), "val")


def manifest_of(tmp_path, **changes):
    entries = []
    for name in ("train_000001.bin", "train_000000.bin"):
        shard = a_shard(tmp_path / name, range(9))
        entries.append({"file": name, "split": "train", "tokens": 9, "sha256": shard.sha256})
    manifest = Manifest(**({"source": {}, "options": {}, "complete": True, "shards": entries} | changes))
    manifest.save(tmp_path)
    return manifest


def test_find_with_a_manifest(tmp_path):
    manifest = manifest_of(tmp_path)
    write_shard(tmp_path / "train_999999.bin", np.arange(9, dtype=np.uint16))  # not of this manifest
    assert Manifest.load(tmp_path) == manifest
    found = find_shards(str(tmp_path), "train")
    assert [s.path.name for s in found] == ["train_000000.bin", "train_000001.bin"]
    assert found[0].sha256 == manifest.shards[1]["sha256"]
    with pytest.raises(UserError, match="without a val split"):
        find_shards(str(tmp_path), "val")


def test_manifests_that_cannot_be_used(tmp_path):
    manifest_of(tmp_path, complete=False)
    with pytest.raises(UserError, match="interrupted; run the same prepare command again"):
        find_shards(str(tmp_path), "train")
    manifest_of(tmp_path, format_version=2)
    with pytest.raises(UserError, match="format 2"):
        find_shards(str(tmp_path), "train")
    manifest_of(tmp_path)
    (tmp_path / "train_000001.bin").unlink()
    with pytest.raises(UserError, match=r"train_000001\.bin: listed in manifest\.json, but gone"):
        find_shards(str(tmp_path), "train")
    write_shard(tmp_path / "train_000001.bin", np.arange(8, dtype=np.uint16))
    with pytest.raises(UserError, match=r"train_000001\.bin: does not hold the 9 tokens"):
        find_shards(str(tmp_path), "train")
    for content in ('{"complete": tr', "[" * 100_000, "{}"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(UserError, match=r"manifest\.json: not a manifest"):
            find_shards(str(tmp_path), "train")


def test_links_that_leave_a_data_directory_are_refused(tmp_path):
    """A directory may come from somebody else: its manifest and its shards are files of its own."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "mine").mkdir()
    manifest_of(tmp_path / "mine")
    for name in ("manifest.json", "train_000001.bin"):
        manifest_of(tmp_path / "theirs")
        (tmp_path / "theirs" / name).unlink()
        (tmp_path / "theirs" / name).symlink_to(tmp_path / "mine" / name)
        with pytest.raises(UserError, match=f"{name} is a .*link"):
            find_shards(str(tmp_path / "theirs"), "train")
        (tmp_path / "theirs" / name).unlink()
    (tmp_path / "theirs" / "manifest.json").unlink(missing_ok=True)
    (tmp_path / "theirs" / "train_000001.bin").symlink_to(tmp_path / "mine" / "train_000001.bin")
    with pytest.raises(UserError, match=r"train_000001\.bin is a link that leaves its directory"):
        find_shards(str(tmp_path / "theirs"), "train")


def test_unigram_loss_by_hand(tmp_path):
    train, val = a_shard(tmp_path / "t.bin", [0, 0, 0, 1]), a_shard(tmp_path / "v.bin", [0, 2])
    total = 4 + 0.01 * 50257
    expected = -(np.log(3.01 / total) + np.log(0.01 / total)) / 2
    assert unigram_loss([train], [val]) == pytest.approx(expected, abs=1e-12)


def test_unigram_loss_is_bounded(tmp_path, monkeypatch):
    shard = a_shard(tmp_path / "t.bin", [7] * 60 + [8] * 40)
    counts = shards._counts([shard, shard], 80)
    assert (counts[7], counts[8], counts.sum()) == (60, 20, 80)
    assert shards._counts([shard, shard], 150).sum() == 150
