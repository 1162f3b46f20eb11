"""Peers do the same work as recipe/train.py, which the scoreboard times as a user starts it."""

import json
import subprocess
import time

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import peers, runs, scoreboard
from benchmarks.peer import transformers_model
from benchmarks.runs import Run, Void, speeds_in_turns, trainer
from recipe.config import parse_config
from tests import processes as programs

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "sequence_length": 32}
SIZES |= {"micro_batch_size": 4, "total_batch_tokens": 128}
FIELDS = SIZES | {"config": "shakespeare", "precision": "fp32"}


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    monkeypatch.setattr(runs, "subprocess", programs.forking)


@pytest.fixture(scope="module")
def directory():
    with runs.shards() as path:
        yield path


@pytest.fixture
def start(directory):
    """Starts a program (default: recipe/train.py) with these fields changed; it is killed after the test."""
    started_runs = []

    def start(*program, **overrides) -> Run:
        started_runs.append(Run(list(program) or trainer(), FIELDS | overrides, directory))
        return started_runs[-1]

    yield start
    for run in started_runs:
        run.close()


@pytest.mark.parametrize("kind", ["transformers", pytest.param("trainer", marks=pytest.mark.slow)])
def test_every_peer_takes_the_same_steps(kind, start):
    """With losses read every ten steps, as on a GPU. nanoGPT's model is checked wherever it is compared."""
    trainer_run, peer = start(logging_steps=10), start("-m", "benchmarks.peer", kind, logging_steps=10)
    result = peers.compare(trainer_run, peer, rounds=1, seconds=0.05, tolerance=0.01)
    assert result["losses_apart"] < 2e-5
    assert 0 < result["low"] <= result["ratio"] <= result["high"]
    assert min(result["peak_memory_bytes"]) > 10**8
    for run in (trainer_run, peer):
        assert [line["step"] for line in run.lines[:3]] == [1, 10, 20]
    assert trainer_run.lines[2]["loss"] < trainer_run.lines[0]["loss"] - 0.01  # it learns
    first_step, start_time = peer.lines[-1]["step"], time.monotonic()
    rate = peer.turn(1.0)
    steps, seconds = peer.lines[-1]["step"] - first_step, time.monotonic() - start_time
    assert 1 / 3 < rate * seconds / (steps * FIELDS["total_batch_tokens"]) < 3, "tokens per second of ten steps"


def test_a_peer_with_other_losses_and_a_run_that_fails_are_void(start):
    with pytest.raises(Void, match="losses differ"):
        peers.compare(start(), start(n_layer=1, n_embd=64), 1, 0.05, tolerance=0.01)
    with pytest.raises(Void, match="n_head"):
        start(n_head=3).turn(0)
    diverging = start("-m", "benchmarks.peer", "transformers", learning_rate=1e30)
    with pytest.raises(Void, match="losses differ by nan"):  # although the first losses agree
        peers.compare(start(), diverging, 1, 0.05, tolerance=0.01)


def test_a_program_takes_no_steps_between_its_turns(start):
    run = start()
    run.turn(0.1, min_steps=3)
    n_lines = len(run.lines)
    time.sleep(3)
    run.turn(0.1)
    assert run.lines[n_lines + 1]["tokens_per_second"] > 128 / 3  # the step did not take the three seconds of the pause
    with pytest.raises(Void, match=r"too slow: at step \d+ after 1 s"):  # peers.py compares the losses of 20 steps
        run.turn(0, min_steps=10**6, timeout=1)
    assert [line["step"] for line in run.lines] == list(range(1, len(run.lines) + 1))


def test_the_compiled_peer_is_one_graph():
    """transformers' model warns at a loss without a type, and a warning breaks the graph."""
    _, loss = transformers_model(parse_config([f"--{name}={value}" for name, value in (runs.FIELDS | FIELDS).items()]))
    windows = torch.zeros(2, 33, dtype=torch.int64)
    explained = torch._dynamo.explain(loss)(windows[:, :-1], windows[:, 1:])
    assert explained.graph_break_count == 0, explained.break_reasons


def test_ratios_are_of_neighbors_in_time():
    # The machine's speed halves midway, which changes a ratio of means but not the ratios of pairs.
    clock = iter([2.0, 1.0, 1.1, 2.2, 1.0, 0.5, 0.5, 1.3])
    speeds = speeds_in_turns(lambda: next(clock), lambda: next(clock), rounds=2)
    rates = speeds.pop("tokens_per_second")
    assert rates == {"ours": [2.0, 2.2, 1.0, 1.3], "peer": [1.0, 1.1, 0.5, 0.5]}  # A B B A
    assert speeds == pytest.approx({"ratio": 2.0, "low": 2.0, "high": 2.6})


SEEN: list[dict] = []  # the fields of each run, and the optimizations that its program omits


class Stopwatch:
    """In place of Run: takes no steps, and its speed follows from its fields."""

    def __init__(self, program, fields, directory, processes):
        SEEN.append(fields | {"without": program[2] if program[1:2] == ["benchmarks.plain"] else ""})
        self.lines = [{"peak_memory_bytes": 10**9}]
        self._fields, self._processes = fields, processes

    def turn(self, seconds, timeout) -> float:
        if self._fields["precision"] == "tf32":
            raise Void("not here")
        rate = 100 * (2 if self._fields["precision"] == "auto" else 1) * (1.5 if self._fields["torch_compile"] else 1)
        return rate * self._processes * (0.5 if self._fields["gradient_checkpointing"] else 1)

    def close(self) -> None:
        pass


def test_each_row_of_the_scoreboard_builds_on_the_rows_kept_so_far(tmp_path, monkeypatch, capsys):
    """A row that cannot run, or is not kept, neither ends the table nor changes what later rows build on."""
    monkeypatch.setattr(scoreboard, "Run", Stopwatch)
    SEEN.clear()
    arguments = ["--sequences=4", "--sweep=micro_batch_size", "--processes", "2", f"--out={tmp_path}"]
    assert scoreboard.main(arguments) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "scoreboard.json").read_text())["rows"]}
    assert (rows["tf32"]["tokens_per_second"], rows["tf32"]["source"]) == (None, "not here")
    assert rows["compile"]["gain"] == 3
    assert "padded vocabulary" not in rows  # a CPU does not pad it
    assert rows["(gradient checkpointing)"]["gain"] == 1.5
    assert {"micro_batch_size 1", "micro_batch_size 2", "micro_batch_size 4"} <= rows.keys()
    assert rows["2 processes"]["tokens_per_second"] == 600
    assert {fields["total_batch_tokens"] for fields in SEEN[:-1]} == {4 * 128}  # all rows take the same steps
    assert SEEN[-1]["total_batch_tokens"] == 8 * 128
    assert not SEEN[-1]["gradient_checkpointing"]
    omitted = ["attention,vocabulary,adamw"] * 3 + ["vocabulary,adamw"] * 2 + [""] * 2
    assert [fields["without"] for fields in SEEN[:7]] == omitted
    assert scoreboard.main(["--minutes=0", f"--out={tmp_path}"]) == 0
    assert "time is up" in capsys.readouterr().out
    note = "of the half-precision peak, on a CPU of the speed of a matrix product."
    assert note in (tmp_path / "scoreboard.md").read_text()


def test_several_machines_make_one_table_with_gains_over_the_first_row_of_each(tmp_path):
    """Published rows have theirs too: those of the scaling journal go from 1.0 to 4,723."""

    def write(machine: str, rows: dict[str, tuple[str, float | None]]) -> str:
        table_rows = [
            dict.fromkeys(scoreboard.COLUMNS)
            | {"machine": machine, "name": name, "size": size, "tokens_per_second": rate, "source": "measured"}
            for name, (size, rate) in rows.items()
        ]
        (tmp_path / f"{machine}.json").write_text(json.dumps({"rows": table_rows}))
        return str(tmp_path / f"{machine}.json")

    files = [
        write("laptop", {"tf32": ("124M", None), "fp32": ("124M", 500), "gpt2-xl": ("1558M", 40)}),
        write("server", {"fp32": ("124M", 100_000)}),
    ]
    assert bench.main(["scoreboard", "--merge", *files, "--out", str(tmp_path)]) == 0
    lines = [line for line in (tmp_path / "scoreboard.md").read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    assert len({len(row) for row in cells}) == 1
    gains = {(row[1], row[2]): row[5] for row in cells}
    assert [gains["laptop", name] for name in ("tf32", "fp32", "gpt2-xl")] == ["", "1.00", ""]
    assert gains["server", "fp32"] == "200.00"
    assert gains["1 x M3", "fp32, on the CPU"] == "1.00"
    assert gains["8 x H100", "DDP, sharded moments; 59.5 min"] == "4,723.11"
    assert gains["8 x TPU V3", "PyTorch/XLA, bf16"] == "32.84"


def test_without_optimizations_the_trainer_takes_the_same_steps(start):
    """The scoreboard's first rows omit those that a recipe has no fields for."""
    trainer_run, plain = start(), start("-m", "benchmarks.plain", "attention,adamw,vocabulary")
    assert peers.compare(trainer_run, plain, rounds=1, seconds=0.05, tolerance=0.01)["losses_apart"] < 2e-5


@pytest.fixture
def tiny(tmp_path) -> str:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("".join(f"{name}: {value}\n" for name, value in SIZES.items()) + "dataset_name: data/none\n")
    return str(recipe)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_scoreboard_times_the_trainer(processes, tiny, tmp_path, monkeypatch, capsys):
    """`make scoreboard` without the rows that compile; two processes are started by `accelerate launch`."""
    if processes > 1:
        monkeypatch.setattr(runs, "subprocess", subprocess)
    all_rows = scoreboard.rows_of
    names = {1: ("fp32", "tf32", "micro-batch 4"), 2: ("fp32", "2 processes")}[processes]
    monkeypatch.setattr(scoreboard, "rows_of", lambda *a: [row for row in all_rows(*a) if row.name in names])
    arguments = ["--config", tiny, "--sequences", "4", "--seconds", "0.2", "--processes", "2", "--out", str(tmp_path)]
    assert bench.main(["scoreboard", *arguments]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "scoreboard.json").read_text())["rows"]}
    assert rows["fp32"]["tokens_per_second"] > 0
    assert rows["fp32"]["gain"] == 1
    assert 0 < rows["fp32"]["mfu"] < 1
    assert rows["fp32"]["memory_gb"] > 0.1
    if processes == 1:
        assert "tf32 is not supported" in rows["tf32"]["source"]  # the trainer's own message
        assert rows["micro-batch 4"]["gain"] > 0
    else:
        assert rows["2 processes"]["tokens_per_second"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names)


def test_the_comparison_writes_a_table_and_json(tiny, tmp_path, capsys):
    name = "bare loop, fp32, our"
    arguments = ["--config", tiny, "--micro_batch_size=2", "--precision=fp32", "--rounds=1", "--seconds=0.05"]
    assert bench.main(["peers", *arguments, f"--only={name}", f"--out={tmp_path}"]) == 0
    (row,) = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert row["ratio"] > 0
    assert name in capsys.readouterr().out


def test_a_wrong_path_is_named(tmp_path, capsys):
    assert bench.main(["peers", "--nanogpt", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no model.py there" in capsys.readouterr().err
    assert bench.main(["scoreboard", "--config", "none-such", "--out", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err
