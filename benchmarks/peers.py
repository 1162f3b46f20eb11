"""Peers beside our trainer: the same tokens, weights, arithmetic and optimizer, in turns on the same device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from itertools import product
from pathlib import Path

from benchmarks.bench_config import BenchConfig, say
from benchmarks.interleaved import NO_TIME, Void, Worker, compare
from benchmarks.variants import Variant
from recipe.utils.errors import UserError


def contenders(ours: Variant, nanogpt: str = "", on_gpu: bool = False) -> list[Variant]:
    """What is run beside `ours`: on a GPU itself with the fused loss; transformers' Trainer and model at their best
    settings, then with less, and nanoGPT's model from a checkout. Raises UserError where there is none."""
    theirs = ours.but(loss_chunk_size=0, gradient_checkpointing=False)
    half = ours.precision
    mode = ours.compile or "default"
    found = [
        theirs.but(name=f"Trainer, {half}, compiled", kind="hf-trainer", compile="default"),
        theirs.but(name=f"Trainer, {half}", kind="hf-trainer", compile=""),
        theirs.but(name=f"transformers in a bare loop, {half}, compiled", kind="hf-loop", compile=mode),
        theirs.but(name=f"transformers in a bare loop, {half}", kind="hf-loop", compile=""),
    ]
    if half != "fp32":
        found.append(found[-1].but(name="transformers in a bare loop, fp32", precision="fp32"))
    if on_gpu:
        found.insert(0, ours.but(name="recipe/train.py, fused loss", fused_loss=True))
    if nanogpt:
        if not (Path(nanogpt) / "model.py").is_file():
            raise UserError(f"--nanogpt {nanogpt}: no model.py there; give a checkout of karpathy/nanoGPT")
        found.append(theirs.but(name=f"nanoGPT, {half}, compiled", kind="nanogpt", checkout=nanogpt, compile=mode))
    return found


def compare_peers(bench: BenchConfig, others: list[Variant], directory: Path) -> Iterator[dict]:
    """Each of `others` in turns with ours; on a CPU twice, with the allocator as it comes ("as shipped") and as our
    trainer sets it ("our allocator"); only those whose "name, environment" matches --only.

    Yields a dict a peer and environment: name, environment, ratio (how many times as fast ours is), low, high (95 %
    bootstrap interval), tokens_per_second of both, peak_memory_bytes of both, losses_apart in nats; null where `void`
    has the reason.
    """
    environments = (("as shipped", False), ("our allocator", True)) if bench.on_cpu else (("", True),)
    with closing(Worker(bench.ours, directory)) as mine:
        for peer, (environment, tuned) in product(others, environments):
            name = ", ".join(filter(None, (peer.name, environment)))
            if not re.search(bench.arguments.only, name):
                continue
            result = {"name": peer.name, "environment": environment, "void": "", "ratio": None}
            if bench.timing.up:
                yield result | {"void": NO_TIME}
                continue
            say(f"...        {name}")
            with closing(Worker(peer.but(tuned=tuned), directory)) as worker:
                try:
                    found = compare(mine, worker, bench.timing)
                except Void as void:
                    yield result | {"void": str(void)}
                    continue
                low, high = found.interval()
                yield result | {
                    "ratio": found.ratio,
                    "low": low,
                    "high": high,
                    "tokens_per_second": [1 / found.seconds(0), 1 / found.seconds(1)],
                    "peak_memory_bytes": [mine.peak_memory, worker.peak_memory],
                    "losses_apart": found.losses_apart,
                    "pairs": found.pairs,
                }


def lines(results: list[dict]) -> list[str]:
    """The table."""
    out = [f"{'ours is faster than':<44} {'':<14} {'times (95 %)':>22} {'losses apart':>13}"]
    for r in results:
        if r["ratio"] is None:
            out.append(f"{r['name']:<44} {r['environment']:<14} VOID: {r['void']}")
            continue
        ratio = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        out.append(f"{r['name']:<44} {r['environment']:<14} {ratio:>22} {r['losses_apart']:>13.1e}")
    return out
