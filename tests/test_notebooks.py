"""The notebooks that ship, executed as they are: only the cell of parameters is followed by one with the test's own.

What stands for the world outside: a clone of this working tree, a Hub of the tests, programs named `pip` and `uv` that
install nothing, and modules named as those of Kaggle and Colab.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, by_step, environment
from tests.hub.push_server import PushHub
from tests.hub.upload_faults import REPO

nbformat = pytest.importorskip("nbformat", reason="needs nbclient (pip install -e '.[dev]')")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient (pip install -e '.[dev]')")
pytest.importorskip("ipykernel", reason="needs ipykernel (pip install -e '.[dev]')")

NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "recipe" / "notebooks").glob("*.ipynb"))}
BIN = Path(sys.executable).parent
EXTRAS = re.compile(r" -e '?\.(?:\[([\w,]+)\])?")

# pip and uv: nothing is installed, there is no network. What they were asked for is written down, and checked.
INSTALLER = f"""\
#!{sys.executable}
import sys
from pathlib import Path

with open(Path(__file__).with_name("installed"), "a") as log:
    print(Path(__file__).name, *sys.argv[1:], file=log)
if sys.argv[1] == "venv":
    Path(sys.argv[-1], "bin").mkdir(parents=True)
"""


def read(name: str):
    return nbformat.read(NOTEBOOKS[name], as_version=4)


def code(notebook) -> dict[str, str]:
    """Its cells of code, by their id."""
    return {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}


def the_clone(at: Path) -> Path:
    """A git repository of this working tree, as far as the notebooks use it."""
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


def programs(at: Path) -> Path:
    at.mkdir()
    for name in ("pip", "uv"):
        (at / name).write_text(INSTALLER)
        (at / name).chmod(0o755)
    return at


def modules(at: Path, **sources: str) -> Path:
    """Modules that a notebook's Python finds, by their dotted names with __ for a dot."""
    for name, source in sources.items():
        path = at / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return at


def execute(name: str, tmp_path: Path, *, env: dict[str, str], only: set[str] | None = None, **parameters) -> dict:
    """Runs a notebook's cells (`only` those); returns what each printed and showed, by its id. A cell that raises, and
    a parameter that the notebook has not, fail the test."""
    notebook = read(name)
    at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    parameters |= {
        "REPOSITORY": str(the_clone(tmp_path / "repository")),
        "CHECKOUT": str(tmp_path / "checkout"),
        "RUNS": str(tmp_path / "runs"),
        "VALIDATION_WINDOWS": 8,
        "HELLASWAG_ROWS": 4,
    }
    names = set(re.findall(r"^([A-Z_]+) = ", notebook.cells[at].source, re.MULTILINE))
    assert parameters.keys() <= names
    lines = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    if only is not None:
        notebook.cells = [cell for i, cell in enumerate(notebook.cells) if i <= at or cell.id in only]
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    bin = programs(tmp_path / "bin")
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), str(BIN), os.environ["PATH"]])
    own = {"PATH": path, "JUPYTER_PREFER_ENV_PATH": "1", "IPYTHONDIR": str(tmp_path / "ipython")}
    env = environment(own) | env
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=env)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    printed = {ident: "".join(o.get("text", "") for o in found) for ident, found in outputs.items()}
    printed["pictures"] = [o for found in outputs.values() for o in found if "image/png" in o.get("data", {})]
    printed["installed"] = (bin / "installed").read_text().splitlines() if (bin / "installed").exists() else []
    return printed


def recipe(at: Path, **fields) -> str:
    """A recipe named as the run is that it goes on with."""
    at.mkdir()
    (at / "shakespeare.yaml").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    return str(at / "shakespeare.yaml")


def check_installed(lines: list[str], extras: set[str], checkout: Path) -> None:
    """The extras asked for are those wanted, which pyproject.toml has; the constraints are this project's, but for
    torch's; the options are uv's, where it is there."""
    assert [line.split()[:2] for line in lines] == [["pip", "install"], ["uv", "venv"], ["uv", "pip"]]
    asked = set(filter(None, (EXTRAS.search(lines[2])[1] or "").split(",")))
    known = (checkout / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    assert asked == extras <= set(re.findall(r"^(\w+) = ", known, re.MULTILINE))
    assert lines[1].split()[-1] == re.search(r"--python (\S+)", lines[2])[1] == ".venv"
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = (checkout / re.search(r" -c (\S+)", lines[2])[1]).read_text().splitlines()
    assert [line for line in pinned if line not in constraints] == [line for line in pinned if "torch==" in line]
    if uv := shutil.which("uv", path=f"{BIN}:{os.environ['PATH']}"):
        for line, command in ((lines[1], ["venv"]), (lines[2], ["pip", "install"])):
            help = subprocess.run([uv, *command, "--help"], capture_output=True, text=True, check=True).stdout
            for option in re.findall(r" (--?[a-z-]+)", line):
                assert re.search(rf"^ +(-\w, )?{option}\b", help, re.MULTILINE), (
                    f"uv {' '.join(command)} has no {option}"
                )


def check_evaluated(printed: dict, run: Path, step: int) -> None:
    """The training, the evaluations and the report left what they leave, and nothing failed."""
    assert f"all is done; the run is in {run}" in printed["push"]
    assert "FAILED" not in "".join(text for text in printed.values() if isinstance(text, str))
    checkpoint = run / f"step_{step:08d}"
    assert sorted(run.glob("step_*")) == [checkpoint]  # save_total_limit 1
    results = json.loads((checkpoint / "results.json").read_text())
    assert {"perplexity", "hellaswag", "sample"} <= results.keys()
    assert results["perplexity"]["windows"] == 8
    assert results["hellaswag"]["rows"] == 4
    assert len(printed["pictures"]) == len(list((run / "report").glob("*.png"))) > 3


@pytest.fixture
def earlier(whole_run, tmp_path) -> Path:
    """The output of a session that ended after 10 of the run's 20 steps, attached as an input."""
    run = tmp_path / "input" / "my-notebook" / "runs" / "shakespeare"
    run.mkdir(parents=True)
    shutil.copytree(whole_run[0] / "step_00000010", run / "step_00000010")
    (run / "metrics.jsonl").write_text("".join(json.dumps(v) + "\n" for k, v in whole_run[1].items() if k <= 10))
    return run


def test_two_t4s(shards, whole_run, earlier, tmp_path):
    """Two processes go on with an attached run, whose model is pushed with a token of Kaggle's secrets."""
    with PushHub(tmp_path / "hub") as hub:
        secrets = f"""
            class UserSecretsClient:
                def get_secret(self, label):
                    return {{"HF_TOKEN": {hub.token!r}}}[label]
            """
        env = {k: v for k, v in hub.environment.items() if k != "HF_TOKEN"}
        env |= {"PYTHONPATH": str(modules(tmp_path / "modules", kaggle_secrets=secrets))}
        config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
        printed = execute("kaggle-t4x2", tmp_path, env=env, CONFIG=config, EARLIER=str(tmp_path / "input"), HUB=REPO)
        run = tmp_path / "runs" / "shakespeare"
        pushed = hub.files(REPO, "main")
    check_installed(printed["installed"], set(), tmp_path / "checkout")
    assert "the Hub's token is there" in printed["token"]
    assert f"going on   from step 10 of {earlier}" in printed["earlier"]
    assert "resume     from step 10" in printed["train"]
    assert "2 processes x" in printed["train"]
    assert by_step(run)[20]["val_loss"] == pytest.approx(whole_run[1][20]["val_loss"], abs=0.05)  # other dropout masks
    check_evaluated(printed, run, 20)
    assert pushed["model.safetensors"] == (run / "step_00000020" / "model.safetensors").read_bytes()
    assert "HellaSwag" in pushed["README.md"].decode()
    assert hub.token not in json.dumps(printed, default=str)


def test_colab(shards, whole_run, tmp_path):
    """A complete run is taken up from Drive and copied back. Its evaluation is, to the letter, that of the T4s."""
    kept, name = tmp_path / "drive" / "MyDrive" / "gpt2-recipe", "shakespeare"
    shutil.copytree(whole_run[0], kept / name)
    (kept / name / ".lock").unlink(missing_ok=True)
    drive = "def mount(path): print('mounted', path)"
    userdata = "def get(name): raise LookupError(name)"
    env = {
        "PYTHONPATH": str(modules(tmp_path / "modules", google__colab__drive=drive, google__colab__userdata=userdata))
    }
    config = recipe(tmp_path / "configs", **TINY, dataset_name=shards, dropout=0.1)
    same = {"loss", "hellaswag", "sample", "report"}
    theirs, ours = code(read("kaggle-t4x2")), code(read("colab"))
    assert {ident for ident in ours if theirs.get(ident) == ours[ident]} >= {*same, "install", "push", "token"}
    assert theirs.keys() - ours.keys() == set()
    printed = execute(
        "colab",
        tmp_path,
        env=env,
        only=ours.keys() - same,
        CONFIG=config,
        DRIVE=str(tmp_path / "drive"),
        KEPT=str(kept),
        HUB=REPO,
    )
    assert f"mounted {tmp_path / 'drive'}" in printed["drive"]
    assert "nothing can be pushed" in printed["token"]
    assert f"going on   from step 20 of {kept / name}" in printed["earlier"]
    assert printed["train"].count("holds the whole run") == 1  # and not an hour later again
    assert f"not pushed: no token to push to {REPO} with" in printed["push"]
    assert [path.name for path in (kept / name).glob("step_*")] == ["step_00000020"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_what_a_notebook_names_exists(name):
    notebook = read(name)
    nbformat.validate(notebook)
    text = "\n".join(cell.source for cell in notebook.cells)
    for path in re.findall(r"\b(?:recipe|eval|accelerate_configs)/[\w./-]*\w", text):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"python -m ([\w.]+)", "\n".join(code(notebook).values())):
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_what_a_run_of_it_leaves(name):
    cells = [cell for cell in read(name).cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[]] * len(cells)
    assert [cell.execution_count for cell in cells] == [None] * len(cells)


@pytest.fixture
def session(monkeypatch):
    from recipe.notebooks import session

    monkeypatch.setattr(session, "FAILED", [])
    monkeypatch.setattr(session, "_GRACE", 20)
    return session


# The shell around it is a launcher that ends at once when it is told to; a training takes a while to save.
TRAINING = "trap 'sleep 0.5; echo saved; exit 75' TERM; echo training; for i in $(seq 100); do sleep 0.1; done"


@pytest.fixture
def launch(tmp_path) -> str:
    (tmp_path / "training.sh").write_text(TRAINING)
    return f"sh {tmp_path}/training.sh; exit 3"


def test_a_command_is_told_to_stop_in_time_and_waited_for(session, launch, capsys):
    assert session.run(launch, hours=1 / 3600) is False
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "training"
    assert lines[-2:] == ["saved", "stopped after 0.000278 hours, as it was told to"]
    assert session.FAILED == []


def test_a_command_that_does_not_stop_is_killed(session, monkeypatch, capsys):
    monkeypatch.setattr(session, "_GRACE", 0.3)
    begun = time.monotonic()
    assert session.run("trap '' TERM; for i in $(seq 100); do sleep 0.1; done", hours=0.2 / 3600) is False
    assert 0.4 < time.monotonic() - begun < 9


def test_an_interrupted_command_is_told_to_stop_and_waited_for(session, launch, monkeypatch):
    lines, heard = [], []

    def write(text: str, *_, **__):
        lines.append(text)
        if text == "training\n" and not heard:
            heard.append(True)
            raise KeyboardInterrupt  # as the stop button does wherever the cell is

    monkeypatch.setattr(session, "print", write, raising=False)
    with pytest.raises(KeyboardInterrupt):
        session.run(launch)
    assert lines[-1] == "saved\n"


def test_a_command_that_fails_ends_the_notebook_only_where_it_is_essential(session, capsys):
    with pytest.raises(RuntimeError, match="exit code 3"):
        session.run("echo why; exit 3")
    assert session.run("exit 4", essential=False) is False
    assert session.run("true", essential=False) is True
    assert session.summary("runs/mine") == "not all is done; the run is in runs/mine\nFAILED     exit 4"
    assert "why\n" in capsys.readouterr().out


def test_the_newest_of_several_earlier_outputs_is_taken(session, tmp_path, capsys):
    for output, step in (("one", 100), ("two", 300), ("three", 200)):
        checkpoint = tmp_path / "input" / output / "runs" / "mine" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_text(output)
        (checkpoint.parent / "metrics.jsonl").write_text(output)
        checkpoint.chmod(0o555)
    (tmp_path / "input" / "two" / "runs" / "mine" / "step_00000400.tmp").mkdir()  # was never finished
    (tmp_path / "input" / "two" / "runs" / "others" / "step_00000500").mkdir(parents=True)
    run = tmp_path / "runs" / "mine"
    assert session.take_up(run, tmp_path / "input") is True
    assert sorted(str(p.relative_to(run)) for p in run.rglob("*")) == [
        "metrics.jsonl",
        "step_00000300",
        "step_00000300/model.safetensors",
    ]
    assert (run / "step_00000300").stat().st_mode & 0o200
    assert (run / "metrics.jsonl").read_text() == (run / "step_00000300" / "model.safetensors").read_text() == "two"
    assert session.take_up(run, tmp_path / "input") is False  # it is here already
    assert "going on   from step 300" in capsys.readouterr().out
    (run / "step_00000300").rename(run / "step_00000250")  # a session's files that are older than the input
    assert session.take_up(run, tmp_path / "input") is True
    assert [path.name for path in run.glob("step_*")] == ["step_00000300"]
    assert session.take_up(tmp_path / "runs" / "new", tmp_path / "nowhere") is False


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_own_recipe_needs_no_data_prepared_before(name):
    from recipe.config import parse_config

    cells = code(read(name))
    config = re.search(r'^CONFIG = "(\S+)"', "\n".join(cells.values()), re.MULTILINE)[1]
    assert parse_config(["--config", str(ROOT / config)]).data.streaming
