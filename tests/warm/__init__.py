"""A python whose imports are done: what tests start with it runs in a fork of a server that has imported torch and the
others once, instead of importing them for seconds.

    subprocess.run([warm.python(), "recipe/train.py", ...])

client.py stands in for python (and for `accelerate`): a small process that hands its arguments, environment, directory
and open files to the server, passes on the signals it gets, and ends as the fork does. server.py forks. Nothing of
recipe/ or eval/ is imported before the fork, and nothing whose import read a variable that the caller has set
otherwise: such a process is started for real, or from a server of its own. What starts further processes by
sys.executable, as launchers do, starts them in the same way.

Tests about what a fork cannot show stay with sys.executable: the process tree, signals to a whole group, what the
kernel counts of a process. tests/test_warm.py holds a fork against a process, to the bit.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
DIRECTORY = "RECIPE_TESTS_WARM"  # in the environment: where the server listens and its python lies
OFF = "RECIPE_TESTS_COLD"  # in the environment of pytest: starts everything for real

_server: subprocess.Popen | None = None


def start(env: dict[str, str]) -> None:
    """Starts the server, which imports nothing before it is asked to, for this process and its children. `env` is the
    environment of the runs to come."""
    global _server
    if _server or OFF in os.environ or DIRECTORY in os.environ or not sys.platform.startswith("linux"):
        return
    directory = Path(tempfile.mkdtemp(prefix="warm-"))
    write_clients(directory)
    env = {k: v for k, v in env.items() if k not in ("PYTHONPATH", "PYTHONUNBUFFERED")}
    with open(directory / "log", "wb") as log, socket.socket(socket.AF_UNIX) as listening:
        try:
            listening.bind(str(directory / "socket"))
        except OSError:  # the path is longer than a socket's may be
            shutil.rmtree(directory)
            return
        listening.listen(64)
        command = [sys.executable, HERE / "server.py", directory, str(listening.fileno())]
        _server = subprocess.Popen(
            command,
            env=env,
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[listening.fileno()],
            start_new_session=True,
        )
    os.environ[DIRECTORY] = str(directory)


def stop() -> None:
    """Ends the server and what it has forked; the one that started it does."""
    global _server
    if _server:
        directory = Path(os.environ.pop(DIRECTORY))
        if keep := os.environ.get("RECIPE_TESTS_WARM_LOG"):
            shutil.copy(directory / "log", keep)
        _server.stdin.close()  # on which it deletes the directory
        _server.wait()
        shutil.rmtree(directory, ignore_errors=True)  # where it has died
        _server = None


def write_clients(directory: Path) -> None:
    client = (HERE / "client.py").read_text()
    (directory / "real").write_text(sys.executable)
    for name in ("python", "python3", "accelerate"):
        path = directory / name
        path.write_text(shebang(sys.executable, "-IS") + client)
        path.chmod(0o755)


def shebang(python: str, *options: str) -> str:
    """The first lines of a program for this Python. A kernel takes neither a path with a space in it nor a long one;
    such a one is for the shell, to which the lines are a command, and to Python a string."""
    if " " in python or len(python) > 120:
        return "\n".join(["#!/bin/sh", " ".join(["'''exec'", f'"{python}"', *options, '"$0" "$@"']), "' '''", ""])
    return " ".join([f"#!{python}", *options]) + "\n"


def python(name: str = "python") -> str:
    """The path of the python, or of another command of its environment, that runs warm; of the real one where there is
    no server."""
    if DIRECTORY in os.environ:
        return str(Path(os.environ[DIRECTORY]) / name)
    return sys.executable if name.startswith("python") else str(Path(sys.executable).parent / name)
