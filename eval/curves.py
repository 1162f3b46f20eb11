"""The report's data: training runs, read from their directories, and the reference curves shipped with the project."""

import json
import math
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TypeGuard

import numpy as np

from eval.common import own_results, utf8
from eval.published import HELLASWAG_ROWS, SIZES
from eval.scores import all_scores, table_row
from recipe.utils.checkpoints import checkpoints, read_metrics, step_of
from recipe.utils.errors import UserError, reading
from recipe.utils.schema import COUNT, check

REFERENCES = Path(__file__).resolve().parent / "references"
# Settings within 5 % of each other count as equal: 19,073 and 19,560 steps differ by less than the noise.
REL_TOL = 0.05
PLACES = {"run_name", "output_dir", "dataset_name", "train_text"}  # fields that name files, not what they hold
# Settings that change the loss, but that a reference may omit: then it has these, the defaults of all recipes.
UNNAMED = {"matrix_learning_rate": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "max_grad_norm": 1.0}
# Texts with a published loss, by Hub repository or a file's SHA-256. The repositories are those of
# recipe/config/fields.py, and tokenized copies from KellerJordan/modded-nanogpt (data/cached_*.py) and llm.c.
DATASETS = {
    "huggingfacefw/fineweb-edu": "FineWeb-Edu",
    "kjj0/finewebedu10b-gpt2": "FineWeb-Edu",
    "karpathy/fineweb-edu-100b-gpt2-token-shards": "FineWeb-Edu",
    "huggingfacefw/fineweb": "FineWeb",
    "kjj0/fineweb10b-gpt2": "FineWeb",
    "kjj0/fineweb100b-gpt2": "FineWeb",
    "skylion007/openwebtext": "OpenWebText",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed": "tiny Shakespeare",
}
# The schema (recipe/utils/schema.py) of what is read of trainer_state.json, which others may have written.
_SOURCE = {"train_text": (None, str), "files": (None, [dict])}
_PART = {"from_step": COUNT, "config": (None, dict), "data": _SOURCE}
_STATE = {"config": dict, "engine": str, "about": [_PART]}


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        records: the lines of metrics.jsonl in order of their steps, one per step.
        config: the newest checkpoint's configuration, flat; empty before the first checkpoint.
        engine: the hardware and engine, in words; empty before the first checkpoint.
        about: the parts of the run (recipe/checkpoint/provenance.py), in the newest checkpoint.
        scores: step -> that checkpoint's results.json as rows of `table_row`; empty if nothing was measured.
    """

    name: str
    directory: Path
    records: list[dict]
    config: dict
    engine: str
    about: list[dict]
    scores: dict[int, list]

    def series(self, name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """(x, y), float64 (n,) each, of the records that have both."""
        pairs = [(record[x], record[name]) for record in self.records if _is_number(record.get(name))]
        return tuple(np.array(pairs, dtype=float).reshape(-1, 2).T)

    def last(self, name: str) -> float:
        """The last value of a column, or NaN."""
        return float([math.nan, *self.series(name, "step")[1]][-1])

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.records[-1]["tokens"]

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.records[-1]["seconds"]

    @property
    def samples(self) -> list[tuple[int, str]]:
        """(step, text) of each sample that was drawn during training."""
        return [(record["step"], str(record["sample"])) for record in self.records if record.get("sample")]

    @property
    def data(self) -> str:
        """The configured data set or mixture, in words."""
        data = self.config.get("dataset_name", "")
        return data if isinstance(data, str) else ", ".join(f"{part['weight']:.1%} {part['name']}" for part in data)

    @property
    def dataset(self) -> str:
        """The name in DATASETS of the text that the run trains and validates on. Empty for any other text, for shards
        whose text neither a manifest nor dataset_source names, and for tokenizers other than GPT-2's."""
        # All parts of a run read the same shards, so parts that name only the shards are ignored.
        sources = [part["data"] for part in self.about if part["data"].keys() != {"shards"}]
        names = {_known_text(source) for source in sources}
        names_shard_text = any("shards" in source for source in sources)
        tokenizer = self.config.get("tokenizer", "gpt2")
        is_unknown = (self.config.get("val_data") and not names_shard_text) or tokenizer != "gpt2"
        return names.pop() if len(names) == 1 and not is_unknown else ""

    @property
    def settings(self) -> dict[str, str]:
        """The settings that decide what the run learns, its data and its code; those that a resume has changed as
        "0.01; 0.005 from step 16". Empty before the first checkpoint."""
        settings: dict[str, str] = {"data": self.dataset or self.data} if self.parts else {}
        parts = [(part["from_step"], part["config"] | {"code": part.get("code", "")[:8]}) for part in self.parts]
        for name in (name for name in [*self.config, "code"] if name not in PLACES):
            values = [(step, part[name]) for step, part in parts if name in part]
            changes = [f"; {v} from step {step:,}" for (_, earlier), (step, v) in pairwise(values) if v != earlier]
            if values:
                settings[name] = f"{values[0][1]}{''.join(changes)}"
        return settings

    @property
    def parts(self) -> list[dict]:
        """The parts of the run that record their settings."""
        return [part for part in self.about if "config" in part]

    @property
    def size(self) -> str:
        """124M, 350M, 774M, 1558M; empty for other shapes."""
        return SIZES.get((self.config.get("n_layer"), self.config.get("n_embd")), "")

    def hellaswag(self, style: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, acc_norm, rows that it was measured on), float64 (n,) each, of the evaluations during training."""
        tokens, accuracy = self.series(name := f"hellaswag_{style}_acc_norm")
        # A resume may change hellaswag_limit, and an older version did not record the rows.
        default = self.config.get("hellaswag_limit") or HELLASWAG_ROWS
        rows = [record.get("hellaswag_rows") or default for record in self.records if _is_number(record.get(name))]
        return tokens, accuracy, np.array(rows, dtype=float)


def read_run(path: str | Path) -> Run:
    """The run in a directory, or of a checkpoint in a run. Raises UserError if there is none or a file is damaged."""
    directory = Path(path).expanduser()
    if directory in checkpoints(directory.parent):
        directory = directory.parent
    log_path = directory / "metrics.jsonl"
    if not log_path.is_file():
        raise UserError(f"run {path}: no metrics.jsonl there. Name a run directory, such as runs/shakespeare")
    lines = read_metrics(log_path)
    records = [line for line in lines if all(_is_number(line.get(name)) for name in ("step", "tokens", "seconds"))]
    if not records:
        raise UserError(f"run {path}: metrics.jsonl has no complete line yet. Wait for the first logged step")
    scores, config, engine, about, checkpoint_dirs = {}, {}, "", [], checkpoints(directory)
    for path in checkpoint_dirs:
        scores[step_of(path)] = [table_row(score) for score in all_scores(own_results(path))]
    if checkpoint_dirs:
        with reading(checkpoint_dirs[-1] / "trainer_state.json", "move that checkpoint away"):
            state = json.loads((checkpoint_dirs[-1] / "trainer_state.json").read_text())
            check(state, _STATE)
            config, engine, about = (state[name] for name in ("config", "engine", "about"))
    return Run(utf8(directory.resolve().name), directory, records, config, engine, about, scores)


def _is_number(value) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_close(key: str, value: float, expected: float) -> bool:
    if key.startswith("adam_beta"):  # averages over about 1 / (1 - beta) steps
        value, expected = 1 - value, 1 - expected
    return math.isclose(value, expected, rel_tol=REL_TOL)


def _known_text(source: dict) -> str:
    """The name in DATASETS of a source, which is a repository (ORG/NAME) or local files; empty if unknown."""
    repository = (source.get("train_text") or "").lower()
    digests = [file.get("sha256") for file in source.get("files") or []]
    return DATASETS.get(digests[0] if len(digests) == 1 else repository, "")


@dataclass(frozen=True)
class Reference:
    """A curve of eval/references/. `val_loss` is (n, 2): tokens, nats per token. It was measured with `settings`; a run
    with the same settings may differ from it by `noise` nats."""

    name: str
    dataset: str
    source: str
    validation: str
    noise: float
    settings: dict
    val_loss: np.ndarray
    hellaswag_name: str = ""
    hellaswag_llmc_acc_norm: np.ndarray | None = None

    def differences(self, run: Run) -> list[str]:
        """The settings in which the run differs and which change its loss at equal steps, in words."""
        sentences = []
        for key, expected in (UNNAMED | self.settings).items():
            value = run.config.get(key, UNNAMED.get(key))
            is_close = _is_number(value) and _is_number(expected) and _is_close(key, value, expected)
            if not (is_close or value == expected):
                sentences.append(f"{key} {value} (reference: {expected})")
        return sentences


def load_references() -> list[Reference]:
    """The published curves in eval/references/, in the order of their file names."""
    references = []
    for path in sorted(REFERENCES.glob("*.json")):
        content = json.loads(path.read_text())
        values: dict = {field.name: content[field.name] for field in fields(Reference) if field.name in content}
        values |= {name: np.array(value) for name, value in values.items() if isinstance(value, list)}
        references.append(Reference(**values))
    return references


def find_reference(run: Run, references: list[Reference]) -> Reference | None:
    """The reference with the run's data and model, and the fewest differing settings; None if there is none or the run
    starts from other weights (init_from)."""
    shape = ("n_layer", "n_head", "n_embd")
    candidates = [
        reference
        for reference in references
        if run.dataset == reference.dataset and all(run.config.get(key) == reference.settings[key] for key in shape)
    ]
    if not candidates or run.config.get("init_from"):
        return None
    return min(candidates, key=lambda reference: len(reference.differences(run)))
