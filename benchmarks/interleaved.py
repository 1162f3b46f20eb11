"""Variants in processes of their own, one at a time, in turns: A B B A. Ratios are of neighbors in time, so that a
drift of the machine cancels."""

from __future__ import annotations

import io
import multiprocessing
import os
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from pathlib import Path

import torch

from benchmarks.bench_config import Timing
from benchmarks.variants import Variant
from benchmarks.worker import work
from recipe.config import ROOT, DataConfig
from recipe.data.prepare import prepare

NO_TIME = "skipped: the time is up"
_PATIENCE = 600  # seconds, for a turn: the first one compiles
COMPARED = 20  # steps whose losses must agree
# Nats between two variants' losses of a step: of one precision, rounding alone; of two, what bf16 rounds off.
TOLERANCE = {"same": 0.01, "other": 0.05}


class Void(Exception):
    """A variant that this device cannot run, or that did other work; the message has the reason."""


class Worker:
    """A variant's processes."""

    def __init__(self, variant: Variant, directory: Path):
        """`directory` is `prepared`."""
        self.variant = variant
        self.losses: list[float] = []
        self.peak_memory = 0  # bytes, of the process that takes the most
        self._directory = Path(tempfile.mkdtemp(dir=directory))
        self._connections, self._processes = [], []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(variant.processes):
            connection, theirs = _context().Pipe()
            process = _context().Process(target=work, args=(variant, rank, port, theirs, self._directory))
            process.start()
            theirs.close()
            self._connections.append(connection)
            self._processes.append(process)

    def turn(self, steps: int) -> float:
        """Takes a step to warm up and so many more, and returns the seconds of one of these. Raises Void."""
        try:
            for connection in self._connections:
                connection.send(steps)
            replies = self._replies()
        except (EOFError, OSError):
            log = self._directory / "log"
            output = log.read_text(errors="replace").strip() if log.exists() else ""
            raise Void(f"the process died: {output.rpartition(chr(10))[2]}") from None
        # A process's loss is the mean over its own sequences, as many as every other one's.
        self.losses += [statistics.fmean(step) for step in zip(*(r["losses"] for r in replies), strict=True)]
        self.peak_memory = max(r["peak_memory"] for r in replies)
        return max(r["seconds"] for r in replies)

    def _replies(self) -> list[dict]:
        waiting, replies = list(self._connections), []
        while waiting:
            if not (ready := wait(waiting, _PATIENCE)):
                raise Void(f"it has not answered for {_PATIENCE} s")
            for connection in ready:
                replies.append(connection.recv())
                waiting.remove(connection)
                if "error" in replies[-1]:
                    raise Void(replies[-1]["error"])
        return replies

    def close(self) -> None:
        """Ends the processes, after a second by killing them."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(1)
            process.kill()
            process.join()


@cache
def _context() -> BaseContext:
    """On Linux a server that has imported everything and forks, so that ten workers import torch and transformers
    once. Elsewhere each worker starts from nothing."""
    if sys.platform != "linux" or (torch.accelerator.is_available() and not torch.cuda.is_available()):
        return multiprocessing.get_context("spawn")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # or the server, asking for a GPU, would begin to use it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.worker", "recipe.train"])
    return context


@dataclass
class Paired:
    """Two variants' seconds a token, by turns: `pairs[i]` are neighbors in time. `losses_apart` in nats."""

    pairs: list[tuple[float, float]] = field(default_factory=list)
    losses_apart: float = 0.0

    @property
    def ratio(self) -> float:
        """How many times as fast the first is: the median of the pairs."""
        return statistics.median(b / a for a, b in self.pairs)

    def interval(self, samples: int = 2000) -> tuple[float, float]:
        """95 % bootstrap interval of `ratio`; seeded, so that the same pairs give the same interval."""
        generator = random.Random(0)
        ratios = [b / a for a, b in self.pairs]
        medians = sorted(statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
        return medians[int(0.025 * samples)], medians[int(0.975 * samples)]

    def seconds(self, index: int) -> float:
        """Median seconds a token of the first (0) or the second (1)."""
        return statistics.median(pair[index] for pair in self.pairs)


def rate_of(worker: Worker, timing: Timing) -> float:
    """Tokens a second of a worker by itself, the median of turns. Raises Void."""
    steps = steps_of(worker, timing)
    return worker.variant.tokens / statistics.median(worker.turn(steps) for _ in range(2 * timing.rounds + 1))


def steps_of(worker: Worker, timing: Timing) -> int:
    """How many steps fill a turn. Raises Void."""
    return max(1, round(timing.seconds / worker.turn(1)))


def compare(a: Worker, b: Worker, timing: Timing) -> Paired:
    """Turns of about `timing.seconds` each, A B B A in every round. Raises Void where one fails, or their losses
    differ."""
    steps = {worker: steps_of(worker, timing) for worker in (a, b)}
    found = Paired()
    for _ in range(timing.rounds):
        a1, b1, b2, a2 = (worker.turn(steps[worker]) / worker.variant.tokens for worker in (a, b, b, a))
        found.pairs += [(a1, b1), (a2, b2)]
    for worker in (a, b):
        if (missing := COMPARED - len(worker.losses)) > 0:
            worker.turn(missing)
    found.losses_apart = agree(a, b)
    return found


def agree(a: Worker, b: Worker) -> float:
    """The largest distance of the first steps' losses in nats. Raises Void where they did other work."""
    apart = max(abs(x - y) for x, y in zip(a.losses[:COMPARED], b.losses[:COMPARED], strict=True))
    limit = TOLERANCE["same" if a.variant.precision == b.variant.precision else "other"]
    if not apart <= limit:  # also NaN
        raise Void(f"losses differ by {apart:.3g} nats")
    return apart


@contextmanager
def prepared() -> Iterator[Path]:
    """A directory with shards of tiny Shakespeare, the text that ships, for workers and what they compile; deleted in
    the end."""
    text = ROOT / "recipe/data/tiny_shakespeare.txt"
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        with redirect_stdout(io.StringIO()):
            prepare(DataConfig(train_text=str(text), dataset_name=f"{name}/shards", val_fraction=0.1))
        yield Path(name)
