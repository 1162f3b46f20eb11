"""Cross-entropy as one Triton kernel, one program for each row of logits. Importing this needs Triton.

TRITON_INTERPRET=1 runs the kernel without a GPU, on CPU tensors.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra import libdevice

_VECTOR = tl.constexpr(8)  # neighboring columns of a thread: in 16 bits they are one load
_LOG2_E = tl.constexpr(1.4426950408889634)
# libdevice's exp flushes denormals to zero; tl's does not and takes three more instructions, but can be interpreted.
_math = tl if knobs.runtime.interpret else libdevice


@triton.jit
def _add_block(x, thread_max, thread_sum):
    """Online softmax: adds the block `x` to each thread's running maximum and its sum of exp(x - maximum)."""
    new_max = tl.maximum(thread_max, tl.max(x, 1))
    rescaled = thread_sum * _math.exp2((thread_max - new_max) * _LOG2_E)
    return new_max, rescaled + tl.sum(_math.exp2((x - new_max[:, None]) * _LOG2_E), 1)


@triton.jit
def _cross_entropy(logits, targets, losses, vocab_size, width, THREADS: tl.constexpr, WRITE_GRAD: tl.constexpr):
    """One row of `width` logits by THREADS threads, which read it twice: for the softmax's maximum and sum, and, with
    WRITE_GRAD, to overwrite it with its gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width  # within a row 32 bits are enough
    target = tl.load(targets + row).to(tl.int32)
    is_token = (target >= 0) & (target < vocab_size)
    target_logit = tl.load(logits + target, mask=is_token, other=0.0).to(tl.float32)
    columns = tl.arange(0, THREADS)[:, None] * _VECTOR + tl.arange(0, _VECTOR)[None, :]  # of a block
    tail = vocab_size // (THREADS * _VECTOR) * (THREADS * _VECTOR)  # start of the last block, the only one with a mask
    tail_columns = tail + columns

    # The softmax's maximum and sum, first for each thread: threads wait for each other once a row, not once a block.
    thread_max = tl.full((THREADS,), -1e30, tl.float32)  # finite, since -inf - -inf is NaN
    thread_sum = tl.zeros((THREADS,), tl.float32)
    for start in range(0, tail, THREADS * _VECTOR):
        thread_max, thread_sum = _add_block(tl.load(logits + start + columns).to(tl.float32), thread_max, thread_sum)
    x = tl.load(logits + tail_columns, mask=tail_columns < vocab_size, other=float("-inf")).to(tl.float32)
    thread_max, thread_sum = _add_block(x, thread_max, thread_sum)
    row_max = tl.max(thread_max, 0)
    row_sum = tl.sum(thread_sum * _math.exp2((thread_max - row_max) * _LOG2_E), 0)
    tl.store(losses + row, tl.where(is_token, tl.log(row_sum) + row_max - target_logit, 0.0))

    if WRITE_GRAD:  # softmax - onehot
        factor = tl.where(is_token, 1.0 / row_sum, 0.0)  # the gradient of a row without a target is 0
        for start in range(0, tail, THREADS * _VECTOR):
            p = _math.exp2((tl.load(logits + start + columns).to(tl.float32) - row_max) * _LOG2_E) * factor
            tl.store(logits + start + columns, p.to(logits.dtype.element_ty))
        p = _math.exp2((x - row_max) * _LOG2_E) * factor
        tl.store(logits + tail_columns, p.to(logits.dtype.element_ty), mask=tail_columns < width)
        tl.debug_barrier()  # or another thread's p could overwrite the target's
        p = _math.exp2((target_logit - row_max) * _LOG2_E) * factor - 1.0
        tl.store(logits + target, p.to(logits.dtype.element_ty), mask=is_token)


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, need_grad: bool) -> torch.Tensor:
    """Cross-entropy in nats of each row, (N,) in fp32; 0 where the target is not a token, such as IGNORE_INDEX.

    Args:
        logits: (N, V and up to 4,096 columns of padding), contiguous. With `need_grad` they become softmax - onehot,
            the gradient of the summed losses; 0 in padding and in rows whose target is not a token.
        targets: (N,) token ids.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    # A multiprocessor has room for 2,048 threads on an A100, H100 or later, for 1,536 or 1,024 on others. The rows that
    # are in progress on all of them should stay in the L2 cache for the second reading: with 512 threads a row, four
    # rows a multiprocessor, an H200 read them from memory again.
    threads, warp = 512, 32
    if logits.is_cuda:
        properties = torch.cuda.get_device_properties(logits.device)
        threads = 1024 if properties.max_threads_per_multi_processor == 2048 else 512
        warp = properties.warp_size  # 64 on AMD's Instinct, where 32 warps would be more threads than it launches
    options = {"THREADS": threads, "WRITE_GRAD": need_grad, "num_warps": threads // warp}
    kernel: Any = _cross_entropy[(len(logits),)]  # a type checker would ask for constexprs
    kernel(logits, targets, losses, vocab_size, logits.shape[1], **options)
    return losses
