"""Where text comes from: files on this machine or a data set on the Hub, as a stream of documents in pieces."""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from recipe.config import UserError

PIECE = 1 << 18  # characters; a document's pieces are cut at the first safe place after this many
LONGEST_PIECE = 1 << 20

_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")
_OPENERS = {".gz": gzip.open, ".bz2": bz2.open}
# No GPT-2 token goes on from a visible character to a blank, so pieces cut there give the tokens of the whole.
_SAFE_CUT = re.compile(r"\S(?=[ \n])")


@dataclass(frozen=True)
class Document:
    index: int
    pieces: Iterator[str]
    stream: dict | None  # {"document", "state"}: an earlier document, and how a Hub stream starts again there


def in_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Cut a text into pieces of 256 Ki to 1 Mi characters which together give the tokens of the whole.

    Where 768 Ki characters hold no blank, the cut falls between any two, which may cost a token there.
    """
    text = ""
    for chunk in chunks:
        text += chunk
        while len(text) > LONGEST_PIECE:
            cut = _cut(text)
            yield text[:cut]
            text = text[cut:]
    while text:
        cut = _cut(text)
        yield text[:cut]
        text = text[cut:]


def _cut(text: str) -> int:
    safe = _SAFE_CUT.search(text, PIECE, LONGEST_PIECE)
    return safe.end() if safe else min(len(text), LONGEST_PIECE)


def open_text(source: str, name: str | None, split: str, revision: str | None, text_column: str) -> TextFiles | HubText:
    """The documents of a file, a glob, a directory or a Hub data set id. Raises UserError if there is no such file."""
    path = Path(source)
    if path.is_dir():
        paths = [Path(p) for p in sorted(glob.glob(f"{glob.escape(source)}/**", recursive=True))]
        paths = [p for p in paths if p.is_file() and _suffix(p) in _SUFFIXES]
        if not paths:
            raise UserError(
                f"--source {source}: no {', '.join(_SUFFIXES)} file (or .gz, .bz2 of them) in this directory"
            )
        return TextFiles(paths, text_column)
    paths = [path] if path.is_file() else [Path(p) for p in sorted(glob.glob(source)) if Path(p).is_file()]
    for p in paths:
        if _suffix(p) not in _SUFFIXES:
            raise UserError(
                f"--source: {p} is not {', '.join(_SUFFIXES)}, nor .gz or .bz2 of them; convert it or leave it out"
            )
    if paths:
        return TextFiles(paths, text_column)
    if _suffix(path) not in _SUFFIXES and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source):
        return HubText(source, name, split, revision, text_column)
    raise UserError(f"--source {source}: no file matches; give a file, a quoted glob, a directory or a Hub data set id")


def _suffix(path: Path) -> str:
    """.jsonl for both x.jsonl and x.jsonl.gz"""
    return Path(path.stem).suffix if path.suffix in _OPENERS else path.suffix


class TextFiles:
    """Local files in order: one document a .txt file, one a line of JSON lines, one a row of parquet."""

    def __init__(self, paths: list[Path], text_column: str):
        self.paths, self.text_column = paths, text_column

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files from {self.paths[0]}"

    def identity(self) -> dict:
        """What must not change between an interrupted preparation and its continuation."""
        return {"files": [_file_identity(path) for path in self.paths], "text_column": self.text_column}

    def pin(self, earlier: dict | None) -> dict:
        return {}

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        """Documents from number `first` on; read in order and never held together."""
        index = 0
        for path in self.paths:
            with _readable(path):
                for chunks in self._texts(path):
                    if index >= first:
                        yield Document(index, in_pieces(chunks), None)
                    index += 1

    def _texts(self, path: Path) -> Iterator[Iterable[str]]:
        if _suffix(path) == ".parquet":
            yield from self._parquet(path)
            return
        opener = _OPENERS.get(path.suffix, open)
        if _suffix(path) == ".txt":
            yield _text_chunks(path, opener)
            return
        with opener(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _chunks(self._json_text(line, f"{path}, line {number}"))

    def _json_text(self, line: bytes, where: str) -> str:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({error}); expected one object a line") from None
        if not isinstance(row, dict):
            raise UserError(f"{where}: a JSON {type(row).__name__}; expected one object a line")
        return text_of(row, self.text_column, where)

    def _parquet(self, path: Path) -> Iterator[Iterable[str]]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)  # or whole row groups come into memory
        except pa.ArrowInvalid as error:
            raise UserError(f"{path}: not a parquet file ({error})") from None
        with file:
            names = file.schema_arrow.names
            if self.text_column not in names:
                raise UserError(_no_column(str(path), self.text_column, names))
            for batch in file.iter_batches(batch_size=64, columns=[self.text_column], use_threads=False):
                for row in batch.to_pylist():
                    yield _chunks(text_of(row, self.text_column, str(path)))


def text_of(row: dict, column: str, where: str) -> str:
    """The text of a row; a null is an empty document. Raises UserError without such a column, or if it is not text."""
    if column not in row:
        raise UserError(_no_column(where, column, row))
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(
            f"{where}: column {column!r} holds {type(text).__name__}, not text; choose another --text_column"
        )
    return text


def _no_column(where: str, column: str, names: Iterable[str]) -> str:
    return f"{where}: no column {column!r}; there are: {', '.join(names)}. Choose with --text_column"


def _chunks(text: str) -> Iterator[str]:
    return (text[lo : lo + LONGEST_PIECE] for lo in range(0, len(text), LONGEST_PIECE))


def _text_chunks(path: Path, opener) -> Iterator[str]:
    # newline="": a model of text should see the line ends that the text has
    with _readable(path), opener(path, "rb") as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        while chunk := file.read(LONGEST_PIECE):
            yield chunk


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it whole, and UTF-8?") from None


def _file_identity(path: Path) -> dict:
    status = path.stat()
    identity = {"name": path.name, "size": status.st_size}
    if status.st_size <= 1 << 22:  # bytes; small files are often copied about, which changes their times
        return identity | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return identity | {"mtime_ns": status.st_mtime_ns}


class HubText:
    """A data set on the Hub, streamed; pinned to the commit that its preparation began with."""

    def __init__(self, source: str, name: str | None, split: str, revision: str | None, text_column: str):
        self.source, self.name, self.split, self.revision, self.text_column = source, name, split, revision, text_column
        self.commit: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.source, self.name, self.split))) + " on the Hub"

    def identity(self) -> dict:
        fields = ("source", "name", "split", "revision", "text_column")
        return {field: getattr(self, field) for field in fields}

    def pin(self, earlier: dict | None) -> dict:
        """The commit to read, of the `earlier` manifest's source or else the newest of `revision`."""
        from huggingface_hub import HfApi

        if earlier:
            self.commit = earlier["commit"]
        else:
            with _hub_errors(self.source):
                self.commit = HfApi().dataset_info(self.source, revision=self.revision).sha
        return {"commit": self.commit}

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        """Documents from number `first` on; `stream` is the one of an earlier document and saves reading up to it."""
        from datasets import load_dataset

        with _hub_errors(self.source):
            rows = load_dataset(self.source, self.name, split=self.split, revision=self.commit, streaming=True)
            if stream:
                rows.load_state_dict(stream["state"])
            for index, row in enumerate(rows, stream["document"] if stream else 0):
                if index >= first:
                    text = text_of(row, self.text_column, self.source)
                    yield Document(index, in_pieces(_chunks(text)), stream)
                if (index + 1) % 256 == 0:
                    stream = {"document": index + 1, "state": rows.state_dict()}


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    """Turns whatever comes out of the Hub's libraries (they raise some dozens of types) into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if "scripts are no longer supported" in str(error):
            raise UserError(
                f"--source {source}: this data set is a script that wants to run on your machine, which is refused; "
                "look for its parquet version (often --revision refs/convert/parquet), or give local files"
            ) from None
        reason = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"--source {source}: no such local file, and the Hub says {type(error).__name__}: {reason}; check the name "
            "and the network, or give local .txt, .jsonl or .parquet files. The same command goes on where it stopped"
        ) from None
