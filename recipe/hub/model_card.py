"""The model card of a checkpoint: the records of the run and its evaluations, rendered by model_card.md.jinja.

The metadata follow https://github.com/huggingface/hub-docs/blob/main/modelcard.md.
"""

import json
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from eval.common import own_results
from eval.published import ACCURACIES, HELLASWAG_ROWS
from eval.scores import all_scores, comparison_row, hellaswag_scores, score, table_row, text_dataset
from recipe.checkpoint.format import state_of
from recipe.config import DEFAULTS, SHAPE_FIELDS, UNDECIDED, ModelConfig, entries_in, hyperparameters
from recipe.config.catalog import DATASETS, short_name
from recipe.data.tokenizer import GPT2
from recipe.estimate.memory import parameter_count
from recipe.utils.checkpoints import read_metrics
from recipe.utils.redaction import redact, redacted
from recipe.utils.units import plural, si

CARD = "README.md"
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TEMPLATE = Path(__file__).with_name("model_card.md.jinja")
_ENGLISH = {source for source, _ in DATASETS.values()}  # according to these data sets' pages on the Hub


def model_card(checkpoint: Path, *, repo: str = "", license: str = "", audit: bool = False) -> str:
    """The card of a checkpoint: YAML and Markdown, without secrets.

    It shows the evaluations in the checkpoint's results.json and, if the checkpoint is in its run's directory, those in
    the run's metrics.jsonl. `repo` is where the card will be, ORG/NAME on the Hub; `license` overrides the run's
    hub_license; `audit` states that the optimizer state and metrics.jsonl are uploaded too. Raises UserError if
    results.json holds something else, OSError, and ValueError for other damaged files.
    """
    state = redacted(state_of(checkpoint))
    state["config"] = config = DEFAULTS | state["config"]  # an older checkpoint lacks newer fields
    step, parts, texts = state["step"], state["about"], training_texts(state)
    lines = [line for line in read_metrics(checkpoint.resolve().parent / "metrics.jsonl") if line["step"] <= step]
    last_line = next((line for line in reversed(lines) if line["step"] == step), {})
    results = redacted(own_results(checkpoint))
    scores = all_scores({"run": {"scores": [*_run_scores(last_line, config, texts)]}} | results)
    kind = model_type(checkpoint)
    name = config["run_name"] or repo.rpartition("/")[2] or "model"
    init = parts[0].get("init_from")
    complete = [score for score in scores if score["complete"]]
    data = ModelCardData(
        language="en" if {text.get("id") for text in texts} <= _ENGLISH else None,
        license=license or config["hub_license"],
        library_name="transformers" if kind == "gpt2" else None,
        pipeline_tag="text-generation",
        tags=[kind, "causal-lm", "pretraining"],
        datasets=list(dict.fromkeys(text["id"] for text in texts if "id" in text)) or None,
        metrics=sorted({score["metric_type"] for score in complete} & {"accuracy", "perplexity"}) or None,
        base_model=init if init and _REPOSITORY.fullmatch(init) else None,
        model_name=name if complete else None,
        eval_results=[_entry(score) for score in complete] or None,
    )
    preflight = _preflight(checkpoint, parts[-1])
    headings = [f"Data: {text['name']}" if len(texts) > 1 else "Data" for text in texts]
    tables = [(heading, _data_rows(state, text)) for heading, text in zip(headings, texts, strict=True)]
    tables += [("Training", _training_rows(state, lines, preflight)), ("Code", _code_rows(config, parts[-1]))]
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        plain=plain,
        title=name,
        kind=kind,
        summary=_summary(state, texts, kind),
        path=repo or "path/to/this/directory",
        positions=config["n_positions"],
        tokenizer=state["tokenizer"],
        documents=not any(source.get("shards") for source in entries_in(parts[-1]["data"])),
        scores=[table_row(score) for score in scores],
        comparison=results.get("compare"),
        comparison_row=comparison_row,
        audit=repo if audit else "",
        tables=tables,
    )
    text = card.content.rstrip() + "\n"
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")  # a file name may be in Latin-1


def model_type(checkpoint: Path) -> str:
    """The model's type in transformers' config.json: gpt2, unless somebody has changed the model and says so there."""
    return json.loads((checkpoint / "config.json").read_bytes())["model_type"]


def _summary(state: dict, texts: list[dict], kind: str) -> str:
    """A sentence about the model, its training text and the length of its training."""
    config, init = state["config"], state["about"][0].get("init_from")
    model = ModelConfig(**{name: config[name] for name in SHAPE_FIELDS if name in config})
    links = []
    for text in texts:
        link = f"[{text['id']}](https://huggingface.co/datasets/{text['id']})" if "id" in text else plain(text["name"])
        links.append(link + (f" ({text['share']:.1%})" if text["share"] < 1 else ""))
    start = "from scratch" if init is None else f"from {plain(init) if init else 'other weights'}"
    steps = config["max_steps"]
    length = f"{config['train_hours']:g} hours" if steps == UNDECIDED else f"{steps:,} steps"
    note = f" It is a checkpoint of a run of {length}." if steps > state["step"] else ""
    is_gpt2 = kind == "gpt2"  # of any other model the parameters are not known here
    size = f"with {si(parameter_count(model), 'B')} parameters " if is_gpt2 else ""
    shape = f"{plural(model.n_layer, 'layer')}, {plural(model.n_head, 'head')}, {model.n_embd} wide"
    shape += f", {model.n_positions:,} positions"
    return (
        f"A {'GPT-2' if is_gpt2 else plain(kind)} language model {size}({shape}), trained {start} on "
        f"{state['tokens']:,} tokens of {', '.join(links)}: the weights after step {state['step']:,}.{note}"
    )


def _run_scores(line: dict, config: dict, texts: list[dict]) -> Iterator[dict]:
    """The scores in a line of metrics.jsonl. Without val_data the validation text is held out of the training text."""
    method, metric = "by the run, in its precision", ("loss", "validation loss, nats per token")
    tokens = config["eval_tokens"] // len(texts)  # the data sets of a mixture share them equally
    tokens = f", at most {tokens:,} tokens{' of each' * (len(texts) > 1)}" if tokens else ""
    if config["val_data"]:
        data = text_dataset(short_name(config["val_data"]))
    else:
        data = text_dataset(" + ".join(text["name"] for text in texts) + ", held out")
        if len(texts) == 1 and (id := texts[0].get("id")):
            version = {"dataset_config": texts[0]["subset"], "dataset_revision": texts[0]["commit"]}
            data |= {"dataset_type": id} | version
    if line.get("val_loss") is not None:
        weighted = ", weighted by the shares" if len(texts) > 1 else ""
        yield score(data, metric, line["val_loss"], method + tokens + weighted)
    for text in texts:
        if (loss := line.get(f"val_loss/{text['name']}")) is not None:
            yield score(text_dataset(f"{text['name']}, held out"), metric, loss, method + tokens)
    accuracies = {name: line.get(f"hellaswag_{name}") for name in ACCURACIES}
    rows = line.get("hellaswag_rows") or config["hellaswag_limit"] or HELLASWAG_ROWS
    yield from hellaswag_scores(accuracies, rows, method, ", during training")


def _entry(score: dict) -> EvalResult:
    """A score as an entry of the card's model-index, which leaderboards read."""
    fields = {key: value for key, value in score.items() if key not in ("how", "ci95", "complete")}
    return EvalResult(**fields | {"metric_value": round(score["metric_value"], 6)})


def plain(value) -> str:
    """Escapes `value` as one line of Markdown, in tables too: file names may contain markup."""
    text = redact(" ".join(str(value).split()))
    return re.sub(r"([\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w))", r"\\\1", text)


def training_texts(state: dict) -> list[dict]:
    """Each training data set in a trainer_state.json: {"text", "name", "share", "state"}, the text it was made from,
    its name in the run, its share of the mixture, and the state that identifies its shards; with {"id", "commit",
    "subset", "split"} for a data set on the Hub, or {"files"}. The configured `train_text` is not used, since existing
    shards may have been made from another text."""
    source, data_state = state["about"][-1]["data"], state["data"]
    if "mixture" not in source:
        text = _text_of(source) or {"text": Path(state["config"]["dataset_name"]).name}
        return [text | {"name": text["text"], "share": 1.0, "state": data_state}]
    pairs = zip(source["mixture"], data_state["mixture"], strict=True)
    return [{"text": entry["name"]} | _text_of(entry) | entry | {"state": shards} for entry, shards in pairs]


def _text_of(source: dict) -> dict:
    repository = source.get("train_text")
    is_known = repository and (source.get("commit") or source.get("shards"))  # with shards, dataset_source names it
    if is_known and _REPOSITORY.fullmatch(repository):
        text = {"text": repository, "id": repository, "commit": source.get("commit")}
        return text | {"subset": source.get("dataset_config"), "split": source.get("dataset_split")}
    if files := source.get("files"):
        rest = source["of"] - 1
        return {"text": files[0]["name"] + (f" and {rest:,} more files" if rest else ""), "files": files}
    return {"text": source["shards"]} if source.get("shards") else {}


def _data_rows(state: dict, text: dict) -> dict[str, object]:
    shards, complete = text["state"]["shards"], text["state"]["complete"]
    tokens, files = sum(count for _, count, _ in shards), text.get("files", [])
    length, tokenizer = state["config"]["sequence_length"], state["tokenizer"]
    read_at_once = sum((count - 1) // length * length for _, count, _ in shards)  # of the windows of an epoch
    tokenizer_name = "GPT-2's" if tokenizer["digest"] == GPT2 else tokenizer["name"]
    return {
        "text": text["text"],
        "share": f"{text['share']:.1%} of every 1,000 sequences" if text["share"] < 1 else None,
        "subset, split": ", ".join(filter(None, (text.get("subset"), text.get("split")))),
        "commit of the data set": text.get("commit"),
        "SHA-256 of the text": files[0].get("sha256") if len(files) == 1 else None,
        "shards": f"{len(shards):,} with {tokens:,} tokens" + ("" if complete else " so far"),
        "epochs": si(text["share"] * state["tokens"] / read_at_once) if complete and read_at_once else None,
        "SHA-256 of the shard": shards[0][2] if len(shards) == 1 else None,
        "tokenizer": f"{tokenizer_name}, {state['config'].get('vocab_size', 50257):,} tokens",
    }


def _training_rows(state: dict, lines: list[dict], preflight: str) -> dict[str, object]:
    config, parts = state["config"], state["about"]  # one part for each start of the run
    precisions = [f"{part['precision']}{', compiled' * part['compiled']}" for part in parts]
    return {
        "steps": f"{state['step']:,}",
        "tokens": f"{state['tokens']:,}",
        "objective": "next token, cross-entropy",
        **{field: _values(field, config, parts) for field in hyperparameters(config)},
        "hardware": "; ".join(dict.fromkeys(map(_hardware, parts))),
        "preflight": preflight,
        "precision": "; ".join([*dict.fromkeys(precisions), "weights and optimizer state fp32"]),
        "seconds of training, without validation and saving": f"{state['metrics']['seconds']:,.0f}",
        "tokens per second, median of the log": _median(lines, "tokens_per_second", "{:,.0f}"),
        "MFU, median of the log": _median(lines, "mfu", "{:.1%}"),
        "steps skipped": max((line.get("skipped_steps") or 0 for line in lines), default=0) or None,
    }


def _values(field: str, config: dict, parts: list[dict]) -> object:
    """A hyperparameter's value or, where a resume changed it, each with the step from which it held."""
    starts = [(part["from_step"], part["config"][field]) for part in parts if field in part["config"]]
    changes = [start for i, start in enumerate(starts) if i == 0 or start[1] != starts[i - 1][1]]
    if len(changes) < 2 or field == "max_steps":
        return None if config[field] == UNDECIDED else config[field]
    return "; ".join(f"{value} from step {step:,}" for step, value in changes)


def _preflight(checkpoint: Path, part: dict) -> str:
    """The result of recipe/preflight.py on the devices of a part of the run; empty if it did not pass there."""
    path = checkpoint.resolve().parent.parent / "preflight.json"
    result = json.loads(path.read_text()) if path.is_file() else {}
    if not result.get("passed") or (result["device"], result["engine"]) != (part["device"], part["engine"]):
        return ""
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in ("torch", "accelerate"))
    return f"passed on {result['processes']} x {result['device']}, {result['date']}, {versions}"


def _code_rows(config: dict, part: dict) -> dict[str, object]:
    return {
        "recipe": Path(config["config"]).name,
        "gpt2-recipe": part["recipe"],
        "commit": (part["commit"] or "").replace("+", ", with local changes"),
        "Python": part["python"],
        **part["packages"],
    }


def _hardware(part: dict) -> str:
    device, engine, nodes = part["device"], part["engine"], part["nodes"]
    if not engine.startswith(device):  # `device` is a CPU's model name, `engine` just "CPU"
        engine = f"{device}, {engine}"
    return engine + (f", on {nodes} nodes" if nodes > 1 else "")


def _median(lines: list[dict], key: str, template: str) -> str | None:
    values = [line[key] for line in lines if line.get(key) is not None]
    return template.format(statistics.median(values)) if values else None
