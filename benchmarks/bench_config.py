"""What is measured, and for how long: a recipe's model on this machine's device."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.variants import Variant
from recipe.config import Config, batch_arithmetic, parse_config
from recipe.engine import device as hardware
from recipe.estimate.memory import flops_per_token, memory_estimate, parameter_count
from recipe.units import si

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Timing:
    """`rounds` of turns of `seconds` each; `ends` is when the measurement should be over, by time.monotonic()."""

    rounds: int
    seconds: float
    ends: float = math.inf

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self.ends - time.monotonic()

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Context of a part that should take no longer than this."""
        whole, self.ends = self.ends, min(self.ends, time.monotonic() + seconds)
        try:
            yield
        finally:
            self.ends = whole


class BenchConfig:
    """What is measured: a recipe's model on this machine's device.

    Attributes:
        recipe: its name or path.
        config: the recipe's configuration, or another one that `set_recipe` has put in its place.
        T: sequence_length.
        micro: sequences at once, as large as they are to get.
        precision, peak: the device's best precision, and its peak in FLOP/s (of a CPU: measured).
    """

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.out = Path(arguments.out)
        self.on_cpu = not torch.accelerator.is_available()
        self.gpus = 0 if self.on_cpu else torch.accelerator.device_count()
        self.precision = arguments.precision or hardware.resolve_precision("auto", cpu=self.on_cpu)
        rounds, seconds = (1, 0.3) if arguments.quick else (arguments.rounds, arguments.seconds)
        self.timing = Timing(rounds, seconds, time.monotonic() + 60 * arguments.minutes)
        self.recipe = arguments.config or ("shakespeare" if self.on_cpu else "gpt2")
        self.set_recipe(self.recipe)
        self._peak: float | None = None

    def set_recipe(self, name: str) -> None:
        flags = ["--config", name, "--precision", self.precision]
        if length := self.arguments.sequence_length:
            flags.append(f"--sequence_length={length}")
            flags.append(f"--total_batch_tokens={length * 1024}")
        self.config = parse_config(flags)
        self.T = self.config.data.sequence_length
        self.micro = self.arguments.micro_batch_size or self.fitting()

    def fitting(self, compiled: bool = False) -> int:
        """The largest power of two, up to 64, that is estimated to fit beside another worker's weights; uncompiled,
        since all rows take the same."""
        memory = hardware.total_memory()
        if memory is None:
            return 2 if self.arguments.quick else min(8, self.config.optimizer.micro_batch_size or 8)
        sizes = [2**k for k in range(6, 0, -1)]
        return next((b for b in sizes if self.estimated(b, compiled) < 0.85 * memory), 1)

    def estimated(self, micro: int, compiled: bool) -> int:
        config = self.but(micro_batch_size=micro, total_batch_tokens=micro * self.config.data.sequence_length)
        return memory_estimate(config, batch_arithmetic(config, 1), precision=self.precision, compiled=compiled)

    def but(self, **fields) -> Config:
        """The recipe with other values of some fields."""
        now = self.config.flat() | {"micro_batch_size": self.config.optimizer.micro_batch_size or "auto"}
        return parse_config([f"--{k}={v}" for k, v in (now | fields).items() if v != ""])

    @property
    def peak(self) -> float | None:
        """Peak of a device in FLOP/s: from its data sheet; of a CPU, the largest of its products here."""
        if not self.on_cpu:
            return hardware.peak_of(torch.accelerator.current_accelerator())
        if self._peak is None:
            self._peak = measured_matmul_peak(self.precision)
        return self._peak

    def ours(self, **changes) -> Variant:
        """recipe/train.py with this recipe."""
        run = self.config.run
        return Variant(
            "recipe/train.py",
            "recipe",
            self.config.model,
            self.T,
            self.micro,
            precision=self.precision,
            compile=run.torch_compile_mode if run.torch_compile else "",
            gradient_checkpointing=run.gradient_checkpointing,
            loss_chunk_size=run.loss_chunk_size,
        ).but(**changes)

    def about(self) -> dict:
        """What a result needs beside its figures."""
        m = self.config.model
        peak = self.peak
        return report.circumstances() | {
            "model": {
                "recipe": Path(self.config.run.config).stem,
                "n_layer": m.n_layer,
                "n_head": m.n_head,
                "n_embd": m.n_embd,
                "parameters": parameter_count(m),
            },
            "sequence_length": self.T,
            "micro_batch_size": self.micro,
            "precision": self.precision,
            "flops_per_token": flops_per_token(m, self.T),
            "flops_formula": report.FLOPS_FORMULA,
            "peak_flops": peak,
            "peak_source": None
            if peak is None
            else "the largest product measured here"
            if self.on_cpu
            else "data sheet, dense bf16 or fp16",
            "conditions": hardware.conditions(),
        }

    def introduce(self, what: str) -> dict:
        """Prints what is measured on what; returns `about`."""
        about = self.about()
        peak = about["peak_flops"]
        peak = f"{peak / 1e12:.3g} TFLOP/s ({about['peak_source']})" if peak else "unknown"
        say(f"{what:<10} GPT-2 {si(about['model']['parameters'])} on {about['device']}, torch {about['torch']}")
        say(f"MFU        {about['flops_formula']}; peak {peak}")
        return about


def measured_matmul_peak(precision: str, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest of several square matrix products on this CPU, for an MFU where no data sheet helps."""
    device, best = torch.device("cpu"), 0.0
    for size in (512, 1024, 2048):
        a, b, out = (torch.randn(size, size).to(DTYPES[precision]) for _ in range(3))
        took = hardware.median_seconds(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, seconds)
        best = max(best, 2 * size**3 / took)
    return best


def say(line: str) -> None:
    print(line, flush=True)
