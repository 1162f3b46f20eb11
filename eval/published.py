"""Results published by others, from data/published.yaml: HellaSwag accuracies, losses and training speeds."""

from pathlib import Path
from typing import NamedTuple

import yaml

HELLASWAG_ROWS = 10_042  # of the validation split
# (layers, width) of OpenAI's four models.
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
# Scoring styles of HellaSwag: name in results and metrics -> name for readers.
STYLES = {"llmc": "llm.c-style", "lmeval": "lm-eval-style"}
# HellaSwag's accuracies: name in results and metrics -> name for readers.
ACCURACIES = {f"{style}_{kind}": f"{kind}, {title}" for style, title in STYLES.items() for kind in ("acc", "acc_norm")}


class Speed(NamedTuple):
    """The training speed that `run` in SPEED_SOURCES reports for GPT-2 of a size in SIZES on `count` devices."""

    run: str
    setup: str
    count: int
    device: str
    size: str
    tokens: int
    seconds: float = 1

    @property
    def tokens_per_second(self) -> float:
        """The speed."""
        return self.tokens / self.seconds


_DATA = yaml.safe_load((Path(__file__).parent / "data" / "published.yaml").read_text())
# Scoring style -> model -> acc and acc_norm; the source of a style's numbers.
HELLASWAG = {style: entry["models"] for style, entry in _DATA["hellaswag"].items()}
SOURCES = {style: entry["source"] for style, entry in _DATA["hellaswag"].items()}
# Data set -> size -> loss of OpenAI's weights; the source of a data set's losses.
OPENAI_LOSS = {data: entry["losses"] for data, entry in _DATA["openai_loss"].items()}
OPENAI_LOSS_SOURCE = {data: entry["source"] for data, entry in _DATA["openai_loss"].items()}
LOSSES = _DATA["losses"]
SLOWER, SPEEDS = (
    [Speed(run, *row) for run, entry in _DATA["speeds"].items() for row in entry.get(kind, [])]
    for kind in ("slower", "best")
)
SPEED_SOURCES = {run: entry["source"] for run, entry in _DATA["speeds"].items()}
