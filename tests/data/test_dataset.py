"""The order of the data: a pure function of (seed, step). Numbers in names are QUALITY's bad inputs."""

import itertools

import numpy as np
import pytest

from recipe.config import BatchPlan, MixtureEntry, counts_of
from recipe.data import dataset as dataset_module
from recipe.data.dataset import TokenDataset, check_data, check_same_data
from recipe.data.mixed import MixedDataset
from recipe.data.shards import Shard
from recipe.utils.errors import UserError
from tests.data import write_shard

T = 8


def make_shards(directory, *lengths, start=0):
    """Shards whose tokens count on from `start`, so that a token tells where it stood."""
    out = []
    for i, n in enumerate(lengths):
        path = directory / f"train_{i:06d}.bin"
        out.append(Shard(path, n, write_shard(path, range(start, start + n))))
        start += n
    return out


@pytest.fixture
def three(tmp_path):
    return make_shards(tmp_path, 100, 9, 88)  # 12 + 1 + 10 windows: (n - 1) // T


def test_windows_are_slices_at_stride_t_within_a_shard(three):
    data = TokenDataset(three, T, 4, seed=1)
    assert data.windows == 23
    rows = data.validation_windows(0, 23)
    assert rows.dtype == np.int64
    starts = [*range(0, 96, T), 100, *range(109, 189, T)]
    assert rows.tolist() == [list(range(s, s + T + 1)) for s in starts]
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
    """Rule 5: which data set gives sequence g, and which of its own it is."""
    q, place = divmod(g, 1000)
    drawn = documented_permutation(1000, seed, q)[: place + 1]
    of = [next(d for d in range(len(counts)) if v < sum(counts[: d + 1])) for v in drawn]
    return of[-1], q * counts[of[-1]] + of[:-1].count(of[-1])


@pytest.mark.parametrize("seed", [0, 1337, 2**63 - 1])
def test_the_documented_rule_is_the_order(three, tmp_path, seed):
    """Written from the page alone, and from nothing of recipe.data: also where several processes read a mixture, in a
    later epoch, and past a shard that is shorter than a sequence (6)."""
    (tmp_path / "other").mkdir()
    other = make_shards(tmp_path / "other", 70, 8, 30, start=1000)
    files = [[shard.path for shard in shards] for shards in (three, other)]
    B, world_size, micro = 12, 2, 3
    sets = [MixtureEntry("a", 667, None), MixtureEntry("b", 333, None)]  # of weights 2 and 1
    assert counts_of([2.0, 1.0]) == [667, 333]
    assert counts_of([0.3, 0.6, 0.7]) == [188, 375, 437]  # of 187.5, 375 and 437.5: the first of equal remainders
    for rank in range(world_size):
        alone = TokenDataset(three, T, B, seed)
        mixed = MixedDataset(sets, [TokenDataset(shards, T, B, seed) for shards in (three, other)], B, seed)
        for step, k in itertools.product((0, 1, 17, 4321), range(2)):
            lo, hi = BatchPlan(B, world_size, micro, accumulation=2).slice(k, rank)
            first = step * B + (k * world_size + rank) * micro
            taken = range(first, first + micro)
            assert alone.sequences(step, lo, hi).tolist() == [documented_sequence(files[0], seed, g) for g in taken]
            dealt = [documented_mixture(seed, [667, 333], g) for g in taken]
            expected = [documented_sequence(files[d], seed, g) for d, g in dealt]
            assert mixed.sequences(step, lo, hi).tolist() == expected


def test_7_train_and_validation_the_same(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    a, b = make_shards(tmp_path / "a", 50, 60), make_shards(tmp_path / "b", 50)
    c = make_shards(tmp_path / "c", 50, start=1000)
    train, *validations = (TokenDataset(shards, T, 4, seed=1) for shards in (a, c, b, [a[1]]))
    check_data([train], validations[:1])
    for val in validations[1:]:
        with pytest.raises(UserError, match=r"\.bin \(training\) and .*\.bin \(validation\) hold the same tokens"):
            check_data([train], [val])


def test_resuming_with_other_data_is_refused(three):
    def state(shards, **changes):
        return TokenDataset(shards, T, 4, seed=1).state_dict() | changes

    full, without = state(three), state([Shard(s.path, s.tokens, None) for s in three])
    stream = state(three[:2], complete=False)  # a stream that has come to its second shard
    for saved, now in itertools.product((full, without), repeat=2):
        check_same_data(saved, now, "data")
    check_same_data(stream, full, "data")
    check_same_data(full, stream, "data")
    other = [three[0], Shard(three[1].path, three[1].tokens, "0" * 64), three[2]]
    swapped = [three[1], three[0], three[2]]
    for saved, now in (
        (full, state(other)),
        (full, state(swapped)),
        (stream, state(swapped)),
        (state(swapped), stream),
    ):
        with pytest.raises(
            UserError, match=r"data no longer holds the shards .* \(train_00000\d\.bin differs\).*--fresh"
        ):
            check_same_data(saved, now, "data")
    for saved, now in ((full, state(three[:2])), (state(three[:2]), full)):
        with pytest.raises(UserError, match="no longer holds the shards that the checkpoint was trained on; prepare"):
            check_same_data(saved, now, "data")


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(1024 + 20)
        file.write(b"\x07\x07")


def test_8_each_epoch_verifies_each_shard_when_it_comes_to_it(three, monkeypatch):
    opened, real = [], dataset_module.open_shard
    monkeypatch.setattr(
        dataset_module, "open_shard", lambda shard: (opened.append(int(shard.path.stem[-1])), real(shard))[1]
    )
    data = TokenDataset(three, T, 4, seed=1)
    for step in range(11):  # 44 of 46 windows of two epochs
        data.sequences(step, 0, 2)
        data.sequences(step, 2, 4)
    assert opened == [0, 1, 2, 0, 1, 2]
    overwrite(three[2].path)
    data = TokenDataset(three, T, 13, seed=1)
    data.sequences(0, 0, 13)
    with pytest.raises(UserError, match=r"train_000002\.bin: its SHA-256 is"):
        data.sequences(1, 0, 1)
