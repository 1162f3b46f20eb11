"""Every command of README.md and docs/ runs: the long ones shortened, on the tests' tiny shards and model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, TINY, environment, flags, run_train

BIN = Path(sys.executable).parent  # python and accelerate as they are, less their imports
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCKS = re.findall(r"```bash\n(.*?)```", "\n".join(PAGES.values()), re.DOTALL)
LAUNCHES = re.findall(r"\| `((?:python|accelerate|sbatch) [^`]+)`", PAGES[ROOT / "README.md"])  # in its table
COMMANDS = LAUNCHES + [
    line.split(" #")[0].strip()
    for block in BLOCKS
    for line in block.splitlines()
    if line.strip() and not line.startswith("#")
]
# Get the code, or are what is running now.
NOT_RUN = ("git clone", "cd ", "make test", "make lint", "make clean", "python -m venv", "source ", "pip install")
NOT_HERE = ("gcloud ", "sbatch ")  # Google's command, and Slurm's: tests/engine/test_engines.py runs the script


def texts(directory: Path) -> Path:
    path = directory / "texts.jsonl"
    lines = SHAKESPEARE.read_text().split("\n\n")[:4000]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


def shortened(command: str, shards: Path, run: Path, tmp_path: Path) -> list[str]:
    """The command's words, with what makes it quick and keeps it out of the working tree."""
    tiny = flags(
        **(TINY | {"dataset_name": shards, "output_dir": tmp_path / "run", "max_steps": 5, "precision": "fp32"})
    )
    words = shlex.split(command)
    options = {k: v for k, _, v in (word.partition("=") for word in words[1:]) if v and not k.startswith("-")}
    if words[0] == "make":
        target = next((word for word in words[1:] if "=" not in word), "help")
        if target in ("train", "data") and options.get("CONFIG"):
            options["ARGS"] = options.get("ARGS", "") + (" --dry_run" if target == "train" else " --help")
        elif target == "train":
            options["ARGS"] = options.get("ARGS", "") + " " + shlex.join([*tiny, "--run_name", "docs"])
        elif target in ("scoreboard", "bench-peers", "bench-gpu", "push"):  # tests/test_bench.py, test_push.py run them
            options["ARGS"] = options.get("ARGS", "") + " --help"
        elif target == "bench-data":
            options |= {"TEXT": str(texts(tmp_path)), "ARGS": "--rounds 1 --steps 11"}
        elif target == "data":
            options["ARGS"] = shlex.join(["--out", str(tmp_path / "shards")])
        elif target == "chat":
            options["MODEL"] = str(run)
        elif target == "bench-eval":  # tests/test_harness.py does what it does
            options["ARGS"] = "--help"
        elif target in ("sample", "eval-val", "eval-wikitext", "eval-lambada", "eval-hellaswag", "eval-lm"):
            options |= {"MODEL": str(run), "ARGS": f"{options.get('ARGS', '')} --output {tmp_path}/results.json"}
            options["ARGS"] = re.sub(r"--compare \S+", f"--compare {run}", options["ARGS"])
            options |= {"LIMIT": "4"} if target not in ("sample", "eval-val") else {}
            options |= {"TEXT": str(SHAKESPEARE)} if target == "eval-wikitext" else {}
            options |= {"ROWS": str(texts(tmp_path))} if target in ("eval-lambada", "eval-lm") else {}
        elif target == "checkpoints":
            options["RUN"] = str(run)
        elif target == "report":
            options |= {"RUN": f"{run} {run}", "OUT": str(tmp_path / "report")}
        elif target == "export":
            options |= {"RUN": str(run), "OUT": str(tmp_path / "out")}
        # The environment is the one that the tests run in: nothing is installed here.
        made = [word for kind in ("", "-dev", "-eval", "-trackers") for word in ("-o", f".venv/installed{kind}")] + [
            f"BIN={BIN}"
        ]
        return ["make", target, *made, *(f"{k}={v}" for k, v in options.items())]
    if "recipe.data.prepare" in words:
        assert words[:3] == ["python", "-m", "recipe.data.prepare"]
        if "recipe/data/tiny_shakespeare.txt" not in words:  # on the Hub
            words[words.index("--train_text") + 1] = str(texts(tmp_path))
            words += ["--val_documents", "3"]
        words[words.index("--out") + 1] = str(tmp_path / "out")
        if "--processes" in words:
            words[words.index("--processes") + 1] = "2"
        return words
    if "recipe.estimate.cost" in words:
        return words
    if "recipe.hub.export" in words:
        if words[3] == "push":  # tests/test_push.py does
            return [*words, "--help"]
        words[3] = str(run)
        words[words.index("--out") + 1] = str(tmp_path / "out")
        return words
    if "recipe.checkpoint" in words:
        assert words[:3] == ["python", "-m", "recipe.checkpoint"]
        path = Path(words[4])
        return [*words[:4], str(run if path.parent.name == "runs" else run / "step_00000020")]
    if "recipe/train.py" in words:
        launch = ["--num_processes", "1", "--main_process_port", "0"]  # tests/engine/test_engines.py has several
        if "multinode" in command:  # one of the machines alone
            launch += ["--num_machines", "1", "--main_process_ip", "127.0.0.1"]
        launch = launch if re.search("ddp|zero", command) else []
        words = [str(shards) if word == "data/openwebtext" else word for word in words]
        script = words.index("recipe/train.py")
        if command not in LAUNCHED_ONCE.values():
            return ["python", *words[script:], "--dry_run"]
        return [*words[:script], *launch, *words[script:], "--dry_run"]
    raise AssertionError(f"there is a command that this test does not know how to run: {command}")


# A TPU's commands are run where torch_xla is, by tests/xla; plain `python recipe/train.py` by a fast test below.
RUN_HERE = [
    command
    for command in dict.fromkeys(COMMANDS)
    if not command.startswith(NOT_RUN + NOT_HERE) and "tpu.yaml" not in command
    if not command.startswith("python recipe/train.py ") or "--help" in command
]
# Starting a launcher takes longer than most commands: the first with each hardware file stands for the others.
LAUNCHED_ONCE = {re.search(r"--config_file (\S+)", c)[1]: c for c in reversed(RUN_HERE) if "accelerate launch" in c}


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_command_of_the_documentation(command, shards, whole_run, tmp_path):
    if command.startswith("make eval-lm"):
        pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")
    words = shortened(command, shards, whole_run[0], tmp_path)
    if words[0] == "python":
        result = programs.run(*words[1:], env=environment())
    else:
        variables = environment({"PATH": f"{BIN}:{os.environ['PATH']}"})
        for inherited in (
            "MAKEFLAGS",
            "MFLAGS",
            "MAKEOVERRIDES",
            "MAKELEVEL",
            "ARGS",
        ):  # of the `make test` around this
            variables.pop(inherited, None)
        words = ["env", *words] if "=" in words[0] else words
        pipes = {"input": "The king\n", "capture_output": True, "text": True}
        result = subprocess.run(words, cwd=ROOT, env=variables, timeout=600, **pipes)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) > ("verify" not in words)  # every command says what it is doing


def test_the_readme_has_the_two_commands_and_every_target_exists_and_is_in_the_help():
    assert {"make train", "make test"} <= set(COMMANDS)
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)", makefile, re.MULTILINE).group(1).split())
    for command in COMMANDS:
        if command.startswith("make "):
            assert command.split()[1] in targets, command
    help = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"^  make ([a-z-]+) +\w", help, re.MULTILINE)) == targets - {"help"}
    groups = re.findall(r"^(\w[\w ]*)$", help, re.MULTILINE)
    assert groups == ["Train", "Look and evaluate", "Share", "Measure speed", "Develop"]
    assert max(map(len, help.splitlines())) <= 80


@pytest.mark.parametrize("hardware", ["single", "zero1", "tpu"])
def test_what_make_would_run_in_a_fresh_clone_is_valid_shell(hardware, tmp_path):
    """With all that is installed first, which no other test sees."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    targets = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE).group(1).split()
    command = ["make", "-n", *targets, f"ACCELERATE=accelerate_configs/{hardware}.yaml", "ARGS=--report_to wandb"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    subprocess.run(["sh", "-n"], input=said, text=True, check=True)
    asked = {match[2]: match[1] for match in re.finditer(r"PIP_CONSTRAINT=(\S+) .*? -e '?(\.\S*?)'?[ ;]", said)}
    wanted = {".[dev,deepspeed,trackers]", ".[deepspeed]", ".[trackers]", ".[tpu]" if hardware == "tpu" else "."}
    assert wanted <= asked.keys()
    assert asked[".[trackers]"] == ("" if hardware != "tpu" else ".venv-tpu/") + "constraints.txt"


def test_training_commands_of_the_documentation_print_their_plan(shards):
    """Without the launchers, which test_command_of_the_documentation starts."""
    trained = [words for words in map(shlex.split, COMMANDS) if "recipe/train.py" in words and "--help" not in words]
    assert len(trained) > 20
    for words in {tuple(words[words.index("recipe/train.py") + 1 :]) for words in trained}:
        result = run_train(*[str(shards) if word == "data/openwebtext" else word for word in words], "--dry_run")
        assert result.returncode == 0, (words, result.stderr)
        assert "sequences" in result.stdout, words


def test_links_and_files_named_in_the_documentation_exist():
    for page, text in PAGES.items():
        for target, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), (page, target)
                linked = PAGES.get((page.parent / target).resolve(), "")
                titles = [re.sub(r"[^\w ]", "", line).lower() for line in re.findall("^#+ (.*)$", linked, re.MULTILINE)]
                assert not heading or heading.replace("-", " ") in titles, (page, target, heading)
        for path in re.findall(r"`((?:recipe|eval|accelerate_configs|ds_configs|tests)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (page, path)


def test_each_page_begins_with_its_question_and_a_command_and_is_linked_from_the_readme():
    for page, text in PAGES.items():
        if page.parent.name == "docs":
            assert re.match(r"# .*\n\n\*[^*]+\?\*\n\n(.+\n\n)?(.+\n)*.*```bash\n", text), page
            assert f"(docs/{page.name})" in PAGES[ROOT / "README.md"], page


def test_versions_named_beside_the_code_are_its_own():
    import recipe

    assert f"\nversion: {recipe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    ruff = re.search(r"ruff==([\d.]+)", (ROOT / "pyproject.toml").read_text())[1]
    assert f"rev: v{ruff} " in (ROOT / ".pre-commit-config.yaml").read_text()
    assert "run: .ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
