"""HellaSwag in both of its published ways: `python eval/hellaswag.py MODEL [--limit N]`.

llm.c-style, "A" in results: the context as it is, each ending encoded by itself, length in tokens (as in
build-nanogpt).
lm-eval-style, "B" in results: lm-evaluation-harness's `hellaswag` version 1, with cleaned text after the activity's
label, context and ending encoded as one string, length in characters. Neither puts a token before the context.

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

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from eval import common, devices
from eval.loglikelihood import Request, rows_of, score
from eval.published import HELLASWAG, SOURCES

ROWS = Path(__file__).resolve().parent / "data" / "hellaswag_val.jsonl.gz"
WAYS = {"A": "llm.c-style (also build-nanogpt)", "B": "lm-eval-style (lm-evaluation-harness hellaswag v1)"}


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


def encode_row(encode: Callable[[str], list[int]], row: dict, way: str) -> list[Request]:
    """The four requests of a row in a way. `encode` turns text into token ids and adds no special tokens."""
    if way == "A":
        context = encode(row["ctx"])
        endings = [encode(" " + ending) for ending in row["endings"]]
        return [Request(context + tokens, len(tokens), len(tokens)) for tokens in endings]
    query, requests = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"), []
    # As in the harness (_encode_pair in its api/model.py), spaces at the context's end belong to the continuation.
    n_context = len(encode(query.rstrip()))
    for ending in map(clean, row["endings"]):
        tokens = encode(f"{query} {ending}")
        requests.append(Request(tokens, len(tokens) - n_context, len(ending)))
    return requests


def score_rows(
    states_fn: Callable,
    encode: Callable[[str], list[int]],
    rows: list[dict],
    *,
    device: torch.device | str,
    batch_size: int = 16,
    max_length: int = 1024,
    ways: Sequence[str] = tuple(WAYS),
    share: bool = True,
    progress: bool = False,
    **options,
) -> list[dict[str, RowScore]]:
    """Score rows, `batch_size` of them a call, in ceil(len(rows) / batch_size) calls; results in the order of `rows`.

    `states_fn`, `share`, `max_length` and further options (head, multiples, place) are those of
    `eval.loglikelihood.score`. Without `head`, whole logits are held: of 16 rows easily a gigabyte.
    """
    encoded = [{way: encode_row(encode, row, way) for way in ways} for row in rows]
    packed = [[rows_of(four, max_length, share) for four in row.values()] for row in encoded]
    # Rows of like length together: little padding. Longest first: memory that does not suffice shows at once.
    order = sorted(range(len(rows)), key=lambda i: -max(len(row.ids) for way in packed[i] for row in way))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    results: list = [None] * len(rows)
    for batch in common.track(batches, "HellaSwag", "rows", show=progress):
        together = [row for i in batch for way in packed[i] for row in way]
        sums = iter(score(states_fn, together, device=device, share=share, max_length=max_length, **options))
        for i in batch:
            results[i] = {
                way: RowScore([next(sums) for _ in four], [request.length for request in four])
                for way, four in encoded[i].items()
            }
    return results


def score_hellaswag(
    states_fn: Callable,
    encode: Callable[[str], list[int]],
    *,
    limit: int | None = None,
    rank: int = 0,
    world: int = 1,
    **options,
) -> dict:
    """Counts of correct rows in this rank's share, to be summed over ranks: for a trainer's live module.

    `states_fn` and `options` are those of `score_rows`. Every rank makes the same number of calls, because under ZeRO-3
    a forward pass is collective: a rank whose share is one row short scores another row and leaves it out of its
    counts.

    Returns {"rows": n, "A": {"acc": correct, "acc_norm": correct}, "B": {...}}, all of them integers.
    """
    rows = load_rows(limit)
    mine, share = share_of(rows, rank, world)
    counts = {"rows": 0} | {way: {"acc": 0, "acc_norm": 0} for way in WAYS}
    for i, row, scores in zip(mine, share, score_rows(states_fn, encode, share, **options), strict=True):
        if i >= len(rows):
            continue
        counts["rows"] += 1
        for way in WAYS:
            for name, right in scores[way].correct(row["label"]).items():
                counts[way][name] += right
    return counts


def share_of(rows: list[dict], rank: int, world: int) -> tuple[range, list[dict]]:
    """The rows of one of `world` processes, as many for each, and their numbers; a number that is not below len(rows)
    stands for a row that only fills the share up."""
    mine = range(rank, rank + world * -(-len(rows) // world), world)
    return mine, [rows[i % len(rows)] for i in mine]


def score_loaded(
    loaded: common.Loaded,
    rows: list[dict],
    *,
    batch_size: int,
    ways: Sequence[str] = tuple(WAYS),
    progress: bool = True,
) -> list[dict[str, RowScore]]:
    """The scores of all `rows`, on every process of a launch, each of which has scored its share."""
    body, head = common.body_and_head(loaded.model)
    mine, share = share_of(rows, *devices.processes())
    options = {"head": head, "max_length": loaded.n_positions, "share": common.shares_prefixes(loaded.model)}
    options |= {
        "device": loaded.device,
        "batch_size": batch_size,
        "ways": ways,
        "progress": progress and devices.is_main(),
    }
    scores = score_rows(body, loaded.encode, share, **options, **devices.shapes(loaded.device))
    together = devices.gather(zip(mine, scores, strict=True))
    return [score for _, score in sorted(together, key=lambda pair: pair[0])][: len(rows)]


def accuracies(scores: list[dict[str, RowScore]], rows: list[dict]) -> dict:
    """Both accuracies in each way, with their 95 % intervals: {"rows": n, "A": {"acc": ..., "acc_ci95": ...}, ...}.

    The interval is the half width of the normal approximation, 1.96 sqrt(p (1 - p) / n).
    """
    result: dict = {"rows": len(rows)}
    for way in scores[0]:
        metric = common.load_metric("hellaswag")
        metric.add_batch(
            log_likelihoods=[score[way].log_likelihoods for score in scores],
            lengths=[score[way].lengths for score in scores],
            labels=[row["label"] for row in rows],
        )
        result[way] = {}
        for name, p in metric.compute().items():
            result[way] |= {name: p, f"{name}_ci95": 1.96 * (p * (1 - p) / len(rows)) ** 0.5}
    return result


def paired_bootstrap(ours: Sequence[int], theirs: Sequence[int], samples: int = 100_000, seed: int = 0) -> dict:
    """What is known of the difference of two models' accuracies on the same rows (1 or 0 for each row).

    Rows are drawn with replacement `samples` times (Efron 1979; for two systems: Koehn 2004). A row's difference is -1,
    0 or 1, so a sample is a draw of how many there are of each, and all rows need not be touched. `p` is exact, of the
    sign test on the rows that one model alone has right (McNemar's, by the binomial): with few of those a bootstrap is
    too sure of itself.

    Returns {"difference": ours - theirs, "ci95": [low, high] of its percentiles, "p": two-sided, "only_ours",
    "only_theirs": rows that one alone has right}.
    """
    difference = np.asarray(ours) - np.asarray(theirs)
    counts = [int((difference == value).sum()) for value in (1, -1, 0)]
    drawn = np.random.default_rng(seed).multinomial(sum(counts), np.array(counts) / sum(counts), size=samples)
    means = (drawn[:, 0] - drawn[:, 1]) / sum(counts)
    fewer, apart = min(counts[:2]), sum(counts[:2])
    p = min(1.0, 2 * sum(math.comb(apart, k) for k in range(fewer + 1)) / 2**apart)
    return {
        "difference": float(difference.mean()),
        "ci95": np.percentile(means, [2.5, 97.5]).tolist(),
        "p": p,
        "only_ours": counts[0],
        "only_theirs": counts[1],
    }


def compare(ours: list[dict[str, RowScore]], theirs: list[dict[str, RowScore]], rows: list[dict]) -> dict:
    """`paired_bootstrap` of both accuracies in both ways: {"A": {"acc": ..., "acc_norm": ...}, "B": {...}}."""
    result: dict = {}
    for way in WAYS:
        a, b = ([score[way].correct(row["label"]) for score, row in zip(s, rows, strict=True)] for s in (ours, theirs))
        result[way] = {name: paired_bootstrap([x[name] for x in a], [x[name] for x in b]) for name in a[0]}
    return result


def table(result: dict) -> str:
    """The result beside what is published, way by way."""
    lines = [f"HellaSwag validation, {result['rows']:,} rows (chance: 0.2500; +- is the 95 % interval)"]
    for way, title in (WAYS | {"GPT-3": "GPT-3's paper, zero-shot, scored nearly llm.c-style"}).items():
        lines += ["", f"{f'{way}. ' if way in WAYS else '   '}{title:<46} {'acc':<18} acc_norm"]
        if way in result:
            ours = [f"{result[way][name]:.4f} +- {result[way][f'{name}_ci95']:.4f}" for name in ("acc", "acc_norm")]
            lines.append(f"   {'this model':<46} {ours[0]:<18} {ours[1]}")
        for model, numbers in HELLASWAG[way].items():
            acc, norm = ("-" if number is None else f"{number:.4f}" for number in numbers)
            lines.append(f"   {model:<46} {acc:<18} {norm}")
        lines.append(textwrap.fill(f"({SOURCES[way]})", 110, initial_indent="   ", subsequent_indent="    "))
    if result["rows"] < 10042:
        lines += ["", "Published numbers are on all 10,042 rows, where the interval is about +- 0.009."]
    return "\n".join(lines)


def comparison(differences: dict, ours: str, theirs: str) -> str:
    """`compare`'s result as a user reads it."""
    lines = [f"{ours} minus {theirs}, on the same rows (paired bootstrap, 95 % interval)"]
    for way in WAYS:
        for name, d in differences[way].items():
            low, high = d["ci95"]
            verdict = "not to be told from 0" if d["p"] > 0.05 else ("better" if d["difference"] > 0 else "worse")
            lines.append(
                f"   {way} {name:<9} {d['difference']:+.4f}  [{low:+.4f}, {high:+.4f}]  p = {d['p']:.2g}  {verdict} "
                f"(right alone: {d['only_ours']:,} and {d['only_theirs']:,} rows)"
            )
    return "\n".join(lines)


def main() -> None:
    parser = common.parser("HellaSwag in both published ways.", batch_size=16, batch_unit="rows (of 8 endings)")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows only (default: all 10,042)")
    parser.add_argument("--compare", metavar="DIR_OR_ID", help="a second model, on the same rows: paired bootstrap")
    args = parser.parse_args()
    with devices.launched():
        loaded = common.load(args, shared=True)
        output = common.results_path(args.output, loaded)
        second = argparse.Namespace(**vars(args) | {"model_option": args.compare})
        other = common.load(second, shared=True) if args.compare else None
        rows = load_rows(args.limit)
        start = time.monotonic()
        scores = score_loaded(loaded, rows, batch_size=args.batch_size)
        seconds = time.monotonic() - start
        result = accuracies(scores, rows)
        print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(rows) / seconds:.1f} rows/s")
        if other:
            differences = compare(scores, score_loaded(other, rows, batch_size=args.batch_size), rows)
            print(f"\n{comparison(differences, loaded.name, other.name)}\n")
            result["compared_with"] = {"model": other.name} | differences
        if devices.is_main():
            common.write_results(output, "hellaswag", loaded.describe() | result | {"seconds": round(seconds, 1)})


if __name__ == "__main__":
    common.run_main(main)
