"""Fake secrets for tests, and a search for them in everything that a program prints and writes."""

import os
from collections.abc import Iterable
from pathlib import Path

CANARY = "canary5Ecret0123456789"
HUB_TOKEN = "hf_" + "Canary0123456789" * 2
WANDB_KEY = "c0ffee" * 6 + "c0de"
# The environment of a program. CANARY is not in it: only its place, such as a password in a URL, makes it a secret.
ENVIRONMENT = {
    "HF_TOKEN": HUB_TOKEN,
    "WANDB_API_KEY": WANDB_KEY,
    "WANDB_MODE": "offline",
    "MY_PASSWORD": "Passwort-" + HUB_TOKEN[::-1],
    "AWS_SECRET_ACCESS_KEY": "Zugang/" + WANDB_KEY[::-1],
}
EVERYWHERE = (CANARY, *(value for value in ENVIRONMENT.values() if len(value) > 8))
URL = f"http://user:{CANARY}@127.0.0.1:9/text.jsonl?token={CANARY}"


def search(directory: Path, texts: Iterable[str]) -> list[str]:
    """The lines of `texts` that hold a secret, and the paths of files whose name or content does."""
    secrets = [secret.encode() for secret in EVERYWHERE]
    leaks = [line for text in texts for line in text.splitlines() if any(s in line.encode() for s in secrets)]
    for path in sorted(directory.rglob("*")):
        content = os.fsencode(path.relative_to(directory)) + b"\n" + (path.read_bytes() if path.is_file() else b"")
        if any(secret in content for secret in secrets):
            leaks.append(str(path))
    return leaks
