"""Data sets on the Hugging Face Hub: text streamed with `datasets`, and token shards downloaded whole.

Both are pinned to the commit they began with. What fails for a while is tried again, aloud, from where it stopped; what
will not pass by waiting is an error at once. The token stays where huggingface_hub finds it: in the environment.
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from recipe.data.prepare.documents import Document, text_chunks, text_of
from recipe.data.shards import DTYPE, HEADER_BYTES, file_sha256, move
from recipe.errors import UserError
from recipe.redaction import redact

PATIENCE = 900  # seconds without anything new after which a failing Hub ends the run
_FIRST_PATIENCE = 60  # the same before anything has been read
DOWNLOADS = ".download"  # beside the shards, where they lie until they are whole
_LONGEST_WAIT = 60  # seconds between two attempts
_SPOILT = 4  # attempts at the same place when what came could not be read, which waiting seldom mends
_STATE_EVERY = 256  # documents between two positions from which a stream can start again
_PERMANENT = {400, 401, 403, 404, 410, 416}


class Retries:
    """Decides after each failure whether to try again, and waits; the clock starts anew with each success.

    The libraries give a rate limit or an outage now and then as a missing file, or as a data set without data. So until
    something has been read only what says plainly that it will pass is tried again (a mistyped name would be waited
    for otherwise), and afterwards all that does not say that it will stay.
    """

    def __init__(self, source: str, say: Callable[[str], None]):
        self.source, self.say = source, say
        self.worked = False
        self._failures, self._since = 0, time.monotonic()

    def success(self) -> None:
        self.worked = True
        self._failures, self._since = 0, time.monotonic()

    def failed(self, error: Exception) -> None:
        """Waits before another attempt. Raises UserError where there is to be none."""
        self._failures += 1
        status, after = _response(error)
        passing = status is not None or _is_lost_connection(error)
        offline = any(type(e).__name__ == "OfflineModeIsEnabled" for e in _chain(error))  # HF_HUB_OFFLINE
        hopeless = offline or status in _PERMANENT or not (passing or self.worked)
        spoilt = isinstance(error, ValueError) and not passing and self._failures >= _SPOILT  # of Arrow, too
        patience = PATIENCE if self.worked else _FIRST_PATIENCE
        if hopeless or spoilt or time.monotonic() - self._since > patience:
            raise _user_error(self.source, error, self.worked) from None
        wait = min(_LONGEST_WAIT, max(after, 2 ** (self._failures - 1)))
        self.say(f"{self.source}: {_reason(error)}; trying again in {wait:.0f} s from where it stopped")
        time.sleep(wait)


class _Pinned:
    """A data set repository that is read at the commit with which the reading began."""

    repo: str
    revision: str | None
    commit: str | None = None
    _retries: Retries

    def pin(self, earlier: dict | None) -> dict:
        """The commit to read, of the `earlier` manifest's source or else the newest of `revision`."""
        if earlier:
            self.commit, self._retries.worked = earlier["commit"], True
        elif not self.commit:
            self.commit = commit_of(self.repo, self.revision, self._retries)
        return {"commit": self.commit}


class HubText(_Pinned):
    """A data set on the Hub, streamed; pinned to the commit that its preparation began with."""

    def __init__(
        self,
        source: str,
        name: str | None,
        split: str,
        revision: str | None,
        text_column: str,
        say: Callable[[str], None] = print,
    ):
        self.source, self.name, self.split, self.revision, self.text_column = source, name, split, revision, text_column
        self.repo = source
        self._files: list[Callable] | None = None
        self._retries = Retries(f"--train_text {source}", say)

    def __str__(self) -> str:
        return "/".join(filter(None, (self.source, self.name, self.split))) + " on the Hub"

    def identity(self) -> dict:
        return {
            "train_text": self.source,
            "dataset_config": self.name,
            "dataset_split": self.split,
            "dataset_revision": self.revision,
            "text_column": self.text_column,
        }

    def documents(self, first: int = 0, stream: dict | None = None) -> Iterator[Document]:
        """Each document once, whatever happens to the connection."""
        while True:
            try:
                for index, row, stream in self._rows(stream):  # noqa: B020  (a later attempt starts from there)
                    self._retries.success()
                    if index >= first:
                        first = index + 1
                        chunks = partial(text_chunks, text_of(row, self.text_column, self.source))
                        yield Document(index, index, chunks, stream)
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
            rows = datasets.load_dataset(self.source, self.name, split=self.split, revision=self.commit, streaming=True)
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

    def __init__(self, uri: str, say: Callable[[str], None] = print):
        if not (match := self._URI.fullmatch(uri)):
            raise UserError(f"data {uri}: expected hf://datasets/ORG/NAME/PATTERN, such as hf://datasets/a/b/*.bin")
        self.uri, (self.repo, self.revision, self.pattern) = uri, match.groups()
        self._retries = Retries(f"data {uri}", say)

    def identity(self) -> dict:
        return {"uri": self.uri}

    def entries(self) -> list[dict]:
        """The manifest's entries, {file, split, tokens, sha256, path}, in the order of the names. Raises UserError."""
        from huggingface_hub import HfApi
        from huggingface_hub.hf_api import RepoFile

        with _hub_errors(self._retries.source):
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
            raise UserError(f"data {self.uri}: no file of the data set matches {self.pattern}")
        if len({Path(e["path"]).parent for e in entries}) > 1:
            raise UserError(f"data {self.uri}: the files that match are in several folders; narrow the pattern to one")
        if all(e["split"] == "val" for e in entries):
            raise UserError(f"data {self.uri}: only validation files match {self.pattern}; widen the pattern")
        return entries

    def download(self, entry: dict, path: Path) -> None:
        """Bring a shard to `path`, whole and with the checksum that the Hub states. Raises UserError."""
        from huggingface_hub import hf_hub_download

        aside = path.parent / DOWNLOADS
        shutil.rmtree(aside, ignore_errors=True)  # a killed download is not taken up again, and would stay for ever
        while True:
            try:
                got = Path(
                    hf_hub_download(
                        self.repo, entry["path"], repo_type="dataset", revision=self.commit, local_dir=aside
                    )
                )
                if entry["sha256"] and (found := file_sha256(got)) != entry["sha256"]:
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


def commit_of(repo: str, revision: str | None, retries: Retries) -> str:
    """The commit that `revision` (default: the main branch) of a data set is now. Raises UserError."""
    from huggingface_hub import HfApi

    while True:
        try:
            return HfApi().dataset_info(repo, revision=revision, timeout=30).sha
        except Exception as error:
            retries.failed(error)


@contextmanager
def _hub_errors(source: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _user_error(source, error) from None


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


def _user_error(source: str, error: Exception, worked: bool = False) -> UserError:
    """One sentence of whatever the Hub's libraries raise (some dozens of types); `worked` says that they did before."""
    if worked:
        return UserError(
            f"{source}: the Hub, which answered before, says {_reason(error)}; the same command goes on from there"
        )
    if "scripts are no longer supported" in str(error):
        return UserError(
            f"{source}: this data set is a script that wants to run on your machine, which is refused; "
            "look for its parquet version (often --dataset_revision refs/convert/parquet), or give local files"
        )
    return UserError(
        f"{source}: no such local file, and the Hub says {_reason(error)}; check the name and the network, or give "
        "local .txt, .jsonl or .parquet files. The same command goes on where it stopped"
    )
