"""Command: how fast the step is on this machine, what makes it so, and how fast others are.

    python -m benchmarks scoreboard      recipe/train.py, one row an optimization
    python -m benchmarks peers           transformers' Trainer and others beside recipe/train.py, in turns
    python -m benchmarks --help          the rest

Without --config: the default recipe's model on a CPU, GPT-2 124M on an accelerator. One GPU is measured, also where
there are more; the scoreboard's last row takes --processes of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import import_module

from benchmarks import peers, report
from benchmarks.bench_config import BenchConfig, say
from benchmarks.interleaved import prepared
from benchmarks.scoreboard import ladder, scoreboard
from benchmarks.scoreboard import lines as scoreboard_lines
from recipe.utils.errors import UserError


def run_scoreboard(bench: BenchConfig) -> None:
    """What each optimization brings: a table, scoreboard.json, scoreboard.png."""
    results = bench.introduce("scoreboard")
    with prepared() as directory:
        results["rows"] = scoreboard(*ladder(bench), directory, bench.timing, quick=bench.arguments.quick)
    peak = results["peak_flops"]
    for row in results["rows"]:
        rate, devices = row["tokens_per_second"], 1 if bench.on_cpu else row.get("processes")
        row["mfu"] = rate * results["flops_per_token"] / (peak * devices) if rate and peak else None
    say("\n" + "\n".join(scoreboard_lines(results["rows"])))
    report.write(results, bench.out / "scoreboard.json")
    report.scoreboard_chart(results, bench.out / "scoreboard.png")


def run_peers(bench: BenchConfig) -> None:
    """transformers' Trainer and others, compared with recipe/train.py: a table, peers.json, peers.png."""
    results, timing = bench.introduce("peers"), bench.timing
    ours = bench.ours
    others = peers.contenders(ours, bench.arguments.nanogpt, bench.device.type == "cuda")
    say(
        f"same       {ours.tokens:,} tokens a step, weights, {ours.precision}, AdamW, clipping; "
        f"{timing.rounds} rounds of A B B A, turns of {timing.seconds:g} s"
    )
    results["rows"] = []
    with prepared() as directory:
        for row in peers.compare_peers(bench, others, directory):
            results["rows"].append(row)
            report.write(results, bench.out / "peers.json")
    say("\n" + "\n".join(peers.lines(results["rows"])))
    report.peers_chart(results, bench.out / "peers.png")


COMMANDS = {"scoreboard": run_scoreboard, "peers": run_peers}
# Commands with arguments of their own: a module's function, which takes them and returns the exit code.
OTHERS = {
    "data": ("libraries.tokenizing", "Tokenizing, compared with datasets.map"),
    "hellaswag": ("libraries.hellaswag", "HellaSwag, compared with lm-evaluation-harness"),
    "optimizers": ("optimizers.main", "How many tokens Muon needs for AdamW's loss"),
    "gpu_tests": ("gpu_tests.main", "The tests that need a GPU, for some minutes at a time"),
    "merge": ("report.main", "Results of several commands as one"),
}


def main(argv: list[str] | None = None) -> int:
    """Measures as the command line says, and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    started = time.monotonic()
    try:
        if argv and argv[0] in OTHERS:
            module, function = OTHERS[argv[0]][0].split(".")
            return getattr(import_module(f"benchmarks.{module}"), function)(argv[1:])
        arguments = _parser().parse_args(argv)
        COMMANDS[arguments.command](BenchConfig(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"done       in {time.monotonic() - started:.0f} s; figures and charts are in {arguments.out}/")
    return 0


def _parser() -> argparse.ArgumentParser:
    commands = {name: function.__doc__.split(":")[0] for name, function in COMMANDS.items()}
    commands |= {name: f"{text} (its own --help)" for name, (_, text) in OTHERS.items()}
    parser = argparse.ArgumentParser(
        description="How fast the step is.",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:<12} {text}" for name, text in commands.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--config", default="", help="recipe whose model is measured (default: by the device)")
    parser.add_argument("--precision", default="", help="fp32, tf32, bf16 or fp16 (default: the device's best)")
    parser.add_argument("--micro_batch_size", type=int, default=0, help="sequences at once (default: what fits, to 64)")
    parser.add_argument("--sequence_length", type=int, default=0, help="tokens a sequence (default: the recipe's)")
    parser.add_argument("--processes", type=int, default=1, help="of the last row (scoreboard)")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--minutes", type=float, default=1e4, help="skip what would begin later than this")
    parser.add_argument("--quick", action="store_true", help="one round of short turns")
    parser.add_argument("--only", default="", help="rows that this regular expression matches (peers)")
    parser.add_argument("--nanogpt", default="", help="checkout of karpathy/nanoGPT to run beside ours (peers)")
    parser.add_argument("--out", default="bench", help="directory of the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
