"""Copies of what is on a device in the CPU's memory, for a checkpoint."""

import logging
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from recipe.utils.errors import first_line

logger = logging.getLogger(__name__)


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
            if self._on_cuda:
                _lock_pages(self._buffer)
        copy = self._buffer[self._used : self._used + tensor.numel()].view(tensor.shape)
        self._used += tensor.numel()
        return copy.copy_(tensor, non_blocking=self._on_cuda)

    def complete(self) -> None:
        """Waits until all copies are there."""
        self._used = 0
        if self._on_cuda:
            torch.cuda.current_stream().synchronize()


def _lock_pages(buffer: Tensor) -> None:
    """Page-locks the memory of a tensor for as long as that lives. (pin_memory would round up to a power of two: 32 GB
    for XL's 18.7.) Where that is refused, as WSL does above a part of the memory, copies wait for the device."""
    cudart, pointer = torch.cuda.cudart(), buffer.data_ptr()
    try:
        torch.cuda.check_error(cudart.cudaHostRegister(pointer, buffer.nbytes, 0))
    except RuntimeError as error:
        why = first_line(error)
        logger.warning("memory     %.1f GB cannot be page-locked (%s): saves take longer", buffer.nbytes / 1e9, why)
        with suppress(RuntimeError):  # CUDA keeps the error for the next kernel: not one of the training
            torch.zeros(1, device="cuda")
        return
    # Before the memory is freed, or CUDA refuses the next buffer at this address. Views of it keep the tensor alive.
    weakref.finalize(buffer, cudart.cudaHostUnregister, pointer).atexit = False
