"""Reading ahead: how long the loop waits, and what it makes of an error."""

import errno
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from recipe.config import BatchPlan
from recipe.data.dataset import TokenDataset
from recipe.data.prefetch import BatchLoader
from recipe.data.shards import Shard
from recipe.utils.errors import Unreachable, UserError


def loader(sequences) -> BatchLoader:
    """Of two steps of one micro-batch, on the CPU, which `sequences` reads."""
    dataset = SimpleNamespace(sequences=sequences, close=lambda: None)
    return BatchLoader(dataset, BatchPlan(2, 1, 2, 1), 0, range(2), to_device=torch.Tensor.cpu, pin=False)


def test_a_wait_for_data_counts_once():
    may_read = threading.Event()
    with loader(lambda *_: may_read.wait(30) and np.zeros((2, 9), np.int64)) as batches:
        assert not batches.ready(0.05)
        assert batches.waited() > 0.04
        assert batches.waited() == 0
        may_read.set()


def test_a_stop_does_not_wait_until_a_large_file_is_verified(tmp_path, caplog):
    """Which takes as long as reading it: OpenWebText's train.bin has 18 GB. This one is a sparse file of 6 GB."""
    caplog.set_level("INFO", "recipe")
    with (tmp_path / "train.bin").open("wb") as file:
        file.write(np.arange(1, 5001, dtype=np.uint16).tobytes())
        file.truncate(6_000_000_000)
    dataset = TokenDataset([Shard(tmp_path / "train.bin", 3_000_000_000, None)], 1024, 2, seed=0)
    with BatchLoader(dataset, BatchPlan(2, 1, 2, 1), 0, range(2), to_device=torch.Tensor.cpu, pin=False) as batches:
        assert not batches.ready(0.5)
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 1
    assert f"verifying {tmp_path}/train.bin, 6 GB" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.EIO, "bad disk"), Unreachable), (FileNotFoundError(errno.ENOENT, "gone"), UserError)],
)
def test_any_error_of_the_disk_is_told_to_the_user(error, kind):
    """And to what restarts the run: a disk that fails may work again."""
    with loader(Mock(side_effect=error)) as batches:
        assert batches.ready(30)
        assert type(told := batches.error()) is kind
        assert str(told).startswith(f"the data cannot be read ({type(error).__name__}: ")
