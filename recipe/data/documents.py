"""Reads documents from local text files, and tokenizes documents. A document is a .txt file, a JSON object or a row of
a table; a literal end-of-text splits any of these into several documents."""

import csv
import hashlib
import io
import json
import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, takewhile
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from huggingface_hub import DatasetCard

from recipe.config.catalog import MADE_HERE, PACKED, TEXT_SUFFIXES, TextListing, endings, text_files, text_suffix
from recipe.data.shards import Manifest
from recipe.data.tokenizer import GPT2Tokenizer
from recipe.utils.errors import UserError, reading
from recipe.utils.files import sha256_of
from recipe.utils.machine import usable_cores
from recipe.utils.units import plural, some

logger = logging.getLogger(__name__)

PIECE = 1 << 18  # characters; a piece ends at the first safe cut after this many
MAX_PIECE = 1 << 20
# No token of GPT-2 spans a visible character and a blank after it, so cutting between them does not change the tokens.
# After a letter or a digit it does not change those of Llama 3 either, whose punctuation takes line breaks along.
_SAFE_CUTS = re.compile(r"[^\W_](?=[ \n])"), re.compile(r"\S(?=[ \n])")
_LISTED_FILES = 10  # of a text, in the manifest
_BATCH_CHARS = 1 << 17  # characters that a thread tokenizes at once; more if one piece is longer
_WAY_OUT = (
    "is it complete, and UTF-8? Unpack it, or convert it: iconv -f ENCODING -t UTF-8 FILE > NEW, where ENCODING is "
    "often CP1252 (Western), CP1251 (Cyrillic), GB18030, BIG5, SHIFT_JIS or EUC-KR, and look at NEW; iconv -c -f UTF-8 "
    "-t UTF-8 drops invalid bytes"
)
# Of files that are not text: how they begin, and what to do.
_NOT_TEXT = {
    b"PK\x03\x04": "a ZIP archive, as .docx, .odt and .epub are: unpack it, or save its text as .txt",
    b"%PDF-": "a PDF: convert it by pdftotext",
    b"\xfd7zXZ": "compressed by xz: unpack it by xz -dk",
    b"\xff\xfe": "text in UTF-16: convert it by iconv -f UTF-16 -t UTF-8 FILE > NEW",
}
_LFS_POINTER = b"version https://git-lfs"  # as git clone leaves where Git LFS is not installed
_BINARY = (".parquet", ".arrow")
_ROWS = 16  # of a parquet file to read at once: one may have some MB
_ROWS_TO_FIND_COLUMN = 100  # at the start of a JSON file
_LISTS_SUBSETS = re.compile(r"---\n(?:(?!---).*\n)*configs:")  # in the header of a data set's README.md on the Hub
_JSON_FORMAT = "expected one object per line, or in .json an array of objects"

Content = str | np.ndarray  # of a piece, never empty: text, or token ids, (tokens,), of the tokenizer's type


@dataclass(frozen=True)
class Piece:
    """A part of a document. `document` is the document's number in the data set, and `is_continuing` says that another
    part precedes this one. `stream` is {"document", "state"}: the number of a document at or before this one, and the
    reader's state at that document; None at the start."""

    document: int
    content: Content
    stream: dict | None
    is_continuing: bool = False


class Column:
    """The table column, or key of JSON objects, that holds documents as text or as ids of the run's tokenizer."""

    def __init__(self, name: str, tokenizer: GPT2Tokenizer):
        self.name, self._tokenizer = name, tokenizer
        separators = {GPT2Tokenizer.end_of_text_token, tokenizer.end_of_text_token}
        self._separator, self._longest = re.compile("|".join(map(re.escape, separators))), max(map(len, separators))

    def pieces(self, row: dict, location: str, *, separated: bool) -> Iterator[tuple[int, Content]]:
        """Yields (index in its document, piece) for a row. A row is one document, null an empty one; if `separated`,
        end-of-texts split it into several. `location` says where the row is, for errors. Raises UserError if the column
        is missing, or holds neither text nor ids of the tokenizer."""
        value = self._value(row, location)
        if isinstance(value, str):
            for document in self._separator.split(value) if separated else [value]:
                yield from enumerate(in_pieces(document))
        elif len(value):
            yield 0, value

    def separated_text(self, chunks: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Like `pieces`, for a text that comes in chunks, and whose end-of-texts separate documents."""
        index, text = 0, ""
        for chunk in chunks:
            *documents, text = self._separator.split(text + chunk)
            for document in documents:
                yield from enumerate(in_pieces(document), index)
                index = 0
            while len(text) > MAX_PIECE + self._longest:  # its end may begin a separator
                piece = next(in_pieces(text))
                yield index, piece
                index, text = index + 1, text[len(piece) :]
        yield from enumerate(in_pieces(text), index)

    def _value(self, row: dict, location: str) -> str | np.ndarray:
        self.check_is_in(row, location)
        value = row[self.name]
        if value is None:
            return ""
        if isinstance(value, str):
            # JSON allows lone surrogates, which UTF-8 does not: replace them by U+FFFD.
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if isinstance(value, list) and all(type(number) is int for number in value):
            return self._tokens(np.array(value, np.int64), location)
        raise UserError(
            f"{location}: column {self.name!r} holds {type(value).__name__}, neither text nor a list of token ids; "
            "choose another text_column (docs/data.md converts chats)"
        )

    def check_is_in(self, names: Iterable[str], location: str, hint: str = "") -> None:
        """Raises UserError, which ends with `hint`, if the column is not among `names`."""
        if self.name not in names:
            listed = ", ".join(name[:40] for name in names)[:1000]  # a CSV without a header has texts for names
            raise UserError(
                f"{location}: no column {self.name!r}; there are: {listed}. Choose with --text_column{hint}"
            )

    def _tokens(self, ids: np.ndarray, location: str) -> np.ndarray:
        invalid = ids[(ids < 0) | (ids >= self._tokenizer.vocab_size)]
        if len(invalid):
            raise UserError(
                f"{location}: column {self.name!r} holds token {invalid[0]}, but the vocabulary of tokenizer "
                f"{self._tokenizer.name} ends at {self._tokenizer.vocab_size - 1}; set tokenizer to the one that made "
                "these ids, or choose a text_column of text"
            )
        # Strip end-of-texts from both ends: a producer adds one to every document.
        text_indices = np.flatnonzero(ids != self._tokenizer.end_of_text)
        document = ids[text_indices[0] : text_indices[-1] + 1] if len(text_indices) else text_indices
        return document.astype(self._tokenizer.dtype)


def tokenized(pieces: Iterable[Piece], tokenizer: GPT2Tokenizer) -> Iterator[tuple[Piece, np.ndarray]]:
    """Yields each piece with its tokens, (tokens,), in order. Tokenizes a few batches ahead on one thread per core that
    it may use, since tokenizers release the GIL."""
    threads = usable_cores()

    def encode(batch: list[Piece]) -> list[tuple[Piece, np.ndarray]]:
        texts = [piece.content for piece in batch if isinstance(piece.content, str)]
        tokens = iter(tokenizer.encode(texts, continuing=batch[0].is_continuing))
        return [(piece, next(tokens) if isinstance(piece.content, str) else piece.content) for piece in batch]

    # Without `with`, which would wait for the threads when an abandoned generator is collected: perhaps while another
    # thread starts, with the lock that their end needs. A pool that is collected ends its threads by itself.
    pool, futures = ThreadPoolExecutor(threads), deque()
    for batch in _batches(pieces):
        futures.append(pool.submit(encode, batch))
        if len(futures) > 2 * threads:
            yield from futures.popleft().result()
    for future in futures:
        yield from future.result()


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The pieces in batches, none of them empty, and none with both first and continuing pieces."""
    batch, size = [], 0
    for piece in pieces:
        if batch and (size >= _BATCH_CHARS or piece.is_continuing != batch[0].is_continuing):
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += len(piece.content)
    if batch:
        yield batch


def in_pieces(text: str) -> Iterator[str]:
    """Cuts a text into pieces of 256 Ki to 1 Mi characters whose tokens together are those of the text. If 768 Ki
    characters contain no blank, the cut falls between any two characters, which may add a token; with a custom
    tokenizer, so may a cut after punctuation, where no letter or digit stands before a blank."""
    start = 0
    while start < len(text):
        matches = (cut.search(text, start + PIECE, start + MAX_PIECE) for cut in _SAFE_CUTS)
        end = next((match.end() for match in matches if match), start + MAX_PIECE)
        yield text[start:end]
        start = end


class TextFiles:
    """Local text files, read in order and never all loaded at once."""

    def __init__(self, name: str, column: Column, subset: str = "", split: str = "train"):
        """`name` is a file, a glob or a directory; `subset` and `split` are for a copy of a Hub data set. `paths` is
        empty if no text file matches. `size` is the number of bytes, and `position` that of the bytes read. Raises
        UserError for a broken link, and for a subset or split that the text does not have."""
        self._listing, self.column, self._name, self._subset = text_files(name), column, name, ""
        if self._listing.files:
            self._listing, self._subset = _of_subset(self._listing, Path(name), subset, split)
        self.paths = self._listing.files
        self._starts = [0, *accumulate(map(_size_of, self.paths))]
        self.size, self.position = self._starts[-1], 0

    def __str__(self) -> str:
        return str(self.paths[0]) if len(self.paths) == 1 else f"{len(self.paths)} files of {self._name}"

    def identity(self) -> dict:
        """What the manifest records of the text, to detect changes: its files or, of many, the first ones, their number
        and a checksum. Each shard writes the manifest and each checkpoint of a stream holds it, so it must be short."""
        files = [_file_identity(path) for path in self.paths]
        identity = {"files": files[:_LISTED_FILES], "text_column": self.column.name}
        if len(files) > _LISTED_FILES:
            identity |= {"of": len(files), "files_sha256": hashlib.sha256(json.dumps(files).encode()).hexdigest()}
        return identity

    def newest(self) -> dict:
        """Empty: unlike HubText's, local files have no commit."""
        return {}

    def pin(self, manifest: Manifest) -> None:
        """Logs which files are skipped; there is no commit to pin."""
        _, links, splits, others = self._listing
        if self._subset:
            message = "data       %s of %s that its README.md gives for %s; other files are skipped"
            logger.info(message, plural(len(self.paths), "file"), self._name, self._subset)
        if links:
            names = [f"{path} is {file}" for path, file in links.items()]
            message = "data       %s skipped, since each file is read only once: %s"
            logger.warning(message, plural(len(links), "link"), some(names, 3))
        if splits:
            message = "data       not trained on, as it is beside a training split: %s; val_data or a glob can name it"
            logger.warning(message, some(map(str, splits), 1))
        if others:
            kinds = f"{endings(others)} ({', '.join(TEXT_SUFFIXES)} are read)"
            logger.info("data       %s skipped: %s", plural(len(others), "file"), kinds)

    def has_documents(self, count: int) -> bool:
        """Whether `count` files are not empty, or else there are `count` documents in about the first 2^30 bytes."""
        first_pieces = takewhile(lambda _: self.position <= 1 << 30, self.pieces())
        n_files = sum(end > start for start, end in pairwise(self._starts))
        return n_files >= count or any(piece.document + 1 == count for piece in first_pieces)

    def pieces(self, stream: dict | None = None) -> Iterator[Piece]:
        """Yields all documents in order, or those from an earlier piece's `stream` on; its state is a file number."""
        document_count, first_file = (stream["document"], stream["state"]) if stream else (0, 0)
        for number, path in enumerate(self.paths[first_file:], first_file):
            file_start = {"document": document_count, "state": number} if number else None
            try:
                with reading(path, "copy or download it again" if text_suffix(path) in _BINARY else _WAY_OUT):
                    for piece_number, content in self._pieces_in(path, self._starts[number]):
                        document_count += piece_number == 0
                        yield Piece(document_count - 1, content, file_start, piece_number > 0)
            except UserError as error:
                if len(self.paths) > 1:
                    raise UserError(f"{error} (a quoted glob can name the files without this one)") from error.__cause__
                raise

    def _pieces_in(self, path: Path, start: int) -> Iterator[tuple[int, Content]]:
        """Yields (index of the piece in its document, piece) for a file."""
        suffix, self.position = text_suffix(path), start
        with path.open("rb") as file:
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise UserError(f"{path} is a pointer of Git LFS: fetch the file by git lfs pull or hf download")
        if suffix == ".parquet":
            with pq.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:  # else it loads a row group
                self.column.check_is_in(file.schema_arrow.names, str(path))
                rows = 0
                for batch in file.iter_batches(_ROWS, columns=[self.column.name], use_threads=False):
                    rows += len(batch)
                    end = start + path.stat().st_size * rows // file.metadata.num_rows
                    yield from self._rows_in(batch, path, end)
            return
        if suffix == ".arrow":
            with pa.OSFile(str(path)) as file:
                if file.read(6) == b"ARROW1":  # polars' write_ipc
                    reader = pa.ipc.open_file(file)
                    count = reader.num_record_batches
                    batches = ((reader.get_batch(i), file.size() * (i + 1) // count) for i in range(count))
                else:  # Datasets' save_to_disk
                    file.seek(0)
                    reader = pa.ipc.open_stream(file)
                    batches = ((batch, file.tell()) for batch in reader)
                self.column.check_is_in(reader.schema.names, str(path))
                for batch, end in batches:
                    yield from self._rows_in(batch.select([self.column.name]), path, start + end)
            return
        with path.open("rb") as packed_file:
            raw = io.BufferedReader(pa.input_stream(packed_file, PACKED.get(path.suffix.lower())), 1 << 20)
            if kind := next((kind for start, kind in _NOT_TEXT.items() if raw.peek().startswith(start)), ""):
                raise UserError(f"{path} is {kind}")
            file = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="\n")
            if suffix in (".csv", ".tsv"):
                rows = _rows_of(file, self.column, path)
            elif suffix == ".json" and raw.peek().lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                rows = ((f"item {number}", row) for number, row in enumerate(json.load(file), 1))
            elif suffix in (".json", ".jsonl"):
                lines = ((f"line {number}", line) for number, line in enumerate(file, 1) if line.strip())
                rows = ((location, _parse_json(line, f"{path}, {location}")) for location, line in lines)
            else:
                yield from self.column.separated_text(self._chunks(file, packed_file, start))
                return
            number, n_without = 0, 0
            for number, (location, row) in enumerate(rows, 1):
                self.position = start + packed_file.tell()
                if not isinstance(row, dict):
                    raise UserError(f"{path}, {location}: a JSON {type(row).__name__}; {_JSON_FORMAT}")
                if self.column.name in row:
                    yield from self.column.pieces(row, f"{path}, {location}", separated=True)
                    continue
                n_without += 1  # as in logs, and in the exports of Spark and BigQuery, which omit what is empty
                if n_without == number == _ROWS_TO_FIND_COLUMN:
                    break
            if n_without and n_without == number:
                self.column.check_is_in(row, f"{path}, {location}")
            if n_without:
                logger.warning("data       %s: %s of %s rows have no %r", path, n_without, number, self.column.name)

    def _rows_in(self, batch: pa.RecordBatch, path: Path, end: int) -> Iterator[tuple[int, Content]]:
        """Like `_pieces_in`, for a batch that ends at position `end`: polars' batches have 100,000 rows."""
        begin = self.position
        for i in range(len(batch)):  # one by one: a document may have 100 MB
            self.position = begin + (end - begin) * (i + 1) // len(batch)
            yield from self.column.pieces(*batch.slice(i, 1).to_pylist(), str(path), separated=True)

    def _chunks(self, file: io.TextIOWrapper, packed_file: BinaryIO, start: int) -> Iterator[str]:
        chunk = file.read(MAX_PIECE)
        is_binary = "\0" in chunk[:1000]  # as are archives, and English in UTF-16
        while chunk:
            if is_binary or chunk.count("\0") > len(chunk) / 4:  # as at the end of an interrupted copy
                raise UserError(
                    f"{packed_file.name} cannot be read (it holds NUL characters); unpack it if it is an archive, copy "
                    "it again if it is incomplete; iconv -f UTF-16LE -t UTF-8 FILE > NEW converts text in UTF-16, tr "
                    "-d '\\0' < FILE > NEW drops the characters"
                )
            self.position = start + packed_file.tell()
            yield chunk
            chunk = file.read(MAX_PIECE)


def _of_subset(listing: TextListing, directory: Path, subset: str, split: str) -> tuple[TextListing, str]:
    """In a copy of a Hub data set whose README.md lists subsets: the files that load_dataset reads, and the names of
    their subset and split. Of any other text, all files and an empty name."""
    card, way_out = directory / "README.md", "or name files by a quoted glob, without dataset_config and dataset_split"
    if not (card.is_file() and _LISTS_SUBSETS.match(card.read_text("utf-8", "replace"))):
        is_made_here = (directory.parent / MADE_HERE).exists()  # by best.py, from the files of the subset
        if (subset or split != "train") and not is_made_here:
            asked = " ".join(filter(None, (subset, split)))
            raise UserError(f"{directory}: no README.md there says which files are {asked!r}; download it, {way_out}")
        return listing, ""
    from datasets.data_files import DataFilesList, get_data_patterns, sanitize_patterns
    from datasets.utils.metadata import MetadataConfigs

    try:
        subsets = MetadataConfigs.from_dataset_card_data(DatasetCard.load(card).data)
        subset = subset or subsets.get_default_config_name() or ""
        if subset not in subsets:
            raise ValueError(f"choose one of its subsets with --dataset_config: {', '.join(subsets)}")
        base, patterns = str(directory / subsets[subset].get("data_dir", "")), subsets[subset].get("data_files")
        splits = sanitize_patterns(patterns) if patterns else get_data_patterns(base)
        if split not in splits:
            raise ValueError(f"choose a split of {subset} with --dataset_split: {', '.join(map(str, splits))}")
        local = [pattern for pattern in splits[split] if "://" not in pattern]  # others would be fetched
        names = map(os.path.abspath, DataFilesList.from_patterns(local, base))
        paths = (*listing.files, *listing.links, *listing.splits)  # none outside the directory
        texts = {os.path.abspath(path): path for path in paths}
        if not (files := [texts[name] for name in names if name in texts]):
            raise ValueError(f"no text of {subset} {split} is there ({', '.join(splits[split])})")
    except (ValueError, FileNotFoundError, yaml.YAMLError) as error:
        raise UserError(f"{card}: {' '.join(str(error).split())[:1000]}; {way_out}") from None
    return TextListing(files, {}, [], []), f"{subset} {split}"


def _size_of(path: Path) -> int:
    with reading(path, "fetch what it links to, or remove it" if path.is_symlink() else "is it still there?"):
        return path.stat().st_size


def _rows_of(file: io.TextIOWrapper, column: Column, path: Path) -> Iterator[tuple[str, dict]]:
    """Yields (location, row) of a table. Raises UserError for a row that has more fields than the header or ends before
    the column: text would be lost."""
    csv.field_size_limit(2**31 - 1)
    first_line = next((line for line in file if line.strip()), "")  # that of an empty table is an empty text
    if "\r" in first_line.strip():
        raise UserError(f"{path}: its lines end in CR; convert it: tr '\\r' '\\n' < FILE > NEW")
    # Excel writes ; where people write decimals with a comma.
    separators = [",", ";", "\t"] if text_suffix(path) == ".csv" else ["\t"]
    names_by = {s: next(csv.reader([first_line], delimiter=s), []) for s in separators}
    separator = next((s for s in separators if column.name in names_by[s]), separators[0])
    table = csv.DictReader(chain([first_line], file), delimiter=separator, strict=True)
    try:
        if header := table.fieldnames:
            names = " or ".join(map(repr, separators))
            column.check_is_in(header, str(path), f"; the first line must name the columns, separated by {names}")
            if header.count(column.name) > 1:
                raise UserError(f"{path}: {header.count(column.name)} columns are called {column.name!r}; rename one")
        for row in table:
            location = f"line {table.line_num}"
            if any(row.pop(None, [])) or row[column.name] is None:  # empty fields are harmless
                raise UserError(f"{path}, {location}: fields unlike the header; quote texts that contain {separator!r}")
            yield location, row
    except csv.Error as error:
        location = f"{path}, line {table.reader.line_num}"
        raise UserError(f"{location}: {error}; is a quote not closed, or the file cut short?") from None


def _parse_json(line: str, location: str):
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(f"{location}: not a JSON object on one line ({error}); {_JSON_FORMAT}") from None


def _file_identity(path: Path) -> dict:
    status = path.stat()
    identity = {"name": path.name, "size": status.st_size}
    if status.st_size <= 1 << 22:  # bytes; small files are often copied, which changes their modification times
        return identity | {"sha256": sha256_of(path)}
    return identity | {"mtime_ns": status.st_mtime_ns}
