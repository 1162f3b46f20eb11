"""Checkpoints: atomic, verified to the last byte, the newest valid one taken, none lost."""

import json
import shutil

import pytest
import torch

from recipe import checkpoint as ckpt
from recipe.config import UserError
from recipe.export import export


def write_model_files(directory):
    (directory / "config.json").write_text("{}")


def save(run, step, **options):
    weights = {"a.weight": torch.arange(6.0).view(2, 3) + step}
    moments = {"exp_avg.a.weight": torch.ones(2, 3), "exp_avg_sq.a.weight": torch.ones(2, 3)}
    state = {"config": {"n_layer": 2, "learning_rate": 1e-3}}
    return ckpt.save_checkpoint(run, step, weights, moments, state, options.get("files", write_model_files))


def test_round_trip(tmp_path):
    loaded = ckpt.load_checkpoint(save(tmp_path, 7))
    assert (loaded.step, loaded.state["config"]["n_layer"]) == (7, 2)
    assert torch.equal(loaded.weights["a.weight"], torch.arange(6.0).view(2, 3) + 7)
    assert loaded.moments.keys() == {"exp_avg.a.weight", "exp_avg_sq.a.weight"}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json",
                                  "manifest.json"])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_any_damage_is_found_and_the_one_before_is_taken(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-3])
    else:
        file.unlink()
    said = []
    assert ckpt.newest_valid(tmp_path, said.append) == tmp_path / "step_00000001"
    assert "step_00000002" in said[0]
    assert name in said[0] or name == "manifest.json"
    if name != "manifest.json":
        shutil.rmtree(tmp_path / "step_00000001")
        assert ckpt.newest_valid(tmp_path, said.append) is None


def test_a_bit_flipped_in_the_manifest_itself_never_passes_a_bad_file(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert ckpt.verify(path) == ["model.safetensors does not have the checksum it was written with"]


def test_a_save_that_fails_leaves_the_earlier_ones_and_no_trace(tmp_path):
    save(tmp_path, 1)

    def full(directory):
        (directory / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2, files=full)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert ckpt.newest_valid(tmp_path) == tmp_path / "step_00000001"


def test_a_leftover_of_a_killed_save_is_no_checkpoint_and_is_swept_away(tmp_path):
    save(tmp_path, 1)
    leftover = tmp_path / ".saving-step_00000002"
    shutil.copytree(tmp_path / "step_00000001", leftover)
    assert ckpt.newest_valid(tmp_path) == tmp_path / "step_00000001"
    ckpt.prune(tmp_path, keep_last=1, milestone_every=0)
    assert not leftover.exists()


def test_another_run_is_refused_and_harmless_changes_are_said(tmp_path):
    state = {"config": {"n_layer": 2, "n_embd": 64, "learning_rate": 1e-3, "seed": 1}}
    same = {"n_layer": 2, "n_embd": 64, "learning_rate": 2e-3, "seed": 1}
    assert ckpt.check_same_run(state, same, tmp_path) == ["resuming with learning_rate 0.001 -> 0.002"]
    with pytest.raises(UserError, match=r"n_layer 2 -> 3, n_embd 64 -> 96.*--fresh"):
        ckpt.check_same_run(state, same | {"n_layer": 3, "n_embd": 96}, tmp_path)


def test_export_takes_the_newest_valid_checkpoint_without_the_trainers_files(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out"
    save(run, 1)
    (save(run, 2) / "model.safetensors").unlink()
    assert export(run, out).name == "step_00000001"
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "config.json"}
    with pytest.raises(UserError, match="exists; name another"):
        export(run, out)
    with pytest.raises(UserError, match="no checkpoint there"):
        export(tmp_path / "nothing", tmp_path / "other")
