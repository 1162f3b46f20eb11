"""GPT-2's activation, with kernels on CUDA that take as long as their bytes."""

import math

import torch
import torch.nn.functional as F

SLOPE, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715


def gelu(x: torch.Tensor) -> torch.Tensor:
    """transformers' "gelu_new": x (1 + tanh(v / 2)) / 2 with v = sqrt(8 / pi) (x + 0.044715 x^3)."""
    if x.is_cuda and torch.compiler.is_compiling():
        return logistic_gelu(x)
    return F.gelu(x, approximate="tanh")


@torch.compiler.allow_in_graph  # for the reason that linear.py gives
def logistic_gelu(x: torch.Tensor) -> torch.Tensor:
    """`gelu` as x sigmoid(v)."""
    return LogisticGELU.apply(x)


class LogisticGELU(torch.autograd.Function):
    """The same as x sigmoid(v), in fp32 whatever the type of x.

    CUDA's tanh has so many instructions that an H200 took 1.4 times as long as it needs to move the bytes.
    """

    @staticmethod
    def forward(ctx, x):
        """Elementwise."""
        ctx.save_for_backward(x)
        y = x.float()
        return (y * share(y)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  one output, one gradient
        """grad times sigmoid(v) (1 + x (1 - sigmoid(v)) dv/dx)."""
        (x,) = ctx.saved_tensors
        y = x.float()
        s = share(y)
        slope = s + s * (1 - s) * (y * (SLOPE + 3 * SLOPE * CUBE * (y * y)))
        return (grad.float() * slope).to(x.dtype)


def share(y: torch.Tensor) -> torch.Tensor:
    """sigmoid(v), of y in fp32."""
    return torch.sigmoid(y * (SLOPE + SLOPE * CUBE * (y * y)))
