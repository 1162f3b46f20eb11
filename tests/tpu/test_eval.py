"""The commands of eval/ on one chip, with `--device tpu`."""

import importlib
import json
import sys

import pytest

from tests.tpu.conftest import train


@pytest.fixture
def evaluate(shards, once, monkeypatch):
    """command, arguments: runs it on a small run."""
    run, _ = once("to-evaluate", lambda run: train(shards, run, "cpu", max_steps=10, warmup_steps=2) and None)

    def call(command: str, *arguments) -> None:
        monkeypatch.setattr(sys, "argv", [command, str(run), *map(str, arguments)])
        importlib.import_module(f"eval.{command}").main()

    return call


def test_a_chip_draws_the_sample_of_the_cpu(evaluate, capsys):
    texts = []
    for device in ("cpu", "tpu"):
        evaluate("sample", "--prompt", "The king", "--temperature", 0, "--max_new_tokens", 4, "--device", device)
        texts.append(capsys.readouterr().out.partition("\nThe king")[2])
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize(
    ("command", "options"), [("perplexity", ["--limit_windows", 8]), ("hellaswag", ["--limit", 8])]
)
def test_a_chip_has_the_results_of_the_cpu(evaluate, tmp_path, command, options):
    results = {}
    for device in ("cpu", "tpu"):
        output = tmp_path / f"{device}.json"
        evaluate(command, "--device", device, "--output", output, *options)
        results[device] = json.loads(output.read_text())[command]
        assert results[device].pop("device") == device
        for name in ("seconds", "scores"):  # scores are the same results, rounded
            results[device].pop(name, None)
    assert results["tpu"].keys() == results["cpu"].keys()
    for name, value in results["cpu"].items():
        assert results["tpu"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
