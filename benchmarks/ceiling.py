"""Command: measures what bounds a step on this device: matrix products, copies and attention at the run's shapes,
and SDPA's choice of kernel. Writes ceiling.json.

    python -m benchmarks ceiling --config gpt2 --micro_batch_size 32
"""

from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import report
from benchmarks.runs import device
from recipe.config import parse_config
from recipe.engine import hardware
from recipe.utils.errors import ArgumentParser

FLASH, CUDNN, EFFICIENT = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
KERNELS = {"chosen": [FLASH, CUDNN, EFFICIENT, SDPBackend.MATH], "flash": FLASH, "cudnn": CUDNN, "efficient": EFFICIENT}


def products(rows: int, width: int, vocab_size: int, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of each matrix product in a forward pass, by shape."""
    shapes = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width), (width, vocab_size)]
    speeds = {}
    for inner, outer in shapes:
        x, w = (torch.randn(n, inner, device=device(), dtype=dtype) for n in (rows, outer))
        speeds[f"{rows} x {inner} x {outer}"] = 2 * rows * inner * outer / hardware.seconds_of(partial(F.linear, x, w))
    return speeds


def attention(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, float | str]:
    """Milliseconds of a layer's attention, forward and backward, with each SDPA kernel, or the kernel's error."""
    q, k, v = (torch.randn(shape, device=device(), dtype=dtype, requires_grad=True) for _ in "qkv")
    gradient = torch.randn(shape, device=device(), dtype=dtype)

    def work() -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.autograd.grad(y, (q, k, v), gradient)[0]

    times: dict[str, float | str] = {}
    for name, backend in KERNELS.items():
        try:
            with sdpa_kernel(backend):
                times[name] = 1e3 * hardware.seconds_of(work)
        except RuntimeError as error:
            times[name] = str(error).partition("\n")[0]
    with torch.profiler.profile(acc_events=True) as profiler, suppress(RuntimeError):
        work()
    names = {event.key for event in profiler.key_averages() if event.key.startswith("aten::_scaled_dot")}
    return times | {"chosen is": ", ".join(sorted(names))}


def main(argv: list[str]) -> int:
    """Runs the measurements; returns the exit code."""
    parser = ArgumentParser(prog="python -m benchmarks ceiling", allow_abbrev=False)
    parser.add_argument("--config", default="gpt2", help="recipe whose shapes are measured")
    parser.add_argument("--micro_batch_size", type=int, default=32 if device().type != "cpu" else 1)
    parser.add_argument("--out", default="bench", help="directory of the results")
    arguments = parser.parse_args(argv)
    config, on_cpu = parse_config([f"--config={arguments.config}"]), device().type == "cpu"
    m, length, B = config.model, config.data.sequence_length, arguments.micro_batch_size
    precision = hardware.resolve_precision("auto", cpu=on_cpu)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    buffer = torch.empty(2**26 if on_cpu else 2**29, dtype=torch.uint8, device=device())
    vocab_size = -(-m.vocab_size // 128) * 128
    results = report.circumstances() | {
        "flops": products(B * length, m.n_embd, vocab_size, dtype),
        "copied_bytes_per_second": 2 * buffer.nbytes / hardware.seconds_of(buffer.clone),
        "attention_ms": attention((B, m.n_head, length, m.n_embd // m.n_head), dtype),
    }
    report.write(results, Path(arguments.out) / "ceiling.json")
    for name, value in results.items():
        print(f"{name:<26} {value}")
    return 0
