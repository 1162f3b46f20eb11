"""Copies of a device's tensors in the CPU's memory, for a checkpoint."""

import logging
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from recipe.utils.errors import first_line

logger = logging.getLogger(__name__)


class HostCopies:
    """Copies of fp32 tensors in one buffer, which is allocated at the first copy and then kept.

    For a GPU the buffer is page-locked: copies are queued without waiting for the device, and `complete` waits once.
    """

    def __init__(self, device: torch.device, numel: int):
        """`numel` is the number of elements of all tensors together."""
        self._on_cuda = device.type == "cuda"
        self._numel, self._used = numel, 0
        self._buffer: Tensor | None = None

    @torch.no_grad()
    def add(self, tensor: Tensor) -> Tensor:
        """A copy, which can be read after `complete`; copies added after `complete` overwrite it."""
        if self._buffer is None:
            self._buffer = torch.empty(self._numel)
            if self._on_cuda:
                _lock_pages(self._buffer)
        copy = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        return copy.copy_(tensor, non_blocking=self._on_cuda)

    def complete(self) -> None:
        """Waits for all copies."""
        self._used = 0
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()


def _lock_pages(buffer: Tensor) -> None:
    """Page-locks the memory of a tensor for its lifetime. (pin_memory would round up to a power of two: 32 GB for XL's
    18.7.) If CUDA refuses, as on WSL above a part of the memory, copies wait for the device."""
    cudart, pointer = torch.cuda.cudart(), buffer.data_ptr()
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(pointer, buffer.nbytes, 0))
    except RuntimeError as error:
        reason = first_line(error)
        logger.warning("memory     %.1f GB cannot be page-locked (%s): saves take longer", buffer.nbytes / 1e9, reason)
        with suppress(RuntimeError):  # CUDA reports the error again at the next kernel: better here than in training
            torch.zeros(1, device="cuda")
        return
    # Unlock before the memory is freed, or CUDA refuses the next buffer at this address. Views keep the tensor alive.
    weakref.finalize(buffer, cudart.cudaHostUnregister, pointer).atexit = False
