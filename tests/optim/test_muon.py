"""Muon: its arithmetic beside torch's, which matrices it updates, and how processes share its work."""

import pytest
import torch
from transformers import GPT2Config

from recipe.config import OptimizerConfig
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.muon import COEFFICIENTS, STEPS, Muon
from recipe.optim.optimizer import load_named_state, make_optimizer, named_state, norm_and_divisor
from tests import processes as programs
from tests.conftest import environment

MUON = OptimizerConfig(optim="muon", learning_rate=1e-3)


def model_with_gradients(seed: int = 0) -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None), seed=0)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


def torchs(weight: torch.Tensor) -> torch.optim.Muon:
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "ns_coefficients": COEFFICIENTS, "ns_steps": STEPS}
    return torch.optim.Muon([weight], nesterov=True, adjust_lr_fn="original", **settings)


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_a_matrix_moves_as_torchs_muon_moves_its_transpose(shape):
    generator = torch.Generator().manual_seed(0)
    ours = torch.nn.Parameter(torch.randn(shape, generator=generator) / 10)  # (in, out), as Conv1D has it
    theirs = torch.nn.Parameter(ours.detach().T.contiguous())
    group = {"params": [ours], "muon": True, "parts": 1, "lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
    optimizer, expected = Muon([group], dtype=torch.bfloat16), torchs(theirs)  # torch's works in bfloat16
    for _ in range(3):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.T.contiguous()
        optimizer.step()
        expected.step()
        assert torch.allclose(ours, theirs.T, rtol=0, atol=1e-6)


def test_muon_moves_the_blocks_matrices_and_adamw_the_rest():
    """Query, key and value each as a matrix of its own."""
    model, alone = model_with_gradients(), model_with_gradients()
    make_optimizer(model, MUON, muon={"dtype": torch.bfloat16}).step()
    make_optimizer(alone, OptimizerConfig(learning_rate=1e-3)).step()
    before = dict(model_with_gradients().named_parameters())
    adamw = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        if ".h." not in name or p.ndim < 2:
            assert torch.equal(p, adamw[name]), name
            continue
        parts = 3 if "c_attn" in name else 1
        old, grad = before[name].detach(), before[name].grad
        for matrix, start, its in zip(p.chunk(parts, 1), old.chunk(parts, 1), grad.chunk(parts, 1), strict=True):
            theirs = torch.nn.Parameter(start.T.contiguous())
            theirs.grad = its.T.contiguous()
            torchs(theirs).step()
            assert torch.allclose(matrix, theirs.T, rtol=0, atol=1e-6), name


def test_a_skipped_step_changes_nothing_and_clipping_divides():
    model, clipped = model_with_gradients(), model_with_gradients()
    optimizer = make_optimizer(model, MUON, fused=True)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad.fill_(torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    for p, good in zip(model.parameters(), model_with_gradients().parameters(), strict=True):
        p.grad = good.grad
    _, optimizer.grad_scale = norm_and_divisor(model.parameters(), 0.5)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    torch.nn.utils.clip_grad_norm_(clipped.parameters(), 0.5)
    reference = make_optimizer(clipped, MUON, fused=True)
    reference.step()
    state, expected = named_state(model, optimizer), named_state(clipped, reference)
    assert state.keys() == expected.keys()
    assert "momentum.transformer.h.0.attn.c_attn.weight" in state
    assert "exp_avg.transformer.wte.weight" in state
    for key in state:
        torch.testing.assert_close(state[key], expected[key], rtol=2e-6, atol=1e-9)

    other = make_optimizer(model, MUON, fused=True)
    load_named_state(model, other, state, 1)
    assert all(torch.equal(a, b) for a, b in zip(named_state(model, other).values(), state.values(), strict=True))


SHARED = """
import sys, torch
from recipe.optim.optimizer import make_optimizer
from tests.optim.test_muon import MUON, model_with_gradients
torch.distributed.init_process_group("gloo")
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
model = model_with_gradients()
done = []
from recipe.optim import muon
whole = muon.orthogonalize
muon.orthogonalize = lambda matrices: done.append(len(matrices)) or whole(matrices)
make_optimizer(model, MUON, muon={"rank": rank, "world_size": world_size}).step()
torch.save([p.detach() for p in model.parameters()] + [torch.tensor(sum(done))], f"{sys.argv[1]}/{rank}.pt")
"""


def test_processes_share_the_work_and_have_the_same_weights(tmp_path):
    """12 matrices over 3 processes: query, key, value, projection and two of the MLP in each of two blocks."""
    (tmp_path / "shared.py").write_text(SHARED)
    result = programs.run(tmp_path / "shared.py", tmp_path, env=environment(), processes=3, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    alone = model_with_gradients()
    make_optimizer(alone, MUON).step()
    counts = []
    for rank in range(3):
        *weights, count = torch.load(tmp_path / f"{rank}.pt")
        counts.append(int(count))
        for p, theirs in zip(alone.parameters(), weights, strict=True):
            torch.testing.assert_close(p.detach(), theirs, rtol=0, atol=1e-7)
    assert sum(counts) == 12
    assert max(counts) <= 5  # two shapes, each shared evenly
