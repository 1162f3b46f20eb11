"""Data sets streamed from the Hugging Face Hub at one commit.

Before the first success a failure of the Hub is an error; afterwards reading is retried, with a log line, from where it
stopped. The token stays in the environment, where huggingface_hub reads it.
"""

import io
import logging
import time
from collections.abc import Iterator

import pyarrow as pa
from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from recipe.config import DataConfig
from recipe.config.fields import DATASETS
from recipe.data.documents import Column, Piece
from recipe.data.shards import Manifest
from recipe.utils.download import within
from recipe.utils.errors import Unreachable, UserError
from recipe.utils.redaction import redact

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # seconds for the Hub's complete answer to the first request
_RETRIES = 20  # of one document, over 15 minutes; then a Hub that goes on failing ends the run
_MAX_DELAY_S = 60  # seconds between two attempts
_CONVERTED = "refs/convert/parquet"  # a branch that the Hub makes, with a directory for each subset
_STATE_EVERY = 256  # documents between positions at which a stream can resume


class HubText:
    """A data set of text, or of token ids, streamed with `datasets` at the commit that `pin` sets.

    The libraries sometimes report a rate limit or an outage as a missing file or an empty data set. So once reading has
    succeeded, any error is retried; before that, it ends the run.
    """

    commit: str
    size = position = 0  # bytes, as in TextFiles; unknown for the Hub

    def __init__(self, data: DataConfig, column: Column):
        self.repo, self.column, self._data = data.train_text, column, data
        self.name = next((name for name, (repo, _) in DATASETS.items() if repo == self.repo), self.repo)
        self._has_succeeded = False
        self._dataset = None  # opened by `_rows`

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self._data.dataset_config, self._data.dataset_split))) + " on the Hub"

    def identity(self) -> dict:
        """The settings that must not change before an interrupted preparation continues."""
        fields = ("train_text", "dataset_config", "dataset_split", "dataset_revision", "text_column")
        return {field: getattr(self._data, field) for field in fields}

    def newest(self) -> dict:
        """{"commit": the newest commit of `dataset_revision`}. Raises UserError, also where several subsets would be
        mixed, since a converted copy has no README.md."""
        try:
            revision = self._data.dataset_revision or None
            info = within(ANSWER_S, lambda: HfApi().dataset_info(self.repo, revision=revision, timeout=ANSWER_S))
        except Exception as error:
            raise self._error(error) from None
        if revision == _CONVERTED:
            subset, paths = self._data.dataset_config, [file.rfilename for file in info.siblings or []]
            subsets = sorted({path.partition("/")[0] for path in paths if "/" in path})
            if (subset or len(subsets) > 1) and subset not in subsets:
                listed = ", ".join(subsets)[:1000]
                raise UserError(f"data set {self.name}, {revision}: choose a subset with --dataset_config: {listed}")
        return {"commit": info.sha}

    def pin(self, manifest: Manifest) -> None:
        """Selects the commit from which the manifest's shards were made. If there are shards already, failures are
        the Hub's and not a wrong name."""
        self.commit, self._has_succeeded = manifest.source["commit"], bool(manifest.shards)

    def pieces(self, stream: dict | None = None) -> Iterator[Piece]:
        """Yields all documents in order, or those from an earlier piece's `stream` on; none twice, despite retries."""
        next_index, failures = 0, 0
        while True:
            try:
                for index, row, stream in self._rows(stream):  # noqa: B020  (a retry resumes from there)
                    if index >= next_index:  # a retry repeats up to 255 documents, which does not show that it helps
                        next_index, failures, self._has_succeeded = index + 1, 0, True
                        for number, content in self.column.pieces(row, self.repo, separated=False):
                            yield Piece(index, content, stream, number > 0)
                return
            except UserError:
                raise
            except Exception as error:
                if not self._has_succeeded:
                    raise self._error(error) from None
                if failures == _RETRIES:
                    problem = f"data set {self.name}: the Hub, which answered before, reports {_reason(error)}"
                    raise Unreachable(f"{problem}; the same command continues") from None
                delay, failures = min(_MAX_DELAY_S, 2**failures), failures + 1
                message = "data       %s: %s; trying again in %d s from where it stopped"
                logger.warning(message, self.repo, _reason(error), delay)
                time.sleep(delay)

    def _error(self, error: Exception) -> UserError:
        """The UserError for any of the dozens of exceptions that the Hub's libraries raise; Unreachable unless the Hub
        has rejected the name or the token."""
        rejections = HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
        status = getattr(getattr(error, "response", None), "status_code", 0)
        way_out = "check the name, --dataset_config, --dataset_split and the network, or give text on this disk"
        if "scripts are no longer supported" in str(error):
            way_out = f"the Hub may have a converted copy: --dataset_revision {_CONVERTED}"
        return (UserError if isinstance(error, rejections) or status in (401, 403) else Unreachable)(
            f"data set {self.name}: no such path on this disk, and the Hub reports {_reason(error)}; {way_out}"
        )

    def _rows(self, stream: dict | None) -> Iterator[tuple[int, dict, dict | None]]:
        """Yields (index, row, the last position at or before it at which a stream can resume)."""
        import datasets.config
        import fsspec.compression

        def unpack(file, mode="rb"):
            return io.BufferedReader(pa.input_stream(file, "zstd"))

        # Before Python 3.14 it reads .zst with another package alone; local text is unpacked by pyarrow, too.
        fsspec.compression.register_compression("zstd", unpack, "zst", force=True)
        # The library's own retries wait up to twenty minutes without a message.
        for setting in ("READ_MAX_RETRIES", "OPEN_MAX_RETRIES"):
            setattr(datasets.config, f"STREAMING_{setting}", 1)
        for setting in ("READ", "OPEN", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
            setattr(datasets.config, f"STREAMING_{setting}_RETRY_INTERVAL", 0)
        if self._dataset is None:
            subset, split = self._data.dataset_config or None, self._data.dataset_split
            name, directory = (None, subset) if self._data.dataset_revision == _CONVERTED else (subset, None)
            self._dataset = datasets.load_dataset(
                self.repo, name, data_dir=directory, split=split, revision=self.commit, streaming=True
            )
        file_count = self._dataset.num_shards
        index, first_file, file_state = 0, 0, None  # `file_state`: the position in the first file
        if stream:
            index, first_file, file_state = stream["document"], stream["state"]["file"], stream["state"]["within"]
        for file_number in range(first_file, file_count):
            # Split by parquet row groups, so that resuming need not read the file from its start; one file at a time,
            # since splitting opens each of them.
            rows = self._dataset.shard(file_count, file_number).reshard()
            if file_state:
                rows.load_state_dict(file_state)
            for row in rows:
                yield index, row, stream
                index += 1
                if index % _STATE_EVERY == 0:
                    stream = {"document": index, "state": {"file": file_number, "within": rows.state_dict()}}
            file_state, stream = None, {"document": index, "state": {"file": file_number + 1, "within": None}}


def _reason(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(redact(str(error)).split())[:400]  # redact before truncating: a truncated secret is not recognized
    return f"{type(error).__name__}: {text}"
