"""Stands in for python: has a fork of the server do what its command line says, and ends as that does.

Copied under the name of the command it stands for. Where the server says that it cannot, becomes the real command.
"""

import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
NAME = os.path.basename(__file__)
# What a run starts beside itself: light, and its process is what the run watches.
BESIDE = ("recipe.hub.upload", "recipe.data.streaming.builder")
PASSED_ON = ("INT", "TERM", "HUP", "QUIT", "ABRT", "USR1", "USR2")


def fds():
    """Of the files that were open when this process began."""
    return [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]


def main(arguments, inherited):
    connection = socket.socket(socket.AF_UNIX)
    ignored = [n for n in map(int, signal.Signals) if signal.getsignal(n) is signal.SIG_IGN and n != signal.SIGPIPE]
    request = {
        "name": NAME,
        "argv": arguments,
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "ignored": ignored,
        "fds": [0, 1, 2, *inherited],
        "umask": os.umask(0),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    os.umask(request["umask"])
    plain = not arguments or arguments[0] in ("-c", "-m", "-u") or not arguments[0].startswith("-") or NAME[0] == "a"
    if not plain or (arguments[0:1] == ["-m"] and arguments[1] in BESIDE) or "--multiprocessing-fork" in arguments:
        return real(inherited)
    try:
        connection.connect(f"{HERE}/socket")
        passed_on = {getattr(signal, f"SIG{name}") for name in PASSED_ON} - {*ignored}
        # Held back until the request is sent: a signal's byte within it would spoil it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
        for number in passed_on:
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        body = json.dumps(request).encode()
        socket.send_fds(connection, [len(body).to_bytes(4, "big")], request["fds"])
        connection.sendall(body)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        answer = connection.recv(100).decode()
    except (OSError, UnicodeError):
        answer = ""
    if not answer.lstrip("-").isdigit():
        if answer == "real":
            return real(inherited)
        sys.exit("the server of tests/warm has died")
    code = int(answer)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def real(inherited):
    for name in PASSED_ON:
        number = getattr(signal, f"SIG{name}")
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    with open(f"{HERE}/real") as file:
        python = file.read()
    command = python if NAME.startswith("python") else os.path.join(os.path.dirname(python), NAME)
    for fd in inherited:
        os.set_inheritable(fd, True)
    os.execv(command, [command, *sys.argv[1:]])


if __name__ == "__main__":
    main(sys.argv[1:], fds())
