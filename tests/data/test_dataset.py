"""The order of the data: a pure function of (seed, step)."""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest

from recipe.config import BatchPlan, MixtureEntry, counts_of
from recipe.data import dataset as dataset_module
from recipe.data.dataset import TokenDataset, check_data, check_same_data
from recipe.data.mixed import MixedDataset
from recipe.data.shards import Shard
from recipe.utils.errors import UserError
from tests.checkpoint import flip_bit
from tests.data import write_shard

T = 8


def make_shards(directory, *lengths, start=0):
    """Shards whose tokens count up from `start`, so that each token is its position."""
    out = []
    for number, length in enumerate(lengths):
        path = directory / f"train_{number:06d}.bin"
        out.append(Shard(path, length, write_shard(path, range(start, start + length))))
        start += length
    return out


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path, 100, 9, 88)  # 12 + 1 + 10 windows: (n - 1) // T


def test_windows_are_slices_at_stride_t_within_a_shard(shards):
    data = TokenDataset(shards, T, 4, seed=1)
    assert data.windows == 23
    rows = data.validation_windows(0, 23)
    assert rows.dtype == np.int64
    starts = [*range(0, 96, T), 100, *range(109, 189, T)]
    assert rows.tolist() == [list(range(start, start + T + 1)) for start in starts]
    assert np.array_equal(data.validation_windows(11, 14), rows[11:14])
    assert data.validation_windows(3, 3).shape == data.sequences(0, 3, 3).shape == (0, T + 1)


def documented_permutation(n: int, seed: int, *key: int) -> list[int]:
    """Rule 3 of "The order of the data" in docs/data.md."""
    return np.random.RandomState([seed % 2**32, seed // 2**32, *key]).permutation(n).tolist()


def documented_sequence(files: list, seed: int, g: int) -> list[int]:
    """Rules 1 and 2: sequence g of a run on these .bin files."""
    shards = [np.fromfile(file, "<u2")[512:] for file in sorted(files)]
    windows = [(len(tokens) - 1) // T for tokens in shards]
    epoch, x = divmod(g, sum(windows))
    s = next(s for s in range(len(shards)) if x < sum(windows[: s + 1]))
    i = documented_permutation(windows[s], seed, epoch, s)[x - sum(windows[:s])]
    return shards[s][i * T : i * T + T + 1].tolist()


def documented_mixture(seed: int, counts: list[int], g: int) -> tuple[int, int]:
    """Rule 5: the data set of sequence g, and the sequence's number in it."""
    q, place = divmod(g, 1000)
    values = documented_permutation(1000, seed, q)[: place + 1]
    *previous, dataset = [next(d for d in range(len(counts)) if v < sum(counts[: d + 1])) for v in values]
    return dataset, q * counts[dataset] + previous.count(dataset)


@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_the_order_is_the_documented_one(shards, tmp_path, seed):
    """The functions above follow docs/data.md and use nothing of recipe.data. Two processes read one data set and a
    mixture of two, in later epochs too; one shard is shorter than a sequence."""
    (tmp_path / "second").mkdir()
    second_shards = make_shards(tmp_path / "second", 70, 8, 30, start=1000)
    files = [[shard.path for shard in group] for group in (shards, second_shards)]
    B, world_size, micro = 12, 2, 3
    sets = [MixtureEntry("a", 667, None), MixtureEntry("b", 333, None)]  # of weights 2 and 1
    assert counts_of([2.0, 1.0]) == [667, 333]
    assert counts_of([0.3, 0.6, 0.7]) == [188, 375, 437]  # from 187.5, 375 and 437.5: the first of equal remainders
    for rank in range(world_size):
        dataset = TokenDataset(shards, T, B, seed)
        mixed = MixedDataset(sets, [dataset, TokenDataset(second_shards, T, B, seed)], B, seed)
        for step, k in itertools.product((0, 1, 17, 4321), range(2)):
            lo, hi = BatchPlan(B, world_size, micro, accumulation=2).slice(k, rank)
            start = step * B + (k * world_size + rank) * micro
            numbers = range(start, start + micro)
            assert dataset.sequences(step, lo, hi).tolist() == [documented_sequence(files[0], seed, g) for g in numbers]
            pairs = [documented_mixture(seed, [667, 333], g) for g in numbers]
            assert mixed.sequences(step, lo, hi).tolist() == [documented_sequence(files[d], seed, g) for d, g in pairs]


def test_a_batch_may_cross_an_epoch_of_a_single_shard(shards):
    batch = TokenDataset(shards[:1], T, 4, 3)
    number = batch.windows - 2  # the last two windows of the first epoch, and the first two of the second
    expected = [documented_sequence([shards[0].path], 3, g) for g in range(number, number + 4)]
    assert batch.windows_at(np.arange(number, number + 4)).tolist() == expected


def test_a_shard_for_both_training_and_validation_is_refused(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    a, b = make_shards(tmp_path / "a", 50, 60), make_shards(tmp_path / "b", 50)
    c = make_shards(tmp_path / "c", 50, start=1000)
    # A step may take all 13 windows of an epoch.
    train, *validations = (TokenDataset(shards, T, 13, seed=1) for shards in (a, c, b, [a[1]]))
    check_data([train], validations[:1])
    gone = replace(a[0], path=tmp_path / "gone.bin")  # by a stream, which deletes what it has read
    unknown = replace(c[0], sha256=None)  # as long, and without a manifest
    check_data([TokenDataset([gone, a[1]], T, 13, seed=1)], [TokenDataset([unknown], T, 13, seed=1)])
    for val in validations[1:]:
        with pytest.raises(UserError, match=r"\.bin \(training\) and .*\.bin \(validation\) hold the same tokens"):
            check_data([train], [val])


def test_resuming_with_other_data_is_refused(shards):
    def state(shards, **changes):
        return TokenDataset(shards, T, 4, seed=1).state_dict() | changes

    full, unhashed = state(shards), state([replace(shard, sha256=None) for shard in shards])
    stream = state(shards[:2], complete=False)  # a stream whose second shard is made
    for saved, current in [*itertools.product((full, unhashed), repeat=2), (stream, full), (full, stream)]:
        check_same_data(saved, current, "data")
    changed = state([shards[0], replace(shards[1], sha256="0" * 64), shards[2]])
    swapped = state([shards[1], shards[0], shards[2]])
    message = r"data does not hold the shards .* \(train_00000\d\.bin differs\).*--fresh"
    for saved, current in ((full, changed), (full, swapped), (stream, swapped), (swapped, stream)):
        with pytest.raises(UserError, match=message):
            check_same_data(saved, current, "data")
    shorter = state(shards[:2])
    message = "does not hold the shards that the checkpoint was trained on; choose another run_name"
    for saved, current in ((full, shorter), (shorter, full)):
        with pytest.raises(UserError, match=message):
            check_same_data(saved, current, "data")


def test_each_epoch_verifies_each_shard_when_it_is_reached(shards, monkeypatch):
    open_shard = Mock(wraps=dataset_module.open_shard)
    monkeypatch.setattr(dataset_module, "open_shard", open_shard)
    data = TokenDataset(shards, T, 4, seed=1)
    for step in range(11):  # 44 of 46 windows of two epochs
        data.sequences(step, 0, 2)
        data.sequences(step, 2, 4)
    assert [call.args[0].path for call in open_shard.mock_calls] == 2 * [shard.path for shard in shards]
    flip_bit(shards[2].path, 500)  # in the unused part of the header
    data = TokenDataset(shards, T, 13, seed=1)
    data.sequences(0, 0, 13)
    message = rf"train_000002\.bin: its SHA-256 is .* but was {shards[2].sha256[:16]}\.\.\. when"
    with pytest.raises(UserError, match=message):
        data.sequences(1, 0, 1)


def test_a_resumed_mixture_verifies_shards_without_a_manifest(shards):
    """By the SHA-256 of the first reading, which the checkpoint has; test_bad_inputs.py resumes a run on one data
    set."""

    def open_data():
        dataset = TokenDataset([replace(shard, sha256=None) for shard in shards], T, 4, seed=1)
        return MixedDataset([MixtureEntry("a", 1000, None)], [dataset], 4, seed=1)

    data, resumed = open_data(), open_data()
    data.sequences(0, 0, 4)
    resumed.load_state_dict(data.state_dict())
    write_shard(shards[0].path, range(1, 101))
    with pytest.raises(UserError, match=r"train_000000\.bin: its SHA-256 is"):
        resumed.sequences(1, 0, 4)
