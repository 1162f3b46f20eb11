"""The shipped notebooks: their code runs in a new interpreter, with the test's parameters after their own.

A link to this working tree replaces the clone, the tests' Hub the real one; `pip`, `uv` and `apt-get` are scripts that
install nothing, and the modules of Kaggle, Colab and IPython are fakes.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest

from recipe.checkpoint.format import verify
from recipe.config import parse_config
from recipe.notebooks import session as module
from tests.canary import WANDB_KEY
from tests.conftest import ROOT, TINY, assert_equal_tensors, by_step, environment, ok, run_train, tiny_flags
from tests.hub import REPO, TOKEN, Hub

NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "recipe/notebooks").glob("*.ipynb"))}
CODE = {  # code cells by their id
    name: {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"}
    for name, notebook in NOTEBOOKS.items()
}
# Cells that are identical in all notebooks, so that it is enough to run them once.
SAME = {"hellaswag", "sample", "report"}

# Installs nothing: it records its arguments.
INSTALLER = """#!/bin/sh
echo "${0##*/} $*" >> "${0%/*}/installed"
[ "$1" != venv ] || mkdir -p .venv/bin
"""


def modules(directory: Path, **sources: str) -> dict[str, str]:
    """Writes modules, given by dotted names with __ for a dot; returns the environment variable that finds them."""
    for name, source in sources.items():
        path = directory / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return {"PYTHONPATH": str(directory)}


# Displaying a picture prints its path.
DISPLAY = """
import sys, types
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = types.SimpleNamespace(Image=lambda path, **size: path, display=print)
"""


def execute(name: str, tmp_path: Path, *, env: dict[str, str], skip: set[str] = frozenset(), **parameters) -> dict:
    """Runs a notebook's cells except those in `skip`; returns the output of each by its id, and as "installed" the
    installers' command lines. Fails if a cell raises, or if the notebook lacks one of the `parameters`."""
    bin_dir, checkout = tmp_path / "bin", tmp_path / "checkout"
    bin_dir.mkdir()
    for program in ("pip", "uv", "apt-get"):
        (bin_dir / program).write_text(INSTALLER)
        (bin_dir / program).chmod(0o755)
    checkout.mkdir()
    for part in ("recipe", "eval", "accelerate_configs", "constraints.txt"):
        (checkout / part).symlink_to(ROOT / part)
    parameters |= {
        "REPOSITORY": "not needed where there is a checkout",
        "CHECKOUT": str(checkout),
        "RUNS": str(tmp_path / "runs"),
        "VALIDATION_WINDOWS": 8,
        "HELLASWAG_ROWS": 4,
    }
    cells = {ident: source for ident, source in CODE[name].items() if ident not in skip}
    assert parameters.keys() <= set(re.findall(r"^([A-Z_]+) = ", cells["parameters"], re.MULTILINE))
    cells["clone"] = cells["clone"].replace("/dev/nvidia1", "/dev/null")  # this machine need not have two GPUs
    cells["parameters"] += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    script = DISPLAY + "".join(f"\nprint('>>> {ident}', flush=True)\n{source}\n" for ident, source in cells.items())
    path = os.pathsep.join([str(bin_dir), str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment({"PATH": path}) | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert result.returncode == 0, result.stdout
    printed = dict(re.findall(r"^>>> ([\w-]+)\n(.*?)(?=^>>> |\Z)", result.stdout, re.MULTILINE | re.DOTALL))
    return printed | {"installed": (bin_dir / "installed").read_text()}


def recipe(directory: Path, **fields) -> str:
    """Writes a recipe of these fields, whose run is called shakespeare; returns its path."""
    directory.mkdir()
    (directory / "shakespeare.yaml").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    return str(directory / "shakespeare.yaml")


def check_installed(installed: str, extras: str, checkout: Path) -> None:
    """Checks that uv is pinned, that exactly these extras are installed and exist, and that all versions are this
    project's, except for torch's on a GPU."""
    pattern = (
        r"pip install .*\buv==\d+\.\d+\.\d+\nuv venv .*\nuv pip install .* -e \.\[(.*)\]\n(apt-get .*tcmalloc.*\n)?"
    )
    match = re.fullmatch(pattern, installed)
    assert match[1] == extras
    assert bool(match[2]) == extras.startswith("tpu")
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{extra} = [" in pyproject for extra in extras.split(","))
    if extras.startswith("tpu"):
        assert not (checkout / ".venv" / "constraints.txt").exists()
        return
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = (checkout / ".venv" / "constraints.txt").read_text().splitlines()
    assert constraints == [line for line in pinned if not line.startswith("torch==")]


@pytest.mark.slow
def test_kaggle_t4x2(shards, whole_run, tmp_path):
    """Two processes resume an attached run whose newest checkpoint is damaged, and its wandb run. wandb's key and the
    token that pushes the model are Kaggle secrets."""
    attached_run = shutil.copytree(whole_run[0], tmp_path / "input" / "my-notebook" / "runs" / "shakespeare")
    (attached_run / "step_00000020" / "model.safetensors").write_bytes(b"damaged")
    with Hub(tmp_path / "hub", TOKEN) as hub:
        secrets = f"""
            class UserSecretsClient:
                def get_secret(self, label):
                    return {{"HF_TOKEN": {hub.token!r}, "WANDB_API_KEY": {WANDB_KEY!r}}}[label]
            """
        env = {k: v for k, v in hub.environment.items() if k != "HF_TOKEN"}
        env |= modules(tmp_path / "modules", kaggle_secrets=secrets) | {"WANDB_MODE": "offline"}
        config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
        printed = execute("kaggle-t4x2", tmp_path, env=env, CONFIG=config, EARLIER=str(tmp_path / "input"), HUB=REPO)
        run = tmp_path / "runs" / "shakespeare"
        pushed = hub.files(REPO, "main")
    check_installed(printed["installed"], "trackers", tmp_path / "checkout")
    assert f"resuming   {attached_run}, copied into {run}" in printed["earlier"]
    assert "resume     from step 10" in printed["train"]
    assert "2 processes x" in printed["train"]
    state = json.loads((attached_run / "step_00000010" / "trainer_state.json").read_text())
    assert list((run / "wandb").glob(f"offline-run-*-{state['tracker']['run_id']}"))
    assert by_step(run)[20]["val_loss"] == pytest.approx(whole_run[1][20]["val_loss"], abs=0.05)  # other dropout masks
    results = json.loads((run / "step_00000020" / "results.json").read_text())
    assert (results["perplexity"]["windows"], results["hellaswag"]["rows"]) == (8, 4)
    assert "\nThe king" in printed["sample"]
    pictures = list((run / "report").glob("*.png"))
    assert pictures
    assert all(str(picture) in printed["report"] for picture in pictures)
    assert f"all done; the run is in {run}" in printed["push"]
    assert pushed["model.safetensors"] == (run / "step_00000020" / "model.safetensors").read_bytes()
    assert hub.token not in json.dumps(printed)
    assert WANDB_KEY not in json.dumps(printed)


@pytest.mark.slow
def test_colab(shards, whole_run, tmp_path):
    """A complete run is resumed from Drive and copied back."""
    run_on_drive = tmp_path / "drive" / "MyDrive" / "gpt2-recipe" / "shakespeare"
    shutil.copytree(whole_run[0], run_on_drive)
    drive = "def mount(path): print('mounted', path)"
    userdata = "def get(name): raise LookupError(name)"
    env = modules(tmp_path / "modules", google__colab__drive=drive, google__colab__userdata=userdata)
    config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
    paths = {"DRIVE": str(tmp_path / "drive"), "KEPT": str(run_on_drive.parent)}
    printed = execute("colab", tmp_path, env=env, skip={*SAME, "loss"}, CONFIG=config, HUB=REPO, **paths)
    assert f"mounted {tmp_path / 'drive'}" in printed["drive"]
    assert "nothing can be pushed" in printed["token"]
    assert f"resuming   {run_on_drive}, copied into" in printed["earlier"]
    assert printed["train"].count("training is finished") == 1  # not once an hour
    assert "not pushed: there is no HF_TOKEN" in printed["push"]
    assert sorted(path.name for path in run_on_drive.glob("step_*")) == ["step_00000010", "step_00000020"]


def test_colab_copies_the_run_when_the_cell_is_interrupted(tmp_path):
    run, copy_run = Mock(side_effect=KeyboardInterrupt), Mock()
    variables = {"run": run, "copy_run": copy_run, "Path": Path, "RUN": str(tmp_path), "KEPT": "/drive", "HOURS": 4}
    with pytest.raises(KeyboardInterrupt):
        exec(CODE["colab"]["train"], dict.fromkeys(("TPU", "CONFIG", "TRACKER", "FIELDS"), "") | variables)
    copy_run.assert_called_once_with(tmp_path, Path("/drive") / tmp_path.name)


@pytest.mark.parametrize(
    ("accelerator", "device", "backend", "extras"),
    [("v5e-1", "TPU v5e-1", "cpu", "tpu,trackers"), ("", "neither a GPU nor a TPU", "auto", "trackers")],
)
def test_colab_installs_for_the_device_of_its_runtime(tmp_path, accelerator, device, backend, extras):
    skip = CODE["colab"].keys() - {"parameters", "clone", "import", "install"}
    printed = execute("colab", tmp_path, env={"TPU_ACCELERATOR_TYPE": accelerator}, skip=skip)
    assert printed["install"].startswith(device) or (not accelerator and Path("/dev/nvidia0").exists())
    assert f"--torch-backend {backend} " in printed["installed"]
    check_installed(printed["installed"], extras, tmp_path / "checkout")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_clone_that_fails_does_not_print_its_address(name, tmp_path):
    """Which may hold a token."""
    settings = f"REPOSITORY = 'https://ghp_secret@127.0.0.1:9/me/x'; CHECKOUT = {str(tmp_path / 'x')!r}\n"
    source = settings + CODE[name]["clone"].replace("/dev/nvidia1", "/dev/null")
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert "git's message is above" in result.stderr
    assert "ghp_secret" not in result.stdout + result.stderr.replace(source, "")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_has_no_outputs_and_streams_an_existing_recipe(name):
    cells = [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    assert all(CODE[name][ident] == CODE["kaggle-t4x2"][ident] for ident in SAME)
    config_path = re.search(r'^CONFIG = "(\S+)"', CODE[name]["parameters"], re.MULTILINE)[1]
    assert parse_config(["--config", str(ROOT / config_path)]).data.streaming
    accelerators = {"kaggle-t4x2": "nvidiaTeslaT4", "kaggle-tpu": "tpuV5e8"}  # Kaggle's names
    assert NOTEBOOKS[name]["metadata"].get("kaggle", {}).get("accelerator") == accelerators.get(name)


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(module, "FAILED", {})
    return module


def test_a_training_that_stops_at_max_hours_is_no_failure(session, shards, tmp_path):
    """The launcher replaces the training's exit code, 75, by 1, as it does for a failure."""
    training = run_train(*tiny_flags(shards, tmp_path / "run", max_steps=5_000, save_steps="end", max_hours=2e-4))
    assert training.returncode == 75, training.stderr
    last_line = training.stdout.splitlines()[-1]
    assert last_line.startswith("stopped    before the end; the same command, without --fresh, continues")
    assert len(list((tmp_path / "run").glob("step_*"))) == 1
    (tmp_path / "output").write_text(training.stdout + "a last word\n")
    assert session.run(f"cat {tmp_path / 'output'}; exit 1") is False
    assert session.FAILED == {}


def test_an_interrupt_stops_the_training_and_waits_for_its_checkpoint(session, tmp_path, monkeypatch):
    """Although the shell around the training ends at SIGTERM at once, as a launcher may."""
    training, lines = tmp_path / "training.sh", []
    loop = "for i in $(seq 99); do sleep 0.1; done"
    training.write_text(f"trap 'sleep 0.5; echo saved; exit 75' TERM; echo training; {loop}")

    def write(text: str, *_, **__):
        lines.append(text)
        if text == "training\n":
            raise KeyboardInterrupt  # the notebook's stop button

    monkeypatch.setattr(session, "print", write, raising=False)
    with pytest.raises(KeyboardInterrupt):
        session.run(f"sh {training}; exit 3")
    assert lines[-1] == "saved\n"


def test_a_failed_command_ends_the_notebook_only_if_it_is_essential(session, capsys):
    with pytest.raises(RuntimeError, match="exit code 3; the command's output"):
        session.run("echo why; exit 3")
    with pytest.raises(RuntimeError, match=r"exit code 3; error: no text$"):
        session.run("echo error: no text; echo a traceback; exit 3")
    assert session.run("exit 4", essential=False) is False
    assert session.run("cat -s 1 no-file", essential=False) is False
    assert session.run("cat -s 1 /dev/null || true", essential=False) is True  # repaired
    assert session.summary("runs/mine") == "some commands failed; the run is in runs/mine\nFAILED     exit 4"
    assert "why\n" in capsys.readouterr().out


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_the_run_with_the_newest_checkpoint_is_resumed(session, whole_run, tmp_path, capsys):
    older, newer = (tmp_path / "input" / name / "runs" / "mine" for name in ("older", "newer"))
    shutil.copytree(whole_run[0] / "step_00000010", older / "step_00000010")
    (older / "metrics.jsonl").write_text("older")
    (tmp_path / "input" / "older" / "runs" / "others" / "step_00000500").mkdir(parents=True)
    older.chmod(0o555)
    run = tmp_path / "runs" / "mine"
    session.restore_run(run, tmp_path / "input")
    assert names(run) == ["metrics.jsonl", "step_00000010"]
    session.restore_run(run, tmp_path / "input")  # it is in place already
    printed = capsys.readouterr().out
    assert printed == f"resuming   {older}, copied into {run}\nresuming   {run} from step 10\n"
    shutil.copytree(whole_run[0], newer)
    session.restore_run(run, tmp_path / "input")
    assert {"metrics.jsonl", "step_00000010", "step_00000020"} <= set(names(run))
    session.restore_run(tmp_path / "runs" / "new", tmp_path / "nowhere")
    assert "new run    no checkpoint new/step_... under" in capsys.readouterr().out


def contents(run: Path) -> dict[Path, bytes]:
    files = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    return {path: data for path, data in files.items() if not path.parts[0].startswith(".")}


def test_a_copy_follows_the_run(session, whole_run, tmp_path, monkeypatch):
    run, copy = shutil.copytree(whole_run[0], tmp_path / "run"), tmp_path / "drive" / "run"
    (run / ".saving-step_00000030").mkdir()
    (run / ".saving-step_00000030/model.safetensors").write_text("unfinished")
    os.utime(run / "step_00000010/config.json", (1e9, 1e9))
    session.copy_run(run, copy)
    assert contents(copy) == contents(run)
    assert (copy / "step_00000010/config.json").stat().st_mtime == 1e9
    assert not list(copy.glob(".*"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", None)
        session.copy_run(run, copy)  # nothing has changed
    (copy / "step_00000010" / "results.json").write_text("of another run's checkpoint of this step")
    shutil.rmtree(run / "step_00000020")
    (run / "step_00000010" / "config.json").write_text("another size")
    weights = run / "step_00000010" / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))
    os.utime(weights, (later := weights.stat().st_mtime + 10, later))
    session.copy_run(run, copy)
    assert contents(copy) == contents(run)
    restored = tmp_path / "next session"
    session.copy_run(copy, restored)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", None)
        session.copy_run(restored, copy)  # an interrupt would damage a checkpoint that is copied back
    assert names(copy) == [name for name in names(run) if not name.startswith(".")]
    (run / "environment").symlink_to("/proc/self/environ")
    session.copy_run(run, copy)
    assert not (copy / "environment").exists()


def test_no_run_is_lost_to_another_one_of_its_name(session, whole_run, tmp_path, capsys):
    """--fresh starts one, which has fewer steps at first. Drive's copy of the earlier run may be the only one."""
    drive, run = shutil.copytree(whole_run[0], tmp_path / "drive" / "mine"), tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text("no checkpoint yet")
    session.copy_run(run, drive)
    assert contents(drive) == contents(whole_run[0])
    checkpoint = shutil.copytree(whole_run[0] / "step_00000010", run / "step_00000002")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    state["tracker"]["run_id"] = "fresh"
    (checkpoint / "trainer_state.json").write_text(json.dumps(state))
    session.restore_run(run, tmp_path / "drive")
    assert f"resuming   {run} from step 2\n" in capsys.readouterr().out
    session.copy_run(run, drive)
    assert (contents(drive), contents(drive.with_name("mine.old-1"))) == (contents(run), contents(whole_run[0]))


def test_a_run_resumes_from_an_interrupted_copy(session, shards, whole_run, tmp_path, monkeypatch):
    """The weights of the newest checkpoint are incomplete, so that training continues from the one before, unless the
    copy is finished first."""
    run, copy, copyfile = shutil.copytree(whole_run[0], tmp_path / "run"), tmp_path / "drive" / "run", shutil.copyfile
    newest = (run / "step_00000020").rename(tmp_path / "newest")
    session.copy_run(run, copy)
    newest.rename(run / "step_00000020")

    def copy_some(source: Path, target: Path) -> None:
        copyfile(source, target)
        if source.name == "model.safetensors":
            os.truncate(target, 1000)
            raise KeyboardInterrupt  # the session ends

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copy_some)
        with pytest.raises(KeyboardInterrupt):
            session.copy_run(run, copy)
    restored = shutil.copytree(copy, tmp_path / "restored" / "run")
    session.restore_run(restored, tmp_path)  # the same cell once more
    assert not verify(restored / "step_00000020")
    training = ok(run_train(*tiny_flags(shards, copy, dropout=0.1)))
    assert "resume     from step 10" in training.stdout
    assert_equal_tensors(copy / "step_00000020", whole_run[0] / "step_00000020")
