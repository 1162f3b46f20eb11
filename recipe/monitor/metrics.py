"""What a run measures and writes: running loss without host syncs, throughput, metrics.jsonl."""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from recipe import faults
from recipe.errors import UserError


class Throughput:
    """Seconds spent training, with pauses (validation, saving) left out.

    Attributes:
        seconds, pauses: of the whole run, earlier processes included.
    """

    def __init__(self, seconds: float = 0.0, pauses: float = 0.0):
        self.seconds, self.pauses = seconds, pauses
        self._last = time.perf_counter()
        self._window = 0.0

    def _advance(self) -> None:
        now = time.perf_counter()
        self._window += now - self._last
        self._last = now

    @contextmanager
    def paused(self):
        """The device must be idle at the start, or its backlog is counted as pause."""
        self._advance()
        try:
            yield
        finally:
            begun, self._last = self._last, time.perf_counter()
            self.pauses += self._last - begun

    def window(self) -> float:
        """Training seconds since the last call."""
        self._advance()
        seconds, self._window = self._window, 0.0
        self.seconds += seconds
        return seconds


class RunningLoss:
    """Mean of the losses since the last reading, kept on the device: adding to it never waits for the device.

    Attributes:
        step: loss of the step that is being taken, (), as far as its micro-batches are done.
    """

    def __init__(self, device: torch.device, state: dict | None = None, dtype: torch.dtype = torch.float64):
        """`dtype`: float64 where the device has it."""
        state = state or {"sum": 0.0, "count": 0}
        # A resumed run begins with the mean of what the processes had: in float64, to the same last digit of float32.
        self._dtype = dtype
        self.step = torch.zeros((), dtype=self._dtype, device=device)
        self._sum = torch.full((), state["sum"], dtype=self._dtype, device=device)
        self._count = torch.full((), float(state["count"]), dtype=torch.float32, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """Adds a micro-batch's share of its step's loss."""
        self.step += loss

    def end_step(self, skipped: torch.Tensor) -> None:
        """Takes the step's loss into the mean, unless the step was left out: `skipped` is 1.0 or 0.0, on the device."""
        skipped = skipped.to(self._sum.device)
        self._sum += torch.where(skipped > 0, torch.zeros_like(self.step), self.step)
        self._count += 1 - skipped
        self.step.zero_()

    def state(self, reduce) -> dict:
        """For the checkpoint; `reduce` averages a tensor over processes (collective; waits for the device)."""
        return {"sum": reduce(self._sum).item(), "count": int(self._count.item())}

    def mean(self, reduce) -> float:
        """Since the last reading; collective, and waits for the device."""
        state = self.state(reduce)
        return state["sum"] / state["count"] if state["count"] else math.nan

    def read(self, reduce) -> float:
        mean = self.mean(reduce)
        self._sum.zero_()
        self._count.zero_()
        return mean


class MetricsLog:
    """metrics.jsonl: one JSON object a logged step, flushed line by line; main process only.

    A resumed run drops the lines from `first_step` on, which it is about to write again. A line that cannot be written,
    on a full disk, waits for the next one.
    """

    def __init__(self, path: Path, first_step: int, say: Callable[[str], None] = print):
        self._say, self._unwritten = say, b""
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(path) if line["step"] < first_step]
        temporary = path.with_suffix(".tmp")
        try:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
            temporary.replace(path)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written: {error.strerror}; mend that, or choose another output_dir"
            ) from None

    def write(self, record: dict) -> None:
        # JSON has no NaN; a reader of the file must not need a special case for it.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        waiting, self._unwritten = self._unwritten, self._unwritten + json.dumps(clean).encode() + b"\n"
        try:
            faults.at("log.write")
            while self._unwritten:  # a nearly full disk takes a part of it
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            if not waiting:
                self._say(
                    f"WARNING    {self._file.name} cannot be written ({error.strerror}); its lines wait in memory"
                )

    def sync(self) -> None:
        """Brings the lines to the disk: before a checkpoint, from which a resumed run will not write them again."""
        with suppress(OSError):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Tries once more what waits; says what is lost."""
        with suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        if lost := self._unwritten.count(b"\n"):
            self._say(f"WARNING    {lost} lines of {self._file.name} could not be written, and are lost")
        self._file.close()


def read_metrics(path: Path, tail: int = 0) -> list[dict]:
    """The lines of a metrics.jsonl, as far as they are whole; with `tail`, of its last so many bytes."""
    if not path.exists():
        return []
    lines = []
    with path.open("rb") as file:
        file.seek(-min(tail, os.fstat(file.fileno()).st_size) if tail else 0, os.SEEK_END if tail else os.SEEK_SET)
        content = file.read().decode(errors="replace")
    for text in content.splitlines():
        with suppress(ValueError):  # the last line of a run that was killed while writing it, or a damaged one
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines
