"""Command: how fast the step is on this machine, what makes it so, and how fast others are.

    python -m benchmarks scoreboard      one row an optimization
    python -m benchmarks peers           transformers' Trainer and others beside recipe/train.py, in turns
    python -m benchmarks --help          the rest

Without --config: the default recipe's model on a CPU, GPT-2 124M on an accelerator.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import peers, profile, report, scaling
from benchmarks.bench_config import BenchConfig, say
from benchmarks.interleaved import NO_TIME, Void, Worker, prepared, rate_of
from benchmarks.scoreboard import add_mfu, ladder, scoreboard
from benchmarks.scoreboard import lines as scoreboard_lines
from benchmarks.variants import Variant
from benchmarks.worker import make_step
from recipe.engine import device as hardware
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token

SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def run_scoreboard(bench: BenchConfig) -> dict:
    """What each optimization brings: a table, scoreboard.json, scoreboard.png."""
    results = bench.introduce("scoreboard")
    with prepared() as directory:
        results["rows"] = scoreboard(*ladder(bench), directory, bench.timing, quick=bench.arguments.quick)
    add_mfu(results["rows"], results["flops_per_token"], results["peak_flops"])
    say("\n" + "\n".join(scoreboard_lines(results["rows"])))
    report.write(results, bench.out / "scoreboard.json")
    report.bars(results, bench.out / "scoreboard.png")
    return results


def run_peers(bench: BenchConfig) -> dict:
    """transformers' Trainer and others beside recipe/train.py: a table, peers.json, peers.png."""
    results, timing = bench.introduce("peers"), bench.timing
    ours = bench.ours()
    others = peers.contenders(ours, bench.arguments.nanogpt)
    say(
        f"same       {ours.tokens:,} tokens a step, weights, {ours.precision}, AdamW, clipping; "
        f"{timing.rounds} rounds of A B B A, turns of {timing.seconds:g} s"
    )
    with prepared() as directory:
        only = bench.arguments.only
        results["rows"] = peers.compare_peers(ours, others, directory, timing, on_cpu=bench.on_cpu, only=only)
    say("\n" + "\n".join(peers.lines(results["rows"])))
    if bench.arguments.llmc_log:
        results["llm.c"] = peers.llmc_log(Path(bench.arguments.llmc_log))
        say(f"llm.c, by its log: {results['llm.c']['tokens_per_second']:,.0f} tokens/s (another run: no ratio)")
    report.write(results, bench.out / "peers.json")
    report.ratios(results, bench.out / "peers.png")
    return results


def run_sizes(bench: BenchConfig) -> dict:
    """The four sizes of GPT-2 on a GPU: tokens/s, MFU, memory beside the estimate; sizes.json."""
    if bench.on_cpu:
        raise UserError("the four sizes are for a GPU: the largest would take a CPU minutes a step")
    results = bench.introduce("sizes") | {"rows": []}
    with prepared() as directory:
        for name in SIZES:
            bench.set_recipe(name)
            compiled = bench.config.run.torch_compile
            bench.micro = bench.arguments.micro_batch_size or bench.fitting(compiled)
            row = alone(bench, bench.ours(), directory)
            estimated = bench.estimated(bench.micro, compiled)
            row |= {"recipe": name, "micro_batch_size": bench.micro, "memory_estimated_bytes": estimated}
            results["rows"].append(row)
            say(f"{name:<12} {bench.micro:>3} sequences  {_measured(row)}, estimated {estimated / 1e9:.1f} GB")
    bench.set_recipe(bench.recipe)
    report.write(results, bench.out / "sizes.json")
    return results


def alone(bench: BenchConfig, variant: Variant, directory: Path) -> dict:
    """A variant by itself: tokens_per_second (the median of turns), mfu, peak_memory_bytes; null where `note` says
    why."""
    result = dict.fromkeys(("tokens_per_second", "mfu", "peak_memory_bytes")) | {"note": ""}
    if bench.timing.left < 0:
        return result | {"note": NO_TIME}
    worker = Worker(variant, directory)
    try:
        rate = rate_of(worker, bench.timing)
        flops = flops_per_token(variant.model, variant.sequence_length)
        mfu = rate * flops / bench.peak if bench.peak else None
        return result | {"tokens_per_second": rate, "mfu": mfu, "peak_memory_bytes": worker.peak_memory}
    except Void as void:
        return result | {"note": str(void)}
    finally:
        worker.close()


def _measured(row: dict) -> str:
    if row["note"]:
        return row["note"]
    mfu = f"  MFU {row['mfu']:.1%}" if row["mfu"] is not None else ""
    return f"{row['tokens_per_second']:>10,.0f} tokens/s{mfu}  {row['peak_memory_bytes'] / 1e9:.2f} GB"


def run_profile(bench: BenchConfig) -> dict:
    """Where the time of a step goes, by operator or kernel; profile.json."""
    results = bench.introduce("profile")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    ours = bench.ours()
    as_the_engine = {"pad_vocab_to": hardware.pad_vocab_to(device)}
    if bench.on_cpu:
        as_the_engine |= {"loss_by_rows": True, "attention": "blocks" if ours.precision == "bf16" else "sdpa"}
    with prepared() as directory:
        step = make_step(ours.but(kind="loop", **as_the_engine), f"{directory}/shards")
        results["profile"] = profile.profile_step(step, device)
        del step
    gc.collect()
    torch.compiler.reset()
    hardware.release_memory()  # for the workers of what comes next
    say("\n".join(profile.lines(results["profile"])))
    report.write(results, bench.out / "profile.json")
    return results


def run_scaling(bench: BenchConfig) -> dict:
    """What communication costs DDP and ZeRO-1 on 8, 64 and 512 GPUs, predicted; scaling.json."""
    results = {"table": scaling.table(), "anchors": scaling.anchors()}
    say("\n".join(scaling.lines()))
    report.write(results, bench.out / "scaling.json")
    return results


# In the order of their worth; what one leaves of its share goes to those after it.
SHARES = {"peers": 35, "scoreboard": 40, "sizes": 17, "profile": 8}


def run_all(bench: BenchConfig) -> dict:
    """The full benchmark of a device within --minutes: peers, scoreboard, sizes, profile; DEVICE.json."""
    results = report.circumstances()
    slug = "-".join(results["device"].lower().replace("(", "").replace(")", "").split())
    shares = list(SHARES.items())
    for at, (name, share) in enumerate(shares):
        left = bench.timing.left
        say(f"\n=== {name}, {left / 60:.1f} minutes left")
        try:
            if left < 20:
                raise UserError(NO_TIME)
            with bench.timing.within(left * share / sum(s for _, s in shares[at:])):
                results[name] = COMMANDS[name](bench)
        except UserError as error:
            results[name] = {"note": str(error)}
            say(str(error))
        except Exception as error:  # the others are worth having without it
            traceback.print_exc()
            results[name] = {"note": f"failed: {error!r}"}
        report.write(results, bench.out / f"{slug}.json")
    return results


COMMANDS: dict[str, Callable[[BenchConfig], dict]] = {
    "scoreboard": run_scoreboard,
    "peers": run_peers,
    "sizes": run_sizes,
    "profile": run_profile,
    "scaling": run_scaling,
    "all": run_all,
}
# Commands with arguments of their own, each a module with a `main(argv)`.
OTHERS = {
    "data": "Preparing and reading data, beside datasets.map",
    "hellaswag": "HellaSwag beside lm-evaluation-harness",
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in OTHERS:
        from importlib import import_module

        return import_module(f"benchmarks.{argv[0]}").main(argv[1:])
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        COMMANDS[arguments.command](BenchConfig(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"done       in {time.monotonic() - started:.0f} s; figures and pictures are in {arguments.out}/")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="How fast the step is.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(
            [f"{name:<12} {function.__doc__.split('; ')[0].split(':')[0]}" for name, function in COMMANDS.items()]
            + [f"{name:<12} {text} (its own --help)" for name, text in OTHERS.items()]
        ),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--config", default="", help="recipe whose model is measured (default: by the device)")
    parser.add_argument("--precision", default="", help="fp32, tf32, bf16 or fp16 (default: the device's best)")
    parser.add_argument("--micro_batch_size", type=int, default=0, help="sequences at once (default: what fits, to 64)")
    parser.add_argument("--sequence_length", type=int, default=0, help="tokens a sequence (default: the recipe's)")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--minutes", type=float, default=1e4, help="skip what would begin later than this")
    parser.add_argument("--quick", action="store_true", help="one round of short turns")
    parser.add_argument("--only", default="", help="rows that this regular expression matches (peers)")
    parser.add_argument("--nanogpt", default="", help="checkout of karpathy/nanoGPT to run beside ours (peers)")
    parser.add_argument("--llmc_log", default="", help="what llm.c's train_gpt2cu printed, to quote (peers)")
    parser.add_argument("--out", default="bench", help="directory of the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
