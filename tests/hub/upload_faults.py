"""What can go wrong with an upload: each fault while a run trains, and while its queue is drained afterwards.

prepared = prepare(directory, shards)
for fault, mode in product(FAULTS, MODES):
    problem = inject(fault, mode, fresh_directory, prepared)  # None: all is as it should be
"""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard

from recipe.checkpoint.format import model_only
from recipe.hub.outbox import entries
from recipe.monitor.metrics import read_metrics
from tests.conftest import ROOT, TINY, by_step, environment, flags, run_train
from tests.hub.push_server import PushHub
from tests.hub.server import Fault

REPO = "acme/gpt2"
MODES = ("training", "drained")
PERMANENT = ("401", "403")
ALWAYS = 10**6
# Two milestones, the second of which is the final checkpoint, and goes to main too.
BRANCHES = {"step-000010": 10, "step-000020": 20, "main": 20}
PUSH = {"push_to_hub": REPO, "milestone_steps": 10}


def _faults(name: str) -> list[Fault]:
    big = {"path": "/lfs/*", "method": "PUT", "received": 1000}
    return {
        "401": [Fault(path="*/commit/*", status=401, times=ALWAYS)],
        "403": [Fault(path="*/commit/*", status=403, times=ALWAYS)],
        "409": [Fault(path="*/commit/*", status=409, times=2)],  # another commit came in between
        "429": [Fault(path="*/preupload/*", status=429, headers={"Retry-After": "3"})],
        "500": [Fault(path="*/commit/*", status=500, times=2)],
        "503": [Fault(path="*/objects/batch", status=503, times=2)],
        "reset": [Fault(kind="reset", times=2, **big)],
        "stall": [Fault(kind="stall", **big)],
    }[name]


FAULTS = ("401", "403", "409", "429", "500", "503", "reset", "stall")


@dataclass(frozen=True)
class Prepared:
    """`plain` is a run that pushes nothing, `queued` the same one with all its checkpoints in the queue."""

    shards: Path
    plain: Path
    queued: Path


def variables(hub: PushHub) -> dict[str, str]:
    """The environment of a process that talks to `hub`, and takes two seconds without a byte for a stall."""
    return hub.environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "2"}


def train(shards: Path, run: Path, env: dict[str, str], **fields) -> subprocess.CompletedProcess:
    return run_train(*flags(**(TINY | {"dataset_name": shards, "output_dir": run} | fields)), env=env, timeout=300)


def push(run: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "recipe.hub.export", "push", str(run), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(env), capture_output=True, text=True, timeout=120)


def prepare(directory: Path, shards: Path) -> Prepared:
    """The two runs that `inject` needs, made in `directory`."""
    prepared = Prepared(shards, directory / "plain", directory / "queued")
    for run, fields in ((prepared.plain, {}), (prepared.queued, PUSH)):
        result = train(shards, run, {"HF_HUB_OFFLINE": "1"}, **fields)
        assert result.returncode == 0, result.stdout + result.stderr
    return prepared


def losses(run: Path) -> dict[int, tuple]:
    """What a run has learned: to the last digit."""
    return {step: tuple(line[k] for k in ("loss", "val_loss", "grad_norm")) for step, line in by_step(run).items()}


def missing(hub: PushHub, run: Path, branches: dict[str, int] = BRANCHES) -> str | None:
    """What of a run's checkpoints is not on its branch, byte by byte, or too much there, or not a card with the step's
    validation loss; None: nothing."""
    repository = hub.repositories.get(REPO)
    if repository is None or set(repository.branches) != {"main", *branches}:
        return f"the branches are {sorted(repository.branches) if repository else None}"
    for branch, step in branches.items():
        expected = {p.name: p.read_bytes() for p in model_only(run / f"step_{step:08d}")}
        found = dict(hub.files(REPO, branch))
        if problem := wrong_card(found.pop("README.md", b"").decode(), run, step):
            return f"{branch}: {problem}"
        if found != expected:
            return f"{branch} has {sorted(found)}, or others' bytes, and not {sorted(expected)}"
        if [c.message for c in repository.branches[branch]] != ["initial", f"Step {step}"]:
            return f"{branch} has the commits {[c.message for c in repository.branches[branch]]}"
    return None


def wrong_card(card: str, run: Path, step: int) -> str | None:
    """What is wrong with the card of a step; None: nothing."""
    found = ModelCard(card)
    if found.data.get("pipeline_tag") != "text-generation" or f"the weights after step {step:,}." not in found.text:
        return f"the card is {card[:300]!r}"
    losses = {line["step"]: line.get("val_loss") for line in read_metrics(run / "metrics.jsonl")}
    expected = [] if losses.get(step) is None else [round(losses[step], 6)]
    values = [e.metric_value for e in found.data.eval_results or [] if e.metric_name.startswith("validation loss")]
    return None if values == expected else f"the card has the validation loss {values}, and not {expected}"


def inject(fault: str, mode: str, directory: Path, prepared: Prepared) -> str | None:
    """Lets `fault` happen, in an empty directory; returns what is wrong with what came of it, or None.

    "training": a run that pushes; its losses must be those of the run that does not. "drained": a queue that
    the push command empties. A fault that passes must leave nothing queued, one that does not must be met once a
    checkpoint and leave all queued; then `push` brings up what is left.
    """
    run, permanent = directory / "run", fault in PERMANENT
    with PushHub(directory / "hub") as hub:
        hub.faults += _faults(fault)
        if mode == "training":
            result = train(prepared.shards, run, variables(hub), **PUSH)
            expected = 0
        else:
            shutil.copytree(prepared.queued, run)
            result = push(run, variables(hub))
            expected = 1 if permanent else 0
        output = result.stdout + result.stderr
        if result.returncode != expected:
            return f"exit code {result.returncode} and not {expected}: {output[-2000:]}"
        if losses(run) != losses(prepared.plain):
            return "the losses are not those of the run that pushes nothing"
        if "Traceback" in output:
            return f"a traceback: {output[-2000:]}"
        queued = [e.path.name for e in entries(run)]
        if permanent:
            if queued != ["step-000010", "step-000020"]:
                return f"queued is {queued}: {output[-2000:]}"
            if (tries := hub.count("POST", "/commit/")) != 2:
                return f"{tries} attempts to commit two checkpoints that are refused"
            if f"HTTP {fault}" not in output:
                return f"the cause is not said: {output[-2000:]}"
            hub.faults.clear()
            if (again := push(run, variables(hub))).returncode != 0:
                return f"the push afterwards: {again.stdout[-1000:]}{again.stderr[-1000:]}"
            queued = [e.path.name for e in entries(run)]
        if queued:
            return f"still queued: {queued}: {output[-2000:]}"
        if hub.faults:
            return "the fault did not happen"
        if not permanent and "trying again in" not in output:
            return f"the failure is not said: {output[-2000:]}"
        if fault == "429" and (waited := hub.waited("/preupload/")) < 3:
            return f"waited {waited:.1f} s where 3 were asked for"
        return missing(hub, run)


def main() -> int:
    """python -m tests.hub.upload_faults SHARDS DIRECTORY: all of them, a JSON object a line."""
    shards, directory = map(Path, sys.argv[1:])
    prepared, wrong = prepare(directory, shards), 0
    for fault in FAULTS:
        for mode in MODES:
            (place := directory / f"{fault}-{mode}").mkdir()
            problem = inject(fault, mode, place, prepared)
            wrong += problem is not None
            print(json.dumps({"fault": fault, "mode": mode, "problem": problem}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
