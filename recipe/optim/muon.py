"""Muon: momentum made orthogonal, for the matrices inside the blocks; AdamW for everything else.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the decoupled weight decay
of torch.optim.Muon. GPT-2's weights are Conv1D's, (in, out), and c_attn holds the matrices of query, key and value side
by side: each is orthogonalized by itself.
"""

from collections import defaultdict

import torch
import torch.distributed as dist

# Of the quintic iteration, tuned for speed (Jordan et al.): five steps bring all singular values into about 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5


class Muon(torch.optim.AdamW):
    """AdamW whose parameter groups with "muon": True are moved by Muon.

    Such a group has parameters of shape (in, parts x out), and "parts", "lr", "momentum" and "weight_decay". Like
    torch's fused optimizers, step() divides the gradients by the attribute `grad_scale` and changes nothing where
    `found_inf` is 1.

    Args:
        dtype: of the orthogonalization.
        rank, world: this process among those that hold the same gradients. Each orthogonalizes its part of the
            matrices and gathers the others', which makes step() a collective call.
    """

    def __init__(
        self, groups: list[dict], *, dtype: torch.dtype = torch.float32, rank: int = 0, world: int = 1, **adam
    ):
        super().__init__([{"muon": False} | group for group in groups], **adam)
        self._dtype, self._rank, self._world = dtype, rank, world

    def step(self, closure=None):
        """Updates the matrices with Muon and the rest with AdamW. A collective call where world > 1."""
        groups = self.param_groups
        self._step_matrices([group for group in groups if group["muon"]])
        try:  # AdamW's own step must not see the others
            self.param_groups = [group for group in groups if not group["muon"]]
            return super().step(closure)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_matrices(self, groups: list[dict]) -> None:
        skipped, divisor = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        moved = []  # a matrix (in, out), its momentum with Nesterov's look ahead, and its group
        for group in groups:
            for p in group["params"]:
                grad = p.grad if divisor is None else p.grad / divisor
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                old = self.state[p]["momentum"]
                new = old.lerp(grad, 1 - group["momentum"])
                look_ahead = grad.lerp(new, group["momentum"])
                old.copy_(new if skipped is None else torch.where(skipped > 0, old, new))
                parts = zip(p.chunk(group["parts"], 1), look_ahead.chunk(group["parts"], 1), strict=True)
                moved += [(matrix, update, group) for matrix, update in parts]
        for (matrix, _, group), direction in zip(moved, self._orthogonal([u for _, u, _ in moved]), strict=True):
            fan_in, fan_out = matrix.shape
            lr = group["lr"]
            new = matrix * (1 - lr * group["weight_decay"])
            new -= direction * (lr * max(1, fan_out / fan_in) ** 0.5)
            matrix.copy_(new if skipped is None else torch.where(skipped > 0, matrix, new))

    def _orthogonal(self, updates: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each of `updates`, orthogonalized. Those of one shape are one batch, of which each process does its part."""
        found: list[torch.Tensor] = [None] * len(updates)
        alike = defaultdict(list)
        for index, update in enumerate(updates):
            alike[tuple(sorted(update.shape))].append(index)
        for indices in alike.values():
            share = -(-len(indices) // self._world)  # the last processes may have fewer to do
            mine = indices[self._rank * share : (self._rank + 1) * share]
            like = updates[indices[0]]
            done = like.new_zeros(share, *sorted(like.shape), dtype=self._dtype)
            if mine:
                wide = torch.stack([_turned(updates[index], like=updates[index]) for index in mine])
                done[: len(mine)] = orthogonalize(wide.to(self._dtype))
            if self._world > 1:
                everyones = [torch.empty_like(done) for _ in range(self._world)]
                dist.all_gather(everyones, done)
                done = torch.cat(everyones)
            for index, matrix in zip(indices, done, strict=False):  # the rest of `done` is padding
                found[index] = _turned(matrix, like=updates[index]).to(like)
        return found


def _turned(matrix: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The matrix as it is if `like` is wider than high, else transposed: the product of its rows is the smaller one,
    and a square is (out, in) as torch's own Muon has it. The same call turns the result back."""
    return matrix if like.shape[0] < like.shape[1] else matrix.mT


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """(n, rows, cols), rows <= cols, to about the nearest matrices with orthonormal rows, by Newton-Schulz iteration.

    Costs STEPS x n x (4 rows^2 cols + 2 rows^3) FLOPs: for GPT-2 124M 1.6 TFLOP a step, 0.4 % of a step of 524,288
    tokens.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
