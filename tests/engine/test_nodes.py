"""Several nodes: two launchers on one machine that connect over the loopback, and the script for SLURM."""

import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from recipe.checkpoint.format import checkpoints, step_of
from tests.checkpoint import flip_bit
from tests.conftest import ROOT, by_step, environment, forget_after
from tests.engine.conftest import assert_same_losses, settings


def free_port() -> int:
    """A port that nobody listens on, below the range from which the kernel assigns ports."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port := random.randrange(20_000, 30_000)))
            return port


# Each "node" gets a core of its own: two that both use all cores would wait for each other's threads.
CPUS = sorted(os.sched_getaffinity(0))[:2] if shutil.which("taskset") else []
PIPE: dict = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def on_two_nodes(*arguments: str, files, folders=(ROOT, ROOT), rendezvous="static", fault="", script="train.py"):
    """Runs a script under two launchers with a rank each, with these Accelerate files: [(exit code, output)] of the
    launchers."""
    port = free_port()
    options = f"--num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1 --main_process_port {port}"
    options += f" --rdzv_backend {rendezvous}"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--config_file"]
    nodes = []
    for i, (file, folder) in enumerate(zip(files, folders, strict=True)):
        # Which node hosts the store of c10d's rendezvous is decided by addresses, and here both have the same one.
        rank = ["--machine_rank", str(i), *(["--rdzv_conf", f"is_host={int(i == 0)}"] if rendezvous == "c10d" else [])]
        taskset = ["taskset", "-c", str(CPUS[i % len(CPUS)])] if CPUS else []
        path = ROOT / "accelerate_configs" / f"{file}.yaml"
        words = [*taskset, *command, path, *rank, ROOT / "recipe" / script, *arguments]
        nodes.append(subprocess.Popen(words, cwd=folder, env=environment({"RECIPE_FAULT": fault}), **PIPE))
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


DDP, ZERO = 2 * ("multinode-ddp",), 2 * ("multinode-zero1",)
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is for Linux only")


@pytest.mark.slow
@needs_deepspeed
def test_a_signal_to_one_node_stops_both_with_a_checkpoint(shards, one_device, tmp_path):
    """Under ZeRO-1 and c10d's rendezvous, which gives rank 0 to either node."""
    arguments = settings(shards, output_dir=tmp_path / "run")
    nodes = on_two_nodes(*arguments, files=ZERO, rendezvous="c10d", fault="term@step.micro:61/1")
    outputs = [output for _, output in nodes]
    assert [code for code, _ in nodes] == [1, 1], "".join(outputs)
    assert sorted(output.count("\nstopped    before the end") for output in outputs) == [0, 1]
    assert "ZeRO-1 over 2 processes" in "".join(outputs)
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] == [20, 31]  # the signal came in step 31
    assert_same_losses(by_step(tmp_path / "run"), one_device[1], last=30)


@contextmanager
def submit(tmp_path, *arguments: str, **changes: str) -> Iterator[tuple[subprocess.Popen, Path]]:
    """accelerate_configs/slurm.sbatch under the srun and scontrol of tests/engine/slurm, with two nodes: the job, and
    the file of scontrol's arguments. On exit kills all that it has started."""
    calls, port = tmp_path / "scontrol", free_port()
    path = [str(ROOT / "tests" / "engine" / "slurm"), str(Path(sys.executable).parent), os.environ["PATH"]]
    job = {
        "SLURM_JOB_ID": str(port),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SCONTROL_CALLS": str(calls),
        "PATH": ":".join(path),
        "NODE_CPUS": " ".join(map(str, CPUS)),
    }
    command = ["bash", ROOT / "accelerate_configs" / "slurm.sbatch", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(job | changes), start_new_session=True, **PIPE)
    try:
        yield process, calls
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_under_slurm_a_process_that_dies_costs_the_steps_since_the_last_checkpoint(shards, one_device, tmp_path):
    """With two launchers and c10d's rendezvous: after step 34 torchrun restarts both processes, which continue from
    step 20. The losses are those of one device."""
    arguments = settings(shards, output_dir=tmp_path / "run")
    with submit(tmp_path, *arguments, RECIPE_FAULT="kill@step.micro:69/1") as (job, calls):
        output, _ = job.communicate(timeout=300)
    assert job.returncode == 0, output
    assert output.count("exitcode: -9") == 1
    assert "lost       another process of this run, or its node, is gone or does not answer (" in output
    assert "Traceback" not in output
    assert "2 processes x 2 micro-steps" in output
    assert output.count("resume     from step 20") == 1
    lines = by_step(tmp_path / "run")
    assert list(lines) == list(range(51))
    assert_same_losses(lines, one_device[1])
    assert calls.read_text().splitlines() == ["show hostnames node[1-2]"]


ACCELERATE = r"""#!/bin/bash
trap 'exit 1' TERM
printf '%s\n' "$@" "$RECIPE_NODES" > "$RECORD.$SLURM_NODEID.part"
mv "$RECORD.$SLURM_NODEID.part" "$RECORD.$SLURM_NODEID"
[[ $EXIT_CODE ]] && exit "$EXIT_CODE"
for i in {1..300}; do sleep 0.1; done
"""


def submit_with_fake_launcher(tmp_path, *arguments: str, exit_code: str = ""):
    """A job whose launchers record their arguments, and exit with `exit_code`, or else wait for SIGTERM."""
    (tmp_path / "accelerate").write_text(ACCELERATE)
    (tmp_path / "accelerate").chmod(0o755)
    path = f"{ROOT}/tests/engine/slurm:{tmp_path}:{os.environ['PATH']}"
    return submit(tmp_path, *arguments, RECORD=str(tmp_path / "arguments"), EXIT_CODE=exit_code, PATH=path)


def test_slurm_launches_each_node_with_its_rank_and_requeues_the_job_at_the_time_limit(tmp_path):
    arguments = ("--config", "recipe/configs/gpt2.yaml", "--train_text", "To be  or 'not'")
    records = [tmp_path / f"arguments.{node}" for node in (0, 1)]
    with submit_with_fake_launcher(tmp_path, *arguments) as (job, calls):
        deadline = time.monotonic() + 60
        while not all(path.exists() for path in records) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert job.poll() is None
        job.send_signal(signal.SIGUSR1)  # SLURM's notice that the time limit is near
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 1, output
    first, second = (path.read_text().splitlines() for path in records)
    differences = [pair for pair in zip(first, second, strict=True) if len(set(pair)) > 1]
    assert differences == [("0", "1"), ("is_host=1", "is_host=0")]  # the rank, and who hosts the store
    assert first[-6:] == ["recipe/train.py", *arguments, "2"], (
        "with the number of nodes, without all of which none trains"
    )
    options = dict(itertools.pairwise(first))
    assert options["--main_process_ip"] == "127.0.0.1"  # the first of those that scontrol names
    assert (options["--num_machines"], options["--num_processes"], options["--max_restarts"]) == ("2", "2", "3")
    hostnames, requeue = calls.read_text().splitlines()
    assert hostnames == "show hostnames node[1-2]"
    assert requeue.split()[0] == "requeue"
    assert requeue.split()[1].isdigit()


@pytest.mark.parametrize("preempt_time", ["None", "2026-01-01T00:01:00"])
def test_a_slurm_job_with_a_user_error_is_not_requeued_but_one_that_is_preempted(tmp_path, monkeypatch, preempt_time):
    monkeypatch.setenv("PREEMPT_TIME", preempt_time)
    with submit_with_fake_launcher(tmp_path, exit_code="2") as (job, calls):
        output, _ = job.communicate(timeout=60)
    assert job.returncode == 2, output
    assert ("requeue" in calls.read_text()) == (preempt_time != "None")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("none", "run/step_00000040 is not on every node: output_dir must be on a file system"),
        ("another", "run/step_00000040 is another one on this node: output_dir must be on a file system"),
        ("damaged", "run/step_00000040 is damaged on this node: optimizer.safetensors does not match its checksum"),
        ("none on the first", "run/step_00000040 is not on rank 0's node: output_dir must be on a file system"),
    ],
)
def test_a_node_that_does_not_see_the_same_checkpoint_is_refused(problem, message, shards, one_device, tmp_path):
    """Its optimizer state would differ from that of the others, and DDP compares only weights. If only the first node
    has none, as when c10d's rendezvous gives rank 0 to another node, the run would start over."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    for folder in {"none": folders[:1], "none on the first": folders[1:]}.get(problem, folders):
        forget_after(40, shutil.copytree(one_device[0], folder / "run"))
    checkpoint = folders[1] / "run" / "step_00000040"
    if problem == "another":
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        del manifest["files"]["generation_config.json"]
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    elif problem == "damaged":
        flip_bit(checkpoint / "optimizer.safetensors")
    arguments = settings(shards, output_dir="run")  # in each node's own folder
    (code, first), (other_code, second) = on_two_nodes(*arguments, files=DDP, folders=folders)
    assert 0 not in (code, other_code)
    name = "run" if problem == "none on the first" else "run/step_00000040"
    assert f"error: {name} cannot be used on another process; see its error message" in first
    assert f"error: {message}" in second


@pytest.mark.slow
def test_a_node_without_the_earlier_recipe_of_make_best_is_refused(tmp_path):
    """It would search for one, and the nodes would wait for each other's other collective calls."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
        (folder / "my.txt").write_text("To be, or not to be. " * 100)
    (folders[0] / "runs" / "my").mkdir(parents=True)
    (folders[0] / "runs" / "my" / "recipe.yaml").write_text("# From recipe/best.py for 1h of my.txt\n")
    arguments = ("--text", "my.txt", "--hours", "1", "--run_name", "my")
    (code, first), (other_code, second) = on_two_nodes(*arguments, files=DDP, folders=folders, script="best.py")
    assert 0 not in (code, other_code)
    assert "error: the earlier recipe cannot be read on another process; see its error message" in first
    assert "error: runs/my/recipe.yaml: No such file or directory" in second


@pytest.mark.slow
@needs_deepspeed
def test_a_node_with_another_launch_file_is_refused(shards, tmp_path):
    """Under ZeRO it would wait for other collective calls than the node under DDP, for ever."""
    arguments = settings(shards, output_dir=tmp_path / "run")
    (code, _), (other_code, output) = on_two_nodes(*arguments, files=(DDP[0], ZERO[0]))
    assert 0 not in (code, other_code)
    assert "launch 'ZeRO-1' here, 'DDP' on rank 0. Launch the same command" in output


@pytest.mark.slow
def test_fsdp_starts_from_the_weights_of_the_first_process(shards, one_device, tmp_path):
    """As DDP and ZeRO do, whatever a node has as `init_from`: a mixture of two models has no meaning."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder, step in zip(folders, (50, 40), strict=True):
        shutil.copytree(one_device[0] / f"step_{step:08d}", folder / "init")
    arguments = settings(shards, output_dir=tmp_path / "run", init_from="init", max_steps=1, warmup_steps=0)
    nodes = on_two_nodes(*arguments, files=("fsdp", "fsdp"), folders=folders)
    assert [code for code, _ in nodes] == [0, 0], nodes
    assert by_step(tmp_path / "run")[0]["val_loss"] == pytest.approx(one_device[1][50]["val_loss"], abs=1e-5)
