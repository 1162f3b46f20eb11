"""How a program ends: the exit codes, and the error whose cause the user can fix."""

import argparse
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NoReturn


class UserError(ValueError):
    """A mistake the user can fix. The message names the field or file, the bad value and the way out."""


class Unreachable(UserError):
    """The Hub does not answer, so it is unknown what a name stands for there."""


class ArgumentParser(argparse.ArgumentParser):
    """argparse's, whose errors are UserErrors: one line instead of the usage and a line."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(message)


class ExitCode(IntEnum):
    """Exit codes of every command; those above 2 are sysexits.h's, and 130 is a shell's for Ctrl-C. `recipe.checkpoint`
    also returns 1, for a damaged checkpoint, and `recipe.audit`, for a run that is not what its replay is."""

    DONE = 0
    USER_ERROR = 2
    NOT_COMPARABLE = 69  # EX_UNAVAILABLE: what a run computed cannot be audited here
    NOT_SAVED = 74  # EX_IOERR: the last checkpoint could not be written
    RUN_AGAIN = 75  # EX_TEMPFAIL: stopped, lost a process, or not all is uploaded; the same command continues
    LEFT_AT_ONCE = 130  # Ctrl-C where nothing is to be saved, or a second one


@contextmanager
def reading(path: Path | str, way_out: str, done: str = "read") -> Generator[None, None, None]:
    """Context in which a file, or what has another name, is read, and nothing else is done: whatever a library raises
    there becomes a UserError that names it and the way out."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds
        reason = getattr(error, "strerror", None) or first_line(error).rstrip(":")
        what = f"no {reason}" if isinstance(error, KeyError) else reason
        raise UserError(f"{path} cannot be {done} ({what}); {way_out}") from error


def writing(path: Path, way_out: str) -> AbstractContextManager[None]:
    """As `reading`, for writing a file or the files of a directory: on a full disk, write() names no file."""
    return reading(path, way_out, "written")


def no_safetensors(model: str) -> UserError:
    """The error for a model without a safetensors file."""
    return UserError(
        f"{model}: no model.safetensors; pytorch_model.bin and the like are pickles, which can run any code when they "
        "are loaded, and are not read. If you trust it, convert it with transformers: "
        f"AutoModelForCausalLM.from_pretrained({model!r}).save_pretrained('converted')"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
