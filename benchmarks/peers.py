"""Command: compares the speed of recipe/train.py with peers that do the same work on the same device, in turns. Prints
a table and writes peers.json.

    python -m benchmarks peers --rounds 2 --nanogpt DIRECTORY
"""

import argparse
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import report
from benchmarks.runs import Run, Void, device, shards, speeds_in_turns, trainer
from recipe.config import parse_config
from recipe.engine import hardware
from recipe.utils.errors import ArgumentParser, UserError

COMPARED_STEPS = 20  # steps whose losses must agree
# Largest difference of two runs' losses at a step, in nats: rounding in one precision; bf16's between two precisions.
TOLERANCE, PRECISION_TOLERANCE = 0.01, 0.05
Peer = tuple[str, list, dict]  # name, command, the fields in which it differs from our run


def contenders(precision: str, nanogpt: str, on_cpu: bool) -> list[Peer]:
    """All peers, the most informative first: on a GPU recipe/train.py without the fused loss; nanoGPT's model from a
    checkout; transformers' model and Trainer at their best settings, then without compilation, then the model in fp32.
    On a CPU each peer runs twice: with the default allocator, and with recipe/train.py's. Raises UserError if the
    checkout is missing."""
    program = ["-m", "benchmarks.peer"]
    loop, compiled = "transformers in a bare loop", {"torch_compile": True}
    eager = {"torch_compile": False}
    peers = [
        (f"{loop}, {precision}, compiled", [*program, "transformers"], compiled),
        (f"Trainer, {precision}, compiled", [*program, "trainer"], compiled),
        (f"{loop}, {precision}", [*program, "transformers"], eager),
        (f"Trainer, {precision}", [*program, "trainer"], eager),
    ]
    if precision != "fp32":
        peers.append((f"{loop}, fp32", [*program, "transformers"], eager | {"precision": "fp32"}))
    if nanogpt:
        if not (Path(nanogpt) / "model.py").is_file():
            raise UserError(f"--nanogpt {nanogpt}: no model.py there; give a checkout of karpathy/nanoGPT")
        peers.insert(0, (f"nanoGPT, {precision}, compiled", [*program, nanogpt], compiled))
    if not on_cpu:
        return [("recipe/train.py without the fused loss", trainer(), {"fused_loss": False}), *peers]
    environments = {"as shipped": [], "our allocator": ["--tuned"]}
    return [
        (f"{name}, {environment}", [*command, *options], overrides)
        for name, command, overrides in peers
        for environment, options in environments.items()
    ]


def compare(recipe_run: Run, peer_run: Run, rounds: int, seconds: float, tolerance: float) -> dict:
    """Returns `speeds_in_turns`, peak_memory_bytes of both, and losses_apart, the largest difference over the first
    steps in nats. Raises Void if a run fails, or the losses differ by more than `tolerance`."""
    for run in (peer_run, recipe_run):
        run.turn(0, min_steps=COMPARED_STEPS)
    ours, peers = (  # a line's loss is the mean over its steps; null in our metrics.jsonl is NaN
        np.array([line["loss"] for line in run.lines if line["step"] <= COMPARED_STEPS], dtype=float)
        for run in (recipe_run, peer_run)
    )
    difference = float(np.abs(ours - peers).max())  # NaN if one loss is
    if not difference <= tolerance:
        raise Void(f"losses differ by {difference:.3g} nats")
    return speeds_in_turns(partial(recipe_run.turn, seconds), partial(peer_run.turn, seconds), rounds) | {
        "peak_memory_bytes": [run.lines[-1]["peak_memory_bytes"] for run in (recipe_run, peer_run)],
        "losses_apart": difference,
    }


def measure(fields: dict, peers: list[Peer], arguments: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Yields a dict per peer: its name and the result of `compare`, or a ratio of None and the reason in `void`."""
    with closing(Run(trainer(), fields, directory)) as recipe_run:
        for name, command, overrides in peers:
            row = {"name": name, "void": "", "ratio": None}
            print(f"...        {name}", flush=True)
            tolerance = PRECISION_TOLERANCE if "precision" in overrides else TOLERANCE
            recipe_run.pause()
            try:
                with closing(Run(command, fields | overrides, directory)) as peer_run:
                    yield row | compare(recipe_run, peer_run, arguments.rounds, arguments.seconds, tolerance)
            except Void as void:
                yield row | {"void": str(void)}


def main(argv: list[str]) -> int:
    """Runs the comparison; returns the exit code. Raises UserError for a mistake in the command line."""
    on_cpu = device().type == "cpu"
    arguments = _parser(on_cpu).parse_args(argv)
    recipe = parse_config([f"--config={arguments.config}"])
    fields = {
        "config": recipe.run.config,
        "precision": arguments.precision or hardware.resolve_precision("auto", cpu=on_cpu),
        "micro_batch_size": arguments.micro_batch_size,
        "sequence_length": arguments.sequence_length or recipe.data.sequence_length,
        "gradient_checkpointing": False,
        # A program waits for its GPU to read a loss; the recipes and nanoGPT do so every ten steps.
        "logging_steps": 1 if on_cpu else 10,
    }
    fields["total_batch_tokens"] = fields["micro_batch_size"] * fields["sequence_length"]
    peers = contenders(fields["precision"], arguments.nanogpt, on_cpu)
    peers = [peer for peer in peers if re.search(arguments.only, peer[0])]
    out, rows = Path(arguments.out), []
    results = report.circumstances() | report.measured_model(recipe) | fields | {"rows": rows}
    with shards() as directory:
        for row in measure(fields, peers, arguments, directory):
            rows.append(row)
            report.write(results, out / "peers.json")
    print(f"\n{'recipe/train.py is faster than':<58} {'times (range)':>22} {'losses apart':>13}")
    for r in rows:
        ratio = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**r) if r["ratio"] else f"VOID: {r['void']}"
        print(f"{r['name']:<58} {ratio:>22}" + (f" {r['losses_apart']:>13.1e}" if r["ratio"] else ""))
    return 0


def _parser(on_cpu: bool) -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="python -m benchmarks peers", allow_abbrev=False)
    parser.add_argument("--config", default="shakespeare" if on_cpu else "gpt2", help="recipe whose model is measured")
    parser.add_argument("--precision", default="", help="fp32, tf32, bf16 or fp16 (default: the device's best)")
    parser.add_argument("--micro_batch_size", type=int, default=8 if on_cpu else 64, help="sequences per step")
    parser.add_argument("--sequence_length", type=int, default=0, help="tokens per sequence (default: the recipe's)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds A B B A")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn")
    parser.add_argument("--only", default="", help="only peers whose name matches this regular expression")
    parser.add_argument("--nanogpt", default="", help="checkout of karpathy/nanoGPT, as another peer")
    parser.add_argument("--out", default="bench", help="directory of the results")
    return parser
