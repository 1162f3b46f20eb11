"""HellaSwag in both of its published ways: `python eval/hellaswag.py MODEL [--limit N]`.

Way A is llm.c's and build-nanogpt's: the context as it is, each ending encoded by itself, length in tokens.
Way B is lm-evaluation-harness's `hellaswag` version 1: cleaned text after the activity's label, context and ending
encoded as one string, length in characters. Neither puts a token before the context.

All 10,042 validation rows ship with the project (Zellers et al., arXiv:1905.07830).
"""

import gzip
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from eval import common

ROWS = Path(__file__).resolve().parent / "data" / "hellaswag_val.jsonl.gz"
WAYS = {"A": "llm.c / build-nanogpt", "B": "lm-evaluation-harness hellaswag v1"}
# OpenAI's models on all 10,042 rows: (acc, acc_norm), None where it was not published for that way.
PUBLISHED = {
    "A": {
        "GPT-2 124M": (0.2859, 0.2955),
        "GPT-2 350M": (None, 0.375224),
        "GPT-2 774M": (None, 0.431986),
        "GPT-2 1558M": (0.3842, 0.4893),
    },
    "B": {"GPT-2 124M": (0.2892, 0.3114), "GPT-2 1558M": (0.4004, 0.5089)},
}
SOURCE = {
    "A": "124M, 1558M: docstring of karpathy/build-nanogpt hellaswag.py; 350M, 774M: karpathy/llm.c dev/vislog.ipynb",
    "B": "harness numbers quoted in the docstring of karpathy/build-nanogpt hellaswag.py",
}


@dataclass(frozen=True)
class Request:
    """One ending to score: `tokens` is context and ending, of which the last `n_scored` are the ending's."""

    tokens: list[int]
    n_scored: int
    length: int  # what acc_norm divides by: tokens (A) or characters (B)


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


def encode_row(encode: Callable[[str], list[int]], row: dict) -> dict[str, list[Request]]:
    """The four requests of a row in each way. `encode` turns text into token ids and adds no special tokens."""
    context, a = encode(row["ctx"]), []
    for ending in row["endings"]:
        tokens = encode(" " + ending)
        a.append(Request(context + tokens, len(tokens), len(tokens)))
    query, b = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"), []
    # As in the harness (_encode_pair in its api/model.py), spaces at the context's end belong to the continuation.
    n_context = len(encode(query.rstrip()))
    for ending in map(clean, row["endings"]):
        tokens = encode(f"{query} {ending}")
        b.append(Request(tokens, len(tokens) - n_context, len(ending)))
    return {"A": a, "B": b}


def score_requests(
    logits_fn: Callable,
    requests: list[Request],
    *,
    device: torch.device | str,
    max_length: int,
    head: Callable = common.identity,
    multiples: tuple[int, int, int] = (1, 1, 1),
) -> list[float]:
    """Summed log-likelihood in nats of each request's ending, from one call of `logits_fn`.

    Args:
        logits_fn: ids (N, T) -> logits (N, T, V), or whatever `head` takes: states (N, T, D).
        max_length: positions the model has, in tokens. Longer requests lose tokens on the left.
        head: states (M, D) -> logits (M, V), applied only where a token is scored.
        multiples: of what N, T and M are filled up to, for a device that compiles for each shape.
    """
    # The last token predicts nothing, hence one token more than the model has positions.
    tokens = [request.tokens[-(max_length + 1) :] for request in requests]
    counts = [min(request.n_scored, max_length) for request in requests]
    n, t, m = multiples
    width = min(_fill(max(map(len, tokens)) - 1, t), max_length)
    # (N, T); a causal model never sees the padding on the right
    ids = np.zeros((_fill(len(tokens), n), width), dtype=np.int64)
    for i, sequence in enumerate(tokens):
        ids[i, : len(sequence) - 1] = sequence[:-1]
    rows = np.repeat(np.arange(len(tokens)), counts)  # (M,)
    columns = np.concatenate([np.arange(len(s) - 1 - n, len(s) - 1) for s, n in zip(tokens, counts, strict=True)])
    targets = np.concatenate([s[-n:] for s, n in zip(tokens, counts, strict=True)])
    rows, columns, targets = (np.pad(x, (0, _fill(len(x), m) - len(x))) for x in (rows, columns, targets))
    ids, rows, columns, targets = (torch.from_numpy(x).to(device) for x in (ids, rows, columns, targets))
    with torch.no_grad():
        log_probs = common.token_log_probs(logits_fn(ids)[rows, columns], targets, head)
    return [part.double().sum().item() for part in log_probs.cpu()[: sum(counts)].split(counts)]


def _fill(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def score_rows(
    logits_fn: Callable,
    encode: Callable[[str], list[int]],
    rows: list[dict],
    *,
    device: torch.device | str,
    batch_size: int = 16,
    max_length: int = 1024,
    head: Callable = common.identity,
    multiples: tuple[int, int, int] = (1, 1, 1),
    progress: bool = False,
) -> list[dict[str, RowScore]]:
    """Score rows in both ways, `batch_size` rows (eight sequences each) a call; results in the order of `rows`.

    `logits_fn`, `head`, `multiples` and `max_length` are those of `score_requests`. Makes ceil(len(rows) / batch_size)
    calls.
    """
    encoded = [encode_row(encode, row) for row in rows]
    # Rows of like length together: little padding. Longest first: memory that does not suffice shows at once.
    order = sorted(range(len(rows)), key=lambda i: -max(len(r.tokens) for way in encoded[i].values() for r in way))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    results: list = [None] * len(rows)
    for batch in common.track(batches, "HellaSwag", "rows", show=progress):
        requests = [request for i in batch for way in WAYS for request in encoded[i][way]]
        sums = score_requests(logits_fn, requests, device=device, max_length=max_length, head=head, multiples=multiples)
        scored = iter(zip(requests, sums, strict=True))
        for i in batch:
            results[i] = {way: _row_score(scored) for way in WAYS}
    return results


def _row_score(scored: Iterator[tuple[Request, float]]) -> RowScore:
    four = [next(scored) for _ in range(4)]
    return RowScore([total for _, total in four], [request.length for request, _ in four])


def score_hellaswag(
    logits_fn: Callable,
    encode: Callable[[str], list[int]],
    *,
    limit: int | None = None,
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    batch_size: int = 8,
    max_length: int = 1024,
    head: Callable = common.identity,
    multiples: tuple[int, int, int] = (1, 1, 1),
    progress: bool = False,
) -> dict:
    """Counts of correct rows in this rank's share, to be summed over ranks: for a trainer's live module.

    `logits_fn`, `head`, `multiples` and `max_length` are those of `score_requests`. Without `head`, whole logits are
    held: 8 rows are at most 64 x 96 positions, 1.2 GB in float32. Every rank makes the same number of calls, because
    under ZeRO-3 a forward pass is collective: a rank whose share is one row short scores another row and
    leaves it out of its counts.

    Returns {"rows": n, "A": {"acc": correct, "acc_norm": correct}, "B": {...}}, all of them integers.
    """
    rows = load_rows(limit)
    mine = range(rank, rank + world * -(-len(rows) // world), world)
    share = [rows[i % len(rows)] for i in mine]
    options = {"device": device, "batch_size": batch_size, "max_length": max_length, "head": head}
    options |= {"multiples": multiples, "progress": progress}
    counts = {"rows": 0} | {way: {"acc": 0, "acc_norm": 0} for way in WAYS}
    for i, row, scores in zip(mine, share, score_rows(logits_fn, encode, share, **options), strict=True):
        if i >= len(rows):
            continue
        counts["rows"] += 1
        for way in WAYS:
            for name, right in scores[way].correct(row["label"]).items():
                counts[way][name] += right
    return counts


def evaluate_rows(loaded: common.Loaded, rows: list[dict], *, batch_size: int, progress: bool = True) -> dict:
    """Both accuracies in both ways, each with its 95 % interval: {"rows": n, "A": {"acc": ..., "acc_ci95": ...}, ...}.

    The interval is the half width of the normal approximation, 1.96 sqrt(p (1 - p) / n).
    """
    body, head = common.body_and_head(loaded.model)
    options = {"device": loaded.device, "batch_size": batch_size, "max_length": loaded.n_positions, "head": head}
    scores = score_rows(body, loaded.encode, rows, **options, progress=progress)
    result: dict = {"rows": len(rows)}
    for way in WAYS:
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


def table(result: dict) -> str:
    """The result beside what is published for OpenAI's models, way by way."""
    lines = [f"HellaSwag validation, {result['rows']:,} rows (chance: 0.2500; +- is the 95 % interval)"]
    for way, title in WAYS.items():
        ours = [f"{result[way][name]:.4f} +- {result[way][f'{name}_ci95']:.4f}" for name in ("acc", "acc_norm")]
        lines += ["", f"{way}. {title:<36} {'acc':<18} acc_norm", f"   {'this model':<36} {ours[0]:<18} {ours[1]}"]
        for model, numbers in PUBLISHED[way].items():
            acc, norm = ("-" if number is None else f"{number:.4f}" for number in numbers)
            lines.append(f"   {model + ', published':<36} {acc:<18} {norm}")
        lines.append(f"   ({SOURCE[way]})")
    if result["rows"] < 10042:
        lines += ["", "Published numbers are on all 10,042 rows, where the interval is about +- 0.009."]
    return "\n".join(lines)


def main() -> None:
    parser = common.parser("HellaSwag in both published ways.", batch_size=16, batch_unit="rows (of 8 sequences)")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows only (default: all 10,042)")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    rows = load_rows(args.limit)
    start = time.monotonic()
    result = evaluate_rows(loaded, rows, batch_size=args.batch_size)
    seconds = time.monotonic() - start
    print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(rows) / seconds:.1f} rows/s")
    common.write_results(output, "hellaswag", loaded.describe() | result | {"seconds": round(seconds, 1)})


if __name__ == "__main__":
    common.run_main(main)
