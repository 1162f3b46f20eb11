"""The activation's formula for CUDA is GPT-2's, on the values and gradients that a CPU can compare."""

import pytest
import torch
import torch.nn.functional as F

from recipe.model.gelu import LogisticGELU, gelu


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_the_logistic_function_gives_the_same_values_and_gradients(dtype, tolerance):
    """Those of torch's formula in fp64, but for rounding to the type."""
    x = torch.cat([torch.linspace(-12, 12, 4801), torch.tensor([0.0, -1e4, 1e4])]).to(dtype)
    weight = torch.linspace(-1, 1, len(x)).to(dtype)

    def both(function, x):
        x = x.clone().requires_grad_()
        y = function(x)
        return torch.cat([y, torch.autograd.grad(y, x, weight.to(x.dtype))[0]]).double()

    exact = both(lambda x: F.gelu(x, approximate="tanh"), x.double())
    found = both(LogisticGELU.apply, x)
    assert found.isfinite().all()
    torch.testing.assert_close(found, exact, rtol=tolerance, atol=tolerance)
    assert both(gelu, x).equal(both(lambda x: F.gelu(x, approximate="tanh"), x))  # a CPU has torch's
