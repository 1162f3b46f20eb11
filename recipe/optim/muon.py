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
# Numbers of the matrices that are orthogonalized at once: all of them together would take half as much memory again as
# the weights, and these (67 MB in bf16) are enough to keep a GPU busy.
SLICE = 2**25


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
        alike = defaultdict(list)  # shape, (rows, cols) -> matrices (in, out) or (out, in), to be updated together
        for group in groups:
            for p in group["params"]:
                self._update_momentum(p, group["momentum"])
                parts = (t.chunk(group["parts"], 1) for t in (p, p.grad, self.state[p]["momentum"]))
                for matrix in zip(*parts, strict=True):
                    alike[tuple(sorted(matrix[0].shape))].append((*matrix, group))
        for (rows, cols), matrices in alike.items():
            share = share_of(len(matrices), rows * cols, self._world)
            for start in range(0, len(matrices), share * self._world):
                self._step_slice(matrices[start : start + share * self._world], share)

    def _update_momentum(self, p: torch.Tensor, momentum: float) -> None:
        skipped, grad = getattr(self, "found_inf", None), self._unscaled(p.grad)
        if "momentum" not in self.state[p]:
            self.state[p]["momentum"] = torch.zeros_like(p)
        old = self.state[p]["momentum"]
        new = old.lerp(grad, 1 - momentum)
        old.copy_(new if skipped is None else torch.where(skipped > 0, old, new))

    def _unscaled(self, grad: torch.Tensor) -> torch.Tensor:
        divisor = getattr(self, "grad_scale", None)
        return grad if divisor is None else grad / divisor

    def _step_slice(self, matrices: list[tuple], share: int) -> None:
        """Updates matrices of one shape, each with its gradient, its momentum and its group, of which this process
        orthogonalizes at most `share`."""
        skipped = getattr(self, "found_inf", None)
        like = matrices[0][0]
        updates = like.new_zeros(share, *sorted(like.shape), dtype=self._dtype)
        mine = matrices[self._rank * share : (self._rank + 1) * share]
        for update, (matrix, grad, momentum, group) in zip(updates, mine, strict=False):  # the rest is padding
            look_ahead = self._unscaled(grad).lerp(momentum, group["momentum"])  # Nesterov's
            update.copy_(_turned(look_ahead, like=matrix))
        if mine:
            updates[: len(mine)] = orthogonalize(updates[: len(mine)])
        if self._world > 1:
            everyones = updates.new_empty(self._world * share, *updates.shape[1:])
            dist.all_gather_into_tensor(everyones, updates)
            updates = everyones
        for update, (matrix, _, _, group) in zip(updates, matrices, strict=False):
            fan_in, fan_out = matrix.shape
            lr = group["lr"]
            new = matrix * (1 - lr * group["weight_decay"])
            new -= _turned(update, like=matrix).to(matrix) * (lr * max(1, fan_out / fan_in) ** 0.5)
            matrix.copy_(new if skipped is None else torch.where(skipped > 0, matrix, new))


def share_of(count: int, size: int, world: int) -> int:
    """How many of `count` matrices of `size` numbers a process orthogonalizes at once: as many as keep those of all
    `world` processes together within SLICE, but at least one."""
    return max(1, min(-(-count // world), SLICE // (size * world)))


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
