"""HellaSwag: way A by hand, way B against lm-evaluation-harness itself, shares of ranks, and the metric module."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from eval import common, hellaswag

BPE = Path(__file__).parent.parent / "recipe" / "data" / "gpt2_bpe"


@pytest.fixture(scope="module")
def tokenizer():
    return GPT2TokenizerFast(vocab=str(BPE / "encoder.json"), merges=str(BPE / "vocab.bpe"))


@pytest.fixture(scope="module")
def make_model(tokenizer):
    def make(n_positions: int) -> common.Loaded:
        torch.manual_seed(0)
        # The wide initialisation spreads the logits: nearly uniform ones would agree whatever the scorer did.
        config = GPT2Config(n_positions=n_positions, n_layer=2, n_embd=32, n_head=2, initializer_range=0.5)
        model = GPT2LMHeadModel(config).eval()
        return common.Loaded("tiny", None, model, tokenizer, torch.device("cpu"), torch.float32)

    return make


def letters(text: str) -> list[int]:
    """A toy encoding: one token a character."""
    return [ord(character) for character in text]


def bigram(probabilities: dict[tuple[str, str], float]):
    """logits_fn in which p(next | previous) is as given; pairs that are not given are impossible (e^-100)."""

    def logits_fn(ids: torch.Tensor) -> torch.Tensor:
        table = torch.full((128, 128), -100.0)
        for (previous, following), p in probabilities.items():
            table[ord(previous), ord(following)] = np.log(p)
        # The rest of each row's mass goes to token 0, which no text contains.
        table[:, 0] = (1 - table.exp().sum(1)).clamp(min=1e-9).log()
        return table[ids]

    return logits_fn


def test_way_a_by_hand():
    row = {"ctx": "c", "endings": ["x", "yy", "xz", "z"], "label": 1, "activity_label": "L", "ctx_a": "", "ctx_b": ""}
    # " x": .9 * .2 = .18; " yy": .9 * .3 * .6 = .162; " xz": .9 * .2 * .1 = .018; " z": .9 * .1 = .09
    p = {("c", " "): 0.9, (" ", "x"): 0.2, (" ", "y"): 0.3, ("y", "y"): 0.6, ("x", "z"): 0.1, (" ", "z"): 0.1}
    requests = hellaswag.encode_row(letters, row)["A"]
    assert [r.tokens for r in requests] == [letters("c x"), letters("c yy"), letters("c xz"), letters("c z")]
    assert [r.n_scored for r in requests] == [r.length for r in requests] == [2, 3, 3, 2]

    scores = hellaswag.score_rows(bigram(p), letters, [row], device="cpu", max_length=50)[0]["A"]
    assert scores.log_likelihoods == pytest.approx(np.log([0.18, 0.162, 0.018, 0.09]), abs=1e-5)
    # By sum the first ending wins; per token the second: .162^(1/3) = .545 against .18^(1/2) = .424.
    assert scores.correct(label=0) == {"acc": 1, "acc_norm": 0}
    assert scores.correct(label=1) == {"acc": 0, "acc_norm": 1}


def test_way_a_encodes_context_and_ending_apart(tokenizer):
    row = {"ctx": "He sp", "endings": ["in", "lit.", "a", "b"], "activity_label": "", "ctx_a": "", "ctx_b": ""}
    first, second = hellaswag.encode_row(tokenizer.encode, row)["A"][:2]
    assert first.tokens == tokenizer.encode("He sp") + tokenizer.encode(" in")
    assert tokenizer.decode(second.tokens[-second.n_scored :]) == " lit."


def test_way_b_cleans_text_and_keeps_boundaries():
    row = {
        "activity_label": "Tidy",
        "ctx_a": " A [title] b [x]",
        "ctx_b": "tHEN",
        "ctx": "",
        "endings": ["a [step] b"] * 4,
    }
    request = hellaswag.encode_row(letters, row)["B"][0]
    # One pass over the double spaces: "A.  b  Then" with [x] gone.
    assert "".join(map(chr, request.tokens)) == "Tidy: A. b Then a b"
    assert (request.n_scored, request.length) == (4, 3)  # " a b", and "a b" in characters
    # A context that ends in a space: the space belongs to the continuation.
    spaced = hellaswag.encode_row(letters, row | {"ctx_b": "x [y]"})["B"][0]
    assert "".join(map(chr, spaced.tokens[-spaced.n_scored :])) == "  a b"


@pytest.mark.parametrize(("n_positions", "limit"), [(1024, 50), (52, 20)])
def test_way_b_equals_lm_evaluation_harness(n_positions, limit, make_model, tmp_path):
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[dev]')")
    import lm_eval.tasks
    from lm_eval.models.huggingface import HFLM

    rows = hellaswag.load_rows(limit)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # The harness's own task, with nothing but the place of its data changed.
    theirs = Path(lm_eval.tasks.__file__).parent / "hellaswag"
    shutil.copy(theirs / "utils.py", tmp_path)
    task = (theirs / "hellaswag.yaml").read_text()
    where = json.dumps(
        {"data_files": {"validation": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")}
    )
    for old, new in {
        "task: hellaswag": "task: hellaswag_local",
        "dataset_path: Rowan/hellaswag": f"dataset_path: json\ndataset_kwargs: {where}",
        "training_split: train": "training_split: null",
    }.items():
        assert old in task
        task = task.replace(old, new)
    (tmp_path / "hellaswag_local.yaml").write_text(task)

    loaded = make_model(n_positions)
    harness = lm_eval.simple_evaluate(
        HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=8, device="cpu"),
        tasks=["hellaswag_local"],
        task_manager=lm_eval.tasks.TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(harness["samples"]["hellaswag_local"], key=lambda sample: sample["doc_id"])
    expected = np.array([[choice[0] for choice in sample["filtered_resps"]] for sample in samples])

    options = {"device": "cpu", "batch_size": 7, "max_length": n_positions}
    body, head = common.body_and_head(loaded.model)
    ours = hellaswag.score_rows(body, loaded.encode, rows, head=head, **options)
    np.testing.assert_allclose([score["B"].log_likelihoods for score in ours], expected, atol=1e-3, rtol=0)
    if n_positions == 52:
        requests = [r for row in rows for r in hellaswag.encode_row(loaded.encode, row)["B"]]
        assert sum(len(r.tokens) > n_positions + 1 for r in requests) > 5  # so truncation was at work
    else:
        assert expected.std() > 50  # far from uniform

    counts = hellaswag.score_hellaswag(lambda ids: loaded.model(ids).logits, loaded.encode, limit=limit, **options)
    for name in ("acc", "acc_norm"):
        assert counts["B"][name] / limit == pytest.approx(
            harness["results"]["hellaswag_local"][f"{name},none"], abs=1e-12
        )


def test_too_long_requests_lose_their_context_first():
    seen = []

    def uniform(ids):
        seen.append(ids.tolist())
        return torch.zeros(*ids.shape, 128)

    request = hellaswag.Request(tokens=[1, 2, 3, 4, 5, 6], n_scored=2, length=2)
    long_ending = hellaswag.Request(tokens=[1, 2, 3, 4, 5, 6], n_scored=5, length=5)
    sums = hellaswag.score_requests(uniform, [request, long_ending], device="cpu", max_length=3)
    assert seen == [[[3, 4, 5], [3, 4, 5]]]
    assert sums == pytest.approx([-2 * np.log(128), -3 * np.log(128)], abs=1e-5)


def test_filled_up_shapes_are_few_and_change_no_score(make_model):
    """For a device that compiles for each shape; 130 positions are no multiple of 64, and not more than there are."""
    loaded = make_model(130)
    shapes, scored = set(), set()

    def logits_fn(ids):
        shapes.add(tuple(ids.shape))
        return loaded.model(ids).logits

    def head(logits):
        scored.add(len(logits))
        return logits

    def run(multiples):
        options = {"device": "cpu", "batch_size": 3, "max_length": 130, "head": head, "multiples": multiples}
        shapes.clear()
        scored.clear()
        return hellaswag.score_rows(logits_fn, loaded.encode, hellaswag.load_rows(10), **options)

    plain = run((1, 1, 1))
    assert len(shapes) == 4
    filled = run((64, 64, 128))
    assert shapes <= {(64, 64), (64, 128), (64, 130)}
    assert scored == {128}  # eval.common cuts what it scores on a CPU into pieces of this size
    for a, b in zip(plain, filled, strict=True):
        for way in hellaswag.WAYS:
            assert a[way].log_likelihoods == pytest.approx(b[way].log_likelihoods, abs=1e-3)
            assert a[way].lengths == b[way].lengths


def test_shares_of_ranks_add_up(make_model):
    loaded = make_model(128)
    calls = []

    def logits_fn(ids):
        calls.append(ids.shape)
        return loaded.model(ids).logits

    def run(rank, world):
        calls.clear()
        options = {"limit": 13, "device": "cpu", "batch_size": 2, "max_length": 128, "rank": rank, "world": world}
        return hellaswag.score_hellaswag(logits_fn, loaded.encode, **options), len(calls)

    whole, _ = run(0, 1)
    assert whole["rows"] == 13
    assert 0 < whole["A"]["acc"] < 13
    for world in (2, 3, 5):
        counts, n_calls = zip(*(run(rank, world) for rank in range(world)), strict=True)
        assert len(set(n_calls)) == 1  # a forward pass may be collective
        assert sum(c["rows"] for c in counts) == 13
        for way in ("A", "B"):
            for name in ("acc", "acc_norm"):
                assert sum(c[way][name] for c in counts) == whole[way][name]


def test_command_and_counts_agree(make_model):
    loaded = make_model(128)
    rows = hellaswag.load_rows(12)
    result = hellaswag.evaluate_rows(loaded, rows, batch_size=5, progress=False)
    options = {"limit": 12, "device": "cpu", "batch_size": 2, "max_length": 128}
    counts = hellaswag.score_hellaswag(lambda ids: loaded.model(ids).logits, loaded.encode, **options)
    for way in ("A", "B"):
        for name in ("acc", "acc_norm"):
            p = counts[way][name] / 12
            assert result[way][name] == pytest.approx(p, abs=1e-12)
            assert result[way][f"{name}_ci95"] == pytest.approx(1.96 * np.sqrt(p * (1 - p) / 12), abs=1e-12)
    text = hellaswag.table(result)
    a, b = text.split("\nB. ")
    assert "0.2859" in a
    assert "0.2955" in a
    assert "0.3114" not in a
    assert "0.2892" in b
    assert "all 10,042 rows" in b


def test_all_rows_are_there():
    rows = hellaswag.load_rows()
    assert len(rows) == 10042
    assert {len(row["endings"]) for row in rows} == {4}
    assert {row["label"] for row in rows} == {0, 1, 2, 3}


def test_metric_by_hand():
    metric = common.load_metric("hellaswag")
    # Row 1: sum picks 0, per length picks 1 (-6/3). Row 2: both pick 2. Row 3: a tie goes to the first.
    metric.add_batch(
        log_likelihoods=[[-4, -6, -9, -9], [-9, -9, -1, -9]], lengths=[[1, 3, 1, 1], [2, 2, 2, 2]], labels=[1, 2]
    )
    metric.add_batch(log_likelihoods=[[-3, -3, -3, -3]], lengths=[[1, 1, 1, 1]], labels=[0])
    assert metric.compute() == {"acc": pytest.approx(2 / 3), "acc_norm": 1.0}


def test_metrics_in_two_processes_leave_nothing_behind(tmp_path):
    repository = Path(__file__).parent.parent
    before = sorted(repository.glob("eval/metrics/**/*"))
    code = (
        "from eval import common\n"
        "for _ in range(2):\n"
        "    m, q = common.load_metric('hellaswag'), common.load_metric('token_perplexity')\n"
        "    m.add_batch(log_likelihoods=[[-1, -2, -3, -4]], lengths=[[1, 1, 1, 1]], labels=[0])\n"
        "    q.add_batch(nlls=[2.0], token_counts=[2], byte_counts=[1])\n"
        "    print(m.compute()['acc'], q.compute()['loss'])\n"
    )
    environment = {"PATH": "", "HF_HOME": "/proc/not/writable", "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    options = {
        "cwd": repository,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    processes = [subprocess.Popen([sys.executable, "-B", "-c", code], **options) for _ in range(2)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert out.split() == ["1.0", "1.0"] * 2, err
    assert sorted(repository.glob("eval/metrics/**/*")) == before
    assert not list(tmp_path.glob("metrics-*"))
