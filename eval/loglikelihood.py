"""Log-likelihoods of continuations. Those of one context share a row, so that the context is computed once.

    context context context | first first | second second second | third ...

Each continuation's positions start at the context's end, and its tokens attend only to the context and their own
continuation. The results equal those of separate texts, at half the tokens for HellaSwag.

Shapes: N rows, T positions, M scored tokens, D width, V vocabulary.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

# Rows of float32 logits computed at once: 128 x 50257 x 4 bytes are 26 MB, and larger chunks are slower on a CPU (they
# exceed its cache); 2048 rows are 412 MB.
CPU_CHUNK_ROWS, CHUNK_ROWS = 128, 2048


@dataclass(frozen=True)
class LanguageModel:
    """The scorers' interface to a model: a checkpoint (`eval.common.Loaded.lm`), or the module in training.

    Attributes:
        body: ids (N, T), positions (N, T) and a mask (N, 1, T, T), true where a query may see a key -> states
            (N, T, D). A causal model without `shares_contexts` may ignore the last two.
        head: states (M, D) -> logits (M, V). It takes most of a small model's time, so it runs on scored tokens only.
        encode: text -> token ids without special tokens.
        multiples: N, T and M are padded to multiples of these, for a device that compiles each shape.
        place: moves a tensor (N, ...) to a device that shards its rows. None means `.to(device)`.
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
    """A continuation to score: `tokens` is the context followed by the continuation, the last `n_scored` tokens."""

    tokens: list[int]
    n_scored: int


@dataclass(frozen=True)
class Row:
    """The model's input for one or several requests, and the positions that predict their scored tokens.

    `inputs` (3, T) holds token ids, positions and segments: segment 0 is the shared context, i + 1 is request i's own.
    `scored` (2, M) holds the columns that predict the scored tokens, and these tokens; `counts` holds the number of
    scored tokens per request.
    """

    inputs: np.ndarray
    scored: np.ndarray
    counts: list[int]


def score_groups(
    model: LanguageModel, groups: Sequence[Sequence[Request]], batch_size: int, desc: str = ""
) -> list[list[float]]:
    """The summed log-likelihood, in nats, of each request, from ceil(len(groups) / batch_size) calls of the model. The
    requests of a group continue one context. With `desc`, shows a progress bar. Requests with more tokens than the
    model's positions plus one are truncated on the left."""
    packed = [rows_of(group, model) for group in groups]
    # Rows of similar length share a batch to save padding; longest first, so that an out-of-memory error comes at once.
    order = sorted(range(len(groups)), key=lambda i: -max(row.inputs.shape[1] for row in packed[i]))
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    scores: list = [None] * len(groups)
    for batch in progress_bar(batches, desc):
        sums = iter(score_rows(model, [row for i in batch for row in packed[i]]))
        for i in batch:
            scores[i] = [next(sums) for _ in groups[i]]
    return scores


def progress_bar(batches: Sequence, desc: str) -> Iterable:
    """The batches with a progress bar, which is updated every 30 s if it goes to a file; no bar without `desc`."""
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(batches, desc=desc, unit=" batches", mininterval=interval, maxinterval=interval, disable=not desc)


def rows_of(requests: Sequence[Request], model: LanguageModel) -> list[Row]:
    """The requests of one context as one row; or one row each if the model cannot share contexts or a request must be
    truncated, since then the requests no longer have the same context."""
    max_tokens = model.n_positions + 1  # the last token predicts nothing, so it needs no position
    if not model.shares_contexts or any(len(r.tokens) > max_tokens for r in requests):
        return [_row([Request(r.tokens[-max_tokens:], min(r.n_scored, model.n_positions))]) for r in requests]
    return [_row(requests)]


def _row(requests: Sequence[Request]) -> Row:
    tokens, n_shared = requests[0].tokens, min(len(r.tokens) - r.n_scored for r in requests)
    # Encoding context and ending as one text may change the context's last tokens.
    while any(r.tokens[:n_shared] != tokens[:n_shared] for r in requests):
        n_shared -= 1
    inputs, scored = [(token, position, 0) for position, token in enumerate(tokens[:n_shared])], []
    for segment, r in enumerate(requests, 1):
        shift = len(inputs) - n_shared  # from a position to its column
        # the last token predicts nothing
        inputs += [(token, position, segment) for position, token in enumerate(r.tokens[n_shared:-1], n_shared)]
        for position in range(len(r.tokens) - 1 - r.n_scored, len(r.tokens) - 1):
            scored.append((position if position < n_shared else position + shift, r.tokens[position + 1]))
    return Row(np.array(inputs).T, np.array(scored).T, [r.n_scored for r in requests])


def score_rows(model: LanguageModel, rows: Sequence[Row]) -> list[float]:
    """The summed log-likelihood of each request in the rows, in order, from one call of the model."""
    n, t, m = model.multiples
    # A causal model never attends to padding on the right; the padding itself attends to the context or earlier tokens.
    length = max(row.inputs.shape[1] for row in rows)
    inputs = np.zeros((3, _round_up(len(rows), n), _round_up(length, t)), dtype=np.int64)
    for i, row in enumerate(rows):
        inputs[:, i, : row.inputs.shape[1]] = row.inputs
    counts = [count for row in rows for count in row.counts]
    scored = np.zeros((3, _round_up(sum(counts), m)), dtype=np.int64)  # row, column, token
    scored[0, : sum(counts)] = np.repeat(np.arange(len(rows)), [sum(row.counts) for row in rows])
    scored[1:, : sum(counts)] = np.concatenate([row.scored for row in rows], 1)
    row_indices, columns, targets = torch.from_numpy(scored).to(model.device)
    place = model.place or (lambda tensor: tensor.to(model.device))
    with torch.no_grad():
        ids, positions, segments = map(place, torch.from_numpy(inputs))
        states = model.body(ids, positions, sees(segments))  # (N, T, D)
        log_probs = token_log_probs(states[row_indices, columns], targets, model.head)
    return [part.double().sum().item() for part in log_probs.cpu()[: sum(counts)].split(counts)]


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def sees(segments: torch.Tensor) -> torch.Tensor:
    """Segments (N, T) -> mask (N, 1, T, T): a position sees the context and its own segment, up to itself."""
    query, key = segments[:, None, :, None], segments[:, None, None, :]
    T = segments.shape[1]
    return ((key == 0) | (key == query)) & torch.ones(T, T, dtype=torch.bool, device=segments.device).tril()


def token_log_probs(states: torch.Tensor, targets: torch.Tensor, head: Callable) -> torch.Tensor:
    """log p(target) in nats, float32 (M,), from states (M, D) and targets (M,)."""
    size = CPU_CHUNK_ROWS if states.device.type == "cpu" else CHUNK_ROWS
    chunks = zip(states.split(size), targets.split(size), strict=True)
    return torch.cat([-F.cross_entropy(head(x).float(), y, reduction="none") for x, y in chunks])
