"""What a run measures and records: its loss without waiting for the device, its throughput, metrics.jsonl."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

import torch

from recipe.config import Config
from recipe.data.prefetch import BatchLoader
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import flops_per_token
from recipe.monitor.progress import Progress
from recipe.monitor.trackers import Tracker
from recipe.optim.schedule import lr_at
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import writing
from recipe.utils.files import replace_file

logger = logging.getLogger(__name__)
Mean = Callable[[torch.Tensor], torch.Tensor]  # over all processes; a collective call

AIM = 0.98  # of train_hours: the decay's length is fixed when it begins, and the machine may slow down after that
# Columns that are null in the lines of steps that did not measure them.
_MEASURED = ("loss", "val_loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "data_wait", "skipped_steps")


class Metrics:
    """The metrics of a run, and where they go: metrics.jsonl, the terminal, an experiment tracker.

    Within a step the loop calls `loss.add` for each micro-batch, and then `end_step`; between steps it calls `record`,
    adds the results of its evaluations, and calls `write`.

    Attributes:
        loss: the RunningLoss.
        tracker: the Tracker, whose state a checkpoint keeps.
        seconds, pauses: spent on training, and on validation, saving and the like; over the whole run, earlier
            processes included, as the seconds that training has waited for saves are.
        warning: shown on every line while it is not empty.
        unwritten: the record of a step that is saved before its line is written.
    """

    def __init__(self, config: Config, strategy: Strategy, batches: BatchLoader, first_step: int):
        """Of a run that starts, or continues, at `first_step`: restore the state, and enter it as a context."""
        self._config, self._strategy, self._batches = config, strategy, batches
        self._flops_per_token = flops_per_token(config.model, config.data.sequence_length)
        self.loss = RunningLoss(strategy.device.torch_device, strategy.device.sum_dtype)
        self.seconds = self.pauses = self._save_wait = 0.0
        self._first_steps, self._stepped = 0.0, False  # seconds of each process's first, which compiles
        self.warning, self.unwritten = "", {}
        self.tracker = Tracker(config, first_step)
        self._log: MetricsLog | None = None  # the main process alone has one
        self._step = self._read_at = first_step  # of the last record, and of the last reading
        self._known: dict = {}  # the values known of the step of the last reading
        self._grad_norm = torch.zeros((), device=strategy.device.torch_device)  # of the last step
        self._closing = ExitStack()

    def __enter__(self) -> Metrics:
        """Opens metrics.jsonl, the progress bar and the tracker. A collective call. Raises UserError."""
        processes, opt = self._strategy.runtime.processes, self._config.optimizer
        with self._closing as closing:
            if processes.is_main:
                self._log = MetricsLog(Path(self._config.run.output_dir) / "metrics.jsonl", self._step)
                closing.callback(self._log.close)
                self._known = self._log.earlier | self._known
            self._known = processes.broadcast_object(self._known)
            shown = processes.is_main
            hours = self._config.run.train_hours if self._config.undecided else 0.0
            self._progress = Progress(opt.max_steps, opt.total_batch_tokens, self._step, hours=hours, show=shown)
            closing.callback(self._progress.close)
            if processes.is_main:
                self.tracker.start()
                closing.callback(self.tracker.close)
            self._closing = closing.pop_all()
        self._window_begun = time.perf_counter()  # moved forward by the pauses
        return self

    def __exit__(self, *_) -> None:
        self._closing.close()

    def record(self, step: int, *, read: bool) -> dict:
        """The record of this step, to which the evaluations are added: values that an earlier process measured at it
        and, if `read`, those gathered on the device since the last reading. A collective call, which waits for the
        device if it reads. Raises UserError after too many skipped steps in a row."""
        self._step = step
        if read and step > self._read_at:
            self._known, self._read_at = self._read(step), step
        known = self._known if step == self._read_at else {}
        return {"learning_rate": lr_at(step, self._config.optimizer)} | known if read else dict(known)

    def _read(self, step: int) -> dict:
        device, processes = self._strategy.device, self._strategy.runtime.processes
        loss = self.loss.read(processes.mean)  # waits for the device, before the clock is read
        now = time.perf_counter()
        seconds, self._window_begun = now - self._window_begun, now
        self.seconds += seconds
        rate = (step - self._read_at) * self._config.optimizer.total_batch_tokens / seconds
        return {
            "loss": loss,
            "grad_norm": self._grad_norm.item(),
            "learning_rate": lr_at(step - 1, self._config.optimizer),
            "tokens_per_second": rate,
            "data_wait": self._batches.waited() / seconds,
            "mfu": rate * self._flops_per_token / (device.peak_flops * processes.world_size)
            if device.peak_flops
            else None,
            "skipped_steps": self._strategy.spike_filter.check(step),
        }

    def write(self, step: int, record: dict) -> None:
        """Writes the record of a step to all outputs, unless it is empty."""
        if not record:
            return
        line = {
            "step": step,
            "tokens": step * self._config.optimizer.total_batch_tokens,
            **dict.fromkeys(_MEASURED),
            **record,
            "seconds": round(self.seconds, 3),
            "save_wait": self._save_wait / (self._save_wait + self.seconds) if self.seconds else 0.0,
            **self._strategy.device.counters(),
        }
        if self._log:
            self._log.write(line)
        self._progress.report(line, self.warning, self.seconds + self.pauses)
        self.tracker.log(line)

    def end_step(self, grad_norm: torch.Tensor, skipped: torch.Tensor) -> None:
        """Adds a step: `grad_norm` (), and `skipped` (), 1.0 or 0.0, both on the device; nothing waits for them."""
        if not self._stepped:
            self._stepped, self._first_steps = True, self._first_steps + time.perf_counter() - self._window_begun
        self.loss.end_step(skipped)
        self._grad_norm = grad_norm
        self._progress.advance()

    @contextmanager
    def paused(self, what: str) -> Generator[Callable[[int, int], None], None, None]:
        """A context for a pause in training, such as "validating": its seconds do not count as training, and the
        progress bar shows what the run is doing. The device must be idle when it starts; otherwise work still queued
        there counts as pause. Yields a function that reports how many of how many batches are done."""
        begun = time.perf_counter()
        try:
            with self._progress.during(what) as tick:
                yield tick
        finally:
            pause = time.perf_counter() - begun
            self.pauses += pause
            self._window_begun += pause
            if what == "saving":
                self._save_wait += pause

    @property
    def val_losses(self) -> dict[int, float]:
        """{step: validation loss} of the run so far."""
        return val_losses(Path(self._config.run.output_dir))

    def sync(self) -> None:
        """Flushes metrics.jsonl to the disk; on the main process."""
        if self._log:
            self._log.sync()

    def state_dict(self) -> dict:
        """The state for the checkpoint, as JSON, with the SHA-256 of the lines of metrics.jsonl before this step, so
        that an audit knows them for the run's. A collective call, which waits for the device."""
        loss = self.loss.state_dict(self._strategy.runtime.processes.mean)
        lines = sha256_before(self._log.text(), self._step) if self._log else ""
        return self._times() | {"running_loss": loss, "lines_sha256": lines, "unwritten": self.unwritten}

    def _times(self) -> dict[str, float]:
        # With the seconds since the last reading, which a resumed run does not see again.
        seconds = self.seconds + time.perf_counter() - self._window_begun
        pauses = {"pauses": self.pauses, "save_wait": self._save_wait}
        return {"seconds": seconds, "first_steps": self._first_steps} | pauses

    def time_to_decay(self) -> bool:
        """Whether it is, for a run of train_hours."""
        return time_to_decay(self._times(), self._config)

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self.seconds, self.pauses, self._save_wait = state["seconds"], state["pauses"], state["save_wait"]
        self._first_steps = state["first_steps"]
        self.loss.load_state_dict(state["running_loss"])
        self._known = state["unwritten"]


class RunningLoss:
    """Mean of the losses since the last reading, kept on the device: adding to it never waits for the device. `step` is
    (), the loss of the current step over the micro-batches done so far."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float64):
        """`dtype`: float64 where the device has it."""
        # A resumed run starts from the mean over the processes; in float64 it agrees to the last digit of a float32.
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
        """The mean since the last reading, NaN if there was no step; collective, and waits for the device."""
        state = self.state_dict(mean)
        self.load_state_dict({"sum": 0.0, "count": 0})
        return state["sum"] / state["count"] if state["count"] else math.nan

    def state_dict(self, mean: Mean) -> dict:
        """The state for the checkpoint; `mean` averages a tensor over processes. Collective; waits for the device."""
        return {"sum": mean(self._sum).item(), "count": int(self._count.item())}

    def load_state_dict(self, state: dict) -> None:
        """Restores what `state_dict` returned."""
        self._sum.fill_(state["sum"])
        self._count.fill_(float(state["count"]))


class MetricsLog:
    """metrics.jsonl: one JSON object for each logged step, written at once; on the main process only.

    A resumed run drops the lines after `first_step`, and replaces the line of `first_step` when it is written again;
    one that starts over keeps an earlier run's file aside. Lines that a full disk does not take are written later.

    Attributes:
        earlier: the file's line of `first_step`, without nulls; empty if there was none. An earlier configuration may
            have measured what this one does not, such as the validation loss after its last step.
    """

    def __init__(self, path: Path, first_step: int):
        """Raises UserError where the file cannot be read or written."""
        self._path, self._failed = path, False
        lines = read_metrics(path)
        # Without a checkpoint, a line of step 0 may come from another configuration.
        kept = {line["step"]: line for line in lines if line["step"] <= first_step and first_step > 0}
        self.earlier = {k: v for k, v in kept.get(first_step, {}).items() if v is not None}
        texts = {step: json.dumps(line).encode() + b"\n" for step, line in kept.items()}
        self._resumed = first_step, sum(len(text) for step, text in texts.items() if step < first_step)
        with writing(path, "free some space, or mend that: it holds the run's curve"):
            if first_step == 0 and any(line["step"] > 0 for line in lines):
                numbered = (path.with_name(f"metrics.old-{n}.jsonl") for n in count(1))
                old = next(other for other in numbered if not os.path.lexists(other))
                path.rename(old)
                logger.warning("note       starts over, without a checkpoint; the earlier curve is kept in %s", old)
            replace_file(path, b"".join(texts.values()))
            self._file = path.open("ab", buffering=0)
        self._end = sum(map(len, texts.values()))  # of the last line that was written
        self._unwritten: list[bytes] = []
        self._torn = False  # what follows `_end` is no line of the run's
        self._lock = threading.Lock()  # a checkpoint's thread calls `sync`

    def write(self, record: dict) -> None:
        """Appends a line; a number that is not finite becomes null."""
        # JSON has no NaN, and readers of the file should not need a special case for it.
        line = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        step, offset = self._resumed
        with self._lock:
            if line["step"] == step:
                self._end, self._torn = offset, True
            self._unwritten.append(json.dumps(line).encode() + b"\n")
        self._write_all()

    def _write_all(self) -> None:
        try:
            with self._lock:
                if self._torn:
                    self._file.truncate(self._end)
                while self._unwritten:
                    line, self._torn = self._unwritten[0], True
                    while line:  # a full disk may take a part of it
                        line = line[self._file.write(line) :]
                    self._end += len(self._unwritten.pop(0))
                self._failed = self._torn = False
        except OSError as error:
            if not self._failed:
                logger.warning("WARNING    %s cannot be written (%s)", self._path, error.strerror)
            self._failed = True

    def text(self) -> bytes:
        """All lines, also those that are not written yet."""
        with self._lock:
            written = self._path.read_bytes()[: self._end] if self._path.is_file() else b""
            return written + b"".join(self._unwritten)

    def sync(self) -> None:
        """Flushes the file to the disk. Called before a checkpoint is committed, since a run resumed from it does not
        write these lines again. A failing disk must not cost the checkpoint."""
        self._write_all()
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flushes the file to the disk and closes it."""
        self.sync()
        with suppress(OSError):
            self._file.close()


def sha256_before(log: bytes, step: int) -> str:
    """Of the lines of a metrics.jsonl before a step, as a checkpoint keeps it."""
    lines = hashlib.sha256()
    for text in log.splitlines(keepends=True):
        with suppress(ValueError, TypeError, KeyError):
            if json.loads(text)["step"] >= step:
                break
        lines.update(text)
    return lines.hexdigest()


def time_to_decay(times: dict[str, float], config: Config) -> bool:
    """Whether wsd's decay must begin for the run to end in train_hours: the steps that it then takes, and the pauses
    between them, last as those before did. `times` are of Metrics.state_dict; first steps are slower than others."""
    left = AIM * 3600 * config.run.train_hours - times["first_steps"]
    used = times["seconds"] + times["pauses"] - times["first_steps"]
    return used >= (1 - config.optimizer.decay_fraction) * left


def val_losses(run: Path) -> dict[int, float]:
    """{step: validation loss} by a run's metrics.jsonl, where it was measured and is finite. Raises UserError."""
    lines = read_metrics(run / "metrics.jsonl")
    return {line["step"]: line["val_loss"] for line in lines if line.get("val_loss") is not None}
