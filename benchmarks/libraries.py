"""Compares two parts of this project with libraries that do the same, in turns (A B B A), so that each ratio compares
neighbors in time.

    python -m benchmarks data --text articles.parquet     tokenizing, beside datasets.map with GPT2TokenizerFast
    python -m benchmarks hellaswag [MODEL]                 HellaSwag, beside lm-evaluation-harness

The rate of tokenizing depends on the text: the fixed cost of a document shows if documents are short.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import GELUTanh, NewGELUActivation

from benchmarks.runs import interleave, times_as_fast
from eval import common, harness
from eval import hellaswag as scorer
from recipe.config import ROOT, DataConfig
from recipe.data.documents import Column, TextFiles
from recipe.data.prepare import prepare
from recipe.data.tokenizer import hf_tokenizer, open_tokenizer
from recipe.utils.errors import UserError

SPEECHES = 20  # of tiny Shakespeare per document: 932 tokens, about as many as in a FineWeb document


def compare(ways: Mapping[str, Callable[[], tuple[float, object]]], rounds: int, amount: float, unit: str) -> dict:
    """Prints each way's rate and its speed relative to the last one. A way returns its seconds and its result; returns
    the result of each."""
    found = {name: way()[1] for name, way in ways.items()}  # warm-up: imports, allocations, first reads
    rates = interleave({name: lambda way=way: amount / way()[0] for name, way in ways.items()}, rounds)
    *_, peer = rates.values()
    for name, turns in rates.items():
        times = "{ratio:.2f} times ({low:.2f} to {high:.2f})".format(**times_as_fast(turns, peer))
        print(f"{name:<34} {statistics.median(turns):>10.2f} {unit}/s {times if turns is not peer else ''}")
    return found


def tokenizing(argv: list[str]) -> int:
    """Text to a file of tokens with one core and with two; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks data", allow_abbrev=False)
    parser.add_argument("--text", default="", help="file of documents (default: tiny Shakespeare, 20 times)")
    parser.add_argument("--rounds", type=int, default=2, help="of two turns each")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        text = Path(name) / "text.jsonl"  # the format that both read fastest and in the same way
        documents = list(_documents(arguments.text))
        text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        characters = sum(map(len, documents))
        print(f"text       {characters / 1e6:.1f} M characters in {len(documents):,} documents; {os.cpu_count()} cores")
        for cores in (1, 2):
            ways = {
                f"this project, {cores} threads": partial(_prepare, text, cores),
                f"datasets.map, {cores} processes": partial(_map, text, cores),
            }
            tokens = set(compare(ways, arguments.rounds, characters / 1e6, "M characters").values())
            assert len(tokens) == 1, f"the two count different numbers of tokens: {tokens}"
    return 0


def _documents(source: str) -> Iterable[str]:
    if not source:
        speeches = (ROOT / "recipe/data/tiny_shakespeare.txt").read_text().split("\n\n")
        return 20 * ["\n\n".join(speeches[i : i + SPEECHES]) for i in range(0, len(speeches), SPEECHES)]
    files = TextFiles(source, Column("text", open_tokenizer("gpt2")))
    if not files.paths:
        raise UserError(f"--text {source}: no such file")
    return ("".join(map(str, document.pieces)) for document in files.documents())


def _prepare(text: Path, threads: int) -> tuple[float, int]:
    """Seconds to prepare shards, and their tokens."""
    with tempfile.TemporaryDirectory(dir=text.parent) as out, redirect_stdout(io.StringIO()):
        start = time.perf_counter()
        manifest = prepare(DataConfig(train_text=str(text), dataset_name=out), threads)
        return time.perf_counter() - start, manifest.tokens("train") + manifest.tokens("val")


_MAP = """
import sys, time, datasets
from recipe.data.tokenizer import hf_tokenizer

datasets.disable_progress_bars()
tokenizer = hf_tokenizer(max_length=10**9)
text, cache, processes = sys.argv[1], sys.argv[2], int(sys.argv[3])
start = time.perf_counter()
pool = processes if processes > 1 else None
rows = datasets.load_dataset("json", data_files=text, split="train", cache_dir=cache)
encode = lambda batch: {"ids": tokenizer(batch["text"])["input_ids"]}
out = rows.map(encode, batched=True, remove_columns=["text"], num_proc=pool, load_from_cache_file=False)
seconds = time.perf_counter() - start
lengths = [len(row) for batch in out.iter(1000) for row in batch["ids"]]
print(seconds, sum(lengths) + sum(length > 0 for length in lengths))
"""


def _map(text: Path, processes: int) -> tuple[float, int]:
    """The same as in transformers' run_clm.py, with one end-of-text per document; in a separate process, since datasets
    forks, which would take longer from this one."""
    command = [sys.executable, "-c", _MAP, text, text.parent / "cache", str(processes)]
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise UserError(f"datasets.map failed: {ran.stderr.strip().splitlines()[-1]}")
    seconds, tokens = ran.stdout.split()[-2:]
    return float(seconds), int(tokens)


def hellaswag(argv: list[str]) -> int:
    """Times HellaSwag from rows in memory to accuracies, with the same weights, rows, batch and device; returns the
    exit code. Without MODEL: GPT-2 124M with random weights, which takes the same time."""
    parser = common.parser("HellaSwag's speed beside lm-evaluation-harness.", batch_size=16, batch_unit="rows")
    parser.add_argument("--rows", type=common.positive_int, default=100, help="spread over all 10,042 (default: 100)")
    parser.add_argument("--rounds", type=common.positive_int, default=2, help="of two turns each")
    arguments = parser.parse_args(argv)

    def measure() -> None:
        harness.require()
        loaded = common.load(arguments) if arguments.model else _random_gpt2(arguments)
        rows = scorer.load_rows()[:: -(-10042 // arguments.rows)]
        print(f"{loaded.describe()}, {len(rows)} rows, {torch.get_num_threads()} threads")
        compare(hellaswag_ways(loaded, rows, arguments.batch_size), arguments.rounds, len(rows), "rows")

    common.run_main(measure)
    return 0


def hellaswag_ways(loaded: common.Loaded, rows: list[dict], batch_size: int) -> dict[str, Callable]:
    """Ways to score the rows, each returning seconds and accuracies; the harness gets a copy of the model as
    transformers builds it, without the changes that `common.load` makes for speed."""
    model = copy.deepcopy(loaded.model)
    for name, module in list(model.named_modules()):
        if isinstance(module, GELUTanh):
            model.set_submodule(name, NewGELUActivation())

    def ours(ways: tuple[str, ...]) -> tuple[float, dict]:
        start = time.perf_counter()
        found = scorer.accuracies(scorer.score_rows(loaded.lm, rows, batch_size=batch_size, ways=ways), rows)
        return time.perf_counter() - start, found

    def theirs() -> tuple[float, dict]:
        from lm_eval import evaluate
        from lm_eval.models.huggingface import HFLM

        with harness.quiet(), harness.local_tasks({"hellaswag": rows}, ["hellaswag"]) as manager:
            tasks = manager.load(["hellaswag"])
            lm = HFLM(model, tokenizer=loaded.tokenizer, batch_size=4 * batch_size)  # in endings, four a row
            start = time.perf_counter()
            found = evaluate(lm, tasks, bootstrap_iters=0)["results"]["hellaswag"]
            return time.perf_counter() - start, {
                f"lmeval_{kind}": found[f"{kind},none"] for kind in ("acc", "acc_norm")
            }

    return {
        "this project, both ways": lambda: ours(("llmc", "lmeval")),
        "this project, lm-eval-style": lambda: ours(("lmeval",)),
        "lm-evaluation-harness": theirs,
    }


def _random_gpt2(arguments: argparse.Namespace) -> common.Loaded:
    torch.manual_seed(0)
    device = common.choose_device(arguments.device)
    dtype = common.choose_dtype(arguments.dtype, device)
    model = GPT2LMHeadModel(GPT2Config(activation_function="gelu_pytorch_tanh")).eval().to(device, dtype)
    return common.Loaded("GPT-2 124M, random weights", None, model, hf_tokenizer())
