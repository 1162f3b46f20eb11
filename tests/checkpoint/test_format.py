"""A checkpoint is intact or absent, a damaged one is never used, and a run resumes from the newest intact one."""

import errno
import io
import json
import os
import re
import shutil
import threading
from functools import reduce
from unittest.mock import Mock

import pytest

from recipe.checkpoint import format as ckpt
from recipe.checkpoint.__main__ import main
from recipe.checkpoint.format import checkpoints, newest_intact, prune, verify
from recipe.config import Config, parse_config
from recipe.utils.errors import UserError
from tests.checkpoint import save
from tests.conftest import flags


def steps_in(run_dir) -> list[int]:
    return [ckpt.step_of(path) for path in checkpoints(run_dir)]


def config_keeping(save_total_limit: int, milestone_steps: int = 0) -> Config:
    fields = {"save_total_limit": save_total_limit, "milestone_steps": milestone_steps, "lr_scheduler_type": "linear"}
    return parse_config(flags(**fields))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "config.json", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "link"])
def test_any_damage_is_detected_and_the_previous_checkpoint_is_used(tmp_path, caplog, name, damage):
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


def test_others_may_read_what_the_umask_allows(tmp_path):
    os.umask(umask := os.umask(0))
    assert {file.stat().st_mode & 0o777 for file in save(tmp_path, 1).iterdir()} == {0o666 & ~umask}


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path):
    (save(tmp_path, 1) / "config.json").unlink()
    with pytest.raises(UserError, match="none of its 1 checkpoints is intact; --fresh moves them aside and"):
        newest_intact(tmp_path)
    assert newest_intact(tmp_path / "nothing") is None


def test_a_read_error_is_not_taken_for_damage(tmp_path, monkeypatch):
    """Otherwise the run would start over and replace its checkpoints."""
    save(tmp_path, 1)

    error = OSError(errno.ESTALE, "Stale file handle")
    monkeypatch.setattr("recipe.utils.checkpoints.sha256_of", Mock(side_effect=error))
    with pytest.raises(UserError, match=r"step_00000001 cannot be read \(Stale file handle\); try again"):
        newest_intact(tmp_path)


OUTSIDE = '{"files": {"%s": {"bytes": 2, "sha256": "0"}}}'


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("[" * 100_000, "manifest.json is missing or damaged"),
        ("{", "manifest.json is missing or damaged"),
        ('{"files": 3}', "manifest.json is missing or damaged"),
        ('{"files": {}}', "manifest.json does not list model.safetensors"),
        (OUTSIDE % "../config.json", "manifest.json names '../config.json', which is not a file of this directory"),
        (OUTSIDE % r"\u001b[2J", r"manifest.json names '\x1b[2J', which is not a file of this directory"),
        (OUTSIDE % "/etc/hosts", "manifest.json names '/etc/hosts', which is not a file of this directory"),
    ],
)
def test_a_malformed_manifest_is_damage(tmp_path, content, problem):
    (save(tmp_path, 1) / "manifest.json").write_text(content)
    assert verify(tmp_path / "step_00000001")[0].startswith(problem)


def test_an_interrupted_save_is_no_checkpoint_and_does_not_block_the_next_one(tmp_path):
    save(tmp_path, 1)
    leftover = shutil.copytree(tmp_path / "step_00000001", tmp_path / ".saving-step_00000002")
    assert newest_intact(tmp_path) == tmp_path / "step_00000001"
    save(tmp_path, 2)
    assert not os.path.lexists(leftover)
    assert verify(tmp_path / "step_00000002") == []


def test_a_link_in_place_of_an_interrupted_save_keeps_its_target(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("precious")
    (tmp_path / ".saving-step_00000001").symlink_to(precious)
    with pytest.raises(FileExistsError):
        save(tmp_path, 1)
    assert (precious / "file").read_text() == "precious"


def test_pruning_keeps_the_newest_the_milestones_and_the_best(tmp_path):
    losses = {}
    for step, loss in [(1, 5.0), (2, 3.0), (3, 4.0), (4, 6e11), (5, 7e11), (6, None)]:
        save(tmp_path, step)
        prune(tmp_path, step, config_keeping(1, milestone_steps=3), losses)
        losses |= {step: loss} if loss else {}  # a step is evaluated after its save has begun
        assert steps_in(tmp_path)[-1] == step
    assert steps_in(tmp_path) == [2, 3, 6]
    prune(tmp_path, 6, config_keeping(3), losses | {6: 2.0}, limit=1)  # of three, one makes room for the last save
    assert steps_in(tmp_path) == [3, 6]  # 3 was a milestone once


def test_pruning_flushes_each_milestone_once(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("recipe.checkpoint.format.fsync", lambda path: flushed.append(path.name))
    for step in (1, 2, 3):
        save(tmp_path, step)
        flushed.clear()
        prune(tmp_path, step, config_keeping(1, milestone_steps=1), {})
        assert flushed == [f"step_{step:08d}"]
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_damaged_checkpoint_does_not_count_toward_save_total_limit(tmp_path):
    """Resumed from 10 because 20 is damaged: neither the save of 12 nor that of 30 may prune 10 for the sake of 20."""
    for step in (5, 10, 20):
        save(tmp_path, step)
    (tmp_path / "step_00000020" / "model.safetensors").write_bytes(b"")
    for _ in range(2):  # without the lock nothing is renamed
        assert newest_intact(tmp_path) == tmp_path / "step_00000010"
    prune(tmp_path, 10, config_keeping(1), {})
    assert steps_in(tmp_path) == [10, 20]  # the newest up to 10 is 10
    assert newest_intact(tmp_path, locked=True) == tmp_path / "step_00000010"
    assert (tmp_path / "damaged_step_00000020" / "model.safetensors").exists()
    for step, expected_steps in ((12, [10, 12]), (30, [12, 30])):
        save(tmp_path, step)
        prune(tmp_path, step, config_keeping(2), {20: 0.1})
        assert steps_in(tmp_path) == expected_steps
    save(tmp_path, 20)  # the same step, saved again
    assert verify(tmp_path / "step_00000020") == []


def test_reading_while_a_run_prunes_always_finds_an_intact_checkpoint(tmp_path, caplog, capsys):
    save(tmp_path, 1)
    stop = threading.Event()

    def train():
        step = 1
        while not stop.is_set():
            step += 1
            save(tmp_path, step)
            prune(tmp_path, step, config_keeping(1), {})

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


def test_the_command_lists_and_verifies(tmp_path, capsys, monkeypatch):
    for file in (path := save(tmp_path, 1)).iterdir():
        os.utime(file, (86_400, 86_400))
    (path / "results.json").write_text("{}")  # by an evaluation, later
    (save(tmp_path, 2) / "config.json").write_bytes(b"[]")
    assert main([str(tmp_path)]) == 1
    intact_line, damaged_line = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"{tmp_path}/step_00000001 .* MB  1970-01-0\d .* intact", intact_line)
    assert re.search("step_00000002 .*DAMAGED: config.json does not match its checksum", damaged_line)
    assert main([str(tmp_path / "step_00000001")]) == 0
    assert main([str(tmp_path / "nothing")]) == 2
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True))
    assert main([str(path)]) == 2, "it is intact, though `make checkpoints | head` reads no further"


SHARD = {"file": "../thesis.tex", "split": "train", "tokens": 9, "sha256": 64 * "0"}
SHARD["next"] = {"document": 0, "tokens": 0, "stream": None}


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
        # A stream on an empty disk takes it from here, and deletes the shards that it has passed.
        ("data.manifest", {"source": {}, "options": {}, "shards": [SHARD]}, "'../thesis.tex' is not train_000000.bin"),
        ("data.mixture", [{"shards": []}] * 2, "data does not match the data sets in config.dataset_name"),
        ("metrics.running_loss.count", 1.5, "metrics.running_loss.count is 1.5"),
        ("metrics.first_steps", None, "metrics.first_steps is missing); if another version wrote it, use that one ("),
        ("metrics.unwritten.loss", [1.0], "unwritten.loss is [1.0]"),
        ("about", [], "about is empty"),
        ("about", [{}], "about[0].from_step is missing"),
    ],
)
def test_a_foreign_trainer_state_is_checked_field_by_field(whole_run, tmp_path, field, value, problem):
    path = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020") / "trainer_state.json"
    state = json.loads(path.read_text())
    assert ckpt.state_of(path.parent) == state
    root = {"state": state}
    *parents, name = f"state.{field}".strip(".").split(".")
    reduce(dict.__getitem__, parents, root)[name] = value
    path.write_text(json.dumps(root["state"]))
    with pytest.raises(UserError, match=rf"^{path}.*{re.escape(problem)}"):
        ckpt.state_of(path.parent)
