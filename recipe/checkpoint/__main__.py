"""Lists and verifies the checkpoints of a run: reads every byte, and compares the checksums.

python -m recipe.checkpoint runs/shakespeare
"""

import os
import sys
import time
from pathlib import Path

from recipe.checkpoint.format import checkpoints, verify
from recipe.engine.launch import fail
from recipe.utils.checkpoints import newest_run
from recipe.utils.errors import ArgumentParser, ExitCode, UserError


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit code (0: all intact, 1: some damaged, 2: no checkpoints)."""
    parser = ArgumentParser(prog="python -m recipe.checkpoint", description=__doc__.partition("\n")[0])
    path_help = "a run, for all of its checkpoints, or one checkpoint (default: the newest run)"
    parser.add_argument("path", type=Path, nargs="?", metavar="DIR", help=path_help)
    try:
        path = parser.parse_args(argv).path or newest_run()
        paths = [path] if (path / "manifest.json").exists() else checkpoints(path)
        if not paths:
            raise UserError(f"{path}: no checkpoint there; name a run, such as runs/shakespeare")
        damaged_count = sum(_report(path) for path in paths)
    except (UserError, OSError) as error:  # OSError: the output is a full disk, or a pipe that was closed
        return fail(error)
    return 1 if damaged_count else ExitCode.DONE


def _report(path: Path) -> bool:
    """Prints the state of a checkpoint; returns whether it is damaged."""
    try:
        problems = verify(path)
        files = [file.stat() for file in path.iterdir()]
        size = sum(file.st_size for file in files) / 1e6
        saved_at = min((file.st_mtime for file in files), default=0)  # an evaluation may have added its results
        modified = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved_at))
    except OSError as error:
        problems, size, modified = [f"cannot be read: {error}"], 0, ""
    if not os.path.lexists(path):
        print(f"{path}  deleted meanwhile by the run that is training there")
        return False
    state = f"DAMAGED: {'; '.join(problems)}" if problems else "intact"
    print(f"{path}  {size:,.1f} MB  {modified}  {state}")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
