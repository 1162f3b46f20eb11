"""Text on this machine as documents: one for each .txt file, line of JSON lines or row of parquet."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.config.catalog import kinds_of_text, text_files, text_suffix, unknown_data
from recipe.data.shards import Manifest
from recipe.data.tokenizer import without_surrogates
from recipe.utils.errors import UserError
from recipe.utils.files import sha256_of

PIECE = 1 << 18  # characters; a document's pieces are cut at the first safe place after this many
LONGEST_PIECE = 1 << 20
# No GPT-2 token continues from a visible character to a blank, so pieces cut there give the tokens of the whole.
_SAFE_CUT = re.compile(r"\S(?=[ \n])")


@dataclass(frozen=True)
class Document:
    """`index` counts the documents of a text. `chunks()` gives its characters, in parts of any size. `stream` is
    {"document", "state"}: a document at or before this one, and the state from which the text can be read there."""

    index: int
    chunks: Callable[[], Iterable[str]]
    stream: dict | None

    def digest(self) -> bytes:
        """A hash of the text, by which a document that is held out for validation is known when it comes again."""
        digest = hashlib.blake2b(digest_size=8)
        for chunk in self.chunks():
            digest.update(without_surrogates(chunk).encode())
        return digest.digest()


def in_pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Cuts a text into pieces of 256 Ki to 1 Mi characters that together give the tokens of the whole.

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


def open_files(name: str, text_column: str) -> TextFiles | None:
    """The documents of a file, a glob or a directory; None where nothing matches. Raises UserError for other files."""
    paths, others = text_files(name)
    if paths:
        return TextFiles(paths, text_column, others)
    if scripts := [path for path in others if path.suffix == ".py"]:
        raise UserError(
            f"train_text {name}: {scripts[0].name} is a program that would make the text, and is not run: run it "
            f"yourself if you trust it, and give the files that it writes ({kinds_of_text()})"
        )
    if Path(name).exists():
        raise unknown_data(name, "train_text")
    return None


class TextFiles:
    """Local files in order, which are never held in memory as a whole."""

    def __init__(self, paths: list[Path], text_column: str, skipped: list[Path]):
        """`skipped` are the files beside them that are not read."""
        self.paths, self.text_column, self.skipped = paths, text_column, skipped

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files from {self.paths[0]}"

    def identity(self) -> dict:
        """What the manifest records of the text, by which a change of it is noticed."""
        return {"files": [_file_identity(path) for path in self.paths], "text_column": self.text_column}

    def newest(self) -> dict:
        """As HubText's: files on this disk have one version."""
        return {}

    def pin(self, manifest: Manifest) -> None:
        """As HubText's."""

    def documents(self, stream: dict | None = None) -> Iterator[Document]:
        """All documents in order, or those from an earlier document's `stream` on, whose state is a file's number."""
        index, first = (stream["document"], stream["state"]) if stream else (0, 0)
        for number, path in enumerate(self.paths[first:], first):
            here = {"document": index, "state": number} if number else None
            with _readable(path):
                for chunks in self._texts(path):
                    yield Document(index, chunks, here)
                    index += 1

    def _texts(self, path: Path) -> Iterator[Callable[[], Iterable[str]]]:
        if text_suffix(path) == ".parquet":
            rows = _parquet_rows(path, self.text_column)
        elif text_suffix(path) in (".txt", ".md"):
            yield partial(_file_chunks, path)
            return
        else:
            rows = _json_rows(path)
        for where, row in rows:
            yield partial(text_chunks, text_of(row, self.text_column, where))


def _open(path: Path) -> io.BufferedReader | lzma.LZMAFile:
    """The bytes of a file, decompressed as its name says."""
    if path.suffix == ".xz":  # which pyarrow cannot read
        return lzma.open(path)
    return io.BufferedReader(pa.input_stream(str(path)), 1 << 20)


def _json_rows(path: Path) -> Iterator[tuple[str, dict]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{where}: not JSON ({error}); expected one object per line") from None
                if not isinstance(row, dict):
                    raise UserError(f"{where}: a JSON {type(row).__name__}; expected one object per line")
                yield where, row


def _parquet_rows(path: Path, column: str) -> Iterator[tuple[str, dict]]:
    try:
        file = pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False)  # or whole row groups come into memory
    except pa.ArrowInvalid as error:
        raise UserError(f"{path}: not a parquet file ({error})") from None
    with file:
        if column not in file.schema_arrow.names:
            raise UserError(_no_column(str(path), column, file.schema_arrow.names))
        for batch in file.iter_batches(batch_size=64, columns=[column], use_threads=False):
            for row in batch.to_pylist():
                yield str(path), row


def text_of(row: dict, column: str, where: str) -> str:
    """The text of a row; a null is an empty document. Raises UserError without such a column, or if it is not text."""
    if column not in row:
        raise UserError(_no_column(where, column, row))
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise UserError(f"{where}: column {column!r} holds {type(text).__name__}, not text; choose another text_column")
    return text


def _no_column(where: str, column: str, names: Iterable[str]) -> str:
    return f"{where}: no column {column!r}; there are: {', '.join(names)}. Choose with --text_column"


def text_chunks(text: str) -> Iterator[str]:
    """The parts of a document's text, of LONGEST_PIECE characters at most."""
    return (text[lo : lo + LONGEST_PIECE] for lo in range(0, len(text), LONGEST_PIECE))


def _file_chunks(path: Path) -> Iterator[str]:
    # utf-8-sig: a byte-order mark is not of the text. newline="": the model should see the line ends that it has.
    with _readable(path), _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
        while chunk := file.read(LONGEST_PIECE):
            yield chunk


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); is it whole, and UTF-8?") from None


def _file_identity(path: Path) -> dict:
    status = path.stat()
    identity = {"name": path.name, "size": status.st_size}
    if status.st_size <= 1 << 22:  # bytes; small files are often copied, which changes their times
        return identity | {"sha256": sha256_of(path)}
    return identity | {"mtime_ns": status.st_mtime_ns}
