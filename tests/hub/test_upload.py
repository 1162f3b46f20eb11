"""Checkpoints on the Hub: each on its branch, to the byte, whatever fails; and a training run that is never delayed."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from recipe.checkpoint.format import model_only
from recipe.errors import UserError
from recipe.hub import access, export, upload
from recipe.hub.upload import Known, Target, Uploads, sync
from tests import processes
from tests.conftest import TINY, by_step, environment, flags
from tests.hub.conftest import make_checkpoint
from tests.hub.push_server import REPO, TOKEN, PushHub
from tests.hub.server import Fault

ALWAYS = 10**6
BRANCHES = {"step-000010": 10, "step-000020": 20, "main": 20}


def target_of(run: Path, **changes) -> Target:
    """As for a training run of 20 steps with milestones every 10."""
    return Target(**{"repo": REPO, "milestone_steps": 10, "final": run / "step_00000020"} | changes)


def on_the_hub(hub: PushHub, run: Path, branches: dict[str, int] = BRANCHES) -> None:
    """Each checkpoint is on its branch, in one commit, byte by byte, with a card that has its validation loss."""
    repository, recorded = hub.repositories[REPO], by_step(run)
    assert set(repository.branches) == {"main", *branches}
    for branch, step in branches.items():
        found = dict(hub.files(REPO, branch))
        card = ModelCard(found.pop("README.md").decode())
        losses = [e.metric_value for e in card.data.eval_results if e.metric_name.startswith("validation loss")]
        assert losses == [round(recorded[step]["val_loss"], 6)]
        assert found == {p.name: p.read_bytes() for p in model_only(run / f"step_{step:08d}")}
        assert [c.message for c in repository.branches[branch]] == ["initial", f"Step {step}"]


# Whole runs


def train(hub: PushHub, shards: Path, run: Path, *, token: str = TOKEN, start=processes.run, **fields):
    """The run of the fixture whole_run, which pushes."""
    push = {"push_to_hub": True, "hub_model_id": REPO, "milestone_steps": 10, "dropout": 0.1}
    settings = TINY | {"dataset_name": shards, "output_dir": run} | push | fields
    command = ("tests/hub/with_hub.py", hub.url, "recipe/train.py", *flags(**settings))
    return start(*command, env=environment({"HUB_TOKEN": token}))


def losses(run: Path) -> dict[int, tuple]:
    return {step: tuple(line[k] for k in ("loss", "val_loss", "grad_norm")) for step, line in by_step(run).items()}


def test_a_run_uploads_its_milestones_and_its_last_checkpoint(shards, whole_run, tmp_path):
    """And learns what it learns without; the token it was given is in none of its files and lines."""
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        result = train(hub, shards, run, hub_private_repo=True)
        assert result.returncode == 0, result.stdout + result.stderr
        on_the_hub(hub, run)
        assert hub.repositories[REPO].private
        assert all(f"{hub.url}/{REPO}/tree/{branch}" in result.stdout for branch in BRANCHES)
    assert losses(run) == losses(whole_run[0])
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in result.stdout + result.stderr


def test_a_run_that_was_killed_in_an_upload_uploads_it_when_it_goes_on(shards, tmp_path):
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="stall", received=1000))
        program = train(hub, shards, run, start=processes.start, max_steps=5000, logging_steps=10, eval_steps=0)
        deadline = time.monotonic() + 60
        while not hub.count("PUT", "/lfs/"):
            assert program.poll() is None, program.stdout + program.stderr
            assert time.monotonic() < deadline
            time.sleep(0.05)
        program.kill()
        assert not [c for c in hub.repositories[REPO].branches.values() if len(c) > 1]
        before = {path.name for path in run.glob("step_*")}
        result = train(hub, shards, run, max_steps=max(int(n[5:]) for n in before) + 10, logging_steps=10, eval_steps=0)
        assert result.returncode == 0, result.stdout + result.stderr
        branches = hub.repositories[REPO].branches
        assert {f"step-{int(n[5:]):06d}" for n in before} < branches.keys()
        assert all(len(commits) == 2 for commits in branches.values())


def test_a_run_without_a_token_ends_before_its_first_step(shards, tmp_path):
    with PushHub(tmp_path / "hub") as hub:
        result = train(hub, shards, tmp_path / "run", token="")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) <= 2
    assert "hub_model_id acme/gpt2: there is no token for the Hub; log in with `hf auth login`" in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# Faults of the Hub

BIG = {"path": "/lfs/*", "method": "PUT", "received": 1000}
FAULTS = {
    "401": [Fault(path="*/commit/*", status=401, times=ALWAYS)],
    "403": [Fault(path="*/commit/*", status=403, times=ALWAYS)],
    "409": [Fault(path="*/commit/*", status=409, times=2)],  # another commit came in between
    "429": [Fault(path="*/preupload/*", status=429, headers={"Retry-After": "3"})],
    "500": [Fault(path="*/commit/*", status=500, times=2)],
    "503": [Fault(path="*/objects/batch", status=503, times=2)],
    "reset": [Fault(kind="reset", times=2, **BIG)],
    "stall": [Fault(kind="stall", **BIG)],
}
LASTING = ("401", "403")


def faults(name: str) -> list[Fault]:
    return [Fault(**vars(fault)) for fault in FAULTS[name]]  # a Hub counts them down


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_training_is_not_affected_by_a_fault(shards, whole_run, tmp_path, fault):
    run = tmp_path / "run"
    with PushHub(tmp_path / "hub") as hub:
        hub.faults += faults(fault)
        result = train(hub, shards, run)
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        assert "Traceback" not in output
        assert losses(run) == losses(whole_run[0])
        if fault in LASTING:
            assert "not on the Hub: step-000010, step-000020, main; python -m recipe.hub.export push" in output
            hub.faults.clear()
            assert train(hub, shards, run).returncode == 0  # the whole run is there, and is uploaded
        assert not hub.faults
        on_the_hub(hub, run)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_waited_for_and_another_is_met_once(push_hub, run, lines, monkeypatch, fault):
    monkeypatch.setattr(upload, "_RETRIES", (0.1,) * 4)
    push_hub.faults += faults(fault)
    start = time.monotonic()
    done = Uploads(run, target_of(run)).wait(limit=60)
    if fault in LASTING:
        assert not done
        assert push_hub.count("POST", "/commit/") == 1
        assert lines.have(f"upload     to {REPO} failed: HTTP {fault}: ") == 1
        push_hub.faults.clear()
        assert export.main(["push", str(run), "--repo", REPO]) == 0
    else:
        assert done
    assert fault != "429" or time.monotonic() - start > 3  # as the Hub asked
    assert sum(line.startswith("upload     to ") for line in lines) <= 1
    assert not push_hub.faults
    on_the_hub(push_hub, run)


def test_a_hub_that_hangs_delays_neither_a_step_nor_the_end_beyond_its_limit(push_hub, run, monkeypatch):
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    push_hub.faults.append(Fault(path="/api/*", kind="stall", times=ALWAYS))
    uploads = Uploads(run, target_of(run))
    start = time.monotonic()
    for _ in range(100):  # lines of metrics.jsonl
        uploads.start(20)
    assert time.monotonic() - start < 1
    assert not uploads.wait(limit=1)
    assert time.monotonic() - start < 10
    assert push_hub.count("POST", "/repos/create") <= 1  # one attempt at a time
    start, asked = time.monotonic(), iter([False, False])
    assert not uploads.wait(stopped=lambda: next(asked, True))  # Ctrl-C
    assert time.monotonic() - start < 10


def test_trouble_is_reported_once_a_minute_and_tried_again_as_often(push_hub, run, lines, monkeypatch):
    push_hub.faults.append(Fault(path="/api/*", status=503, times=ALWAYS))
    uploads = Uploads(run, target_of(run))

    def line_of_metrics() -> None:
        uploads.start(20)
        while uploads._running():
            time.sleep(0.01)

    for _ in range(5):
        line_of_metrics()
    assert lines == [f"upload     to {REPO} failed: HTTP 503: Service Unavailable; trying again later"]
    assert push_hub.count("POST", "/repos/create") == 1
    monkeypatch.setattr(upload.time, "monotonic", lambda clock=time.monotonic: clock() + 61)
    line_of_metrics()
    assert len(lines) == 2
    push_hub.faults.clear()
    monkeypatch.setattr(upload.time, "monotonic", lambda clock=time.monotonic: clock() + 122)
    line_of_metrics()
    on_the_hub(push_hub, run)


# What belongs on the Hub and is not there


def test_a_checkpoint_waits_for_its_evaluation(push_hub, run):
    """`start(step)` is called once the metrics of `step` are written; a checkpoint after it has none yet."""
    known = Known()
    sync(run, target_of(run), known, up_to=9)
    assert not push_hub.repositories
    sync(run, target_of(run), known, up_to=10)
    assert push_hub.repositories[REPO].branches.keys() == {"main", "step-000010"}
    sync(run, target_of(run), known, up_to=20)
    on_the_hub(push_hub, run)


def test_nothing_is_committed_twice_and_other_weights_of_a_step_replace_the_first(push_hub, run):
    push_hub.faults.append(Fault(path="*/commit/*", kind="reset", after=None))  # the answer is lost, not the commit
    with pytest.raises(Exception, match=r"disconnected|reset|closed"):
        sync(run, target_of(run), Known())
    sync(run, target_of(run), Known())
    on_the_hub(push_hub, run)
    before = len(push_hub.requests)
    sync(run, target_of(run), Known())
    assert not [r for r in push_hub.requests[before:] if "/commit/" in r.path or r.method == "PUT"]
    make_checkpoint(run / "step_00000010", 10, weights=b"another seed")
    sync(run, target_of(run), Known())
    assert push_hub.files(REPO, "step-000010")["model.safetensors"] == b"another seed"
    assert len(push_hub.repositories[REPO].branches["main"]) == 2


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_checkpoint_does_not_reach_the_hub(push_hub, run, lines, capsys, file):
    """While the run goes on, where the others go up; and by hand, where the newest whole one is for main."""
    damaged = run / "step_00000020" / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert not Uploads(run, target_of(run)).wait()
    problem = f"{run / 'step_00000020'}: {file} does not have the checksum that it was written with"
    assert lines.have(f"upload     main is refused: {problem}") == 1
    assert set(push_hub.repositories[REPO].branches) == {"main", "step-000010"}
    assert not push_hub.files(REPO, "main")
    assert export.main(["push", str(run), "--repo", REPO]) == 75
    assert json.loads(push_hub.files(REPO, "main")["config.json"])["step"] == 10
    assert "not on the Hub: step-000020" in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.json", "manifest.json", "results.json"])
def test_a_link_in_a_checkpoint_is_not_followed(push_hub, run, tmp_path, file):
    """A run from somebody else could make it publish any file of this machine."""
    checkpoint, secret = run / "step_00000020", tmp_path / "secret"
    (checkpoint / "results.json").write_text("{}")
    shutil.copy(checkpoint / file, secret)
    (checkpoint / file).unlink()
    (checkpoint / file).symlink_to(secret)
    known = Known()
    sync(run, target_of(run), known)
    assert known.refused == dict.fromkeys(("step-000020", "main"), f"{file} is a symbolic link")
    assert not push_hub.files(REPO, "main")
    assert known.uploaded == {"step-000010"}


def test_only_what_the_manifest_lists_goes_up(push_hub, run):
    (run / "step_00000020" / "notes.txt").write_text("of mine")
    sync(run, target_of(run), Known())
    assert push_hub.files(REPO, "main").keys() == {"README.md", "config.json", "model.safetensors"}


# Model cards


def test_the_card_is_renewed_by_hand_and_by_nothing_else(push_hub, run, capsys):
    sync(run, target_of(run), Known())
    main = push_hub.repositories[REPO].branches["main"]
    main[-1].files["README.md"] = b"a person's"
    sync(run, target_of(run), Known())
    assert export.main(["push", str(run), "--repo", REPO, "--no_card"]) == 0
    assert main[-1].files["README.md"] == b"a person's"
    scores = {"acc": 0.25, "acc_ci95": 0.1}
    (run / "step_00000020" / "results.json").write_text(json.dumps({"hellaswag": {"rows": 10042, "A": scores}}))
    for _ in range(2):  # the second time there is nothing to do
        assert export.main(["push", str(run), "--repo", REPO, "--license", "cc-by-4.0"]) == 0
    card = ModelCard(main[-1].files["README.md"].decode())
    assert [e.metric_value for e in card.data.eval_results] == [4.25, 0.25]
    assert card.data.license == "cc-by-4.0"
    assert b"license: cc-by-4.0" in push_hub.files(REPO, "step-000010")["README.md"]
    assert len(main) == 3
    assert capsys.readouterr().out.endswith("upload     everything is on the Hub\n")


def test_a_card_that_fails_costs_nothing_but_the_card(push_hub, run, lines, monkeypatch):
    (run / "step_00000010" / "results.json").write_text("[]")
    assert Uploads(run, target_of(run)).wait()
    assert lines.have("step_00000010 has no model card: UserError: ") == 1
    assert push_hub.files(REPO, "step-000010").keys() == {"config.json", "model.safetensors"}
    monkeypatch.setattr(upload, "model_card", lambda *_, **__: "---\nlicense: mine\n---\n")
    make_checkpoint(run / "step_00000020", 20, weights=b"others")
    assert Uploads(run, target_of(run)).wait()
    assert lines.have("step-000020 goes up without its card, which the Hub refuses: Invalid metadata") == 1
    assert push_hub.files(REPO, "step-000020")["model.safetensors"] == b"others"


# Who may write, and where


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
def test_who_may_not_write_is_told_before_the_first_step(push_hub, run, repo, me, message, capsys):
    push_hub.me |= me
    with pytest.raises(UserError) as refused:
        access.check_access(repo, False, "hub_model_id")
    assert str(refused.value).startswith(f"hub_model_id {repo}: ")
    assert message in str(refused.value)
    assert export.main(["push", str(run), "--repo", repo]) == 2
    assert f"error: --repo {repo}: " in capsys.readouterr().err
    assert not push_hub.repositories


@pytest.mark.parametrize("path", ["/api/whoami-v2", "/api/repos/create"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_hub_that_refuses_the_token_is_the_users_error(push_hub, path, status):
    push_hub.faults.append(Fault(path=path, status=status, times=ALWAYS))
    with pytest.raises(UserError, match=f"hub_model_id {REPO}: the Hub answers HTTP {status}: .*HF_TOKEN"):
        access.check_access(REPO, False, "hub_model_id")


def test_nothing_goes_to_a_public_repository_against_hub_private_repo(push_hub, run, lines, capsys):
    for me in ({}, {"auth": fine_grained("acme", "repo.write")}, {"auth": {"type": "oauth"}}):
        push_hub.me |= me
        access.check_access(REPO, True, "hub_model_id")
    assert push_hub.repositories[REPO].private
    push_hub.repositories[REPO].private = False  # on its page, while the run goes on
    assert not Uploads(run, target_of(run, private=True)).wait()
    assert lines.have("acme/gpt2 is a public repository, and hub_private_repo wants a private one") == 1
    make_checkpoint(run / "step_00000020", 20, hub_private_repo=True)  # a push by hand remembers what the run was told
    assert export.main(["push", str(run), "--repo", REPO]) == 2
    assert "is a public repository" in capsys.readouterr().err
    assert not push_hub.files(REPO, "main")


def training(run: Path) -> SimpleNamespace:
    """What open_uploads wants of a configuration."""
    fields = {"push_to_hub": True, "hub_model_id": REPO, "hub_private_repo": False, "milestone_steps": 10}
    return SimpleNamespace(run=SimpleNamespace(output_dir=str(run), **fields), optimizer=SimpleNamespace(max_steps=20))


ONE_PROCESS = SimpleNamespace(is_main=True, from_main=lambda value: value)


def test_a_training_run_begins_without_the_hub_and_a_push_ends_at_once(push_hub, run, lines, capsys, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    start = time.monotonic()
    uploads = upload.open_uploads(training(run), ONE_PROCESS)
    assert lines.have("upload     the Hub cannot be reached (ConnectError: ") == 1
    assert export.main(["push", str(run), "--repo", REPO]) == 2
    assert time.monotonic() - start < 5
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: http://127.0.0.1:9 cannot be reached (ConnectError: ")
    assert error.endswith("push again when there is a network")
    assert "s3cret" not in error + "".join(lines)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", push_hub.url)
    assert uploads.wait()
    on_the_hub(push_hub, run)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    upload.open_uploads(training(run), ONE_PROCESS).start(20)
    assert lines.have("HF_HUB_OFFLINE is set, so this run uploads nothing") == 1


def test_what_is_shown_has_no_secrets(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    shown = access.clean(f"PUT https://user:pass@s3.example/a/b?X-Amz-Signature=1&b=2: no, {TOKEN}")
    assert shown == "PUT https://s3.example/a/b no, ***"


# By hand


def test_mistakes_of_a_push(push_hub, run, capsys, monkeypatch):
    make_checkpoint(run / "step_00000020", 20, hub_model_id="strangers/loot")

    def refused(*arguments: str) -> str:
        assert export.main(["push", *arguments]) == 2
        return capsys.readouterr().err

    assert "no such run" in refused(str(run / "nowhere"), "--repo", REPO)
    # Only the command names where something goes, and not a run's directory, which may be somebody else's.
    assert "--repo is empty; name the repository" in refused(str(run))
    assert "make push REPO=ORG/NAME" in refused(str(run), "--repo", "")
    assert "--repo '../gpt2' must be ORG/NAME" in refused(str(run), "--repo", "../gpt2")
    assert not push_hub.requests
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused(str(run), "--repo", REPO)


def test_the_best_checkpoint_or_a_copy_of_one_goes_to_main(push_hub, run, tmp_path):
    (run / "metrics.jsonl").write_text('{"step": 10, "val_loss": 4.1}\n{"step": 20, "val_loss": 4.25}\n')
    assert export.main(["push", str(run), "--repo", REPO, "--best"]) == 0
    assert json.loads(push_hub.files(REPO, "main")["config.json"])["step"] == 10
    assert set(push_hub.repositories[REPO].branches) == set(BRANCHES)
    copy = shutil.copytree(run / "step_00000020", tmp_path / "mine")
    assert export.main(["push", str(copy), "--repo", "acme/other"]) == 0
    assert push_hub.repositories["acme/other"].branches["main"][-1].message == "Step 20"
