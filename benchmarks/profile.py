"""Where a training step's time goes, by torch.profiler: the longest operators, or kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from recipe.engine import device as hardware
from recipe.errors import UserError


def profile_step(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict:
    """Calls `step` twice to warm up and `steps` times under the profiler.

    Returns `seconds` a step by operator or kernel, longest first, without those that it calls, and their sum
    `accounted_seconds`. Raises UserError where the profiler sees nothing of this device.
    """
    for _ in range(2):
        step()
    hardware.synchronize(device)
    with profile(activities=supported_activities(), acc_events=True) as profiler:
        for _ in range(steps):
            step()
        hardware.synchronize(device)
    on_cpu = device.type == "cpu"
    seconds: dict[str, float] = {}
    for event in profiler.key_averages():
        # An annotation spans kernels that are listed themselves; an operator's time on a GPU is that of its kernels.
        if (event.device_type == DeviceType.CPU) != on_cpu or (not on_cpu and event.is_user_annotation):
            continue
        spent = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        seconds[event.key] = seconds.get(event.key, 0.0) + 1e-6 * spent / steps
    total = sum(seconds.values())
    if not total:
        raise UserError(f"torch's profiler sees nothing of what {device.type} does; profile on a CPU or an Nvidia GPU")
    longest = sorted(seconds.items(), key=lambda item: -item[1])
    return {"device": str(device), "seconds": dict(longest), "accounted_seconds": total}


def lines(figures: dict) -> list[str]:
    """The figures of `profile_step` for the terminal."""
    total = figures["accounted_seconds"]
    out = [f"profile    a step on {figures['device']}: {1e3 * total:.2f} ms accounted for"]
    longest = list(figures["seconds"].items())[:20]
    return out + [f"  {seconds / total:6.1%}  {1e3 * seconds:9.3f} ms  {name[:90]}" for name, seconds in longest]
