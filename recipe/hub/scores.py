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
_WAYS = {"A": "way A, as llm.c and build-nanogpt score", "B": "way B, as lm-evaluation-harness (hellaswag v1) scores"}
_NO_METRICS = ("rows", "samples", "sample_len", "limit", "version", "num_fewshot")  # beside an lm-eval task's metrics
_HARNESS = "https://github.com/EleutherAI/lm-evaluation-harness"


@dataclass(frozen=True)
class Score:
    """A figure. `type` is the Hub's name of the metric, `dataset` {"type", "name", "split", ...} as EvalResult has
    them, `args` what the figure depends on, `half` the half width of its 95 % interval."""

    dataset: dict
    type: str
    name: str
    value: float
    how: str = ""
    args: dict = field(default_factory=dict)
    half: float | None = None
    source: str = ""

    @property
    def data(self) -> str:
        """What it was measured on, for a reader."""
        return ", ".join(filter(None, (self.dataset["name"], self.dataset.get("split"))))

    @property
    def shown(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.half:.4f}" if self.half is not None else "")

    def entry(self) -> EvalResult:
        about = {f"dataset_{k}": v for k, v in self.dataset.items() if v}
        source = {"source_name": "lm-evaluation-harness", "source_url": self.source} if self.source else {}
        return EvalResult(
            task_type="text-generation",
            **about,
            metric_type=self.type,
            metric_value=round(self.value, 6),
            metric_name=self.name,
            metric_args=self.args or None,
            **source,
        )


def of_run(lines: list[dict], config: dict, step: int, text: dict) -> Iterator[Score]:
    """Of metrics.jsonl's `lines` up to `step`: figures of these very weights. `text` is what they were trained on, as
    card.data_set has it."""
    own = next((line for line in reversed(lines) if line["step"] == step), {})
    if (loss := own.get("val_loss")) is not None:
        tokens = config.get("eval_tokens")
        most = f", at most {tokens:,} tokens" if tokens else ""
        data = _validation(
            config.get("val_data") or config.get("dataset_name") or "the run's validation data", config, text
        )
        yield Score(data, "loss", "validation loss, nats a token", loss, f"by the run, in its precision{most}")
    rows = config.get("hellaswag_limit") or HELLASWAG_ROWS
    for way, title in _WAYS.items():
        for kind in ("acc", "acc_norm"):
            if (value := own.get(f"hellaswag_{way}_{kind}")) is not None:
                how = f"{title}{_first(rows, HELLASWAG_ROWS)}; by the run, in its precision"
                yield Score(_HELLASWAG, "accuracy", f"{kind}, way {way}, during training", value, how, {"rows": rows})


_HELLASWAG = {"type": "Rowan/hellaswag", "name": "HellaSwag", "split": "validation"}
# What the evaluation commands call `data_set` where the text is the whole data set's, going by its digest.
_KNOWN = {
    "Salesforce/wikitext": {"name": "WikiText-2", "config": "wikitext-2-raw-v1", "split": "test"},
    "EleutherAI/lambada_openai": {"name": "LAMBADA", "config": "default", "split": "test"},
}


def of_results(results: dict, config: dict, text: dict) -> Iterator[Score]:
    """Of a results.json. `config` is the run's, `text` as in `of_run`."""
    if found := _of(results, "hellaswag"):
        yield from _hellaswag(found)
    if found := _of(results, "perplexity"):
        yield from _losses(_validation(found.get("data"), config, text), found, ("loss", "perplexity", "bits_per_byte"))
    if found := _of(results, "wikitext2"):
        yield from _losses(_named(found), found, ("perplexity", "word_perplexity", "bits_per_byte"))
    if found := _of(results, "lambada"):
        yield from _lambada(found)
    if found := _of(results, "lm_eval"):
        yield from _lm_eval(found)


def _hellaswag(found: dict) -> Iterator[Score]:
    rows = _number(found.get("rows", HELLASWAG_ROWS))
    for way, title in _WAYS.items():
        own = _of(found, way)
        for kind in ("acc", "acc_norm"):
            if (value := _number(own.get(kind))) is not None:
                how = f"{title}{_first(rows, HELLASWAG_ROWS)}{_in(found)}"
                half, args = _number(own.get(f"{kind}_ci95")), {"rows": rows} if rows else {}
                yield Score(_HELLASWAG, "accuracy", f"{kind}, way {way}", value, how, args, half)


def _lambada(found: dict) -> Iterator[Score]:
    data, rows = _named(found), _number(found.get("rows"))
    of = f" of {LAMBADA_ROWS:,}" if rows != LAMBADA_ROWS and data["type"] in _KNOWN else ""
    how, args = (
        (f"{'the first ' * bool(of)}{rows:,}{of} rows" if rows else "") + _in(found),
        {"rows": rows} if rows else {},
    )
    if (value := _number(found.get("acc"))) is not None:
        yield Score(data, "accuracy", "acc", value, how, args, _number(found.get("acc_ci95")))
    if (value := _number(found.get("perplexity"))) is not None:
        yield Score(data, "perplexity", "perplexity", value, how, args)


def _lm_eval(found: dict) -> Iterator[Score]:
    """Of tasks as eval/harness.py's `summary` has them: metrics without ",none", and how many rows as sample_len."""
    version, limit = found.get("version"), _number(found.get("limit"))
    for task, metrics in _of(found, "tasks").items():
        task, metrics = redact(task), metrics if isinstance(metrics, dict) else {}  # a key, which `redacted` leaves
        rows = _number(metrics.get("sample_len"))
        how = "lm-evaluation-harness" + (f" {version}" if version else "")
        how += (f", {rows:,} rows" if rows else "") + (f", limit {limit:,}" if limit else "") + _in(found)
        args = {k: v for k, v in (("rows", rows), ("limit", limit)) if v}
        for key, value in metrics.items():
            kind, _, filtered = key.partition(",")
            if _number(value) is None or "stderr" in key or kind in _NO_METRICS:
                continue
            error = _number(metrics.get(f"{kind}_stderr" + key[len(kind) :]))
            half = None if error is None else 1.96 * error
            way = "" if filtered in ("", "none") else f" ({filtered})"
            name, type = f"{kind}{way}, lm-evaluation-harness", "accuracy" if kind.startswith("acc") else kind
            yield Score({"type": task, "name": task}, type, name, value, how, args, half, _HARNESS)


_NAMES = {
    "loss": ("loss", "loss, nats a token"),
    "perplexity": ("perplexity", "perplexity, of a token"),
    "word_perplexity": ("perplexity", "perplexity, of a word"),
    "bits_per_byte": ("bits_per_byte", "bits a byte"),
}


def _losses(data: dict, found: dict, keys: tuple[str, ...]) -> Iterator[Score]:
    names = ("sequence_length", "stride", "tokens", "windows", "limit_windows")
    args = {k: found[k] for k in names if _number(found.get(k)) is not None}
    words = {
        "sequence_length": "{:,} at once",
        "stride": "stride {:,}",
        "limit_windows": "the first {:,} windows",
        "tokens": "{:,} tokens",
    }
    how = ", ".join(words[k].format(args[k]) for k in words if k in args) + _in(found)
    for key in keys:
        if (value := _number(found.get(key))) is not None:
            yield Score(data, *_NAMES[key], value, how, args)


def _validation(data: str | None, config: dict, text: dict) -> dict:
    """Shards or a text that a loss is of: a directory, a glob or a file. Only the run's own directory holds what was
    held out of the text that it was trained on, and only where the run validated on that."""
    if not data or any(
        _path(own) != _path(data) for own in (config.get("dataset_name"), config.get("val_data") or data)
    ):
        return _local(data)
    name = text.get("id") or text.get("name") or "the run's own data"
    if "id" not in text:
        return _local(f"{name}, held out")
    return {
        "type": text["id"],
        "name": f"{name}, held out",
        "config": text.get("subset"),
        "revision": text.get("commit"),
    }


def _path(name: str | None) -> str | None:
    return os.path.normpath(redact(name)) if name else None


def _named(found: dict) -> dict:
    """What the command has recognised; another text, or one that an earlier version scored, by its name."""
    known = _KNOWN.get(found.get("data_set"))
    return {"type": found["data_set"]} | known if known else _local(found.get("data_set") or found.get("data"))


def _local(path: str | None) -> dict:
    """A text by its last name alone: its directories are nobody's business. The name is the `config` too, since
    huggingface_hub puts figures into one group that differ in nothing but the data set's name."""
    name = Path(redact(path)).name if isinstance(path, str) else ""
    name = name if name.strip("~.") else "a local text"
    return {"type": "text", "name": name, "config": name}


def _of(results: dict, key: str) -> dict:
    found = results.get(key)
    return found if isinstance(found, dict) else {}


def _number(value) -> float | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def _first(rows: int | None, every: int) -> str:
    return "" if rows is None or rows >= every else f", the first {rows:,} of {every:,} rows"


def _in(found: dict) -> str:
    return f"; in {found['dtype']}" if found.get("dtype") else ""
