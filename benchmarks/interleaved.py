"""Workers, one at a time, in turns: A B B A. Ratios are of neighbours in time, so that a drift cancels."""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.context
import os
import random
import re
import socket
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from benchmarks.bench_config import Timing
from benchmarks.variants import Variant
from benchmarks.worker import use_device, work
from recipe.config import ROOT, DataConfig
from recipe.data.prepare.pipeline import prepare
from recipe.engine import device as hardware

NO_TIME = "skipped: the time is up"
_PATIENCE = 600  # seconds, for a turn: the first one compiles
COMPARED = 20  # steps whose losses must agree
# Nats between two variants' losses of a step: of one precision, rounding alone; of two, what bf16 rounds off.
TOLERANCE = {"same": 0.01, "other": 0.05}


class Void(Exception):
    """A variant that this device cannot run, or that did other work; the message has the reason."""


class Worker:
    """A variant's process, or processes if its `world` is larger than 1."""

    def __init__(self, variant: Variant, directory: Path):
        """`directory` is `prepared`."""
        self.variant = variant
        self.log = directory / f"{re.sub('[^a-zA-Z0-9.-]+', '-', variant.name)}.log"
        self.losses: list[float] = []
        self.peak_memory = 0
        self._ends: list[Connection] = []
        self._processes = []
        environments = [hardware.one_gpu()] if variant.world == 1 else _ranks(variant.world)
        for environment in environments:
            ours, theirs = _context().Pipe()
            process = _context().Process(
                target=work, args=(variant, theirs, str(directory), str(self.log), environment), daemon=False
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def run(self, steps: int) -> float:
        """Takes so many steps; returns seconds a step. Raises Void."""
        for end in self._ends:
            with suppress(OSError):
                end.send(steps)
        replies = []
        waiting = list(self._ends)
        while waiting:
            for end in _ready(waiting):
                try:
                    reply = end.recv()
                except (EOFError, OSError):
                    said = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
                    reply = {"error": f"the process died{': ' if said else ''}{''.join(said[-1:])}"}
                if "error" in reply:
                    raise Void(reply["error"])
                replies.append(reply)
                waiting.remove(end)
        # each process has the mean over its own rows
        self.losses += [statistics.fmean(values) for values in zip(*(r["losses"] for r in replies), strict=True)]
        self.peak_memory = max(r["peak_memory"] for r in replies)
        return max(r["seconds"] for r in replies)

    def release(self) -> None:
        """Ends a turn: memory that is not in use goes back to the device."""
        for end in self._ends:
            with suppress(OSError):
                end.send(0)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.join(1)
            if process.is_alive():
                process.kill()
                process.join()


def _ready(ends: list[Connection]) -> list[Connection]:
    """Those that have answered. Raises Void where none does for too long."""
    if not (ready := wait(ends, timeout=_PATIENCE)):
        raise Void(f"it has not answered for {_PATIENCE} s")
    return ready


@cache
def _context() -> multiprocessing.context.BaseContext:
    """A process that has imported everything and forks, so that ten workers import torch and transformers once; where
    a fork cannot use the accelerator, or is not safe, each worker starts from nothing."""
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not begin to use it
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.worker", "recipe.train"])
    if torch.accelerator.is_available():
        ours, theirs = context.Pipe()
        process = context.Process(target=use_device, args=(theirs,))
        process.start()
        theirs.close()
        try:
            works = ours.poll(_PATIENCE) and ours.recv()
        except EOFError:
            works = False
        process.join()
        if not works:
            return multiprocessing.get_context("spawn")
    return context


def _ranks(world: int) -> list[dict[str, str]]:
    """Environments of the processes, as torchrun sets them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    if not torch.accelerator.is_available():
        common["ACCELERATE_USE_CPU"] = "true"
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


@dataclass
class Paired:
    """Two variants' seconds a token, by turns: `pairs[i]` are neighbours in time."""

    pairs: list[tuple[float, float]] = field(default_factory=list)

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
    """Tokens a second of a worker by itself, the median of turns. Raises Void where it fails."""
    worker.run(1)
    steps = max(1, round(timing.seconds / worker.run(1)))
    return worker.variant.tokens / statistics.median(worker.run(steps) for _ in range(2 * timing.rounds + 1))


def compare(a: Worker, b: Worker, timing: Timing) -> Paired:
    """Turns of about `timing.seconds` each, A B B A in every round. Raises Void where one fails, or their losses
    differ."""
    steps = []
    for worker in (a, b):
        worker.run(1)  # compiles, allocates
        steps.append(max(1, round(timing.seconds / worker.run(1))))
        worker.release()

    def turn(worker: Worker, count: int) -> float:
        worker.run(1)  # what the other one has displaced from caches and memory comes back
        taken = worker.run(count) / worker.variant.tokens
        worker.release()
        return taken

    found = Paired()
    for _ in range(timing.rounds):
        a1, b1 = turn(a, steps[0]), turn(b, steps[1])
        b2, a2 = turn(b, steps[1]), turn(a, steps[0])
        found.pairs += [(a1, b1), (a2, b2)]
    for worker in (a, b):
        if (missing := COMPARED - len(worker.losses)) > 0:
            worker.run(missing)
            worker.release()
    agree(a, b)
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
