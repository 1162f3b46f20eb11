"""The loss in its four implementations: at once, in chunks, by rows on a CPU, and fused for a GPU."""

import json
from importlib.util import find_spec
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from recipe.model.loss import IGNORE_INDEX, next_token_loss
from tests.conftest import interpreted
from tests.model.loss_probe import distances


@pytest.mark.parametrize("by_rows", [True, False])  # on a CPU, and elsewhere
@pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 7}, {"chunk_size": 64}, {"pad_vocab_to": 64}, {"chunk_size": 7, "pad_vocab_to": 64}]
)
def test_the_loss_is_exact(by_rows, options):
    """Against fp64, with ignored positions, more rows than are computed at a time, and a very unlikely target."""
    assert max(distances("float32", rows=50, vocab_size=503, fused=False, by_rows=by_rows, **options)) < 2e-6


@pytest.mark.parametrize("chunk_size", [0, 4])
def test_the_loss_of_no_target_is_zero_and_bf16_autocast_stays_close(chunk_size):
    hidden, weight = torch.randn(2, 8, 16), torch.randn(50, 16)
    ignored = torch.full((2, 8), IGNORE_INDEX)
    assert next_token_loss(hidden, weight, ignored, chunk_size).item() == 0
    targets = torch.randint(50, (2, 8))
    exact = next_token_loss(hidden, weight, targets, chunk_size)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = next_token_loss(hidden, weight, targets, chunk_size)
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact.item(), abs=0.05)
    assert rounded.item() != exact.item()  # autocast was on


def test_the_heads_gradient_of_many_positions_does_not_overflow_fp16():
    """Its sum, -75,000, is beyond fp16's 65,504 before it is divided by the number of positions."""
    hidden, weight = torch.ones(1, 100_000, 2).half(), torch.zeros(4, 2).half().requires_grad_()
    next_token_loss(hidden, weight, torch.zeros(1, 100_000, dtype=torch.long), by_rows=True).backward()
    expected = torch.tensor([-0.75, 0.25, 0.25, 0.25])[:, None].expand(4, 2)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=0, atol=1e-3)


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which PyTorch's builds for CPUs come without")
def test_the_fused_loss_is_exact():
    """Against fp64, in Triton's interpreter: numbers of rows and columns that no block divides, one row, several blocks
    of columns, padding, chunks, ignored positions and a very unlikely target."""
    cases = [
        (2e-6, {"dtype": "float32", "rows": 50, "vocab_size": 503}),
        (2e-6, {"dtype": "float32", "rows": 1, "vocab_size": 503, "pad_vocab_to": 64}),
        (2e-6, {"dtype": "float32", "rows": 13, "vocab_size": 9001, "pad_vocab_to": 128}),
        (2e-6, {"dtype": "float32", "rows": 13, "vocab_size": 9001, "pad_vocab_to": 128, "chunk_size": 5}),
        (1e-3, {"dtype": "float16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64}),
        (1e-3, {"dtype": "float16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64, "chunk_size": 7}),
        (1e-2, {"dtype": "bfloat16", "rows": 50, "vocab_size": 503, "pad_vocab_to": 64}),
    ]
    results = interpreted("-m", "tests.model.loss_probe", json.dumps([case for _, case in cases]))
    for (tolerance, case), errors in zip(cases, results, strict=True):
        assert max(errors) < tolerance, case


@pytest.mark.skipif(not find_spec("triton"), reason="needs Triton, which PyTorch's builds for CPUs come without")
@pytest.mark.parametrize(("room", "warp"), [(2048, 32), (1536, 32), (2048, 64)])  # the last as an MI300X
def test_the_kernel_starts_no_more_threads_than_a_gpu_allows(monkeypatch, room, warp):
    from recipe.model import loss_kernel

    properties = SimpleNamespace(max_threads_per_multi_processor=room, warp_size=warp)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(loss_kernel, "_cross_entropy", kernel := MagicMock())
    logits = MagicMock(is_cuda=True, device="cpu", shape=(2, 8))
    logits.__len__.return_value = 2
    loss_kernel.cross_entropy_(logits, torch.zeros(2), 8, True)
    options = kernel.__getitem__.return_value.call_args.kwargs
    assert options["num_warps"] * warp == options["THREADS"] <= 1024
