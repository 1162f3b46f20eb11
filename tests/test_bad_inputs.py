"""Mistakes, made on the command line: exit code 2, no traceback, the field or file and the way out.

The messages are tested one by one where they arise; here it is that a user sees them, and only them.
"""

import shutil
from importlib.util import find_spec

import numpy as np
import pytest
from safetensors.torch import load_file

from recipe.checkpoint import checkpoints, verify
from recipe.data.prepare import PrepareOptions, prepare
from recipe.data.shards import write_shard
from tests.conftest import SHAKESPEARE, TINY, flags, metrics, run_train


def refused(*arguments, processes=1, env=None) -> str:
    result = run_train(*arguments, processes=processes, env=env)
    assert "Traceback" not in result.stderr or processes > 1, result.stderr  # torchrun adds its own
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stdout + result.stderr
    assert result.returncode == (2 if processes == 1 else 1)
    return errors[0]


def tiny(shards, run, **fields):
    return flags(**(TINY | {"data": shards, "output_dir": run, "max_steps": 6} | fields))


def test_configuration():
    assert "unknown '--learning_rat'; did you mean 'learning_rate'?" in refused("--learning_rat", "1")
    assert "nearest valid: 896, 1024, 1152" in refused("--total_batch_tokens", "1000")
    assert "precision fp16 needs a CUDA GPU" in refused("--precision", "fp16", "--dry_run")


def test_data(shards, tmp_path):
    message = refused(*tiny(tmp_path / "none", tmp_path / "run", source=""))
    assert "none: no such directory" in message
    assert "recipe.data.prepare" in message
    assert "no .bin file matches" in refused(*tiny(tmp_path / "*.bin", tmp_path / "run"))

    broken = tmp_path / "broken"
    shutil.copytree(shards, broken)
    data = bytearray((broken / "train_000000.bin").read_bytes())
    data[5000] ^= 1
    (broken / "train_000000.bin").write_bytes(data)
    assert "SHA-256" in refused(*tiny(broken, tmp_path / "run"))

    other = tmp_path / "tokens"
    other.mkdir()
    write_shard(other / "x_train_0.bin", np.full(4000, 50257, np.uint16))
    write_shard(other / "x_val_0.bin", np.arange(2000, dtype=np.uint16))
    assert "token 50257 at position 0" in refused(*tiny(other, tmp_path / "run"))
    write_shard(other / "x_train_0.bin", np.arange(20, dtype=np.uint16))
    assert "20 tokens, fewer than one sequence" in refused(*tiny(other, tmp_path / "run"))
    assert all(line["step"] == 0 for line in metrics(tmp_path / "run"))  # found before a step was taken


def test_data_that_turn_out_damaged_cost_nothing_that_was_trained(tmp_path):
    """The second of the shards is found out when it is reached; there is a checkpoint of the step before."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text(SHAKESPEARE.read_text()[:60_000])
    prepare(PrepareOptions(source=str(text), out=str(data), val_fraction=0.2, first_shard_tokens=2000))
    content = bytearray((data / "train_000001.bin").read_bytes())
    content[3000] ^= 1
    (data / "train_000001.bin").write_bytes(content)
    assert "train_000001.bin: SHA-256" in refused(*tiny(data, run, max_steps=20, save_every=0))
    assert [p.name for p in checkpoints(run)] == ["step_00000007"]
    assert verify(run / "step_00000007") == []


def test_a_hub_data_set_that_is_not_prepared_names_the_command(tmp_path):
    message = refused("--config", "recipe/configs/tinystories.yaml", "--compile", "false", f"--data={tmp_path}/stories",
                      "--source=roneneldan/TinyStories")  # fmt: skip
    assert "not prepared yet; first run: python -m recipe.data.prepare --source roneneldan/TinyStories" in message


def test_resuming_with_another_architecture(shards, tmp_path):
    run = tmp_path / "run"
    assert run_train(*tiny(shards, run)).returncode == 0
    message = refused(*tiny(shards, run, n_layer=3, max_steps=8))
    assert f"{run} holds a run with other settings: n_layer 2 -> 3" in message
    shutil.copytree(run, tmp_path / "moved")
    shutil.copytree(shards, tmp_path / "elsewhere")
    result = run_train(*tiny(tmp_path / "elsewhere", tmp_path / "moved", max_steps=7))
    assert result.returncode == 0
    assert "resuming with data" in result.stdout  # the same shards at another path are the same data

    changed = tmp_path / "shards"  # under the same name, another text
    shutil.copytree(shards, changed)
    run2 = tmp_path / "run2"
    assert run_train(*tiny(changed, run2)).returncode == 0
    shutil.rmtree(changed)
    text = tmp_path / "other.txt"
    text.write_text(SHAKESPEARE.read_text()[-100_000:])
    prepare(PrepareOptions(source=str(text), out=str(changed), val_fraction=0.1))
    assert "no longer holds the shards" in refused(*tiny(changed, run2, max_steps=8))

    (run / "step_00000006" / "model.safetensors").write_bytes(b"")
    (run / "step_00000006").rename(run / "step_00000009")
    result = run_train(*tiny(shards, run))
    assert "skipping" in result.stdout
    assert "model.safetensors has 0 bytes" in result.stdout
    assert result.returncode == 0


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(shards, tmp_path):
    run = tmp_path / "run"
    assert run_train(*tiny(shards, run, max_steps=4, warmup_steps=0)).returncode == 0
    broken = {"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 12, "save_every": 1, "log_every": 5}
    assert "the validation loss at step 10 is nan: the weights are spoilt" in refused(*tiny(shards, run, **broken))
    broken["max_skipped_steps"] = 3
    assert "5 steps in a row, by step 10, were left out" in refused(*tiny(shards, run, **broken))
    assert (run / "step_00000004").is_dir()
    for checkpoint in run.glob("step_*"):
        assert all(t.isfinite().all() for t in load_file(checkpoint / "model.safetensors").values()), checkpoint


@pytest.mark.parametrize("environment", [{"ACCELERATE_USE_CPU": "false"}])
def test_processes_that_would_train_alone_are_refused(shards, tmp_path, environment):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    message = refused(*tiny(shards, tmp_path / "run"), processes=2, env=environment)
    assert "each would train alone" in message
    assert "ACCELERATE_USE_CPU=true" in message


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="needs an environment without torch_xla")
def test_a_tpu_without_torch_xla():
    """Rather than a run on the machine's CPU, unnoticed."""
    message = refused("--dry_run", env={"PJRT_DEVICE": "TPU"})
    assert "PJRT_DEVICE is set, but torch_xla is not installed: pip install -e '.[tpu]'" in message
