"""Measures and records a run: its loss, without waiting for the device, its throughput, and metrics.jsonl."""

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from recipe.config import Config, due_at
from recipe.data.prefetch import BatchLoader
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import flops_per_token
from recipe.monitor.progress import Progress
from recipe.monitor.trackers import Tracker
from recipe.optim.schedule import lr_at
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import writing
from recipe.utils.files import replace_file, unused_path

logger = logging.getLogger(__name__)
Mean = Callable[[torch.Tensor], torch.Tensor]  # over all processes; a collective call

AIM = 0.96  # of train_hours, as a margin: the decay cannot be shortened any more if the machine slows down
# Columns that are null in the line of a step that did not measure them.
_MEASURED = ("loss", "val_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "data_wait", "skipped_steps")


class Metrics:
    """The metrics of a run and their outputs: metrics.jsonl, the terminal, an experiment tracker.

    Within a step the loop calls `loss.add` for each micro-batch, and then `end_step`; between steps it calls `record`,
    adds the results of its evaluations, and calls `write`.

    Attributes:
        loss: the RunningLoss.
        tracker: the Tracker, whose state a checkpoint keeps.
        seconds, pauses: seconds of training, and of validation, saving and the like, since the run first started,
            including the processes before a resume. `_first_steps` is counted in the same way.
        warning: shown on every line until it is empty.
        unwritten: the record of a step whose checkpoint is saved before its line is written.
    """

    def __init__(
        self, config: Config, strategy: Strategy, batches: BatchLoader, first_step: int, *, is_rewound: bool = False
    ):
        """For a run that starts or resumes at `first_step`: restore the state, then `open` it.
        `is_rewound`: the later checkpoints have been set aside, with a copy of metrics.jsonl."""
        self._config, self._strategy, self._batches, self._is_rewound = config, strategy, batches, is_rewound
        self._flops_per_token = flops_per_token(config.model, config.data.sequence_length)
        self.loss = RunningLoss(strategy.device.torch_device, strategy.device.sum_dtype)
        self.seconds = self.pauses = 0.0
        self._first_steps, self._has_stepped = 0.0, False  # seconds of the first step of each process, which compiles
        self.warning, self.unwritten = "", {}
        self.tracker = Tracker(config, first_step)
        self._log: MetricsLog | None = None  # on the main process only
        self._read_step = first_step  # of the last reading
        self._values: dict = {}  # of the last reading
        self._grad_norm = torch.zeros((), device=strategy.device.torch_device)  # of the last step

    @contextmanager
    def open(self) -> Generator[None, None, None]:
        """Context: metrics.jsonl, the progress bar and the tracker are open. A collective call. Raises UserError."""
        processes, opt = self._strategy.runtime.processes, self._config.optimizer
        with ExitStack() as stack:
            if processes.is_main:
                path = Path(self._config.run.output_dir) / "metrics.jsonl"
                self._log = MetricsLog(
                    path, self._read_step, lambda step: due_at(step, self._config).save and not self._is_rewound
                )
                stack.callback(self._log.close)
                self._values = self._log.earlier | self._values
            self._values = processes.broadcast_object(self._values)
            hours, show = self._config.run.train_hours if self._config.undecided else 0.0, processes.is_main
            self._progress = Progress(opt.max_steps, opt.total_batch_tokens, self._read_step, hours=hours, show=show)
            stack.callback(self._progress.close)
            if processes.is_main:
                self.tracker.start()
                stack.push(lambda kind, *_: self.tracker.close(failed=kind is not None))
            self._window_start = time.perf_counter()  # of the time since the last reading; pauses move it forward
            yield

    def record(self, step: int, *, read: bool) -> dict:
        """The record of this step, to which evaluations are added: values that an earlier process measured at this step
        and, if `read`, those gathered on the device since the last reading. A collective call, which waits for the
        device if it reads. Raises UserError after too many skipped steps in a row."""
        if read and step > self._read_step:
            self._values, self._read_step = self._read(step), step
        rate = {"learning_rate": lr_at(step, self._config.optimizer)} if read else {}
        return rate | (self._values if step == self._read_step else {})

    def _read(self, step: int) -> dict:
        device, processes = self._strategy.device, self._strategy.runtime.processes
        loss = self.loss.read(processes.mean)  # waits for the device, before the clock is read
        now = time.perf_counter()
        seconds, self._window_start = now - self._window_start, now
        self.seconds += seconds
        rate = (step - self._read_step) * self._config.optimizer.total_batch_tokens / seconds
        peak = device.peak_flops and device.peak_flops * processes.world_size
        return {
            "loss": loss,
            "grad_norm": self._grad_norm.item(),
            "learning_rate": lr_at(step - 1, self._config.optimizer),
            "tokens_per_second": rate,
            "data_wait": self._batches.waited() / seconds,
            "mfu": rate * self._flops_per_token / peak if peak else None,
            "skipped_steps": self._strategy.spike_filter.check(step),
        }

    def write(self, step: int, record: dict) -> None:
        """Writes a step's record to all outputs, unless it is empty."""
        if not record:
            return
        line = {
            "step": step,
            "tokens": step * self._config.optimizer.total_batch_tokens,
            **dict.fromkeys(_MEASURED),
            **record,
            "seconds": round(self.seconds, 3),
            **self._strategy.device.counters(),
        }
        if self._log:
            self._log.write(line)
        self._progress.report(line, self.warning, self.seconds + self.pauses)
        self.tracker.log(line)

    def end_step(self, grad_norm: torch.Tensor, skipped: torch.Tensor) -> None:
        """Adds a step: `grad_norm` (), and `skipped` (), 1.0 or 0.0, both on the device; does not wait for them."""
        if not self._has_stepped:
            self._has_stepped, self._first_steps = True, self._first_steps + time.perf_counter() - self._window_start
        self.loss.end_step(skipped)
        self._grad_norm = grad_norm
        self._progress.advance()

    @contextmanager
    def paused(self, activity: str) -> Generator[Callable[[int, int], None], None, None]:
        """Context: a pause in training for an `activity` such as "validating", which the progress bar shows; its
        seconds do not count as training. The device must be idle when it starts, or work still queued there would count
        as pause. Yields a function of (batches done, batches in all) that shows progress."""
        start = time.perf_counter()
        try:
            with self._progress.during(activity) as tick:
                yield tick
        finally:
            pause = time.perf_counter() - start
            self.pauses += pause
            self._window_start += pause

    def sync(self) -> None:
        """Flushes metrics.jsonl to the disk; on the main process."""
        assert self._log
        self._log.sync()

    def lines_sha256(self, step: int) -> str:
        """The SHA-256 of the lines of metrics.jsonl before `step`, the current one, by which an audit verifies them; on
        the main process."""
        assert self._log
        return self._log.sha256_before(step)

    @property
    def val_losses(self) -> dict[int, float]:
        """{step: validation loss} of the lines of metrics.jsonl; on the main process."""
        assert self._log
        return self._log.val_losses.copy()  # the loop adds to it while a checkpoint's thread reads it

    def state_dict(self) -> dict:
        """The state for the checkpoint, as JSON. A collective call, which waits for the device."""
        loss = self.loss.state_dict(self._strategy.runtime.processes.mean)
        return self._times() | {"running_loss": loss, "unwritten": self.unwritten}

    def _times(self) -> dict[str, float]:
        # With the seconds since the last reading, which a resumed run would miss.
        seconds = self.seconds + time.perf_counter() - self._window_start
        return {"seconds": seconds, "first_steps": self._first_steps, "pauses": self.pauses}

    def time_to_decay(self) -> bool:
        """Whether the decay of a run of train_hours must start now."""
        return time_to_decay(self._times(), self._config)

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self.seconds, self._first_steps, self.pauses = state["seconds"], state["first_steps"], state["pauses"]
        self.loss.load_state_dict(state["running_loss"])
        self._values = state["unwritten"]


class RunningLoss:
    """The mean loss since the last reading, kept on the device, so that adding to it never waits. `step` is (), the
    loss of the current step over the micro-batches done so far."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float64):
        """`dtype`: float64 if the device supports it."""
        # A resumed run starts from the mean over the processes; in float64 that agrees to the last digit of a float32.
        self.step, self._sum = (torch.zeros((), dtype=dtype, device=device) for _ in range(2))
        self._count = torch.zeros((), dtype=torch.float32, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's share of its step's loss."""
        self.step += loss

    def end_step(self, skipped: torch.Tensor) -> None:
        """Adds the step's loss to the mean, unless the step was skipped: `skipped` is 1.0 or 0.0, on the device."""
        skipped = skipped.to(self._sum.device)
        self._sum += torch.where(skipped > 0, torch.zeros_like(self.step), self.step)
        self._count += 1 - skipped
        self.step.zero_()

    def read(self, mean: Mean) -> float:
        """The mean since the last reading, NaN if there was no step. A collective call, which waits for the device."""
        state = self.state_dict(mean)
        self.load_state_dict({"sum": 0.0, "count": 0})
        return state["sum"] / state["count"] if state["count"] else math.nan

    def state_dict(self, mean: Mean) -> dict:
        """The state for the checkpoint; `mean` averages over processes. A collective call; waits for the device."""
        return {"sum": mean(self._sum).item(), "count": int(self._count.item())}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self._sum.fill_(state["sum"])
        self._count.fill_(float(state["count"]))


class MetricsLog:
    """metrics.jsonl: one JSON object for each logged step, written at once; on the main process only.

    A resumed run drops the lines after `first_step`, and replaces the line of `first_step` when it is written again. An
    earlier file is kept if the run starts over, or if the dropped lines are more than those since the last save: later
    checkpoints have then been moved away. Lines that do not fit on a full disk are written later.

    Attributes:
        earlier: the file's record of `first_step`, without nulls; empty if there is none. An earlier configuration may
            have measured more than this one, such as the validation loss after its last step.
        val_losses: {step: validation loss} of all lines. It and the checksum are kept, since reading a log of 600,000
            lines at each save would take seconds.
    """

    def __init__(self, path: Path, first_step: int, saves: Callable[[int], bool] = lambda step: False):
        """`saves` tells whether a checkpoint is saved at a step. Raises UserError if the file cannot be read or
        written."""
        self._path, self._has_failed = path, False
        records = read_metrics(path)
        # Without a checkpoint, a record of step 0 may come from another configuration.
        kept_records = {r["step"]: r for r in records if r["step"] <= first_step and first_step > 0}
        self.earlier = {k: v for k, v in kept_records.get(first_step, {}).items() if v is not None}
        lines = {step: json.dumps(record).encode() + b"\n" for step, record in kept_records.items()}
        self._first_step = first_step
        self._first_offset = sum(len(line) for step, line in lines.items() if step < first_step)  # of its line
        self.val_losses: dict[int, float] = {}
        self._digest = hashlib.sha256()  # of all lines but the last, which has this step
        self._last_step, self._last_line = 0, b""
        for step, record in kept_records.items():
            self._remember(record, lines[step])
        with writing(path, "free some space or make it writable: it holds the run's curve"):
            last_step = max((record["step"] for record in records), default=0)
            starts_over = first_step == 0 < last_step
            if starts_over or any(saves(step) for step in range(first_step + 1, last_step)):
                old_path = unused_path(path.with_name("metrics.old-"), ".jsonl")
                replace_file(old_path, path.read_bytes())
                what = "no checkpoint: the run starts over" if starts_over else f"the run is back at step {first_step}"
                logger.warning("note       %s; the earlier curve is kept in %s", what, old_path)
            replace_file(path, b"".join(lines.values()))
            self._file = path.open("ab", buffering=0)
        self._unwritten = b""  # what a full disk has refused
        self._lock = threading.Lock()  # a checkpoint's thread calls `sync`

    def write(self, record: dict) -> None:
        """Appends a line; a number that is not finite becomes null, since JSON has no NaN."""
        record = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        line = json.dumps(record).encode() + b"\n"
        self._append(line, self._first_offset if record["step"] == self._first_step else None)
        self._remember(record, line)

    def _remember(self, record: dict, line: bytes) -> None:
        """Adds a line to the checksum, unless it replaces the last one, and its validation loss to the others."""
        if record["step"] != self._last_step:
            self._digest.update(self._last_line)
        self._last_step, self._last_line = record["step"], line
        if record.get("val_loss") is not None:
            self.val_losses[record["step"]] = record["val_loss"]

    def sha256_before(self, step: int) -> str:
        """The SHA-256 of all lines before `step`, which is that of the last line or a later one."""
        digest = self._digest.copy()
        if self._last_step < step:
            digest.update(self._last_line)
        return digest.hexdigest()

    def _append(self, line: bytes, offset: int | None = None) -> None:
        """Writes `line` after what could not be written before or, with `offset`, in place of what follows it."""
        with self._lock:
            self._unwritten += line
            try:
                if offset is not None:
                    self._file.truncate(offset)
                while self._unwritten:  # a full disk may take a part of it
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
                self._has_failed = False
            except OSError as error:
                if not self._has_failed:
                    logger.warning("WARNING    %s cannot be written (%s); trying again", self._path, error.strerror)
                self._has_failed = True

    def sync(self) -> None:
        """Flushes the file to disk. Called before a checkpoint is committed, since a run resumed from it does not write
        these lines again. A disk error here does not prevent the checkpoint."""
        self._append(b"")
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes the file to disk and closes it."""
        self.sync()
        with suppress(OSError):
            self._file.close()


def sha256_before(log: bytes, step: int) -> str:
    """The SHA-256 of the lines of a metrics.jsonl before a step, as saved in a checkpoint."""
    lines = log.splitlines(keepends=True)
    end = len(lines)
    for i in reversed(range(end)):  # from the end, since a long run has 100,000 lines
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(lines[i])["step"] < step:
                break
            end = i
    return hashlib.sha256(b"".join(lines[:end])).hexdigest()


def time_to_decay(times: dict[str, float], config: Config) -> bool:
    """Whether wsd's decay must start now for the run to end within train_hours, if the steps and pauses of the decay
    take as long as those before it. `times` are those of Metrics.state_dict; the slower first steps are excluded."""
    available = AIM * 3600 * config.run.train_hours - times["first_steps"]
    elapsed = times["seconds"] + times["pauses"] - times["first_steps"]
    return elapsed >= (1 - config.optimizer.decay_fraction) * available
