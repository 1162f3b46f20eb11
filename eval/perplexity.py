"""Loss, perplexity and bits per byte: `python eval/perplexity.py MODEL [--data DIR | --text FILE]`.

Windows are those of the trainer's validation: T + 1 tokens at stride T, never across shards, in order, so that each
token but a shard's first is predicted once. Without --data and --text they are the very windows of the training run's
validation, first `eval_tokens` tokens included, and the loss is the trainer's.
"""

import argparse
import glob
import hashlib
import itertools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository, not from eval/ with its `common`, `sample`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from eval import common
from eval.loglikelihood import progress_bar, token_log_probs
from eval.metrics.token_perplexity.token_perplexity import TokenPerplexity

# llm.c's .bin format (karpathy/llm.c, dev/data/data_common.py): 256 int32, of which magic, version, count; then uint16.
HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1


@dataclass(frozen=True)
class Window:
    """Tokens that the model sees at once, of which it is to predict the last `n_scored`, at most all but the first."""

    tokens: np.ndarray
    n_scored: int


def read_shard(path: Path) -> np.ndarray:
    """Token ids of a .bin shard, or of nanoGPT's val.bin, which has no header; uint16, mapped rather than read.

    Raises UserError if it is neither.
    """
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    words = header.view("<u2")  # of tokens, few are 0; a header's tail is, and every other half of wider integers
    if len(header) == HEADER_INTS and header[0] != MAGIC and words.max() < 50257 and (words == 0).mean() < 0.4:
        return np.memmap(path, dtype="<u2", mode="r")
    if len(header) < HEADER_INTS or tuple(header[:2]) != (MAGIC, VERSION):
        raise common.UserError(f"{path}: not a token shard (magic {MAGIC}, version {VERSION})")
    stored = (path.stat().st_size - 4 * HEADER_INTS) // 2
    if stored != header[2]:
        raise common.UserError(f"{path}: the header promises {header[2]:,} tokens, the file holds {stored:,}")
    return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER_INTS)


def cut(tokens: np.ndarray, sequence_length: int) -> list[Window]:
    """Windows of T + 1 tokens at stride T; tokens that do not fill one are skipped, as in training."""
    starts = range(0, len(tokens) - sequence_length, sequence_length)
    return [Window(tokens[start : start + sequence_length + 1], sequence_length) for start in starts]


def shard_windows(data: str, sequence_length: int) -> tuple[list[Window], dict[str, str]]:
    """Windows of validation shards, and the first 12 digits of each file's sha256.

    `data` is a directory, of which the .bin files with "val" in their name are taken, or a glob of .bin files.
    """
    directory = Path(data)
    paths = directory.glob("*val*.bin") if directory.is_dir() else map(Path, glob.glob(data))
    paths = sorted(path for path in paths if path.is_file())
    if not paths:
        raise common.UserError(f"--data {data}: no .bin file with `val` in its name. Prepare one, or use --text FILE")
    windows = [window for path in paths for window in cut(read_shard(path), sequence_length)]
    if not windows:
        raise common.UserError(f"--data {data}: no shard has {sequence_length + 1:,} tokens. Lower --sequence_length")
    return windows, {path.name: _file_digest(path) for path in paths}


def text_windows(
    path: Path, encode: Callable[[str], list[int]], end_of_text: int, sequence_length: int
) -> tuple[list[Window], dict[str, str]]:
    """Windows of a UTF-8 file, and its sha256 as in `shard_windows`.

    End-of-text comes first, as before each document in training, and the last window may be shorter, so that every
    token of the text is predicted and its bytes are the file's.
    """
    tokens = np.array([end_of_text, *encode(common.read_text(path, "--text"))], dtype=np.int64)
    if len(tokens) < 2:
        raise common.UserError(f"--text {path}: empty")
    windows = cut(tokens, sequence_length)
    tail = tokens[len(windows) * sequence_length :]
    return windows + [Window(tail, len(tail) - 1)] * (len(tail) > 1), {path.name: _file_digest(path)}


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:12]


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Bytes of text that each token id stands for, int64 (V,); special tokens stand for none.

    A byte-level BPE writes each byte as one character of a 256-letter alphabet (Radford et al. 2019, section 2.2), so
    a token's length in characters is its length in bytes; tokens that were added to it, such as runs of spaces, are
    text as it is. Raises UserError for other tokenizers.
    """
    special, added = set(tokenizer.all_special_ids), tokenizer.added_tokens_decoder
    own = {i: token for token, i in tokenizer.get_vocab().items() if i not in special and i not in added}
    if not set("".join(own.values())) <= set(ByteLevel.alphabet()):
        raise common.UserError("bits per byte need a byte-level BPE such as GPT-2's; this model's tokenizer is none")
    lengths = np.zeros(max(tokenizer.get_vocab().values()) + 1, np.int64)
    for i, token in own.items():
        lengths[i] = len(token)
    for i in added.keys() - special:
        lengths[i] = len(str(added[i]).encode())
    return lengths


def evaluate_windows(loaded: common.Loaded, windows: list[Window], batch_size: int, desc: str) -> dict:
    """{"loss": nats per token, "perplexity", "bits_per_byte", "windows", "tokens", "bytes"} over all windows,
    `batch_size` of one shape at a time. `desc` is the progress bar's."""
    model, table = loaded.lm, byte_lengths(loaded.tokenizer)
    same_shape = itertools.groupby(windows, key=lambda window: (len(window.tokens), window.n_scored))
    groups = [list(group) for _, group in same_shape]
    batches = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
    nlls: list[float] = []
    for batch in progress_bar(batches, desc):
        tokens = torch.from_numpy(np.stack([window.tokens for window in batch]).astype(np.int64)).to(loaded.device)
        n = batch[0].n_scored
        with torch.no_grad():
            states = model.body(tokens[:, :-1])[:, -n:]  # (N, n, D)
            log_probs = token_log_probs(states.flatten(0, 1), tokens[:, -n:].flatten(), model.head)  # (N * n,)
        nlls += (-log_probs.cpu().double().view(len(batch), n).sum(1)).tolist()
    token_counts = [window.n_scored for window in windows]
    byte_counts = [int(table[window.tokens[-window.n_scored :]].sum()) for window in windows]
    metric = TokenPerplexity(keep_in_memory=True)
    found = metric.compute(nlls=nlls, token_counts=token_counts, byte_counts=byte_counts)
    return found | {"windows": len(windows), "tokens": sum(token_counts), "bytes": sum(byte_counts)}


def choose_length(args: argparse.Namespace, loaded: common.Loaded) -> int:
    """--sequence_length, or the training's, or the model's, 1024 at most. Raises UserError where the model has fewer
    positions."""
    trained = common.trainer_config(loaded.directory).get("sequence_length")
    length = args.sequence_length or trained or min(1024, loaded.n_positions)
    if not 2 <= length <= loaded.n_positions:
        raise common.UserError(f"--sequence_length {length}: from 2 to {loaded.n_positions}, the model's positions")
    return length


def choose_windows(args: argparse.Namespace, loaded: common.Loaded) -> tuple[list[Window], dict]:
    """The windows that the arguments ask for, and what the result records about them."""
    config = common.trainer_config(loaded.directory)
    sequence_length, limit = choose_length(args, loaded), args.limit_windows
    if args.text:
        source = str(args.text)
        windows, files = text_windows(args.text, loaded.encode, loaded.tokenizer.eos_token_id, sequence_length)
    else:
        source = args.data or config.get("val_data") or config.get("dataset_name")
        if not source:
            raise common.UserError("no data: the model names none in trainer_state.json. Use --data DIR or --text FILE")
        if mixed := common.mixture(source):
            raise common.UserError(
                f"the model was trained on {len(mixed)} data sets. Name one: --data {next(iter(mixed))}"
            )
        windows, files = shard_windows(os.path.expanduser(source), sequence_length)  # a run writes ~ for the home
        if not args.data and not limit and "eval_tokens" in config:
            limit = max(1, config["eval_tokens"] // sequence_length)  # as many as each validation of the training
    quick = {"limit_windows": args.limit_windows} if args.limit_windows else {}
    return windows[:limit], {"data": source, "files": files, "sequence_length": sequence_length} | quick


def main() -> None:
    """Evaluates one model on shards or text, prints and writes the loss. Raises UserError."""
    parser = common.parser("Loss, perplexity and bits per byte.", batch_size=8, batch_unit="windows")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--data", help="directory or glob of shards (default: the training's validation shards)")
    source.add_argument("--text", type=Path, help="text file, UTF-8, instead of shards")
    parser.add_argument(
        "--sequence_length", type=common.positive_int, help="predicted tokens a window (default: as in training)"
    )
    parser.add_argument("--limit_windows", type=common.positive_int, help="the first N windows only (default: all)")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    windows, about = choose_windows(args, loaded)
    print(f"data {about['data']}: {json.dumps(about['files'])}, {len(windows):,} windows", flush=True)
    result = evaluate_windows(loaded, windows, args.batch_size, "perplexity")
    units = {"loss": "nats/token", "perplexity": "", "bits_per_byte": "bits/byte", "tokens": "", "bytes": ""}
    print()
    for name, unit in units.items():
        shown = f"{result[name]:,}" if isinstance(result[name], int) else f"{result[name]:.4f}"
        print(f"{name:<14} {shown:>14} {unit}".rstrip())
    print()
    common.write_results(output, "perplexity", loaded.describe() | about | result)


if __name__ == "__main__":
    common.run_main(main)
