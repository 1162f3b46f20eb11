"""One recipe on every engine: the same losses, the same data, checkpoints that move between all of them.

The files of accelerate_configs/ are those for eight GPUs, here on CPU processes with gloo. XLA's tests are in tests/xla
(make test-xla). Tests not marked `slow` cover one device, ZeRO-3 and FSDP.
"""

import json
import math
import re
import shutil

import pytest
import torch

from recipe.data import tokenizer
from recipe.engine.strategy import TIMEOUT
from recipe.evaluation import continuation
from tests.conftest import assert_equal_tensors, by_step, forget_after, launch, ok, own_model, tensors
from tests.engine.conftest import assert_same_losses, settings
from tests.engine.test_gpu import REFERENCE, curve

NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp": "FSDP"}
SEVERAL = ("-m", "tests.engine.several_runs")


# All are slow but one.
EACH_ENGINE = [name if name == "zero3" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def test_the_cpu_losses_that_a_gpu_has_to_follow_are_current(shards, tmp_path, pytestconfig):
    """A change of numerics updates the file: pytest tests/engine/test_engines.py -k cpu_losses --update_golden"""
    losses = curve(shards, tmp_path / "run", "single", cpu=True)
    if pytestconfig.getoption("update_golden"):
        REFERENCE.write_text(json.dumps(losses, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(REFERENCE.read_text()), abs=1e-4)


@pytest.fixture(scope="session")
def engine_run(shards, one_device, once):
    """Engine -> (directory, output) of two runs: `full` has 50 steps; `moved` continues one device's from step 40."""

    def make_on(engine: str, directory):
        directory.mkdir()
        forget_after(40, shutil.copytree(one_device[0], directory / "moved"))
        runs = f"{directory}/full,{directory}/moved"
        result = ok(launch(engine, 2, *SEVERAL, runs, *settings(shards), real=True))
        unresolved = re.compile(r".*Unable to resolve hostname.*\n")  # gloo's, where /etc/hosts lacks this machine
        assert unresolved.sub("", result.stderr) == ""
        return result.stdout

    return lambda engine: once(f"engine-{engine}", lambda directory: make_on(engine, directory))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "state"), [("fsdp", {"momentum", "rows", "columns", "largest"}), ("zero1", {"momentum", "rows"})]
)
def test_any_optimizers_state_resumes(shards, tmp_path, engine, state):
    """To the bit: a tensor of the parameter's shape; under FSDP one with a number for each of its rows, one with a
    number for each of its columns, and a number, too."""
    script = "-m", "tests.engine.own_optimizer"
    fields = settings(shards, optim="adamw", max_steps=8, warmup_steps=2, save_steps=4)
    ok(launch(engine, 2, *script, f"{tmp_path}/full", *fields))
    forget_after(4, shutil.copytree(tmp_path / "full", tmp_path / "resumed"))
    assert "resume     from step 4" in ok(launch(engine, 2, *script, f"{tmp_path}/resumed", *fields)).stdout
    full, resumed = (tmp_path / name / "step_00000008" for name in ("full", "resumed"))
    kinds = {name.partition(".")[0] for name in tensors(full)} - {"transformer"}
    assert kinds == state
    assert_equal_tensors(full, resumed)


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_losses_in_fp32_are_those_of_one_device(engine_run, one_device, engine):
    directory, output = engine_run(engine)
    lines, expected = by_step(directory / "full"), one_device[1]
    assert list(lines) == list(range(51))
    assert_same_losses(lines, expected, within=1e-5 if engine == "fsdp" else 1e-4)
    assert lines[50]["val_loss"] == pytest.approx(expected[50]["val_loss"], abs=1e-4)
    for step in range(1, 51):
        assert lines[step]["learning_rate"] == expected[step]["learning_rate"]
        # torch's fp32 norm on a CPU is off by up to 3e-4 for sparse gradients; DeepSpeed's is in fp64
        assert lines[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)
    assert "2 processes x 2 micro-steps x 2 sequences" in output
    assert f"{NAMES[engine]} over 2 processes" in output
    assert "_op built" not in output  # DeepSpeed has compiled nothing


@pytest.mark.parametrize("engine", EACH_ENGINE)
def test_a_checkpoint_of_one_device_is_resumed_on_any_engine(engine_run, one_device, engine):
    directory, output = engine_run(engine)
    assert output.count("from step 40") == 1
    assert_same_losses(by_step(directory / "moved"), one_device[1], first=41)


@pytest.mark.parametrize("engines", [["zero3"], pytest.param([*NAMES], marks=pytest.mark.slow)], ids=["zero3", "all"])
def test_a_checkpoint_of_any_engine_is_resumed_on_one_device(shards, engine_run, tmp_path, engines):
    """By way of one device, every engine can then read every other engine's checkpoints."""
    full_runs = {engine: engine_run(engine)[0] / "full" for engine in engines}
    for engine, full_run in full_runs.items():
        forget_after(40, shutil.copytree(full_run, tmp_path / engine))
    runs = ",".join(str(tmp_path / engine) for engine in engines)
    result = ok(launch("single", 1, *SEVERAL, runs, *settings(shards, micro_batch_size=8)))
    assert result.stdout.count("from step 40") == len(engines)
    for engine, full_run in full_runs.items():
        assert_same_losses(by_step(tmp_path / engine), by_step(full_run), first=41)


def test_fsdp_continues_a_run_of_one_device(shards, one_device, tmp_path):
    """For ten steps; then what it gathers, a checkpoint and a sample, equals one device's."""
    run = forget_after(40, shutil.copytree(one_device[0], tmp_path / "run"))
    result = ok(launch("fsdp", 2, "recipe/train.py", *settings(shards, output_dir=run, sample_steps=50)))
    assert "FSDP over 2 processes" in result.stdout
    assert "from step 40" in result.stdout
    lines = by_step(run)
    assert_same_losses(lines, one_device[1], first=41, within=1e-5)
    for step in range(41, 51):
        assert lines[step]["grad_norm"] == pytest.approx(one_device[1][step]["grad_norm"], rel=1e-3)
    weights, expected = (tensors(path / "step_00000050") for path in (run, one_device[0]))
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
    model = own_model(run / "step_00000050").eval()
    with torch.no_grad():
        tokens = continuation(model, tokenizer.encoding().encode_ordinary("\n"), seed=1337)
    assert lines[50]["sample"] == tokenizer.encoding().decode(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_bf16_follows_fp32(shards, one_device, tmp_path, engine):
    ok(launch(engine, 2, "recipe/train.py", *settings(shards, output_dir=tmp_path / "run", precision="bf16")))
    lines, expected = by_step(tmp_path / "run"), one_device[1]
    assert 0 < max(abs(lines[step]["loss"] - expected[step]["loss"]) for step in range(1, 51)) <= 1e-2


def test_fsdp_adds_the_gradients_of_bf16_in_fp32(shards, tmp_path):
    """The mean of two processes' gradients, which the first moment is without a decay, is seldom a number in bf16."""
    options = {"adam_beta1": 0.0, "max_grad_norm": 0.0, "precision": "bf16", "micro_batch_size": 4}
    options |= {"max_steps": 1, "warmup_steps": 0, "eval_steps": "end"}
    ok(launch("fsdp", 2, "recipe/train.py", *settings(shards, output_dir=tmp_path / "run", **options)))
    gradient = tensors(tmp_path / "run" / "step_00000001")["exp_avg.transformer.h.0.mlp.c_fc.weight"]
    assert (gradient != gradient.bfloat16()).float().mean() > 0.5


@pytest.fixture(scope="session")
def probe(once):
    """What tests/engine/probe.py prints on an engine, by rank."""

    def get(config: str, processes: int, precision: str, mode: str) -> list[dict]:
        def make(directory):
            result = launch(config, processes, "-m", "tests.engine.probe", precision, mode)
            lines = [json.loads(line[6:]) for line in result.stdout.splitlines() if line.startswith("PROBE ")]
            assert len(lines) == processes, result.stdout + result.stderr
            return sorted(lines, key=lambda line: line["rank"])

        return once(f"probe-{config}-{processes}-{precision}-{mode}", make)[1]

    return get


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "processes", "precision", "mode"),
    [
        ("ddp", 2, "fp32", "compile"),
        ("zero1", 2, "fp32", "compile"),
        ("zero3", 3, "fp32", "eager"),
        ("fsdp", 2, "fp32", "compile"),
        ("fsdp", 3, "fp32", "eager"),
        ("zero1", 2, "fp16", "eager"),
        ("zero3", 2, "fp16", "eager"),
    ],
)
def test_sharded_state_is_exact_and_skipped_steps_change_nothing(probe, config, processes, precision, mode):
    """Also where no size is divisible by the number of processes; ZeRO's fp16 keeps fp32 weights to the bit. Fails if a
    new version of DeepSpeed changes the private names that the engine uses."""
    unsharded = probe("ddp", 2, "fp32", "compile")[0]
    for line in probe(config, processes, precision, mode):
        main = line["rank"] == 0
        assert line["weights_kept"]
        assert line["optimizer_state_kept"]
        assert line["names"] == ([28, 56] if main else [0, 0])
        assert line["steps"] == 10  # 7 loaded, 3 taken
        assert not line["timed"]
        assert set(line["timeouts"]) == {TIMEOUT.total_seconds()}
        if config != "ddp":
            assert line["state_bytes"] == pytest.approx(unsharded["state_bytes"] / processes, rel=0.05)
        if mode == "compile":
            assert (line["graphs"], line["breaks"]) == (1, [])
        if processes == 2:
            assert line["norm"] == pytest.approx(unsharded["norm"], rel=1e-6 if precision == "fp32" else 1e-3)
        if precision == "fp16":
            assert line["norm"] != unsharded["norm"]
            assert (line["scaler"]["scale"], line["scaler"]["_growth_tracker"]) == (2**16, 2)  # torch's: 3
        assert not math.isfinite(line["norm_of_overflow"])
        assert line["changed_by_overflow"] == 0
        if not config.startswith("zero"):
            assert 0.3 < line["norm_of_spike"] < 3
            assert line["changed_by_spike"] == 0
        assert 0.3 < line["norm_after"] < 3
        assert line["changed_after"] == (3 * 28 + 1 if main else 1)
        assert line["skipped"] == 1
