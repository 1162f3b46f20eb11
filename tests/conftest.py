"""Helpers of the tests."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from tests import processes as programs
from tests.processes import ROOT, environment

# Tests must not depend on, or wait for, a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run side by side, with more threads than cores: one that waits for the others must not do so at full speed.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHAKESPEARE = ROOT / "recipe" / "data" / "tiny_shakespeare.txt"

# The tiny configuration: every run of a test starts from it. fp32, so that numbers mean the same everywhere. The
# vocabulary is GPT-2's, so that time goes with the tokens.
TINY = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 64,
    "sequence_length": 16,
    "total_batch_tokens": 64,
    "micro_batch_size": 4,
    "max_steps": 20,
    "optim": "adamw",
    "learning_rate": 1e-2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
    "warmup_steps": 4,
    "precision": "fp32",
    "logging_steps": 1,
    "eval_steps": 10,
    "save_steps": 10,
    "eval_tokens": 256,
}

# The same on every engine, accumulation and clipping at work. A rate of 1e-2 would blow up rounding itself.
EQUAL = TINY | {
    "total_batch_tokens": 128,
    "max_steps": 50,
    "learning_rate": 1e-3,
    "warmup_steps": 10,
    "micro_batch_size": 2,
    "eval_steps": 25,
    "save_steps": 25,
}


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """name, make -> a directory that make(directory) has filled, and what it returned, through JSON: made by the first
    of pytest-xdist's workers that asks, while others who ask wait."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make) -> tuple:
        directory, returned = shared / name, shared / f"{name}.json"
        with FileLock(shared / f"{name}.lock"):
            if not returned.exists():
                shutil.rmtree(directory, ignore_errors=True)
                returned.write_text(json.dumps(make(directory)))
        return directory, json.loads(returned.read_text())

    return get


@pytest.fixture(scope="session")
def shards(once) -> Path:
    """A directory of shards of the first 120 kB of tiny Shakespeare."""
    from recipe.config import DataConfig
    from recipe.data.prepare import prepare

    def make(directory: Path):
        directory.mkdir()
        text = directory / "text.txt"
        text.write_text(SHAKESPEARE.read_text()[:120_000])
        prepare(DataConfig(train_text=str(text), dataset_name=str(directory / "shards"), val_fraction=0.1))

    return once("data", make)[0] / "shards"


@pytest.fixture(autouse=True)
def messages_reach_caplog():
    """Also after a test that has called a command's main(), which sends them to standard output."""
    yield
    logger = logging.getLogger("recipe")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.INFO)


def pytest_addoption(parser):
    parser.addoption("--update_golden", action="store_true", help="write this machine's losses to the golden files")


def flags(**fields) -> list[str]:
    return [f"--{k}={v}" for k, v in fields.items()]


def launch(
    config: str,
    processes: int,
    *command,
    env: dict | None = None,
    cwd: Path = ROOT,
    timeout: int = 600,
    real: bool = False,
) -> subprocess.CompletedProcess:
    """A script under a file of accelerate_configs/, in `processes` processes; `real`: through the launcher itself."""
    if config.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed, which is installed on Linux only")
    if real:
        path = ROOT / "accelerate_configs" / f"{config}.yaml"
        options = f"--quiet --num_processes {processes} --main_process_port 0 --config_file"
        words = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), path, *command]
        return subprocess.run(words, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=timeout)
    asked = {}
    if config.startswith("zero"):
        asked = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": f"ds_configs/{config}.json",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        }
    if config == "fsdp":
        asked = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    return programs.run(*command, env=asked | (env or {}), cwd=cwd, processes=processes, timeout=timeout)


def ok(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """What a program that has succeeded has printed."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def run_train(
    *arguments: str, processes: int = 1, env: dict | None = None, cwd: Path = ROOT, timeout: int = 600
) -> subprocess.CompletedProcess:
    """Runs recipe/train.py as a user would: plain python, or two and more CPU processes as accelerate starts them."""
    ranks = processes if processes > 1 else 0
    return programs.run(ROOT / "recipe/train.py", *arguments, env=env, cwd=cwd, processes=ranks, timeout=timeout)


def interpreted(*words: str) -> dict | list:
    """What a Python program prints, as JSON, whose kernels Triton's interpreter runs: in a process of its own, since
    TRITON_INTERPRET counts when Triton is imported."""
    command, variables = [sys.executable, *words], os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("the interpreter of this Triton (3.6) cannot count with this numpy (2.5)")
    return json.loads(ok(result).stdout)


@contextmanager
def files_of_at_most(size: int):
    """In the place of a full disk: a limit of what this process may write to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_step(run: Path) -> dict[int, dict]:
    return {line["step"]: line for line in metrics(run)}


def tensors(checkpoint: Path) -> dict:
    """The weights and the optimizer state."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def assert_equal_tensors(checkpoint: Path, expected: Path) -> None:
    """Weights and optimizer state are equal to the bit."""
    actual, wanted = tensors(checkpoint), tensors(expected)
    assert actual.keys() == wanted.keys()
    assert [name for name in actual if not actual[name].equal(wanted[name])] == []


def train(shards, run, processes=1, **fields):
    """A tiny run into `run`; its metrics by step."""
    settings = TINY | {"dataset_name": shards, "output_dir": run} | fields
    result = ok(run_train(*flags(**settings), processes=processes))
    return by_step(run), result.stdout


@pytest.fixture(scope="session")
def whole_run(shards, once):
    """The tiny run, dropout on, uninterrupted: (directory, metrics, output)."""
    run, output = once("whole", lambda run: train(shards, run, dropout=0.1)[1])
    return run, by_step(run), output


def forget_after(step: int, run: Path) -> Path:
    """The run as it was after a step: without the checkpoints that it saved later."""
    for later in run.glob("step_*"):
        if int(later.name[5:]) > step:
            shutil.rmtree(later)
    return run


def own_model(directory: Path):
    """This project's model with the configuration and the weights of a directory."""
    from recipe.model.gpt2 import GPT2LMHeadModel, read_config, read_weights

    model = GPT2LMHeadModel(read_config(str(directory)))
    model.load_weights(read_weights(str(directory)), str(directory))
    return model


@pytest.fixture(scope="session")
def tiny_gpt2():
    """n_positions, initializer_range -> a random GPT-2 with GPT-2's tokenizer, as the evaluation commands load one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    from eval import common

    bpe = ROOT / "recipe" / "data" / "gpt2_bpe"
    tokenizer = GPT2TokenizerFast(vocab=str(bpe / "encoder.json"), merges=str(bpe / "vocab.bpe"))

    def make(n_positions: int = 64, initializer_range: float = 0.3) -> common.Loaded:
        torch.manual_seed(0)
        # The wide initialisation spreads the logits: nearly uniform ones would agree whatever the scorer did.
        sizes = {"n_positions": n_positions, "n_layer": 2, "n_embd": 32, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=initializer_range)).eval()
        return common.Loaded("tiny", None, model, tokenizer)

    return make
