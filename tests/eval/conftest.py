"""What the tests of the evaluation commands share."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from eval import common


def load(directory) -> common.Loaded:
    return common.load(common.parser("").parse_args([str(directory), "--device", "cpu"]))


def local_tasks(directory: Path, **rows: list[dict]) -> Path:
    """A directory for --include_path with lm-evaluation-harness's tasks of these names on these rows."""
    theirs = Path(find_spec("lm_eval").origin).parent / "tasks"
    directory.mkdir()
    for name, own in rows.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in own))
        split = "validation" if name == "hellaswag" else "test"
        kwargs = {"data_files": {split: str(file)}, "cache_dir": f"{directory}/cache"}
        (included,) = theirs.glob(f"{name.partition('_')[0]}/{name}.yaml")
        task = {"include": str(included), "task": name, "dataset_path": "json", "dataset_name": None}
        task |= {"dataset_kwargs": kwargs, "training_split": None, "validation_split": None, f"{split}_split": split}
        (directory / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
    return directory


@pytest.fixture
def command(monkeypatch):
    """Runs the main function of a module with arguments, on the CPU."""

    def run(module, *arguments) -> None:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments), "--device", "cpu"])
        module.main()

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tiny_gpt2):
    """A small model with GPT-2's tokenizer."""
    directory, made = tmp_path_factory.mktemp("models") / "gpt2", tiny_gpt2(64)
    made.model.save_pretrained(directory)
    made.tokenizer.save_pretrained(directory)
    return directory
