"""What CONTRIBUTING.md says how to add is added, to a copy of the project, and works."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, environment, flags, metrics

GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
SECTIONS = {
    title: (re.findall(r"```diff\n(.*?)```", text, re.DOTALL), re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    for title, text in re.findall(r"^## (An? .*?)\n(.*?)(?=^## |\Z)", GUIDE, re.DOTALL | re.MULTILINE)
}


class Copy:
    """A copy of the project that is changed as the guide says; its runs are tiny, into `run`."""

    def __init__(self, directory: Path, shards: Path):
        self.root, self.run = directory / "copy", directory / "run"
        self.root.mkdir()
        for name in ("recipe", "eval", "accelerate_configs", "tests"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.tiny = flags(**(TINY | {"dataset_name": shards, "output_dir": self.run, "max_steps": 6, "save_steps": 3}))

    def apply(self, title: str) -> None:
        """Applies a section's diff, file by file."""
        env = os.environ | {"GIT_CEILING_DIRECTORIES": str(self.root.parent)}  # or paths are of the repository around
        for file in re.split(r"^(?=--- )", "".join(SECTIONS[title][0]), flags=re.MULTILINE)[1:]:
            command = ["git", "apply", "--recount", "--unidiff-zero", "-"]
            subprocess.run(command, cwd=self.root, input=file, text=True, check=True, env=env)

    def add(self, title: str) -> list[str]:
        """Applies a section's diff, runs its commands, and returns what they printed."""
        self.apply(title)
        return [self.call(line) for line in "".join(SECTIONS[title][1]).splitlines()]

    def call(self, line: str) -> str:
        words = shlex.split(line)
        own = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if "recipe/train.py" in words and "--dry_run" not in words:
            words += self.tiny
        module = {"accelerate": "accelerate.commands.launch", "pytest": "pytest"}.get(words[0])
        if module == "pytest":
            words += ["-p", "no:cacheprovider"]
        elif module:
            words[1:2] = ["--main_process_port", "0"]  # for the word launch
        words[:1] = [sys.executable, "-m", module] if module else [sys.executable]
        own["PYTHONPATH"] = str(self.root)
        variables = environment() | own
        result = subprocess.run(words, cwd=self.root, env=variables, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture
def copy(tmp_path, shards):
    return Copy(tmp_path, shards)


def test_the_guide_has_the_four_and_each_is_short():
    assert list(SECTIONS) == ["A model size", "A data set", "An optimizer", "An engine"]
    for title, (diffs, _) in SECTIONS.items():
        said = re.search(rf"^## {title}\n(.*?)```", GUIDE, re.DOTALL | re.MULTILINE).group(1).strip()
        assert len(said.splitlines()) < 10, title
        added = [line for line in "".join(diffs).splitlines() if re.match(r"\+(?!\+\+ )", line)]
        assert 0 < len(added) < 20, title


def test_paths_that_the_guide_names_exist():
    for path in re.findall(r"`((?:recipe|eval|tests)/[\w./-]*)`", GUIDE):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("title", SECTIONS)
def test_the_diffs_apply_and_are_python(copy, title):
    copy.apply(title)
    for file in re.findall(r"^\+\+\+ b/(\S+\.py)$", "".join(SECTIONS[title][0]), re.MULTILINE):
        compile((copy.root / file).read_text(), file, "exec")


@pytest.mark.slow
def test_a_model_size(copy):
    (said,) = copy.add("A model size")
    assert "6 layers, 6 heads, 384 wide" in said
    assert "5,000 steps" in said


@pytest.mark.slow
def test_a_data_set(copy):
    (said,) = copy.add("A data set")
    assert "data       Salesforce/wikitext wikitext-103-raw-v1, as shards in data/" in said


@pytest.mark.slow
def test_an_optimizer(copy, whole_run):
    copy.add("An optimizer")
    losses = [line["loss"] for line in metrics(copy.run)[1:]]
    assert losses != [line["loss"] for line in metrics(whole_run[0])[1:7]]  # AdamW's
    last = copy.run / "step_00000006"
    weights = (last / "model.safetensors").read_bytes()
    shutil.rmtree(last)
    assert "from step 3" in copy.call("python recipe/train.py --optimizer radam")
    assert (last / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
def test_an_engine(copy):
    said = copy.add("An engine")
    assert "DDP over 2 processes" in said[0]
    first, *_, last = metrics(copy.run)
    assert last["val_loss"] < first["val_loss"]
