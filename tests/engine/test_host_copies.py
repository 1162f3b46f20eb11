"""A checkpoint's copies are exact, stay while training goes on, and do not wait for a GPU one by one."""

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
    """Refuses what CUDA does: memory that is registered already."""

    def __init__(self):
        self.registered = {}

    def cudaHostRegister(self, pointer, size, flags):
        known = any(pointer < at + n and at < pointer + size for at, n in self.registered.items())
        self.registered |= {} if known else {pointer: size}
        return 712 * known

    def cudaHostUnregister(self, pointer):
        del self.registered[pointer]


def test_memory_is_page_locked_for_as_long_as_there_are_copies(monkeypatch):
    """A process may train several times, as best.py does and a run of train_hours."""
    cudart, device = Cudart(), type("Device", (), {"type": "cuda"})()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda error: error and pytest.fail(f"CUDA error {error}"))
    for _ in range(5):
        copies = HostCopies(device, 21_000_000)
        copy = copies.add(torch.ones(1000))
        del copies
        assert len(cudart.registered) == 1, "which a save may still be writing"
        del copy
        assert not cudart.registered
