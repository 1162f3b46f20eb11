"""How tests start several processes that find each other."""

import socket
from contextlib import closing

import pytest

from tests.processes import Running

PROGRAM = "import os, time\nprint(os.environ['MASTER_PORT'] + '.', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_the_port_where_processes_meet_is_reserved(tmp_path, processes):
    """One process gets port 0, so that the system chooses; several get one that is reserved on every address."""
    (tmp_path / "program.py").write_text(PROGRAM)
    running = Running(tmp_path / "program.py", processes=processes)
    try:
        running.until(".")
        port = int(running.stdout.partition(".")[0])
        assert (port == 0) == (processes == 1)
        for address in ("", "127.0.0.1") if port else ():
            with closing(socket.socket()) as listener, pytest.raises(OSError, match="in use"):
                listener.bind((address, port))
    finally:
        running.kill()
