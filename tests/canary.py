"""Secrets put where people put them, and a search for them in all that a run says and leaves behind.

found = in_a_run(directory, shards)      # a tiny run, to its end; [] if the secret is nowhere
found = in_a_mistake(directory)          # command lines and YAMLs that are refused
found = in_a_failing_stream(directory)   # a stream whose Hub does not answer
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess

from tests.conftest import ROOT, TINY, environment, flags, run_train
from tests.hub import Fault, Hub

CANARY = "canary5Ecret0123456789"
HUB_TOKEN = "hf_" + "Canary0123456789" * 2
WANDB_KEY = "c0ffee" * 6 + "c0de"
SECRETS = (CANARY, HUB_TOKEN, WANDB_KEY)
# Where they belong. CANARY is in none of these, so that it is found where only its place says what it is.
ENVIRONMENT = {
    "HF_TOKEN": HUB_TOKEN,
    "WANDB_API_KEY": WANDB_KEY,
    "WANDB_MODE": "offline",
    "MY_PASSWORD": "Passwort-" + HUB_TOKEN[::-1],
    "AWS_SECRET_ACCESS_KEY": "Zugang/" + WANDB_KEY[::-1],
}
EVERYWHERE = (*SECRETS, *(v for v in ENVIRONMENT.values() if len(v) > 8))
URL = f"http://user:{CANARY}@127.0.0.1:9/text.jsonl?token={CANARY}"


def search(directories: list[Path], *results: CompletedProcess) -> list[str]:
    """Where a secret stands: "stdout of ...", "stderr of ...", or a file's path, in every byte of every file and in the
    names of files."""
    secrets, found = [s.encode() for s in EVERYWHERE], []
    for result in results:
        for stream in ("stdout", "stderr"):
            if any(s in getattr(result, stream).encode() for s in secrets):
                found.append(f"{stream} of {' '.join(map(str, result.args))[-200:]}")
    for directory in directories:
        for path in sorted(directory.rglob("*")):
            inside = path.read_bytes() if path.is_file() else b""
            if any(s in os.fsencode(path.relative_to(directory)) or s in inside for s in secrets):
                found.append(str(path))
    return found


def in_a_run(directory: Path, shards: Path, tracker: str = "", **fields) -> list[str]:
    """A run to its end, with secrets in the environment, in a comment of its recipe, and where the environment's are
    repeated in fields: the prompt of samples and the name of a subset. What it would push, with its model cards, waits
    in its queue. `directory` is made."""
    directory.mkdir(parents=True)
    recipe = directory / "aside" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text(f"# hf_token: {CANARY}\ndataset_name: {shards}\nsample_prompt: {ENVIRONMENT['MY_PASSWORD']}\n")
    home = directory / "home"  # what the libraries keep there is the run's as well
    home.mkdir()
    settings = (
        TINY
        | {
            "config": recipe,
            "output_dir": directory / "run",
            "max_steps": 2,
            "warmup_steps": 1,
            "eval_steps": 0,
            "report_to": tracker or "none",
            "name": HUB_TOKEN,
            "push_to_hub": "acme/gpt2",
        }
        | fields
    )
    env = (
        ENVIRONMENT
        | {"HF_HUB_OFFLINE": "1"}
        | {"HF_HOME": str(home / "hf"), "WANDB_DIR": str(home), "TRACKIO_DIR": str(home), "TMPDIR": str(home)}
    )
    first = run_train(*flags(**settings), env=env)
    again = run_train(*flags(**(settings | {"max_steps": 3})), env=env)  # what was saved is compared with what is asked
    dry = run_train(*flags(**(settings | {"dry_run": "true"})), env=env)
    assert (first.returncode, again.returncode, dry.returncode) == (0, 0, 0), first.stderr + again.stderr + dry.stderr
    assert "from step 2" in again.stdout
    assert len(list((directory / "run").glob(".push/*/README.md"))) == 2  # the cards of what waits to be pushed
    assert "sample_prompt" not in again.stdout + again.stderr  # the same as before
    return search([directory / "run", home], first, again, dry)


def mistakes(directory: Path) -> list[list[str]]:
    """Command lines that hold a secret in a wrong place, each refused."""
    directory.mkdir(parents=True)

    def recipe(name: str, text: str) -> str:
        (directory / name).write_text(text)
        return f"--config={directory / name}"

    run = f"--output_dir={directory / 'run'}"
    return [
        [f"--hf_token={CANARY}"],
        ["--hf_token", CANARY],
        [run, CANARY],
        [f"-hf_token={CANARY}"],
        [f"--max_steps={HUB_TOKEN}"],
        [f"--report_to={HUB_TOKEN}", run],
        [recipe("key.yaml", f"dataset_name: x\nhf_token: {CANARY}\n")],
        [recipe("nested.yaml", f"data:\n  password: {CANARY}\n")],
        [recipe("tag.yaml", f"dataset_name: !{CANARY} x\n")],
        [recipe("alias.yaml", f"dataset_name: *{CANARY}\n")],
        [recipe("broken.yaml", f"dataset_name: x\nhf_token: '{CANARY}\n")],
        [recipe("url.yaml", f"dataset_name: {URL}\n"), run],
        [f"--dataset_name={directory / 'none'}", f"--train_text={URL}", run],
        [f"--init_from={URL}", run],
        [f"--output_dir={URL}"],
    ]


def in_a_mistake(directory: Path) -> list[str]:
    """All of them through recipe/train.py in one process, and three through recipe.data.prepare.pipeline."""
    rest = directory / "rest"
    lines, prepare = mistakes(directory), "from recipe.data.prepare.pipeline import main as prepare"
    script = f"import sys; from recipe.train import main; {prepare}; lines = {lines!r}\n"
    script += "codes = [main(line) for line in lines]\n"
    for line in ([f"--hf_token={CANARY}"], [f"--train_text={URL}", f"--out={rest}"], [f"--workers={HUB_TOKEN}"]):
        script += f"codes.append(prepare({['--train_text=x', f'--out={rest}', *line]!r}))\n"
    script += "sys.exit(0 if set(codes) == {2} else f'codes {codes}')"
    result = subprocess.run(
        [sys.executable, "-"],
        input=script,
        cwd=ROOT,
        text=True,
        capture_output=True,
        env=environment(ENVIRONMENT | {"PYTHONPATH": str(ROOT)}),
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("error: ") == len(lines) + 3, result.stderr
    for path in directory.glob("*.yaml"):
        path.unlink()  # it is there that the secrets stand
    return search([directory], result)


def in_a_failing_stream(directory: Path) -> list[str]:
    """A stream from a Hub whose address holds a password, and which fails at first and then has no such data set."""
    (directory / "hub").mkdir(parents=True)
    settings = TINY | {
        "data": directory / "data",
        "source": "a/text",
        "streaming": "true",
        "val_documents": 9,
        "output_dir": directory / "run",
    }
    with Hub(directory / "hub") as hub:
        hub.faults.append(Fault(path="*/api/datasets/*", status=503))
        address = hub.url.replace("://", f"://user:{CANARY}@")
        env = hub.environment | {"HF_HOME": str(directory / "hf")} | ENVIRONMENT | {"HF_ENDPOINT": address}
        result = run_train(*flags(**settings), env=env)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "a/text: no such local file, and the Hub says HTTP 404" in result.stderr
    assert "trying again" in result.stdout
    assert (directory / "data" / "builder.log").exists()
    assert (directory / "data" / ".builder.json").exists()
    return search([directory], result)
