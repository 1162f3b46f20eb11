"""The notebooks that ship: their own code, run in a new interpreter, with the test's parameters after theirs.

The outside world is replaced by a clone of this working tree, the tests' Hub, programs named `pip` and `uv` that
install nothing, and modules with the names of Kaggle's, Colab's and IPython's.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, by_step, environment, flags
from tests.hub import REPO, TOKEN, Hub

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "recipe" / "notebooks").glob("*.ipynb"))}
KEY = "c0ffee" * 6 + "c0de"  # of wandb
EXTRAS = re.compile(r" -e '?\.(?:\[([\w,]+)\])?")

# pip and uv: nothing is installed, there is no network. The log of what they were asked for is checked.
INSTALLER = f"""\
#!{sys.executable}
import sys
from pathlib import Path

with open(Path(__file__).with_name("installed"), "a") as log:
    print(Path(__file__).name, *sys.argv[1:], file=log)
if sys.argv[1] == "venv":
    Path(sys.argv[-1], "bin").mkdir(parents=True)
"""


def read(name: str) -> dict:
    return json.loads(NOTEBOOKS[name].read_text())


def code(name: str) -> dict[str, str]:
    """A notebook's code cells, by their id."""
    return {cell["id"]: "".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "code"}


def the_clone(at: Path) -> Path:
    """A git repository of those parts of this working tree that the notebooks use."""
    at.mkdir()
    unwanted = shutil.ignore_patterns("__pycache__", "results")
    for name in ("recipe", "eval", "accelerate_configs"):
        shutil.copytree(ROOT / name, at / name, ignore=unwanted)
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, at / name)
    git = ["git", "-C", str(at), "-c", "user.name=tests", "-c", "user.email=tests@localhost"]
    for words in (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "The working tree"]):
        subprocess.run([*git, *words], check=True)
    return at


def modules(at: Path, **sources: str) -> Path:
    """Modules for a notebook's Python, by their dotted names with __ for a dot."""
    for name, source in sources.items():
        path = at / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return at


# A picture that is shown leaves its path.
DISPLAY = """
import sys, types
sys.modules["IPython"] = types.ModuleType("IPython")
sys.modules["IPython.display"] = types.SimpleNamespace(Image=lambda path, **size: path, display=print)
"""


def execute(name: str, tmp_path: Path, *, env: dict[str, str], only: set[str] | None = None, **parameters) -> dict:
    """Runs a notebook's cells (or `only` some); returns what each printed and showed, by its id, and "installed", what
    pip and uv were asked for. A cell that raises fails the test, and so does a parameter that the notebook does not
    have."""
    parameters |= {
        "REPOSITORY": str(the_clone(tmp_path / "repository")),
        "CHECKOUT": str(tmp_path / "checkout"),
        "RUNS": str(tmp_path / "runs"),
        "VALIDATION_WINDOWS": 8,
        "HELLASWAG_ROWS": 4,
    }
    cells = code(name)
    assert parameters.keys() <= set(re.findall(r"^([A-Z_]+) = ", cells["parameters"], re.MULTILINE))
    cells["parameters"] += "".join(f"\n{key} = {value!r}" for key, value in parameters.items())
    before = list(cells)[: list(cells).index("parameters") + 1]
    wanted = {k: v for k, v in cells.items() if only is None or k in {*only, *before}}
    script = DISPLAY + "".join(f"\nprint('>>> {ident}', flush=True)\n{source}\n" for ident, source in wanted.items())
    bin = tmp_path / "bin"
    bin.mkdir()
    for program in ("pip", "uv"):
        (bin / program).write_text(INSTALLER)
        (bin / program).chmod(0o755)
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), os.environ["PATH"]])
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
    return printed | {"installed": (bin / "installed").read_text()}


def recipe(at: Path, **fields) -> str:
    """A recipe with the name of the run that it resumes."""
    at.mkdir()
    (at / "shakespeare.yaml").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    return str(at / "shakespeare.yaml")


def check_installed(installed: str, extras: set[str], checkout: Path) -> None:
    """The extras are the wanted ones and exist; the constraints are this project's, except torch's."""
    asked = set(filter(None, (EXTRAS.search(installed.splitlines()[2])[1] or "").split(",")))
    known = (checkout / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert asked == extras <= set(re.findall(r"^(\w+) = ", known, re.MULTILINE))
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = (checkout / ".venv" / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line not in constraints] == [line for line in pinned if "torch==" in line]


@pytest.mark.slow
def test_two_t4s(shards, whole_run, tmp_path):
    """Two processes resume an attached run, whose newer checkpoint is damaged; a token of Kaggle's secrets pushes the
    model."""
    earlier = shutil.copytree(whole_run[0], tmp_path / "input" / "my-notebook" / "runs" / "shakespeare")
    (earlier / "step_00000020" / "model.safetensors").write_bytes(b"damaged")
    with Hub(tmp_path / "hub", TOKEN) as hub:
        secrets = f"""
            class UserSecretsClient:
                def get_secret(self, label):
                    return {{"HF_TOKEN": {hub.token!r}, "WANDB_API_KEY": {KEY!r}}}[label]
            """
        env = {k: v for k, v in hub.environment.items() if k != "HF_TOKEN"}
        env |= {"PYTHONPATH": str(modules(tmp_path / "modules", kaggle_secrets=secrets))}
        config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
        printed = execute("kaggle-t4x2", tmp_path, env=env, CONFIG=config, EARLIER=str(tmp_path / "input"), HUB=REPO)
        run = tmp_path / "runs" / "shakespeare"
        pushed = hub.files(REPO, "main")
    check_installed(printed["installed"], {"trackers"}, tmp_path / "checkout")
    assert printed["token"] == "the Hub's token is there\nwandb's key is there\n"
    assert f"resuming   {earlier}, copied into {run}" in printed["earlier"]
    assert "step_00000020: model.safetensors has 7 bytes" in printed["train"]
    assert "resume     from step 10" in printed["train"]
    assert "2 processes x" in printed["train"]
    assert by_step(run)[20]["val_loss"] == pytest.approx(whole_run[1][20]["val_loss"], abs=0.05)  # other dropout masks
    assert f"all done; the run is in {run}" in printed["push"]
    results = json.loads((run / "step_00000020" / "results.json").read_text())
    assert (results["perplexity"]["windows"], results["hellaswag"]["rows"], "sample" in results) == (8, 4, True)
    pictures = list((run / "report").glob("*.png"))
    assert len(pictures) > 1
    assert all(str(picture) in printed["report"] for picture in pictures)
    assert pushed["model.safetensors"] == (run / "step_00000020" / "model.safetensors").read_bytes()
    assert "HellaSwag" in pushed["README.md"].decode()
    assert hub.token not in json.dumps(printed)
    assert KEY not in json.dumps(printed)


@pytest.mark.slow
def test_colab(shards, whole_run, tmp_path):
    """A complete run is resumed from Drive and copied back. Its evaluation cells are, to the letter, the T4s'."""
    kept, name = tmp_path / "drive" / "MyDrive" / "gpt2-recipe", "shakespeare"
    shutil.copytree(whole_run[0], kept / name)
    drive = "def mount(path): print('mounted', path)"
    userdata = "def get(name): raise LookupError(name)"
    env = {
        "PYTHONPATH": str(modules(tmp_path / "modules", google__colab__drive=drive, google__colab__userdata=userdata))
    }
    config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
    same = {"loss", "hellaswag", "sample", "report"}
    theirs, ours = code("kaggle-t4x2"), code("colab")
    assert {ident for ident in ours if theirs.get(ident) == ours[ident]} >= {*same, "install", "push", "token"}
    assert theirs.keys() - ours.keys() == set()
    places = {"DRIVE": str(tmp_path / "drive"), "KEPT": str(kept)}
    printed = execute("colab", tmp_path, env=env, only=ours.keys() - same, CONFIG=config, HUB=REPO, **places)
    assert f"mounted {tmp_path / 'drive'}" in printed["drive"]
    assert "nothing can be pushed" in printed["token"]
    assert "no WANDB_API_KEY" in printed["token"]
    assert f"resuming   {kept / name}, copied into" in printed["earlier"]
    assert printed["train"].count("holds the whole run") == 1  # and not an hour later again
    assert "not pushed: there is no HF_TOKEN" in printed["push"]
    assert sorted(path.name for path in (kept / name).glob("step_*")) == ["step_00000010", "step_00000020"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_valid_clean_and_names_what_exists(name):
    from recipe.config import parse_config

    notebook = read(name)
    assert notebook["nbformat"] == 4
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    text = "\n".join(code(name).values())
    for path in re.findall(r"\b(?:recipe|eval|accelerate_configs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m (recipe[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file() or (ROOT / module.replace(".", "/")).is_dir(), module
    config = parse_config(["--config", str(ROOT / re.search(r'^CONFIG = "(\S+)"', text, re.MULTILINE)[1])])
    assert config.data.streaming  # no data are prepared beforehand
    assert config.run.save_total_limit >= 2
    assert "save_total_limit" not in text


@pytest.fixture
def session(monkeypatch):
    from recipe.notebooks import session

    monkeypatch.setattr(session, "FAILED", [])
    return session


def test_a_training_that_stops_at_its_hours_is_no_failure(session, shards, tmp_path, capfd):
    """The launcher makes 1 of the training's exit code 75, which it makes of a failure too."""
    fields = TINY | {"dataset_name": shards, "output_dir": tmp_path / "run", "max_steps": 5_000, "max_hours": 2e-3}
    train = " ".join([sys.executable, "recipe/train.py", *map(shlex.quote, flags(**fields))])
    assert session.run(f"cd {ROOT} && {{ {train} || exit 1; }}") is False
    lines = capfd.readouterr().out.splitlines()
    assert lines[-1].startswith("stopped    before the end; the same command, without --fresh, continues")
    assert session.FAILED == []


def test_an_interrupted_command_is_told_to_stop_and_waited_for(session, tmp_path, monkeypatch):
    """The shell around the training is a launcher that ends at once when it is told to; a training takes a while to
    save."""
    training = "trap 'sleep 0.5; echo saved; exit 75' TERM; echo training; for i in $(seq 100); do sleep 0.1; done"
    (tmp_path / "training.sh").write_text(training)
    lines, heard = [], []

    def write(text: str, *_, **__):
        lines.append(text)
        if text == "training\n" and not heard:
            heard.append(True)
            raise KeyboardInterrupt  # as the stop button does wherever the cell is

    monkeypatch.setattr(session, "print", write, raising=False)
    with pytest.raises(KeyboardInterrupt):
        session.run(f"sh {tmp_path}/training.sh; exit 3")
    assert lines[-1] == "saved\n"


def test_a_command_that_fails_ends_the_notebook_only_where_it_is_essential(session, capsys):
    with pytest.raises(RuntimeError, match="exit code 3"):
        session.run("echo why; exit 3")
    assert session.run("exit 4", essential=False) is False
    assert session.run("true", essential=False) is True
    assert session.summary("runs/mine") == "not everything worked; the run is in runs/mine\nFAILED     exit 4"
    assert "why\n" in capsys.readouterr().out


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.iterdir())


def test_the_newest_of_several_earlier_outputs_is_taken_up(session, whole_run, tmp_path, capsys):
    older, newer = (tmp_path / "input" / name / "runs" / "mine" for name in ("older", "newer"))
    shutil.copytree(whole_run[0] / "step_00000010", older / "step_00000010")
    (older / "metrics.jsonl").write_text("older")
    older.chmod(0o555)
    run = tmp_path / "runs" / "mine"
    session.take_up(run, tmp_path / "input")
    assert names(run) == ["metrics.jsonl", "step_00000010"]
    session.take_up(run, tmp_path / "input")  # it is here already
    assert capsys.readouterr().out.splitlines() == [
        f"resuming   {older}, copied into {run}",
        f"resuming   {run} from step 10",
    ]
    shutil.copytree(whole_run[0], newer)
    session.take_up(run, tmp_path / "input")
    assert {"metrics.jsonl", "step_00000010", "step_00000020"} <= set(names(run))
    session.take_up(tmp_path / "runs" / "new", tmp_path / "nowhere")
    assert "new run    nothing of it under" in capsys.readouterr().out


def test_a_copy_follows_the_run_and_never_holds_half_a_checkpoint(session, whole_run, tmp_path, monkeypatch):
    run, kept = tmp_path / "run", tmp_path / "drive" / "run"
    shutil.copytree(whole_run[0], run)
    session.copy_run(run, kept)
    assert names(kept) == [name for name in names(run) if not name.startswith(".")]
    (run / "step_00000020").rename(run / "step_00000030")
    shutil.rmtree(run / "step_00000010")
    with monkeypatch.context() as patch:  # the session ends in the middle of the copy
        patch.setattr(session.Path, "rename", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.copy_run(run, kept)
    assert {"step_00000010", "step_00000020"} == {path.name for path in kept.glob("step_*")}
    for manifest in ("another run's of this step", "again another's"):
        (run / "step_00000030" / "manifest.json").write_text(manifest)
        session.copy_run(run, kept)
        assert [path.name for path in kept.glob("step_*")] == ["step_00000030"]
        assert (kept / "step_00000030" / "manifest.json").read_text() == manifest
