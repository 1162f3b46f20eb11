"""One recipe on every engine: the same losses, the same data, checkpoints that move between all of them.

The files of accelerate_configs/ are those that a machine with eight GPUs uses, here on CPU processes with gloo. XLA's
part is in tests/xla/ (make test-xla). Without `slow`: one device, ZeRO-3, and a checkpoint that moves between them.
"""

import hashlib
import json
import math
import shutil

import pytest

from tests.conftest import EQUAL, by_step, flags, launch

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


def slow_but(names, *fast: str) -> list:
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def settings(name: str, shards, **fields) -> list[str]:
    return flags(**(EQUAL | {"dataset_name": shards, "save_steps": 20} | ENGINES[name][2] | fields))


@pytest.fixture(scope="session")
def run_of(shards, once):
    """name, precision -> (run directory, metrics by step, output) of 50 steps, started once, as a user would."""

    def run(name: str, precision: str = "fp32"):
        def make(directory):
            config, processes, _ = ENGINES[name]
            arguments = settings(name, shards, output_dir=directory, precision=precision)
            real = precision == "fp32" and name in MATRIX[1:]  # each file once
            result = launch(config, processes, "recipe/train.py", *arguments, real=real)
            assert result.returncode == 0, result.stdout + result.stderr
            assert not real or result.stderr == ""  # to the end of the interpreter, which a fork has not
            return result.stdout

        directory, output = once(f"{name}-{precision}", make)
        return directory, by_step(directory), output

    return run


def distance(a: dict, b: dict, steps) -> float:
    return max(abs(a[step]["loss"] - b[step]["loss"]) for step in steps)


@pytest.mark.parametrize("name", slow_but([name for name in ENGINES if name != "single"], "zero3"))
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


@pytest.mark.parametrize("name", slow_but(["single", "zero3"], "single"))
def test_bf16_follows_fp32_on_every_engine(run_of, name):
    _, reference, _ = run_of("single")
    _, lines, _ = run_of(name, "bf16")
    assert 0 < distance(lines, reference, range(1, 51)) <= 1e-2


def test_every_engine_reads_the_same_tokens(shards):
    """The hash of all tokens of the 50 steps, for each way in which engines divide them."""
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
    """target, sources -> {source: metrics by step} of runs that the engine `source` saved at step 40 and `target`
    finished."""

    def resume(target: str, sources: list[str]) -> dict:
        def make(directory):
            for source in sources:
                shutil.copytree(run_of(source)[0], directory / source)
                shutil.rmtree(directory / source / "step_00000050")
            config, processes, _ = ENGINES[target]
            directories = ",".join(str(directory / source) for source in sources)
            result = launch(config, processes, "tests/engine/several_runs.py", directories, *settings(target, shards))
            assert result.returncode == 0, result.stdout + result.stderr
            assert result.stdout.count("from step 40") == len(sources)

        directory, _ = once(f"resumed-{target}-{len(sources)}", make)
        return {source: by_step(directory / source) for source in sources}

    return resume


def assert_moved(lines: dict, expected: dict) -> None:
    assert list(lines) == list(range(51))
    assert distance(lines, expected, range(41, 46)) <= 1e-5
    assert distance(lines, expected, range(41, 51)) <= 1e-4


def test_a_checkpoint_of_zero3_is_resumed_on_one_device(run_of, resumed):
    assert_moved(resumed("single", ["zero3"])["zero3"], run_of("zero3")[1])


@pytest.mark.slow
@pytest.mark.parametrize("target", MATRIX)
def test_a_checkpoint_of_any_engine_is_resumed_by_any_other(run_of, resumed, target):
    for source, lines in resumed(target, MATRIX).items():
        assert_moved(lines, run_of(source)[1])


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


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("ddp", 2), ("zero1", 2)])
def test_compiling_gives_one_graph_without_a_break(probe, config, processes):
    for line in probe(config, processes, "fp32", "compile"):
        assert (line["graphs"], line["breaks"]) == (1, [])


@pytest.mark.slow
def test_zero_shards_the_optimizer_state_and_puts_it_together_again(probe):
    """Also where nothing divides by the number of processes. Fails where a new version of DeepSpeed moves the private
    names that the engine uses."""
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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_a_skipped_step_leaves_nothing_behind(probe, config, processes, precision, mode):
    """Neither one that overflows nor a finite one that is taken for a spike; and the next one is like any other."""
    for line in probe(config, processes, precision, mode):
        assert not math.isfinite(line["norm_of_overflow"])
        assert 0.3 < line["norm_of_spike"] < 3
        assert 0.3 < line["norm_after"] < 3
        assert (line["changed_by_overflow"], line["changed_by_spike"]) == (0, 0)
        assert line["changed_after"] == (3 * 28 + 1 if line["rank"] == 0 else 1)
        assert line["skipped"] == 1
