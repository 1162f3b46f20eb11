"""Access to the Hugging Face Hub: write permission, the meaning of errors, request timeouts."""

import logging
import os
import re

import huggingface_hub.constants
from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils._http import default_client_factory  # the one that set_client_factory replaces

from recipe.utils.download import within
from recipe.utils.errors import UserError, is_transient
from recipe.utils.redaction import redact

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S = 10.0, 60.0  # the second also limits how long a transfer may stall
_TRANSIENT = (408, 409, 412, 429)  # 4xx statuses after which a retry may succeed
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"
_LICENSES = "set hub_license (of a push: --license) to one listed at huggingface.co/docs/hub/repositories-licenses"


def check_access(repo: str, private: bool, license: str, field: str) -> None:
    """Creates the repository unless it exists. Raises UserError, naming `field`, if the token may not write there or
    the Hub rejects `license` in a model card (empty: the card will have none). If the Hub is unreachable or busy, this
    only warns, since an upload tries again."""
    if not (token := huggingface_hub.get_token()):
        raise UserError(f"{field} {repo}: there is no token for the Hub; {_LOG_IN}")
    if not token.isascii():
        raise UserError(f"{field} {repo}: the token has a character that no token has; {_LOG_IN}")
    limit_requests()
    try:
        within(REQUEST_TIMEOUT_S, lambda: open_repository(HfApi(), repo, private))
        if license:
            ModelCard(f"---\n{ModelCardData(license=license).to_yaml()}\n---\n").validate()
    except Exception as error:
        if is_permanent(error):
            raise UserError(f"{field} {repo}: {reason(error)}") from None
        endpoint = redact(huggingface_hub.constants.ENDPOINT)
        logger.warning("upload     %s does not answer now (%s); trying again later", endpoint, reason(error))


def open_repository(api: HfApi, repo: str, private: bool) -> None:
    """Creates the repository unless it exists, and checks the token. Raises UserError if it is not `private`."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    api.auth_check(repo, write=True)
    if private and not api.repo_info(repo).private:
        raise UserError(
            f"{repo} is public, but hub_private_repo asks for a private repository; make it private in its settings on "
            "the Hub, or name another"
        )


def is_permanent(error: Exception) -> bool:
    """Whether a retry cannot help: the user made a mistake, or the Hub refuses the request."""
    if status := _status(error)[0]:
        return 400 <= status < 500 and status not in _TRANSIENT
    if isinstance(error, UserError):
        return not is_transient(error)  # a disk that failed for a moment
    return isinstance(error, HFValidationError) or _is_bad_card(error)


def _status(error: Exception) -> tuple[int, str]:
    """The HTTP status and message of an error; 0 if there was no response."""
    if isinstance(error, HfHubHTTPError):
        response = error.response
        return response.status_code, response.headers.get("X-Error-Message") or response.reason_phrase
    # hf_xet raises ConnectionError for HTTP errors too, with the status in its message.
    match = re.search(r"HTTP status \w+ error \((\d{3}) ([^)]*)\)(.*)", str(error))
    return (int(match[1]), match[2] + match[3]) if match else (0, "")


def _is_bad_card(error: Exception) -> bool:
    """Whether `error` is huggingface_hub's for a model card that the Hub rejects."""
    return isinstance(error, ValueError) and isinstance(error.__context__, HfHubHTTPError)


def reason(error: Exception) -> str:
    """An error in one line for the user, without secrets."""
    if isinstance(error, UserError):
        return str(error)
    (status, message), way_out = _status(error), ""
    if status:
        text = f"HTTP {status}: {message}"
        if status in (401, 404) or (status == 403 and "limit" not in message):  # of storage
            way_out = f"; {_LOG_IN}"
    elif _is_bad_card(error):
        text = f"the Hub rejects the model card ({error}); {_LICENSES}"
    else:  # no connection, an unreadable file, an invalid response
        text = f"{type(error).__name__}: {error}"
    return redact(" ".join(text.split()))[:400] + way_out


def limit_requests() -> None:
    """Makes requests fail after HF_HUB_DOWNLOAD_TIMEOUT seconds (60) without a byte; by default they wait forever."""
    seconds = float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or REQUEST_TIMEOUT_S)

    def make_client():
        client = default_client_factory()
        client.timeout = (_CONNECT_TIMEOUT_S, seconds, seconds, seconds)  # to connect, read, write, get a connection
        return client

    huggingface_hub.set_client_factory(make_client)


def page(repo: str, branch: str = "") -> str:
    """The URL of a repository or of one of its branches."""
    return redact(huggingface_hub.constants.ENDPOINT) + f"/{repo}" + (f"/tree/{branch}" if branch else "")
