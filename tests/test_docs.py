"""Every command of README.md and docs/ runs.

Bash runs the pages' code blocks unchanged, in a directory like a clone with a trained model, where `python` and
`accelerate` only record their arguments. The tests then run those commands, the long ones shortened.
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
from transformers import GPT2Config

from eval.hellaswag import load_rows
from recipe.best import parse_request
from recipe.data.tokenizer import train_tokenizer
from recipe.monitor.metrics import read_metrics
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, environment, ok, tiny_flags
from tests.eval.conftest import local_tasks

PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
# tests/hub/test_downstream.py runs the code of elsewhere.md, which needs other programs.
BLOCKS = re.findall(
    r"```bash\n(.*?)```", "\n".join(text for page, text in PAGES.items() if page.name != "elsewhere.md"), re.DOTALL
)
LAUNCHES = re.findall(r"\| `((?:python|accelerate|sbatch) [^`]+)`", PAGES[ROOT / "README.md"])  # in the table
JOB = re.search(r"^hf jobs run .*", PAGES[ROOT / "docs" / "clusters.md"], re.MULTILINE)[0]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)", MAKEFILE, re.MULTILINE)[1].split())

RECORDER = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; echo; } >> "$RECORDS"
"""

# Options that make a program quick and independent of the network; if an option is given twice, the last one counts.
SHORTER = {
    "eval.hellaswag": ["--limit", "4"],
    "eval.compare": ["--limit", "4"],
    "eval.harness": ["--limit", "4", "--include_path", "tasks"],  # the tasks with local rows
    "recipe.data.prepare": [
        *("--train_text", "texts.jsonl", "--dataset_config", ""),
        *("--dataset_name", "data/texts", "--val_documents", "3"),
    ],
    "recipe.hub.export push": ["--help"],  # tests/hub runs it
    "recipe.audit --repo": ["--help"],  # the same
    "benchmarks": ["--help"],  # tests/benchmarks runs the others
}


def remote() -> list[str]:
    """The commands that a container, Hugging Face Jobs and SkyPilot run in a clone."""
    sky = yaml.safe_load((ROOT / "docs" / "skypilot.yaml").read_text())
    container = json.loads(re.search(r"^CMD (.*)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1])
    docker = [re.search(r" gpt2-recipe (make .*)", block)[1] for block in BLOCKS if "docker run" in block]
    _, job = shlex.split(JOB)[-1].split(" && cd gpt2-recipe && ")
    return [shlex.join(container), *docker, job, sky["setup"], sky["run"]]


def make(*words: str, cwd: Path = ROOT) -> str:
    """The output of make; in this repository it regards the packages as installed."""
    command = ["make", *words, *(["-o", ".venv/installed"] if cwd == ROOT else [])]
    options = {"cwd": cwd, "env": environment(), "capture_output": True, "text": True, "timeout": 600}
    return ok(subprocess.run(command, **options)).stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory, whole_run) -> Path:
    """The files that commands need: the code, the environments of make, a run, and the data that the pages name."""
    root = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    for name in ("recipe", "eval", "benchmarks", "accelerate_configs", "ds_configs"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(whole_run[0], root / "runs" / "shakespeare")
    (root / "openai-community").mkdir()
    (root / "openai-community" / "gpt2").symlink_to(root / "runs" / "shakespeare")
    models = {
        "openai-community/gpt2-medium": GPT2Config(n_layer=24, n_head=16, n_embd=1024),
        "runs/first/step_00000700": GPT2Config(n_layer=4, n_head=4, n_embd=128, n_positions=128),
    }
    for name, config in models.items():
        config.save_pretrained(root / name)
        (root / name / "model.safetensors").touch()  # a dry run does not read it
    shutil.copy(SHAKESPEARE, root / "my.txt")
    train_tokenizer([SHAKESPEARE.read_text()], root / "own-tokenizer", vocab_size=257)
    (root / "data" / "openwebtext").mkdir(parents=True)  # in nanoGPT's format, enough for a step of GPT-2's batch
    for name, tokens in {"train": 600_000, "val": 6_000}.items():
        (root / "data" / "openwebtext" / f"{name}.bin").write_bytes(b"\1\xc0" * tokens)  # of GPT-2's vocabulary
    lines = SHAKESPEARE.read_text().split("\n\n")[:400]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    if find_spec("lm_eval"):
        rows = {"lambada_openai": [{"text": line} for line in lines], "wikitext": [{"page": line} for line in lines]}
        local_tasks(root / "tasks", hellaswag=load_rows(4), **rows)
    return root


@pytest.fixture(scope="module")
def commands(clone) -> list[list[str]]:
    """The distinct command lines that the pages start, with `python` or `accelerate` first."""
    fakes = clone / "fakes"
    for folder in (".venv/bin", ".venv-tpu/bin", "fakes"):
        (clone / folder).mkdir(parents=True)
        for name in ("python", "accelerate"):
            (clone / folder / name).write_text(RECORDER)
            (clone / folder / name).chmod(0o755)
    (clone / "gpt2-recipe").symlink_to(".")
    for name in ("git", "docker", "gcloud", "hf", "pip", "sbatch", "sky"):  # tests/engine/test_nodes.py runs sbatch's
        (fakes / name).symlink_to("/bin/true")
    for folder in (".venv", ".venv-tpu"):
        (clone / folder / "constraints.txt").touch()
        for kind in ("", "-deepspeed", "-dev", "-eval", "-trackers"):
            (clone / folder / f"installed{kind}").touch()
    (clone / ".venv" / "bin" / "activate").touch()
    variables = environment() | {"PATH": f"{fakes}:{os.environ['PATH']}", "RECORDS": str(clone / "records")}
    script = "\n".join([*BLOCKS, *LAUNCHES, *remote()])
    assert {"make train", "make test"} <= {line.split("  ")[0] for line in script.splitlines()}
    subprocess.run(["bash", "-ec", script], cwd=clone, env=variables, stdin=subprocess.DEVNULL, check=True, timeout=300)
    return [line.split("\0")[:-1] for line in dict.fromkeys((clone / "records").read_text().splitlines())]


def test_documented_training_commands_pass_a_dry_run(clone, commands):
    """The launchers' options are checked; tests/engine starts the launchers themselves."""
    trainings = set()
    for program, *words in commands:
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
            arguments = launch_command_parser().parse_args(words)
            assert (clone / arguments.config_file).is_file()
            _validate_launch_command(arguments)
        trainings.add(tuple(words[words.index("recipe/train.py") + 1 :]))
    assert len(trainings) > 20
    for words in trainings:
        result = programs.run("recipe/train.py", *words, "--dry_run", "--fresh", cwd=clone)
        assert result.returncode == 0, (words, result.stderr)
        assert ("usage:" if "--help" in words else "sequences") in result.stdout, words


@pytest.mark.slow
def test_nanogpts_first_example_trains_on_characters(clone, commands, tmp_path):
    """2,000 steps end at a loss of 1.59 or 1.60 (docs/migrating.md), an eighth of them at 2.04."""
    (words,) = (words[1:] for words in commands if "own-tokenizer" in words)
    ok(programs.run(*words, "--max_steps=250", "--precision=fp32", f"--output_dir={tmp_path}", cwd=clone))
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["tokens"] == 250 * 768
    assert last["val_loss"] == pytest.approx(2.04, abs=0.04)


def test_the_documented_hugging_face_job_is_valid():
    hf, *words = shlex.split(JOB.replace("hf jobs run", "hf jobs run --dry-run", 1))
    command = [Path(sys.executable).with_name(hf), *words]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True, timeout=120)
    job = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line.startswith("  "))
    assert job["image"] == "python:3.12"  # or an unknown option was taken for it
    assert job["flavor"] in list(JobHardware)


@pytest.mark.slow
def test_all_other_documented_commands_run(clone, commands):
    # Empty words stand for the run's directory, which the fake `python -m recipe.config` has not printed.
    other_commands = [
        [word for word in words if word]
        for _, *words in commands
        if not {"recipe/train.py", "recipe/preflight.py", "recipe/best.py"} & {*words} and words[:2] != ["-m", "pytest"]
    ]
    assert len(other_commands) > 20
    for words in other_commands:
        line = " ".join(words).removeprefix("-m ")
        shorter = next((options for program, options in SHORTER.items() if line.startswith(program)), [])
        result = programs.run(*words, *shorter, cwd=clone)
        assert result.returncode == 0, (words, result.stdout, result.stderr)
        assert result.stdout, words


@pytest.mark.slow
def test_make_train_trains_and_prints_a_sample(shards, tmp_path):
    arguments = " ".join(tiny_flags(shards, tmp_path / "run", max_steps=5))
    output = make("train", f"BIN={Path(sys.executable).parent}", f"ARGS={arguments}")
    assert "step_00000005: 1,635,744 parameters" in output  # the sampler's first line


def test_make_overfit_memorizes_a_batch(tmp_path):
    """The loss starts at that of a uniform guess, ln(50,257) = 10.8, and ends below 0.1, whatever run and place the
    recipe describes besides the model."""
    recipe = yaml.safe_load((ROOT / "recipe/configs/shakespeare.yaml").read_text())
    recipe.pop("max_steps")
    recipe |= {
        "output_dir": str(tmp_path / "mine"),
        "train_hours": 1.0,
        "lr_scheduler_type": "wsd",
        "milestone_steps": 9,
    }
    recipe |= {"push_to_hub": True, "hub_model_id": "me/mine", "report_to": "tensorboard", "init_from": "me/mine"}
    recipe |= {"val_data": "data/mine", "tokenizer": "me/mine"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    script = make("-n", "overfit", f"CONFIG={tmp_path / 'mine.yaml'}", "ARGS=--precision fp32")
    words = shlex.split(script.replace("\\\n", " ").partition("recipe/train.py ")[2])
    assert words[words.index("--output_dir") + 1] == "runs/overfit"
    words += ["--output_dir", str(tmp_path)]
    words += ["--dataset_name", str(tmp_path / "data")]
    result = ok(programs.run("recipe/train.py", *words))
    losses = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if line["step"]]
    assert losses[0] == pytest.approx(10.8, abs=0.1)
    assert losses[-1] < 0.1
    assert f"loss {losses[-1]:.4f}" in result.stdout


SAVING = "(sleep 2; rm started) 2>/dev/null; exit 1"  # whoever waits for its errors does not wait for it


def make_train(directory: Path, launcher: str, **options) -> subprocess.Popen:
    """`make train` with this script as its launcher, in the directory, once it has made the file `started` there."""
    path = directory / "launcher"
    path.write_text(f"#!/bin/sh\ncd {directory}\n{launcher}\n")
    path.chmod(0o755)
    words = ["make", "train", "-o", ".venv/installed", f"LAUNCH={path}"]
    running = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)
    while not (directory / "started").exists():
        time.sleep(0.1)
    return running


@pytest.mark.parametrize(
    ("interrupt", "training", "has_ps"),
    [(False, "exit 1", True), *((True, script, ps) for script in (SAVING, "exec sleep 60") for ps in (True, False))],
)
def test_make_reports_a_failed_training_as_an_error_but_not_ctrl_c(interrupt, training, has_ps, tmp_path):
    """A launcher waits for the training, which saves, and exits with 1, like Accelerate's; the last one has not started
    the training yet."""
    if not has_ps:  # as in a slim container
        (tmp_path / "ps").write_text("#!/bin/sh\nexit 127\n")
        (tmp_path / "ps").chmod(0o755)
    env = environment() | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    heeded = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731  a background job ignores it
    running = make_train(tmp_path, f"touch started\n{training}", env=env, start_new_session=True, preexec_fn=heeded)
    if interrupt:
        os.killpg(running.pid, signal.SIGINT)  # as a terminal does
    errors = running.communicate(timeout=30)[1]
    assert ("Error 1" in errors) == (not interrupt)
    assert running.returncode == (-signal.SIGINT if interrupt else 2)
    assert (tmp_path / "started").exists() != (training == SAVING)  # once the training has saved


def test_kill_of_make_ends_its_launcher_and_nobody_else(tmp_path):
    """Also where Ctrl-C is ignored, as in a script's background job, and make is in the process group of its caller."""
    launcher = "trap 'touch ended; exit' TERM\ntouch started\nwhile :; do sleep 0.1; done"
    ignored = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)  # noqa: E731
    running = make_train(tmp_path, launcher, env=environment(), preexec_fn=ignored)
    running.terminate()
    running.communicate(timeout=30)
    assert running.returncode == -signal.SIGTERM
    assert (tmp_path / "ended").exists()


def test_every_target_is_in_the_help():
    help_text = make("-s", "help")
    assert "$" not in help_text
    assert set(re.findall(r"^  make ([a-z-]+) +\w", help_text, re.MULTILINE)) == TARGETS - {"start", "help"}


def test_make_passes_a_variable_with_shell_characters_as_one_word():
    word = """Say "hi" for $100, `date` and John's"""
    for target, variable in (("sample", "PROMPT"), ("best", "TEXT"), ("plan", "CONFIG"), ("train", "PROMPT")):
        words = shlex.split(make("-n", target, f"{variable}={word}"))
        assert word in words or f"--text={word}" in words, target


def test_make_takes_a_run_by_either_name_and_refuses_variables_that_it_would_ignore(monkeypatch):
    """It once exported another run than MODEL's, and trained on another text than TEXT."""
    targets = {"sample", "chat", "report", "audit", "checkpoints", "export", "push", "compare"}
    for target in targets | {target for target in TARGETS if target.startswith("eval-")}:
        for variable in ("RUN", "MODEL"):
            assert "/a  run" in shlex.split(make("-n", target, f"{variable}=/a  run")), target
    monkeypatch.setenv("MODEL", "claude")
    assert "claude" not in make("-n", "sample", "RUN=/a")
    for words in (["sample", "RUN=~/a b"], ["export", "OUT=~/a b"], ["compare", "WITH=~/a b"]):
        assert f"{Path.home()}/a b" in shlex.split(make("-n", *words)), words
    for words in (["train", "PROCESSES=2"], ["best", "PROCESSES=2"], ["test", "WORKERS=1"], ["scoreboard", "CONFIG=x"]):
        make("-n", *words)
    ignored = "make {0} does not use {1}; see make help"
    mistakes = {("train", "TEXT=my.txt"): ignored, ("train", "HOURS=1"): ignored, ("best", "CONFIG=gpt2"): ignored}
    mistakes |= {("gpu-proof", "OUT=x"): ignored, ("sample", "RUN=a", "MODEL=b"): "RUN and MODEL mean the same"}
    for words, message in mistakes.items():
        result = subprocess.run(["make", "-n", *words], cwd=ROOT, env=environment(), capture_output=True, text=True)
        assert message.format(words[0], words[1].partition("=")[0]) in result.stderr
    for target in ("train", "best"):
        assert "--fresh" in make("-n", target, "FRESH=1")
        assert not any("--fresh" in make("-n", target, f"FRESH={value}") for value in ("0", "no", ""))


@pytest.mark.parametrize("words", ["--help", "--dry_run 8xh100"])
def test_where_make_trains_nothing_it_samples_from_nothing(words):
    assert not any("eval.sample" in make("-n", target, f"ARGS={words}") for target in ("train", "best"))
    assert "eval.sample" in make("-n", "train", "ARGS=--run_name help")


@pytest.mark.parametrize(
    ("config", "environment"), [("accelerate_configs/tpu.yaml", ".venv-tpu"), ("/home/tpuser/ddp.yaml", ".venv")]
)
def test_a_make_target_installs_the_environment_that_it_runs(config, environment, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    for target in ("data", "sample", "report", "export", "eval-val", "train"):
        script = make("-n", target, f"ACCELERATE={config}", cwd=tmp_path)
        assert set(re.findall(r"\.venv[\w-]*(?=/)", script)) == {environment}, target


@pytest.mark.parametrize("hardware", ["zero1", "tpu"])
def test_every_make_target_is_valid_shell_in_a_fresh_clone(hardware, tmp_path):
    """Including the installations, which the other tests skip."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    options = [f"ACCELERATE=accelerate_configs/{hardware}.yaml", "ARGS=--report_to wandb"]
    script = make("-n", *TARGETS, *options, cwd=tmp_path)
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    installs = re.finditer(r"^bash \.ci/install \S+ (\S+) -e '?(\.\S*?)'?( |$)", script, re.MULTILINE)
    constraints = {match[2]: match[1] for match in installs}
    assert {".", ".[dev,deepspeed,trackers]", ".[trackers]"} <= constraints.keys()
    assert {"tpu": ".[tpu]", "zero1": ".[deepspeed]"}[hardware] in constraints
    assert constraints[".[trackers]"] == "constraints.txt"


@pytest.mark.parametrize(
    "uv", [False, pytest.param(True, marks=pytest.mark.skipif(not shutil.which("uv"), reason="needs uv"))]
)
def test_make_installs_into_an_environment_without_pip(tmp_path, uv):
    """As uv creates them: uv installs if there is one, else the environment gets pip."""
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        info = "tiny-1.0.dist-info"
        file.writestr("tiny.py", "")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    venv_dir = tmp_path / ".venv"
    venv.create(venv_dir, with_pip=False, symlinks=True)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    if uv:
        (bin_dir / "uv").symlink_to(shutil.which("uv"))
    command = [".ci/install", venv_dir, "constraints.txt", wheel]
    variables = environment() | {"PATH": f"{bin_dir}:/usr/bin:/bin"}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, timeout=300)
    python = venv_dir / "bin" / "python"
    subprocess.run([python, "-c", "import tiny"], check=True)
    has_pip = subprocess.run([python, "-m", "pip", "--version"]).returncode == 0
    assert has_pip != uv


def test_versions_and_addresses_agree_in_all_files():
    import recipe

    assert f"\nversion: {recipe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    ruff = re.search(r"ruff==([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    assert f"rev: v{ruff} " in (ROOT / ".pre-commit-config.yaml").read_text()
    address = re.search(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    texts = [*PAGES.values(), *(path.read_text() for path in (ROOT / "recipe" / "notebooks").glob("*.ipynb"))]
    repositories = {url for text in texts for url in re.findall(r"https://[\w./-]*/gpt2-recipe\b", text)}
    assert repositories == {address}
    assert ", run: .ci/run}" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
