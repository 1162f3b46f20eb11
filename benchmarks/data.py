"""How fast text is tokenized, beside `datasets.map` with GPT2TokenizerFast on the same file.

    python -m benchmarks data --text articles.parquet --output bench-data.json

Ratios are of medians of interleaved rounds; absolute figures belong to the machine that printed them.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

from recipe.config import ROOT, DataConfig
from recipe.data.prepare.documents import open_files
from recipe.data.prepare.pipeline import prepare
from recipe.data.prepare.tokenize import Workers
from recipe.errors import UserError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks data", description="How fast the data are.", allow_abbrev=False
    )
    parser.add_argument("--text", default="", help="file of documents (default: tiny Shakespeare's speeches, 20 times)")
    parser.add_argument("--documents", type=int, default=0, help="first so many of them (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way to tokenize, interleaved")
    parser.add_argument("--steps", type=int, default=60, help="of the default recipe, for its wait for data")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-data-") as directory:
            figures = measure(arguments, Path(directory))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def measure(arguments: argparse.Namespace, directory: Path) -> dict:
    """All figures, printed as they come. Everything is written under `directory`."""
    text = _as_jsonl(arguments.text, arguments.documents, directory)
    print(
        f"text       {arguments.text or 'tiny Shakespeare'}: {text.stat().st_size / 1e6:.1f} MB; {os.cpu_count()} cores"
    )
    figures = {"text": arguments.text, "bytes": text.stat().st_size, "cores": os.cpu_count()}
    figures["tokenizing"] = _tokenizing(text, directory, arguments.rounds)
    figures["data_wait"] = _data_wait(directory, arguments.steps)
    return figures


def _as_jsonl(source: str, documents: int, directory: Path) -> Path:
    """The text as JSON lines: what both sides read fastest, and alike."""
    path = directory / "text.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for index, document in enumerate(_documents(source)):
            if index == documents > 0:
                break
            file.write(json.dumps({"text": document}) + "\n")
    return path


def _documents(source: str) -> Iterator[str]:
    if not source:
        speeches = (ROOT / "recipe/data/tiny_shakespeare.txt").read_text().split("\n\n")
        for _ in range(20):
            yield from speeches
    elif not (files := open_files(source, "text")):
        raise UserError(f"--text {source}: no such file")
    else:
        for document in files.documents():
            yield "".join(document.chunks())


def _tokenizing(text: Path, directory: Path, rounds: int) -> dict:
    def ours(name: str, **crew) -> Callable[[], tuple[int, float]]:
        def run() -> tuple[int, float]:
            out = directory / name
            for path in out.glob("*"):
                path.unlink()
            start = time.perf_counter()
            with redirect_stdout(io.StringIO()):
                manifest = prepare(DataConfig(train_text=str(text), dataset_name=str(out)), Workers(**crew))
            return manifest.tokens("train") + manifest.tokens("val"), time.perf_counter() - start

        return run

    ways = {
        "ours 1 thread": ours("ours 1 thread", threads=1),
        "datasets.map 1 process": lambda: _peer(text, directory, 1),
        "ours 2 threads": ours("ours 2 threads", threads=2),
        "ours 2 processes": ours("ours 2 processes", processes=2),
        "datasets.map 2 processes": lambda: _peer(text, directory, 2),
    }
    rates = {name: [] for name in ways}
    counts = set()
    for _ in range(rounds):
        for name, run in ways.items():
            tokens, seconds = run()
            rates[name].append(tokens / seconds)
            counts.add(tokens)
    if len(counts) > 1:
        raise AssertionError(f"the ways count different numbers of tokens: {counts}")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"tokenizing {counts.pop():,} tokens, text to file, medians of {rounds} interleaved rounds, without imports")
    for name, rate in medians.items():
        peer = medians[f"datasets.map {'1 process' if ' 1 ' in name else '2 processes'}"]
        spread = f"{min(rates[name]) / 1e6:.2f} to {max(rates[name]) / 1e6:.2f}"
        ratio = f"{rate / peer:5.2f} x datasets.map" if name.startswith("ours") else ""
        print(f"  {name:26} {rate / 1e6:6.2f} M tokens/s ({spread})  {ratio}")
    return rates


def _peer(text: Path, directory: Path, processes: int) -> tuple[int, float]:
    """Tokenise as transformers' run_clm.py does, a process a core; returns the tokens, one end-of-text a document, and
    the seconds, without those of the imports."""
    code = (
        "import sys, time, datasets; from recipe.data.tokenizer import hf_tokenizer\n"
        "datasets.disable_caching(); datasets.disable_progress_bars(); tokenizer = hf_tokenizer()\n"
        "tokenizer.model_max_length = 10**9; start = time.perf_counter()\n"
        "rows = datasets.load_dataset('json', data_files=sys.argv[1], split='train', cache_dir=sys.argv[2])\n"
        "n = int(sys.argv[3])\n"
        "out = rows.map(lambda b: {'ids': tokenizer(b['text'])['input_ids']}, batched=True, remove_columns=['text'],\n"
        "               num_proc=n if n > 1 else None, load_from_cache_file=False)\n"
        "seconds = time.perf_counter() - start; import pyarrow.compute as pc\n"
        "lengths = pc.list_value_length(out.data['ids'])\n"
        "print(pc.sum(lengths).as_py() + pc.sum(pc.greater(lengths, 0)).as_py(), seconds)"
    )
    command = [sys.executable, "-c", code, str(text), str(directory / "cache"), str(processes)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise UserError(f"datasets.map failed: {ran.stderr.strip().splitlines()[-1]}")
    tokens, seconds = ran.stdout.split()[-2:]
    return int(tokens), float(seconds)


def _data_wait(directory: Path, steps: int) -> float:
    """Share of the default recipe's step time that it waits for data."""
    run = directory / "run"
    fields = {
        "output_dir": run,
        "dataset_name": directory / "shards",
        "train_text": ROOT / "recipe/data/tiny_shakespeare.txt",
        "max_steps": steps,
        "warmup_steps": 10,
        "eval_steps": 0,
        "eval_tokens": 1024,
        "logging_steps": 10,
    }
    command = [sys.executable, str(ROOT / "recipe/train.py"), *(f"--{name}={value}" for name, value in fields.items())]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise UserError(f"the default recipe failed: {ran.stderr.strip().splitlines()[-1]}")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    wait = float(np.mean([line["data_wait"] for line in lines if line.get("data_wait") is not None]))
    print(f"data wait  {100 * wait:.2f} % of the step time in {steps} steps of the default recipe")
    return wait
