"""recipe/preflight.py: what it says of a sound machine, and of one that is broken in three places."""

import json
import os
import signal

import pytest

from tests import processes as programs
from tests.conftest import ROOT, launch, ok


def said(output: str) -> dict[str, str]:
    """The lines by check."""
    lines = [line for line in output.splitlines() if line.startswith(("ok ", "WRONG "))]
    return {line[7:18].strip(): line for line in lines}


SMALL = ["--n_layer", "2", "--n_embd", "64", "--n_head", "2"]


def test_a_sound_machine_passes(tmp_path):
    (tmp_path / "runs").mkdir()
    result = ok(programs.run(ROOT / "recipe/preflight.py", *SMALL, cwd=tmp_path))
    lines = said(result.stdout)
    assert {line.split()[0] for line in lines.values()} == {"ok"}
    assert {"devices", "attention", "loss", "muon", "disk", "adamw fp32", "muon fp32", "resume", "trial"} <= {*lines}
    assert "equal to the bit" in lines["resume"]
    assert "tokens/s" in lines["trial"]
    report = json.loads((tmp_path / "runs/preflight.json").read_text())
    assert report["passed"] is True
    assert report["processes"] == 1
    assert [line["check"] for line in report["checks"]][-1] == "trial"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["preflight.json"]


def test_a_ctrl_c_leaves_nothing(tmp_path):
    preflight = programs.Running(ROOT / "recipe/preflight.py", cwd=tmp_path)
    preflight.until("ok     devices")
    preflight.send_signal(signal.SIGINT)
    assert preflight.wait(60) == 130, preflight.output
    assert preflight.stderr == ""
    assert list(tmp_path.glob("runs/*")) == []


@pytest.mark.slow
def test_what_is_broken_is_named(tmp_path):
    """An attention that is 10 % off, and a bit of a checkpoint's weights."""
    broken = {"RECIPE_FAULT": "wrong@kernel.saved"}
    result = programs.run(ROOT / "recipe/preflight.py", "--precision", "bf16", env=broken, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = said(result.stdout)
    wrong = {check for check, line in lines.items() if line.startswith("WRONG")}
    assert {"attention", "resume"} <= wrong
    # Twenty steps from random weights hardly need attention: it depends on the processor whether their losses show it.
    assert wrong <= {"attention", "resume", "adamw bf16", "muon bf16"}
    assert "model.safetensors" in lines["resume"]
    assert [*lines][-1] == "resume", "what ends with an error is the last"
    assert json.loads((tmp_path / "runs/preflight.json").read_text())["passed"] is False
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["preflight.json"]


@pytest.mark.slow
def test_a_compiler_that_computes_something_else_is_named(tmp_path):
    """Where the recipe compiles."""
    broken = {"RECIPE_FAULT": "wrong@compiled"}
    options = ["--precision", "fp32", "--torch_compile", "true"]
    result = programs.run(ROOT / "recipe/preflight.py", *options, env=broken, cwd=tmp_path)
    assert result.returncode == 1, result.stdout + result.stderr
    lines = said(result.stdout)
    assert "20 compiled steps" in lines["adamw fp32"]
    assert {check for check, line in lines.items() if line.startswith("WRONG")} == {"adamw fp32", "muon fp32"}


def test_flags_of_a_run_do_not_fail_a_machine_and_a_killed_preflight_leaves_no_verdict(tmp_path):
    for name in ("before", "beside"):  # a leftover, and that of another preflight which runs now
        (tmp_path / "runs" / f".preflight-{name}").mkdir(parents=True)
    os.utime(tmp_path / "runs/.preflight-before", (0, 0))
    (tmp_path / "runs/preflight.json").write_text('{"passed": true}')
    flags = [*SMALL, "--precision", "fp32", "--train_hours", "2", "--lr_scheduler_type", "wsd", "--dry_run"]
    flags += ["--val_data", "data/val"]
    preflight = programs.Running(ROOT / "recipe/preflight.py", *flags, cwd=tmp_path)
    preflight.until("adamw")
    assert not (tmp_path / "runs/preflight.json").exists()
    assert not (tmp_path / "runs/.preflight-before").exists()
    assert (tmp_path / "runs/.preflight-beside").exists()
    assert preflight.wait(200) == 0, preflight.output
    assert "tokens/s" in said(preflight.stdout)["trial"]


def test_a_process_whose_sums_are_wrong_is_named():
    result = launch("ddp", 2, "recipe/preflight.py", env={"RECIPE_FAULT": "wrong@sum"})
    assert result.returncode == 1, result.stdout + result.stderr
    lines = said(result.stdout)
    assert [check for check, line in lines.items() if line.startswith("WRONG")] == ["sum"]
    assert "process 1:" in lines["sum"]


@pytest.mark.slow
@pytest.mark.parametrize("config", ["fsdp", "zero1"])
def test_engines_pass(config):
    result = ok(launch(config, 2, "recipe/preflight.py"))
    assert "losses within" in said(result.stdout)["adamw fp32"]
