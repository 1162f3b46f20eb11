"""The expected speed of training on a device: from published runs or, on a CPU, from the time of a small model."""

import math
import time
from dataclasses import replace
from functools import lru_cache

import torch
from transformers import GPT2Config

from eval.published import SIZES, SPEEDS
from recipe.config import SHAPE_FIELDS, ModelConfig
from recipe.engine.device import Device
from recipe.engine.hardware import DEVICES, known_name
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.units import si

ASSUMED_MFU = 0.4  # where nothing was published or measured
# Our measurement where nothing was published: gpt2, 64 sequences a step (docs/results/h200.json).
MEASURED_MFU = {"H200": 0.49}
PROBE_TOKENS, PROBE_WIDTH = 256, 384  # of the passes timed on a CPU, to take a second; wider ones are faster
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
    speed = cpu_flops(device.precision, model) * processes
    return speed, speed, f"at the {si(speed)}FLOP/s that one layer and the embeddings reach here now"


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
    """A note for a speed that was measured on fewer devices than `count`; else empty."""
    return f"; on {count} communication takes more of the time" if measured < count else ""


def cpu_flops(precision: str, model: ModelConfig) -> float:
    """FLOP/s of this process's threads in the forward and backward pass of one layer of `model`, or of a narrower one
    if it is wide, with its embeddings: the fastest of some passes in half a second."""
    narrow = model if model.n_embd <= PROBE_WIDTH else replace(model, n_embd=PROBE_WIDTH, n_head=PROBE_WIDTH // 64)
    return _pass_flops(precision, replace(narrow, n_layer=1, n_positions=min(PROBE_TOKENS, model.n_positions)))


@lru_cache
def _pass_flops(precision: str, model: ModelConfig) -> float:
    shape = {name: getattr(model, name) for name in SHAPE_FIELDS}
    gpt2 = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=None, eos_token_id=None)).eval()  # without dropout
    tokens = torch.zeros(PROBE_TOKENS // model.n_positions, model.n_positions, dtype=torch.int64)
    seconds, start = list[float](), time.perf_counter()
    while len(seconds) < 2 or time.perf_counter() - start < 0.5:
        pass_start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = gpt2(tokens, tokens)
        loss.backward()
        seconds.append(time.perf_counter() - pass_start)
    return flops_per_token(model, model.n_positions) * tokens.numel() / min(seconds)
