"""Starts runs of recipe/train.py on the CPU, many times faster than a launcher can, and watches how they end.

Importing torch, transformers and accelerate takes longer than a tiny run. So runs are forked from a server
(multiprocessing's) that has imported them once, before any thread is there, with the environment that the launcher
would have set. `Lab.compare_with_launchers` holds such a run against one that a user starts, to the bit; `launch`
starts those.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait as wait_for
from pathlib import Path

import psutil

from recipe.checkpoint.format import checkpoints, newest_valid, step_of, verify
from recipe.data.prepare.pipeline import PrepareOptions, prepare
from tests.conftest import ROOT, SHAKESPEARE, environment, flags

HANG = 60  # seconds after which a run that should have ended is taken for hung
GRACE = 15  # seconds that the others have once one process of a run has died, as torchrun's agent gives them
HOW = "commands.txt"  # in a case's directory: its runs, as commands
MARK = "RECIPE_FAULTS_CASE"  # in the environment of whatever a case starts: its directory

# The smallest run with everything in it: accumulation with two processes too, dropout, three saves of which the first
# two are pruned, validations, HellaSwag.
TINY = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 64,
    "sequence_length": 16,
    "total_batch_tokens": 128,
    "micro_batch_size": 2,
    "max_steps": 12,
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "dropout": 0.1,
    "seed": 1,
    "precision": "fp32",
    "logging_steps": 1,
    "eval_steps": 4,
    "eval_tokens": 128,
    "hellaswag_steps": 6,
    "hellaswag_limit": 2,
    "save_steps": 4,
    "save_total_limit": 1,
}
DATA = {"val_fraction": 0.1, "val_documents": 5, "shard_tokens": 4000, "first_shard_tokens": 1000}

_ENGINES = {
    # name: processes, Accelerate's file, what `accelerate launch` puts into the environment under it
    "one": (1, "single", {}),
    "ddp": (2, "ddp", {"ACCELERATE_MIXED_PRECISION": "no"}),
    "zero1": (
        2,
        "zero1",
        {
            "ACCELERATE_MIXED_PRECISION": "no",
            "ACCELERATE_USE_DEEPSPEED": "true",
            "DS_ACCELERATOR": "cpu",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_configs/zero1.json",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
        },
    ),
}
ENGINES = tuple(_ENGINES)


def processes(engine: str) -> int:
    return _ENGINES[engine][0]


class Lost(Exception):
    """An injection that was not survived, or that did not happen."""


def expect(condition, message: str) -> None:
    if not condition:
        raise Lost(message)


@dataclass
class Result:
    """How a run ended."""

    directory: Path
    codes: list[int]  # of the ranks, or of the launcher; negative: the signal it died of
    output: str
    seconds: float
    hung: bool

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that the output reports as done."""
        return [int(n) for n in re.findall(r"^step (\d+)  ", self.output, re.MULTILINE)]

    def expect(self, *codes: int) -> Result:
        """Raises Lost unless each process ended with one of `codes`."""
        expect(not self.hung, f"hung for {HANG} s\n{self.tail}")
        expect(set(self.codes) <= set(codes), f"exit codes {self.codes}, expected {codes}\n{self.tail}")
        return self

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-25:])


class Run:
    """A run under way: forked processes, a rank each, or one launcher.

    `processes` have pid, exitcode and sentinel, as multiprocessing's do.
    """

    def __init__(self, directory: Path, ranks: list, output: Path):
        self.directory, self.ranks, self._output, self._start = directory, ranks, output, time.monotonic()

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait(self, *, together: bool = True, timeout: float = HANG) -> Result:
        """Waits for the end of all; `together`: where one dies the others are ended, as torchrun does."""
        deadline, ended, hung = time.monotonic() + timeout, False, False
        while waiting := [r for r in self.ranks if _exit_code(r) is None]:
            wait_for([r.sentinel for r in waiting], max(0, deadline - time.monotonic()))
            failed = any(_exit_code(r) for r in self.ranks)
            waiting = [r for r in waiting if _exit_code(r) is None]
            if waiting and failed and together and not ended:
                ended, deadline = True, time.monotonic() + GRACE
                _send(waiting, signal.SIGTERM)
            elif waiting and time.monotonic() >= deadline:
                if not ended:
                    hung = True
                    _send(waiting, signal.SIGABRT)  # where it hangs goes to the output, by faulthandler
                    time.sleep(1)
                _send(waiting, signal.SIGKILL)
                deadline = time.monotonic() + 10
        codes = [_exit_code(r) for r in self.ranks]
        return Result(self.directory, codes, self.output, time.monotonic() - self._start, hung)

    def until(self, text: str, timeout: float = HANG) -> None:
        """Waits for a text in the output."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            expect(time.monotonic() < deadline, f"{text!r} did not come\n{self.output[-3000:]}")
            expect(all(_exit_code(r) is None for r in self.ranks), f"ended before {text!r} came\n{self.output[-3000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        _send([r for r in self.ranks if _exit_code(r) is None], signal.SIGKILL)

    def leftovers(self, patience: float = 30) -> list[str]:
        """Command lines of processes of this run that are there when it should have ended, `patience` seconds later."""
        deadline = time.monotonic() + patience
        while found := self._alive():
            if time.monotonic() > deadline:
                return found
            time.sleep(0.2)
        return []

    def _alive(self) -> list[str]:
        pids, mine = {r.pid for r in self.ranks}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                marked = process.environ().get(MARK) == str(self.directory)
                if marked or process.pid in pids or os.getsid(process.pid) in pids:
                    mine.append(f"{process.pid}: {shlex.join(process.cmdline())[:200]}")
        return mine


# multiprocessing polls all its children whenever one is started, and two threads that read one exit code at once would
# leave one of them with 255.
_polling = threading.Lock()


def _exit_code(process) -> int | None:
    with _polling:
        return process.exitcode


def _send(ranks: list, number: int) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.pid, number)


class _Launcher:
    """A subprocess with the attributes of multiprocessing's."""

    def __init__(self, command: list[str], env: dict, output: Path):
        with open(output, "ab") as file:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.pid = self._process.pid
        self.sentinel = os.pidfd_open(self.pid)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()


def _pin(pid: int, cores: list[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, cores)


def _rank(argv: list[str], variables: dict, output: str, cores: list[int]) -> None:
    """A rank's life, in a process forked from the server."""
    import faulthandler

    os.setsid()  # what is left of it can be told by its session
    _pin(0, cores)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    from recipe import faults, train

    importlib.reload(faults)  # RECIPE_FAULT is read when it is imported
    if "HF_ENDPOINT" in variables:  # as what huggingface_hub reads
        from huggingface_hub import constants

        constants.ENDPOINT, constants.HF_HUB_OFFLINE = variables["HF_ENDPOINT"], False
        constants.HF_HUB_DISABLE_XET = True
    sys.argv = ["recipe/train.py", *argv]
    sys.exit(train.main(argv))


class Lab:
    """Where cases are run: shards, runs to compare with, a directory for each case. Several may share one `base`."""

    def __init__(self, base: Path):
        self.base = base.resolve()
        self.base.mkdir(parents=True, exist_ok=True)
        self._ports = itertools.count(random.Random(os.getpid()).randrange(15_000, 32_000))
        self._turn = itertools.count()
        self._there = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._runs: list[Run] = []

    @cached_property
    def server(self):
        # What is read while modules are imported has to be there before the server starts.
        os.environ |= {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "DS_ACCELERATOR": "cpu",
        }
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        # of the locks that a killed run leaves to be cleaned up, as it is
        os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.preload"])
        return context

    # Runs

    def fields(self, directory: Path, **changes) -> dict:
        return (
            TINY
            | DATA
            | {"dataset_name": self.data, "train_text": self.text, "output_dir": directory / "run"}
            | changes
        )

    def start(
        self,
        directory: Path,
        engine: str = "one",
        fault: str = "",
        env: dict | None = None,
        cores: int | None = None,
        **changes,
    ) -> Run:
        """Forks the ranks of a run in `directory`, which may use `cores` (as many as it has processes, that is a thread
        each: threads of several runs side by side wait for each other for minutes)."""
        directory.mkdir(parents=True, exist_ok=True)
        argv, world = flags(**self.fields(directory, **changes)), processes(engine)
        variables = self._variables(directory, fault, env) | _ENGINES[engine][2]
        if world > 1:
            variables |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._port()),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
            }
        self._note(directory, engine, fault, env, changes)
        output, ranks, pinned = self._output(directory), [], self._cores(cores or world)
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            process = self.server.Process(target=_rank, args=(argv, variables | own, str(output), pinned))
            with _polling:
                process.start()
            ranks.append(process)
        return self._watched(Run(directory, ranks, output))

    def launch(
        self,
        directory: Path,
        engine: str = "one",
        fault: str = "",
        env: dict | None = None,
        cores: int | None = None,
        launcher: bool = False,
        **changes,
    ) -> Run:
        """Starts a run as a user does: plain python for one process unless `launcher`, else `accelerate launch`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._note(directory, engine, fault, env, changes)
        command = self.command(engine, self.fields(directory, **changes), launcher)
        output = self._output(directory)
        variables = self._variables(directory, fault, env)
        launched = _Launcher(command, variables, output)
        _pin(launched.pid, self._cores(cores or processes(engine)))
        return self._watched(Run(directory, [launched], output))

    def command(self, engine: str, fields: dict, launcher: bool = False) -> list[str]:
        world, file, _ = _ENGINES[engine]
        command = [sys.executable]
        if world > 1 or launcher:
            command += [
                "-m",
                "accelerate.commands.launch",
                "--quiet",
                "--config_file",
                f"accelerate_configs/{file}.yaml",
                "--num_processes",
                str(world),
            ]
        if world > 1:
            command += ["--main_process_port", str(self._port())]
        return [*command, "recipe/train.py", *flags(**fields)]

    def run(self, directory: Path, *arguments, real: bool = False, **changes) -> Result:
        """A run from its start to its end; `real`: by its launcher."""
        return (self.launch if real else self.start)(directory, *arguments, **changes).wait(
            timeout=2 * HANG if real else HANG
        )

    def close(self) -> None:
        for run in self._runs:
            run.kill()

    def _watched(self, run: Run) -> Run:
        self._runs.append(run)
        return run

    def _variables(self, directory: Path, fault: str, env: dict | None) -> dict:
        variables = environment({MARK: str(directory), "PYTHONUNBUFFERED": "1"} | (env or {}))
        for name in ("DS_ACCELERATOR", "PYTHONWARNINGS"):  # the server's
            variables.pop(name, None)
        return variables | ({"RECIPE_FAULT": fault} if fault else {})

    def _note(self, directory: Path, engine: str, fault: str, env: dict | None, changes: dict) -> None:
        """What a user would type for this run, for the report of a loss."""
        variables = {"ACCELERATE_USE_CPU": "true"} | (env or {}) | ({"RECIPE_FAULT": fault} if fault else {})
        command = self.command(engine, self.fields(directory, **changes))
        line = shlex.join(["env", *(f"{k}={v}" for k, v in variables.items()), "python", *command[1:]])
        with open(directory / HOW, "a") as file:
            file.write(line + "\n")

    def _output(self, directory: Path) -> Path:
        path = directory / f"output-{len(list(directory.glob('output-*')))}.txt"
        path.touch()
        return path

    def pin(self) -> None:
        """This thread, and what it starts without another word, to the next core."""
        _pin(0, self._cores(1))

    def _cores(self, number: int) -> list[int]:
        """The next ones in turn."""
        return [self._there[next(self._turn) % len(self._there)] for _ in range(number)]

    def _port(self) -> int:
        """A free port below those that the kernel gives out by itself, not given out before."""
        while True:
            port = 15_000 + next(self._ports) % 17_000
            with socket.socket() as s, contextlib.suppress(OSError):
                s.bind(("127.0.0.1", port))
                return port

    # What is made once

    @contextlib.contextmanager
    def once(self, name: str) -> Iterator[tuple[Path, bool]]:
        """A directory, and whether this caller is to fill it; others wait."""
        directory = self.base / "once" / name
        directory.parent.mkdir(parents=True, exist_ok=True)
        with open(directory.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            done = directory.with_suffix(".done")
            yield directory, not done.exists()
            done.touch()

    @cached_property
    def text(self) -> Path:
        """Sixty documents of tiny Shakespeare."""
        with self.once("text") as (directory, empty):
            if empty:
                directory.mkdir()
                words = SHAKESPEARE.read_text()
                lines = (json.dumps({"text": words[i * 900 : (i + 1) * 900]}) for i in range(60))
                (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
        return directory / "text.jsonl"

    @cached_property
    def data(self) -> Path:
        """Its shards."""
        with self.once("data") as (directory, empty):
            if empty:
                prepare(PrepareOptions(train_text=str(self.text), out=str(directory), **DATA), lambda line: None)
        return directory

    def reference(self, engine: str, fault: str = "", real: bool = False, **changes) -> Result:
        """An uninterrupted run, kept for those that ask again."""
        name = ["real" if real else "forked", engine, fault, *(f"{k}={v}" for k, v in sorted(changes.items()))]
        name = "-".join(filter(None, name))
        with self.once(name.replace("/", "_")) as (directory, empty):
            if empty:
                result = self.run(directory, engine, fault, real=real, **changes).expect(0)
                return result
        return Result(directory, [0], (directory / "output-0.txt").read_text(), 0.0, False)

    def compare_with_launchers(self, engine: str) -> None:
        """That forked runs compute what runs started by a user do: weights, moments, losses, to the bit. With two
        threads a process too, where there are cores for them."""
        same_end(self.reference(engine, real=True).directory, self.reference(engine).directory)
        if engine == "one" and (psutil.cpu_count(logical=False) or 1) > 1:
            launched, forked = (self.reference(engine, real=real, cores=2) for real in (True, False))
            expect("2 threads" in launched.output and "2 threads" in forked.output, "not two threads")
            same_end(launched.directory, forked.directory)


# What is asked of a run's directory


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of weights and moments."""
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def lines(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]


def curve(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl without what is measured by the clock."""
    clock = {"tokens_per_second", "mfu", "seconds", "data_wait", "peak_memory_bytes", "save_wait"}
    return [{k: v for k, v in line.items() if k not in clock} for line in lines(directory)]


def same_end(directory: Path, expected: Path, *, metrics: bool = True) -> None:
    """Raises Lost unless a run ended with the weights, moments and losses of another."""
    found, wanted = (checkpoints(d / "run")[-1:] for d in (directory, expected))
    expect(found, "no checkpoint at the end")
    expect(found[0].name == wanted[0].name, f"ended with {found[0].name}, the uninterrupted run with {wanted[0].name}")
    for problem in verify(found[0]):
        raise Lost(f"{found[0].name}: {problem}")
    for name, digest in digests(wanted[0]).items():
        expect(digests(found[0])[name] == digest, f"{found[0].name}/{name} differs from the uninterrupted run's")
    if metrics:
        for line, other in itertools.zip_longest(curve(directory), curve(expected)):
            expect(line == other, f"metrics.jsonl: {line}, the uninterrupted run's: {other}")


def whole(directory: Path, *, at_least: int = 0) -> int:
    """The step of the newest checkpoint, 0 where there is none. Raises Lost where one that has its name is not whole,
    or there are fewer than `at_least`."""
    run = directory / "run"
    found = checkpoints(run)
    for path in found:
        for problem in verify(path):
            raise Lost(f"{path.name} is committed and not whole: {problem}")
    expect(len(found) >= at_least, f"{len(found)} valid checkpoints, expected {at_least}")
    newest = newest_valid(run, lambda line: None)
    return step_of(newest) if newest else 0


@dataclass
class Case:
    """One injection. `check(lab, directory)` raises Lost where it was not survived."""

    group: str
    name: str
    check: Callable[[Lab, Path], object]
    quick: bool = False  # in the sample that `make test` runs
