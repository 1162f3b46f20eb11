"""Hides secrets and the home directory in text that leaves the process: messages, logs, and the files of a run."""

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
_SHORTEST = 8  # characters; a shorter value may be a number or a word, which would then be hidden everywhere
_SECRET_NAME = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?(_|$)", re.IGNORECASE)
_NOT_THE_SECRET = re.compile(r"_(PATH|FILE|DIR)$", re.IGNORECASE)  # only the place of one

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
    # Hugging Face's. Weights & Biases' looks like a commit's hash; only the word before it tells.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), HIDDEN),
    (re.compile(r"(key['\"]?\s*[:=]\s*['\"]?)[0-9a-f]{40}\b", re.IGNORECASE), rf"\1{HIDDEN}"),
]


def looks_secret(name: str) -> bool:
    """Whether a variable or a flag holds a secret, judged by its name."""
    return bool(_SECRET_NAME.search(name)) and not _NOT_THE_SECRET.search(name)


def redact(text: str) -> str:
    """`text` without its secrets, and with ~ for the home directory at the beginning of a path.

    Secrets are the values of environment variables whose names look secret, the user and password of a URL, parameters
    of a URL whose names look secret, and tokens known by their shape. Redacting twice changes nothing more.
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
    """A copy of `values` with every string redacted, also in nested lists and dicts; keys stay as they are."""

    def within(value):
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, dict):
            return redacted(value)
        return [within(v) for v in value] if isinstance(value, (list, tuple)) else value

    return {key: within(value) for key, value in values.items()}


def keep_secrets() -> None:
    """From now on redacts what this process logs, libraries included, and the tracebacks that end it or a thread."""
    make = logging.getLogRecordFactory()

    def record(*args, **kwargs) -> logging.LogRecord:
        made = make(*args, **kwargs)
        with suppress(TypeError, ValueError):  # a message that does not fit its arguments; logging reports that
            made.msg, made.args = redact(made.getMessage()), ()
        return made

    logging.setLogRecordFactory(record)
    sys.excepthook = lambda *error: sys.stderr.write(redact("".join(traceback.format_exception(*error))))
    threading.excepthook = lambda of: sys.stderr.write(
        redact("".join(traceback.format_exception(of.exc_type, of.exc_value, of.exc_traceback)))
    )


def _secret_values() -> list[str]:
    """The environment's secrets, longest first, each also in its form in a URL and in JSON."""
    values = [v for k, v in os.environ.items() if len(v) >= _SHORTEST and looks_secret(k)]
    forms = {form for v in values for form in (v, quote(v, safe=""), json.dumps(v)[1:-1])}
    return sorted(forms, key=len, reverse=True)
