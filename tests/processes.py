"""Runs the recipe's programs in forked processes, which need not import torch again.

    run("recipe/train.py", "--max_steps=4")           as `python recipe/train.py --max_steps=4`
    run("-m", "recipe.hub.export", "runs/mine")       as `python -m recipe.hub.export runs/mine`
    run_ranks(2, "recipe/train.py", ...)              as `accelerate launch` of two CPU processes, without the launcher

They are children of multiprocessing's forkserver, which has imported the libraries once. What an import depends on (see
FRESH) is given to a new interpreter instead, and so is everything with `fresh=True`. Tests of launchers, signals to a
process group and the like start the real command themselves.
"""

import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import wait as wait_for
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOAD = ["tests.preload"]
# Variables that are read while a library is imported.
FRESH = ("HF_", "HOME", "MALLOC_", "MKL_", "OMP_", "PJRT_", "TORCH_", "TRACKIO", "TRANSFORMERS_", "WANDB_")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class Running:
    """A program that runs: `wait`, `poll` and `send_signal` as subprocess.Popen's; its output so far as text."""

    def __init__(self, argv: tuple, env: dict[str, str], cwd: Path):
        self.args, self._directory = argv, tempfile.TemporaryDirectory()
        self._files = [Path(self._directory.name) / name for name in ("stdout", "stderr")]
        self.process = _context.Process(target=_become, args=(argv, env, str(cwd), self._files))
        self.process.start()
        self.pid = self.process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends the program and whatever it has started."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            self.process.kill()
        self.process.join()

    @property
    def stdout(self) -> str:
        return self._files[0].read_text() if self._files[0].exists() else ""

    @property
    def stderr(self) -> str:
        return self._files[1].read_text() if self._files[1].exists() else ""


def start(*argv, env: dict[str, str], cwd: Path = ROOT) -> Running:
    """Starts a program under exactly the variables `env`."""
    return Running(tuple(map(str, argv)), env, cwd)


def run(
    *argv, env: dict[str, str], cwd: Path = ROOT, timeout: float = 600, fresh: bool = False
) -> subprocess.CompletedProcess:
    """Runs a program to its end; kills it, and raises TimeoutExpired, after `timeout` seconds."""
    argv = tuple(map(str, argv))
    if fresh or _needs_fresh(env):
        return subprocess.run(
            [sys.executable, *argv], env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
    running = Running(argv, env, cwd)
    try:
        code = running.wait(timeout)
    finally:
        if running.poll() is None:
            running.kill()
    return subprocess.CompletedProcess(argv, code, running.stdout, running.stderr)


class Ranks:
    """The processes of one run, which find each other as torchrun's do; `alone`: one that is told nothing of ranks."""

    def __init__(self, world_size: int, *argv, env: dict[str, str], cwd: Path = ROOT, alone: bool = False):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        shared = {
            "WORLD_SIZE": world_size,
            "LOCAL_WORLD_SIZE": world_size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        own = [{} if alone else shared | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(world_size)]
        self.args = argv
        self.ranks = [start(*argv, env=env | {k: str(v) for k, v in o.items()}, cwd=cwd) for o in own]

    @property
    def codes(self) -> list[int | None]:
        """Exit codes by rank; negative: the signal it died of; None: it runs."""
        return [rank.poll() for rank in self.ranks]

    @property
    def stdout(self) -> str:
        return "".join(rank.stdout for rank in self.ranks)

    @property
    def stderr(self) -> str:
        return "".join(rank.stderr for rank in self.ranks)

    def wait(self, timeout: float = 600, *, together: bool = True, grace: float = 30) -> int:
        """The exit code of the first that failed, or 0. `together`: as with torchrun, the first that fails ends the
        others, by SIGTERM and SIGKILL `grace` seconds later. Kills what is left, and raises TimeoutExpired, after
        `timeout` seconds."""
        deadline, code = time.monotonic() + timeout, 0
        try:
            while alive := [rank for rank in self.ranks if rank.poll() is None]:
                wait_for([rank.process.sentinel for rank in alive], max(0.0, deadline - time.monotonic()))
                failed = [status for status in self.codes if status]
                if failed and not code:
                    code = failed[0]
                    if together:
                        deadline = min(deadline, time.monotonic() + grace)
                        for rank in self.ranks:
                            rank.send_signal(signal.SIGTERM)
                if time.monotonic() > deadline:
                    if not (code and together):
                        raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
                    break
        finally:
            self.kill()
        return code

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()


def run_ranks(
    world_size: int, *argv, env: dict[str, str], cwd: Path = ROOT, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Runs a program in processes as torchrun does; the output is that of all, in the order of their ranks."""
    ranks = Ranks(world_size, *argv, env=env, cwd=cwd)
    code = ranks.wait(timeout)
    return subprocess.CompletedProcess(argv, code, ranks.stdout, ranks.stderr)


def _needs_fresh(env: dict[str, str]) -> bool:
    ours = os.environ
    return any(env.get(k) != ours.get(k) for k in {*env, *ours} if k.startswith(FRESH))


def _become(argv: tuple[str, ...], env: dict[str, str], cwd: str, files: list[Path]) -> None:
    """In the forked process: does what a new interpreter would do with this command line."""
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdin = open(os.devnull)  # noqa: SIM115 - for the life of the process
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where make runs in the background
    if env.get("RECIPE_FAULT"):  # as tests/faults/load/sitecustomize.py does in a new interpreter
        from tests.faults import plugin

        plugin.install(env["RECIPE_FAULT"])
    if argv[0] == "-m":
        sys.argv = ["-m", *argv[2:]]
        sys.path.insert(0, cwd)
        sys.modules.pop(argv[1], None)  # a new interpreter would not have it
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
