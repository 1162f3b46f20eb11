"""Cross-entropy of whole rows of logits as one Triton kernel. Importing this needs Triton.

TRITON_INTERPRET=1 runs the kernel without a GPU, on CPU tensors.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

_LANE = tl.constexpr(8)  # neighboring columns of each thread: in 16 bits one load
_LOG2_E = tl.constexpr(1.4426950408889634)
# libdevice's exp flushes denormals to zero; tl's does not and takes three more instructions, but can be interpreted.
_math = tl if triton.knobs.runtime.interpret else libdevice


@triton.jit
def _add_block(x, largest, total):
    """The maximum of each thread's columns so far, and the sum of exp(x - maximum), with the block `x`."""
    larger = tl.maximum(largest, tl.max(x, 1))
    kept = total * _math.exp2((largest - larger) * _LOG2_E)
    return larger, kept + tl.sum(_math.exp2((x - larger[:, None]) * _LOG2_E), 1)


@triton.jit
def _cross_entropy(logits, targets, losses, vocab_size, width, LANES: tl.constexpr, WRITE: tl.constexpr):
    """A row by LANES threads, which read it twice: for the softmax's maximum and sum, and for the gradient."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width  # within a row 32 bits are enough
    target = tl.load(targets + row).to(tl.int32)
    counts = (target >= 0) & (target < vocab_size)
    target_logit = tl.load(logits + target, mask=counts, other=0.0).to(tl.float32)
    columns = tl.arange(0, LANES)[:, None] * _LANE + tl.arange(0, _LANE)[None, :]
    whole = vocab_size // (LANES * _LANE) * (LANES * _LANE)  # columns in whole blocks, which need no mask
    rest = whole + columns
    # A maximum and a sum for each thread: threads wait for each other once a row, not once a block.
    largest = tl.full((LANES,), -1e30, tl.float32)  # finite, since -inf - -inf is NaN
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, whole, LANES * _LANE):
        largest, total = _add_block(tl.load(logits + start + columns).to(tl.float32), largest, total)
    x = tl.load(logits + rest, mask=rest < vocab_size, other=float("-inf")).to(tl.float32)
    largest, total = _add_block(x, largest, total)
    maximum = tl.max(largest, 0)
    total = tl.sum(total * _math.exp2((largest - maximum) * _LOG2_E), 0)
    tl.store(losses + row, tl.where(counts, tl.log(total) + maximum - target_logit, 0.0))
    if WRITE:
        factor = tl.where(counts, 1.0 / total, 0.0)  # a row that does not count has no gradient
        for start in range(0, whole, LANES * _LANE):
            p = _math.exp2((tl.load(logits + start + columns).to(tl.float32) - maximum) * _LOG2_E) * factor
            tl.store(logits + start + columns, p.to(logits.dtype.element_ty))
        p = _math.exp2((x - maximum) * _LOG2_E) * factor
        tl.store(logits + rest, p.to(logits.dtype.element_ty), mask=rest < width)
        tl.debug_barrier()  # or another thread's p could overwrite this one
        p = _math.exp2((target_logit - maximum) * _LOG2_E) * factor - 1.0
        tl.store(logits + target, p.to(logits.dtype.element_ty), mask=counts)


def cross_entropy_(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int, need_grad: bool) -> torch.Tensor:
    """Cross-entropy in nats of each row, (N,) in fp32; 0 where the target is not a token, such as IGNORE_INDEX.

    Args:
        logits: (N, V and up to 4,096 columns of padding), contiguous. With `need_grad` they become softmax - onehot,
            the gradient of the summed losses; 0 in padding and in rows that do not count.
        targets: (N,) token ids.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    # A multiprocessor has room for 2,048 threads on an A100, H100 or later, for 1,536 or 1,024 on others. The rows that
    # these have in progress should stay in the L2 cache for their second reading: with 512 threads for each, four a
    # multiprocessor, an H200 read them from memory again.
    threads = 512
    if logits.is_cuda and torch.cuda.get_device_properties(logits.device).max_threads_per_multi_processor == 2048:
        threads = 1024
    sizes = {"LANES": threads, "WRITE": need_grad, "num_warps": threads // 32}
    _cross_entropy[(len(logits),)](logits, targets, losses, vocab_size, logits.shape[1], **sizes)
    return losses
