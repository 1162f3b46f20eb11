"""How fast text is tokenized, beside `datasets.map` with GPT2TokenizerFast on the same file, and how long the default
recipe waits for its data.

    python -m benchmarks data --text articles.parquet

Ratios are of medians of interleaved rounds. Absolute figures belong to the machine that printed them, and all of them
to the text: what a document costs besides its tokens, in Python and on one core, shows where documents are short.
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
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path

from recipe.config import ROOT, DataConfig
from recipe.data.prepare.documents import open_files
from recipe.data.prepare.pipeline import prepare
from recipe.utils.errors import UserError

SPEECHES = 20  # in a document: 932 tokens on the average, about as many as a document of FineWeb


def main(argv: list[str] | None = None) -> int:
    """Prints all figures as they come, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks data", description="How fast data is prepared and read.", allow_abbrev=False
    )
    parser.add_argument("--text", default="", help="file of documents (default: tiny Shakespeare in 362, 20 times)")
    parser.add_argument("--rounds", type=int, default=3, help="of each way to tokenize, interleaved")
    parser.add_argument("--steps", type=int, default=60, help="of the default recipe, for its wait for data")
    arguments = parser.parse_args(argv)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-data-") as directory:
            text, count, characters = _as_jsonl(arguments.text, Path(directory))
            name = arguments.text or "tiny Shakespeare, 20 times"
            what = f"{characters / 1e6:.1f} M characters in {count:,} documents of {characters / count:,.0f}"
            print(f"text       {name}: {what}; {os.cpu_count()} cores")
            _tokenizing(text, Path(directory), arguments.rounds)
            _data_wait(Path(directory), arguments.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _as_jsonl(source: str, directory: Path) -> tuple[Path, int, int]:
    """The text as JSON lines, which both sides read fastest and alike; its documents and characters."""
    path, count, characters = directory / "text.jsonl", 0, 0
    with open(path, "w", encoding="utf-8") as file:
        for document in _documents(source):
            file.write(json.dumps({"text": document}) + "\n")
            count, characters = count + 1, characters + len(document)
    return path, count, characters


def _documents(source: str) -> Iterator[str]:
    if not source:
        speeches = (ROOT / "recipe/data/tiny_shakespeare.txt").read_text().split("\n\n")
        yield from 20 * ["\n\n".join(speeches[i : i + SPEECHES]) for i in range(0, len(speeches), SPEECHES)]
    elif not (files := open_files(source, "text")):
        raise UserError(f"--text {source}: no such file")
    else:
        for document in files.documents():
            yield "".join(document.chunks())


def _tokenizing(text: Path, directory: Path, rounds: int) -> None:
    """Tokens a second of ours and of the peer with as many threads or processes."""
    ways = {
        "ours 1 thread": lambda: _ours(text, directory, 1),
        "datasets.map 1 process": lambda: _peer(text, directory, 1),
        "ours 2 threads": lambda: _ours(text, directory, 2),
        "datasets.map 2 processes": lambda: _peer(text, directory, 2),
    }
    rates, counts = {name: [] for name in ways}, set()
    for _ in range(rounds):
        for name, run in ways.items():
            tokens, seconds = run()
            rates[name].append(tokens / seconds)
            counts.add(tokens)
    assert len(counts) == 1, f"the ways count different numbers of tokens: {counts}"
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"tokenizing {counts.pop():,} tokens, text to file, medians of {rounds} interleaved rounds, without imports")
    for name, rate in medians.items():
        peer = medians[f"datasets.map {'1 process' if ' 1 ' in name else '2 processes'}"]
        spread = f"{min(rates[name]) / 1e6:.2f} to {max(rates[name]) / 1e6:.2f}"
        ratio = f"{rate / peer:5.2f} x datasets.map" if name.startswith("ours") else ""
        print(f"  {name:26} {rate / 1e6:6.2f} M tokens/s ({spread})  {ratio}")


def _ours(text: Path, directory: Path, threads: int) -> tuple[int, float]:
    """Prepares shards in a directory of their own; returns the tokens and the seconds."""
    with tempfile.TemporaryDirectory(dir=directory) as out, redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        manifest = prepare(DataConfig(train_text=str(text), dataset_name=out), threads)
        return manifest.tokens("train") + manifest.tokens("val"), time.perf_counter() - start


PEER = """
import sys, time, datasets, pyarrow.compute as pc
from recipe.data.tokenizer import hf_tokenizer

datasets.disable_caching()
datasets.disable_progress_bars()
tokenizer = hf_tokenizer()
tokenizer.model_max_length = 10**9
text, cache, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
start = time.perf_counter()
rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=cache)
out = rows.map(
    lambda batch: {"ids": tokenizer(batch["text"])["input_ids"]},
    batched=True,
    remove_columns=["text"],
    num_proc=processes if processes > 1 else None,
    load_from_cache_file=False,
)
seconds = time.perf_counter() - start
lengths = pc.list_value_length(out.data["ids"])
print(pc.sum(lengths).as_py() + pc.sum(pc.greater(lengths, 0)).as_py(), seconds)
"""


def _peer(text: Path, directory: Path, processes: int) -> tuple[int, float]:
    """Tokenizes as transformers' run_clm.py does, a process a core; returns the tokens, one end-of-text a document, and
    the seconds, without those of the imports."""
    command = [sys.executable, "-c", PEER, str(text), str(directory / "cache"), str(processes)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    tokens, seconds = _output(command, environment).split()[-2:]
    return int(tokens), float(seconds)


def _data_wait(directory: Path, steps: int) -> None:
    """The share of the default recipe's step time for which it waits for data."""
    fields = {
        "output_dir": directory / "run",
        "dataset_name": directory / "shards",
        "train_text": ROOT / "recipe/data/tiny_shakespeare.txt",
        "max_steps": steps,
        "warmup_steps": 0,
        "eval_steps": 0,
        "eval_tokens": 1024,
        "logging_steps": 10,
    }
    command = [sys.executable, str(ROOT / "recipe/train.py"), *(f"--{name}={value}" for name, value in fields.items())]
    _output(command, dict(os.environ))
    lines = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    wait = statistics.mean(line["data_wait"] for line in lines if line.get("data_wait") is not None)
    print(f"data wait  {100 * wait:.2f} % of the step time in {steps} steps of the default recipe")


def _output(command: list[str], environment: dict[str, str]) -> str:
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise UserError(f"{command[1]} failed: {ran.stderr.strip().splitlines()[-1]}")
    return ran.stdout
