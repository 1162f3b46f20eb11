"""A Hugging Face Hub on this machine: the part of its API that reads data sets, and its failures on demand.

    with Hub(root) as hub:  # serves root/<org>/<name>/<files>
        hub.faults.append(Fault(path="*.parquet", status=429, headers={"Retry-After": "1"}, times=2))
        subprocess.run(command, env=os.environ | hub.environment)
        assert ("GET", "/datasets/org/name/resolve/main/a.parquet", None, 429) in hub.requests

The libraries read their environment when imported: point another process at it. Processes share a cache in HF_HOME.
"""

import hashlib
import json
import re
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
# What the Hub keeps in LFS whatever its size (the .gitattributes of a new data set), as far as tests may need it.
LFS = {".arrow", ".bin", ".bz2", ".gz", ".npy", ".npz", ".parquet", ".safetensors", ".tar", ".xz", ".zip", ".zst"}
URL = re.compile(
    r"(/datasets(?=/[^/]+/[^/]+/resolve/)|/api/datasets(?!/[^/]+/[^/]+/resolve/))/(?P<name>[^/]+/[^/]+)"
    r"(/(?P<what>revision|tree|paths-info|resolve)/(?P<revision>[^/]+)(/(?P<path>.+))?)?"
)

# What faults say by default: (X-Error-Code, X-Error-Message). Clients choose their exception by the code. Over https
# they take a 401 without one for "no such repository" too; over http they do not recognise the URL.
MEANING = {
    401: ("RepoNotFound", "Invalid username or password."),
    403: ("GatedRepo", "Access to this dataset is restricted and you are not in the authorized list."),
    404: ("EntryNotFound", "Entry not found"),
}


class Request(NamedTuple):
    method: str
    path: str  # unquoted, without the query
    range: str | None
    status: int  # 0 where the connection broke before a status line


@dataclass(eq=False)
class Fault:
    """What goes wrong with `times` of the requests that match, the first `skip` of them let through. Of the faults
    that match a request the first one in the list decides.

    "status": the answer is `status` with `headers`; an empty X-Error-Code takes the usual one away.
    "reset": the first `after` bytes of the right answer's body, then the connection is reset.
    "close": the same, but it is closed as if the answer were complete, which clients treat differently.
    "stall": the same, but nothing comes for `seconds` before it is reset.
    after=None breaks before the status line: the way to break a HEAD, which has no body. received=N breaks, or stalls,
    when so many bytes of the request's body have come, and nothing is answered: an upload that stops in the middle.
    """

    path: str = "*"  # fnmatch patterns
    method: str = "*"
    kind: str = "status"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = 0
    received: int | None = None
    seconds: float = 600
    times: int = 1
    skip: int = 0


def success(value) -> Answer:
    return 200, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode()


def error(status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> Answer:
    every = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"} | (headers or {})
    return status, {name: value for name, value in every.items() if value}, json.dumps({"error": message}).encode()


class Hub:
    commit = "0123456789abcdef0123456789abcdef01234567"  # what "main" is, and the only one there is
    page = 1000  # entries that an answer to /tree holds; its Link header leads to the next ones

    def __init__(self, root: Path):
        self.root = Path(root)
        self.token: str | None = None  # when set, a request without it is refused
        self.requests: list[Request] = []
        self.faults: list[Fault] = []  # one that is used up is removed
        self.stopping = threading.Event()
        self.connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self):
        handler = type("HubHandler", (Handler,), {"hub": self, "log_message": lambda *_: None})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._home = TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True)
        home = self._home.name
        # Also what has a default: it may be set, to something else, where the tests run.
        self.environment = {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": "",
            "HF_HOME": home,
            "HF_TOKEN_PATH": f"{home}/token",
            "HF_HUB_CACHE": f"{home}/hub",
            "HF_DATASETS_CACHE": f"{home}/datasets",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):  # an idle one would still be answered
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._home.cleanup()

    def fault(self, method: str, path: str) -> Fault | None:
        with self._lock:
            for fault in self.faults:
                if fnmatch(path, fault.path) and fnmatch(method, fault.method):
                    if fault.skip > 0:
                        fault.skip -= 1
                        return None
                    fault.times -= 1
                    if fault.times <= 0:
                        self.faults.remove(fault)
                    return fault
        return None

    def records(self, path: str) -> bool:
        """Whether a request goes into `requests`: not what clients look up for their User-Agent."""
        return path.startswith(("/api/datasets/", "/datasets/"))

    def answer(self, method: str, url: str, headers, body: bytes) -> Answer:
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        given = headers.get("Authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            return error(401, "", "Invalid credentials in Authorization header") if given else error(401, *MEANING[401])
        if (match := URL.fullmatch(parts.path)) is None or ".." in unquote(parts.path).split("/"):
            return error(404, "", "Sorry, we can't find the page you are looking for.")
        name, what, revision, path = (unquote(match[group] or "") for group in ("name", "what", "revision", "path"))
        repository = self.root / name
        if not repository.is_dir():  # who is not known is not told whether there is a private one
            return error(404, "RepoNotFound", "Repository not found") if given else error(401, *MEANING[401])
        if revision not in ("", "main", self.commit):
            return error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if what == "resolve":
            return self._file(repository, path, headers.get("Range"))
        if what == "paths-info":
            form = parse_qs(body.decode())
            paths, expand = form.get("paths", []), form.get("expand") == ["true"]
            return success([self._entry(repository, path, expand) for path in paths if (repository / path).exists()])
        if not (repository / path).is_dir():
            return error(404, "EntryNotFound", f'{path} does not exist on "{revision}"')
        below = (repository / path).glob("*" if what == "tree" and query.get("recursive") != "true" else "**/*")
        paths = sorted(file.relative_to(repository).as_posix() for file in below)
        if what != "tree":  # dataset_info
            siblings = [{"rfilename": path} for path in paths if (repository / path).is_file()]
            return success({"id": name, "sha": self.commit, "private": False, "gated": False, "siblings": siblings})
        end = (start := int(query.get("cursor", 0))) + self.page
        answer = success([self._entry(repository, path, query.get("expand") == "true") for path in paths[start:end]])
        if end < len(paths):
            answer[1]["Link"] = f'<{self.url}{parts.path}?{urlencode(query | {"cursor": end})}>; rel="next"'
        return answer

    def _entry(self, repository: Path, path: str, expand: bool) -> dict:
        file = repository / path
        entry = {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}
        if file.is_file():
            content = file.read_bytes()
            entry |= {"type": "file", "size": len(content)}
            if file.suffix in LFS:  # git has a pointer alone
                sha256, size = hashlib.sha256(content).hexdigest(), len(content)
                content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
                entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(content)}
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if expand:
            entry["lastCommit"] = {"id": self.commit, "title": "Upload", "date": "2024-01-01T00:00:00.000Z"}
        return entry

    def _file(self, repository: Path, path: str, asked: str | None) -> Answer:
        headers = {"X-Repo-Commit": self.commit, "Accept-Ranges": "bytes"}
        if not (repository / path).is_file():
            return error(404, *MEANING[404], headers)
        entry, content = self._entry(repository, path, False), (repository / path).read_bytes()
        headers |= {"ETag": f'"{entry["oid"]}"', "Content-Type": "application/octet-stream"}
        if "lfs" in entry:
            headers |= dict.fromkeys(("ETag", "X-Linked-Etag"), f'"{entry["lfs"]["oid"]}"')
            headers["X-Linked-Size"] = str(len(content))
        match = re.fullmatch(r"bytes=(\d*)-(\d*)", asked or "-")
        if match is None or not any(match.groups()):
            return 200, headers, content
        first, last, size = *match.groups(), len(content)
        start = int(first) if first else max(size - int(last), 0)
        end = min(int(last) + 1, size) if first and last else size
        if start >= end:
            return error(416, "", "Range Not Satisfiable", headers | {"Content-Range": f"bytes */{size}"})
        return 206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, content[start:end]


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits for the acknowledgement of its headers

    def handle(self):
        self.hub.connections.add(self.connection)
        with suppress(OSError):  # the client has gone
            super().handle()
        self.hub.connections.discard(self.connection)

    def respond(self):
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.fault(self.command, path)
        length = int(self.headers.get("Content-Length", 0))
        if fault and fault.received is not None:
            self.rfile.read(min(length, fault.received))
            self.hub.requests.append(Request(self.command, path, None, 0))
            self.break_off(fault)
            return
        body = self.rfile.read(length)
        if fault and fault.kind == "status":  # and nothing is done
            status, headers, content = error(fault.status, *MEANING.get(fault.status, ("", "")), fault.headers)
            fault = None
        else:
            status, headers, content = self.hub.answer(self.command, self.path, self.headers, body)
        if fault and fault.after is None:
            status = 0
        if self.hub.records(path):  # before it is sent: who has the answer finds it recorded
            self.hub.requests.append(Request(self.command, path, self.headers.get("Range"), status))
        if status:
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(content))}).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: fault.after if fault else None])
        if fault:
            self.break_off(fault)

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def break_off(self, fault: Fault):
        # A reset throws away what the other side has not acknowledged yet: leave it the time.
        deadline = time.monotonic() + (fault.seconds if fault.kind == "stall" else 0.1)
        while time.monotonic() < deadline and not self.hub.stopping.wait(0.02):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                break  # the client has gone
        self.close_connection = True
        if fault.kind != "close":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Not close(): rfile would keep the socket open, and the server say goodbye properly before it is reset.
            self.hub.connections.discard(self.connection)
            socket.close(self.connection.detach())
