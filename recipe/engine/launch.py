"""What the launch asks for, read from the environment, what is refused before a process group exists, and how a process
of several ends that cannot go on."""

import os
import re
import signal
import sys
import time
from importlib.util import find_spec

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from recipe.errors import ExitCode, UserError
from recipe.redaction import redact

_PATIENCE = 20  # seconds, for processes that start at different times

# What gloo and NCCL say where the process at a connection's other end has died, or its machine has.
_BROKEN_OFF = re.compile(
    r"^\[\S*gloo/transport/\S*\] (?P<gloo>.*?)(\. This is typically.*)?$|"
    r"^.*?(?P<nccl>ncclRemoteError|remote process exited|Connection (reset|closed) by (remote )?peer).*$",
    re.MULTILINE,
)


def is_on(name: str, default: str = "") -> bool:
    return os.environ.get(name, default).lower() in ("1", "true", "yes")


def wants_cpu() -> bool:
    """Whether the CPU is to be used even where there is a GPU."""
    return is_on("ACCELERATE_USE_CPU")


def wants_deepspeed() -> bool:
    return is_on("ACCELERATE_USE_DEEPSPEED")


def wants_xla() -> bool:
    """Where torch_xla is installed Accelerate uses it, unless told not to."""
    return find_spec("torch_xla") is not None and is_on("USE_TORCH_XLA", "1")


def launcher_patience() -> float | None:
    """Seconds after which torchrun, told to stop, kills its processes; None where there is none."""
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30))
    return limit if "TORCHELASTIC_RUN_ID" in os.environ else None


def speaks() -> bool:
    """Whether this process reports errors: one does on each machine, for the machine may be the only one to have it."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def restarts() -> tuple[int, int]:
    """How often torchrun may start this machine's processes again should they fail, in all and from now on."""
    limit, used = (int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("MAX_RESTARTS", "RESTART_COUNT"))
    return limit, max(0, limit - used)


def fail(error: Exception) -> int:
    """Says on standard error, once a machine, what of `error` a user is to know, and returns the exit code; of several
    processes none returns, but ends with that code. Raises `error` itself where it is neither a mistake of the user's
    nor the loss of another process.

    The launcher ends all processes as soon as one has ended: that must not be before the first of them has spoken, nor
    while it is about to. So the others wait to be ended, and one that is not is the only one to know of the mistake.
    """
    message, code = f"error: {error}", ExitCode.USER_ERROR
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if not isinstance(error, UserError):
        how = _BROKEN_OFF.search(str(error))
        if not (several and how):  # of one process it is a connection to something else
            raise error
        message, code = _lost(how["gloo"] or how["nccl"]), ExitCode.RUN_AGAIN
    if several and not speaks():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(_PATIENCE)
    print(redact(message), file=sys.stderr, flush=True)
    if several:  # the interpreter's own end would take down a process group that others are still using, and abort
        sys.stdout.flush()
        os._exit(code)
    return code


def _lost(how: str) -> str:
    """What to say where another process is gone; `how` it was seen."""
    left = restarts()[1]
    if left:
        again = (
            f"torchrun starts this machine's part again, at most {left} more time{'s' * (left > 1)}, and once all "
            "machines are there it"
        )
    else:
        again = "The same command, without --fresh, on every machine"
    return (
        f"\nlost       another process of this run, or its machine, is gone or does not answer ({how}); what it says "
        f"there is the cause. {again} goes on from the last checkpoint"
    )


def check_launch() -> None:
    """Raises UserError for a launch that can be seen to train something else than was asked for."""
    accelerator = torch.accelerator.current_accelerator()
    installed = find_spec("torch_xla") is not None
    if accelerator is not None and accelerator.type == "tpu" and not installed:
        raise UserError("this TPU's PyTorch has no torch_xla: each process would train a copy of its own")
    asked = [name for name in ("PJRT_DEVICE", "TPU_ACCELERATOR_TYPE") if name in os.environ]
    if asked and not installed and is_on("USE_TORCH_XLA", "1"):
        raise UserError(
            f"{asked[0]} is set, but torch_xla is not installed: pip install -e '.[tpu]' to train on the TPU, or unset "
            "it to train without"
        )
    if wants_deepspeed() and wants_xla():
        raise UserError("torch_xla is installed and would take DeepSpeed's place; set USE_TORCH_XLA=0 for DeepSpeed")
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > 1 and not wants_cpu() and 0 < gpus < processes:
        raise UserError(f"{processes} processes for {gpus} GPU{'s' if gpus > 1 else ''}: pass --num_processes {gpus}")
    if restarts()[0] and is_on("TORCHELASTIC_USE_AGENT_STORE"):  # with what they wrote there of where they are
        raise UserError(
            "--max_restarts as it is lets processes that are started again look for those that are gone; it needs "
            "--rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment of accelerate launch"
        )
    if is_on("ACCELERATE_USE_FSDP"):
        raise UserError("FSDP is not supported; accelerate_configs/zero3.yaml cuts the weights up")
    # Accelerate's launcher for one process names a meeting point only if the YAML asked for more of them.
    if "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        raise UserError(
            "the Accelerate file asks for several processes, but its distributed_type starts only one; use "
            "accelerate_configs/ddp.yaml (on the CPU with ACCELERATE_USE_CPU=true), or pass --num_processes 1. If it "
            "asks for one, unset MASTER_ADDR"
        )


def check_accelerator(accelerator: Accelerator, supported: tuple[DistributedType, ...], precision: str) -> None:
    """Raises UserError where the Accelerator that came of the launch would train something else."""
    if (expected := int(os.environ.get("WORLD_SIZE", 1))) != accelerator.num_processes:
        raise UserError(
            f"{expected} processes were launched, but each would train alone: no GPU for each of them was found. "
            "For processes on the CPU set ACCELERATE_USE_CPU=true before `accelerate launch`"
        )
    if accelerator.distributed_type not in supported:
        raise UserError(
            f"distributed_type {accelerator.distributed_type.value} is not supported; use a file of accelerate_configs/"
        )
    if (theirs := os.environ.get("ACCELERATE_MIXED_PRECISION", "no")) not in ("no", precision):
        raise UserError(
            f"the Accelerate file says mixed_precision {theirs}, the recipe {precision}; "
            "leave it out of the file, or pass --precision"
        )
    # The train loop owns the accumulation boundary; a second owner would divide the loss twice.
    if accelerator.gradient_accumulation_steps != 1:
        raise UserError("unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS: accumulation follows from total_batch_tokens")
