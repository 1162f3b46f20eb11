"""What a run measures and writes: its loss, its speed, metrics.jsonl across resumptions."""

import json
import os
import subprocess
import sys

import torch

from recipe import faults
from recipe.monitor.metrics import MetricsLog, RunningLoss, Throughput, read_metrics
from tests.conftest import ROOT


def test_running_loss_is_the_mean_since_the_last_reading_and_survives_a_checkpoint():
    def step(running: RunningLoss, *shares: float, skipped: float = 0.0) -> None:
        for share in shares:
            running.add(torch.tensor(share))
        running.end_step(torch.tensor(skipped))

    loss = RunningLoss(torch.device("cpu"))
    step(loss, 1.0, 2.0)  # two micro-batches' shares
    step(loss, 6.0)
    step(loss, 1.0, float("nan"), skipped=1.0)  # a step that was left out does not count
    again = RunningLoss(torch.device("cpu"), json.loads(json.dumps(loss.state(lambda t: t))))
    for restored in (loss, again):
        step(restored, 3.0)
        assert restored.read(lambda t: t) == 4.0
    step(loss, 5.0)
    assert loss.mean(lambda t: t) == 5.0  # a look, no reading
    assert loss.read(lambda t: t) == 5.0


def test_a_damaged_line_costs_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": 1.0}) for n in range(10)]
    lines[3], lines[5], lines[7] = lines[3].replace(":", "?"), "5", "{}"
    path.write_bytes("\n".join(lines).encode().replace(b'"step": 8', b'"st\xffp": 8') + b'\n{"step": 1')
    MetricsLog(path, 100)
    assert [line["step"] for line in read_metrics(path)] == [0, 1, 2, 4, 6, 9]


def test_a_full_disk_under_the_log_ends_no_run():
    code = "from recipe.monitor.progress import Progress\np = Progress(10, 2, 0, show=True)\np.say('a')\n"
    code += "p.report({'step': 1, 'tokens': 5, 'loss': 1.0, 'val_loss': None, 'learning_rate': 1.0, 'mfu': None, "
    code += "'tokens_per_second': None})\nopen('/dev/stderr', 'w').write('on')"
    with open("/dev/full", "w") as full:
        result = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert result.stderr.startswith("on")
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "on")


def test_a_line_that_cannot_be_written_waits_for_the_next(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(faults, "_FAULTS", faults._parse("enospc@log.write:2-3", "0"))
    log = MetricsLog(tmp_path / "metrics.jsonl", 0, said.append)
    for n in range(5):
        log.write({"step": n})
        assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == list(
            range(n + 1) if n in (0, 3, 4) else [0]
        )
    assert len(said) == 1
    assert "cannot be written (No space left on device)" in said[0]


def test_throughput_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    throughput = Throughput(seconds=7.0, pauses=5.0)
    now[0] += 2
    with throughput.paused():
        now[0] += 50
    now[0] += 1
    assert throughput.window() == 3
    assert throughput.seconds == 10
    assert throughput.pauses == 55


def test_a_resumed_log_drops_what_will_be_written_again_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "lo')
    log = MetricsLog(path, first_step=3)
    log.write({"step": 3, "loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0},
        {"step": 1},
        {"step": 2},
        {"step": 3, "loss": None},
    ]
