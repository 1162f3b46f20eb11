"""Block attention, which a CPU uses in bf16, against SDPA."""

import pytest
import torch

from recipe.model.attention import block_attention
from recipe.model.gpt2 import causal_attention


@pytest.mark.parametrize("T", [1, 100, 128, 300])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_block_attention_is_as_exact_as_sdpa(T, dtype, tolerance):
    """Outputs and gradients, compared with SDPA in fp64, for scores up to 16."""
    generator = torch.Generator().manual_seed(T)
    qkv = (2 * torch.randn(3, 2, 3, T, 16, generator=generator)).to(dtype)
    weight = torch.randn(2, 3, T, 16, generator=generator).to(dtype)

    def results(attend, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in qkv]
        out = attend(*leaves, 0.0)
        out.backward(weight.to(dtype))
        return [out.detach().double(), *(t.grad.double() for t in leaves)]

    exact_results = results(causal_attention, torch.float64)
    for block, sdpa, exact in zip(
        results(block_attention, dtype), results(causal_attention, dtype), exact_results, strict=True
    ):
        scale = exact.norm() + 1  # with one position, q and k have no gradient
        error, sdpa_error = (block - exact).norm() / scale, (sdpa - exact).norm() / scale
        assert error <= min(tolerance, max(tolerance / 4, 1.5 * sdpa_error))


def test_block_attention_leaves_dropout_to_sdpa():
    q, k, v = torch.randn(3, 1, 2, 64, 16).unbind()
    torch.manual_seed(0)
    dropped = block_attention(q, k, v, 0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, causal_attention(q, k, v, 0.5))
