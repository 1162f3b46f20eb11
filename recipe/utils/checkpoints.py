"""Reads a run's directory: its checkpoints, their manifests and metrics.jsonl; and finds the newest run."""

import json
import re
from contextlib import suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG

from recipe.utils.errors import UserError, reading
from recipe.utils.files import sha256_of
from recipe.utils.schema import COUNT, check

_NAME = re.compile(r"step_(\d{8,})")


def checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first, unverified."""
    for _ in range(3):  # a listing that races with a commit and a deletion can be empty
        if paths := [path for path in run_dir.glob("step_*") if _NAME.fullmatch(path.name)]:
            break
    return sorted(paths, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("step_"))


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run with the newest checkpoint or, if no run has one, the run that logged last; prints its name. Raises
    UserError if there is no run."""
    # Directories do not show this by their own times: evaluations write results into runs and checkpoints.
    manifests = [path / "manifest.json" for run in runs.glob("[!.]*") for path in checkpoints(run)]
    candidates = [path for path in manifests if path.is_file()] or [*runs.glob("[!.]*/metrics.jsonl")]
    if not candidates:
        raise UserError(f"no run given, and none under {runs}/: run `make train`, or name one: runs/NAME")
    run = runs / max(candidates, key=lambda path: path.stat().st_mtime).relative_to(runs).parts[0]
    print(f"no run given: the newest is {run}", flush=True)
    return run


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics.jsonl, one a line; empty if there is no file. A line that is not a step's record, such
    as the unfinished last line of a killed run, is skipped. Raises UserError if the file cannot be read."""
    with reading(path, "make it readable, or move it away; the run then continues without the earlier metrics"):
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def val_losses(run: Path) -> dict[int, float]:
    """{step: validation loss} from a run's metrics.jsonl, if measured and finite. Raises UserError."""
    records = read_metrics(run / "metrics.jsonl")
    return {record["step"]: record["val_loss"] for record in records if record.get("val_loss") is not None}


def manifest_of(checkpoint: Path) -> dict[str, tuple[int, str]]:
    """{file name: (bytes, SHA-256)} from a checkpoint's manifest.json. Raises UserError if it is missing or damaged, or
    names a file outside the checkpoint."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        check(manifest, {"files": {...: {"bytes": COUNT, "sha256": str}}})
    except (FileNotFoundError, ValueError, RecursionError) as error:
        raise UserError(f"manifest.json is missing or damaged ({type(error).__name__})") from None
    files = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    for name in files:
        if name in ("", "..") or Path(name).name != name or not name.isprintable():
            raise UserError(f"manifest.json names {name!r}, which is not a file of this directory")
    return files


def problem_of(file: Path, expected: tuple[int, str] | None = None) -> str:
    """What is wrong with a file of a checkpoint, such as "is missing"; empty if nothing is. `expected` is its
    (bytes, SHA-256), if known. Raises OSError if the file exists and cannot be read."""
    try:
        status = file.lstat()
        if not S_ISREG(status.st_mode):
            return "is a link" if S_ISLNK(status.st_mode) else "is not a regular file"
        if expected and status.st_size != expected[0]:
            return f"has {status.st_size} bytes instead of {expected[0]}"
        if expected and sha256_of(file) != expected[1]:
            return "does not match its checksum in manifest.json"
    except (FileNotFoundError, NotADirectoryError):  # perhaps deleted while it was being read
        return "is missing"
    return ""
