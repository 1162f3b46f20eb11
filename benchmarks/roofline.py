"""The floor of a training step: what its matrix products, its attention and its memory traffic cost alone, in sum.

    python -m benchmarks.roofline --micro_batch 64 --actual 1.9

A step cannot be faster than its parts one after the other on the same device, unless they overlap or are fused
further than is counted here; how near it comes is what is left to be won, which the distance to the data sheet's peak
does not tell.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from recipe.config import ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine import device as hardware
from recipe.errors import UserError
from recipe.estimate.memory import parameter_count
from recipe.model.attention import block_attention
from recipe.model.gpt2 import causal_attention

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Gemm:
    """The matrix product (m, k) x (k, n), `count` times a micro-step: what `name` does in `part` of it. `transposed`
    says which operands lie in memory the other way round, as they do in the model."""

    name: str
    part: str
    m: int
    k: int
    n: int
    count: int
    transposed: tuple[bool, bool]

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


def gemms(model: ModelConfig, tokens: int, pad_vocab_to: int = 1) -> list[Gemm]:
    """All matrix products of a micro-step of so many tokens, but attention's: 6 FLOPs a weight and token."""
    D, L = model.n_embd, model.n_layer
    found = []
    for name, k, n in (("qkv", D, 3 * D), ("attention out", D, D), ("mlp up", D, 4 * D), ("mlp down", 4 * D, D)):
        found += [  # weights are (in, out)
            Gemm(name, "forward", tokens, k, n, L, (False, False)),
            Gemm(name, "dx", tokens, n, k, L, (False, True)),
            Gemm(name, "dW", k, tokens, n, L, (True, False)),
        ]
    V = VOCAB_SIZE + -VOCAB_SIZE % pad_vocab_to
    return [  # the head's weight is (V, D)
        *found,
        Gemm("head", "forward", tokens, D, V, 1, (False, True)),
        Gemm("head", "dx", tokens, V, D, 1, (False, False)),
        Gemm("head", "dW", V, tokens, D, 1, (True, False)),
    ]


def traffic(model: ModelConfig, tokens: int, accumulation: int, half: bool) -> dict[str, float]:
    """Bytes a token that a step has to move outside its matrix products and attention, by what moves them.

    Counted is what each pass over memory reads and writes if neighbouring elementwise operations are one pass, as
    torch.compile makes them, what a product writes is read again, no dropout is drawn and nothing is recomputed. In
    units of D activations a token and block:

    - forward 16: residual sum and layer norm in one (read 2, write 2), twice; gelu (read 4, write 4);
    - backward 26: gelu (read 8, write 4); layer norm with the residual's gradient added (read 3, write 1), twice; the
      gradients of q, k and v put together (read 3, write 3). Bias gradients are summed in these passes.
    - once: the first norm (2), the last norm's backward (3), both outside the blocks' count.

    The logits are read for the softmax's sums, and read and written for its gradient. An embedding's row is fp32: read
    and written into the stream; its gradient read from there, and added (read and write) to the table's. A micro-step
    casts the matrices (half precision), and turns their gradients to fp32 or adds them to the earlier micro-steps'. A
    step reads the gradients once for their norm, and weights, gradients and two moments for AdamW, which writes three.
    """
    D, L, N = model.n_embd, model.n_layer, parameter_count(model)
    width = 2 if half else 4
    matrices = N - model.n_positions * D - L * 13 * D - 2 * D
    once, later = (width + 4, width + 8) if half else (0, 12)  # a gradient's bytes: first micro-step, each other
    casts = matrices * (4 + width if half else 0)
    gradients = matrices * (once + (accumulation - 1) * later)
    optimizer = N * (4 + 16 + 12)
    return {
        "norms and residuals": width * D * (L * (8 + 8 + 6) + 5),
        "gelu": width * D * L * (8 + 12),
        "logits": 3 * width * VOCAB_SIZE,
        "embedding": D * (4 + width + width + 8),
        "casts and gradients": casts / tokens + gradients / (tokens * accumulation),
        "optimizer": optimizer / (tokens * accumulation),
    }


def measure_floor(
    model: ModelConfig,
    micro_batch: int,
    sequence_length: int,
    device: torch.device,
    precision: str,
    *,
    accumulation: int = 1,
    pad_vocab_to: int | None = None,
    actual: float | None = None,
    seconds: float = 0.3,
    copy_bytes: int = 2**28,
) -> dict:
    """Times the parts of a step of `accumulation` micro-steps of (micro_batch, sequence_length) tokens, each alone.

    Args:
        precision: of the products: fp32, tf32, bf16 or fp16. UserError for another.
        pad_vocab_to: as in `recipe.model.loss.next_token_loss`; None for the engine's choice on this device.
        actual: measured microseconds a token, to be compared.
        seconds: that each timing may take; at least three samples are taken.
        copy_bytes: size of the copy that measures the bandwidth; it must be larger than the caches.
    Returns:
        a dict for JSON: `parts` in microseconds a token and their sum `floor`, `floor_of_actual` (None without
        `actual`), every product (`gemms`: shape, count, seconds, FLOP/s), `gemm_flops_per_token`, `traffic` in bytes a
        token, `copy_bandwidth` in bytes/s (read and written), `matmul_peak` in FLOP/s, of the
        fastest product, these or square ones.
    """
    dtype = _dtype(precision)
    if pad_vocab_to is None:
        pad_vocab_to = hardware.pad_vocab_to(device)
    tokens = micro_batch * sequence_length
    products = gemms(model, tokens, pad_vocab_to)
    with _matmul_precision(precision):
        bandwidth = copy_bandwidth(device, copy_bytes, seconds)
        timed = [dataclasses.asdict(g) | {"seconds": _time_gemm(g, device, dtype, seconds)} for g in products]
        attention = model.n_layer * _time_attention(model, micro_batch, sequence_length, device, dtype, seconds)
    peak = measured_matmul_peak(device, precision, seconds)
    moved = traffic(model, tokens, accumulation, half=dtype.itemsize == 2)
    parts = {"block products": 0.0, "head products": 0.0, "attention": 1e6 * attention / tokens}
    for g, line in zip(products, timed, strict=True):
        line["flops_per_second"] = g.flops / line["seconds"]
        part = "head products" if g.name == "head" else "block products"
        parts[part] += 1e6 * g.count * line["seconds"] / tokens
    peak = max(peak, *(line["flops_per_second"] for line in timed))
    parts |= {name: 1e6 * size / bandwidth for name, size in moved.items()}
    floor = sum(parts.values())
    return {
        "device": str(device),
        "precision": precision,
        "model": dataclasses.asdict(model),
        "micro_batch": micro_batch,
        "sequence_length": sequence_length,
        "accumulation": accumulation,
        "pad_vocab_to": pad_vocab_to,
        "parts": parts,
        "floor": floor,
        "actual": actual,
        "floor_of_actual": floor / actual if actual else None,
        "gemms": timed,
        "gemm_flops_per_token": sum(g.count * g.flops for g in products) / tokens,
        "traffic": moved,
        "copy_bandwidth": bandwidth,
        "matmul_peak": peak,
    }


def measured_matmul_peak(device: torch.device, precision: str, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest of several square matrix products in `precision`: what this device can be made to do, for
    an MFU where no data sheet says. UserError for a precision that is not known."""
    dtype, best = _dtype(precision), 0.0
    with _matmul_precision(precision):
        for size in (512, 1024, 2048) if device.type == "cpu" else (2048, 4096, 8192, 16384):
            a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            best = max(best, 2 * size**3 / hardware.median_seconds(_product(a, b), device, seconds))
    return best


def copy_bandwidth(device: torch.device, size: int = 2**28, seconds: float = 0.3) -> float:
    """Bytes/s, read and written, of a copy of `size` bytes on the device."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / hardware.median_seconds(lambda: target.copy_(source), device, seconds)


def _dtype(precision: str) -> torch.dtype:
    if precision not in DTYPES:
        raise UserError(f"precision {precision!r} cannot be timed; choose from {', '.join(DTYPES)}")
    return DTYPES[precision]


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """As the engine sets it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _time_gemm(gemm: Gemm, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """On random numbers: a GPU draws less power, and keeps a higher clock, on zeros."""
    shapes = ((gemm.m, gemm.k), (gemm.k, gemm.n))
    a, b = (
        torch.randn(shape[::-1] if transposed else shape, device=device, dtype=dtype).t()
        if transposed
        else torch.randn(shape, device=device, dtype=dtype)
        for shape, transposed in zip(shapes, gemm.transposed, strict=True)
    )
    return hardware.median_seconds(_product(a, b), device, seconds)


def _product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    out = torch.empty(a.shape[0], b.shape[1], device=a.device, dtype=a.dtype)  # fresh pages would be timed on a CPU
    return lambda: torch.mm(a, b, out=out)


def _time_attention(
    model: ModelConfig, B: int, T: int, device: torch.device, dtype: torch.dtype, seconds: float
) -> float:
    """Seconds of a block's attention, forward and backward, on q, k and v that lie in memory as the model's do."""
    D, H = model.n_embd, model.n_head
    attend = block_attention if device.type == "cpu" and dtype == torch.bfloat16 else causal_attention  # the engine's
    joint = torch.randn(B, T, 3 * D, device=device, dtype=dtype)
    q, k, v = (t.view(B, T, H, D // H).transpose(1, 2).detach().requires_grad_() for t in joint.split(D, dim=2))
    grad = torch.randn(B, T, H, D // H, device=device, dtype=dtype).transpose(1, 2)

    def both() -> None:
        torch.autograd.grad(attend(q, k, v, 0.0), (q, k, v), grad)

    return hardware.median_seconds(both, device, seconds)


def lines(figures: dict, actual: float | None = None) -> list[str]:
    """The figures of `measure_floor` for the terminal, beside `actual` microseconds a token if given."""
    B, T = figures["micro_batch"], figures["sequence_length"]
    floor = figures["floor"]
    out = [
        f"floor      {figures['device']}, {figures['precision']}, {B} x {T} tokens, accumulation "
        f"{figures['accumulation']}; microseconds a token"
    ]
    out += [f"  {name:20} {value:10.4f}  {100 * value / floor:5.1f} %" for name, value in figures["parts"].items()]
    out.append(f"  {'floor':20} {floor:10.4f}  {1e6 / floor:,.0f} tokens/s")
    if actual := actual or figures["actual"]:
        out.append(f"  {'actual':20} {actual:10.4f}  floor/actual {100 * floor / actual:.1f} %")
    peak = figures["matmul_peak"]
    out.append(
        f"measured   {peak / 1e12:.4g} TFLOP/s (fastest product), copies {figures['copy_bandwidth'] / 1e9:.4g} "
        "GB/s (read and written)"
    )
    out.append("products   share of that peak, forward, dx, dW")
    rows: dict[str, list[float]] = {}
    for line in figures["gemms"]:
        rows.setdefault(line["name"], []).append(line["flops_per_second"] / peak)
    out += [f"  {name:20} " + "".join(f"{100 * share:7.1f} %" for share in shares) for name, shares in rows.items()]
    return out


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="The floor of a training step on this device.", allow_abbrev=False)
    for field in ("n_layer", "n_head", "n_embd"):
        parser.add_argument(f"--{field}", type=int, default=getattr(ModelConfig(), field))
    parser.add_argument("--micro_batch", type=int, default=8, help="sequences")
    parser.add_argument("--sequence_length", type=int, default=1024, help="tokens")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-steps a step")
    parser.add_argument("--precision", default="auto", help="auto, fp32, tf32, bf16 or fp16")
    parser.add_argument("--actual", type=float, default=None, help="measured microseconds a token, to be compared")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each timing")
    parser.add_argument("--cpu", action="store_true", help="the processor, where there is a GPU too")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    arguments = parser.parse_args(argv)
    device = torch.accelerator.current_accelerator()
    if arguments.cpu or device is None:
        device = torch.device("cpu")
        hardware.tune_cpu(local_world=1)
    T = arguments.sequence_length
    sizes = {name: getattr(arguments, name) for name in ("n_layer", "n_head", "n_embd")}
    try:
        precision = hardware.resolve_precision(arguments.precision, cpu=device.type == "cpu")
        figures = measure_floor(
            ModelConfig(**sizes, n_positions=max(T, 1024)),
            arguments.micro_batch,
            T,
            device,
            precision,
            accumulation=arguments.accumulation,
            actual=arguments.actual,
            seconds=arguments.seconds,
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(figures)))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
