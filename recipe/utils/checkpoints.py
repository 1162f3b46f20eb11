"""A run's directory: its checkpoints and their manifests, its log, and which run is the newest."""

import errno
import json
import re
from contextlib import suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG

from recipe.utils.errors import UserError, reading
from recipe.utils.files import sha256_of

_NAME = re.compile(r"step_(\d{8,})")


def checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first, unverified."""
    for _ in range(3):  # a directory that is read while a run commits one and deletes another can look empty
        if paths := [path for path in run_dir.glob("step_*") if _NAME.fullmatch(path.name)]:
            break
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run whose checkpoint was committed last, else the one that logged last; prints it. Raises UserError."""
    # By files that nobody writes again: results are written into runs and checkpoints.
    manifests = [path / "manifest.json" for run in runs.glob("*") for path in checkpoints(run)[-1:]]
    written = [path for path in manifests if path.is_file()] or [*runs.glob("*/metrics.jsonl")]
    if not written:
        raise UserError(f"no run given, and none under {runs}/: run `make train`, or name one: runs/NAME")
    run = runs / max(written, key=lambda path: path.stat().st_mtime).relative_to(runs).parts[0]
    print(f"no run given: the newest is {run}", flush=True)
    return run


def read_metrics(path: Path) -> list[dict]:
    """The lines of a metrics.jsonl; none if there is no file. Anything that is not the line of a step, such as an
    unfinished line of a killed run, is skipped. Raises UserError if the file cannot be read."""
    with reading(path, "make it readable, or move it away: the run then goes on without its lines"):
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "Not a regular file")  # opening a FIFO would wait for ever
        texts = path.read_text(errors="replace").splitlines() if path.exists() else []
    lines = []
    for text in texts:
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
    return lines


def manifest_of(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """{file: (bytes, SHA-256)} by a checkpoint's manifest.json. Raises UserError where that is damaged, or names a file
    outside its directory."""
    try:
        listed = json.loads((checkpoint / "manifest.json").read_bytes())["files"]
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"manifest.json is missing or damaged ({type(error).__name__})") from None
    if outside := [name for name in files if name in ("", "..") or Path(name).name != name]:
        raise UserError(f"manifest.json names {outside[0]!r}, which is not a file of this directory")
    return files


def problem_of(file: Path, written: tuple[int, str] | None = None) -> str:
    """What is wrong with a file of a checkpoint; `written`: its (bytes, SHA-256), where they are known. Raises OSError
    where it is there and cannot be read."""
    try:
        status = file.lstat()
        if not S_ISREG(status.st_mode):
            return "is a link" if S_ISLNK(status.st_mode) else "is not a regular file"
        if written and status.st_size != written[0]:
            return f"has {status.st_size} bytes, {written[0]} were written"
        if written and sha256_of(file) != written[1]:
            return "does not have the checksum that it was written with"
    except (FileNotFoundError, NotADirectoryError):  # perhaps deleted while it was being read
        return "is missing"
    return ""
