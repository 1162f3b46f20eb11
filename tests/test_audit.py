"""`python -m recipe.audit` on runs as they were trained, and on runs that did not compute what they say."""

import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from recipe import audit
from recipe.utils.files import sha256_of
from tests.checkpoint import change_state
from tests.conftest import EQUAL, ROOT, train

KEPT = {"save_steps": 5, "save_total_limit": 9, "logging_steps": 2}


def audited(capsys, *arguments) -> tuple[int, list[str]]:
    """Exit code, and the sentence of each interval."""
    code = audit.main([str(argument) for argument in arguments])
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def flip_a_bit(checkpoint) -> str:
    """Of a weight in the checkpoint, whose manifest says afterwards that nothing was changed; returns its name."""
    file, name = checkpoint / "model.safetensors", "transformer.h.1.mlp.c_fc.weight"
    weights = load_file(file)
    weights[name].view(-1).view(torch.int32)[7] ^= 1
    save_file(weights, file, {"format": "pt"})
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return name


def test_a_replay_equals_the_run_to_the_bit(shards, tmp_path, capsys):
    train(shards, tmp_path / "run", **KEPT)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    code, sentences = audited(capsys, tmp_path / "run", "--last", 4)
    assert (code, sentences) == (0, [f"step {n} to {n + 5}: equal to the bit" for n in (0, 5, 10, 15)])
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before

    # one bit of one weight after step 10, from which the run then went on
    for step in (15, 20):
        shutil.rmtree(tmp_path / "run" / f"step_{step:08d}")
    name = flip_a_bit(tmp_path / "run" / "step_00000010")
    train(shards, tmp_path / "run", **KEPT)
    elsewhere = shutil.copytree(shards, tmp_path / "elsewhere")
    flags = f"--dataset_name {elsewhere}"
    code, sentences = audited(capsys, tmp_path / "run", "--last", 4, "--flags", flags)
    assert code == 1
    assert [": equal" in sentence for sentence in sentences] == [True, False, True, True]
    assert f"the logged losses are equal; {name} differs most" in sentences[1]


@pytest.mark.slow
def test_a_replay_on_two_processes_equals_the_run_within_the_tolerance(shards, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    train(shards, tmp_path / "run", **EQUAL | {"save_total_limit": 9})
    ddp = f"accelerate.commands.launch --config_file {ROOT / 'accelerate_configs/ddp.yaml'} --num_processes 2"
    code, sentences = audited(capsys, tmp_path / "run", "--last", 2, "--launch", f"{sys.executable} -m {ddp}")
    assert code == 0
    assert all(": equal within 0.01 (" in one and "processes 1 in the run, 2 here" in one for one in sentences)
    code, sentences = audited(capsys, tmp_path / "run", "--launch", f"{sys.executable} -m {ddp}", "--tolerance", 1e-9)
    assert code == 1
    assert ": different: " in sentences[0]


@pytest.mark.parametrize("which", [("--last", 0), ("--random", -1)])
def test_no_interval_is_no_audit(which, tmp_path, capsys):
    assert audited(capsys, tmp_path, *which)[0] == 2


def test_altered_data_are_found_at_their_step(shards, tmp_path, capsys):
    data, run = shutil.copytree(shards, tmp_path / "data"), tmp_path / "run"
    (data / "manifest.json").unlink()  # whose checksums would stop the run, as those in its checkpoint would
    files = {"shards": data / "train_*.bin", "val_data": data / "val_*.bin"}
    train(**files, run=run, **KEPT)
    shutil.rmtree(run / "step_00000020")
    tokens = data / "train_000000.bin"
    as_it_was = tokens.read_bytes()
    altered = np.frombuffer(as_it_was, np.uint16).copy()
    altered[128:] = altered[128:][::-1]
    tokens.write_bytes(altered.tobytes())
    change_state(run / "step_00000015", lambda state: state["data"]["shards"][0].__setitem__(2, None))  # or it stops
    train(**files, run=run, **KEPT)
    tokens.write_bytes(as_it_was)
    code, sentences = audited(capsys, run, "--last", 2)
    assert code == 1
    assert sentences[0] == "step 10 to 15: equal to the bit"
    assert sentences[1].startswith("step 15 to 20: different: losses differ from step 16 on")
