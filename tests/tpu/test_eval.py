"""The commands of eval/ on one chip, with `--device tpu`."""

import importlib
import json
import sys

import pytest

from tests.tpu.conftest import train


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("perplexity", ["--limit_windows", "8"]),
        ("hellaswag", ["--limit", "8"]),
        ("sample", ["--prompt", "The king", "--temperature", "0", "--max_new_tokens", "4"]),
    ],
)
def test_a_chip_has_the_results_of_the_cpu(shards, once, tmp_path, monkeypatch, command, options):
    run, _ = once("to-evaluate", lambda run: train(shards, run, "cpu", max_steps=10, warmup_steps=2) and None)
    results = {}
    for device in ("cpu", "tpu"):
        output = tmp_path / f"{device}.json"
        words = [command, run, "--device", device, "--output", output, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        importlib.import_module(f"eval.{command}").main()
        results[device] = json.loads(output.read_text())[command]
        assert results[device].pop("device") == device
        for name in ("seconds", "scores"):  # scores are the same results, rounded
            results[device].pop(name, None)
    assert results["tpu"].keys() == results["cpu"].keys()
    for name, value in results["cpu"].items():
        assert results["tpu"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
