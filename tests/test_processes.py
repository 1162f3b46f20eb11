"""How tests start several processes that find each other."""

import socket
from contextlib import closing

import pytest

from tests.processes import Running

PROGRAM = "import os, time\nprint(os.environ['MASTER_PORT'] + '.', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize("processes", [1, 2])
def test_nobody_else_is_given_the_port_where_the_processes_meet(tmp_path, processes):
    """One process lets the system choose, several are told one that is theirs on every address until they listen."""
    (tmp_path / "program.py").write_text(PROGRAM)
    running = Running(tmp_path / "program.py", processes=processes)
    try:
        running.until(".")
        port = int(running.stdout.partition(".")[0])
        assert (port == 0) == (processes == 1)
        for address in ("", "127.0.0.1") if port else ():
            with closing(socket.socket()) as other, pytest.raises(OSError, match="in use"):
                other.bind((address, port))
    finally:
        running.kill()
