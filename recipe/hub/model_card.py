"""The model card of a checkpoint, from what the run and its evaluations have written down; what they lack is left out.

The metadata are those of https://github.com/huggingface/hub-docs/blob/main/modelcard.md.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import ModelCardData

from recipe.config import ModelConfig
from recipe.data.catalog import DATASETS
from recipe.errors import UserError
from recipe.estimate.memory import parameter_count, si
from recipe.hub import scores
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redact, redacted

CARD = "README.md"
# What the Hub's pages of these data sets say of themselves, and the text that ships, recipe/data/tiny_shakespeare.txt.
_ENGLISH = {source for source, _ in DATASETS.values()}
_ENGLISH_FILES = {"86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}  # SHA-256
_SHOWN = (
    "total_batch_tokens",
    "sequence_length",
    "micro_batch_size",
    "max_steps",
    "learning_rate",
    "min_lr_fraction",
    "warmup_steps",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "dropout",
    "seed",
)


def card_of(checkpoint: Path, *, repo: str = "", license: str = "", dtype: str = "float32", tail: int = 0) -> str:
    """The card of a checkpoint, whatever it is called, with the evaluations beside it, and its run's metrics where it
    is in its run's directory. `tail`: read no more than the last so many bytes of metrics.jsonl. Raises UserError for
    a results.json that holds something else, OSError, and ValueError for other files that do."""
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    lines = read_metrics(checkpoint.resolve().parent / "metrics.jsonl", tail)
    return model_card(state, lines, _results_of(checkpoint), repo=repo, license=license, dtype=dtype)


def _results_of(checkpoint: Path) -> dict:
    path = checkpoint / "results.json"
    try:
        results = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError:
        results = None
    if not isinstance(results, dict):
        raise UserError(f"{path} is not a JSON object of results; move it away, evaluate again")
    try:
        list(scores.of_results(results, {}, {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} holds what eval/ does not write ({error}); move it away, evaluate again") from None
    return results


def model_card(
    state: dict, lines: list[dict], results: dict, *, repo: str = "", license: str = "", dtype: str = "float32"
) -> str:
    """The card of the weights after `state["step"]` steps: YAML and Markdown, without what is secret.

    `state` is a trainer_state.json, `lines` are those of metrics.jsonl, `results` a results.json. `repo` is where the
    card will stand, ORG/NAME on the Hub; `license` an identifier of the Hub's, in place of the one that the run was
    given; `dtype` of the weights beside it.
    """
    # Before it is cut and put into YAML, which what stands for a secret would break.
    state, results = redacted(state), redacted(results)
    config, step = state.get("config", {}), state["step"]
    lines = [line for line in lines if line["step"] <= step]
    name = config.get("run_name") or repo.rpartition("/")[2] or "model"
    text = data_set(state)
    found = [*scores.of_run(lines, config, step, text), *scores.of_results(results, config, text)]
    init = _part(state, 0).get("init_from", "" if config.get("init_from") else None)
    data = ModelCardData(
        language="en" if _is_english(text) else None,
        license=license or config.get("hub_license") or "mit",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "causal-lm", "pretraining"],
        datasets=[text["id"]] if "id" in text else None,
        metrics=sorted({s.type for s in found} & {"accuracy", "perplexity"}) or None,
        base_model=init if init and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init) else None,
        model_name=name if found else None,
        eval_results=[s.entry() for s in found] or None,
    )
    parts = [
        f"# {name}\n\n{_introduction(state, text, init)}",
        f"## Use\n\n{_use(repo, config)}",
        f"## Results\n\n{_results(found, state, dtype)}",
        f"## Data\n\n{_table(_data(state, text))}",
        f"## Training\n\n{_table(_training(state, lines))}",
        f"## Code\n\n{_table(_code(state))}",
        "This card was written from what the run recorded; what is not here was not measured. The licence is the one "
        "that those who trained the model gave the weights; the data have terms of their own.",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + redact("\n\n".join(parts)) + "\n"


def data_set(state: dict) -> dict:
    """{"id", "commit", "subset", "split"} of a data set on the Hub, {"name", "files"} of local text, {"name"} of shards
    of which nobody wrote down what they were made from, {} if unknown; "options" of those that are known. Never what
    the configuration calls `train_text`: shards that are there are used, whatever they were made from."""
    config = state.get("config", {})
    manifest = state.get("data", {}).get("manifest", {})
    source = _part(state, -1).get("data") or manifest.get("source") or {}
    options = {"options": source.get("options") or manifest.get("options") or {}}
    hub = source.get("train_text") or source.get("uri", "").removeprefix("hf://datasets/")
    if hub and source.get("commit"):
        return {
            "id": "/".join(hub.split("@")[0].split("/")[:2]),
            "commit": source["commit"],
            "subset": source.get("dataset_config"),
            "split": source.get("dataset_split"),
        } | options
    if files := source.get("files"):
        more = source.get("of", len(files)) - 1
        return {"name": files[0]["name"] + (f" and {more:,} more files" if more else ""), "files": files} | options
    local = source.get("shards") or Path(config.get("dataset_name") or "").name
    return {"name": local} if local else {}


def _is_english(text: dict) -> bool:
    """Known to be; of most texts nobody has said."""
    files = text.get("files", [])
    alone = len(files) == 1 and text["name"] == files[0]["name"]  # and no more files than are named
    return text.get("id") in _ENGLISH or (alone and files[0].get("sha256") in _ENGLISH_FILES)


def _part(state: dict, which: int) -> dict:
    return (state.get("about") or [{}])[which]


def parameters(config: dict) -> int | None:
    sizes = {k: config.get(k) for k in ("n_layer", "n_head", "n_embd", "n_positions")}
    return None if None in sizes.values() else parameter_count(ModelConfig(**sizes))


def _introduction(state: dict, text: dict, init: str | None) -> str:
    config, tokens = state.get("config", {}), state.get("tokens")
    shape = ""
    if count := parameters(config):
        shape = (
            f" with {si(count)} parameters ({config['n_layer']} layers, {config['n_head']} heads, "
            f"{config['n_embd']} wide, {config['n_positions']:,} positions)"
        )
    start = "from scratch" if init is None else f"on from {init}" if init else "on from other weights"
    trained = f", trained {start}" + (f" on {tokens:,} tokens" if tokens else "")
    of = f" of {_name(text)}" if text else ""
    end, step = config.get("max_steps", 0), state["step"]
    whole = f" It is a checkpoint of a run of {end:,} steps." if end > step else ""
    return (
        f"A GPT-2 language model{shape}{trained}{of}: the weights after step {step:,}.{whole} It continues text; it "
        "was not taught to follow instructions, and nothing was done about what its text may contain."
    )


def _name(text: dict) -> str:
    return f"[{text['id']}](https://huggingface.co/datasets/{text['id']})" if "id" in text else text["name"]


def _use(repo: str, config: dict) -> str:
    where = repo or "path/to/this/directory"
    length = f" It has {config['n_positions']:,} positions." if config.get("n_positions") else ""
    return f"""```python
from transformers import pipeline

generate = pipeline("text-generation", model="{where}")
print(generate("The", max_new_tokens=50)[0]["generated_text"])
```

or `AutoModelForCausalLM.from_pretrained("{where}")`. Token 50256, `<|endoftext|>`, stood before each document in
training, and ends generation.{length}"""


def _results(found: list, state: dict, dtype: str) -> str:
    if not found:
        return "None was measured."
    rows = ["| data | metric | | how |", "|---|---|---|---|"]
    rows += [_row(s.data, s.name, s.shown, s.how) for s in found]
    if dtype != "float32":
        rows.append(f"\nThe weights here are those measured, in float32, rounded to {dtype}.")
    return "\n".join(rows)


def _data(state: dict, text: dict) -> Iterator[tuple]:
    if not text:
        return
    yield "text", _name(text)
    yield "subset, split", ", ".join(filter(None, (text.get("subset"), text.get("split"))))
    yield "commit of the data set", text.get("commit")
    shards = state.get("data", {}).get("shards") or []
    if len(files := text.get("files", [])) == 1:
        yield "SHA-256 of the text", files[0].get("sha256")
    complete, tokens = state.get("data", {}).get("complete"), sum(count for _, count, _ in shards)
    if shards:
        yield "shards", f"{len(shards):,} of {tokens:,} tokens" + ("" if complete else ", of those made so far")
    if shards and complete and state.get("tokens"):
        yield "epochs", f"{state['tokens'] / tokens:.3g}"
    if len(shards) == 1:
        yield "SHA-256 of the shard", shards[0][2]
    yield "left out", "documents whose text came before" if text.get("options", {}).get("dedup") else None
    yield "tokenizer", "GPT-2's byte-level BPE, 50,257 tokens"


def _training(state: dict, lines: list[dict]) -> Iterator[tuple]:
    config = state.get("config", {})
    yield "steps, tokens", f"{state['step']:,}" + (f", {state['tokens']:,}" if state.get("tokens") else "")
    yield "objective", "next token, cross-entropy"
    yield "optimizer", "AdamW, cosine after linear warm-up"
    for field in _SHOWN:
        yield field, config.get(field)
    parts = state.get("about") or [{"engine": state.get("engine")}]
    for part in parts:
        when = _when(part) if len(parts) > 1 or part.get("from_step") else ""
        yield f"hardware{when}", _hardware(part)
        precision = part.get("precision")
        compiled = ", compiled" if part.get("compiled") else ""
        yield f"precision{when}", precision and f"{precision}{compiled}; weights and moments in fp32"
    yield (
        "seconds of training, without validation and saving",
        f"{state['seconds']:,.0f}" if state.get("seconds") else None,
    )
    yield "tokens a second, median of the log", _median(lines, "tokens_per_second", "{:,.0f}")
    yield "MFU, median of the log", _median(lines, "mfu", "{:.1%}")
    yield "steps left out", next((line["skipped_steps"] for line in reversed(lines) if line.get("skipped_steps")), None)


def _hardware(part: dict) -> str | None:
    device, engine, machines = part.get("device"), part.get("engine"), part.get("machines", 1)
    if engine and device and not engine.startswith(device):  # a processor, whose engine is only "CPU"
        engine = f"{device}, {engine}"
    return engine and engine + (f", on {machines} machines" if machines > 1 else "")


def _median(lines: list[dict], key: str, how: str) -> str | None:
    values = [line[key] for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return how.format(statistics.median(values)) if values else None


def _code(state: dict) -> Iterator[tuple]:
    config, parts = state.get("config", {}), state.get("about") or []
    yield "recipe", Path(config["config"]).name if config.get("config") else None
    yield from _by_part(parts, "gpt2-recipe", [part.get("recipe") for part in parts])
    commits = [part.get("commit") or "" for part in parts]
    changed = ["" if not commit.endswith("+") else ", with changes that it does not hold" for commit in commits]
    commits = [commit.removesuffix("+") + more for commit, more in zip(commits, changed, strict=True)]
    yield from _by_part(parts, "commit", commits)
    yield from _by_part(parts, "Python", [part.get("python") for part in parts])
    packages = [part.get("packages") or {} for part in parts]
    for name in dict.fromkeys(name for versions in packages for name in versions):
        yield from _by_part(parts, name, [versions.get(name) for versions in packages])


def _by_part(parts: list[dict], name: str, values: list) -> Iterator[tuple]:
    """One row where all parts of the run have the same value, or else a row for each part that changes it."""
    if not any(values):
        return
    several = len(set(values)) > 1 or parts[0].get("from_step")  # of what came before it nothing was recorded
    before = object()
    for part, value in zip(parts, values, strict=True):
        if value != before:
            yield name + (_when(part) if several else ""), value or "not recorded"
        before = value


def _when(part: dict) -> str:
    return f" from step {part.get('from_step', 0):,}"


def _table(rows: Iterator[tuple]) -> str:
    kept = [_row(name, value) for name, value in rows if value not in (None, "")]
    return "\n".join(["| | |", "|---|---|", *kept]) if kept else "Not recorded."


def _row(*cells) -> str:
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"
