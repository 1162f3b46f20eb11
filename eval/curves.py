"""What the report draws: training runs, read from their directories, and the reference curves that ship."""

import json
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from eval.common import STEP_DIR, UserError

REFERENCES = Path(__file__).resolve().parent / "references"
HELLASWAG_ROWS = 10_042
# (layers, width) of OpenAI's four models.
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
# Settings within 5 % of each other count as equal: 19,073 and 19,560 steps differ by less than the noise does.
NEAR = 0.05

# Known data sets: their repositories on the Hub, and what a directory or shards of them are called. The repositories
# are those of recipe/catalog.py, and copies in GPT-2's tokens from KellerJordan/modded-nanogpt
# (data/cached_*.py) and karpathy/llm.c. Anything else is another data set, whatever its name.
DATASETS = {
    "FineWeb-Edu": (
        ("huggingfacefw/fineweb-edu", "kjj0/finewebedu10b-gpt2", "karpathy/fineweb-edu-100b-gpt2-token-shards"),
        "(?:fineweb[-_]?edu|edu[-_]?fineweb)",
    ),
    "FineWeb": (("huggingfacefw/fineweb", "kjj0/fineweb10b-gpt2", "kjj0/fineweb100b-gpt2"), "fineweb"),
    "OpenWebText": (("skylion007/openwebtext",), "openwebtext"),
    "TinyStories": (("roneneldan/tinystories",), "tinystories"),
    "tiny Shakespeare": ((), "(?!)"),  # known by the text's checksum alone: copies hold out other parts of it
}
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        records: the lines of metrics.jsonl in order of their steps, one a step.
        config: the newest checkpoint's configuration, flat; empty before the first checkpoint.
        engine: what it ran on, in words; empty if unknown.
        results: step -> results.json of that checkpoint.
        damaged: number of lines that are no JSON object with a step.
        dataset: which of DATASETS it trains and validates on; empty for any other.
    """

    name: str
    directory: Path
    records: list[dict]
    config: dict = field(default_factory=dict)
    engine: str = ""
    results: dict[int, dict] = field(default_factory=dict)
    damaged: int = 0
    dataset: str = ""

    def series(self, name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """(x, y), float64 (n,) each, of the records that have both as numbers."""
        columns = np.array([[number(record.get(key)) for key in (x, name)] for record in self.records]).reshape(-1, 2)
        return tuple(columns[np.isfinite(columns).all(1)].T)

    def last(self, name: str) -> float:
        """The last value of a column, or NaN."""
        return float([math.nan, *self.series(name, "step")[1]][-1])

    @property
    def tokens(self) -> float:
        return max([0.0, *self.series("tokens", "step")[1]])

    @property
    def batch_tokens(self) -> float:
        """Tokens a step, according to the log; NaN if it has no step but 0."""
        steps, tokens = self.series("tokens", "step")
        return float(tokens[-1] / steps[-1]) if len(steps) and steps[-1] else math.nan

    @property
    def size(self) -> str:
        """124M, 350M, 774M, 1558M; empty for other shapes."""
        return SIZES.get((number(self.config.get("n_layer")), number(self.config.get("n_embd"))), "")

    @property
    def parameters(self) -> float:
        """GPT-2's count, with the head tied to the embedding: V d + P d + L (12 d^2 + 13 d) + 2 d; NaN if unknown."""
        layers, d, positions = (number(self.config.get(key)) for key in ("n_layer", "n_embd", "n_positions"))
        return 50257 * d + positions * d + layers * (12 * d * d + 13 * d) + 2 * d

    @cached_property
    def hellaswag(self) -> dict[str, list[tuple[float, float, int]]]:
        """Way -> (tokens, acc_norm, rows), in order of tokens: of evaluations during training and of results.json, the
        one on more rows where a step has both."""
        limit = number(self.config.get("hellaswag_limit"))
        rows = int(limit) if limit > 0 else HELLASWAG_ROWS
        found = {}
        for way in ("A", "B"):
            points = {t: (y, rows) for t, y in zip(*self.series(f"hellaswag_{way}_acc_norm"), strict=True)}
            for step, results in self.results.items():
                score, n = number(_at(results, "hellaswag", way, "acc_norm")), number(_at(results, "hellaswag", "rows"))
                tokens = step * self.batch_tokens
                if math.isfinite(score + tokens) and n >= points.get(tokens, (0, 1))[1]:
                    points[tokens] = (score, int(n))
            found[way] = [(float(t), float(y), n) for t, (y, n) in sorted(points.items())]
        return found


def read_run(path: str | Path) -> Run:
    """The run in a directory, or of a checkpoint in it. Raises UserError if there is none, or no line of it yet."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        raise UserError(f"run {path}: no such directory. Name a run directory, such as runs/shakespeare")
    if STEP_DIR.fullmatch(directory.name) and not (directory / "metrics.jsonl").is_file():
        directory = directory.parent
    log = directory / "metrics.jsonl"
    if not log.is_file():
        raise UserError(f"run {path}: no metrics.jsonl in it. Name a directory that recipe/train.py has written")
    records, damaged = [], 0
    for line in log.read_text(errors="replace").splitlines():
        record = None
        with suppress(ValueError):  # the last line of a run that was killed, or that is writing now
            record = json.loads(line)
        step = number(_at(record, "step"))
        while records and records[-1]["step"] >= step:  # a resumed run repeats steps
            records.pop()
        if step >= 0:
            records.append(record)
        else:
            damaged += bool(line.strip())
    if not records:
        raise UserError(f"run {path}: metrics.jsonl has no complete line yet. Wait for the first logged step")
    state, results = {}, {}
    steps = [path for path in directory.glob("step_*") if STEP_DIR.fullmatch(path.name)]
    for checkpoint in sorted(steps, key=lambda path: int(STEP_DIR.fullmatch(path.name).group(1))):
        state = _read_object(checkpoint / "trainer_state.json") or state
        if found := _read_object(checkpoint / "results.json"):
            results[int(STEP_DIR.fullmatch(checkpoint.name).group(1))] = found
    config = state.get("config") if isinstance(state.get("config"), dict) else {}
    engine, dataset = str(state.get("engine") or ""), dataset_of(config, state.get("about"))
    return Run(directory.resolve().name, directory, records, config, engine, results, damaged, dataset)


def read_runs(paths: list[str]) -> list[Run]:
    """The runs; where two have one name, all are called by as much of their paths as distinguishes them."""
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name="/".join(run.directory.resolve().parts[-2:])) for run in runs]
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{run.name} ({i})") for i, run in enumerate(runs, 1)]
    return runs


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run under `runs` whose metrics.jsonl was written last. Raises UserError if there is none."""
    logs = list(runs.glob("*/metrics.jsonl"))
    if not logs:
        raise UserError(f"no run given and none under {runs}/: run `make train`, or name one: RUN=directory")
    return max(logs, key=lambda log: log.stat().st_mtime).parent


def dataset_of(config: dict, about: object) -> str:
    """Which of DATASETS a run trains and validates on; empty for any other.

    `about` is trainer_state.json's: for each part of the run, the text that the shards were made from, according to
    their manifest. Shards without a manifest of ours are known by their name only.
    """
    parts = [part.get("data") for part in about if isinstance(part, dict)] if isinstance(about, list) else []
    names = {
        _of_manifest(part if isinstance(part, dict) else {}, str(config.get("dataset_name") or "")) for part in parts
    }
    name = names.pop() if len(names) == 1 else ""
    return name if not config.get("val_data") or _of_path(str(config["val_data"])) == name else ""


def _of_manifest(manifest: dict, path: str) -> str:
    if hub := manifest.get("train_text") or manifest.get("uri"):
        return _of_hub(str(hub))
    if files := manifest.get("files"):
        return "tiny Shakespeare" if [_at(file, "sha256") for file in files] == [SHAKESPEARE_SHA256] else ""
    return _of_path(path)


def _of_hub(name: str) -> str:
    """ORG/NAME or hf://datasets/ORG/NAME[@REVISION]/PATTERN."""
    repository = "/".join(name.removeprefix("hf://datasets/").split("/")[:2]).split("@")[0].lower()
    return next((name for name, (repositories, _) in DATASETS.items() if repository in repositories), "")


def _of_path(path: str) -> str:
    """A directory or a glob of shards, known by the last part of its path as a whole."""
    if "://" in path:
        return _of_hub(path)
    last = re.sub(r"_(?:train|val)(?:_[^/]*)?\.bin$", "", Path(path).name)
    size = r"(?:[-_]?(?:sample[-_])?\d+BT?)?(?:-gpt2)?"  # fineweb10B, fineweb-sample-10BT, fineweb10B-gpt2
    return next((n for n, (_, sign) in DATASETS.items() if re.fullmatch(sign + size, last, re.IGNORECASE)), "")


@dataclass(frozen=True)
class Reference:
    """A curve of eval/references/. `val_loss` is (n, 2): tokens, nats a token; `settings` are those it holds for, and
    `noise` is by how many nats a run with the same settings may differ from it."""

    name: str
    presets: list[str]
    dataset: str
    source: str
    made: str
    validation: str
    noise: float
    noise_reason: str
    settings: dict
    val_loss: np.ndarray
    hellaswag_A_acc_norm: np.ndarray | None = None

    def differences(self, run: Run) -> list[str]:
        """Settings of the run that make its loss another one at equal steps, in words."""
        unlike = [k for k, value in self.settings.items() if run.config and not _near(run.config.get(k), value)]
        return [f"{key} {_plain(run.config.get(key))}, there {_plain(self.settings[key])}" for key in unlike]


def load_references(directory: Path = REFERENCES) -> list[Reference]:
    references = []
    for path in sorted(directory.glob("*.json")):
        fields = json.loads(path.read_text())
        curves = {k: np.array(fields[k], dtype=float) for k in ("val_loss", "hellaswag_A_acc_norm") if k in fields}
        references.append(Reference(**fields | curves))
    return references


def find_reference(run: Run, references: list[Reference]) -> Reference | None:
    """The reference for a run's data and model, if one ships; other settings may still differ.

    A run that starts from other weights has none. Before the first checkpoint the settings are not known: a run with
    a recipe's name and batch is taken for that recipe's.
    """
    for reference in references:
        expected = reference.settings
        if not run.config:
            same = run.name in reference.presets and run.batch_tokens == expected["total_batch_tokens"]
        else:
            shape = all(run.config.get(key) == expected[key] for key in ("n_layer", "n_head", "n_embd"))
            same = shape and run.dataset == reference.dataset and not run.config.get("init_from")
        if same:
            return reference
    return None


def number(value: object) -> float:
    """A JSON value as a float; NaN for what is no number, or too large to be a measurement."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    return float(value) if ok else math.nan


def _at(value: object, *keys: str) -> object:
    """value[key][key]..., or None where a key is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _near(a: object, b: object) -> bool:
    x, y = number(a), number(b)
    return a == b or abs(x - y) <= NEAR * max(abs(x), abs(y))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "not known" if value is None else str(value)


def _read_object(path: Path) -> dict:
    """A JSON object from a file; empty if there is none."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else {}
    return {}
