"""The scoreboard: one row an optimization, each on top of those before it that are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.bench_config import BenchConfig, Timing, say
from benchmarks.interleaved import NO_TIME, Void, Worker, compare, rate_of
from benchmarks.variants import Variant
from recipe.engine import device as hardware
from recipe.utils.errors import UserError


@dataclass(frozen=True)
class Row:
    """An optimization: the `changes` to the variant of the last row kept, or why this device `cannot` do it.

    `kept`: later rows build on it. What is not kept costs speed here and is there for memory, or for another device.
    """

    name: str
    changes: dict | None = None
    kept: bool = True
    cannot: str = ""


def ladder(bench: BenchConfig) -> tuple[Variant, list[Row]]:
    """What the rows start from, and the rows. Every one takes the same steps, of `bench.micro` sequences: in
    micro-batches of a part of them until the row that raises them to all."""
    on_cpu, large, T = bench.on_cpu, bench.micro, bench.T
    small = max(1, large // (2 if on_cpu else 8))
    first = Variant(
        "fp32, nothing else",
        "loop",
        bench.config.model,
        T,
        small,
        large // small,
        tuned=not on_cpu,
        fused=False,
        attention="plain",
    )
    half = hardware.resolve_precision("auto", cpu=on_cpu)
    try:
        hardware.resolve_precision("tf32", cpu=on_cpu)
        has_tf32 = True
    except UserError:
        has_tf32 = False

    def where(possible: bool, name: str, changes: dict, cannot: str, kept: bool = True) -> Row:
        return Row(name, changes, kept) if possible else Row(name, cannot=cannot)

    return first, [
        Row(first.name, {}),
        where(on_cpu, "allocator", {"tuned": True}, "for CPUs; a GPU's memory has an allocator of its own"),
        where(has_tf32, "tf32", {"precision": "tf32"}, "needs an NVIDIA GPU from Ampere on"),
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
        Row("loss in chunks", {"loss_chunk_size": max(128, small * T // 8)}, kept=False),
        Row("compile", {"compile": bench.config.run.torch_compile_mode}),
        Row("fused AdamW", {"fused": True}),
        where(large > small, f"micro-batch {large}", {"micro_batch": large}, f"{small} are the whole step here"),
        where(not on_cpu, "fused loss", {"fused_loss": True}, "a kernel for GPUs", kept=False),
        Row("gradient checkpointing", {"gradient_checkpointing": True}, kept=False),
        Row("recipe/train.py", {"kind": "recipe"}),
    ]


def applied(now: Variant, row: Row, sequences: int) -> Variant:
    """`now` with the row's changes, and as many micro-steps as make `sequences` a step."""
    variant = now.but(name=row.name, **row.changes)
    return variant.but(accumulation=sequences // variant.micro_batch)


def scoreboard(now: Variant, rows: list[Row], directory: Path, timing: Timing, quick: bool = False) -> list[dict]:
    """Measures the rows, from `now` on, each against the last one kept, in turns; with `quick` only those to keep.

    Returns a dict a row; null where `note` has the reason: speedup [ratio, low, high] over the last row kept; total,
    over the first row, which is the product of these ratios; tokens_per_second, the first row's times `total`, so that
    a drift of the machine is in none of them; peak_memory_bytes.
    """
    results, base, sequences = [], None, now.sequences
    total, first_rate = 1.0, 0.0
    try:
        for row in rows:
            result = dict.fromkeys(("tokens_per_second", "speedup", "total", "peak_memory_bytes"))
            result = {"name": row.name, "kept": row.kept, "note": row.cannot} | result
            results.append(result)
            if row.changes is None:
                continue
            if quick and not row.kept:
                result["note"] = "skipped by --quick"
                continue
            if timing.left < 0:
                result |= {"note": NO_TIME, "kept": False}
                continue
            say(f"...        {row.name}")
            variant = applied(now, row, sequences)
            worker = Worker(variant, directory)
            try:
                if base is None:
                    first_rate = rate_of(worker, timing)
                else:
                    found = compare(worker, base, timing)
                    result["speedup"] = [found.ratio, *found.interval()]
                result["total"] = total * (result["speedup"] or [1.0])[0]
                result["tokens_per_second"] = first_rate * result["total"]
                result["peak_memory_bytes"] = worker.peak_memory
            except Void as void:
                result |= {"note": str(void), "kept": False}
            if result["kept"]:
                base, worker, now, total = worker, base, variant, result["total"]
            if worker:
                worker.close()
    finally:
        if base:
            base.close()
    return results


def lines(results: list[dict]) -> list[str]:
    """The table."""
    out = [f"{'optimization':<26} {'tokens/s':>10} {'x last row kept':>22} {'x first':>8} {'MFU':>7} {'memory':>9}"]
    for r in results:
        if r["tokens_per_second"] is None:
            out.append(f"{r['name']:<26} {'-':>10} {r['note']}")
            continue
        speedup = "{:.2f} ({:.2f} to {:.2f})".format(*r["speedup"]) if r["speedup"] else ""
        mfu = f"{100 * r['mfu']:.1f} %" if r["mfu"] is not None else ""
        out.append(
            f"{r['name'] if r['kept'] else '(' + r['name'] + ')':<26} {r['tokens_per_second']:>10,.0f} {speedup:>22} "
            f"{r['total']:>7.2f}x {mfu:>7} {r['peak_memory_bytes'] / 1e9:>6.2f} GB"
        )
    return [*out, "(in brackets: measured, and not part of the rows below it)"]
