"""What is measured, and for how long: a recipe's model on this machine's device."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.variants import Variant
from recipe.config import BatchPlan, parse_config
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
    ends: float

    @property
    def up(self) -> bool:
        """Whether nothing else should begin."""
        return time.monotonic() > self.ends


class BenchConfig:
    """What is measured: `ours`, recipe/train.py with the recipe of the `arguments` on this machine's `device`, with the
    device's best precision and as many sequences at once as fit, unless others are asked for."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.out = arguments, Path(arguments.out)
        self.device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        self.on_cpu = self.device.type == "cpu"
        precision = arguments.precision or hardware.resolve_precision("auto", cpu=self.on_cpu)
        rounds, seconds = (1, 0.3) if arguments.quick else (arguments.rounds, arguments.seconds)
        self.timing = Timing(rounds, seconds, time.monotonic() + 60 * arguments.minutes)
        flags = [f"--config={arguments.config or ('shakespeare' if self.on_cpu else 'gpt2')}"]
        if length := arguments.sequence_length:
            flags += [f"--sequence_length={length}", f"--total_batch_tokens={length * 1024}"]
        self.config = parse_config([*flags, f"--precision={precision}"])
        run, micro = self.config.run, arguments.micro_batch_size or self._fitting(precision)
        self.ours = Variant(
            "recipe/train.py",
            "recipe",
            self.config.model,
            self.config.data.sequence_length,
            sequences=micro,
            micro_batch=micro,
            precision=precision,
            compile=run.torch_compile_mode if run.torch_compile else "",
            loss_chunk_size=run.loss_chunk_size,
            fused_loss=run.fused_loss,
            gradient_checkpointing=bool(run.gradient_checkpointing),  # auto as well
        )

    def _fitting(self, precision: str) -> int:
        """The largest power of two, up to 64, that is estimated to fit beside another worker's weights; uncompiled,
        since all rows take the same."""
        memory = hardware.memory(self.device)
        if memory is None:
            return 2 if self.arguments.quick else min(8, self.config.optimizer.micro_batch_size or 8)

        def estimated(micro: int) -> int:
            return memory_estimate(self.config, BatchPlan(micro, 1, micro, 1), precision=precision)

        return next((micro for micro in (64, 32, 16, 8, 4, 2) if estimated(micro) < 0.85 * memory), 1)

    def introduce(self, what: str) -> dict:
        """Prints what is measured on what; returns what a result needs beside its figures."""
        m, ours = self.config.model, self.ours
        source = "one thread's best product times their number" if self.on_cpu else "data sheet, dense bf16 or fp16"
        sizes = {"n_layer": m.n_layer, "n_head": m.n_head, "n_embd": m.n_embd, "parameters": parameter_count(m)}
        about = report.circumstances() | {
            "model": {"recipe": Path(self.config.run.config).stem} | sizes,
            "sequence_length": ours.sequence_length,
            "micro_batch_size": ours.micro_batch,
            "precision": ours.precision,
            "flops_per_token": flops_per_token(m, ours.sequence_length),
            "flops_formula": FLOPS_FORMULA,
            "peak_flops": cpu_flops(ours.precision) if self.on_cpu else hardware.peak_of(self.device),
            "peak_source": source,
        }
        peak = f"{about['peak_flops'] / 1e12:.3g} TFLOP/s ({source})" if about["peak_flops"] else "unknown"
        say(f"{what:<10} GPT-2 {si(sizes['parameters'])} on {about['device']}, torch {about['torch']}")
        say(f"MFU        {FLOPS_FORMULA}; peak {peak}")
        return about


def say(line: str) -> None:
    """Prints a line at once, also into a pipe."""
    print(line, flush=True)
