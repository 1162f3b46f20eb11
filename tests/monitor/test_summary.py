"""The opening and the closing panel of a run."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.config import batch_arithmetic, parse_config
from recipe.errors import UserError
from recipe.estimate import micro_batch
from recipe.estimate.memory import HEADROOM, memory_estimate
from recipe.monitor import summary
from tests.conftest import ROOT

A100 = "NVIDIA A100-SXM4-80GB"


def engine(**changes) -> SimpleNamespace:
    """What the panel asks of an engine."""
    known = {"name": "GPU", "precision": "bf16", "peak_flops": 312e12, "sharding": "", "no_compile": "", "world": 1}
    return SimpleNamespace(**known | {"local_world": 1, "devices": 1, "device": torch.device("meta")} | changes)


def panel(*arguments: str, **changes) -> dict[str, str]:
    """The opening panel's lines by their labels."""
    config, of = parse_config(list(arguments)), engine(**changes)
    lines = summary.describe(config, batch_arithmetic(config, of.world, of.devices), of)
    return {line[:11].strip(): line[11:] for line in lines}


def test_time_and_price_where_the_peak_is_known():
    run = ["--config=gpt2", "--max_steps=18865", "--total_batch_tokens=524288", "--price_per_hour=1.75"]
    # 855,166,464 FLOP x 18,865 x 524,288 / (0.5 x 8 x 312e12) = 6,777 s = 1.8826 h, x 8 x $1.75 = $26.36
    eight = panel(*run, world=8, local_world=4, name=f"{A100}, DDP over 8 processes")
    assert eight["device"] == f"{A100}, bf16 (auto), compiled (default)"
    assert eight["engine"] == "DDP over 8 processes on 2 nodes"
    assert eight["time"].startswith("about 1 h 53 min at 50 % MFU, an assumption")
    assert eight["price"] == "about $26.36: $1.75 an hour of each of 8 devices"
    one = panel(*run)
    assert one["time"].startswith("about 15 h 4 min at 50 % MFU")
    assert one["price"] == "about $26.36: $1.75 an hour of the device"  # an eighth of the devices, eight times as long
    tpu = panel(*run, name="TPU v3, 8 devices behind one process", devices=8, peak_flops=8 * 312e12)
    assert tpu["price"] == "about $26.36: $1.75 an hour of each of 8 devices"
    assert "price" not in panel(*run[:-1])


def test_a_plan_for_a_device_that_is_not_here():
    run = ["--config=gpt2", "--max_steps=18865", "--total_batch_tokens=524288", "--price_per_hour=1.75"]
    eight = panel(*run, "--dry_run", "--plan_device=8xa100", peak_flops=None)
    assert eight["time"] == "about 1 h 53 min on 8 x A100 at 50 % MFU, an assumption"
    assert eight["price"] == "about $26.36: $1.75 an hour of each of 8 devices"
    assert panel(*run, "--dry_run", "--plan_device=rtx 4090")["time"].startswith(
        "about 28 h 27 min on 1 x RTX 4090 at 50 % MFU"
    )
    with pytest.raises(UserError, match=r"plan_device 'h1000': no such GPU is known; there are .*H100"):
        panel(*run, "--dry_run", "--plan_device=h1000")
    with pytest.raises(UserError, match="plan_device is for a plan of a run; pass --dry_run too"):
        parse_config(["--plan_device=h100"])


def test_a_peak_that_is_not_known_is_said():
    unknown = panel("--price_per_hour=0.5", peak_flops=None)
    assert unknown["time"] == "the peak of this device is not known; the progress shows it after the first steps"
    assert unknown["price"] == "$0.50 an hour of the device"
    assert "its peak in fp32 is not known" in panel("--precision=fp32", precision="fp32")["time"]
    assert panel(precision="fp32")["time"].startswith("about ")  # the best that the device has


def test_a_cpus_time_follows_from_a_measured_matrix_product(monkeypatch):
    monkeypatch.setattr(summary, "cpu_flops", lambda precision: 100e9)
    cpu = {"device": torch.device("cpu"), "peak_flops": None, "name": "CPU (2 threads a process)"}
    # 855,166,464 FLOP x 10 B tokens / (0.5 x 100 GFLOP/s) = 5.4 years: nobody should start this unwarned
    assert panel("--config=gpt2", **cpu)["time"] == (
        "about 1979 d 12 h if a step reaches 50 % of the 100 GFLOP/s that a matrix product reaches here now"
    )


def test_what_does_not_fit_says_what_helps(monkeypatch):
    run = ["--config=gpt2-xl", "--micro_batch_size=4"]
    config = parse_config(run)
    needed = memory_estimate(config, batch_arithmetic(config, 1), precision="bf16", compiled=True) / 1e9
    monkeypatch.setattr(micro_batch.hardware, "memory", lambda device: int(16e9))
    found = panel(*run)
    assert found["memory"] == f"about {needed:.3g} GB a device (estimate) of 16.0 GB"
    assert "does not fit" in found[""]
    assert "What helps: a smaller --micro_batch_size, --gradient_checkpointing true" in found[""]
    monkeypatch.setattr(micro_batch.hardware, "memory", lambda device: int(1e9 * needed / HEADROOM) + 1)
    assert "" not in panel(*run)


def test_the_closing_panel():
    config = parse_config(["--config=gpt2", "--max_steps=19073", "--price_per_hour=1.75", "--hellaswag_limit=500"])
    lines = [
        {"step": 250, "val_loss": 3.1234},
        {"step": 260, "hellaswag_A_acc_norm": 0.31, "hellaswag_B_acc_norm": 0.295},
        {"step": 19073, "val_loss": 3.2},
    ]
    result = summary.Result(3.2, True, seconds=5720.0, pauses=280.0)
    assert summary.outcome(config, batch_arithmetic(config, 8), result, 7.5, lines, 312e12) == [
        "done       10 B tokens in 19,073 steps; validation loss 3.2000 (unigram baseline 7.5000)",
        "best       validation loss 3.1234 at step 250",
        "HellaSwag  acc_norm 0.3100 (llm.c-style), 0.2950 (lm-eval-style) at step 260, 500 rows",
        "took       1 h 35 min of training, 1,748,207 tokens/s, MFU 59.9 %; 4 min 40 s more for validation, saving and "
        "the like",
        "price      $23.33: 1 h 40 min x 8 devices x $1.75 an hour, without start-up",  # 6,000 s: 1.6667 h x 8 x 1.75
    ]
    plain = parse_config(["--config=gpt2"])
    found = summary.outcome(plain, batch_arithmetic(plain, 1), result, 7.5, [{"step": 19073, "val_loss": 3.2}], None)
    assert [line.split()[0] for line in found] == ["done", "took"]  # nothing else is known, or worth a line
    assert "MFU" not in found[1]


def test_the_commands_of_the_closing_panel(whole_run, monkeypatch, tmp_path):
    run, _, output = whole_run
    assert output.splitlines()[-4:] == [
        f"  transformers.AutoModelForCausalLM.from_pretrained('{run}/step_00000020')",
        f"  make sample MODEL={run}",
        f"  make report RUN={run}",
        f"  make export RUN={run}",
    ]
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    monkeypatch.chdir(ROOT)
    of_default = [shlex.split(line) for line in summary.commands(Path("runs/shakespeare"))]
    assert of_default == [["make", "sample"], ["make", "report"], ["make", "export"]]
    assert targets >= {words[1] for words in of_default}
    monkeypatch.chdir(tmp_path)
    assert summary.commands(Path("a run"))[1] == f"make -C {ROOT} report RUN={shlex.quote(str(tmp_path / 'a run'))}"
