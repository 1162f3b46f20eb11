"""A repository of the Hub, by the name that a field of the configuration gives, as a directory on this disk."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from recipe.utils.errors import Unreachable, UserError, first_line

_TIMEOUT = 5.0  # seconds for the Hub's first answer


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
        HfApi().model_info(name, timeout=_TIMEOUT)
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
