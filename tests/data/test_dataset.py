"""The order of the data: a pure function of (seed, step). Numbers in names are QUALITY's bad inputs."""

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest

from recipe.config import BatchPlan, MixtureEntry, counts_of
from recipe.data import dataset as dataset_module
from recipe.data.dataset import TokenDataset, check_data, check_same_data, permutation
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


def test_each_epoch_has_every_window_once_in_its_own_order(three):
    B = 5
    data = TokenDataset(three, T, B, seed=1)
    plain = data.validation_windows(0, 23).tolist()
    stream = np.concatenate([data.sequences(step, 0, B) for step in range(23)]).tolist()  # 115 = five epochs
    epochs = [stream[lo : lo + 23] for lo in range(0, 115, 23)]
    for epoch in epochs:
        assert sorted(epoch) == plain
        assert sorted(epoch[:12]) == plain[:12]  # shards in order
        assert epoch[12] == plain[12]
    assert len({str(epoch) for epoch in epochs} | {str(plain)}) == 6
    other = TokenDataset(three, T, B, seed=2)
    assert other.sequences(0, 0, B).tolist() != stream[:B]


def documented_permutation(x: int, n: int, *key: int) -> int:
    """Rules 3 and 4 of "The order of the data" in docs/data.md, in Python's own integers."""
    a = math.isqrt(n - 1) + 1
    b = math.ceil(n / a)
    left, right = divmod(x, b)
    for i in range(8):
        digest = hashlib.blake2b(" ".join(map(str, (*key, i))).encode(), digest_size=16).digest()
        m, c = int.from_bytes(digest[:8], "little") | 1, int.from_bytes(digest[8:], "little")
        h = ((left if i % 2 else right) * m + c) % 2**64
        f = (h ^ h >> 31) * 0x94D049BB133111EB % 2**64 >> 32
        left, right = (left, (right + f) % b) if i % 2 else ((left + f) % a, right)
    y = left * b + right
    return y if y < n else documented_permutation(y, n, *key)


def documented_sequence(files: list, seed: int, g: int) -> list[int]:
    """Rules 1 and 2: sequence g of a run on these .bin files."""
    shards = [np.fromfile(file, "<u2")[512:] for file in sorted(files)]
    windows = [(len(tokens) - 1) // T for tokens in shards]
    epoch, x = divmod(g, sum(windows))
    s = next(s for s in range(len(shards)) if x < sum(windows[: s + 1]))
    i = documented_permutation(x - sum(windows[:s]), windows[s], seed, epoch, s)
    return shards[s][i * T : i * T + T + 1].tolist()


def documented_mixture(seed: int, counts: list[int], g: int) -> tuple[int, int]:
    """Rule 6: which data set gives sequence g, and which of its own it is."""
    q, place = divmod(g, 1000)
    drawn = [documented_permutation(x, 1000, seed, q) for x in range(place + 1)]
    of = [next(d for d in range(len(counts)) if v < sum(counts[: d + 1])) for v in drawn]
    return of[-1], q * counts[of[-1]] + of[:-1].count(of[-1])


@pytest.mark.parametrize("seed", [0, 1337])
def test_the_documented_rule_is_the_order(three, tmp_path, seed):
    """Written from the page alone, and from nothing of recipe.data."""
    (tmp_path / "other").mkdir()
    other = make_shards(tmp_path / "other", 70, start=1000)
    files = [[shard.path for shard in shards] for shards in (three, other)]
    B, world_size, micro = 12, 2, 3
    for step in (0, 1, 17, 4321):
        alone = TokenDataset(three, T, B, seed)
        for rank, k in itertools.product(range(world_size), range(2)):
            lo, hi = BatchPlan(B, world_size, micro, accumulation=2).slice(k, rank)
            taken = range((k * world_size + rank) * micro, (k * world_size + rank) * micro + micro)
            expected = [documented_sequence(files[0], seed, step * B + j) for j in taken]
            assert alone.sequences(step, lo, hi).tolist() == expected
        sets = [MixtureEntry("a", 667, None), MixtureEntry("b", 333, None)]  # of weights 2 and 1
        assert counts_of([2.0, 1.0]) == [667, 333]
        assert counts_of([0.3, 0.6, 0.7]) == [188, 375, 437]  # of 187.5, 375 and 437.5: the first of equal remainders
        mixed = MixedDataset(sets, [TokenDataset(shards, T, B, seed) for shards in (three, other)], B, seed)
        dealt = [documented_mixture(seed, [667, 333], step * B + j) for j in range(B)]
        assert mixed.sequences(step, 0, B).tolist() == [documented_sequence(files[d], seed, g) for d, g in dealt]


def test_permutation_is_a_bijection():
    for n in range(1, 301):
        assert sorted(permutation(np.arange(n), n, (n, 0, 0)).tolist()) == list(range(n))
    for n in (65_535, 97_656, 100_003):
        assert np.array_equal(np.sort(permutation(np.arange(n), n, (5, 1, 2))), np.arange(n))
    for n in (2**31 + 11, 2**40 - 87, 10**12):  # too large to count: no two of a sample fall together
        sample = permutation(np.arange(n - 50_000, n), n, (5, 1, 2))
        assert len(set(sample.tolist())) == 50_000
        assert 0 <= sample.min() < n / 1000
        assert n - n / 1000 < sample.max() < n


def test_permutations_are_evenly_drawn():
    counts = Counter(tuple(permutation(np.arange(4), 4, (7, epoch, 0))) for epoch in range(2400))
    chi2 = sum((counts[p] - 100) ** 2 / 100 for p in itertools.permutations(range(4)))
    assert chi2 / (math.factorial(4) - 1) < 2.5  # 1 is chance, 5 standard deviations are 2.5
    # neighbours in a shard end up anywhere: 97,656 differences in 100 bins
    n = 97_656
    bins = np.histogram(np.diff(permutation(np.arange(n), n, (1337, 0, 0))) % n, 100, (0, n))[0]
    assert ((bins - n / 100) ** 2 / (n / 100)).sum() / 99 < 1.7


def test_6_a_shard_shorter_than_a_sequence_is_passed_over(tmp_path):
    data = TokenDataset(make_shards(tmp_path, 100, 8, 50), T, 18, seed=1)
    assert data.windows == 12 + 6
    assert sorted(data.sequences(0, 0, 18)[:, 0]) == [*range(0, 96, T), *range(108, 156, T)]


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

    whole, without = state(three), state([Shard(s.path, s.tokens, None) for s in three])
    stream = state(three[:2], complete=False)  # a stream that has come to its second shard
    for saved, now in itertools.product((whole, without), repeat=2):
        check_same_data(saved, now, "data")
    check_same_data(stream, whole, "data")
    check_same_data(whole, stream, "data")
    other = [three[0], Shard(three[1].path, three[1].tokens, "0" * 64), three[2]]
    swapped = [three[1], three[0], three[2]]
    for saved, now in (
        (whole, state(other)),
        (whole, state(swapped)),
        (stream, state(swapped)),
        (state(swapped), stream),
    ):
        with pytest.raises(
            UserError, match=r"data no longer holds the shards .* \(train_00000\d\.bin differs\).*--fresh"
        ):
            check_same_data(saved, now, "data")
    for saved, now in ((whole, state(three[:2])), (state(three[:2]), whole)):
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
