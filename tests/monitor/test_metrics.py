"""What a run measures and records: its loss, its throughput, metrics.jsonl across resumptions and failures."""

import errno
import json
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from recipe.config import parse_config
from recipe.estimate.memory import flops_per_token
from recipe.monitor.metrics import Metrics, MetricsLog, Outputs, RunningLoss, Throughput, read_metrics
from recipe.utils.errors import UserError


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
    assert (throughput.seconds, throughput.pauses) == (10, 55)


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


def test_lines_that_cannot_be_written_cost_one_warning_and_nothing_after_them(tmp_path, caplog):
    path, calls = tmp_path / "metrics.jsonl", count()
    with MetricsLog(path, 0) as log:
        file = log._file

        def write(data):
            if (call := next(calls)) in (1, 2):
                raise OSError(errno.ENOSPC, "No space left on device")
            return file.write(data[:5] if call == 3 else data)  # a nearly full disk takes a part of a line

        names = ("fileno", "close", "tell", "truncate")
        log._file = SimpleNamespace(write=write, **{name: getattr(file, name) for name in names})
        for n in range(6):
            log.write({"step": n})
    assert path.read_text() == '{"step": 0}\n{"step": 4}\n{"step": 5}\n'
    assert caplog.text.count("cannot be written (No space left on device)") == 1


def test_a_directory_in_place_of_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be read \(not a regular file\); "):
        MetricsLog(tmp_path / "metrics.jsonl", 0)


def test_a_record_holds_what_its_step_read_and_its_evaluations_also_after_a_resume(monkeypatch):
    config = parse_config(["--logging_steps=5", "--learning_rate=1e-3", "--warmup_steps=10"])
    tokens, now = config.optimizer.total_batch_tokens, [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    stop = SimpleNamespace(patient=nullcontext)
    engine = SimpleNamespace(
        device=torch.device("cpu"), sum_dtype=torch.float64, peak_flops=1e6, world_size=1, stop=stop
    )
    engine.mean, engine.counters = lambda t: t, lambda: {"peak_memory_bytes": 7}
    engine.spike_filter, batches = SimpleNamespace(check=lambda step: 2), SimpleNamespace(waited=lambda: 0.5)
    lines, warnings = [], []
    progress = SimpleNamespace(advance=lambda: None, during=nullcontext, tick=None)
    progress.report = lambda line, warning: warnings.append(warning)
    outputs = Outputs(None, progress, SimpleNamespace(log=lines.append))

    metrics = Metrics(config, engine, batches, outputs, 0, None)
    metrics.write(0, metrics.record(0, read=True))
    for step in range(5):
        now[0] += 2.0
        metrics.loss.add(torch.tensor(float(step)))
        metrics.end_step(torch.tensor(0.5), torch.tensor(0.0))
    metrics.write(4, metrics.record(4, read=False))  # nothing was measured at this step
    with metrics.paused("saving"):
        now[0] += 10.0
    record = metrics.record(5, read=True)
    state, saved = json.loads(json.dumps(metrics.state_dict())), dict(record)
    metrics.warning = "step 5 not saved"
    metrics.write(5, record | {"val_loss": 3.0})
    resumed = Metrics(config, engine, batches, outputs, 5, saved)  # evaluated again, where its line was not written
    resumed.load_state_dict(state)
    resumed.write(5, resumed.record(5, read=True) | {"val_loss": 3.0})
    nothing, line, again = lines
    assert warnings == ["", "step 5 not saved", ""]
    assert (nothing["step"], nothing["loss"], nothing["learning_rate"]) == (0, None, 1e-4)
    assert (line["step"], line["tokens"], line["loss"], line["val_loss"]) == (5, 5 * tokens, 2.0, 3.0)
    assert (line["grad_norm"], line["learning_rate"], line["skipped_steps"]) == (0.5, 5e-4, 2)
    assert line["mfu"] == line["tokens_per_second"] * flops_per_token(config.model, config.data.sequence_length) / 1e6
    assert (line["tokens_per_second"], line["seconds"], line["data_wait"]) == (tokens / 2.0, 10.0, 0.05)
    assert (line["save_wait"], again["save_wait"]) == (0.5, 0.0)  # of this process
    assert again | {"save_wait": 0.5} == line
