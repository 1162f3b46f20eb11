"""Next-token cross-entropy from the hidden states and the head's weight, in fp32. All implementations compute the same
function, up to rounding.

`_loss_sum` computes the gradients with the loss: it overwrites the logits with their gradient, all at once or chunk by
chunk. In `plain_loss_sum` autograd, or Inductor, derives the gradients.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100
# A chunk's head gradient has the type of the logits: in fp16 the sum over more positions than these could overflow.
FP16_CHUNK = 4096
_ROWS = 16  # rows of the softmax at a time: 3 MB of 50,257 fp32 logits; 8 to 32 are equally fast


def can_fuse(device_type: str) -> bool:
    """Whether the fused kernel can run on such a device: it needs CUDA, and Triton to be installed."""
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
        chunk_size: positions whose logits are in memory at once; 0 for all of them.
        pad_vocab_to: V is rounded up to a multiple of this for the product, because tensor cores are faster then. The
            padding is sliced off before the softmax, so that neither the loss nor a gradient changes.
        fused: compute softmax, loss and gradient of the logits in one Triton kernel, on CUDA.
        by_rows: compute the softmax of a few rows at a time, which stay in a CPU's cache; the default on a CPU.
    """
    hidden, targets = hidden.flatten(0, 1), targets.flatten()  # (N, D), (N,)
    vocab_size = weight.shape[0]
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    if padding := -vocab_size % pad_vocab_to:
        weight = F.pad(weight, (0, 0, 0, padding))
    count = (targets != IGNORE_INDEX).sum().clamp(min=1)
    by_rows = hidden.device.type == "cpu" if by_rows is None else by_rows
    if chunk_size or fused or by_rows:
        need_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
        kernel = "fused" if fused else "rows" if by_rows else "log_softmax"
        chunk_size = chunk_size or (FP16_CHUNK if hidden.dtype == torch.float16 else len(hidden))
        return _loss_sum(hidden, weight, targets, vocab_size, chunk_size, kernel, need_grad)[0] / count
    return plain_loss_sum(F.linear(hidden, weight), targets, vocab_size) / count


def plain_loss_sum(logits: torch.Tensor, targets: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Summed cross-entropy, 0-d in fp32, of (N, V and padding) logits, by PyTorch's own operators."""
    return F.cross_entropy(logits[:, :vocab_size].float(), targets, ignore_index=IGNORE_INDEX, reduction="sum")


# Opaque to torch.compile, whose own code for the loss reads all logits several times and reaches 0.9 of the speed, and
# which would reorder the chunks and then keep the logits of all of them at once.
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
    and then freed: none are kept or recomputed. The factor 1/count (and a loss scale) is applied in backward: fp16
    would flush p/count to zero.
    """
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    chunked = chunk_size < len(hidden)  # the head's gradient is then summed in fp32
    grad_hidden = hidden.new_empty(hidden.shape if need_grad else 0)
    grad_weight = weight.new_zeros(weight.shape if need_grad and chunked else 0, dtype=torch.float32)
    for start in range(0, len(hidden), chunk_size):
        rows = slice(start, start + chunk_size)
        logits = hidden[rows] @ weight.t()  # (chunk, V and padding)
        loss += _KERNELS[kernel](logits, targets[rows], vocab_size, need_grad)
        if need_grad:
            if kernel == "fused":  # ignored rows are already 0
                torch.mm(logits, weight, out=grad_hidden[rows])
                chunk_grad_weight = logits.t() @ hidden[rows]
            else:  # ignored rows are masked on the narrow side: D numbers a row, not V
                mask = (targets[rows] != IGNORE_INDEX)[:, None]
                grad_hidden[rows] = (logits @ weight) * mask
                chunk_grad_weight = logits.t() @ (hidden[rows] * mask)
            grad_weight = grad_weight.add_(chunk_grad_weight) if chunked else chunk_grad_weight
    return loss, grad_hidden, grad_weight


@_loss_sum.register_fake
def _(hidden, weight, targets, vocab_size, chunk_size, kernel, need_grad):
    loss = torch.empty((), dtype=torch.float32, device=hidden.device)
    dtype = torch.float32 if chunk_size < len(hidden) or not need_grad else weight.dtype
    shapes = (hidden.shape, weight.shape) if need_grad else (0, 0)
    return loss, hidden.new_empty(shapes[0]), weight.new_empty(shapes[1], dtype=dtype)


def _save_for_backward(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the gradients, which have no gradient
    ctx.save_for_backward(*output[1:])
    ctx.dtype = inputs[1].dtype


def _scale_gradients(ctx, grad_loss, *_):
    if grad_loss is None:
        return (None,) * 7
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad_loss, (grad_weight * grad_loss).to(ctx.dtype), *(None,) * 5


_loss_sum.register_autograd(_scale_gradients, setup_context=_save_for_backward)

# The kernels. Each returns the summed cross-entropy of (N, V and padding) logits and, with `need_grad`, overwrites them
# with their gradient, softmax - onehot: 0 in the padding, undefined in ignored rows (the fused kernel writes 0).


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
    """A few rows at a time, for CPUs, where softmax is one kernel, and log-softmax and an exponential would be two."""
    logits[:, vocab_size:] = 0
    index = targets.clamp(min=0)[:, None]
    log_p = torch.empty(len(logits), 1, dtype=torch.float32)
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        row_logits = logits[rows, :vocab_size]
        p = torch.softmax(row_logits.float(), -1)
        p_target = p.gather(1, index[rows])
        log_p[rows] = p_target.log()
        if p_target.min() < 1e-30:  # too small for an accurate logarithm
            log_p[rows] = torch.log_softmax(row_logits.float(), -1).gather(1, index[rows])
        if need_grad:
            row_logits.copy_(p.scatter_(1, index[rows], p_target - 1))
    return -(log_p.squeeze(1) * (targets != IGNORE_INDEX)).sum()


def by_fused_kernel(logits, targets, vocab_size, need_grad):
    """All rows in one Triton kernel."""
    from recipe.model.loss_kernel import cross_entropy_  # here, because it needs Triton

    return cross_entropy_(logits, targets, vocab_size, need_grad).sum()


_KERNELS = {"log_softmax": by_log_softmax, "rows": by_rows_of_softmax, "fused": by_fused_kernel}
