"""How fast a device trains: by published speeds, or on a CPU by a matrix product."""

import math
import time

import torch

from eval.published import SPEEDS, Speed
from recipe.config import ModelConfig, parse_config
from recipe.engine.hardware import DEVICES, known_name
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.utils.units import si

ASSUMED_MFU = 0.4  # where nothing was published, and on a CPU


def mfu_of(device: str, count: int, model: ModelConfig) -> tuple[float, float, str]:
    """The lowest and highest MFU to expect of `count` devices called `device`, and where they are from: the published
    runs on that device whose model, then whose number of devices, is nearest; or an assumption."""
    name, wanted = known_name(device), parameter_count(model)
    nearest: dict[tuple[float, float], list[tuple[float, Speed, int]]] = {}
    for run in SPEEDS:
        if name and known_name(run.device) == name:
            shape = parse_config([f"--config={run.size}"]).model
            parameters = parameter_count(shape)
            distance = abs(math.log(parameters / wanted)), abs(math.log(run.count / count))
            mfu = run.tokens_per_second * flops_per_token(shape, shape.n_positions) / (run.count * DEVICES[name].peak)
            nearest.setdefault(distance, []).append((mfu, run, parameters))
    if not nearest:
        return ASSUMED_MFU, ASSUMED_MFU, f"an assumed {100 * ASSUMED_MFU:.0f} % MFU"
    runs = sorted(nearest[min(nearest)])
    (low, run, parameters), (high, *_) = runs[0], runs[-1]
    shares = f"{100 * low:.1f}" + (f" to {100 * high:.1f}" if len(runs) > 1 else "")
    whose = " and ".join(dict.fromkeys(found.run for _, found, _ in runs))
    of = f"{si(parameters, 'B')} parameters on {run.count} x {name}"
    return low, high, f"{shares} % MFU, published by {whose} for {of}"


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
