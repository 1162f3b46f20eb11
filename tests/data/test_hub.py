"""The tests' Hugging Face Hub: the libraries read from it as from the real one, and it fails as it is told to."""

import hashlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pyarrow
import pyarrow.parquet
import pytest

from tests.hub import Fault, Hub

TOKENS = bytes(range(256)) * 4000
README = """---
configs:
- config_name: sample-10BT
  data_files: [{split: train, path: sample/*.parquet}]
- config_name: other
  data_files: [{split: train, path: sample/1.parquet}]
---
"""
FILE = "/datasets/org/name/resolve/main/tokens.bin"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    for path, rows in {"name/sample/0": [0, 10], "name/sample/1": [10, 20], "bare/data/train": [0, 10]}.items():
        file = root / "org" / f"{path}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"text": [f"row {row}" for row in range(*rows)]})
        pyarrow.parquet.write_table(table, file, row_group_size=5)
    (root / "org/name/tokens.bin").write_bytes(TOKENS)
    (root / "org/name/README.md").write_text(README)
    return root


@pytest.fixture
def hub(root):
    with Hub(root) as hub:
        yield hub


def run(hub: Hub, script: str, *arguments: str, **environment: str):
    """What `script` prints as JSON, run with the libraries pointed at the Hub."""
    command = [sys.executable, "-c", script, hub.commit, *arguments]
    environment = os.environ | hub.environment | environment
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


API = """
import json, sys
from pathlib import Path
from huggingface_hub import HfApi, HfFileSystem, hf_hub_download

commit, here = sys.argv[1:]
api, fs, at = HfApi(), HfFileSystem(), f"datasets/org/name@{commit}"

def failure(call, *arguments, **options):
    try:
        return call(*arguments, **options).sha
    except Exception as error:
        return [type(error).__name__, error.response.status_code]

def entries(found):
    return [[e.path, getattr(e, "size", None), e.lfs.sha256 if getattr(e, "lfs", None) else None] for e in found]

with fs.open(f"{at}/tokens.bin") as file:
    file.seek(1000)
    piece = file.read(5).hex()
paths = ["sample", "tokens.bin", "gone"]
print(json.dumps({
    "sha": [api.dataset_info("org/name", revision=r).sha for r in (None, "main", commit)],
    "siblings": [s.rfilename for s in api.dataset_info("org/name").siblings],
    "no revision": failure(api.dataset_info, "org/name", revision="0" * 40),
    "no repository": [failure(api.dataset_info, "org/none", token=t) for t in (None, "hf_x")],
    "tree": entries(api.list_repo_tree("org/name", recursive=True, repo_type="dataset")),
    "top": entries(api.list_repo_tree("org/name", repo_type="dataset", expand=True, revision=commit)),
    "paths": entries(api.get_paths_info("org/name", paths, repo_type="dataset", expand=True)),
    "glob": [len(fs.glob(f"hf://{at}/{pattern}")) for pattern in ("sample/*.parquet", "*.parquet", "**/*.parquet")],
    "ls": sorted(path.removeprefix(at) for path in fs.ls(f"hf://{at}", detail=False)),
    "info": [fs.info(f"{at}/tokens.bin")["size"], fs.info(f"{at}/tokens.bin")["lfs"]["sha256"]],
    "piece": piece,
    "text": fs.read_text(f"{at}/README.md"),
    "files": [hf_hub_download("org/name", name, repo_type="dataset", revision=commit, local_dir=here)
              for name in ("tokens.bin", "sample/0.parquet", "README.md")],
}))
"""


def test_the_client_library_reads_it(hub, root, tmp_path):
    hub.page = 2  # more than a page of everything
    seen = run(hub, API, str(tmp_path))
    repository = root / "org" / "name"
    files = ["README.md", "sample/0.parquet", "sample/1.parquet", "tokens.bin"]
    content = {path: (repository / path).read_bytes() for path in files}
    sha256 = {path: hashlib.sha256(content[path]).hexdigest() for path in files if path != "README.md"}
    entry = {path: [path, len(content[path]), sha256.get(path)] for path in files} | {"sample": ["sample", None, None]}
    assert seen["sha"] == [hub.commit] * 3
    assert seen["siblings"] == files
    assert seen["no revision"] == ["RevisionNotFoundError", 404]
    assert seen["no repository"] == [["RepositoryNotFoundError", 401], ["RepositoryNotFoundError", 404]]
    assert seen["tree"] == [entry[path] for path in ("README.md", "sample", *files[1:])]
    assert seen["top"] == [entry[path] for path in ("README.md", "sample", "tokens.bin")]
    assert seen["paths"] == [entry["sample"], entry["tokens.bin"]]
    assert seen["glob"] == [2, 0, 2]
    assert seen["ls"] == ["/README.md", "/sample", "/tokens.bin"]
    assert seen["info"] == [len(TOKENS), sha256["tokens.bin"]]
    assert bytes.fromhex(seen["piece"]) == TOKENS[1000:1005]
    assert seen["text"] == README
    names = ["tokens.bin", "sample/0.parquet", "README.md"]
    assert [Path(path).read_bytes() for path in seen["files"]] == [content[name] for name in names]
    url = f"/datasets/org/name/resolve/{hub.commit}/tokens.bin"
    requests = [("GET", url, f"bytes=1000-{len(TOKENS) - 1}", 206), ("HEAD", url, None, 200), ("GET", url, None, 200)]
    assert [request for request in hub.requests if request.path == url] == requests


STREAM = """
import json, os, sys
from datasets import load_dataset

commit = sys.argv[1]
rows = load_dataset("org/name", "sample-10BT", split="train", revision=commit, streaming=True)
shards = [rows.num_shards]
whole = [row["text"] for row in rows]
if hasattr(rows, "reshard"):
    rows = rows.reshard()
    shards.append(rows.num_shards)
iterator = iter(rows)
start = [next(iterator)["text"] for _ in range(7)]
state = rows.state_dict()
again = load_dataset("org/name", "sample-10BT", split="train", revision=commit, streaming=True)
again = again.reshard() if hasattr(again, "reshard") else again
again.load_state_dict(state)
rest = [row["text"] for row in again]
bare = [row["text"] for row in load_dataset("org/bare", split="train", revision=commit, streaming=True)]
print(json.dumps([shards, whole, start + rest, bare]), flush=True)
os._exit(0)  # a stream left open may abort the interpreter on its way out
"""


def test_the_data_set_library_streams_from_it(hub):
    hub.token = "hf_right"
    hub.faults = [Fault(path="*/1.parquet", kind="reset", after=100), Fault(path="*/0.parquet", status=503)]
    shards, whole, resumed, bare = run(hub, STREAM, HF_TOKEN="hf_right")
    assert shards in ([2, 4], [2])
    assert whole == resumed == [f"row {row}" for row in range(20)]
    assert bare == whole[:10]
    assert not hub.faults  # and the library went on
    assert {request.status for request in hub.requests if request.path.endswith(".parquet")} == {206, 503}


def get(hub: Hub, path: str = FILE, method: str = "GET", timeout: float = 5, **headers: str):
    return urlopen(Request(hub.url + path, method=method, headers=headers), timeout=timeout)


def refusal(hub: Hub, *arguments, **options) -> tuple[int, dict]:
    with pytest.raises(HTTPError) as error:
        get(hub, *arguments, **options)
    return error.value.code, error.value.headers


def test_ranges(hub):
    size = len(TOKENS)
    wanted = {
        "bytes=0-0": (0, 1),
        "bytes=1000-1999": (1000, 2000),
        "bytes=1000-": (1000, size),
        "bytes=-10": (size - 10, size),
        f"bytes=5-{size + 5}": (5, size),
    }
    for asked, (start, end) in wanted.items():
        answer = get(hub, Range=asked)
        assert (answer.status, answer.read()) == (206, TOKENS[start:end]), asked
        assert answer.headers["Content-Range"] == f"bytes {start}-{end - 1}/{size}"
    code, headers = refusal(hub, Range=f"bytes={size}-")
    assert (code, headers["Content-Range"]) == (416, f"bytes */{size}")
    answer = get(hub, method="HEAD")
    assert (answer.status, answer.read(), answer.headers["Content-Length"]) == (200, b"", str(size))
    assert answer.headers["X-Linked-Etag"] == f'"{hashlib.sha256(TOKENS).hexdigest()}"'
    assert (answer.headers["X-Repo-Commit"], answer.headers["X-Linked-Size"]) == (hub.commit, str(size))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert refusal(hub, "/datasets/org/name/resolve/main/../bare/data/train.parquet")[0] == 404


def test_a_token_is_asked_for(hub):
    hub.token = "hf_right"
    code, headers = refusal(hub)
    assert (code, headers["X-Error-Code"]) == (401, "RepoNotFound")
    code, headers = refusal(hub, Authorization="Bearer hf_wrong")
    assert (code, headers["X-Error-Code"]) == (401, None)
    assert get(hub, Authorization="Bearer hf_right").read() == TOKENS


def test_statuses_come_in_order_and_are_used_up(hub):
    hub.faults = [
        Fault(path="*.bin", status=429, headers={"Retry-After": "1"}, times=2, skip=1),
        Fault(path="*.bin", status=403, headers={"X-Error-Code": ""}),
        Fault(path="*.bin", method="HEAD", status=401),
        Fault(path="*.parquet", status=500),
    ]
    assert get(hub).read() == TOKENS
    answers = [refusal(hub) for _ in range(3)]
    assert [(code, headers["Retry-After"], headers["X-Error-Code"]) for code, headers in answers] == [
        (429, "1", None),
        (429, "1", None),
        (403, None, None),
    ]
    assert get(hub).read() == TOKENS
    code, headers = refusal(hub, method="HEAD")
    assert (code, headers["X-Error-Code"]) == (401, "RepoNotFound")
    assert [fault.path for fault in hub.faults] == ["*.parquet"]
    assert hub.requests[-1] == ("HEAD", FILE, None, 401)
    assert [request.status for request in hub.requests] == [200, 429, 429, 403, 200, 401]


@pytest.mark.parametrize(
    ("kind", "error"), [("reset", ConnectionResetError), ("close", http.client.IncompleteRead), ("stall", TimeoutError)]
)
def test_a_body_breaks_off(hub, kind, error):
    hub.faults.append(Fault(kind=kind, after=300_000))
    answer = get(hub, timeout=0.3)
    assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(TOKENS)))
    assert answer.read(300_000) == TOKENS[:300_000]
    with pytest.raises(error):
        answer.read()
    answer.close()
    assert get(hub).read() == TOKENS
    assert [request.status for request in hub.requests] == [200, 200]
    deadline = time.monotonic() + 5
    while hub.connections:  # a stall does not outlive its client
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_connection_breaks_off_before_it_is_answered(hub):
    hub.faults = [Fault(kind=kind, after=None, seconds=0.5) for kind in ("reset", "close", "stall", "stall")]
    connection = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=5)
    for error in (ConnectionResetError, http.client.RemoteDisconnected, ConnectionResetError):
        start = time.monotonic()
        connection.request("HEAD", FILE)
        with pytest.raises(error) as raised:
            connection.getresponse()
        assert error is http.client.RemoteDisconnected or raised.type is error
    assert time.monotonic() - start > 0.4  # that one stalled
    with pytest.raises(socket.timeout):
        get(hub, timeout=0.2)
    assert [request.status for request in hub.requests] == [0] * 4


def test_it_ends_with_what_it_was_serving(root):
    with Hub(root) as hub:
        idle = http.client.HTTPConnection(hub.url.removeprefix("http://"), timeout=5)
        idle.request("HEAD", FILE)
        assert idle.getresponse().read() == b""
        hub.faults.append(Fault(kind="stall", after=10))
        stalled = get(hub)
        home = Path(hub.environment["HF_HOME"])
        assert home.is_dir()
    with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
        stalled.read()
    idle.request("HEAD", FILE)
    with pytest.raises(ConnectionResetError):
        idle.getresponse()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection(idle.host, idle.port).connect()
    assert not home.exists()
