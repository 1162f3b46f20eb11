"""Command: how fast the step is on this machine, what makes it so, and how fast others are.

    python -m benchmarks scoreboard      one row an optimisation
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
from benchmarks import roofline as floor
from benchmarks.bench_config import Setting
from benchmarks.comm_overhead import measure_two
from benchmarks.interleaved import Void, Worker, compare, prepared, workers
from benchmarks.scoreboard import ladder, scoreboard
from benchmarks.scoreboard import lines as scoreboard_lines
from benchmarks.variants import Variant
from benchmarks.worker import make_step
from recipe.engine import device as hardware
from recipe.errors import UserError
from recipe.estimate import cost
from recipe.estimate.memory import MFU, flops_per_token

MODES = ("regional", "default", "max-autotune")
SIZES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


def run_scoreboard(setting: Setting) -> dict:
    """The scoreboard: a table, scoreboard.json, scoreboard.png."""
    results = setting.introduce("scoreboard")
    small = max(1, setting.micro // (2 if setting.on_cpu else 8))
    first, rows = ladder(
        setting.config.model,
        setting.T,
        small,
        setting.micro,
        gpus=setting.gpus,
        on_cpu=setting.on_cpu,
        torch_compile_mode=setting.config.run.torch_compile_mode,
    )
    with prepared() as directory:
        results["rows"] = scoreboard(
            first,
            rows,
            directory,
            flops=results["flops_per_token"],
            peak=results["peak_flops"],
            rounds=setting.rounds,
            seconds=setting.seconds,
            left=lambda: setting.left,
            say=setting.say,
            quick=setting.arguments.quick,
        )
    setting.say("\n" + "\n".join(scoreboard_lines(results["rows"])))
    report.write(results, setting.out / "scoreboard.json")
    report.bars(results, setting.out / "scoreboard.png")
    return results


def run_peers(setting: Setting) -> dict:
    """Peers beside recipe/train.py: a table, peers.json, peers.png."""
    results = setting.introduce("peers")
    ours = setting.ours()
    others = peers.contenders(ours, setting.arguments.nanogpt)
    setting.say(
        f"same       {ours.tokens:,} tokens a step, weights, {ours.precision}, AdamW, clipping; "
        f"{setting.rounds} rounds of A B B A, turns of {setting.seconds:g} s"
    )
    with prepared() as directory:
        results["rows"] = peers.compare_peers(
            ours,
            others,
            directory,
            on_cpu=setting.on_cpu,
            rounds=setting.rounds,
            seconds=setting.seconds,
            left=lambda: setting.left,
            say=setting.say,
            only=setting.arguments.only,
        )
    setting.say("\n" + "\n".join(peers.lines(results["rows"])))
    if setting.arguments.llmc_log:
        results["llm.c"] = peers.llmc_log(Path(setting.arguments.llmc_log))
        setting.say(f"llm.c, by its log: {results['llm.c']['tokens_per_second']:,.0f} tokens/s (another run: no ratio)")
    report.write(results, setting.out / "peers.json")
    report.ratios(results, setting.out / "peers.png")
    return results


def run_sweep(setting: Setting) -> dict:
    """Micro-batch sizes of recipe/train.py, doubled until one does not fit: tokens/s, memory; sweep.json."""
    results = setting.introduce("sweep") | {"rows": []}
    micro, largest = 1, setting.arguments.micro_batch_size or (setting.micro if setting.on_cpu else 512)
    with prepared() as directory:
        while micro <= largest:
            row = alone(setting, setting.ours(micro_batch=micro), directory)
            results["rows"].append({"micro_batch_size": micro} | row)
            setting.say(f"{micro:>5} sequences  {_measured(row)}")
            if row["note"]:
                break
            micro *= 2
    report.write(results, setting.out / "sweep.json")
    return results


def run_compile(setting: Setting) -> dict:
    """Ways to compile, beside none: seconds until the first step is done, speed of the later ones; compile.json."""
    results = setting.introduce("compile") | {"rows": []}
    with (
        prepared(fresh=True) as directory,
        workers(directory, setting.ours(name="not compiled", compile="")) as (plain,),
    ):
        for mode in MODES:
            row = {"mode": mode, "note": "left out: the time is up"}
            if setting.left > 0:
                with workers(directory, setting.ours(name=mode, compile=mode)) as (worker,):
                    row = _compiled(setting, worker, plain) | {"mode": mode}
            results["rows"].append(row)
            setting.say(f"{mode:<14} {row['note']}")
    report.write(results, setting.out / "compile.json")
    return results


def _compiled(setting: Setting, worker: Worker, plain: Worker) -> dict:
    try:
        first = worker.run(1)
        found = compare(worker, plain, setting.rounds, setting.seconds)
    except Void as void:
        return {"note": str(void)}
    low, high = found.interval()
    note = f"{found.ratio:.2f}x ({low:.2f} to {high:.2f}) of not compiled; first step after {first:.0f} s"
    return {"first_step_seconds": first, "speedup": [found.ratio, low, high], "note": note}


def run_sizes(setting: Setting) -> dict:
    """The four sizes of GPT-2 with their recipes: tokens/s, MFU, memory beside what was reckoned; sizes.json."""
    if setting.on_cpu:
        raise UserError("the four sizes are for a GPU: the largest would take a CPU minutes a step")
    results = setting.introduce("sizes") | {"rows": []}
    with prepared() as directory:
        for name in SIZES:
            setting.set_recipe(name)
            compiled = setting.config.run.torch_compile
            setting.micro = setting.arguments.micro_batch_size or setting.fitting(compiled)
            row = alone(setting, setting.ours(), directory)
            reckoned = setting.reckoned(setting.micro, compiled)
            row |= {"recipe": name, "micro_batch_size": setting.micro, "memory_reckoned_bytes": reckoned}
            results["rows"].append(row)
            setting.say(f"{name:<12} {setting.micro:>3} sequences  {_measured(row)}, reckoned {reckoned / 1e9:.1f} GB")
    setting.set_recipe(setting.recipe)
    report.write(results, setting.out / "sizes.json")
    return results


def alone(setting: Setting, variant: Variant, directory: Path) -> dict:
    """A variant by itself, the median of turns: tokens_per_second, mfu, peak_memory_bytes; null where `note` says
    why."""
    result = dict.fromkeys(("tokens_per_second", "mfu", "peak_memory_bytes")) | {"note": ""}
    if setting.left < 0:
        return result | {"note": "left out: the time is up"}
    worker = Worker(variant, directory)
    try:
        worker.run(1)
        steps = max(1, round(setting.seconds / worker.run(1)))
        turns = sorted(worker.run(steps) for _ in range(2 * setting.rounds + 1))
        rate = variant.tokens / turns[setting.rounds]
        flops = flops_per_token(variant.model, variant.sequence_length)
        peak = setting.peak
        return result | {
            "tokens_per_second": rate,
            "mfu": rate * flops / peak if peak else None,
            "peak_memory_bytes": worker.peak_memory,
        }
    except Void as void:
        return result | {"note": str(void)}
    finally:
        worker.close()


def _measured(row: dict) -> str:
    if row["note"]:
        return row["note"]
    mfu = f"  MFU {100 * row['mfu']:.1f} %" if row["mfu"] is not None else ""
    return f"{row['tokens_per_second']:>10,.0f} tokens/s{mfu}  {row['peak_memory_bytes'] / 1e9:.2f} GB"


def run_profile(setting: Setting) -> dict:
    """Where the time of a step goes, by group of kernels, and how near the step is to its floor; profile.json."""
    results = setting.introduce("profile")
    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    ours = setting.ours()
    with prepared() as directory:
        actual = alone(setting, ours, directory)["tokens_per_second"]
        profile.name_compiled_kernels()
        as_the_engine = {"pad_vocab_to": hardware.pad_vocab_to(device)}
        if setting.on_cpu:
            as_the_engine |= {"loss_by_rows": True, "attention": "blocks" if ours.precision == "bf16" else "sdpa"}
        step = make_step(ours.but(kind="loop", **as_the_engine), f"{directory}/shards")
        results["profile"] = profile.profile_step(step, device)
        del step
        torch.compiler.reset()
    results["floor"] = floor.measure_floor(
        ours.model, ours.micro_batch, setting.T, device, ours.precision, actual=1e6 / actual if actual else None
    )
    gc.collect()
    hardware.release_memory()  # for the workers of what comes next
    setting.say("\n".join(profile.lines(results["profile"]) + floor.lines(results["floor"])))
    report.write(results, setting.out / "profile.json")
    return results


def run_scaling(setting: Setting) -> dict:
    """What talking costs DDP and ZeRO: by arithmetic for 8, 64 and 512 GPUs, and between two processes here;
    scaling.json."""
    results = report.circumstances() | {"table": scaling.table(), "anchors": scaling.anchors()}
    results["two_processes"] = measure_two() if setting.left > 60 else None
    setting.say("\n".join(scaling.lines(results["table"], results["two_processes"])))
    report.write(results, setting.out / "scaling.json")
    return results


def run_cost(setting: Setting) -> dict:
    """How long GPT-2's sizes take and what they cost, at --mfu and --price_per_hour; cost.json."""
    mfu, price = setting.arguments.mfu, setting.arguments.price_per_hour
    if not 0 < mfu <= 1 or price < 0:
        raise UserError(f"--mfu {mfu:g} --price_per_hour {price:g}: a share between 0 and 1, and dollars")
    results = {"table": cost.table(mfu, price)}
    setting.say("\n".join(cost.lines(results["table"], price)))
    report.write(results, setting.out / "cost.json")
    return results


def run_all(setting: Setting) -> dict:
    """All of them, one after the other, within --minutes; <device>.json has all figures."""
    results = report.circumstances()
    with prepared():  # one for all: what is compiled twice is compiled once
        return _run_all(setting, results)


# In the order of their worth; what one leaves of its share goes to those after it.
SHARES = {"peers": 30, "scoreboard": 35, "profile": 7, "sizes": 15, "sweep": 10, "compile": 8, "scaling": 5}


def _run_all(setting: Setting, results: dict) -> dict:
    shares = list(SHARES.items())
    for at, (name, share) in enumerate(shares):
        left = setting.whole_left
        setting.say(f"\n=== {name}, {left / 60:.1f} minutes left")
        if left < 20:
            results[name] = {"note": "left out: the time is up"}
            setting.say(results[name]["note"])
            continue
        try:
            with setting.within(left * share / sum(s for _, s in shares[at:])):
                results[name] = COMMANDS[name](setting)
        except UserError as error:
            results[name] = {"note": str(error)}
            setting.say(results[name]["note"])
        except Exception as error:  # the others are worth having without it
            traceback.print_exc()
            results[name] = {"note": f"failed: {error!r}"}
        slug = "-".join(results["device"].lower().replace("(", "").replace(")", "").split())
        report.write(results, setting.out / f"{slug}.json")
    return results


COMMANDS: dict[str, Callable[[Setting], dict]] = {
    "scoreboard": run_scoreboard,
    "peers": run_peers,
    "sweep": run_sweep,
    "sizes": run_sizes,
    "profile": run_profile,
    "compile": run_compile,
    "scaling": run_scaling,
    "cost": run_cost,
    "all": run_all,
}


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    started = time.monotonic()
    try:
        COMMANDS[arguments.command](Setting(arguments))
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
            f"{name:<12} {function.__doc__.split('; ')[0].split(':')[0].strip().rstrip('.')}"
            for name, function in COMMANDS.items()
        ),
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--config", default="", help="recipe whose model is measured (default: by the device)")
    parser.add_argument("--precision", default="", help="fp32, tf32, bf16 or fp16 (default: the device's best)")
    parser.add_argument("--micro_batch_size", type=int, default=0, help="sequences at once (default: what fits, to 64)")
    parser.add_argument("--sequence_length", type=int, default=0, help="tokens a sequence (default: the recipe's)")
    parser.add_argument("--rounds", type=int, default=3, help="of A B B A")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("--minutes", type=float, default=1e4, help="leave out what would begin later than this")
    parser.add_argument("--quick", action="store_true", help="one round of short turns")
    parser.add_argument("--only", default="", help="rows that this regular expression matches (peers)")
    parser.add_argument("--mfu", type=float, default=MFU, help="assumed share of a device's peak (cost)")
    parser.add_argument("--price_per_hour", type=float, default=0.0, help="dollars an hour of one device (cost)")
    parser.add_argument("--nanogpt", default="", help="checkout of karpathy/nanoGPT to run beside ours (peers)")
    parser.add_argument("--llmc_log", default="", help="what llm.c's train_gpt2cu printed, to quote (peers)")
    parser.add_argument("--out", default="bench", help="directory of the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
