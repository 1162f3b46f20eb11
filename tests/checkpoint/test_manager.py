"""Checkpoints are written in the background, after the metrics before them; a failure is reported and retried."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from recipe.checkpoint import manager as module
from recipe.checkpoint.format import checkpoints, load_checkpoint, step_of
from recipe.checkpoint.manager import CheckpointManager
from recipe.config import parse_config
from recipe.utils.processes import Processes


class Run:
    """A run whose only weights are four times `value`, with a CheckpointManager in `directory`."""

    def __init__(self, directory):
        self.directory, self.value, self.stop = directory, 1.0, SimpleNamespace(patient=nullcontext, leave=lambda: None)
        self.synced = []
        self.metrics = SimpleNamespace(warning="", val_losses={}, paused=lambda what: nullcontext())
        self.metrics.state_dict, self.metrics.sync = lambda: {"seconds": 3.0}, lambda: self.synced.append(True)
        engine = SimpleNamespace(
            device=torch.device("cpu"), name="CPU", precision="fp32", no_compile="", stop=self.stop
        )
        engine.processes, engine.snapshot = Processes(), self._snapshot
        config = parse_config([f"--output_dir={directory}", "--save_total_limit=1", "--lr_scheduler_type=linear"])
        model = SimpleNamespace(config=SimpleNamespace(n_positions=64))
        model.save_config = lambda path: (path / "config.json").write_bytes(b"{}")
        trained, scaler = (model, SimpleNamespace(state={})), SimpleNamespace(state_dict=lambda: {"scale": 2.0})
        self.manager = CheckpointManager(config, engine, trained, self.metrics, {"grad_scaler": scaler}, None)

    def _snapshot(self, *_trained) -> tuple[dict, dict]:
        return {"a": torch.full((4,), self.value)}, {"exp_avg.a": torch.ones(4)}

    def save(self, step: int) -> None:
        self.manager.save(step, {"loss": 0.5})

    def saved(self, step: int) -> None:
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


def test_a_checkpoint_holds_the_state_of_every_component(run):
    run.saved(3)
    (path,) = checkpoints(run.directory)
    state = load_checkpoint(path).state
    assert state["record"] == {"loss": 0.5}
    assert (state["metrics"], state["grad_scaler"]) == ({"seconds": 3.0}, {"scale": 2.0})
    assert state["config"]["output_dir"] == str(run.directory)
    assert state["tokenizer"]["digest"] == "gpt2"


def test_training_waits_for_a_save_only_at_the_next_one(run, monkeypatch):
    commit, begin = module.save_checkpoint, threading.Event()
    monkeypatch.setattr(module, "save_checkpoint", lambda *a: begin.wait(30) and commit(*a))
    run.save(1)
    assert run.steps == []  # and the loop is here already
    threading.Timer(0.3, begin.set).start()
    began = time.monotonic()
    run.save(2)
    assert time.monotonic() - began >= 0.2
    run.manager.wait()
    assert run.steps == [2]


def test_the_metrics_are_on_the_disk_before_the_checkpoint_is(run, monkeypatch):
    commit = module.save_checkpoint
    monkeypatch.setattr(module, "save_checkpoint", lambda *a: run.synced and commit(*a))
    run.save(1)
    assert run.manager.finish()
    assert run.steps == [1]


def test_weights_that_are_not_finite_are_never_committed_nor_good_ones_pruned_for_them(run, caplog):
    run.save(1)
    run.value = float("inf")
    run.save(2)
    assert not run.manager.finish()  # and at once: they stay what they are
    assert run.steps == [1]
    assert "step 2: NOT SAVED: a holds inf or NaN; lower learning_rate" in caplog.text
