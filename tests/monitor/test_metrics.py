"""What a run measures and records: its loss, its throughput, metrics.jsonl across resumptions and failures."""

import errno
import json
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from recipe.config import parse_config
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token
from recipe.monitor.metrics import Metrics, MetricsLog, Outputs, RunningLoss, Throughput, read_metrics


def steps_in(path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def test_running_loss_is_the_mean_since_the_last_reading_and_survives_a_checkpoint():
    def step(running: RunningLoss, *shares: float, skipped: float = 0.0) -> None:
        for share in shares:
            running.add(torch.tensor(share))
        running.end_step(torch.tensor(skipped))

    loss, again = RunningLoss(torch.device("cpu")), RunningLoss(torch.device("cpu"))
    step(loss, 1.0, 2.0)  # two micro-batches' shares
    step(loss, 6.0)
    step(loss, 1.0, float("nan"), skipped=1.0)  # a skipped step does not count
    again.load_state_dict(json.loads(json.dumps(loss.state_dict(lambda t: t))))
    for restored in (loss, again):
        step(restored, 3.0)
        assert restored.read(lambda t: t) == 4.0
    step(loss, 5.0)
    assert loss.mean(lambda t: t) == 5.0  # does not begin the next mean
    assert loss.read(lambda t: t) == 5.0


def test_throughput_does_not_count_pauses(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    throughput = Throughput(seconds=7.0, pauses=5.0)
    now[0] += 2
    with throughput.paused():
        now[0] += 50
    now[0] += 1
    assert throughput.window() == 3
    assert (throughput.seconds, throughput.pauses, throughput.share(10.0)) == (10, 55, 0.5)


def test_a_resumed_log_drops_what_will_be_written_again_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "lo')
    with MetricsLog(path, first_step=3) as log:
        log.write({"step": 3, "loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0},
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": None},
    ]


def test_a_line_that_cannot_be_written_waits_for_the_next_one_or_for_a_checkpoint(tmp_path, caplog):
    path, full = tmp_path / "metrics.jsonl", {1, 2, 5}
    log = MetricsLog(path, 0)
    file, calls = log._file, iter(range(99))

    def write(data):
        if next(calls) in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return file.write(data[:20])  # a part of it

    log._file = SimpleNamespace(write=write, fileno=file.fileno, close=file.close)
    log.write({"step": 0})
    for n in (1, 2):
        log.write({"step": n})
        assert steps_in(path) == [0]
    log.write({"step": 3})
    assert caplog.text.count("cannot be written (No space left on device); its lines wait in memory") == 1
    log.write({"step": 4})
    log.sync()
    assert steps_in(path) == [0, 1, 2, 3, 4]


def test_a_directory_in_place_of_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(not a regular file\); "):
        MetricsLog(tmp_path / "metrics.jsonl", 0)


def test_a_record_holds_what_its_step_read_and_its_evaluations_also_after_a_resume():
    config = parse_config(["--logging_steps=5", "--learning_rate=1e-3", "--warmup_steps=10"])
    tokens = config.optimizer.total_batch_tokens
    stop = SimpleNamespace(patient=nullcontext)
    engine = SimpleNamespace(device=torch.device("cpu"), sum_dtype=torch.float64, peak_flops=1e6, world=1, stop=stop)
    engine.mean = lambda t: time.sleep(0.05) or t  # the device is behind
    engine.counters = lambda: {"peak_memory_bytes": 7}
    engine.spike_filter, batches = SimpleNamespace(check=lambda step: 2), SimpleNamespace(waited=lambda: 0.0)
    checkpoints = SimpleNamespace(failed="step 10 not saved", save_wait=1.0)
    records, warnings, live = [], [], []

    def make() -> Metrics:
        progress = SimpleNamespace(advance=lambda: None, wants_loss=True, live=live.append)
        progress.report = lambda record, warning: warnings.append(warning)
        outputs = Outputs(None, progress, SimpleNamespace(log=records.append))
        return Metrics(config, engine, batches, checkpoints, outputs)

    metrics = make()
    metrics.read(0)
    metrics.write(0)
    for step in range(5):
        metrics.loss.add(torch.tensor(float(step)))
        metrics.end_step(torch.tensor(0.5), torch.tensor(0.0))
    assert live == [0.0, 0.5, 1.0, 1.5, 2.0]  # the mean so far: a sign of life
    metrics.write(4)  # nothing was read at this step
    metrics.read(5)
    state = json.loads(json.dumps(metrics.state_dict() | {"step": 5}))
    metrics.add(val_loss=3.0)
    metrics.write(5)
    resumed = make()  # evaluated again at step 5, whose line was not written
    resumed.load_state_dict(state)
    resumed.read(5)
    resumed.add(val_loss=3.0)
    resumed.write(5)
    nothing, line, again = records
    assert warnings == ["step 10 not saved"] * 3
    assert (nothing["step"], nothing["loss"], nothing["learning_rate"]) == (0, None, 1e-4)
    assert (line["step"], line["tokens"], line["loss"], line["val_loss"]) == (5, 5 * tokens, 2.0, 3.0)
    assert (line["grad_norm"], line["learning_rate"], line["skipped_steps"]) == (0.5, 5e-4, 2)
    flops = flops_per_token(config.model, config.data.sequence_length)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / 1e6)
    assert line["seconds"] == pytest.approx(line["save_wait"] ** -1 - 1, abs=1e-3)
    assert line["seconds"] >= 6 * 0.05  # five live losses, and the wait for the steps that the line is about
    assert {k for k, v in again.items() if v != line[k]} <= {"seconds", "save_wait"}
