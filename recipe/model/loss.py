"""Next-token cross-entropy from the hidden states and the head's weight, in fp32, and the same numbers in each form.

Where gradients are computed with the loss (`_loss_sum`), the logits become their own gradient in place, all at once or
chunk by chunk; elsewhere autograd, or Inductor, derives them from the plain form.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
_ROWS = 16  # of 50,257 fp32 logits are 3 MB; 8 to 32 are equally fast


def can_fuse(device_type: str) -> bool:
    """Whether the fused kernel can run on such a device, here: it is written in Triton, for CUDA."""
    return device_type == "cuda" and find_spec("triton") is not None


def next_token_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk_size: int = 0,
    pad_vocab_to: int = 1,
    fused: bool = False,
    by_rows: bool | None = None,
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
        by_rows: a few rows of the softmax at a time, which stay in a CPU's cache; by default on a CPU.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (N, D), (N,)
    vocab_size = weight.shape[0]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if rows := -vocab_size % pad_vocab_to:
        weight = F.pad(weight, (0, 0, 0, rows))
    count = (targets != IGNORE_INDEX).sum().clamp(min=1)
    by_rows = hidden.device.type == "cpu" if by_rows is None else by_rows
    if chunk_size or fused or by_rows:
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        kernel = "fused" if fused else "rows" if by_rows else "log_softmax"
        # Of more rows than this the head's gradient could overflow in fp16, in which a chunk's is summed.
        chunk_size = chunk_size or (4096 if hidden.dtype == torch.float16 else len(hidden))
        return _loss_sum(hidden, weight, targets, vocab_size, chunk_size, kernel, need_grad)[0] / count
    return plain_loss_sum(F.linear(hidden, weight), targets, vocab_size) / count


def plain_loss_sum(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Summed cross-entropy, 0-d in fp32, of (N, V and padding) logits, by PyTorch's own operators."""
    return F.cross_entropy(logits[:, :vocab_size].float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


# Opaque to torch.compile, whose own code for the loss reads all logits several times and reaches 0.9 of the speed, and
# would reorder the chunks and then hold the logits of all of them at once.
@torch.library.custom_op("recipe::loss_sum", mutates_args=())
def _loss_sum(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocab_size: int,
    chunk_size: int,
    kernel: str,
    need_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Summed cross-entropy, and its gradients (empty unless `need_grad`), of N x D hidden states.

    The gradient of a sum over positions needs one scalar from later layers, so logits are turned into gradients at once
    and then dropped: none are kept or recomputed. The factor 1/count (and a loss scale) enters in backward: fp16 would
    flush p/count to zero.
    """
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    chunked = chunk_size < len(hidden)  # then the head's gradient is summed in fp32
    grad_hidden = hidden.new_empty(hidden.shape if need_grad else 0)
    grad_weight = weight.new_zeros(weight.shape if need_grad and chunked else 0, dtype=torch.float32)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        logits = hidden[rows] @ weight.t()  # (chunk, V and padding)
        loss += _KERNELS[kernel](logits, targets[rows], vocab_size, need_grad)
        if need_grad:
            if kernel == "fused":  # 0 in ignored rows
                torch.mm(logits, weight, out=grad_hidden[rows])
                product = logits.t() @ hidden[rows]
            else:  # they are masked on the narrow side: D numbers a row, not V
                valid = (targets[rows] != IGNORE_INDEX)[:, None]
                grad_hidden[rows] = (logits @ weight) * valid
                product = logits.t() @ (hidden[rows] * valid)
            grad_weight = grad_weight.add_(product) if chunked else product
    return loss, grad_hidden, grad_weight


@_loss_sum.register_fake
def _(hidden, weight, targets, vocab_size, chunk_size, kernel, need_grad):
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    dtype = torch.float32 if chunk_size < len(hidden) or not need_grad else weight.dtype
    shapes = (hidden.shape, weight.shape) if need_grad else (0, 0)
    return loss, hidden.new_empty(shapes[0]), weight.new_empty(shapes[1], dtype=dtype)


def _keep_gradients(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the gradients, which have no gradient
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[1].dtype


def _scale_gradients(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 7
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad_loss, (grad_weight * grad_loss).to(ctx.dtype), *(None,) * 5


_loss_sum.register_autograd(_scale_gradients, setup_context=_keep_gradients)

# The kernels. Each returns the summed cross-entropy of (N, V and padding) logits and, with `need_grad`, turns them into
# their gradient, softmax - onehot; 0 in the padding, and anything in ignored rows (0 where it is fused).


def by_log_softmax(logits, targets, vocab_size, need_grad):
    """All rows at once."""
    index = targets.clamp(min=0)[:, None]
    log_p = F.log_softmax(logits[:, :vocab_size], -1, dtype=torch.float32)
    loss = -(log_p.gather(1, index).squeeze(1) * (targets != IGNORE_INDEX)).sum()
    if need_grad:
        p = log_p.exp_()
        p.scatter_add_(1, index, p.new_full((1, 1), -1.0).expand_as(index))
        logits[:, :vocab_size] = p
        logits[:, vocab_size:] = 0
    return loss


def by_rows_of_softmax(logits, targets, vocab_size, need_grad):
    """On a CPU, where softmax is one kernel, and log-softmax and an exponential would be two."""
    logits[:, vocab_size:] = 0
    index = targets.clamp(min=0)[:, None]
    log_p = torch.empty(len(logits), 1, dtype=torch.float32)
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        row_logits = logits[rows, :vocab_size]
        p = torch.softmax(row_logits.float(), -1)
        p_target = p.gather(1, index[rows])
        log_p[rows] = p_target.log()
        if p_target.min() < 1e-30:  # too small for its logarithm
            log_p[rows] = torch.log_softmax(row_logits.float(), -1).gather(1, index[rows])
        if need_grad:
            row_logits.copy_(p.scatter_(1, index[rows], p_target - 1))
    return -(log_p.squeeze(1) * (targets != IGNORE_INDEX)).sum()


def by_fused_kernel(logits, targets, vocab_size, need_grad):
    """In one kernel."""
    from recipe.model.loss_kernel import cross_entropy_  # here, because it needs Triton

    return cross_entropy_(logits, targets, vocab_size, need_grad).sum()


_KERNELS = {"log_softmax": by_log_softmax, "rows": by_rows_of_softmax, "fused": by_fused_kernel}
