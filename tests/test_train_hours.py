"""train_hours: a run of wsd that decays in time, whatever stops it on the way, and that an audit can replay."""

import json
import shutil

import pytest

from recipe import audit
from recipe.checkpoint.format import checkpoints
from recipe.config import parse_config
from recipe.monitor.metrics import time_to_decay
from tests import processes as programs
from tests.conftest import TINY, assert_equal_tensors, by_step, flags, forget_after, ok, run_train

SECONDS = 8
FIELDS = {name: value for name, value in TINY.items() if name != "max_steps"}
FIELDS |= {"train_hours": SECONDS / 3600, "lr_scheduler_type": "wsd", "decay_fraction": 0.5, "save_steps": "end"}
FIELDS |= {"logging_steps": 10, "eval_steps": 400}


def plan(run) -> dict:
    """Of the newest checkpoint: its step, the configured steps, and the seconds of the run."""
    state = json.loads((checkpoints(run)[-1] / "trainer_state.json").read_text())
    times = state["metrics"]
    return {"step": state["step"], "seconds": times["seconds"] + times["pauses"]} | {"config": state["config"]}


def test_at_an_unchanged_speed_it_ends_after_98_percent_of_the_time():
    config = parse_config(["--train_hours=1", "--lr_scheduler_type=wsd", "--decay_fraction=0.6"])
    for used, due in ((0.4 * 0.979, False), (0.4 * 0.981, True)):  # the decay takes 1.5 times as long again
        assert time_to_decay({"seconds": 3600 * used - 60, "pauses": 60, "first_steps": 0}, config) is due


@pytest.fixture
def trained(shards, once, tmp_path):
    """Processes -> a copy of a run that has had its time, and what it printed."""

    def get(processes: int):
        def train(run):
            command = flags(**FIELDS, dataset_name=shards, output_dir=run)
            return ok(run_train(*command, processes=processes)).stdout

        run, output = once(f"hours-{processes}", train)
        return shutil.copytree(run, tmp_path / "run"), output

    return get


@pytest.mark.parametrize("processes", [1, 2])
def test_it_decays_and_is_complete_in_time(shards, trained, tmp_path, processes, capsys, monkeypatch):
    run, output = trained(processes)
    start, last = (int(path.name[5:]) for path in checkpoints(run))
    assert f"decay      begins after step {start:,}; the run has {last:,} steps" in output
    assert last / 2 == pytest.approx(start, abs=1)
    lines = by_step(run)
    assert max(lines) == last
    assert lines[last]["val_loss"] is not None
    rates = {line["learning_rate"] for step, line in lines.items() if 4 < step <= start}
    assert rates == {1e-2}  # the warm-up over, constant
    assert lines[last]["learning_rate"] == pytest.approx(1e-2 / (last - start), rel=1e-6)
    # Quiet machines keep it within some percent; those that test may be slowed down at any moment.
    assert 0.5 * SECONDS < plan(run)["seconds"] < 2 * SECONDS
    command = flags(**FIELDS, dataset_name=shards, output_dir=run)
    assert "training is finished" in run_train(*command, processes=processes).stdout

    if processes == 1:
        again = forget_after(start, shutil.copytree(run, tmp_path / "again"))  # killed between the two parts
        resumed = run_train(*command[:-1], f"--output_dir={again}")
        assert f"from step {start}" in resumed.stdout
        assert_equal_tensors(again / f"step_{last:08d}", run / f"step_{last:08d}")
        monkeypatch.setattr(audit, "subprocess", programs.forking)
        assert audit.main([str(run), "--last", "2"]) == 0
        assert capsys.readouterr().out.count("steps equal to the bit") == 2


def test_a_run_that_was_stopped_counts_only_the_time_that_it_ran(shards, tmp_path):
    command = flags(**FIELDS, dataset_name=shards, output_dir=tmp_path / "run")
    stopped = run_train(*command, "--max_hours", str(SECONDS / 4 / 3600))
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    assert plan(tmp_path / "run")["seconds"] > 0.2 * SECONDS
    ok(run_train(*command))
    assert plan(tmp_path / "run")["step"] == plan(tmp_path / "run")["config"]["max_steps"]
    assert 0.5 * SECONDS < plan(tmp_path / "run")["seconds"] < 2 * SECONDS


def test_less_time_than_a_run_has_had_takes_nothing_back(shards, trained):
    run, _ = trained(1)
    before = plan(run)
    less = FIELDS | {"train_hours": SECONDS / 7200}
    again = ok(run_train(*flags(**less, dataset_name=shards, output_dir=run)))
    assert "training is finished" in again.stdout
    assert plan(run) == before
    assert not list(run.glob("decayed_*"))


def test_the_time_may_come_in_an_evaluation_after_the_save(shards, tmp_path):
    """Of a step whose checkpoint has an earlier clock."""
    long = {"eval_steps": 1, "save_steps": 1, "eval_tokens": 8_000, "val_data": f"{shards}/train_000000.bin"}
    shorter = {"dataset_name": f"{shards}/val_000000.bin", "sequence_length": 16, "total_batch_tokens": 64}
    result = ok(run_train(*flags(**FIELDS | long | shorter, output_dir=tmp_path / "run"), timeout=90))
    assert result.stdout.count("decay      begins after step") == 1
    assert plan(tmp_path / "run")["step"] == plan(tmp_path / "run")["config"]["max_steps"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--lr_scheduler_type=cosine", "--decay_fraction=0.2"], "train_hours is for lr_scheduler_type wsd"),
        (["--max_steps=5", "--train_hours=1"], "max_steps and train_hours set the length of the run"),
        (["--decay_fraction=0.9"], "decay_fraction 0.9 leaves too little time before the decay"),
    ],
)
def test_what_does_not_go_with_it_is_named(shards, tmp_path, words, error):
    result = run_train(*flags(**FIELDS, dataset_name=shards, output_dir=tmp_path / "run"), *words)
    assert result.returncode == 2
    assert error in result.stderr
