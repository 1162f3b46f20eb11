"""A run beside a program that follows "What a step computes" in docs/recipes.md, with the order of docs/data.md."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.conftest import TINY, train

SEED, STEPS, T = 1337, 16, TINY["sequence_length"]
BATCH = 4
SETTINGS = {"learning_rate": 3e-3, "min_lr_fraction": 0.1, "max_grad_norm": 0.7, "muon_weight_decay": 0.1}
SETTINGS |= {"max_steps": STEPS, "total_batch_tokens": BATCH * T, "micro_batch_size": 2}


def windows_of(shards, step: int) -> torch.Tensor:
    """The sequences of a step in the first epoch of a single shard."""
    (path,) = shards.glob("train_*.bin")
    tokens = np.fromfile(path, "<u2", offset=1024).astype(np.int64)
    order = np.random.RandomState([SEED, 0, 0, 0]).permutation((len(tokens) - 1) // T)
    return torch.tensor(np.array([tokens[i * T : i * T + T + 1] for i in order[step * BATCH : (step + 1) * BATCH]]))


def factor(s: int, schedule: str, w: int) -> float:
    """Rule 3, with the decay_fraction of this test; `w` is 0 for Muon."""
    if s < w:
        return (s + 1) / w
    d = max(TINY["warmup_steps"], STEPS - round(0.4 * STEPS)) if schedule == "wsd" else w
    x = max(0, s - d) / (STEPS - d)
    return 0.1 + 0.9 * ((1 + math.cos(math.pi * x)) / 2 if schedule == "cosine" else 1 - x)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    """The iteration of rule 5."""
    if x.shape[0] > x.shape[1]:
        return orthogonalized(x.T).T
    x = x / x.norm()
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.775 * a @ x + 2.0315 * a @ a @ x
    return x


def muon_update(w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, s: int, rate: float, parts: int) -> None:
    """Rule 5."""
    u = 0.85 + 0.1 * min(1, s / 300)
    m.mul_(u).add_(g, alpha=1 - u)
    matrices = ((1 - u) * g + u * m).chunk(parts, 1)
    w.mul_(1 - rate * 0.1)
    w.sub_(torch.cat([rate * max(1, x.shape[1] / x.shape[0]) ** 0.5 * orthogonalized(x) for x in matrices], 1))


def adamw_update(w: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, s: int, rate: float) -> None:
    """Rule 4."""
    w.mul_(1 - rate * 0.1 * (w.ndim > 1))
    m.mul_(0.9).add_(g, alpha=0.1)
    v.mul_(0.95).add_(g * g, alpha=0.05)
    w.sub_(rate * (m / (1 - 0.9 ** (s + 1))) / ((v / (1 - 0.95 ** (s + 1))).sqrt() + 1e-8))


@pytest.mark.parametrize(
    "options",
    [
        {"optim": "muon", "lr_scheduler_type": "wsd", "decay_fraction": 0.4},
        {"optim": "muon", "lr_scheduler_type": "cosine"},
        {"optim": "adamw", "lr_scheduler_type": "linear", "matrix_learning_rate": 1e-3},
    ],
)
def test_a_program_written_from_the_docs_takes_the_same_steps(shards, tmp_path, options):
    """In float64: losses, gradient norms and rates within 1e-5, the weights within 1e-4 of their update."""
    torch.manual_seed(0)
    shape = {name: TINY[name] for name in ("n_layer", "n_head", "n_embd", "n_positions")}
    model = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    for p in model.parameters():  # at GPT-2's initial weights attention's gradients are hardly more than rounding
        p.data += 0.05 * torch.randn_like(p)
    model.save_pretrained(tmp_path / "start")
    settings = SETTINGS | options | {"init_from": tmp_path / "start"}
    lines, _ = train(shards, tmp_path / "run", **settings)

    parameters, schedule = dict(model.double().named_parameters()), options["lr_scheduler_type"]
    initial = {name: p.detach().clone() for name, p in parameters.items()}
    first, second = ({name: torch.zeros_like(p) for name, p in parameters.items()} for _ in range(2))
    for s in range(STEPS):
        windows = windows_of(shards, s)
        loss = F.cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten())
        gradients = dict(zip(parameters, torch.autograd.grad(loss, [*parameters.values()]), strict=True))
        norm = torch.stack([g.norm() for g in gradients.values()]).norm()
        rate = factor(s, schedule, TINY["warmup_steps"])
        measured = [lines[s + 1][name] for name in ("loss", "grad_norm", "learning_rate")]
        assert measured == pytest.approx([loss.item(), norm.item(), 3e-3 * rate], rel=1e-5), f"step {s}"
        with torch.no_grad():
            for name, p in parameters.items():
                g = gradients[name] * min(1, 0.7 / (norm + 1e-6))
                is_matrix = ".h." in name and p.ndim == 2
                if is_matrix and options["optim"] == "muon":
                    parts = 3 if "c_attn" in name else 1
                    muon_update(p, g, first[name], s, 0.02 * factor(s, schedule, 0), parts)
                else:
                    peak = options.get("matrix_learning_rate", 3e-3) if is_matrix else 3e-3
                    adamw_update(p, g, first[name], second[name], s, peak * rate)
    weights = load_file(tmp_path / "run" / f"step_{STEPS:08}" / "model.safetensors")
    for name, p in parameters.items():
        difference, update = weights[name] - p, p - initial[name]
        if "c_attn.bias" in name:  # the keys' bias has no effect, and its gradient is rounding
            difference.view(3, -1)[1] = 0
        assert difference.norm() < 1e-4 * update.norm(), name
