"""Which data set a run trains on, and what OpenAI's weights lose on it."""

import re
from pathlib import Path

# Known data sets: name here -> (name to show, repositories on the Hub in lower case, what a directory of it is called,
# or its shards before _train and _val). Repositories: recipe/data/catalog.py's, and such of GPT-2's tokens, from
# KellerJordan/modded-nanogpt (data/cached_*.py) and karpathy/llm.c. Every other one is another data set, whatever it is
# called. Tiny Shakespeare is the text that ships, cut as the recipe cuts it: others hold out another part of it.
DATASETS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "fineweb-edu": (
        "FineWeb-Edu",
        ("huggingfacefw/fineweb-edu", "kjj0/finewebedu10b-gpt2", "karpathy/fineweb-edu-100b-gpt2-token-shards"),
        "(?:fineweb[-_]?edu|edu[-_]?fineweb)",
    ),
    "fineweb": ("FineWeb", ("huggingfacefw/fineweb", "kjj0/fineweb10b-gpt2", "kjj0/fineweb100b-gpt2"), "fineweb"),
    "openwebtext": ("OpenWebText", ("skylion007/openwebtext",), "openwebtext"),
    "tinystories": ("TinyStories", ("roneneldan/tinystories",), "tinystories"),
    "tiny-shakespeare": ("tiny Shakespeare", (), "(?!)"),
}
SHOWN = {name: shown for name, (shown, _, _) in DATASETS.items()}
SHAKESPEARE = "tiny_shakespeare.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
# Validation loss of OpenAI's weights, nats a token. A line is drawn only where the run's data are that data set.
OPENAI_LOSS = {
    "fineweb-edu": {"124M": 3.2924},
    "fineweb": {"124M": 3.424958, "350M": 3.083089, "774M": 3.000580, "1558M": 2.831273},
    "openwebtext": {"124M": 3.12, "350M": 2.84, "774M": 2.67, "1558M": 2.54},
}
OPENAI_LOSS_SOURCE = {
    "fineweb-edu": "karpathy/build-nanogpt, play.ipynb (at 6104ab1), on its validation shard of FineWeb-Edu 10B",
    "fineweb": "karpathy/llm.c, dev/vislog.ipynb (at f1e2ace; May 2024, when FineWeb was its only web data; which "
    "sample's validation shard is not said there)",
    "openwebtext": "karpathy/nanoGPT, README (at 3adf61e), on its own split of OpenWebText",
}


def dataset_of(config: dict, about: list | None = None) -> str:
    """Which of DATASETS a run trains and validates on; empty for any other, and where validation is on other data.

    `about` is trainer_state.json's: what the manifest says that the shards were made from, None where they have none.
    The configuration's `train_text` says that only where `dataset_name` is the directory that the recipe would make of
    it: shards that are there already, or that a glob names, are trained on as they are.
    """
    data, source = (str(config.get(key) or "") for key in ("dataset_name", "train_text"))
    parts = [part["data"] for part in about or [] if isinstance(part, dict) and "data" in part]
    if parts:
        names = {_of_manifest(part, data) for part in parts}
        name = names.pop() if len(names) == 1 else ""
    elif Path(source).name == SHAKESPEARE:
        name = "tiny-shakespeare" if Path(data) == Path("data/shakespeare") else _of_path(data)
    else:
        repository = "".join(source.removeprefix("hf://datasets/").split("/")[1:2]).split("@")[0]
        made = "-".join(filter(None, (f"data/{repository}", str(config.get("dataset_config") or ""))))
        name = _of_hub(source) if source and Path(data) == Path(made) else _of_path(data)
    return name if not config.get("val_data") or _of_path(str(config["val_data"])) == name else ""


def _of_manifest(source: object, data: str) -> str:
    source = source if isinstance(source, dict) else {}
    if hub := source.get("train_text") or source.get("uri"):
        return _of_hub(str(hub))
    files = source.get("files")
    if isinstance(files, list) and files:
        whole = len(files) == 1 and isinstance(files[0], dict) and files[0].get("sha256") == SHAKESPEARE_SHA256
        return "tiny-shakespeare" if whole else ""
    return _of_path(data)


def _of_hub(name: str) -> str:
    """Of ORG/NAME or hf://datasets/ORG/NAME[@REVISION]/PATTERN."""
    repository = "/".join(name.removeprefix("hf://datasets/").split("/")[:2]).split("@")[0].lower()
    return next((name for name, (_, repositories, _) in DATASETS.items() if repository in repositories), "")


def _of_path(path: str) -> str:
    """Of a directory or a glob of shards, by the last part of its name, all of it."""
    if "://" in path:
        return _of_hub(path)
    last = re.sub(r"_(?:train|val)(?:_[^/]*)?\.bin$", "", Path(path).name)
    size = r"(?:[-_]?(?:sample[-_])?\d+BT?)?(?:-gpt2)?"  # fineweb10B, fineweb-sample-10BT, fineweb10B-gpt2
    return next((n for n, (_, _, sign) in DATASETS.items() if re.fullmatch(sign + size, last, re.IGNORECASE)), "")
