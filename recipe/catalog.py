"""What `data` may be called for short, instead of a directory of shards and the source that they are made from."""

import re
from pathlib import Path

# name: (Hub data set, subset)
DATASETS = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", ""),
    "tinystories": ("roneneldan/TinyStories", ""),
}


def names_a_data_set(data: str) -> bool:
    """Whether `data` is one of the names above, a Hub data set or shards on the Hub, and not a path."""
    path = Path(data)
    if not data or path.exists():
        return False
    if data in DATASETS or data.startswith("hf://"):
        return True
    is_hub_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", data) and path.suffix != ".bin"
    return bool(is_hub_id) and path.parts[0] != "data" and not Path(path.parts[0]).exists()


def resolve(data: str, name: str) -> tuple[str, str, str]:
    """(directory of the shards, source, subset) of what names a data set."""
    if data in DATASETS:
        source, subset = DATASETS[data]
        name = name or subset
    else:
        source = data
    if data.startswith("hf://"):
        name = ""
    repository = source.removeprefix("hf://datasets/").split("/")[1].split("@")[0]
    return "-".join(filter(None, (f"data/{repository}", name))), source, name
