"""Data sets on the Hugging Face Hub, read at one commit.

A failure of the Hub is an error before the first success, and afterwards is retried from where the reading stopped,
with a message. The token stays where huggingface_hub finds it: in the environment.
"""

import logging
import time
from collections.abc import Iterator

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError

from recipe.config import DataConfig
from recipe.config.fields import DATASETS
from recipe.data.documents import Column, Piece
from recipe.data.shards import Manifest
from recipe.utils.download import within
from recipe.utils.errors import Unreachable, UserError, first_line
from recipe.utils.redaction import redact

logger = logging.getLogger(__name__)

ANSWER_S = 30.0  # seconds for the first answer of the Hub
_RETRY_WINDOW_S = 900  # seconds without anything new after which a failing Hub ends the run
_MAX_DELAY_S = 60  # seconds between two attempts
_STATE_EVERY = 256  # documents between two positions from which a stream can start again
_PERMANENT_STATUSES = {400, 401, 403, 404, 410, 416}  # HTTP


class HubText:
    """A data set of text, or of token ids, streamed with `datasets` at the commit that `pin` sets.

    The libraries sometimes report a rate limit or an outage as a missing file, or as a data set without data. So what
    has worked is retried whatever the error is, unless the Hub itself reports that it is permanent; and what has not
    worked yet is a mistake, such as a wrong name.
    """

    commit: str
    size = position = 0  # bytes, as those of TextFiles: unknown

    def __init__(self, data: DataConfig, column: Column):
        self.repo, self.column, self._data = data.train_text, column, data
        self.name = next((name for name, (repo, _) in DATASETS.items() if repo == self.repo), self.repo)
        self._has_succeeded, self._last_success = False, time.monotonic()
        self._files = None  # all of them, as `datasets` streams them, from the first `_rows` on

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self._data.dataset_config, self._data.dataset_split))) + " on the Hub"

    def identity(self) -> dict:
        """What must not change between an interrupted preparation and its continuation."""
        fields = ("train_text", "dataset_config", "dataset_split", "dataset_revision", "text_column")
        return {field: getattr(self._data, field) for field in fields}

    def newest(self) -> dict:
        """{"commit": the newest one of `dataset_revision`}. Raises UserError."""
        try:
            revision = self._data.dataset_revision or None
            info = within(ANSWER_S, lambda: HfApi().dataset_info(self.repo, revision=revision, timeout=ANSWER_S))
        except Exception as error:
            raise self._error(error) from None
        return {"commit": info.sha}

    def pin(self, manifest: Manifest) -> None:
        """Reads what the shards of a manifest were made from. If there are shards already, a failure from now on is the
        Hub's, not a mistake in a name."""
        self.commit, self._has_succeeded = manifest.source["commit"], bool(manifest.shards)

    def wait_after(self, error: Exception) -> None:
        """Waits before another attempt. Raises UserError where there should be none."""
        if not self._has_succeeded:
            raise self._error(error) from None
        status, reason = _status_and_reason(error)
        silence = time.monotonic() - self._last_success
        if status in _PERMANENT_STATUSES or silence > _RETRY_WINDOW_S:
            raise UserError(
                f"data set {self.name}: the Hub, which answered before, reports {reason}; the same command continues"
            ) from None
        delay = min(_MAX_DELAY_S, 1 + silence)  # about twice as long each time
        logger.warning("data       %s: %s; trying again in %.0f s from where it stopped", self.repo, reason, delay)
        time.sleep(delay)

    def pieces(self, stream: dict | None = None) -> Iterator[Piece]:
        """All documents in order, or those from an earlier piece's `stream` on: each once, whatever happens."""
        next_index = 0
        while True:
            try:
                for index, row, stream in self._rows(stream):  # noqa: B020  (a later attempt starts from there)
                    self._has_succeeded, self._last_success = True, time.monotonic()
                    if index >= next_index:
                        next_index = index + 1
                        for content in self.column.pieces(row, self.repo):
                            yield Piece(index, content, stream)
                return
            except UserError:
                raise
            except Exception as error:
                self.wait_after(error)

    def _error(self, error: Exception) -> UserError:
        """One sentence for what the Hub's libraries raise, which is dozens of types; Unreachable where the Hub has not
        said what is wrong with the name."""
        status, reason = _status_and_reason(error)
        is_permanent = status in _PERMANENT_STATUSES or isinstance(error, HFValidationError)
        return (UserError if is_permanent else Unreachable)(
            f"data set {self.name}: no such path on this disk, and the Hub reports {reason}; check the name and the "
            "network, or give text on this disk"
        )

    def _rows(self, stream: dict | None) -> Iterator[tuple[int, dict, dict | None]]:
        """(index, row, the last position before it from which a stream can start again)."""
        import datasets.config

        # Its own retries wait up to twenty minutes without a message.
        for setting in ("READ_MAX_RETRIES", "OPEN_MAX_RETRIES"):
            setattr(datasets.config, f"STREAMING_{setting}", 1)
        for setting in ("READ", "OPEN", "READ_SERVER_UNAVAILABLE", "READ_RATE_LIMIT"):
            setattr(datasets.config, f"STREAMING_{setting}_RETRY_INTERVAL", 0)
        if self._files is None:
            subset, split = self._data.dataset_config or None, self._data.dataset_split
            self._files = datasets.load_dataset(self.repo, subset, split=split, revision=self.commit, streaming=True)
        file_count = self._files.num_shards
        index, first_file, file_state = 0, 0, None  # `within`: where in its first file
        if stream:
            index, first_file, file_state = stream["document"], stream["state"]["file"], stream["state"]["within"]
        for file_number in range(first_file, file_count):
            # By row groups of parquet: a restart need not read the file up to there. A file at a time, since all of
            # them would be opened first.
            rows = self._files.shard(file_count, file_number).reshard()
            if file_state:
                rows.load_state_dict(file_state)
            for row in rows:
                yield index, row, stream
                index += 1
                if index % _STATE_EVERY == 0:
                    stream = {"document": index, "state": {"file": file_number, "within": rows.state_dict()}}
            file_state, stream = None, {"document": index, "state": {"file": file_number + 1, "within": None}}


def _status_and_reason(error: Exception) -> tuple[int | None, str]:
    """The HTTP status beneath an error, if there is one, and a line about both."""
    status, cause = None, error
    while cause and status is None:
        status = getattr(getattr(cause, "response", None), "status_code", None)
        cause = cause.__cause__ or cause.__context__
    text = redact(first_line(error))[:200]  # redacted first: a cut secret is not recognized
    return status, f"{f'HTTP {status}, ' if status else ''}{type(error).__name__}: {text}"
