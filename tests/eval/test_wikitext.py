"""WikiText-2: which tokens the windows score, against transformers' own loss, and the text's words and digest."""

import hashlib
import json
import math
import sys

import datasets
import numpy as np
import pytest
import torch

from eval import common, wikitext
from tests.conftest import ASSETS, SHAKESPEARE

JOINED = ASSETS / "text" / "wikitext-2-raw-v1.test.joined.txt"


@pytest.mark.parametrize(
    ("n_tokens", "length", "stride"),
    [(100, 16, 8), (100, 16, 5), (97, 16, 1), (40, 16, 8), (41, 16, 8), (16, 16, 8), (7, 16, 8), (2, 16, 8)],
)
def test_overlapping_windows_score_each_token_but_the_first_once(n_tokens, length, stride):
    windows = wikitext.sliding_windows(n_tokens, length, stride)
    scored = [i for window in windows for i in range(window.end - window.n_scored, window.end)]
    assert scored == list(range(1, n_tokens))
    assert (windows[0].begin, windows[0].n_scored) == (0, min(length, n_tokens) - 1)
    assert [window.begin for window in windows] == [stride * i for i in range(len(windows))]
    assert all(window.end - window.begin == length for window in windows[:-1])
    assert windows[-1].end == n_tokens
    # After the first window every scored token has at least a window less the stride before it, the first included.
    assert all(window.end - window.n_scored - window.begin >= length - stride for window in windows[1:])


def test_windows_without_overlap_leave_out_their_first_token():
    windows = wikitext.sliding_windows(35, 16, 16)
    assert windows == [wikitext.Window(0, 16, 15), wikitext.Window(16, 32, 15), wikitext.Window(32, 35, 2)]
    assert wikitext.sliding_windows(33, 16, 16) == windows[:2]  # a window of one token scores nothing
    assert wikitext.sliding_windows(1, 16, 16) == wikitext.sliding_windows(0, 16, 8) == []


def guide(model, ids: torch.Tensor, length: int, stride: int, n_windows: int) -> list[tuple[float, int]]:
    """(mean loss, labels that count) of each window, with what is not to be scored labelled -100."""
    windows, previous = [], 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + length, ids.shape[1])
        labels = ids[:, begin:end].clone()
        labels[:, : previous - begin if previous > begin else 0] = -100
        with torch.no_grad():
            loss = model(ids[:, begin:end], labels=labels).loss
        windows.append((loss.item(), (labels[:, 1:] != -100).sum().item()))
        previous = end
        if end == ids.shape[1] or len(windows) == n_windows:
            break
    return windows


@pytest.fixture(params=["wikitext", "shakespeare"])
def text(request) -> str:
    if request.param == "shakespeare":
        return SHAKESPEARE.read_text()[:700]
    if not JOINED.is_file():
        pytest.skip(f"needs WikiText-2's test split, {JOINED.relative_to(ASSETS.parent)}")
    return wikitext.joined_text(JOINED)[0][:1500]


@pytest.mark.parametrize("stride", [32, 24, 64])
def test_perplexity_is_that_of_transformers_loss(stride, text, tiny_gpt2):
    loaded = tiny_gpt2(64)
    ids = loaded.encode(text)
    expected = guide(loaded.model, torch.tensor([ids]), 64, stride, n_windows=5)
    windows = wikitext.sliding_windows(len(ids), 64, stride)[:5]
    nlls = wikitext.score_windows(loaded, np.array(ids), windows, batch_size=3)
    assert [window.n_scored for window in windows] == [n for _, n in expected]
    assert nlls == pytest.approx([loss * n for loss, n in expected], rel=1e-5)

    # The whole text, partial last window included.
    every = guide(loaded.model, torch.tensor([ids]), 64, stride, n_windows=10**6)
    result = wikitext.evaluate_text(loaded, text, length=64, stride=stride, batch_size=4)
    loss = sum(loss * n for loss, n in every) / sum(n for _, n in every)
    n_unscored = len(every) if stride == 64 else 1
    assert (result["windows"], result["tokens"]) == (len(every), len(ids) - n_unscored)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    words = len(text.split()) + text.count("\n\n") + 1
    assert result["word_perplexity"] == pytest.approx(math.exp(loss * len(ids) / words), rel=1e-3)
    assert result["bits_per_byte"] == pytest.approx(loss * result["tokens"] / result["bytes"] / math.log(2), rel=1e-5)
    if stride != 64:
        assert result["bytes"] == len(text.encode()) - len(loaded.tokenizer.decode(ids[:1]).encode())
        # The guide weighs later windows by one label too few, which is not to be seen in a long text.
        weights = [n - (i > 0) for i, (_, n) in enumerate(every)]
        theirs = sum(loss * w for (loss, _), w in zip(every, weights, strict=True)) / sum(weights)
        assert theirs == pytest.approx(loss, rel=1e-2)


def test_words_are_rows_and_what_they_hold():
    rows = ["", " = Title = \n", "", " One two , three . \n", " Next \n", "", ""]
    assert wikitext.count_words("\n\n".join(rows)) == 3 + 5 + 1 + len(rows)
    assert wikitext.count_words("") == 1  # one row, which is empty


def test_limited_words_are_those_covered(tiny_gpt2):
    loaded, text = tiny_gpt2(64), "one two three four five six seven eight nine ten"
    result = wikitext.evaluate_text(loaded, text, length=4, stride=2, batch_size=4, limit=2)
    assert (result["windows"], result["tokens"], result["words"]) == (2, 5, 6 + 1)


def test_the_whole_split_is_known():
    if not JOINED.is_file():
        pytest.skip(f"needs WikiText-2's test split, {JOINED.relative_to(ASSETS.parent)}")
    text, source = wikitext.joined_text(JOINED)
    assert source == str(JOINED)
    assert hashlib.sha256(text.encode()).hexdigest() == wikitext.SHA256
    assert wikitext.count_words(text) == 245_569  # table 1 of arXiv:1609.07843


def command(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["wikitext", *map(str, arguments)])
    wikitext.main()


def test_command(whole_run, tmp_path, monkeypatch, capsys):
    text, output = tmp_path / "rows.txt", tmp_path / "results.json"
    text.write_bytes(b" A row \r\n\r\n\r\n and another row of it \r\n" * 9)
    flags = [whole_run[0], "--device", "cpu", "--text", text, "--output", output]
    command(monkeypatch, *flags)
    result = json.loads(output.read_text())["wikitext2"]
    assert (result["sequence_length"], result["stride"]) == (16, 8)  # the run's, and half of it
    assert result["sha256"] == hashlib.sha256(text.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
    assert {"model", "perplexity", "word_perplexity", "bits_per_byte", "tokens", "words", "bytes"} <= set(result)
    assert result["data_set"] == "rows.txt"
    shown = capsys.readouterr().out
    assert "this is another text" in shown
    assert "18.34" in shown

    command(monkeypatch, *flags, "--stride", 32, "--sequence_length", 32, "--limit_windows", 2)
    result = json.loads(output.read_text())["wikitext2"]
    assert (result["windows"], result["limit_windows"], result["tokens"]) == (2, 2, 62)
    assert result["data_set"] == "rows.txt"
    monkeypatch.setattr(wikitext, "SHA256", result["sha256"])  # as if this were the test split
    command(monkeypatch, *flags, "--limit_windows", 2)
    assert json.loads(output.read_text())["wikitext2"]["data_set"] == "Salesforce/wikitext"
    assert "(no overlap)" in capsys.readouterr().out
    for wrong, message in ((["--stride", 33], "tokens would be skipped"), (["--sequence_length", 65], "from 2 to 64")):
        with pytest.raises(common.UserError, match=message):
            command(monkeypatch, *flags, *wrong)


def test_without_text_the_hub_is_asked(monkeypatch):
    with pytest.raises(common.UserError, match=r"the Hub does not answer .* Use --text FILE"):
        wikitext.joined_text(None)
    asked = []

    def load_dataset(*names, split):
        asked.append((*names, split))
        return datasets.Dataset.from_dict({"text": ["", " = A = \n", " b \n"]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    text, source = wikitext.joined_text(None)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test")]
    assert (text, source) == ("\n\n = A = \n\n\n b \n", "Salesforce/wikitext/wikitext-2-raw-v1")
