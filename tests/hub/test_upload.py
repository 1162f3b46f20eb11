"""Uploads: each checkpoint reaches its branch byte for byte, whatever fails, and never delays the training."""

import hashlib
import json
import logging
import shutil
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from recipe.checkpoint.format import model_only
from recipe.errors import UserError
from recipe.hub import access, export, upload
from recipe.hub.upload import Target, Uploads, sync
from tests import processes
from tests.conftest import TINY, by_step, environment, flags
from tests.hub import REPO, TOKEN, Fault, Hub
from tests.hub.conftest import change
from tests.hub.server import Model

ALWAYS = 10**6
BRANCHES = {"step-000010": 10, "step-000020": 20, "main": 20}


def target_of(run: Path, **changes) -> Target:
    """As for a training run of 20 steps with milestones every 10."""
    return Target(**{"repo": REPO, "milestone_steps": 10, "final": run / "step_00000020"} | changes)


def on_the_hub(hub: Hub, run: Path, branches: dict[str, int] = BRANCHES) -> None:
    """Each checkpoint is on its branch, in one commit, byte by byte, with a card that has its validation loss."""
    repository, recorded = hub.models[REPO], by_step(run)
    assert set(repository.branches) == {"main", *branches}
    for branch, step in branches.items():
        found = dict(hub.files(REPO, branch))
        card = ModelCard(found.pop("README.md").decode())
        losses = [e.metric_value for e in card.data.eval_results if e.metric_name.startswith("validation loss")]
        assert losses == [round(recorded[step]["val_loss"], 6)]
        assert found == {p.name: p.read_bytes() for p in model_only(run / f"step_{step:08d}")}
        assert [c.message for c in repository.branches[branch]] == ["initial", f"Step {step}"]


def push(run: Path, *more: str, repo: str = REPO) -> int:
    return export.main(["push", str(run), "--repo", repo, *more])


# Whole runs


def train(hub: Hub, shards: Path, run: Path, *, token: str = TOKEN, start=processes.run, **fields):
    """The run of the fixture whole_run, which pushes."""
    settings = TINY | {"push_to_hub": True, "hub_model_id": REPO, "milestone_steps": 10, "dropout": 0.1}
    settings |= {"dataset_name": shards, "output_dir": run} | fields
    command = ("tests/hub/with_hub.py", hub.url, "recipe/train.py", *flags(**settings))
    return start(*command, env=environment({"HUB_TOKEN": token}))


def losses(run: Path) -> dict[int, tuple]:
    return {step: tuple(line[k] for k in ("loss", "val_loss", "grad_norm")) for step, line in by_step(run).items()}


def test_a_run_uploads_its_milestones_and_its_last_checkpoint(shards, whole_run, tmp_path):
    """And learns what it learns without; the token it was given is in none of its files and lines."""
    run = tmp_path / "run"
    with Hub(tmp_path / "hub", TOKEN) as hub:
        result = train(hub, shards, run, hub_private_repo=True)
        assert result.returncode == 0, result.stdout + result.stderr
        on_the_hub(hub, run)
        assert hub.models[REPO].private
        assert all(f"{hub.url}/{REPO}/tree/{branch}" in result.stdout for branch in BRANCHES)
    assert losses(run) == losses(whole_run[0])
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in result.stdout + result.stderr


def test_a_run_that_was_killed_in_an_upload_uploads_it_when_it_goes_on(shards, tmp_path):
    run = tmp_path / "run"
    with Hub(tmp_path / "hub", TOKEN) as hub:
        hub.faults.append(Fault(path="/lfs/*", method="PUT", kind="stall", received=1000))
        program = train(hub, shards, run, start=processes.start, max_steps=5000, logging_steps=10, eval_steps=0)
        try:
            while not hub.count("PUT", "/lfs/"):
                assert program.poll() is None, program.stdout + program.stderr
                time.sleep(0.05)
        finally:
            program.kill()
        assert not [c for c in hub.models[REPO].branches.values() if len(c) > 1]
        before = {path.name for path in run.glob("step_*")}
        result = train(hub, shards, run, max_steps=max(int(n[5:]) for n in before) + 10, logging_steps=10, eval_steps=0)
        assert result.returncode == 0, result.stdout + result.stderr
        branches = hub.models[REPO].branches
        assert {f"step-{int(n[5:]):06d}" for n in before} < branches.keys()
        assert all(len(commits) == 2 for commits in branches.values())


def test_a_run_without_a_token_ends_before_its_first_step(shards, tmp_path):
    with Hub(tmp_path / "hub", TOKEN) as hub:
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
    "429": [Fault(path="*/preupload/*", status=429, headers={"Retry-After": "1"})],
    "429 at first": [Fault(path="/api/repos/create", status=429, headers={"Retry-After": "1"}, times=2)],
    "500": [Fault(path="*/commit/*", status=500, times=2)],
    "503": [Fault(path="*/objects/batch", status=503, times=2)],
    "reset": [Fault(kind="reset", times=2, **BIG)],
    "stall": [Fault(kind="stall", **BIG)],
}
LASTING = ("401", "403")


def faults(name: str) -> list[Fault]:
    return [Fault(**vars(fault)) for fault in FAULTS[name]]  # a Hub counts them down


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["403", "503", "stall"])
def test_training_is_not_affected_by_a_fault(shards, whole_run, tmp_path, fault):
    run = tmp_path / "run"
    with Hub(tmp_path / "hub", TOKEN) as hub:
        hub.faults += faults(fault)
        result = train(hub, shards, run)
        output = result.stdout + result.stderr
        assert result.returncode == (2 if fault in LASTING else 0), output
        assert "Traceback" not in output
        assert losses(run) == losses(whole_run[0])
        if fault in LASTING:
            assert "not on the Hub: step-000010, step-000020, main; to upload it, run python -m recipe.hub" in output
            hub.faults.clear()
            assert train(hub, shards, run).returncode == 0  # the whole run is there, and is uploaded
        assert not hub.faults
        on_the_hub(hub, run)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_waited_for_and_another_is_met_once(hub, run, capsys, monkeypatch, fault):
    monkeypatch.setattr(upload, "_PAUSES", (0.1,) * 4)
    hub.faults += faults(fault)
    start, code = time.monotonic(), push(run)
    screen = capsys.readouterr().out
    if fault in LASTING:
        assert code == 2
        assert hub.count("POST", "/commit/") == 1
        assert f"upload     to {REPO} failed: HTTP {fault}: " in screen
        hub.faults.clear()
        assert push(run) == 0
    else:
        assert code == 0
        assert "429" not in fault or time.monotonic() - start > 1  # as the Hub asks
    assert screen.count(f"upload     to {REPO} failed: ") <= 1
    assert not hub.faults
    on_the_hub(hub, run)


@pytest.mark.parametrize(("status", "code"), [(503, 75), (429, 75), (403, 2)])
def test_a_run_and_a_push_end_alike_where_the_hub_fails_to_the_end(hub, run, monkeypatch, status, code):
    monkeypatch.setattr(upload, "_PAUSES", ())
    hub.faults.append(Fault(path="/api/*/branch/*", status=status, times=ALWAYS))
    assert Uploads(run, target_of(run)).wait() == push(run) == code


def test_an_upload_through_xet(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    assert push(run) == 0
    bytes_sent = 0
    for branch, step in BRANCHES.items():
        weights = (run / f"step_{step:08d}" / "model.safetensors").read_bytes()
        assert hub.files(REPO, branch)["model.safetensors"] == hashlib.sha256(weights).hexdigest().encode()
        bytes_sent += len(weights) if branch != "main" else 0
    assert not hub.count("PUT", "/lfs/")
    stored = sum(path.stat().st_size for path in (tmp_path / "hub" / "xet").rglob("default.*"))
    assert 0.8 * bytes_sent < stored < 1.2 * bytes_sent  # floats hardly compress


def test_a_refusal_through_xet_is_final(hub, run, capsys, monkeypatch):
    """hf-xet itself calls a 403 for the write token a network error."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.faults.append(Fault(path="*/xet-write-token/*", status=403, times=ALWAYS))
    assert push(run) == 2
    screen = capsys.readouterr().out
    assert f"upload     to {REPO} failed: HTTP 403: Forbidden, asked for a token to write with\n" in screen
    assert hub.count("GET", "/xet-write-token/") == 1


def test_a_hub_that_hangs_delays_neither_a_step_nor_the_end_beyond_its_limit(hub, run, monkeypatch):
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    monkeypatch.setattr(upload, "_PAUSES", ())
    hub.faults.append(Fault(path="/api/*", kind="stall", times=ALWAYS))
    uploads = Uploads(run, target_of(run))
    start = time.monotonic()
    for _ in range(100):  # lines of metrics.jsonl
        uploads.start(20)
    assert time.monotonic() - start < 1
    assert uploads.wait(limit=1) == 75
    assert time.monotonic() - start < 10
    assert hub.count("POST", "/repos/create") <= 1  # one attempt at a time
    start, asked = time.monotonic(), iter([False, False])
    assert uploads.wait(stopped=lambda: next(asked, True)) == 75  # Ctrl-C
    assert time.monotonic() - start < 10


def test_trouble_is_reported_once_a_minute_and_tried_again_as_often(hub, run, caplog, monkeypatch):
    hub.faults.append(Fault(path="/api/*", status=503, times=ALWAYS))
    uploads = Uploads(run, target_of(run))

    def line_of_metrics(seconds: float = 0) -> None:
        with monkeypatch.context() as later:
            later.setattr(upload.time, "monotonic", lambda clock=time.monotonic: clock() + seconds)
            uploads.start(20)
            uploads._thread.join()

    for _ in range(5):
        line_of_metrics()
    assert caplog.messages == [f"upload     to {REPO} failed: HTTP 503: Service Unavailable; trying again later"]
    assert hub.count("POST", "/repos/create") == 1
    line_of_metrics(61)
    assert len(caplog.messages) == 2
    hub.faults.clear()
    line_of_metrics(122)
    on_the_hub(hub, run)


# What belongs on the Hub and is not there


def test_what_is_missing_goes_up_once_evaluated_and_nothing_twice(hub, run):
    known: dict[str, bool] = {}
    sync(run, target_of(run), known, up_to=9)
    assert not hub.models
    sync(run, target_of(run), known, up_to=10)
    assert hub.models[REPO].branches.keys() == {"main", "step-000010"}
    hub.faults.append(Fault(path="*/commit/*", kind="reset", after=None))  # the answer is lost, not the commit
    with pytest.raises(Exception, match=r"disconnected|reset|closed"):
        sync(run, target_of(run), known)
    (run / "step_00000020" / "notes.txt").write_text("of mine")
    sync(run, target_of(run), known)
    on_the_hub(hub, run)
    before = len(hub.requests)
    sync(run, target_of(run), {})
    assert not [r for r in hub.requests[before:] if "/preupload/" in r.path]
    change(run / "step_00000010", weights=b"another seed")
    sync(run, target_of(run), {})
    assert hub.files(REPO, "step-000010")["model.safetensors"] == b"another seed"
    assert len(hub.models[REPO].branches["main"]) == 2


def test_a_damaged_checkpoint_does_not_reach_the_hub(hub, run, tmp_path, caplog, capsys):
    """While the run goes on, where the others go up; and by hand, where the newest whole one is for main. A link is
    damage: a run from somebody else could make it publish any file of this machine."""
    config = run / "step_00000020" / "config.json"
    shutil.copy(config, tmp_path / "secret")
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    assert Uploads(run, target_of(run)).wait() == 2
    assert f"upload     main is refused: {config.parent}: config.json is a link" in caplog.text
    assert set(hub.models[REPO].branches) == {"main", "step-000010"}
    assert not hub.files(REPO, "main")
    assert push(run) == 2
    assert hub.models[REPO].branches["main"][-1].message == "Step 10"
    assert "not on the Hub: step-000020" in capsys.readouterr().out


def test_a_card_is_renewed_unless_it_is_to_stay(hub, run, capsys):
    sync(run, target_of(run), {})
    main = hub.models[REPO].branches["main"]
    main[-1].files["README.md"] = b"a person's"
    assert push(run, "--no_card") == 0
    assert main[-1].files["README.md"] == b"a person's"
    scores = {"acc": 0.25, "acc_ci95": 0.1}
    (run / "step_00000020" / "results.json").write_text(json.dumps({"hellaswag": {"rows": 10042, "A": scores}}))
    for _ in range(2):  # the second time there is nothing to do
        assert push(run, "--license", "cc-by-4.0") == 0
    card = ModelCard(main[-1].files["README.md"].decode())
    assert 0.25 in [e.metric_value for e in card.data.eval_results]
    assert card.data.license == "cc-by-4.0"
    assert b"license: cc-by-4.0" in hub.files(REPO, "step-000010")["README.md"]
    assert len(main) == 3
    assert capsys.readouterr().out.endswith("upload     everything is on the Hub\n")


# Who may write, and where


@pytest.mark.parametrize("case", ["namespace", "read", "token"])
def test_who_may_not_write_is_told_before_the_first_step(hub, run, capsys, case):
    repo, status = "strangers/gpt2", 401 if case == "token" else 403
    if case == "read":
        hub.models[repo] = Model()  # a repository that is there, which others may write
    elif case == "token":
        hub.token = "hf_another"
    with pytest.raises(UserError, match=f"hub_model_id {repo}: the Hub answers HTTP {status}: .*HF_TOKEN"):
        access.check_access(repo, False, "hub_model_id")
    assert push(run, repo=repo) == 2
    assert f"error: --repo {repo}: the Hub answers HTTP {status}: " in capsys.readouterr().err


def test_nothing_goes_to_a_public_repository_against_hub_private_repo(hub, run, caplog, capsys):
    access.check_access(REPO, True, "hub_model_id")
    assert hub.models[REPO].private
    hub.models[REPO].private = False  # on its page, while the run goes on
    assert Uploads(run, target_of(run, private=True)).wait() == 2
    assert "acme/gpt2 is a public repository, and hub_private_repo wants a private one" in caplog.text
    change(run / "step_00000020", hub_private_repo=True)  # a push by hand remembers what the run was told
    assert push(run) == 2
    assert "is a public repository" in capsys.readouterr().err
    assert not hub.files(REPO, "main")


def test_a_push_without_a_run_takes_the_newest(hub, run, tmp_path, monkeypatch):
    shutil.copytree(run, tmp_path / "here" / "runs" / "mine")
    monkeypatch.chdir(tmp_path / "here")
    assert export.main(["push", "--repo", REPO]) == 0
    newest = (run / "step_00000020" / "model.safetensors").read_bytes()
    assert dict(hub.files(REPO, "main"))["model.safetensors"] == newest


def test_a_training_run_begins_without_the_hub_and_a_push_names_it(hub, run, caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO)
    fields = {"push_to_hub": True, "hub_model_id": REPO, "hub_private_repo": False, "milestone_steps": 10}
    config = SimpleNamespace(
        run=SimpleNamespace(output_dir=str(run), **fields), optimizer=SimpleNamespace(max_steps=20)
    )
    one_process = SimpleNamespace(is_main=True, shared_error=lambda what: nullcontext())
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setattr(upload, "_PAUSES", ())
    uploads = upload.open_uploads(config, one_process)
    unreachable = "upload     http://127.0.0.1:9 cannot be used now (ConnectError: "
    assert unreachable in caplog.text
    assert push(run) == 75
    screen = capsys.readouterr().out
    assert unreachable in screen
    assert "s3cret" not in screen + caplog.text
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    assert uploads.wait() == 0
    on_the_hub(hub, run)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert push(run) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    logging.getLogger("recipe").propagate = True
    upload.open_uploads(config, one_process).start(20)
    assert "HF_HUB_OFFLINE is set, so this run uploads nothing" in caplog.text


# By hand


@pytest.mark.parametrize(
    ("where", "repo", "message"),
    [
        ("run/nowhere", REPO, "no such run"),
        # Only the command names where something goes, and not a run's directory, which may be somebody else's.
        ("run", "", "--repo is empty; name the repository to upload to, ORG/NAME (make push REPO=ORG/NAME)"),
        ("run", "../gpt2", "--repo '../gpt2' must be ORG/NAME"),
    ],
)
def test_mistakes_of_a_push(hub, run, capsys, where, repo, message):
    change(run / "step_00000020", hub_model_id="strangers/loot")
    assert push(run.parent / where, repo=repo) == 2
    assert message in capsys.readouterr().err
    assert not hub.requests


def test_the_best_checkpoint_or_a_copy_of_one_goes_to_main(hub, run, tmp_path):
    lines = "".join(f'{{"step": {step}, "val_loss": {loss}}}\n' for step, loss in ((10, 4.1), (20, 4.25)))
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").write_text(lines)
    assert push(run, "--best") == 0
    assert hub.models[REPO].branches["main"][-1].message == "Step 10"
    assert set(hub.models[REPO].branches) == set(BRANCHES)
    copy = shutil.copytree(run / "step_00000020", tmp_path / "mine")
    assert push(copy, repo="acme/other") == 0
    assert hub.models["acme/other"].branches["main"][-1].message == "Step 20"
