"""HellaSwag in both of its published ways: `python eval/hellaswag.py MODEL [--limit N]`.

llm.c-style, "llmc" in results: the context as it is, each ending encoded by itself, length in tokens (as in
build-nanogpt).
lm-eval-style, "lmeval" in results: lm-evaluation-harness's `hellaswag` version 1, with cleaned text after the
activity's label, context and ending encoded as one string, length in characters. Neither puts a token before the
context.

All 10,042 validation rows ship with the project (Zellers et al., arXiv:1905.07830).
"""

import argparse
import gzip
import json
import math
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

from eval import common, devices
from eval.loglikelihood import LanguageModel, Request, score
from eval.published import HELLASWAG, HELLASWAG_ROWS, SOURCES, WAYS
from eval.scores import ci95, hellaswag_scores

ROWS = Path(__file__).resolve().parent / "data" / "hellaswag_val.jsonl.gz"


@dataclass(frozen=True)
class RowScore:
    """One row in one way: summed log-likelihood (nats) and length of each of the four endings."""

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
    """lm-evaluation-harness's text preparation, to the letter (lm_eval/tasks/hellaswag/utils.py, version 1)."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_row(encode: Callable[[str], list[int]], row: dict, way: str) -> tuple[list[Request], list[int]]:
    """The four requests of a row in a way, and the lengths that acc_norm divides by. `encode` turns text into token ids
    and adds no special tokens."""
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
    model: LanguageModel, rows: list[dict], *, batch_size: int = 16, ways: Sequence[str] = tuple(WAYS), desc: str = ""
) -> list[dict[str, RowScore]]:
    """The scores of each row, way by way, in ceil(len(rows) / batch_size) calls of the model; with `desc` behind a
    progress bar."""
    encoded = [encode_row(model.encode, row, way) for row in rows for way in ways]
    found = score(model, [requests for requests, _ in encoded], batch_size * len(ways), desc)
    scores = iter(RowScore(four, lengths) for four, (_, lengths) in zip(found, encoded, strict=True))
    return [{way: next(scores) for way in ways} for _ in rows]


def count_correct(
    model: LanguageModel, rows: list[dict], *, batch_size: int = 16, rank: int = 0, world_size: int = 1
) -> dict[str, int]:
    """How many rows of this rank's share are right, to be summed over ranks: {"rows": n, "llmc_acc": ...,
    "llmc_acc_norm": ..., "lmeval_acc": ..., "lmeval_acc_norm": ...}. For a trainer's live module.

    Every rank calls the model equally often, because a forward pass of sharded weights is collective.
    """
    counts = {"rows": 0} | {f"{way}_{kind}": 0 for way in WAYS for kind in ("acc", "acc_norm")}
    mine, share = share_of(rows, rank, world_size)
    for i, scores in zip(mine, score_rows(model, share, batch_size=batch_size), strict=True):
        if i < len(rows):
            counts["rows"] += 1
            for way in WAYS:
                for kind, right in scores[way].correct(rows[i]["label"]).items():
                    counts[f"{way}_{kind}"] += right
    return counts


def share_of(rows: list[dict], rank: int, world_size: int) -> tuple[range, list[dict]]:
    """The rows of one of `world_size` processes, as many for each, and their numbers; a number that is not below
    len(rows) stands for a row that only fills the share up."""
    mine = range(rank, rank + world_size * -(-len(rows) // world_size), world_size)
    return mine, [rows[i % len(rows)] for i in mine]


def score_shared(loaded: common.Loaded, rows: list[dict], batch_size: int) -> list[dict[str, RowScore]]:
    """The scores of all `rows`, on every process of a launch, each of which has scored its share. A collective call."""
    mine, share = share_of(rows, *devices.processes())
    scores = score_rows(loaded.lm, share, batch_size=batch_size, desc="HellaSwag" if devices.is_main() else "")
    together = dict(devices.gather(zip(mine, scores, strict=True)))
    return [together[i] for i in range(len(rows))]


def accuracies(scores: list[dict[str, RowScore]], rows: list[dict]) -> dict:
    """Both accuracies in each way: {"rows": n, "llmc": {"acc": ..., "acc_norm": ...}, "lmeval": {...}}."""
    from eval.metrics.hellaswag.hellaswag import HellaSwag  # imports `datasets`, which a training run may not need

    result: dict = {"rows": len(rows)}
    for way in scores[0]:
        result[way] = HellaSwag(keep_in_memory=True).compute(
            log_likelihoods=[score[way].log_likelihoods for score in scores],
            lengths=[score[way].lengths for score in scores],
            labels=[row["label"] for row in rows],
        )
    return result


def paired_difference(ours: Sequence[int], theirs: Sequence[int]) -> dict:
    """What is known of the difference of two models' accuracies on the same rows (1 or 0 for each row).

    Only rows that one model alone has right tell. The interval is the normal approximation of the mean of the rows'
    differences, each -1, 0 or 1. `p` is exact, of the sign test on those rows (McNemar's, by the binomial): with few of
    them the interval is too sure of itself.

    Returns {"difference": ours - theirs, "ci95": [low, high], "p": two-sided, "only_ours", "only_theirs": rows}.
    """
    apart = np.asarray(ours) - np.asarray(theirs)
    mean, half = float(apart.mean()), 1.96 * float(apart.std()) / len(apart) ** 0.5
    only_ours, only_theirs = int((apart == 1).sum()), int((apart == -1).sum())
    n = only_ours + only_theirs
    p = min(1.0, 2 * sum(math.comb(n, k) for k in range(min(only_ours, only_theirs) + 1)) / 2**n)
    interval = [mean - half, mean + half]
    return {"difference": mean, "ci95": interval, "p": p, "only_ours": only_ours, "only_theirs": only_theirs}


def compare(ours: list[dict[str, RowScore]], theirs: list[dict[str, RowScore]], rows: list[dict]) -> dict:
    """`paired_difference` of both accuracies in both ways: {"llmc": {"acc": ..., "acc_norm": ...}, "lmeval": {...}}."""
    result: dict = {}
    for way in WAYS:
        a, b = ([score[way].correct(row["label"]) for score, row in zip(s, rows, strict=True)] for s in (ours, theirs))
        result[way] = {name: paired_difference([x[name] for x in a], [x[name] for x in b]) for name in a[0]}
    return result


def table(result: dict) -> str:
    """The result beside what is published, way by way."""
    lines = [f"HellaSwag validation, {result['rows']:,} rows (chance: 0.2500; +- is the 95 % interval)"]
    for way, title in (WAYS | {"GPT-3": "GPT-3's paper, zero-shot, scored nearly llm.c-style"}).items():
        lines += ["", f"{title:<49} {'acc':<18} acc_norm"]
        if way in result:
            found = (result[way][name] for name in ("acc", "acc_norm"))
            ours = [f"{p:.4f} +- {ci95(p, result['rows']):.4f}" for p in found]
            lines.append(f"   {'this model':<46} {ours[0]:<18} {ours[1]}")
        for model, numbers in HELLASWAG[way].items():
            acc, norm = ("-" if number is None else f"{number:.4f}" for number in numbers)
            lines.append(f"   {model:<46} {acc:<18} {norm}")
        lines.append(textwrap.fill(f"({SOURCES[way]})", 110, initial_indent="   ", subsequent_indent="    "))
    if result["rows"] < HELLASWAG_ROWS:
        lines += ["", f"Published numbers are on all {HELLASWAG_ROWS:,} rows, where the interval is about +- 0.009."]
    return "\n".join(lines)


def comparison(differences: dict, ours: str, theirs: str) -> str:
    """`compare`'s result as a user reads it."""
    lines = [f"{ours} minus {theirs}, on the same rows (paired, 95 % interval)"]
    for way in WAYS:
        for name, d in differences[way].items():
            low, high = d["ci95"]
            verdict = "no clear difference" if d["p"] > 0.05 else ("better" if d["difference"] > 0 else "worse")
            lines.append(
                f"   {WAYS[way]:<13} {name:<9} {d['difference']:+.4f}  [{low:+.4f}, {high:+.4f}]  p = {d['p']:.2g}  "
                f"{verdict} (right alone: {d['only_ours']:,} and {d['only_theirs']:,} rows)"
            )
    return "\n".join(lines)


def main() -> None:
    """Scores one model, or two on the same rows, prints and writes the accuracies. Raises UserError."""
    parser = common.parser("HellaSwag in both published ways.", batch_size=16, batch_unit="rows")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows only (default: all 10,042)")
    parser.add_argument("--compare", metavar="DIR_OR_ID", help="a second model, on the same rows")
    args = parser.parse_args()
    with devices.launched():
        loaded = common.load(args, shared=True)
        output = common.results_path(args.output, loaded)
        second = argparse.Namespace(**vars(args) | {"model": args.compare})
        other = common.load(second, shared=True) if args.compare else None
        rows = load_rows(args.limit)
        start = time.monotonic()
        ours = score_shared(loaded, rows, args.batch_size)
        seconds = time.monotonic() - start
        result = accuracies(ours, rows)
        print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(rows) / seconds:.1f} rows/s")
        if other:
            differences = compare(ours, score_shared(other, rows, args.batch_size), rows)
            print(f"\n{comparison(differences, loaded.name, other.name)}\n")
            result["compared_with"] = {"model": other.name} | differences
        result |= {"seconds": round(seconds, 1)}
        if devices.is_main():
            found = hellaswag_scores(result, len(rows), f"in {loaded.describe()['dtype']}")
            common.write_results(output, "hellaswag", loaded.describe() | result | {"scores": found})


if __name__ == "__main__":
    common.run_main(main)
