"""HellaSwag in both published scoring styles: `python -m eval.hellaswag MODEL [--limit N]`.

llm.c-style, "llmc" in results: the context unchanged, each ending encoded separately, length in tokens (as in
build-nanogpt).
lm-eval-style, "lmeval" in results: lm-evaluation-harness's `hellaswag` version 1, with the activity label before the
cleaned text, context and ending encoded as one string, length in characters. Neither puts a token before the context.

All 10,042 validation rows ship with the project (Zellers et al., arXiv:1905.07830).
"""

import gzip
import json
import re
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from eval import common
from eval.loglikelihood import LanguageModel, Request, score_groups
from eval.published import HELLASWAG, HELLASWAG_ROWS, SOURCES, STYLES
from eval.scores import ci95, hellaswag_scores

ROWS = Path(__file__).resolve().parent / "data" / "hellaswag_val.jsonl.gz"
# Style -> the endings' summed log-likelihoods in nats and their lengths, (N, 4) each for N rows.
Scores = dict[str, tuple[np.ndarray, np.ndarray]]


def load_rows(limit: int | None = None) -> list[dict]:
    """`limit` validation rows at equal distances, or all 10,042, in the data set's order. The first ones would be no
    sample: rows 0 to 3,242 are from ActivityNet, the others from WikiHow, which is harder."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        lines = file.readlines()
    count = min(limit or len(lines), len(lines))
    return [json.loads(lines[i * len(lines) // count]) for i in range(count)]


def clean(text: str) -> str:
    """lm-evaluation-harness's text preparation, copied exactly (lm_eval/tasks/hellaswag/utils.py, version 1)."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_row(encode: Callable[[str], list[int]], row: dict, style: str) -> tuple[list[Request], list[int]]:
    """A row's four requests in a style, and the lengths that acc_norm divides by. `encode` adds no special tokens."""
    if style == "llmc":
        context, start = encode(row["ctx"]), encode("a")  # a start, since some tokenizers put a space before a text
        endings = [encode(f"a {ending}")[len(start) :] for ending in row["endings"]]
        return [Request(context + tokens, len(tokens)) for tokens in endings], [len(tokens) for tokens in endings]
    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    # As in the harness (_encode_pair in its api/model.py), spaces at the context's end belong to the continuation.
    n_context = len(encode(query.rstrip()))
    endings = [clean(ending) for ending in row["endings"]]
    texts = [encode(f"{query} {ending}") for ending in endings]
    return [Request(tokens, len(tokens) - n_context) for tokens in texts], [len(ending) for ending in endings]


def score_rows(model: LanguageModel, rows: Sequence[dict], *, batch_size: int = 16, desc: str = "") -> Scores:
    """The rows' scores in each style, from ceil(len(rows) / batch_size) calls of the model."""
    requests, lengths = zip(*(encode_row(model.encode, row, style) for style in STYLES for row in rows), strict=True)
    sums = score_groups(model, requests, batch_size * len(STYLES), desc)
    shape = len(STYLES), len(rows), -1
    log_likelihoods, lengths = np.reshape(sums, shape), np.reshape(lengths, shape)
    return {style: (log_likelihoods[i], lengths[i]) for i, style in enumerate(STYLES)}


def correct(scores: Scores, rows: Sequence[dict]) -> dict[str, np.ndarray]:
    """For each of ACCURACIES, which rows are answered correctly: bool (N,). Ties go to the first ending."""
    labels = np.array([row["label"] for row in rows])
    correct_rows = {}
    for style, (log_likelihoods, lengths) in scores.items():
        correct_rows[f"{style}_acc"] = log_likelihoods.argmax(1) == labels
        correct_rows[f"{style}_acc_norm"] = (log_likelihoods / lengths).argmax(1) == labels
    return correct_rows


def count_correct(
    model: LanguageModel, rows: list[dict], *, batch_size: int = 16, rank: int = 0, world_size: int = 1
) -> dict[str, int]:
    """The number of correct rows in this rank's share, to be summed over ranks: {"rows": n} and a count for each of
    ACCURACIES. Every rank calls the model equally often, because a forward pass of sharded weights is collective."""
    # Each rank gets the same number of rows; an index of len(rows) or more is padding.
    indices = np.arange(rank, rank + world_size * -(-len(rows) // world_size), world_size)
    rank_rows, is_real = [rows[i % len(rows)] for i in indices], indices < len(rows)
    correct_rows = correct(score_rows(model, rank_rows, batch_size=batch_size), rank_rows)
    return {"rows": int(is_real.sum())} | {name: int(mask[is_real].sum()) for name, mask in correct_rows.items()}


def accuracies(scores: Scores, rows: list[dict]) -> dict:
    """{"rows": n} and each of ACCURACIES."""
    return {"rows": len(rows)} | {name: float(mask.mean()) for name, mask in correct(scores, rows).items()}


def table(result: dict) -> str:
    """The result beside the published numbers, one table per style."""
    rows = result["rows"]
    lines = [f"HellaSwag validation, {rows:,} rows (chance: 0.2500; +- is the 95 % interval)"]
    for style, title in STYLES.items():
        measured = [f"{p:.4f} +- {ci95(p, rows):.4f}" for p in (result[f"{style}_acc"], result[f"{style}_acc_norm"])]
        cells = {title: ["acc", "acc_norm"], "   this model": measured}
        for model, numbers in HELLASWAG[style].items():
            cells[f"   {model}"] = ["-" if number is None else f"{number:.4f}" for number in numbers]
        lines += ["", *(f"{name:<49} {acc:<18} {norm}" for name, (acc, norm) in cells.items())]
        lines.append(textwrap.fill(f"({SOURCES[style]})", 110, initial_indent="   ", subsequent_indent="    "))
    if rows < HELLASWAG_ROWS:
        lines += ["", f"Published numbers are for all {HELLASWAG_ROWS:,} rows, where the interval is about +- 0.009."]
    return "\n".join(lines)


def main() -> None:
    """Scores one model, then prints and writes its accuracies. Raises UserError."""
    parser = common.parser("HellaSwag in both published ways.", batch_size=16, batch_unit="rows")
    parser.add_argument("--limit", type=common.positive_int, help="N evenly spaced rows (default: all 10,042)")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    rows = load_rows(args.limit)
    start = time.monotonic()
    result = accuracies(score_rows(loaded.lm, rows, batch_size=args.batch_size, desc="HellaSwag"), rows)
    seconds = time.monotonic() - start
    print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(rows) / seconds:.1f} rows/s")
    scores = hellaswag_scores(result, len(rows), f"in {loaded.describe()['dtype']}")
    result |= {"seconds": round(seconds, 1), "scores": scores}
    common.write_results(output, "hellaswag", loaded.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
