"""LAMBADA: toy rows scored by hand, scores beside lm-evaluation-harness itself, and its files of rows."""

import json
import math
import sys

import pytest
import torch

from eval import common, lambada
from eval.loglikelihood import LanguageModel
from tests.conftest import ASSETS

ROWS = ASSETS / "lambada" / "lambada_openai.jsonl"


class Letters:
    """Stands for `common.Loaded`: one token a character, and p(next | previous) as given."""

    class tokenizer:
        eos_token_id = 0

    def __init__(self, probabilities: dict[tuple[str, str], float], n_positions: int):
        table = torch.full((128, 128), -100.0)
        for (previous, following), p in probabilities.items():
            table[ord(previous), ord(following)] = math.log(p)
        table[:, 127] = (1 - table.exp().sum(1)).clamp(min=1e-9).log()  # the rest of each row's mass
        self.seen = []

        def body(ids):
            self.seen.append(ids.tolist())
            return table[ids]

        self.lm = LanguageModel(body, lambda logits: logits, self.encode, n_positions, torch.device("cpu"))

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]


def test_by_hand():
    p = {("b", " "): 0.6, (" ", "x"): 0.5, (" ", "y"): 0.3, (" ", " "): 0.1}
    p |= {("x", "y"): 0.2, ("y", "y"): 0.9, ("\0", " "): 0.7}
    loaded = Letters(p, 50)
    # " x" is likeliest at each letter, " y" is not at "y"; in " xy" the "y" is not (0.2 against the rest's 0.8).
    texts = ["a b x", "a b y", "a b xy", "x"]
    result = lambada.evaluate_texts(loaded, texts, batch_size=3)
    expected = [0.6 * 0.5, 0.6 * 0.3, 0.6 * 0.5 * 0.2, 0.7 * 0.5]
    assert (result["rows"], result["acc"]) == (4, 0.5)
    assert result["perplexity"] == pytest.approx(math.prod(expected) ** (-1 / 4), rel=1e-5)
    assert result["acc_ci95"] == pytest.approx(1.96 * 0.25)
    assert [len(batch) for batch in loaded.seen] == [3, 1]
    assert loaded.seen[1][0][:1] == [0]  # a text of one word is predicted from end-of-text
    # Spaces at a context's end belong to the target: of "a b  x" it is "  x".
    assert lambada.evaluate_texts(loaded, ["a b  x"], batch_size=1)["perplexity"] == pytest.approx(1 / 0.03, rel=1e-5)


def test_long_texts_lose_tokens_on_the_left():
    loaded = Letters({(" ", "x"): 0.5, ("b", " "): 0.6, ("x", "x"): 0.4}, 3)
    result = lambada.evaluate_texts(loaded, ["a b x"], batch_size=1)
    assert loaded.seen == [[[ord(character) for character in " b "]]]
    assert result["perplexity"] == pytest.approx(1 / (0.6 * 0.5), rel=1e-5)
    result = lambada.evaluate_texts(loaded, ["a b xxxx"], batch_size=1)  # of five the last three
    assert result["perplexity"] == pytest.approx(0.4**-3, rel=1e-5)


@pytest.mark.parametrize(("n_positions", "limit"), [(256, 10), pytest.param(60, 20, marks=pytest.mark.slow)])
def test_equals_lm_evaluation_harness(n_positions, limit, tiny_gpt2):
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")
    if not ROWS.is_file():
        pytest.skip(f"needs LAMBADA's rows, {ROWS.relative_to(ASSETS.parent)}")
    from eval import harness

    texts = lambada.read_rows(ROWS)
    assert (len(texts), lambada.digest(texts)) == (lambada.N_ROWS, lambada.SHA256)
    texts, loaded = texts[:limit], tiny_gpt2(n_positions, initializer_range=0.5)
    theirs = harness.evaluate(loaded, ["lambada_openai"], rows=ROWS, limit=limit, batch_size=8)
    metrics = theirs["results"]["lambada_openai"]
    result = lambada.evaluate_texts(loaded, texts, batch_size=7)
    assert result["acc"] == pytest.approx(metrics["acc,none"], abs=1e-3)
    assert math.log(result["perplexity"]) == pytest.approx(math.log(metrics["perplexity,none"]), abs=1e-3)
    requests = [lambada.encode_text(loaded, text) for text in texts]
    assert max(request.n_scored for request in requests) > 1
    assert (max(len(request.tokens) for request in requests) > n_positions + 1) == (n_positions == 60)


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"text": "fine"}\n["no"]\n', "line 2: one JSON object a line"), ('{"text": 3}\n', "line 1: one"), ("", "empty")],
)
def test_files_that_are_no_rows(content, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(common.UserError, match=message):
        lambada.read_rows(path)


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
    monkeypatch.setattr(lambada, "SHA256", lambada.digest(lambada.read_rows(rows)))
    lambada.main()
    assert json.loads(output.read_text())["lambada"]["data_set"] == "EleutherAI/lambada_openai"
