"""Exit codes, and the error for mistakes that the user can fix."""

from __future__ import annotations  # so that `check_packages` also runs in the Python 3.9 of macOS

import argparse
import os
import re
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


class UserError(ValueError):
    """A mistake the user can fix. The message names the field or file, the bad value and the way out."""


class Unreachable(UserError):
    """The Hub or a disk does not answer; a restart may help."""


class Permanent(UserError):
    """An error after which an automatic restart is no use: it would meet the same error or, where the run's directory
    was moved, start the run over."""


_PERMISSION = "the owner of the file, or of a directory above it, can permit that with chmod"
_WRONG_PATH = FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError


def is_transient(error: BaseException) -> bool:
    """Whether an error is a failure of a disk or the Hub, which may be over at the next start. An OSError without an
    errno is not: libraries raise it for a file that they cannot read."""
    causes = (cause for cause in (error, error.__cause__) if isinstance(cause, OSError) and cause.errno)
    return isinstance(error, Unreachable) or any(not isinstance(cause, _WRONG_PATH) for cause in causes)


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, but an error is a UserError: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(message)


class ExitCode(IntEnum):
    """Exit codes of every command; those above 2 are from sysexits.h, and 130 is a shell's code for Ctrl-C. 1 is for a
    damaged checkpoint (`recipe.checkpoint`), a run that its replay does not reproduce (`recipe.audit`) and a check that
    fails (`recipe/preflight.py`)."""

    DONE = 0
    USER_ERROR = 2
    NOT_COMPARABLE = 69  # EX_UNAVAILABLE: the run cannot be audited on this machine
    NOT_SAVED = 74  # EX_IOERR: the last checkpoint could not be written
    RUN_AGAIN = 75  # EX_TEMPFAIL: stopped, lost a process or its data, or not all uploaded; the same command continues
    INTERRUPTED = 130  # Ctrl-C with nothing to save, or a second Ctrl-C


def check_packages() -> None:
    """Ends the process if its Python lacks the packages, as one outside make's environment does."""
    if find_spec("accelerate") is None:
        message = f"error: {sys.executable} lacks Accelerate; use .venv/bin/python, which `make train` sets up"
        print(message, file=sys.stderr)
        sys.exit(ExitCode.USER_ERROR)


@contextmanager
def reading(path: Path | str, way_out: str, action: str = "read") -> Generator[None, None, None]:
    """Context: whatever a library raises while it reads `path` becomes a UserError with the path, the reason and the
    way out. Do nothing else in it: any other bug would be reported as an unreadable file."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries raise many kinds
        reason = getattr(error, "strerror", None) or first_line(error).rstrip(":")
        if isinstance(error, KeyError):
            reason = f"no {reason}"
        if isinstance(error, PermissionError) and action == "read":  # the file may be sound, and somebody else's
            way_out = _PERMISSION
        if isinstance(error, UnicodeDecodeError):  # whose position is that in a part of the file
            reason = f"not UTF-8: byte {error.object[error.start]:#x}"
        raise UserError(f"{path} cannot be {action} ({reason}); {way_out}") from error


def writing(path: Path, way_out: str) -> AbstractContextManager[None]:
    """As `reading`, for writing a file or the files of a directory: a full disk's OSError does not name the file."""
    return reading(path, way_out, "written")


def no_safetensors(model: str) -> UserError:
    """The error for a model without a safetensors file."""
    problem = f"{model}: no model.safetensors; pytorch_model.bin, ckpt.pt and the like are pickles, which can run any "
    problem += "code when loaded, so they are not read"
    if os.path.exists(model) and not (Path(model) / "config.json").exists():
        problem += ". Give a directory that transformers' save_pretrained has written, such as a Trainer's checkpoint-N"
        return UserError(f"{problem}; docs/migrating.md converts the checkpoints of nanoGPT and llm.c")
    directory, download = model, ""
    if not os.path.exists(model):
        directory, download = "converted", f"download it (hf download {model} --local-dir converted) and "
    return UserError(
        f"{problem}. If you trust the model, {download}convert it in place, beside its tokenizer, with transformers: "
        f"AutoModelForCausalLM.from_pretrained({directory!r}).save_pretrained({directory!r})"
    )


def in_words(error: Exception) -> str:
    """The message of an error; of an OSError without its number, and with the way out where a permission is missing."""
    if not (isinstance(error, OSError) and error.filename and error.strerror):
        return str(error)
    way_out = f"; {_PERMISSION}" if isinstance(error, PermissionError) else ""
    return f"{error.filename}: {error.strerror}{way_out}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def no_memory_left(error: BaseException) -> str:
    """What PyTorch reports when a device or a CPU has no memory left; empty for other errors. Where another program has
    taken a GPU's memory, CUDA, cuBLAS and NCCL run out of it outside PyTorch's allocator, with errors of their own;
    Inductor wraps those of its trials."""
    pattern = r"can't allocate memory: .*? bytes|^.*(out of memory|CUBLAS_STATUS_ALLOC_FAILED).*?(?=\. GPU|$)"
    match = re.search(pattern, str(error), re.MULTILINE) if isinstance(error, RuntimeError) else None
    return match[0] if match else ""
