"""Attention in blocks, the CPU's own, against SDPA."""

import pytest
import torch

from recipe.model.attention import block_attention
from recipe.model.gpt2 import causal_attention


@pytest.mark.parametrize("T", [1, 100, 128, 300])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_attention_in_blocks_is_attention(T, dtype, tolerance):
    """Outputs and gradients against SDPA in fp64, of scores up to 16: as near as SDPA in the same type."""
    generator = torch.Generator().manual_seed(T)
    qkv = (2 * torch.randn(3, 2, 3, T, 16, generator=generator)).to(dtype)
    weight = torch.randn(2, 3, T, 16, generator=generator).to(dtype)

    def results(attend, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(kind).requires_grad_() for t in qkv]
        out = attend(*leaves, 0.0)
        out.backward(weight.to(kind))
        return [out.detach().double(), *(t.grad.double() for t in leaves)]

    expected = results(causal_attention, torch.float64)
    both = (results(attend, dtype) for attend in (block_attention, causal_attention))
    for ours, sdpas, exact in zip(*both, expected, strict=True):
        scale = exact.norm() + 1  # of one position, q and k have no gradient
        assert (ours - exact).norm() / scale <= max(tolerance / 4, 1.5 * (sdpas - exact).norm() / scale)
        assert (ours - exact).norm() / scale <= tolerance


def test_attention_in_blocks_leaves_dropout_to_sdpa():
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    torch.manual_seed(0)
    dropped = block_attention(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, causal_attention(q, k, v, 0.5))
