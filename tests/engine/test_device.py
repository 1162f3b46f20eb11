"""What the engine chooses for the hardware, which is faked."""

import os
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import psutil
import pytest
import torch
from huggingface_hub import JobHardware

from recipe.engine import hardware
from recipe.engine.device import local_device
from recipe.engine.strategy import Strategy
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests.engine import cpu_strategy


@pytest.fixture
def machine(monkeypatch):
    def pretend(capability=None, mps=False, xpu=False, cpu_bf16=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(torch.xpu, "is_available", lambda: xpu)
        monkeypatch.setattr(hardware, "cpu_has_bf16", lambda: cpu_bf16)

    return pretend


@pytest.mark.parametrize(
    ("devices", "cpu", "precision"),
    [
        ({"capability": (7, 0)}, False, "fp16"),  # V100
        ({"capability": (7, 5)}, False, "fp16"),  # T4: torch emulates bf16 there, and reports that it is supported
        ({"capability": (8, 0)}, False, "bf16"),
        ({"capability": (8, 0)}, True, "fp32"),
        ({"capability": (8, 0), "cpu_bf16": True}, True, "bf16"),
        ({"cpu_bf16": True}, False, "bf16"),
        ({}, False, "fp32"),
        ({"mps": True, "cpu_bf16": True}, False, "fp32"),
        ({"xpu": True, "cpu_bf16": True}, False, "fp32"),
        ({"xpu": True, "cpu_bf16": True}, True, "bf16"),
    ],
)
def test_auto_is_the_fastest_precision_that_the_device_computes_natively(machine, devices, cpu, precision):
    machine(**devices)
    assert hardware.resolve_precision("auto", cpu=cpu) == precision
    assert hardware.resolve_precision("fp32", cpu=cpu) == "fp32"


def test_fp32_is_not_rounded_to_tf32(monkeypatch):
    settings = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", settings.append)
    for precision in ("fp32", "tf32"):
        local_device(torch.device("mps"), precision, Processes())
    assert settings == ["highest", "high"]


@pytest.mark.parametrize(
    ("devices", "precision", "message"),
    [
        ({"capability": (7, 5)}, "bf16", "precision bf16 is not supported on Tesla T4; use auto, fp16 or fp32"),
        ({}, "fp16", "precision fp16 is not supported on a CPU; use auto, fp32 or bf16"),
        ({"xpu": True}, "fp16", "precision fp16 is not supported on XPU; use auto, fp32 or bf16"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(machine, devices, precision, message):
    machine(**devices)
    with pytest.raises(UserError, match=message):
        hardware.resolve_precision(precision, cpu=False)


# Names as CUDA reports them, and peaks in TFLOP/s.
KNOWN = {
    "NVIDIA GH200 144G HBM3e": 989,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA A100-SXM4-80GB": 312,
    "A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A10G": 70,
    "NVIDIA L40S": 362,
    "Tesla T4": 65,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 4060": 30.2,
    "NVIDIA RTX A6000": 154.8,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 503.8,
    "Tesla V100-SXM2-32GB": 125,
    "NVIDIA B200": 2250,
    "AMD Instinct MI300X": 1307.4,
    "AMD Instinct MI250X": 191.5,  # one of its two devices
    "NVIDIA H100 NVL": 835,
    "NVIDIA GB200": 2500,
}
# GPUs of laptops, slices, export models and others with almost the same name.
UNKNOWN = ["NVIDIA RTX A1000", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "GRID A100-10C", "NVIDIA T400", ""]
UNKNOWN += ["AMD Radeon RX 7900 XTX", "NVIDIA B200 MIG 1g.23gb", "NVIDIA L4-24Q", "NVIDIA RTX 4000 Ada Generation"]
UNKNOWN += ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 NVL", "NVIDIA GeForce RTX 4060 Laptop GPU"]


def test_the_peak_is_the_data_sheets_and_none_for_a_similar_name():
    assert {name: hardware.peak_flops(name) for name in KNOWN} == {name: tera * 1e12 for name, tera in KNOWN.items()}
    assert [name for name in UNKNOWN if hardware.peak_flops(name)] == []


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("rtx4090", 1, "RTX 4090"),
        ("4090 24GB", 1, "RTX 4090"),
        ("rtx4070ti", 1, "RTX 4070 TI"),
        ("rtx6000ada", 1, "RTX 6000 ADA"),
        ("4070tisuper", 1, "RTX 4070 TI SUPER"),
        ("2xrtx3090", 2, "RTX 3090"),
        ("RTX_6000_Ada", 1, "RTX 6000 ADA"),
        ("h100x8", 8, "H100"),
        ("H100:8", 8, "H100"),
        ("8 x NVIDIA H100 80GB HBM3", 8, "H100"),
        ("a100_80gb", 1, "A100"),
        ("h100sxm", 1, "H100"),
        ("h100nvl", 1, "H100 NVL"),
        ("rtxpro6000", 1, "RTX PRO 6000"),
        ("m1max", 1, "M1 MAX"),
        ("gb200", 1, "GB200"),
        ("a6000", 1, "RTX A6000"),
        ("8xmi300x", 8, "MI300X"),
        ("tpu-v5e-8", 8, "TPU V5E"),
        ("v5litepod-16", 16, "TPU V5E"),
        ("v4-8", 4, "TPU V4"),  # Google counts cores
        ("8xtpu v6e", 8, "TPU V6E"),
    ],
)
def test_a_dry_run_accepts_the_common_names_of_devices(text, count, name):
    assert hardware.named_devices(text) == (count, name, hardware.DEVICES[name].memory)


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("4xa100-40gb", 40),
        ("a100-sxm4-40gb", 40),
        ("a100-pcie-40gb", 40),
        ("a100-40g", 40),
        ("v100-32gb:2", 32),
        ("rtx4060ti-16gb", 16),
        ("3080 12GB", 12),
        ("h20-141gb", 141),
        ("NVIDIA GH200 480GB", 96),  # that is its processor's
    ],
)
def test_a_dry_run_takes_the_memory_that_is_named(text, gigabytes):
    assert hardware.named_devices(text)[2] == gigabytes


def test_a_dry_run_accepts_the_flavors_of_hugging_face_jobs():
    flavors = [flavor.value for flavor in JobHardware if not flavor.value.startswith(("cpu", "inf"))]
    counts = {flavor: hardware.named_devices(flavor)[0] for flavor in flavors}
    assert counts["a100x8"] == counts["rtx-pro-6000x8"] == 8
    assert counts["a10g-largex2"] == 2
    assert counts["t4-small"] == counts["l40sx1"] == 1


@pytest.mark.parametrize(
    ("launched", "launcher_environment", "thread_counts"),
    [
        (False, {}, []),  # python recipe/train.py: the variable is the user's
        (True, {"OMP_NUM_THREADS": "1"}, []),
        (True, {}, [2]),  # accelerate launch has set it to 1 itself
    ],
)
def test_the_users_omp_num_threads_is_kept(monkeypatch, launched, launcher_environment, thread_counts):
    set_counts = []
    launcher = SimpleNamespace(environ=lambda: launcher_environment, cmdline=lambda: ["accelerate", "launch"])
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(parent=lambda: launcher))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch, "set_num_threads", set_counts.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    hardware.tune_cpu(local_world_size=1)
    assert set_counts == thread_counts


@pytest.mark.parametrize(
    ("quota", "processes", "threads"),
    [
        *[("20000 10000", 1, 2), ("5000 10000", 1, 1), ("max 10000", 1, 8), (None, 1, 8), (None, 4, 2), (None, 16, 1)],
        *[(20000, 1, 2), (-1, 1, 8)],  # version 1 of control groups
    ],
)
def test_the_processes_of_a_node_share_its_cores_or_a_containers_quota(
    monkeypatch, tmp_path, quota, processes, threads
):
    """More threads take turns, and each waits for those that do not run."""
    if isinstance(quota, int):
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("10000\n")
    elif quota:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    set_counts = []
    monkeypatch.setattr("recipe.utils.machine.CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "set_num_threads", set_counts.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    hardware.tune_cpu(local_world_size=processes)
    assert set_counts == [threads]


def test_a_deterministic_run_is_compiled_by_torch_2_9_too(monkeypatch):
    """Whose compiler does not have the setting."""
    from torch._inductor import config

    monkeypatch.delitem(config._config, "deterministic", raising=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    model = torch.nn.Linear(1, 1)
    hardware.compile_in_place(model, "default")
    assert model._compiled_call_impl is not None


def test_compiled_code_that_another_user_may_have_made_is_not_run(monkeypatch, tmp_path):
    """Torch reads precompiled headers there also where TORCHINDUCTOR_CACHE_DIR is set."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    hardware.compile_in_place(torch.nn.Linear(2, 2), "default")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UserError, match=f"{tmp_path}/torchinductor_ada.+ belongs to another user.+set TMPDIR"):
        hardware.compile_in_place(torch.nn.Linear(2, 2), "default")


def test_dropout_differs_between_seeds_steps_and_processes_and_is_repeatable():
    def mask(seed: int, step: int, rank: int) -> tuple:
        cpu_strategy(processes=Processes(rank=rank, world_size=2)).seed_dropout(seed, step)
        return tuple(torch.rand(4).tolist())

    cases = [(seed, step, rank) for seed in (1, 2) for step in (0, 1, 7) for rank in (0, 1)]
    masks = [mask(*case) for case in cases]
    assert len(set(masks)) == len(cases)
    assert [mask(*case) for case in cases] == masks


@pytest.mark.parametrize(
    ("release", "setting"), [("6.8.0-generic", "expandable_segments:True"), ("5.15.1-microsoft-standard-WSL2", None)]
)
def test_the_allocators_segments_grow_except_under_wsl(monkeypatch, release, setting):
    """Where some drivers end the run with an error at an allocation."""
    monkeypatch.setattr(hardware.platform, "release", lambda: release)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    hardware.set_up_allocator()
    assert os.environ.pop("PYTORCH_ALLOC_CONF", None) == setting


@pytest.mark.parametrize(
    ("error", "settings"),
    [("CUDA driver error: operation not supported", ["expandable_segments:False"]), ("CUDA error: an illegal", None)],
)
def test_segments_do_not_grow_on_a_gpu_that_cannot_map_memory(monkeypatch, error, settings):
    """As on a vGPU, whose first allocation would end the run."""
    set_settings = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", set_settings.append)
    monkeypatch.setattr(torch, "ones", Mock(side_effect=RuntimeError(error)))
    with nullcontext() if settings else pytest.raises(RuntimeError, match=error):
        hardware.check_allocator(torch.device("cuda"))
    assert set_settings == (settings or [])


@pytest.mark.parametrize(("capability", "reason"), [((6, 0), "Triton does not support Tesla T4"), ((7, 0), "")])
def test_a_gpu_older_than_triton_supports_trains_uncompiled(monkeypatch, machine, capability, reason):
    """Inductor would end the run with a traceback."""
    machine(capability=capability)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=16e9))
    monkeypatch.setattr(hardware, "check_allocator", lambda device: None)
    accelerator = SimpleNamespace(device=torch.device("cuda"), process_index=0, num_processes=1)
    monkeypatch.setattr("recipe.engine.strategy.start_accelerator", lambda *_: accelerator)
    assert Strategy.open("auto").runtime.no_compile == reason


@pytest.mark.parametrize(
    ("names", "tera", "note"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, 165.2, ""),
        (
            ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3060"],
            (165.2 + 25.5) / 2,
            "GPUs differ .+ 4090, .+ 3060.: each",
        ),
        (
            ["NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080"],
            None,
            "GPUs differ .+: each step waits for the slowest",
        ),
    ],
)
def test_the_mfu_of_different_gpus_counts_the_peak_of_each(monkeypatch, names, tera, note):
    processes = Processes(world_size=2, local_world_size=2)
    monkeypatch.setattr(Processes, "gather_objects", lambda *_: names)
    monkeypatch.setattr(hardware, "check_allocator", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: names[0])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24e9))
    device = local_device(torch.device("cuda"), "bf16", processes)
    assert device.peak_flops == (tera and pytest.approx(1e12 * tera))
    assert re.search(note, device.note) if note else device.note == ""


@pytest.mark.parametrize(("integrated", "free"), [(1, 115e9), (0, 41e9)])
def test_files_that_the_kernel_caches_take_no_memory_of_an_integrated_gpu(monkeypatch, integrated, free):
    """Such as a DGX Spark's, which shares its memory with the processor."""
    facts = {"mem_get_info": (41e9, 128e9), "memory_reserved": 0, "memory_allocated": 0}
    facts["get_device_properties"] = SimpleNamespace(is_integrated=integrated)
    for name, fact in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, fact=fact: fact)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=115e9))
    monkeypatch.setattr("recipe.utils.machine.CGROUP", Path("/none"))
    assert hardware.free_memory(torch.device("cuda")) == free
