"""What the tests of the evaluation commands share."""

import sys

import pytest

from eval import common


def load(directory) -> common.Loaded:
    return common.load(common.parser("").parse_args([str(directory), "--device", "cpu"]))


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
