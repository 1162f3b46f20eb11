"""Command: fits the scaling law by which recipe/best.py chooses a size, and measures how well it predicts.

    python -m benchmarks scaling --texts books.jsonl code.jsonl recipe/data/tiny_shakespeare.txt

Trains the sizes and lengths of GRID on each text, as recipe/best.py would. The law is fitted to these runs and to all
in recipe/estimate/scaling.json (for three texts recipe/best.py's own runs and their neighbors; its run on an H200, and
published ones of billions of tokens, each with its source), each text with a line of its own. Its predictions are then
measured as recipe/best.py uses them: two short runs on a text predict the loss of a longer one; also by the law fitted
to the other texts alone. Each run is recipe/train.py itself. None is repeated; a text takes ten minutes on a core.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import tempfile
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from benchmarks import report
from benchmarks.runs import train_to_end
from recipe.config import ROOT, parse_config
from recipe.data.producer import open_text
from recipe.data.survey import Text, survey
from recipe.estimate.forecast import fields_for
from recipe.estimate.scaling import SCALING, error_of, law, line_through
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ArgumentParser, UserError

# Layers, width, tokens.
GRID = ((2, 64, 32_768), (2, 64, 128_000), (2, 64, 512_000), (4, 128, 1_024_000), (2, 64, 2_048_000))
MIN_TRIAL_GAP = 0.5  # nats by the law: the smallest difference of recipe/best.py's two trials


def train(text: Text, layers: int, width: int, tokens: int) -> float:
    """Trains a size for this many tokens; returns the validation loss."""
    values = {name: value for name, (value, _) in fields_for((layers, width), text, tokens, 1).items()}
    with tempfile.TemporaryDirectory() as directory:
        values |= {"max_steps": tokens // 1024, "total_batch_tokens": 1024, "output_dir": directory, "seed": 1}
        values["eval_tokens"] = 65_536  # all validation tokens of a short text
        if train_to_end(values):
            raise UserError("the run was stopped; the same command trains it again")
        return read_metrics(Path(directory) / "metrics.jsonl")[-1]["val_loss"]


def fit(runs_by_text: list[list[dict]]) -> float:
    """Sets the constants of recipe/best.py's law: A, a, c and R bring each text's losses closest to a straight line in
    the law's value; E and s are the first text's line. Returns the RMS of the relative errors."""
    constants = SCALING["law"]

    def line(runs: list[dict]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        law_values = np.array([law(tuple(run["size"]), run["tokens"], run["unique"]) for run in runs])
        loss = np.array([run["loss"] for run in runs])
        return np.polyfit(law_values, loss, 1), law_values, loss

    def error(logarithms: np.ndarray) -> float:
        constants.update(zip(("A", "a", "c", "R"), np.exp(logarithms).tolist(), strict=True), E=0.0, s=1.0)
        errors = [np.polyval(slope, law_values) / loss - 1 for slope, law_values, loss in map(line, runs_by_text)]
        return float(np.mean(np.concatenate(errors) ** 2) ** 0.5)

    constants.clear()
    optimum = minimize(
        error, np.log([0.01, 0.8, 0.1, 2.0]), method="Nelder-Mead", options={"maxiter": 10_000, "maxfev": 10_000}
    )
    error(optimum.x)
    s, E = line(runs_by_text[0])[0]
    constants.update({name: float(f"{value:.5g}") for name, value in (constants | {"E": E, "s": s}).items()})
    return optimum.fun


def forecast_errors(runs: list[dict]) -> list[tuple[float, bool]]:
    """For each loss, as recipe/best.py forecasts it from two higher ones that differ enough: the relative error, and
    whether that is within the stated one."""
    points = [(law(tuple(run["size"]), run["tokens"], run["unique"]), run["loss"]) for run in runs]
    errors = []
    for highest, middle, (value, loss) in itertools.combinations(sorted(points, reverse=True), 3):
        if highest[0] - middle[0] > MIN_TRIAL_GAP and middle[0] > value:
            error = line_through([highest, middle])(value) / loss - 1
            errors.append((error, abs(error) <= error_of(middle[0] - value)))
    return errors


def held_out(runs_by_text: list[list[dict]]) -> dict[str, dict]:
    """For each text, by the law fitted to all other texts: the law's a, how many forecasts there are, how many are
    within the stated error, and the worst relative error. Changes the law's constants."""
    results = {}
    for number, runs in enumerate(runs_by_text):
        fit(runs_by_text[:number] + runs_by_text[number + 1 :])
        errors = forecast_errors(runs)
        counts = {"forecasts": len(errors), "within": sum(is_within for _, is_within in errors)}
        worst = max((error for error, _ in errors), key=abs, default=0.0)
        results[runs[0]["text"]] = {"a": SCALING["law"]["a"]} | counts | {"worst": round(worst, 3)}
    return results


def text_of(result: dict) -> str:
    """JSON with a line for each run, and for each entry of the other parts: what is nested deeper is joined."""
    text = re.sub(r"(?<=[\[{])\n {3,}|\n {2,}(?=[\]}])", "", json.dumps(result, indent=1))
    return re.sub(r"\n {3,}", " ", text) + "\n"


def main(argv: list[str]) -> int:
    """Trains the missing runs, fits the law and writes recipe/estimate/scaling.json; returns the exit code."""
    parser = ArgumentParser(prog="python -m benchmarks scaling", allow_abbrev=False)
    parser.add_argument("--texts", nargs="+", required=True, help="text files on which to train the missing runs")
    path, result = ROOT / "recipe/estimate/scaling.json", SCALING | {"circumstances": report.circumstances()}
    for name in parser.parse_args(argv).texts:
        stem = Path(name).stem
        config = parse_config([f"--dataset_name={name}", f"--run_name={stem}"])
        unlimited = {"seconds": math.inf, "needed_bytes": math.inf}
        text = survey(name, open_text(config.data), config, **unlimited, train_own=True)
        for layers, width, tokens in GRID:
            key = {"text": stem, "size": [layers, width], "tokens": tokens}
            if not any(run.items() >= key.items() for run in result["runs"]):
                loss = round(train(text, layers, width, tokens), 4)
                result["runs"].append(key | {"unique": round(text.tokens), "loss": loss})
                path.write_text(text_of(result))
                print(f"{stem}: {layers} x {width}, {tokens:,} tokens: {loss:.4f}", flush=True)
    texts = dict.fromkeys(run["text"] for run in result["runs"])
    runs_by_text = [[run for run in result["runs"] if run["text"] == text] for text in texts]
    result["held_out"] = held_out(runs_by_text)
    residual = fit(runs_by_text)
    result |= {"law": SCALING["law"], "residual": round(residual, 4)}
    path.write_text(text_of(result))
    print(f"law: {SCALING['law']}, within {residual:.2%}")
    outcomes = [is_within for runs in runs_by_text for _, is_within in forecast_errors(runs)]
    print(f"of {len(outcomes)} forecasts from any two runs, {sum(outcomes)} are within recipe/best.py's stated error")
    print(f"the same of each text by the law fitted to the others: {result['held_out']}")
    return 0
