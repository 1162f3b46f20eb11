"""Loss, perplexity and bits per byte: `python eval/perplexity.py MODEL [--data DIR | --text FILE]`.

Windows are those of the trainer's validation: T + 1 tokens at stride T, never across shards, in order, so that each
token but a shard's first is predicted once. Without --data and --text they are the very windows of the training run's
validation, first `eval_tokens` tokens included, and the loss is the trainer's.
"""

import argparse
import glob
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from eval import common

# llm.c's .bin format (karpathy/llm.c, dev/data/data_common.py): 256 int32, of which magic, version, count; then uint16.
HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1


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


def cut(tokens: np.ndarray, sequence_length: int) -> list[np.ndarray]:
    """Windows of T + 1 tokens at stride T; tokens that do not fill one are skipped, as in training."""
    starts = range(0, len(tokens) - sequence_length, sequence_length)
    return [tokens[start : start + sequence_length + 1] for start in starts]


def shard_windows(data: str, sequence_length: int) -> tuple[list[np.ndarray], dict[str, str]]:
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
    return windows, {path.name: file_digest(path) for path in paths}


def text_windows(
    path: Path, encode: Callable[[str], list[int]], end_of_text: int, sequence_length: int
) -> tuple[list[np.ndarray], dict[str, str]]:
    """Windows of a UTF-8 file, and its sha256 as in `shard_windows`.

    End-of-text comes first, as before each document in training, and the last window may be shorter, so that every
    token of the text is predicted and its bytes are the file's.
    """
    try:
        # As bytes: reading as text would turn "\r\n" into "\n".
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise common.UserError(f"--text {path}: not UTF-8 at byte {error.start}") from None
    tokens = np.array([end_of_text, *encode(text)], dtype=np.int64)
    if len(tokens) < 2:
        raise common.UserError(f"--text {path}: empty")
    windows = cut(tokens, sequence_length)
    tail = tokens[len(windows) * sequence_length :]
    return windows + [tail] * (len(tail) > 1), {path.name: file_digest(path)}


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()[:12]


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Bytes of text that each token id stands for, int64 (V,); special tokens stand for none.

    A byte-level BPE writes each byte as one character of a 256-letter alphabet (Radford et al. 2019, section 2.2), so
    a token's length in characters is its length in bytes. Raises UserError for other tokenizers.
    """
    tokens, special = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), set(tokenizer.all_special_ids)
    if not set("".join(token for i, token in enumerate(tokens) if i not in special)) <= set(ByteLevel.alphabet()):
        raise common.UserError("bits per byte need a byte-level BPE such as GPT-2's; this model's tokenizer is none")
    return np.array([0 if i in special else len(token) for i, token in enumerate(tokens)])


def score_windows(
    logits_fn: Callable,
    windows: list[np.ndarray],
    *,
    device: torch.device | str,
    batch_size: int,
    head: Callable = common.identity,
    progress: bool = False,
) -> Iterator[tuple[list[np.ndarray], list[float]]]:
    """Yield (windows, their summed negative log-likelihoods in nats), `batch_size` windows of one length at a time.

    `logits_fn`: ids (N, T) -> logits (N, T, V), or states (N, T, D) that `head` turns from (M, D) into (M, V).
    """
    n_full = sum(len(window) == len(windows[0]) for window in windows)  # only the last one may be shorter
    batches = [windows[i : min(i + batch_size, n_full)] for i in range(0, n_full, batch_size)]
    for batch in common.track(batches + [[w] for w in windows[n_full:]], "perplexity", "windows", show=progress):
        tokens = torch.from_numpy(np.stack(batch).astype(np.int64)).to(device)  # (N, T + 1)
        with torch.no_grad():
            states = logits_fn(tokens[:, :-1])  # (N, T, D)
            log_probs = common.token_log_probs(states.flatten(0, 1), tokens[:, 1:].flatten(), head)
        yield batch, (-log_probs.cpu().double().view(len(batch), -1).sum(1)).tolist()


def evaluate_windows(loaded: common.Loaded, windows: list[np.ndarray], *, batch_size: int) -> dict:
    """{"loss": nats per token, "perplexity", "bits_per_byte", "windows", "tokens", "bytes"} over all windows."""
    table = byte_lengths(loaded.tokenizer)
    metric = common.load_metric("token_perplexity")
    body, head = common.body_and_head(loaded.model)
    n_tokens = n_bytes = 0
    options = {"device": loaded.device, "batch_size": batch_size, "head": head, "progress": True}
    for batch, nlls in score_windows(body, windows, **options):
        token_counts = [len(window) - 1 for window in batch]
        byte_counts = [int(table[window[1:]].sum()) for window in batch]
        metric.add_batch(nlls=nlls, token_counts=token_counts, byte_counts=byte_counts)
        n_tokens, n_bytes = n_tokens + sum(token_counts), n_bytes + sum(byte_counts)
    return metric.compute() | {"windows": len(windows), "tokens": n_tokens, "bytes": n_bytes}


def choose_windows(args: argparse.Namespace, loaded: common.Loaded) -> tuple[list[np.ndarray], dict]:
    """The windows that the arguments ask for, and what the result records about them."""
    config = common.trainer_config(loaded.directory)
    sequence_length = args.sequence_length or config.get("sequence_length") or min(1024, loaded.n_positions)
    if sequence_length > loaded.n_positions:
        raise common.UserError(f"--sequence_length {sequence_length}: the model has {loaded.n_positions} positions")
    limit = args.limit_windows
    if args.text:
        source, end_of_text = str(args.text), loaded.tokenizer.eos_token_id
        windows, files = text_windows(args.text, loaded.encode, end_of_text, sequence_length)
    else:
        source = args.data or config.get("val_data") or config.get("dataset_name")
        if not source:
            raise common.UserError("no data: the model names none in trainer_state.json. Use --data DIR or --text FILE")
        windows, files = shard_windows(os.path.expanduser(source), sequence_length)  # a run writes ~ for the home
        if not args.data and not limit and "eval_tokens" in config:
            limit = max(1, config["eval_tokens"] // sequence_length)  # as many as each validation of the training
    quick = {"limit_windows": args.limit_windows} if args.limit_windows else {}
    return windows[:limit], {"data": source, "files": files, "sequence_length": sequence_length} | quick


def main() -> None:
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
    result = evaluate_windows(loaded, windows, batch_size=args.batch_size)
    units = {"loss": "nats/token", "perplexity": "", "bits_per_byte": "bits/byte", "tokens": "", "bytes": ""}
    print()
    for name, unit in units.items():
        shown = f"{result[name]:,}" if isinstance(result[name], int) else f"{result[name]:.4f}"
        print(f"{name:<14} {shown:>14} {unit}".rstrip())
    print()
    common.write_results(output, "perplexity", loaded.describe() | about | result)


if __name__ == "__main__":
    common.run_main(main)
