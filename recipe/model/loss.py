"""Next-token cross-entropy, whole or in chunks, from the hidden states and the head's weight.

Both forms compute the softmax in fp32 and give the same numbers. The whole form holds the logits of the
micro-batch, N x V; the chunked one holds `chunk_size` x V and, in exchange, keeps the gradient of the head.
"""

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
_ROWS = 16  # of 50,257 fp32 logits are 3 MB; 8 to 32 are equally fast


def next_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int = 0,
    pad_vocab_to: int = 1,
    fused: bool = False,
) -> torch.Tensor:
    """Mean cross-entropy in nats of `targets` under softmax(hidden @ weight.T); a 0-d fp32 tensor.

    Args:
        hidden: (B, T, D) final hidden states, position t already aligned with the target at t.
        weight: (V, D) the head; under autocast the product runs in autocast's type.
        targets: (B, T) token ids; positions with IGNORE_INDEX do not count; the loss is 0 if none counts.
        chunk_size: positions whose logits are held at once; 0 holds all of them.
        pad_vocab_to: the product's row count is rounded up to a multiple of this. The rows added are sliced off
            before the softmax, so that neither the loss nor a gradient changes; tensor cores are faster with it.
        fused: softmax, loss and gradient of the logits are one Triton kernel, on CUDA.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (N, D), (N,)
    vocab_size = weight.shape[0]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if rows := -vocab_size % pad_vocab_to:
        weight = F.pad(weight, (0, 0, 0, rows))
    count = (targets != IGNORE_INDEX).sum().clamp(min=1)
    if chunk_size:
        return _chunked(hidden, weight, targets, chunk_size, vocab_size, fused) / count
    if fused or _by_rows(hidden):
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        loss_sum = _fused_loss if fused else _loss_by_rows
        return loss_sum(hidden, weight, targets, vocab_size, need_grad)[0] / count
    logits = F.linear(hidden, weight)[:, :vocab_size]  # (N, V)
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum") / count


class _ChunkedLossSum(torch.autograd.Function):
    """Summed cross-entropy that computes its gradients chunk by chunk in the forward pass.

    The gradient of a sum over positions needs one scalar from later layers, so each chunk's logits are turned into
    gradients at once and then dropped: no logits are kept or recomputed.
    The factor 1/count (and a loss scale) enters in backward, in fp32: fp16 would flush p/count to zero.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, chunk_size, vocab_size, fused):
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        need_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        if need_grad:
            grad_hidden = torch.empty_like(hidden)
            grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            h, y = hidden[rows], targets[rows]
            valid = y != IGNORE_INDEX
            loss_and_gradient = _cross_entropy_fused if fused else _cross_entropy
            loss_sum, p = loss_and_gradient(h @ weight.t(), y, vocab_size, need_grad)
            loss += loss_sum
            if not need_grad:
                continue
            # Ignored rows are masked on the narrow side: D numbers a row, not V.
            grad_hidden[rows] = (p @ weight) * valid[:, None]
            grad_weight += p.t() @ (h * valid[:, None])
        if need_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad_loss,) = grad_outputs
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (grad_hidden * grad_loss).to(hidden_dtype),
            (grad_weight * grad_loss).to(weight_dtype),
            *(None,) * 4,
        )


def _cross_entropy(logits, targets, vocab_size, need_grad):
    """Summed cross-entropy of (N, V) logits, and their gradient, computed for ignored rows too."""
    index = targets.clamp(min=0)[:, None]
    log_p = F.log_softmax(logits[:, :vocab_size], -1, dtype=torch.float32)
    loss = -(log_p.gather(1, index).squeeze(1) * (targets != IGNORE_INDEX)).sum()
    if not need_grad:
        return loss, None
    p = log_p.exp_()  # d loss / d logits = p - onehot
    p.scatter_add_(1, index, p.new_full((1, 1), -1.0).expand_as(index))
    p, padding = p.to(logits.dtype), logits.shape[1] - vocab_size
    return loss, F.pad(p, (0, padding)) if padding else p


def _cross_entropy_fused(logits, targets, vocab_size, need_grad):
    """As `_cross_entropy`, in one kernel that overwrites the logits with their gradient."""
    from recipe.model.loss_kernel import cross_entropy_  # here, because it needs Triton

    return cross_entropy_(logits, targets, vocab_size, need_grad).sum(), logits


def _by_rows(hidden: torch.Tensor) -> bool:
    """Whether to go by rows: not on a GPU, which would wait for many small kernels."""
    return hidden.device.type == "cpu"


# Opaque to torch.compile, whose own code for the loss reads all logits several times and reaches 0.9 of the speed.
@torch.library.custom_op("recipe::loss_by_rows", mutates_args=())
def _loss_by_rows(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, need_grad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Summed cross-entropy on a CPU, and its gradients (empty unless `need_grad`): the softmax takes a few rows at a
    time, which stay in the cache.

    The logits, in the product's type, are the only N x V numbers: they become their gradient in place.
    On a CPU softmax is one kernel; log-softmax and an exponential would be two.
    """
    logits = hidden @ weight.t()  # (N, V and padding)
    logits[:, vocab_size:] = 0
    valid = targets != IGNORE_INDEX
    index = targets.clamp(min=0)[:, None]
    log_p = torch.empty(hidden.shape[0], 1, dtype=torch.float32)
    for start in range(0, hidden.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        row_logits = logits[rows, :vocab_size]
        p = torch.softmax(row_logits.float(), -1)
        p_target = p.gather(1, index[rows])
        log_p[rows] = p_target.log()
        if p_target.min() < 1e-30:  # too small for its logarithm
            log_p[rows] = torch.log_softmax(row_logits.float(), -1).gather(1, index[rows])
        if need_grad:  # d loss / d logits = p - onehot
            row_logits.copy_(p.scatter_(1, index[rows], p_target - 1))
    loss = -(log_p.squeeze(1) * valid).sum()
    if not need_grad:
        return loss, hidden.new_empty(0), hidden.new_empty(0)
    # Ignored rows are masked on the narrow side: D numbers a row, not V.
    valid = valid[:, None]
    return loss, (logits @ weight) * valid, logits.t() @ (hidden * valid)


@_loss_by_rows.register_fake
def _(hidden, weight, targets, vocab_size, need_grad):
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    return loss, *(t.new_empty(t.shape if need_grad else 0) for t in (hidden, weight))


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the gradients, which have no gradient
    ctx.save_for_backward(*output[1:])


def _scale_gradients(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 5
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad_loss, grad_weight * grad_loss, None, None, None


_loss_by_rows.register_autograd(_scale_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("recipe::fused_loss", mutates_args=())
def _fused_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocab_size: int, need_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross-entropy, and the gradient of the (N, V) logits in their place (empty unless `need_grad`)."""
    loss, gradient = _cross_entropy_fused(hidden @ weight.t(), targets, vocab_size, need_grad)
    return loss, gradient if need_grad else hidden.new_empty(0)


@_fused_loss.register_fake
def _(hidden, weight, targets, vocab_size, need_grad):
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    return loss, hidden.new_empty((hidden.shape[0], weight.shape[0]) if need_grad else 0)


def _keep_logits_gradient(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:2], output[1])


def _multiply_logits_gradient(ctx, grad_loss, _):
    if grad_loss is None:
        return (None,) * 5
    hidden, weight, gradient = ctx.saved_tensors
    # The factor 1/count (and a loss scale) multiplies the D numbers of a row rather than the V: cheaper, and in fp16 a
    # sum over all rows cannot overflow.
    return gradient @ weight * grad_loss, gradient.t() @ (hidden * grad_loss), None, None, None


_fused_loss.register_autograd(_multiply_logits_gradient, setup_context=_keep_logits_gradient)


# Never compiled: Inductor reorders the chunks' kernels and then holds the logits of all chunks at once.
_chunked = torch.compiler.disable(_ChunkedLossSum.apply)
