"""Uploads: each checkpoint reaches its branch byte for byte, whatever fails, without delaying the training."""

import errno
import hashlib
import json
import logging
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
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
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import UserError
from recipe.utils.files import replace_file
from recipe.utils.processes import Processes
from tests import processes
from tests.checkpoint import replace_files
from tests.conftest import TINY, by_step, flags, ok, recorded, refused, run_train, tiny_flags
from tests.hub import REPO, TOKEN, Fault, Hub
from tests.hub.conftest import change
from tests.hub.server import Model

ALWAYS = 10**6
PUSH = {"push_to_hub": True, "hub_model_id": REPO, "milestone_steps": 10}
BRANCHES = {"step-000010": 10, "step-000020": 20, "main": 20}


def uploads_of(run: Path, **changes) -> Uploads:
    """The uploads of a training run of 20 steps with milestones every 10."""
    return Uploads(run, REPO, milestone_steps=10, final=run / "step_00000020", **changes)


def assert_on_the_hub(hub: Hub, run: Path) -> None:
    """Each checkpoint is on its branch, in one commit, byte for byte, with a card that has its validation loss."""
    repository, recorded = hub.models[REPO], by_step(run)
    assert set(repository.branches) == {"main", *BRANCHES}
    for branch, step in BRANCHES.items():
        files = dict(hub.files(REPO, branch))
        card = ModelCard(files.pop("README.md").decode())
        losses = [e.metric_value for e in card.data.eval_results if e.metric_name.startswith("validation loss")]
        assert losses == [round(recorded[step]["val_loss"], 6)]
        assert files == {p.name: p.read_bytes() for p in files_of(run / f"step_{step:08d}")}
        assert [c.message for c in repository.branches[branch]] == ["initial", f"Step {step}"]


def push(run: Path, *options: str, repo: str = REPO) -> int:
    return export.main(["push", str(run), "--repo", repo, *options])


# Training runs


def uploading(shards: Path, run: Path, **fields) -> list[str]:
    """The flags of the fixture whole_run's run, with uploads."""
    return tiny_flags(shards, run, **PUSH | {"dropout": 0.1} | fields)


def test_a_run_uploads_its_milestones_and_its_last_checkpoint(shards, whole_run, tmp_path):
    """It trains as without uploads, and the token is in none of its files and not in its output."""
    run = tmp_path / "run"
    with Hub(tmp_path / "hub", TOKEN) as hub:
        result = ok(run_train(*uploading(shards, run, hub_private_repo=True), env=hub.environment))
        assert_on_the_hub(hub, run)
        assert hub.models[REPO].private
        assert f"upload     checkpoints to {hub.url}/{REPO}: one every 10 steps and the last\n" in result.stdout
        assert all(f"{hub.url}/{REPO}/tree/{branch}" in result.stdout for branch in BRANCHES)
    columns = ("loss", "val_loss", "grad_norm")
    assert recorded(run, *columns) == recorded(whole_run[0], *columns)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in result.stdout + result.stderr


def test_a_stopped_run_names_the_command_that_uploads_its_checkpoint(hub, shards, tmp_path, in_process):
    result = in_process(uploading(shards, tmp_path / "run", milestone_steps=0, max_hours=1e-9))
    assert result.returncode == 75
    assert f"upload     checkpoints to {hub.url}/{REPO}: the last\n" in result.stdout
    assert f"upload     make push RUN={tmp_path / 'run'} REPO={REPO} uploads that checkpoint" in result.stdout


def config_of(run: Path, **changes):
    return parse_config(flags(**TINY | PUSH | {"output_dir": run} | changes))


def test_a_run_pushed_with_its_state_can_be_audited_from_the_hub(hub, run, shards, capsys, monkeypatch):
    """The data are named by a flag, since the paths in the configuration are somebody else's."""
    monkeypatch.setattr(audit, "subprocess", processes.forking)
    assert push(run) == 0
    assert audit.main(["--repo", REPO]) == 2
    assert "only a run with --push_to_hub state can be audited" in capsys.readouterr().err
    assert upload.open_uploads(config_of(run, push_to_hub="state"), Processes()).wait() == 0
    assert audit.main(["--repo", REPO]) == 2
    assert f"dataset_name '{shards}' is a path on the computer of {REPO}'s author" in capsys.readouterr().err
    arguments = ["--repo", REPO, "--flags", f"--dataset_name {shards}"]
    branches = hub.models[REPO].branches  # in an order that is not that of steps, as the Hub's may be
    hub.models[REPO].branches = dict(reversed(branches.items()))
    assert audit.main(arguments) == 0
    assert capsys.readouterr().out.endswith("step 10 to 20: 10 steps equal to the bit\nmain: the model of step 20\n")
    assert json.loads(hub.files(REPO, "step-000010")["metrics.jsonl"].splitlines()[-1])["step"] == 10
    assert f"`python -m recipe.audit --repo {REPO}`" in hub.files(REPO, "main")["README.md"].decode()
    files = hub.files(REPO, "step-000020")
    lines = files["metrics.jsonl"].decode().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | {"loss": 4.0})
    files["metrics.jsonl"] = "\n".join(lines).encode()
    assert audit.main(arguments) == 1
    assert "step 10 to 20: different: loss of step 20 is 4.0, and " in capsys.readouterr().out
    monkeypatch.setattr(audit, "audit", lambda *_: "equal")
    main = hub.files(REPO, "main")
    for name, content in (("adapter_config.json", b"{}"), ("model.safetensors", b"another's")):
        main[name] = content  # from_pretrained would load it
        assert audit.main(arguments) == 69
        assert capsys.readouterr().out.endswith("main: cannot be compared: no branch step-... has the same model\n")
    main.clear()  # the run has not ended yet
    assert audit.main(arguments) == 0


def test_a_push_removes_the_state_of_an_earlier_push_and_files_of_another_model(hub, run, capsys):
    """Which from_pretrained would read with this one; also from a new branch, which starts as a copy of main. Other
    files stay."""
    assert upload.open_uploads(config_of(run, push_to_hub="state"), Processes()).wait() == 0
    files = hub.files(REPO, "main")
    assert "trainer_state.json" in files
    own = ["picture.png", "models.json", "configs.json", "model_comparison.txt", "vocabulary.txt", "model-q4.bin"]
    others = ["adapter_config.json", "additional_chat_templates/tool.jinja", "chat_template.jinja"]
    others += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "special_tokens_map.json"]
    files |= dict.fromkeys((*own, *others), b"{}")
    assert push(run) == 0
    assert f"deleting another model's {', '.join(others)} from main" in capsys.readouterr().out
    for branch, step in BRANCHES.items():
        expected = {"README.md", *(path.name for path in files_of(run / f"step_{step:08d}"))}
        assert {*hub.files(REPO, branch)} - {*own} == expected, branch
    assert {*own} <= {*hub.files(REPO, "main")}


def test_a_push_by_hand_uploads_the_state_if_it_or_the_run_says_so(hub, run):
    assert push(run, "--state") == 0
    assert all({*hub.files(REPO, branch)} >= upload.STATE for branch in BRANCHES)
    change(run / "step_00000020", push_to_hub="state")
    assert push(run, repo="acme/again") == 0
    assert {*hub.files("acme/again", "main")} >= upload.STATE
    (run / "step_00000020" / "optimizer.safetensors").unlink()  # the newest that has a state then goes to main
    change(run / "step_00000010", push_to_hub="state")
    assert push(run) == 2
    assert hub.models[REPO].branches["main"][-1].message == "Step 10"


# Faults of the Hub

TEMPORARY_FAULTS = {
    "409": {"path": "*/commit/*", "status": 409, "times": 2},  # another commit came in between
    "429": {"path": "/api/repos/create", "status": 429, "times": 2},
    "503": {"path": "*/objects/batch", "status": 503, "times": 2},
    "stall": {"path": "/lfs/*", "method": "PUT", "kind": "stall", "after": None},
}


@pytest.mark.parametrize("fault", TEMPORARY_FAULTS)
def test_an_upload_is_retried_after_a_temporary_fault(hub, run, monkeypatch, fault):
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    hub.faults.append(Fault(**TEMPORARY_FAULTS[fault]))
    assert push(run) == 0
    assert not hub.faults
    assert_on_the_hub(hub, run)


def test_a_run_waits_a_minute_after_a_failed_upload(hub, run, monkeypatch):
    """The Hub's limits count every request, and a run asks for uploads at each line of metrics.jsonl."""
    monkeypatch.setattr(upload, "SCAN_INTERVAL_S", 0.0)
    hub.faults.append(Fault(path="/api/repos/create", status=429, times=ALWAYS))
    uploads, now = uploads_of(run), time.monotonic()
    for seconds, requests in ((0, 1), (59, 1), (62, 2)):
        monkeypatch.setattr(upload, "time", SimpleNamespace(monotonic=lambda seconds=seconds: now + seconds))
        deadline, turns = time.monotonic() + 10, 0
        while turns < 20 or (hub.count("POST", "/repos/create") < requests and time.monotonic() < deadline):
            uploads.start()
            turns += 1
            time.sleep(0.02)
        assert hub.count("POST", "/repos/create") == requests


@pytest.mark.parametrize(
    ("headers", "reason"),
    [({}, ".*; log in with"), ({"X-Error-Message": "storage limit reached"}, "storage limit reached$")],
)
def test_a_refused_commit_is_not_retried(hub, run, capsys, monkeypatch, headers, reason):
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    hub.faults.append(Fault(path="*/commit/*", status=403, times=2, headers=headers))
    assert push(run) == 2
    assert hub.count("POST", "/commit/") == 1
    printed = capsys.readouterr().out
    assert re.search(f"upload     to {REPO} failed: HTTP 403: {reason}", printed, re.MULTILINE)
    assert "with what was refused above put right, the same command, without --fresh, uploads the rest" in printed
    hub.faults.clear()
    assert push(run) == 0
    assert_on_the_hub(hub, run)


def test_an_upload_through_xet(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    assert push(run) == 0
    upload_bytes = 0
    for branch, step in BRANCHES.items():
        weights = (run / f"step_{step:08d}" / "model.safetensors").read_bytes()
        assert hub.files(REPO, branch)["model.safetensors"] == hashlib.sha256(weights).hexdigest().encode()
        upload_bytes += len(weights) if branch != "main" else 0
    assert not hub.count("PUT", "/lfs/")
    stored_bytes = sum(path.stat().st_size for path in (tmp_path / "hub" / "xet").rglob("default.*"))
    assert 0.8 * upload_bytes < stored_bytes < 1.2 * upload_bytes  # floats hardly compress


def test_an_http_error_during_a_xet_upload_is_reported_as_such(hub, run, monkeypatch, capsys):
    """hf_xet raises ConnectionError for every HTTP error."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    hub.faults.append(Fault(path="*xet-write-token*", status=404, times=ALWAYS))
    assert push(run) == 2
    assert f"to {REPO} failed: HTTP 404: Not Found, domain: {hub.url}/api/models/" in capsys.readouterr().out


def test_a_hub_that_hangs_delays_no_step_and_the_end_only_to_the_limit(hub, run, monkeypatch):
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "60")
    hub.faults.append(Fault(path="/api/*", kind="stall", times=ALWAYS))
    uploads = uploads_of(run)
    start = time.monotonic()
    branches = Mock(wraps=uploads.branches)
    monkeypatch.setattr(uploads, "branches", branches)
    for _ in range(100):  # lines of metrics.jsonl
        uploads.start()
    assert branches.call_count <= 2  # reading the directory may take longer than a step
    assert time.monotonic() - start < 1
    assert uploads.wait(limit=1) == 75
    assert time.monotonic() - start < 10
    assert hub.count("POST", "/repos/create") <= 1  # one attempt at a time
    start, answers = time.monotonic(), iter([False, False])
    assert uploads.wait(stop_requested=lambda: next(answers, True)) == 75  # Ctrl-C
    assert time.monotonic() - start < 10


def test_a_directory_that_cannot_be_read_for_a_moment_does_not_end_a_run(hub, run, monkeypatch):
    uploads = uploads_of(run)
    with monkeypatch.context() as patch:
        patch.setattr(uploads, "branches", Mock(side_effect=PermissionError(13, "Permission denied")))
        uploads.start()
        assert uploads.wait() == 75
        patch.setattr(uploads, "branches", Mock(side_effect=UserError("trainer_state.json cannot be read")))
        assert uploads.wait() == 75
    assert uploads.wait() == 0
    assert_on_the_hub(hub, run)


@pytest.mark.parametrize(("number", "code"), [(errno.ESTALE, 0), (errno.EACCES, 2)])
def test_a_read_that_fails_for_a_moment_is_repeated(hub, run, monkeypatch, number, code):
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    lines, error = read_metrics(run / "metrics.jsonl"), UserError("metrics.jsonl cannot be read")
    error.__cause__ = OSError(number, "")
    monkeypatch.setattr("recipe.hub.model_card.read_metrics", Mock(side_effect=[error, lines, lines, lines]))
    assert uploads_of(run).wait() == code


def test_a_file_that_is_not_a_score_keeps_only_its_own_checkpoint_from_the_hub(hub, run):
    (run / "step_00000010/results.json").write_text("x")
    assert uploads_of(run).wait() == 2
    assert {name for name, branch in hub.models[REPO].branches.items() if len(branch) > 1} == {"main", "step-000020"}


# Which checkpoints are uploaded


def test_only_missing_and_changed_checkpoints_are_uploaded(hub, run):
    uploads = uploads_of(run)
    branches = uploads.branches()
    uploads.sync({"step-000010": branches.pop("step-000010")})
    assert hub.models[REPO].branches.keys() == {"main", "step-000010"}
    hub.faults.append(Fault(path="*/commit/*", kind="reset", after=None))  # the answer is lost, not the commit
    with pytest.raises(Exception, match=r"disconnected|reset|closed"):
        uploads.sync(branches)
    (run / "step_00000020" / "notes.txt").write_text("of mine")
    uploads.sync(branches)
    assert uploads.accepted == dict.fromkeys(BRANCHES, True)
    assert_on_the_hub(hub, run)
    sent = hub.count("PUT", "/lfs/"), hub.count("POST", "/commit/")
    uploads.sync(uploads.branches())
    assert (hub.count("PUT", "/lfs/"), hub.count("POST", "/commit/")) == sent
    replace_files(run / "step_00000010", {"model.safetensors": b"another seed"})
    uploads.sync(uploads.branches())
    assert hub.files(REPO, "step-000010")["model.safetensors"] == b"another seed"
    assert len(hub.models[REPO].branches["main"]) == 2


def test_a_damaged_checkpoint_does_not_reach_the_hub(hub, run, tmp_path, caplog, capsys):
    """The others are uploaded; a push by hand uploads the newest intact one to main. A link counts as damage: a run
    from somebody else could make it publish any file of this machine."""
    config = run / "step_00000020" / "config.json"
    shutil.copy(config, tmp_path / "secret")
    config.unlink()
    config.symlink_to(tmp_path / "secret")
    assert uploads_of(run).wait() == 2
    assert f"upload     not uploading main: {config.parent}: config.json is a link" in caplog.text
    assert set(hub.models[REPO].branches) == {"main", "step-000010"}
    assert not hub.files(REPO, "main")
    assert push(run) == 2
    assert hub.models[REPO].branches["main"][-1].message == "Step 10"
    assert "not on the Hub: step-000020" in capsys.readouterr().out


def test_a_damaged_optimizer_state_does_not_reach_the_hub(hub, run):
    replace_file(run / "step_00000010/optimizer.safetensors", b"damaged")
    assert upload.open_uploads(config_of(run, push_to_hub="state"), Processes()).wait() == 2
    assert "step-000010" not in hub.models[REPO].branches


def test_a_push_updates_the_card_unless_no_card_is_set(hub, run, capsys):
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


# Access


def test_a_refused_license_stops_a_run_before_its_first_step_and_a_push(hub, run, shards, tmp_path, in_process, capsys):
    error = refused(in_process(uploading(shards, tmp_path / "new", hub_license="mine")))
    assert not (tmp_path / "new" / "metrics.jsonl").exists()
    assert push(run, "--license", "mine") == 2
    for message in (error, capsys.readouterr().err):
        assert "the Hub rejects the model card" in message
        assert "set hub_license (of a push: --license)" in message
    assert uploads_of(run, license="mine").wait() == 2  # the Hub accepted it at the start
    change(run / "step_00000020", hub_license="mine")
    assert push(run) == 2
    assert "the Hub rejects the model card" in capsys.readouterr().err
    assert not hub.files(REPO, "main")
    assert push(run, "--no_card") == 0


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        ("namespace", "HTTP 403"),
        ("read", "HTTP 403"),
        ("token", "HTTP 401"),
        ("no token", "no token for the Hub"),
        ("typo", "no token has"),
    ],
)
def test_missing_write_access_is_reported_before_the_first_step(hub, run, capsys, monkeypatch, case, answer):
    repo = "strangers/gpt2"
    if case == "read":
        hub.models[repo] = Model()  # exists, but belongs to others
    elif case == "token":
        hub.token = "hf_another"
    elif case == "no token":
        monkeypatch.setenv("HF_TOKEN", "")
    elif case == "typo":
        monkeypatch.setenv("HF_TOKEN", "hf_\u00fc")
    with pytest.raises(UserError, match=f"hub_model_id {repo}: .*{answer}.*HF_TOKEN"):
        access.check_access(repo, False, "mit", "hub_model_id")
    assert push(run, repo=repo) == 2
    assert f"error: --repo {repo}: " in capsys.readouterr().err


def test_a_name_that_the_hub_forbids_is_not_tried_again(hub, run, capsys):
    with pytest.raises(UserError, match=r"hub_model_id acme/x\.git: .*Repo_id"):
        access.check_access("acme/x.git", False, "mit", "hub_model_id")
    assert push(run, repo="acme/x.git") == 2


def test_nothing_goes_to_a_public_repository_against_hub_private_repo(hub, run, caplog, capsys):
    access.check_access(REPO, True, "mit", "hub_model_id")
    assert hub.models[REPO].private
    hub.models[REPO].private = False  # made public on its page during the run
    assert uploads_of(run, private=True).wait() == 2
    assert "acme/gpt2 is public, but hub_private_repo asks for a private repository" in caplog.text
    assert push(run, "--private", repo="acme/mine") == 0
    assert hub.models["acme/mine"].private
    change(run / "step_00000020", hub_private_repo=True)  # a push by hand follows the run's configuration
    assert push(run) == 2
    assert "is public, but hub_private_repo asks" in capsys.readouterr().err
    assert not hub.files(REPO, "main")


def test_an_unreachable_hub_stops_a_push_but_not_a_training_run(hub, run, caplog, capsys, monkeypatch):
    caplog.set_level(logging.INFO)
    config = config_of(run)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://user:s3cret@127.0.0.1:9")
    monkeypatch.setattr(upload, "RETRY_PAUSE_S", 0.1)
    uploads = upload.open_uploads(config, Processes())
    unreachable = "upload     http://127.0.0.1:9 does not answer now (ConnectError: "
    assert unreachable in caplog.text
    assert push(run) == 75
    screen = capsys.readouterr().out
    assert unreachable in screen
    assert "upload     not on the Hub: step-000010, step-000020, main; the same command, without --fresh, up" in screen
    assert screen.count(f"upload     to {REPO} failed: ConnectError: ") == 6
    assert "s3cret" not in screen + caplog.text
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
    assert uploads.wait() == 0
    assert_on_the_hub(hub, run)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert push(run) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    logging.getLogger("recipe").propagate = True
    upload.open_uploads(config, Processes()).start()
    assert "HF_HUB_OFFLINE is set, so this run uploads nothing" in caplog.text


# Pushes by hand


@pytest.mark.parametrize(
    ("directory", "repo", "message"),
    [
        ("run/nowhere", REPO, "no checkpoint there"),
        # The repository comes from the command only: the run may be somebody else's.
        ("run", "", "--repo is empty; name the repository to upload to, ORG/NAME (make push REPO=ORG/NAME)"),
        ("run", "../gpt2", "--repo '../gpt2' must be ORG/NAME"),
    ],
)
def test_mistakes_of_a_push(hub, run, capsys, directory, repo, message):
    change(run / "step_00000020", hub_model_id="strangers/loot")
    assert push(run.parent / directory, repo=repo) == 2
    assert message in capsys.readouterr().err
    assert not hub.requests
