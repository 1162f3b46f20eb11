"""What the notebooks share: running a command, resuming an earlier session's run, secrets.

A notebook imports this into its own Python, in which nothing of this project is installed: standard library only.
"""

import json
import os
import shutil
import signal
import subprocess
from contextlib import suppress
from itertools import count
from pathlib import Path

# Output is unbuffered, the notebook's plotting backend is not used, and a training run that is asked to stop gets more
# than torchrun's 30 s to save.
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "MPLBACKEND": "Agg",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
}
_CHECKPOINTS = "step_" + 8 * "[0-9]"  # a glob of checkpoint names, which sort by step
FAILED: dict[str, str] = {}  # commands that failed without ending the notebook, by their first three words


def run(command: str, essential: bool = True) -> bool:
    """Runs a shell command and prints its output; returns whether it completed with exit code 0.

    A training run that stopped with a checkpoint, at max_hours or because the cell was interrupted, reports it in its
    output, since the launcher replaces the exit code. A failed command raises RuntimeError with its error message or,
    if it is not `essential`, is only listed by `summary`.
    """
    print(f"$ {command}", flush=True)
    program, error = " ".join(command.split()[:3]), "the command's output above names the cause"
    FAILED.pop(program, None)
    process = subprocess.Popen(
        ["sh", "-c", command],
        start_new_session=True,  # otherwise an interrupt would reach only the launcher, or every process twice
        env=os.environ | _ENVIRONMENT,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    interrupted, stopped = False, False
    while True:
        try:
            # Wait for the end of the output, not the process: a launcher may exit while its training still saves.
            for line in process.stdout:
                print(line, end="", flush=True)
                stopped |= line.startswith("stopped ")
                error = line.strip() if line.startswith("error: ") else error
            break
        except KeyboardInterrupt:
            interrupted = True
            os.killpg(process.pid, signal.SIGTERM)
    exit_code = process.wait()
    if interrupted:
        raise KeyboardInterrupt
    if exit_code and essential and not stopped:
        raise RuntimeError(f"exit code {exit_code}; {error}")
    if exit_code and not stopped:
        FAILED[program] = command
        print(f"FAILED     exit code {exit_code}; the notebook goes on", flush=True)
    return exit_code == 0


def restore_run(run_dir: str | Path, search_dir: str | Path) -> None:
    """Copies an earlier session's copy of this run, anywhere under `search_dir`, into `run_dir` if it has a newer
    checkpoint; if `run_dir` has a run already, only a copy of that one. The training verifies the checkpoints and
    resumes from the newest intact one."""
    run_dir, checkpoints = Path(run_dir), [*Path(search_dir).glob(f"**/{Path(run_dir).name}/{_CHECKPOINTS}")]
    if own_ids := _run_ids(run_dir):
        checkpoints = [path for path in checkpoints if _run_ids(path.parent) & own_ids]
    checkpoints = [*run_dir.glob(_CHECKPOINTS), *checkpoints]
    checkpoints = [path for path in checkpoints if (path / "manifest.json").exists()]  # which is copied last
    newest = max(checkpoints, key=lambda path: path.name, default=None)  # the first of equal ones: `run_dir`'s
    if newest is None:
        print(f"new run    no checkpoint {run_dir.name}/step_... under {search_dir}")
    elif newest.parent == run_dir:
        print(f"resuming   {run_dir} from step {int(newest.name.removeprefix('step_'))}")
    else:
        copy_run(newest.parent, run_dir)
        print(f"resuming   {newest.parent}, copied into {run_dir}")


def _run_ids(run_dir: Path) -> set[str]:
    """What tells a run from others, also from one that --fresh has started in its place. An extended run has two."""
    ids = set()
    for path in run_dir.glob(f"**/{_CHECKPOINTS}/trainer_state.json"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            ids.add(json.loads(path.read_text())["tracker"]["run_id"])
    return ids


def copy_run(source: str | Path, target: str | Path) -> None:
    """Makes `target` a copy of a run: copies what is new or has changed, by size and time, then deletes what the run's
    checkpoints no longer have. An interrupted copy leaves the previous checkpoints, and an incomplete one without its
    manifest, which the training does not use. Another run in `target` is kept beside it; a run without a checkpoint is
    not copied."""
    source, target = Path(source), Path(target)
    if not any(source.glob(_CHECKPOINTS)):
        return
    if (old_ids := _run_ids(target)) and not old_ids & _run_ids(source):
        kept = next(path for n in count(1) if not (path := target.with_name(f"{target.name}.old-{n}")).exists())
        target.rename(kept)
        print(f"kept       another run of this name, now in {kept}")
    for path in sorted(source.rglob("*"), key=lambda path: (path.name == "manifest.json", path)):
        copy = target / path.relative_to(source)
        # No links: somebody else's run could make this copy any file of this machine into an output that is published.
        if path.is_file() and not path.is_symlink() and not path.relative_to(source).parts[0].startswith("."):
            new, old = path.stat(), copy.stat() if copy.exists() else None
            if not old or old.st_size != new.st_size or old.st_mtime < new.st_mtime - 2:  # some disks round times
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)  # without permissions: Kaggle's inputs are read-only
                with suppress(OSError):
                    os.utime(copy, (new.st_atime, new.st_mtime))  # so that it is not copied back
    for path in [*target.glob(_CHECKPOINTS), *target.glob(f"{_CHECKPOINTS}/*")]:
        if not (source / path.relative_to(target)).exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def secret(name: str) -> bool:
    """Whether the environment has this variable; a Kaggle or Colab secret of this name is copied into it."""
    # A missing module, missing access and a missing secret raise different exceptions, and all mean the same here.
    with suppress(Exception):
        from kaggle_secrets import UserSecretsClient

        os.environ[name] = UserSecretsClient().get_secret(name)
    with suppress(Exception):
        from google.colab import userdata

        os.environ[name] = userdata.get(name)
    return bool(os.environ.get(name))


def summary(run_dir: str | Path) -> str:
    """Where the run is, and which of the notebook's commands failed, if any."""
    failures = "".join(f"\nFAILED     {command}" for command in FAILED.values())
    return f"{'some commands failed' if failures else 'all done'}; the run is in {run_dir}{failures}"
