"""The part of the Hub's API through which models are uploaded, over LFS' basic transfer, with server.py's faults.

with PushHub(tmp_path) as hub:
    hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="reset", received=1000))
    subprocess.run(command, env=os.environ | hub.environment | {"HF_TOKEN": hub.token})
    assert hub.files("acme/gpt2", "main")["config.json"] == (checkpoint / "config.json").read_bytes()
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from tests.hub.card_spec import problems
from tests.hub.server import LFS, MEANING, Answer, Hub, error, success

TOKEN = "hf_canary_of_the_tests"
REPO = "acme/gpt2"


@dataclass
class Commit:
    oid: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit("0" * 40, "initial", {})]})


class PushHub(Hub):
    """Who asks is `me`, as whoami describes it: alice, who may write for acme and read at museum."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.token = TOKEN
        self.me = {
            "type": "user",
            "name": "alice",
            "orgs": [{"name": "acme", "roleInOrg": "write"}, {"name": "museum", "roleInOrg": "read"}],
            "auth": {"type": "access_token", "accessToken": {"displayName": "tests", "role": "write"}},
        }
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS', by SHA-256
        self._state = threading.Lock()

    def __enter__(self):
        super().__enter__()
        self.environment["HF_TOKEN"] = self.token
        return self

    def files(self, name: str, branch: str) -> dict[str, bytes]:
        """What is on a branch."""
        return self.repositories[name].branches[branch][-1].files

    def count(self, method: str, part: str) -> int:
        """Requests whose path contains `part`."""
        return sum(r.method == method and part in r.path for r in self.requests)

    def records(self, path: str) -> bool:
        return "agent-harnesses" not in path

    def answer(self, method: str, url: str, headers, body: bytes) -> Answer:
        path = unquote(urlsplit(url).path)
        if method == "PUT":  # to a storage that knows no tokens
            with self._state:
                return self._store(path.removeprefix("/lfs/"), body)
        if headers.get("Authorization") != f"Bearer {self.token}":
            return error(401, *MEANING[401])
        paths_info = re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/(.+)", path)
        given = [] if paths_info else [json.loads(line) for line in body.splitlines()]
        with self._state:
            if path == "/api/whoami-v2":
                return success(self.me)
            if paths_info:
                return self._paths_info(*paths_info.groups(), parse_qs(body.decode())["paths"])
            if path == "/api/validate-yaml":
                wrong = [{"message": p} for p in problems(given[0]["content"])]
                answer = {"errors": wrong, "warnings": []}
                return (400 if wrong else 200), {"Content-Type": "application/json"}, json.dumps(answer).encode()
            if path == "/api/repos/create":
                return self._create(given[0])
            if match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
                return self._batch(match[1], given[0])
            if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(\w+))?(?:/(.+))?", path):
                return self._model(match[1], match[2], match[3], given)
        return error(404, "", "Sorry, we can't find the page you are looking for.")

    def _create(self, wanted: dict) -> Answer:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.repositories:
            status, headers, _ = error(409, "", "You already created this model repo")
            return status, headers, json.dumps({"url": f"{self.url}/{name}"}).encode()
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.repositories[name] = Repository(private)
        return success({"url": f"{self.url}/{name}", "name": name})

    def _model(self, name: str, what: str | None, rest: str | None, given: list[dict]) -> Answer:
        if name not in self.repositories:
            return error(404, "RepoNotFound", "Repository not found")
        branches = self.repositories[name].branches
        if what == "branch":
            if rest in branches:
                return error(409, "", f"Reference already exists: refs/heads/{rest}")
            branches[rest] = list(branches["main"])
            return success({})
        if what == "refs":
            found = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": c[-1].oid} for b, c in branches.items()]
            return success({"branches": found, "converts": [], "tags": []})
        if (rest or "main") not in branches:
            return error(404, "RevisionNotFound", f"Invalid rev id: {rest}")
        head = branches[rest or "main"][-1]
        if what == "preupload":
            return success({"files": [self._mode(head, file) for file in given[0]["files"]]})
        if what == "commit":
            return self._commit(name, rest, given)
        private = self.repositories[name].private
        return success({"id": name, "sha": head.oid, "private": private, "gated": False, "siblings": []})

    def _paths_info(self, name: str, branch: str, paths: list[str]) -> Answer:
        files, entries = self.files(name, branch), []
        for path in paths:
            if (content := files.get(path)) is not None:
                entry = {"type": "file", "path": path, "size": len(content)}
                if Path(path).suffix in LFS:
                    entry["lfs"] = {
                        "oid": hashlib.sha256(content).hexdigest(),
                        "size": len(content),
                        "pointerSize": 130,
                    }
                entries.append(entry | {"oid": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()})
        return success(entries)

    def _mode(self, head: Commit, file: dict) -> dict:
        path, lfs = file["path"], Path(file["path"]).suffix in LFS
        answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
        if (content := head.files.get(path)) is not None:
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            answer["oid"] = hashlib.sha256(content).hexdigest() if lfs else blob
        return answer

    def _batch(self, name: str, given: dict) -> Answer:
        if name not in self.repositories:
            return error(404, "RepoNotFound", "Repository not found")
        objects = []
        for wanted in given["objects"]:
            action = {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}?X-Amz-Signature=s3cret"}}
            objects.append(wanted | ({} if wanted["oid"] in self.objects else {"actions": action}))
        return success({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return error(400, "", "The SHA-256 does not match")
        self.objects[oid] = body
        return success({})

    def _commit(self, name: str, branch: str, given: list[dict]) -> Answer:
        commits = self.repositories[name].branches[branch]
        files = dict(commits[-1].files)
        message = next(line["value"]["summary"] for line in given if line["key"] == "header")
        for line in given:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.objects:
                    return error(400, "", f"LFS pointer to an object that is not here: {value['path']}")
                files[value["path"]] = self.objects[value["oid"]]
        oid = hashlib.sha1(f"{name} {branch} {len(commits)}".encode()).hexdigest()
        commits.append(Commit(oid, message, files))
        return success({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})
