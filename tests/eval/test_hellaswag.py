"""HellaSwag: llm.c-style by hand, lm-eval-style against the harness, shared contexts, and rows split over ranks."""

import dataclasses
import re
from functools import partial

import numpy as np
import pytest
import torch

from eval import hellaswag
from eval.loglikelihood import LanguageModel, Request, score_groups
from eval.published import ACCURACIES
from eval.scores import ci95
from recipe.data.tokenizer import open_tokenizer
from tests.data.test_own_tokenizer import save, sentencepiece_bpe
from tests.eval.conftest import local_tasks

ROW = {"ctx": "", "endings": [""] * 4, "activity_label": "", "ctx_a": "", "ctx_b": "", "label": 0}


def letters(text: str) -> list[int]:
    """A toy encoding: one token a character."""
    return [ord(character) for character in text]


def bigram(probabilities: dict[tuple[str, str], float]) -> LanguageModel:
    """A model in which p(next | previous) is as given; other pairs are impossible (e^-100)."""
    table = torch.full((128, 128), -100.0)
    for (previous, character), p in probabilities.items():
        table[ord(previous), ord(character)] = np.log(p)
    # The rest of each row's mass goes to token 0, which no text contains.
    table[:, 0] = (1 - table.exp().sum(1)).clamp(min=1e-9).log()
    return LanguageModel(lambda ids, *_: table[ids], lambda logits: logits, letters, 50, torch.device("cpu"))


def assert_same(scores: hellaswag.Scores, expected: hellaswag.Scores) -> None:
    for style in hellaswag.STYLES:
        assert scores[style][0] == pytest.approx(expected[style][0], abs=2e-3)


@pytest.mark.parametrize("limit", [100, 500, 3000])
def test_a_limit_takes_as_large_a_share_of_each_source_as_all_rows_have(limit):
    """The first third is ActivityNet's, the rest WikiHow's, whose texts have marks: a model scores higher on the first
    than on the others."""
    rows = hellaswag.load_rows(limit)
    from_wikihow = [bool(re.search(r"\[(header|title|step)\]", row["ctx"])) for row in rows]
    assert len(rows) == limit
    assert np.mean(from_wikihow) == pytest.approx(6799 / 10_042, abs=0.01)
    assert len({(row["source_id"], row["ctx"]) for row in rows}) > 0.98 * limit, "no row is taken twice"


def test_a_limit_above_all_rows_takes_all():
    assert hellaswag.load_rows(20_000) == hellaswag.load_rows()


def test_an_ending_has_the_tokens_that_it_has_in_its_text(tmp_path):
    """Also with a tokenizer that puts a space before each text, as Llama 2's."""
    tokenizer = open_tokenizer(save(sentencepiece_bpe(), tmp_path))
    row, texts = ROW | {"ctx": "ROM", "endings": ["ab", "R"] * 2}, ("ROM ab", "ROM R")
    requests, _ = hellaswag.encode_row(lambda text: tokenizer.encode([text])[0].tolist(), row, "llmc")
    assert [request.tokens for request in requests[:2]] == [tokenizer.encode([text])[0].tolist() for text in texts]


def test_llmc_style_by_hand():
    row = ROW | {"ctx": "c", "endings": ["x", "yy", "xz", "z"]}
    # " x": .9 * .2 = .18; " yy": .9 * .3 * .6 = .162; " xz": .9 * .2 * .1 = .018; " z": .9 * .1 = .09
    p = {("c", " "): 0.9, (" ", "x"): 0.2, (" ", "y"): 0.3, ("y", "y"): 0.6, ("x", "z"): 0.1, (" ", "z"): 0.1}
    (log_likelihoods,), (lengths,) = hellaswag.score_rows(bigram(p), [row])["llmc"]
    assert log_likelihoods == pytest.approx(np.log([0.18, 0.162, 0.018, 0.09]), abs=1e-5)
    assert lengths.tolist() == [2, 3, 3, 2]
    # By sum the first ending wins; per token the second: .162^(1/3) = .545 against .18^(1/2) = .424.
    for label, expected in ((0, (1, 0)), (1, (0, 1))):
        counts = hellaswag.count_correct(bigram(p), [row | {"label": label}])
        assert (counts["llmc_acc"], counts["llmc_acc_norm"]) == expected


def test_what_each_style_encodes(tiny_gpt2):
    encode, decode = tiny_gpt2().encode, tiny_gpt2().tokenizer.decode
    row = ROW | {"ctx": "He sp", "endings": ["in", "lit.", "a"]}
    (first, second, *_), _ = hellaswag.encode_row(encode, row, "llmc")
    assert first.tokens == encode("He sp") + encode(" in")  # separately
    assert decode(second.tokens[-second.n_scored :]) == " lit."

    row = ROW | {"activity_label": "Tidy", "ctx_a": " A [title] b [x]", "ctx_b": "tHEN", "endings": ["a [step] b"] * 4}
    (request, *_), lengths = hellaswag.encode_row(letters, row, "lmeval")
    # One pass over the double spaces: "A.  b  Then" with [x] gone.
    assert "".join(map(chr, request.tokens)) == "Tidy: A. b Then a b"
    assert (request.n_scored, lengths) == (4, [3] * 4)  # " a b", and "a b" in characters
    # A context that ends in a space: the space belongs to the continuation.
    (spaced, *_), _ = hellaswag.encode_row(letters, row | {"ctx_b": "x [y]"}, "lmeval")
    assert "".join(map(chr, spaced.tokens[-spaced.n_scored :])) == "  a b"


@pytest.mark.parametrize(("n_positions", "limit"), [(1024, 8), pytest.param(52, 12, marks=pytest.mark.slow)])
def test_lm_eval_style_equals_lm_evaluation_harness(n_positions, limit, tiny_gpt2, tmp_path, monkeypatch):
    """At 52 positions some requests are cut on the left."""
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")
    import lm_eval.tasks

    from eval import harness

    rows, loaded = hellaswag.load_rows()[:limit], tiny_gpt2(n_positions, initializer_range=0.5)
    # TaskManager's index of all tasks takes seconds to build.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    local = local_tasks(tmp_path / "tasks", hellaswag=rows)
    results = harness.evaluate(loaded, ["hellaswag"], batch_size=8, include=local)
    samples = sorted(results["samples"]["hellaswag"], key=lambda sample: sample["doc_id"])
    expected = np.array([[choice[0] for choice in sample["filtered_resps"]] for sample in samples])

    scores = hellaswag.score_rows(loaded.lm, rows, batch_size=7)
    np.testing.assert_allclose(scores["lmeval"][0], expected, atol=1e-3, rtol=0)
    requests = [r for row in rows for r in hellaswag.encode_row(loaded.encode, row, "lmeval")[0]]
    assert (sum(len(r.tokens) > n_positions + 1 for r in requests) > 5) == (n_positions == 52)
    assert expected.std() > 10  # far from uniform
    counts = hellaswag.count_correct(loaded.lm, rows, batch_size=7)
    for name in ("acc", "acc_norm"):
        expected_accuracy = results["results"]["hellaswag"][f"{name},none"]
        assert counts[f"lmeval_{name}"] / limit == pytest.approx(expected_accuracy, abs=1e-12)


def test_too_long_requests_lose_their_context_first():
    seen = []

    def uniform(ids, positions, mask):
        seen.append((ids.tolist(), positions.tolist()))
        assert mask.tolist() == [[torch.ones(3, 3).tril().bool().tolist()]] * 2
        return torch.zeros(*ids.shape, 128)

    model = LanguageModel(uniform, lambda logits: logits, letters, 3, torch.device("cpu"))
    # Each in a row of its own, since they no longer have the same context.
    (scores,) = score_groups(model, [[Request([1, 2, 3, 4, 5, 6], 2), Request([1, 2, 3, 4, 5, 6], 5)]], batch_size=1)
    assert seen == [([[3, 4, 5], [3, 4, 5]], [[0, 1, 2], [0, 1, 2]])]
    assert scores == pytest.approx([-2 * np.log(128), -3 * np.log(128)], abs=1e-5)


@pytest.mark.parametrize("n_positions", [1024, pytest.param(60, marks=pytest.mark.slow)])
def test_sharing_and_padding_change_no_score(n_positions, tiny_gpt2):
    """At 60 positions some rows are truncated, and share nothing; others share part of their context."""
    model, rows = tiny_gpt2(n_positions, initializer_range=0.5).lm, hellaswag.load_rows()[:40:2]
    shapes, head_sizes = [], set()

    def body(ids, *rest):
        shapes.append(tuple(ids.shape))
        return model.body(ids, *rest)

    def head(states):
        head_sizes.add(len(states))
        return model.head(states)

    def run(**changes):
        shapes.clear()
        head_sizes.clear()
        scores = hellaswag.score_rows(dataclasses.replace(model, body=body, head=head, **changes), rows, batch_size=6)
        return scores, sum(n * t for n, t in shapes)

    (shared, n_shared), (separate, n_separate) = run(), run(shares_contexts=False)
    assert model.shares_contexts
    assert_same(shared, separate)
    assert n_shared < (0.6 if n_positions == 1024 else 0.8) * n_separate
    padded, _ = run(multiples=(16, 64, 128))  # for a device that compiles each shape
    assert_same(shared, padded)
    assert all(n % 16 == 0 and t % 64 == 0 for n, t in shapes)
    assert head_sizes == {128}  # the chunks of a CPU


def test_endings_that_change_the_contexts_last_tokens_share_only_what_is_before_them(tiny_gpt2):
    """As where the context and an ending, encoded as one text, make another token of the context's last letters."""
    model, texts = tiny_gpt2().lm, ([1, 2, 3, 4, 5], [1, 2, 9, 4, 5], [1, 2, 3, 8])
    models = model, dataclasses.replace(model, shares_contexts=False)
    (shared,), (separate,) = (score_groups(m, [[Request(text, 1) for text in texts]], batch_size=1) for m in models)
    assert shared == pytest.approx(separate, abs=2e-3)


def test_counts_of_ranks_add_up_to_the_accuracies(tiny_gpt2):
    """Of three processes, one has a batch of padding, a copy of the first row, which this model answers correctly."""
    model, rows, calls = tiny_gpt2(128).lm, hellaswag.load_rows(8), []
    rows = rows[2:] + rows[:2]

    def body(*inputs):
        calls.append(inputs)
        return model.body(*inputs)

    def run(rank, world_size):
        calls.clear()
        counted = dataclasses.replace(model, body=body)
        return hellaswag.count_correct(counted, rows, batch_size=2, rank=rank, world_size=world_size), len(calls)

    result = hellaswag.accuracies(hellaswag.score_rows(model, rows, batch_size=5), rows)
    counts, n_calls = zip(*(run(rank, 3) for rank in range(3)), strict=True)
    assert len(set(n_calls)) == 1  # a forward pass may be collective
    assert sum(count["rows"] for count in counts) == result["rows"] == 8
    for name in ACCURACIES:
        assert result[name] == pytest.approx(sum(count[name] for count in counts) / 8, abs=1e-12)

    llmc, lmeval = hellaswag.table(result).split("\nlm-eval-style ")
    assert "0.2955" in llmc
    assert "0.3114" in lmeval  # each number under the style in which it was published
    assert "0.3114" not in llmc
    assert f"{result['llmc_acc']:.4f} +- {ci95(result['llmc_acc'], 8):.4f}" in llmc
    assert lmeval.endswith("Published numbers are for all 10,042 rows, where the interval is about +- 0.009.")
    assert "Published numbers are for" not in hellaswag.table(result | {"rows": 10_042})
