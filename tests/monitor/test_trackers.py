"""Trackers: what each records of a stopped and resumed run, and that no tracker can stop a run."""

import logging
import os
import re
import sqlite3
import sys
from contextlib import closing, suppress
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import yaml
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from recipe.config import parse_config
from recipe.monitor import trackers
from recipe.monitor.metrics import Metrics
from recipe.monitor.trackers import Tracker, check_tracker, metric_names
from recipe.utils.errors import UserError
from tests.canary import HUB_TOKEN, WANDB_KEY
from tests.conftest import ROOT, TINY, flags
from tests.engine import cpu_strategy

NAMES = ("tensorboard", "wandb", "trackio")
needs = {name: pytest.mark.skipif(not find_spec(name), reason=f"needs {name}") for name in NAMES}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    """An empty home directory, and no environment variable of a tracker, such as a key or a mode."""
    home = tmp_path / "home-of-ada"
    home.mkdir()
    for name in [n for n in os.environ if n.startswith(("WANDB_", "TRACKIO_", "NETRC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    PartialState(cpu=True)
    yield home
    if "wandb" in sys.modules:  # it caches the environment
        sys.modules["wandb"].teardown()
    PartialState._reset_state()


@pytest.fixture
def messages(caplog):
    """A function that returns the recipe's messages so far."""
    caplog.set_level(logging.INFO, "recipe")
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("recipe")]


def track(run: Path, name: str, *steps: int, loss: float = 1.0, resume: int = 0, run_id: str | None = None, **fields):
    """Logs `steps` as a run that starts or resumes at step `resume`; returns the Tracker."""
    run.mkdir(exist_ok=True)
    settings = TINY | {"output_dir": run, "report_to": name, "run_name": "mine"} | fields
    with closing(Tracker(parse_config(flags(**settings)), resume)) as tracker:
        tracker.load_state_dict({"run_id": run_id or tracker.run_id})
        tracker.start()
        for step in steps:
            evaluated = {"sample": f"Once, at step {step}", "val_loss/code": 0.5, "hellaswag_llmc_acc": 0.3}
            record = {"step": step, "loss": loss, "val_loss": 1.0 if step else None, "mfu": None}
            tracker.log(record | (evaluated if step == 40 else {}))
    return tracker


@needs["tensorboard"]
def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path, messages):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    tracker = track(run, "tensorboard", 0, 10, 20, 30, loss=1.0)
    track(run, "tensorboard", 20, 30, 40, loss=2.0, resume=20, run_id=tracker.run_id)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(0, 1.0), (10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]
    assert {*events.Tags()["scalars"]} == {"train/loss", "val/loss", "val/loss/code", "val/hellaswag_llmc_acc"}
    (sample,) = events.Tensors("val/sample/text_summary")
    assert (sample.step, sample.tensor_proto.string_val) == (40, [b"Once, at step 40"])
    (*_, configuration) = events.Tensors("configuration/text_summary")
    assert configuration.step == 20
    assert b'"learning_rate": 0.01,' in configuration.tensor_proto.string_val[0]
    assert len(list((run / "tensorboard").iterdir())) == 2  # a file for each start, shown as one run
    assert messages() == [f"tracker    tensorboard --logdir {run}"] * 2


@pytest.mark.slow
@needs["trackio"]
def test_trackio_continues_the_run(tmp_path, home, monkeypatch):
    import trackio.sqlite_storage
    import trackio.utils

    for module in (trackio.sqlite_storage, trackio.utils):  # they read the environment when they are imported
        monkeypatch.setattr(module, "TRACKIO_DIR", home / "trackio")
    tracker = track(tmp_path / "run", "trackio", 0, 10)
    track(tmp_path / "run", "trackio", 20, resume=10, run_id=tracker.run_id)
    new_tracker = track(tmp_path / "run", "trackio", 0)
    with closing(sqlite3.connect(home / "trackio" / "gpt2-recipe.db")) as database:
        rows = database.execute("SELECT run_name, step FROM metrics").fetchall()
    expected = [(f"mine-{tracker.run_id}", step) for step in (0, 10, 20)] + [(f"mine-{new_tracker.run_id}", 0)]
    assert sorted(rows) == sorted(expected)


@pytest.mark.slow
@needs["wandb"]
@pytest.mark.parametrize("swept", [False, True])
def test_wandb_continues_the_run_and_is_offline_without_a_key(tmp_path, messages, monkeypatch, swept):
    """By hand also that of a sweep, whose agent has chosen its id. One command uploads both sessions."""
    run = tmp_path / "run"
    with monkeypatch.context() as agent:
        if swept:
            agent.setenv("WANDB_RUN_ID", "1a2b3c4d")
        tracker = track(run, "wandb", 0, 10)
    assert (tracker.run_id == "1a2b3c4d") == swept
    track(run, "wandb", 20, resume=10, run_id=tracker.run_id)
    names = [path.name for path in (run / "wandb").glob("offline-run-*")]
    assert names
    # wandb adds "-1" to the second folder of the same second.
    assert all(name.removesuffix("-1").endswith(tracker.run_id) for name in names)
    assert messages()[-1].startswith(f"tracker    wandb is offline; to upload: wandb sync {run}/wandb/offline-run-")
    assert len(glob(messages()[-1].rpartition(" ")[2])) == len(names) == 2


@pytest.mark.slow
@needs["wandb"]
@pytest.mark.parametrize("fails", [False, True])
def test_wandb_shows_whether_a_run_has_failed(tmp_path, fails):
    """An alert on failed runs needs it."""
    from wandb.proto.wandb_internal_pb2 import Record

    config = parse_config(flags(**TINY | {"output_dir": tmp_path, "report_to": "wandb"}))
    with suppress(UserError), Metrics(config, cpu_strategy(), MagicMock(), 0).open():
        if fails:
            raise UserError("the loss is not finite")
    (path,) = tmp_path.rglob("*.wandb")
    data, start, exit_codes = path.read_bytes(), 7, []
    while start < len(data):  # the format of LevelDB's log: a checksum, a length of two bytes, a kind, a record
        end = start + 7 + int.from_bytes(data[start + 4 : start + 6], "little")
        record, start = Record.FromString(data[start + 7 : end]), end
        exit_codes += [record.exit.exit_code] if record.HasField("exit") else []
    assert exit_codes == [int(fails)]


@pytest.mark.slow
@needs["wandb"]
def test_wandb_may_be_disabled(tmp_path, monkeypatch, messages):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    track(tmp_path / "run", "wandb", 0)
    assert messages() == ["tracker    wandb is disabled by WANDB_MODE"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=needs[name]) for name in NAMES])
def test_a_tracker_uploads_no_secret_and_no_home_directory(tmp_path, home, name, monkeypatch):
    if name == "trackio":
        import trackio.sqlite_storage

        monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", home / "trackio")
    monkeypatch.setenv("WANDB_API_KEY", WANDB_KEY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["recipe/train.py", "--a-flag-of-the-command"])
    track(tmp_path / "run", name, 0, 10, val_data=HUB_TOKEN, init_from=f"{home}/prompt")
    paths = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"~/prompt" in path.read_bytes() for path in paths)
    for path in paths:
        private_texts = [HUB_TOKEN, WANDB_KEY, "--a-flag-of-the-command"]
        if path.suffix in (".wandb", ".db") or "tfevents" in path.name or "files" in path.parts:
            private_texts.append(str(home))  # wandb's own log, which stays on this disk, names directories
        assert not [text for text in private_texts if text.encode() in path.read_bytes()], path


@pytest.mark.parametrize("method", ["", "start", "log", "finish"])
def test_a_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch, messages, method):
    broken = MagicMock()
    fails = getattr(broken.return_value, method) if method else broken
    fails.side_effect = RuntimeError(f"no luck with {HUB_TOKEN}\nand a second line")
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", broken)
    track(tmp_path / "run", "tensorboard", 0, 10, 20)
    warnings = [line for line in messages() if line.startswith("WARNING")]
    assert warnings == ["WARNING    tensorboard: no luck with ***; the run goes on without it; metrics.jsonl has all"]
    assert fails.call_count == 1
    assert broken.mock_calls[-1][0] in ("", f"().{method}")  # it is not called again


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    check_tracker("none")
    with pytest.raises(UserError, match=r"report_to is wandb, which is not installed: pip install -e '\.\[trackers\]'"):
        check_tracker("wandb")


@needs["wandb"]
def test_each_run_of_a_sweep_has_a_directory_of_its_own(monkeypatch):
    """The second would be refused in that of the first one, which had another rate."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

    sweep = yaml.safe_load(re.search(r"```yaml\n(.*?)```", (ROOT / "docs/evaluation.md").read_text(), re.DOTALL)[1])
    assert sweep["metric"]["name"] in metric_names({"val_loss": 3.0})
    values = {name: {"value": drawn.get("value", drawn.get("min"))} for name, drawn in sweep["parameters"].items()}
    arguments = create_sweep_command_args({"args": values | {"torch_compile": {"value": False}}})["args"]
    monkeypatch.setenv("WANDB_RUN_ID", "1a2b3c4d")
    assert parse_config(arguments).run.run_name == "gpt2"  # by hand: the run of this id is continued
    monkeypatch.setenv("WANDB_SWEEP_ID", "9z8y7x6w")
    config = parse_config(arguments)
    assert (config.run.run_name, config.run.output_dir) == ("gpt2-1a2b3c4d", "runs/gpt2-1a2b3c4d")
    assert (config.optimizer.learning_rate, config.run.torch_compile) == (3e-4, False)
    assert parse_config([*arguments, "--run_name=mine"]).run.run_name == "mine"
