"""server.py DIRECTORY SOCKET: listens, forks a process for each client, and ends with its stdin.

Two generations of servers, each of which has recorded which variables were read while it imported. The first has
imported torch; the second, of which there is one for each set of values of those variables (the Hub's address, its
caches, offline or not), what is built on it. Neither may start a thread: a fork takes one along, and leaves the others'
locks as they are.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = 6  # servers of the second generation, of some 200 MB each
FIRST = ("numpy", "torch", "torch._dynamo", "matplotlib")
# Imported lazily by what the recipe imports, and dear.
LAZY = (
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.elastic.multiprocessing",
    "torch._inductor.config",
)
DEEPSPEED = ("deepspeed", "deepspeed.ops", "deepspeed.runtime.zero.muon.muon_optimizer")
# Read by C libraries and the interpreter, when they are loaded, or by prefix.
NATIVE = (
    "LD_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "MALLOC_",
    "GLIBC_",
    "LC_",
    "LANG",
    "PYTHON",
    "PYTORCH_",
    "ARROW_",
    "CUDA_",
    "FSSPEC_",
    "TQDM_",
    "NETWORKX_",
    "DS_",
)
HANDLED = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER"}  # by `become`
# The one is read when torch is asked, not when it is imported. The other is set by libraries in whoever imports them,
# the tests' own process too; only another OpenMP than torch's for Linux reads it.
LATE = {"PYTORCH_NVML_BASED_CUDA_CHECK", "KMP_DUPLICATE_LIB_OK"}
CHOSEN = ("ACCELERATE_USE_DEEPSPEED",)  # decides what is imported
IGNORE = (
    "recipe",
    "eval",
    "torch_xla",
    "deepspeed",
    "evaluate",
    "lm_eval",
    "trl",
    "datasets",
    "pandas",
    "pyarrow",
)  # threads, or rarely


@contextlib.contextmanager
def recorded(keys: set):
    """Names of the variables that are read within, but for those of a look at all."""
    get = os._Environ.__getitem__

    def recording(self, key):
        if sys._getframe(1).f_code.co_name != "__iter__":
            keys.add(key)
        return get(self, key)

    os._Environ.__getitem__ = recording
    try:
        yield
    finally:
        os._Environ.__getitem__ = get


def imported_at_the_top() -> list[tuple[str, str | None]]:
    """What the modules of recipe/ and eval/ import from elsewhere, outside functions: module, and name in it."""
    found = {}
    for path in sorted([*(ROOT / "recipe").rglob("*.py"), *(ROOT / "eval").rglob("*.py")]):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {(alias.name, None): 0 for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found |= {(node.module, alias.name): 0 for alias in node.names}
    return [
        (m, n) for m, n in found if m.split(".")[0] not in IGNORE and m.split(".")[0] not in sys.stdlib_module_names
    ]


def receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; OSError where the other end has gone before it sent them."""
    body = bytearray()
    while len(body) < size:
        if not (part := connection.recv(size - len(body))):
            raise OSError("the other end has gone")
        body += part
    return bytes(body)


def import_all(modules) -> None:
    for module, name in modules:
        with contextlib.suppress(ImportError):
            getattr(importlib.import_module(module), name or "__name__", None)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads before a fork"
    gc.collect()
    gc.freeze()


class Server:
    def __init__(self, directory: Path, listening: socket.socket):
        self.directory, self.python, self.listening = directory, sys.executable, listening
        self.environment = dict(os.environ)
        self.path = sys.path[1:]
        self.first, self.second = set(), set()  # variables read by the imports of each generation
        self.warm = False
        self.servers: dict[tuple, socket.socket] = {}  # of the second generation
        self.retired: list[socket.socket] = []  # no more requests, but their forks are left to end

    # The first generation

    def run(self) -> Job | None:
        """Serves; returns in forked processes only, with what they are to do, and in the end."""
        with selectors.DefaultSelector() as ready:
            ready.register(0, selectors.EVENT_READ)
            ready.register(self.listening, selectors.EVENT_READ)
            while True:
                for key, _ in ready.select():
                    if key.fileobj == 0:
                        for server in (*self.servers.values(), *self.retired):
                            server.close()
                        with contextlib.suppress(ChildProcessError):
                            while True:
                                os.wait()
                        shutil.rmtree(self.directory, ignore_errors=True)  # also where pytest was killed
                        return None
                    connection, _ = self.listening.accept()
                    if (server := self.dispatch(connection)) is not None:
                        return server
                    connection.close()

    def dispatch(self, connection: socket.socket) -> Job | None:
        try:
            size, fds, _, _ = socket.recv_fds(connection, 4, 250)
        except OSError:
            return None
        try:
            body = receive(connection, int.from_bytes(size, "big"))
            request = json.loads(body)
        except (OSError, ValueError):
            for fd in fds:
                os.close(fd)
            return None
        if not self.warm:
            with recorded(self.first):
                import_all([(name, None) for name in FIRST])
            self.warm = True
        different = self.different(request["env"], self.first)
        if different or request["env"].get("PJRT_DEVICE"):
            print("real:", " ".join(different), request["argv"], flush=True)
            with contextlib.suppress(OSError):  # a client that has gone
                connection.sendall(b"real")
        else:
            values = self.values(request["env"])
            if values not in self.servers or not self.second:
                if (job := self.fork_server(request["env"], connection, fds)) is not None:
                    return job
                values = self.values(request["env"])
                self.servers[values] = self.newest
                while len(self.servers) > AT_ONCE:
                    oldest = self.servers.pop(next(iter(self.servers)))
                    with contextlib.suppress(OSError):
                        oldest.sendall(bytes(4))
                    self.retired.append(oldest)
            self.servers[values] = self.servers.pop(values)  # the last one used
            try:
                socket.send_fds(self.servers[values], [len(body).to_bytes(4, "big")], [connection.fileno(), *fds])
                self.servers[values].sendall(body)
            except OSError:
                print("a server has died", flush=True)
                del self.servers[values]
        for fd in fds:
            os.close(fd)
        return None

    def values(self, env: dict) -> tuple:
        """What tells servers of the second generation apart."""
        return tuple((k, env.get(k)) for k in sorted({*(self.second - self.first - HANDLED - LATE), *CHOSEN}))

    def different(self, env: dict, read: set) -> list[str]:
        names = read | {k for k in {*env, *self.environment} if k.startswith(NATIVE)}
        # as the server was given it, or as an import has left it
        return sorted(
            k for k in names - HANDLED - LATE if env.get(k) not in (self.environment.get(k), os.environ.get(k))
        )

    def fork_server(self, env: dict, connection: socket.socket, fds: list[int]) -> Job | None:
        """A server of the second generation for `env`, in self.newest; in the server's forks: what they are to do."""
        ours, theirs = socket.socketpair()
        start = time.monotonic()
        if os.fork() == 0:
            for unused in (ours, connection, self.listening, *self.servers.values(), *self.retired):
                unused.close()
            for fd in fds:
                os.close(fd)
            os.environ.clear()
            os.environ.update(env)
            os.environ.pop("PYTHONPATH", None)
            read = set()
            with recorded(read):
                import_all([*imported_at_the_top(), *((name, None) for name in LAZY)])
                if env.get("ACCELERATE_USE_DEEPSPEED") == "true":
                    if env.get("ACCELERATE_USE_CPU") == "true":
                        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as recipe/engine/deepspeed.py does
                    import_all((name, None) for name in DEEPSPEED)
            theirs.sendall(json.dumps(sorted(read)).encode())
            return Second(theirs, self).run()
        theirs.close()
        self.second |= set(json.loads(ours.recv(1 << 20)))
        self.newest = ours
        others = sorted(k for k in self.second if env.get(k) != self.environment.get(k))  # values may be secrets
        print("server:", f"{time.monotonic() - start:.1f} s", *others, flush=True)
        return None


class Second:
    """A server of the second generation: forks, and tells clients how the forks have ended."""

    def __init__(self, requests: socket.socket, first: Server):
        self.requests, self.first = requests, first
        self.clients: dict[int, socket.socket] = {}  # by the fork's process id

    def run(self) -> Job:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ready = selectors.DefaultSelector()
        ready.register(reading, selectors.EVENT_READ, "ended")
        ready.register(self.requests, selectors.EVENT_READ, "request")
        retired = False
        while self.clients or not retired:
            for key, _ in ready.select():
                if key.data == "ended":
                    os.read(reading, 100)
                    self.reap(ready)
                elif key.data == "request":
                    request, connection, fds = self.receive()
                    if not request:
                        retired = True
                        continue
                    if (pid := os.fork()) == 0:
                        ready.close()
                        for unused in (connection, self.requests, *self.clients.values()):
                            unused.close()
                        return Job(request, fds, self.first)
                    for fd in fds:
                        os.close(fd)
                    self.clients[pid] = connection
                    ready.register(connection, selectors.EVENT_READ, pid)
                elif key.data in self.clients:
                    try:
                        told = self.clients[key.data].recv(100)
                    except OSError:
                        told = b""
                    with contextlib.suppress(ProcessLookupError):
                        for number in told or [signal.SIGKILL]:
                            os.kill(key.data, number)
                    if not told:
                        ready.unregister(key.fileobj)
        os._exit(0)

    def receive(self) -> tuple[dict, socket.socket | None, list[int]]:
        """The next request, its client and its files; an empty one where there will be no more."""
        body, fds = b"", []
        with contextlib.suppress(OSError):
            size, fds, _, _ = socket.recv_fds(self.requests, 4, 250)
            if size and not any(size):
                return {}, None, []
            body = receive(self.requests, int.from_bytes(size, "big"))
        if not body:  # the first generation has ended
            for pid in self.clients:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            while self.clients:
                self.reap(None)
            os._exit(0)
        return json.loads(body), socket.socket(fileno=fds[0]), fds[1:]

    def reap(self, ready) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG if ready else 0)
                if not pid:
                    return
                client = self.clients.pop(pid)
                with contextlib.suppress(KeyError, ValueError):
                    ready.unregister(client) if ready else None
                with contextlib.suppress(OSError):
                    client.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                client.close()
                if not ready:
                    return


class Job:
    """What a forked process does: what the interpreter would, with the client's command line."""

    def __init__(self, request: dict, fds: list[int], server: Server):
        self.request, self.fds, self.server = request, fds, server

    def become(self) -> None:
        """Takes over all that the client had."""
        request, env = self.request, self.request["env"]
        os.setsid()
        os.sched_setaffinity(0, request["cores"])
        os.umask(request["umask"])
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, *(n for n in request["ignored"] if n not in (signal.SIGKILL, signal.SIGSTOP))):
            signal.signal(number, signal.SIG_IGN if number in request["ignored"] else signal.SIG_DFL)
        # First out of the way of the numbers they are to have.
        above = [os.dup2(fd, 500 + i) for i, fd in enumerate(self.fds)]
        os.closerange(3, 500)
        for fd, number in zip(above, request["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        os.chdir(request["cwd"])
        unbuffered = bool(env.get("PYTHONUNBUFFERED")) or request["argv"][:1] == ["-u"]
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = getattr(sys, name)
            if unbuffered and name == "stdout":
                raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115 - for the life of the process
                stream = sys.stdout = sys.__stdout__ = __import__("io").TextIOWrapper(
                    raw, stream.encoding, stream.errors, write_through=True
                )
            stream.reconfigure(line_buffering=name == "stderr" or os.isatty(1))
        sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
        sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
        if env.get("PYTHONFAULTHANDLER"):
            __import__("faulthandler").enable()
        sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(os.pathsep)), *self.server.path]
        sys.executable = str(self.server.directory / "python")
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # a fork would draw what the others draw

    def run(self) -> None:
        self.become()
        main = types.ModuleType("__main__")
        main.__builtins__ = __builtins__
        sys.modules["__main__"] = main
        argv = self.request["argv"][self.request["argv"][:1] == ["-u"] :]
        if not self.request["name"].startswith("python"):
            argv = [str(Path(self.server.python).parent / self.request["name"]), *argv]
        if argv[:1] == ["-m"]:
            import runpy

            sys.argv = ["-m", *argv[2:]]
            sys.modules.pop(argv[1], None)
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(argv[1])
            return
        if argv[:1] == ["-c"]:
            source, name, sys.argv = argv[1], "<string>", ["-c", *argv[2:]]
            sys.path.insert(0, "")
        elif argv in ([], ["-"]):
            source, name, sys.argv = sys.stdin.read(), "<stdin>", argv or [""]
            sys.path.insert(0, "")
        else:
            source, name, sys.argv = Path(argv[0]).read_bytes(), argv[0], argv
            sys.path.insert(0, str(Path(argv[0]).resolve().parent))
            main.__file__ = argv[0]
        exec(compile(source, name, "exec"), main.__dict__)


def main() -> None:
    job = Server(Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))).run()
    if not job:
        return
    code = 1
    try:
        job.run()
        code = 0
    except SystemExit as exit:
        code = exit.code
    except BaseException as error:
        while (trace := error.__traceback__) and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            error.__traceback__ = trace.tb_next
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    leave(code)


def leave(code: object) -> None:
    """Ends as the interpreter does, but for taking apart what was imported: that would take longer than the imports."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code and code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    main()
