"""Writing files so that a power failure, a full disk or a link that someone has planted cannot do harm."""

import hashlib
import os
from pathlib import Path


def write_file(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Writes a new file and, with `flush`, waits until it is on the disk. Raises OSError, also where the name exists,
    even as a link."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        if flush:
            os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, *, flush: bool = True) -> None:
    """Replaces a file, or a link, as a whole: a reader finds the old content or the new, with `flush` even after a
    power failure. Raises OSError."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or a link
    write_file(temporary, data, flush=flush)
    temporary.replace(path)
    if flush:
        fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk: what was created, renamed or deleted there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
