"""What the engine makes of the hardware it finds; the hardware is pretended."""

import subprocess
import time

import pytest
import torch

from recipe.engine import device
from recipe.errors import UserError


@pytest.fixture
def machine(monkeypatch):
    def pretend(capability=None, mps=False, cpu_bf16=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(device, "_cpu_has_bf16", lambda: cpu_bf16)

    return pretend


@pytest.mark.parametrize(
    ("found", "cpu", "precision"),
    [
        ({"capability": (7, 0)}, False, "fp16"),  # V100
        ({"capability": (7, 5)}, False, "fp16"),  # T4: torch emulates bf16 there, and says that it is supported
        ({"capability": (8, 0)}, False, "bf16"),
        ({"capability": (9, 0)}, False, "bf16"),
        ({"capability": (8, 0)}, True, "fp32"),
        ({"capability": (8, 0), "cpu_bf16": True}, True, "bf16"),
        ({"cpu_bf16": True}, False, "bf16"),
        ({}, False, "fp32"),
        ({"mps": True, "cpu_bf16": True}, False, "fp32"),
    ],
)
def test_auto_takes_what_the_device_does_natively(machine, found, cpu, precision):
    machine(**found)
    assert device.resolve_precision("auto", cpu=cpu) == precision
    assert device.resolve_precision("fp32", cpu=cpu) == "fp32"


@pytest.mark.parametrize(
    ("found", "precision", "message"),
    [
        ({"capability": (7, 5)}, "bf16", "precision bf16 is only emulated on Tesla T4; use auto or fp16"),
        ({"capability": (7, 5)}, "tf32", "precision tf32 needs an Ampere or newer GPU; use auto or fp32"),
        ({}, "tf32", "precision tf32 needs an Ampere or newer GPU"),
        ({}, "fp16", "precision fp16 needs a CUDA GPU"),
    ],
)
def test_a_precision_that_the_device_lacks_is_refused(machine, found, precision, message):
    machine(**found)
    with pytest.raises(UserError, match=message):
        device.resolve_precision(precision, cpu=False)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA B200", 2250),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA GH200 144G HBM3e", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 SXM5 80GB", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("A100-SXM4-40GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-SXM3-32GB", 125),
        ("Tesla V100-PCIE-16GB", 112),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 3090", 71),
    ],
)
def test_peaks_are_those_of_the_data_sheets(name, tera):
    assert device.peak_flops(name) == tera * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",
        "NVIDIA A1000",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "GRID A100-10C",
        "NVIDIA A100-40C",
        "NVIDIA A10-24Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA A800-SXM4-80GB",
        "NVIDIA H800",
        "NVIDIA H20",
        "NVIDIA L20",
        "NVIDIA A100X",
        "NVIDIA T400",
        "NVIDIA T4G",
        "Tesla V100-FHHL-16GB",
        "Tesla V100-DGXS-32GB",
        "NVIDIA GB200",
        "Some GPU",
        "",
    ],
)
def test_a_name_that_is_not_wholly_known_has_no_peak(name):
    assert device.peak_flops(name) is None


@pytest.mark.parametrize(
    ("chip", "peak"),
    [
        ("Apple M1", 2.6e12),
        ("Apple M1 Pro", 5.2e12),
        ("Apple M1 Max", 10.4e12),
        ("Apple M1 Ultra", 21e12),
        ("Apple M2", 3.6e12),
        ("Apple M2 Max", 13.6e12),
        ("Apple M2 Ultra", 27.2e12),
        ("Apple M2 Pro", None),
        ("Apple M3", None),
        ("Apple M10", None),
        ("Intel(R) Core(TM) i9", None),
        ("", None),
    ],
)
def test_a_mac_is_asked_for_its_chip(monkeypatch, chip, peak):
    """PyTorch calls all of them MPS."""
    asked = []

    def answer(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=f"{chip}\n")

    monkeypatch.setattr(subprocess, "run", answer)
    assert device.peak_of(torch.device("mps")) == peak
    assert asked == [["sysctl", "-n", "machdep.cpu.brand_string"]]


def test_a_mac_that_cannot_be_asked_has_no_peak(monkeypatch):
    def missing(command, **_):
        raise FileNotFoundError(command[0])

    monkeypatch.setattr(subprocess, "run", missing)
    assert device.peak_of(torch.device("mps")) is None


def test_the_peak_of_a_device_is_that_of_its_name(machine):
    machine(capability=(7, 5))  # a T4
    assert device.peak_of(torch.device("cuda", 0)) == 65e12
    assert device.peak_of(torch.device("cpu")) is None


def test_a_median_time_is_that_of_one_call():
    calls = []

    def call():
        calls.append(time.perf_counter())
        time.sleep(0.02)

    assert 0.02 <= device.median_seconds(call, torch.device("cpu"), seconds=0.2) < 0.06
    assert len(calls) >= 5  # one to warm up, one to estimate, and at least three
    calls.clear()
    device.median_seconds(lambda: calls.append(0), torch.device("cpu"), seconds=0.001)
    assert len(calls) > 100  # what is short is timed in rows of about a millisecond
    assert 0.005 <= device.seconds_of(lambda: time.sleep(0.005), torch.device("cpu"), calls=10) < 0.04  # for one call


def test_peaks_go_by_the_longest_known_name():
    assert device.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert device.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert device.peak_flops("NVIDIA A10G") == 70e12
    assert device.peak_flops("NVIDIA L4") == 121e12
    assert device.peak_flops("NVIDIA L40S") == 362e12
    assert device.peak_flops("Some GPU") is None


def test_memory_is_known_of_a_gpu_only(monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert (device.memory(cpu), device.free_memory(cpu)) == (None, None)
    properties = type("Properties", (), {"total_memory": 80})()
    pretended = {
        "get_device_properties": properties,
        "mem_get_info": (50, 80),
        "memory_reserved": 20,
        "memory_allocated": 5,
    }
    for name, value in pretended.items():
        monkeypatch.setattr(torch.cuda, name, lambda which, value=value: value)
    assert device.memory(gpu) == 80
    assert device.free_memory(gpu) == 65  # what the allocator keeps and nothing uses is free too


def test_memory_that_runs_out_is_an_answer_and_other_errors_are_not(monkeypatch):
    gpu, calls = torch.device("cuda", 0), []
    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name) or 42)
    assert device.peak_while(gpu, lambda: calls.append("work")) == 42
    assert calls == ["empty_cache", "reset_peak_memory_stats", "work", "synchronize", "max_memory_allocated"]

    def fail(error):
        raise error

    assert device.peak_while(gpu, lambda: fail(torch.OutOfMemoryError("CUDA out of memory"))) is None
    with pytest.raises(RuntimeError, match="illegal"):
        device.peak_while(gpu, lambda: fail(RuntimeError("an illegal memory access was encountered")))


def test_random_numbers_of_a_trial_are_drawn_again():
    with device.same_random_numbers(torch.device("cpu")):
        drawn = torch.rand(3)
    assert torch.equal(torch.rand(3), drawn)
