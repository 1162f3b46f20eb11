"""Downloads a Hub repository that a field of the configuration names."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # Python 3.10: not the built-in TimeoutError
from pathlib import Path
from typing import TypeVar

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from recipe.utils.errors import Unreachable, UserError, first_line, no_safetensors

HUB_TIMEOUT_S = 5.0  # for the Hub's complete answer to the first request
Answer = TypeVar("Answer")


def within(seconds: float, request: Callable[[], Answer]) -> Answer:
    """Returns or raises what `request()` does, or raises TimeoutError after `seconds`: the libraries' own timeouts
    start again with each byte received."""
    answer: Future[Answer] = Future()

    def work():
        try:
            answer.set_result(request())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()  # a pool's thread would delay the exit of the process
    try:
        return answer.result(seconds)
    except FutureTimeout:
        raise TimeoutError(f"no complete answer in {seconds:g} s") from None


def local_copy(name: str, field: str, patterns: list[str], required: str, *, weights: bool = False) -> str:
    """The directory `name`, or the local cache of the Hub model of that name, downloaded if necessary.

    Asks the Hub once, with a short timeout: offline, the libraries' own retries take most of a minute. `patterns` match
    the files to download; `required` names the files that a directory must hold, for the error message. With `weights`,
    a model on the Hub must have some in safetensors. Raises UserError; Unreachable if the Hub does not answer.
    """
    if Path(name).exists():
        return name
    problem, way_out = f"{field} {name} is not a directory here, and", f"give a directory that holds {required}"
    try:
        info = within(HUB_TIMEOUT_S, lambda: HfApi().model_info(name, timeout=HUB_TIMEOUT_S))
        if weights and not any(file.rfilename.endswith(".safetensors") for file in info.siblings or []):
            raise no_safetensors(name)
        return snapshot_download(name, allow_patterns=patterns)
    except UserError:
        raise
    except HFValidationError:
        raise UserError(f"{problem} cannot be a name on the Hub; {way_out}") from None
    except RepositoryNotFoundError as error:
        raise UserError(f"{problem} the Hub does not show you such a model ({first_line(error)}); {way_out}") from None
    except Exception as error:  # offline: from httpx or httpx2, depending on huggingface_hub's version
        try:
            return snapshot_download(name, allow_patterns=patterns, local_files_only=True)
        except LocalEntryNotFoundError:
            raise Unreachable(
                f"{problem} the Hub cannot be reached ({first_line(error)}). Is this machine offline? Connect it, or "
                f"{way_out}"
            ) from None
