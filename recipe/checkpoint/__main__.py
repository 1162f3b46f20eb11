"""Lists or verifies the checkpoints of a run.

python -m recipe.checkpoint list runs/shakespeare
python -m recipe.checkpoint verify runs/shakespeare/step_00000500
"""

import argparse
import os
import sys
import time
from pathlib import Path

from recipe.checkpoint.format import checkpoints, verify
from recipe.errors import ExitCode


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0 all is whole, 1 something is damaged, 2 no checkpoint is there."""
    parser = argparse.ArgumentParser(prog="python -m recipe.checkpoint", description="Checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    verifying = commands.add_parser("verify", help="read every byte and compare it with the checksums")
    verifying.add_argument("path", type=Path, metavar="DIR", help="a checkpoint, or a run for all of its checkpoints")
    listing = commands.add_parser("list", help="a run's checkpoints, oldest first, verified")
    listing.add_argument("path", type=Path, metavar="RUN")
    args = parser.parse_args(argv)
    found = checkpoints(args.path)
    if args.command == "verify" and (not found or (args.path / "manifest.json").exists()):
        found = [args.path]
    if not found or not args.path.is_dir():
        print(f"error: {args.path}: no checkpoint there; name a run, such as runs/shakespeare", file=sys.stderr)
        return ExitCode.USER_ERROR
    damaged = [_report(path, args.command) for path in found]
    return 1 if any(damaged) else ExitCode.DONE


def _report(path: Path, command: str) -> bool:
    """Prints the state of a checkpoint; returns whether it is damaged."""
    try:
        problems = verify(path)
        files = [file.stat() for file in path.iterdir()]
        modified = time.strftime("%Y-%m-%d %H:%M", time.localtime(path.stat().st_mtime))
    except OSError as error:
        problems, files, modified = [f"cannot be read: {error}"], [], ""
    if not os.path.lexists(path):
        print(f"{path}  deleted meanwhile, by the run that trains there")
        return False
    size = sum(file.st_size for file in files) / 1e6
    if command == "list":
        print(f"{path}  {size:,.1f} MB  {modified}  {'DAMAGED: ' + problems[0] if problems else 'whole'}")
    elif problems:
        print("\n".join(f"{path}: {problem}" for problem in problems))
    else:
        print(f"{path}: whole, {len(files)} files, {size:,.1f} MB")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
