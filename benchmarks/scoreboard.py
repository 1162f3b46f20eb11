"""The scoreboard: recipe/train.py with one flag after the other, each on top of those before it that are kept."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    changes: dict = field(default_factory=dict)
    kept: bool = True
    cannot: str = ""


def ladder(bench: BenchConfig) -> tuple[Variant, list[Row]]:
    """What the rows start from, and the rows. Every one takes the same steps, of `ours.micro_batch` sequences for each
    process of the last row: in micro-batches of a part of them until the row that raises them to all."""
    on_cpu, ours, processes = bench.on_cpu, bench.ours, bench.arguments.processes
    large = ours.micro_batch
    small = max(1, large // (2 if on_cpu else 8))
    first = Variant("fp32", "recipe", ours.model, ours.sequence_length, large * processes, small)
    half = hardware.resolve_precision("auto", cpu=on_cpu)
    no_tf32, no_half = "", "" if half != "fp32" else "this device does not multiply bf16 natively"
    try:
        hardware.resolve_precision("tf32", cpu=on_cpu)
    except UserError:
        no_tf32 = "needs an NVIDIA GPU from Ampere on"
    return first, [
        Row(first.name),
        Row("tf32", {"precision": "tf32"}, cannot=no_tf32),
        Row("bf16" if no_half else half, {"precision": half}, cannot=no_half),
        Row(
            f"micro-batch {large}",
            {"micro_batch": large},
            cannot="" if large > small else f"{small} are the whole step here",
        ),
        Row("compile", {"compile": bench.config.run.torch_compile_mode}),
        Row("fused loss", {"fused_loss": True}, kept=False, cannot="a kernel for GPUs" if on_cpu else ""),
        Row("loss in chunks", {"loss_chunk_size": max(128, large * ours.sequence_length // 8)}, kept=False),
        Row("gradient checkpointing", {"gradient_checkpointing": True}, kept=False),
        Row(f"{processes} processes", {"processes": processes}, cannot="" if processes > 1 else "with --processes"),
    ]


def scoreboard(now: Variant, rows: list[Row], directory: Path, timing: Timing, quick: bool = False) -> list[dict]:
    """Measures the rows, from `now` on, each against the last one kept, in turns; with `quick` only those to keep.

    Returns a dict a row; null where `void` has the reason: speedup [ratio, low, high] over the last row kept; total,
    over the first row, which is the product of these ratios; tokens_per_second, the first row's times `total`, so that
    a drift of the machine is in none of them; peak_memory_bytes of a process; and what it ran with.
    """
    results, base, total, first_rate = [], None, 1.0, 0.0
    try:
        for row in rows:
            void = row.cannot or ("skipped by --quick" if quick and not row.kept else "")
            void = void or (NO_TIME if timing.up else "")
            result = {"name": row.name, "kept": row.kept and not void, "void": void}
            result |= dict.fromkeys(("tokens_per_second", "speedup", "total", "peak_memory_bytes"))
            results.append(result)
            if void:
                continue
            say(f"...        {row.name}")
            variant = now.but(name=row.name, **row.changes)
            result |= {k: getattr(variant, k) for k in ("precision", "micro_batch", "processes", "compile")}
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
            except Void as reason:
                result |= {"void": str(reason), "kept": False}
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
            out.append(f"{r['name']:<26} {'-':>10} {r['void']}")
            continue
        speedup = "{:.2f} ({:.2f} to {:.2f})".format(*r["speedup"]) if r["speedup"] else ""
        mfu = f"{100 * r['mfu']:.1f} %" if r["mfu"] is not None else ""
        out.append(
            f"{r['name'] if r['kept'] else '(' + r['name'] + ')':<26} {r['tokens_per_second']:>10,.0f} {speedup:>22} "
            f"{r['total']:>7.2f}x {mfu:>7} {r['peak_memory_bytes'] / 1e9:>6.2f} GB"
        )
    return [*out, "(in brackets: measured, and not part of the rows below it)"]
