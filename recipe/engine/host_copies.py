"""Copies of what is on a device in the CPU's memory, for a checkpoint."""

import torch
from torch import Tensor


class HostCopies:
    """Copies of fp32 tensors in one buffer, allocated for the first of them and then kept.

    For a GPU it is page-locked: copies are queued without waiting for the device, and `complete` waits once.
    """

    def __init__(self, device: torch.device, numbers: int):
        """`numbers` is how many all tensors together hold."""
        self._on_cuda = device.type == "cuda"
        self._numbers, self._used = numbers, 0
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def add(self, tensor: Tensor) -> Tensor:
        """A copy, to be read after `complete`; those after `complete` overwrite it."""
        if self._buffer is None:
            self._buffer = torch.empty(self._numbers)
            if self._on_cuda:  # not pin_memory, which rounds up to a power of two: 32 GB for XL's 18.7
                cudart = torch.cuda.cudart()
                torch.cuda.check_error(cudart.cudaHostRegister(self._buffer.data_ptr(), self._buffer.nbytes, 0))
        copy = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        return copy.copy_(tensor, non_blocking=self._on_cuda)

    def complete(self) -> None:
        """Waits until all copies are there."""
        self._used = 0
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()
