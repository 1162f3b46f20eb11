"""The expected speed of training on a device: from published runs or, on a CPU, from a timed matrix product."""

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

ASSUMED_MFU = 0.4  # on a CPU, and where nothing was published or measured
# Our measurement where nothing was published: gpt2, 64 sequences a step (docs/results/h200.json).
MEASURED_MFU = {"H200": 0.49}
MIN_STEP_S = 0.01  # of a step on an H200, however small the model (docs/log.md); assumed of all but CPUs


def expected_flops(
    device: Device, processes: int, model: ModelConfig, step_flops: float, *, auto: bool = True
) -> tuple[float, float, str] | None:
    """The lowest and highest expected FLOP/s of a training step of `step_flops` on all devices of `processes`
    processes, and the basis of the estimate; None if the peak is not known. A known peak is that of half precision or
    of the device's best precision, which `auto` says the run uses.
    """
    if device.peak_flops and (device.precision in ("bf16", "fp16") or auto):
        low, high, basis = mfu_of(device.chip, processes * device.count, model)
        peak, most = device.peak_flops * processes, step_flops / MIN_STEP_S
        if high * peak > most:
            basis += f"; a step takes at least {1000 * MIN_STEP_S:g} ms"
        return min(low * peak, most), min(high * peak, most), f"at {basis}"
    if device.type != "cpu":
        return None
    peak = cpu_flops(device.precision) * processes
    basis = f"at {100 * ASSUMED_MFU:.0f} % of the {si(peak)}FLOP/s that a matrix product reaches here now"
    return ASSUMED_MFU * peak, ASSUMED_MFU * peak, basis


def mfu_of(device: str, count: int, model: ModelConfig) -> tuple[float, float, str]:
    """The lowest and highest MFU to expect of `count` devices called `device`, and their source: the published runs on
    that device with the nearest model size, then the nearest number of devices; else MEASURED_MFU; else ASSUMED_MFU."""
    name = known_name(device)
    runs = [run for run in SPEEDS if name and known_name(run.device) == name]
    if not runs and name in MEASURED_MFU:
        mfu = MEASURED_MFU[name]
        basis = f"{100 * mfu:.0f} % MFU, this project's for 124 M parameters on 1 x {name}"
        return mfu, mfu, basis + _caveat(1, count)
    if not runs:
        return ASSUMED_MFU, ASSUMED_MFU, f"an assumed {100 * ASSUMED_MFU:.0f} % MFU"
    shapes = {size: ModelConfig(n_layer=layers, n_embd=width) for (layers, width), size in SIZES.items()}
    ratio = {size: abs(math.log(parameter_count(shape) / parameter_count(model))) for size, shape in shapes.items()}
    nearest = min(runs, key=lambda run: (ratio[run.size], abs(math.log(run.count / count))))
    shape, peak = shapes[nearest.size], nearest.count * DEVICES[name].peak
    runs = [run for run in runs if (run.size, run.count) == (nearest.size, nearest.count)]
    mfus = sorted((run.tokens_per_second * flops_per_token(shape, 1024) / peak, run.run) for run in runs)
    low, high = mfus[0][0], mfus[-1][0]
    percent = " to ".join(f"{100 * mfu:.1f}" for mfu in dict.fromkeys((low, high)))
    authors = " and ".join(dict.fromkeys(author for _, author in mfus))
    setup = f"{si(parameter_count(shape), 'B')} parameters on {nearest.count} x {name}{_caveat(nearest.count, count)}"
    return low, high, f"{percent} % MFU, published by {authors} for {setup}"


def _caveat(measured: int, count: int) -> str:
    """What a speed that was measured on fewer devices than `count` does not contain."""
    return f"; on {count} communication takes more of the time" if measured < count else ""


@lru_cache
def cpu_flops(precision: str) -> float:
    """FLOP/s of this process's CPU threads: the fastest matrix product of one thread in a tenth of a second, times the
    number of threads. (Several threads would wait for the slowest, which says little on a busy machine.)"""
    a = torch.ones(256, 256, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    a @ a  # prepares the kernel
    deadline, fastest = time.perf_counter() + 0.1, math.inf  # seconds
    while (start := time.perf_counter()) < deadline or fastest == math.inf:
        a @ a
        fastest = min(fastest, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return threads * 2 * 256**3 / fastest
