"""Measures how far the loss and its gradients are from fp64: on a CPU, on a GPU and in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.model.loss_probe CASES

CASES is a JSON list of keyword arguments of `distances`, whose results are printed as JSON.
"""

import json
import sys

import torch
import torch.nn.functional as F

from recipe.model.loss import IGNORE_INDEX, next_token_loss


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def distances(dtype: str, rows: int, vocab_size: int, device: str = "cpu", **options) -> list[float]:
    """Relative distances of the loss, of the hidden states' gradient and of the head's from fp64 on the same inputs."""
    options = {"fused": True} | options
    torch.manual_seed(1)
    hidden, weight = (torch.randn(n, 16).to(device, getattr(torch, dtype)) for n in (rows, vocab_size))
    targets = torch.randint(vocab_size, (1, rows)).to(device)
    targets[0, : rows // 3] = IGNORE_INDEX
    hidden[-1] = 8 * weight[5]  # predicts token 5, by a hundred nats
    targets[0, -1] = (weight.float() @ weight[5].float()).argmin()
    inputs = [t.clone().requires_grad_() for t in (hidden[None], weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    loss = next_token_loss(*inputs, targets, **options)
    expected = F.cross_entropy(exact[0] @ exact[1].t(), targets[0])
    (loss * 3).backward()  # as a loss scale would
    (expected * 3).backward()
    with torch.no_grad():
        assert next_token_loss(*inputs, targets, **options).item() == loss.item()
    return [
        relative(loss.double(), expected),
        relative(inputs[0].grad[0].double(), exact[0].grad),
        relative(inputs[1].grad.double(), exact[1].grad),
    ]


if __name__ == "__main__":
    print(json.dumps([distances(**case) for case in json.loads(sys.argv[1])]))
