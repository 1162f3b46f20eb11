"""Command: measures the speed of recipe/train.py by optimization, micro-batch, processes and size, and lists published
speeds below. Each row is a separate run, timed by its metrics.jsonl. Writes scoreboard.json and scoreboard.md.

    python -m benchmarks scoreboard --sweep micro_batch_size --sizes gpt2 gpt2-medium gpt2-large gpt2-xl
    python -m benchmarks scoreboard --merge h100/scoreboard.json cpu/scoreboard.json     several machines in one table

Rows in brackets are measured, but the rows below do not build on them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.runs import Run, Void, device, shards, trainer
from eval.published import SIZES, SLOWER, SPEED_SOURCES, SPEEDS, Speed
from recipe.config import ModelConfig, parse_config
from recipe.engine import hardware
from recipe.estimate.memory import flops_per_token
from recipe.utils.errors import ArgumentParser
from recipe.utils.units import si

COLUMNS = {  # key of a row -> heading, format
    "machine": ("machine", "{}"),
    "name": ("setup", "{}"),
    "size": ("model", "{}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "gain": ("x first", "{:,.2f}"),
    "mfu": ("MFU", "{:.1%}"),
    "memory_gb": ("memory, GB", "{:.2f}"),
    "source": ("source", "{}"),
}


@dataclass(frozen=True)
class Row:
    """A run: the fields in which it differs from the rows kept so far or, for a model size, from its recipe. "without"
    lists what benchmarks/plain.py omits."""

    name: str
    overrides: dict
    kept: bool = False  # the rows below build on it, if it runs
    processes: int = 1


def rows_of(arguments: argparse.Namespace, length: int, on_cpu: bool) -> list[Row]:
    """The requested runs in order. A step has `arguments.sequences` sequences per process, in several micro-batches up
    to the row "micro-batch"."""
    sequences = arguments.sequences
    baseline = {"precision": "fp32", "micro_batch_size": max(1, sequences // (2 if on_cpu else 8))}
    baseline |= {"torch_compile": False, "loss_chunk_size": 0, "gradient_checkpointing": False, "fused_loss": False}
    baseline |= {"without": ("attention", "vocabulary", "adamw")}  # where the scaling journal and build-nanogpt start
    rows = [
        Row("fp32", baseline, kept=True),
        Row("tf32", {"precision": "tf32"}, kept=True),
        Row("best precision", {"precision": "auto"}, kept=True),
        Row("fused attention", {"without": ("vocabulary", "adamw")}, kept=True),
        Row("compile", {"torch_compile": True}, kept=True),
        *([] if on_cpu else [Row("padded vocabulary", {"without": ("adamw",)}, kept=True)]),  # a CPU does not pad it
        Row("fused AdamW", {"without": ()}, kept=True),
        Row(f"micro-batch {sequences}", {"micro_batch_size": sequences}, kept=True),
        *([] if on_cpu else [Row("fused loss", {"fused_loss": "auto"}, kept=True)]),
        Row("(loss in chunks)", {"loss_chunk_size": max(128, sequences * length // 8)}),
        Row("(gradient checkpointing)", {"gradient_checkpointing": True}),
    ]
    field, _, values = arguments.sweep.partition("=")
    if field:
        powers = [2**n for n in range(sequences.bit_length()) if sequences % 2**n == 0]
        rows += [Row(f"{field} {value}", {field: value}) for value in (values.split(",") if values else powers)]
    rows += [Row(f"{n} processes", {}, processes=n) for n in arguments.processes]
    rows += [Row(size, {"config": size}) for size in arguments.sizes]
    return [row for row in rows if re.search(arguments.only, row.name)]


def cpu_peak() -> float:
    """FLOP/s of this process's threads in a matrix product: those of one thread, times the number of threads. (Several
    threads would wait for the slowest, which says little on a busy machine.)"""
    dtype = torch.bfloat16 if hardware.resolve_precision("auto", cpu=True) == "bf16" else torch.float32
    a, threads = torch.ones(256, 256, dtype=dtype), torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = hardware.seconds_of(lambda: a @ a)
    torch.set_num_threads(threads)
    return threads * 2 * 256**3 / seconds


def measure(arguments: argparse.Namespace, directory: Path) -> Iterator[dict]:
    """Yields each row with the keys of COLUMNS; a row without a speed has the reason in `source`."""
    on_cpu, deadline = device().type == "cpu", time.monotonic() + 60 * arguments.minutes
    conditions = report.circumstances()
    device_name = conditions["device"]
    peak = cpu_peak() if on_cpu else hardware.peak_flops(device_name)
    recipe = parse_config([f"--config={arguments.config}"])
    best = {"config": recipe.run.config}
    for row in rows_of(arguments, recipe.data.sequence_length, on_cpu):
        fields = row.overrides if row.name in arguments.sizes else best | row.overrides
        config, n = parse_config([f"--config={fields['config']}"]), row.processes
        fields = fields | {"total_batch_tokens": arguments.sequences * config.data.sequence_length * n}
        omitted = fields.pop("without", ())
        machine = device_name if on_cpu else f"{n} x {device_name}"
        model = report.measured_model(config)
        result = dict.fromkeys(COLUMNS) | model | {"machine": machine, "name": row.name, "processes": n}
        result |= {"size": si(model["model"]["parameters"], "B"), "source": f"measured {conditions['date']}"}
        print(f"...        {row.name}", flush=True)
        try:
            if (seconds_left := deadline - time.monotonic()) < 0:
                raise Void("skipped: time is up")
            with closing(Run(trainer(n, omitted if n == 1 else ()), fields, directory, n)) as run:
                rate = run.turn(arguments.seconds, timeout=min(seconds_left, 600))
                memory = run.lines[-1]["peak_memory_bytes"]
        except Void as reason:
            yield result | {"source": str(reason)}
            continue
        if row.kept:
            best |= row.overrides
        if peak:
            result["mfu"] = rate * model["flops_per_token"] / (peak if on_cpu else peak * n)
        yield result | {"tokens_per_second": rate, "memory_gb": memory / 1e9 if memory else None}


def published_rows() -> list[dict]:
    """The published speeds with the keys of COLUMNS; `gain` is over the first row of the same source."""
    rows = []
    for source in SPEED_SOURCES:
        runs = [run for run in (*SLOWER, *SPEEDS) if run.run == source]
        rows += add_gains([_published(run) for run in runs])
    return rows


def _published(run: Speed) -> dict:
    row = dict.fromkeys(COLUMNS) | {"machine": f"{run.count} x {run.device}", "name": run.setup, "size": run.size}
    if peak := hardware.peak_flops(run.device):
        layers, width = next(shape for shape, size in SIZES.items() if size == run.size)
        flops = run.tokens_per_second * flops_per_token(ModelConfig(n_layer=layers, n_embd=width), 1024)
        row["mfu"] = flops / (run.count * peak)
    return row | {"tokens_per_second": run.tokens_per_second, "source": f"published: {run.run}"}


def add_gains(rows: list[dict]) -> list[dict]:
    """The rows, with `gain` over the first that has a speed where the model is the same."""
    timed_rows = [row for row in rows if row["tokens_per_second"]]
    same_model_rows = [row for row in timed_rows if row["size"] == timed_rows[0]["size"]]
    for row in same_model_rows if len(same_model_rows) > 1 else ():
        row["gain"] = row["tokens_per_second"] / same_model_rows[0]["tokens_per_second"]
    return rows


def table(measured_rows: list[dict]) -> str:
    """All rows in Markdown, and below them the published ones."""
    rows = [*add_gains(measured_rows), *published_rows()]
    cells = [[heading for heading, _ in COLUMNS.values()]]
    for row in rows:
        cells.append(["" if row[key] is None else fmt.format(row[key]) for key, (_, fmt) in COLUMNS.items()])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    note = f"MFU by {report.FLOPS_FORMULA}, of the half-precision peak, on a CPU of the speed of a matrix product. "
    note += "Memory per device, or per process."
    return "\n".join([*lines, "", note, *(f"{run}: {source}." for run, source in SPEED_SOURCES.items())]) + "\n"


def main(argv: list[str]) -> int:
    """Measures or merges; returns the exit code. Raises UserError for a mistake in the command line."""
    arguments = _parser(device().type == "cpu").parse_args(argv)
    out, rows = Path(arguments.out), []
    if arguments.merge:
        rows = [row for path in arguments.merge for row in json.loads(path.read_text())["rows"]]
        out.mkdir(parents=True, exist_ok=True)
    else:
        with shards() as directory:
            for row in measure(arguments, directory):
                rows.append(row)
                report.write(report.circumstances() | {"rows": add_gains(rows)}, out / "scoreboard.json")
    (out / "scoreboard.md").write_text(table(rows))
    print("\n" + table(rows))
    return 0


def _parser(on_cpu: bool) -> argparse.ArgumentParser:
    max_processes = os.cpu_count() or 1 if on_cpu else torch.cuda.device_count()
    parser = ArgumentParser(prog="python -m benchmarks scoreboard", allow_abbrev=False)
    parser.add_argument("--config", default="shakespeare" if on_cpu else "gpt2", help="recipe whose model is measured")
    parser.add_argument("--sequences", type=int, default=8 if on_cpu else 64, help="sequences per step and process")
    parser.add_argument("--sweep", default="", help="micro_batch_size, or any field with values: FIELD=1,2,3")
    counts = [n for n in (2, 4, 8) if n <= max_processes]
    parser.add_argument(
        "--processes", type=int, nargs="*", default=counts, help=f"numbers of DDP processes (default: {counts})"
    )
    parser.add_argument("--sizes", nargs="*", default=[], help="recipes to measure unchanged: gpt2 gpt2-medium ...")
    parser.add_argument("--only", default="", help="only rows whose name matches this regular expression")
    parser.add_argument("--seconds", type=float, default=10.0, help="minimum per row")
    parser.add_argument("--minutes", type=float, default=30, help="maximum for all rows")
    parser.add_argument("--merge", nargs="+", type=Path, help="merge these scoreboard.json files instead of measuring")
    parser.add_argument("--out", default="bench", help="directory of the results")
    return parser
