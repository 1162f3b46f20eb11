"""GPT-2's tokenizer: tiktoken and transformers give the same ids, and training text is never parsed."""

import random
import tempfile
import threading
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from tokenizers import Regex, pre_tokenizers

from recipe.data import documents
from recipe.data.documents import MAX_PIECE, Piece, in_pieces, tokenized
from recipe.data.tokenizer import END_OF_TEXT, encode, encoding, hf_tokenizer, open_tokenizer, train_tokenizer
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def gpt2_tokenizer():
    return hf_tokenizer()


# The words of Llama 3's tokenizer, in which punctuation takes the line breaks after it.
LLAMA_3 = pre_tokenizers.Split(
    Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ),
    "isolated",
)


def test_the_bundled_files_are_read_as_by_tiktoken_but_without_its_cache(tmp_path, monkeypatch):
    """The cache is in the directory for temporary files, where anybody may have put a FIFO of its name."""
    for variable in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = encoding.__wrapped__()._mergeable_ranks
    assert list(tmp_path.iterdir()) == []
    bpe = ROOT / "recipe" / "data" / "gpt2_bpe"
    assert ranks == data_gym_to_mergeable_bpe_ranks(str(bpe / "vocab.bpe"), str(bpe / "encoder.json"))


# Arbitrary characters, and strings that the tokenizer's pattern, or transformers, treats specially
SPECIAL = ["'s", " 're", "   ", "\n\n", "\r\n", " \n ", "\u3000", "\x1c", "1²", "a!\n", "_\nb", "<|endoftext|>"]
texts = st.lists(st.text(max_size=20) | st.sampled_from(SPECIAL))


@settings(max_examples=300, deadline=None)
@given(texts.map("".join))
@example("a<|endoftext|>b")
def test_any_text_has_transformers_ids_and_comes_back(gpt2_tokenizer, text):
    """A literal end-of-text is plain text here, and a token in transformers."""
    ids = encode(text).tolist()
    assert encoding().decode(ids) == text
    assert END_OF_TEXT not in ids
    assert ids == gpt2_tokenizer(text)["input_ids"] or "<|endoftext|>" in text


def test_a_million_spaces_before_a_word():
    ids = encode("x" + " " * 1_000_000 + "word")
    assert encoding().decode(ids.tolist()) == "x" + " " * 1_000_000 + "word"
    assert ids[-1] == encode(" word")[0]  # the last space belongs to the word


@settings(max_examples=300, deadline=None)
@given(texts.map("".join))
def test_a_cut_never_changes_the_tokens(text):
    """Here pieces have three characters and more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE", 2)
        pieces = list(in_pieces(text))
    assert [token for piece in pieces for token in encode(piece).tolist()] == encode(text).tolist()
    if all(piece[-1].isalnum() for piece in pieces[:-1]):  # as where a text has words
        words = [word for piece in pieces for word, _ in LLAMA_3.pre_tokenize_str(piece)]
        assert words == [word for word, _ in LLAMA_3.pre_tokenize_str(text)], "as many own tokenizers split a text"


def test_a_text_whose_lines_end_in_punctuation_is_cut_between_them():
    """As in Chinese and Japanese."""
    lines = 30_000 * "汉字是书写汉语的文字。\n"
    first, *_ = in_pieces(lines)
    assert len(first) < 300_000
    assert first.endswith("。")


def test_text_is_tokenized_on_the_cores_that_a_container_may_use(tmp_path, monkeypatch):
    """More threads use up its quota at once, and the process that trains waits for the next one with them."""
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    monkeypatch.setattr("recipe.utils.machine.CGROUP", tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64), raising=False)
    before = set(threading.enumerate())
    reader = tokenized((Piece(i, "word " * 40_000, None) for i in range(20)), open_tokenizer("gpt2"))
    next(reader)
    assert len(set(threading.enumerate()) - before) == 2
    reader.close()


def test_a_tokenizer_is_trained_on_text_without_blanks_in_seconds(tmp_path):
    """As Chinese without punctuation: two seconds, where one word of this length would take minutes."""
    draw = random.Random(0)
    text = "".join(chr(draw.randint(0x4E00, 0x9FFF)) for _ in range(200_000))
    started = time.monotonic()
    tokenizer = open_tokenizer(str(train_tokenizer([text], tmp_path / "own", vocab_size=4096)))
    assert time.monotonic() - started < 60
    (tokens,) = tokenizer.encode([text])
    assert (tokenizer.vocab_size, len(tokens) < 400_000) == (4096, True)
    assert tokenizer.decode(tokens.tolist()).decode() == text


def test_pieces_of_a_text_without_blanks_are_bounded():
    assert [len(p) for p in in_pieces("x" * (2 * MAX_PIECE + 5))] == [MAX_PIECE, MAX_PIECE, 5]
