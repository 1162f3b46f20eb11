"""The loss in its four forms: whole, in chunks, by rows on a CPU, and fused for a GPU."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F

from recipe.model.loss import IGNORE_INDEX, next_token_loss


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def loss_and_grads(**options):
    torch.manual_seed(1)
    hidden = torch.randn(2, 25, 16, requires_grad=True)
    weight = torch.randn(503, 16, requires_grad=True)
    targets = torch.randint(503, (2, 25))
    targets[0, :7] = IGNORE_INDEX
    loss = next_token_loss(hidden, weight, targets, **options)
    (loss * 3).backward()  # as a loss scale would
    return loss, hidden.grad, weight.grad, F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    "options", [{"chunk_size": 7}, {"chunk_size": 64}, {"pad_vocab_to": 64}, {"chunk_size": 7, "pad_vocab_to": 64}]
)
def test_chunks_and_padding_change_no_number(options):
    loss, *grads, plain = loss_and_grads()
    other, *other_grads, _ = loss_and_grads(**options)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert other.item() == pytest.approx(loss.item(), rel=1e-6)
    for grad, other_grad in zip(grads, other_grads, strict=True):
        assert relative(other_grad, grad) < 1e-6


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("options", [{}, {"pad_vocab_to": 64}])
def test_the_loss_by_rows_and_the_plain_one_are_exact(by_rows, options, monkeypatch):
    """Against fp64, with ignored positions, more rows than are taken at a time, and a target that is hopeless."""
    monkeypatch.setattr("recipe.model.loss._by_rows", lambda hidden: by_rows)
    torch.manual_seed(1)
    hidden, weight = torch.randn(2, 25, 16), torch.randn(503, 16)
    targets = torch.randint(503, (2, 25))
    targets[0, :7] = IGNORE_INDEX
    hidden[1, 3] = 30 * weight[5]  # sure of token 5, by hundreds of nats
    targets[1, 3] = (weight @ weight[5]).argmin()
    found = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    loss = next_token_loss(*found, targets, **options)
    expected = F.cross_entropy((exact[0] @ exact[1].t()).flatten(0, 1), targets.flatten())
    assert expected > 10
    (loss * 3).backward()
    (expected * 3).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(found, exact, strict=True):
        assert relative(ours.grad, theirs.grad) < 2e-6
    with torch.no_grad():
        assert next_token_loss(*found, targets, **options).item() == loss.item()


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_nothing_to_predict_is_zero_and_bf16_autocast_stays_close(chunk_size):
    hidden, weight = torch.randn(2, 8, 16), torch.randn(50, 16)
    nothing = torch.full((2, 8), IGNORE_INDEX)
    assert next_token_loss(hidden, weight, nothing, chunk_size).item() == 0
    targets = torch.randint(50, (2, 8))
    exact = next_token_loss(hidden, weight, targets, chunk_size)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = next_token_loss(hidden, weight, targets, chunk_size)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), abs=0.05)
    assert rounded.item() != exact.item()  # or autocast did nothing


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which PyTorch's builds for CPUs come without")
def test_the_fused_loss_is_exact():
    """Against fp64, by Triton's interpreter: rows and columns that are multiples of nothing, one row, several blocks of
    columns, padding, chunks, ignored positions and a target that is hopeless."""
    cases = {
        2e-6: [
            {"dtype": "float32", "rows": 50, "vocab_size": 503},
            {"dtype": "float32", "rows": 1, "vocab_size": 503, "pad_vocab_to": 64},
            {"dtype": "float32", "rows": 13, "vocab_size": 9001, "pad_vocab_to": 128},
            {"dtype": "float32", "rows": 13, "vocab_size": 9001, "pad_vocab_to": 128, "chunk_size": 5},
        ],
        1e-3: [
            {"dtype": "float16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64},
            {"dtype": "float16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64, "chunk_size": 7},
        ],
        1e-2: [{"dtype": "bfloat16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64}],
    }
    words = [
        sys.executable,
        "-m",
        "tests.model.loss_probe",
        json.dumps([case for some in cases.values() for case in some]),
    ]
    # A process of its own: TRITON_INTERPRET counts when Triton is imported.
    result = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert result.returncode == 0, result.stderr
    found = iter(json.loads(result.stdout))
    for tolerance, some in cases.items():
        for case in some:
            assert max(next(found)) < tolerance, case
