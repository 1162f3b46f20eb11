"""The scoreboard: one row an optimisation, each on top of those before it that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from recipe import device as hardware
from recipe.config import ModelConfig, UserError
from recipe.speed.rounds import Void, Worker, compare
from recipe.speed.variants import Variant


@dataclass(frozen=True)
class Row:
    """An optimisation: the `variant` that has it, or why this device cannot do it.

    `kept`: later rows build on it. What is not kept costs speed here and is there for memory, or for another device.
    """

    name: str
    variant: Variant | None = None
    kept: bool = True
    cannot: str = ""


def ladder(
    model: ModelConfig, sequence_length: int, small: int, large: int, *, gpus: int, on_cpu: bool, compile_mode: str
) -> Iterator[Row]:
    """The rows. Every one takes the same steps, of `large` sequences a GPU: in micro-batches of `small` until the row
    that raises them to `large`."""
    sequences = large * max(1, gpus)
    now = Variant(
        "fp32, nothing else", "loop", model, sequence_length, small, sequences // small, tuned=not on_cpu, fused=False,
        attention="plain",
    )  # fmt: skip
    yield Row(now.name, now)

    def row(name: str, kept: bool = True, **changes) -> Row:
        nonlocal now
        variant = now.but(name=name, **changes)
        now = variant if kept else now
        return Row(name, variant, kept)

    if on_cpu:
        yield row("allocator", tuned=True)
    else:
        yield Row("allocator", cannot="for CPUs; a GPU's memory has an allocator of its own")
    try:
        hardware.resolve_precision("tf32", cpu=on_cpu)
        yield row("tf32", precision="tf32")
    except UserError:
        yield Row("tf32", cannot="needs an NVIDIA GPU from Ampere on")
    half = hardware.resolve_precision("auto", cpu=on_cpu)
    if half in ("bf16", "fp16"):
        yield row(half, precision=half)
    else:
        yield Row("bf16", cannot="this device does not multiply bf16 natively")
    yield row("SDPA", attention="sdpa")
    if on_cpu and half == "bf16":
        yield row("attention in blocks", attention="blocks")
    else:
        yield Row("attention in blocks", cannot="for CPUs with bf16")
    if on_cpu:
        yield row("loss by rows", loss_by_rows=True)
    else:
        yield Row("loss by rows", cannot="for CPUs, whose caches hold some rows of logits")
    yield row("vocabulary padded to 128", kept=not on_cpu, pad_vocab_to=128)
    yield row("loss in chunks", kept=False, loss_chunk_size=max(128, small * sequence_length // 8))
    yield row("compile", compile=compile_mode)
    yield row("fused AdamW", fused=True)
    if large > small:
        yield row(f"micro-batch {large}", micro_batch=large, accumulation=sequences // large)
    else:
        yield Row("larger micro-batch", cannot=f"{small} sequences are the whole step here")
    yield row("recomputation", kept=False, recompute=True)
    yield row("recipe/train.py", kind="recipe")
    if gpus > 1:
        yield row(f"DDP over {gpus} GPUs", world=gpus, accumulation=1)
    else:
        yield Row("DDP", cannot="one device here")


def scoreboard(
    rows: Iterator[Row], directory: Path, *, flops: int, peak: float | None, rounds: int, seconds: float,
    left: Callable[[], float], say: Callable[[str], None], quick: bool = False,
) -> list[dict]:  # fmt: skip
    """Measures the rows, each against the last one kept, in turns; `say` hears of each as it is begun. None is begun
    when fewer seconds are `left` than the longest so far took, nor, with `quick`, one that is not kept.

    Returns a dict a row: tokens_per_second, speedup [ratio, low, high] over the last row kept, total (over the first
    row, the ratios multiplied), mfu (`flops` a token, `peak` FLOP/s a device), peak_memory_bytes; null where `note`
    says why.
    """
    results, base, total, longest = [], None, 1.0, 0.0
    try:
        for row in rows:
            result = dict.fromkeys(("tokens_per_second", "speedup", "total", "mfu", "peak_memory_bytes"))
            result = {"name": row.name, "kept": row.kept, "note": row.cannot} | result
            if row.variant and quick and not row.kept:
                result["note"] = "left out by --quick"
            elif row.variant and left() < longest:
                result |= {"note": "left out: the time is up", "kept": False}
            elif row.variant:
                say(f"...        {row.name}")
                since = time.monotonic()
                worker = Worker(row.variant, directory)
                try:
                    result |= _measure(worker, base, total, flops, peak, rounds, seconds)
                except Void as void:
                    result["note"], result["kept"] = str(void), False
                if result["kept"]:
                    base, worker = worker, base
                    total = result["total"]
                if worker:
                    worker.close()
                longest = max(longest, time.monotonic() - since)
            results.append(result)
    finally:
        if base:
            base.close()
    return results


def _measure(worker: Worker, base: Worker | None, total: float, flops: int, peak: float | None, rounds: int,
             seconds: float) -> dict:  # fmt: skip
    variant = worker.variant
    if base is None:
        worker.run(1)
        steps = max(1, round(seconds / worker.run(1)))
        a_token = sorted(worker.run(steps) for _ in range(rounds))[rounds // 2] / variant.tokens
        speedup = None
    else:
        found = compare(worker, base, rounds, seconds)
        a_token, speedup, total = found.seconds(0), [found.ratio, *found.interval()], total * found.ratio
    rate = 1 / a_token
    return {
        "tokens_per_second": rate,
        "speedup": speedup,
        "total": total,
        "mfu": rate * flops / (peak * variant.world) if peak else None,
        "peak_memory_bytes": worker.peak_memory,
    }


def lines(results: list[dict]) -> list[str]:
    """The table."""
    head = f"{'optimisation':<26} {'tokens/s':>10} {'x last row kept':>22} {'x first':>8} {'MFU':>7} {'memory':>9}"
    out = [head]
    for r in results:
        name = r["name"] if r["kept"] or r["tokens_per_second"] is None else f"({r['name']})"
        if r["tokens_per_second"] is None:
            out.append(f"{name:<26} {'-':>10} {r['note']}")
            continue
        ratio, low, high = r["speedup"] or (1, 1, 1)
        speedup = f"{ratio:.2f} ({low:.2f} to {high:.2f})" if r["speedup"] else ""
        mfu = f"{100 * r['mfu']:.1f} %" if r["mfu"] is not None else ""
        out.append(f"{name:<26} {r['tokens_per_second']:>10,.0f} {speedup:>22} {r['total']:>7.2f}x {mfu:>7} "
                   f"{r['peak_memory_bytes'] / 1e9:>6.2f} GB")  # fmt: skip
    if any(not r["kept"] and r["tokens_per_second"] for r in results):
        out.append("(in brackets: measured, and not part of the rows below it)")
    return out
