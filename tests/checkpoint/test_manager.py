"""Checkpoints are written in the background, after the metrics before them; a failure is reported and retried."""

import errno
import threading
from types import SimpleNamespace

import pytest
import torch

from recipe.checkpoint import manager as module
from recipe.checkpoint.format import Retention, checkpoints, step_of
from recipe.checkpoint.manager import CheckpointManager


@pytest.fixture
def log() -> SimpleNamespace:
    """metrics.jsonl."""
    synced = []
    return SimpleNamespace(val_losses={}, synced=synced, sync=lambda: synced.append(True))


@pytest.fixture
def manager(tmp_path, log):
    with CheckpointManager(tmp_path, Retention(save_total_limit=1), log) as manager:
        yield manager


def save(manager: CheckpointManager, step: int, value: float = 1.0) -> None:
    manager.begin()
    weights = {"a": torch.full((4,), value)}
    manager.save(step, weights, {"exp_avg.a": torch.ones(4)}, {"config": {}, "data": {}}, {"config.json": b"{}"})


def steps(run) -> list[int]:
    return [step_of(path) for path in checkpoints(run)]


def failing(monkeypatch, times: int) -> None:
    """The disk is full, so many times."""
    commit, calls = module.save_checkpoint, iter(range(99))

    def save_checkpoint(*arguments):
        if next(calls) < times:
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(*arguments)

    monkeypatch.setattr(module, "save_checkpoint", save_checkpoint)


def test_training_waits_for_a_save_only_at_the_next_one(tmp_path, manager, monkeypatch):
    commit, begin = module.save_checkpoint, threading.Event()
    monkeypatch.setattr(module, "save_checkpoint", lambda *a: begin.wait(30) and commit(*a))
    save(manager, 1)
    assert steps(tmp_path) == []  # and the loop is here already
    threading.Timer(0.3, begin.set).start()
    save(manager, 2)
    assert manager.save_wait >= 0.2
    manager.wait()
    assert steps(tmp_path) == [2]


def test_the_metrics_are_on_the_disk_before_the_checkpoint_is(tmp_path, manager, log, monkeypatch):
    commit = module.save_checkpoint
    monkeypatch.setattr(module, "save_checkpoint", lambda *a: log.synced and commit(*a))
    save(manager, 1)
    assert manager.conclude(lambda: False)
    assert steps(tmp_path) == [1]


def test_a_failed_save_is_reported_and_the_next_one_is_the_next_attempt(tmp_path, manager, monkeypatch, caplog):
    save(manager, 1)
    manager.wait()
    failing(monkeypatch, 1)
    save(manager, 2)
    manager.wait()
    assert manager.failed == "step 2 not saved"
    assert "step 2: NOT SAVED: No space left on device" in caplog.text
    assert "the next save tries again; step_00000001 is the newest checkpoint" in caplog.text
    save(manager, 3)
    assert manager.conclude(lambda: False)
    assert (manager.failed, steps(tmp_path)) == ("", [3])


@pytest.mark.parametrize(("failures", "saved"), [(2, True), (99, False)])
def test_the_last_save_is_tried_again_for_a_while(tmp_path, manager, monkeypatch, failures, saved):
    monkeypatch.setattr(module, "_PAUSES", (0.01,) * 6)
    failing(monkeypatch, failures)
    save(manager, 5)
    assert manager.conclude(lambda: False) is saved
    assert steps(tmp_path) == [5] * saved


def test_one_who_is_in_a_hurry_gets_one_more_attempt(manager, monkeypatch):
    failing(monkeypatch, 99)
    save(manager, 5)
    assert not manager.conclude(lambda: True)  # would else take a minute


def test_weights_that_are_not_finite_are_never_committed_nor_good_ones_pruned_for_them(tmp_path, manager, caplog):
    save(manager, 1)
    save(manager, 2, value=float("inf"))
    assert not manager.conclude(lambda: False)  # and at once: they stay what they are
    assert steps(tmp_path) == [1]
    assert "step 2: NOT SAVED: a holds inf or NaN; lower learning_rate" in caplog.text
    assert "training continues; step_00000001 is the newest checkpoint" in caplog.text


def test_the_best_one_is_kept_and_at_the_end_not_twice(tmp_path, manager, log):
    for step, loss in enumerate([5.0, 4.0, 3.0], 1):
        save(manager, step)
        manager.wait()
        log.val_losses[step] = loss
    assert steps(tmp_path) == [2, 3]
    assert manager.conclude(lambda: False)
    assert steps(tmp_path) == [3]
