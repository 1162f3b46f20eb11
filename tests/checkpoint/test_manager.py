"""Checkpoints are written in the background; a failure is reported and retried."""

import errno
import json
import os
import threading
import time
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace

import pytest
import torch

from recipe.checkpoint import manager as module
from recipe.checkpoint.format import checkpoints, protect, prune, step_of
from recipe.checkpoint.manager import CheckpointManager
from recipe.checkpoint.run_dir import run_directory
from recipe.config import parse_config
from recipe.utils.errors import Permanent
from tests.checkpoint import save
from tests.conftest import tensors
from tests.engine import cpu_strategy


class Run:
    """A run with a CheckpointManager in `directory`, with one weight of four times `value`, of `moment` the same."""

    def __init__(self, directory):
        self.directory, self.value, self.moment = directory, 1.0, 1.0
        self.metrics = SimpleNamespace(warning="", paused=lambda activity: nullcontext(), val_losses={})
        self.metrics.state_dict = lambda: {"unwritten": self.metrics.unwritten}
        self.metrics.lines_sha256 = lambda step: "a" * 64
        self.metrics.sync = lambda: None
        self.strategy = strategy = cpu_strategy()
        strategy.gather = self._gather
        config = parse_config([f"--output_dir={directory}", "--save_total_limit=1", "--lr_scheduler_type=linear"])
        model = SimpleNamespace(config=SimpleNamespace(n_positions=64))
        model.save_config = lambda path: (path / "config.json").write_bytes(b"{}")
        self.optimizer = SimpleNamespace(state={})
        trained = model, self.optimizer
        stateful = {"grad_scaler": SimpleNamespace(state_dict=lambda: {"scale": 2.0}), "metrics": self.metrics}
        self.lock = ExitStack()
        descriptor = self.lock.enter_context(run_directory(directory))
        self.manager = CheckpointManager(config, strategy, trained, stateful, self.metrics, descriptor, None)

    def _gather(self, *_) -> tuple[dict, dict]:
        return {"a": torch.full((4,), self.value)}, {"exp_avg.a": torch.full((4,), self.moment)}

    def save(self, step: int) -> None:
        self.manager.save(step, {"loss": 0.5})

    def save_and_wait(self, step: int) -> None:
        self.save(step)
        self.manager.wait()

    @property
    def steps(self) -> list[int]:
        return [step_of(path) for path in checkpoints(self.directory)]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    yield run
    run.manager.join()
    run.lock.close()


def test_a_step_that_is_saved_already_is_not_saved_again(run):
    """As when a run is stopped right after a save."""
    for value in (1.0, 2.0):
        run.value = value
        run.save_and_wait(3)
    assert run.metrics.warning == ""
    assert tensors(run.directory / "step_00000003")["a"].tolist() == [1.0] * 4


def test_a_checkpoint_has_the_number_of_steps_that_were_not_skipped(run):
    """By which AdamW corrects its averages after a resume."""
    run.optimizer.state["a"] = {"step": torch.tensor(3.0)}
    run.save_and_wait(5)
    state = json.loads((run.directory / "step_00000005" / "trainer_state.json").read_text())
    assert (state["step"], state["optimizer_steps"]) == (5, 3)


def test_a_save_is_waited_for_only_at_the_next_one(run, monkeypatch):
    commit, may_write = module.save_checkpoint, threading.Event()
    monkeypatch.setattr(module, "save_checkpoint", lambda *a: may_write.wait(30) and commit(*a))
    run.save(1)
    assert run.steps == []  # `save` has returned before the checkpoint is written
    threading.Timer(0.3, may_write.set).start()
    start = time.monotonic()
    run.save(2)
    assert time.monotonic() - start >= 0.2
    run.manager.wait()
    assert run.steps == [2]


def fail_saves(monkeypatch, number: int, is_due) -> None:
    """Saves fail with this error whenever `is_due()`."""
    commit = module.save_checkpoint

    def save_checkpoint(*arguments):
        if is_due():
            raise OSError(number, os.strerror(number))
        commit(*arguments)

    monkeypatch.setattr(module, "save_checkpoint", save_checkpoint)


def test_the_last_save_on_a_full_disk_deletes_an_unprotected_checkpoint(run, monkeypatch, caplog):
    """A disk for five checkpoints: the best, a milestone, a deletable one, the newest intact one, a damaged one."""
    fail_saves(monkeypatch, errno.ENOSPC, lambda: len(run.steps) == 5)
    monkeypatch.setattr(module, "prune", lambda *a: prune(*a) if run.metrics.warning else None)
    run.metrics.val_losses = {step: 1.0 if step == 1 else 2.0 for step in range(1, 6)}
    for step in range(1, 6):
        run.save_and_wait(step)
    protect(run.directory / "step_00000002")
    (run.directory / "step_00000005" / "config.json").write_bytes(b"")
    run.save_and_wait(6)
    assert run.steps == [1, 2, 3, 4, 5]
    assert run.manager.finish()
    assert run.steps == [1, 2, 4, 5, 6]
    assert run.metrics.warning == ""
    assert "deleted    1 checkpoint before step_00000004, to make room" in caplog.text
    assert "retrying" not in caplog.text


@pytest.mark.parametrize(("last_loss", "steps"), [(3.0, [1, 2]), (1.5, [4])])
def test_the_last_save_on_a_full_disk_deletes_the_best_checkpoint_if_it_is_better(run, monkeypatch, last_loss, steps):
    """A disk for two checkpoints: the best, and the newest. A better loss, at step 3, was not saved."""
    fail_saves(monkeypatch, errno.ENOSPC, lambda: len(run.steps) == 2)
    monkeypatch.setattr(module, "RETRY_WINDOW_S", 0)
    run.metrics.val_losses = {1: 2.0, 2: 4.0}
    run.save_and_wait(1)
    run.save_and_wait(2)
    run.metrics.val_losses |= {3: 1.0, 4: last_loss}
    run.save_and_wait(4)
    assert run.manager.finish() == (4 in steps)
    assert run.steps == steps


@pytest.mark.parametrize("stopped", [False, True])
def test_the_last_save_is_retried_for_a_minute(stopped, run, monkeypatch, caplog):
    """Also of a run that a signal has stopped."""
    run.strategy.runtime.stop.requested = stopped
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.1)
    is_broken = iter([True, True, False])
    fail_saves(monkeypatch, errno.EIO, lambda: next(is_broken))
    run.save_and_wait(1)
    assert run.manager.finish()
    assert run.steps == [1]
    assert "retrying   the last save, for up to 60 s: free some space or repair" in caplog.text


def test_a_run_whose_directory_was_replaced_ends_and_touches_nothing_there(run, tmp_path_factory):
    """`mv runs/x old`, and a second run in runs/x: its files, its lock and its half-written save stay."""
    run.save_and_wait(3)
    moved_dir = run.directory.rename(tmp_path_factory.mktemp("moved") / "old")
    with run_directory(run.directory):
        save(run.directory, 1)
        save(run.directory, 2)
        (run.directory / ".saving-step_00000003").mkdir()
        paths = sorted(run.directory.iterdir())
        assert run.manager.finish()  # which would prune
        with pytest.raises(Permanent, match=f"^{run.directory} was moved or replaced during this run"):
            run.save(4)
        run.lock.close()
        assert sorted(run.directory.iterdir()) == paths
    assert [step_of(path) for path in checkpoints(moved_dir)] == [3]


def test_a_failed_save_is_not_retried_in_a_directory_that_replaces_the_runs(run, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.1)
    with monkeypatch.context() as patch:
        fail_saves(patch, errno.EIO, lambda: True)
        run.save_and_wait(3)
    run.directory.rename(tmp_path_factory.mktemp("moved") / "old")
    run.directory.mkdir()
    assert not run.manager.finish()
    assert list(run.directory.iterdir()) == []


@pytest.mark.parametrize(("name", "tensor"), [("value", "a"), ("moment", "exp_avg.a")])
def test_a_state_that_is_not_finite_is_never_saved_and_replaces_no_good_one(run, caplog, name, tensor):
    run.save(1)
    setattr(run, name, float("inf"))
    run.save(2)
    assert not run.manager.finish()  # at once: a retry would not help
    assert run.steps == [1]
    assert f"step 2: NOT SAVED: {tensor} holds inf or NaN; lower learning_rate" in caplog.text
