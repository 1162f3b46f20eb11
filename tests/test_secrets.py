"""No secret in what a run says and leaves behind, and nothing pickled."""

import json
import pickletools
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from recipe.redaction import HIDDEN, looks_secret, redact, redacted
from tests import canary
from tests.conftest import ROOT


@pytest.fixture
def secrets(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SOME_API_KEY", "correct horse/battery")
    monkeypatch.setenv("SHORT_TOKEN", "main")
    monkeypatch.setenv("HF_TOKEN_PATH", "/var/lib/token-file")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the key is correct horse/battery.", f"the key is {HIDDEN}."),
        ("?q=correct%20horse%2Fbattery", f"?q={HIDDEN}"),
        ("revision main of /var/lib/token-file", None),
        ("GET https://ada:pa5s@host:8080/x failed", "GET https://host:8080/x failed"),
        ("https://host/x?a=1&X-Amz-Signature=abcd&b=2", f"https://host/x?a=1&X-Amz-Signature={HIDDEN}&b=2"),
        ("https://host/x?sig=ab%2B#top", f"https://host/x?sig={HIDDEN}#top"),
        ("hf://datasets/a/b@v1/x/*.bin", None),
        ("token hf_" + "Ab1" * 11, f"token {HIDDEN}"),
        ("hf_hub_download_with_a_long_name", None),
        ("Authorization: Bearer abcdefgh.ijk", f"Authorization: Bearer {HIDDEN}"),
        ("api_key=" + "0f" * 20, f"api_key={HIDDEN}"),
        ("commit " + "0f" * 20, None),
        ("/home/ada/runs, '/home/ada' and /home/ada", "~/runs, '~' and ~"),
        ("/home/adam/runs and /mnt/home/ada", None),
        ("shard_tokens=100000000", None),
    ],
)
def test_what_is_hidden_and_what_is_not(secrets, text, expected):
    assert redact(text) == (text if expected is None else expected)
    assert redact(redact(text)) == redact(text)


def test_a_dict_keeps_its_shape(secrets):
    values = {"data": "/home/ada/x", "n": 3, "list": [{"uri": "https://a:b@c/"}, None], "none": None}
    assert redacted(values) == {"data": "~/x", "n": 3, "list": [{"uri": "https://c/"}, None], "none": None}


def test_names_that_look_secret():
    assert all(
        map(looks_secret, ("HF_TOKEN", "WANDB_API_KEY", "hf-token", "MyPassword", "AWS_SECRET_ACCESS_KEY", "KEYS"))
    )
    assert not any(map(looks_secret, ("TOKENIZERS_PARALLELISM", "HF_TOKEN_PATH", "HOME", "KEYBOARD")))


def test_a_run_in_the_home_directory_continues(secrets, caplog):
    """Its saved configuration says ~ and is compared with one that says it in full."""
    from recipe.checkpoint.run_dir import check_same_run
    from recipe.config import parse_config

    caplog.set_level("INFO")
    config = parse_config(["--dataset_name=~/shards", "--output_dir=/home/ada/run"])
    assert config.data.dataset_name == "/home/ada/shards"
    saved = json.loads(json.dumps(redacted(config.flat())))
    assert (saved["data"], saved["output_dir"]) == ("~/shards", "~/run")
    check_same_run({"config": saved, "data": {}}, redacted(config.flat()), Path("run"))
    assert caplog.messages == []


def test_no_secret_of_a_run_is_found_anywhere(shards, tmp_path):
    tracker = (
        "tensorboard" if find_spec("tensorboard") else ""
    )  # an extra; `make test-faults` searches wandb's files too
    assert canary.in_a_run(tmp_path / "run", shards, tracker) == []


def test_no_secret_in_a_wrong_place_is_repeated(tmp_path):
    assert canary.in_a_mistake(tmp_path / "mistakes") == []


def test_no_secret_of_a_hub_that_fails_is_found_anywhere(tmp_path):
    assert canary.in_a_failing_stream(tmp_path / "stream") == []


def is_pickle(data: bytes) -> bool:
    try:
        list(pickletools.genops(data))
        return True
    except Exception:  # genops raises whatever the bytes make it raise
        return False


def not_readable_without_pickle(directory: Path) -> list[str]:
    """Files that are neither safetensors, JSON, JSON lines, a tracker's events nor text; and those that are pickles."""
    wrong = []
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        data = path.read_bytes()
        try:
            if is_pickle(data):
                raise ValueError("a pickle")
            if path.suffix == ".safetensors":
                with safe_open(path, framework="numpy") as file:
                    assert list(file.keys())
            elif path.suffix == ".json":
                json.loads(data)
            elif path.suffix == ".jsonl":
                for line in data.splitlines():
                    json.loads(line)
            elif not path.name.startswith("events.out.tfevents"):  # protocol buffers
                data.decode()
        except Exception as error:
            wrong.append(f"{path}: {error}")
    return wrong


def test_what_a_run_leaves_behind_is_read_without_pickle(whole_run, tmp_path):
    import pickle

    assert not_readable_without_pickle(whole_run[0]) == []
    (tmp_path / "notes.txt").write_bytes(pickle.dumps({"weights": [1.0, 2.0]}, protocol=0))  # which is text as well
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps([1]))
    (tmp_path / "rest.bin").write_bytes(b"\xff\xfe")
    assert len(not_readable_without_pickle(tmp_path)) == 3


def test_nothing_is_written_under_the_home_directorys_name(whole_run):
    home = str(Path.home()).encode()
    for path in whole_run[0].rglob("*.json*"):
        assert home + b"/" not in path.read_bytes(), path


def test_the_code_neither_pickles_nor_loads_a_pickle():
    words = (
        r"torch\.load|torch\.save|\bpickle\.|import pickle|allow_pickle|joblib|\bdill\b|yaml\.(unsafe_|full_)?load\("
    )
    found = subprocess.run(
        ["git", "grep", "-nE", words, "--", "recipe/**.py", "eval/**.py"], cwd=ROOT, text=True, capture_output=True
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert re.search(words, "np.load(path, allow_pickle=True)")
