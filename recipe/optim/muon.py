"""Muon: orthogonalized momentum, for the matrices inside the blocks; AdamW for everything else.

Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024), with the decoupled weight decay
of torch.optim.Muon. GPT-2's weights are stored as in Conv1D, (in, out), and c_attn holds the query, key and value
matrices side by side: each is orthogonalized separately.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

# The quintic iteration, tuned for speed (Jordan et al.): five steps bring singular values to about 0.7 to 1.2, but for
# the smallest of a square matrix.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
# Matrix elements in a bucket, which is orthogonalized at once: all matrices together would take half as much memory
# again as the weights, and this many (67 MB in bf16) keep a GPU busy.
MAX_BUCKET_ELEMENTS = 2**25
Tensors = tuple[torch.Tensor, ...] | list[torch.Tensor]


@dataclass(frozen=True)
class _LocalParam:
    """This process's part of a parameter that holds `count` matrices (fan_in, fan_out) side by side. `weight`, `grad`
    and `momentum` are flat, in fp32: the elements of the flattened parameter from `start` on, and all of them unless
    `is_sharded`."""

    weight: torch.Tensor
    grad: torch.Tensor
    momentum: torch.Tensor
    fan_in: int
    fan_out: int
    count: int
    start: int
    is_sharded: bool
    group: dict

    def matrices(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """`values` of the local elements as (fan_in, fan_out) matrices; elements of other processes are 0."""
        if self.is_sharded:
            unsharded = values.new_zeros(self.fan_in * self.count * self.fan_out)
            unsharded[self.start : self.start + len(values)] = values
            values = unsharded
        return values.view(self.fan_in, -1).chunk(self.count, 1)

    def local_elements(self, matrices: torch.Tensor) -> torch.Tensor:
        """The local elements, flat, of `matrices` (count, rows, cols), rows <= cols."""
        if self.fan_in >= self.fan_out:
            matrices = matrices.mT
        values = matrices.transpose(0, 1).reshape(-1)
        # A part is copied, which frees the matrices.
        return values[self.start : self.start + len(self.weight)].clone() if self.is_sharded else values


class Muon(torch.optim.AdamW):
    """AdamW that updates the parameter groups with "muon": True by Muon.

    Such a group has parameters of shape (in, num_matrices x out), and "num_matrices", "lr", "momentum" and
    "weight_decay". Like torch's fused optimizers, step() changes nothing where the attribute `found_inf` is 1.

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
        params_by_size = defaultdict(list)  # (rows, cols), rows <= cols -> parameters with matrices of this size
        for param in (param for group in groups for param in self._local_params(group)):
            params_by_size[tuple(sorted((param.fan_in, param.fan_out)))].append(param)
        for (rows, cols), params in params_by_size.items():
            num_matrices = sum(param.count for param in params)
            share = share_of(num_matrices, rows * cols, self._world_size)
            for bucket in _buckets(params, max_matrices=share * self._world_size):
                self._step_bucket(bucket, rows, cols)

    def _local_params(self, group: dict) -> Iterator[_LocalParam]:
        """This process's parts of the group's parameters."""
        for p in group["params"]:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
            is_sharded = hasattr(p, "to_local")  # a DTensor; importing the class takes a second
            tensors = p, p.grad, self.state[p]["momentum"]
            local = [(t.to_local() if is_sharded else t).view(-1) for t in tensors]
            count = group["num_matrices"]
            if layout := group.get("layout"):
                for (fan_in, width), start, offset, length in layout:
                    parts = (t.narrow(0, offset, length) for t in local)
                    yield _LocalParam(*parts, fan_in, width // count, count, start, True, group)
            else:  # FSDP splits the rows as torch.chunk does
                fan_in, width = p.shape
                start = min(self._rank * -(-fan_in // self._world_size), fan_in) * width if is_sharded else 0
                yield _LocalParam(*local, fan_in, width // count, count, start, is_sharded, group)

    def _step_bucket(self, bucket: list[_LocalParam], rows: int, cols: int) -> None:
        """Updates parameters whose matrices are all rows x cols or cols x rows. A collective call. The _foreach
        functions launch one kernel for all of them: with a small model a GPU waits for its launches."""
        num_matrices = sum(param.count for param in bucket)
        share = -(-num_matrices // self._world_size)  # matrices per process, with padding if the count does not divide
        own_indices = range(self._rank * share, min((self._rank + 1) * share, num_matrices))
        weights, grads, momenta = zip(*((param.weight, param.grad, param.momentum) for param in bucket), strict=True)

        # 1. Update the momentum of the local elements. On XLA a group's momentum and lr are tensors.
        kept = [param.group["momentum"] for param in bucket]
        self._assign(momenta, torch._foreach_lerp(momenta, grads, [1 - m for m in kept]))
        look_ahead = torch._foreach_lerp(grads, momenta, kept)  # Nesterov's

        # 2. Assemble this process's share of the matrices: (share, rows, cols). If they are sharded,
        # each process contributes its elements; otherwise every process has all of them, and nothing is sent.
        if bucket[0].is_sharded and self._world_size > 1:
            packed = self._pack(bucket, look_ahead, range(num_matrices), (share * self._world_size, rows, cols))
            updates = packed.new_empty(share, rows, cols)
            dist.reduce_scatter_tensor(updates, packed)
            del packed
        else:
            updates = self._pack(bucket, look_ahead, own_indices, (share, rows, cols))
        del look_ahead  # like all processes' matrices, before the iteration allocates memory

        # 3. Orthogonalize the share.
        if own_indices:
            updates[: len(own_indices)] = orthogonalize(updates[: len(own_indices)])

        # 4. Gather the shares of all processes: (share x world_size, rows, cols).
        if self._world_size > 1:
            gathered = updates.new_empty(share * self._world_size, rows, cols)
            dist.all_gather_into_tensor(gathered, updates)
            updates = gathered

        # 5. Update the local elements of the weights.
        updates = updates[:num_matrices].to(weights[0]).split([param.count for param in bucket])
        local = [param.local_elements(update) for param, update in zip(bucket, updates, strict=True)]
        scales = [param.group["lr"] * max(1, param.fan_out / param.fan_in) ** 0.5 for param in bucket]
        decays = [1 - param.group["lr"] * param.group["weight_decay"] for param in bucket]
        torch._foreach_mul_(local, scales)
        updated = torch._foreach_mul(weights, decays)
        torch._foreach_sub_(updated, local)
        self._assign(weights, updated)

    def _pack(
        self, bucket: list[_LocalParam], values: Tensors, indices: range, shape: tuple[int, int, int]
    ) -> torch.Tensor:
        """The bucket's matrices at `indices`, (len(indices) and padding, rows, cols), from the `values` of the local
        elements; the padding and other processes' elements are 0."""
        packed, stop = values[0].new_zeros(shape, dtype=self._dtype), 0
        for param, value in zip(bucket, values, strict=True):
            start, stop = stop, stop + param.count
            if any(i in indices for i in range(start, stop)):
                for i, matrix in enumerate(param.matrices(value), start):
                    if i in indices:
                        packed[i - indices.start].copy_(matrix if param.fan_in < param.fan_out else matrix.mT)
        return packed

    def _assign(self, tensors: Tensors, values: Tensors) -> None:
        """Copies `values` into `tensors`, unless the step is skipped."""
        skip = getattr(self, "found_inf", None)
        if skip is not None:
            values = [torch.where(skip > 0, old, new) for old, new in zip(tensors, values, strict=True)]
        torch._foreach_copy_(tensors, values)


def _buckets(params: list[_LocalParam], max_matrices: int) -> Iterator[list[_LocalParam]]:
    """The parameters in lists of at most `max_matrices` matrices, but at least one parameter."""
    bucket: list[_LocalParam] = []
    for param in params:
        if bucket and sum(p.count for p in bucket) + param.count > max_matrices:
            yield bucket
            bucket = []
        bucket.append(param)
    yield bucket


def share_of(count: int, size: int, world_size: int) -> int:
    """How many of `count` matrices of `size` elements a process orthogonalizes at once: as many as keep all
    `world_size` processes together within MAX_BUCKET_ELEMENTS, but at least one."""
    return max(1, min(-(-count // world_size), MAX_BUCKET_ELEMENTS // (size * world_size)))


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Approximates the nearest matrices with orthonormal rows by Newton-Schulz iteration: (n, rows, cols), rows <=
    cols, so that the Gram matrix is the smaller one; square matrices are (out, in), as in torch's Muon.

    Costs NS_STEPS x n x (4 rows^2 cols + 2 rows^3) FLOPs: for GPT-2 124M 1.6 TFLOP a step, 0.4 % of a step of 524,288
    tokens.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
