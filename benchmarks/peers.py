"""Peers beside our trainer: the same tokens, weights, arithmetic and optimizer, in turns on the same device."""

from __future__ import annotations

import re
import statistics
import time
from itertools import product
from pathlib import Path

from benchmarks.bench_config import Timing, say
from benchmarks.interleaved import NO_TIME, Void, Worker, agree, compare
from benchmarks.variants import Variant
from recipe.errors import UserError


def contenders(ours: Variant, nanogpt: str = "") -> list[Variant]:
    """What is run beside `ours`: transformers' Trainer and model at their best settings, then with less, and nanoGPT's
    model from a checkout."""
    theirs = ours.but(loss_chunk_size=0, gradient_checkpointing=False, pad_vocab_to=1)
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
    if nanogpt:
        if not (Path(nanogpt) / "model.py").is_file():
            raise UserError(f"--nanogpt {nanogpt}: no model.py there; give a checkout of karpathy/nanoGPT")
        found.append(theirs.but(name=f"nanoGPT, {half}, compiled", kind="nanogpt", checkout=nanogpt, compile=mode))
    return found


def compare_peers(
    ours: Variant, others: list[Variant], directory: Path, timing: Timing, *, on_cpu: bool, only: str = ""
) -> list[dict]:
    """Each of `others` in turns with `ours`; on a CPU twice, with the allocator as it comes ("as shipped") and as our
    trainer sets it ("our allocator"); `only` those whose "name, environment" matches this regular expression.

    Returns a dict a peer and environment: name, environment, ratio (how many times as fast ours is), low, high (95 %
    bootstrap interval), tokens_per_second of both, peak_memory_bytes of both, losses_apart in nats; null where `void`
    says why.
    """
    environments = (("as shipped", False), ("our allocator", True)) if on_cpu else (("", True),)
    results, longest = [], 0.0
    mine = Worker(ours, directory)
    try:
        for peer, (environment, tuned) in product(others, environments):
            name = ", ".join(filter(None, (peer.name, environment)))
            if not re.search(only, name):
                continue
            result = {"name": peer.name, "environment": environment, "void": NO_TIME, "ratio": None}
            results.append(result)
            if timing.left < longest:
                continue
            say(f"...        {name}")
            since = time.monotonic()
            result |= _beside(mine, peer.but(tuned=tuned), directory, timing)
            longest = max(longest, time.monotonic() - since)
    finally:
        mine.close()
    return results


def _beside(mine: Worker, peer: Variant, directory: Path, timing: Timing) -> dict:
    worker = Worker(peer, directory)
    try:
        found = compare(mine, worker, timing)
        low, high = found.interval()
        return {
            "void": "",
            "ratio": found.ratio,
            "low": low,
            "high": high,
            "tokens_per_second": [1 / found.seconds(0), 1 / found.seconds(1)],
            "peak_memory_bytes": [mine.peak_memory, worker.peak_memory],
            "losses_apart": agree(mine, worker),
            "pairs": found.pairs,
        }
    except Void as void:
        return {"void": str(void)}
    finally:
        worker.close()


def lines(results: list[dict]) -> list[str]:
    out = [f"{'ours is faster than':<44} {'':<14} {'times (95 %)':>22} {'losses apart':>13}"]
    for r in results:
        if r["ratio"] is None:
            out.append(f"{r['name']:<44} {r['environment']:<14} VOID: {r['void']}")
            continue
        ratio = f"{r['ratio']:.2f} ({r['low']:.2f} to {r['high']:.2f})"
        out.append(f"{r['name']:<44} {r['environment']:<14} {ratio:>22} {r['losses_apart']:>13.1e}")
    return out


def llmc_log(path: Path) -> dict:
    """tokens_per_second, the median of the steps after the first ten, of what llm.c's train_gpt2cu printed: a run of
    another program at another time, beside which no ratio is claimed. Raises UserError."""
    try:
        text = path.read_text(errors="replace")
    except OSError as e:
        raise UserError(f"--llmc_log {path}: {e.strerror}") from None
    batch = re.search(r"total_batch_size=(\d+)", text)
    # step    5/18865 | loss 9.5 (+nanz)| norm 4.7 (+nanz)| lr 4.29e-06 | 305.13 ms | 58.4% bf16 MFU | 1718224 tok/s
    # The milliseconds are of the step; the tokens a second are smoothed.
    steps = [float(ms) for ms in re.findall(r"^step\s+\d+/\d+ .*?([\d.]+) ms", text, re.MULTILINE)][10:]
    if not steps or not batch:
        raise UserError(
            f"--llmc_log {path}: no total_batch_size=, or no more than ten `step N/M | ... ms` lines; give all that "
            "train_gpt2cu printed"
        )
    return {"tokens_per_second": int(batch[1]) / (statistics.median(steps) / 1000), "steps": len(steps)}
