"""Uploads: each checkpoint reaches its branch byte for byte, whatever fails, and never delays the training."""

import hashlib
import json
import logging
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import ModelCard

from eval.scores import score, text_dataset
from recipe import audit
from recipe.checkpoint.format import files_of
from recipe.config import parse_config
from recipe.hub import access, export, upload
from recipe.hub.upload import Uploads
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests import processes
from tests.checkpoint import replace_files
from tests.conftest import TINY, by_step, flags, ok
from tests.hub import REPO, TOKEN, Fault, Hub
from tests.hub.conftest import change
from tests.hub.server import Model

ALWAYS = 10**6
BRANCHES = {"step-000010": 10, "step-000020": 20, "main": 20}


def uploads_of(run: Path, **changes) -> Uploads:
    """As for a training run of 20 steps with milestones every 10."""
    return Uploads(run, REPO, milestone_steps=10, final=run / "step_00000020", **changes)


def on_the_hub(hub: Hub, run: Path) -> None:
    """Each checkpoint is on its branch, in one commit, byte by byte, with a card that has its validation loss."""
    repository, recorded = hub.models[REPO], by_step(run)
    assert set(repository.branches) == {"main", *BRANCHES}
    for branch, step in BRANCHES.items():
        files = dict(hub.files(REPO, branch))
        card = ModelCard(files.pop("README.md").decode())
        losses = [e.metric_value for e in card.data.eval_results if e.metric_name.startswith("validation loss")]
        assert losses == [round(recorded[step]["val_loss"], 6)]
        assert files == {p.name: p.read_bytes() for p in files_of(run / f"step_{step:08d}")}
        assert [c.message for c in repository.branches[branch]] == ["initial", f"Step {step}"]


def push(run: Path, *more: str, repo: str = REPO) -> int:
    return export.main(["push", str(run), "--repo", repo, *more])


# Whole runs


def train(hub: Hub, shards: Path, run: Path, **fields):
    """The run of the fixture whole_run, which pushes."""
    settings = TINY | {"push_to_hub": True, "hub_model_id": REPO, "milestone_steps": 10, "dropout": 0.1}
    settings |= {"dataset_name": shards, "output_dir": run} | fields
    return processes.run("recipe/train.py", *flags(**settings), env=hub.environment)


def losses(run: Path) -> dict[int, tuple]:
    return {step: tuple(line[k] for k in ("loss", "val_loss", "grad_norm")) for step, line in by_step(run).items()}


def test_a_run_uploads_its_milestones_and_its_last_checkpoint(shards, whole_run, tmp_path):
    """And learns what it learns without; the token it was given is in none of its files and lines."""
    run = tmp_path / "run"
    with Hub(tmp_path / "hub", TOKEN) as hub:
        result = ok(train(hub, shards, run, hub_private_repo=True))
        on_the_hub(hub, run)
        assert hub.models[REPO].private
        assert all(f"{hub.url}/{REPO}/tree/{branch}" in result.stdout for branch in BRANCHES)
    assert losses(run) == losses(whole_run[0])
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in result.stdout + result.stderr


def config_of(run: Path, **changes):
    fields = {"push_to_hub": True, "hub_model_id": REPO, "milestone_steps": 10, "max_steps": 20, "warmup_steps": 1}
    return parse_config(flags(**TINY | fields | {"output_dir": run} | changes))


def test_a_run_on_the_hub_can_be_audited_where_it_has_its_state(hub, run, shards, capsys, monkeypatch):
    """With data that a flag names, since the paths in the configuration are somebody else's."""
    monkeypatch.setattr(audit, "subprocess", processes.forking)
    assert push(run) == 0
    assert audit.main(["--repo", REPO]) == 2
    assert "only uploads of --push_to_hub state" in capsys.readouterr().err
    assert upload.open_uploads(config_of(run, push_to_hub="state"), Processes()).wait() == 0
    assert audit.main(["--repo", REPO]) == 2
    assert f"dataset_name '{shards}' of {REPO} is a path of its author" in capsys.readouterr().err
    here = ["--repo", REPO, "--flags", f"--dataset_name {shards}"]
    assert audit.main(here) == 0
    assert "step 10 to 20: 10 steps equal to the bit" in capsys.readouterr().out
    assert f"`python -m recipe.audit --repo {REPO}`" in hub.files(REPO, "main")["README.md"].decode()
    files = hub.files(REPO, "step-000020")
    lines = files["metrics.jsonl"].decode().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"loss": 4.0})
    files["metrics.jsonl"] = "\n".join(lines).encode()
    assert audit.main(here) == 1
    assert "step 10 to 20: different: loss of step 20 is 4.0, and " in capsys.readouterr().out


def test_no_branch_keeps_the_state_of_another_push(hub, run):
    """Of its own, or of main, of which a new branch is a copy; other files stay."""
    assert upload.open_uploads(config_of(run, push_to_hub="state"), Processes()).wait() == 0
    files = hub.files(REPO, "main")
    assert "trainer_state.json" in files
    files["picture.png"] = b"of mine"
    assert push(run) == 0
    for branch, step in BRANCHES.items():
        there = {*hub.files(REPO, branch)}
        assert there - {"picture.png"} == {"README.md", *(p.name for p in files_of(run / f"step_{step:08d}"))}, branch
    assert "picture.png" in hub.files(REPO, "main")


# Faults of the Hub

FAULTS = {
    "403": {"path": "*/commit/*", "status": 403, "times": ALWAYS},
    "409": {"path": "*/commit/*", "status": 409, "times": 2},  # another commit came in between
    "429": {"path": "/api/repos/create", "status": 429, "times": 2},
    "503": {"path": "*/objects/batch", "status": 503, "times": 2},
    "stall": {"path": "/lfs/*", "method": "PUT", "kind": "stall", "after": None},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_waited_for_and_another_is_met_once(hub, run, capsys, monkeypatch, fault):
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    hub.faults.append(Fault(**FAULTS[fault]))
    code = push(run)
    screen = capsys.readouterr().out
    if fault == "403":
        assert code == 2
        assert hub.count("POST", "/commit/") == 1
        assert f"upload     to {REPO} failed: HTTP {fault}: " in screen
        hub.faults.clear()
        assert push(run) == 0
    else:
        assert code == 0
    assert not hub.faults
    on_the_hub(hub, run)


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


def test_an_answer_to_xet_is_no_missing_connection(hub, run, monkeypatch, capsys):
    """hf_xet raises ConnectionError for each status."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.faults.append(Fault(path="*xet-write-token*", status=404, times=ALWAYS))
    assert push(run) == 2
    assert f"to {REPO} failed: HTTP 404: Not Found, domain: {hub.url}/api/models/" in capsys.readouterr().out


def test_a_hub_that_hangs_delays_neither_a_step_nor_the_end_beyond_its_limit(hub, run, monkeypatch):
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    hub.faults.append(Fault(path="/api/*", kind="stall", times=ALWAYS))
    uploads = uploads_of(run)
    start = time.monotonic()
    looked = Mock(wraps=uploads.branches)
    monkeypatch.setattr(uploads, "branches", looked)
    for _ in range(100):  # lines of metrics.jsonl
        uploads.start()
    assert looked.call_count <= 2  # reading the directory may take longer than a step
    assert time.monotonic() - start < 1
    assert uploads.wait(limit=1) == 75
    assert time.monotonic() - start < 10
    assert hub.count("POST", "/repos/create") <= 1  # one attempt at a time
    start, asked = time.monotonic(), iter([False, False])
    assert uploads.wait(stop_requested=lambda: next(asked, True)) == 75  # Ctrl-C
    assert time.monotonic() - start < 10


# What belongs on the Hub and is not there


def test_what_is_missing_goes_up_once_evaluated_and_nothing_twice(hub, run):
    uploads = uploads_of(run)
    wanted = uploads.branches()
    uploads.sync({"step-000010": wanted.pop("step-000010")})
    assert hub.models[REPO].branches.keys() == {"main", "step-000010"}
    hub.faults.append(Fault(path="*/commit/*", kind="reset", after=None))  # the answer is lost, not the commit
    with pytest.raises(Exception, match=r"disconnected|reset|closed"):
        uploads.sync(wanted)
    (run / "step_00000020" / "notes.txt").write_text("of mine")
    uploads.sync(wanted)
    assert uploads.accepted == dict.fromkeys(BRANCHES, True)
    on_the_hub(hub, run)
    sent = hub.count("PUT", "/lfs/"), hub.count("POST", "/commit/")
    uploads.sync(uploads.branches())
    assert (hub.count("PUT", "/lfs/"), hub.count("POST", "/commit/")) == sent
    replace_files(run / "step_00000010", {"model.safetensors": b"another seed"})
    uploads.sync(uploads.branches())
    assert hub.files(REPO, "step-000010")["model.safetensors"] == b"another seed"
    assert len(hub.models[REPO].branches["main"]) == 2


def test_a_damaged_checkpoint_does_not_reach_the_hub(hub, run, tmp_path, caplog, capsys):
    """While the run goes on, where the others go up; and by hand, where the newest intact one is for main. A link is
    damage: a run from somebody else could make it publish any file of this machine."""
    config = run / "step_00000020" / "config.json"
    shutil.copy(config, tmp_path / "secret")
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    assert uploads_of(run).wait() == 2
    assert f"upload     main is refused: {config.parent}: config.json is a link" in caplog.text
    assert set(hub.models[REPO].branches) == {"main", "step-000010"}
    assert not hub.files(REPO, "main")
    assert push(run) == 2
    assert hub.models[REPO].branches["main"][-1].message == "Step 10"
    assert "not on the Hub: step-000020" in capsys.readouterr().out


def test_a_card_is_renewed_unless_it_is_to_stay(hub, run, capsys):
    assert uploads_of(run).wait() == 0
    main = hub.models[REPO].branches["main"]
    main[-1].files["README.md"] = b"a person's"
    assert push(run, "--no_card") == 0
    assert main[-1].files["README.md"] == b"a person's"
    results = {"perplexity": {"scores": [score(text_dataset("play.txt"), ("loss", "loss"), 0.25, "by hand")]}}
    (run / "step_00000020" / "results.json").write_text(json.dumps(results))
    for _ in range(2):  # the second time there is nothing to do
        assert push(run, "--license", "cc-by-4.0") == 0
    card = ModelCard(main[-1].files["README.md"].decode())
    assert 0.25 in [e.metric_value for e in card.data.eval_results]
    assert card.data.license == "cc-by-4.0"
    assert b"license: cc-by-4.0" in hub.files(REPO, "step-000010")["README.md"]
    assert len(main) == 3
    assert capsys.readouterr().out.endswith("upload     everything is on the Hub\n")


# Who may write, and where


def test_a_license_that_the_hub_refuses_ends_a_run_before_its_first_step_and_a_push(hub, run, shards, tmp_path, capsys):
    result = train(hub, shards, tmp_path / "new", hub_license="mine")
    assert result.returncode == 2
    assert not (tmp_path / "new" / "metrics.jsonl").exists()
    assert push(run, "--license", "mine") == 2
    for printed in (result.stderr, capsys.readouterr().err):
        assert "the Hub refuses the model card" in printed
        assert "hub_license, or a push's --license" in printed
    assert uploads_of(run, license="mine").wait() == 2  # the Hub has changed its mind meanwhile
    assert not hub.files(REPO, "main")


@pytest.mark.parametrize(
    ("case", "answer"),
    [("namespace", "HTTP 403"), ("read", "HTTP 403"), ("token", "HTTP 401"), ("no token", "no token for the Hub")],
)
def test_who_may_not_write_is_told_before_the_first_step(hub, run, capsys, monkeypatch, case, answer):
    repo = "strangers/gpt2"
    if case == "read":
        hub.models[repo] = Model()  # a repository that is there, which others may write
    elif case == "token":
        hub.token = "hf_another"
    elif case == "no token":
        monkeypatch.setenv("HF_TOKEN", "")
    with pytest.raises(UserError, match=f"hub_model_id {repo}: .*{answer}.*HF_TOKEN"):
        access.check_access(repo, False, "mit", "hub_model_id")
    assert push(run, repo=repo) == 2
    assert f"error: --repo {repo}: " in capsys.readouterr().err


def test_nothing_goes_to_a_public_repository_against_hub_private_repo(hub, run, caplog, capsys):
    access.check_access(REPO, True, "mit", "hub_model_id")
    assert hub.models[REPO].private
    hub.models[REPO].private = False  # on its page, while the run goes on
    assert uploads_of(run, private=True).wait() == 2
    assert "acme/gpt2 is a public repository, and hub_private_repo wants a private one" in caplog.text
    change(run / "step_00000020", hub_private_repo=True)  # a push by hand remembers what the run was told
    assert push(run) == 2
    assert "is a public repository" in capsys.readouterr().err
    assert not hub.files(REPO, "main")


def test_a_training_run_begins_without_the_hub_and_a_push_names_it(hub, run, caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO)
    config = config_of(run)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    uploads = upload.open_uploads(config, Processes())
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
    upload.open_uploads(config, Processes()).start()
    assert "HF_HUB_OFFLINE is set, so this run uploads nothing" in caplog.text


# By hand


@pytest.mark.parametrize(
    ("where", "repo", "message"),
    [
        ("run/nowhere", REPO, "no checkpoint there"),
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
