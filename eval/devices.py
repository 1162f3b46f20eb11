"""Where an evaluation runs: one device, or the processes of `accelerate launch`."""

import contextlib
import os
import sys
from collections.abc import Callable, Generator, Sequence

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from accelerate.utils.environment import parse_flag_from_env


class UserError(ValueError):
    """A mistake the user can mend. The message names the bad value and the way out."""


def _launched() -> PartialState | None:
    """The state of a launch of several processes; None in one process, which may use another device than Accelerate
    would choose."""
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    return PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU")) if several else None


def is_main() -> bool:
    """Whether this process is the one that prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


@contextlib.contextmanager
def launched() -> Generator[None, None, None]:
    """Context of a command that may be one of several processes: only the main process's standard output is shown."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if is_main() else nowhere):
        yield
    if state := _launched():
        state.destroy_process_group()


def split(score: Callable[[Sequence], Sequence], items: Sequence) -> list:
    """What `score` returns for each item, on every process; each process scores its share. A collective call."""
    state = _launched()
    if state is None:
        return list(score(items))
    share = range(state.process_index, len(items), state.num_processes)
    found = dict(gather_object(list(zip(share, score([items[i] for i in share]), strict=True))))
    return [found[i] for i in range(len(items))]


def choose_device(name: str) -> torch.device:
    """`auto` is the first there is of cuda, mps, cpu; of several processes, the one that Accelerate gives to each.
    Raises UserError if a named one is absent."""
    if name == "auto" and (state := _launched()) and state.device:
        return state.device
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    present = [device for device, found in there.items() if found]
    if name != "auto" and name not in present:
        raise UserError(f"--device {name}: not available here. There is: {', '.join(present)}")
    return torch.device(present[0] if name == "auto" else name)


def forget_kaggles_address() -> None:
    """Kaggle's images set TPU_PROCESS_ADDRESSES to "local", which libtpu takes for a host's name and waits for; call
    this before torch_xla starts."""
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]
