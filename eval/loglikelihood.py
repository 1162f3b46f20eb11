"""Log-likelihoods of continuations: those of one context stand in one row, so that the context is computed once.

    context context context | first first | second second second | third ...

Each continuation's positions go on from the context's end, and its tokens see the context and their own continuation
only: the numbers are those of four separate texts, at half the tokens of HellaSwag's.

Shapes: N rows, T positions, M scored tokens, D width, V vocabulary.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

# Rows of logits held in float32 at once, by device: 128 x 50257 x 4 bytes is 26 MB, and larger pieces were slower on a
# CPU (they fall out of its cache); other devices take 2048 (412 MB).
PIECE = {"cpu": 128}


@dataclass(frozen=True)
class LanguageModel:
    """What the scorers need of a model: of a checkpoint (`eval.common.Loaded.lm`), or of a trainer's live module.

    Attributes:
        body: ids (N, T) -> states (N, T, D). With `shares_contexts` it also takes positions (N, T) and a mask
            (N, 1, T, T), true where a query may see a key.
        head: states (M, D) -> logits (M, V). It takes most of a small model's time, so it runs on scored tokens only.
        encode: text -> token ids, without special tokens.
        multiples: numbers that N, T and M are padded to multiples of, for a device that compiles each shape.
        place: brings a tensor (N, ...) to the device; for one that shards its rows. None is `.to(device)`.
    """

    body: Callable
    head: Callable
    encode: Callable[[str], list[int]]
    n_positions: int
    device: torch.device
    shares_contexts: bool = True
    multiples: tuple[int, int, int] = (1, 1, 1)
    place: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class Request:
    """A continuation to score: `tokens` is context and continuation, of which the last `n_scored` are the latter's."""

    tokens: list[int]
    n_scored: int

    def cut(self, n_positions: int) -> "Request":
        """What a model of that many positions can see: tokens are lost on the left.

        The last token predicts nothing, hence one token more than there are positions.
        """
        return Request(self.tokens[-(n_positions + 1) :], min(self.n_scored, n_positions))


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


def score(
    model: LanguageModel, groups: Sequence[Sequence[Request]], batch_size: int, desc: str = ""
) -> list[list[float]]:
    """The summed log-likelihoods, in nats, of each group's requests, which continue one context, in
    ceil(len(groups) / batch_size) calls of the model. With `desc` there is a progress bar.

    Requests that are longer than the model's positions and one lose tokens on the left.
    """
    packed = [rows_of(group, model) for group in groups]
    # Rows of like length together: little padding. Longest first: memory that does not suffice shows at once.
    order = sorted(range(len(groups)), key=lambda i: -max(len(row.ids) for row in packed[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    scores: list = [None] * len(groups)
    for batch in progress_bar(batches, desc):
        found = iter(score_rows(model, [row for i in batch for row in packed[i]]))
        for i in batch:
            scores[i] = [next(found) for _ in groups[i]]
    return scores


def progress_bar(batches: Sequence, desc: str) -> Iterable:
    """The batches behind a progress bar, which writes into a file only every half minute; no bar without `desc`."""
    often = 0.1 if sys.stderr.isatty() else 30
    return tqdm(batches, desc=desc, unit=" batches", mininterval=often, maxinterval=often, disable=not desc)


def rows_of(requests: Sequence[Request], model: LanguageModel) -> list[Row]:
    """The requests of one context as one row; as a row each where the model cannot share contexts, or where one has to
    be cut, since the others would then not share all that it sees."""
    if not model.shares_contexts or any(len(r.tokens) > model.n_positions + 1 for r in requests):
        return [_row([request.cut(model.n_positions)]) for request in requests]
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


def score_rows(model: LanguageModel, rows: Sequence[Row]) -> list[float]:
    """The summed log-likelihood of each request of the rows, in their order, from one call of the model."""
    n, t, m = model.multiples
    # A model that compiles each shape may be given positions beyond its last one, which the row's own do not reach.
    width = _fill(max(len(row.ids) for row in rows), t)
    shape = _fill(len(rows), n), width if model.shares_contexts else min(width, model.n_positions)
    # A causal model never sees the padding on the right, which itself sees the context or what is before it.
    ids, positions, segments = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)], positions[i, : len(row.ids)] = row.ids, row.positions
        segments[i, : len(row.ids)] = row.segments
    numbers = np.repeat(np.arange(len(rows)), [len(row.columns) for row in rows])  # (M,)
    columns, targets = (np.concatenate([getattr(row, name) for row in rows]) for name in ("columns", "targets"))
    scored = (np.pad(x, (0, _fill(len(x), m) - len(x))) for x in (numbers, columns, targets))
    numbers, columns, targets = (torch.from_numpy(x).to(model.device) for x in scored)
    place = model.place or (lambda tensor: tensor.to(model.device))
    with torch.no_grad():
        if model.shares_contexts:
            ids, positions, segments = (place(torch.from_numpy(x)) for x in (ids, positions, segments))
            states = model.body(ids, positions, sees(segments))  # (N, T, D)
        else:
            states = model.body(place(torch.from_numpy(ids)))
        log_probs = token_log_probs(states[numbers, columns], targets, model.head)
    counts = [count for row in rows for count in row.counts]
    return [part.double().sum().item() for part in log_probs.cpu()[: sum(counts)].split(counts)]


def _fill(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def sees(segments: torch.Tensor) -> torch.Tensor:
    """Segments (N, T) -> mask (N, 1, T, T): a position sees those of the context, and its own segment's, before it and
    itself."""
    query, key = segments[:, None, :, None], segments[:, None, None, :]
    T = segments.shape[1]
    return ((key == 0) | (key == query)) & torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()


def token_log_probs(states: torch.Tensor, targets: torch.Tensor, head: Callable) -> torch.Tensor:
    """log p(target) in nats, float32 (M,), from states (M, D) and targets (M,)."""
    size = PIECE.get(states.device.type, 2048)
    pieces = zip(states.split(size), targets.split(size), strict=True)
    return torch.cat([-F.cross_entropy(head(part).float(), wanted, reduction="none") for part, wanted in pieces])
