"""Fixtures and helpers of the evaluation tests."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from eval import common

TOKENIZERS: dict[tuple, object] = {}


@pytest.fixture(autouse=True)
def tokenizers_are_read_once(monkeypatch):
    """From directories whose files are the same: GPT-2's take up to a second, and many tests load several models."""
    read = AutoTokenizer.from_pretrained

    def read_once(name, **options):
        key = tuple(path.read_bytes() for path in sorted(Path(name).glob("*.json")) if path.name != "results.json")
        if key not in TOKENIZERS or not key:
            TOKENIZERS[key] = read(name, **options)
        return TOKENIZERS[key]

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", read_once)


def load(directory) -> common.Loaded:
    return common.load(common.parser("").parse_args([str(directory), "--device", "cpu"]))


def local_tasks(directory: Path, **rows: list[dict]) -> Path:
    """Fills a directory for --include_path: lm-evaluation-harness's tasks of these names, on these rows instead."""
    lm_eval_tasks = Path(find_spec("lm_eval").origin).parent / "tasks"
    directory.mkdir()
    for name, task_rows in rows.items():
        file = directory / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in task_rows))
        split = "validation" if name == "hellaswag" else "test"
        kwargs = {"data_files": {split: str(file)}, "cache_dir": f"{directory}/cache"}
        (included,) = lm_eval_tasks.glob(f"{name.partition('_')[0]}/{name}.yaml")
        task = {"include": str(included), "task": name, "dataset_path": "json", "dataset_name": None}
        task |= {"dataset_kwargs": kwargs, "training_split": None, "validation_split": None, f"{split}_split": split}
        (directory / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML
    return directory


@pytest.fixture
def command(monkeypatch):
    """module, arguments: runs the module's main function, on the CPU if it takes a device."""

    def run(module, *arguments) -> None:
        device = [] if module.__name__ == "eval.report" else ["--device", "cpu"]
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments), *device])
        module.main()

    return run


@pytest.fixture
def error_of(command, capsys):
    """module, arguments: the error, of one line, with which the module's main function refuses them."""

    def run(module, *arguments) -> str:
        with pytest.raises(SystemExit, match=r"^2$"):
            common.run_main(lambda: command(module, *arguments))
        error = capsys.readouterr().err
        assert error.count("\n") == 1, error
        return error

    return run


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory, tiny_gpt2):
    """A small model with GPT-2's tokenizer."""
    directory, loaded = tmp_path_factory.mktemp("models") / "gpt2", tiny_gpt2(64)
    loaded.model.save_pretrained(directory)
    loaded.tokenizer.save_pretrained(directory)
    return directory
