"""Measures a text before recipe/best.py chooses a model: its number of tokens, and by which tokenizer."""

import filecmp
import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from recipe.config import Config
from recipe.config.catalog import MADE_HERE
from recipe.data.documents import TextFiles
from recipe.data.hub_text import HubText
from recipe.data.tokenizer import open_tokenizer, train_tokenizer
from recipe.utils.errors import UserError

SHIPPED_TEXT = Path(__file__).with_name("tiny_shakespeare.txt")
OWN_VOCAB_SIZE = 4096  # of a tokenizer that is trained on the text
SAMPLE_BYTES = 1 << 24  # of text, to train a tokenizer on
MEASURED_CHARACTERS = 1_000_000  # of the sample, on which bytes per token are measured
ENGLISH = 4.4  # bytes per token of GPT-2's tokenizer
READ_RATE = 0.02 * 50e6  # bytes to read for each second of the run, at 50 MB/s: a fiftieth of its time
MIN_TOKENS, VAL_TOKENS = 20_000, 60_000  # the fewest in a text; how many to validate on, at most a tenth of it


@dataclass(frozen=True)
class Text:
    """A text to train on.

    Attributes:
        name: the dataset_name of a run.
        tokenizer: its name, or its directory.
        tokens: for training, without the validation part; infinite for a data set on the Hub.
        token_bytes: bytes of text per token.
        val_fraction: the share for validation; 0 beside val_data.
        stride: the run reads every n-th piece of the text that was given; 1 is all of it.
    """

    name: str
    tokenizer: str
    tokens: float
    token_bytes: float
    val_fraction: float = 0.01
    stride: int = 1


def survey(
    name: str, source: TextFiles | HubText, config: Config, *, seconds: float, needed_bytes: float, train_own: bool
) -> Text:
    """Measures the text `name` for a run of `seconds` that needs about `needed_bytes` of it, and reads as much as fits.

    If a local text is much longer, every n-th piece is written to data/RUN for the run to read. With `train_own` a
    tokenizer is trained there. Raises UserError if the text is too short or holds token ids.
    """
    tokenizer = config.data.tokenizer
    is_local = isinstance(source, TextFiles)
    if not is_local and not train_own:  # nothing needs to be known of it
        return Text(name, tokenizer, math.inf, ENGLISH)
    if not is_local:
        source.commit = source.newest()["commit"]
    # However short the run: `source.position` grows by up to 2 MiB at a time.
    readable = min(source.size, max(SAMPLE_BYTES, READ_RATE * seconds)) if is_local else SAMPLE_BYTES
    stride = max(1, int(readable / needed_bytes)) if is_local else 1
    sample_stride = stride * max(1, int(readable / stride / SAMPLE_BYTES))
    directory = Path("data") / config.run.run_name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MADE_HERE).touch()  # marks it as made here: a later run on all of data/ does not read it
    kept_bytes, sample, copy = 0, [], directory / f"every-{stride}.txt"
    with tempfile.NamedTemporaryFile("w", dir=directory, encoding="utf-8") as out:
        for number, content in enumerate(piece.content for piece in source.pieces()):
            if not isinstance(content, str):
                raise UserError(f"--text {name} holds token ids, but best.py needs text; write a recipe for it")
            if number % stride == 0:
                kept_bytes += len(content.encode())
                out.write(f"{content}<|endoftext|>" if stride > 1 else "")
            if number % sample_stride == 0:
                sample.append(content)
            if (source.position if is_local else kept_bytes) > readable:
                break
        out.flush()
        if stride > 1 and not (copy.exists() and filecmp.cmp(copy, out.name)):  # a new file is tokenized again
            shutil.copyfile(out.name, copy)
    if train_own:
        tokenizer = str(train_tokenizer(sample, directory / "tokenizer", OWN_VOCAB_SIZE))
    measured = "".join(sample)[:MEASURED_CHARACTERS]
    token_bytes = len(measured.encode()) / max(1, len(open_tokenizer(tokenizer).encode([measured])[0]))
    unread = source.size / readable if is_local and stride == 1 else 1
    tokens = kept_bytes * unread / token_bytes
    if tokens < MIN_TOKENS:
        problem = f"--text {name} has {tokens:,.0f} tokens in {kept_bytes:,} bytes, too few to train on"
        least = f"{MIN_TOKENS:,} or more, about {MIN_TOKENS * ENGLISH:,.0f} bytes of English"
        raise UserError(f"{problem}; give {least}")
    val_fraction = 0.0 if config.data.val_data else float(f"{min(0.1, max(0.01, VAL_TOKENS / tokens)):.1g}")
    tokens = (1 - val_fraction) * tokens if is_local else math.inf
    return Text(str(copy) if stride > 1 else name, tokenizer, tokens, token_bytes, val_fraction, stride)
