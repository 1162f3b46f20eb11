"""Cores and memory that this process may use: a container or a batch system may grant less than the machine has."""

import math
import os
from contextlib import suppress
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")  # of the container, by Linux's control groups


def usable_cores(*, logical: bool = True) -> int:
    """Cores on which this process can run at the same time; `logical` counts each hardware thread as one."""
    cores = psutil.cpu_count(logical=logical) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2 and 1
        with suppress(OSError, ValueError):  # "200000 100000" is two cores; without a quota it is "max" or -1
            quota, period = (int(word) for name in names for word in (CGROUP / name).read_text().split())
            cores = min(cores, round(quota / period)) if quota > 0 else cores
    return max(1, cores)


def usable_memory() -> float:
    """Bytes that are free, or that a container's limit leaves beside this process, if those are fewer."""
    left = math.inf
    for name in ("memory.max", "memory/memory.limit_in_bytes"):  # version 2, where "max" is no limit, and 1
        with suppress(OSError, ValueError):
            left = int((CGROUP / name).read_text()) - psutil.Process().memory_info().rss
    return max(0, min(psutil.virtual_memory().available, left))
