"""What a run reports: running loss without host syncs, throughput, MFU, metrics.jsonl, a progress bar."""

import json
import math
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from tqdm import tqdm


class Throughput:
    """Seconds spent training, with pauses (validation, saving) left out."""

    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds  # of the whole run, earlier processes included
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
            self._last = time.perf_counter()

    def window(self) -> float:
        """Training seconds since the last call."""
        self._advance()
        seconds, self._window = self._window, 0.0
        self.seconds += seconds
        return seconds


class RunningLoss:
    """Mean of the losses since the last reading, kept on the device: adding to it never waits for the device."""

    def __init__(self, device: torch.device, state: dict | None = None):
        state = state or {"sum": 0.0, "count": 0}
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.sum = torch.full((), state["sum"], dtype=dtype, device=device)
        self.count = state["count"]

    def add(self, loss: torch.Tensor, *, last_of_step: bool) -> None:
        """Adds a micro-batch's share of its step's loss."""
        self.sum += loss
        self.count += last_of_step

    def state(self, reduce) -> dict:
        """For the checkpoint; `reduce` averages a tensor over processes (collective; waits for the device)."""
        return {"sum": reduce(self.sum).item(), "count": self.count}

    def read(self, reduce) -> float:
        state = self.state(reduce)
        self.sum.zero_()
        self.count = 0
        return state["sum"] / state["count"] if state["count"] else math.nan


class MetricsLog:
    """metrics.jsonl: one JSON object a logged step, flushed line by line; main process only.

    A resumed run drops the lines from `first_step` on, which it is about to write again.
    """

    def __init__(self, path: Path, first_step: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in _lines(path) if line["step"] < first_step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(path)
        self._file = path.open("a")

    def write(self, record: dict) -> None:
        # JSON has no NaN; a reader of the file must not need a special case for it.
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()


def _lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:  # the last line of a run that was killed while writing it
            break
    return lines


class Progress:
    """A bar in tokens on a terminal, a plain line a logged step elsewhere; silent where `show` is false."""

    def __init__(self, total_tokens: int, done_tokens: int, *, show: bool):
        self.show = show
        self.terminal = show and sys.stderr.isatty()
        self.bar = tqdm(
            total=total_tokens, initial=done_tokens, unit="tok", unit_scale=True, dynamic_ncols=True, smoothing=0.05,
            disable=not self.terminal, desc="training",
        )  # fmt: skip
        self._postfix: dict[str, str] = {}

    def advance(self, tokens: int) -> None:
        self.bar.update(tokens)

    def report(self, record: dict) -> None:
        """Shows a record of metrics.jsonl."""
        losses = {"loss": record["loss"], "val": record["val_loss"]}
        losses = {k: v for k, v in losses.items() if v is not None}
        waiting = [f"{wait:.0%} waiting for data"] if (wait := record.get("data_wait") or 0) > 0.01 else []
        if self.terminal:
            self._postfix |= {k: f"{v:.3f}" for k, v in losses.items()} | {"lr": f"{record['learning_rate']:.1e}"}
            self._postfix |= {"data": waiting[0]} if waiting else {}
            self.bar.set_postfix(self._postfix)
        elif self.show:
            parts = [f"step {record['step']}", f"{100 * record['tokens'] / self.bar.total:.0f} %"]
            parts += [f"{k} {v:.4f}" for k, v in losses.items()] + [f"lr {record['learning_rate']:.1e}"]
            if rate := record["tokens_per_second"]:
                left = (self.bar.total - record["tokens"]) / rate
                parts += [f"{rate:,.0f} tokens/s", f"{tqdm.format_interval(left)} left"]
            if record["mfu"]:
                parts.append(f"MFU {100 * record['mfu']:.1f} %")
            parts += waiting
            print("  ".join(parts), flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if self.show:
            self.bar.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()
