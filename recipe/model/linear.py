"""x W + b, with a bias gradient that Inductor fuses with the kernel that writes the gradients it sums."""

import torch


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """x (..., in), weight (in, out) -> (..., out), in the type of autocast."""
    if x.is_cuda and torch.compiler.is_compiling():
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            x, weight = x.to(dtype), weight.to(dtype)
        return two_stage_linear(x, weight, bias)
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


# If Dynamo traces into this function, torch 2.11 does not mark its operators as part of a checkpointed block, and keeps
# their results instead of recomputing them: 8 blocks took 8.45 GB, not the estimated 5.05. torch 2.13 does mark them.
@torch.compiler.allow_in_graph
def two_stage_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`linear` for x and weight that already have the type of the product."""
    return TwoStageLinear.apply(x, weight, bias)


class TwoStageLinear(torch.autograd.Function):
    """The bias gradient is a sum over T and then one over B.

    Inductor would itself split the sum over B T in two, but would not fuse the first with the kernel that computes the
    summands: it would read all gradients of GELU, q, k and v once more (torch 2.13).
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        """x (B, T, in), weight (in, out), bias (out) -> (B, T, out)."""
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = bias.dtype
        return torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight).unflatten(0, x.shape[:2])

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  one output, one gradient
        """(B, T, out) -> the gradients of x, weight and bias."""
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, 1)
        grad_bias = grad.sum(1, dtype=torch.float32).sum(0).to(ctx.bias_dtype)
        return (rows @ weight.t()).view(x.shape), x.flatten(0, 1).t() @ rows, grad_bias
