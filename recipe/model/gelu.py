"""GPT-2's activation, with a form for CUDA whose kernels are bound by memory bandwidth."""

import math

import torch
import torch.nn.functional as F

_SCALE, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715


def gelu(x: torch.Tensor) -> torch.Tensor:
    """transformers' "gelu_new": x (1 + tanh(v / 2)) / 2 with v = sqrt(8 / pi) (x + 0.044715 x^3)."""
    if x.is_cuda and torch.compiler.is_compiling():
        return logistic_gelu(x)
    return F.gelu(x, approximate="tanh")


@torch.compiler.allow_in_graph  # for the reason given in linear.py
def logistic_gelu(x: torch.Tensor) -> torch.Tensor:
    """`gelu` as x sigmoid(v)."""
    return LogisticGELU.apply(x)


class LogisticGELU(torch.autograd.Function):
    """x sigmoid(v), computed in fp32 whatever the type of x.

    CUDA's tanh has so many instructions that an H200 took 1.4 times as long as the memory traffic needs.
    """

    @staticmethod
    def forward(ctx, x):
        """Elementwise."""
        ctx.save_for_backward(x)
        y = x.float()
        return (y * _gate(y)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):  # ty: ignore[incompatible-method-override]  one output, one gradient
        """grad times sigmoid(v) (1 + x (1 - sigmoid(v)) dv/dx)."""
        (x,) = ctx.saved_tensors
        y = x.float()
        gate = _gate(y)
        derivative = gate + gate * (1 - gate) * (y * (_SCALE + 3 * _SCALE * _CUBIC * (y * y)))
        return (grad.float() * derivative).to(x.dtype)


def _gate(y: torch.Tensor) -> torch.Tensor:
    """sigmoid(v) of y in fp32."""
    return torch.sigmoid(y * (_SCALE + _SCALE * _CUBIC * (y * y)))
