"""recipe/preflight.py: it passes a sound machine, and names what is wrong with a broken one."""

import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from recipe import preflight
from recipe.checkpoint.format import state_of
from recipe.config import Config, parse_config
from recipe.data.tokenizer import train_tokenizer
from recipe.engine.factory import open_strategy
from recipe.utils.processes import Processes
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, launch, ok
from tests.engine import cpu_strategy


def lines_of(output: str) -> dict[str, str]:
    """The line of each check."""
    lines = [line for line in output.splitlines() if line.startswith(("ok ", "WRONG "))]
    return {line[7:18].strip(): line for line in lines}


def wrong_checks(lines: dict[str, str]) -> set[str]:
    return {check for check, line in lines.items() if line.startswith("WRONG")}


def test_a_sound_machine_passes_whatever_the_flags_of_its_run(whole_run, tmp_path):
    runs = tmp_path / "runs"
    for name in ("killed", "running"):  # directories of two other preflights
        (runs / f".preflight-{name}").mkdir(parents=True)
    os.utime(runs / ".preflight-killed", (0, 0))
    (runs / "preflight.json").write_text('{"passed": true}')
    train_tokenizer([SHAKESPEARE.read_text()], tmp_path / "own", vocab_size=512)
    argv = ["--n_layer", "2", "--n_embd", "64", "--n_head", "2", "--val_data", "data/val", "--tokenizer", "own"]
    argv += ["--train_hours", "2", "--lr_scheduler_type", "wsd", "--dry_run"]
    preflight = programs.Running(ROOT / "recipe/preflight.py", *argv, cwd=tmp_path)
    preflight.until("adamw")
    assert not (runs / "preflight.json").exists(), "were this preflight killed, an earlier result would count"
    assert preflight.wait(200) == 0, preflight.output
    lines = lines_of(preflight.stdout)
    assert wrong_checks(lines) == set()
    assert {"devices", "attention", "loss", "muon", "disk", "adamw fp32", "muon fp32", "resume", "trial"} <= {*lines}
    assert "equal to the bit" in lines["resume"]
    assert "tokens/s" in lines["trial"]
    assert float(re.search(r"checkpoint of (\S+) MB", lines["disk"])[1]) < 5, "with GPT-2's vocabulary it is larger"
    report = json.loads((runs / "preflight.json").read_text())
    part = state_of(whole_run[0] / "step_00000020")["about"][-1]  # of a run here, whose card then names this result
    names = ("device", "engine", "processes")
    assert [report["passed"], *(report[name] for name in names)] == [True, *(part[name] for name in names)]
    assert report["checks"][-1]["check"] == "trial"
    assert sorted(path.name for path in runs.iterdir()) == [".preflight-running", "preflight.json"]


def test_ctrl_c_leaves_no_files(tmp_path):
    preflight = programs.Running(ROOT / "recipe/preflight.py", cwd=tmp_path)
    preflight.until("ok     devices")
    preflight.send_signal(signal.SIGINT)
    assert preflight.wait(60) == 130, preflight.output
    assert preflight.stderr == ""
    assert list(tmp_path.glob("runs/*")) == []


def test_a_device_without_fp64_is_compared_too():
    """As Apple's MPS."""

    class WithoutFP64(torch.Tensor):
        def double(self):
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64")

        def cpu(self):
            return self.as_subclass(torch.Tensor)

    def on_device(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).as_subclass(WithoutFP64)

    device = SimpleNamespace(torch_device=torch.device("cpu"), precision="fp32")
    strategy = SimpleNamespace(device=device, runtime=SimpleNamespace(processes=Processes()))
    finding = preflight.compared_in_fp64(strategy, on_device, lambda x: x * 2, [torch.ones(4)])
    assert finding == ("within 0.0e+00 of fp64 (0.0001 allowed)", "")
    assert preflight.relative_error(torch.tensor(math.nan), torch.tensor(1.0)) == math.inf


def test_the_trial_reads_the_shards_that_a_glob_names(shards, tmp_path, monkeypatch):
    configs: list[Config] = []
    monkeypatch.setattr(preflight, "run", lambda config, strategy: configs.append(config))
    config = parse_config([f"--dataset_name={shards}/train_*.bin", "--milestone_steps=2"])
    preflight.trial(config, tmp_path, open_strategy("fp32", "m1"))
    assert configs[0].data.dataset_name == f"{shards}/train_*.bin"
    assert configs[0].run.milestone_steps == 0  # or the steps that it times would save


@pytest.mark.slow
@pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="this processor emulates bf16, in which 20 steps would take longer than a check may",
)
def test_a_wrong_kernel_and_a_damaged_checkpoint_are_named(tmp_path):
    """An attention that is 10 % off, and a flipped bit in a checkpoint's weights."""
    fault = {"RECIPE_FAULT": "wrong@kernel.saved"}
    result = programs.run(ROOT / "recipe/preflight.py", "--precision", "bf16", env=fault, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = lines_of(result.stdout)
    # Twenty steps from random weights hardly need attention: it depends on the processor whether their losses show it.
    assert {"attention", "resume"} <= wrong_checks(lines) <= {"attention", "resume", "adamw bf16", "muon bf16"}
    assert "model.safetensors" in lines["resume"]
    assert [*lines][-1] == "resume", "a check that ends with an error is the last one"
    assert json.loads((tmp_path / "runs/preflight.json").read_text())["passed"] is False
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["preflight.json"]


@pytest.mark.slow
def test_a_wrong_compiler_is_named(tmp_path):
    fault = {"RECIPE_FAULT": "wrong@compiled"}
    options = ["--precision", "fp32", "--torch_compile", "true"]
    result = programs.run(ROOT / "recipe/preflight.py", *options, env=fault, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = lines_of(result.stdout)
    assert "20 compiled steps" in lines["adamw fp32"]
    assert wrong_checks(lines) == {"adamw fp32", "muon fp32"}


def test_a_process_with_wrong_sums_is_named():
    result = launch("ddp", 2, "recipe/preflight.py", env={"RECIPE_FAULT": "wrong@sum"})
    assert result.returncode == 1, result.stdout + result.stderr
    lines = lines_of(result.stdout)
    assert wrong_checks(lines) == {"sum"}
    assert "process 1:" in lines["sum"]


@pytest.mark.slow
def test_a_number_of_processes_that_cannot_share_the_golden_run_still_tries_its_recipe(tmp_path):
    """As four nodes of eight GPUs."""
    argv = ["--n_layer", "2", "--n_embd", "64", "--n_head", "2", "--total_batch_tokens", "5120"]
    lines = lines_of(ok(launch("ddp", 5, ROOT / "recipe/preflight.py", *argv, cwd=tmp_path)).stdout)
    assert wrong_checks(lines) == set()
    assert "skipped: its 48 sequences cannot be divided among 5 devices" in lines["golden run"]
    assert "tokens/s" in lines["trial"]


def test_a_step_larger_than_the_shipped_text_is_tried_all_the_same(tmp_path, monkeypatch):
    """As eight GPUs of 64 sequences take it, before the recipe's own text is prepared."""
    (text := tmp_path / "short.txt").write_text("To be, or not to be, that is the question. " * 35)  # 400 tokens
    monkeypatch.setattr(preflight, "SHIPPED_TEXT", text)
    flags = ["--n_layer=1", "--n_embd=32", "--n_head=1", "--sequence_length=32", "--n_positions=32"]
    flags += ["--micro_batch_size=16", "--total_batch_tokens=512", f"--dataset_name={tmp_path / 'data'}"]
    config = parse_config([*flags, f"--train_text={text}", "--precision=fp32"])
    measured, problem = preflight.trial(config, tmp_path, open_strategy("fp32"))
    assert "tokens/s" in measured
    assert not problem


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp", "zero1"])
def test_sharding_engines_pass(config):
    result = ok(launch(config, 2, "recipe/preflight.py"))
    assert "losses within" in lines_of(result.stdout)["adamw fp32"]


@pytest.mark.parametrize(("nats", "differs"), [(0.0, False), (9e-4, False), (1.1e-3, True)])
def test_a_resumed_run_that_is_not_the_uninterrupted_one_is_named(nats, differs, whole_run, tmp_path, monkeypatch):
    def golden_losses(directory, *_):
        shutil.copytree(whole_run[0] / "step_00000020", directory / "step_00000020")
        return [loss + nats for loss in preflight.losses_in(whole_run[0])]

    monkeypatch.setattr(preflight, "golden_losses", golden_losses)
    shutil.copytree(whole_run[0], tmp_path / "adamw-fp32")
    _, problem = preflight.resumes(tmp_path, open_strategy("fp32"), {})
    assert problem == ("the state was not restored exactly, or runs here are not repeatable" if differs else "")


@pytest.mark.parametrize(
    ("waits", "problem"),
    [
        ([0.9, 0.02, 0.04], ""),  # the first step waits for the compiler
        ([0.0, 0.2, 0.3], "25 % of the time goes into waiting for data: use a faster disk or network"),
        ([0.0], "fewer than two steps in two minutes: this device is too slow for the recipe"),
    ],
)
def test_slow_data_and_a_slow_device_are_named(waits, problem, shards, tmp_path, monkeypatch):
    line = {"tokens_per_second": 9.0, "mfu": None, "peak_memory_bytes": None}
    lines = [line | {"data_wait": wait} for wait in waits]
    monkeypatch.setattr(preflight, "run", lambda *_: None)
    monkeypatch.setattr(preflight, "read_metrics", lambda path: lines)
    config = parse_config([f"--dataset_name={shards}"])
    assert preflight.trial(config, tmp_path, open_strategy("fp32", "m1"))[1] == problem


@pytest.mark.parametrize(("speed", "memory", "is_slow"), [(0.7, 8e10, True), (0.9, 8e10, False), (0.7, None, False)])
def test_a_gpu_that_is_slower_than_the_others_is_named(speed, memory, is_slow, monkeypatch):
    """Not a process on a CPU, which shares it with the others."""
    monkeypatch.setattr(preflight.hardware, "seconds_of", lambda call: 1.0)
    processes = SimpleNamespace(gather_objects=lambda value: [value, speed * value, value, value])
    device = SimpleNamespace(memory=memory, torch_device="meta", dtype=torch.float32, count=1, peak_flops=None)
    strategy = SimpleNamespace(device=device, runtime=SimpleNamespace(processes=processes))
    measured, problem = preflight.products(parse_config([]), strategy)
    assert problem.startswith("process 1 is slower than the others: ") == is_slow == bool(problem)
    assert re.fullmatch(r"[\d.]+ [GMT] to [\d.]+ [GMT]FLOP/s a process", measured)


@pytest.mark.parametrize("vendor", ["AMD", ""])
def test_a_gpu_that_pytorch_cannot_use_is_named(vendor, monkeypatch):
    monkeypatch.setattr(preflight, "unused_gpu", lambda: vendor)
    _, problem = preflight.devices(parse_config([]), cpu_strategy())
    assert problem.startswith("this PyTorch cannot use the AMD GPU: docs/hardware.md") if vendor else problem == ""


def test_a_check_that_hangs_is_named_and_ends_the_command(tmp_path):
    """Here after two seconds instead of three minutes, which all checks together may take."""
    (tmp_path / "hangs.py").write_text(
        "import sys, threading, time\n"
        "from recipe import preflight\n"
        "timer = threading.Timer\n"
        "threading.Timer = lambda seconds, *rest: timer(seconds / 90, *rest)\n"
        "def products(*_): time.sleep(0.6)\n"
        "def disk(*_): time.sleep(30)\n"
        "preflight.products = preflight.attention = preflight.loss = preflight.muon = products\n"
        "preflight.disk = disk\n"
        "sys.exit(preflight.main())\n"
    )
    result = programs.run(tmp_path / "hangs.py", cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = lines_of(result.stdout)
    assert wrong_checks(lines) == {"disk"}
    assert lines["disk"].endswith(" no result after 180 s: it hangs")
    assert json.loads((tmp_path / "runs/preflight.json").read_text())["passed"] is False


def test_a_full_disk_is_named_and_not_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    monkeypatch.setattr(preflight.tempfile, "TemporaryFile", None)
    strategy = SimpleNamespace(runtime=SimpleNamespace(processes=Processes()))
    _, problem = preflight.disk(parse_config([f"--output_dir={tmp_path}"]), strategy)
    assert re.match(rf"1 MB free in {tmp_path}, but a checkpoint takes 87.4 MB: no step can be saved; ", problem)
