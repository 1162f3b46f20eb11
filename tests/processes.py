"""Runs the recipe's programs in forked processes, which do not have to import torch again.

    run("recipe/train.py", "--max_steps=4")    as `python recipe/train.py --max_steps=4`
    run("-m", "recipe.hub.export", "runs/mine")    as `python -m recipe.hub.export runs/mine`
    run("recipe/train.py", processes=2)    as `accelerate launch` of two CPU processes, without the launcher

They are children of multiprocessing's forkserver, which has imported the libraries once. A program with an environment
variable that affects an import (FRESH) gets a new interpreter instead. Tests of launchers, of signals to a process
group and the like start the real command themselves.
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
from multiprocessing import forkserver
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from tests.faults.shim import built as shim

ROOT = Path(__file__).resolve().parents[1]
# Prefixes of variables that libraries read when they are imported.
FRESH = ("HF_", "HOME", "MALLOC_", "MKL_", "OMP_", "PJRT_", "TORCH_", "TRACKIO", "TRANSFORMERS_", "WANDB_")
# What `accelerate launch` sets in its processes; tests/engine/ compares their results with the real launcher's.
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "TORCHELASTIC_RUN_ID": "none"}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


def environment(changes: dict | None = None) -> dict:
    """The environment of a command that is typed, not run by `make test`; on the CPU, even if there are GPUs, with one
    thread, so that sums are the same on every machine."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "ARGS"}
    variables |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"} | (changes or {})
    if variables["ACCELERATE_USE_CPU"] == "true":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    variables.pop("PYTHONPATH", None)
    if variables.get("RECIPE_FAULT"):  # for tests/faults/plugin.py in new interpreters
        variables["PYTHONPATH"] = os.pathsep.join((str(ROOT / "tests" / "faults" / "load"), str(ROOT)))
        variables["LD_PRELOAD"] = shim()
    return variables


class Running:
    """A running program: one process or, with `processes`, several that find each other as torchrun's do. `env` are
    changes to the environment."""

    def __init__(self, *argv, env: dict[str, str] | None = None, cwd: Path = ROOT, processes: int = 0):
        self.args, self._directory = tuple(map(str, argv)), tempfile.TemporaryDirectory()
        self.ranks = []
        _start_server()
        group_env = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1"}
        self._port = socket.socket()
        if processes > 1:
            # Bound, without listening, until the processes have ended: only rank 0, which asks for this port, gets it.
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind(("", 0))
        group_env["MASTER_PORT"] = self._port.getsockname()[1]  # 0 for one process: the system chooses
        for rank in range(processes or 1):
            variables = environment(env)
            if processes:
                rank_env = group_env | {"RANK": rank, "LOCAL_RANK": rank}
                variables = LAUNCHED | variables | {name: str(value) for name, value in rank_env.items()}
            output_paths = [self._output(name, rank) for name in ("stdout", "stderr")]
            process = _context.Process(target=_become, args=(self.args, variables, str(cwd), output_paths))
            process.start()
            self.ranks.append(process)

    def _output(self, name: str, rank: int) -> Path:
        return Path(self._directory.name) / f"{rank}.{name}"

    def _printed(self, name: str) -> str:
        paths = (self._output(name, rank) for rank in range(len(self.ranks)))
        return "".join(path.read_text() for path in paths if path.exists())

    @property
    def stdout(self) -> str:
        """The standard output so far, of all processes in the order of their ranks."""
        return self._printed("stdout")

    @property
    def stderr(self) -> str:
        """The standard error so far, likewise."""
        return self._printed("stderr")

    @property
    def output(self) -> str:
        """Standard output, and then standard error."""
        return self.stdout + self.stderr

    @property
    def codes(self) -> list[int | None]:
        """Exit codes by rank: the negative number of a signal that killed the process, None while it runs."""
        return [process.exitcode for process in self.ranks]

    def send_signal(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to one process, or to all, that still run."""
        for process in self.ranks if rank is None else [self.ranks[rank]]:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def until(self, text: str, seconds: float = 60) -> None:
        """Waits until `text` is in the output."""
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, f"{text!r} did not come\n{self.output}"
            time.sleep(0.02)

    def wait(self, timeout: float = 600, *, together: bool = True, grace: float = 30) -> int:
        """Waits for the end; returns the exit code of the first process that failed, or 0. With `together`, a process
        that fails ends the others, as with torchrun: by SIGTERM, and by SIGKILL `grace` seconds later. After `timeout`
        seconds kills all processes and raises TimeoutExpired."""
        deadline, code = time.monotonic() + timeout, 0
        try:
            while processes := [process for process in self.ranks if process.exitcode is None]:
                wait_for([process.sentinel for process in processes], max(0.0, deadline - time.monotonic()))
                if not code:
                    code = next(filter(None, self.codes), 0)
                    if code and together:
                        deadline = min(deadline, time.monotonic() + grace)
                        self.send_signal(signal.SIGTERM)
                if time.monotonic() > deadline:
                    if not (code and together):
                        raise subprocess.TimeoutExpired(self.args, timeout, self.stdout, self.stderr)
                    break
        finally:
            self.kill()
        return code or next(filter(None, self.codes), 0)

    def kill(self) -> None:
        """Kills all processes and their children."""
        for process in self.ranks:
            if process.exitcode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    process.kill()
                process.join()
        self._port.close()


class Forked(Running):
    """A replacement for subprocess.Popen: a Python program that leads a process group and prints into a file."""

    def __init__(self, command, stdout, env: dict[str, str] | None = None, **_):
        self._file = Path(stdout.name)
        super().__init__(*command[1:], env=env)
        self.pid = self.ranks[0].pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:
            time.sleep(0.01)

    def _output(self, *_) -> Path:
        return self._file

    def poll(self) -> int | None:
        """The exit code, None while the program runs."""
        return self.codes[0]

    returncode = property(poll)


# A replacement for a module's `subprocess`.
forking = SimpleNamespace(**vars(subprocess) | {"Popen": Forked})


def run(
    *argv, env: dict[str, str] | None = None, cwd: Path = ROOT, processes: int = 0, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Runs a program to its end; kills it after `timeout` seconds and raises TimeoutExpired."""
    if not processes and _needs_fresh(variables := environment(env)):
        command = [sys.executable, *map(str, argv)]
        return subprocess.run(command, env=variables, cwd=cwd, timeout=timeout, capture_output=True, text=True)
    running = Running(*argv, env=env, cwd=cwd, processes=processes)
    code = running.wait(timeout)
    return subprocess.CompletedProcess(running.args, code, running.stdout, running.stderr)


def _start_server() -> None:
    """Starts the forkserver, unless it runs, with the shim that injects faults into programs."""
    libraries = [shim(), os.environ.get("LD_PRELOAD", "")]  # such as tcmalloc
    directory = os.getcwd()
    os.chdir(ROOT)  # elsewhere, as in a test of another directory, it would not find tests.preload, and say nothing
    with mock.patch.dict(os.environ, LD_PRELOAD=":".join(filter(None, libraries))):
        forkserver.ensure_running()
    os.chdir(directory)


def _needs_fresh(env: dict[str, str]) -> bool:
    return any(env.get(k) != os.environ.get(k) for k in {*env, *os.environ} if k.startswith(FRESH))


def _become(argv: tuple[str, ...], env: dict[str, str], cwd: str, output_paths: list[Path]) -> None:
    """In the forked process: does what a new interpreter would do with this command line."""
    assert "tests.preload" in sys.modules, "the forkserver has imported nothing: it does not say why"
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # to be read from TMPDIR
    os.chdir(cwd)
    for descriptor, path in enumerate(output_paths, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
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
