"""Access to the Hugging Face Hub: whether a token may write, what an error means, and how long a request may hang."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import huggingface_hub.constants
from huggingface_hub import HfApi
from huggingface_hub.utils._http import default_client_factory  # the one that set_client_factory replaces

from recipe.errors import UserError
from recipe.redaction import redact

_CONNECT = 10.0  # seconds within which the Hub must accept a connection
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"


def check_access(repo: str, private: bool, field: str) -> None:
    """Creates the repository unless it exists. Raises UserError, which names `field`, where the token must not write
    there, and whatever huggingface_hub raises where the Hub cannot be reached."""
    subject = f"{field} {repo}"
    if not huggingface_hub.get_token():
        raise UserError(f"{subject}: there is no token for the Hub; {_LOG_IN}")
    limit_requests(_CONNECT)  # somebody waits for the first step
    try:
        api = HfApi()
        _check_rights(api.whoami(), repo)
        open_repository(api, repo, private)
    except UserError as error:
        raise UserError(f"{subject}: {clean(str(error))}") from None
    except Exception as error:
        if (failure := failure_of(error)).lasting:
            raise UserError(f"{subject}: the Hub answers {failure.reason}; {_LOG_IN}") from None
        raise


def _check_rights(me: dict, repo: str) -> None:
    """Raises UserError where the account or its token, as whoami describes them, may not write to `repo`."""
    namespace = repo.split("/")[0]
    roles = {org["name"].lower(): org.get("roleInOrg") for org in me.get("orgs", [])}
    if namespace.lower() not in (me["name"].lower(), *roles):
        names = ", ".join([me["name"], *(org["name"] for org in me.get("orgs", []))])
        raise UserError(f"the token is {me['name']}'s, who is no member of {namespace}; name a repository of {names}")
    if roles.get(namespace.lower()) in ("read", "no_access"):
        raise UserError(
            f"{me['name']} may only read in {namespace}; ask there for the role write, or name "
            f"{me['name']}/{repo.split('/')[1]}"
        )
    token = me.get("auth", {}).get("accessToken", {})
    fine = token.get("fineGrained", {}).get("scoped")
    allowed = {
        scope["entity"].get("name", "").lower() for scope in fine or [] if "repo.write" in scope.get("permissions", [])
    }
    if token.get("role") == "read" or (fine is not None and not allowed & {namespace.lower(), repo.lower()}):
        raise UserError(f"the token may not write there; {_LOG_IN}")


def open_repository(api: HfApi, repo: str, private: bool) -> None:
    """Creates the repository unless it exists. Raises UserError where it is public and must not be."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise UserError(
            f"{repo} is a public repository, and hub_private_repo wants a private one; make it private in its "
            "settings on the Hub, or name another"
        )


@dataclass(frozen=True)
class Failure:
    """`reason` for the user, without secrets; `lasting` where trying again will not help; `after` seconds, at least,
    until the next attempt."""

    reason: str
    lasting: bool = False
    after: float = 0.0


def failure_of(error: Exception) -> Failure:
    """What an error of `sync` or `check_access` means."""
    response = getattr(error, "response", None)
    if isinstance(error, UserError):
        return Failure(clean(str(error)), lasting=True)
    if response is None:  # no connection, a file that cannot be read, an answer that makes no sense
        first = (str(error).strip().splitlines() or [""])[0]
        return Failure(clean(f"{type(error).__name__}: {first}"))
    status = response.status_code
    reason = clean(f"HTTP {status}: {response.headers.get('X-Error-Message') or response.reason_phrase}")
    expired = status == 403 and response.request.method == "PUT"  # the link to an upload is valid for a while only
    passing = expired or status >= 500 or status in (408, 409, 412, 423, 425, 429)  # conflicts, and rate limits
    return Failure(reason, not passing, _asked(response.headers))


def _asked(headers) -> float:
    """Seconds that the Hub asks to wait: in Retry-After, or with RateLimit: "api";r=0;t=55."""
    after = headers.get("Retry-After", "").strip()
    limit = re.search(r";\s*r=0\s*;\s*t=(\d+)", headers.get("RateLimit", ""))
    return min(float(after) if after.isdigit() else float(limit[1]) if limit else 0.0, 3600.0)


def limit_requests(seconds: float = 0.0) -> None:
    """From now on a request of huggingface_hub fails after `seconds` without a byte (0: HF_HUB_DOWNLOAD_TIMEOUT, or a
    minute), where by itself it would wait for ever."""
    seconds = seconds or float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 60)

    def make():
        client = default_client_factory()
        client.timeout = (_CONNECT, seconds, seconds, seconds)  # to connect, read, write, get a connection
        return client

    huggingface_hub.set_client_factory(make)


def clean(text: str) -> str:
    """`text` in one line without secrets: a token, user:password@ of a URL, the signature in its query."""
    if token := huggingface_hub.get_token():  # which may come from a file, of which redact knows nothing
        text = text.replace(token, "***")
    text = redact(" ".join(text.split()))
    return re.sub(r"(https?://[^\s?]*)\?\S*", r"\1", re.sub(r"//[^/\s@]+@", "//", text))[:300]


def page(repo: str, branch: str = "") -> str:
    """The URL of a repository or of one of its branches."""
    return clean(huggingface_hub.constants.ENDPOINT) + f"/{repo}" + (f"/tree/{branch}" if branch else "")
