"""Every command of README.md and docs/ runs.

The blocks of a page go through bash as they are, in a directory like a clone in which a model has been trained, where
`python` and `accelerate` only note their arguments. Those commands are then run, the long ones shortened.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from huggingface_hub import JobHardware

from eval.hellaswag import load_rows
from recipe.best import parse_request
from recipe.monitor.metrics import read_metrics
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, TINY, environment, flags, ok
from tests.eval.conftest import local_tasks

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# tests/hub/test_downstream.py runs those of elsewhere.md, which need other programs.
BLOCKS = re.findall(
    r"```bash\n(.*?)```", "\n".join(text for page, text in PAGES.items() if page.name != "elsewhere.md"), re.DOTALL
)
LAUNCHES = re.findall(r"\| `((?:python|accelerate|sbatch) [^`]+)`", PAGES[ROOT / "README.md"])  # in its table
JOB = re.search(r"^hf jobs run .*", PAGES[ROOT / "docs" / "clusters.md"], re.MULTILINE)[0]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)[1].split())

NOTE = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; echo; } >> "$NOTES"
"""

# What makes a program quick and independent of a network; of an option that stands twice, the last counts.
SHORTER = {
    "eval.hellaswag": ["--limit", "4"],
    "eval.compare": ["--limit", "4"],
    "eval.harness": ["--limit", "4", "--include_path", "tasks"],  # those on rows of this machine
    "recipe.data.prepare": ["--train_text", "texts.jsonl", "--dataset_name", "data/texts", "--val_documents", "3"],
    "recipe.hub.export push": ["--help"],  # tests/hub runs it
    "recipe.audit --repo": ["--help"],  # the same
    "benchmarks": ["--help"],  # tests/benchmarks runs the others
}


def remote() -> list[str]:
    """What a container, Hugging Face Jobs and SkyPilot run in a clone."""
    sky = yaml.safe_load((ROOT / "docs" / "skypilot.yaml").read_text())
    container = json.loads(re.search(r"^CMD (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1])
    others = [re.search(r" gpt2-recipe (make .*)", block)[1] for block in BLOCKS if "docker run" in block]
    _, job = shlex.split(JOB)[-1].split(" && cd gpt2-recipe && ")
    return [shlex.join(container), *others, job, sky["setup"], sky["run"]]


def by_hand() -> dict[str, str]:
    """Variables of a command that is typed, and not started by `make test`."""
    return {k: v for k, v in environment().items() if not k.startswith("MAKE") and k != "ARGS"}


@pytest.fixture(scope="module")
def clone(tmp_path_factory, whole_run) -> Path:
    """What commands expect to find: the code, the environments of make, a run and the data that the pages name."""
    at = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, at)
    for name in ("recipe", "eval", "benchmarks", "accelerate_configs", "ds_configs"):
        (at / name).symlink_to(ROOT / name)
    shutil.copytree(whole_run[0], at / "runs" / "shakespeare")
    (at / "openai-community").mkdir()
    (at / "openai-community" / "gpt2").symlink_to(at / "runs" / "shakespeare")
    (at / "data" / "openwebtext").mkdir(parents=True)  # in nanoGPT's format, enough for a step of GPT-2's batch
    for name, tokens in {"train": 600_000, "val": 6_000}.items():
        (at / "data" / "openwebtext" / f"{name}.bin").write_bytes(b"\1\xc0" * tokens)  # of GPT-2's vocabulary
    lines = SHAKESPEARE.read_text().split("\n\n")[:400]
    (at / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    if find_spec("lm_eval"):
        rows = {"lambada_openai": [{"text": line} for line in lines], "wikitext": [{"page": line} for line in lines]}
        local_tasks(at / "tasks", hellaswag=load_rows(4), **rows)
    return at


@pytest.fixture(scope="module")
def started(clone) -> list[list[str]]:
    """What the commands start, `python` or `accelerate` first; each is there once."""
    fakes = clone / "fakes"
    for folder in (".venv/bin", ".venv-tpu/bin", "fakes"):
        (clone / folder).mkdir(parents=True)
        for name in ("python", "accelerate"):
            (clone / folder / name).write_text(NOTE)
            (clone / folder / name).chmod(0o755)
    (clone / "gpt2-recipe").symlink_to(".")
    for name in ("git", "docker", "gcloud", "hf", "sbatch", "sky"):  # tests/engine/test_nodes.py runs sbatch's script
        (fakes / name).symlink_to("/bin/true")
    for folder in (".venv", ".venv-tpu"):
        (clone / folder / "constraints.txt").touch()
        for kind in ("", "-deepspeed", "-dev", "-eval", "-trackers"):
            (clone / folder / f"installed{kind}").touch()
    (clone / ".venv" / "bin" / "activate").touch()
    variables = by_hand() | {"PATH": f"{fakes}:{os.environ['PATH']}", "NOTES": str(clone / "notes")}
    script = "\n".join([*BLOCKS, *LAUNCHES, *remote()])
    assert {"make train", "make test"} <= {line.split("  ")[0] for line in script.splitlines()}
    subprocess.run(["bash", "-ec", script], cwd=clone, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=300)
    return [line.split("\0")[:-1] for line in dict.fromkeys((clone / "notes").read_text().splitlines())]


def test_commands_that_train_print_their_plan(clone, started):
    """The launchers' options are checked; tests/engine starts the launchers themselves."""
    trained = set()
    for program, *words in started:
        if "recipe/preflight.py" in words:
            continue  # tests/test_preflight.py runs it
        if "recipe/best.py" in words:
            parse_request(words[words.index("recipe/best.py") + 1 :])  # tests/test_best.py runs it
            continue
        if "recipe/train.py" not in words:
            assert program == "python", words
            continue
        if program == "accelerate":
            assert words.pop(0) == "launch"
            launched = launch_command_parser().parse_args(words)
            assert (clone / launched.config_file).is_file()
            _validate_launch_command(launched)
        trained.add(tuple(words[words.index("recipe/train.py") + 1 :]))
    assert len(trained) > 20
    for words in trained:
        result = programs.run("recipe/train.py", *words, "--dry_run", "--fresh", cwd=clone)
        assert result.returncode == 0, (words, result.stderr)
        assert ("usage:" if "--help" in words else "sequences") in result.stdout, words


def test_hugging_face_jobs_takes_the_job():
    hf, *words = shlex.split(JOB.replace("hf jobs run", "hf jobs run --dry-run", 1))
    command = [Path(sys.executable).with_name(hf), *words]
    result = subprocess.run(command, env=by_hand(), capture_output=True, text=True, check=True, timeout=120)
    job = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  "))
    assert job["image"] == "python:3.12"  # or an unknown option was taken for it
    assert job["flavor"] in list(JobHardware)


@pytest.mark.slow
def test_all_other_commands_run(clone, started):
    # An empty word is what the recorded `python -m recipe.config` has printed: the run's directory.
    others = [
        [word for word in words if word]
        for _, *words in started
        if not {"recipe/train.py", "recipe/preflight.py", "recipe/best.py"} & {*words} and words[:2] != ["-m", "pytest"]
    ]
    assert len(others) > 20
    for words in others:
        line = " ".join(words).removeprefix("-m ")
        shorter = next((options for program, options in SHORTER.items() if line.startswith(program)), [])
        result = programs.run(*words, *shorter, cwd=clone)
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        assert result.stdout, words


@pytest.mark.slow
def test_make_train_trains_and_prints_a_sample(shards, tmp_path):
    arguments = flags(**(TINY | {"dataset_name": shards, "output_dir": tmp_path / "run", "max_steps": 5}))
    words = [
        "make",
        "train",
        "-o",
        ".venv/installed",
        f"BIN={Path(sys.executable).parent}",
        f"ARGS={' '.join(arguments)}",
    ]
    result = ok(subprocess.run(words, cwd=ROOT, env=by_hand(), capture_output=True, text=True, timeout=600))
    assert "step_00000005: 1,635,744 parameters" in result.stdout  # the sampler's first line


def test_make_overfit_learns_a_batch_by_heart(tmp_path):
    """The loss begins at that of a guess, ln(50,257) = 10.8, and ends below 0.1."""
    command = ["make", "-n", "overfit", "-o", ".venv/installed", f"ARGS=--output_dir {tmp_path} --precision fp32"]
    printed = subprocess.run(command, cwd=ROOT, env=by_hand(), capture_output=True, text=True, check=True).stdout
    words = shlex.split(printed.replace("\\\n", " ").partition("recipe/train.py ")[2])
    words += ["--dataset_name", str(tmp_path / "data")]
    result = ok(programs.run("recipe/train.py", *words))
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"]]
    assert losses[0] == pytest.approx(10.8, abs=0.1)
    assert losses[-1] < 0.1
    assert f"loss {losses[-1]:.4f}" in result.stdout


@pytest.mark.parametrize("stopped", [True, False])
def test_make_calls_a_failed_training_an_error_and_a_ctrl_c_not(stopped, tmp_path):
    launcher = tmp_path / "launcher"  # as Accelerate's: it ends with 1, after the training has saved
    launcher.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nsleep 2\nexit 1\n")
    launcher.chmod(0o755)
    words = ["make", "train", "-o", ".venv/installed", f"LAUNCH={launcher}"]
    options = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a background job ignores it
    running = subprocess.Popen(words, cwd=ROOT, env=by_hand(), **options)
    while not (tmp_path / "started").exists():
        time.sleep(0.1)
    if stopped:
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    printed = running.communicate(timeout=60)[1]
    assert ("Error 1" in printed) == (not stopped)
    assert running.returncode == (-signal.SIGINT if stopped else 2)


def test_every_target_is_in_the_help():
    help = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "$" not in help
    assert set(re.findall(r"^  make ([a-z-]+) +\w", help, re.MULTILINE)) == TARGETS - {"start", "help"}


def test_make_passes_on_what_it_is_given_as_one_word():
    word = """Say "hi" for $100, `date` and John's"""
    for target, variable in (("sample", "PROMPT"), ("best", "TEXT"), ("plan", "CONFIG"), ("train", "PROMPT")):
        command = ["make", "-n", "-o", ".venv/installed", target, f"{variable}={word}"]
        lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        words = shlex.split(lines)
        assert word in words or f"--text={word}" in words, target


@pytest.mark.parametrize("hardware", ["zero1", "tpu"])
def test_what_make_would_run_in_a_fresh_clone_is_valid_shell(hardware, tmp_path):
    """With all that is installed first, which no other test sees."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "-n", *TARGETS, f"ACCELERATE=accelerate_configs/{hardware}.yaml", "ARGS=--report_to wandb"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    subprocess.run(["sh", "-n"], input=printed, text=True, check=True)
    asked = {
        match[2]: match[1] for match in re.finditer(r"^\.ci/install \S+ (\S+) -e '?(\.\S*?)'?( |$)", printed, re.M)
    }
    assert {".", ".[dev,deepspeed,trackers]", ".[trackers]"} <= asked.keys()
    assert {"tpu": ".[tpu]", "zero1": ".[deepspeed]"}[hardware] in asked
    assert asked[".[trackers]"] == "constraints.txt"


@pytest.mark.parametrize(
    "uv", [False, pytest.param(True, marks=pytest.mark.skipif(not shutil.which("uv"), reason="needs uv"))]
)
def test_make_installs_into_an_environment_without_pip(tmp_path, uv):
    """As uv makes them: with uv where it is installed, else with a pip that the environment is given."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        about = "tiny-1.0.dist-info"
        file.writestr("tiny.py", "")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", f"tiny.py,,\n{about}/METADATA,,\n{about}/WHEEL,,\n{about}/RECORD,,\n")
    environment = tmp_path / ".venv"
    venv.create(environment, with_pip=False, symlinks=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    if uv:
        (programs / "uv").symlink_to(shutil.which("uv"))
    command = [ROOT / ".ci" / "install", environment, ROOT / "constraints.txt", wheel]
    variables = by_hand() | {"PATH": f"{programs}:/usr/bin:/bin"}
    subprocess.run(command, env=variables, check=True, timeout=300)
    subprocess.run([environment / "bin" / "python", "-c", "import tiny"], check=True)
    assert uv != (
        subprocess.run([environment / "bin" / "python", "-m", "pip", "--version"], check=False).returncode == 0
    )


def test_versions_named_beside_the_code_are_its_own():
    import recipe

    assert f"\nversion: {recipe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    ruff = re.search(r"ruff==([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    assert f"rev: v{ruff} " in (ROOT / ".pre-commit-config.yaml").read_text()
    address = re.search(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    texts = [*PAGES.values(), *(path.read_text() for path in (ROOT / "recipe" / "notebooks").glob("*.ipynb"))]
    named = {name for text in texts for name in re.findall(r"https://[\w./-]*/gpt2-recipe\b", text)}
    assert named == {address}
    assert ", run: .ci/run}" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
