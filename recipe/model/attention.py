"""Causal attention for CPUs, where it is faster than SDPA: matrix products over blocks of queries.

PyTorch's flash attention on a CPU spends a sixth of a 124M step on 4 % of its FLOPs (docs/log.md). Here each block of
queries is multiplied by the keys up to its end in one batched product, and the probabilities are kept for backward
instead of recomputed: B H T (T + 128) / 2 numbers a layer, which fit in a CPU's memory. Scores and softmax are fp32, as
in SDPA.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

_BLOCK = 128  # queries; 64 to 256 are equally fast


def block_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal softmax attention over (B, H, T, K), in place of SDPA; with dropout it is SDPA."""
    if dropout:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
    B, H, T, K = q.shape
    q, k, v = (t.reshape(B * H, T, K) for t in (q, k, v))
    return _attend(q, k, v)[0].view(B, H, T, K)


def _num_probs(heads: int, T: int) -> int:
    """How many probabilities are kept for backward: `heads` is B H."""
    return heads * sum((hi - lo) * hi for lo, hi in _blocks(T))


def _blocks(T: int) -> Iterator[tuple[int, int]]:
    return ((lo, min(T, lo + _BLOCK)) for lo in range(0, T, _BLOCK))


def _prob_blocks(probs: torch.Tensor, heads: int, T: int) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(lo, hi, probabilities (heads, hi - lo, hi)) of each block of queries."""
    start = 0
    for lo, hi in _blocks(T):
        size = heads * (hi - lo) * hi
        yield lo, hi, probs[start : start + size].view(heads, hi - lo, hi)
        start += size


# Opaque to torch.compile, which would unroll the loops, and which generates no code for their products anyway.
@torch.library.custom_op("recipe::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads, T, K) each -> outputs (heads, T, K) and probabilities, flat (`_prob_blocks`)."""
    heads, T, K = q.shape
    out, probs = q.new_empty(q.shape), q.new_empty(_num_probs(heads, T))
    with torch.autocast(q.device.type, enabled=False):
        scaled_q, keys = q.float() / math.sqrt(K), k.float().transpose(1, 2)
        causal_mask = torch.full((min(_BLOCK, T),) * 2, -math.inf, device=q.device).triu(1)
        for lo, hi, p in _prob_blocks(probs, heads, T):
            scores = torch.bmm(scaled_q[:, lo:hi], keys[:, :, :hi])
            scores[:, :, lo:] += causal_mask[: hi - lo, : hi - lo]
            p.copy_(torch.softmax(scores, -1))
            out[:, lo:hi] = torch.bmm(p, v[:, :hi])
    return out, probs


@_attend.register_fake
def _(q, k, v):
    return q.new_empty(q.shape), q.new_empty(_num_probs(q.shape[0], q.shape[1]))


@torch.library.custom_op("recipe::attend_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, (heads, T, K) each."""
    heads, T, K = q.shape
    dq = q.new_empty(q.shape)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    with torch.autocast(q.device.type, enabled=False):
        for lo, hi, p in _prob_blocks(probs, heads, T):
            g = grad[:, lo:hi]
            dv[:, :hi] += torch.bmm(p.transpose(1, 2), g)
            dp = torch.bmm(g, v[:, :hi].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype).mul_(1 / math.sqrt(K))
            dq[:, lo:hi] = torch.bmm(ds, k[:, :hi])
            dk[:, :hi] += torch.bmm(ds.transpose(1, 2), q[:, lo:hi])
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_attend_backward.register_fake
def _(grad, q, k, v, probs):
    return tuple(t.new_empty(t.shape) for t in (q, k, v))


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the probabilities, which have no gradient
    ctx.save_for_backward(*inputs, output[1])


def _backward(ctx, grad, _):
    if grad is None:
        return None, None, None
    q, k, v, probs = ctx.saved_tensors
    return _attend_backward(grad.contiguous(), q, k, v, probs)


_attend.register_autograd(_backward, setup_context=_save_for_backward)
