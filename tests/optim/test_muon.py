"""Muon: its arithmetic beside torch's, and which matrices it updates."""

import weakref

import torch
from transformers import GPT2Config

from recipe.config import OptimizerConfig
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim import muon
from recipe.optim.muon import NS_COEFFICIENTS, NS_STEPS, Muon
from recipe.optim.optimizer import load_named_state, make_optimizer, named_state, norm_and_divisor

MUON = OptimizerConfig(optim="muon", learning_rate=1e-3)


def model_with_gradients(seed: int = 0) -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 20}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None), seed=0)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    return model


def test_muon_moves_the_blocks_matrices_and_adamw_the_rest():
    """Three steps, as torch's Muon moves the transposes of what Conv1D holds, query, key and value each a matrix of
    its own."""
    model, rest = model_with_gradients(), model_with_gradients()
    optimizer = make_optimizer(model, MUON, muon={"dtype": torch.bfloat16})  # torch's works in bfloat16
    adamw = make_optimizer(rest, OptimizerConfig(learning_rate=1e-3))
    theirs = {
        name: [torch.nn.Parameter(part.T.contiguous()) for part in p.detach().chunk(3 if "c_attn" in name else 1, 1)]
        for name, p in model.named_parameters()
        if ".h." in name and p.ndim == 2
    }
    settings = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1, "nesterov": True}
    torchs = torch.optim.Muon(
        [matrix for matrices in theirs.values() for matrix in matrices],
        ns_coefficients=NS_COEFFICIENTS,
        ns_steps=NS_STEPS,
        adjust_lr_fn="original",
        **settings,
    )
    for seed in range(3):
        gradients = dict(model_with_gradients(seed).named_parameters())
        for name, p in [*model.named_parameters(), *rest.named_parameters()]:
            p.grad = gradients[name].grad
        for name, matrices in theirs.items():
            for matrix, gradient in zip(matrices, gradients[name].grad.chunk(len(matrices), 1), strict=True):
                matrix.grad = gradient.T.contiguous()
        for each in (optimizer, adamw, torchs):
            each.step()
    for (name, p), by_adamw in zip(model.named_parameters(), rest.parameters(), strict=True):
        if name in theirs:
            expected = torch.cat([matrix.T for matrix in theirs[name]], 1)
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-6, msg=name)
        else:
            assert torch.equal(p, by_adamw), name


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


def test_what_a_process_sends_of_sharded_matrices_is_freed_before_it_orthogonalizes(monkeypatch):
    """update_bytes counts on it."""
    sent, orthogonalized, orthogonalize = [], [], muon.orthogonalize

    def send(received, matrices):
        sent.append(weakref.ref(matrices))
        received.zero_()

    def watched(matrices):
        orthogonalized.append(len(matrices))
        assert [each() for each in sent] == [None]
        return orthogonalize(matrices)

    monkeypatch.setattr(muon.dist, "reduce_scatter_tensor", send)
    monkeypatch.setattr(muon.dist, "all_gather_into_tensor", lambda gathered, own: gathered.zero_())
    monkeypatch.setattr(muon, "orthogonalize", watched)
    flat = torch.nn.Parameter(torch.randn(128))  # the first half of two matrices of 8 x 16, one process's part
    flat.grad = torch.randn(128)
    layout = [((8, 16), 0, 0, 64), ((8, 16), 0, 64, 64)]
    group = {"params": [flat], "muon": True, "num_matrices": 1, "momentum": 0.95, "weight_decay": 0.1, "layout": layout}
    Muon([group], world_size=2).step()
    assert orthogonalized == [1]
