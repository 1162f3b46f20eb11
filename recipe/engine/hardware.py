"""The hardware: its precisions, peak FLOP/s, memory, threads and allocator. Uses PyTorch, but not Accelerate."""

import ctypes
import hashlib
import logging
import os
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from recipe.utils.errors import UserError
from recipe.utils.machine import usable_cores, usable_memory
from recipe.utils.processes import is_set_by_launcher


class DataSheet(NamedTuple):
    """An entry of devices.yaml, a GPU or a TPU device, with the peak in FLOP/s."""

    peak: float
    memory: float
    bf16: bool = True


# The peak of a device that is not listed is not guessed from a similar name: a laptop's GPU, a slice of a GPU or its
# "D" edition has almost the same one (see `known_name`).
DEVICES = {
    name: DataSheet(1e12 * sheet["peak"], sheet["memory"], sheet.get("bf16", True))
    for name, sheet in yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text()).items()
}
# Parts of a device's name that do not identify the model: vendor, socket, edition, size of a job; and memory.
_NAME_EXTRAS = re.compile(
    r"^(NVIDIA |AMD |APPLE )?(TESLA |GEFORCE |INSTINCT )?"
    r"| ?SXM\d?(?= |$)| (BLACKWELL WORKSTATION EDITION|GENERATION|SMALL|MEDIUM|LARGE)$"
)
# Where people leave out a space.
_UNSPACED = r"(?<=^RTX)(?=\w)|(?<=^TPU)(?=\w)|(?<=\d)(?=TI|SUPER|ADA|PCIE|NVL|PRO|MAX)|(?<=TI)(?=SUPER)|(?<=PRO)(?=\d)"
_MEMORY = re.compile(r" (\d+GB?|HBM\d\w?)(?= |$)")


def known_name(name: str) -> str:
    """The name in DEVICES of the device that CUDA or the XLA engine calls `name`; empty if it is not known.

    Every word of the name must match: vendor, model, memory, socket. So the A1000 is not an A100, and neither is a MIG
    slice of one ("NVIDIA A100-SXM4-80GB MIG 1g.10gb") or a vGPU ("GRID A100-10C").
    """
    model = _MEMORY.sub("", _model(name))
    return model if model in DEVICES else ""


def _model(name: str) -> str:
    """A name in the spelling of DEVICES, with its memory."""
    return _NAME_EXTRAS.sub("", " ".join(re.split(r"[\s_-]+", name.strip().upper())))


def peak_flops(name: str) -> float | None:
    """Dense half-precision peak in FLOP/s of the device called `name`; None if it is not known."""
    return DEVICES[model].peak if (model := known_name(name)) else None


def named_devices(text: str) -> tuple[int, str, float]:
    """ "8xh100", "H100:8", "a100_80gb", "rtx4090", "a10g-largex2", "8xtpu v5e", or Google's "v5e-8" -> the number of
    devices, their name in DEVICES and the GB of memory, of which the text may name another size than DEVICES. Raises
    UserError for an unknown name."""
    if tpus := re.fullmatch(r"(?:tpu-?)?(v\d\w?)-([1-9]\d*)", text.strip().lower().replace("litepod", "e")):
        name, cores = tpus[1], int(tpus[2])  # the chips of v4 and v5p have two cores, but are one device
        text = f"{max(1, cores // 2) if name in ('v4', 'v5p') else cores} x TPU {name}"
    count_first = re.fullmatch(r"\s*([1-9]\d*)\s*x(.*)", text, re.IGNORECASE)
    count_last = re.fullmatch(r"(.*?)\s*[x:]\s*([1-9]\d*)\s*", text, re.IGNORECASE)
    readings = [("1", text), count_first and count_first.groups(), count_last and (count_last[2], count_last[1])]
    for count, name in filter(None, readings):
        model, size = _MEMORY.sub("", _model(name)), re.search(r" (\d+)GB?(?= |$)", _model(name))
        model = re.sub(_UNSPACED, " ", model)
        for family in ("", "RTX ", "TPU "):
            if (device := f"{family}{model}") in DEVICES:
                memory = DEVICES[device].memory
                named = int(size[1]) if size else memory
                return int(count), device, named if named <= 2 * memory else memory  # a GH200's processor has 480 GB
    raise UserError(f"{text!r} is not a known device; use one of {', '.join(DEVICES)} (M1 and M2 are Apple's)")


def set_up_allocator() -> None:
    """Lets the segments of CUDA's allocator grow, unless the user has configured it; call it before CUDA starts.
    With segments of fixed size fp16 ran out of memory at a peak of 92 %, which HEADROOM allows (docs/log.md). Not under
    WSL, where some of Nvidia's drivers before R615 cannot (pytorch #192330)."""
    in_wsl = "microsoft" in platform.release().lower()
    if torch.version.cuda and not in_wsl and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def check_allocator(device: torch.device) -> None:
    """Keeps segments of fixed size where a CUDA device cannot map memory, as Nvidia's vGPUs (openxla/xla #49252) and
    some Jetsons (unsloth #1446) cannot; its first allocation then fails. So does the first kernel if PyTorch is not
    built for this GPU: better now than in the middle of a compilation."""
    try:
        torch.ones(1, device=device)
    except RuntimeError as error:
        if "CUDA driver error" not in str(error):
            raise
        warnings.filterwarnings("ignore", "torch.cuda._set_allocator_settings", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")  # ty: ignore[deprecated]


def use_deterministic_algorithms() -> None:
    """Makes two runs of the same program equal to the bit, compiled too; call it before CUDA starts.

    On a GPU attention then does not use cuDNN, and Inductor tunes no kernels. On a CPU it costs nothing: the only
    nondeterminism there is the embedding's gradient, which compiled code would sum atomically.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory only helps to find bugs, and takes time. (It is an attribute of the module's class.)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010


def peak_memory(device: torch.device) -> int | None:
    """Bytes: the peak of a CUDA device's allocator since the last `reset_peak_memory`, or of a TPU's, None if that does
    not report it; elsewhere the process's largest resident set, which cannot be reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "tpu":
        return torch.accelerator.max_memory_allocated() or None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Frees cached memory and resets `peak_memory`, on a CUDA device only."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> float | None:
    """Bytes of a CUDA device's memory not in use by other processes, this one's CUDA context or its tensors; None on
    other devices."""
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    if torch.cuda.get_device_properties(device).is_integrated:  # CUDA counts cached files as used (unsloth #10704)
        free = max(free, usable_memory())
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def seconds_of(function: Callable[[], torch.Tensor]) -> float:
    """Seconds that a call takes on the device: the median of three rounds of four calls, after a warm-up of two."""
    seconds = []
    for calls in (2, 4, 4, 4):
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        result[(0,) * result.ndim].item()  # waits for any device
        seconds.append((time.perf_counter() - start) / calls)
    return statistics.median(seconds[1:])


def resolve_precision(precision: str, *, cpu: bool) -> str:
    """`supported_precision` of this process's device: a GPU if there is one, unless `cpu`."""
    if torch.cuda.is_available() and not cpu:  # is_bf16_supported() counts emulation
        bf16 = torch.cuda.get_device_capability() >= (8, 0)
        return supported_precision(precision, torch.cuda.get_device_name(), gpu=True, bf16=bf16)
    # MPS and Intel's XPU stay in fp32 until their autocast has been tested here.
    other = "" if cpu else "MPS" if torch.backends.mps.is_available() else "XPU" if torch.xpu.is_available() else ""
    return supported_precision(precision, other or "a CPU", gpu=False, bf16=not other and cpu_has_bf16())


def supported_precision(precision: str, name: str, *, gpu: bool, bf16: bool) -> str:
    """Resolves `auto` to the fastest precision of the device called `name`; `gpu`: whether it is a CUDA GPU; `bf16`:
    whether it computes in bf16 natively. Raises UserError if it does not support `precision`."""
    if gpu:
        supported = ("bf16", "fp16", "tf32", "fp32") if bf16 else ("fp16", "fp32")
    else:
        supported = ("bf16", "fp32") if bf16 else ("fp32", "bf16")
    if precision == "auto":
        return supported[0]
    if precision not in supported:
        raise UserError(f"precision {precision} is not supported on {name}; use auto, {' or '.join(supported)}")
    return precision


def cpu_has_bf16() -> bool:
    """Whether bf16 is faster than fp32 on this CPU: with AMX, or with AVX512-BF16 on an AMD. On an Intel CPU that has
    only AVX512-BF16, fp32 is 1.5 times as fast (docs/log.md)."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in cpuinfo or ("avx512_bf16" in cpuinfo and "AuthenticAMD" in cpuinfo)


def processor() -> str:
    """The processor's name."""
    with suppress(OSError, IndexError):
        return re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[0]
    return platform.processor() or "CPU"


def nvidia_smi(*fields: str) -> dict[str, str]:
    """The values of nvidia-smi's `fields` for the first GPU; empty if there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return dict(zip(fields, output.splitlines()[0].split(", "), strict=True))
    return {}


def compile_in_place(module: torch.nn.Module, mode: str) -> None:
    """Compiles a module in place, which keeps `_orig_mod.` out of the parameters' names; DDP splits its graph at the
    ends of its buckets. `mode` max-autotune tunes the kernels, any other does not. Raises UserError."""
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # In /tmp anybody may have made it first, and torch runs, and unpickles, what it finds there; precompiled headers
    # also where TORCHINDUCTOR_CACHE_DIR names another directory.
    os.makedirs(directory := default_cache_dir(), exist_ok=True)
    if os.lstat(directory).st_uid != os.getuid():
        raise UserError(
            f"{directory}, where PyTorch keeps compiled code, belongs to another user, who could have put code there; "
            "set TMPDIR to a directory of yours, or torch_compile false"
        )
    if torch.are_deterministic_algorithms_enabled() and hasattr(inductor, "deterministic"):  # not in torch 2.9
        inductor.deterministic = True  # otherwise sums depend on which variant of a kernel was the fastest
    if mode == "max-autotune":  # fifteen lines for each product, and a traceback for a candidate that does not fit
        inductor.autotune_num_choices_displayed = 0
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.CRITICAL)
    if shlex.quote(paths := torch.__file__ + sys.base_prefix) != paths:
        _link_libraries()
    # CUDA graphs would reserve the memory of a full step, and saved an H200 half a millisecond of it (docs/log.md).
    module.compile(dynamic=False, mode="max-autotune-no-cudagraphs" if mode == "max-autotune" else "default")


@cache
def _link_libraries() -> None:
    """Gives the linker links in the compiler's cache in place of paths with spaces and the like, which PyTorch 2.13
    does not quote (pytorch #191010)."""
    from torch._inductor.codecache import cache_dir
    from torch._inductor.cpp_builder import BuildOptionsBase

    def link_to(path: str) -> str:
        link = Path(cache_dir(), hashlib.sha256(path.encode()).hexdigest()[:16])
        with suppress(FileExistsError):
            link.symlink_to(path)
        return str(link)

    def libraries_dirs(self: BuildOptionsBase) -> list[str]:
        return [path if path == shlex.quote(path) else link_to(path) for path in original(self)]

    original = BuildOptionsBase.get_libraries_dirs
    setattr(BuildOptionsBase, "get_libraries_dirs", libraries_dirs)  # noqa: B010


def tune_cpu(local_world_size: int) -> None:
    """Configures threads and allocator for training on a CPU with `local_world_size` processes on this node.

    `accelerate launch` and torchrun set OMP_NUM_THREADS=1 if it is not set, with which each process would use one core;
    a value that the user has set is kept. glibc returns large blocks to the kernel on every free: keeping them makes
    the loss 1.7 times as fast in fp32 and 2.4 times in bf16 (docs/log.md).
    """
    threads = os.environ.get("OMP_NUM_THREADS")
    if not threads or (threads == "1" and is_set_by_launcher("OMP_NUM_THREADS", "--num_cpu_threads_per_process")):
        torch.set_num_threads(max(1, usable_cores(logical=False) // local_world_size))
    if platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 64 * 2**20)
