"""What a run measures and records: loss, throughput, and metrics.jsonl, also across resumes and failures."""

import json
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from recipe.config import parse_config
from recipe.engine.device import Device
from recipe.estimate.memory import flops_per_token
from recipe.monitor.metrics import Metrics, MetricsLog, RunningLoss, sha256_before
from recipe.utils.checkpoints import read_metrics, val_losses
from recipe.utils.errors import UserError
from tests.conftest import files_of_at_most, flags
from tests.engine import cpu_strategy


def steps_in(path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_running_loss_is_the_mean_since_the_last_reading_and_survives_a_checkpoint():
    def step(running: RunningLoss, *shares: float, skipped: float = 0.0) -> None:
        for share in shares:
            running.add(torch.tensor(share))
        running.end_step(torch.tensor(skipped))

    loss, restored = RunningLoss(torch.device("cpu")), RunningLoss(torch.device("cpu"))
    step(loss, 1.0, 2.0)  # two micro-batches' shares
    step(loss, 6.0)
    step(loss, 1.0, float("nan"), skipped=1.0)  # a skipped step does not count
    restored.load_state_dict(json.loads(json.dumps(loss.state_dict(lambda t: t))))
    for running in (loss, restored):
        step(running, 3.0)
        assert running.read(lambda t: t) == 4.0
    step(loss, 5.0)
    assert loss.read(lambda t: t) == 5.0


def test_a_full_disk_costs_one_warning_and_no_line(tmp_path, caplog):
    """The disk is full in the middle of a line; the lines that do not fit are written later."""
    with closing(MetricsLog(tmp_path / "metrics.jsonl", 0)) as log:
        log.write({"step": 0})
        with files_of_at_most(20):
            for step in range(1, 50):
                log.write({"step": step, "sample": 1000 * "x"})
            digest = log.sha256_before(50)
        log.write({"step": 50})
    assert sha256_before((tmp_path / "metrics.jsonl").read_bytes(), 50) == digest
    assert steps_in(tmp_path / "metrics.jsonl") == [*range(51)]
    assert caplog.text.count("cannot be written (File too large)") == 1


def test_a_save_does_not_take_longer_the_longer_a_run_has_been(tmp_path):
    """It needs the checksum of all lines and all validation losses: also after a resume, which writes a line again, and
    of a log of 600,000 lines, which took ten seconds to read."""
    path = tmp_path / "metrics.jsonl"
    line = '{"step": %d, "loss": 3.25, "val_loss": %s, "seconds": 0.5}\n'
    path.write_text("".join(line % (step, 4.0 if step % 1000 == 0 else "null") for step in range(1, 20_003)))
    with closing(MetricsLog(path, first_step=20_000)) as log:
        for step, record in [
            (20_000, {"step": 20_000, "val_loss": 4.0, "sample": "the line of the resume, written again"}),
            (20_001, {"step": 20_001, "val_loss": 2.0}),
            (20_002, {"step": 20_002, "val_loss": float("nan")}),
            (20_005, {}),
        ]:
            start = time.thread_time()
            digest, losses = log.sha256_before(step), dict(log.val_losses)
            assert time.thread_time() - start < 0.05
            assert (digest, losses) == (sha256_before(path.read_bytes(), step), val_losses(tmp_path))
            if record:
                log.write(record)
                assert log.sha256_before(step) == digest  # a run that is stopped saves after the step's line
    assert [step for step in losses if step > 19_000] == [20_000, 20_001]


def test_a_metrics_path_that_is_not_a_file_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(Is a directory\); "):
        MetricsLog(tmp_path / "metrics.jsonl", 0)


def test_a_run_that_starts_over_keeps_the_curve_of_the_earlier_one(tmp_path, caplog):
    """Its checkpoints were moved away, or it was killed before it saved one."""
    path, curve = tmp_path / "metrics.jsonl", '{"step": 0}\n{"step": 1}\n'
    (tmp_path / "metrics.old-2.jsonl").symlink_to("unmounted")
    for _ in range(2):
        path.write_text(curve)
        MetricsLog(path, 0).close()
    assert [(tmp_path / f"metrics.old-{n}.jsonl").read_text() for n in (1, 3)] == [curve, curve]
    assert f"the earlier curve is kept in {tmp_path}/metrics.old-1.jsonl" in caplog.text
    assert path.read_text() == ""


@pytest.mark.parametrize(("last_step", "is_kept"), [(6, False), (7, True)])
def test_a_run_whose_later_checkpoints_were_moved_away_keeps_its_curve(tmp_path, caplog, last_step, is_kept):
    """It saves every 3 steps and resumes from step 3: after a kill, lines up to step 6, whose save was in progress."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(curve := "".join(f'{{"step": {step}}}\n' for step in range(last_step + 1)))
    MetricsLog(path, 3, lambda step: step % 3 == 0).close()
    assert steps_in(path) == [0, 1, 2, 3]
    assert [old.read_text() for old in tmp_path.glob("metrics.old-1.jsonl")] == [curve] * is_kept
    assert ("the run is back at step 3; the earlier curve is kept in" in caplog.text) == is_kept


def test_a_resume_on_a_full_disk_says_to_free_space_and_keeps_the_curve(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    with files_of_at_most(5), pytest.raises(UserError, match=r"\(File too large\); free some space"):
        MetricsLog(path, 1)
    assert path.read_text() == '{"step": 1}\n'


def test_a_record_holds_what_its_step_read_and_its_evaluations_also_after_a_resume(tmp_path, monkeypatch):
    settings = {"logging_steps": 5, "learning_rate": 1e-3, "warmup_steps": 10, "output_dir": tmp_path}
    config = parse_config(flags(**settings))
    tokens, clock = config.optimizer.total_batch_tokens, SimpleNamespace(seconds=100.0)
    monkeypatch.setattr("time.perf_counter", lambda: clock.seconds)
    monkeypatch.setattr(Device, "counters", lambda self: {"peak_memory_bytes": 7})
    same = {"mean": lambda value: value, "broadcast_object": lambda value: value}  # on both processes
    processes = SimpleNamespace(world_size=2, is_main=True, **same)
    strategy, batches = cpu_strategy(None, processes, peak_flops=5e5), SimpleNamespace(waited=lambda: 0.5)
    strategy.spike_filter = SimpleNamespace(check=lambda step: 2)

    metrics = Metrics(config, strategy, batches, 0)
    with metrics.open():
        with metrics.paused("saving"):
            clock.seconds += 4.0
        metrics.write(0, metrics.record(0, read=True))
        for step in range(5):
            clock.seconds += 2.0
            metrics.loss.add(torch.tensor(float(step)))
            metrics.end_step(torch.tensor(0.5), torch.tensor(0.0))
        metrics.write(4, metrics.record(4, read=False))  # nothing was measured at this step
        with metrics.paused("saving"):
            clock.seconds += 6.0
        record = metrics.record(5, read=True)
        metrics.unwritten = dict(record)
        clock.seconds += 3.0  # of training since the record
        state = json.loads(json.dumps(metrics.state_dict()))
        metrics.write(5, record | {"val_loss": 3.0})
    first_line, line = read_metrics(tmp_path / "metrics.jsonl")
    assert (metrics.seconds, metrics.pauses) == (10.0, 10.0)
    first_values = [first_line[name] for name in ("step", "loss", "learning_rate")]
    assert first_values == [0, None, 1e-4]
    assert (line["step"], line["tokens"], line["loss"], line["val_loss"]) == (5, 5 * tokens, 2.0, 3.0)
    assert (line["grad_norm"], line["learning_rate"], line["skipped_steps"]) == (0.5, 5e-4, 2)
    assert line["mfu"] == line["tokens_per_second"] * flops_per_token(config.model, config.data.sequence_length) / 1e6
    assert (line["tokens_per_second"], line["seconds"], line["data_wait"]) == (tokens / 2.0, 10.0, 0.05)

    resumed_metrics = Metrics(config, strategy, batches, 5)
    resumed_metrics.load_state_dict(state)
    assert (resumed_metrics.seconds, resumed_metrics.pauses) == (13.0, 10.0)
    with resumed_metrics.open():
        record = resumed_metrics.record(5, read=True)
        assert record["val_loss"] == 3.0  # of the earlier process, so that it is not measured again
        resumed_metrics.write(5, record)
        clock.seconds += 4.0
        resumed_metrics.end_step(torch.tensor(0.5), torch.tensor(0.0))
        assert resumed_metrics.record(6, read=True)["tokens_per_second"] == tokens / 4.0, "of the steps since step 5"
    assert read_metrics(tmp_path / "metrics.jsonl") == [first_line, line | {"seconds": 13.0}]
