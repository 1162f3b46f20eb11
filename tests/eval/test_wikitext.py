"""WikiText-2: which tokens the windows score, the loss beside transformers' own, and the text's words and digest."""

import hashlib
import json
import math
import sys

import numpy as np
import pytest
import torch

from eval import common, wikitext
from tests.conftest import ASSETS, SHAKESPEARE

JOINED = ASSETS / "text" / "wikitext-2-raw-v1.test.joined.txt"


@pytest.mark.parametrize(
    ("n_tokens", "length", "stride"), [(100, 16, 8), (100, 16, 5), (97, 16, 1), (41, 16, 8), (7, 16, 8), (2, 16, 8)]
)
def test_overlapping_windows_score_each_token_but_the_first_once(n_tokens, length, stride):
    windows = wikitext.sliding_windows(np.arange(n_tokens), length, stride)
    assert [t for window in windows for t in window.tokens[-window.n_scored :]] == list(range(1, n_tokens))
    assert windows[0].n_scored == min(length, n_tokens) - 1
    assert [window.tokens[0] for window in windows] == [stride * i for i in range(len(windows))]
    assert all(len(window.tokens) == length for window in windows[:-1])
    # After the first window every scored token has at least a window less the stride before it.
    assert all(len(window.tokens) - window.n_scored >= length - stride for window in windows[1:])


def test_windows_without_overlap_leave_out_their_first_token():
    windows = wikitext.sliding_windows(np.arange(35), 16, 16)
    assert [(w.tokens[0], len(w.tokens), w.n_scored) for w in windows] == [(0, 16, 15), (16, 16, 15), (32, 3, 2)]
    assert len(wikitext.sliding_windows(np.arange(33), 16, 16)) == 2  # a window of one token scores nothing
    assert wikitext.sliding_windows(np.arange(1), 16, 16) == wikitext.sliding_windows(np.arange(0), 16, 8) == []


def guide(model, ids: torch.Tensor, length: int, stride: int) -> list[tuple[float, int]]:
    """(mean loss, labels that count) of each window of transformers' guide: what is not scored is labelled -100."""
    windows, previous = [], 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : max(0, previous - begin)] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=labels).loss
        windows.append((loss.item(), (labels[:, 1:] != -100).sum().item()))
        previous = end
        if end == ids.shape[1]:
            break
    return windows


@pytest.mark.parametrize("stride", [32, 24, 64])
def test_perplexity_is_that_of_transformers_loss(stride, tiny_gpt2):
    loaded, text = tiny_gpt2(64), SHAKESPEARE.read_text()[:700]
    ids = loaded.encode(text)
    windows = guide(loaded.model, torch.tensor([ids]), 64, stride)
    result = wikitext.evaluate_text(loaded, text, length=64, stride=stride, batch_size=4)
    loss = sum(loss * n for loss, n in windows) / sum(n for _, n in windows)
    n_unscored = len(windows) if stride == 64 else 1
    assert (result["windows"], result["tokens"]) == (len(windows), len(ids) - n_unscored)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    words = len(text.split()) + text.count("\n\n") + 1
    assert result["word_perplexity"] == pytest.approx(math.exp(loss * len(ids) / words), rel=1e-3)
    assert result["bits_per_byte"] == pytest.approx(loss * result["tokens"] / result["bytes"] / math.log(2), rel=1e-5)
    if stride != 64:
        assert result["bytes"] == len(text.encode()) - len(loaded.tokenizer.decode(ids[:1]).encode())


def test_words_are_those_of_the_rows_and_of_what_is_covered(tiny_gpt2):
    rows = ["", " = Title = \n", "", " One two , three . \n", " Next \n", "", ""]
    assert wikitext.count_words("\n\n".join(rows)) == 3 + 5 + 1 + len(rows)
    assert wikitext.count_words("") == 1  # one row, which is empty
    text = "one two three four five six seven eight nine ten"
    result = wikitext.evaluate_text(tiny_gpt2(64), text, length=4, stride=2, batch_size=4, limit=2)
    assert (result["windows"], result["tokens"], result["words"]) == (2, 5, 6 + 1)


def test_the_whole_split_is_known():
    if not JOINED.is_file():
        pytest.skip(f"needs WikiText-2's test split, {JOINED.relative_to(ASSETS.parent)}")
    text, source = wikitext.joined_text(JOINED)
    assert source == str(JOINED)
    assert hashlib.sha256(text.encode()).hexdigest() == wikitext.SHA256
    assert wikitext.count_words(text) == 245_569  # table 1 of arXiv:1609.07843


def test_command(whole_run, tmp_path, monkeypatch, capsys):
    text, output = tmp_path / "rows.txt", tmp_path / "results.json"
    text.write_bytes(b" A row \r\n\r\n\r\n and another row of it \r\n" * 9)

    def command(*more) -> dict:
        arguments = [whole_run[0], "--device", "cpu", "--text", text, "--output", output, *more]
        monkeypatch.setattr(sys, "argv", ["wikitext", *map(str, arguments)])
        wikitext.main()
        return json.loads(output.read_text())["wikitext2"]

    result = command()
    assert (result["sequence_length"], result["stride"]) == (16, 8)  # the run's, and half of it
    assert result["sha256"] == hashlib.sha256(text.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    assert {"model", "perplexity", "word_perplexity", "bits_per_byte", "tokens", "words", "bytes"} <= set(result)
    assert result["data_set"] == "rows.txt"
    shown = capsys.readouterr().out
    assert "this is another text" in shown
    assert "18.34" in shown

    monkeypatch.setattr(wikitext, "SHA256", result["sha256"])  # as if this were the test split
    result = command("--stride", 32, "--sequence_length", 32, "--limit_windows", 2)
    assert (result["windows"], result["limit_windows"], result["tokens"]) == (2, 2, 62)
    assert result["data_set"] == "Salesforce/wikitext"
    assert "(no overlap)" in capsys.readouterr().out
    for wrong, message in ((["--stride", 33], "tokens would be skipped"), (["--sequence_length", 65], "from 2 to 64")):
        with pytest.raises(common.UserError, match=message):
            command(*wrong)
