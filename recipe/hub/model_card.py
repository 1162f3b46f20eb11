"""The model card of a checkpoint: what the run and its evaluations recorded, laid out by model_card.md.jinja.

The metadata are those of https://github.com/huggingface/hub-docs/blob/main/modelcard.md.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from recipe.catalog import DATASETS
from recipe.config import ModelConfig
from recipe.errors import UserError
from recipe.estimate.memory import parameter_count
from recipe.hub import scores
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redact, redacted
from recipe.units import si

CARD = "README.md"
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
# English, according to these data sets' pages on the Hub; and the text that ships, recipe/data/tiny_shakespeare.txt.
_ENGLISH = {source for source, _ in DATASETS.values()}
_ENGLISH_FILES = {"86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"}  # SHA-256
_HYPERPARAMETERS = (
    "total_batch_tokens",
    "sequence_length",
    "micro_batch_size",
    "max_steps",
    "learning_rate",
    "lr_scheduler_type",
    "min_lr_fraction",
    "warmup_steps",
    "optim",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "dropout",
    "seed",
)


def model_card(checkpoint: Path, *, repo: str = "", license: str = "", dtype: str = "float32") -> str:
    """The card of a checkpoint: YAML and Markdown, without secrets.

    It has the evaluations beside the checkpoint (results.json), and those of its run's metrics.jsonl where the
    checkpoint is in its run's directory. `repo` is where the card will be, ORG/NAME on the Hub; `license` replaces the
    run's hub_license; `dtype` is that of the weights beside the card. Raises UserError for a results.json that eval/
    did not write, OSError, and ValueError for other damaged files.
    """
    state = redacted(json.loads((checkpoint / "trainer_state.json").read_text()))
    config, step, parts = state.get("config", {}), state["step"], state.get("about") or []
    lines = [n for n in read_metrics(checkpoint.resolve().parent / "metrics.jsonl") if n["step"] <= step]
    own = next((line for line in reversed(lines) if line["step"] == step), {})
    text = data_set(state)
    found = [*scores.of_run(own, config, text), *_evaluated(checkpoint, config, text)]
    name = config.get("run_name") or repo.rpartition("/")[2] or "model"
    init = parts[0].get("init_from") if parts else None
    whole = [score for score in found if score.whole]
    data = ModelCardData(
        language="en" if _is_english(text) else None,
        license=license or config.get("hub_license") or "mit",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["gpt2", "causal-lm", "pretraining"],
        datasets=[text["id"]] if "id" in text else None,
        metrics=sorted({score.type for score in whole} & {"accuracy", "perplexity"}) or None,
        base_model=init if init and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", init) else None,
        model_name=name if whole else None,
        eval_results=[score.entry() for score in whole] or None,
    )
    tables = [("Data", _data(state, text)), ("Training", _training(state, lines)), ("Code", _code(config, parts))]
    link = f"[{text['id']}](https://huggingface.co/datasets/{text['id']})" if "id" in text else None
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        title=plain(name),
        shape=_shape(config),
        start="from scratch" if init is None else f"on from {plain(init) if init else 'other weights'}",
        tokens=f"{state['tokens']:,}" if state.get("tokens") else "",
        dataset_link=link or plain(text.get("name", "")),
        step=f"{step:,}",
        whole_run=f"{config['max_steps']:,}" if config.get("max_steps", 0) > step else "",
        path=repo or "path/to/this/directory",
        positions=config.get("n_positions"),
        scores=[[plain(cell) for cell in score.row()] for score in found],
        dtype=dtype,
        tables=[(title, [(plain(k), plain(v)) for k, v in rows if v not in (None, "")]) for title, rows in tables],
    )
    return card.content.rstrip() + "\n"


def plain(value) -> str:
    """One line of Markdown that shows `value` as it is, in a table too: file names may hold markup."""
    text = redact(" ".join(str(value).split()))
    return re.sub(r"([\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def data_set(state: dict) -> dict:
    """What a trainer_state.json says of the training data.

    Returns:
        {"id", "commit", "subset", "split"} of a data set on the Hub, {"name", "files"} of local text, {"name"} of
        shards whose origin nobody wrote down, or {}. Never the configured `train_text`, since shards that were there
        before the run are used whatever they were made from.
    """
    config, manifest = state.get("config", {}), state.get("data", {}).get("manifest", {})
    source = (state.get("about") or [{}])[-1].get("data") or manifest.get("source") or {}
    hub = source.get("source") or source.get("uri", "").removeprefix("hf://datasets/")
    if hub and source.get("commit"):
        repo = "/".join(hub.split("@")[0].split("/")[:2])
        return {"id": repo, "commit": source["commit"], "subset": source.get("name"), "split": source.get("split")}
    if files := source.get("files"):
        more = source.get("of", len(files)) - 1
        return {"name": files[0]["name"] + (f" and {more:,} more files" if more else ""), "files": files}
    local = source.get("shards") or Path(config.get("dataset_name") or "").name
    return {"name": local} if local else {}


def _is_english(text: dict) -> bool:
    """Whether it is known to be; of most texts it is not known."""
    files = text.get("files", [])
    alone = len(files) == 1 and text["name"] == files[0]["name"]  # there are no more files than are named
    return text.get("id") in _ENGLISH or (alone and files[0].get("sha256") in _ENGLISH_FILES)


def _evaluated(checkpoint: Path, config: dict, text: dict) -> list[scores.Score]:
    path = checkpoint / "results.json"
    try:
        return list(scores.of_results(redacted(json.loads(path.read_text())), config, text))
    except FileNotFoundError:
        return []
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not what eval/ writes ({error}); move it away and evaluate again") from None


def _shape(config: dict) -> str:
    sizes = {key: config.get(key) for key in ("n_layer", "n_head", "n_embd", "n_positions")}
    if None in sizes.values():
        return ""
    model = ModelConfig(**sizes)
    return (
        f" with {si(parameter_count(model))} parameters ({model.n_layer} layers, {model.n_head} heads, "
        f"{model.n_embd} wide, {model.n_positions:,} positions)"
    )


def _data(state: dict, text: dict) -> Iterator[tuple]:
    if not text:
        return
    shards = state.get("data", {}).get("shards") or []
    complete, tokens = state.get("data", {}).get("complete"), sum(count for _, count, _ in shards)
    yield "text", text.get("id") or text["name"]
    yield "subset, split", ", ".join(filter(None, (text.get("subset"), text.get("split"))))
    yield "commit of the data set", text.get("commit")
    if len(files := text.get("files", [])) == 1:
        yield "SHA-256 of the text", files[0].get("sha256")
    if shards:
        yield "shards", f"{len(shards):,} with {tokens:,} tokens" + ("" if complete else ", of those made so far")
    if shards and complete and state.get("tokens"):
        yield "epochs", f"{state['tokens'] / tokens:.3g}"
    if len(shards) == 1:
        yield "SHA-256 of the shard", shards[0][2]
    yield "tokenizer", "GPT-2's byte-level BPE, 50,257 tokens"


def _training(state: dict, lines: list[dict]) -> Iterator[tuple]:
    config, parts = state.get("config", {}), state.get("about") or []
    yield "steps", f"{state['step']:,}"
    yield "tokens", f"{state['tokens']:,}" if state.get("tokens") else None
    yield "objective", "next token, cross-entropy"
    for field in _HYPERPARAMETERS:
        yield field, config.get(field)
    yield "hardware", _history(parts, _hardware)
    yield "precision", _history(parts, _precision)
    yield "seconds of training, without validation and saving", f"{state['seconds']:,.0f}" if "seconds" in state else ""
    yield "tokens per second, median of the log", _median(lines, "tokens_per_second", "{:,.0f}")
    yield "MFU, median of the log", _median(lines, "mfu", "{:.1%}")
    yield "steps skipped", next((line["skipped_steps"] for line in reversed(lines) if line.get("skipped_steps")), None)


def _code(config: dict, parts: list[dict]) -> Iterator[tuple]:
    yield "recipe", Path(config["config"]).name if config.get("config") else None
    yield "gpt2-recipe", _history(parts, lambda part: part.get("recipe"))
    yield "commit", _history(parts, lambda part: (part.get("commit") or "").replace("+", ", with local changes"))
    yield "Python", _history(parts, lambda part: part.get("python"))
    for name in dict.fromkeys(name for part in parts for name in part.get("packages") or {}):
        yield name, _history(parts, lambda part, name=name: (part.get("packages") or {}).get(name))


def _history(parts: list[dict], value_of: Callable[[dict], str | None]) -> str:
    """The value of a run, or each that a later part of the run changed it to: "2.13.0; 2.14.0 from step 40"."""
    values: list[str] = []
    before = None
    for part in parts:
        if (value := value_of(part)) and value != before:
            values.append(value + (f" from step {part['from_step']:,}" if part.get("from_step") else ""))
            before = value
    return "; ".join(values)


def _hardware(part: dict) -> str | None:
    device, engine, machines = part.get("device"), part.get("engine"), part.get("machines", 1)
    if engine and device and not engine.startswith(device):  # a processor, whose engine is only "CPU"
        engine = f"{device}, {engine}"
    return engine and engine + (f", on {machines} nodes" if machines > 1 else "")


def _precision(part: dict) -> str | None:
    precision = part.get("precision")
    return precision and f"{precision}{', compiled' if part.get('compiled') else ''}; weights and optimizer state fp32"


def _median(lines: list[dict], key: str, how: str) -> str | None:
    values = [line[key] for line in lines if line.get(key) is not None and math.isfinite(line[key])]
    return how.format(statistics.median(values)) if values else None
