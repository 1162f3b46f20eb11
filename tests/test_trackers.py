"""Trackers: what a run that is stopped, resumed, moved or copied leaves at each, and that none can harm a run."""

import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipe.config import parse_config
from recipe.engine import base as engines
from recipe.errors import UserError
from recipe.monitor import trackers
from recipe.monitor.trackers import Tracker, has_wandb_key, metric_names, tracker_run
from tests.conftest import ROOT, TINY, environment, flags, metrics, run_train

SECRET = "hf_" + "Tracker012345678" * 2  # in a field, where it is known by its shape
KEY = "c0ffee" * 6 + "c0de"

needs = {name: pytest.mark.skipif(not find_spec(name), reason=f"needs {name}") for name in trackers.TRACKERS}
each = pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in trackers.TRACKERS])


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """An empty home directory, and nothing in the environment that a tracker would take notice of."""
    home = tmp_path / "home-of-ada"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "none"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return home


@pytest.fixture
def run(home, tmp_path, monkeypatch):
    """run(name, step=0, **fields) -> a Tracker of a run in tmp_path/run, from Accelerate's real Accelerator; what it
    says is in `run.said`."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    if find_spec("trackio"):
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio.sqlite_storage, trackio.utils):  # read from the environment when it was imported
            monkeypatch.setattr(module, "TRACKIO_DIR", home / "trackio")
    for patience in ("_START", "_END"):  # a slow machine is not what is tested
        monkeypatch.setattr(trackers, patience, 60.0)
    said = []

    def make(name: str, step: int = 0, directory: Path = tmp_path / "run", **fields) -> Tracker:
        directory.mkdir(exist_ok=True)
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=directory)
        engine = SimpleNamespace(accelerator=accelerator, _tracker=name)

        def begin(project, **options):
            return engines.Engine.begin_tracker(engine, project, **options)

        config = parse_config(flags(**(TINY | {"output_dir": directory, "tracker": name, "run_name": "mine"} | fields)))
        return Tracker(config, step, begin, said.append)

    make.said = said
    yield make
    AcceleratorState._reset_state(reset_partial_state=True)


def tracker_run_id(directory: Path, *, resumed: bool) -> str:
    return tracker_run(directory, resumed=resumed)["id"]


def log(tracker: Tracker, *steps: int, loss: float = 1.0) -> None:
    for step in steps:
        tracker.log({"step": step, "tokens": 256 * step, "loss": loss, "val_loss": None, "mfu": None})


# What the trackers have on the disk, as [(step, loss)]


def in_tensorboard(directory: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars("train/loss")]


def in_trackio(home: Path, column: str = "step, metrics ->> '$.\"train/loss\"'") -> list[tuple]:
    with closing(sqlite3.connect(home / "trackio" / "gpt2-recipe.db")) as database:
        return database.execute(f"SELECT {column} FROM metrics ORDER BY step").fetchall()


def wandb_records(path: Path) -> list:
    """The records of a .wandb file: a LevelDB log behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, whole, records = path.read_bytes(), 7, b"", []
    assert data[:4] == b":W&B"
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole one, or its last part
            records.append(Record.FromString(whole))
            whole = b""
    return records


def history(records: list) -> list[dict]:
    lines = [r.history for r in records if r.WhichOneof("record_type") == "history"]
    return [{(i.key or "/".join(i.nested_key)): json.loads(i.value_json) for i in line.item} for line in lines]


def in_wandb(directory: Path) -> list[tuple[str, list[tuple[int, float]]]]:
    """Of each process: the run's id and what it logged."""
    found = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime):
        records = wandb_records(path)
        (begun,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
        found.append((begun.run_id, [(line["step"], line.get("train/loss")) for line in history(records)]))
    return found


# A run that goes on


@needs["tensorboard"]
def test_tensorboard_shows_a_step_once(run, tmp_path, home):
    with run("tensorboard") as tracker:
        log(tracker, 0, 10, 20, 30, loss=1.0)
    with run("tensorboard", 20) as tracker:  # a checkpoint of step 20, and a kill after step 30
        log(tracker, 20, 30, 40, loss=2.0)
    assert in_tensorboard(tmp_path / "run") == [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    with run("tensorboard", 0) as tracker:  # killed before its first checkpoint
        log(tracker, 0, 10, loss=3.0)
    assert in_tensorboard(tmp_path / "run") == [(0, 3.0), (10, 3.0)]
    assert [p.name for p in (tmp_path / "run").iterdir() if p.is_dir()] == ["tensorboard"]
    assert not [p for p in (tmp_path / "run" / "tensorboard").iterdir() if p.is_dir()]  # one run, not one for hparams
    assert run.said == [f"tracker    tensorboard --logdir {tmp_path / 'run'}"] * 3


@needs["trackio"]
def test_trackio_shows_a_step_once(run, tmp_path, home, capfd):
    with run("trackio") as tracker:
        log(tracker, 0, 10, 20, 30, loss=1.0)
    with run("trackio", 20) as tracker:
        log(tracker, 20, 30, 40, loss=2.0)
    assert in_trackio(home) == [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    assert len(set(in_trackio(home, "run_id, run_name"))) == 1
    with run("trackio", 0) as tracker:  # another run, which leaves the first one alone
        log(tracker, 0, 10)
    assert len(set(in_trackio(home, "run_id"))) == len(set(in_trackio(home, "run_name"))) == 2
    assert len(in_trackio(home)) == 7
    names = [line.split()[3].rstrip(":") for line in run.said]
    assert set(names) == {name for (name,) in in_trackio(home, "run_name")}
    assert names[0] == names[1] != names[2]
    assert capfd.readouterr().out == ""  # what trackio would say


@needs["wandb"]
def test_wandb_goes_on_in_the_same_run(run, tmp_path, home, capfd):
    with run("wandb") as tracker:
        log(tracker, 0, 10, 20, 30, loss=1.0)
    time.sleep(1.1)  # wandb names its directory by the second
    with run("wandb", 20) as tracker:  # a checkpoint of step 20, and a kill after step 30
        log(tracker, 20, 30, 40, loss=2.0)
    (first, before), (second, after) = in_wandb(tmp_path / "run")
    assert first == second
    assert before == [(0, 1.0), (10, 1.0), (20, 1.0), (30, 1.0)]
    assert after == [(20, 2.0), (30, 2.0), (40, 2.0)]
    records = wandb_records(next((tmp_path / "run").glob("wandb/offline-run-*/*.wandb")))
    assert [r.run.resume for r in records if r.HasField("run")] == [True]
    assert [(r.metric.glob_name, r.metric.step_metric) for r in records if r.HasField("metric")] == [("*", "step")]
    assert any(r.HasField("stats") for r in records)  # the device's utilization
    reason = "no API key was found (wandb login keeps one)"
    command = f"wandb sync {tmp_path}/run/wandb/offline-run-*-{first}"
    assert run.said == [f"tracker    wandb, offline: {reason}; to upload:\n  {command}"] * 2
    assert capfd.readouterr() == ("", "")  # what wandb would say


@each
def test_no_secret_and_no_home_directory_in_what_a_tracker_writes(run, tmp_path, home, name, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["recipe/train.py", "--a-word-of-the-command-line"])
    with run(name, val_data=SECRET, sample_prompt=f"{home}/prompt") as tracker:
        log(tracker, 0, 10)
    searched = [p for top in (tmp_path / "run", home) for p in top.rglob("*") if p.is_file()]
    kept = b"".join(p.read_bytes() for p in searched)
    assert b"train/loss" in kept
    assert b"~/prompt" in kept
    uploaded = [p for p in searched if p.suffix in (".wandb", ".db") or "tfevents" in p.name or "files" in p.parts]
    for path in searched:
        words = [SECRET, KEY, "--a-word-of-the-command-line"]
        words += [str(home)] if path in uploaded else []  # wandb's log on this disk says where it lies
        assert not [word for word in words if word.encode() in path.read_bytes()], path


# Which run at the tracker


def test_the_id_is_the_runs_own(tmp_path, home):
    here = tmp_path / "run"
    here.mkdir()
    first = tracker_run_id(here, resumed=False)
    assert tracker_run_id(here, resumed=True) == first
    here.rename(tmp_path / "moved")
    assert tracker_run_id(tmp_path / "moved", resumed=True) == first
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    copy = tracker_run_id(tmp_path / "copy", resumed=True)
    assert copy != first
    assert tracker_run_id(tmp_path / "copy", resumed=True) == copy
    assert tracker_run_id(tmp_path / "moved", resumed=True) == first
    assert tracker_run_id(tmp_path / "moved", resumed=False) != first
    for damaged in ("", "[]", '{"id": 3, "directory": ""}', '{"id": "ab"}'):
        (tmp_path / "copy" / trackers.RUN_FILE).write_text(damaged)
        assert len(tracker_run_id(tmp_path / "copy", resumed=True)) == 8


def test_the_id_file_does_not_name_the_home_directory(home):
    (home / "run").mkdir()
    tracker_run_id(home / "run", resumed=False)
    assert json.loads((home / "run" / trackers.RUN_FILE).read_text())["directory"] == "~/run"
    shutil.copytree(home / "run", home / "copy")
    assert tracker_run_id(home / "copy", resumed=True) != tracker_run_id(home / "run", resumed=True)


def test_every_column_has_a_group(whole_run):
    columns = {column for line in metrics(whole_run[0]) for column, value in line.items() if value is not None}
    names = metric_names(dict.fromkeys(columns | {"mfu", "compilations", "hellaswag_A_acc"}, 0.5))
    assert {"tokens", "train/loss", "val/loss", "speed/tokens_per_second", "val/hellaswag_A_acc"} <= set(names)
    assert {name.partition("/")[0] for name in names} == {"tokens", "train", "val", "speed", "device"}
    assert not any("step" in name.split("/") for name in names)
    assert metric_names({"step": 3, "loss": None, "mfu": 0.5}) == {"speed/mfu": 0.5}


# wandb: online or not


@pytest.mark.parametrize(
    ("netrc", "base_url", "variables", "expected"),
    [
        ("", "https://api.wandb.ai", {}, False),
        ("", "https://api.wandb.ai", {"api_key": KEY}, True),
        ("", "https://api.wandb.ai", {"identity_token_file": "token"}, True),
        (f"machine api.wandb.ai\n  login user\n  password {KEY}\n", "https://api.wandb.ai", {}, True),
        (f"machine api.wandb.ai\n  login user\n  password {KEY}\n", "https://api.forge.coreweave.com", {}, True),
        (f"machine api.wandb.ai\n  login user\n  password {KEY}\n", "http://wandb.mine:8080", {}, False),
        (f"machine wandb.mine:8080\n  login user\n  password {KEY}\n", "http://wandb.mine:8080", {}, True),
        (f"machine github.com\n  login user\n  password {KEY}\n", "https://api.wandb.ai", {}, False),
        ("machine api.wandb.ai\n  nonsense\n", "https://api.wandb.ai", {}, False),
    ],
)
@pytest.mark.parametrize("place", [".netrc", "_netrc", "elsewhere"])
def test_where_a_key_for_wandb_is_found(home, monkeypatch, netrc, base_url, variables, expected, place):
    monkeypatch.delenv("NETRC")
    if place == "elsewhere":
        monkeypatch.setenv("NETRC", str(home / place))
    if netrc:
        (home / place).write_text(netrc)
        (home / place).chmod(0o600)
    settings = SimpleNamespace(**({"api_key": None, "identity_token_file": None, "base_url": base_url} | variables))
    assert has_wandb_key(settings) == expected


@needs["wandb"]
def test_wandb_login_is_heard_of(home, monkeypatch):
    """Where the installed wandb writes a key and what it makes of the environment: the settings are its own."""
    import wandb
    from wandb.sdk.lib.wbauth import write_netrc_auth

    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_BASE_URL", "http://wandb.mine:8080")
    wandb.teardown()
    try:
        settings = wandb.setup(wandb.Settings(silent=True)).settings
        assert settings.base_url == "http://wandb.mine:8080"
        assert not has_wandb_key(settings)
        write_netrc_auth(host=settings.base_url, api_key=KEY)
        assert has_wandb_key(settings)
    finally:
        wandb.teardown()


@needs["wandb"]
@pytest.mark.parametrize(
    ("mode", "said"), [("offline", "wandb, offline; to upload:"), ("disabled", "wandb is disabled")]
)
def test_what_the_user_says_of_wandbs_mode_holds(run, tmp_path, monkeypatch, mode, said):
    monkeypatch.setenv("WANDB_MODE", mode)
    with run("wandb") as tracker:
        log(tracker, 0)
    assert len(run.said) == 1
    assert run.said[0].startswith(f"tracker    {said}")
    assert len(in_wandb(tmp_path / "run")) == (mode == "offline")


# Harm that a tracker might do


@needs["wandb"]
def test_a_server_that_is_not_there_leaves_wandb_offline(run, tmp_path, monkeypatch):
    monkeypatch.setattr(trackers, "_WANDB_INIT", 0.5)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with run("wandb") as tracker:
        log(tracker, 0, 10)
    assert len(run.said) == 1
    assert run.said[0].startswith("tracker    wandb, offline: ")
    assert KEY not in run.said[0]
    assert [points for _, points in in_wandb(tmp_path / "run")] == [[(0, 1.0), (10, 1.0)]]


@needs["wandb"]
def test_a_wandb_that_dies_costs_a_warning(run):
    with run("wandb") as tracker:
        log(tracker, 0)
        tracker._records.join()
        (core,) = [child for child in psutil.Process().children() if "wandb-core" in " ".join(child.cmdline())]
        core.kill()
        core.wait(60)
        log(tracker, 10, 20)
    assert [line.partition(": ")[0] for line in run.said[1:]] == ["WARNING    tracker wandb"], run.said


@needs["wandb"]
def test_a_wandb_that_hangs_does_not_keep_the_process(home, tmp_path):
    script = f"""
import os, psutil, sys
from types import SimpleNamespace
from accelerate import Accelerator
from recipe.monitor import trackers
from recipe.config import parse_config
from recipe.engine.base import Engine
trackers._END = 1.0
config = parse_config(["--dataset_name=x", "--tracker=wandb", "--output_dir={tmp_path}"])
engine = SimpleNamespace(accelerator=Accelerator(cpu=True, log_with="wandb"), _tracker="wandb")
with trackers.Tracker(config, 0, lambda *a, **k: Engine.begin_tracker(engine, *a, **k), print) as tracker:
    (core,) = [child for child in psutil.Process().children() if "wandb-core" in " ".join(child.cmdline())]
    print(core.pid)
    core.suspend()
    tracker.log({{"step": 0, "loss": 1.0}})
sys.exit(7)
"""
    with (tmp_path / "output").open("w+") as output:  # no pipe: what is stopped would keep it open
        command = [sys.executable, "-c", script]
        result = subprocess.run(
            command, cwd=ROOT, env=environment({"PYTHONPATH": str(ROOT)}), stdout=output, timeout=60
        )
        said = output.seek(0) or output.read().splitlines()[2:]
    os.kill(int(said[0]), signal.SIGKILL)
    assert result.returncode == 7
    assert said[1:] == ["WARNING    tracker wandb: no end of it after 1 s; left as it is"]


@needs["tensorboard"]
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # pytest's word for a traceback
def test_a_full_disk_costs_tensorboard_its_points_of_then(run, tmp_path, monkeypatch, capfd):
    from tensorboard.summary.writer.record_writer import RecordWriter

    with run("tensorboard") as tracker:
        log(tracker, 0)
        tracker._records.join()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(RecordWriter, "write", full)
            log(tracker, 10, 20)
            tracker._records.join()
        log(tracker, 30, 40)
    # The writer's thread may have ended unseen, and step 30 be what finds it so.
    points = in_tensorboard(tmp_path / "run")
    assert points[0] == (0, 1.0)
    assert points[1:] in ([(30, 1.0), (40, 1.0)], [(40, 1.0)])
    assert run.said[1:] == [
        "WARNING    tracker tensorboard: [Errno 28] No space left on device; the run goes on, and metrics.jsonl has all"
    ]
    assert capfd.readouterr().err == ""


@needs["trackio"]
def test_what_trackio_cannot_write_costs_a_warning(run, home):
    (home / "trackio").write_text("a file where its directory should be")
    with run("trackio") as tracker:
        log(tracker, 0, 10)
    warnings = [line for line in run.said if line.startswith("WARNING    tracker trackio: ")]
    assert len(warnings) == 1
    assert "rackio" in warnings[0]


@needs["tensorboard"]
@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_tracker_that_cannot_begin(home, tmp_path, monkeypatch, fault):
    import threading

    monkeypatch.setattr(trackers, "_START", 0.1 if fault == "hangs" else 60)
    monkeypatch.setattr(trackers, "_END", 0.1 if fault == "hangs" else 60)
    monkeypatch.setattr(trackers, "_WAITING", 3)
    release, said = threading.Event(), []

    def begin(project, **options):
        if fault == "hangs":
            release.wait(60)
        raise RuntimeError(f"no luck with {SECRET}\nand a second line")

    config = parse_config(["--dataset_name=x", "--tracker=tensorboard", f"--output_dir={tmp_path}"])
    with Tracker(config, 0, begin, said.append) as tracker:
        log(tracker, *range(10))
    assert tracker._thread.is_alive() == (fault == "hangs")
    release.set()
    if fault == "raises":
        assert said == ["WARNING    tracker tensorboard: no luck with ***; the run goes on, and metrics.jsonl has all"]
    else:
        assert ["slow to start" in said[0], "not taken 3 records" in said[1], "no end of it" in said[2]] == [True] * 3
        assert len(said) == 3


@pytest.mark.parametrize("begin", [False, None])
def test_other_processes_and_other_runs_have_none(home, tmp_path, begin):
    """`begin` is called by nobody, and nothing is written."""
    name = "tensorboard" if begin is False else ""
    config = parse_config(["--dataset_name=x", f"--tracker={name}", f"--output_dir={tmp_path}"])
    with Tracker(config, 0, begin if begin is False else lambda *a, **k: 1 / 0, print) as tracker:
        log(tracker, 0)
    assert [p for p in tmp_path.iterdir() if p != home] == []


def test_what_is_not_installed_is_said_before_anything_begins(monkeypatch):
    monkeypatch.setattr(engines, "Accelerator", lambda *a, **k: pytest.fail("too late"))
    with pytest.raises(UserError, match="tracker 'tensorbord' is not known; choose from tensorboard, wandb, trackio"):
        engines.open_engine("fp32", tracker="tensorbord")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in trackers.TRACKERS:
        with pytest.raises(UserError, match=rf"tracker {name} is not installed: pip install -e '\.\[trackers\]'"):
            engines.open_engine("fp32", tracker=name)


# The whole program


@needs["wandb"]
def test_ctrl_c_and_the_same_command_again(shards, tmp_path, home):
    """Each logged step is once in the two parts of the one run, the one that was saved last among them."""
    run, outputs = tmp_path / "run", []
    settings = TINY | {"dataset_name": shards, "output_dir": run, "tracker": "wandb", "max_steps": 6, "eval_steps": 0}
    for code, fault in ((75, "int@step.end:3"), (0, "")):
        result = run_train(*flags(**settings), env={"HOME": str(home), "RECIPE_FAULT": fault})
        outputs.append(result.stdout + result.stderr)
        assert result.returncode == code, outputs[-1]
        assert ("WARNING" in outputs[-1], "wandb: " in outputs[-1]) == (False, False)
    (first, before), (second, after) = in_wandb(run)
    assert first == second
    assert [step for step, _ in [*before, *after]] == [line["step"] for line in metrics(run)] == list(range(7))
    assert before[-1][0] == 3  # logged, saved, and at the head of metrics.jsonl's second part
