"""Loads the tokenizer of a directory or of a model on the Hub."""

import json
from importlib.util import find_spec
from typing import Any

from tokenizers import Tokenizer

from recipe.utils.errors import UserError


def load_tokenizer(name: str) -> Any:
    """The tokenizer that transformers loads, with the normalizer and the pre-tokenizer of its tokenizer.json. Runs no
    code of the model's. Raises UserError, or whatever the libraries raise.

    transformers 5 builds a GPT2Tokenizer from the vocabulary and the merges alone, and so splits text as GPT-2 does
    whatever the file says, as that of OLMo 2 or KoGPT2 (huggingface/transformers#45920).
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # takes seconds; making shards does not need it
    from transformers.utils import cached_file

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except ValueError as error:  # without the package, transformers reads its files as tiktoken's: "Error parsing line"
        if ".model" in str(error) and find_spec("sentencepiece") is None:
            raise UserError("it needs the package sentencepiece: pip install sentencepiece") from error
        raise
    file = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    if type(tokenizer).__name__ != "GPT2Tokenizer" or not file:
        return tokenizer
    backend = Tokenizer.from_file(file)
    settings = json.loads(backend.to_str())
    splits = settings["pre_tokenizer"] or {}
    if not settings["normalizer"] and splits.get("type") == "ByteLevel" and splits["use_regex"]:
        return tokenizer
    special_tokens = tokenizer.special_tokens_map.items()  # one that the class adds by default may not be a token here
    known: dict[str, Any] = {key: token for key, token in special_tokens if backend.token_to_id(token) is not None}
    return PreTrainedTokenizerFast.from_pretrained(name, **known)
