"""GPT-2's loss by model size and training tokens: a scaling law.

`python -m benchmarks scaling` writes the runs and the law's constants to scaling.json; docs/log.md shows its errors.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from recipe.config import ModelConfig

SCALING = json.loads(Path(__file__).with_suffix(".json").read_text())
Size = tuple[int, int]  # layers and width
# The small runs' sizes, with one block per 32 of width; three between them and GPT-2's four.
SIZES: tuple[Size, ...] = (
    *((2, 64), (3, 96), (4, 128), (5, 160), (6, 192), (8, 256), (8, 384), (10, 512)),
    *((12, 768), (24, 1024), (36, 1280), (48, 1600)),
)
MIN_SPREAD = 0.2  # nats per token, by the law, between two trials whose slope can be trusted
ERROR = 0.03, 0.06  # relative error of a predicted loss, and its growth per nat of extrapolation (docs/log.md)


def model_of(size: Size, vocabulary: int = 0) -> ModelConfig:
    """The architecture of a size: heads are 32 wide, or 64 from a width of 384, and positions grow with the width."""
    layers, width = size
    heads = width // (32 if width < 384 else 64)
    positions = next((n for limit, n in ((200, 128), (300, 256), (600, 512)) if width < limit), 1024)
    return ModelConfig(layers, heads, width, positions, vocab_size=vocabulary)


def block_parameters(size: Size) -> int:
    """Parameters in the blocks' matrices, 12 L D^2."""
    return 12 * size[0] * size[1] ** 2


def law(size: Size, tokens: float, unique: float = math.inf) -> float:
    """E + s (A / N^a + 1 / D)^c nats per token, for N parameters in the blocks and D tokens of the first text that the
    law was fitted to. Another text has its own E and s, so its loss is a linear function of this one. (The form is
    Kaplan et al. 2020, arXiv 2001.08361, equation 1.5, with E; docs/log.md.)"""
    E, s, A, a, c = (SCALING["law"][name] for name in "EsAac")
    return E + s * (A / block_parameters(size) ** a + 1 / new_tokens(tokens, unique, SCALING["law"]["R"])) ** c


def new_tokens(tokens: float, unique: float, R: float) -> float:
    """The number of new tokens worth as much as `tokens` of a text of `unique` ones, unique (1 + R (1 -
    exp(-repetitions / R))) (Muennighoff et al. 2023, arXiv 2305.16264, section 3.1)."""
    return unique * (1 + R * (1 - math.exp((1 - tokens / unique) / R))) if tokens > unique else tokens


def line_through(points: list[tuple[float, float]]) -> Callable[[float], float]:
    """Maps the law's loss to the loss on a text with the measured (law's loss, loss) `points`: by the line through the
    highest and the lowest; with one point, or less than MIN_SPREAD apart, by proportion."""
    (x0, y0), (x, y) = max(points), min(points)
    slope = (y0 - y) / (x0 - x) if x0 - x > MIN_SPREAD else y / x
    return lambda value: y + slope * (value - x)


def error_of(extrapolation: float) -> float:
    """The relative error expected of `line_through`, `extrapolation` nats (by the law) below its lowest point."""
    return ERROR[0] + ERROR[1] * max(0.0, extrapolation)
