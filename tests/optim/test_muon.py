"""Muon: its arithmetic beside torch's, and which matrices it updates."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from recipe.config import OptimizerConfig
from recipe.optim import muon
from recipe.optim.muon import NS_COEFFICIENTS, NS_STEPS, Muon
from recipe.optim.optimizer import make_optimizer
from tests.optim.test_optimizer import tiny_model

MUON = OptimizerConfig(optim="muon", learning_rate=1e-3, muon_weight_decay=0.05)


def test_muon_updates_the_blocks_matrices_and_adamw_the_rest():
    """Three steps as torch's Muon, which has each matrix transposed, and query, key and value as three matrices."""
    model, adamw_model = tiny_model(), tiny_model()
    optimizer = make_optimizer(model, MUON, muon={"dtype": torch.bfloat16})  # the type in which torch's computes
    adamw = make_optimizer(adamw_model, OptimizerConfig(learning_rate=1e-3))
    torch_matrices = {
        name: [torch.nn.Parameter(part.T.contiguous()) for part in p.detach().chunk(3 if "c_attn" in name else 1, 1)]
        for name, p in model.named_parameters()
        if ".h." in name and p.ndim == 2
    }
    options = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.05, "nesterov": True, "adjust_lr_fn": "original"}
    options |= {"ns_coefficients": NS_COEFFICIENTS, "ns_steps": NS_STEPS}
    torch_muon = torch.optim.Muon([matrix for matrices in torch_matrices.values() for matrix in matrices], **options)
    for seed in range(3):
        gradients = {name: p.grad for name, p in tiny_model(seed).named_parameters()}
        if not seed:  # orthogonalized as 0, not as NaN
            gradients["transformer.h.0.mlp.c_fc.weight"].zero_()
        for name, p in [*model.named_parameters(), *adamw_model.named_parameters()]:
            p.grad = gradients[name]
        for name, matrices in torch_matrices.items():
            for matrix, gradient in zip(matrices, gradients[name].chunk(len(matrices), 1), strict=True):
                matrix.grad = gradient.T.contiguous()
        optimizer.step()
        adamw.step()
        torch_muon.step()
    for (name, p), by_adamw in zip(model.named_parameters(), adamw_model.parameters(), strict=True):
        if name in torch_matrices:
            expected = torch.cat([matrix.T for matrix in torch_matrices[name]], 1)
            torch.testing.assert_close(p, expected, rtol=0, atol=1e-6, msg=name)
        else:
            assert torch.equal(p, by_adamw), name


def test_what_a_process_sends_of_sharded_matrices_is_freed_before_it_orthogonalizes(monkeypatch):
    """update_bytes, an estimate of memory, assumes it."""
    sent, orthogonalized, orthogonalize = [], [], muon.orthogonalize

    def send(received, matrices):
        sent.append(weakref.ref(matrices))
        received.zero_()

    def checked_orthogonalize(matrices):
        orthogonalized.append(len(matrices))
        assert [reference() for reference in sent] == [None]
        return orthogonalize(matrices)

    monkeypatch.setattr(muon.dist, "reduce_scatter_tensor", send)
    monkeypatch.setattr(muon.dist, "all_gather_into_tensor", lambda output, input: output.zero_())
    monkeypatch.setattr(muon, "orthogonalize", checked_orthogonalize)
    flat = torch.nn.Parameter(torch.randn(128))  # the first half of two matrices of 8 x 16: one process's shard
    flat.grad = torch.randn(128)
    layout = [((8, 16), 0, 0, 64), ((8, 16), 0, 64, 64)]
    group = {"params": [flat], "muon": True, "num_matrices": 1, "momentum": 0.95, "weight_decay": 0.1, "layout": layout}
    Muon([group], world_size=2).step()
    assert orthogonalized == [1]


def test_a_block_adds_few_operators_to_a_step():
    """Where a GPU waits for its launches, as with a small model, a step takes as long as these. It was 38 more with
    each block. Views launch nothing."""

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.total += not func.is_view and "view" not in str(func)
            return func(*args, **(kwargs or {}))

    totals = []
    for n_layer in (2, 3):
        optimizer = make_optimizer(tiny_model(n_layer=n_layer), MUON, fused=True)
        optimizer.step()  # creates the optimizer state
        with Count() as count:
            optimizer.step()
        totals.append(count.total)
    assert totals[1] - totals[0] <= 10
