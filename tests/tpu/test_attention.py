"""The attention of a real chip, which all other tests replace by plain products."""

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from recipe.model.gpt2 import causal_attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_is_one_fused_operator_and_its_backward_another(monkeypatch, dtype, dropout):
    """torch_tpu's Pallas kernel has this name of PyTorch's. It is only traced, because only a TPU can run it."""
    monkeypatch.setattr(F, "scaled_dot_product_attention", F.of_a_tpu)
    q = torch.zeros(1, 2, 1024, 64, device="tpu", dtype=dtype, requires_grad=True)

    def step(q, k, v):
        return torch.autograd.grad(causal_attention(q, k, v, dropout).sum(), (q, k, v))

    graph = make_fx(step, tracing_mode="fake")(q, q, q).graph
    names = [str(node.target) for node in graph.nodes if "attention" in str(node.target) or "bmm" in str(node.target)]
    assert names == [f"aten._scaled_dot_product_cudnn_attention{part}.default" for part in ("", "_backward")]
