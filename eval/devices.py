"""Where an evaluation runs: one device, the processes of `accelerate launch`, or TPU cores behind one process."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

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
def launched() -> Iterator[None]:
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


def choose_device(name: str, shared: bool = False) -> torch.device:
    """`auto` is the first there is of cuda, mps, cpu; of several processes, the one that Accelerate gives to each.
    Raises UserError if a named one is absent.

    `shared`: of a command whose shapes are few enough for a device that compiles a program for each. There `auto` may
    be a TPU.
    """
    if name == "auto" and (state := _launched()):
        return state.device
    xla = find_spec("torch_xla") is not None
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True, "xla": xla}
    if xla and (shared or name == "xla"):
        forget_kaggles_address()
    if name == "auto":
        name = "xla" if xla and shared and _on_tpu() else next(device for device, present in there.items() if present)
    if not there[name]:
        raise UserError(f"--device {name}: not available here. There is: {', '.join(d for d, p in there.items() if p)}")
    if name == "xla":
        import torch_xla.backends
        import torch_xla.runtime as xr

        xr.use_spmd()  # one process for all cores; before anything is on the device
        # A TPU multiplies fp32 as bf16 unless told not to.
        torch_xla.backends.set_mat_mul_precision("highest")
        return torch_xla.device()
    return torch.device(name)


def forget_kaggles_address() -> None:
    """Kaggle's images set TPU_PROCESS_ADDRESSES to "local", which libtpu takes for a host's name and waits for; call
    this before torch_xla starts."""
    if os.environ.get("TPU_PROCESS_ADDRESSES") == "local":
        del os.environ["TPU_PROCESS_ADDRESSES"]


def _on_tpu() -> bool:
    import torch_xla.runtime as xr

    return xr.device_type() == "TPU"


def placement(device: torch.device) -> dict:
    """The fields `multiples` and `place` of a LanguageModel: few shapes on a device that prepares each of them, and on
    a TPU rows sharded across its cores."""
    if device.type != "xla":  # cuDNN plans attention with a mask for each length
        return {"multiples": (1, 64, 1)} if device.type == "cuda" else {}
    import numpy as np
    import torch_xla.core.xla_model as xm
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    cores = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(cores), (cores,), ("data",))

    def place(tensor: torch.Tensor) -> torch.Tensor:
        spec = xs.ShardingSpec(mesh, ("data",) + (None,) * (tensor.ndim - 1))
        return xm.send_cpu_data_to_device(tensor, device, spec)[0]

    return {"multiples": (math.lcm(32, cores), 64, 1024), "place": place}
