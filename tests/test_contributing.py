"""The worked examples of CONTRIBUTING.md are applied to one copy of the project, and its commands run there."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT, environment, metrics, ok, tiny_flags

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    title: (re.findall(r"```diff\n(.*?)```", text, re.DOTALL), re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    for title, text in re.findall(r"^## (An? .*?)\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project with all diffs of the guide applied, file by file."""
    root = tmp_path_factory.mktemp("copy")
    for name in ("recipe", "eval", "accelerate_configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(root.parent)}  # else paths are relative to an outer repository
    for diff in (diff for diffs, _ in SECTIONS.values() for diff in diffs):
        for file in re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]:
            command = ["git", "apply", "--recount", "--unidiff-zero", "-"]
            subprocess.run(command, cwd=root, input=file, text=True, check=True, env=env)
    return root


@pytest.fixture
def call(copy, shards, tmp_path):
    """A function: title of a section -> what its command prints. A training run is tiny and goes into tmp_path/run."""
    tiny = tiny_flags(shards, tmp_path / "run", max_steps=6, save_steps=3)

    def run(title: str) -> str:
        (line,) = "".join(SECTIONS[title][1]).splitlines()
        settings = "" if "--dry_run" in line else shlex.join(tiny)
        python = shlex.quote(sys.executable)
        launcher = f"{python} -m accelerate.commands.launch --main_process_port 0"
        line = line.replace("accelerate launch", launcher).replace("python recipe", f"{python} recipe")
        variables = environment() | {"PYTHONPATH": str(copy)}
        command = ["bash", "-c", f"{line} {settings}"]
        return ok(subprocess.run(command, cwd=copy, env=variables, capture_output=True, text=True, timeout=300)).stdout

    return run


def test_each_example_is_valid_python_of_less_than_20_lines(copy):
    assert len(SECTIONS) == 4
    for title, (diffs, _) in SECTIONS.items():
        assert 0 < len(re.findall(r"^\+(?!\+\+ )", "".join(diffs), re.MULTILINE)) < 20, title
        for file in re.findall(r"^\+\+\+ b/(\S+\.py)$", "".join(diffs), re.MULTILINE):
            compile((copy / file).read_text(), file, "exec")


def test_each_name_is_in_the_file_that_the_guide_says():
    pairs = re.findall(r"`(?:\w+\.)?(\w+)`\s+in\s+`([\w/]+\.py)`", GUIDE)
    assert len(pairs) > 5
    assert [pair for pair in pairs if pair[0] not in (ROOT / pair[1]).read_text()] == []


@pytest.mark.slow
def test_the_examples_of_a_model_size_and_a_data_set(call):
    assert "6 layers, 6 heads, 384 wide" in call("A model size")
    assert "data       Salesforce/wikitext wikitext-103-raw-v1, streamed into data/" in call("A data set")


@pytest.mark.slow
def test_the_example_of_an_optimizer(call, whole_run, tmp_path):
    call("An optimizer")
    losses = [line["loss"] for line in metrics(tmp_path / "run")[1:]]
    assert losses != [line["loss"] for line in metrics(whole_run[0])[1:7]]  # AdamW's
    checkpoint = tmp_path / "run" / "step_00000006"
    weights = (checkpoint / "model.safetensors").read_bytes()
    shutil.rmtree(checkpoint)
    assert "from step 3" in call("An optimizer")
    assert (checkpoint / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_the_example_of_an_engine(call, tmp_path):
    assert "DDP over 2 processes" in call("An engine")
    first, *_, last = metrics(tmp_path / "run")
    assert last["val_loss"] < first["val_loss"]
