"""The tokenizer of a run: GPT-2's, from the files bundled beside this module, or another whose tokens keep all text.

GPT-2's encodes with tiktoken, and is exported with transformers.

Source: OpenAI, "Language Models are Unsupervised Multitask Learners" (2019), section 2.2; files of the `gpt2` release.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tiktoken
from tokenizers import Tokenizer

from recipe.utils.download import local_copy
from recipe.utils.errors import UserError, first_line, writing
from recipe.utils.shards import dtype_of
from recipe.utils.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast
    from transformers.models.gpt2 import tokenization_gpt2

GPT2 = "gpt2"
END_OF_TEXT = 50256
VOCAB_SIZE = 50257

# Blanks of all kinds, what patterns split, and characters with all bytes that UTF-8 has
_PROBES = (
    "One  two   three:\n\n\tx = 12345;\r\n",
    "naïve café, 日本語 🙂\n",
    "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x400), *range(0xE000, 0x110000, 0x400)))),
)

_FILES = Path(__file__).parent / "gpt2_bpe"
# What a tokenizer.json says of a space or "▁" that precedes a text, and of dropping it again, as it is without that
_NO_PREFIX = {"add_prefix_space": False, "prepend_scheme": "never", "prepend": "", "start": 0}
_LONG = re.compile(r"\S{1000}")
# OpenAI's pattern (encoder.py of the gpt2 release), with the possessive quantifiers of tiktoken: same pieces.
_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@lru_cache(maxsize=1)
def encoding() -> tiktoken.Encoding:
    """The tiktoken encoding, built offline."""
    # Not with tiktoken.load, which first looks for these files in /tmp/data-gym-cache, where anybody may put others.
    characters = {chr(byte): byte for byte in range(256) if chr(byte).isprintable() and byte != ord(" ")}
    unprintable = [byte for byte in range(256) if byte not in characters.values()]
    characters |= {chr(256 + number): byte for number, byte in enumerate(unprintable)}
    tokens = json.loads((_FILES / "encoder.json").read_bytes()).items()  # a token's number is its rank
    ranks = {bytes(map(characters.__getitem__, token)): rank for token, rank in tokens if rank != END_OF_TEXT}
    return tiktoken.Encoding(
        "gpt2",
        pat_str=_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": END_OF_TEXT},
        explicit_n_vocab=VOCAB_SIZE,
    )


def encode(text: str) -> np.ndarray:
    """Token ids of `text`, (tokens,), uint16. A literal "<|endoftext|>" is ordinary text."""
    try:
        return encoding().encode_to_numpy(text, disallowed_special=()).astype(np.uint16)
    except ValueError:
        # The regex engine's stack overflows on several 100,000 spaces in a row; the one of transformers does not.
        tokenizer = hf_tokenizer().backend_tokenizer
        tokenizer.encode_special_tokens = True
        return np.array(tokenizer.encode(text).ids, np.uint16)


def hf_tokenizer() -> tokenization_gpt2.GPT2Tokenizer:
    """The same tokenizer for transformers, built offline. Unlike `encode` it parses a literal "<|endoftext|>", which is
    also its padding token: GPT-2 has no other special token."""
    from transformers.models.gpt2 import tokenization_gpt2  # takes seconds to import; making shards does not need it

    vocab, merges = str(_FILES / "encoder.json"), str(_FILES / "vocab.bpe")
    return tokenization_gpt2.GPT2Tokenizer(vocab, merges, model_max_length=1024, pad_token="<|endoftext|>")


class GPT2Tokenizer:
    """GPT-2's tokenizer.

    Attributes:
        name: for display; of a directory only the last component, since its path is private.
        digest: equal for tokenizers that produce the same tokens.
        end_of_text: the id of the token that precedes each document; `end_of_text_token` is its text.
        padding: the id of the padding token: end-of-text, unless the tokenizer has its own.
    """

    name = digest = GPT2
    vocab_size = VOCAB_SIZE
    end_of_text, end_of_text_token = END_OF_TEXT, "<|endoftext|>"
    padding = END_OF_TEXT

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return hf_tokenizer()

    @property
    def dtype(self) -> np.dtype:
        """The type of its tokens: uint16, or uint32 if there are more than 65,536."""
        return dtype_of(self.vocab_size)

    def encode(self, texts: list[str], *, continuing: bool = False) -> list[np.ndarray]:
        """The tokens of each text, (tokens,), of `dtype`. What looks like end-of-text is ordinary text. With
        `continuing`, no text is the start of a document, before which some tokenizers put a space."""
        return [encode(text) for text in texts]

    def decode(self, ids: list[int]) -> bytes:
        """The text of tokens that continue another text: UTF-8 if they form complete characters."""
        return encoding().decode_bytes(ids)

    def vocabulary(self) -> dict[str, int]:
        """{token, as it is in tokenizer.json: id}, with the added tokens."""
        return self._tokenizer.get_vocab()

    def save(self, directory: Path, max_length: int) -> None:
        """Writes the files that `AutoTokenizer.from_pretrained(directory)` loads, for `max_length` positions."""
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer.model_max_length = max_length
        if isinstance(tokenizer.chat_template, dict):  # of files, which a model that only continues text does not need
            tokenizer.chat_template = tokenizer.chat_template.get("default")
        tokenizer.save_pretrained(directory)


class CustomTokenizer(GPT2Tokenizer):
    """A tokenizer from a directory or the Hub, loaded by transformers: a byte-level BPE, or another whose tokens give
    the text back, as those of SentencePiece do where its vocabulary has the bytes (Llama 2)."""

    def __init__(self, name: str):
        """Raises UserError for a tokenizer that cannot be loaded, or cannot make shards."""
        self._tokenizer = _load(name)
        self.name = Path(name).resolve().name if Path(name).exists() else name
        self.vocab_size = max(self.vocabulary().values()) + 1
        self.end_of_text, self.end_of_text_token = self._tokenizer.eos_token_id, self._tokenizer.eos_token
        self._tokenizer.pad_token = self._tokenizer.pad_token or self.end_of_text_token
        self.padding = self._tokenizer.pad_token_id
        settings = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in settings["added_tokens"]:  # text may contain <|user|>, but end-of-text is between documents
            token["special"] = token["content"] == self.end_of_text_token
        if dropout := settings["model"].get("dropout"):
            raise UserError(
                f"tokenizer {name} has a dropout of {dropout}, with which the same text has other tokens each time; "
                'set "dropout" to null in its tokenizer.json'
            )
        without_prefix = settings | {
            part: json.loads(json.dumps(settings[part]), object_hook=_without_prefix)
            for part in ("normalizer", "pre_tokenizer", "decoder")
        }
        _check_keeps_text(name, _backend(without_prefix | {"normalizer": None}))
        self._backend, self._continuing = _backend(settings), _backend(without_prefix)
        self.digest = _digest(self._backend.to_str(), self.end_of_text)

    def encode(self, texts: list[str], *, continuing: bool = False) -> list[np.ndarray]:
        """Like GPT2Tokenizer's, but special tokens other than end-of-text are those tokens."""
        backend = self._continuing if continuing else self._backend
        return [
            np.array(result.ids, self.dtype) for result in backend.encode_batch_fast(texts, add_special_tokens=False)
        ]

    def decode(self, ids: list[int]) -> bytes:
        """Like GPT2Tokenizer's; incomplete characters become U+FFFD."""
        return self._continuing.decode(ids, skip_special_tokens=False).encode()


def _without_prefix(pairs: dict) -> dict:
    return {key: _NO_PREFIX.get(key, value) for key, value in pairs.items()}


def _backend(settings: dict) -> Tokenizer:
    """The tokenizer of a tokenizer.json for texts of any length."""
    backend = Tokenizer.from_str(json.dumps(settings))
    backend.encode_special_tokens = True  # as ordinary text
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_keeps_text(name: str, tokenizer: Tokenizer) -> None:
    """Raises UserError if the tokens of a text do not decode to it. `tokenizer` has no normalizer and no prefix space,
    which may change a text: the model's users expect them."""
    for probe in _PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False).ids
        if (text := tokenizer.decode(ids, skip_special_tokens=False)) != probe:
            raise UserError(
                f"tokenizer {name} loses text: of {probe[:40]!r}, its tokens give back {text[:40]!r}; give it "
                "ByteLevel as its last pre_tokenizer and its decoder, or choose one like GPT-2's or Llama's"
            )


def _digest(tokenizer_json: str, end_of_text: int) -> str:
    """16 hexadecimal digits of a hash of those parts of a tokenizer.json that determine the tokens. `tokenizer_json` is
    that of the loaded tokenizer, after tokenizer_config.json is applied (add_prefix_space, added tokens)."""
    # Null and false count as absent: later versions of the library write such keys for their new options.
    parts = json.loads(
        tokenizer_json, object_hook=lambda pairs: {k: v for k, v in pairs.items() if v is not None and v is not False}
    )
    relevant = [parts.get(key) for key in ("normalizer", "pre_tokenizer", "model", "added_tokens")]
    return hashlib.sha256(json.dumps([*relevant, end_of_text], sort_keys=True).encode()).hexdigest()[:16]


_HUB_FILES = ["*token*.json", "config.json", "vocab.json", "merges.txt"]
_REQUIRED = "tokenizer.json, such as a run's checkpoint: --tokenizer runs/NAME/step_NUMBER"


@lru_cache(maxsize=8)
def open_tokenizer(name: str) -> GPT2Tokenizer:
    """The tokenizer that a configuration names. Raises UserError."""
    return GPT2Tokenizer() if name == GPT2 else CustomTokenizer(name)


def _load(name: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    directory = local_copy(name, "tokenizer", _HUB_FILES, _REQUIRED)
    try:
        tokenizer = load_tokenizer(directory)
    except Exception as error:  # the libraries raise many kinds
        raise UserError(
            f"tokenizer {name} cannot be loaded ({first_line(error)}); give a directory that "
            "holds tokenizer.json, ORG/NAME on the Hub, or gpt2"
        ) from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        kind = type(tokenizer).__name__
        raise UserError(
            f"tokenizer {name} is a {kind}, which has no tokenizer.json; choose one like GPT-2's or Llama's"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(
            f'tokenizer {name} has no eos_token, which precedes each document; name one of its tokens as "eos_token" '
            "in its tokenizer_config.json"
        )
    return tokenizer if tokenizer("a") == tokenizer("a", add_special_tokens=False) else _without_added(tokenizer)


def _without_added(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """A copy of the tokenizer that adds no token to a text. The start or end that some add, as Llama 3's and RoBERTa's
    do, is in no document here: with it a prompt in transformers would begin with a token that the model never saw, or
    end before its answer."""
    from transformers import PreTrainedTokenizerFast  # other classes would add them again when they are loaded

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        extra_special_tokens=tokenizer.extra_special_tokens,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )


def train_tokenizer(texts: Iterable[str], directory: Path | str, vocab_size: int) -> Path:
    """Trains a byte-level BPE of `vocab_size` tokens, including end-of-text, and saves it to `directory`, which it
    returns."""
    # Chinese without punctuation, or DNA, is one word to BPE, whose training takes time by the square of its length.
    texts = (_LONG.sub(r"\g<0>\n", text) if any(len(run) > 1000 for run in text.split()) else text for text in texts)
    tokenizer = hf_tokenizer().train_new_from_iterator(texts, vocab_size, show_progress=False)
    with writing(Path(directory), "fix that"):
        tokenizer.save_pretrained(directory)
    return Path(directory)
