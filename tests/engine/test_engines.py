"""One recipe on every engine: the same losses, the same data, checkpoints that move between all of them.

The files of accelerate_configs/ are those that a machine with eight GPUs uses, here on CPU processes with gloo. XLA's
part is in tests/xla/ (make test-xla). Without `slow`: one device, ZeRO-3, FSDP and
checkpoints that move between them.
"""

import json
import math
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
OTHERS = list(NAMES)
SEVERAL = ("-m", "tests.engine.several_runs")


def slow_but(names, fast: str) -> list:
    return [name if name == fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def test_the_losses_that_a_gpu_has_to_follow(shards, tmp_path, pytestconfig):
    """A change of numerics updates the file: pytest tests/engine/test_engines.py -k has_to_follow --update_golden"""
    losses = curve(shards, tmp_path / "run", "single", cpu=True)
    if pytestconfig.getoption("update_golden"):
        REFERENCE.write_text(json.dumps(losses, indent=1) + "\n")
    assert losses == pytest.approx(json.loads(REFERENCE.read_text()), abs=1e-4)


@pytest.fixture(scope="session")
def engine_run(shards, one_device, once):
    """Engine -> (directory of two runs, output): `full` of 50 steps, and `moved`, the last ten of one device's."""

    def make_on(engine: str, directory):
        directory.mkdir()
        forget_after(40, shutil.copytree(one_device[0], directory / "moved"))
        runs = f"{directory}/full,{directory}/moved"
        result = ok(launch(engine, 2, *SEVERAL, runs, *settings(shards), real=True))
        # Accelerate warns that an engine of DeepSpeed's is already there, since these are two runs.
        assert [line for line in result.stderr.splitlines() if "currently tied for this" not in line] == []
        return result.stdout

    return lambda engine: once(f"engine-{engine}", lambda directory: make_on(engine, directory))


@pytest.mark.parametrize("engine", slow_but(OTHERS, "zero3"))
def test_losses_in_fp32_are_those_of_one_device(engine_run, one_device, engine):
    directory, output = engine_run(engine)
    lines, expected = by_step(directory / "full"), one_device[1]
    assert list(lines) == list(range(51))
    assert_same_losses(lines, expected, within=1e-5 if engine == "fsdp" else 1e-4)
    assert lines[50]["val_loss"] == pytest.approx(expected[50]["val_loss"], abs=1e-4)
    for step in range(1, 51):
        assert lines[step]["learning_rate"] == expected[step]["learning_rate"]
        # torch's fp32 norm on a CPU is off by up to 3e-4 for sparse gradients; DeepSpeed's is taken in fp64
        assert lines[step]["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=1e-3)
    assert "2 processes x 2 micro-steps x 2 sequences" in output
    assert f"{NAMES[engine]} over 2 processes" in output
    assert "_op built" not in output  # DeepSpeed has compiled nothing


@pytest.mark.parametrize("engine", slow_but(OTHERS, "zero3"))
def test_a_checkpoint_of_one_device_is_resumed_on_any_engine(engine_run, one_device, engine):
    directory, output = engine_run(engine)
    assert output.count("from step 40") == 1
    assert_same_losses(by_step(directory / "moved"), one_device[1], first=41)


@pytest.mark.parametrize("engines", [["zero3"], pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["zero3", "all"])
def test_a_checkpoint_of_any_engine_is_resumed_on_one_device(shards, engine_run, tmp_path, engines):
    """One file format: what each engine writes for one device, and reads from it, any other reads and writes."""
    full = {engine: engine_run(engine)[0] / "full" for engine in engines}
    for engine, directory in full.items():
        forget_after(40, shutil.copytree(directory, tmp_path / engine))
    runs = ",".join(str(tmp_path / engine) for engine in engines)
    result = ok(launch("single", 1, *SEVERAL, runs, *settings(shards, micro_batch_size=8)))
    assert result.stdout.count("from step 40") == len(engines)
    for engine, directory in full.items():
        assert_same_losses(by_step(tmp_path / engine), by_step(directory), first=41)


def test_fsdp_continues_a_run_of_one_device(shards, one_device, tmp_path):
    """Ten steps, after which all that it has gathered, a checkpoint and a sample, is what one device has."""
    run = forget_after(40, shutil.copytree(one_device[0], tmp_path / "run"))
    result = ok(launch("fsdp", 2, "recipe/train.py", *settings(shards, output_dir=run, sample_steps=50)))
    assert "FSDP over 2 processes" in result.stdout
    assert "from step 40" in result.stdout
    lines = by_step(run)
    assert_same_losses(lines, one_device[1], first=41, within=1e-5)
    for step in range(41, 51):
        assert lines[step]["grad_norm"] == pytest.approx(one_device[1][step]["grad_norm"], rel=1e-3)
    weights, expected = (tensors(at / "step_00000050") for at in (run, one_device[0]))
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
    saved = own_model(run / "step_00000050").eval()
    with torch.no_grad():
        tokens = continuation(saved, tokenizer.encoding().encode_ordinary("\n"), seed=1337)
    assert lines[50]["sample"] == tokenizer.encoding().decode(tokens)


@pytest.mark.slow
def test_fsdp_stopped_and_resumed_is_the_same_to_the_bit(shards, engine_run, tmp_path):
    full = engine_run("fsdp")[0] / "full"
    run = forget_after(40, shutil.copytree(full, tmp_path / "run"))
    ok(launch("fsdp", 2, "recipe/train.py", *settings(shards, output_dir=run)))
    assert_equal_tensors(run / "step_00000050", full / "step_00000050")


# Many CPUs compute in bf16 only slowly.
SHORT = {"max_steps": 20, "save_steps": "end"}


@pytest.fixture(scope="session")
def short_run(shards, once):
    """Twenty steps of one device in fp32: metrics by step."""

    def make(directory):
        ok(launch("single", 1, "recipe/train.py", *settings(shards, output_dir=directory, **SHORT)))

    return by_step(once("short-run", make)[0])


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["zero3", "fsdp"])
def test_bf16_follows_fp32(shards, short_run, tmp_path, engine):
    arguments = settings(shards, output_dir=tmp_path / "run", precision="bf16", **SHORT)
    ok(launch(engine, 2, "recipe/train.py", *arguments))
    lines = by_step(tmp_path / "run")
    assert 0 < max(abs(lines[step]["loss"] - short_run[step]["loss"]) for step in range(1, 21)) <= 1e-2


@pytest.fixture(scope="session")
def probe(once):
    """What tests/engine/probe.py found on an engine, process by process."""

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
def test_an_engine_from_inside(probe, config, processes, precision, mode):
    """ZeRO and FSDP shard the optimizer state and put it together again, also where nothing divides by the number of
    processes; its fp16 keeps fp32 weights, bit for bit. Fails where a new version of DeepSpeed moves the private names
    that the engine uses."""
    unsharded = probe("ddp", 2, "fp32", "compile")[0]
    for line in probe(config, processes, precision, mode):
        main = line["rank"] == 0
        assert line["weights_kept"]
        assert line["optimizer_state_kept"]
        assert line["names"] == ([28, 56] if main else [0, 0])
        assert line["steps"] == 10  # 7 loaded, 3 made
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
        # A skipped step leaves nothing behind, whether it overflows or is a finite spike; the next one is like any.
        assert not math.isfinite(line["norm_of_overflow"])
        assert line["changed_by_overflow"] == 0
        if config.startswith("zero"):
            assert "skip_loss_z is not supported under ZeRO" in line["refused"]
        else:
            assert 0.3 < line["norm_of_spike"] < 3
            assert line["changed_by_spike"] == 0
        assert 0.3 < line["norm_after"] < 3
        assert line["changed_after"] == (3 * 28 + 1 if main else 1)
        assert line["skipped"] == 1
