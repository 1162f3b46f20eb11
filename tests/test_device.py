"""What the engine makes of the hardware it finds; the hardware is pretended."""

import pytest
import torch

from recipe import device
from recipe.config import UserError


@pytest.fixture
def machine(monkeypatch):
    def pretend(capability=None, mps=False, cpu_bf16=False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
        monkeypatch.setattr(device, "_cpu_has_bf16", lambda: cpu_bf16)

    return pretend


@pytest.mark.parametrize(("found", "cpu", "precision"), [
    ({"capability": (7, 0)}, False, "fp16"),  # V100
    ({"capability": (7, 5)}, False, "fp16"),  # T4: torch emulates bf16 there, and says that it is supported
    ({"capability": (8, 0)}, False, "bf16"),
    ({"capability": (9, 0)}, False, "bf16"),
    ({"capability": (8, 0)}, True, "fp32"),
    ({"capability": (8, 0), "cpu_bf16": True}, True, "bf16"),
    ({"cpu_bf16": True}, False, "bf16"),
    ({}, False, "fp32"),
    ({"mps": True, "cpu_bf16": True}, False, "fp32"),
])  # fmt: skip
def test_auto_takes_what_the_device_does_natively(machine, found, cpu, precision):
    machine(**found)
    assert device.resolve_precision("auto", cpu=cpu) == precision
    assert device.resolve_precision("fp32", cpu=cpu) == "fp32"


@pytest.mark.parametrize(("found", "precision", "message"), [
    ({"capability": (7, 5)}, "bf16", "precision bf16 is only emulated on Tesla T4; use auto or fp16"),
    ({"capability": (7, 5)}, "tf32", "precision tf32 needs an Ampere or newer GPU; use auto or fp32"),
    ({}, "tf32", "precision tf32 needs an Ampere or newer GPU"),
    ({}, "fp16", "precision fp16 needs a CUDA GPU"),
])  # fmt: skip
def test_a_precision_that_the_device_lacks_is_refused(machine, found, precision, message):
    machine(**found)
    with pytest.raises(UserError, match=message):
        device.resolve_precision(precision, cpu=False)


def test_peaks_go_by_the_longest_known_name():
    assert device.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert device.peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert device.peak_flops("NVIDIA A10G") == 70e12
    assert device.peak_flops("NVIDIA L4") == 121e12
    assert device.peak_flops("NVIDIA L40S") == 362e12
    assert device.peak_flops("Some GPU") is None
