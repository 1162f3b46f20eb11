"""The processes of a launch: the rank of this one, and how they communicate."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn, TypeVar

import psutil
import torch

from recipe.utils.errors import Unreachable, UserError, in_words, is_transient

LONG_TIMEOUT = timedelta(days=7)  # of preparing a large text, for example
Result = TypeVar("Result")


@dataclass(frozen=True)
class Processes:
    """This process among all that train together. Its methods are collective calls.

    Attributes:
        rank, world_size: among all processes.
        local_rank, local_world_size: among the processes of its node.
        is_main: whether this process writes the files and logs.
        cpu_group: a Gloo group on the CPUs, which does not wait for the devices; None for a single process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_main: bool = True
    cpu_group: torch.distributed.ProcessGroup | None = None

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return -(-self.world_size // self.local_world_size)

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """Sum over processes of a tensor on their devices; with one process `value` itself."""
        if self.world_size == 1:
            return value
        total = value.clone()
        torch.distributed.all_reduce(total)
        return total

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Mean over processes of a tensor on their devices; with one process `value` itself."""
        return value if self.world_size == 1 else self.sum(value) / self.world_size

    def anywhere(self, condition: bool) -> bool:
        """Whether `condition` holds on any process."""
        flag = torch.tensor([condition], dtype=torch.int32)
        if self.cpu_group is not None:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=self.cpu_group)
        return bool(flag)

    def gather_objects(self, value) -> list:
        """The `value` (any small picklable object) of each process, by rank."""
        values = [value] * self.world_size
        if self.cpu_group is not None:
            torch.distributed.all_gather_object(values, value, group=self.cpu_group)
        return values

    def broadcast_object(self, value):
        """The main process's `value` (any small picklable object) on every process."""
        values = [value]
        if self.cpu_group is not None:
            torch.distributed.broadcast_object_list(values, src=0, group=self.cpu_group)
        return values[0]

    @contextmanager
    def shared_error(self, failure: str) -> Generator[None, None, None]:
        """Context: a UserError or OSError of one process is raised on all, as a UserError; as Unreachable if a restart
        may help. On the other processes its message is the `failure`, such as "the data cannot be read", and a pointer
        to the cause."""
        error: Exception | None = None
        try:
            yield
        except (UserError, OSError) as e:
            error = e
        if self.anywhere(error is not None):
            kind = Unreachable if self.anywhere(error is not None and is_transient(error)) else UserError
            raise kind(in_words(error) if error else f"{failure} on another process; see its error message")

    @contextmanager
    def with_long_timeout(self) -> Generator[Processes, None, None]:
        """Context: these processes, whose collective calls on the CPUs time out after days."""
        group = torch.distributed.new_group(backend="gloo", timeout=LONG_TIMEOUT) if self.cpu_group else None
        yield replace(self, cpu_group=group)
        if group:
            torch.distributed.destroy_process_group(group)

    def in_turns(self, action: Callable[[], Result], failure: str) -> Result:
        """What `action` returns, which the main process calls first, then one process of each other node, then the
        rest; none after one that has failed, as in `shared_error`. They wait for days."""
        own_turn = 0 if self.is_main else 1 if self.local_rank == 0 else 2
        with self.with_long_timeout() as processes:
            for turn in range(3):
                with processes.shared_error(failure):
                    if turn == own_turn:
                        result = action()
        return result


def is_launched() -> bool:
    """Whether `accelerate launch` or torchrun has started this process."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def is_set_by_launcher(variable: str, option: str | None = None) -> bool:
    """Whether an environment variable comes from the launcher, which was started without it and without its `option`.
    If the system does not show the launcher's environment, the variable is assumed to come from it."""
    if variable not in os.environ or not is_launched():
        return False
    try:
        launcher = psutil.Process().parent()
        return variable not in launcher.environ() and option not in launcher.cmdline()
    except (psutil.Error, OSError, AttributeError):
        return True


def exit_process(code: int) -> NoReturn:
    """Ends this process as `sys.exit` does, but if it is one of several, without finalizing Python's interpreter: up to
    Python 3.13 that aborts a process (exit code -6) in which a thread of Gloo, having finished the last collective
    call, has yet to release its tensors. DeepSpeed and others keep the groups, so destroying them does not wait for the
    threads.

    A signal to stop while the interpreter is finalized, which can take a second, would replace the exit code.
    """
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
