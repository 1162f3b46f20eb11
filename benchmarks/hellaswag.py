"""How fast HellaSwag is scored beside lm-evaluation-harness:

    python -m benchmarks hellaswag [MODEL] [--rows N] [--rounds N]

The same weights, rows, batch and device; each is timed from rows in memory to accuracies. Turns go A B C C B A, so that
a ratio is of neighbors in time. The harness has its own copy of the model, as transformers builds it. Without MODEL it
is GPT-2 124M with random weights, which take the same time.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast
from transformers.activations import GELUTanh, NewGELUActivation

from eval import common, devices, harness, hellaswag

BPE = Path(__file__).resolve().parent.parent / "recipe" / "data" / "gpt2_bpe"
OURS_BOTH, OURS, THEIRS = "this project, both ways", "this project, lm-eval-style", "lm-evaluation-harness"


def random_gpt2(device: torch.device, dtype: torch.dtype) -> common.Loaded:
    """GPT-2 124M before its first step."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(activation_function="gelu_pytorch_tanh")).eval()
    tokenizer = GPT2TokenizerFast(vocab=str(BPE / "encoder.json"), merges=str(BPE / "vocab.bpe"))
    return common.Loaded("GPT-2 124M, random weights", None, model.to(device, dtype), tokenizer, device, dtype)


def as_transformers_builds_it(loaded: common.Loaded) -> common.Loaded:
    """A copy of the model without what `common.load` has changed for speed."""
    model = copy.deepcopy(loaded.model)
    if model.config.model_type == "gpt2" and model.config.activation_function == "gelu_pytorch_tanh":
        for name, module in list(model.named_modules()):
            if isinstance(module, GELUTanh):
                model.set_submodule(name, NewGELUActivation())
    return common.Loaded(loaded.name, loaded.directory, model, loaded.tokenizer, loaded.device, loaded.dtype)


def ours(loaded: common.Loaded, rows: list[dict], batch_size: int, ways: tuple[str, ...]) -> tuple[float, dict]:
    """(seconds, {"llmc": {"acc": ...}, "lmeval": ...}), as the command computes them."""
    start = time.perf_counter()
    scores = hellaswag.score_rows(loaded.lm, rows, batch_size=batch_size, ways=ways)
    found = hellaswag.accuracies(scores, rows)
    return time.perf_counter() - start, found


def theirs(loaded: common.Loaded, rows: list[dict], batch_size: int) -> tuple[float, dict]:
    """The same by the harness, whose task files and data set are made before the clock starts."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    with harness.quiet(), harness.local_tasks({"hellaswag": rows}, ["hellaswag"]) as manager:
        tasks = manager.load(["hellaswag"])
        lm = HFLM(loaded.model, tokenizer=loaded.tokenizer, batch_size=batch_size)
        start = time.perf_counter()
        results = evaluate(lm, tasks, bootstrap_iters=0)
        seconds = time.perf_counter() - start
    found = results["results"]["hellaswag"]
    return seconds, {"lmeval": {name: found[f"{name},none"] for name in ("acc", "acc_norm")}}


def measure(variants: dict[str, Callable], rounds: int) -> tuple[dict[str, list[float]], dict[str, dict]]:
    """Seconds of each turn, two a round, and what each variant has found."""
    seconds, found = {name: [] for name in variants}, {}
    for number in range(rounds):
        for name in [*variants, *reversed(variants)]:
            turn, found[name] = variants[name]()
            seconds[name].append(turn)
            print(f"round {number + 1} of {rounds}: {name:<30} {turn:8.1f} s", flush=True)
    return seconds, found


def report(seconds: dict[str, list[float]], rows: int) -> str:
    """Rows a second, and how many times as fast as the harness: median of the ratios of turns, and their range."""
    lines = [f"{'':<30} {'rows/s':>8}  times the harness (lowest to highest of {len(seconds[THEIRS])} turns)"]
    for name, turns in seconds.items():
        ratios = [b / a for a, b in zip(turns, seconds[THEIRS], strict=True)]
        spread = "" if name == THEIRS else f"  ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"{name:<30} {rows / statistics.median(turns):>8.2f}  {statistics.median(ratios):.2f}{spread}")
    return "\n".join(lines)


def _arguments() -> argparse.ArgumentParser:
    parser = common.parser("HellaSwag's speed beside lm-evaluation-harness.", batch_size=16, batch_unit="rows")
    parser.add_argument("--rows", type=common.positive_int, default=100, help="spread over all 10,042 (default: 100)")
    parser.add_argument("--rounds", type=common.positive_int, default=2, help="of two turns each")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Compares the two for one model and prints a table; returns the exit code."""
    common.run_main(lambda: compare(_arguments().parse_args(argv)))
    return 0


def compare(args: argparse.Namespace) -> None:
    """Raises UserError where lm-eval is not installed, or there is no such model."""
    harness.require()
    if args.model:
        loaded = common.load(args, shared=True)
    else:
        device = devices.choose_device(args.device, shared=True)
        loaded = random_gpt2(device, common.choose_dtype(args.dtype, device))
    plain = as_transformers_builds_it(loaded)
    rows = hellaswag.load_rows()[:: -(-10042 // args.rows)]
    about = loaded.describe()
    threads = f", {torch.get_num_threads()} threads" if loaded.device.type == "cpu" else ""
    print(
        f"{loaded.name}, {about['device']}{threads}, {about['dtype']}, {len(rows)} rows, batches of "
        f"{args.batch_size} rows and, the harness, {4 * args.batch_size} endings"
    )
    variants = {
        OURS_BOTH: lambda rows=rows: ours(loaded, rows, args.batch_size, ("llmc", "lmeval")),
        OURS: lambda rows=rows: ours(loaded, rows, args.batch_size, ("lmeval",)),
        THEIRS: lambda rows=rows: theirs(plain, rows, 4 * args.batch_size),
    }
    for variant in variants.values():  # what is imported, allocated and read once
        variant(rows[:: -(-len(rows) // 4)])
    seconds, found = measure(variants, args.rounds)
    print("\n" + report(seconds, len(rows)))
    b = found[THEIRS]["lmeval"]
    print(
        f"\nthe harness finds acc {b['acc']:.4f}, acc_norm {b['acc_norm']:.4f}; this project, lm-eval-style, acc "
        f"{found[OURS]['B']['acc']:.4f}, acc_norm {found[OURS]['B']['acc_norm']:.4f}"
    )
    if args.output:
        results = {"rows": len(rows), "batch_size": args.batch_size, "seconds": seconds, "found": found}
        common.write_results(args.output, "bench", about | results)
