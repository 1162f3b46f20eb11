"""The figures of a model card: what a run and the evaluation commands have measured, each with how it was scored."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import EvalResult

HELLASWAG_ROWS = 10042
_HELLASWAG = {"type": "Rowan/hellaswag", "name": "HellaSwag", "split": "validation"}
_STYLES = {"A": "llm.c-style", "B": "lm-eval-style"}  # how HellaSwag is scored
_HARNESS = {"source_name": "lm-evaluation-harness", "source_url": "https://github.com/EleutherAI/lm-evaluation-harness"}
_NOT_METRICS = ("version", "sample_len", "samples", "num_fewshot")  # beside the metrics of a task
_LOSSES = {
    "loss": ("loss", "loss, nats per token"),
    "perplexity": ("perplexity", "perplexity per token"),
    "bits_per_byte": ("bits_per_byte", "bits per byte"),
}
_HOW = {  # settings of a loss, as a reader wants them
    "sequence_length": "{:,} tokens at once",
    "limit_windows": "the first {:,} windows",
    "tokens": "{:,} tokens",
}


@dataclass(frozen=True)
class Score:
    """A figure.

    Attributes:
        dataset: what it was measured on: "type", "name", "config", "split", "revision", as EvalResult has them.
        type: the Hub's name of the metric.
        name: the metric's name for a reader.
        how: how it was measured, for a reader.
        half: the half width of its 95 % interval.
        whole: whether all of the data set was evaluated, and not a part for a quick look.
        more: other fields of the EvalResult.
    """

    dataset: dict
    type: str
    name: str
    value: float
    how: str = ""
    half: float | None = None
    whole: bool = True
    more: dict = field(default_factory=dict)

    def row(self) -> tuple[str, str, str, str]:
        """(data, metric, value, how) of the model card's table."""
        data = ", ".join(filter(None, (self.dataset["name"], self.dataset.get("split"))))
        interval = f" ± {self.half:.4f}" if self.half is not None else ""
        return data, self.name, f"{self.value:.4f}{interval}", self.how

    def entry(self) -> EvalResult:
        """For model-index, from which leaderboards read."""
        return EvalResult(
            task_type="text-generation",
            metric_type=self.type,
            metric_name=self.name,
            metric_value=round(self.value, 6),
            **{f"dataset_{key}": value for key, value in self.dataset.items() if value},
            **self.more,
        )


def all_scores(line: dict, results: dict, config: dict, texts: list[dict]) -> list[Score]:
    """What was measured of a checkpoint, where it is finite.

    `line` is the checkpoint's of metrics.jsonl and `results` its results.json, each {} where there is none; `config` is
    the run's; `texts` are what it was trained on, from model_card.data_sets.
    """
    own = results.get("perplexity", {})
    found = [
        *_of_run(line, config, texts),
        *_hellaswag(results.get("hellaswag", {})),
        *_losses(_held_out(own.get("data"), config, texts), own),
        *_lm_eval(results.get("lm_eval", {})),
    ]
    return [score for score in found if score.value is not None and math.isfinite(score.value)]


def _of_run(line: dict, config: dict, texts: list[dict]) -> Iterator[Score]:
    tokens = config.get("eval_tokens")
    how = "by the run, in its precision" + (f", at most {tokens:,} tokens" if tokens else "")
    name = "validation loss, nats per token"
    data = _held_out(config.get("val_data") or config.get("dataset_name"), config, texts)
    weighted = ", weighted by the shares" if len(texts) > 1 else ""
    yield Score(data, "loss", name, line.get("val_loss"), how + weighted)
    for text in texts if weighted else []:
        yield Score(_local(f"{text['name']}, held out"), "loss", name, line.get(f"val_loss/{text['name']}"), how)
    rows = config.get("hellaswag_limit") or HELLASWAG_ROWS
    how = f"by the run, in its precision, {_rows(rows, HELLASWAG_ROWS)}"
    for key, style in _STYLES.items():
        for kind in ("acc", "acc_norm"):
            name, value = f"{kind}, {style}, during training", line.get(f"hellaswag_{key}_{kind}")
            yield Score(_HELLASWAG, "accuracy", name, value, how, whole=rows >= HELLASWAG_ROWS)


def _hellaswag(found: dict) -> Iterator[Score]:
    rows = found.get("rows", 0)
    how = f"{_rows(rows, HELLASWAG_ROWS)}{_dtype(found)}"
    for key, style in _STYLES.items():
        own = found.get(key, {})
        for kind in ("acc", "acc_norm"):
            half, whole = own.get(f"{kind}_ci95"), rows >= HELLASWAG_ROWS
            yield Score(_HELLASWAG, "accuracy", f"{kind}, {style}", own.get(kind), how, half, whole)


def _losses(data: dict, found: dict) -> Iterator[Score]:
    settings = {key: found[key] for key in _HOW if key in found}
    how = ", ".join(_HOW[key].format(value) for key, value in settings.items()) + _dtype(found)
    whole, more = "limit_windows" not in found, {"metric_args": settings}
    for name, (kind, words) in _LOSSES.items():
        yield Score(data, kind, words, found.get(name), how, whole=whole, more=more)


def _lm_eval(found: dict) -> Iterator[Score]:
    """Of tasks as eval/harness.py writes them: metrics without ",none", and the number of rows as sample_len."""
    limit = found.get("limit")
    for task, metrics in found.get("tasks", {}).items():
        rows = metrics.get("sample_len")
        how = f"lm-evaluation-harness {found.get('version') or ''}" + (f", {rows:,} rows" if rows else "")
        how += (f", limit {limit:,}" if limit else "") + _dtype(found)
        for key, value in metrics.items():
            kind, _, filtered = key.partition(",")
            if "stderr" in key or kind in _NOT_METRICS:
                continue
            error = metrics.get(f"{kind}_stderr" + key[len(kind) :])
            half = None if error is None else 1.96 * error
            name = f"{kind}{f' ({filtered})' if filtered else ''}, lm-evaluation-harness"
            type = "accuracy" if kind.startswith("acc") else kind
            yield Score({"type": task, "name": task}, type, name, value, how, half, whole=not limit, more=_HARNESS)


def _held_out(data: str | None, config: dict, texts: list[dict]) -> dict:
    """The shards or text of a loss: the part of the training text that was held out, where the run has no other
    validation data and `data` is its own."""
    own = config.get("dataset_name")
    if not (data and own) or config.get("val_data") or os.path.normpath(data) != os.path.normpath(own):
        return _local(data)
    if len(texts) > 1:
        return _local(f"{' + '.join(text['name'] for text in texts)}, held out")
    text = texts[0]
    if "id" not in text:
        return _local(f"{text['name'] or 'own data'}, held out")
    of_hub = {"config": text.get("subset"), "revision": text.get("commit")}
    return {"type": text["id"], "name": f"{text['id']}, held out"} | of_hub


def _local(path: str | None) -> dict:
    """A text by its file's name alone: its directories are private. The name is the `config` too, since
    huggingface_hub groups figures by everything but the data set's name."""
    name = Path(path or "").name or "a local text"
    return {"type": "text", "name": name, "config": name}


def _rows(rows: int, every: int) -> str:
    return f"the first {rows:,} of {every:,} rows" if rows < every else f"{rows:,} rows"


def _dtype(found: dict) -> str:
    return f", in {found['dtype']}" if found.get("dtype") else ""
