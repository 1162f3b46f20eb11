"""The figures of a model card: what a run and the evaluation commands have measured, each with how it was scored."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import EvalResult

from recipe.redaction import redact

HELLASWAG_ROWS, LAMBADA_ROWS = 10042, 5153
_HELLASWAG = {"type": "Rowan/hellaswag", "name": "HellaSwag", "split": "validation"}
# What the evaluation commands call `data_set` where the text is the whole data set's, going by its digest.
_KNOWN = {
    "Salesforce/wikitext": {"name": "WikiText-2", "config": "wikitext-2-raw-v1", "split": "test"},
    "EleutherAI/lambada_openai": {"name": "LAMBADA", "config": "default", "split": "test"},
}
_STYLES = {"A": "llm.c-style", "B": "lm-eval-style"}  # how HellaSwag is scored
_HARNESS = {"source_name": "lm-evaluation-harness", "source_url": "https://github.com/EleutherAI/lm-evaluation-harness"}
_NOT_METRICS = ("rows", "samples", "sample_len", "limit", "version", "num_fewshot")  # beside the metrics of a task
_LOSSES = {
    "loss": ("loss", "loss, nats per token"),
    "perplexity": ("perplexity", "perplexity per token"),
    "word_perplexity": ("perplexity", "perplexity per word"),
    "bits_per_byte": ("bits_per_byte", "bits per byte"),
}
_HOW = {  # settings of a loss, as a reader wants them
    "sequence_length": "{:,} tokens at once",
    "stride": "stride {:,}",
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


def of_run(line: dict, config: dict, text: dict) -> Iterator[Score]:
    """Of the line of metrics.jsonl for these very weights. `text` is what they were trained on, from
    model_card.data_set."""
    if (loss := _number(line.get("val_loss"))) is not None:
        tokens = config.get("eval_tokens")
        at_most = f", at most {tokens:,} tokens" if tokens else ""
        own = config.get("val_data") or config.get("dataset_name") or "the run's validation data"
        data = _validation(own, config, text)
        yield Score(data, "loss", "validation loss, nats per token", loss, f"by the run, in its precision{at_most}")
    rows = config.get("hellaswag_limit") or HELLASWAG_ROWS
    for key, style in _STYLES.items():
        for kind in ("acc", "acc_norm"):
            if (value := _number(line.get(f"hellaswag_{key}_{kind}"))) is not None:
                how = f"by the run, in its precision, {_rows(rows, HELLASWAG_ROWS)}"
                whole = rows >= HELLASWAG_ROWS
                yield Score(_HELLASWAG, "accuracy", f"{kind}, {style}, during training", value, how, whole=whole)


def of_results(results: dict, config: dict, text: dict) -> Iterator[Score]:
    """Of a results.json. `config` is the run's, `text` as in `of_run`."""
    yield from _hellaswag(_dict(results, "hellaswag"))
    found = _dict(results, "perplexity")
    yield from _losses(_validation(found.get("data"), config, text), found, ("loss", "perplexity", "bits_per_byte"))
    found = _dict(results, "wikitext2")
    yield from _losses(_named(found), found, ("perplexity", "word_perplexity", "bits_per_byte"))
    yield from _lambada(_dict(results, "lambada"))
    yield from _lm_eval(_dict(results, "lm_eval"))


def _hellaswag(found: dict) -> Iterator[Score]:
    rows = _number(found.get("rows")) or 0
    for key, style in _STYLES.items():
        own = _dict(found, key)
        for kind in ("acc", "acc_norm"):
            if (value := _number(own.get(kind))) is not None:
                how = f"{_rows(rows, HELLASWAG_ROWS)}{_dtype(found)}"
                half, whole = _number(own.get(f"{kind}_ci95")), rows >= HELLASWAG_ROWS
                yield Score(_HELLASWAG, "accuracy", f"{kind}, {style}", value, how, half, whole)


def _losses(data: dict, found: dict, names: tuple[str, ...]) -> Iterator[Score]:
    settings = {key: found[key] for key in _HOW if _number(found.get(key)) is not None}
    how = ", ".join(_HOW[key].format(value) for key, value in settings.items()) + _dtype(found)
    for name in names:
        if (value := _number(found.get(name))) is not None:
            more = {"metric_args": settings} if settings else {}
            yield Score(data, *_LOSSES[name], value, how, whole="limit_windows" not in found, more=more)


def _lambada(found: dict) -> Iterator[Score]:
    data, rows = _named(found), _number(found.get("rows")) or 0
    known = data["type"] in _KNOWN  # of another text nobody knows how many rows it has
    how = f"{_rows(rows, LAMBADA_ROWS if known else rows)}{_dtype(found)}"
    for kind, type in (("acc", "accuracy"), ("perplexity", "perplexity")):
        if (value := _number(found.get(kind))) is not None:
            half, whole = _number(found.get(f"{kind}_ci95")), known and rows >= LAMBADA_ROWS
            yield Score(data, type, kind, value, how, half, whole)


def _lm_eval(found: dict) -> Iterator[Score]:
    """Of tasks as eval/harness.py writes them: metrics without ",none", and the number of rows as sample_len."""
    version, limit = found.get("version"), _number(found.get("limit"))
    for task, metrics in _dict(found, "tasks").items():
        metrics, task = metrics if isinstance(metrics, dict) else {}, redact(task)
        rows = _number(metrics.get("sample_len"))
        how = f"lm-evaluation-harness {version or ''}" + (f", {rows:,} rows" if rows else "")
        how += (f", limit {limit:,}" if limit else "") + _dtype(found)
        for key, value in metrics.items():
            kind, _, filtered = key.partition(",")
            if _number(value) is None or "stderr" in key or kind in _NOT_METRICS:
                continue
            error = _number(metrics.get(f"{kind}_stderr" + key[len(kind) :]))
            name = f"{kind}{f' ({filtered})' if filtered not in ('', 'none') else ''}, lm-evaluation-harness"
            type = "accuracy" if kind.startswith("acc") else kind
            half = None if error is None else 1.96 * error
            yield Score({"type": task, "name": task}, type, name, value, how, half, whole=not limit, more=_HARNESS)


def _validation(data: str | None, config: dict, text: dict) -> dict:
    """The shards or text of a loss. Only the run's own directory holds the validation part of the text that it was
    trained on, and only where the run validated on that."""

    def path(name: str | None) -> str | None:
        return os.path.normpath(redact(name)) if name else None

    own = (config.get("dataset_name"), config.get("val_data") or data)
    if not data or any(path(name) != path(data) for name in own):
        return _local(data)
    if "id" not in text:
        return _local(f"{text.get('name') or 'own data'}, held out")
    of_hub = {"config": text.get("subset"), "revision": text.get("commit")}
    return {"type": text["id"], "name": f"{text['id']}, held out"} | of_hub


def _named(found: dict) -> dict:
    """A data set that the command has recognized, or another text by its file's name."""
    known = _KNOWN.get(found.get("data_set"))
    return {"type": found["data_set"]} | known if known else _local(found.get("data_set") or found.get("data"))


def _local(path: str | None) -> dict:
    """A text by its file's name alone: its directories are private. The name is the `config` too, since
    huggingface_hub groups figures by everything but the data set's name."""
    name = Path(redact(path)).name if isinstance(path, str) else ""
    name = name if name.strip("~.") else "a local text"
    return {"type": "text", "name": name, "config": name}


def _dict(results: dict, key: str) -> dict:
    found = results.get(key)
    return found if isinstance(found, dict) else {}


def _number(value) -> float | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def _rows(rows: int, every: int) -> str:
    return f"the first {rows:,} of {every:,} rows" if rows < every else f"{rows:,} rows"


def _dtype(found: dict) -> str:
    return f", in {found['dtype']}" if found.get("dtype") else ""
