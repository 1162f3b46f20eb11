"""Hides secrets, the home directory and control characters in what a run writes and prints: configurations, URLs,
messages, model cards."""

import os
import re
from typing import Any
from urllib.parse import quote

HIDDEN = "***"
_MIN_SECRET_LENGTH = 8  # a shorter value may be an ordinary word or number, which would then be hidden everywhere
# Names of environment variables that hold a secret, and not the path of one.
_SECRET_NAME = re.compile(
    r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(?=_|$)(?!.*_(PATH|FILE|DIR)$)", re.IGNORECASE
)
_PATTERNS = [
    # https://user:secret@host -> https://host
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"]*@", re.IGNORECASE), r"\1"),
    # ?token=..., &X-Amz-Signature=...
    (re.compile(r"([?&][\w.-]*(?:token|key|secret|passw|sig)[\w.-]*=)[^&\s#'\"]+", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),  # Hugging Face's tokens
]
_CONTROL = re.compile(r"(?!\r\n)[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line breaks


def redact(text: str) -> str:
    """`text` without its secrets (values of environment variables whose names look secret, the user and password of a
    URL, parameters of a URL whose names look secret, the Hub's tokens), with ~ for the home directory, and with control
    characters, by which a name in somebody else's file could rewrite a terminal's lines, as \\x1b."""
    values = [v for k, v in os.environ.items() if len(v) >= _MIN_SECRET_LENGTH and _SECRET_NAME.search(k)]
    for secret in sorted({secret for v in values for secret in (v, quote(v, safe=""))}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return home_as_tilde(_CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text))


def home_as_tilde(text: str) -> str:
    """`text` with ~ for the home directory."""
    home = os.path.expanduser("~").rstrip("/")
    if home and home != "~":
        text = re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def redacted(value: Any) -> Any:
    """A copy of `value`, as parsed JSON, with every string in it redacted but for the keys of dicts."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redacted(item) for key, item in value.items()}
    return [redacted(item) for item in value] if isinstance(value, list | tuple) else value
