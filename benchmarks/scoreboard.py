"""The scoreboard: one row an optimisation, each on top of those before it that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interleaved import Void, Worker, compare
from benchmarks.variants import Variant
from recipe.config import ModelConfig
from recipe.engine import device as hardware
from recipe.errors import UserError


@dataclass(frozen=True)
class Row:
    """An optimisation: the `changes` to the variant of the last row kept, or why this device `cannot` do it.

    `kept`: later rows build on it. What is not kept costs speed here and is there for memory, or for another device.
    """

    name: str
    changes: dict | None = None
    kept: bool = True
    cannot: str = ""


def ladder(
    model: ModelConfig,
    sequence_length: int,
    small: int,
    large: int,
    *,
    gpus: int,
    on_cpu: bool,
    torch_compile_mode: str,
) -> tuple[Variant, list[Row]]:
    """What the rows start from, and the rows. Every one takes the same steps, of `large` sequences a GPU: in
    micro-batches of `small` until the row that raises them to `large`."""
    first = Variant(
        "fp32, nothing else",
        "loop",
        model,
        sequence_length,
        small,
        large * max(1, gpus) // small,
        tuned=not on_cpu,
        fused=False,
        attention="plain",
    )
    half = hardware.resolve_precision("auto", cpu=on_cpu)
    try:
        hardware.resolve_precision("tf32", cpu=on_cpu)
        tf32 = Row("tf32", {"precision": "tf32"})
    except UserError:
        tf32 = Row("tf32", cannot="needs an NVIDIA GPU from Ampere on")

    def where(possible: bool, name: str, changes: dict, cannot: str) -> Row:
        return Row(name, changes) if possible else Row(name, cannot=cannot)

    return first, [
        Row(first.name, {}),
        where(on_cpu, "allocator", {"tuned": True}, "for CPUs; a GPU's memory has an allocator of its own"),
        tf32,
        where(
            half in ("bf16", "fp16"),
            half if half != "fp32" else "bf16",
            {"precision": half},
            "this device does not multiply bf16 natively",
        ),
        Row("SDPA", {"attention": "sdpa"}),
        where(on_cpu and half == "bf16", "attention in blocks", {"attention": "blocks"}, "for CPUs with bf16"),
        where(on_cpu, "loss by rows", {"loss_by_rows": True}, "for CPUs, whose caches hold some rows of logits"),
        Row("vocabulary padded to 128", {"pad_vocab_to": 128}, kept=not on_cpu),
        Row("loss in chunks", {"loss_chunk_size": max(128, small * sequence_length // 8)}, kept=False),
        Row("compile", {"compile": torch_compile_mode}),
        Row("fused AdamW", {"fused": True}),
        where(large > small, f"micro-batch {large}", {"micro_batch": large}, f"{small} are the whole step here"),
        Row("recomputation", {"gradient_checkpointing": True}, kept=False),
        Row("recipe/train.py", {"kind": "recipe"}),
        where(gpus > 1, f"DDP over {gpus} GPUs", {"world": gpus}, "one device here"),
    ]


def applied(now: Variant, row: Row, sequences: int) -> Variant:
    """`now` with the row's changes, and as many micro-steps as make `sequences` a step."""
    variant = now.but(name=row.name, **row.changes)
    return variant.but(accumulation=sequences // (variant.micro_batch * variant.world))


def scoreboard(
    now: Variant,
    rows: list[Row],
    directory: Path,
    *,
    flops: int,
    peak: float | None,
    rounds: int,
    seconds: float,
    left: Callable[[], float],
    say: Callable[[str], None],
    quick: bool = False,
) -> list[dict]:
    """Measures the rows, from `now` on, each against the last one kept, in turns; `say` hears of each as it begins.
    None begins when fewer seconds are `left` than the longest so far took, nor, with `quick`, one that is not kept.

    Returns a dict a row: tokens_per_second, speedup [ratio, low, high] over the last row kept, total (over the first
    row, the ratios multiplied), mfu (`flops` a token, `peak` FLOP/s a device), peak_memory_bytes; null where `note`
    says why.
    """
    results, base, total, longest, sequences = [], None, 1.0, 0.0, now.sequences
    try:
        for row in rows:
            result = dict.fromkeys(("tokens_per_second", "speedup", "total", "mfu", "peak_memory_bytes"))
            result = {"name": row.name, "kept": row.kept, "note": row.cannot} | result
            if row.changes is None:
                pass
            elif quick and not row.kept:
                result["note"] = "left out by --quick"
            elif left() < longest:
                result |= {"note": "left out: the time is up", "kept": False}
            else:
                say(f"...        {row.name}")
                since = time.monotonic()
                variant = applied(now, row, sequences)
                worker = Worker(variant, directory)
                try:
                    result |= _measure(worker, base, total, flops, peak, rounds, seconds)
                except Void as void:
                    result["note"], result["kept"] = str(void), False
                if result["kept"]:
                    base, worker, now = worker, base, variant
                    total = result["total"]
                if worker:
                    worker.close()
                longest = max(longest, time.monotonic() - since)
            results.append(result)
    finally:
        if base:
            base.close()
    return results


def _measure(
    worker: Worker, base: Worker | None, total: float, flops: int, peak: float | None, rounds: int, seconds: float
) -> dict:
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
        out.append(
            f"{name:<26} {r['tokens_per_second']:>10,.0f} {speedup:>22} {r['total']:>7.2f}x {mfu:>7} "
            f"{r['peak_memory_bytes'] / 1e9:>6.2f} GB"
        )
    if any(not r["kept"] and r["tokens_per_second"] for r in results):
        out.append("(in brackets: measured, and not part of the rows below it)")
    return out
