"""The commands of eval/ on one chip, by `--device tpu`."""

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
    found = {}
    for device in ("cpu", "tpu"):
        output = tmp_path / f"{device}.json"
        words = [command, run, "--device", device, "--output", output, *options]
        monkeypatch.setattr(sys, "argv", list(map(str, words)))
        importlib.import_module(f"eval.{command}").main()
        found[device] = json.loads(output.read_text())[command]
        assert found[device].pop("device") == device
        for name in ("seconds", "scores"):  # the same rounded, for a model card
            found[device].pop(name, None)
    assert found["tpu"].keys() == found["cpu"].keys()
    for name, value in found["cpu"].items():
        assert found["tpu"][name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
