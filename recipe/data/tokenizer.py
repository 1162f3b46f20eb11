"""GPT-2's byte-level BPE from the files bundled beside this module: tiktoken to make shards, transformers to export.

Source: OpenAI, "Language Models are Unsupervised Multitask Learners" (2019), section 2.2; files of the `gpt2` release.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks

if TYPE_CHECKING:
    from transformers import GPT2TokenizerFast

END_OF_TEXT = 50256
VOCAB_SIZE = 50257
CONTEXT_LENGTH = 1024

_FILES = Path(__file__).parent / "gpt2_bpe"
_VOCAB_BPE_SHA256 = "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"
_ENCODER_JSON_SHA256 = "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"

# OpenAI's pattern (encoder.py of the gpt2 release), in the possessive form in which tiktoken ships it: same pieces.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# What \s means to tiktoken's regex engine (Unicode White_Space). Python's \s takes \x1c-\x1f as well.
_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_BEFORE_LAST_SPACE_OF_LONG_RUN = re.compile(f"(?<=[{_SPACE}]{{1000}})(?=[{_SPACE}][^{_SPACE}])")


@lru_cache(maxsize=1)
def encoding() -> tiktoken.Encoding:
    """The tiktoken encoding, built offline. Raises ValueError if a bundled file is damaged."""
    # tiktoken keeps a copy of both files in a temporary directory, by path. The hashes make it ignore a stale copy;
    # switching that cache off would mean changing the environment of the whole process.
    ranks = data_gym_to_mergeable_bpe_ranks(
        str(_FILES / "vocab.bpe"),
        str(_FILES / "encoder.json"),
        vocab_bpe_hash=_VOCAB_BPE_SHA256,
        encoder_json_hash=_ENCODER_JSON_SHA256,
    )
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def encode(text: str) -> np.ndarray:
    """Token ids of `text`, shape (tokens,), uint16.

    A literal "<|endoftext|>" is ordinary text: END_OF_TEXT never comes out. Lone surrogates become U+FFFD.
    """
    try:
        return _encode(text)
    except UnicodeEncodeError:
        return encode(without_surrogates(text))
    except ValueError:
        # The regex engine's stack runs out on some 100,000s of spaces before a word. The run's last space belongs to
        # the word and the others are one piece, so a cut between them changes no token.
        cuts = [0, *(m.end() for m in _BEFORE_LAST_SPACE_OF_LONG_RUN.finditer(text)), len(text)]
        return np.concatenate([_encode(text[a:b]) for a, b in pairwise(cuts)])


def without_surrogates(text: str) -> str:
    """`text` with U+FFFD for each lone surrogate, which JSON may hold and UTF-8 may not."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _encode(text: str) -> np.ndarray:
    return encoding().encode_to_numpy(text, disallowed_special=()).astype(np.uint16)


def hf_tokenizer(max_length: int = CONTEXT_LENGTH) -> GPT2TokenizerFast:
    """The same tokenizer as `transformers` knows it, built offline; it warns of texts of more than `max_length` tokens,
    and truncates there if asked to. It does parse a literal "<|endoftext|>", which also pads batches: GPT-2 has no
    other special token."""
    from transformers import GPT2TokenizerFast  # seconds to import; only export needs it

    vocab = json.loads((_FILES / "encoder.json").read_text(encoding="utf-8"))
    merges = (_FILES / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]  # after a version line
    return GPT2TokenizerFast(
        vocab=vocab,
        merges=[tuple(merge.split()) for merge in merges],
        model_max_length=max_length,
        pad_token="<|endoftext|>",
    )


def save_tokenizer(directory: Path, max_length: int = CONTEXT_LENGTH) -> None:
    """Write tokenizer.json and tokenizer_config.json, which `AutoTokenizer.from_pretrained(directory)` loads, for a
    model of `max_length` positions."""
    hf_tokenizer(max_length).save_pretrained(directory)
