"""How the loss of GPT-2 goes with its size and the text it reads: a law fitted to small runs, and a published one.

scaling.json has the runs and the law's numbers, by `python -m benchmarks scaling`; docs/log.md how good it is.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

from recipe.config import ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE

SCALING = json.loads(Path(__file__).with_suffix(".json").read_text())
Size = tuple[int, int]  # layers and width
# As the small runs, a block for 32 numbers of width, up to GPT-2's four.
SIZES: tuple[Size, ...] = (
    *((2, 64), (3, 96), (4, 128), (5, 160), (6, 192), (8, 256), (8, 384), (10, 512)),
    *((12, 768), (24, 1024), (36, 1280), (48, 1600)),
)
LEAST_APART = 0.2  # nats a token by the law between two trials, or they do not show how the text is learned
ERROR = 0.03, 0.06  # of a loss to expect, and for each nat by the law that it lies below the last trial's: docs/log.md


def model_of(size: Size, vocabulary: int = 0) -> ModelConfig:
    """The architecture; heads are 32 wide, from a width of 384 on 64, and sequences grow with the model."""
    layers, width = size
    heads = width // (32 if width < 384 else 64)
    positions = next((n for below, n in ((200, 128), (300, 256), (600, 512)) if width < below), 1024)
    return ModelConfig(layers, heads, width, positions, vocab_size=vocabulary)


def block_parameters(size: Size) -> int:
    """12 L D^2, what the blocks' matrices hold."""
    return 12 * size[0] * size[1] ** 2


def law(size: Size, tokens: float, unique: float = math.inf) -> float:
    """E + s log(A / N^a + 1 / D) nats a token, for N parameters in the blocks and D tokens, of the first text that it
    was fitted to. That of another text has its own E and s: it is a straight line of this. (The form is the limit of
    Kaplan et al. 2020, arXiv 2001.08361, equation 1.5, for a small exponent; docs/log.md.)"""
    E, s, A, a = (SCALING["law"][name] for name in "EsAa")
    return E + s * math.log(A / block_parameters(size) ** a + 1 / new_tokens(tokens, unique, SCALING["law"]["R"]))


def published_law(size: Size, tokens: float, unique: float = math.inf) -> float:
    """E + A / N^alpha + B / D^beta nats a token, for N parameters with their embedding (Hoffmann et al. 2022, with the
    numbers of Besiroglu et al. 2024, arXiv 2404.10102, and for repeated text of Muennighoff et al. 2023)."""
    N = block_parameters(size) + VOCAB_SIZE * size[1]
    return 1.8172 + 482.01 / N**0.3478 + 2085.43 / new_tokens(tokens, unique, 15.39) ** 0.3658


def new_tokens(tokens: float, unique: float, R: float) -> float:
    """How many tokens of new text are worth as much: unique (1 + R (1 - exp(-repetitions / R))) (Muennighoff et al.
    2023, arXiv 2305.16264, section 3.1)."""
    return unique * (1 + R * (1 - math.exp((1 - tokens / unique) / R))) if tokens > unique else tokens


def line_through(points: list[tuple[float, float]]) -> Callable[[float], float]:
    """From the law's loss to that on a text of which so many (law's loss, loss) are known: the straight line through
    the highest and the lowest; in proportion to the only one; or the law's."""
    if not points:
        return float
    (x0, y0), (x, y) = max(points), min(points)
    slope = (y0 - y) / (x0 - x) if x0 - x > LEAST_APART else y / x
    return lambda value: y + slope * (value - x)


def error_of(beyond: float) -> float:
    """That of a loss at a point of such a line, so many nats beyond the lowest that is known."""
    return ERROR[0] + ERROR[1] * max(0.0, beyond)
