"""What is timed does the same work: every variant, ours and the peers', takes the same steps."""

import json
from dataclasses import replace
from functools import partial, update_wrapper

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import peers, report
from benchmarks.interleaved import COMPARED, Paired, Void, Worker, agree, compare, prepared
from benchmarks.scoreboard import Row, applied, ladder, lines, scoreboard
from benchmarks.variants import Variant
from recipe.config import ModelConfig
from recipe.errors import UserError
from tests.conftest import ROOT

TINY = Variant(
    "tiny", "loop", ModelConfig(n_layer=2, n_head=2, n_embd=32, n_positions=32), 32, micro_batch=2, accumulation=2
)
# What each may do otherwise without doing other work.
SAME = {
    "plain": {"tuned": False, "fused": False, "attention": "plain", "micro_batch": 1, "accumulation": 4},
    "blocks": {"attention": "blocks"},
    "by rows": {"loss_by_rows": True},
    "padded": {"pad_vocab_to": 128},
    "chunked": {"loss_chunk_size": 16},
    "recomputed": {"gradient_checkpointing": True},
    "trainer": {"kind": "recipe"},
    "two processes": {"kind": "recipe", "world": 2, "accumulation": 1},
    "transformers": {"kind": "hf-loop"},
    "transformers' Trainer": {"kind": "hf-trainer"},
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


@pytest.mark.parametrize("name", SAME)
def test_every_variant_takes_the_same_steps(directory, reference, name):
    variant = replace(TINY, name=name, **SAME[name])
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
            compare(worker, reference, rounds=1, seconds=0.05)
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
    first, rows = ladder(ModelConfig(), 1024, 8, 64, gpus=gpus, on_cpu=on_cpu, torch_compile_mode="default")
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


def test_the_scoreboard_builds_on_what_is_kept(directory):
    """A row that cannot be run, one that fails and one that is not kept do not end the table, nor change its base."""
    wrong = {"model": replace(TINY.model, n_head=3)}
    rows = [
        Row("first", {}),
        Row("cannot", cannot="not here"),
        Row("fails", wrong),
        Row("aside", {"gradient_checkpointing": True}, kept=False),
        Row("kept", {"attention": "blocks"}),
    ]
    how = {"flops": 10**6, "peak": 1e12, "rounds": 1, "seconds": 0.05, "say": lambda line: None}
    results = scoreboard(TINY, rows, directory, left=lambda: 1e9, **how)
    assert [bool(r["tokens_per_second"]) for r in results] == [True, False, False, True, True]
    assert [r["kept"] for r in results] == [True, True, False, False, True]
    first, _, fails, aside, kept = results
    assert first["total"] == 1.0
    assert first["mfu"] == pytest.approx(first["tokens_per_second"] * 1e6 / 1e12)
    assert "Error" in fails["note"]
    assert kept["total"] == pytest.approx(kept["speedup"][0])  # over the first, not over the one set aside
    assert kept["speedup"][1] <= kept["speedup"][0] <= kept["speedup"][2]
    table = "\n".join(lines(results))
    assert "not here" in table
    assert "(aside)" in table
    late = scoreboard(TINY, rows[:1], directory, left=lambda: -1.0, **how)
    assert late[0]["note"] == "left out: the time is up"
    assert aside["peak_memory_bytes"] > 0
    json.dumps(results, allow_nan=False)


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


def test_the_command_writes_table_json_and_picture(tiny, tmp_path, capsys, monkeypatch):
    whole = bench.ladder

    def some(*arguments, **options):
        """Without those that compile, which take most of the time."""
        first, rows = whole(*arguments, **options)
        return first, [row for row in rows if row.name not in ("compile", "SDPA", "loss by rows", "fused AdamW")]

    monkeypatch.setattr(bench, "ladder", some)
    assert command("scoreboard", *tiny) == 0
    found = json.loads((tmp_path / "scoreboard.json").read_text())
    assert (tmp_path / "scoreboard.png").read_bytes().startswith(b"\x89PNG")
    rows = {r["name"]: r for r in found["rows"]}
    assert rows["recipe/train.py"]["tokens_per_second"] > 0
    assert rows["recomputation"]["note"] == "left out by --quick"
    assert found["torch"] == torch.__version__
    assert found["peak_source"] == "the largest product measured here"
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


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


def test_the_command_sweeps_profiles_and_compiles(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "MODES", ("regional",))
    for name in ("sweep", "profile", "compile"):
        assert command(name, *tiny, "--micro_batch_size", "2") == 0, capsys.readouterr().err
    sweep, profile, compiled = (
        json.loads((tmp_path / f"{n}.json").read_text()) for n in ("sweep", "profile", "compile")
    )
    assert [r["micro_batch_size"] for r in sweep["rows"]] == [1, 2]
    assert all(r["tokens_per_second"] > 0 and r["peak_memory_bytes"] > 0 for r in sweep["rows"])
    assert sum(profile["profile"]["shares"].values()) == pytest.approx(1)
    assert profile["floor"]["floor_of_actual"] > 0
    assert [r["mode"] for r in compiled["rows"]] == ["regional"]
    assert all(r["speedup"][0] > 0 for r in compiled["rows"])


def test_all_goes_on_after_a_part_that_fails_and_ends_in_time(tiny, tmp_path, monkeypatch, capsys):
    ran = []

    def part(setting, name):
        """A part of it."""
        if name == "peers":
            raise RuntimeError("no such kernel")
        ran.append(name)
        assert 0 < setting.left < setting.whole_left
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
    assert command("sweep", "--config", "none-such", "--out", tmp_path) == 2
    assert "no such file" in capsys.readouterr().err
    with pytest.raises(UserError, match="total_batch_size"):
        peers.llmc_log(ROOT / "README.md")
    with pytest.raises(UserError, match="No such file"):
        peers.llmc_log(tmp_path / "none")


def test_pictures_of_what_could_not_be_measured(tmp_path):
    nothing = {"rows": [{"name": "a", "environment": "", "ratio": None, "void": "x"}]}
    report.ratios(nothing, tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
