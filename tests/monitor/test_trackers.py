"""Trackers: what each records of a run that is stopped and resumed, and that no tracker can stop a run."""

import logging
import os
import sqlite3
import sys
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from recipe.config import parse_config
from recipe.monitor import trackers
from recipe.monitor.trackers import Tracker, check_tracker, metric_names
from recipe.utils.errors import UserError
from tests.canary import HUB_TOKEN, WANDB_KEY
from tests.conftest import TINY, flags

EACH = ("tensorboard", "wandb", "trackio")
installed = {name: pytest.mark.skipif(not find_spec(name), reason=f"needs {name}") for name in EACH}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty home directory, and no variable that a tracker reads: no key, no mode."""
    home = tmp_path / "home-of-ada"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    PartialState(cpu=True)
    yield home
    if "wandb" in sys.modules:  # which keeps what it has read of the environment
        sys.modules["wandb"].teardown()
    PartialState._reset_state()


@pytest.fixture
def said(caplog):
    """The messages so far."""
    caplog.set_level(logging.INFO, "recipe")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("recipe")]


def track(run: Path, name: str, *steps: int, loss: float = 1.0, after: int = 0, run_id: str | None = None, **fields):
    """Logs `steps` as a run that resumes after step `after` does; returns the Tracker."""
    run.mkdir(exist_ok=True)
    settings = TINY | {"output_dir": run, "report_to": name, "run_name": "mine"} | fields
    with closing(Tracker(parse_config(flags(**settings)), after)) as tracker:
        tracker.load_state_dict({"run_id": run_id or tracker.run_id})
        tracker.start()
        for step in steps:
            sample = {"sample": f"Once, at step {step}"} if step == 40 else {}
            tracker.log({"step": step, "tokens": 64 * step, "loss": loss, "val_loss": None, "mfu": None} | sample)
    return tracker


@installed["tensorboard"]
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path, said):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    first = track(run, "tensorboard", 0, 10, 20, 30, loss=1.0)
    track(run, "tensorboard", 20, 30, 40, loss=2.0, after=20, run_id=first.run_id)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert shown == [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    (sample,) = events.Tensors("val/sample/text_summary")
    assert (sample.step, sample.tensor_proto.string_val) == (40, [b"Once, at step 40"])
    (*_, configuration) = events.Tensors("configuration/text_summary")
    assert configuration.step == 20
    assert b'"learning_rate": 0.01,' in configuration.tensor_proto.string_val[0]
    assert len(list((run / "tensorboard").iterdir())) == 2  # a file for each start: one run to look at
    assert said() == [f"tracker    tensorboard --logdir {run}"] * 2


@pytest.mark.slow
@installed["trackio"]
def test_trackio_continues_the_run(tmp_path, home, monkeypatch):
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.sqlite_storage, trackio.utils):  # which read the environment when they were imported
        monkeypatch.setattr(module, "TRACKIO_DIR", home / "trackio")
    first = track(tmp_path / "run", "trackio", 0, 10)
    track(tmp_path / "run", "trackio", 20, after=10, run_id=first.run_id)
    other = track(tmp_path / "run", "trackio", 0)
    with closing(sqlite3.connect(home / "trackio" / "gpt2-recipe.db")) as database:
        rows = database.execute("SELECT run_name, step FROM metrics").fetchall()
    assert sorted(rows) == sorted(
        [*((f"mine-{first.run_id}", step) for step in (0, 10, 20)), (f"mine-{other.run_id}", 0)]
    )


@pytest.mark.slow
@installed["wandb"]
def test_wandb_continues_the_run_and_is_offline_without_a_key(tmp_path, said):
    run = tmp_path / "run"
    first = track(run, "wandb", 0, 10)
    track(run, "wandb", 20, after=10, run_id=first.run_id)
    kept = [path.name for path in (run / "wandb").glob("offline-run-*")]
    assert kept
    # wandb adds "-1" to the second folder of one second.
    assert all(name.removesuffix("-1").endswith(first.run_id) for name in kept)
    assert said()[0].startswith(f"tracker    wandb is offline; to upload: wandb sync {run}/wandb/offline-run-")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=installed[name]) for name in EACH])
def test_no_secret_and_no_home_directory_in_what_a_tracker_uploads(tmp_path, home, name, monkeypatch):
    if name == "trackio":
        import trackio.sqlite_storage

        monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", home / "trackio")
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["recipe/train.py", "--a-word-of-the-command-line"])
    track(tmp_path / "run", name, 0, 10, val_data=HUB_TOKEN, init_from=f"{home}/prompt")
    written = [p for top in (tmp_path / "run", home) for p in top.rglob("*") if p.is_file()]
    content = {path: path.read_bytes() for path in written}
    assert b"~/prompt" in b"".join(content.values())
    for path, data in content.items():
        words = [HUB_TOKEN, WANDB_KEY, "--a-word-of-the-command-line"]
        if path.suffix in (".wandb", ".db") or "tfevents" in path.name or "files" in path.parts:
            words.append(str(home))  # wandb's own log, which stays on this disk, names directories
        assert not [word for word in words if word.encode() in data], path


@pytest.mark.parametrize("method", ["", "start", "log", "finish"])
def test_a_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch, said, method):
    broken = MagicMock()
    fails = getattr(broken.return_value, method) if method else broken
    fails.side_effect = RuntimeError(f"no luck with {HUB_TOKEN}\nand a second line")
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", broken)
    track(tmp_path / "run", "tensorboard", 0, 10, 20)
    warned = [line for line in said() if line.startswith("WARNING")]
    assert warned == ["WARNING    tensorboard: no luck with ***; the run goes on without it, metrics.jsonl has all"]
    assert fails.call_count == 1
    assert broken.mock_calls[-1][0] in ("", f"().{method}")  # it is not called again


def test_what_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(UserError, match=r"report_to is wandb, which is not installed: pip install -e '\.\[trackers\]'"):
        check_tracker("wandb")


def test_columns_are_grouped_by_training_and_evaluation():
    line = {"step": 3, "loss": 2.0, "mfu": None, "val_loss": 1.0, "val_loss/code": 0.5, "hellaswag_llmc_acc": 0.3}
    expected = {"train/loss": 2.0, "val/loss": 1.0, "val/loss/code": 0.5, "val/hellaswag_llmc_acc": 0.3}
    assert metric_names(line) == expected
