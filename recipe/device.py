"""What the hardware is and can do: precision, peak, threads, allocator. Knows PyTorch, but not Accelerate."""

import ctypes
import os
import platform
from pathlib import Path

import psutil
import torch

from recipe.config import UserError

# Dense bf16 (fp16 where there is no bf16) peak in FLOP/s, from the vendors' data sheets; the first name contained in
# the device's name counts. What is not listed has no MFU rather than a guessed one.
PEAK_FLOPS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "A10": 125e12, "V100": 125e12, "T4": 65e12, "4090": 165e12,
    "3090": 71e12,
}  # fmt: skip


def peak_flops(name: str) -> float | None:
    """Peak of the device called `name` in FLOP/s, or None where it is not known."""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def resolve_precision(precision: str, *, cpu: bool) -> str:
    """`auto` becomes the fastest arithmetic that the device does natively, with `cpu` the processor's even where there
    is a GPU. UserError where the device lacks what is named."""
    cuda = torch.cuda.is_available() and not cpu
    mps = torch.backends.mps.is_available() and not cpu
    if cuda:
        native_bf16 = torch.cuda.get_device_capability() >= (8, 0)  # is_bf16_supported() counts emulation
    if precision == "auto":
        if cuda:
            return "bf16" if native_bf16 else "fp16"
        # MPS stays in fp32 until its autocast has been tested here.
        return "bf16" if not mps and _cpu_has_bf16() else "fp32"
    if precision == "fp16" and not cuda:
        raise UserError("precision fp16 needs a CUDA GPU (Accelerate would silently run fp32); use auto, bf16 or fp32")
    if precision == "tf32" and not (cuda and native_bf16):
        raise UserError("precision tf32 needs an Ampere or newer GPU; use auto or fp32")
    if precision == "bf16" and cuda and not native_bf16:
        raise UserError(f"precision bf16 is only emulated on {torch.cuda.get_device_name()}; use auto or fp16")
    return precision


def _cpu_has_bf16() -> bool:
    """Whether the CPU multiplies bf16 natively (AMX or AVX512-BF16); emulated, it is slower than fp32."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def tune_cpu(local_world: int) -> None:
    """Threads and allocator for training on a CPU.

    `accelerate launch` sets OMP_NUM_THREADS=1 where nobody set it, which would leave all cores but one idle.
    glibc gives large blocks back to the kernel on every free and takes fresh, zeroed pages on every malloc; keeping
    them made the loss on a 50,257-word vocabulary 1.7 (fp32) and 2.4 (bf16) times as fast (recipe/LOG.md).
    """
    if os.environ.get("OMP_NUM_THREADS", "1") == "1":
        cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            cores = min(cores, len(os.sched_getaffinity(0)))
        torch.set_num_threads(max(1, cores // local_world))
    if platform.libc_ver()[0] == "glibc":
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4  # malloc.h
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 64 * 2**20)
