"""Micro-batches, read ahead of the training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import islice

import torch

from recipe.config import BatchPlan
from recipe.data.mixed import Dataset
from recipe.utils.errors import Unreachable, UserError, first_line, is_transient


class BatchLoader:
    """A process's micro-batches of `steps` in order, (micro, T + 1) int64, on the device.

    One thread reads two steps ahead, so that verifying a shard, reading it and copying it into pinned memory overlap
    with training.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch: BatchPlan,
        rank: int,
        steps: range,
        *,
        to_device: Callable[[torch.Tensor], torch.Tensor],
        pin: bool,
    ):
        self._dataset, self._batch, self._rank, self._to_device, self._pin = dataset, batch, rank, to_device, pin
        self._indices = ((step, m) for step in steps for m in range(batch.accumulation))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._pending: deque[Future] = deque()
        self._wait_seconds = 0.0

    def __enter__(self) -> BatchLoader:
        """Starts to read ahead."""
        for _ in range(2 * self._batch.accumulation):
            self._submit_next()
        return self

    def __exit__(self, *_) -> None:
        """Stops the thread, and interrupts a read that waits for a shard."""
        self._dataset.close()
        self._pool.shutdown(cancel_futures=True)

    def _submit_next(self) -> None:
        if (index := next(self._indices, None)) is not None:
            self._pending.append(self._pool.submit(self._load, *index))

    def _load(self, step: int, micro_step: int) -> torch.Tensor:
        sequences = torch.from_numpy(self._dataset.sequences(step, *self._batch.slice(micro_step, self._rank)))
        return sequences.pin_memory() if self._pin else sequences

    def ready(self, seconds: float) -> bool:
        """Whether all micro-batches of the next step are ready within `seconds`."""
        start = time.perf_counter()
        not_done = wait(self._next_step(), timeout=seconds).not_done
        self._wait_seconds += time.perf_counter() - start
        return not not_done

    def error(self) -> UserError | None:
        """The error of reading the next step, if it has failed."""
        error = next((e for future in self._next_step() if future.done() and (e := future.exception())), None)
        if error is None or isinstance(error, UserError):
            return error
        kind = Unreachable if is_transient(error) else UserError
        return kind(f"the data cannot be read ({type(error).__name__}: {first_line(error)})")

    def _next_step(self) -> list[Future]:
        return list(islice(self._pending, self._batch.accumulation))

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> torch.Tensor:
        """The next micro-batch, (micro, T + 1) int64, on the device, which `ready` has waited for; raises what reading
        raised, and StopIteration after the last step."""
        if not self._pending:
            raise StopIteration
        sequences = self._pending.popleft().result()
        self._submit_next()
        return self._to_device(sequences)

    def waited(self) -> float:
        """Seconds that the loop has waited for data since the last call."""
        waited, self._wait_seconds = self._wait_seconds, 0.0
        return waited
