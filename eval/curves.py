"""Runs as curves: what a run directory says, and the reference curves that ship."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from eval.common import STEP_DIR, UserError
from eval.known_data import dataset_of

REFERENCES = Path(__file__).resolve().parent / "references"
HELLASWAG_ROWS = 10_042
# (layers, width) of OpenAI's four models, and what they are called for short.
SIZES = {(12, 768): "124M", (24, 1024): "350M", (36, 1280): "774M", (48, 1600): "1558M"}
# Settings within 5 % of each other count as equal: 19,073 and 19,560 steps, or a warm-up of 700 and 715, differ by less
# than the noise does.
NEAR = 0.05


@dataclass(frozen=True)
class Run:
    """A run directory, read.

    Attributes:
        records: the lines of metrics.jsonl, one a step, in order; null and whatever is no number are NaN.
        config: the newest checkpoint's configuration, flat; empty before the first checkpoint.
        engine: what it ran on, in words; empty if unknown.
        results: step -> results.json of that checkpoint.
        damaged: lines that were no JSON object with a step.
        about: the newest checkpoint's, of the parts of the run; empty in one that has none.
    """

    name: str
    directory: Path
    records: list[dict]
    config: dict = field(default_factory=dict)
    engine: str = ""
    results: dict[int, dict] = field(default_factory=dict)
    damaged: int = 0
    about: list = field(default_factory=list)

    def column(self, name: str) -> np.ndarray:
        """One value a record, (N,), float64, NaN where there is none."""
        return np.array([_number(record.get(name)) for record in self.records])

    def series(self, name: str, x: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of the records that have both, (n,) each."""
        xs, ys = self.column(x), self.column(name)
        there = np.isfinite(xs) & np.isfinite(ys)
        return xs[there], ys[there]

    def last(self, name: str) -> float:
        """The last value that there is, or NaN."""
        values = self.series(name, "step")[1]
        return float(values[-1]) if len(values) else math.nan

    @property
    def tokens(self) -> float:
        return float(np.nanmax([0.0, *self.column("tokens")]))

    @property
    def batch_tokens(self) -> float:
        """Tokens a step, of the log itself; NaN if it has no step but 0."""
        pairs = [(r["step"], _number(r.get("tokens"))) for r in self.records if r["step"] > 0]
        return pairs[-1][1] / pairs[-1][0] if pairs else math.nan

    @property
    def dataset(self) -> str:
        return dataset_of(self.config, self.about)

    @property
    def size(self) -> str:
        """124M, 350M, 774M, 1558M; empty for other shapes."""
        return SIZES.get((self.config.get("n_layer"), self.config.get("n_embd")), "")

    @property
    def parameters(self) -> int | None:
        """GPT-2's count, the head tied to the embedding: V d + P d + L (12 d^2 + 13 d) + 2 d."""
        try:
            layers, d, positions = (int(self.config[k]) for k in ("n_layer", "n_embd", "n_positions"))
        except (KeyError, TypeError, ValueError):
            return None
        return 50257 * d + positions * d + layers * (12 * d * d + 13 * d) + 2 * d

    @cached_property
    def hellaswag(self) -> dict[str, list[tuple[float, float, int]]]:
        """Way -> (tokens, acc_norm, rows) of evaluations during training and of results.json, in order of tokens."""
        limit = _number(self.config.get("hellaswag_limit"))
        rows = int(limit) if limit > 0 else HELLASWAG_ROWS
        points: dict[str, dict[float, tuple[float, int]]] = {"A": {}, "B": {}}
        for way, at in points.items():
            for tokens, value in zip(*self.series(f"hellaswag_{way}_acc_norm"), strict=True):
                at[float(tokens)] = (float(value), rows)
            for step, results in self.results.items():
                result = results.get("hellaswag")
                scores = result.get(way) if isinstance(result, dict) else None
                value = _number(scores.get("acc_norm")) if isinstance(scores, dict) else math.nan
                n = _number(result.get("rows")) if isinstance(result, dict) else math.nan
                tokens = step * self.batch_tokens
                # The same step both ways: the one on more rows.
                if math.isfinite(value + n + tokens) and n >= max(1, at.get(tokens, (0, 0))[1]):
                    at[tokens] = (value, int(n))
        return {way: [(t, *at[t]) for t in sorted(at)] for way, at in points.items()}


def read_run(path: str | Path) -> Run:
    """The run in a directory, or of a checkpoint in it. Raises UserError where there is none, or not a line of it."""
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
        with suppress(ValueError):  # of a run that was killed while it wrote, or of one that is writing now
            record = json.loads(line)
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            damaged += bool(line.strip())
            continue
        while records and records[-1]["step"] >= step:  # a resumed run writes these again
            records.pop()
        records.append(record)
    if not records:
        raise UserError(f"run {path}: not a whole line in metrics.jsonl yet. Wait for the first step that is logged")
    config, engine, about, results = {}, "", [], {}
    steps = [path for path in directory.glob("step_*") if STEP_DIR.fullmatch(path.name)]
    for checkpoint in sorted(steps, key=lambda path: int(STEP_DIR.fullmatch(path.name).group(1))):
        state = _read_object(checkpoint / "trainer_state.json")
        if isinstance(state.get("config"), dict):
            config = {k: v for k, v in state["config"].items() if isinstance(v, (str, int, float, type(None)))}
            engine = str(state.get("engine") or "")
            about = state["about"] if isinstance(state.get("about"), list) else []
        if found := _read_object(checkpoint / "results.json"):
            results[int(STEP_DIR.fullmatch(checkpoint.name).group(1))] = found
    return Run(directory.resolve().name, directory, records, config, engine, results, damaged, about)


def read_runs(paths: list[str]) -> list[Run]:
    """The runs, with names that tell them apart."""
    runs = [read_run(path) for path in paths]
    names = [run.name for run in runs]
    taken = {name for name in names if names.count(name) == 1}
    for i, run in enumerate(runs):
        if names.count(names[i]) > 1:
            parent = run.directory.resolve().parent.name
            plain = name = f"{parent}/{run.name}" if parent else run.name
            count = 1
            while name in taken:
                count += 1
                name = f"{plain} ({count})"
            taken.add(name)
            runs[i] = replace(run, name=name)
    return runs


def newest_run(runs: Path = Path("runs")) -> Path:
    """The run under `runs` whose metrics.jsonl was written last. Raises UserError if there is none."""
    logs = list(runs.glob("*/metrics.jsonl"))
    if not logs:
        raise UserError(f"no run given and none under {runs}/: run `make train`, or name one: RUN=directory")
    return max(logs, key=lambda log: log.stat().st_mtime).parent


def smooth(y: np.ndarray, width: int) -> np.ndarray:
    """Mean over up to `width` neighbours, (N,) -> (N,): over fewer at the beginning, where a loss falls steeply, and at
    the end over those that there are."""
    at = np.arange(len(y))
    half = np.minimum(at // 8, width // 2)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    low, high = at - half, np.minimum(at + half, len(y) - 1) + 1
    return (sums[high] - sums[low]) / (high - low)


def smoothing_width(n: int) -> int:
    """Points that `smooth` takes for a curve of n: a fortieth, odd."""
    return 2 * (n // 80) + 1


@dataclass(frozen=True)
class Reference:
    """A curve to compare with, of eval/references/: points are (tokens, nats a token), settings those it holds for.

    A point of `loss` is as a line of a log: the mean over the steps since the point before it, or since the first step.
    """

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
    loss: np.ndarray
    loss_noise: float = 0.1
    hellaswag_A_acc_norm: np.ndarray | None = None


def load_references(directory: Path = REFERENCES) -> list[Reference]:
    references = []
    for path in sorted(directory.glob("*.json")):
        fields = json.loads(path.read_text())
        for name in ("val_loss", "loss", "hellaswag_A_acc_norm"):
            if name in fields:
                fields[name] = np.array(fields[name], dtype=float).reshape(-1, 2)
        references.append(Reference(**fields))
    return references


def find_reference(run: Run, references: list[Reference]) -> tuple[Reference | None, list[str]]:
    """(the reference for a run's data and model or None, what else differs in words).

    Before the first checkpoint the settings are not known: the recipe is taken that the run is called after, if the
    batch is that one's.
    """
    shape = ("n_layer", "n_head", "n_embd")
    for reference in references:
        expected = reference.settings
        if not run.config:
            if run.name in reference.presets and run.batch_tokens == expected["total_batch_tokens"]:
                return reference, ["it has no checkpoint yet, so its settings are not known"]
            continue
        if run.dataset != reference.dataset or any(run.config.get(k) != expected[k] for k in shape):
            continue
        differing = [k for k in expected if k not in shape and not _near(run.config.get(k), expected[k])]
        return reference, [f"{k} {_plain(run.config.get(k))}, there {_plain(expected[k])}" for k in differing]
    return None, []


def _number(value: object) -> float:
    """NaN for what is no number, or so large that it was not measured: a picture has no room for 1e300."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30
    return float(value) if ok else math.nan


def _near(a: object, b: object) -> bool:
    x, y = _number(a), _number(b)
    return a == b or abs(x - y) <= NEAR * max(abs(x), abs(y))


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else "not known" if value is None else f"{value}"


def _read_object(path: Path) -> dict:
    """A JSON object of a file; empty if there is none."""
    with suppress(OSError, ValueError):
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else {}
    return {}
