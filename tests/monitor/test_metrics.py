"""What a run measures and records: its loss, its throughput, metrics.jsonl across resumptions and failures."""

import errno
import json
import logging
import os
import shutil
from types import SimpleNamespace

import pytest
import torch

from recipe import files
from recipe.config import parse_config
from recipe.errors import UserError
from recipe.log import set_up_logging
from recipe.monitor import metrics as module
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


def test_a_damaged_line_costs_no_other(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": n, "loss": 1.0}) for n in range(10)]
    lines[3], lines[5], lines[6], lines[7] = lines[3].replace(":", "?"), "5", "[" * 100_000, "{}"
    path.write_bytes("\n".join(lines).encode().replace(b'"step": 8', b'"st\xffp": 8') + b'\n{"step": 1')
    MetricsLog(path, 100).close()
    assert steps_in(path) == [0, 1, 2, 4, 9]


def test_the_file_is_on_the_disk_before_it_takes_the_place_of_the_one_before(tmp_path, monkeypatch):
    """A power failure after a resume must not leave an empty metrics.jsonl."""
    done = []
    monkeypatch.setattr(files.os, "fsync", lambda fd: done.append(os.readlink(f"/proc/self/fd/{fd}")))
    replace = files.Path.replace
    monkeypatch.setattr(files.Path, "replace", lambda self, to: (done.append("replace"), replace(self, to)))
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n')
    MetricsLog(path, 1)
    assert done == [str(tmp_path / ".metrics.jsonl.tmp"), "replace", str(tmp_path)]


def test_a_line_that_cannot_be_written_waits_for_the_next_one_or_for_a_checkpoint(tmp_path, monkeypatch, caplog):
    path, full = tmp_path / "metrics.jsonl", {1, 2}
    append, calls = module.append_line, iter(range(99))

    def fails(file, data):
        if next(calls) in full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return append(file, data)

    monkeypatch.setattr(module, "append_line", fails)
    log = MetricsLog(path, 0)
    for n in range(4):
        log.write({"step": n})
        assert steps_in(path) == list(range(n + 1) if n in (0, 3) else [0])
    assert caplog.text.count("cannot be written (No space left on device); its lines wait in memory") == 1
    full.add(5)
    log.write({"step": 4})
    assert steps_in(path) == [0, 1, 2, 3, 4][: len(steps_in(path))]
    log.sync()
    assert steps_in(path) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.tmp"])
def test_a_link_that_somebody_has_planted_never_has_its_target_changed(tmp_path, name):
    target, run = tmp_path / "precious", tmp_path / "run"
    target.write_text("precious")
    run.mkdir()
    (run / name).symlink_to(target)
    if name == "metrics.jsonl":
        with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: it is a link; move it away"):
            MetricsLog(run / "metrics.jsonl", 0)
    else:
        MetricsLog(run / "metrics.jsonl", 0).write({"step": 0})
        assert steps_in(run / "metrics.jsonl") == [0]
    assert target.read_text() == "precious"


def test_a_directory_in_place_of_the_file_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match=r"metrics\.jsonl cannot be written: Is a directory; move it away"):
        MetricsLog(tmp_path / "metrics.jsonl", 0)


@pytest.mark.parametrize("how", ["deleted", "renamed"])
def test_a_run_whose_directory_goes_away_ends_with_a_message(tmp_path, how):
    run = tmp_path / "run"
    run.mkdir()
    log = MetricsLog(run / "metrics.jsonl", 0)
    shutil.rmtree(run) if how == "deleted" else run.rename(tmp_path / "other")
    with pytest.raises(UserError, match=r"run/metrics\.jsonl was deleted, renamed or replaced while the run was writ"):
        log.write({"step": 1})


def test_a_full_disk_under_the_standard_output_ends_no_run(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        set_up_logging()
        logging.getLogger("recipe.train").info("step 1")
        with pytest.raises(OSError, match="No space left"):
            full.flush()  # which shows that the line was not written
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # to close it without an error


class Recorder:
    """An engine, a data loader, a spike filter and all outputs of one process, as far as Metrics needs them."""

    device, sum_dtype, peak_flops, world = torch.device("cpu"), torch.float64, 1e6, 1

    def __init__(self):
        self.records, self.during = [], lambda what: self.patient()
        self.stop = self.spike_filter = self
        self.mean = lambda tensor: tensor

    def patient(self):
        from contextlib import nullcontext

        return nullcontext()

    def counters(self):
        return {"peak_memory_bytes": 7}

    def waited(self):
        return 0.0

    def check(self, step):
        return 2

    def advance(self):
        pass

    wants_loss = True

    def live(self, loss):
        self.live_losses = [*getattr(self, "live_losses", []), loss]

    def tick(self, done, of):
        pass

    def report(self, record, failed):
        assert failed == "step 10 not saved"

    def log(self, record):
        self.records.append(record)


def test_a_record_holds_what_its_step_read_and_its_evaluations_also_after_a_resume():
    config = parse_config(["--logging_steps=5", "--learning_rate=1e-3", "--warmup_steps=10"])
    tokens = config.optimizer.total_batch_tokens

    def make() -> tuple[Metrics, Recorder]:
        recorder = Recorder()
        checkpoints = SimpleNamespace(failed="step 10 not saved", save_wait=1.0)
        metrics = Metrics(config, recorder, recorder, checkpoints, Outputs(None, recorder, recorder), 6.0)
        return metrics, recorder

    metrics, recorder = make()
    metrics.read(0)
    metrics.write(0)
    for step in range(5):
        metrics.loss.add(torch.tensor(float(step)))
        metrics.end_step(torch.tensor(0.5), torch.tensor(0.0))
    assert recorder.live_losses == [0.0, 0.5, 1.0, 1.5, 2.0]  # the mean so far: a sign of life
    metrics.write(4)  # nothing was read at this step
    metrics.read(5)
    state = json.loads(json.dumps(metrics.state_dict() | {"step": 5}))
    metrics.add(val_loss=3.0)
    metrics.write(5)
    nothing, line = recorder.records
    assert (nothing["step"], nothing["loss"], nothing["learning_rate"]) == (0, None, 1e-4)
    assert (line["step"], line["tokens"], line["loss"], line["val_loss"]) == (5, 5 * tokens, 2.0, 3.0)
    assert (line["grad_norm"], line["learning_rate"], line["skipped_steps"]) == (0.5, 5e-4, 2)
    assert line["mfu"] == pytest.approx(line["tokens_per_second"] * 6.0 / 1e6)
    assert line["seconds"] == pytest.approx(line["save_wait"] ** -1 - 1, abs=1e-3)

    resumed, recorder = make()  # evaluated again at step 5, whose line was not written
    resumed.load_state_dict(state)
    resumed.read(5)
    resumed.add(val_loss=3.0)
    resumed.write(5)
    differing = {k for k, v in recorder.records[0].items() if v != line[k]}
    assert differing <= {"seconds", "save_wait"}
