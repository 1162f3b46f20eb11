"""Access to the Hugging Face Hub: permission to write, what an error means, time limits of requests."""

from __future__ import annotations

import logging
import os
import re

import huggingface_hub.constants
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import parse_ratelimit_headers
from huggingface_hub.utils._http import default_client_factory  # the one that set_client_factory replaces

from recipe.errors import UserError
from recipe.redaction import redact

logger = logging.getLogger(__name__)

_CONNECT, _SILENCE = 10.0, 60.0  # seconds within which the Hub must accept a connection, and send or take a byte
_PASSING = (408, 409, 412, 429)  # of the statuses from 400 to 499, those that another attempt may not meet
# hf-xet raises a ConnectionError for every status; only its text has the one by which the Hub refuses a write token.
_XET_REFUSAL = re.compile(r"client error \((\d{3}) ([^)]*)\).*/xet-write-token/")
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"


def check_access(repo: str, private: bool, field: str) -> None:
    """Creates the repository unless it exists. Raises UserError, which names `field`, where the token must not write
    there. A Hub that cannot be reached, or is busy, gets a warning: an upload tries again."""
    if not huggingface_hub.get_token():
        raise UserError(f"{field} {repo}: there is no token for the Hub; {_LOG_IN}")
    limit_requests()
    try:
        open_repository(HfApi(), repo, private)
    except UserError as error:
        raise UserError(f"{field} {repo}: {error}") from None
    except Exception as error:
        if is_lasting(error):
            raise UserError(f"{field} {repo}: the Hub answers {reason(error)}; {_LOG_IN}") from None
        where = redact(huggingface_hub.constants.ENDPOINT)
        logger.warning("upload     %s cannot be used now (%s); trying again later", where, reason(error))


def open_repository(api: HfApi, repo: str, private: bool) -> None:
    """Creates the repository unless it exists, and asks the Hub whether the token may write there. Raises UserError
    where it is public and must not be."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    api.auth_check(repo, write=True)
    if private and not api.repo_info(repo).private:
        raise UserError(
            f"{repo} is a public repository, and hub_private_repo wants a private one; make it private in its "
            "settings on the Hub, or name another"
        )


def is_lasting(error: Exception) -> bool:
    """Whether trying again will not help: a mistake of the user's, or a refusal by the Hub."""
    if isinstance(error, UserError):
        return True
    status, _ = _answer(error)
    # PUT goes to the storage, by a link that expires after a while.
    to_storage = isinstance(error, HfHubHTTPError) and error.response.request.method == "PUT"
    return 400 <= status < 500 and status not in _PASSING and not to_storage


def retry_after(error: Exception) -> float:
    """The seconds that the Hub asks its clients to wait, 0 where it names none."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    limit = parse_ratelimit_headers(headers)
    if limit is not None and limit.remaining == 0:
        return limit.reset_in_seconds + 1.0
    wait = headers.get("Retry-After", "")
    return float(wait) if wait.isdigit() else 0.0


def reason(error: Exception) -> str:
    """An error in one line for the user, without secrets."""
    if isinstance(error, UserError):
        return str(error)
    status, meaning = _answer(error)
    # Without a status: no connection, a file that cannot be read, an answer that makes no sense.
    text = f"HTTP {status}: {meaning}" if status else f"{type(error).__name__}: {error}"
    return redact(" ".join(text.split()))[:300]


def _answer(error: Exception) -> tuple[int, str]:
    """The status of the Hub's answer and what it means, 0 where there was none."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code, error.response.headers.get("X-Error-Message") or error.response.reason_phrase
    refusal = _XET_REFUSAL.search(str(error))
    return (int(refusal[1]), f"{refusal[2]}, asked for a token to write with") if refusal else (0, "")


def limit_requests() -> None:
    """From now on a request of huggingface_hub fails after HF_HUB_DOWNLOAD_TIMEOUT seconds without a byte, or after a
    minute; by default it would wait forever."""
    seconds = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or _SILENCE)

    def make():
        client = default_client_factory()
        client.timeout = (_CONNECT, seconds, seconds, seconds)  # to connect, read, write, get a connection
        return client

    huggingface_hub.set_client_factory(make)


def page(repo: str, branch: str = "") -> str:
    """The URL of a repository or of one of its branches."""
    return redact(huggingface_hub.constants.ENDPOINT) + f"/{repo}" + (f"/tree/{branch}" if branch else "")
