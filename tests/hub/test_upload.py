"""Checkpoints on the Hub: each on its branch, to the byte, whatever fails; and the training that never hears of it."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from recipe.errors import UserError
from recipe.hub import export, push, upload
from recipe.hub.outbox import QUEUE, Entry, alone, entries
from tests.conftest import ROOT, TINY, environment, flags
from tests.hub import upload_faults as faults
from tests.hub.push_server import TOKEN, PushHub
from tests.hub.server import Fault
from tests.hub.upload_faults import ALWAYS, BRANCHES, PUSH, REPO, Prepared


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub that this process and those it starts talk to, and that waits a tenth of a second instead of a minute."""
    with PushHub(tmp_path / "hub") as hub:
        for name, value in faults.variables(hub).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(upload, "_LONGEST_WAIT", 0.1)
        yield hub


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's directory with checkpoints of steps 10 and 20: as far as files go."""
    for step in (10, 20):
        checkpoint = tmp_path / "run" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(bytes([step]) * 2_000_000)
        (checkpoint / "config.json").write_text(f'{{"dtype": "float32", "step": {step}}}')
        (checkpoint / "optimizer.safetensors").write_text("the trainer's own")
        (checkpoint / "trainer_state.json").write_text(json.dumps({"step": step, "config": {"run_name": "mine"}}))
        content = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
        for name in ("results.json", "notes.txt"):  # which came later
            (checkpoint / name).write_text("{}")
        files = {k: {"bytes": len(v), "sha256": hashlib.sha256(v).hexdigest()} for k, v in content.items()}
        (checkpoint / "manifest.json").write_text(json.dumps({"files": files}))
    return tmp_path / "run"


class Lines(list):
    def __call__(self, line: str) -> None:
        self.append(line)

    def have(self, text: str) -> int:
        return sum(text in line for line in self)


def queue(run: Path) -> None:
    """Both checkpoints, as a run queues them that cannot upload."""
    uploads = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    uploads.close(wait=False)
    uploads.add(run / "step_00000010")
    uploads.add(run / "step_00000020")


def drain(run: Path, patience: float = 60) -> Lines:
    """In this process; what it told."""
    lines = Lines()
    with upload.hub_client(2):
        upload.drain(run, lambda event, **v: lines(push.describe({"event": event, **v}, run)), patience)
    return lines


# Whole runs


@pytest.fixture(scope="module")
def prepared(shards, once) -> Prepared:
    def make(directory: Path) -> None:
        directory.mkdir()
        faults.prepare(directory, shards)

    directory, _ = once("push", make)
    return Prepared(shards, directory / "plain", directory / "queued")


def test_each_milestone_has_its_branch_and_the_last_checkpoint_is_main(prepared, tmp_path):
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        result = faults.train(
            prepared.shards, run, faults.variables(hub), **PUSH, save_steps=5, save_total_limit=1, hub_private_repo=True
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert faults.missing(hub, run) is None
        assert hub.repositories[REPO].private
        for branch in BRANCHES:
            assert f"{hub.url}/{REPO}/tree/{branch}" in result.stdout
    assert not entries(run)
    assert faults.losses(run) == faults.losses(prepared.plain)
    # A token that a run was given is in nothing that it leaves or says.
    files = [p for p in run.rglob("*") if p.is_file()]
    assert len(files) > 10
    assert not [p for p in files if TOKEN.encode() in p.read_bytes()]
    assert TOKEN not in result.stdout + result.stderr


# `make test-faults` has all eight, both ways.
@pytest.mark.parametrize(("fault", "mode"), [("429", "training"), ("reset", "training"), ("stall", "drained")])
def test_training_does_not_hear_of_a_fault(prepared, tmp_path, fault, mode):
    assert faults.inject(fault, mode, tmp_path, prepared) is None


def test_an_upload_that_is_killed_again_and_again_is_done_by_hand(prepared, tmp_path):
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        killed = faults.variables(hub) | {"RECIPE_FAULT": "kill@upload.during:2"}
        result = faults.train(prepared.shards, run, killed, **PUSH)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "the process that uploads died (killed by signal 9); started again" in result.stdout
        assert "still queued: step-000010, step-000020" in result.stdout
        assert faults.losses(run) == faults.losses(prepared.plain)
        result = faults.push(run, faults.variables(hub))
        assert result.returncode == 0, result.stdout + result.stderr
        assert faults.missing(hub, run) is None


def test_a_trainer_killed_in_the_middle_of_an_upload_takes_the_upload_with_it(prepared, tmp_path):
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="stall", received=1000))
        settings = (
            TINY
            | PUSH
            | {
                "dataset_name": prepared.shards,
                "output_dir": run,
                "max_steps": 100_000,
                "save_steps": 10,
                "milestone_steps": 10,
                "eval_steps": 0,
                "save_total_limit": 1,
            }
        )
        command = [sys.executable, "recipe/train.py", *flags(**settings)]
        with open(tmp_path / "output", "w") as output:
            trainer = subprocess.Popen(command, cwd=ROOT, env=environment(hub.environment), stdout=output)
        deadline = time.monotonic() + 100
        while not hub.count("PUT", "/lfs/"):
            assert trainer.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        trainer.kill()
        trainer.wait()
        result = faults.push(run, faults.variables(hub))  # and not: another process is uploading
        assert result.returncode == 0, result.stdout + result.stderr
        assert not entries(run)
        assert (
            faults.missing(
                hub, run, {"step-000010": 10} | {b: int(b[5:]) for b in hub.repositories[REPO].branches if b != "main"}
            )
            is None
        )


def test_a_run_without_a_token_ends_before_its_first_step(prepared, tmp_path):
    with PushHub(tmp_path / "hub") as hub:
        result = faults.train(prepared.shards, tmp_path / "run", hub.environment | {"HF_TOKEN": ""}, **PUSH)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) <= 2
    assert "push_to_hub acme/gpt2: no token of the Hub is here; log in with `hf auth login`" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Before the first step


def fine_grained(name: str, *permissions: str) -> dict:
    scoped = [{"entity": {"type": "user", "name": name}, "permissions": list(permissions)}]
    return {"accessToken": {"role": "fineGrained", "fineGrained": {"scoped": scoped}}}


@pytest.mark.parametrize(
    ("repo", "me", "message"),
    [
        ("strangers/gpt2", {}, "alice's, who is no member of strangers; name a repository of alice, acme, museum"),
        ("museum/gpt2", {}, "alice may only read in museum"),
        (REPO, {"auth": {"accessToken": {"role": "read"}}}, "the token may not write there; log in"),
        (REPO, {"auth": fine_grained("acme", "repo.content.read")}, "the token may not write there; log in"),
        (REPO, {"auth": fine_grained("alice", "repo.write")}, "the token may not write there; log in"),
    ],
)
def test_who_may_not_write_is_told_at_once(hub, repo, me, message):
    hub.me |= me
    with pytest.raises(UserError) as refused:
        push.check_push(repo, False, Lines())
    assert f"push_to_hub {repo}: " in str(refused.value)
    assert message in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert not hub.repositories


@pytest.mark.parametrize("path", ["/api/whoami-v2", "/api/repos/create"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_the_token_is_the_users_error(hub, path, status):
    hub.faults.append(Fault(path=path, status=status, times=ALWAYS))
    with pytest.raises(UserError, match=f"push_to_hub {REPO}: the Hub says HTTP {status}: .*HF_TOKEN"):
        push.check_push(REPO, False, Lines())


def test_who_may_write_gets_a_repository(hub):
    for me in ({}, {"auth": fine_grained("acme", "repo.write")}, {"auth": {"type": "oauth"}}):
        hub.me |= me
        push.check_push(REPO, True, lines := Lines())
        assert lines == [f"push       to {hub.url}/{REPO}, each checkpoint while the run goes on"]
    assert hub.repositories[REPO].private
    hub.repositories[REPO].private = False
    with pytest.raises(UserError, match="acme/gpt2 is a public repository, and hub_private_repo wants a private one"):
        push.check_push(REPO, True, Lines())


def test_a_hub_that_cannot_be_reached_is_no_error(hub, monkeypatch):
    monkeypatch.setattr(push, "_CHECK_PATIENCE", 1.5)
    hub.faults.append(Fault(path="/api/whoami-v2", status=429, headers={"Retry-After": "1"}))
    push.check_push(REPO, False, lines := Lines())
    assert lines.have("push       to ")  # it passed soon
    hub.faults.append(Fault(path="/api/whoami-v2", status=503, times=ALWAYS))
    push.check_push(REPO, False, lines := Lines())
    assert lines.have("cannot be reached (HTTP 503: Service Unavailable): checkpoints are queued, and tried again")
    monkeypatch.setattr(push, "_CHECK_TIMEOUT", 0.5)
    hub.faults[:] = [Fault(path="/api/whoami-v2", kind="stall", times=ALWAYS)]
    push.check_push(REPO, False, lines := Lines())
    assert lines.have("cannot be reached (ReadTimeout")
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    push.check_push(REPO, False, lines := Lines())
    assert lines.have("cannot be reached (ConnectError")
    assert not lines.have("s3cret")


# While the run goes on


def test_what_is_pruned_is_still_uploaded_and_queueing_takes_no_time(hub, run):
    hub.faults.append(Fault(path="/api/repos/create", status=500, times=2))
    expected = {name: (run / "step_00000010" / name).read_bytes() for name in ("config.json", "model.safetensors")}
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    start = time.monotonic()
    uploads.add(run / "step_00000010")
    assert time.monotonic() - start < 0.5
    (entry,) = entries(run)
    assert os.path.samefile(entry.path / "model.safetensors", run / "step_00000010" / "model.safetensors")
    shutil.rmtree(run / "step_00000010")
    uploads.close(wait=True)
    assert hub.files(REPO, "step-000010").keys() == expected.keys() | {"README.md"}
    assert hub.files(REPO, "step-000010").items() >= expected.items()
    assert b"the weights after step 10." in hub.files(REPO, "step-000010")["README.md"]
    assert not hub.files(REPO, "main")
    assert lines.have("HTTP 500: Internal Server Error; trying again in 1 s")
    assert lines.have(f"upload     step-000010 is at {hub.url}/{REPO}/tree/step-000010")
    assert not list((run / QUEUE).glob("*step*"))


def test_where_links_are_not_possible_files_are_copied(run, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    queue(run)
    assert [e.todo for e in entries(run)] == [("step-000010",), ("step-000020", "main")]
    assert (entries(run)[1].path / "model.safetensors").read_bytes() == bytes([20]) * 2_000_000


def test_a_full_disk_is_said_and_not_raised(run, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(shutil, "copyfile", refuse)
    uploads.add(run / "step_00000010")
    uploads.close(wait=True)
    assert lines.have("No space left on device; the training goes on") == 1
    assert not entries(run)


def test_stopping_does_not_wait_and_the_next_one_goes_on(hub, run):
    hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="stall", received=1000))
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    uploads.add(run / "step_00000010")
    while not hub.count("PUT", "/lfs/"):
        time.sleep(0.05)
    start = time.monotonic()
    uploads.close(wait=False)
    assert time.monotonic() - start < 3
    assert lines[-1] == f"upload     still queued: step-000010; {push.push_command(run)} uploads what is left"
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    assert lines == ["upload     still queued from before: step-000010"]
    uploads.close(wait=True)
    assert "step-000010" in hub.repositories[REPO].branches
    assert not entries(run)


def test_who_waits_is_let_go(hub, run, monkeypatch):
    """By `stop`, and by a Hub that fails for too long."""
    hub.faults.append(Fault(path="/api/*", status=503, times=ALWAYS))
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    uploads.add(run / "step_00000010")
    asked = iter([False, False, True])
    uploads.close(wait=True, stop=lambda: next(asked))
    assert lines.have("waiting for step-000010 of acme/gpt2; Ctrl-C leaves it queued")
    monkeypatch.setattr(push, "PATIENCE", 1)
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    start = time.monotonic()
    uploads.close(wait=True)
    assert 1 < time.monotonic() - start < 15
    assert lines.have("still queued: step-000010;")


def test_a_killed_process_is_started_again(hub, run):
    hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="stall", received=1000))
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    uploads.add(run / "step_00000020")
    while not hub.count("PUT", "/lfs/"):
        time.sleep(0.05)
    os.kill(uploads._process.pid, signal.SIGKILL)
    uploads.close(wait=True)
    assert lines.have("died (killed by signal 9); started again") == 1
    assert hub.files(REPO, "main") == hub.files(REPO, "step-000020") != {}


# The card


def write_line(run: Path, step: int, val_loss: float | None) -> None:
    with open(run / "metrics.jsonl", "a") as log:
        log.write(json.dumps({"step": step, "val_loss": val_loss}) + "\n")


def card_of(run: Path, step: int) -> str:
    return (run / QUEUE / f"step-{step:06d}" / "README.md").read_text()


def test_a_checkpoint_goes_up_once_with_the_evaluation_that_comes_after_it(hub, run):
    write_line(run, 0, 10.8)
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    uploads.add(run / "step_00000010")
    uploads.report()
    drain(run)
    assert [e.held for e in entries(run)] == [True]
    assert not hub.repositories
    assert "validation loss" not in card_of(run, 10)
    write_line(run, 10, 4.5)
    uploads.report()
    uploads.add(run / "step_00000020")
    write_line(run, 20, 4.25)
    uploads.close(wait=True)  # without a report in between
    assert lines.have("step-000020 is at") == 2
    for step, loss in ((10, 4.5), (20, 4.25)):
        card = ModelCard(hub.files(REPO, f"step-{step:06d}")["README.md"].decode())
        assert [(e.metric_name, e.metric_value) for e in card.data.eval_results] == [
            ("validation loss, nats a token", loss)
        ]
        assert f'from_pretrained("{REPO}")' in card.text
    messages = {b: [c.message for c in commits][1:] for b, commits in hub.repositories[REPO].branches.items()}
    assert messages == {"main": ["Step 20"], "step-000010": ["Step 10"], "step-000020": ["Step 20"]}


def test_a_run_at_its_end_holds_nothing_back(hub, run, monkeypatch):
    """Where the line of metrics.jsonl could not be written."""
    monkeypatch.setattr(push, "_SILENCE", 5)
    write_line(run, 0, 10.8)
    uploads = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    uploads.add(run / "step_00000010")
    uploads.close(wait=True)
    assert "README.md" in hub.files(REPO, "step-000010")
    assert not entries(run)


def full_disk(monkeypatch, step: int, times: int) -> None:
    """For the first `times` changes of the entry of `step`."""
    write, left = Entry.write, [times]

    def refuse(entry: Entry, directory: Path | None = None) -> Entry:
        if entry.step == step and directory is None and left[0] > 0:
            left[0] -= 1
            raise OSError(28, "No space left on device")
        return write(entry, directory)

    monkeypatch.setattr(Entry, "write", refuse)


def test_one_that_cannot_be_let_go_holds_up_no_other_and_is_not_waited_for(hub, run, monkeypatch):
    monkeypatch.setattr(push, "_SILENCE", 20)
    write_line(run, 0, 10.8)
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
    for step in (10, 20):
        uploads.add(run / f"step_{step:08d}")
    write_line(run, 20, 4.25)
    full_disk(monkeypatch, step=10, times=ALWAYS)
    for _ in range(3):
        uploads.report()
    start = time.monotonic()
    uploads.close(wait=True)
    assert time.monotonic() - start < 15
    assert lines.have("step-000010 is held back: OSError: [Errno 28] No space left on device") == 1
    assert [(e.step, e.held) for e in entries(run)] == [(10, True)]
    assert "4.25" in hub.files(REPO, "main")["README.md"].decode()
    assert lines[-1].startswith("upload     still queued: step-000010;")


def test_trouble_is_said_once_a_minute(run, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)

    def broken() -> None:
        raise OSError(5, "Input/output error")

    for _ in range(3):
        uploads._guard(broken)
    assert lines.have("Input/output error; the training goes on") == 1
    monkeypatch.setattr(push, "_BETWEEN_LINES", 0.0)
    uploads._guard(broken)
    assert lines.have("Input/output error; the training goes on") == 2


def test_one_that_was_not_evaluated_is_let_go_at_the_end_once_the_disk_has_room(hub, run, monkeypatch):
    hub.faults.append(Fault(path="/api/repos/create", status=500))  # a second, in which to try again
    write_line(run, 0, 10.8)
    uploads = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    for step in (10, 20):
        uploads.add(run / f"step_{step:08d}")
    full_disk(monkeypatch, step=10, times=1)
    uploads.close(wait=True)
    assert not entries(run)
    assert set(hub.repositories[REPO].branches) == set(BRANCHES)


def test_who_is_killed_before_the_evaluation_leaves_a_checkpoint_that_is_not_lost(hub, run):
    write_line(run, 0, 10.8)
    uploads = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    uploads.close(wait=False)
    uploads.add(run / "step_00000010")
    again = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    again.add(run / "step_00000010", again=False)
    again.close(wait=False)
    assert [(e.step, e.held) for e in entries(run)] == [(10, True)]
    again.report()
    write_line(run, 10, 4.5)
    again.report()
    assert [(e.step, e.held) for e in entries(run)] == [(10, False)]
    assert "4.5" in card_of(run, 10)
    uploads.add(run / "step_00000020")
    assert [e.held for e in entries(run)] == [False, True]
    assert export.main(["push", str(run), "--license", "cc-by-4.0"]) == 0  # by hand nothing is waited for
    assert b"license: cc-by-4.0\n" in hub.files(REPO, "main")["README.md"]


def test_a_card_that_fails_costs_nothing_but_the_card(hub, run, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("in the card")

    with monkeypatch.context() as patch:
        patch.setattr("recipe.hub.package.card_of", broken)
        write_line(run, 0, 10.8)
        uploads = push.Uploads(run, REPO, False, lines := Lines(), milestone_steps=10, last_step=20)
        uploads.add(run / "step_00000010")
        write_line(run, 10, 4.5)
        uploads.close(wait=True)
    assert lines.have("step_00000010 has no card: ZeroDivisionError: in the card") == 1
    assert lines.have("step-000010 has no new card: ZeroDivisionError: in the card") == 1
    assert hub.files(REPO, "step-000010").keys() == {"config.json", "model.safetensors"}


def test_a_card_that_the_hub_refuses_does_not_hold_up_the_weights(hub, run):
    queue(run)
    (run / QUEUE / "step-000010" / "README.md").write_text("---\nlicense: mine\n---\n")
    lines = drain(run)
    assert lines.have("step-000010 goes up without its card, which the Hub refuses: - license 'mine'") == 1
    assert hub.files(REPO, "step-000010").keys() == {"config.json", "model.safetensors"}
    assert "README.md" in hub.files(REPO, "step-000020")


@pytest.mark.parametrize(
    ("answer", "reason", "attempts"),
    [
        ((404, "application/json", b'{"error": "no such page"}'), "HTTP 404: ", 1),
        ((413, "application/json", b'{"error": "too large"}'), "HTTP 413: ", 1),
        ((409, "application/json", b'{"error": "a conflict"}'), "HTTP 409: ", 5),
        ((404, "text/html", b"<html>no such page</html>"), "JSONDecodeError: ", 5),
        ((200, "application/json", b"[]"), "AttributeError: ", 5),
    ],
)
def test_nor_does_a_hub_that_cannot_judge_cards(hub, run, monkeypatch, answer, reason, attempts):
    """A mirror without that page, one that answers with something else: what may pass is waited for first."""
    usual = hub.answer
    status, kind, body = answer
    asked = []

    def instead(method: str, url: str, headers, content: bytes):
        if "/api/validate-yaml" not in url:
            return usual(method, url, headers, content)
        asked.append(url)
        return status, {"Content-Type": kind}, body

    monkeypatch.setattr(hub, "answer", instead)
    queue(run)
    entries(run)[1].remove()
    lines = drain(run)
    assert lines.have(f"step-000010 goes up without its card, which the Hub refuses: {reason}") == 1
    assert len(asked) == attempts
    assert hub.files(REPO, "step-000010").keys() == {"config.json", "model.safetensors"}
    assert not entries(run)


@pytest.mark.parametrize("status", [400, 403, 409])
def test_a_commit_that_is_refused_is_not_the_cards_fault(hub, run, status):
    hub.faults.append(Fault(path="*/commit/*", status=status, times=5))  # a sixth would be let through
    queue(run)
    entries(run)[1].remove()
    lines = drain(run)
    assert not lines.have("without its card")
    assert [bool(e.error) for e in entries(run)] == [True]


def test_a_licence_that_comes_too_late_for_a_card_is_said(hub, run, capsys):
    queue(run)
    shutil.rmtree(run / "step_00000010")
    assert export.main(["push", str(run), "--license", "cc-by-4.0"]) == 0
    output = capsys.readouterr().out
    assert "step-000010 keeps its card, without --license cc-by-4.0: its checkpoint is no longer in" in output
    assert "step-000020 keeps" not in output
    assert b"\nlicense: mit\n" in hub.files(REPO, "step-000010")["README.md"]
    assert b"\nlicense: cc-by-4.0\n" in hub.files(REPO, "step-000020")["README.md"]
    queue_of_one = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
    queue_of_one.close(wait=False)
    queue_of_one.add(run / "step_00000020")
    shutil.rmtree(run / "step_00000020")
    for wanted in ([], ["--license", "mit"]):  # which it has
        assert export.main(["push", str(run), *wanted]) == 0
        assert "keeps its card" not in capsys.readouterr().out


def test_a_copy_of_a_checkpoint_is_pushed_whatever_it_is_called(hub, run, tmp_path):
    copy = shutil.copytree(run / "step_00000010", tmp_path / "mine")
    assert export.main(["push", str(copy), "--repo", REPO]) == 0
    assert hub.repositories[REPO].branches["main"][-1].message == "Step 10"
    assert b"the weights after step 10." in hub.files(REPO, "main")["README.md"]


def test_the_best_of_what_is_kept_goes_to_main_with_its_results(hub, run, capsys):
    assert export.main(["push", str(run), "--repo", REPO, "--best"]) == 2
    assert "no checkpoint that is kept and whole was evaluated at its step" in capsys.readouterr().err
    for step, loss in ((0, 1.0), (10, 4.25), (20, 4.5)):
        write_line(run, step, loss)
    scores = {"acc": 0.25, "acc_ci95": 0.1}
    (run / "step_00000010" / "results.json").write_text(json.dumps({"hellaswag": {"rows": 72, "A": scores}}))
    assert export.main(["push", str(run), "--repo", REPO, "--best"]) == 0
    assert json.loads(hub.files(REPO, "main")["config.json"])["step"] == 10
    card = ModelCard(hub.files(REPO, "main")["README.md"].decode())
    assert [e.metric_value for e in card.data.eval_results] == [4.25, 0.25]
    assert "| 0.2500 ± 0.1000 | way A, as llm.c and build-nanogpt score, the first 72 of 10,042 rows |" in card.text
    hub.repositories[REPO].branches["main"][-1].files["README.md"] = b"a person's"
    assert export.main(["push", str(run), "--repo", REPO, "--no_card"]) == 0
    assert hub.files(REPO, "main")["README.md"] == b"a person's"
    assert json.loads(hub.files(REPO, "main")["config.json"])["step"] == 20
    assert export.main(["push", str(run), "--best"]) == 2
    assert "--best chooses what goes to main of --repo" in capsys.readouterr().err


# The queue, drained


def test_nothing_is_committed_twice(hub, run):
    """Not where a commit's answer is lost, and not where a process is killed before it has crossed the entry out."""
    queue(run)
    hub.faults.append(Fault(path="*/commit/*", kind="reset", after=None))
    command = [sys.executable, "-m", "recipe.hub.export", "push", str(run)]
    killed = subprocess.run(command, cwd=ROOT, env=os.environ | {"RECIPE_FAULT": "kill@upload.after"}, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert len(entries(run)) == 2
    drain(run)
    commits = {b: [c.message for c in commits] for b, commits in hub.repositories[REPO].branches.items()}
    assert commits == {
        "main": ["initial", "Step 20"],
        "step-000010": ["initial", "Step 10"],
        "step-000020": ["initial", "Step 20"],
    }


@pytest.mark.parametrize(
    ("fault", "attempts"),
    [
        (Fault(path="*/commit/*", status=409, times=ALWAYS), 5),
        (Fault(path="*/commit/*", status=400, times=ALWAYS), 1),
        (Fault(path="*/preupload/*", status=404, times=ALWAYS), 1),
        (Fault(path="/lfs/*", status=403, times=ALWAYS), 5),  # of the storage, whose links run out
    ],
)
def test_what_will_not_pass_is_left_for_the_user(hub, run, fault, attempts):
    hub.faults.append(fault)
    queue(run)
    entries(run)[1].remove()
    lines = drain(run)
    (entry,) = entries(run)
    assert entry.error.startswith(f"HTTP {fault.status}: ")
    assert lines.have(f"step-000010 is refused: {entry.error}; it stays queued, {push.push_command(run)} tries") == 1
    assert hub.count("PUT" if "lfs" in fault.path else "POST", fault.path.strip("*/")) == attempts
    before = len(hub.requests)
    drain(run)
    assert len(hub.requests) == before  # nobody tries again unasked


def test_a_step_queued_again_comes_after_the_one_before(hub, run):
    queue(run)
    (run / "step_00000010" / "config.json").unlink()  # and not through the link
    (run / "step_00000010" / "config.json").write_text('{"dtype": "float32", "another": "one"}')
    queue(run)
    assert [e.path.name for e in entries(run)] == ["step-000010", "step-000010.1", "step-000020", "step-000020.1"]
    drain(run)
    assert hub.files(REPO, "step-000010")["config.json"] == b'{"dtype": "float32", "another": "one"}'


def test_what_is_shown_has_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shown = upload.clean(f"PUT https://user:pass@s3.example/a/b?X-Amz-Signature=1&b=2: no, {TOKEN}")
    assert shown == "PUT https://s3.example/a/b no, ***"


# By hand


def test_a_run_that_pushed_nothing_is_pushed_by_name(hub, run, capsys):
    assert export.main(["push", str(run)]) == 0
    assert "nothing of" in capsys.readouterr().out
    assert export.main(["push", str(run), "--repo", REPO, "--private"]) == 0
    assert set(hub.repositories[REPO].branches) == {"main"}
    assert hub.files(REPO, "main").keys() == {"README.md", "config.json", "model.safetensors"}
    assert json.loads(hub.files(REPO, "main")["config.json"])["step"] == 20
    assert hub.repositories[REPO].private
    output = capsys.readouterr().out
    assert f"{run}/step_00000020, to main of {REPO}" in output
    assert output.endswith("upload     all is up\n")


def test_mistakes_of_a_push_by_hand(hub, run, capsys, monkeypatch):
    def refused(*arguments: str) -> str:
        assert export.main(["push", *arguments]) == 2
        return capsys.readouterr().err

    assert "no such run" in refused(str(run / "nowhere"))
    assert "--repo '../gpt2' must be ORG/NAME" in refused(str(run), "--repo", "../gpt2")
    assert "--repo strangers/gpt2: the token is alice's" in refused(str(run), "--repo", "strangers/gpt2")
    assert not entries(run)
    with alone(run, 0):
        assert "its training, or another push, is uploading" in refused(str(run))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(str(run))


def test_what_was_refused_is_tried_again_by_hand(hub, run, capsys):
    queue(run)
    hub.faults.append(Fault(path="*/commit/*", status=403, times=2))
    assert export.main(["push", str(run)]) == 1
    assert f"still queued: step-000010, step-000020; {push.push_command(run)} tries again" in capsys.readouterr().out
    assert export.main(["push", str(run)]) == 0
    assert not entries(run)
    assert set(hub.repositories[REPO].branches) == set(BRANCHES)


def test_a_checkpoint_that_a_kill_kept_from_the_queue_is_queued_on_resuming(hub, run):
    """Once: not if it waits already, and not if it is up."""

    def resume(step: int) -> None:
        uploads = push.Uploads(run, REPO, False, Lines(), milestone_steps=10, last_step=20)
        uploads.close(wait=False)
        uploads.add(run / f"step_{step:08d}", again=False)

    for _ in range(2):
        resume(10)
        assert [e.step for e in entries(run)] == [10]
    drain(run)
    resume(10)
    assert not entries(run)
    resume(20)
    assert [e.todo for e in entries(run)] == [("step-000020", "main")]
