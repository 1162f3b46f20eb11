"""What talking costs: DDP and ZeRO on 8, 64 and 512 GPUs by arithmetic, and between two processes here.

    python -m benchmarks.scaling                  the table, the anchors, and two processes of this machine
    python -m benchmarks.scaling --arithmetic     without the measurement

The bytes are those of benchmarks/communication.py, the measurement is benchmarks/comm_overhead.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.comm_overhead import lines as two_lines
from benchmarks.comm_overhead import measure_two
from benchmarks.communication import BUS_EFFICIENCY, LINKS, collectives, seconds
from recipe.config import ModelConfig
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token

# Assumed share of a micro-step's time that is its backward pass: two of three products.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Gpu:
    """Dense bf16 peak in FLOP/s, and the names of its links within a node and between nodes."""

    peak: float
    link: str
    network: str


GPUS = {
    "A100": Gpu(312e12, "NVLink 3", "InfiniBand 8 x 200 Gb/s"),
    "H100": Gpu(989e12, "NVLink 4", "InfiniBand 8 x 400 Gb/s"),
}
MODELS = {"124M": ModelConfig(), "1558M": ModelConfig(n_layer=48, n_head=25, n_embd=1600)}
TOTAL_SEQUENCES, SEQUENCE_LENGTH = 512, 1024  # 524,288 tokens a step
# Sequences at once at which the runs below were measured; a device whose share is smaller takes that.
MICRO_BATCH = {"124M": 64, "1558M": 16}
# Assumed share of the peak (PaLM's FLOPs) while a device computes: that of published runs, tokens/s a GPU in brackets.
# All but the H100's 124M had eight GPUs, so that their communication is in it and counts twice here.
MFU = {
    ("A100", "124M"): 0.599,  # llm.c, 8 x A100, 300 ms a step (218 K)
    ("H100", "124M"): 0.362,  # a PyTorch loop on one H100 with micro-batches of 64 (419 K)
    ("A100", "1558M"): 0.64,  # nothing of this size was published; llm.c's 774M on 8 x A100 (38.6 K)
    ("H100", "1558M"): 0.487,  # llm.c, 8 x H100 (46.8 K)
}


def predict(gpu: str, model: str, strategy: str, world: int, mfu: float | None = None) -> dict:
    """A step of TOTAL_SEQUENCES on `world` GPUs: milliseconds that it computes (at `mfu`, by default MFU's) and
    communicates, and tokens/s with nothing hidden and with as much hidden as goes behind the last micro-step's
    backward (every one's under stage 2; under stage 3 behind all that is computed). All without latency."""
    hardware, size, name = GPUS[gpu], MODELS[model], (gpu, model)
    share = TOTAL_SEQUENCES // world
    micro = min(MICRO_BATCH[model], share)
    accumulation = share // micro
    rate = (mfu or MFU[name]) * hardware.peak / flops_per_token(size, SEQUENCE_LENGTH)  # tokens/s a device
    compute = share * SEQUENCE_LENGTH / rate
    backward = BACKWARD * compute / accumulation
    window = {"zero2": backward * accumulation, "zero3": compute}.get(strategy, backward)
    link, network = LINKS[hardware.link], LINKS[hardware.network]
    talk = hideable = 0.0
    for collective in collectives(strategy, size, accumulation=accumulation):
        if world > 1:
            time = seconds(collective, world, link, network, BUS_EFFICIENCY)
            talk += time
            hideable += time * collective.hideable / collective.size
    exposed = talk - min(hideable, window)
    tokens = TOTAL_SEQUENCES * SEQUENCE_LENGTH
    return {
        "gpu": gpu,
        "model": model,
        "strategy": strategy,
        "devices": world,
        "micro_batch": micro,
        "accumulation": accumulation,
        "mfu": mfu or MFU[name],
        "compute_ms": 1e3 * compute,
        "talk_ms": 1e3 * talk,
        "exposed_ms": 1e3 * exposed,
        "step_seconds": compute + talk,
        "step_seconds_hidden": compute + exposed,
        "share": talk / (compute + talk),
        "share_exposed": exposed / (compute + exposed),
        "tokens_per_second": tokens / (compute + talk),
        "tokens_per_second_hidden": tokens / (compute + exposed),
        "small_micro_batch": micro < MICRO_BATCH[model],
    }


def table(
    worlds: tuple[int, ...] = (8, 64, 512), strategies: tuple[str, ...] = ("ddp", "zero1"), models=tuple(MODELS)
) -> list[dict]:
    """`predict` for every model, GPU and strategy, with the efficiencies beside the smallest world's tokens/s a
    device."""
    rows = []
    for model in models:
        for gpu in GPUS:
            for strategy in strategies:
                found = [predict(gpu, model, strategy, world) for world in worlds]
                for row in found:
                    for key in ("tokens_per_second", "tokens_per_second_hidden"):
                        one = found[0][key] / worlds[0]
                        row[key.replace("tokens_per_second", "efficiency")] = row[key] / row["devices"] / one
                rows += found
    return rows


def anchors() -> list[dict]:
    """Published tokens/s beside what the arithmetic makes of them. `basis` says where the speed of computing is from:
    only where it is from another run is the comparison more than a check of the bytes."""
    cases = (
        ("journal, 124M, 8 x H100, DDP", "H100", "124M", "ddp", 0.362, "its run on one H100", 3.05e6),
        ("llm.c 124M, 8 x H100", "H100", "124M", "llm.c", 0.419, "a model of the step: 484 K a GPU", 3.75e6),
        ("llm.c 124M, 8 x A100, 300 ms", "A100", "124M", "llm.c", 0.599, "this very run", 1.75e6),
        ("llm.c 1558M, 8 x H100", "H100", "1558M", "llm.c", 0.487, "this very run", 374e3),
    )
    rows = []
    for name, gpu, model, strategy, mfu, basis, published in cases:
        row = predict(gpu, model, strategy, 8, mfu)
        rows.append(
            {
                "name": name,
                "basis": basis,
                "published": published,
                "talk_ms": row["talk_ms"],
                "predicted": row["tokens_per_second"],
                "predicted_hidden": row["tokens_per_second_hidden"],
                "ratio": row["tokens_per_second"] / published,
            }
        )
    return rows


def by_link() -> list[dict]:
    """Milliseconds of a step's communication over each kind of link alone: between 2 devices of a machine over PCIe, 8
    over NVLink, and 2 nodes of 8 over a network, whose share is given without NVLink's."""
    rows = []
    for name, speed in LINKS.items():
        world = 2 if "PCIe" in name else 8 if "NVLink" in name else 2  # of the ring that crosses this link
        for model, size in MODELS.items():
            row = {"link": name, "model": model, "ring": world}
            for strategy in ("ddp", "zero1"):
                sent = sum(c.sent(world) for c in collectives(strategy, size))
                row[strategy] = 1e3 * sent / speed / BUS_EFFICIENCY
            rows.append(row)
    return rows


def lines(rows: list[dict] | None = None, two: dict | None = None) -> list[str]:
    """`table`, `anchors` and `by_link` for the terminal, and `measure_two`'s figures where there are any."""
    rows = table() if rows is None else rows
    out = [
        f"scaling    predicted, not measured: {TOTAL_SEQUENCES * SEQUENCE_LENGTH:,} tokens a step, links at "
        f"{100 * BUS_EFFICIENCY:.0f} % of their speed, no latency, published MFU",
        "           each pair: nothing hidden / hidden behind the last backward as far as it goes",
        "  model  GPUs          way    micro  compute ms   talk ms (exposed)   share %       M tokens/s      scaling %",
    ]
    for r in rows:
        mark = "*" if r["small_micro_batch"] else " "
        out.append(
            f"  {r['model']:6} {r['devices']:3} x {r['gpu']:6} {r['strategy']:6} {r['micro_batch']:4}{mark} "
            f"{r['compute_ms']:10.1f} {r['talk_ms']:9.2f} ({r['exposed_ms']:6.2f}) "
            f"{100 * r['share']:7.1f} / {100 * r['share_exposed']:4.1f} {r['tokens_per_second'] / 1e6:8.2f} / "
            f"{r['tokens_per_second_hidden'] / 1e6:6.2f} {100 * r['efficiency']:6.0f} / "
            f"{100 * r['efficiency_hidden']:3.0f}"
        )
    if any(r["small_micro_batch"] for r in rows):
        out.append("  * sequences at once; fewer than the published run's, whose MFU it will not reach: not modelled")
    out.append("anchors    tokens/s of all GPUs, predicted (nothing hidden / hidden) beside published")
    for a in anchors():
        out.append(
            f"  {a['name']:31} {a['predicted'] / 1e6:6.3f} / {a['predicted_hidden'] / 1e6:5.3f} M, published "
            f"{a['published'] / 1e6:5.3f} M ({a['ratio']:.2f}x); computing as in {a['basis']}"
        )
    out.append("links      milliseconds of a step's communication, DDP / ZeRO-1, over one kind of link alone")
    out += [
        f"  {r['link']:24} {r['model']:6} ring of {r['ring']}  {r['ddp']:9.2f} / {r['zero1']:9.2f}" for r in by_link()
    ]
    return out + (two_lines(two) if two else [])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What communication costs.", allow_abbrev=False)
    parser.add_argument("--arithmetic", action="store_true", help="without the measurement between two processes")
    parser.add_argument(
        "--strategies", nargs="+", default=["ddp", "zero1"], metavar="S", help="of ddp, zero1, zero2, zero3"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the measurement, each with and without, and back")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    arguments = parser.parse_args(argv)
    try:
        rows = table(strategies=tuple(arguments.strategies))
        measured = [s for s in arguments.strategies if s != "zero3"]  # whose model does not run alone
        two = None if arguments.arithmetic else measure_two(tuple(measured), rounds=arguments.rounds)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(rows, two)))
    if arguments.output:
        figures = {"table": rows, "anchors": anchors(), "by_link": by_link(), "two_processes": two}
        Path(arguments.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
