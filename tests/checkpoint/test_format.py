"""A checkpoint is intact or absent, a damaged one is never used, and the newest intact one is found."""

import errno
import json
import os
import re
import shutil
import threading

import pytest

from recipe.checkpoint import format as ckpt
from recipe.checkpoint.__main__ import main
from recipe.checkpoint.format import checkpoints, newest_intact, prune, verify
from recipe.config import Config, parse_config
from recipe.utils.errors import UserError
from tests.checkpoint import save
from tests.conftest import flags


def names(run) -> list[int]:
    return [ckpt.step_of(path) for path in checkpoints(run)]


def keeping(save_total_limit: int, milestone_steps: int = 0) -> Config:
    fields = {"save_total_limit": save_total_limit, "milestone_steps": milestone_steps, "lr_scheduler_type": "linear"}
    return parse_config(flags(**fields))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "link"])
def test_any_damage_is_found_and_the_checkpoint_before_is_taken(tmp_path, caplog, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage == "flip":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-3])
    elif damage == "link":
        (tmp_path / "copy").write_bytes(data)
        file.symlink_to(tmp_path / "copy")
    assert newest_intact(tmp_path) == tmp_path / "step_00000001"
    assert "skipping" in caplog.text
    assert "step_00000002" in caplog.text
    assert name in caplog.text or name == "manifest.json"


def test_where_all_are_damaged_the_user_decides(tmp_path):
    (save(tmp_path, 1) / "config.json").unlink()
    with pytest.raises(UserError, match="none of its 1 checkpoints is intact; --fresh moves them aside and"):
        newest_intact(tmp_path)
    assert newest_intact(tmp_path / "nothing") is None


def test_what_cannot_be_read_now_is_not_taken_for_damage(tmp_path, monkeypatch):
    """Or the run would begin again, and replace what it has."""
    save(tmp_path, 1)

    def stale(path):
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr("recipe.utils.checkpoints.sha256_of", stale)
    with pytest.raises(UserError, match=r"step_00000001 cannot be read: Stale file handle; try again"):
        newest_intact(tmp_path)


@pytest.mark.parametrize("name", ["../config.json", "{run}/config.json"])
def test_a_manifest_that_points_elsewhere_is_damage(tmp_path, name):
    path, name = save(tmp_path, 1), name.format(run=tmp_path)
    (tmp_path / "config.json").write_bytes(b"{}")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["config.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = verify(path)
    assert repr(name) in problem


@pytest.mark.parametrize("content", ["[" * 100_000, '{"files": 3}', '{"files": {}}', "{"])
def test_a_manifest_that_is_none_is_damage(tmp_path, content):
    (save(tmp_path, 1) / "manifest.json").write_text(content)
    assert "manifest" in verify(tmp_path / "step_00000001")[0]


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_a_leftover_is_no_checkpoint_and_does_not_block_the_next_save(tmp_path, kind):
    save(tmp_path, 1)
    precious, leftover = tmp_path / "precious", tmp_path / ".saving-step_00000002"
    precious.mkdir()
    (precious / "file").write_text("precious")
    if kind == "directory":
        shutil.copytree(tmp_path / "step_00000001", leftover)
    elif kind == "file":
        leftover.write_text("")
    else:
        leftover.symlink_to(precious)
    assert newest_intact(tmp_path) == tmp_path / "step_00000001"
    save(tmp_path, 2)
    assert not os.path.lexists(leftover)
    assert verify(tmp_path / "step_00000002") == []
    assert (precious / "file").read_text() == "precious"


def test_the_newest_the_milestones_and_the_best_are_kept(tmp_path):
    losses = {}
    for step, loss in [(1, 5.0), (2, 3.0), (3, 4.0), (4, 6e11), (5, 7e11), (6, None)]:
        save(tmp_path, step)
        prune(tmp_path, step, keeping(1, milestone_steps=3), losses)
        losses |= {step: loss} if loss else {}  # a step is evaluated after its save has begun
        assert names(tmp_path)[-1] == step
    assert names(tmp_path) == [2, 3, 6]
    prune(tmp_path, 6, keeping(1), losses | {6: 2.0})
    assert names(tmp_path) == [3, 6]  # 3 was a milestone once


def test_what_is_damaged_never_counts_as_a_checkpoint_that_is_kept(tmp_path):
    """Resumed from 10 because 20 is damaged: neither the save of 12 nor that of 30 may prune 10 for the sake of 20."""
    for step in (5, 10, 20):
        save(tmp_path, step)
    (tmp_path / "step_00000020" / "model.safetensors").write_bytes(b"")
    for _ in range(2):  # a look leaves it where it is
        assert newest_intact(tmp_path) == tmp_path / "step_00000010"
    assert newest_intact(tmp_path, locked=True) == tmp_path / "step_00000010"
    assert (tmp_path / "damaged_step_00000020" / "model.safetensors").exists()
    for step, kept in ((12, [10, 12]), (30, [12, 30])):
        save(tmp_path, step)
        prune(tmp_path, step, keeping(2), {20: 0.1})
        assert names(tmp_path) == kept
    save(tmp_path, 20)  # the same step, saved again
    assert verify(tmp_path / "step_00000020") == []


def test_reading_while_a_run_prunes_finds_a_whole_checkpoint_every_time(tmp_path, caplog, capsys):
    save(tmp_path, 1)
    stop = threading.Event()

    def train():
        step = 1
        while not stop.is_set():
            step += 1
            save(tmp_path, step)
            prune(tmp_path, step, keeping(1), {})

    thread = threading.Thread(target=train)
    thread.start()
    try:
        for _ in range(60):
            assert newest_intact(tmp_path)
            assert main([str(tmp_path)]) == 0
    finally:
        stop.set()
        thread.join()
    assert caplog.text.count("skipping") == 0


def test_the_command_lists_and_verifies(tmp_path, capsys):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "config.json").write_bytes(b"[]")
    assert main([str(tmp_path)]) == 1
    intact, damaged = capsys.readouterr().out.splitlines()
    assert intact.startswith(f"{tmp_path}/step_00000001 ")
    assert intact.endswith(" intact")
    assert "step_00000002" in damaged
    assert "DAMAGED: config.json does not match its checksum" in damaged
    assert main([str(tmp_path / "step_00000001")]) == 0
    assert main([str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("", [], "it is []"),
        ("step", -1, "step is -1"),
        ("step", True, "step is True"),
        ("config", None, "config is missing"),
        ("config.max_steps", 0, "max_steps is 0; it must be at least 1"),
        ("config.max_steps", None, "max_steps is ''; it must be INTEGER"),
        ("config.train_text", 3, "config.train_text is 3"),
        ("config.learning_rate", "fast", "learning_rate is 'fast'; it must be NUMBER"),
        ("config.dataset_name", [{"name": "a"}], "config.dataset_name[0].weight is missing"),
        ("data.shards", [["a.bin", 9, "0"]], "data.shards[0][2] is '0'"),
        ("data.manifest", {"source": {}, "options": {}, "shards": [{"file": "/x"}]}, "shards[0].split is missing"),
        ("data.mixture", [{"shards": []}] * 2, "data does not match the data sets in config.dataset_name"),
        ("metrics.running_loss.count", 1.5, "metrics.running_loss.count is 1.5"),
        ("metrics.unwritten.loss", [1.0], "unwritten.loss is [1.0]"),
        ("about", [], "about is empty"),
        ("about", [{}], "about[0].from_step is missing"),
    ],
)
def test_a_state_that_others_may_have_written_is_checked_field_by_field(whole_run, tmp_path, field, value, problem):
    path = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020") / "trainer_state.json"
    state = json.loads(path.read_text())
    assert ckpt.state_of(path.parent) == state
    changed = {"": state}
    within, (*way, last) = changed, ["", *field.split(".")] if field else [""]
    for key in way:
        within = within[key]
    within[last] = value
    path.write_text(json.dumps(changed[""]))
    with pytest.raises(UserError, match=rf"^{path}.*{re.escape(problem)}"):
        ckpt.state_of(path.parent)
