"""The opening and the closing panel of a run."""

import dataclasses
import re
import shlex
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config

from recipe.config import SHAPE_FIELDS, ModelConfig, batch_arithmetic, parse_config
from recipe.engine.factory import open_strategy
from recipe.estimate import micro_batch, speed
from recipe.estimate.fused_loss import resolve_fused_loss
from recipe.estimate.memory import HEADROOM, flops_per_token, step_memory
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.monitor import summary
from recipe.utils.errors import UserError
from recipe.utils.redaction import redact
from tests.conftest import ROOT
from tests.engine import cpu_strategy


def panel(devices: str, *arguments: str, **changes) -> dict[str, str]:
    """The lines of the opening panel by their labels, for a dry run for `devices`; `changes` are of the device."""
    config = parse_config([*arguments, f"--dry_run={devices}"])
    strategy = open_strategy(config.run.precision, config.run.plan_device)
    strategy.device = dataclasses.replace(strategy.device, **changes)
    config, loss_line = resolve_fused_loss(config, strategy)
    config, micro_line = micro_batch.resolve_micro_batch(config, strategy)
    batch = batch_arithmetic(config, strategy.runtime.processes.world_size, strategy.device.count)
    lines = summary.describe(config, batch, strategy, [loss_line, micro_line])
    return {line[:11].strip(): line[11:] for line in lines}


@pytest.mark.parametrize(("quota", "is_slowed"), [("max 100000", True), ("400000 100000", False)])
def test_other_programs_slow_a_run_only_where_they_leave_too_few_cores(quota, is_slowed, tmp_path, monkeypatch):
    """A container may use four of 64 cores, of which the machine's other containers use 30."""
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr("recipe.utils.machine.CGROUP", tmp_path)
    for name in ("os.cpu_count", "psutil.cpu_count"):
        monkeypatch.setattr(name, lambda **_: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: 100 * 30 / 64)
    notes = list(summary._device_notes(parse_config([]), cpu_strategy()))
    assert notes == ["other programs use 30.0 of 64 cores, which slows this run"] * is_slowed


@pytest.mark.parametrize("file", ["memory.max", "memory/memory.limit_in_bytes"])
def test_a_run_that_does_not_fit_a_cpus_memory_says_so_before_the_kernel_ends_it(file, tmp_path, monkeypatch):
    """124M parameters take 2 GB of state alone, of which a container leaves 1.5 beside this process."""
    config, strategy = parse_config(["--config=gpt2", "--micro_batch_size=1"]), cpu_strategy()
    monkeypatch.setattr("recipe.utils.machine.CGROUP", tmp_path)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=16e9))
    monkeypatch.setattr("psutil.Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=5e8)))
    batch = batch_arithmetic(config, 1)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("max\n")
    assert len([*summary._memory(config, batch, strategy)]) == 1
    (tmp_path / file).write_text("2000000000\n")
    text = "it does not fit: 1.4 GB are left for tensors; weights, gradients and optimizer state alone take 2.0 GB"
    assert text in [*summary._memory(config, batch, strategy)][1]


def test_a_dry_run_for_other_devices_describes_those_devices():
    argv = ["--config=gpt2", "--max_steps=18865", "--total_batch_tokens=524288"]
    # 18,865 x 524,288 tokens at twice 1.748 and 1.59 M tokens/s: 2,830 and 3,110 s
    sixteen = panel("16xa100", *argv, "--price_per_hour=30")
    assert sixteen["device"] == "A100, bf16 (auto), compiled (default)"
    assert sixteen["engine"] == "DDP over 16 processes on 2 nodes"
    assert sixteen["time"] == (
        "about 47 min 10 s to 51 min 50 s, $24 to $26, at 54.5 to 59.9 % MFU, published by S. Emani with llm.c "
        "and llm.c for 124 M parameters on 8 x A100; on 16 communication takes more of the time"
    )
    # 9 ms a step by the speed of eight, and 10.8 by the lowest
    spread = panel("128xh100", "--config=gpt2")["time"]
    assert re.fullmatch("about 3 min 11 s to 3 min 2. s at .*; on 128 comm.* time; a step takes at least 10 ms", spread)
    small = panel("h100", "--max_steps=1000", "--micro_batch_size=auto", "--price_per_hour=30")
    memory = small["memory"].split()
    assert f": {memory[1]} {memory[2]} of 80 GB, an estimate" in small["micro"], "in the same unit"
    assert small["time"].startswith("about 10 s, $0.08, at ")
    assert panel("a100", *argv)["time"].startswith("about 12 h 35 min to 13 h 49 min at 54.5 to 59.9 % MFU")
    # 288,827 and 243,000 tokens/s
    assert panel("v3-8", *argv)["time"].startswith("about 9 h 31 min to 11 h 18 min at 42.2 to 50.2 % MFU, published")
    eight = panel("8xh100", "--config=gpt2")
    assert eight == panel("8 x NVIDIA H100 80GB HBM3", "--config=gpt2") == panel("8xh100-sxm", "--config=gpt2")
    assert eight["batch"] == "524,288 tokens = 8 processes x 1 micro-step x 64 sequences x 1024"
    assert "GB a device (estimate) of 80.0 GB: state " in eight["memory"]
    # 10 B tokens at 3.745 M tokens/s, 140 ms a step, and at 3.046 M
    assert eight["time"].startswith("about 44 min 30 s to 54 min 42 s at 32.9 to 40.5 % MFU, published by the scaling")
    t4 = panel("t4", "--config=gpt2")
    assert t4["device"].startswith("T4, fp16 (auto)")  # it has no bf16
    assert t4["time"].endswith("at an assumed 40 % MFU")
    h200 = panel("h200", "--config=gpt2")
    assert h200["time"].endswith("at 49 % MFU, this project's for 124 M parameters on 1 x H200")
    assert panel("2 x 4090", "--config=gpt2")["device"].startswith("RTX 4090, bf16")
    mac = panel("Apple M1 Max", "--config=gpt2")
    assert mac["device"] == "M1 MAX, fp32 (auto), compiled (default)"
    assert "of 64.0 GB: state " in mac["memory"]
    tpu = panel("8xtpu v5e", "--config=kaggle-tpu")
    assert tpu["device"] == "TPU V5E, bf16 (auto), compiled (default)"
    assert tpu["batch"] == "524,288 tokens = 8 processes x 8 micro-steps x 8 sequences x 1024"
    assert tpu == panel("v5e-8", "--config=kaggle-tpu") == panel("v5litepod-8", "--config=kaggle-tpu")
    assert "GB a device (estimate) of 16.0 GB: state " in tpu["memory"]
    assert panel("v4-8", "--config=gpt2")["engine"] == "DDP over 4 processes"  # Google counts the cores
    assert panel("v5e-16", "--config=gpt2")["engine"] == "DDP over 16 processes"  # on hosts of 4 or 8
    one_process = panel("v3-8", "--config=gpt2")
    assert one_process["engine"] == "8 devices behind one process"
    assert one_process["batch"].endswith(" = 1 process x 8 micro-steps x 8 devices x 8 sequences x 1024")
    assert "at 15.7 % MFU, published by windmaple in JAX" in panel("v6e-8", "--config=gpt2")["time"]
    with pytest.raises(UserError, match="precision bf16 is not supported on T4; use auto, fp16 or fp32"):
        panel("t4", "--precision=bf16")
    with pytest.raises(UserError, match=r"'mps' is not a known device; use one of .*H100.* \(M1 and M2 are Apple's\)"):
        panel("mps")


def test_a_dry_run_shards_as_the_launch_asks(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # srun has started accelerate launch on each of two nodes
    ddp = panel("8xa100", "--config=gpt2-xl")
    assert "note" not in ddp, "its processes train together"
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds_configs/zero3.json")
    zero3 = panel("8xa100", "--config=gpt2-xl", "--micro_batch_size=8")
    assert zero3["engine"] == "ZeRO-3 over 8 processes on 1 node"
    assert float(zero3["memory"].split()[1]) < float(ddp["memory"].split()[1])


@pytest.mark.parametrize(
    ("devices", "sharding", "message"),
    [
        ("v5e-8", "zero2", "zero2 does not run on TPU V5E; launch with accelerate_configs/tpu-fsdp.yaml"),
        ("v3-8", "zero2", "zero2 does not run on TPU V3; launch with accelerate_configs/tpu.yaml"),
        ("v3-8", "fsdp", "fsdp does not run on TPU V3; launch with accelerate_configs/tpu.yaml"),
        ("m1", "fsdp", "fsdp does not run on M1; launch with accelerate_configs/single.yaml"),
        ("8xm1", "zero1", "zero1 does not run on M1; launch with accelerate_configs/single.yaml"),
        ("8xm1", "", "8xm1: Apple's chips cannot train together; plan for one of them"),
    ],
)
def test_a_dry_run_refuses_what_the_devices_cannot_run(devices, sharding, message, monkeypatch):
    monkeypatch.setenv(f"ACCELERATE_USE_{'FSDP' if sharding == 'fsdp' else 'DEEPSPEED'}", str(bool(sharding)))
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", f"ds_configs/{sharding}.json")
    with pytest.raises(UserError, match=f"^{message}$"):
        panel(devices)


def test_the_time_on_a_device_without_a_known_peak(monkeypatch):
    time = panel("h100", peak_flops=None)["time"]
    assert time == "unknown, as is the peak of this device; the progress shows it after the first steps"
    assert "unknown, as is its peak in fp32; " in panel("h100", "--precision=fp32")["time"]
    monkeypatch.setattr(speed, "cpu_flops", lambda precision, model: 40e9)
    # 855,166,464 FLOP x 10 B tokens / 40 GFLOP/s = 6.8 years
    time = panel("h100", "--config=gpt2", type="cpu", peak_flops=None)["time"]
    assert time == "about 2474 d 9 h at the 40 GFLOP/s that one layer and the embeddings reach here now"
    time = panel("2xh100", "--config=gpt2", type="cpu", peak_flops=None)["time"]
    assert time.startswith("about 1237 d 5 h at the 80 GFLOP/s "), "of two processes"


@pytest.mark.parametrize(("precision", "width", "vocab_size"), [("fp32", 64, 257), ("bf16", 128, 8192)])
def test_the_speed_expected_of_a_cpu_is_about_that_of_a_step(precision, width, vocab_size):
    shape = ModelConfig(n_layer=4, n_head=4, n_embd=width, n_positions=128, vocab_size=vocab_size)
    fields = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    model = GPT2LMHeadModel(GPT2Config(**fields, bos_token_id=None, eos_token_id=None)).eval()
    tokens = torch.randint(vocab_size, (8, 128))

    def seconds() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(tokens, tokens)
        loss.backward()
        return time.perf_counter() - start

    times, expected = [], []
    for more in range(5):  # in turns, for the best of each: other programs slow either for a while
        times += [seconds() for _ in range(4)]
        # A process measures each shape once.
        expected.append(speed.cpu_flops(precision, dataclasses.replace(shape, vocab_size=vocab_size + more)))
    measured = flops_per_token(shape, 128) * tokens.numel() / min(times)
    assert 0.4 < max(expected) / measured < 2


def test_a_run_that_does_not_fit_is_told_what_helps():
    argv = ["--config=gpt2-xl", "--micro_batch_size=4", "--gradient_checkpointing=false"]
    config = parse_config(argv)
    peak = step_memory(config, batch_arithmetic(config, 1), precision="bf16", compiled=True).peak
    lines = panel("l4", *argv)
    assert lines["memory"].startswith(f"about {peak / 1e9:.3g} GB a device (estimate) of 24.0 GB: state 24.9 GB")
    assert "does not fit" in lines[""]
    assert (
        "; weights, gradients and optimizer state alone take 24.9 GB: what helps is FSDP or ZeRO on several GPUs ("
        in lines[""]
    )
    assert "FSDP on several chips (accelerate_configs/tpu-fsdp.yaml); docs" in panel("v5e-8", *argv)[""]
    assert panel("v2-8", "--config=gpt2-medium", "--micro_batch_size=8")[""].endswith("or a smaller model")
    large = ["--config=gpt2-large", "--micro_batch_size=16", "--gradient_checkpointing=false"]
    tip = "; what helps: a smaller --micro_batch_size, --gradient_checkpointing true (about a quarter slower), --loss"
    assert tip in panel("l4", *large)[""]
    note = panel("l4", *large[:2], "--gradient_checkpointing=true", "--loss_chunk_size=1024", memory=14e9)[""]
    assert "; what helps: a smaller --micro_batch_size, or FSDP or ZeRO" in note, "nothing that is on already"
    assert "tight, but it may fit" in panel("l4", *argv, memory=int(peak / HEADROOM / 1.04))[""]
    assert "" not in panel("l4", *argv, memory=int(peak / HEADROOM) + 1)


def test_a_disk_that_is_too_small_for_a_checkpoint_is_noted(monkeypatch, tmp_path):
    free = {tmp_path: 3e6}
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free[path]))
    argv = ["--config=gpt2", f"--output_dir={tmp_path}/new/run"]
    config = parse_config([*argv, "--dry_run"])

    def last_line() -> str:
        return list(summary.describe(config, batch_arithmetic(config, 1), open_strategy("auto", "h100"), []))[-1]

    note = f"note       3 MB free in {tmp_path}, but a checkpoint takes 1.5 GB: no step can be saved; free some space, "
    assert last_line() == f"{note}or choose another output_dir"
    assert "note" not in panel("h100", *argv), "another machine may have another disk"
    free[tmp_path] = 1.6e9
    sizes = r"checkpoints may take 10.5 GB and the stream 10 GB \(disk_budget_gb\)"
    assert re.match(rf"note       1.6 GB free in .*, but {sizes}: free some space, ", last_line())
    free[tmp_path] = 15e9  # either fits by itself
    assert re.match(rf"note       15 GB free in .*, but {sizes}: free some space, ", last_line())
    free[tmp_path] = 21e9
    assert not last_line().startswith("note")
    free[tmp_path / "new" / "run"] = 1.6e9
    (tmp_path / "new" / "run" / "step_00000001").mkdir(parents=True)
    assert "checkpoints may take 8.98 GB and" in last_line()
    config = config.replace(fresh=True)
    assert "checkpoints may take 10.5 GB and" in last_line(), "the earlier run's stay on this disk"


def test_a_field_without_the_one_that_it_needs_is_noted():
    argv = ["--config=shakespeare", "--hub_model_id=me/model"]
    assert panel("h100", *argv)["note"] == "hub_model_id has no effect without push_to_hub"
    assert "note" not in panel("h100", *argv, "--push_to_hub")


def test_steps_that_keep_the_best_checkpoint_only_now_and_then_are_noted():
    """The default recipe validates every 175 steps."""
    note = "only every 700 steps a checkpoint is validated too, and the best of those is kept: "
    assert panel("h100", "--config=shakespeare", "--save_steps=100")["note"].startswith(note)
    assert not [save for save in ("35", "350", "end") if "note" in panel("h100", f"--save_steps={save}")]


def test_positions_that_no_sequence_reaches_are_noted():
    note = "positions above sequence_length 512 stay untrained, so longer texts come out as nonsense; --n_positions "
    shorter = panel("h100", "--config=gpt2", "--sequence_length=512")
    assert shorter["note"].startswith(note)
    assert "note" not in panel("h100", "--config=gpt2", "--sequence_length=512", "--n_positions=512")
    # OpenAI's weights, say, have them trained
    assert "note" not in panel("h100", "--config=gpt2", "--sequence_length=512", "--init_from=openai-community/gpt2")


def test_the_closing_panel(whole_run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    config = parse_config(["--config=gpt2", "--max_steps=19073", "--output_dir=a run"])
    metrics, log = SimpleNamespace(seconds=5720.0, pauses=280.0), tmp_path / "a run/metrics.jsonl"
    log.parent.mkdir()
    log.write_text('{"step": 250, "val_loss": 3.1234}\n{"step": 19073, "val_loss": 3.2}\n')
    assert list(summary.outcome(config, metrics, 3.2))[:3] == [
        "done       10 B tokens in 19,073 steps; validation loss 3.2000",
        "best       validation loss 3.1234 at step 250 (not saved)",
        "took       1 h 35 min of training, 1,748,207 tokens/s; 4 min 40 s more for validation, saving and the like",
    ]
    one_step = config.replace(max_steps=1)
    assert next(iter(summary.outcome(one_step, metrics, 3.2))).startswith("done       524 k tokens in 1 step; ")
    assert summary._length(one_step) == "length     1 step, 524 k tokens"
    (tmp_path / "a run/step_00000250").mkdir()
    assert list(summary.outcome(config, metrics, 3.2))[1] == "best       validation loss 3.1234 at step 250"
    log.unlink()
    report_line = list(summary.outcome(config, metrics, 3.2))[-2]
    assert report_line.startswith(f"  make -C {shlex.quote(str(ROOT))} report RUN=")
    commands = subprocess.check_output(["sh", "-c", f"{report_line} -n -o .venv/installed"], text=True)
    assert str(tmp_path / "a run") in shlex.split(commands)
    monkeypatch.setattr(summary, "ROOT", tmp_path)  # as where a wheel is installed, without a Makefile
    report = shlex.split(list(summary.outcome(config, metrics, 3.2))[-2])
    assert report == ["python", "-m", "eval.report", "a run"]
    monkeypatch.setenv("HOME", str(tmp_path))
    at_home = parse_config(["--config=gpt2", "--max_steps=19073", f"--output_dir={tmp_path}/b"])
    load_line = redact(list(summary.outcome(at_home, metrics, 3.2))[-4])
    assert load_line == "  transformers.AutoModelForCausalLM.from_pretrained('b/step_00019073')"
    run, _, output = whole_run
    assert output.splitlines()[-4:] == [
        f"  transformers.AutoModelForCausalLM.from_pretrained('{run}/step_00000020')",
        f"  make sample RUN={run}",
        f"  make report RUN={run}",
        f"  make export RUN={run}",
    ]
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    assert targets >= {shlex.split(line)[1] for line in output.splitlines()[-3:]}
