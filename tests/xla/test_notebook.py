"""The notebook for Kaggle's TPU, executed on XLA's CPU client."""

import json

from tests.conftest import TINY, by_step
from tests.test_notebooks import SAME, check_installed, execute, recipe


def test_a_kaggle_tpu(shards, tmp_path):
    """All devices behind one process, without an earlier run and without a push."""
    config = recipe(tmp_path / "configs", **TINY | {"max_steps": 6}, dataset_name=shards)
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_USE_SPMD": "0", "ACCELERATE_USE_CPU": "false"}
    printed = execute("kaggle-tpu", tmp_path, env=env, skip=SAME, CONFIG=config, EARLIER=str(tmp_path))
    run = tmp_path / "runs" / "shakespeare"
    check_installed(printed["installed"], "tpu,trackers", tmp_path / "checkout")
    assert "new run    nothing of it" in printed["earlier"]
    assert "4 devices behind one process" in printed["train"]
    assert by_step(run)[6]["val_loss"] < by_step(run)[0]["val_loss"]
    results = json.loads((run / "step_00000006" / "results.json").read_text())
    assert results["perplexity"]["windows"] == 8
    assert "not pushed: HUB names no repository" in printed["push"]
    assert f"all done; the run is in {run}" in printed["push"]
