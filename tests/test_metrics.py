"""What a run shows and writes: progress on a terminal and elsewhere, metrics.jsonl across resumptions."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios

import torch

from recipe.metrics import MetricsLog, RunningLoss, Throughput
from tests.conftest import ROOT, TINY, flags


def test_running_loss_is_the_mean_since_the_last_reading_and_survives_a_checkpoint():
    loss = RunningLoss(torch.device("cpu"))
    for value in (1.0, 2.0, 6.0):  # two micro-batches' shares, then one
        loss.add(torch.tensor(value), last_of_step=value != 1.0)
    again = RunningLoss(torch.device("cpu"), json.loads(json.dumps(loss.state(lambda t: t))))
    for restored in (loss, again):
        restored.add(torch.tensor(3.0), last_of_step=True)
        assert restored.read(lambda t: t) == 4.0
    loss.add(torch.tensor(5.0), last_of_step=True)
    assert loss.read(lambda t: t) == 5.0


def test_throughput_leaves_pauses_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    throughput = Throughput(seconds=7.0)
    now[0] += 2
    with throughput.paused():
        now[0] += 50
    now[0] += 1
    assert throughput.window() == 3
    assert throughput.seconds == 10


def test_a_resumed_log_drops_what_will_be_written_again_and_half_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in range(5)) + '{"step": 5, "lo')
    log = MetricsLog(path, first_step=3)
    log.write({"step": 3, "loss": float("nan")})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "loss": None},
    ]  # fmt: skip


def test_a_terminal_gets_one_bar_with_tokens_speed_and_time_left(shards, tmp_path):
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 150, 0, 0))  # rows, columns
    settings = flags(**(TINY | {"data": shards, "output_dir": tmp_path / "run", "max_steps": 8}))
    process = subprocess.Popen(
        [sys.executable, "recipe/train.py", *settings], cwd=ROOT, stdout=terminal, stderr=terminal,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )  # fmt: skip
    os.close(terminal)
    output = b""
    try:
        while data := os.read(main, 65536):
            output += data
    except OSError:  # how Linux says that the other end was closed
        pass
    assert process.wait() == 0
    text = output.decode()
    last = [line for line in text.replace("\n", "\r").split("\r") if line.startswith("training:")][-1]
    assert "100%" in last
    assert "2.05k/2.05k" in last  # 8 steps of 256 tokens
    assert "tok/s" in last
    assert "loss=" in last
    assert "val=" in last
    assert "step 1  " not in text  # plain lines are for pipes
    assert "Warning" not in text
