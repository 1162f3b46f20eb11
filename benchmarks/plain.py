"""recipe/train.py without optimizations that no config field turns off, for the scoreboard's first rows.

python -m benchmarks.plain attention,adamw,vocabulary FLAGS of recipe/train.py
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
import torch.nn.functional as F

from recipe import train
from recipe.engine import strategy


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal softmax attention over (B, H, T, K) that writes all scores (B, H, T, T) to memory."""
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
    return F.dropout(scores.softmax(-1), dropout) @ v


# What can be omitted -> the fields of a Device that replace it.
CHANGES = {
    "attention": {"attention": naive_attention},
    "adamw": {"adamw": "foreach"},  # torch's default on a GPU
    "vocabulary": {"pad_vocab_to": 1},
}


def main(argv: list[str]) -> int:
    """Trains without the optimizations that the first argument lists; returns the exit code."""
    names, *flags = argv
    changes = {field: value for name in names.split(",") for field, value in CHANGES[name].items()}
    local_device = strategy.local_device
    setattr(strategy, "local_device", lambda *arguments: replace(local_device(*arguments), **changes))  # noqa: B010
    return train.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
