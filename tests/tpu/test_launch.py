"""Command lines as users type them, on a machine with chips and on one without."""

import os
import re
import signal
import time

import pytest

from tests.conftest import ROOT, by_step
from tests.tpu.conftest import assert_same, launch, settings, train

LINE = "accelerate launch --config_file accelerate_configs/{}.yaml recipe/train.py"


def test_the_line_of_the_readme_without_a_chip_is_an_error():
    """Although torch_tpu is installed."""
    lines = re.findall(r"`(accelerate launch .*accelerate_configs/tpu.yaml [^`]+)`", (ROOT / "README.md").read_text())
    out, err = launch(lines[0], chips=0).communicate(timeout=300)
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "asks for a TPU, which cannot be used: this machine has no chip; installed: torch_tpu. " in errors[0]
    assert out.replace("libtpu not found.\n", "") == ""


def test_a_host_of_a_pod_without_its_number_is_an_error(monkeypatch):
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "10.0.0.1,10.0.0.2")
    _, err = launch(LINE.format("tpu-pod"), chips=2).communicate(timeout=300)
    assert "error: TPU_WORKER_HOSTNAMES is set without TPU_WORKER_ID, this host's number among them; set it" in err
    assert "Traceback" not in err.partition("error: ")[2].partition("\n")[0]


def test_two_chips_stopped_by_sigterm_take_the_steps_of_one_process(shards, on_cpu, tmp_path, capsys):
    """Accelerate's launcher dies of the signal, the inner one passes it on, and the run ends with a checkpoint. One
    chip continues from it, because it starts sooner than two."""
    arguments = settings(shards, tmp_path / "run", torch_compile="true")
    process, log = launch(LINE.format("tpu"), *arguments, chips=2), tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and '"step": 12' in log.read_text()):
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode, out
    assert "DDP over 2 processes" in out
    assert "stopping at the next step boundary, with a checkpoint" in out + err
    stopped_lines = by_step(tmp_path / "run")
    lines = train(shards, tmp_path / "run", torch_compile="true")
    assert re.search(r"resume     from step (1[2-9]|2\d)", capsys.readouterr().out)
    assert_same(stopped_lines | lines, on_cpu("adamw"))


def test_one_ctrl_c_saves_although_a_step_takes_longer_than_the_launchers_death(shards, tmp_path):
    """It also gets to torchrun, to which the launcher's death must not be a second Ctrl-C."""
    slow = {"total_batch_tokens": 24_576, "torch_compile": "false", "max_steps": 500, "logging_steps": 1}
    arguments, log = settings(shards, tmp_path / "run", **slow), tmp_path / "run" / "metrics.jsonl"
    process = launch(LINE.format("tpu"), *arguments, chips=2, start_new_session=True)
    while process.poll() is None and not (log.exists() and '"step": 2' in log.read_text()):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert "stopping at the next step boundary, with a checkpoint" in out + err
    assert "stopped    before the end" in out, out + err
    assert len(list((tmp_path / "run").glob("step_*"))) == 1


@pytest.mark.parametrize(("file", "chips", "optims"), [("tpu", 4, ("adamw", "muon")), ("tpu-fsdp", 2, ("adamw",))])
def test_several_chips_take_the_steps_of_one_process(shards, on_cpu, tmp_path, file, chips, optims):
    runs = ",".join(f"{tmp_path / optim} --optim={optim}" for optim in optims)
    line = LINE.format(file).replace("recipe/train.py", "tests/engine/several_runs.py")
    process = launch(line, runs, *settings(shards, tmp_path, torch_compile="true"), chips=chips)
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, out + err
    assert out.count(f"{'FSDP' if 'fsdp' in file else 'DDP'} over {chips} processes") == len(optims)
    for optim in optims:
        assert_same(by_step(tmp_path / optim), on_cpu(optim))


@pytest.mark.slow
def test_two_chips_pass_the_first_checks_of_preflight_which_can_be_stopped():
    """The later checks are training runs, as above."""
    line = LINE.format("tpu").replace("train.py", "preflight.py")
    process = launch(line, "--precision=fp32", "--n_layer=1", "--n_embd=64", "--n_head=2", chips=2)
    checked = {}
    while "disk" not in checked and (line := process.stdout.readline()):
        if line.startswith(("ok ", "WRONG ")):
            verdict, name = line.split()[:2]
            checked[name] = verdict
    assert checked == dict.fromkeys(["devices", "sum", "products", "attention", "loss", "muon", "disk"], "ok")
    process.terminate()
    process.communicate(timeout=120)
    assert not list(ROOT.glob("runs/.preflight-*"))


def test_fsdp_on_one_chip_takes_the_steps_of_one_process_in_any_compile_mode(shards, on_cpu, tmp_path):
    """torch_tpu's compiler has one mode, and Muon has no other process to which it could send a matrix."""
    fields = {"optim": "muon", "torch_compile": "true", "torch_compile_mode": "max-autotune"}
    process = launch(LINE.format("tpu-fsdp"), *settings(shards, tmp_path / "run", **fields), chips=1)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    assert_same(by_step(tmp_path / "run"), on_cpu("muon"))
