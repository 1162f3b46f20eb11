"""The figures of a model card: what a run and the evaluation commands have measured, each with how it was scored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from huggingface_hub import EvalResult

from recipe.redact import redact

HELLASWAG_ROWS = 10042
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
        return ", ".join(filter(None, (self.dataset["name"], self.dataset.get("split"))))

    @property
    def shown(self) -> str:
        return f"{self.value:.4f}" + (f" ± {self.half:.4f}" if self.half is not None else "")

    def entry(self) -> EvalResult:
        about = {f"dataset_{k}": v for k, v in self.dataset.items() if v}
        source = {"source_name": "lm-evaluation-harness", "source_url": self.source} if self.source else {}
        return EvalResult(
            task_type="text-generation", **about, metric_type=self.type, metric_value=round(self.value, 6),
            metric_name=self.name, metric_args=self.args or None, **source,
        )  # fmt: skip


def of_run(lines: list[dict], config: dict, step: int, text: dict) -> Iterator[Score]:
    """Of metrics.jsonl's `lines` up to `step`: figures of these very weights, and the newest training loss."""
    own = next((line for line in reversed(lines) if line["step"] == step), {})
    held_out = _held_out(text)
    if (loss := own.get("val_loss")) is not None:
        tokens = config.get("eval_tokens")
        most = f", at most {tokens:,} tokens" if tokens else ""
        yield Score(held_out, "loss", "validation loss, nats a token", loss, f"by the run, in its precision{most}")
    rows = config.get("hellaswag_limit") or HELLASWAG_ROWS
    for way, title in _WAYS.items():
        for kind in ("acc", "acc_norm"):
            if (value := own.get(f"hellaswag_{way}_{kind}")) is not None:
                how = f"{title}{_rows(rows)}; by the run, in its precision"
                yield Score(_HELLASWAG, "accuracy", f"{kind}, way {way}, during training", value, how, {"rows": rows})


_HELLASWAG = {"type": "Rowan/hellaswag", "name": "HellaSwag", "split": "validation"}


def of_results(results: dict, text: dict) -> Iterator[Score]:
    """Of a results.json."""
    if found := _of(results, "hellaswag"):
        rows = found.get("rows", HELLASWAG_ROWS)
        for way, title in _WAYS.items():
            for kind in ("acc", "acc_norm"):
                if (value := _number(found.get(way, {}).get(kind))) is not None:
                    half = _number(found[way].get(f"{kind}_ci95"))
                    how = f"{title}{_rows(rows)}{_in(found)}"
                    yield Score(_HELLASWAG, "accuracy", f"{kind}, way {way}", value, how, {"rows": rows}, half)
    if found := _of(results, "perplexity"):
        # of the run's own shards, unless another text was named
        files = found.get("files") or {}
        ours = not files or all(name.endswith(".bin") for name in files)
        data = _held_out(text) if ours else {"type": "text", "name": redact(", ".join(list(files)[:3]))}
        yield from _losses(data, found, ("loss", "perplexity", "bits_per_byte"))
    if found := _of(results, "wikitext2"):
        yield from _losses({"type": "Salesforce/wikitext", "name": "WikiText-2"}, found,
                           ("perplexity", "word_perplexity", "bits_per_byte"))  # fmt: skip
    if found := _of(results, "lambada"):
        data, rows = {"type": "lambada", "name": "LAMBADA"}, found.get("rows")
        how, args = (f"{rows:,} rows" if rows else "") + _in(found), {"rows": rows} if rows else {}
        if (value := _number(found.get("acc"))) is not None:
            yield Score(data, "accuracy", "acc", value, how, args, _number(found.get("acc_ci95")))
        if (value := _number(found.get("perplexity"))) is not None:
            yield Score(data, "perplexity", "perplexity", value, how, args)
    if found := _of(results, "lm_eval"):
        version = found.get("version")
        for task, metrics in (found.get("tasks") or {}).items():
            task = redact(task)  # a key, which `redacted` leaves
            for key, value in metrics.items():
                kind = key.split(",")[0]
                if _number(value) is not None and "stderr" not in key and kind not in _NO_METRICS:
                    type = "accuracy" if kind.startswith("acc") else kind
                    rows = metrics.get("rows") or metrics.get("samples")
                    how = "lm-evaluation-harness" + (f" {version}" if version else "")
                    how += (f", {rows:,} rows" if _number(rows) else "") + _in(found)
                    name = f"{kind}, lm-evaluation-harness"
                    error = _number(metrics.get(f"{kind}_stderr" + key[len(kind) :]))
                    half = None if error is None else 1.96 * error
                    yield Score({"type": task, "name": task}, type, name, value, how, {}, half, _HARNESS)


_NAMES = {"loss": ("loss", "loss, nats a token"), "perplexity": ("perplexity", "perplexity, of a token"),
          "word_perplexity": ("perplexity", "perplexity, of a word"),
          "bits_per_byte": ("bits_per_byte", "bits a byte")}  # fmt: skip


def _losses(data: dict, found: dict, keys: tuple[str, ...]) -> Iterator[Score]:
    args = {k: found[k] for k in ("sequence_length", "stride", "tokens", "windows") if k in found}
    words = {"sequence_length": "{:,} at once", "stride": "stride {:,}", "tokens": "{:,} tokens"}
    how = ", ".join(words[k].format(args[k]) for k in words if k in args) + _in(found)
    for key in keys:
        if (value := _number(found.get(key))) is not None:
            yield Score(data, *_NAMES[key], value, how, args)


def _held_out(text: dict) -> dict:
    """The validation part of what the model was trained on."""
    name = text.get("id") or text.get("name") or "the run's own data"
    about = {"type": text.get("id") or "text", "name": f"{name}, held out"}
    return about | {"config": text.get("subset"), "revision": text.get("commit")}


def _of(results: dict, key: str) -> dict:
    found = results.get(key)
    return found if isinstance(found, dict) else {}


def _number(value) -> float | None:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if fine else None


def _rows(rows: int) -> str:
    return "" if rows >= HELLASWAG_ROWS else f", the first {rows:,} of {HELLASWAG_ROWS:,} rows"


def _in(found: dict) -> str:
    return f"; in {found['dtype']}" if found.get("dtype") else ""
