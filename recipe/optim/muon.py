"""Muon: orthogonalized momentum, for the matrices inside the blocks; AdamW for everything else.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the decoupled weight decay
of torch.optim.Muon. GPT-2's weights are Conv1D's, (in, out), and c_attn holds the query, key and value matrices side by
side: each is orthogonalized separately.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# The quintic iteration, tuned for speed (Jordan et al.): five steps bring all singular values to about 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# Matrix elements that are orthogonalized at once: all matrices together would take half as much memory again as the
# weights, and this many (67 MB in bf16) keep a GPU busy.
SLICE = 2**25


@dataclass(frozen=True)
class _Piece:
    """This process's part of a parameter (in, parts x out): the elements of the flattened tensor from `start` on, all
    of them unless `sharded`. `weight`, `grad` and `momentum` are flat, in fp32."""

    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    shape: tuple[int, int]
    start: int
    sharded: bool
    group: dict

    @property
    def parts(self) -> int:
        """How many matrices the parameter holds side by side."""
        return self.group["parts"]

    @property
    def wide(self) -> bool:
        """Whether a matrix has more columns than rows."""
        return self.shape[0] < self.shape[1] // self.parts

    def matrices(self, own: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The matrices, (in, out) each: this process's elements from `own` (flat), zeros elsewhere."""
        if self.sharded:
            full = own.new_zeros(math.prod(self.shape))
            full[self.start : self.start + len(own)] = own
            own = full
        return own.view(self.shape).chunk(self.parts, 1)


class Muon(torch.optim.AdamW):
    """AdamW that updates the parameter groups with "muon": True by Muon.

    Such a group has parameters of shape (in, parts x out), and "parts", "lr", "momentum" and "weight_decay". Like
    torch's fused optimizers, step() divides the gradients by the attribute `grad_scale` and changes nothing where
    `found_inf` is 1.

    The parameters may be sharded by rows (FSDP's DTensors), or one flat tensor may be this process's part of all of
    them (ZeRO); then the group's "layout" lists its contents: (shape, start in the flattened parameter, start in the
    flat tensor, length). Each matrix is assembled on the process that orthogonalizes it.

    Args:
        dtype: of the orthogonalization and its communication.
        rank, world_size: of this process. Each process orthogonalizes its share of the matrices and gathers the
            others', which makes step() a collective call.
    """

    def __init__(
        self, groups: list[dict], *, dtype: torch.dtype = torch.float32, rank: int = 0, world_size: int = 1, **adam
    ):
        super().__init__([{"muon": False} | group for group in groups], **adam)
        self._dtype, self._rank, self._world_size = dtype, rank, world_size

    def step(self, closure=None):
        """Updates the matrices with Muon and the rest with AdamW. A collective call where world_size > 1."""
        groups = self.param_groups
        self._step_matrices([group for group in groups if group["muon"]])
        try:  # AdamW's own step must not see Muon's groups
            self.param_groups = [group for group in groups if not group["muon"]]
            return super().step(closure)
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _step_matrices(self, groups: list[dict]) -> None:
        alike = defaultdict(list)  # (rows, cols) -> parameters whose matrices have these sizes, to be updated together
        for piece in (piece for group in groups for piece in self._pieces(group)):
            alike[tuple(sorted((piece.shape[0], piece.shape[1] // piece.parts)))].append(piece)
        for (rows, cols), pieces in alike.items():
            most = self._world_size * share_of(sum(piece.parts for piece in pieces), rows * cols, self._world_size)
            for some in _slices(pieces, most):
                self._step_slice(some, rows, cols)

    def _pieces(self, group: dict) -> Iterator[_Piece]:
        """This process's parts of the group's parameters, with their momentum updated."""
        for p in group["params"]:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            sharded = hasattr(p, "to_local")  # a DTensor; importing the class takes a second
            own = [t.to_local() if sharded else t for t in (p, p.grad, self.state[p]["momentum"])]
            self._update_momentum(*own[1:], group["momentum"])
            flat = [t.view(-1) for t in own]
            if layout := group.get("layout"):
                for shape, start, offset, length in layout:
                    yield _Piece(*(t.narrow(0, offset, length) for t in flat), shape, start, True, group)
            else:  # FSDP splits the rows as torch.chunk does
                rows, cols = p.shape
                start = min(self._rank * -(-rows // self._world_size), rows) * cols if sharded else 0
                yield _Piece(*flat, (rows, cols), start, sharded, group)

    def _update_momentum(self, grad: torch.Tensor, old: torch.Tensor, momentum: float) -> None:
        skipped = getattr(self, "found_inf", None)
        new = old.lerp(self._unscaled(grad), 1 - momentum)
        old.copy_(new if skipped is None else torch.where(skipped > 0, old, new))

    def _unscaled(self, grad: torch.Tensor) -> torch.Tensor:
        divisor = getattr(self, "grad_scale", None)
        return grad if divisor is None else grad / divisor

    def _step_slice(self, pieces: list[_Piece], rows: int, cols: int) -> None:
        """Updates parameters whose `count` matrices have these sizes; each process orthogonalizes its share of them."""
        count = sum(piece.parts for piece in pieces)
        share = -(-count // self._world_size)  # the last processes may have fewer; the rest is padding
        own = range(self._rank * share, min((self._rank + 1) * share, count))
        if pieces[0].sharded:
            packed = self._pack(pieces, range(count), (share * self._world_size, rows, cols))
            updates = packed.new_empty(share, rows, cols)
            dist.reduce_scatter_tensor(updates, packed)
            del packed  # or all processes' matrices would lie beside the iteration's
        else:
            updates = self._pack(pieces, own, (share, rows, cols))
        if own:
            updates[: len(own)] = orthogonalize(updates[: len(own)])
        if self._world_size > 1:
            gathered = updates.new_empty(share * self._world_size, rows, cols)
            dist.all_gather_into_tensor(gathered, updates)
            updates = gathered
        self._unpack(pieces, updates)

    def _pack(self, pieces: list[_Piece], held: range, shape: tuple[int, int, int]) -> torch.Tensor:
        """The look-ahead of the matrices whose numbers are in `held`, this process's part of each: `shape`, zeros
        elsewhere."""
        packed, number = pieces[0].weight.new_zeros(shape, dtype=self._dtype), 0
        for piece in pieces:
            numbers = range(number, number := number + piece.parts)
            if any(i in held for i in numbers):
                look_ahead = self._unscaled(piece.grad).lerp(piece.momentum, piece.group["momentum"])  # Nesterov's
                for i, matrix in zip(numbers, piece.matrices(look_ahead), strict=True):
                    if i in held:
                        packed[i - held.start].copy_(matrix if piece.wide else matrix.mT)
        return packed

    def _unpack(self, pieces: list[_Piece], updates: torch.Tensor) -> None:
        """Updates the parameters from the orthogonalized `updates`, (count and padding, rows, cols)."""
        done = iter(updates)
        for piece in pieces:
            self._move(piece, [next(done) for _ in range(piece.parts)])

    def _move(self, piece: _Piece, updates: list[torch.Tensor]) -> None:
        """Updates this process's part of a parameter from the orthogonalized `updates`, (rows, cols) each."""
        skipped, lr = getattr(self, "found_inf", None), piece.group["lr"]
        fan_in, fan_out = piece.shape[0], piece.shape[1] // piece.parts
        full = torch.cat([update if piece.wide else update.mT for update in updates], 1).view(-1)
        own = full[piece.start : piece.start + len(piece.weight)].to(piece.weight)
        new = piece.weight * (1 - lr * piece.group["weight_decay"])
        new -= own * (lr * max(1, fan_out / fan_in) ** 0.5)
        piece.weight.copy_(new if skipped is None else torch.where(skipped > 0, piece.weight, new))


def _slices(pieces: list[_Piece], most: int) -> Iterator[list[_Piece]]:
    """The parameters in groups of at most `most` matrices, but at least one parameter."""
    some: list[_Piece] = []
    for piece in pieces:
        if some and sum(one.parts for one in some) + piece.parts > most:
            yield some
            some = []
        some.append(piece)
    yield some


def share_of(count: int, size: int, world_size: int) -> int:
    """How many of `count` matrices of `size` numbers a process orthogonalizes at once: so many that all `world_size`
    processes together stay within SLICE, but at least one."""
    return max(1, min(-(-count // world_size), SLICE // (size * world_size)))


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Approximates the nearest matrices with orthonormal rows by Newton-Schulz iteration: (n, rows, cols), rows <=
    cols, so that the product of the rows is the smaller one; square matrices are (out, in), as in torch's Muon.

    Costs STEPS x n x (4 rows^2 cols + 2 rows^3) FLOPs: for GPT-2 124M 1.6 TFLOP a step, 0.4 % of a step of 524,288
    tokens.
    """
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
