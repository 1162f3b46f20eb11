"""The data sets that a configuration may name."""

import dataclasses
import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from recipe.config.fields import DATASETS, DataConfig
from recipe.utils.errors import UserError
from recipe.utils.units import plural

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet", ".csv", ".tsv")
_JSON_LINES = {".ndjson", ".jsonlines"}  # other names of .jsonl
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # a text file may be compressed: how pyarrow names that
REPO_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # ORG/NAME on the Hub
LOCK = ".preparing.lock"  # in a directory in which shards are made
_OF_OUTPUT = {LOCK, "metrics.jsonl"}  # what shards of this recipe, and a run, lie beside
_OF_HUB = {"readme.md", "dataset_infos.json", "dataset_info.json"}  # a data set's description
# The settings that decide what the shards of a text hold.
SHARD_FIELDS = (
    *("dataset_config", "dataset_split", "dataset_revision", "text_column", "tokenizer"),
    *("val_fraction", "val_documents", "shard_tokens"),
)


def resolve(data: DataConfig) -> DataConfig:
    """The data's configuration with `dataset_name` the directory, file or glob of the shards, and `train_text` the text
    from which they are made, if there is one. Shards made from text lie in a directory of their own under data/, so
    that they never mix with other files."""
    name, text = data.dataset_name, data.train_text
    if text:
        return data if name else dataclasses.replace(data, dataset_name=_directory_of(text, data))
    if is_text(name):
        return dataclasses.replace(data, dataset_name=_directory_of(name, data), train_text=name)
    if not is_on_hub(name):
        return data
    text, subset = DATASETS.get(name, (name, ""))
    data = dataclasses.replace(data, train_text=text, dataset_config=data.dataset_config or subset)
    return dataclasses.replace(data, dataset_name=_directory_of(text, data))


def _directory_of(text: str, data: DataConfig) -> str:
    """Where the shards of a text lie: other settings or another text are another directory."""
    path, settings = Path(text), {name: getattr(data, name) for name in SHARD_FIELDS}
    if data.val_data:
        settings["val_fraction"] = 0.0  # all of the text is trained on
    if is_on_hub(text):
        split = data.dataset_split if data.dataset_split != "train" else ""
        tokenizer = "" if data.tokenizer == "gpt2" else Path(data.tokenizer).name
        stem = "-".join(filter(None, (path.name, data.dataset_config, split, tokenizer)))
        del settings["val_fraction"]  # which is for local text
    else:
        path = path.parent if glob.has_magic(path.name) else path
        stem = re.sub(r"[^\w-]+", "-", path.name.split(".")[0]).strip("-") or "text"
        text = str(Path(text).absolute())
    return f"data/{stem}-{hashlib.sha256(json.dumps([text, settings]).encode()).hexdigest()[:8]}"


def short_name(shards: str) -> str:
    """A data set's name for people: that of the directory in which its shards lie."""
    path = Path(os.path.abspath(shards))
    own = path.parent if glob.has_magic(path.name) or path.suffix == ".bin" else path
    return re.sub(r"-[0-9a-f]{8}$", "", own.name)  # without the hash of `_directory_of`


def text_suffix(path: Path) -> str:
    """.jsonl for both x.jsonl and X.JSONL.gz; empty for what is not known to be text."""
    suffix = (Path(path.stem).suffix if path.suffix.lower() in PACKED else path.suffix).lower()
    suffix = ".jsonl" if suffix in _JSON_LINES else suffix
    return suffix if suffix in TEXT_SUFFIXES else ""


def text_files(name: str) -> tuple[list[Path], list[Path]]:
    """The text files of a path, by name, and what is not read: of a directory with its subdirectories, files with other
    endings and links to directories. A file that is named, or matched by a glob, is text, unless it holds tokens
    (.bin). Hidden ones, a data set's description, and shards and runs are in neither list."""
    directory = Path(name)
    if not directory.is_dir():  # the name of a file may hold a bracket
        paths = [directory] if directory.is_file() else sorted(map(Path, glob.glob(name, recursive=True)), key=str)
        files = [path for path in paths if _is_file(path)]
        return ([] if any(path.suffix == ".bin" for path in files) else files), []
    below = [path.relative_to(directory) for path in _below(directory)]
    made = {path.parent for path in below if path.name in _OF_OUTPUT}  # such as data/NAME, where text may lie in data/
    texts = [path for path in below if path.name.lower() not in _OF_HUB and made.isdisjoint(path.parents)]
    paths = [directory / path for path in texts if not any(part.startswith(".") for part in path.parts)]
    files = sorted((path for path in paths if _is_file(path) or path.is_symlink()), key=str)
    is_read = {path: bool(text_suffix(path)) and not path.is_dir() for path in files}
    return [path for path in files if is_read[path]], [path for path in files if not is_read[path]]


def _below(directory: Path) -> Iterator[Path]:
    """All files and directories below it. Raises UserError for a directory that cannot be read, which pathlib would
    skip, unless it is hidden or the lost+found of a disk that is mounted there."""

    def refuse(error: OSError) -> None:
        if not Path(error.filename).name.startswith(".") and Path(error.filename).name != "lost+found":
            raise UserError(f"{error.filename}: {error.strerror}; make it readable, or move it away") from None

    for parent, directories, files in os.walk(directory, onerror=refuse):
        yield from (Path(parent, name) for name in (*directories, *files))


def _is_file(path: Path) -> bool:
    """Also a link to nothing, for the error that names it: git-annex and DVC leave such where data was not fetched."""
    return path.is_file() or not path.exists()


def is_text(name: str) -> bool:
    """Whether a path holds text and no shards: a text file, a glob of them, or a directory with such files."""
    directory = Path(name)
    if not name or (directory / "manifest.json").exists() or any(directory.glob("*.bin")):
        return False
    below = {path.parent for path in directory.glob("*/*.bin")}
    return all((path / "manifest.json").exists() for path in below) and bool(text_files(name)[0])


def is_on_hub(name: str) -> bool:
    """Whether a data set, by its name, is read from the Hub: a known one, or ORG/NAME where that is nothing on this
    disk, nor the name of a file or of data/NAME."""
    path = Path(name)
    if name in DATASETS:
        return not path.exists()
    if not REPO_NAME.fullmatch(name) or path.suffix == ".bin" or text_suffix(path):
        return False
    return path.parts[0] != "data" and not Path(path.parts[0]).exists()


def unknown_data(name: str, field: str = "dataset_name") -> UserError:
    """The error for a name that is neither a path of text or shards nor a known name."""
    if Path(name).is_dir():
        others = text_files(name)[1]
        what = f"a directory without text or shards; it holds {plural(len(others), 'other file')} {endings(others)}"
        way_out = f"give {', '.join(TEXT_SUFFIXES)} (also {', '.join(PACKED)}) or .bin files; a quoted glob, as in "
        way_out += f"'{name.rstrip('/')}/*', reads files of any ending as text"
    else:
        what = "no such file, directory or data set"
        names = ", ".join(DATASETS)
        way_out = f"give text or .bin files, a directory or a quoted glob, ORG/NAME on the Hub, or one of {names}"
    return UserError(f"{field} {name}: {what}\n{way_out}")


def endings(files: list[Path]) -> str:
    """Of files and links to directories, in short: '.py .text LICENSE more/'."""
    return " ".join(sorted({f"{path.name}/" if path.is_dir() else path.suffix or path.name for path in files})[:8])
