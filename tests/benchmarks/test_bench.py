"""What is timed does the same work: every variant, ours and the peers', takes the same steps."""

import json
from dataclasses import replace
from functools import partial, update_wrapper
from types import SimpleNamespace

import matplotlib.image
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import peers, profile, report, scaling
from benchmarks.bench_config import Timing
from benchmarks.interleaved import COMPARED, Paired, Void, Worker, agree, compare, prepared
from benchmarks.scoreboard import Row, add_mfu, applied, ladder, lines, scoreboard
from benchmarks.variants import Variant
from recipe.config import ModelConfig, parse_config
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token, parameter_count
from tests.conftest import ROOT

TINY = Variant(
    "tiny", "loop", ModelConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32), 32, micro_batch=2, accumulation=2
)
QUICK = Timing(rounds=1, seconds=0.05)
# What each does differently without doing other work.
SAME = {
    "every switch": {"attention": "blocks", "loss_by_rows": True, "pad_vocab_to": 128, "gradient_checkpointing": True},
    "recipe/train.py": {"kind": "recipe"},
    "transformers": {"kind": "hf-loop"},
}
SLOW = {
    "plain": {"tuned": False, "fused": False, "attention": "plain", "micro_batch": 1, "accumulation": 4},
    "loss in chunks": {"loss_chunk_size": 16},
    "transformers' Trainer": {"kind": "hf-trainer"},
    "two processes": {"kind": "recipe", "world": 2, "accumulation": 1},
}


@pytest.fixture(scope="module")
def directory():
    with prepared() as path:
        yield path


@pytest.fixture(scope="module")
def reference(directory):
    worker = Worker(TINY, directory)
    worker.run(COMPARED)
    yield worker
    worker.close()


@pytest.mark.parametrize("name", [*SAME, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_variant_takes_the_same_steps(directory, reference, name):
    variant = replace(TINY, name=name, **(SAME | SLOW)[name])
    assert variant.tokens == TINY.tokens
    worker = Worker(variant, directory)
    try:
        seconds = worker.run(COMPARED)
        assert seconds > 0
        assert worker.peak_memory > 10**8
        assert len(worker.losses) == COMPARED
        assert worker.losses[-1] < worker.losses[0] - 0.01  # it learns
        assert agree(worker, reference) < 2e-5
    finally:
        worker.close()


@pytest.mark.slow
def test_nanogpt_takes_the_same_steps(directory, reference, tmp_path):
    """Of a stand-in with nanoGPT's interface: transformers' model behind it, with transposed weights."""
    (tmp_path / "model.py").write_text(NANOGPT)
    worker = Worker(replace(TINY, name="nanoGPT", kind="nanogpt", checkout=str(tmp_path)), directory)
    try:
        worker.run(COMPARED)
        # its 47 rows more in the vocabulary stand in the softmax: log(50304 / 50257) = 9e-4
        assert worker.losses[0] - reference.losses[0] == pytest.approx(9.3e-4, abs=2e-4)
        assert agree(worker, reference) < 2e-3
    finally:
        worker.close()


NANOGPT = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int; vocab_size: int; n_layer: int; n_head: int; n_embd: int; dropout: float; bias: bool

class Linear(torch.nn.Module):
    def __init__(self, source):
        super().__init__()
        self.weight = torch.nn.Parameter(source.weight.detach().t().clone())
        self.bias = torch.nn.Parameter(source.bias.detach().clone())
    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        from recipe.model.gpt2 import Transformer, causal_attention
        from transformers import GPT2Config
        c = GPT2Config(vocab_size=config.vocab_size, n_positions=config.block_size, n_layer=config.n_layer,
                       n_head=config.n_head, n_embd=config.n_embd, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        self.transformer = Transformer(c, False, causal_attention, None)
        for block in self.transformer.h:
            block.attn.c_attn, block.attn.c_proj = Linear(block.attn.c_attn), Linear(block.attn.c_proj)
            block.mlp.c_fc, block.mlp.c_proj = Linear(block.mlp.c_fc), Linear(block.mlp.c_proj)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(0, 0.02)
    def forward(self, x, y):
        logits = self.transformer(x) @ self.transformer.wte.weight.t()
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)
"""


def test_other_work_is_void(directory, reference):
    """A model that is not the same one: its losses differ, and no ratio comes of it."""
    narrow = replace(TINY, name="narrow", model=replace(TINY.model, n_layer=1, n_embd=64))
    worker = Worker(narrow, directory)
    try:
        with pytest.raises(Void, match="losses differ"):
            compare(worker, reference, QUICK)
    finally:
        worker.close()


def test_a_variant_that_fails_says_why(directory):
    worker = Worker(replace(TINY, name="wrong", model=replace(TINY.model, n_head=3)), directory)
    with pytest.raises(Void, match=r"RuntimeError|ValueError|UserError"):
        worker.run(1)
    worker.close()


def test_losses_that_are_not_numbers_do_not_agree(reference):
    class Broken:
        variant, losses = TINY, [float("nan")] * COMPARED

    with pytest.raises(Void, match="nan"):
        agree(Broken, reference)


def test_ratios_are_of_neighbours_in_time():
    # the machine slows down to half in the middle: the pairs do not mind, a ratio of all to all would
    pairs = [(1.0, 2.0), (1.1, 2.2), (2.0, 4.0), (2.2, 4.4), (1.0, 2.6)]
    found = Paired(pairs)
    assert found.ratio == pytest.approx(2.0)
    low, high = found.interval()
    assert low == pytest.approx(2.0)
    assert 2.0 <= high <= 2.6
    assert found.seconds(0) == 1.1
    assert found.seconds(1) == 2.6


@pytest.mark.parametrize(("on_cpu", "gpus"), [(True, 0), (False, 1), (False, 8)])
def test_every_row_takes_the_same_steps(on_cpu, gpus, monkeypatch):
    monkeypatch.setattr("benchmarks.scoreboard.hardware.resolve_precision", lambda p, cpu: "bf16")
    config = parse_config(["--config", "gpt2", "--torch_compile_mode", "default"])
    first, rows = ladder(SimpleNamespace(config=config, on_cpu=on_cpu, gpus=gpus, micro=64, T=1024))
    variants, now = [], first
    for row in rows:
        if row.changes is not None:
            assert len(row.changes) == (row.name != first.name)  # one optimisation a row
            variants.append(applied(now, row, first.sequences))
            now = variants[-1] if row.kept else now
    assert len({v.tokens for v in variants}) == 1
    assert len({row.name for row in rows}) == len(rows)
    assert all((row.changes is None) == bool(row.cannot) for row in rows)
    last = variants[-1]
    assert (last.kind, last.world) == ("recipe", max(1, gpus))
    assert (last.attention, last.fused, last.compile) == ("blocks" if on_cpu else "sdpa", True, "default")
    assert last.precision == "bf16"
    assert not last.gradient_checkpointing
    assert last.loss_chunk_size == 0


class Stopwatch:
    """A worker that takes no steps: its variant's speed is `dropout`, in tokens a second."""

    def __init__(self, variant, directory):
        self.variant, self.peak_memory = variant, 10**9

    def rate(self, timing) -> float:
        if self.variant.model.n_head == 3:
            raise Void("it failed")
        return self.variant.model.dropout

    def over(self, other, timing) -> Paired:
        return Paired([(1 / self.rate(timing), 1 / other.rate(timing))])

    def close(self) -> None:
        pass


def test_the_scoreboard_builds_on_what_is_kept(monkeypatch, tmp_path):
    """A row that cannot be run, one that fails and one that is not kept do not end the table, nor change its base."""
    monkeypatch.setattr("benchmarks.scoreboard.Worker", Stopwatch)
    monkeypatch.setattr("benchmarks.scoreboard.rate_of", Stopwatch.rate)
    monkeypatch.setattr("benchmarks.scoreboard.compare", Stopwatch.over)

    def model(**fields) -> dict:
        return {"model": replace(TINY.model, **fields)}

    rows = [
        Row("first", model(dropout=100.0)),
        Row("cannot", cannot="not here"),
        Row("fails", model(n_head=3)),
        Row("aside", model(dropout=50.0), kept=False),
        Row("kept", model(dropout=200.0)),
        Row("last", model(dropout=300.0)),
    ]
    results = scoreboard(TINY, rows, tmp_path, QUICK)
    add_mfu(results, 10**6, 1e9)
    assert [r["tokens_per_second"] for r in results] == [100, None, None, 50, 200, 300]
    assert [r["kept"] for r in results] == [True, True, False, False, True, True]
    assert [r["total"] for r in results] == [1, None, None, 0.5, 2, 3]  # over the first row
    assert [r["speedup"] and r["speedup"][0] for r in results] == [None, None, None, 0.5, 2, 1.5]  # over the last kept
    assert results[0]["mfu"] == pytest.approx(0.1)
    assert results[2]["note"] == "it failed"
    table = "\n".join(lines(results))
    assert "not here" in table
    assert "(aside)" in table
    late = scoreboard(TINY, rows[:1], tmp_path, Timing(1, 0.05, ends=0.0))
    assert late[0]["note"] == "skipped: the time is up"
    json.dumps(results, allow_nan=False)


def texts_of(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("source", ["docs/results/cpu-scoreboard.json", None])
def test_the_picture_shows_what_the_figures_make(source, tmp_path, monkeypatch):
    """Each ratio is that of the figures beside it, and a gray bar is explained where there is one, and only there."""
    if source:
        results = json.loads((ROOT / source).read_text())
    else:
        row = {"name": "a", "kept": True, "tokens_per_second": 10.0, "speedup": None, "total": 1.0}
        gray = row | {"name": "b", "kept": False, "tokens_per_second": 20.0, "speedup": [2.0, 1.9, 2.1], "total": 2.0}
        results = {"rows": [row, gray], "device": "x", "torch": "2", "sequence_length": 8, "model": {"parameters": 1}}
    drawn = []
    finish = report._finish
    monkeypatch.setattr(report, "_finish", lambda plt, figure, *a: (drawn.append(figure), finish(plt, figure, *a)))
    report.bars(results, tmp_path / "bars.png")
    rows = [r for r in results["rows"] if r["tokens_per_second"]]
    assert len(texts_of(drawn[0])) == len(rows)
    for text, row in zip(texts_of(drawn[0]), rows, strict=True):
        ratio = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        assert text.startswith(f" {ratio:.2f}x, {row['tokens_per_second']:,.0f} tokens/s")
    assert ("gray" in drawn[0].axes[0].get_xlabel()) == (not all(row["kept"] for row in rows))
    assert matplotlib.image.imread(tmp_path / "bars.png").shape[1] > 800


def command(*words) -> int:
    return bench.main([str(word) for word in words])


@pytest.fixture(scope="module")
def tiny_recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(
        "dataset_name: data/none\nn_layer: 1\nn_head: 2\nn_embd: 32\nn_positions: 32\nsequence_length: 32\n"
        "total_batch_tokens: 256\nmicro_batch_size: 4\n"
    )
    return path


@pytest.fixture
def tiny(tiny_recipe, tmp_path) -> tuple:
    return "--quick", "--config", tiny_recipe, "--precision", "fp32", "--out", tmp_path


@pytest.mark.slow
def test_the_command_writes_table_json_and_picture(tiny, tmp_path, capsys, monkeypatch):
    whole = bench.ladder

    def some(config):
        """Without those that compile, which take most of the time."""
        first, rows = whole(config)
        return first, [row for row in rows if row.name not in ("compile", "SDPA", "loss by rows", "fused AdamW")]

    monkeypatch.setattr(bench, "ladder", some)
    assert command("scoreboard", *tiny) == 0
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    assert (tmp_path / "scoreboard.png").read_bytes().startswith(b"\x89PNG")
    rows = {r["name"]: r for r in found["rows"]}
    assert rows["recipe/train.py"]["tokens_per_second"] > 0
    assert rows["recomputation"]["note"] == "skipped by --quick"
    assert found["torch"] == torch.__version__
    assert found["peak_source"] == "the largest product measured here"
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


@pytest.mark.slow
def test_the_command_compares_with_peers(tiny, tmp_path, monkeypatch):
    contenders = peers.contenders
    monkeypatch.setattr(peers, "contenders", lambda *a: [v for v in contenders(*a) if not v.compile])
    log = tmp_path / "llmc.log"
    head = "batch_size B=64 * seq_len T=1024 * num_processes=8 and total_batch_size=524288\n"
    step = "step {:4d}/18865 | loss 9.5 (+0.1z)| norm 4.7 (+0.2z)| lr 4.29e-06 | {:.2f} ms | 58.4% bf16 MFU | 9 tok/s\n"
    log.write_text(head + "".join(step.format(n, 300 + n % 2) for n in range(40)))
    assert command("peers", *tiny, "--llmc_log", log) == 0
    found = json.loads((tmp_path / "peers.json").read_text())
    assert len(found["rows"]) == 4  # Trainer and bare loop, as shipped and with our allocator
    assert all(r["ratio"] > 0 and r["losses_apart"] < 1e-3 for r in found["rows"])
    assert found["llm.c"]["tokens_per_second"] == pytest.approx(524288 / 0.3005, rel=1e-3)
    assert (tmp_path / "peers.png").exists()


def test_what_the_profiler_counts_is_what_was_done():
    """Two products a step, five steps, two of them to warm up."""
    a, calls = torch.randn(256, 256), []

    def step():
        calls.append(1)
        torch.mm(a, a)
        torch.mm(a, a)

    figures = profile.profile_step(step, torch.device("cpu"))
    assert len(calls) == 5
    assert next(iter(figures["seconds"])) == "aten::mm"
    assert figures["seconds"]["aten::mm"] > 0.5 * figures["accounted_seconds"]
    assert "aten::mm" in "\n".join(profile.lines(figures))


@pytest.mark.slow
def test_the_command_profiles(tiny, tmp_path):
    assert command("profile", *tiny, "--micro_batch_size", "2") == 0
    found = json.loads((tmp_path / "profile.json").read_text())["profile"]
    assert sum(found["seconds"].values()) == pytest.approx(found["accounted_seconds"])


def test_all_goes_on_after_a_part_that_fails_and_ends_in_time(tiny, tmp_path, monkeypatch, capsys):
    ran = []

    def part(setting, name):
        """A part of it."""
        if name == "peers":
            raise RuntimeError("no such kernel")
        ran.append(name)
        assert 0 < setting.timing.left < 6e5
        return {"of": name}

    for name in set(bench.COMMANDS) - {"all"}:
        stand_in = update_wrapper(partial(part, name=name), part)
        monkeypatch.setitem(bench.COMMANDS, name, stand_in)
    assert command("all", *tiny) == 0
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert set(ran) == set(bench.SHARES) - {"peers"}
    assert found["peers"]["note"] == "failed: RuntimeError('no such kernel')"
    assert found["scoreboard"] == {"of": "scoreboard"}
    ran.clear()
    assert command("all", *tiny, "--minutes", "0.1") == 0
    assert ran == []
    assert "the time is up" in capsys.readouterr().out


def test_the_four_sizes_want_a_gpu(tiny, capsys):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    assert command("sizes", *tiny) == 2
    assert "for a GPU" in capsys.readouterr().err


def test_mistakes_of_the_command_are_named(tmp_path, capsys):
    assert command("peers", "--nanogpt", tmp_path, "--out", tmp_path) == 2
    assert "no model.py there" in capsys.readouterr().err
    assert command("scoreboard", "--config", "none-such", "--out", tmp_path) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(UserError, match="total_batch_size"):
        peers.llmc_log(ROOT / "README.md")
    with pytest.raises(UserError, match="No such file"):
        peers.llmc_log(tmp_path / "none")


def test_pictures_of_what_could_not_be_measured(tmp_path):
    nothing = {"rows": [{"name": "a", "environment": "", "ratio": None, "void": "x"}]}
    report.ratios(nothing, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


# What communication costs. GPT-2 124M: V D = 38,597,376; wpe 786,432; linear layers 12 (12 D^2 + 9 D) = 85,017,600.
GPT2 = ModelConfig()
N, EMBEDDINGS, LINEAR = 124_439_808, 39_383_808, 85_017_600
MIXED = 2 * LINEAR + 4 * (N - LINEAR)


def test_the_bytes_of_a_step_by_hand():
    assert parameter_count(GPT2) == N
    (ddp,) = scaling.collectives("ddp", GPT2)
    assert (ddp.kind, ddp.size, ddp.hideable) == ("all_reduce", 497_759_232, 497_759_232 - 4 * EMBEDDINGS)
    reduce, gather = scaling.collectives("zero1", GPT2)
    assert (reduce.size, reduce.hideable, gather.size, gather.hideable) == (MIXED, MIXED - 4 * EMBEDDINGS, 4 * N, 0)


def test_a_prediction_by_hand():
    """64 H100 at 36.2 %: 8 sequences each in one micro-step, 19.57 ms; DDP over NVLink and eight adapters."""
    row = scaling.predict("H100", "124M", "ddp", 64)
    compute = 8192 * flops_per_token(GPT2, 1024) / (0.362 * 989e12)
    communication = 2 * 4 * N * (7 / 8 / 450e9 + 7 / 8 / 400e9) / 0.8
    assert (row["micro_batch"], row["small_micro_batch"]) == (8, True)
    assert row["compute_ms"] == pytest.approx(1e3 * compute)
    assert row["communication_ms"] == pytest.approx(1e3 * communication)
    hidden = communication * (1 - EMBEDDINGS / N)
    assert hidden < 2 / 3 * compute  # it all hides behind backward
    assert row["exposed_ms"] == pytest.approx(1e3 * (communication - hidden))
    assert row["tokens_per_second"] == pytest.approx(524288 / (compute + communication))
    long = scaling.predict("A100", "1558M", "ddp", 512)  # no more than backward's length hides
    assert long["exposed_ms"] == pytest.approx(long["communication_ms"] - 2 / 3 * long["compute_ms"])


def test_published_figures_stand_beside_the_predicted_ones():
    """A change of a formula that moves a prediction away from what was published must be seen."""
    found = scaling.anchors()
    assert len(found) == 4
    for row in found:
        assert 0.95 < row["predicted"] / row["published"] < 1.1, row
    rows = scaling.table()
    assert len({(r["model"], r["gpu"], r["strategy"], r["devices"]) for r in rows}) == len(rows) == 24
    assert "512 x H100" in "\n".join(scaling.lines())
