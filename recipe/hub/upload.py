"""The process that brings queued checkpoints to the Hugging Face Hub, and what it makes of the Hub's errors.

push.py starts `python -m recipe.hub.upload RUN`, which ends when its standard input does, that is with the trainer,
however that ends. What it does it says on its standard output, one JSON object a line. The token stays where
huggingface_hub finds it, in the environment or its own file: nothing here writes it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import huggingface_hub.constants
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.utils._http import default_client_factory  # the one that set_client_factory replaces

from recipe import faults
from recipe.hub.outbox import MAIN, Entry, alone, entries
from recipe.redaction import redact

TIMEOUT = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 60)  # seconds in which no byte moves
_LONGEST_WAIT = 60  # seconds between two attempts, unless the Hub asks for more
_LONGEST_ASKED = 3600
_TRIES = 5  # at what another attempt mends at times, but not always
_POLL = 0.5  # seconds between looks into an empty queue
_BAD_CARD = "Invalid metadata in README.md."  # how create_commit begins what the Hub has against a card
_NO_SENSE = (OSError, ValueError, KeyError, TypeError, AttributeError)
_CONFLICT = (409, 412, 423)  # another commit came in between
_PASSING = (408, 425, 429)  # and whatever is 500 or more

Tell = Callable[..., None]  # tell(event, **values)


class Refused(Exception):
    """What another attempt would meet again."""


class Passing(Exception):
    """What waiting may mend; `after` is how many seconds of it the Hub asks for."""

    def __init__(self, reason: str, after: float = 0.0):
        super().__init__(reason)
        self.after = after


# Talking to the Hub


@contextmanager
def hub_client(timeout: float) -> Iterator[None]:
    """Within it a request of huggingface_hub ends after `timeout` seconds in which nothing moves (by itself it would
    wait for ever), and one that fails says so at once as Passing (by itself it would try five times more, silently)."""

    def make():
        client = default_client_factory()
        client.timeout = timeout
        send = client.send

        def send_once(request, **options):
            try:
                response = send(request, **options)
            except Exception as error:  # types of an HTTP library, which is another one from version to version
                raise Passing(f"{type(error).__name__}: {error}") from error
            if response.status_code >= 500 or response.status_code in _PASSING:
                raise Passing(f"HTTP {response.status_code}: {_words_of(response)}", _asked(response.headers))
            return response

        client.send = send_once
        return client

    huggingface_hub.set_client_factory(make)
    try:
        yield
    finally:
        huggingface_hub.set_client_factory(default_client_factory)


def _words_of(response) -> str:
    return response.headers.get("X-Error-Message") or response.reason_phrase or "no more is said"


def _asked(headers) -> float:
    """Seconds that the Hub asks to wait: in Retry-After, or with RateLimit: "api";r=0;t=55."""
    after = headers.get("Retry-After", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("RateLimit", ""))
    return min(float(after) if after.isdigit() else float(limit[1]) if limit else 0.0, _LONGEST_ASKED)


def judge(error: BaseException) -> tuple[str, str, float]:
    """("passing" | "perhaps" | "permanent", what to tell the user, seconds to wait at least)."""
    for e in _chain(error):
        if isinstance(e, Passing):
            return "passing", clean(str(e)), e.after
        if isinstance(e, Refused):
            return "permanent", clean(str(e)), 0.0
        if (response := getattr(e, "response", None)) is not None:
            # An upload's own link leads past the Hub, and runs out.
            expired = response.request.method == "PUT" and response.status_code == 403
            kind = "perhaps" if expired or response.status_code in _CONFLICT else "permanent"
            return kind, clean(f"HTTP {response.status_code}: {_words_of(response)}"), 0.0
    words = (str(error).strip().splitlines() or [""])[0]
    # Errors of files, and answers that make no sense, may be lasting. The rest is of Xet's connections.
    kind = "perhaps" if isinstance(error, _NO_SENSE) else "passing"
    return kind, clean(f"{type(error).__name__}: {words}"), 0.0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen = set()
    while error and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def clean(text: str) -> str:
    """`text` without what must not be shown: a token, user:secret@ of a URL, the signature in its query."""
    if token := huggingface_hub.get_token():  # which may come from a file, of which redact knows nothing
        text = text.replace(token, "***")
    text = redact(text)
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", re.sub(r"//[^/\s@]+@", "//", text))[:300]


def page(repo: str, branch: str = "") -> str:
    return clean(huggingface_hub.constants.ENDPOINT) + f"/{repo}" + (f"/tree/{branch}" if branch else "")


def open_repo(api: HfApi, repo: str, private: bool) -> None:
    """Makes the repository, unless it is there. Raises Refused where it is public and must not be."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise Refused(
            f"{repo} is a public repository, and hub_private_repo wants a private one; make it private in its "
            "settings on the Hub, or name another"
        )


class Uploader:
    """Brings entries up, each as one commit a branch. What was done before it was killed is not done again: files
    that are there are not sent, and a commit without a change is not made."""

    def __init__(self, tell: Tell):
        self._tell, self._api = tell, HfApi()
        self._opened: set[str] = set()
        self.moved: set[tuple] = set()  # what has gone up, for those who wait for progress

    def upload(self, entry: Entry, last: bool = False) -> None:
        """Raises whatever the libraries raise; `judge` tells what that means. `last`: no other attempt will follow one
        that fails for what may be lasting."""
        faults.at("upload.begin")
        if entry.repo not in self._opened:
            open_repo(self._api, entry.repo, entry.private)
            self._opened.add(entry.repo)
        for branch in entry.todo:
            if branch != MAIN:
                self._api.create_branch(entry.repo, branch=branch, exist_ok=True)
            additions = [CommitOperationAdd(path.name, str(path)) for path in entry.files()]
            for number, addition in enumerate(additions, 1):
                # One by one, and create_commit and not upload_folder, which may make several commits of them.
                faults.at("upload.during")
                self._api.preupload_lfs_files(entry.repo, [addition], revision=branch, free_memory=False)
                self.moved.add((entry.path.name, branch, number))
                self._tell("file", name=entry.path.name, branch=branch, number=number, of=len(additions))
            self._commit(entry, branch, additions, last)
            entry = dataclasses.replace(entry, todo=tuple(b for b in entry.todo if b != branch)).write()
            self.moved.add((entry.path.name, branch))
            self._tell("uploaded", name=entry.path.name, url=page(entry.repo, branch))
        faults.at("upload.after")
        entry.remove()

    def _commit(self, entry: Entry, branch: str, additions: list[CommitOperationAdd], last: bool) -> None:
        options = {"commit_message": f"Step {entry.step}", "revision": branch}
        rest = [addition for addition in additions if addition.path_in_repo != "README.md"]
        try:
            self._api.create_commit(entry.repo, additions, **options)
        except Exception as error:
            if len(rest) == len(additions) or not (reason := _against_the_card(error, last)):
                raise
            # The weights are worth more than what is said of them.
            self._tell("card", name=entry.path.name, reason=reason)
            self._api.create_commit(entry.repo, rest, **options)


def _against_the_card(error: Exception, last: bool) -> str:
    """Why a commit is to be tried without its card; empty where that is not what stands in its way, or may pass."""
    if str(error).startswith(_BAD_CARD):
        return clean(" ".join(str(error)[len(_BAD_CARD) :].split()))
    kind, reason, _ = judge(error)
    answers = [e.response for e in _chain(error) if getattr(e, "response", None) is not None]
    # An answer that is no JSON is not in its error: it may have been another request's.
    of_card = not isinstance(error, OSError) or bool(answers)
    of_card = of_card and all(str(answer.request.url).endswith("/api/validate-yaml") for answer in answers)
    lasting = (kind == "permanent" and answers) or (kind == "perhaps" and last)
    return reason if of_card and lasting else ""


def drain(run: Path, tell: Tell, patience: float = float("inf")) -> None:
    """Uploads what is queued until nothing is left that another attempt could bring up, or until it has failed for
    `patience` seconds without anything new on the Hub. Entries with an error, or held, are left alone."""
    uploader = Uploader(tell)
    failures, doubtful, moved, since = 0, 0, 0, time.monotonic()
    while entry := next((e for e in entries(run) if not e.error and not e.held), None):
        try:
            uploader.upload(entry, last=doubtful == _TRIES - 1)
            failures = doubtful = 0
            continue
        except Exception as e:  # whatever it is, it is judged, and nobody else hears of it
            kind, reason, after = judge(e)
        if len(uploader.moved) > moved:
            failures, moved, since = 0, len(uploader.moved), time.monotonic()
        failures, doubtful = failures + 1, doubtful + (kind == "perhaps")
        if kind == "permanent" or doubtful >= _TRIES:
            current = next((e for e in entries(run) if e.path == entry.path), entry)  # one branch of it may be done
            dataclasses.replace(current, error=reason).write()
            tell("refused", name=entry.path.name, reason=reason)
            failures = doubtful = 0
            continue
        if time.monotonic() - since > patience:
            return
        wait = max(after, min(_LONGEST_WAIT, 2 ** (failures - 1)))
        tell("failing", name=entry.path.name, reason=reason, wait=wait)
        time.sleep(wait)


def main() -> int:
    run = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(OSError):
        os.nice(10)  # the step comes first

    def tell(event: str, **values) -> None:
        print(json.dumps({"event": event, **values}), flush=True)

    try:
        with alone(run, float("inf")), hub_client(TIMEOUT):
            while True:
                drain(run, tell)
                time.sleep(_POLL)
    except Exception as error:  # without a traceback, which could show what is secret
        print(judge(error)[1], file=sys.stderr)
        return 1


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)  # what is half done is done again by the next one


if __name__ == "__main__":
    sys.exit(main())
