"""train_hours: a WSD run that decays in time, also if it is stopped in between, and that an audit can replay."""

import dataclasses
import itertools
import json
import shutil

import pytest

from recipe import audit
from recipe.checkpoint.format import checkpoints
from recipe.config import OptimizerConfig, parse_config
from recipe.monitor.metrics import time_to_decay
from recipe.utils.errors import UserError
from tests import processes as programs
from tests.conftest import TINY, assert_equal_tensors, by_step, flags, forget_after, ok, run_train

SECONDS = 8
FIELDS = {name: value for name, value in TINY.items() if name != "max_steps"}
FIELDS |= {"train_hours": SECONDS / 3600, "lr_scheduler_type": "wsd", "decay_fraction": 0.5, "save_steps": "end"}
FIELDS |= {"logging_steps": 10, "eval_steps": 400}


def saved_state(run) -> tuple[int, int, float]:
    """Of the newest checkpoint: its step, the number of steps of the run, and the seconds since it started."""
    state = json.loads((checkpoints(run)[-1] / "trainer_state.json").read_text())
    return state["step"], state["config"]["max_steps"], state["metrics"]["seconds"] + state["metrics"]["pauses"]


def test_at_a_constant_speed_a_run_ends_after_96_percent_of_the_time():
    config = parse_config(["--train_hours=1", "--lr_scheduler_type=wsd", "--decay_fraction=0.6"])
    for first_steps, (share, is_due) in itertools.product((0, 300), ((0.959, False), (0.961, True))):
        # The decay takes 1.5 times as long again, without another first step, which compiles.
        seconds = first_steps + 0.4 * (3600 * share - first_steps) - 60
        assert time_to_decay({"seconds": seconds, "pauses": 60, "first_steps": first_steps}, config) is is_due


@pytest.mark.parametrize("fraction", [0.2, 0.6])
def test_the_decay_begins_at_the_step_at_which_it_is_due_but_not_before_the_end_of_the_warm_up(fraction):
    for step, warmup_steps in itertools.product((1, 5, 7, 100, 12345), (0, 20)):
        config = OptimizerConfig(lr_scheduler_type="wsd", decay_fraction=fraction, warmup_steps=warmup_steps)
        config = dataclasses.replace(config, max_steps=config.ending_after(step))
        assert config.decay_start == max(step, warmup_steps) <= config.max_steps


@pytest.fixture
def complete_run(shards, once, tmp_path):
    """A function: number of processes -> a copy of a complete run, and what it printed."""

    def get(processes: int):
        def train(run):
            command = flags(**FIELDS, dataset_name=shards, output_dir=run)
            return ok(run_train(*command, processes=processes)).stdout

        run, output = once(f"hours-{processes}", train)
        return shutil.copytree(run, tmp_path / "run"), output

    return get


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_decays_and_is_complete_in_time(shards, complete_run, tmp_path, processes, capsys, monkeypatch):
    run, output = complete_run(processes)
    decay_start, last = (int(path.name[5:]) for path in checkpoints(run))
    assert f"decay      begins after step {decay_start:,}; the run will end at step {last:,}" in output
    assert "resuming with" not in output  # the user has changed nothing
    assert last / 2 == pytest.approx(decay_start, abs=1)
    lines = by_step(run)
    assert max(lines) == last
    assert lines[last]["val_loss"] is not None
    rates = {line["learning_rate"] for step, line in lines.items() if 4 < step <= decay_start}
    assert rates == {1e-2}  # constant after the warm-up
    assert lines[last]["learning_rate"] == pytest.approx(1e-2 / (last - decay_start), rel=1e-6)
    # Within some percent on a quiet machine; a test machine may slow down at any moment.
    assert 0.5 * SECONDS < saved_state(run)[2] < 2 * SECONDS
    command = flags(**FIELDS, dataset_name=shards, output_dir=run)
    assert "; raise --train_hours to train longer" in run_train(*command, processes=processes).stdout

    if processes == 1:
        resumed = forget_after(decay_start, shutil.copytree(run, tmp_path / "resumed"))  # killed before the decay
        output = run_train(*command[:-1], f"--output_dir={resumed}").stdout
        assert f"from step {decay_start}" in output
        assert_equal_tensors(resumed / f"step_{last:08d}", run / f"step_{last:08d}")
        monkeypatch.setattr(audit, "subprocess", programs.forking)
        assert audit.main([str(run), "--last", "2"]) == 0
        assert capsys.readouterr().out.count("steps equal to the bit") == 2


def test_only_the_time_that_a_stopped_run_ran_counts(shards, tmp_path):
    run = tmp_path / "run"
    command = flags(**FIELDS, dataset_name=shards, output_dir=run)
    stopped = run_train(*command, "--max_hours", str(SECONDS / 4 / 3600))
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    assert saved_state(run)[2] > 0.2 * SECONDS
    ok(run_train(*command))
    step, max_steps, seconds = saved_state(run)
    assert step == max_steps
    assert 0.5 * SECONDS < seconds < 2 * SECONDS


def test_a_complete_run_stays_as_it_is_with_less_time(shards, complete_run):
    run, _ = complete_run(1)
    state = saved_state(run)
    fields = FIELDS | {"train_hours": SECONDS / 7200}
    result = ok(run_train(*flags(**fields, dataset_name=shards, output_dir=run)))
    assert "training is finished" in result.stdout
    assert saved_state(run) == state
    assert not list(run.glob("decayed_*"))


def test_the_decay_can_become_due_during_an_evaluation_after_the_save(shards, tmp_path):
    """The checkpoint of that step has an earlier clock. With --fresh, which the decay must not repeat."""
    fields = FIELDS | {"dataset_name": f"{shards}/val_000000.bin", "val_data": f"{shards}/train_000000.bin"}
    fields |= {"eval_steps": 1, "save_steps": 1, "eval_tokens": 8_000, "fresh": "true"}
    result = ok(run_train(*flags(**fields, output_dir=tmp_path / "run"), timeout=90))
    assert result.stdout.count("decay      begins after step") == 1
    step, max_steps, _ = saved_state(tmp_path / "run")
    assert step == max_steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "cosine", "decay_fraction": 0.2}, "train_hours needs lr_scheduler_type wsd"),
        ({"max_steps": 5}, "max_steps and train_hours set the length of the run"),
        ({"decay_fraction": 0.9}, "decay_fraction 0.9 leaves too little time before the decay"),
    ],
)
def test_fields_that_conflict_with_train_hours_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        parse_config(flags(**FIELDS | changes))
