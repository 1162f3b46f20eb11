"""Data sets on the Hugging Face Hub: text streamed with `datasets`, and token shards downloaded whole.

Both are pinned to the commit with which the reading began. A failure that may pass is retried, with a message, from
where it stopped; any other is an error at once. The token stays where huggingface_hub finds it: in the environment.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from recipe.config import DataConfig
from recipe.data.prepare.documents import Document, text_chunks, text_of
from recipe.data.shards import DTYPE, HEADER_BYTES, move
from recipe.errors import UserError
from recipe.files import sha256_of
from recipe.redaction import redact

logger = logging.getLogger(__name__)

PATIENCE = 900  # seconds without anything new after which a failing Hub ends the run
DOWNLOADS = ".download"  # beside the shards, where they lie until they are whole
_FIRST_PATIENCE = 60  # the same before anything has been read
_LONGEST_WAIT = 60  # seconds between two attempts
_UNREADABLE = 4  # attempts at the same place when what came could not be read, which waiting seldom mends
_STATE_EVERY = 256  # documents between two positions from which a stream can start again
_PERMANENT = {400, 401, 403, 404, 410, 416}


class Retries:
    """Decides after each failure whether to try again, and waits; each success starts the clock again.

    The libraries sometimes report a rate limit or an outage as a missing file, or as a data set without data. So until
    something has been read only a failure that is plainly temporary is retried (or a mistyped name would be waited
    for), and afterwards every failure that is not plainly permanent.
    """

    def __init__(self, name: str):
        self.name, self.worked = name, False
        self._failures, self._since = 0, time.monotonic()

    def success(self) -> None:
        self.worked = True
        self._failures, self._since = 0, time.monotonic()

    def failed(self, error: Exception) -> None:
        """Waits before another attempt. Raises UserError where there is to be none."""
        self._failures += 1
        status, after = _response(error)
        temporary = status is not None or _is_lost_connection(error)
        offline = any(type(e).__name__ == "OfflineModeIsEnabled" for e in _chain(error))  # HF_HUB_OFFLINE
        hopeless = offline or status in _PERMANENT or not (temporary or self.worked)
        unreadable = isinstance(error, ValueError) and not temporary and self._failures >= _UNREADABLE  # Arrow's, too
        patience = PATIENCE if self.worked else _FIRST_PATIENCE
        if hopeless or unreadable or time.monotonic() - self._since > patience:
            raise _user_error(self.name, error, self.worked) from None
        wait = min(_LONGEST_WAIT, max(after, 2 ** (self._failures - 1)))
        logger.warning(
            "data       %s: %s; trying again in %.0f s from where it stopped", self.name, _reason(error), wait
        )
        time.sleep(wait)


class _Pinned:
    """A data set repository that is read at the commit with which the reading began."""

    repo: str
    revision: str | None
    commit: str | None = None
    _retries: Retries

    def pin(self, earlier: dict | None) -> dict:
        """The commit to read: that of an `earlier` manifest's source, or else the newest of `revision`."""
        if earlier:
            self.commit, self._retries.worked = earlier["commit"], True
        while not self.commit:
            from huggingface_hub import HfApi

            try:
                self.commit = HfApi().dataset_info(self.repo, revision=self.revision, timeout=30).sha
            except Exception as error:
                self._retries.failed(error)
        return {"commit": self.commit}


class HubText(_Pinned):
    """A data set of text on the Hub, streamed."""

    def __init__(self, data: DataConfig):
        self.repo, self.revision, self._data = data.train_text, data.dataset_revision or None, data
        self._files: list[Callable] | None = None
        self._retries = Retries(f"train_text {self.repo}")

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self._data.dataset_config, self._data.dataset_split))) + " on the Hub"

    def identity(self) -> dict:
        fields = ("train_text", "dataset_config", "dataset_split", "dataset_revision", "text_column")
        return {field: getattr(self._data, field) for field in fields}

    def documents(self, stream: dict | None = None) -> Iterator[Document]:
        """Each document once, whatever happens to the connection."""
        following = 0
        while True:
            try:
                for index, row, stream in self._rows(stream):  # noqa: B020  (a later attempt starts from there)
                    self._retries.success()
                    if index >= following:
                        following = index + 1
                        yield Document(
                            index, partial(text_chunks, text_of(row, self._data.text_column, self.repo)), stream
                        )
                return
            except UserError:
                raise
            except Exception as error:
                self._retries.failed(error)

    def _rows(self, stream: dict | None) -> Iterator[tuple[int, dict, dict | None]]:
        """(index, row, the last position before it from which a stream can start again)."""
        import datasets

        # Its own retries wait up to twenty minutes without a word.
        datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = 1
        for what in ("READ", "OPEN", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
            setattr(datasets.config, f"STREAMING_{what}_RETRY_INTERVAL", 0)
        if self._files is None:
            subset, split = self._data.dataset_config or None, self._data.dataset_split
            rows = datasets.load_dataset(self.repo, subset, split=split, revision=self.commit, streaming=True)
            self._files = [partial(rows.shard, rows.num_shards, i) for i in range(rows.num_shards)]
        index, start = (stream["document"], stream["state"]) if stream else (0, {"file": 0, "within": None})
        for number in range(start["file"], len(self._files)):
            # By row groups of parquet: to start again need not read the file up to there. A file at a time, for all of
            # them would be opened first.
            rows = self._files[number]().reshard()
            if start["within"]:
                rows.load_state_dict(start["within"])
            for row in rows:
                yield index, row, stream
                index += 1
                if index % _STATE_EVERY == 0:
                    stream = {"document": index, "state": {"file": number, "within": rows.state_dict()}}
            start = {"file": number + 1, "within": None}
            stream = {"document": index, "state": start}


class HubShards(_Pinned):
    """Token shards in a data set repository: hf://datasets/ORG/NAME[@REVISION]/PATTERN."""

    _URI = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?/(.+)")

    def __init__(self, uri: str):
        if not (match := self._URI.fullmatch(uri)):
            raise UserError(
                f"dataset_name {uri}: expected hf://datasets/ORG/NAME/PATTERN, as in hf://datasets/a/b/*.bin"
            )
        self.uri, (self.repo, self.revision, self.pattern) = uri, match.groups()
        self._retries = Retries(f"dataset_name {uri}")

    def identity(self) -> dict:
        return {"uri": self.uri}

    def entries(self) -> list[dict]:
        """The manifest's entries, {file, split, tokens, sha256, path}, in the order of the names. Raises UserError."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        with _hub_errors(self._retries.name):
            tree = HfApi().list_repo_tree(self.repo, repo_type="dataset", revision=self.commit, recursive=True)
            files = [f for f in tree if isinstance(f, RepoFile) and _matches(f.path, self.pattern)]
        entries = []
        for f in sorted(files, key=lambda f: f.path):
            entries.append(
                {
                    "file": Path(f.path).name,
                    "split": "val" if "val" in Path(f.path).name else "train",
                    "tokens": (f.size - HEADER_BYTES) // DTYPE.itemsize,
                    "sha256": f.lfs.sha256 if f.lfs else None,
                    "path": f.path,
                }
            )
        if not entries:
            raise UserError(f"dataset_name {self.uri}: no file of the data set matches {self.pattern}")
        if len({Path(e["path"]).parent for e in entries}) > 1:
            raise UserError(
                f"dataset_name {self.uri}: files in several folders match; narrow the pattern to one folder"
            )
        if all(e["split"] == "val" for e in entries):
            raise UserError(f"dataset_name {self.uri}: only validation files match {self.pattern}; widen the pattern")
        return entries

    def download(self, entry: dict, path: Path) -> None:
        """Downloads a shard to `path`, whole and with the checksum that the Hub states. Raises UserError."""
        from huggingface_hub import hf_hub_download

        aside = path.parent / DOWNLOADS
        shutil.rmtree(aside, ignore_errors=True)  # nothing continues a killed download, which would stay for ever
        while True:
            try:
                got = Path(
                    hf_hub_download(
                        self.repo, entry["path"], repo_type="dataset", revision=self.commit, local_dir=aside
                    )
                )
                if entry["sha256"] and (found := sha256_of(got)) != entry["sha256"]:
                    shutil.rmtree(aside)
                    raise ValueError(
                        f"{entry['file']} came with SHA-256 {found[:16]}..., not {entry['sha256'][:16]}..."
                    )
                break
            except Exception as error:
                self._retries.failed(error)
        self._retries.success()
        move(got, path)
        shutil.rmtree(aside, ignore_errors=True)


def _matches(path: str, pattern: str) -> bool:
    """As in a shell, * stays within a folder."""
    parts, patterns = path.split("/"), pattern.split("/")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _user_error(name, error) from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = set()
    while error and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _response(error: Exception) -> tuple[int | None, float]:
    """HTTP status and the seconds of Retry-After (0: not said) of whatever lies beneath an error."""
    for e in _chain(error):
        if (response := getattr(e, "response", None)) is not None and hasattr(response, "status_code"):
            after = response.headers.get("Retry-After", "")
            return response.status_code, float(after) if after.isdigit() else 0.0
    return None, 0.0


def _is_lost_connection(error: Exception) -> bool:
    """By name too: the libraries' HTTP clients raise types of their own, and change them."""
    names = ("Timeout", "Connect", "Network", "Protocol", "ReadError", "IncompleteRead", "Transport", "Closed")
    return any(
        isinstance(e, (ConnectionError, TimeoutError)) or any(n in type(e).__name__ for n in names)
        for e in _chain(error)
    )


def _reason(error: Exception) -> str:
    status, _ = _response(error)
    text = redact((str(error).strip().splitlines() or [""])[0])[:200]  # redacted first: a cut secret has no shape
    return f"{f'HTTP {status}, ' if status else ''}{type(error).__name__}: {text}"


def _user_error(name: str, error: Exception, worked: bool = False) -> UserError:
    """One sentence for what the Hub's libraries raise, which is dozens of types; `worked` if they succeeded before."""
    if worked:
        return UserError(
            f"{name}: the Hub, which answered before, reports {_reason(error)}; the same command continues"
        )
    if "scripts are no longer supported" in str(error):
        return UserError(
            f"{name}: this data set is a script that wants to run on your machine, which is refused; "
            "look for its parquet version (often --dataset_revision refs/convert/parquet), or give local files"
        )
    return UserError(
        f"{name}: no such local file, and the Hub reports {_reason(error)}; check the name and the network, or give "
        "local .txt, .jsonl or .parquet files"
    )
