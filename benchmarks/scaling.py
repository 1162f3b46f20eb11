"""Command: fits the law by which recipe/best.py chooses a size, and measures how well it predicts.

    python -m benchmarks scaling --texts books.jsonl code.jsonl recipe/data/tiny_shakespeare.txt

Trains sizes and lengths of GRID on each text, as recipe/best.py would. The law is fitted to the first text, and R, what
repeated text is worth, to those that were repeated. On the others the first two runs predict the rest, as trials do in
recipe/best.py. Each run is recipe/train.py itself. recipe/scaling.json keeps the finished ones, and none is repeated;
all of them take an hour on a core.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from benchmarks import report
from recipe.best import SCALING, Text, law, line_through, recipe, survey
from recipe.config import ROOT, parse_config
from recipe.data.producer import open_text
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import UserError

# Layers, width, tokens: for all texts; and for the first.
GRID = ((2, 64, 32_768), (2, 64, 128_000), (2, 64, 512_000), (2, 64, 2_048_000), (4, 128, 1_024_000))
MORE = ((4, 128, 32_768), (4, 128, 128_000), (4, 128, 512_000), (6, 192, 512_000))


def train(text: Text, layers: int, width: int, tokens: int) -> float:
    """The validation loss after so many tokens."""
    values = {name: value for name, (value, _) in recipe((layers, width), text, tokens, 1).items()}
    with tempfile.TemporaryDirectory() as directory:
        values |= {"max_steps": tokens // 1024, "total_batch_tokens": 1024, "output_dir": directory, "seed": 1}
        words = [f"--{name}={value}" for name, value in values.items()]
        code = subprocess.run([sys.executable, ROOT / "recipe/train.py", *words], stdout=subprocess.DEVNULL).returncode
        if code:
            raise UserError(f"recipe/train.py ended with exit code {code}; see its message above")
        return read_metrics(Path(directory) / "metrics.jsonl")[-1]["val_loss"]


def fit(runs: list[dict], law_of: dict[str, float]) -> float:
    """Sets the law's A, a, B, c and R, by which all texts are fitted best, each by a straight line of the law's losses
    (the first by the law itself), and returns the standard deviation of relative errors."""
    names, first = ("A", "a", "B", "c", "R"), runs[0]["text"]
    loss = np.array([run["loss"] for run in runs])
    of_text = {text: np.array([run["text"] == text for run in runs]) for text in dict.fromkeys(r["text"] for r in runs)}

    def error(logarithms: np.ndarray) -> float:
        law_of.update(zip(names, np.exp(logarithms).tolist(), strict=True))
        by_law = np.array([law(tuple(run["size"]), run["tokens"], run["unique"]) for run in runs])
        for text, rows in of_text.items():
            if text != first:
                by_law[rows] = np.polyval(np.polyfit(by_law[rows], loss[rows], 1), by_law[rows])
        return float(np.mean((by_law / loss - 1) ** 2) ** 0.5)

    start = np.log([3.6e10, 0.7, 1.6e13, 0.1, 2.0])  # near Kaplan's exponents, 0.076 and 0.095
    found = minimize(
        error, start, method="Nelder-Mead", options={"maxiter": 20_000, "maxfev": 20_000, "adaptive": True}
    )
    law_of.update(zip(names, (float(f"{value:.5g}") for value in np.exp(found.x)), strict=True))
    return found.fun


def largest_error(runs: list[dict]) -> float:
    """Of the losses of one text, each predicted from its two shortest runs."""
    points = [(law(tuple(run["size"]), run["tokens"], run["unique"]), run["loss"]) for run in runs]
    return max(abs(line_through(points[:2])(value) / loss - 1) for value, loss in points[2:])


def main(argv: list[str]) -> int:
    """Trains what is missing, fits and writes recipe/scaling.json; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks scaling", allow_abbrev=False)
    parser.add_argument("--texts", nargs="+", required=True, help="files; the first is long, and the law is its")
    path, result = ROOT / "recipe" / "scaling.json", SCALING | {"circumstances": report.circumstances()}
    by_text: dict[str, list[dict]] = {}
    for number, name in enumerate(parser.parse_args(argv).texts):
        stem = Path(name).stem
        config = parse_config([f"--dataset_name={name}", f"--run_name={stem}"])
        text = survey(name, open_text(config.data), config, math.inf, math.inf, own=True)
        for layers, width, tokens in (*GRID, *(MORE if number == 0 else ())):
            key = {"text": stem, "size": [layers, width], "tokens": tokens}
            if not any(run.items() >= key.items() for run in result["runs"]):
                loss = train(text, layers, width, tokens)
                result["runs"].append(key | {"unique": round(text.tokens), "loss": round(loss, 4)})
                path.write_text(json.dumps(result, indent=1) + "\n")
                print(f"{stem}: {layers} x {width}, {tokens:,} tokens: {loss:.4f}", flush=True)
        by_text[stem] = [run for run in result["runs"] if run["text"] == stem]
    constants = SCALING["law"]
    residual = fit([run for runs in by_text.values() for run in runs], constants)
    error = {name: round(largest_error(runs), 3) for name, runs in by_text.items()}
    result |= {"law": constants, "residual": round(residual, 4), "errors": error, "error": max(error.values())}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"law: {constants}, within {residual:.2%}\nlargest errors from two runs: {error}")
    return 0
