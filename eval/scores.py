"""Scores in the shape of huggingface_hub's EvalResult: the evaluations write them to results.json as "scores", and the
model card and the report show them.

A score is a dict of EvalResult's fields and three more: "how" it was measured, in words; "ci95", half the width of its
95 % interval, or None; and "complete", whether it is on the full data set rather than a part.
"""

import math

from eval.published import ACCURACIES, HELLASWAG_ROWS

_HELLASWAG = {"dataset_type": "Rowan/hellaswag", "dataset_name": "HellaSwag", "dataset_split": "validation"}


def score(dataset: dict, metric: tuple[str, str], value: float, method: str, **fields) -> dict:
    """One score; `metric` is its name on the Hub and its name for readers, `fields` are more fields."""
    metric_type, metric_name = metric
    metric_fields = {"metric_type": metric_type, "metric_name": metric_name, "metric_value": value, "how": method}
    return {"task_type": "text-generation"} | dataset | metric_fields | {"ci95": None, "complete": True} | fields


def text_dataset(name: str, digest: str = "") -> dict:
    """The data set of a score on local text or shards; `name` has no directories, which are private, so a `digest` of
    the files distinguishes it from another text of that name."""
    # The name is also the config, since huggingface_hub groups scores by everything but the data set's name.
    config = f"{name}, SHA-256 {digest}" if digest else name
    return {"dataset_type": "text", "dataset_name": name, "dataset_config": config}


def hellaswag_scores(accuracies: dict[str, float | None], rows: int, method: str, when: str = "") -> list[dict]:
    """The scores on this many rows, from those of ACCURACIES that were measured."""
    complete = rows >= HELLASWAG_ROWS
    count = f"{rows:,} rows" if complete else f"{rows:,} of {HELLASWAG_ROWS:,} rows"
    scores = []
    for name, title in ACCURACIES.items():
        if (p := accuracies.get(name)) is not None:
            metric = "accuracy", f"{title}{when}"
            scores.append(score(_HELLASWAG, metric, p, f"{count}, {method}", ci95=ci95(p, rows), complete=complete))
    return scores


def ci95(p: float, n: int) -> float:
    """Half the width of the 95 % interval of a fraction p of n rows, which is not 0 where p is 0 or 1: with two right
    and two wrong rows added (Agresti and Coull 1998)."""
    n_added = n + 4
    p_added = (p * n + 2) / n_added
    return 1.96 * (p_added * (1 - p_added) / n_added) ** 0.5


def merge_scores(previous: list[dict], new: list[dict]) -> list[dict]:
    """A model's previous and new scores, one for each measurement: the new one, unless it is on a part of the data and
    the previous one is complete."""
    scores = {_identity(entry): entry for entry in previous}
    for entry in new:
        if entry["complete"] or not scores.get(_identity(entry), entry)["complete"]:
            scores[_identity(entry)] = entry
    return [*scores.values()]


def _identity(score: dict) -> tuple:
    names = ("dataset_type", "dataset_name", "dataset_config", "dataset_split", "metric_name")
    return tuple(score.get(name) for name in names)


def all_scores(results: dict) -> list[dict]:
    """The finite scores of a results.json."""
    scores = [score for entry in results.values() for score in entry.get("scores", [])]
    return [score for score in scores if math.isfinite(score["metric_value"])]


def table_row(score: dict) -> tuple[str, str, str, str]:
    """A score as a table row: (data, metric, value, how)."""
    data = ", ".join(filter(None, (score["dataset_name"], score.get("dataset_split"))))
    interval = "" if score.get("ci95") is None else f" ± {score['ci95']:.4f}"
    return data, score["metric_name"], f"{score['metric_value']:.4f}{interval}", score["how"]


def comparison_row(row: dict) -> tuple[str, str, str, str]:
    """A row of eval/compare.py as a table row: (metric, ours, theirs, difference with its interval)."""
    interval = "[{:+.4f}, {:+.4f}]".format(*row["ci95"]) if row.get("ci95") else "(too little text for an interval)"
    return row["metric"], f"{row['ours']:.4f}", f"{row['theirs']:.4f}", f"{row['difference']:+.4f}  {interval}"
