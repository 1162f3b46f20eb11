"""python -m benchmarks proof, whose steps cannot harm each other, and the commands that it runs."""

import json
import re
import subprocess
import tarfile

import psutil
import pytest

from benchmarks import __main__ as bench
from benchmarks import proof
from benchmarks.proof import Step
from recipe.engine import hardware
from tests import processes as programs
from tests.conftest import ROOT, environment, ok, refused

SUCCEEDS = "import json, pathlib; pathlib.Path('speed.json').write_text(json.dumps({'ratio': 1.2})); print('well')"
# Ignores SIGTERM; its child is paused and in a session of its own, like a run of benchmarks/runs.py between turns.
HANGS = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(child.pid)
time.sleep(600)
"""


def step(name: str, program: str, limit: float = 60) -> Step:
    return Step(name, limit, ["-c", program])


def results(out) -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def test_a_step_that_fails_or_hangs_costs_only_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(proof, "GRACE_S", 0.5)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    out = tmp_path / "proof"
    steps = [
        step("broken", "print('before'); raise SystemExit('no such kernel')"),
        step("hanging", HANGS, limit=3),
        step("sound", SUCCEEDS),
    ]
    assert proof.prove(steps, out, minutes=5) == 2
    records = results(out)
    assert {name: r["rc"] for name, r in records.items()} == {"01-broken": 1, "02-hanging": 124, "03-sound": 0}
    assert records["01-broken"]["result"]["output"] == ["before", "no such kernel"]
    assert records["03-sound"]["result"] == {"speed": {"ratio": 1.2}, "output": ["well"]}
    assert 3 <= records["02-hanging"]["seconds"] < 20
    child = int(records["02-hanging"]["result"]["output"][0])
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE
    assert all(r["device"] and r["torch"] and r["command"][1] == "-c" for r in records.values())
    printed = capsys.readouterr().out
    assert re.search(r"FAILED 01-broken in \d+ s: no such kernel", printed)
    assert "KILLED 02-hanging" in printed
    assert "1 of 3 steps have succeeded" in printed


def test_a_second_run_repeats_only_the_steps_that_have_not_succeeded(tmp_path, capsys):
    out, append_x = tmp_path / "proof", "open('../count', 'a').write('x')"
    steps = [step("first", append_x), step("second", "raise SystemExit(1)"), step("third", append_x)]
    assert proof.prove(steps, out, minutes=0) == 3
    assert capsys.readouterr().out.count("not started, time is up") == 3
    assert results(out) == {}
    assert proof.prove(steps, out, minutes=5) == 1
    steps[1] = step("second", append_x)
    assert proof.prove(steps, out, minutes=5) == 0
    assert (tmp_path / "proof-work/count").read_text() == "xxx"
    assert set(results(out)) == {"01-first", "02-second", "03-third"}
    assert results(out)["02-second"]["before"]["rc"] == 1, "the failure's record is kept"


def test_what_was_measured_before_a_kill_is_kept(tmp_path, monkeypatch, capsys):
    """A run's metrics, and a table that is written after each of its rows: both are also printed."""
    monkeypatch.setattr(proof, "GRACE_S", 0.5)
    lines = [{"step": n, "loss": 11 - n, "tokens_per_second": 100 * n, "mfu": None} for n in range(6)]
    program = f"import json, os, time; os.mkdir('run'); lines = {lines}\n"
    program += "with open('run/metrics.jsonl', 'w') as file: file.writelines(json.dumps(x) + '\\n' for x in lines)\n"
    rows = [{"name": "theirs", "ratio": 1.204, "void": ""}, {"name": "large", "ratio": None, "void": "out of memory"}]
    program += f"json.dump({ {'rows': rows} }, open('peers.json', 'w')); time.sleep(600)"
    proof.prove([step("killed", program, limit=4)], tmp_path / "proof", minutes=5)
    record = results(tmp_path / "proof")["01-killed"]
    assert record["rc"] == 124
    assert record["result"]["peers"] == {"rows": rows}
    assert record["result"]["tokens_per_second"] == 400
    assert record["result"]["losses"] == [10, 9, 8, 7, 6]
    printed = capsys.readouterr().out
    assert "s: 1.20x theirs; large: out of memory; 400 tokens/s, MFU 0.0%, losses to 6" in printed


def test_the_steps_are_commands_that_exist(tmp_path, capsys):
    """The most valuable come first. Those up to `deterministic` take less than ten minutes if each
    needs half of its limit."""
    steps = proof.steps(nanogpt="", text="")
    names = [step.name for step in steps]
    assert names[:3] == ["fused-loss", "auto", "peers"]
    assert sum(step.limit for step in steps[: names.index("deterministic") + 1]) < 2 * 600
    assert "optimizers" not in names
    assert "optimizers" in [step.name for step in proof.steps(nanogpt="", text="books.jsonl")]
    for words in {tuple(step.arguments[:3]) for step in steps if step.arguments[1] == "benchmarks"}:
        with pytest.raises(SystemExit) as exit_info:
            bench.main([words[2], "--help"])
        assert exit_info.value.code == 0
    assert bench.main(["proof", "--nanogpt", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no model.py there" in capsys.readouterr().err


def test_the_ceiling_of_this_machine(tmp_path):
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("n_layer: 1\nn_head: 2\nn_embd: 32\nn_positions: 32\nsequence_length: 32\ndataset_name: none\n")
    assert bench.main(["ceiling", "--config", str(recipe), "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "ceiling.json").read_text())
    assert len(result["flops"]) == 5
    assert result["copied_bytes_per_second"] > 1e8
    assert result["attention_ms"]["chosen"] > 0
    assert "scaled_dot_product" in result["attention_ms"]["chosen is"]


def test_the_bundle_has_the_text_and_the_peer_of_any_directory(tmp_path):
    text, bundle = tmp_path / "my texts" / "one text.txt", tmp_path / "bundle.tar.gz"
    text.parent.mkdir()
    text.write_text("A text.")
    (tmp_path / "model.py").write_text("")
    words = ["make", "-C", ROOT, "gpu-bundle", f"BUNDLE={bundle}", f"TEXT={text}", f"NANOGPT={tmp_path}"]
    printed = ok(subprocess.run(words, env=environment(), capture_output=True, text=True)).stdout
    assert "make gpu-proof NANOGPT=. TEXT=" in printed
    with tarfile.open(bundle) as archive:
        assert {"Makefile", "recipe/train.py", "model.py", "one text.txt"} <= set(archive.getnames())


def kernels(out, *options: str):
    sizes = "--n_layer=1 --n_head=2 --n_embd=32 --n_positions=32 --sequence_length=32 --precision=fp32"
    flags = ["--micro_batch_size=4", "--torch_compile=false", f"--out={out}", *sizes.split(), *options]
    return programs.run("-m", "benchmarks", "kernels", *flags)


@pytest.mark.parametrize("peer", ["", "transformers"])
def test_the_time_of_each_operator_in_a_step(peer, tmp_path):
    assert "ms per step of 128 tokens" in ok(kernels(tmp_path, f"--peer={peer}", "--seconds=2")).stdout
    result = json.loads((tmp_path / "kernels.json").read_text())
    rows = result["kernels"]
    assert result["profiled_step_ms"] > 0.5 * sum(ms for *_, ms in rows)  # several threads may work at a time
    assert 0.1 < result["step_ms"] / result["profiled_step_ms"] < 10
    calls = {name: n for name, n, _ in rows}
    assert calls["aten::addmm"] == 4  # c_attn, c_fc and two c_proj, forward
    times = [ms for *_, ms in rows]
    assert times == sorted(times, reverse=True)
    assert times[-1] > 0


@pytest.mark.skipif(not hardware.cpu_has_bf16(), reason="a CPU without bf16")
def test_a_peer_is_profiled_in_the_precision_that_the_recipe_resolves_to(tmp_path):
    """A peer once ran in fp32 beside our bf16; and in fp32 it copies fewer tensors to another type."""
    copies = {}
    for precision in ("auto", "fp32"):
        ok(kernels(tmp_path, "--peer=transformers", f"--precision={precision}"))
        result = json.loads((tmp_path / "kernels.json").read_text())
        copies[result["precision"]] = {name: n for name, n, _ in result["kernels"]}["aten::_to_copy"]
    assert copies["bf16"] > copies["fp32"] + 8  # four matrices, their biases, the head; forward and backward


def test_a_run_that_fails_is_not_profiled(tmp_path):
    errors = refused(kernels(tmp_path, f"--init_from={tmp_path}"))
    assert errors.endswith("error: the run ended before its steps were profiled; it has printed why\n")
    assert f"error: {tmp_path}: no model.safetensors" in errors
    assert not (tmp_path / "kernels.json").exists()
