"""A run's directory: one run at a time, however the previous one ended, and never a directory of another program."""

import errno
import os
import re
import signal
import socket
import stat
import threading
import time
from contextlib import nullcontext

import pytest

from recipe.checkpoint import run_dir as module
from recipe.checkpoint.format import newest_intact
from recipe.checkpoint.run_dir import LOCK, OWNER, check_same_run, run_directory
from recipe.config import parse_config
from recipe.data.tokenizer import open_tokenizer
from recipe.utils.errors import UserError
from tests.checkpoint import save


@pytest.fixture
def holder(tmp_path):
    """The PID of another process, which holds `tmp_path` until it is killed."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with run_directory(tmp_path):
                os.write(write_end, b"held")
                time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(read_end, 4) == b"held"
    yield pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def names(directory) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in sorted(directory.glob("*/*"))]


def test_a_second_run_is_refused_and_told_the_owner(tmp_path, holder, monkeypatch):
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    owner = rf"process {holder} on {socket.gethostname()}"
    (tmp_path / "metrics.jsonl").touch()
    for fresh in (False, True):
        with pytest.raises(UserError, match=rf"another run is writing there \({owner}\); wait for it"):
            run_directory(tmp_path, fresh=fresh).__enter__()
    assert (tmp_path / "metrics.jsonl").exists()


def test_the_lock_of_a_dead_process_is_taken_over_at_once(tmp_path, holder):
    """Even of a zombie, whose parent has not waited for it, as in a container or a notebook."""
    os.kill(holder, signal.SIGKILL)
    os.waitid(os.P_PID, holder, os.WEXITED | os.WNOWAIT)
    (tmp_path / "notes.txt").touch()
    with run_directory(tmp_path):
        assert (tmp_path / OWNER).read_text() == f"process {os.getpid()} on {socket.gethostname()}"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("dies", [False, True])
def test_the_lock_of_another_node_is_waited_for_longer(dies, tmp_path, holder, monkeypatch, caplog):
    """A file server keeps the lock of a node that has died for a minute or two."""
    caplog.set_level("INFO")
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "NODE_LOCK_TIMEOUT_S", 30.0 if dies else 0.2)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    if dies:
        threading.Timer(0.5, os.kill, (holder, signal.SIGKILL)).start()
    refused = nullcontext() if dies else pytest.raises(UserError, match=rf"writing there \(process {holder} on ")
    with refused, run_directory(tmp_path):
        assert (tmp_path / OWNER).read_text() == f"process {os.getpid()} on another"
    assert f"s for the lock of process {holder} on " in caplog.text


def test_a_link_at_the_owner_file_is_replaced_and_its_target_stays(tmp_path):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("precious")
    run.mkdir()
    for name in (OWNER, f".{OWNER}.tmp"):
        (run / name).symlink_to(precious)
    with run_directory(run):
        assert not (run / OWNER).is_symlink()
    assert precious.read_text() == "precious"


def test_fresh_moves_the_earlier_run_aside_and_keeps_all_of_it(tmp_path):
    run = tmp_path / "run"
    save(run, 3)
    for n in (1, 2):
        inode = run.stat().st_ino
        with run_directory(run, fresh=True):
            assert (tmp_path / f"run.old-{n}").stat().st_ino == inode  # a kill cannot split the run
            assert newest_intact(run) is None
            assert sorted(p.name for p in run.iterdir()) == [LOCK, OWNER]
            save(run, n)
    assert names(tmp_path) == ["run/step_00000002", "run.old-1/step_00000003", "run.old-2/step_00000001"]


def test_fresh_moves_the_target_of_a_link_so_that_the_run_stays_on_its_disk(tmp_path):
    target, link = tmp_path / "disk" / "run", tmp_path / "run"
    save(target, 3)
    link.symlink_to(target)
    with run_directory(link, fresh=True):
        save(link, 1)
    assert link.is_symlink()
    assert names(target.parent) == ["run/step_00000001", "run.old-1/step_00000003"]


def test_another_run_is_refused_and_harmless_changes_are_reported(tmp_path, caplog):
    caplog.set_level("INFO")
    words = ["--n_layer=2", "--max_steps=80", "--warmup_steps=0", "--learning_rate=1e-3", "--lr_scheduler_type=linear"]
    saved, tokenizer = parse_config(words).flat(), open_tokenizer("gpt2")
    state = {"config": saved, "data": {}, "metrics": {}, "step": 20, "tokenizer": {"name": "gpt2", "digest": "gpt2"}}
    state["about"] = [{}]
    config = saved | {"max_steps": 100, "eval_steps": 7}
    for name in ("gone", ""):  # a fine-tuned run, whose weights moved, or whose resume omitted them
        tuned = state | {"config": saved | {"init_from": name}, "about": [{"init_from": ""}]}
        check_same_run(tuned, config | {"init_from": "gpt2"}, tokenizer, tmp_path)
        assert any(re.search(f"^resuming with init_from '{name}' -> 'gpt2', which has no", m) for m in caplog.messages)
    assert "resuming with max_steps 80 -> 100" in caplog.messages
    assert "the learning rate at step 20 was 0.00075 and is 0.0008 now" in caplog.messages[-1]
    check_same_run(state, saved | {"val_data": "other"}, tokenizer, tmp_path)
    message = "validation losses up to step 20 cannot be compared with those that follow: val_data '' -> 'other'"
    assert message in caplog.messages[-1]
    caplog.clear()
    check_same_run(state | {"config": config}, config, tokenizer, tmp_path)
    assert caplog.messages == []
    check_same_run(state | {"step": 80}, saved | {"min_lr_fraction": 0.1}, tokenizer, tmp_path)
    assert caplog.messages == ["resuming with min_lr_fraction 0.0 -> 0.1"]  # no step follows at another rate
    old = {name: value for name, value in saved.items() if name != "dropout"}  # of a version without this field
    check_same_run(state | {"config": old, "step": 80}, saved | {"dropout": 0.1}, tokenizer, tmp_path)
    assert caplog.messages[1:] == ["resuming with dropout 0.0 -> 0.1"]
    with pytest.raises(UserError, match=r"n_layer 2 -> 3, n_embd 128 -> 96, optim 'muon' -> 'adamw'.*--fresh"):
        check_same_run(state, config | {"n_layer": 3, "n_embd": 96, "optim": "adamw"}, tokenizer, tmp_path)
    others = {"seed": 2, "sequence_length": 32, "total_batch_tokens": 64}  # other data at a step
    for name, value in (others | {"init_from": "gpt2"}).items():
        with pytest.raises(UserError, match=f"holds a run with other settings: {name} "):
            check_same_run(state, config | {name: value}, tokenizer, tmp_path)
    message = "run_name 'shakespeare' -> 'other'; .*, or continue it: --run_name shakespeare --output_dir "
    with pytest.raises(UserError, match=message):
        check_same_run(state, config | {"run_name": "other"}, tokenizer, tmp_path)
    check_same_run(state, config | {"run_name": tmp_path.name}, tokenizer, tmp_path)  # it was called after the recipe


@pytest.mark.parametrize(("number", "refused"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_a_file_system_may_have_no_fsync_of_directories(tmp_path, monkeypatch, number, refused):
    """VirtualBox's shared folders, for example; any other error is the disk's."""
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        pytest.raises(UserError, match="Input/output error") if refused else nullcontext(),
        run_directory(tmp_path / "r"),
    ):
        pass
