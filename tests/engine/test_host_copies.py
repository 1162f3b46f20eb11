"""A checkpoint's copies on the host: exact, kept while training goes on, queued without waiting for the GPU."""

import pytest
import torch

from recipe.engine.host_copies import HostCopies

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_copies_are_queued_into_one_buffer(device):
    tensors = [torch.randn(shape, device=device) for shape in [(7, 5), (3,), (5, 7), (64, 64)]]
    tensors[2] = tensors[2].t()
    expected = [tensor.clone().cpu() for tensor in tensors]
    copies = HostCopies(torch.device(device), sum(tensor.numel() for tensor in tensors))
    if device == "cuda":
        copies.add(tensors[0])  # allocates the buffer
        copies.complete()
        torch.cuda.set_sync_debug_mode("error")
    copied = [copies.add(tensor) for tensor in tensors]
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    copies.complete()
    for tensor in tensors:
        tensor.zero_()
    torch.testing.assert_close(copied, expected, rtol=0, atol=0)
    assert all(copy.untyped_storage().data_ptr() == copied[0].data_ptr() for copy in copied)


class Cudart:
    """Refuses, as CUDA does, memory that is registered already."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, pointer, size, flags):
        if any(pointer < start + n and start < pointer + size for start, n in self.registered.items()):
            return 712
        self.registered[pointer] = size
        return 0

    def cudaHostUnregister(self, pointer):
        del self.registered[pointer]


def test_memory_is_page_locked_as_long_as_a_copy_exists(monkeypatch):
    """A process may train several times, as best.py does and a run of train_hours."""
    cudart, device = Cudart(), type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: error and pytest.fail(f"CUDA error {error}"))
    for _ in range(5):
        copies = HostCopies(device, 21_000_000)
        copy = copies.add(torch.ones(1000))
        del copies
        assert len(cudart.registered) == 1  # a save may still be writing the copy
        del copy
        assert not cudart.registered


def test_memory_that_cannot_be_page_locked_is_used_pageable(monkeypatch, caplog):
    """WSL refuses to lock a large part of the memory, and the next kernel reports that error again."""
    errors = [RuntimeError("out of memory(2)"), RuntimeError("CUDA error: out of memory")]
    cudart = type("Cudart", (), {"cudaHostRegister": lambda *_: 2})

    def fail(*_, **__):
        raise errors.pop(0)

    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    monkeypatch.setattr(torch.cuda, "check_error", fail)
    with monkeypatch.context() as kernels:
        kernels.setattr(torch, "zeros", fail)
        copy = HostCopies(type("Device", (), {"type": "cuda"})(), 1000).add(torch.ones(1000))
    assert not errors
    assert copy.sum() == 1000
    assert "0.0 GB cannot be page-locked (" in caplog.text
