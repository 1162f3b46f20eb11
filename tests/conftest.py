"""Fixtures and helpers of all tests."""

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock

from tests import processes as programs
from tests.processes import ROOT, environment

# Tests must not depend on, or wait for, a network; a company's proxy does not know this machine's servers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run in parallel, with more threads than cores: a thread that waits for others must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")

SHAKESPEARE = ROOT / "recipe" / "data" / "tiny_shakespeare.txt"

# The tiny configuration, from which the runs of all tests start. In fp32, so that numbers agree on all machines. The
# vocabulary is GPT-2's, so most of the time goes into the head, by the number of tokens.
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "precision": "fp32"}
TINY |= {"sequence_length": 16, "total_batch_tokens": 64, "micro_batch_size": 4, "max_steps": 20}
TINY |= {"optim": "adamw", "learning_rate": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
TINY |= {"lr_scheduler_type": "cosine", "warmup_steps": 4}
TINY |= {"logging_steps": 1, "eval_steps": 10, "save_steps": 10, "eval_tokens": 256}

# A run whose losses are compared between engines, with gradient accumulation and clipping. A learning rate of 1e-2
# would amplify rounding.
EQUAL = TINY | {"total_batch_tokens": 128, "micro_batch_size": 2, "eval_steps": 25, "save_steps": 25}
EQUAL |= {"max_steps": 50, "learning_rate": 1e-3, "warmup_steps": 10}


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """A function: name, make -> a directory that make(directory) has filled, and its result, as JSON. The first of
    pytest-xdist's workers that needs it makes it, and the others wait."""
    base_dir = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base_dir = base_dir.parent

    def get(name: str, make) -> tuple:
        directory, result_path = base_dir / name, base_dir / f"{name}.json"
        with FileLock(base_dir / f"{name}.lock"):
            if not result_path.exists():
                shutil.rmtree(directory, ignore_errors=True)
                result_path.write_text(json.dumps(make(directory)))
        return directory, json.loads(result_path.read_text())

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
def signals_are_given_back():
    """Those that a test's strategy has taken over."""
    yield
    if shutdown := sys.modules.get("recipe.engine.shutdown"):
        shutdown.StopSignal.release()


@pytest.fixture(autouse=True)
def messages_reach_caplog():
    """Undoes set_up_logging, which a command's main() calls to print messages on standard output."""
    yield
    logger = logging.getLogger("recipe")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.INFO)


def pytest_addoption(parser):
    parser.addoption("--update_golden", action="store_true", help="write this machine's losses to the golden files")


def flags(**fields) -> list[str]:
    return [f"--{name}={value}" for name, value in fields.items()]


def tiny_flags(shards, run, **fields) -> list[str]:
    """The flags of a tiny run on these shards, in the directory `run`."""
    return flags(**TINY | {"dataset_name": shards, "output_dir": run} | fields)


def launch(
    config: str, processes: int, *command, env: dict | None = None, cwd: Path = ROOT, real: bool = False
) -> subprocess.CompletedProcess:
    """Runs a script in `processes` processes, as `accelerate launch` does with accelerate_configs/<config>.yaml; with
    `real`, through the launcher itself."""
    if config.startswith("zero") and find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed, which is installed on Linux only")
    if real:
        path = ROOT / "accelerate_configs" / f"{config}.yaml"
        options = f"--quiet --num_processes {processes} --main_process_port 0 --config_file"
        argv = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), path, *command]
        return subprocess.run(argv, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=600)
    launcher_env = {}
    if config.startswith("zero"):
        launcher_env = {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": f"ds_configs/{config}.json",
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        }
    if config == "fsdp":
        launcher_env = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    return programs.run(*command, env=launcher_env | (env or {}), cwd=cwd, processes=processes)


def ok(result: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    """The result of a program, which must have succeeded."""
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def refused(result: subprocess.CompletedProcess) -> str:
    """The errors that a program has printed, which must have ended for a mistake of the user's."""
    assert result.returncode == 2, result.stdout + result.stderr
    return result.stderr


def run_train(
    *arguments: str, processes: int = 1, env: dict | None = None, cwd: Path = ROOT, timeout: int = 600
) -> subprocess.CompletedProcess:
    """Runs recipe/train.py as a user does: with Python, or in several CPU processes as `accelerate launch` does."""
    ranks = processes if processes > 1 else 0
    return programs.run(ROOT / "recipe/train.py", *arguments, env=env, cwd=cwd, processes=ranks, timeout=timeout)


def interpreted(*words: str) -> dict | list:
    """The JSON that a Python program prints, with its kernels run by Triton's interpreter: in a new process, since
    Triton reads TRITON_INTERPRET when it is imported."""
    env = os.environ | {"TRITON_INTERPRET": "1"}
    result = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env)
    if "only 0-dimensional arrays can be converted" in result.stderr:
        pytest.skip("Triton 3.6's interpreter does not support numpy 2.5")
    return json.loads(ok(result).stdout)


@contextmanager
def files_of_at_most(size: int):
    """Context: a limit in bytes on each file that this process writes, in place of a full disk."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def recorded(run: Path, *columns: str) -> list[tuple]:
    """The step and these columns of each line of metrics.jsonl."""
    return [tuple(line[column] for column in ("step", *columns)) for line in metrics(run)]


def by_step(run: Path) -> dict[int, dict]:
    return {line["step"]: line for line in metrics(run)}


def tensors(checkpoint: Path) -> dict:
    """The weights and the optimizer state."""
    from safetensors.torch import load_file

    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def assert_equal_tensors(checkpoint: Path, expected: Path) -> None:
    """Asserts that weights and optimizer state are equal to the bit."""
    actual_tensors, expected_tensors = tensors(checkpoint), tensors(expected)
    assert actual_tensors.keys() == expected_tensors.keys()
    assert [name for name, tensor in actual_tensors.items() if not tensor.equal(expected_tensors[name])] == []


def train(shards, run, processes=1, **fields):
    """Trains a tiny run in the directory `run`; returns its metrics by step and its output."""
    result = ok(run_train(*tiny_flags(shards, run, **fields), processes=processes))
    return by_step(run), result.stdout


@pytest.fixture(scope="session")
def whole_run(shards, once):
    """The tiny run, dropout on, uninterrupted: (directory, metrics, output)."""
    run, output = once("whole", lambda run: train(shards, run, dropout=0.1)[1])
    return run, by_step(run), output


def forget_after(step: int, run: Path) -> Path:
    """Deletes the checkpoints after a step, as if the run had been killed then; returns the run's directory."""
    for checkpoint in run.glob("step_*"):
        if int(checkpoint.name[5:]) > step:
            shutil.rmtree(checkpoint)
    return run


@pytest.fixture
def in_process(monkeypatch, capsys):
    """argv -> the result of recipe/train.py or, after "prepare", of the command that prepares data, in this process, on
    the CPU. Restores the process state that they change."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name.endswith("RANK")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    }
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()

    def run(argv: list) -> subprocess.CompletedProcess:
        AcceleratorState._reset_state(True)  # an earlier test may have left one of another precision
        name, words = ("recipe.data.prepare", argv[1:]) if argv[0] == "prepare" else ("recipe.train", argv)
        code = import_module(name).main([str(word) for word in words])
        return subprocess.CompletedProcess(argv, code, *capsys.readouterr())

    capsys.readouterr()
    yield run
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    assert handlers == {number: signal.getsignal(number) for number in handlers}  # which a notebook needs afterwards
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)


def own_model(directory: Path):
    """This project's model with the configuration and the weights of a directory."""
    from recipe.model.gpt2 import GPT2LMHeadModel, read_config, read_weights

    model = GPT2LMHeadModel(read_config(str(directory)))
    model.load_weights(read_weights(str(directory)), str(directory))
    return model


@pytest.fixture(scope="session")
def tiny_gpt2():
    """A function: n_positions, initializer_range -> a random GPT-2 with GPT-2's tokenizer, as `eval` loads one."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

    from eval import common

    bpe = ROOT / "recipe" / "data" / "gpt2_bpe"
    tokenizer = GPT2TokenizerFast(vocab=str(bpe / "encoder.json"), merges=str(bpe / "vocab.bpe"))

    def make(n_positions: int = 64, initializer_range: float = 0.3) -> common.Loaded:
        torch.manual_seed(0)
        # A wide initialization spreads the logits: if they were nearly uniform, any scorer would agree.
        sizes = {"n_positions": n_positions, "n_layer": 2, "n_embd": 32, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=initializer_range)).eval()
        return common.Loaded("tiny", None, model, tokenizer)

    return make
