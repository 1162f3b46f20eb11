"""A local Hugging Face Hub: data sets to read, models to upload, and failures on demand.

    with Hub(root) as hub:  # serves the data sets root/<org>/<name>/<files>
        hub.faults.append(Fault(path="*.parquet", status=429, headers={"Retry-After": "1"}, times=2))
        subprocess.run(command, env=os.environ | hub.environment)
        assert ("GET", "/datasets/org/name/resolve/main/a.parquet") in hub.requests
        assert hub.files("acme/gpt2", "main")["config.json"] == (checkpoint / "config.json").read_bytes()

The libraries read the environment when they are imported, so only a new process can use `hub.environment`. Such
processes share a cache, HF_HOME.
"""

import base64
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
from urllib.parse import parse_qs, unquote, urlsplit

Answer = tuple[int, dict[str, str], bytes]  # status, headers, body
# Suffixes of files that the Hub keeps in LFS whatever their size (from the .gitattributes of a new repository).
LFS = {".bin", ".gz", ".parquet", ".safetensors", ".zst"}


@dataclass(eq=False)
class Fault:
    """A failure of `times` matching requests, after the first `skip` of them. If several faults match a request, the
    first in the list counts.

    "status": the Hub answers with `status` and `headers`, and does nothing.
    "reset": the Hub sends the first `after` bytes of the correct answer's body, then resets the connection.
    "stall": the same, but the Hub goes silent for ten minutes.
    after=None: before the status line; the way to break a HEAD, which has no body.
    """

    path: str = "*"  # fnmatch patterns
    method: str = "*"
    kind: str = "status"
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = 0
    times: int = 1
    skip: int = 0


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Model:
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("0" * 40, "initial", {})]})


def reply(value, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json; charset=utf-8"}, json.dumps(value).encode()


def error(status: int, code: str = "", message: str = "", headers: dict[str, str] | None = None) -> Answer:
    """Clients choose their exception by the code. Over https they also take a 401 without a code for "no such
    repository"; over http they do not recognize the URL."""
    headers = {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"} | (headers or {})
    return status, {name: value for name, value in headers.items() if value}, json.dumps({"error": message}).encode()


def blob_id(content: bytes) -> str:
    """Git's object id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def entry(path: str, content: bytes | None) -> dict:
    """The Hub's description of a file, or of a directory (`content` is None)."""
    if content is None:
        return {"type": "directory", "path": path, "size": 0, "oid": blob_id(path.encode())}
    info = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if Path(path).suffix in LFS:
        info["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return info


class Hub:
    commit = "0123456789abcdef0123456789abcdef01234567"  # the only commit of each data set

    def __init__(self, root: Path, token: str = ""):
        """With a `token`, the Hub refuses requests without it."""
        self.root, self.token = Path(root), token
        self.models: dict[str, Model] = {}
        self.requests: list[tuple[str, str]] = []  # methods and paths, unquoted, without queries
        self.faults: list[Fault] = []  # a fault is removed after its last time
        self.stopping = threading.Event()
        self._objects: dict[str, bytes] = {}  # LFS objects by SHA-256
        self._lock = threading.Lock()

    def __enter__(self):
        handler = type("HubHandler", (Handler,), {"hub": self, "log_message": lambda *_: None})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._home = TemporaryDirectory(prefix="hub-", ignore_cleanup_errors=True)
        home = self._home.name
        # Including variables with a suitable default: the machine may set them to something else.
        self.environment = {
            "HF_ENDPOINT": self.url,
            "HF_HUB_OFFLINE": "0",
            "HF_DATASETS_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_TOKEN": self.token,
            "HF_HOME": home,
            "HF_TOKEN_PATH": f"{home}/token",
            "HF_HUB_CACHE": f"{home}/hub",
            "HF_DATASETS_CACHE": f"{home}/datasets",
        }
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._home.cleanup()

    def files(self, model: str, branch: str) -> dict[str, bytes]:
        """The files of a branch."""
        return self.models[model].branches[branch][-1].files

    def count(self, method: str, part: str) -> int:
        """The number of requests whose path contains `part`."""
        return sum(request[0] == method and part in request[1] for request in self.requests)

    def fault(self, method: str, path: str) -> Fault | None:
        """The fault of a request, if it has one; counts down `skip` and `times`."""
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

    def answer(self, method: str, url: str, headers, body: bytes) -> Answer:
        path, query = unquote(urlsplit(url).path), parse_qs(urlsplit(url).query)
        authorization = headers.get("Authorization")
        with self._lock:
            if method == "PUT":  # to the LFS storage, which needs no token
                return self._store(path.removeprefix("/lfs/"), body)
            if path == "/api/validate-yaml":
                return self._validate(json.loads(body)["content"])
            if self.token and authorization != f"Bearer {self.token}":
                return error(401, "" if authorization else "RepoNotFound", "Invalid username or password.")
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            revision = r"(refs/convert/parquet|[^/]+)"
            if match := re.fullmatch(rf"(?:/api)?/datasets/([^/]+/[^/]+)(?:/(\w[\w-]*)/{revision}(?:/(.+))?)?", path):
                return self._data_set(*match.groups(), query, headers.get("Range"), body)
            if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return self._batch(json.loads(body))
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/([\w-]+))?(?:/(.+))?", path):
                return self._model(*match.groups(), body)
            if match := re.fullmatch(r"/(\w+/\w+)/resolve/(\w+)/(.+)", path):
                name, oid, file = match.groups()
                return self._content(oid, file, self._at(name, oid).get(file), headers.get("Range"))
        return error(404, "", "Sorry, we can't find the page you are looking for.")

    # Data sets: directories

    def _data_set(
        self, name: str, action: str, revision: str, path: str, query: dict, byte_range: str | None, body: bytes
    ) -> Answer:
        top = self.root / name
        if not top.is_dir():
            return error(401, "RepoNotFound", "Invalid username or password.")
        if revision not in (None, "main", "refs/convert/parquet", self.commit):
            return error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if action == "resolve":
            content = (top / path).read_bytes() if (top / path).is_file() else None
            return self._content(self.commit, path, content, byte_range)
        if action == "paths-info":
            paths = [path for path in parse_qs(body.decode()).get("paths", []) if (top / path).exists()]
        elif (folder := top / (path or "")).is_dir():
            children = folder.glob("*" if action == "tree" and query.get("recursive") != ["true"] else "**/*")
            paths = sorted(file.relative_to(top).as_posix() for file in children)
        else:
            return error(404, "EntryNotFound", f'{path} does not exist on "{revision}"')
        if action not in ("tree", "paths-info"):  # dataset_info
            siblings = [{"rfilename": path} for path in paths if (top / path).is_file()]
            return reply({"id": name, "sha": self.commit, "private": False, "gated": False, "siblings": siblings})
        return reply([entry(path, (top / path).read_bytes() if (top / path).is_file() else None) for path in paths])

    def _content(self, commit: str, path: str, content: bytes | None, byte_range: str | None) -> Answer:
        """A file of a repository, None where there is none; of it only the bytes of `byte_range`, if there is one."""
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if content is None:
            return error(404, "EntryNotFound", "Entry not found", headers)
        info, size = entry(path, content), len(content)
        headers |= {"ETag": f'"{info.get("lfs", info)["oid"]}"', "Content-Type": "application/octet-stream"}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", byte_range or "")
        if not match:
            return 200, headers, content
        start, end = int(match[1]), min(int(match[2] or size) + 1, size)
        return 206, headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, content[start:end]

    # Models: uploaded over LFS' basic transfer, or over Xet, to a directory that hf-xet uses as its storage

    @staticmethod
    def may_write(model: str) -> bool:
        return model.startswith("acme/")

    def _create(self, request: dict) -> Answer:
        name = f"{request['organization']}/{request['name']}"
        if name in self.models:
            return reply({"url": f"{self.url}/{name}"}, 409)
        if not self.may_write(name):
            return error(403, "", f"You don't have the rights to create a model under the namespace {name}")
        self.models[name] = Model(private=request.get("visibility") == "private" or bool(request.get("private")))
        return reply({"url": f"{self.url}/{name}", "name": name})

    def _validate(self, card: str) -> Answer:
        """Accepts two licenses; the real Hub accepts many, and checks other metadata too."""
        if re.search(r"^license: (mit|cc-by-4\.0)$", card, re.MULTILINE):
            return reply({"errors": [], "warnings": []})
        return reply({"errors": [{"message": '"license" must be one of ...'}]}, 400)

    def _model(self, name: str, action: str | None, revision: str | None, body: bytes) -> Answer:
        if name not in self.models:
            return error(404, "RepoNotFound", "Repository not found")
        branches = self.models[name].branches
        if action == "auth-check":
            allowed = revision != "write" or self.may_write(name)
            return reply({}) if allowed else error(403, "", "You may not write there")
        if action == "branch":
            if revision in branches:
                return error(409, "", f"Reference already exists: refs/heads/{revision}")
            branches[revision] = list(branches["main"])
            return reply({})
        if action == "xet-write-token":
            storage = f"local://{self.root}/xet"
            return reply({"casUrl": storage, "accessToken": "xet", "exp": int(time.time()) + 3600})
        if action == "refs":
            heads = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commits[-1].oid}
                for branch, commits in branches.items()
            ]
            return reply({"branches": heads, "converts": [], "tags": []})
        if action == "tree":
            return reply([entry(path, content) for path, content in self._at(name, revision).items()])
        head = branches[revision or "main"][-1]
        if action == "preupload":
            return reply({"files": [self._mode(head, file["path"]) for file in json.loads(body)["files"]]})
        if action == "commit":
            return self._commit(name, revision, [json.loads(line) for line in body.splitlines()])
        private = self.models[name].private
        siblings = [{"rfilename": path} for path in head.files]
        return reply({"id": name, "sha": head.oid, "private": private, "gated": False, "siblings": siblings})

    def _at(self, name: str, oid: str) -> dict[str, bytes]:
        """The files of a commit, or of a branch."""
        branches = self.models[name].branches.values()
        if oid in self.models[name].branches:
            return self.models[name].branches[oid][-1].files
        return next(commit.files for commits in branches for commit in commits if commit.oid == oid)

    def _mode(self, head: Commit, path: str) -> dict:
        lfs = Path(path).suffix in LFS
        answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if (content := head.files.get(path)) is not None:
            answer["oid"] = hashlib.sha256(content).hexdigest() if lfs else blob_id(content)
        return answer

    def _batch(self, request: dict) -> Answer:
        objects = []
        for lfs_object in request["objects"]:
            action = {"upload": {"href": f"{self.url}/lfs/{lfs_object['oid']}?X-Amz-Signature=s3cret"}}
            objects.append(lfs_object | ({} if lfs_object["oid"] in self._objects else {"actions": action}))
        return reply({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return error(400, "", "The SHA-256 does not match")
        self._objects[oid] = body
        return reply({})

    def _commit(self, name: str, branch: str, lines: list[dict]) -> Answer:
        commits = self.models[name].branches[branch]
        files = dict(commits[-1].files)
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                # Xet's uploads are only in its storage; the SHA-256 stands for the content.
                files[value["path"]] = self._objects.get(value["oid"], value["oid"].encode())
        oid = hashlib.sha1(f"{name} {branch} {len(commits)}".encode()).hexdigest()
        commits.append(Commit(oid, message, files))
        return reply({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or a body waits for the acknowledgement of its headers

    def handle(self):
        with suppress(OSError):  # the client has gone
            super().handle()

    def respond(self):
        path = unquote(urlsplit(self.path).path)
        fault = self.hub.fault(self.command, path)
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        if fault and fault.kind == "status":
            (status, headers, content), fault = error(fault.status, headers=fault.headers), None
        else:
            status, headers, content = self.hub.answer(self.command, self.path, self.headers, body)
        if "agent-harnesses" not in path:  # which clients request for their User-Agent
            # Recorded before the answer is sent, so that a test that has the answer finds the request.
            self.hub.requests.append((self.command, path))
        if not fault or fault.after is not None:
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
        # A reset discards what the other side has not acknowledged yet, so give it time.
        deadline = time.monotonic() + (600 if fault.kind == "stall" else 0.1)
        while time.monotonic() < deadline and not self.hub.stopping.wait(0.02):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                break  # the client has gone
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Not close(): rfile would keep the socket open, and the server would shut it down properly before the reset.
        socket.close(self.connection.detach())
