"""HellaSwag in both published scoring styles: `python eval/hellaswag.py MODEL [--limit N]`.

llm.c-style, "llmc" in results: the context unchanged, each ending encoded separately, length in tokens (as in
build-nanogpt).
lm-eval-style, "lmeval" in results: lm-evaluation-harness's `hellaswag` version 1, with cleaned text after the activity
label, context and ending encoded as one string, length in characters. Neither puts a token before the context.

All 10,042 validation rows ship with the project (Zellers et al., arXiv:1905.07830).
"""

import gzip
import json
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository, not from eval/ with its `common`, `sample`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from eval import common
from eval.loglikelihood import LanguageModel, Request, score
from eval.published import HELLASWAG, HELLASWAG_ROWS, SOURCES, WAYS
from eval.scores import ci95, hellaswag_scores

ROWS = Path(__file__).resolve().parent / "data" / "hellaswag_val.jsonl.gz"


@dataclass(frozen=True)
class RowScore:
    """One row in one style: summed log-likelihood (nats) and length of each of the four endings."""

    log_likelihoods: list[float]
    lengths: list[int]

    def correct(self, label: int) -> dict[str, int]:
        """Whether each accuracy counts this row: 1 or 0. Ties go to the first ending."""
        scores = np.asarray(self.log_likelihoods)
        return {
            "acc": int(scores.argmax() == label),
            "acc_norm": int((scores / np.asarray(self.lengths)).argmax() == label),
        }


def load_rows(limit: int | None = None) -> list[dict]:
    """The first `limit` validation rows, or all 10,042, in the data set's order."""
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line, _ in zip(file, range(limit or sys.maxsize), strict=False)]


def clean(text: str) -> str:
    """lm-evaluation-harness's text preparation, copied exactly (lm_eval/tasks/hellaswag/utils.py, version 1)."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_row(encode: Callable[[str], list[int]], row: dict, way: str) -> tuple[list[Request], list[int]]:
    """A row's four requests in one style, and the lengths that acc_norm divides by. `encode` turns text into token ids
    without special tokens."""
    if way == "llmc":
        context = encode(row["ctx"])
        endings = [encode(" " + ending) for ending in row["endings"]]
        return [Request(context + tokens, len(tokens)) for tokens in endings], [len(tokens) for tokens in endings]
    query = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    # As in the harness (_encode_pair in its api/model.py), spaces at the context's end belong to the continuation.
    n_context = len(encode(query.rstrip()))
    endings = [clean(ending) for ending in row["endings"]]
    texts = [encode(f"{query} {ending}") for ending in endings]
    return [Request(tokens, len(tokens) - n_context) for tokens in texts], [len(ending) for ending in endings]


def score_rows(
    model: LanguageModel,
    rows: Sequence[dict],
    *,
    batch_size: int = 16,
    ways: Sequence[str] = tuple(WAYS),
    desc: str = "",
) -> list[dict[str, RowScore]]:
    """The scores of each row, style by style, in ceil(len(rows) / batch_size) calls of the model; with `desc`, shows a
    progress bar."""
    encoded = [encode_row(model.encode, row, way) for row in rows for way in ways]
    found = score(model, [requests for requests, _ in encoded], batch_size * len(ways), desc)
    scores = iter(RowScore(four, lengths) for four, (_, lengths) in zip(found, encoded, strict=True))
    return [{way: next(scores) for way in ways} for _ in rows]


def count_correct(
    model: LanguageModel, rows: list[dict], *, batch_size: int = 16, rank: int = 0, world_size: int = 1
) -> dict[str, int]:
    """How many rows of this rank's share are correct, to be summed over ranks: {"rows": n, "llmc_acc": ...,
    "llmc_acc_norm": ..., "lmeval_acc": ..., "lmeval_acc_norm": ...}. For evaluation during training.

    Every rank calls the model equally often, because a forward pass of sharded weights is collective.
    """
    # The same number of rows for each rank; an index of len(rows) or more is padding.
    numbers = range(rank, rank + world_size * -(-len(rows) // world_size), world_size)
    scores = score_rows(model, [rows[i % len(rows)] for i in numbers], batch_size=batch_size)
    counts = {"rows": 0} | {f"{way}_{kind}": 0 for way in WAYS for kind in ("acc", "acc_norm")}
    for i, row_scores in zip(numbers, scores, strict=True):
        if i < len(rows):
            counts["rows"] += 1
            for way in WAYS:
                for kind, right in row_scores[way].correct(rows[i]["label"]).items():
                    counts[f"{way}_{kind}"] += right
    return counts


def accuracies(scores: list[dict[str, RowScore]], rows: list[dict]) -> dict:
    """Both accuracies in each style: {"rows": n, "llmc": {"acc": ..., "acc_norm": ...}, "lmeval": {...}}."""
    from eval.metrics.hellaswag.hellaswag import HellaSwag  # imports `datasets`, which a training run may not need

    result: dict = {"rows": len(rows)}
    for way in scores[0]:
        result[way] = HellaSwag(keep_in_memory=True).compute(
            log_likelihoods=[score[way].log_likelihoods for score in scores],
            lengths=[score[way].lengths for score in scores],
            labels=[row["label"] for row in rows],
        )
    return result


def table(result: dict) -> str:
    """The result beside the published numbers, style by style."""
    rows = result["rows"]
    lines = [f"HellaSwag validation, {rows:,} rows (chance: 0.2500; +- is the 95 % interval)"]
    for way, title in WAYS.items():
        lines += ["", f"{title:<49} {'acc':<18} acc_norm"]
        acc, norm = (f"{p:.4f} +- {ci95(p, rows):.4f}" for p in (result[way]["acc"], result[way]["acc_norm"]))
        lines.append(f"   {'this model':<46} {acc:<18} {norm}")
        for model, numbers in HELLASWAG[way].items():
            acc, norm = ("-" if number is None else f"{number:.4f}" for number in numbers)
            lines.append(f"   {model:<46} {acc:<18} {norm}")
        lines.append(textwrap.fill(f"({SOURCES[way]})", 110, initial_indent="   ", subsequent_indent="    "))
    if rows < HELLASWAG_ROWS:
        lines += ["", f"Published numbers are on all {HELLASWAG_ROWS:,} rows, where the interval is about +- 0.009."]
    return "\n".join(lines)


def main() -> None:
    """Scores one model, prints and writes the accuracies. Raises UserError."""
    parser = common.parser("HellaSwag in both published ways.", batch_size=16, batch_unit="rows")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows only (default: all 10,042)")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    rows = load_rows(args.limit)
    start = time.monotonic()
    result = accuracies(score_rows(loaded.lm, rows, batch_size=args.batch_size, desc="HellaSwag"), rows)
    seconds = time.monotonic() - start
    print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(rows) / seconds:.1f} rows/s")
    found = hellaswag_scores(result, len(rows), f"in {loaded.describe()['dtype']}")
    result |= {"seconds": round(seconds, 1), "scores": found}
    common.write_results(output, "hellaswag", loaded.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
