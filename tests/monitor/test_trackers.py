"""Trackers: what a run leaves at each of them, stopped and resumed, and that none can stop a run."""

import json
import logging
import os
import sqlite3
import struct
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from recipe.config import parse_config
from recipe.errors import UserError
from recipe.monitor import trackers
from recipe.monitor.trackers import Tracker, check_tracker, metric_names
from tests.conftest import TINY, flags, metrics

SECRET = "hf_" + "Tracker012345678" * 2  # redaction recognizes it by its shape
KEY = "c0ffee" * 6 + "c0de"

EACH = ("tensorboard", "wandb", "trackio")
installed = {name: pytest.mark.skipif(not find_spec(name), reason=f"needs {name}") for name in EACH}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty home directory, and no variable that a tracker reads."""
    home = tmp_path / "home-of-ada"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("WANDB_MODE", "offline")
    PartialState(cpu=True)
    yield home
    PartialState._reset_state()


@pytest.fixture
def said(caplog, monkeypatch):
    """The messages so far."""
    monkeypatch.setattr(logging.getLogger("recipe"), "propagate", True)
    caplog.set_level(logging.INFO, "recipe")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("recipe")]


def track(run: Path, name: str, *steps: int, loss: float = 1.0, after: int = 0, run_id: str | None = None, **fields):
    """Logs `steps` as a run that resumes after step `after` does; returns the Tracker."""
    run.mkdir(exist_ok=True)
    settings = TINY | {"output_dir": run, "report_to": name, "run_name": "mine"} | fields
    with Tracker(parse_config(flags(**settings)), after, run_id, active=True) as tracker:
        for step in steps:
            tracker.log({"step": step, "tokens": 64 * step, "loss": loss, "val_loss": None, "mfu": None})
    return tracker


# What the trackers have on the disk, as [(step, loss)]


def in_tensorboard(run: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars("train/loss")]


def in_trackio(home: Path) -> list[tuple[str, int, float]]:
    with closing(sqlite3.connect(home / "trackio" / "gpt2-recipe.db")) as database:
        columns = "run_name, step, metrics ->> '$.\"train/loss\"'"
        return database.execute(f"SELECT {columns} FROM metrics ORDER BY step").fetchall()


def in_wandb(run: Path) -> list[tuple[str, int, float]]:
    """(run id, step, loss) from the .wandb files, each a LevelDB log behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        data, position, whole, run_id = path.read_bytes(), 7, b"", ""
        while position + 7 <= len(data):
            if (left := 32768 - position % 32768) < 7:
                position += left
                continue
            _, length, kind = struct.unpack("<IHB", data[position : position + 7])
            whole += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind not in (1, 4):  # neither a whole record nor the last part of one
                continue
            record, whole = Record.FromString(whole), b""
            run_id = record.run.run_id or run_id
            values = {(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in record.history.item}
            if "train/loss" in values:
                found.append((run_id, values["_step"], values["train/loss"]))
    return found


@installed["tensorboard"]
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path, said):
    run = tmp_path / "run"
    first = track(run, "tensorboard", 0, 10, 20, 30, loss=1.0)
    track(run, "tensorboard", 20, 30, 40, loss=2.0, after=20, run_id=first.run_id)
    assert in_tensorboard(run) == [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
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
    assert first.run_id != other.run_id
    rows = in_trackio(home)
    assert [row[1:] for row in rows if row[0] == f"mine-{first.run_id}"] == [(0, 1.0), (10, 1.0), (20, 1.0)]
    assert [row[1:] for row in rows if row[0] == f"mine-{other.run_id}"] == [(0, 1.0)]


@pytest.mark.slow
@installed["wandb"]
def test_wandb_continues_the_run(tmp_path, said):
    run = tmp_path / "run"
    first = track(run, "wandb", 0, 10)
    track(run, "wandb", 20, after=10, run_id=first.run_id)
    assert sorted(in_wandb(run)) == [(first.run_id, step, 1.0) for step in (0, 10, 20)]
    assert said()[0].startswith(f"tracker    wandb is offline; to upload: wandb sync {run}/wandb/offline-run-")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=installed[name]) for name in EACH])
def test_no_secret_and_no_home_directory_in_what_a_tracker_uploads(tmp_path, home, name, monkeypatch):
    if name == "trackio":
        import trackio.sqlite_storage

        monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", home / "trackio")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setattr("sys.argv", ["recipe/train.py", "--a-word-of-the-command-line"])
    track(tmp_path / "run", name, 0, 10, val_data=SECRET, sample_prompt=f"{home}/prompt")
    written = [p for top in (tmp_path / "run", home) for p in top.rglob("*") if p.is_file()]
    content = {path: path.read_bytes() for path in written}
    assert b"~/prompt" in b"".join(content.values())
    for path, found in content.items():
        words = [SECRET, KEY, "--a-word-of-the-command-line"]
        if path.suffix in (".wandb", ".db") or "tfevents" in path.name or "files" in path.parts:
            words.append(str(home))  # wandb's own log, which stays on this disk, names directories
        assert not [word for word in words if word.encode() in found], path


class Broken:
    """A tracker that raises in one of its methods; `calls` are those of all."""

    calls: list[tuple[str, object]]
    fails: str

    def __init__(self, *place, **options):
        self._do("__init__", options)

    tracker = property(lambda self: SimpleNamespace(offline=False, url="https://wandb.example/run"))

    def _do(self, method: str, what: object = None) -> None:
        self.calls.append((method, what))
        if method == self.fails:
            raise RuntimeError(f"no luck with {SECRET}\nand a second line")

    def start(self):
        self._do("start")

    def store_init_configuration(self, values):
        self._do("store_init_configuration", values)

    def log(self, values, step):
        self._do("log", (step, values))

    def finish(self):
        self._do("finish")


@pytest.mark.parametrize("method", ["__init__", "start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch, said, method):
    broken = type("Tried", (Broken,), {"calls": [], "fails": method})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", broken)
    track(tmp_path / "run", "tensorboard", 0, 10, 20)
    warned = [line for line in said() if line.startswith("WARNING")]
    assert warned == ["WARNING    tensorboard: no luck with ***; the run continues without it, metrics.jsonl has all"]
    assert [name for name, _ in broken.calls].count(method) == 1
    assert broken.calls[-1][0] == method  # it is not called again


def test_a_tracker_gets_the_run_without_its_secrets(tmp_path, monkeypatch, home):
    fine = type("Tried", (Broken,), {"calls": [], "fails": ""})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", fine)
    tracker = track(tmp_path / "run", "wandb", 0, val_data=SECRET, sample_prompt=f"{home}/prompt", run_id="abcd")
    found = dict(fine.calls)
    assert tracker.run_id == "abcd"
    assert (found["__init__"]["id"], found["__init__"]["resume"], found["__init__"]["name"]) == (
        "abcd",
        "allow",
        "mine",
    )
    settings = found["store_init_configuration"]
    assert (settings["val_data"], settings["sample_prompt"], settings["n_layer"]) == ("***", "~/prompt", 2)
    assert found["log"] == (0, {"tokens": 0, "train/loss": 1.0})


def test_other_processes_have_no_tracker(tmp_path, monkeypatch):
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", lambda *a, **k: pytest.fail("started"))
    config = parse_config(flags(**TINY, output_dir=tmp_path / "run", report_to="wandb"))
    with Tracker(config, 0, None, active=False) as tracker:
        tracker.log({"step": 0, "loss": 1.0})
    assert not (tmp_path / "run").exists()


def test_what_is_not_known_or_not_installed_is_refused(monkeypatch):
    with pytest.raises(UserError, match=r"--report_to.*: invalid choice: 'tensorbord' \(choose from .*tensorboard"):
        parse_config(["--report_to=tensorbord"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(UserError, match=r"report_to is wandb, which is not installed: pip install -e '\.\[trackers\]'"):
        check_tracker("wandb")


def test_every_column_has_a_group(whole_run):
    columns = {column for line in metrics(whole_run[0]) for column, value in line.items() if value is not None}
    names = metric_names(dict.fromkeys(columns | {"mfu", "compilations", "hellaswag_A_acc"}, 0.5))
    assert {"tokens", "train/loss", "val/loss", "speed/tokens_per_second", "val/hellaswag_A_acc"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"tokens", "train", "val", "speed", "device"}
    assert metric_names({"step": 3, "loss": None, "mfu": 0.5}) == {"speed/mfu": 0.5}
