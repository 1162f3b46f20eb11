"""One recipe on every engine: the same losses, the same data, checkpoints that move between all of them.

The files of accelerate_configs/ are those that a machine with eight GPUs uses, here on CPU processes with gloo.
XLA's part is in tests/xla/ (make test-xla).
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.checkpoint.format import checkpoints, step_of
from tests.conftest import EQUAL, ROOT, by_step, environment, flags, launch, run_train

# name: (file of accelerate_configs/, processes, what differs of the recipe)
ENGINES = {
    "single": ("single", 1, {"micro_batch_size": 8}),
    "accumulation": ("single", 1, {}),
    "ddp": ("ddp", 2, {}),
    "ddp4": ("ddp", 4, {"micro_batch_size": 1}),
    "zero1": ("zero1", 2, {}),
    "zero2": ("zero2", 2, {}),
    "zero3": ("zero3", 2, {}),
}
MATRIX = ["single", "ddp", "zero1", "zero2", "zero3"]


def settings(name: str, shards, **fields) -> list[str]:
    return flags(**(EQUAL | {"dataset_name": shards, "save_steps": 20} | ENGINES[name][2] | fields))


@pytest.fixture(scope="session")
def run_of(shards, once):
    """name, precision -> (run directory, metrics by step, output) of 50 steps, started once, as a user would."""

    def run(name: str, precision: str = "fp32"):
        def make(directory):
            config, processes, _ = ENGINES[name]
            arguments = settings(name, shards, output_dir=directory, precision=precision)
            real = precision == "fp32" and name in MATRIX  # each file once
            result = launch(config, processes, "recipe/train.py", *arguments, real=real)
            assert result.returncode == 0, result.stdout + result.stderr
            assert not real or result.stderr == ""  # to the end of the interpreter, which a fork has not
            return result.stdout

        directory, output = once(f"{name}-{precision}", make)
        return directory, by_step(directory), output

    return run


def distance(a: dict, b: dict, steps) -> float:
    return max(abs(a[step]["loss"] - b[step]["loss"]) for step in steps)


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "single"])
def test_fp32_losses_are_the_same_on_every_engine(run_of, name):
    _, reference, _ = run_of("single")
    _, lines, output = run_of(name)
    assert list(lines) == list(range(51))
    assert distance(lines, reference, range(1, 11)) <= 1e-5
    assert distance(lines, reference, range(1, 51)) <= 1e-4
    assert lines[50]["val_loss"] == pytest.approx(reference[50]["val_loss"], abs=1e-4)
    assert reference[50]["loss"] < reference[1]["loss"] - 0.5  # there was something to agree on
    for step in range(1, 51):
        assert lines[step]["learning_rate"] == reference[step]["learning_rate"]
        # torch's fp32 norm on a CPU is off by up to 3e-4 for sparse gradients; DeepSpeed's is taken in fp64
        assert lines[step]["grad_norm"] == pytest.approx(reference[step]["grad_norm"], rel=1e-3)
    _, processes, changed = ENGINES[name]
    micro = (EQUAL | changed)["micro_batch_size"]
    assert f"{processes} process{'es' if processes > 1 else ''} x " in output
    assert f" x {micro} sequence" in output
    if name.startswith("zero"):
        assert f"ZeRO-{name[-1]} over 2 processes" in output
        assert "_op built" not in output  # DeepSpeed has compiled nothing


@pytest.mark.parametrize("name", ["single", "ddp", "zero1", "zero3"])
def test_bf16_follows_fp32_on_every_engine(run_of, name):
    _, reference, _ = run_of("single")
    _, lines, _ = run_of(name, "bf16")
    assert 0 < distance(lines, reference, range(1, 51)) <= 1e-2


def test_every_engine_reads_the_same_tokens(shards):
    """The hash of all tokens of the 50 steps, for each way that the engines cut them."""
    from recipe.config import batch_arithmetic, parse_config
    from recipe.data.dataset import TokenDataset
    from recipe.data.shards import find_shards

    hashes = set()
    for name, (_, processes, _) in ENGINES.items():
        for devices in (1, 4):  # a TPU's, behind one process
            config = parse_config(settings(name, shards))
            if devices > 1 and processes > 1:
                continue
            batch = batch_arithmetic(config, processes, devices)
            source = TokenDataset(
                find_shards(str(shards), "train"), EQUAL["sequence_length"], batch.sequences, config.run.seed
            )
            digest = hashlib.sha256()
            for step in range(50):
                for micro_step in range(batch.accumulation):
                    for rank in range(processes):
                        digest.update(source.rows(step, *batch.slice(micro_step, rank)).tobytes())
            hashes.add(digest.hexdigest())
    assert len(hashes) == 1


@pytest.fixture(scope="session")
def resumed(shards, run_of, once):
    """target -> {source: metrics by step} of runs that the engine `source` saved at step 40 and `target` ended."""

    def resume(target: str) -> dict:
        def make(directory):
            for source in MATRIX:
                shutil.copytree(run_of(source)[0], directory / source)
                shutil.rmtree(directory / source / "step_00000050")
            config, processes, _ = ENGINES[target]
            directories = ",".join(str(directory / source) for source in MATRIX)
            result = launch(config, processes, "tests/engine/several_runs.py", directories, *settings(target, shards))
            assert result.returncode == 0, result.stdout + result.stderr
            assert result.stdout.count("from step 40") == len(MATRIX)

        directory, _ = once(f"resumed-{target}", make)
        return {source: by_step(directory / source) for source in MATRIX}

    return resume


@pytest.mark.parametrize("source", MATRIX)
@pytest.mark.parametrize("target", MATRIX)
def test_a_checkpoint_of_any_engine_is_resumed_by_any_other(run_of, resumed, source, target):
    _, expected, _ = run_of(source)
    lines = resumed(target)[source]
    assert list(lines) == list(range(51))
    assert distance(lines, expected, range(41, 46)) <= 1e-5
    assert distance(lines, expected, range(41, 51)) <= 1e-4


@pytest.fixture(scope="session")
def probe(once):
    """What tests/engine/probe.py found on an engine, process by process."""

    def get(config: str, processes: int, precision: str = "fp32", mode: str = "eager") -> list[dict]:
        def make(directory):
            result = launch(config, processes, "tests/engine/probe.py", precision, mode)
            found = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("PROBE ")]
            assert len(found) == processes, result.stdout + result.stderr
            return sorted(found, key=lambda line: line["rank"])

        return once(f"probe-{config}-{processes}-{precision}-{mode}", make)[1]

    return get


@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("ddp", 2), ("zero1", 2)])
def test_compiling_gives_one_graph_without_a_break(probe, config, processes):
    for line in probe(config, processes, "fp32", "compile"):
        assert (line["graphs"], line["breaks"]) == (1, [])


def test_zero_shards_the_optimizer_state_and_puts_it_together_again(probe):
    """Also where nothing divides by the number of processes. DeepSpeed's privates are used in its engine alone;
    where a new version moves them, this is the test that says so."""
    whole = probe("ddp", 2, "fp32", "compile")[0]
    for config, processes, mode in (("zero1", 2, "compile"), ("zero3", 3, "eager")):
        for line in probe(config, processes, "fp32", mode):
            assert line["weights_kept"], config
            assert line["optimizer_state_kept"], config
            assert line["names"] == ([28, 56] if line["rank"] == 0 else [0, 0])
            assert line["steps"] == whole["steps"] == 10  # 7 loaded, 3 made
            assert line["state_bytes"] == pytest.approx(whole["state_bytes"] / processes, rel=0.05)
            if processes == 2:
                assert line["norm"] == pytest.approx(whole["norm"], rel=1e-6)


@pytest.mark.parametrize("config", ["zero1", "zero3"])
def test_fp16_under_zero_keeps_fp32_weights_and_scales_the_loss(probe, config):
    """DeepSpeed's native fp16 makes its fp32 weights from fp16 ones; ours are put back, bit for bit."""
    whole = probe("ddp", 2, "fp32", "compile")[0]
    for line in probe(config, 2, "fp16"):
        assert line["weights_kept"]
        assert line["optimizer_state_kept"]
        assert line["norm"] == pytest.approx(whole["norm"], rel=1e-3)
        assert line["norm"] != whole["norm"]
        assert line["scaler"]["scale"] == 2**16
        assert line["scaler"]["_growth_tracker"] == 3


@pytest.mark.parametrize(
    ("config", "processes", "precision", "mode"),
    [
        ("ddp", 2, "fp32", "compile"),
        ("zero1", 2, "fp32", "compile"),
        ("zero3", 3, "fp32", "eager"),
        ("zero1", 2, "fp16", "eager"),
        ("zero3", 2, "fp16", "eager"),
    ],
)
def test_a_step_left_out_leaves_nothing_behind(probe, config, processes, precision, mode):
    """Neither one with an overflow nor a finite one that is called a spike; and the next one is like any other."""
    for line in probe(config, processes, precision, mode):
        assert not math.isfinite(line["norm_of_overflow"])
        assert 0.3 < line["norm_of_spike"] < 3
        assert 0.3 < line["norm_after"] < 3
        assert (line["changed_by_overflow"], line["changed_by_spike"]) == (0, 0)
        assert line["changed_after"] == (3 * 28 + 1 if line["rank"] == 0 else 1)
        assert line["skipped"] == 1


def test_a_run_that_diverges_under_zero_ends_like_any_other(shards, tmp_path):
    broken = {"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 12, "logging_steps": 5, "eval_steps": 0}
    arguments = settings("zero1", shards, output_dir=tmp_path / "run", **broken)
    assert "the validation loss at step 12 is nan: the weights are spoilt" in refused("zero1", 2, *arguments)
    arguments = settings("zero1", shards, output_dir=tmp_path / "other", max_skipped_steps=3, **broken)
    assert "4 steps in a row, by step 5, were skipped" in refused("zero1", 2, *arguments)


# Below those that a kernel gives away by itself, and for each of pytest-xdist's workers a thousand of its own, begun
# elsewhere by each test run.
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
PORTS = [20_000 + 1000 * (WORKER % 10) + (os.getpid() + i) % 1000 for i in range(1000)]


def free_port() -> int:
    """One that nobody listens on, and that was not returned before."""
    while PORTS:
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port := PORTS.pop()))
            return port
    raise AssertionError("no free port")


# Of two "machines" on one, each would take all cores, and their threads wait for one another.
CPUS = sorted(os.sched_getaffinity(0))[:2] if shutil.which("taskset") else []


def on_two_machines(config: str, *arguments: str, folders=(ROOT, ROOT), rendezvous="static", fault=""):
    """Two launchers with a rank each that meet on the loopback: [(exit code, output)] of them."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        ROOT / "accelerate_configs" / f"{config}.yaml",
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(port),
        "--rdzv_backend",
        rendezvous,
    ]
    nodes = []
    for i, folder in enumerate(folders):
        # Machines tell by their addresses who keeps the store of c10d's rendezvous; here they have the same one.
        here = ["--machine_rank", str(i), *(["--rdzv_conf", f"is_host={int(i == 0)}"] if rendezvous == "c10d" else [])]
        core = ["taskset", "-c", str(CPUS[i % len(CPUS)])] if CPUS else []
        words = [*core, *command, *here, ROOT / "recipe" / "train.py", *arguments]
        pipes = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        nodes.append(subprocess.Popen(words, cwd=folder, env=environment({"RECIPE_FAULT": fault}), **pipes))
    try:
        outputs = [node.communicate(timeout=300)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, output) for node, output in zip(nodes, outputs, strict=True)]


def test_two_machines_are_one_run(shards, run_of, tmp_path):
    arguments = settings("ddp", shards, output_dir=tmp_path / "run")
    (code, first), (other_code, second) = on_two_machines("multinode-ddp", *arguments)
    assert (code, other_code) == (0, 0), first + second
    lines = by_step(tmp_path / "run")
    assert distance(lines, run_of("single")[1], range(1, 11)) <= 1e-5
    assert distance(lines, run_of("single")[1], range(1, 51)) <= 1e-4
    assert "2 processes x 2 micro-steps" in first
    assert "step 50" not in second  # one process of all of them talks


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is installed on Linux only")
def test_where_one_machine_is_told_to_stop_both_do_with_a_checkpoint(shards, run_of, tmp_path):
    """Under ZeRO-1 and c10d's rendezvous, which gives either of them rank 0."""
    arguments = settings("zero1", shards, output_dir=tmp_path / "run")
    nodes = on_two_machines("multinode-zero1", *arguments, rendezvous="c10d", fault="term@step.begin:31/1")
    outputs = [output for _, output in nodes]
    assert [code for code, _ in nodes] == [1, 1], "".join(outputs)
    assert sorted(output.count("\nstopped    before the end") for output in outputs) == [0, 1]
    assert "ZeRO-1 over 2 processes" in "".join(outputs)
    assert [step_of(path) for path in checkpoints(tmp_path / "run")] in ([20, 31], [20, 32])
    assert distance(by_step(tmp_path / "run"), run_of("single")[1], range(1, 31)) <= 1e-4


def submit(tmp_path, *arguments: str, fault: str = "", **changes: str) -> tuple[subprocess.Popen, Path]:
    """accelerate_configs/slurm.sbatch under the srun and scontrol of tests/engine/slurm, a process a node: what
    runs, and the file with what scontrol was asked for."""
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
        "RECIPE_FAULT": fault,
    }
    command = ["bash", ROOT / "accelerate_configs" / "slurm.sbatch", *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(job | changes),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ), calls


def test_under_slurm_a_process_that_dies_costs_the_steps_since_the_last_checkpoint(shards, run_of, tmp_path):
    """Two launchers meet by c10d's rendezvous; torchrun starts both processes again, after step 34, from step 20."""
    arguments = settings("ddp", shards, output_dir=tmp_path / "run")
    job, calls = submit(tmp_path, *arguments, fault="kill@step.begin:35/1")
    try:
        output, _ = job.communicate(timeout=300)
    finally:
        end_all(job)
    assert job.returncode == 0, output
    assert output.count("exitcode: -9") == 1
    assert "lost       another process of this run, or its machine, is gone or does not answer (" in output
    assert "at most 3 more times, and once all machines are there it goes on from the last checkpoint" in output
    assert "Traceback" not in output
    assert output.count("resume     from step 20") == 1
    lines = by_step(tmp_path / "run")
    assert list(lines) == list(range(51))
    assert distance(lines, run_of("single")[1], range(1, 11)) <= 1e-5
    assert distance(lines, run_of("single")[1], range(1, 51)) <= 1e-4
    assert calls.read_text().splitlines() == ["show hostnames node[1-2]"]


def end_all(job: subprocess.Popen) -> None:
    """The job and whatever it has started, if they are still there."""
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


ACCELERATE = r"""#!/bin/bash
trap 'exit 1' TERM
printf '%s\n' "$@" > "$SEEN.$SLURM_NODEID.half" && mv "$SEEN.$SLURM_NODEID.half" "$SEEN.$SLURM_NODEID"
[[ $THEN == wait ]] || exit "$THEN"
for i in {1..300}; do sleep 0.1; done
"""


def slurm_job(tmp_path, then: str, *arguments: str) -> tuple[subprocess.Popen, Path]:
    """A job whose launchers write down their arguments, and end with a code or wait to be told to stop."""
    (tmp_path / "accelerate").write_text(ACCELERATE)
    (tmp_path / "accelerate").chmod(0o755)
    path = f"{ROOT}/tests/engine/slurm:{tmp_path}:{os.environ['PATH']}"
    return submit(tmp_path, *arguments, SEEN=str(tmp_path / "seen"), THEN=then, PATH=path)


def test_slurms_nodes_are_launched_alike_but_for_who_keeps_the_store(tmp_path):
    job, calls = slurm_job(tmp_path, "0", "--config", "recipe/configs/gpt2.yaml", "--sample_prompt", "To be  or 'not'")
    try:
        output, _ = job.communicate(timeout=60)
    finally:
        end_all(job)
    assert job.returncode == 0, output
    first, second = ((tmp_path / f"seen.{node}").read_text().splitlines() for node in (0, 1))
    assert [pair for pair in zip(first, second, strict=True) if len(set(pair)) > 1] == [
        ("0", "1"),
        ("is_host=1", "is_host=0"),
    ]
    assert first[-5:] == [
        "recipe/train.py",
        "--config",
        "recipe/configs/gpt2.yaml",
        "--sample_prompt",
        "To be  or 'not'",
    ]
    given = dict(itertools.pairwise(first))
    assert given["--main_process_ip"] == "127.0.0.1"  # the first of those that scontrol names
    assert (given["--num_machines"], given["--num_processes"], given["--max_restarts"]) == ("2", "2", "3")
    assert calls.read_text().splitlines() == ["show hostnames node[1-2]"]


@pytest.mark.parametrize(
    ("then", "told", "code", "requeued"),
    [
        ("wait", signal.SIGUSR1, 1, True),  # SLURM's word that the time limit is near
        ("2", None, 2, False),  # a mistake in the command
    ],
)
def test_a_job_that_the_time_limit_stops_is_queued_again(tmp_path, then, told, code, requeued):
    job, calls = slurm_job(tmp_path, then)
    try:
        deadline = time.monotonic() + 30
        while not all((tmp_path / f"seen.{node}").exists() for node in (0, 1)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if told:
            assert job.poll() is None
            job.send_signal(told)
        output, _ = job.communicate(timeout=30)
    finally:
        end_all(job)
    assert job.returncode == code, output
    again = [line for line in calls.read_text().splitlines() if line.startswith("requeue")]
    assert len(again) == requeued
    assert not again or again[0].split()[1].isdigit()


def test_a_checkpoint_that_only_one_machine_sees_is_refused_on_both(shards, run_of, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    second.mkdir()
    shutil.copytree(run_of("ddp")[0], first / "run")
    shutil.rmtree(first / "run" / "step_00000050")
    arguments = settings("ddp", shards, output_dir="run")  # within each machine's own folder
    for code, output in on_two_machines("multinode-ddp", *arguments, folders=(first, second)):
        assert code != 0
        assert "error: run/step_00000040 is not on every node: output_dir must be on a file system" in output


def refused(config, processes: int, *arguments, env: dict | None = None) -> str:
    result = launch(config, processes, "recipe/train.py", *arguments, env=env, real=True)
    assert result.returncode != 0
    errors = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stdout + result.stderr
    return errors[0]


def file_like(tmp_path, config: str, *replacements: tuple[str, str]):
    text = (ROOT / "accelerate_configs" / f"{config}.yaml").read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / f"{config}.yaml"
    path.write_text(text)
    return path


def test_one_process_where_two_were_asked_for_is_refused(tmp_path):
    path = file_like(tmp_path, "ddp", ("MULTI_GPU", "MULTI_CPU"))
    message = refused(path, 2, "--dry_run")
    assert "asks for several processes, but its distributed_type starts only one" in message
    assert "accelerate_configs/ddp.yaml" in message


def test_a_model_without_its_wrapper_is_refused():
    from recipe.engine.base import Engine
    from recipe.errors import UserError

    engine = Engine.__new__(Engine)
    engine.world = 2
    engine.accelerator = SimpleNamespace(prepare=lambda *objects: objects)
    with pytest.raises(UserError, match="without DDP; launch with accelerate_configs/ddp"):
        engine.prepare(None, None, None, 1.0)


def test_zero_refuses_an_optimizer_that_it_would_resume_as_another():
    import torch

    from recipe.engine.deepspeed import ZeroEngine
    from recipe.errors import UserError

    for kind in (torch.optim.RAdam, torch.optim.Adam):
        with pytest.raises(UserError, match=rf"ZeRO knows AdamW alone, not {kind.__name__}; launch with accelerate_"):
            ZeroEngine.__new__(ZeroEngine).prepare(None, kind([torch.zeros(1)]), None, 1.0)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP is not supported; accelerate_configs/zero3.yaml"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "the Accelerate file says mixed_precision bf16, the recipe fp32"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "start DeepSpeed with accelerate launch"),
    ],
)
def test_an_environment_that_would_change_the_run_is_refused(environment, message):
    result = run_train("--precision", "fp32", "--dry_run", env=environment)
    assert result.returncode == 2
    assert message in result.stderr


def test_zero_without_a_gpu_wants_to_be_told(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    message = refused("zero1", 2, "--dry_run", env={"ACCELERATE_USE_CPU": "false"})
    assert "no GPU was found; for ZeRO on the CPU set ACCELERATE_USE_CPU=true" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 3},
            "train_micro_batch_size_per_gpu is 3, but the recipe makes it 8; leave it",
        ),
        ({"train_batch_size": 64}, "zero.json: train_batch_size is 64, but the recipe makes it 16"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is not about sharding and belongs to the recipe; take it out"),
        ({"bf16": {"enabled": True}}, "bf16 is not about sharding"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0; 1, 2 and 3 are supported"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types is not about sharding"),
    ],
)
def test_a_sharding_file_that_decides_more_than_sharding_is_refused(change, message):
    from recipe.engine.deepspeed import check_sharding_only
    from recipe.errors import UserError

    ours = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    shipped = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    check_sharding_only(shipped | {"gradient_clipping": 1.0, "fp16": {"enabled": False}}, ours, "zero.json")
    with pytest.raises(UserError, match=message):
        check_sharding_only(shipped | change, ours, "zero.json")


def test_a_launch_with_such_a_file_is_refused(tmp_path, shards):
    config = json.loads((ROOT / "ds_configs" / "zero1.json").read_text()) | {"gradient_clipping": 0.5}
    (tmp_path / "zero.json").write_text(json.dumps(config))
    path = file_like(tmp_path, "zero1", ("ds_configs/zero1.json", str(tmp_path / "zero.json")))
    message = refused(path, 1, *settings("zero1", shards, output_dir=tmp_path / "run"))
    assert "zero.json: gradient_clipping is 0.5, but the recipe makes it 1.0" in message
