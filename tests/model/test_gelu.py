"""The activation's formula for CUDA is GPT-2's, in values and gradients computed on a CPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from recipe.model.gelu import LogisticGELU, gelu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_the_logistic_gelu_has_the_values_and_gradients_of_torchs(dtype, tolerance):
    """In fp64, but for rounding to the type."""
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -1e4, 1e4])]).to(dtype)
    weight = torch.linspace(-1, 1, len(x)).to(dtype)

    def values_and_gradients(function, x):
        x = x.clone().requires_grad_()
        y = function(x)
        return torch.cat([y, torch.autograd.grad(y, x, weight.to(x.dtype))[0]]).double()

    torch_gelu = partial(F.gelu, approximate="tanh")
    results = values_and_gradients(LogisticGELU.apply, x)
    assert results.isfinite().all()
    torch.testing.assert_close(results, values_and_gradients(torch_gelu, x.double()), rtol=tolerance, atol=tolerance)
    assert values_and_gradients(gelu, x).equal(values_and_gradients(torch_gelu, x))  # a CPU uses torch's
