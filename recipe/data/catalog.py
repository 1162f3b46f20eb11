"""What `data` may be called for short, instead of a directory of shards and the source that they are made from."""

import difflib
import re
from pathlib import Path

# name: (Hub data set, subset)
DATASETS = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", ""),
    "tinystories": ("roneneldan/TinyStories", ""),
}

# What the Hub takes as a licence in a card: huggingface/hub-docs, docs/hub/repositories-licenses.md, without those of
# single companies' models.
_LICENSES = """
afl-3.0 agpl-3.0 apache-2.0 artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 bigscience-openrail-m bsd
bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-nc-2.0
cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0
cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m
ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 gfdl gpl gpl-2.0 gpl-3.0 isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr
lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail openrail++ osl-3.0 other pddl
postgresql unknown unlicense wtfpl zlib
"""
LICENSES = frozenset(_LICENSES.split())


def license_error(name: str) -> str:
    """What is wrong with a licence that the Hub would refuse, with the way out; empty if nothing is."""
    if name in LICENSES:
        return ""
    close = difflib.get_close_matches(name, LICENSES, n=3) or ["mit", "apache-2.0", "cc-by-4.0"]
    known = "huggingface.co/docs/hub/repositories-licenses lists them"
    return f"{name!r} is no licence that the Hub knows; {known}: choose {', '.join(close)} or other"


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
