"""LAMBADA: by hand on toy rows, against lm-evaluation-harness itself, and its files of rows."""

import hashlib
import json
import math
import sys

import datasets
import numpy as np
import pytest
import torch

from eval import common, lambada
from tests.conftest import ASSETS

ROWS = ASSETS / "lambada" / "lambada_openai.jsonl"


class Letters:
    """A toy tokenizer of one token a character, with the model in which p(next | previous) is as given."""

    eos_token_id = 0

    def __init__(self, probabilities: dict[tuple[str, str], float]):
        self.table = torch.full((128, 128), -100.0)
        for (previous, following), p in probabilities.items():
            self.table[ord(previous), ord(following)] = math.log(p)
        self.table[:, 127] = (1 - self.table.exp().sum(1)).clamp(min=1e-9).log()  # the rest of each row's mass

    def encode(self, text, **_) -> list[int]:
        return [ord(character) for character in text]

    def loaded(self, n_positions: int, monkeypatch, seen: list) -> common.Loaded:
        def body(ids):
            seen.append(ids.tolist())
            return self.table[ids]

        monkeypatch.setattr(common, "body_and_head", lambda model: (body, common.identity))
        model = type("Model", (), {"config": type("Config", (), {"max_position_embeddings": n_positions})})
        return common.Loaded("letters", None, model, self, torch.device("cpu"), torch.float32)


def test_by_hand(monkeypatch):
    p = {
        ("b", " "): 0.6,
        (" ", "x"): 0.5,
        (" ", "y"): 0.3,
        (" ", " "): 0.1,
        ("x", "y"): 0.2,
        ("y", "y"): 0.9,
        ("\0", " "): 0.7,
    }
    seen = []
    loaded = Letters(p).loaded(50, monkeypatch, seen)
    # " x" is likeliest at each letter, " y" is not at "y"; in " xy" the "y" is not (0.2 against the rest's 0.8).
    texts = ["a b x", "a b y", "a b xy", "x", "a b  x"]
    scores = lambada.score_texts(loaded, texts, batch_size=2)
    # Spaces at a context's end belong to the target: of "a b  x" it is "  x".
    expected = [0.6 * 0.5, 0.6 * 0.3, 0.6 * 0.5 * 0.2, 0.7 * 0.5, 0.6 * 0.1 * 0.5]
    assert [score.log_likelihood for score in scores] == pytest.approx(np.log(expected), abs=1e-5)
    assert [score.greedy for score in scores] == [True, False, False, True, False]
    assert [len(batch) for batch in seen] == [2, 2, 1]
    assert seen[2][0][:1] == [0]  # a text of one word is predicted from end-of-text

    result = lambada.evaluate_texts(loaded, texts[:4], batch_size=4, progress=False)
    assert (result["rows"], result["acc"]) == (4, 0.5)
    assert result["perplexity"] == pytest.approx(math.prod(expected[:4]) ** (-1 / 4), rel=1e-5)
    assert result["acc_ci95"] == pytest.approx(1.96 * 0.25)


def test_long_texts_lose_tokens_on_the_left(monkeypatch):
    seen = []
    loaded = Letters({(" ", "x"): 0.5, ("b", " "): 0.6, ("x", "x"): 0.4}).loaded(3, monkeypatch, seen)
    (score,) = lambada.score_texts(loaded, ["a b x"])
    assert seen == [[[ord(character) for character in " b "]]]
    assert score.log_likelihood == pytest.approx(math.log(0.6 * 0.5), abs=1e-5)
    (score,) = lambada.score_texts(loaded, ["a b xxxx"])  # of five the last three
    assert score.log_likelihood == pytest.approx(math.log(0.4**3), abs=1e-5)


@pytest.mark.parametrize(("n_positions", "limit"), [(256, 10), pytest.param(60, 20, marks=pytest.mark.slow)])
def test_equals_lm_evaluation_harness(n_positions, limit, tiny_gpt2):
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")
    if not ROWS.is_file():
        pytest.skip(f"needs LAMBADA's rows, {ROWS.relative_to(ASSETS.parent)}")
    from eval import harness

    texts = lambada.read_rows(ROWS)[:limit]
    loaded = tiny_gpt2(n_positions, initializer_range=0.5)
    theirs = harness.evaluate(loaded, ["lambada_openai"], rows=ROWS, limit=limit, batch_size=8)
    samples = sorted(theirs["samples"]["lambada_openai"], key=lambda sample: sample["doc_id"])
    expected = [sample["filtered_resps"][0] for sample in samples]

    scores = lambada.score_texts(loaded, texts, batch_size=7)
    np.testing.assert_allclose([s.log_likelihood for s in scores], [e[0] for e in expected], atol=1e-3, rtol=0)
    assert [s.greedy for s in scores] == [e[1] for e in expected]
    result = lambada.evaluate_texts(loaded, texts, batch_size=16, progress=False)
    metrics = theirs["results"]["lambada_openai"]
    assert result["acc"] == pytest.approx(metrics["acc,none"], abs=1e-3)
    assert result["perplexity"] == pytest.approx(metrics["perplexity,none"], rel=1e-3)
    requests = [lambada.encode_text(loaded, text) for text in texts]
    assert max(request.n_scored for request in requests) > 1
    assert (max(len(request.tokens) for request in requests) > n_positions + 1) == (n_positions == 60)


def test_rows_of_both_kinds(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "one two"}\n{"context": "three", "continuation": "four"}\n')
    assert lambada.load_texts(path) == (["one two", "three four"], str(path))
    for content, message in (
        ('{"text": "fine"}\n["no"]\n', "line 2: one JSON object a line"),
        ('{"context": "alone"}\n', "line 1: one JSON object a line"),
        ('{"text": 3}\n', "line 1: one JSON object a line"),
        ("", "empty"),
    ):
        path.write_text(content)
        with pytest.raises(common.UserError, match=message):
            lambada.read_rows(path)


def test_without_rows_the_hub_is_asked(monkeypatch):
    with pytest.raises(common.UserError, match=r"the Hub does not answer .* Use --rows FILE"):
        lambada.load_texts(None)
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": ["one two"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert lambada.load_texts(None) == (["one two"], "EleutherAI/lambada_openai")
    assert asked == [("EleutherAI/lambada_openai", "default", "test")]


def test_command(whole_run, tmp_path, monkeypatch, capsys):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "results.json"
    rows.write_text("".join(json.dumps({"text": f"one two three {word}"}) + "\n" for word in ("four", "five", "six")))
    arguments = [whole_run[0], "--device", "cpu", "--rows", rows, "--limit", 2, "--output", output]
    monkeypatch.setattr(sys, "argv", ["lambada", *map(str, arguments)])
    lambada.main()
    result = json.loads(output.read_text())["lambada"]
    assert (result["rows"], result["data_set"]) == (2, "rows.jsonl")
    assert {"model", "acc", "acc_ci95", "perplexity", "sha256", "data"} <= set(result)
    shown = capsys.readouterr().out
    assert "all 5,153 rows" in shown
    harness, paper = shown.split("scored differently")
    assert "0.3256" in harness
    assert "0.4599" not in harness
    assert "0.4599" in paper
    # As if these were all rows; that of them but two were scored does not matter.
    whole = hashlib.sha256("\n".join(lambada.read_rows(rows)).encode()).hexdigest()
    monkeypatch.setattr(lambada, "SHA256", whole)
    lambada.main()
    assert json.loads(output.read_text())["lambada"]["data_set"] == "EleutherAI/lambada_openai"


def test_all_rows_are_known():
    if not ROWS.is_file():
        pytest.skip(f"needs LAMBADA's rows, {ROWS.relative_to(ASSETS.parent)}")
    texts = lambada.read_rows(ROWS)
    assert len(texts) == lambada.N_ROWS
    assert hashlib.sha256("\n".join(texts).encode()).hexdigest() == lambada.SHA256


def test_metric_by_hand():
    metric = common.load_metric("last_word")
    metric.add_batch(log_likelihoods=[-1.0, -3.0, -2.0], greedy=[True, False, False])
    assert metric.compute() == {"acc": pytest.approx(1 / 3), "perplexity": pytest.approx(math.exp(2))}
