"""Log-likelihoods of continuations: those of one context stand in one row, so that the context is computed once.

    context context context | first first | second second second | third ...

Each continuation's positions go on from the context's end, and its tokens see the context and their own continuation
only: the numbers are those of four separate texts, at half the tokens of HellaSwag's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eval import common


@dataclass(frozen=True)
class Request:
    """A continuation to score: `tokens` is context and continuation, of which the last `n_scored` are the latter's."""

    tokens: list[int]
    n_scored: int
    length: int = 0  # what a normalized score divides by, in whatever unit

    def cut(self, max_length: int) -> "Request":
        """What a model of `max_length` positions can see: tokens are lost on the left.

        The last token predicts nothing, hence one token more than there are positions.
        """
        return Request(self.tokens[-(max_length + 1) :], min(self.n_scored, max_length), self.length)


@dataclass(frozen=True)
class Row:
    """What the model is given of one or several requests, and where their scored tokens are predicted.

    `ids`, `positions` and `segments` have one number a position: segment 0 is the shared context, i + 1 what is request
    i's alone. `columns` and `targets` have one number a scored token; `counts` has how many are each request's.
    """

    ids: np.ndarray
    positions: np.ndarray
    segments: np.ndarray
    columns: np.ndarray
    targets: np.ndarray
    counts: list[int]


def rows_of(requests: Sequence[Request], max_length: int, share: bool = True) -> list[Row]:
    """The requests of one context as one row; as a row each without `share`, or if one has to be cut, since the others
    would then not share all that it sees."""
    if not share or any(len(r.tokens) > max_length + 1 for r in requests):
        return [_row([request.cut(max_length)]) for request in requests]
    return [_row(requests)]


def _row(requests: Sequence[Request]) -> Row:
    shared = 0 if len(requests) == 1 else min(len(r.tokens) - r.n_scored for r in requests)
    first = requests[0].tokens
    while any(r.tokens[:shared] != first[:shared] for r in requests):  # of texts encoded as a whole
        shared -= 1
    parts = [(first[:shared], np.arange(shared), 0)]
    columns, start = [], shared
    for i, r in enumerate(requests):
        own = np.arange(shared, len(r.tokens) - 1)  # the last token predicts nothing
        parts.append((r.tokens[shared:-1], own, i + 1))
        predicting = np.arange(len(r.tokens) - 1 - r.n_scored, len(r.tokens) - 1)  # in the request's own positions
        columns.append(np.where(predicting < shared, predicting, predicting + start - shared))
        start += len(own)
    return Row(
        ids=np.concatenate([np.asarray(ids, dtype=np.int64) for ids, _, _ in parts]),
        positions=np.concatenate([positions for _, positions, _ in parts]),
        segments=np.concatenate([np.full(len(ids), segment) for ids, _, segment in parts]),
        columns=np.concatenate(columns),
        targets=np.concatenate([r.tokens[-r.n_scored :] for r in requests]),
        counts=[r.n_scored for r in requests],
    )


def sees(segments: torch.Tensor) -> torch.Tensor:
    """Segments (N, T) -> mask (N, 1, T, T): a position sees those of the context, and its own segment's, before it and
    itself."""
    query, key = segments[:, None, :, None], segments[:, None, None, :]
    T = segments.shape[1]
    return ((key == 0) | (key == query)) & torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()


def score(states_fn: Callable, rows: Sequence[Row], *, head: Callable = common.identity, **options) -> list[float]:
    """Summed log-likelihood in nats of each request of `rows`, in their order, from one call of `states_fn`.

    `head`: states (M, D) -> logits (M, V), applied only where a token is scored. `options` are those of
    `scored_states`.
    """
    states, targets, counts = scored_states(states_fn, rows, **options)
    with torch.no_grad():
        log_probs = common.token_log_probs(states, targets, head)
    return [part.double().sum().item() for part in log_probs.cpu()[: sum(counts)].split(counts)]


def scored_states(
    states_fn: Callable,
    rows: Sequence[Row],
    *,
    device: torch.device | str,
    share: bool,
    max_length: int,
    multiples: tuple[int, int, int] = (1, 1, 1),
    place: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """States (M, D) that predict the scored tokens of all requests of `rows`, these tokens (M,), and how many are each
    request's; from one call of `states_fn`.

    Args:
        states_fn: ids (N, T) -> logits (N, T, V), or states (N, T, D) before a head. With `share` it is given
            positions (N, T) and a mask (N, 1, T, T) too.
        max_length: positions that the model has.
        multiples: of what N, T and M are filled up to, for a device that compiles for each shape.
        place: brings a tensor with N rows to the device, sharded where there are several; else `.to(device)`.
    """
    place = place or (lambda tensor: tensor.to(device))
    n, t, m = multiples
    width = _fill(max(len(row.ids) for row in rows), t)
    shape = _fill(len(rows), n), width if share else min(width, max_length)
    # A causal model never sees the padding on the right, which itself sees the context or what is before it.
    ids, positions, segments = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)], positions[i, : len(row.ids)] = row.ids, row.positions
        segments[i, : len(row.ids)] = row.segments
    numbers = np.repeat(np.arange(len(rows)), [len(row.columns) for row in rows])  # (M,)
    columns, targets = (np.concatenate([getattr(row, name) for row in rows]) for name in ("columns", "targets"))
    scored = (np.pad(x, (0, _fill(len(x), m) - len(x))) for x in (numbers, columns, targets))
    numbers, columns, targets = (torch.from_numpy(x).to(device) for x in scored)
    with torch.no_grad():
        if share:
            ids, positions, segments = (place(torch.from_numpy(x)) for x in (ids, positions, segments))
            states = states_fn(ids, positions, sees(segments))
        else:
            states = states_fn(place(torch.from_numpy(ids)))
    return states[numbers, columns], targets, [count for row in rows for count in row.counts]


def _fill(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
