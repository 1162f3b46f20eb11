"""`python -m recipe.export --run RUN --out DIR`: a run's latest checkpoint as a clean model directory;
`python -m recipe.export push RUN`: what a run has queued for the Hub, or its latest checkpoint, uploaded."""

import argparse
import dataclasses
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import huggingface_hub

from recipe import outbox, upload
from recipe.checkpoint import checkpoints, model_only, newest_valid, step_of
from recipe.config import UserError, check_repo_name
from recipe.push import PATIENCE, check_push, describe, names, push_command


def export(run: Path, out: Path) -> Path:
    """Copies the model's files of the newest whole checkpoint to `out`, which must not exist; returns the checkpoint.

    `run` may also be one checkpoint's own directory. The copy is made under another name and renamed.
    """
    if out.exists():
        raise UserError(f"--out {out} exists; name another directory, or delete it")
    checkpoint = run if (run / "trainer_state.json").is_file() else newest_valid(run)
    if checkpoint is None:
        raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for path in model_only(checkpoint):
        shutil.copyfile(path, temporary / path.name)
    temporary.rename(out)
    return checkpoint


def push(run: Path, repo: str, private: bool, say: Callable[[str], None]) -> list[outbox.Entry]:
    """Uploads what is queued and, where `repo` is named, the newest checkpoint to its main; returns what is left.
    Raises UserError."""
    if not run.is_dir():
        raise UserError(f"{run}: no such run; name its directory, such as runs/shakespeare")
    try:
        with outbox.alone(run, patience=2):  # which a trainer's process may need to end
            return _push(run, repo, private, say)
    except BlockingIOError:
        raise UserError(f"{run}: its training, or another push, is uploading; wait for that") from None


def _push(run: Path, repo: str, private: bool, say: Callable[[str], None]) -> list[outbox.Entry]:
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set; unset it where the Hub can be reached, and push there")
    checkpoint, queued = None, outbox.entries(run)
    if repo:
        check_repo_name(repo, "--repo")
        if (checkpoint := newest_valid(run, say)) is None:
            raise UserError(f"{run}: no checkpoint there; name a run directory, such as runs/shakespeare")
    elif not queued:
        say(f"upload     nothing of {run} is queued; --repo ORG/NAME uploads its newest checkpoint")
    wanted = {(entry.repo, entry.private) for entry in queued} | ({(repo, private)} if repo else set())
    for name, hidden in sorted(wanted):
        check_push(name, hidden, say, field="--repo" if name == repo else "push_to_hub")
    if checkpoint:
        say(f"upload     {checkpoint}, to main of {repo}")
        outbox.enqueue(run, model_only(checkpoint), step_of(checkpoint), repo, private, [outbox.MAIN])
    for entry in queued:
        dataclasses.replace(entry, error=None).write()  # what was refused is tried again
    huggingface_hub.utils.disable_progress_bars()

    def tell(event: str, **values) -> None:
        if line := describe({"event": event, **values}, run):
            say(line)

    with upload.hub_client(upload.TIMEOUT):
        upload.drain(run, tell, PATIENCE)
    return outbox.entries(run)


def _newest_run(runs: Path = Path("runs")) -> Path:
    found = [run for run in runs.glob("*") if checkpoints(run)]
    if not found:
        raise UserError("no run under runs/; train one first (make train) or name it with --run")
    return max(found, key=lambda run: checkpoints(run)[-1].stat().st_mtime)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        return push_main(argv[1:]) if argv[:1] == ["push"] else export_main(argv)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2


def export_main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, help="run directory, or one checkpoint of it (default: the newest run)")
    parser.add_argument("--out", type=Path, default=Path("model"), help="directory to make")
    args = parser.parse_args(argv)
    checkpoint = export(args.run or _newest_run(), args.out)
    print(f"exported {checkpoint} to {args.out}")
    print(f"load it: transformers.AutoModelForCausalLM.from_pretrained({str(args.out)!r})")
    return 0


def push_main(argv: list[str]) -> int:
    """Returns 0 when all is up, 1 when something is left."""
    parser = argparse.ArgumentParser(prog="python -m recipe.export push", description="Upload a run's checkpoints.")
    parser.add_argument("run", type=Path, help="run directory, such as runs/shakespeare")
    parser.add_argument("--repo", default="", help="ORG/NAME: the run's newest checkpoint goes there, on main")
    parser.add_argument("--private", action="store_true", help="--repo makes a private repository")
    args = parser.parse_args(argv)
    say = partial(print, flush=True)
    try:
        left = push(args.run, args.repo, args.private, say)
    except KeyboardInterrupt:
        left = outbox.entries(args.run)
    if left:
        say(f"upload     still queued: {names(left)}; {push_command(args.run)} tries again")
        return 1
    say("upload     all is up")
    return 0


if __name__ == "__main__":
    sys.exit(main())
