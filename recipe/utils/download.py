"""A repository of the Hub, by the name that a field of the configuration gives, as a directory on this disk."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoResult  # its name in Python 3.10, where it is not TimeoutError
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from recipe.utils.errors import Unreachable, UserError, first_line

HUB_TIMEOUT_S = 5.0  # seconds for the Hub's first answer
Answer = TypeVar("Answer")


def within(seconds: float, ask: Callable[[], Answer]) -> Answer:
    """What `ask` returns or raises; TimeoutError after `seconds`: the libraries' own time-outs begin again at each
    byte."""
    answer: Future[Answer] = Future()

    def work():
        try:
            answer.set_result(ask())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # not a pool's, for which the process would wait at its end
    try:
        return answer.result(seconds)
    except NoResult:
        raise TimeoutError(f"no complete answer in {seconds:g} s") from None


def on_this_disk(name: str, field: str, patterns: list[str], needed: str) -> str:
    """The directory `name`, or the Hub's model of that name in its local cache, downloaded if need be.

    Asks the Hub once, with a short timeout: the libraries' own retries take most of a minute without a network.
    `patterns` are of the files to download, `needed` names those that a directory must hold. Raises UserError;
    Unreachable where the Hub does not answer.
    """
    if Path(name).exists():
        return name
    problem = f"{field} {name} is not a directory here, and"
    try:
        within(HUB_TIMEOUT_S, lambda: HfApi().model_info(name, timeout=HUB_TIMEOUT_S))
        return snapshot_download(name, allow_patterns=patterns)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise UserError(f"{problem} there is no model of that name on the Hub ({first_line(error)})") from None
    except Exception as error:  # without a network: of httpx or httpx2, going by huggingface_hub's version
        try:
            return snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        except LocalEntryNotFoundError:
            raise Unreachable(
                f"{problem} the Hub cannot be reached ({first_line(error)}). Is this machine offline? Connect it, or "
                f"give a directory that holds {needed}"
            ) from None
