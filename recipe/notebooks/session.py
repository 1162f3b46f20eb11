"""What the notebooks share: commands that can be told to stop, what an earlier session left, the Hub's token.

A notebook imports this into its own Python, in which nothing of this project is installed: standard library only.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

_GRACE = 600  # seconds that a command told to stop may take, before it is killed
# Of the commands: lines as they come, nothing that is the notebook's own, and more than torchrun's 30 s to save in.
_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "MPLBACKEND": "Agg",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300",
}
FAILED: list[str] = []  # commands that failed and did not end the notebook


def run(command: str, hours: float | None = None, essential: bool = True) -> bool:
    """Runs a shell command and prints what it says; returns whether it came to a good end of its own.

    After `hours`, or when the cell is interrupted, it gets SIGTERM, at which a training saves a checkpoint and ends.
    Raises RuntimeError where it fails by itself, unless it is not `essential`: then `summary` names it.
    """
    print(f"$ {command}", flush=True)
    # In a process group of its own: an interrupted cell would reach the launcher alone, or all of them twice.
    process = subprocess.Popen(
        command,
        shell=True,
        start_new_session=True,
        env=os.environ | _ENVIRONMENT,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    told = threading.Event()

    def tell(number: int) -> None:
        told.set()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    timers = (
        [
            threading.Timer(hours * 3600, tell, [signal.SIGTERM]),
            threading.Timer(hours * 3600 + _GRACE, tell, [signal.SIGKILL]),
        ]
        if hours is not None
        else []
    )
    for timer in timers:
        timer.daemon = True
        timer.start()
    interrupted = False
    while True:
        try:
            # To the end of the output and not of the process: a launcher may end at once, and its training saves still.
            for line in process.stdout:
                print(line, end="", flush=True)
            break
        except KeyboardInterrupt:
            interrupted = True
            tell(signal.SIGTERM)
    for timer in timers:
        timer.cancel()
    code = process.wait()
    if interrupted:
        raise KeyboardInterrupt
    if told.is_set() and code:
        print(f"stopped after {hours:.3g} hours, as it was told to", flush=True)
    elif code and essential:
        raise RuntimeError(f"exit code {code}; what the command says above is the cause")
    elif code:
        FAILED.append(command)
        print(f"FAILED     exit code {code}; the notebook goes on", flush=True)
    return code == 0


def take_up(run_dir: str | Path, where: str | Path) -> bool:
    """Copies into `run_dir` what an earlier session left of it anywhere under `where`: of the directories of that name
    the one with the newest checkpoint, and that checkpoint alone. Returns whether there was a newer one than here."""
    run_dir, found = Path(run_dir), Path(where).glob(f"**/{Path(run_dir).name}/step_*")
    newest = max((path for path in found if _step(path) >= 0), key=_step, default=None)
    here = max(map(_step, run_dir.glob("step_*")), default=-1)
    if newest is None or _step(newest) <= here:
        print(f"going on   from step {here} in {run_dir}" if here >= 0 else f"new run    nothing of it under {where}")
        return False
    copy_run(newest.parent, run_dir)
    print(f"going on   from step {_step(newest)} of {newest.parent}, copied into {run_dir}")
    return True


def copy_run(source: Path, target: Path) -> None:
    """Copies a run with its newest checkpoint, in place of an older one: under another name first, then renamed. A run
    without any is left where it is."""
    kept = max((path for path in source.glob("step_*") if _step(path) >= 0), key=_step, default=None)
    if kept is None:
        return
    if not (target / kept.name).exists():
        temporary = target / f".{kept.name}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        _copy_files(kept, temporary)
        temporary.rename(target / kept.name)
    for path in source.iterdir():
        if _step(path) < 0 and not path.name.startswith("."):
            _copy_files(path, target / path.name)
    for path in target.glob("step_*"):
        if path.name != kept.name:
            shutil.rmtree(path)


def _copy_files(source: Path, target: Path) -> None:
    """A file, or all of a directory; without their rights, for what is attached as an input is read-only."""
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _step(path: Path) -> int:
    """The step of a checkpoint; -1 of anything else, unfinished ones too."""
    match = re.fullmatch(r"step_(\d+)", path.name)
    return int(match[1]) if match else -1


def hub_token() -> bool:
    """Whether HF_TOKEN is there: a secret of Kaggle or Colab, which goes into the environment, or the environment's."""
    # Neither there, nor allowed, nor set: each has an exception of its own, and all of them mean the same here.
    with suppress(Exception):
        from kaggle_secrets import UserSecretsClient

        os.environ["HF_TOKEN"] = UserSecretsClient().get_secret("HF_TOKEN")
    with suppress(Exception):
        from google.colab import userdata

        os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
    return bool(os.environ.get("HF_TOKEN"))


def may_push(repo: str) -> bool:
    """Whether there is a repository to push to, and a token; says so if not."""
    if not repo:
        print("not pushed: HUB is empty; name a repository there, ORG/NAME")
    elif not hub_token():
        print(f"not pushed: no token to push to {repo} with; add a secret HF_TOKEN (huggingface.co/settings/tokens)")
    else:
        return True
    return False


def summary(run_dir: str | Path) -> str:
    """What of the notebook failed, if anything, and where the run is."""
    failed = "".join(f"\nFAILED     {command}" for command in FAILED)
    return f"{'not all' if failed else 'all'} is done; the run is in {run_dir}{failed}"
