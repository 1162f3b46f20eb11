"""The run on one device with which the other engines are compared."""

import pytest

from tests.conftest import EQUAL, by_step, flags, launch, ok


def settings(shards, **fields) -> list[str]:
    """Flags of recipe/train.py: 50 steps of 8 sequences, with checkpoints at 20, 40 and 50."""
    return flags(**(EQUAL | {"dataset_name": shards, "save_steps": 20} | fields))


def assert_same_losses(lines: dict, expected: dict, first: int = 1, last: int = 50, within: float = 1e-4) -> None:
    """Up to 1e-5 in the first ten steps, then up to `within`, since differences of rounding grow."""
    for step in range(first, last + 1):
        assert abs(lines[step]["loss"] - expected[step]["loss"]) <= (1e-5 if step < first + 10 else within), step


@pytest.fixture(scope="session")
def one_device(shards, once):
    """(directory, metrics by step)."""

    def make(directory):
        ok(launch("single", 1, "recipe/train.py", *settings(shards, output_dir=directory, micro_batch_size=8)))

    directory, _ = once("one-device", make)
    lines = by_step(directory)
    assert list(lines) == list(range(51))
    assert lines[50]["loss"] < lines[1]["loss"] - 0.5  # it learns: equal losses are no accident
    return directory, lines
