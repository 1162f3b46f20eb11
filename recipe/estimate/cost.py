"""How long a run takes and what it costs. As a command: a table for the sizes of GPT-2.

python -m recipe.estimate.cost --price_per_hour 1.75
"""

import argparse
import math
import re
import time

import torch

from recipe.config import parse_config
from recipe.engine.device import PEAK_FLOPS
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.units import plural, si

# An assumption until something is measured. By flops_per_token llm.c trains the 124M model at 60 % on 8 A100s (300 ms a
# step: karpathy/llm.c, discussion 481) and at 40 % on 8 H100s (the log of eval/references/gpt2-fineweb.json).
MFU = 0.5

RECIPES = ("gpt2", "gpt2-fast", "gpt2-medium", "gpt2-large", "gpt2-xl")
DEVICES = ((8, "A100"), (8, "H100"), (1, "H100"), (1, "RTX 4090"))  # how many, and a name of PEAK_FLOPS


def training_seconds(flops: float, peak_flops: float, mfu: float = MFU) -> float:
    """Seconds for `flops` in all, on devices whose peaks add up to `peak_flops`, at the MFU `mfu`. Validation, saving
    and communication come on top."""
    return flops / (mfu * peak_flops)


def price(seconds: float, devices: int, per_hour: float) -> float:
    """Dollars: each of the devices costs `per_hour`."""
    return seconds / 3600 * devices * per_hour


def named_devices(text: str) -> tuple[int, str]:
    """ "8xh100", "8 x H100" or "h100" -> how many, and the name in PEAK_FLOPS. Raises UserError for an unknown name."""
    count, name = re.fullmatch(r"\s*(?:([1-9]\d*)\s*x\s*)?(.*?)\s*", text, re.IGNORECASE).groups()
    if name.upper() not in PEAK_FLOPS:
        raise UserError(f"plan_device {text!r}: no such GPU is known; there are {', '.join(PEAK_FLOPS)}")
    return int(count or 1), name.upper()


def cpu_flops(precision: str, size: int = 256) -> float:
    """FLOP/s of this process's threads on the CPU: the best matrix product of one thread in a tenth of a second, times
    their number. (Of several threads the slowest counts, which on a busy machine says nothing.)"""
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


def table(mfu: float = MFU, price_per_hour: float = 0.0) -> list[str]:
    """Lines for the terminal: each recipe on each device, at `mfu` of its peak and dollars an hour of one device."""
    dollars = f", ${price_per_hour:g} an hour of a device" if price_per_hour else "; --price_per_hour 2 adds dollars"
    lines = [f"cost       an estimate, not measured: {mfu:.0%} MFU of the dense bf16 peak{dollars}"]
    for recipe in RECIPES:
        config = parse_config([f"--config={recipe}"])
        tokens = config.optimizer.max_steps * config.optimizer.total_batch_tokens
        flops = tokens * flops_per_token(config.model, config.data.sequence_length)
        size = si(parameter_count(config.model), "B")
        lines.append(f"{recipe}, {size} parameters, {si(tokens, 'B')} tokens, {flops:.2g} FLOP")
        for count, name in DEVICES:
            time_ = training_seconds(flops, count * PEAK_FLOPS[name], mfu) / 3600
            line = f"  {f'{count} x {name}':14} " + (f"{time_:8.1f} h   " if time_ < 48 else f"{time_ / 24:8.1f} days")
            line += f"  {plural(round(count * time_), 'device-hour'):>20}"
            lines.append(line + (f"  ${price(3600 * time_, count, price_per_hour):,.0f}" if price_per_hour else ""))
    return lines


def main(argv: list[str] | None = None) -> int:
    """Prints time and cost of GPT-2's sizes on several devices; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time and cost of training GPT-2's sizes.", allow_abbrev=False)
    parser.add_argument("--mfu", type=float, default=MFU, help=f"share of a device's peak (default {MFU:g})")
    parser.add_argument("--price_per_hour", type=float, default=0.0, help="dollars an hour of one device")
    args = parser.parse_args(argv)
    if not (0 < args.mfu <= 1 and args.price_per_hour >= 0):
        parser.error("--mfu is a share above 0 and at most 1, --price_per_hour not negative")
    print("\n".join(table(args.mfu, args.price_per_hour)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
