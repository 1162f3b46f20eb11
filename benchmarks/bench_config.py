"""What is measured, and for how long: a recipe's model on this machine's device."""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.variants import Variant
from recipe.config import Batch, parse_config
from recipe.engine import device as hardware
from recipe.estimate.cost import cpu_flops
from recipe.estimate.memory import flops_per_token, memory_estimate, parameter_count
from recipe.utils.units import si

FLOPS_FORMULA = "6 N + 12 L D T a token (PaLM, appendix B), N without position embeddings, the true vocabulary"


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


class BenchConfig:
    """What is measured: a recipe's model on this machine's device.

    Attributes:
        config: the recipe's configuration.
        device: the accelerator, or the CPU without one.
        precision: the device's best, unless another is asked for.
        T: sequence_length.
        micro: sequences at once.
        timing: how long.
        out: directory of the results.
    """

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.out = Path(arguments.out)
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        self.precision = arguments.precision or hardware.resolve_precision("auto", cpu=self.on_cpu)
        rounds, seconds = (1, 0.3) if arguments.quick else (arguments.rounds, arguments.seconds)
        self.timing = Timing(rounds, seconds, time.monotonic() + 60 * arguments.minutes)
        flags = [f"--config={arguments.config or ('shakespeare' if self.on_cpu else 'gpt2')}"]
        if length := arguments.sequence_length:
            flags += [f"--sequence_length={length}", f"--total_batch_tokens={length * 1024}"]
        self.config = parse_config([*flags, f"--precision={self.precision}"])
        self.T = self.config.data.sequence_length
        self.micro = arguments.micro_batch_size or self._fitting()

    def _fitting(self) -> int:
        """The largest power of two, up to 64, that is estimated to fit beside another worker's weights; uncompiled,
        since all rows take the same."""
        memory = hardware.memory(self.device)
        if memory is None:
            return 2 if self.arguments.quick else min(8, self.config.optimizer.micro_batch_size or 8)

        def estimated(micro: int) -> int:
            return memory_estimate(self.config, Batch(micro, 1, micro, 1), precision=self.precision)

        return next((micro for micro in (64, 32, 16, 8, 4, 2) if estimated(micro) < 0.85 * memory), 1)

    def ours(self) -> Variant:
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
            loss_chunk_size=run.loss_chunk_size,
            fused_loss=run.fused_loss,
            gradient_checkpointing=bool(run.gradient_checkpointing),  # auto as well
        )

    def introduce(self, what: str) -> dict:
        """Prints what is measured on what; returns what a result needs beside its figures."""
        m = self.config.model
        source = "one thread's best product times their number" if self.on_cpu else "data sheet, dense bf16 or fp16"
        about = report.circumstances() | {
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
            "flops_formula": FLOPS_FORMULA,
            "peak_flops": cpu_flops(self.precision) if self.on_cpu else hardware.peak_of(self.device),
            "peak_source": source,
        }
        peak = f"{about['peak_flops'] / 1e12:.3g} TFLOP/s ({source})" if about["peak_flops"] else "unknown"
        say(f"{what:<10} GPT-2 {si(about['model']['parameters'])} on {about['device']}, torch {about['torch']}")
        say(f"MFU        {FLOPS_FORMULA}; peak {peak}")
        return about


def say(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(line, flush=True)
