"""How fast a device trains: by published speeds, or on a CPU by a matrix product."""

import math
import time
from typing import NamedTuple

import torch

from recipe.engine.hardware import known_name
from recipe.utils.units import si


class Speed(NamedTuple):
    """A published speed: the device by its name in DEVICES, how many of them, the model's parameters, the share of the
    peak (MFU by `flops_per_token`), and whose run that was."""

    device: str
    count: int
    parameters: float
    mfu: float
    run: str


PUBLISHED = (
    Speed("A100", 8, 124e6, 0.599, "llm.c"),  # 300 ms a step, 1.75 M tokens/s: karpathy/llm.c, discussion 481
    Speed("A100", 8, 355e6, 0.62, "llm.c"),  # 639 K tokens/s
    Speed("A100", 8, 774e6, 0.64, "llm.c"),  # 308 K tokens/s
    Speed("H100", 8, 1558e6, 0.487, "llm.c"),  # 374 K tokens/s: discussion 677
    # 419 K tokens/s of a PyTorch loop on one, 3.05 M on eight: jjschwartz.github.io/blog/scaling-gpt2
    Speed("H100", 1, 124e6, 0.362, "the scaling journal"),
    Speed("H100", 8, 124e6, 0.329, "the scaling journal"),
    # 18 hours for 10 B tokens (its 243 K tokens/s would be 11.4): ducto489.github.io/projects/train-gpt-2-with-tpu
    Speed("TPU V3", 8, 124e6, 0.268, "a Kaggle notebook"),
    # 1.43 s a step of 524,288 tokens, MFU as it prints it: github.com/tucan9389/nanochat-jax, dev/LEADERBOARD.md
    Speed("TPU V6E", 8, 730e6, 0.237, "nanochat-jax"),
)
ASSUMED_MFU = 0.4  # where nothing was published, and on a CPU


def mfu_of(device: str, count: int, parameters: int) -> tuple[float, str]:
    """The MFU to expect of `count` devices called `device`, and where it is from: the published run on that device
    whose model, then whose number of devices, is nearest; or an assumption."""
    name = known_name(device)
    runs = [run for run in PUBLISHED if run.device == name]
    if not runs:
        return ASSUMED_MFU, f"an assumed {100 * ASSUMED_MFU:.0f} % MFU"

    def distance(run: Speed) -> tuple[float, float]:
        return abs(math.log(run.parameters / parameters)), abs(math.log(run.count / count))

    run = min(runs, key=distance)
    of = f"{si(run.parameters, 'B')} parameters on {run.count} x {run.device}"
    return run.mfu, f"{100 * run.mfu:.1f} % MFU, published by {run.run} for {of}"


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
