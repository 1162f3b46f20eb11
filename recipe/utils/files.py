"""Writes files so that a power failure, a full disk or a planted link does no harm."""

import errno
import hashlib
import os
import threading
from itertools import count
from pathlib import Path

from recipe.utils.errors import UserError


def replace_file(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Replaces a file or a link atomically; with `flush`, the new file also survives a power failure. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # left by a killed process, or a planted link
    with temporary.open("xb") as file:
        file.write(data)
    if flush:
        fsync(temporary)
    temporary.replace(path)
    if flush:
        fsync(path.parent)


def fsync(path: Path) -> None:
    """Flushes a file to disk or, for a directory, its entries: what was created, renamed or deleted there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without it for directories: VirtualBox's, older kernels' CIFS
            raise
    finally:
        os.close(descriptor)


def unused_path(path: Path, suffix: str = "") -> Path:
    """The first of `path` followed by 1, 2, ... and the suffix that does not exist, not even as a broken link."""
    paths = (path.with_name(f"{path.name}{number}{suffix}") for number in count(1))
    return next(unused for unused in paths if not os.path.lexists(unused))


def nearest_directory(path: Path) -> Path:
    """The directory `path`, or its nearest parent that exists."""
    path = path.absolute()  # without access, is_dir of a Path raises an error
    return next(directory for directory in (path, *path.parents) if os.path.isdir(directory))


def sha256_of(path: Path, stop: threading.Event | None = None) -> str:
    """The SHA-256 of a file, as hexadecimal digits. Raises UserError if `stop` is set meanwhile."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            if stop and stop.is_set():
                raise UserError(f"{path} was not read to its end, since the run stops")
            digest.update(block)
    return digest.hexdigest()
