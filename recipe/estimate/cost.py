"""How fast a device trains: by published speeds, or on a CPU by a matrix product."""

import math
import time
from functools import lru_cache

import torch

from eval.published import SIZES, SPEEDS
from recipe.config import ModelConfig
from recipe.engine.device import Device
from recipe.engine.hardware import DEVICES, known_name
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.utils.units import si

ASSUMED_MFU = 0.4  # where nothing was published or measured, and on a CPU
MEASURED_MFU = {"H200": 0.49}  # by us, where nothing was published: gpt2, 64 sequences a step (docs/results/h200.json)


def expected_flops(
    device: Device, processes: int, model: ModelConfig, *, auto: bool = True
) -> tuple[float, float, str] | None:
    """The lowest and highest FLOP/s to expect of a training step on so many such devices, and where that is from; None
    where nothing is known of them. `auto`: the precision is the best that the device has.

    The known GPU peaks are for half precision; the peak of another one is not known, unless it is the best there is.
    """
    if device.peak_flops and (device.precision in ("bf16", "fp16") or auto):
        low, high, basis = mfu_of(device.chip, processes * device.count, model)
        return low * device.peak_flops * processes, high * device.peak_flops * processes, f"at {basis}"
    if device.type != "cpu":
        return None
    peak, share = cpu_flops(device.precision) * processes, f"{100 * ASSUMED_MFU:.0f} %"
    basis = f"if a step reaches {share} of the {si(peak)}FLOP/s that a matrix product reaches here now"
    return ASSUMED_MFU * peak, ASSUMED_MFU * peak, basis


def mfu_of(device: str, count: int, model: ModelConfig) -> tuple[float, float, str]:
    """The lowest and highest MFU to expect of `count` devices called `device`, and where they are from: the published
    runs on that device whose model, then whose number of devices, is nearest; or ours on one; or an assumption."""
    name = known_name(device)
    runs = [run for run in SPEEDS if name and known_name(run.device) == name]
    if not runs and name in MEASURED_MFU:
        mfu = MEASURED_MFU[name]
        return mfu, mfu, f"{100 * mfu:.0f} % MFU, this project's for 124 M parameters on 1 x {name}"
    if not runs:
        return ASSUMED_MFU, ASSUMED_MFU, f"an assumed {100 * ASSUMED_MFU:.0f} % MFU"
    shapes = {size: ModelConfig(n_layer=layers, n_embd=width) for (layers, width), size in SIZES.items()}
    ratio = {size: abs(math.log(parameter_count(shape) / parameter_count(model))) for size, shape in shapes.items()}
    nearest = min(runs, key=lambda run: (ratio[run.size], abs(math.log(run.count / count))))
    shape, peak = shapes[nearest.size], nearest.count * DEVICES[name].peak
    same = [run for run in runs if (run.size, run.count) == (nearest.size, nearest.count)]
    found = sorted((run.tokens_per_second * flops_per_token(shape, 1024) / peak, run.run) for run in same)
    low, high = found[0][0], found[-1][0]
    shares = " to ".join(f"{100 * mfu:.1f}" for mfu in dict.fromkeys((low, high)))
    of = f"{si(parameter_count(shape), 'B')} parameters on {nearest.count} x {name}"
    return low, high, f"{shares} % MFU, published by {' and '.join(dict.fromkeys(run for _, run in found))} for {of}"


@lru_cache
def cpu_flops(precision: str, size: int = 256) -> float:
    """FLOP/s of this process's threads on the CPU: the best matrix product of one thread in a tenth of a second, times
    their number. (Several threads would wait for the slowest, which tells nothing on a busy machine.)"""
    a = torch.ones(size, size, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a @ a  # prepares the kernel
    begun, best = time.perf_counter(), math.inf
    while (start := time.perf_counter()) < begun + 0.1 or best == math.inf:
        a @ a
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return threads * 2 * size**3 / best
