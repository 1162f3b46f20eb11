"""Reads the launch from the environment, refuses launches before a process group exists, and ends a process that
cannot continue."""

import os
import re
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_torch_xla_available, parse_flag_from_env

from recipe.engine.shutdown import StopSignal
from recipe.utils.errors import ExitCode, Permanent, UserError, first_line, in_words, is_transient, no_memory_left
from recipe.utils.log import end_if_unread, print_error
from recipe.utils.processes import is_set_by_launcher
from recipe.utils.redaction import redact
from recipe.utils.units import plural

EXIT_GRACE_S = 20  # a silent process waits this long for the one that prints: processes start at different times

# Messages of gloo and NCCL if the process at the other end of a connection, or its node, has died.
_LOST_PEER = re.compile(
    r"^\[\S*gloo/transport/\S*\] (?P<gloo>.*?)(\. This is typically.*)?$|"
    r"^.*?(?P<nccl>ncclRemoteError|remote process exited|Connection (reset|closed) by (remote )?peer).*$",
    re.MULTILINE,
)

# What Inductor and Triton report where a C++ compiler or Python's headers are missing. Of the headers Triton names the
# command alone: the compiler prints the rest.
_NO_COMPILER = re.compile(
    r"No working C\+\+ compiler|Failed to find C compiler|Python\.h|CalledProcessError: Command '\['\S*(gcc|cc|clang)'"
)

_LOST = (
    "\nlost       another process of this run, or its node, is gone or does not answer ({}); its own output has the "
    "cause. The same command on every node, without --fresh, or torchrun's next restart continues from the last "
    "checkpoint"
)

# Options of `accelerate launch`, and what decides in their place.
_DECIDED_ELSEWHERE = {
    "mixed_precision": "--precision",
    "dynamo_backend": "--torch_compile",
    "use_parallelism_config": "the distributed_type",
    "gradient_accumulation_steps": "total_batch_tokens, with micro_batch_size,",
    # DeepSpeed's, of which Accelerate drops those that its file could hold
    "gradient_clipping": "max_grad_norm",
    "deepspeed_zero_stage": "the deepspeed_config_file",
    "deepspeed_offload_optimizer_device": "the deepspeed_config_file",
    "deepspeed_offload_param_device": "the deepspeed_config_file",
}


def wants(what: str) -> bool:
    """Whether the launch asks Accelerate for CPU (even where there is a GPU), DEEPSPEED or FSDP."""
    return parse_flag_from_env(f"ACCELERATE_USE_{what}")


def wants_tpu() -> bool:
    """Whether the launch asks for a TPU: `gpu_ids: tpu` is all of tpu.yaml that Accelerate passes on."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") == "tpu" or os.environ.get("PJRT_DEVICE") == "TPU"


def has_tpu() -> bool:
    """Whether this machine has a TPU, by Google's variable, by the device file of a v4 or an older one, or by the PCI
    ids that JAX knows (jax/_src/hardware_utils.py)."""
    tpu_id = re.compile("PCI_ID=1AE0:(0027|0056|005E|0062|0063|006F|0076)")
    pci_devices = (path.read_text() for path in Path("/sys/bus/pci/devices").glob("*/uevent"))
    device_files = Path("/dev").glob("accel[0-9]*")
    return bool(os.environ.get("TPU_ACCELERATOR_TYPE")) or any(device_files) or any(map(tpu_id.search, pci_devices))


def unused_gpu() -> str:
    """The vendor of a GPU of this node that this PyTorch cannot use, unless the launch asks for the CPU; else empty."""
    if torch.cuda.is_available() or wants("CPU") or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "tpu"):
        return ""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "Nvidia"
    # By AMD's driver, which runs the small GPUs of processors too.
    memory = (int(path.read_text()) for path in Path("/sys/class/drm").glob("card*/device/mem_info_vram_total"))
    return "AMD" if any(size > 4e9 for size in memory) else ""


def has_torch_tpu() -> bool:
    """Whether torch_tpu has a TPU, which is then PyTorch's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == "tpu"


def is_local_main_process() -> bool:
    """Whether this process prints errors: one does on each node, because an error may concern that node only."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def max_restarts() -> int:
    """How many times torchrun may restart this node's processes."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))


def _lost_peer(error: Exception) -> str:
    """What gloo, NCCL or the store, by which processes find each other, reports of the loss of another process; empty
    for other errors."""
    if isinstance(error, torch.distributed.DistStoreError | torch.distributed.DistNetworkError):
        return "" if "EADDRINUSE" in str(error) else first_line(error)
    match = _LOST_PEER.search(str(error))
    return (match["gloo"] or match["nccl"]) if match else ""


def fail(error: Exception) -> int:
    """Prints an error on standard error, once a node, and returns the exit code; one of several processes ends with
    that code instead of returning. Re-raises `error` unless it is a UserError, an OSError or the loss of a process.

    The launcher ends all processes as soon as one has ended, so none may end before the error is printed: those that do
    not print wait for the launcher. If it does not end such a process, only that one has the error, and prints it.
    """
    end_if_unread(error)
    if reason := no_memory_left(error):
        way_out = "lower --micro_batch_size (the line `batch` has it), or see what helps in docs/memory.md"
        if "cuda" in reason.lower():
            way_out += "; nvidia-smi lists the programs that use the GPU"
        error = Permanent(f"{reason}; {way_out}")
    if isinstance(error, RuntimeError) and re.search("no kernel image|invalid device function", str(error)):  # HIP's
        build = f"PyTorch {torch.__version__} is not built for this GPU"
        error = Permanent(f"{build}: docs/troubleshooting.md names others, at `no kernel image`")
    if isinstance(error, RuntimeError) and _NO_COMPILER.search(str(error)):
        error = Permanent(
            "torch.compile needs a C++ compiler and Python's headers, and this machine lacks one of them: install them "
            "(on Debian and Ubuntu: apt install g++ python3-dev), or add --torch_compile false"
        )
    if isinstance(error, RuntimeError) and (kernel := re.search(r"(\S+): failed to map segment", str(error))):
        error = Permanent(
            f"torch.compile cannot load {kernel[1]}, most likely because /tmp, or the directory in its place, is "
            "mounted noexec: set TORCHINDUCTOR_CACHE_DIR to a directory elsewhere, or add --torch_compile false"
        )
    message, code = f"error: {in_words(error)}", ExitCode.USER_ERROR
    is_distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if not isinstance(error, UserError | OSError):
        if not (is_distributed and (cause := _lost_peer(error))):  # with one process it was some other connection
            raise error
        message, code = _LOST.format(cause), ExitCode.RUN_AGAIN
    if is_distributed and not is_local_main_process():
        if StopSignal.received and code == ExitCode.RUN_AGAIN:  # the launcher is ending all of them: that lost the peer
            os._exit(code)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        time.sleep(EXIT_GRACE_S)
    print_error(redact(message))
    # torchrun would start it again, to meet the same error, unless a disk or the Hub has failed for a while.
    is_permanent = isinstance(error, Permanent) or not (StopSignal.stepping or is_transient(error))
    if code == ExitCode.USER_ERROR and max_restarts() and is_permanent:
        os.kill(os.getppid(), signal.SIGTERM)
    if is_distributed:  # a normal exit would destroy a process group that others are still using, and abort
        sys.stdout.flush()
        os._exit(code)
    return code


def check_launch() -> None:
    """Raises UserError for a misconfigured launch, as far as its environment shows it."""
    has_xla, torch_tpu_installed = is_torch_xla_available(), find_spec("torch_tpu") is not None
    xla_has_device = has_xla and ("PJRT_DEVICE" in os.environ or has_tpu())  # otherwise it would use the CPU
    if wants_tpu() and not xla_has_device and not has_torch_tpu():
        packages = ["torch_xla"] * has_xla + ["torch_tpu"] * torch_tpu_installed
        origin, way_out = "the Accelerate file", "use another file, such as accelerate_configs/single.yaml"
        if os.environ.get("PJRT_DEVICE") == "TPU":
            origin, way_out = "PJRT_DEVICE=TPU", "unset PJRT_DEVICE"
        raise UserError(
            f"{origin} asks for a TPU, which cannot be used: this machine has {'a' if has_tpu() else 'no'} chip; "
            f"installed: {', '.join(packages) or 'neither torch_xla nor torch_tpu'}. "
            f"On a machine with a TPU run pip install -e '.[tpu]'; elsewhere {way_out}"
        )
    if torch.version.cuda and unused_gpu() == "Nvidia":
        raise UserError(
            f"this node's Nvidia GPU cannot be used by PyTorch {torch.__version__}, built for CUDA "
            f"{torch.version.cuda}; most likely the driver is too old: update it, or install a build for an older CUDA "
            "(docs/troubleshooting.md). ACCELERATE_USE_CPU=true trains on the CPU"
        )
    # Restarted processes would find the addresses of those that died: they hang, or use up the restarts.
    if max_restarts() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise UserError(
            "--max_restarts needs --rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    is_alone = not {"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"} & os.environ.keys()
    if is_alone and not wants_tpu() and is_set_by_launcher("MASTER_PORT"):
        raise UserError(
            "Accelerate has started one process, though its settings are for several: distributed_type NO and "
            "MULTI_CPU start one, and so does --cpu; use accelerate_configs/ddp.yaml, for several nodes "
            "multinode-ddp.yaml; for processes on the CPU set ACCELERATE_USE_CPU=true before `accelerate launch`"
        )
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if "LOCAL_RANK" in os.environ and rank >= world_size:
        raise UserError(f"RANK is {rank}, but WORLD_SIZE {world_size}; unset RANK, LOCAL_RANK and WORLD_SIZE")
    local_variables = {"LOCAL_RANK": "this process's index on its node", "LOCAL_WORLD_SIZE": "how many that has"}
    missing = [f"{name} ({meaning})" for name, meaning in local_variables.items() if name not in os.environ]
    if missing and world_size > 1:  # as by deepspeed's launcher, or by hand
        raise UserError(f"WORLD_SIZE is set without {' and '.join(missing)}; set that too, or use `accelerate launch`")
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))  # by torchrun
    if nodes != (expected := int(os.environ.get("RECIPE_NODES", nodes))):  # by slurm.sbatch
        raise UserError(
            f"{nodes} of {expected} nodes found each other. c10d's rendezvous takes a node whose clock is 15 s behind "
            "for dead: synchronize the nodes' clocks"
        )
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count()
    if processes > 1 and not wants("CPU") and 0 < gpus < processes:
        where = f" on each of {nodes} nodes" if nodes > 1 else ""
        raise UserError(f"{processes} processes for {plural(gpus, 'GPU')}{where}: pass --num_processes {gpus * nodes}")


def check_options(precision: str) -> None:
    """Raises UserError for an option of `accelerate launch` that would have no effect."""
    for option, decides in _DECIDED_ELSEWHERE.items():
        value = os.environ.get(variable := f"ACCELERATE_{option.upper()}", "none")
        is_default = option == "gradient_accumulation_steps" and value == "1"
        if value.lower() not in ("none", "no", "false", precision) and not is_default:
            raise UserError(
                f"the launch sets {option} {value}, which has no effect: {decides} decides that; remove it from the "
                f"command and from the Accelerate file, or unset {variable}"
            )


def check_accelerator(accelerator: Accelerator, supported: tuple[DistributedType, ...]) -> None:
    """Raises UserError if the Accelerator does not match the launch."""
    if (expected := int(os.environ.get("WORLD_SIZE", 1))) != accelerator.num_processes:
        raise UserError(
            f"{expected} processes were launched, but each would train alone: there is not a GPU for each of them. "
            "For processes on the CPU set ACCELERATE_USE_CPU=true before `accelerate launch`"
        )
    if accelerator.distributed_type not in supported:  # also if torch_xla has taken DeepSpeed's or FSDP's place
        raise UserError(
            f"distributed_type {accelerator.distributed_type.value} is not supported; use a file of "
            "accelerate_configs/ (of GPUs other than Nvidia's and AMD's, a run takes one, with single.yaml)"
        )
