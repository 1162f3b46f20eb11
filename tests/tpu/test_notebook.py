"""The notebooks for TPUs, executed on XLA's CPU plugin."""

import json

import pytest

from tests.conftest import TINY, by_step
from tests.test_notebooks import SAME, check_installed, execute, modules, recipe
from tests.tpu.conftest import environment


@pytest.fixture
def env() -> dict[str, str]:
    """What a notebook's programs see of a machine with one chip."""
    return {name: environment(chips=1)[name] for name in ("PYTHONPATH", "TPU_CHIPS", "ACCELERATE_USE_CPU")}


def test_the_kaggle_notebook_trains_and_evaluates_on_a_tpu(shards, env, tmp_path):
    """Without an earlier run and without a push."""
    config = recipe(tmp_path / "configs", **TINY | {"max_steps": 6}, dataset_name=shards)
    printed = execute("kaggle-tpu", tmp_path, env=env, skip=SAME, CONFIG=config, EARLIER=str(tmp_path))
    run = tmp_path / "runs" / "shakespeare"
    check_installed(printed["installed"], "tpu,trackers", tmp_path / "checkout")
    assert "new run    no checkpoint shakespeare/step_... under" in printed["earlier"]
    assert "device     TPU, fp32" in printed["train"]
    assert by_step(run)[6]["val_loss"] < by_step(run)[0]["val_loss"]
    results = json.loads((run / "step_00000006" / "results.json").read_text())
    assert results["perplexity"]["windows"] == 8
    assert results["perplexity"]["device"] == "tpu"
    assert "not pushed: HUB names no repository" in printed["push"]
    assert f"all done; the run is in {run}" in printed["push"]


def test_the_colab_notebook_trains_on_a_tpu_and_keeps_the_run_on_drive(shards, env, tmp_path):
    """Its later cells are those of Kaggle's."""
    config = recipe(tmp_path / "configs", **TINY | {"max_steps": 6}, dataset_name=shards)
    drive = {"google__colab__drive": "def mount(path): pass", "google__colab__userdata": ""}
    fakes = modules(tmp_path / "modules", **drive)["PYTHONPATH"]
    env |= {"PYTHONPATH": f"{fakes}:{env['PYTHONPATH']}", "TPU_ACCELERATOR_TYPE": "v5e-1"}
    places = {"DRIVE": str(tmp_path), "KEPT": str(tmp_path / "kept"), "HOURS": 1}
    printed = execute("colab", tmp_path, env=env, skip={*SAME, "loss"}, CONFIG=config, **places)
    check_installed(printed["installed"], "tpu,trackers", tmp_path / "checkout")
    assert printed["install"].startswith("TPU v5e-1")
    assert "device     TPU, fp32" in printed["train"]
    assert (tmp_path / "kept" / "shakespeare" / "step_00000006" / "model.safetensors").exists()
