"""What runs in a fork of tests/warm's server is what runs in a process of its own."""

import hashlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ROOT, TINY, by_step, environment, flags, run_train
from tests.warm.server import receive

pytestmark = pytest.mark.skipif(warm.DIRECTORY not in os.environ, reason="needs the server of tests/warm (Linux)")
CLOCK = ("tokens_per_second", "seconds", "data_wait", "save_wait", "peak_memory_bytes")


def run(*arguments, python: str | None = None, env: dict | None = None, **options) -> subprocess.CompletedProcess:
    options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 120} | options
    return subprocess.run([python or warm.python(), *arguments], env=environment(env), **options)


def test_a_forked_run_is_a_launched_run_to_the_bit(shards, whole_run, tmp_path):
    """Files, metrics, and all that is said but for what is read from a clock."""
    forked, lines, output = whole_run
    launched = tmp_path / "run"
    settings = TINY | {"data": shards, "output_dir": launched, "dropout": 0.1}
    result = run_train(*flags(**settings), real=True)
    assert result.returncode == 0, result.stderr

    def said(text: str, directory: Path) -> list[str]:
        """All but what a clock decides: of the steps' lines that they are there, of the last panel's how long."""
        lines = (" ".join(line.replace(str(directory), "RUN").split()) for line in text.splitlines())
        lines = (re.sub(r"\S*/python ", "python ", line) for line in lines)
        lines = (re.sub(r"^(step \d+:? (saved \S+)?|took).*", r"\1", line) for line in lines)
        return [re.sub(r"\d[\d.,]* (tokens/)?s\b", "N", line) for line in lines]

    assert said(result.stdout, launched) == said(output, forked)
    for name in ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json"):
        a, b = (d / "step_00000020" / name for d in (forked, launched))
        assert hashlib.sha256(a.read_bytes()).digest() == hashlib.sha256(b.read_bytes()).digest(), name
    for step, line in by_step(launched).items():
        assert {k: v for k, v in line.items() if k not in CLOCK} == {
            k: v for k, v in lines[step].items() if k not in CLOCK
        }


SHOWS = """
import os, signal, sys
print(sys.argv, os.getcwd(), sys.path[0], __name__, sys.stdin.read(), os.environ["SHOWN"], sorted(os.environ))
print(os.umask(0), signal.getsignal(2), signal.getsignal(15), signal.getsignal(1), sys.stdout.line_buffering)
print("told", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["code", "script", "module", "input"])
def test_what_a_process_is_given(tmp_path, how):
    (tmp_path / "shows.py").write_text(SHOWS)
    arguments = {"code": ["-c", SHOWS], "script": ["shows.py"], "module": ["-m", "shows"], "input": ["-"]}[how]
    given = "" if how == "input" else "a line"
    if how == "input":
        given = SHOWS.replace("sys.stdin.read()", "0")
    results = [
        run(*arguments, "x", "y z", python=python, cwd=tmp_path, input=given, env={"SHOWN": "yes"})
        for python in (None, sys.executable)
    ]
    assert [r.returncode for r in results] == [0, 0], results
    assert results[0].stdout == results[1].stdout
    assert results[0].stderr == results[1].stderr == "told\n"


@pytest.mark.parametrize(
    "code",
    [
        "1/0",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('a message')",
        "raise KeyboardInterrupt",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os._exit(75)",
        "import atexit, threading, time; atexit.register(print, 'last'); "
        "threading.Thread(target=lambda: (time.sleep(0.2), print('late'))).start()",
    ],
)
def test_how_a_process_ends(code):
    forked, launched = run("-c", code), run("-c", code, python=sys.executable)
    assert (forked.returncode, forked.stdout, forked.stderr) == (launched.returncode, launched.stdout, launched.stderr)


def test_nothing_of_the_repository_is_imported_and_no_run_sees_another():
    code = "import sys, torch; print([m for m in sys.modules if m.split('.')[0] in ('recipe', 'eval', 'tests')]); "
    code += "print(hasattr(torch, 'left')); torch.left = 1; import numpy; print(numpy.random.rand())"
    first, second = run("-c", code).stdout.splitlines(), run("-c", code).stdout.splitlines()
    assert first[:2] == second[:2] == ["[]", "False"]
    assert first[2] != second[2]


def test_what_is_read_while_importing_is_the_callers(tmp_path):
    code = "import sys; warm = 'torch' in sys.modules; from huggingface_hub import constants; "
    code += "print(warm, constants.HF_HOME, constants.ENDPOINT, constants.HF_HUB_OFFLINE)"
    for home in tmp_path / "one", tmp_path / "two":
        env = {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_OFFLINE": "0"}
        assert run("-c", code, env=env).stdout == f"True {home} http://127.0.0.1:1 False\n"
    for name in ("TORCH_LOGS", "OMP_NUM_THREADS", "PYTHONHASHSEED"):  # too early for any fork
        assert run("-c", code, env={name: "2" if name[0] != "T" else "recompiles"}).stdout.startswith("False ")


def test_signals_reach_the_fork_and_it_dies_with_its_client():
    code = "import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\nprint(os.getpid(), flush=True)\n"
    code += "while True: time.sleep(0.05)"
    for number, expected in ((signal.SIGTERM, 7), (signal.SIGINT, -signal.SIGINT), (signal.SIGKILL, -signal.SIGKILL)):
        process = subprocess.Popen(
            [warm.python(), "-c", code], env=environment(), stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
        )
        pid = int(process.stdout.readline())
        process.send_signal(number)
        assert process.wait(timeout=60) == expected
        process.stdout.read()  # until nobody has it open
        deadline = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not Path(f"/proc/{pid}").exists()


def test_open_files_are_handed_on(tmp_path):
    with open(tmp_path / "file", "w+") as file:
        run("-c", f"import os; os.write({file.fileno()}, b'handed')", pass_fds=[file.fileno()])
        assert (tmp_path / "file").read_text() == "handed"


# The server and its client by themselves


@pytest.fixture
def own_server(tmp_path):
    """own_server(TMPDIR) -> (a process of tests that has started a server, the server's directory or "")."""
    started = []

    def start(directory: Path):
        code = "from tests import warm; import os, sys; warm.start(dict(os.environ)); "
        code += "print(os.environ.get(warm.DIRECTORY, ''), warm.python(), sep='\\n', flush=True); sys.stdin.read()"
        env = {k: v for k, v in os.environ.items() if k != warm.DIRECTORY} | {"TMPDIR": str(directory)}
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=ROOT, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        return process, *(process.stdout.readline().rstrip("\n") for _ in range(2))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def until(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_a_client_that_is_killed_in_mid_request_costs_the_server_nothing(own_server, tmp_path):
    _, directory, _ = own_server(tmp_path)
    for _ in range(2):  # the second is heard after the first
        reading, writing = os.pipe()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{directory}/socket")
            socket.send_fds(client, [(100).to_bytes(4, "big")], [writing])
            client.sendall(b"{")
        os.close(writing)
        ended, _, _ = select.select([reading], [], [], 30)  # the server has closed what it was sent
        os.close(reading)
        assert ended


def test_a_server_whose_requests_end_in_mid_request_ends():
    code = "import os, socket; from tests.warm.server import Second; ours, theirs = socket.socketpair(); "
    code += "socket.send_fds(ours, [(100).to_bytes(4, 'big')], [0]); ours.sendall(b'{'); ours.close(); "
    code += "Second(theirs, None).receive(); os._exit(1)"
    assert run("-c", code, python=sys.executable, env={"PYTHONPATH": str(ROOT)}, timeout=30).returncode == 0


def test_a_signal_in_mid_request_comes_after_it(tmp_path):
    warm.write_clients(tmp_path)
    large = {f"LARGE{i}": "x" * 100_000 for i in range(8)}  # more than a socket takes before somebody reads
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        listening.settimeout(60)
        client = subprocess.Popen([tmp_path / "python", "-c", ""], env=environment(large))
        try:
            connection, _ = listening.accept()
            with connection:
                connection.settimeout(60)
                size, fds, _, _ = socket.recv_fds(connection, 4, 250)
                for fd in fds:
                    os.close(fd)
                client.send_signal(signal.SIGTERM)
                client.send_signal(signal.SIGUSR1)
                whole = receive(connection, int.from_bytes(size, "big"))
                assert json.loads(whole)["env"].items() >= large.items()
                assert {*receive(connection, 2)} == {signal.SIGTERM, signal.SIGUSR1}
                connection.sendall(b"7")
            assert client.wait(timeout=60) == 7
        finally:
            client.kill()


def test_the_server_cleans_up_after_a_pytest_that_was_killed(own_server, tmp_path):
    process, directory, python = own_server(tmp_path)
    assert python == f"{directory}/python"
    assert Path(python).exists()
    process.kill()
    assert until(lambda: not list(tmp_path.iterdir()))


def test_a_directory_whose_path_is_too_long_for_a_socket_leaves_all_cold(own_server, tmp_path):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    _, directory, python = own_server(long)
    assert (directory, python) == ("", sys.executable)
    assert list(long.iterdir()) == []


@pytest.mark.parametrize("name", ["plain", "my environment", "long" * 50])
def test_a_program_for_a_python_wherever_it_lies(tmp_path, name):
    (tmp_path / name).mkdir()
    python, program = tmp_path / name / "python", tmp_path / "program"
    python.symlink_to(sys.executable)
    program.write_text(
        warm.shebang(str(python), "-IS") + '"""What it is."""\nimport sys\nprint(sys.flags.isolated, sys.argv)'
    )
    program.chmod(0o755)
    result = subprocess.run([program, "a b", "'c'", '"'], capture_output=True, text=True, check=True)
    assert result.stdout == f"1 {[str(program), 'a b', chr(39) + 'c' + chr(39), chr(34)]}\n"
    assert result.stderr == ""
