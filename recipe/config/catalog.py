"""What a data set's name stands for: text or shards on this disk, or a data set on the Hub."""

import dataclasses
import glob
import hashlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from recipe.config.fields import DATASETS, DataConfig
from recipe.utils.errors import UserError
from recipe.utils.shards import SUFFIXES, shards_in
from recipe.utils.units import plural

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv")
_JSON_LINES = {".ndjson", ".jsonlines"}  # other suffixes of .jsonl files
PACKED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # {suffix of a compressed text file: pyarrow's name for it}
REPO_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)  # ORG/NAME on the Hub
MADE_HERE = ".preparing.lock"  # in a directory in which shards are made; their lock
# Splits by the names of files and directories, as in data/test-00000-of-00001.parquet and wiki.valid.txt.
_SPLIT = r"(?:^|[-._ /\d])(?:{})(?:$|[-._ /\d])"
_TRAIN = re.compile(_SPLIT.format("train|training"), re.IGNORECASE)
_HELD_OUT = re.compile(_SPLIT.format("val|valid|validation|dev|test|testing|eval|evaluation"), re.IGNORECASE)
# A data set's description, beside its README.md
_HUB_METADATA = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json"}
_LOCAL_NAMES = "text or .bin files, a directory or a quoted glob"
DATA_NAMES = f"{_LOCAL_NAMES}, ORG/NAME on the Hub, or one of {', '.join(DATASETS)}"
# The fields that decide the content of the shards of a text.
SHARD_FIELDS = (
    *("dataset_config", "dataset_split", "dataset_revision", "text_column", "tokenizer"),
    *("val_fraction", "val_documents", "shard_tokens"),
)


def resolve(data: DataConfig) -> DataConfig:
    """Resolves names: `dataset_name` becomes the directory, file or glob of the shards, and `train_text` the text they
    are made from, if any; likewise `val_data` and `val_text`. Shards of a text get a directory of their own under
    data/, so that they never mix with other files."""
    if is_text(data.val_data):
        shards = f"{_directory_of(data.val_data, data)}/train_*.bin"
        data = dataclasses.replace(data, val_text=data.val_data, val_data=shards)
    name = data.train_text or data.dataset_name
    on_hub = is_on_hub(name)
    if not (data.train_text or on_hub or is_text(name)):
        return data
    directory = data.dataset_name if data.train_text else ""
    text, subset = DATASETS.get(name, (name, "")) if on_hub else (name, "")
    data = dataclasses.replace(data, train_text=text, dataset_config=data.dataset_config or subset)
    return dataclasses.replace(data, dataset_name=directory or _directory_of(text, data))


def _directory_of(text: str, data: DataConfig) -> str:
    """The directory for the shards of a text; its name depends on the text and on SHARD_FIELDS."""
    path, settings = Path(text), {name: getattr(data, name) for name in SHARD_FIELDS}
    settings["tokenizer"] = _portable_path(data.tokenizer)
    if data.val_data:
        settings["val_fraction"] = 0.0  # all of the text is trained on
        if not is_on_hub(text):
            settings["val_documents"] = 0
    if is_on_hub(text):
        split = data.dataset_split if data.dataset_split != "train" else ""
        tokenizer = "" if data.tokenizer == "gpt2" else Path(data.tokenizer).name
        stem = "-".join(filter(None, (path.name, data.dataset_config, split, tokenizer)))
        del settings["val_fraction"]  # for local text only
    else:
        path = path.parent if glob.has_magic(path.name) and not path.exists() else path
        stem = re.sub(r"[^\w-]+", "-", path.name.split(".")[0]).strip("-") or "text"
        stem = stem.encode()[:200].decode(errors="ignore")  # a name has at most 255 bytes
        text = _portable_path(text)
    return f"data/{stem}-{hashlib.sha256(json.dumps([text, settings]).encode()).hexdigest()[:8]}"


def _portable_path(path: str) -> str:
    """A path inside the working directory, which holds data/, as a relative path: it names the same shards after both
    have moved, or been mounted in a container. Any other path as an absolute one. A name on the Hub stays as it is."""
    absolute = Path(os.path.abspath(path))
    for parent in (absolute, *absolute.parents):
        if os.path.isdir(parent) and parent.samefile("."):  # perhaps through a link, as /home often is
            return str(absolute.relative_to(parent))
    return str(absolute)


def short_name(shards: str) -> str:
    """A readable name of a data set: that of its shards' directory."""
    path = Path(os.path.abspath(shards))
    directory = path.parent if glob.has_magic(path.name) or path.suffix in SUFFIXES else path
    return re.sub(r"-[0-9a-f]{8}$", "", directory.name)  # without the hash of `_directory_of`


def text_suffix(path: Path) -> str:
    """.jsonl for both x.jsonl and X.JSONL.gz; empty if the suffix is not one of text."""
    suffix = (Path(path.stem).suffix if path.suffix.lower() in PACKED else path.suffix).lower()
    suffix = ".jsonl" if suffix in _JSON_LINES else suffix
    return suffix if suffix in TEXT_SUFFIXES else ""


class TextListing(NamedTuple):
    """The text files of a path, sorted, and the paths that are not read."""

    files: list[Path]
    links: dict[Path, Path]  # {path: the first path of the same file}
    splits: list[Path]  # held out, beside a training split
    others: list[Path]  # below a directory: files with other suffixes, links to directories, and runs


def text_files(name: str) -> TextListing:
    """The text files of a path. A file that is named, or matched by a glob, is text, unless it holds tokens. Hidden
    files, the data set's description, and directories of shards are not listed. Raises UserError for a directory that
    cannot be read."""
    directory = Path(name)
    if not directory.is_dir():  # tests for a file first: its name may contain a bracket
        if directory.parent.is_dir():  # whose name may contain a bracket, too
            name = os.path.join(glob.escape(str(directory.parent)), directory.name)
        paths = [directory] if directory.is_file() else [*map(Path, glob.glob(name, recursive=True))]
        by_place: dict[tuple[str, str], Path] = {}
        for path in sorted(paths, key=lambda path: len(path.parts)):  # ** follows links, also to a directory above
            by_place.setdefault((os.path.realpath(path.parent), path.name), path)
        files = sorted((path for path in by_place.values() if _is_file(path)), key=str)
        texts, links = _each_once([] if any(path.suffix in SUFFIXES for path in files) else files)
        return TextListing(texts, links, [], [])
    paths, runs = list[Path](), list[Path]()
    for parent, directories, names in os.walk(directory, onerror=_refuse):
        if MADE_HERE in names:  # shards made here, such as data/NAME in data/
            directories.clear()
            continue
        if "dataset_info.json" in names:  # of Datasets' save_to_disk or its cache; map() and others cache beside it
            names = [name for name in names if name != "state.json" and not name.startswith("cache-")]
        if "metrics.jsonl" in names:  # probably a run
            directories.clear()
            runs.append(Path(parent))
            continue
        directories[:] = [name for name in directories if not name.startswith(".")]
        describes = Path(parent) == directory or ".gitattributes" in names  # of the Hub's repositories
        metadata = _HUB_METADATA | ({"readme.md"} if describes else set())
        visible_names = [name for name in names if not name.startswith(".") and name.lower() not in metadata]
        paths += [Path(parent, name) for name in (*visible_names, *directories)]
    files = sorted((path for path in paths if _is_file(path) or path.is_symlink()), key=str)
    is_read = {path: bool(text_suffix(path)) and not path.is_dir() for path in files}
    texts, links = _each_once([path for path in files if is_read[path]])
    splits = _held_out(texts, directory)
    others = [path for path in files if not is_read[path]]
    return TextListing([path for path in texts if path not in splits], links, [*splits], [*others, *runs])


def _each_once(files: list[Path]) -> tuple[list[Path], dict[Path, Path]]:
    """The first path of each file, and {other path, which is a link or leads through one: the first}."""
    by_file: dict[str, Path] = {}
    firsts = {path: by_file.setdefault(os.path.realpath(path), path) for path in files}
    return [*by_file.values()], {path: first for path, first in firsts.items() if path is not first}


def _held_out(files: list[Path], directory: Path) -> dict[Path, str]:
    """{path: name below the directory} of the files that by this name belong to a held-out split, where others belong
    to a training split. Markdown belongs to none: training.md and testing.md are pages."""
    names = {path: os.path.relpath(path, directory) for path in files if text_suffix(path) != ".md"}
    if not any(map(_TRAIN.search, names.values())):
        return {}
    return {path: name for path, name in names.items() if _HELD_OUT.search(name) and not _TRAIN.search(name)}


def _refuse(error: OSError) -> None:
    """Raises UserError for a directory that cannot be read, which os.walk would skip."""
    if Path(error.filename).name != "lost+found":  # of a disk
        raise UserError(f"{error.filename}: {error.strerror}; make it readable, or move it away") from None


def _is_file(path: Path) -> bool:
    """Whether a path is a file or a broken link: git-annex and DVC leave those for data that was not fetched, and
    reading one raises the error that names it."""
    return path.is_file() or not path.exists()


def is_text(name: str) -> bool:
    """Whether a path holds text and not shards: a text file, a glob of text files, or a directory with some."""
    directory = Path(name)
    if not name or (directory / "manifest.json").exists() or shards_in(directory):
        return False
    shard_dirs = {path.parent for path in shards_in(directory, "*/*")}
    return all((path / "manifest.json").exists() for path in shard_dirs) and bool(text_files(name).files)


def is_on_hub(name: str) -> bool:
    """Whether a name stands for a data set on the Hub: a known one, unless it is a path here, or ORG/NAME, unless there
    is a directory ORG here or the name looks like that of a file or data/NAME."""
    path = Path(name)
    if name in DATASETS:
        return not path.exists()
    if not REPO_NAME.fullmatch(name) or path.suffix in SUFFIXES or text_suffix(path):
        return False
    return path.parts[0] != "data" and not Path(path.parts[0]).exists()


def unknown_data(name: str, field: str = "dataset_name") -> UserError:
    """The error for a name that is neither a path of text or shards nor a known data set."""
    if Path(name).is_dir():
        texts, *_, others = text_files(name)
        if texts:
            problem = "holds text, but also .bin files without a manifest.json in a subdirectory"
            way_out = f"to read text alone, give a quoted glob, as '{name.rstrip('/')}/**/*{texts[0].suffix}'"
            return UserError(f"{field} {name}: {problem}; {way_out}")
        note = f"; it holds {plural(len(others), 'other file')} {endings(others)}" if others else ""
        problem = f"a directory without text or shards{note}"
        way_out = f"give {', '.join(TEXT_SUFFIXES)} (also {', '.join(PACKED)}) or .bin files; a quoted glob, as in "
        way_out += f"'{name.rstrip('/')}/*', reads files of any suffix as text"
    else:
        problem, way_out = "no such file, directory or data set", f"give {DATA_NAMES}"
        if field == "val_data":  # which is read from this disk
            problem, way_out = "no such file or directory", f"give {_LOCAL_NAMES}"
    return UserError(f"{field} {name}: {problem}\n{way_out}")


def endings(files: list[Path]) -> str:
    """A summary of files and links to directories: '.py .text LICENSE more/'."""
    return " ".join(sorted({f"{path.name}/" if path.is_dir() else path.suffix or path.name for path in files})[:8])
