"""No program prints or writes a secret, and none pickles anything."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.checkpoint.run_dir import check_same_run
from recipe.config import parse_config
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.redaction import HIDDEN, redact, redacted
from tests import processes as programs
from tests.canary import CANARY, ENVIRONMENT, HUB_TOKEN, URL, search
from tests.conftest import ROOT, ok, tiny_flags, train


@pytest.fixture
def secrets(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SOME_API_KEY", "correct horse/battery")
    monkeypatch.setenv("MyPasswords", "open sesame")
    monkeypatch.setenv("KEYBOARD", "qwertzuiop")
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
        ("hf://datasets/a/b@v1/x/*.bin", None),
        ("token hf_" + "Ab1" * 11, f"token {HIDDEN}"),
        ("hf_hub_download_with_a_long_name", None),
        ("/home/ada/runs, '/home/ada' and /home/ada", "~/runs, '~' and ~"),
        ("/home/adam/runs and /mnt/home/ada", None),
        ("'open sesame' on a qwertzuiop", f"'{HIDDEN}' on a qwertzuiop"),
        ("a\tb\n\x1b[2J\x9b2J", "a\tb\n\\x1b[2J\\x9b2J"),  # clears a terminal
        ("ROMEO:\r\na\rb", "ROMEO:\r\na\\x0db"),  # the line breaks of Windows, in a sample of such a text
    ],
)
def test_redaction_hides_secrets_and_the_home_directory_only(secrets, text, expected):
    assert redact(text) == (text if expected is None else expected)
    assert redact(redact(text)) == redact(text)
    assert redacted({"a": [{"b": text}, None], "n": 3}) == {"a": [{"b": redact(text)}, None], "n": 3}


def test_a_run_in_the_home_directory_continues(secrets, caplog):
    """Its saved configuration has ~, and is compared with one that has the full path."""
    caplog.set_level("INFO")
    config = parse_config(["--dataset_name=~/shards", "--output_dir=/home/ada/run"])
    assert config.data.dataset_name == "/home/ada/shards"
    saved_config = json.loads(json.dumps(redacted(config.flat())))
    assert (saved_config["dataset_name"], saved_config["output_dir"]) == ("~/shards", "~/run")
    state = {"config": saved_config, "data": {}, "step": 1, "tokenizer": {"name": "gpt2", "digest": "gpt2"}}
    check_same_run(state, redacted(config.flat()), open_tokenizer("gpt2"), Path("run"))
    assert caplog.messages == []


SCRIPT = """
import json, logging, sys
from recipe.data.prepare import main as prepare
from recipe.train import main
runs, mistakes, url = json.loads(sys.argv[1])
assert [main(line) for line in runs] == [0, 0, 0]
for line in mistakes:
    code = prepare(line[1:]) if line[0] == "prepare" else main(line)
    assert code == 2, line
logging.getLogger("recipe").warning("GET %s failed", url)
"""


def test_no_file_or_output_holds_a_secret(shards, tmp_path):
    """Of a run, its resumption, a dry run, and of command lines and recipes with a secret in a wrong place."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "home").mkdir()  # for the files of libraries

    def recipe(name: str, text: str) -> str:
        (tmp_path / "recipes" / name).write_text(text)
        return f"--config={tmp_path / 'recipes' / name}"

    # Secrets of the environment in fields, and one in a comment of the recipe.
    settings = {"warmup_steps": 1, "eval_steps": "end", "sample_prompt": HUB_TOKEN, "sample_steps": "end"}
    settings |= {"report_to": "tensorboard" if find_spec("tensorboard") else ""}
    mine = recipe("mine.yaml", f"# hf_token: {CANARY}\ndataset_split: {ENVIRONMENT['MY_PASSWORD']}\n")
    lengths = {"max_steps": 2}, {"max_steps": 3}, {"max_steps": 3, "dry_run": "true"}
    runs = [[mine, *tiny_flags(shards, tmp_path / "run", **settings, **length)] for length in lengths]
    run = f"--output_dir={tmp_path / 'mistakes'}"
    mistakes = [
        [f"--hf_token={CANARY}"],
        [run, CANARY],
        [f"--max_steps={HUB_TOKEN}"],
        [f"--report_to={HUB_TOKEN}", run],
        [recipe("key.yaml", f"hf_token: {CANARY}\n")],
        [recipe("tag.yaml", f"dataset_name: !{CANARY} x\n")],
        [recipe("broken.yaml", f"dataset_name: x\nhf_token: '{CANARY}\n")],
        [recipe("url.yaml", f"dataset_name: {URL}\n"), run],
        [f"--output_dir={URL}"],
        ["prepare", f"--train_text={URL}", f"--dataset_name={tmp_path / 'shards'}"],
    ]
    home = dict.fromkeys(("HF_HOME", "WANDB_DIR", "TRACKIO_DIR", "TMPDIR"), str(tmp_path / "home"))
    result = ok(programs.run("-c", SCRIPT, json.dumps([runs, mistakes, URL]), env=ENVIRONMENT | home, timeout=300))
    assert result.stderr.count("error: ") == len(mistakes), result.stderr
    assert "GET http://127.0.0.1:9/text.jsonl" in result.stdout
    assert "from step 2" in result.stdout
    for path in (tmp_path / "recipes").iterdir():
        path.unlink()
    assert search(tmp_path, [result.stdout, result.stderr]) == []
    (tmp_path / "run" / "planted").write_text(CANARY)
    assert len(search(tmp_path, [HUB_TOKEN])) == 2  # the search works


def test_no_file_of_a_run_names_the_home_directory(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data, run = shutil.copytree(shards, tmp_path / "data"), tmp_path / "run"
    train(data, run, max_steps=2, warmup_steps=0)
    assert '"~/data"' in (run / "step_00000002" / "trainer_state.json").read_text()
    assert [path for path in run.rglob("*") if path.is_file() and bytes(tmp_path) in path.read_bytes()] == []


def test_the_code_neither_pickles_nor_loads_a_pickle():
    calls = r"torch\.(load|save)|\bpickle\.|import pickle|allow_pickle|joblib|\bdill\b|yaml\.(unsafe_|full_)?load\("
    programs = [path for package in ("recipe", "eval") for path in (ROOT / package).rglob("*.py")]
    assert [path for path in programs if re.search(calls, path.read_text())] == []
    assert re.search(calls, "np.load(path, allow_pickle=True)")
