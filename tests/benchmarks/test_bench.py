"""Everything that is timed does the same work: each variant, ours and the peers', takes the same steps."""

import json
import math
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from benchmarks import __main__ as bench
from benchmarks import gpu_tests, peers, report
from benchmarks.bench_config import Timing
from benchmarks.interleaved import COMPARED, Paired, Void, Worker, agree, compare, prepared
from benchmarks.scoreboard import Row, ladder, scoreboard
from benchmarks.variants import Variant, loss_of, transformers_model
from benchmarks.worker import Rows
from recipe.config import ModelConfig, parse_config
from tests.conftest import ROOT

TINY = Variant(
    "tiny", "recipe", ModelConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32), 32, sequences=4, micro_batch=2
)
QUICK = Timing(rounds=1, seconds=0.05, ends=math.inf)
# What each does differently without doing other work.
SAME = {
    "transformers": {"kind": "hf-loop"},
    "two processes": {"processes": 2},
}
SLOW = {
    "gradient checkpointing": {"gradient_checkpointing": True, "loss_chunk_size": 16, "micro_batch": 1},
    "transformers' Trainer": {"kind": "hf-trainer", "tuned": False},
}


@pytest.fixture(scope="module")
def directory():
    with prepared() as path:
        yield path


@pytest.fixture(scope="module")
def reference(directory):
    worker = Worker(TINY, directory)
    worker.turn(COMPARED)
    yield worker
    worker.close()


@pytest.fixture
def start(directory):
    """Fields that differ from TINY's -> a worker."""
    started = []

    def start(**fields) -> Worker:
        started.append(Worker(replace(TINY, **fields), directory))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


@pytest.mark.parametrize("name", [*SAME, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_variant_takes_the_same_steps(start, reference, name):
    worker = start(name=name, **(SAME | SLOW)[name])
    assert worker.variant.tokens == TINY.tokens
    assert worker.turn(COMPARED - 1) > 0
    assert worker.peak_memory > 10**8
    assert len(worker.losses) == COMPARED
    assert worker.losses[-1] < worker.losses[0] - 0.01  # it learns
    assert agree(worker, reference) < 2e-5


# nanoGPT's interface, with this project's model behind it.
NANOGPT = """
import torch
from dataclasses import dataclass
from transformers import GPT2Config
from recipe.model.gpt2 import GPT2LMHeadModel

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        off = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        self.transformer = GPT2LMHeadModel(GPT2Config(vocab_size=config.vocab_size, n_positions=config.block_size,
            n_layer=config.n_layer, n_head=config.n_head, n_embd=config.n_embd, **off), seed=0).transformer
        for name, module in list(self.named_modules()):
            if type(module).__name__ == "Conv1D":
                self.set_submodule(name, torch.nn.Linear(*module.weight.shape))
    def forward(self, x, y):
        logits = self.transformer(x) @ self.transformer.wte.weight.t()
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        groups = [{"params": [p for p in self.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in self.parameters() if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""


@pytest.mark.slow
def test_nanogpt_takes_the_same_steps(start, reference, tmp_path):
    (tmp_path / "model.py").write_text(NANOGPT)
    worker = start(name="nanoGPT", kind="nanogpt", checkout=str(tmp_path))
    worker.turn(COMPARED - 1)
    # its 47 rows more in the vocabulary stand in the softmax: log(50304 / 50257) = 9e-4
    assert worker.losses[0] - reference.losses[0] == pytest.approx(9.3e-4, abs=2e-4)
    assert agree(worker, reference) < 2e-3


def test_the_rows_of_the_peers_trainer_reach_the_processes_of_its_data_loader():
    """As on a GPU; on a CPU the Trainer reads them itself."""
    rows = Rows(torch.arange(12).view(3, 4))
    loader = DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context="forkserver")
    batches = [batch["input_ids"].tolist() for batch in islice(loader, 2)]
    assert batches == [[[0, 1, 2], [4, 5, 6]], [[8, 9, 10], [0, 1, 2]]]


def test_the_compiled_peer_is_one_graph():
    """transformers' model warns at a loss without a type, and a warning breaks the graph."""
    model = transformers_model(TINY)
    rows = torch.zeros(2, 33, dtype=torch.int64)
    explained = torch._dynamo.explain(loss_of(TINY.but(kind="hf-loop"), model))(rows[:, :-1], rows[:, 1:])
    assert explained.graph_break_count == 0, explained.break_reasons


def test_other_work_and_a_variant_that_fails_are_void(start, reference):
    """A model that is not the same one: its losses differ, and no ratio comes of it."""
    with pytest.raises(Void, match="losses differ"):
        compare(start(name="narrow", model=replace(TINY.model, n_layer=1, n_embd=64)), reference, QUICK)
    with pytest.raises(Void, match=r"exit code 2: error: .*n_head"):
        start(name="wrong", model=replace(TINY.model, n_head=3)).turn(1)
    with pytest.raises(Void, match="nan"):
        agree(SimpleNamespace(variant=TINY, losses=[float("nan")] * COMPARED), reference)


def test_ratios_are_of_neighbors_in_time():
    # the machine slows down to half in the middle: the pairs do not mind, a ratio of all to all would
    found = Paired([(1.0, 2.0), (1.1, 2.2), (2.0, 4.0), (2.2, 4.4), (1.0, 2.6)])
    assert found.ratio == pytest.approx(2.0)
    low, high = found.interval()
    assert low == pytest.approx(2.0)
    assert 2.0 <= high <= 2.6
    assert (found.seconds(0), found.seconds(1)) == (1.1, 2.6)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_row_takes_the_same_steps_with_one_flag_more(on_cpu, monkeypatch):
    monkeypatch.setattr("benchmarks.scoreboard.hardware.resolve_precision", lambda p, cpu: "bf16")
    config = parse_config(["--config", "gpt2", "--torch_compile_mode", "default"])
    ours, arguments = Variant("ours", micro_batch=64), SimpleNamespace(processes=4)
    first, rows = ladder(SimpleNamespace(config=config, on_cpu=on_cpu, ours=ours, arguments=arguments))
    variants, now = [], first
    for row in rows:
        if not row.cannot:
            assert len(row.changes) == (row.name != first.name)
            variants.append(now.but(name=row.name, **row.changes))
            now = variants[-1] if row.kept else now
    assert {v.accumulation * v.micro_batch * v.processes for v in variants} == {4 * 64}
    assert len({row.name for row in rows}) == len(rows)
    last = variants[-1]
    assert (last.kind, last.precision, last.compile, last.processes) == ("recipe", "bf16", "default", 4)
    assert (last.gradient_checkpointing, last.loss_chunk_size, last.fused_loss) == (False, 0, False)


class Stopwatch:
    """A worker that takes no steps: its variant's speed is `loss_chunk_size`, in tokens a second."""

    def __init__(self, variant, directory):
        self.variant, self.peak_memory = variant, 10**9

    def rate(self, timing) -> float:
        if self.variant.checkout:
            raise Void("it failed")
        return self.variant.loss_chunk_size or 1.0

    def over(self, other, timing) -> Paired:
        return Paired([(1 / self.rate(timing), 1 / other.rate(timing))])

    def close(self) -> None:
        pass


@pytest.fixture
def stopwatch(monkeypatch):
    for module in ("scoreboard", "peers"):
        monkeypatch.setattr(f"benchmarks.{module}.Worker", Stopwatch)
        monkeypatch.setattr(f"benchmarks.{module}.compare", Stopwatch.over)
    monkeypatch.setattr("benchmarks.scoreboard.rate_of", Stopwatch.rate)


def test_the_scoreboard_builds_on_what_is_kept(stopwatch, tmp_path):
    """A row that cannot be run, one that fails and one that is not kept do not end the table, nor change its base."""

    rows = [
        Row("first", {"loss_chunk_size": 100}),
        Row("cannot", cannot="not here"),
        Row("fails", {"checkout": "none"}),
        Row("aside", {"loss_chunk_size": 50}, kept=False),
        Row("kept", {"loss_chunk_size": 200}),
        Row("last", {"loss_chunk_size": 300}),
    ]
    results = scoreboard(TINY, rows, tmp_path, QUICK)
    assert [r["tokens_per_second"] for r in results] == [100, None, None, 50, 200, 300]
    assert [r["kept"] for r in results] == [True, False, False, False, True, True]
    assert [r["total"] for r in results] == [1, None, None, 0.5, 2, 3]  # over the first row
    assert [r["speedup"] and r["speedup"][0] for r in results] == [None, None, None, 0.5, 2, 1.5]  # over the last kept
    assert [r["void"] for r in results[1:3]] == ["not here", "it failed"]
    assert scoreboard(TINY, rows[:1], tmp_path, Timing(1, 0.05, ends=0.0))[0]["void"] == "skipped: the time is up"


@pytest.fixture
def command(tmp_path):
    """words -> the exit code of `python -m benchmarks` for a tiny recipe."""
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(
        "dataset_name: data/none\nn_layer: 1\nn_head: 2\nn_embd: 32\nn_positions: 32\nsequence_length: 32\n"
        "total_batch_tokens: 256\nmicro_batch_size: 4\n"
    )
    options = ["--quick", "--config", recipe, "--precision", "fp32", "--out", tmp_path / "out"]
    return lambda *words: bench.main([str(word) for word in (words[0], *options, *words[1:])])


def check_results(out, printed: str) -> None:
    board = json.loads((out / "scoreboard.json").read_text())
    rows = {r["name"]: r for r in board["rows"]}
    assert board["model"]["recipe"] == "tiny"
    assert rows["fp32"]["tokens_per_second"] > 0
    assert rows["fp32"]["mfu"] > 0
    assert rows["gradient checkpointing"]["void"] == "skipped by --quick"
    assert all(name in printed for name in rows)
    found = json.loads((out / "peers.json").read_text())["rows"]
    assert {r["environment"] for r in found} == {"as shipped", "our allocator"}
    assert all(r["ratio"] > 0 and r["losses_apart"] < 1e-3 for r in found)
    assert all((out / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("scoreboard", "peers"))


@pytest.mark.parametrize("timed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_commands_write_tables_json_and_charts(timed, request, command, tmp_path, monkeypatch, capsys):
    """`timed` without what compiles, which takes most of the time."""
    if not timed:
        request.getfixturevalue("stopwatch")
    contenders, whole = peers.contenders, bench.ladder
    monkeypatch.setattr(bench, "ladder", lambda c: (whole(c)[0], [r for r in whole(c)[1] if r.name != "compile"]))
    monkeypatch.setattr(peers, "contenders", lambda *a: [v for v in contenders(*a) if not v.compile])
    assert command("scoreboard") == command("peers") == 0
    check_results(tmp_path / "out", capsys.readouterr().out)


def test_mistakes_of_the_command_are_named(tmp_path, capsys):
    assert bench.main(["peers", "--nanogpt", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "no model.py there" in capsys.readouterr().err
    assert bench.main(["scoreboard", "--config", "none-such", "--out", str(tmp_path)]) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_gpu_tests_go_on_where_they_were(tmp_path, monkeypatch):
    """Within their minutes, and none that has passed runs again."""
    (tmp_path / "tests/engine").mkdir(parents=True)
    (tmp_path / "tests/engine/test_gpu.py").write_text(
        f"from pathlib import Path\nhere = Path({str(tmp_path)!r})\n"
        "def test_once():\n    (here / 'once').mkdir()\n"
        "def test_mended():\n    assert (here / 'mended').exists()\n"
    )
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)

    def outcomes(*words) -> dict[str, str]:
        gpu_tests.main(["--out", str(tmp_path), *words])
        return {r["name"]: r["outcome"] for r in json.loads((tmp_path / "gpu_tests.json").read_text())["rows"]}

    assert outcomes("--minutes", "0") == {"test_once": "passed"}
    assert outcomes() == {"test_once": "passed", "test_mended": "failed"}
    (tmp_path / "mended").touch()
    assert outcomes() == {"test_once": "passed", "test_mended": "passed"}


def test_results_of_several_commands_become_one(tmp_path, capsys):
    about = json.loads((ROOT / "docs/results/cpu-peers.json").read_text())
    row = {"environment": "", "low": 1.0, "high": 1.2, "void": ""}
    void = row | {"ratio": None, "void": "skipped: the time is up"}
    for name, rows in {
        "a": [row | {"name": "one", "ratio": 1.1}, void | {"name": "two"}],
        "b": [void | {"name": "one"}, row | {"name": "two", "ratio": 1.2}],
    }.items():
        report.write(about | {"rows": rows}, tmp_path / name / "peers.json")
    report.write(about | {"device": "another"}, tmp_path / "c" / "peers.json")
    words = ["merge", f"--out={tmp_path}", *(f"{tmp_path}/{name}/peers.json" for name in "abc")]
    assert bench.main(words[:-1]) == 0
    found = json.loads((tmp_path / "gpu-peers.json").read_text())
    assert {r["name"]: r["ratio"] for r in found["rows"]} == {"one": 1.1, "two": 1.2}
    assert (tmp_path / "gpu-peers.png").read_bytes().startswith(b"\x89PNG")
    assert bench.main(words) == 2
    assert "differ in device" in capsys.readouterr().err
