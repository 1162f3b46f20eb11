"""Checkpoints: atomic, verified to the last byte, the newest valid one taken, none lost."""

import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import save as save_tensors

from recipe import faults
from recipe.checkpoint import format as ckpt
from recipe.errors import UserError
from recipe.hub.export import export


def save(run, step):
    weights = {"a.weight": torch.arange(6.0).view(2, 3) + step}
    moments = {"exp_avg.a.weight": torch.ones(2, 3), "exp_avg_sq.a.weight": torch.ones(2, 3)}
    state = {"config": {"n_layer": 2, "learning_rate": 1e-3}}
    return ckpt.save_checkpoint(run, step, weights, moments, state, {"config.json": b"{}"})


def test_round_trip(tmp_path):
    loaded = ckpt.load_checkpoint(save(tmp_path, 7))
    assert (loaded.step, loaded.state["config"]["n_layer"]) == (7, 2)
    assert torch.equal(loaded.weights["a.weight"], torch.arange(6.0).view(2, 3) + 7)
    assert loaded.moments.keys() == {"exp_avg.a.weight", "exp_avg_sq.a.weight"}


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json", "manifest.json"]
)
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
        with pytest.raises(UserError, match="none of its 1 checkpoints is whole; --fresh starts over"):
            ckpt.newest_valid(tmp_path, said.append)


def test_what_cannot_be_read_now_is_not_taken_for_damage(tmp_path, monkeypatch):
    """Or the run would begin again, and write over what it has."""
    save(tmp_path, 1)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(ckpt, "_sha256", stale)
    with pytest.raises(UserError, match=r"step_00000001 cannot be read: Stale file handle; try again"):
        ckpt.newest_valid(tmp_path)


def test_a_bit_flipped_in_the_manifest_itself_never_passes_a_bad_file(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = "0" * 64
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert ckpt.verify(path) == ["model.safetensors does not have the checksum it was written with"]


def test_the_tensors_are_in_the_bytes_that_safetensors_writes():
    tensors = {
        "b": torch.randn(3, 4),
        "a.weight": torch.randn(2, 3).t(),
        "é": torch.randn(()),
        "none": torch.zeros(0, 2),
    }
    contiguous = {k: v.contiguous() for k, v in tensors.items()}
    assert b"".join(ckpt.safetensors_parts(tensors, {"format": "pt"})) == save_tensors(contiguous, {"format": "pt"})
    assert b"".join(ckpt.safetensors_parts({})) == save_tensors({})


@pytest.mark.parametrize(
    "point", ["save.begin", "save.optimizer.safetensors.during", "save.manifest.json.after", "save.rename.before"]
)
def test_a_save_that_fails_leaves_the_earlier_ones_and_no_trace(tmp_path, monkeypatch, point):
    save(tmp_path, 1)
    monkeypatch.setattr(faults, "_FAULTS", faults._parse(f"enospc@{point}", "0"))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert ckpt.newest_valid(tmp_path) == tmp_path / "step_00000001"


def test_a_save_for_which_there_is_no_room_is_not_begun(tmp_path, monkeypatch):
    save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    with pytest.raises(OSError, match=r"a checkpoint takes 0.016 GB, 0.001 GB are free"):
        save(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def test_what_is_newer_than_the_step_just_saved_is_damaged_and_never_counts(tmp_path):
    """Resumed from 10 because 20 is damaged: the save of 12 must not prune 10 and 12 for the sake of 20."""
    for step in (5, 10, 20):
        save(tmp_path, step)
    (tmp_path / "step_00000020" / "model.safetensors").write_bytes(b"")
    save(tmp_path, 12)
    assert [p.name for p in ckpt.prune(tmp_path, 12, save_total_limit=1, milestone_steps=0)] == [
        "step_00000005",
        "step_00000010",
    ]
    assert ckpt.newest_valid(tmp_path, lambda line: None) == tmp_path / "step_00000012"
    save(tmp_path, 20)  # made again, in the place of the damaged one
    assert ckpt.verify(tmp_path / "step_00000020") == []


def test_a_manifest_that_points_elsewhere_is_damage(tmp_path):
    path = save(tmp_path, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (tmp_path / "config.json").write_bytes(b"{}")
    for name in ("../config.json", str(tmp_path / "config.json")):
        changed = {"files": manifest["files"] | {name: manifest["files"]["config.json"]}}
        (path / "manifest.json").write_text(json.dumps(changed))
        assert ckpt.verify(path) == [f"manifest.json names {name!r}, which is not a file of this directory"]
    del manifest["files"]["optimizer.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert ckpt.verify(path) == ["manifest.json does not list optimizer.safetensors"]


def test_the_command_lists_and_verifies(tmp_path, capsys):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "config.json").write_bytes(b"[]")
    assert ckpt.main(["list", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [f"{tmp_path}/step_0000000{n}" for n in (1, 2)]
    assert lines[0].endswith("whole")
    assert lines[1].endswith("DAMAGED: config.json does not have the checksum it was written with")
    assert ckpt.main(["verify", str(tmp_path / "step_00000001")]) == 0
    assert "whole, 5 files" in capsys.readouterr().out
    assert ckpt.main(["verify", str(tmp_path)]) == 1
    assert "step_00000002: config.json does not have" in capsys.readouterr().out
    (tmp_path / "step_00000001" / "manifest.json").unlink()
    assert ckpt.main(["verify", str(tmp_path / "step_00000001")]) == 1
    assert ckpt.main(["list", str(tmp_path / "nothing")]) == 2


def test_a_leftover_of_a_killed_save_is_no_checkpoint_and_is_swept_away(tmp_path):
    save(tmp_path, 1)
    leftover = tmp_path / ".saving-step_00000002"
    shutil.copytree(tmp_path / "step_00000001", leftover)
    assert ckpt.newest_valid(tmp_path) == tmp_path / "step_00000001"
    save(tmp_path, 3)
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
    assert {p.name for p in out.iterdir()} == {"README.md", "model.safetensors", "config.json"}
    with pytest.raises(UserError, match="exists; name another"):
        export(run, out)
    with pytest.raises(UserError, match="no checkpoint there"):
        export(tmp_path / "nothing", tmp_path / "other")
