"""Hides secrets and the home directory in text that leaves the process: messages, logs, and what a run writes down."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import traceback
from contextlib import suppress
from urllib.parse import quote

HIDDEN = "***"
_SHORTEST = 8  # characters; what is shorter is rather a number or a word, and would be hidden everywhere
_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)
_NOT_THE_SECRET = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)  # where it lies

_SHAPES = [
    # https://user:secret@host -> https://host
    (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/?#'\"]*@", re.IGNORECASE), r"\1"),
    # ?token=..., &X-Amz-Signature=...
    (
        re.compile(
            r"([?&;][\w.-]*(?:token|key|secret|passw|credential|signature|\bsig)[\w.-]*=)[^&\s#'\"]+", re.IGNORECASE
        ),
        rf"\1{HIDDEN}",
    ),
    (re.compile(r"(\bBearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    # Hugging Face's; wandb's looks like a commit, and is known by what stands before it
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"(key['\"]?\s*[:=]\s*['\"]?)[0-9a-f]{40}\b", re.IGNORECASE), rf"\1{HIDDEN}"),
]


def looks_secret(name: str) -> bool:
    """Whether a variable or a flag of this name holds a secret, going by the name."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_THE_SECRET.search(name)


def redact(text: str) -> str:
    """`text` without what is secret in it, and with ~ for the home directory at the beginning of a path.

    Secret are the values of environment variables with such names, user and password of a URL, parameters of a URL with
    such names, and tokens known by their shape. To redact twice is to redact once.
    """
    for value in _secret_values():
        text = text.replace(value, HIDDEN)
    for pattern, instead in _SHAPES:
        text = pattern.sub(instead, text)
    home = os.path.expanduser("~").rstrip("/")
    if home and home != "~":
        text = re.sub(rf"(?<![\w./~-]){re.escape(home)}(?![\w.-])", "~", text)
    return text


def redacted(values: dict) -> dict:
    """The same dict with every string redacted, in lists and dicts within it too; keys stay."""

    def within(value):
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, dict):
            return redacted(value)
        return [within(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {key: within(value) for key, value in values.items()}


def keep_secrets() -> None:
    """From here on redacts what this process logs, and the tracebacks that end it or a thread of it."""
    make = logging.getLogRecordFactory()

    def record(*args, **kwargs) -> logging.LogRecord:
        made = make(*args, **kwargs)
        with suppress(TypeError, ValueError):  # of a message that does not fit its arguments; logging reports that
            made.msg, made.args = redact(made.getMessage()), ()
        return made

    logging.setLogRecordFactory(record)
    sys.excepthook = lambda *error: sys.stderr.write(redact("".join(traceback.format_exception(*error))))
    threading.excepthook = lambda of: sys.stderr.write(
        redact("".join(traceback.format_exception(of.exc_type, of.exc_value, of.exc_traceback)))
    )


def _secret_values() -> list[str]:
    """Longest first, each also as it stands in a URL and in JSON."""
    values = [v for k, v in os.environ.items() if len(v) >= _SHORTEST and looks_secret(k)]
    forms = {form for v in values for form in (v, quote(v, safe=""), json.dumps(v)[1:-1])}
    return sorted(forms, key=len, reverse=True)
