"""Loss, perplexity and bits per byte: `python -m eval.perplexity MODEL [--data DIR]`.

Windows are cut as in the trainer's validation: T + 1 tokens at stride T, in order, never across shards. Without --data
they are exactly the training run's, and the loss equals the trainer's.

Shapes: N windows, T sequence_length, V vocabulary.
"""

import argparse
import glob
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from eval import common
from eval.loglikelihood import progress_bar, token_log_probs
from eval.scores import score, text_dataset
from recipe.utils.files import sha256_of
from recipe.utils.redaction import redact
from recipe.utils.shards import GPT2_TOKENS, SUFFIXES, ShardReader, shards_in


def read_manifest(data: str) -> dict:
    """The manifest.json of shards that this project prepared, in the directory `data` or in that of the glob; {} if
    there is none. Raises UserError."""
    path = (Path(data) if os.path.isdir(data) else Path(data).parent) / "manifest.json"
    with common.reading(path, "name other shards with --data"):
        return dict(json.loads(path.read_text())) if path.is_file() else {}


def val_shards(data: str) -> dict[Path, str]:
    """The validation shards in the trainer's order, each with its SHA-256. `data` is a glob of shards, or a directory:
    the files of its manifest, or else those with "val" in their name. Raises UserError if there are none, or if one is
    not the shard that the manifest describes."""
    recorded = {}
    if os.path.isdir(data):
        with common.reading(Path(data) / "manifest.json", "name other shards with --data"):
            entries = [entry for entry in read_manifest(data).get("shards", []) if entry["split"] == "val"]
            recorded = {Path(data) / Path(entry["file"]).name: entry["sha256"] for entry in entries}
    files = shards_in(Path(data), "*val*") if os.path.isdir(data) else map(Path, glob.glob(data, recursive=True))
    paths = [*recorded] or sorted(files)
    digests = {path: sha256_of(path) for path in paths if path.suffix in SUFFIXES and path.is_file()}
    if not digests:
        raise common.UserError(
            f"--data {data}: no .bin or .npy file there (a directory needs one with `val` in its name). For text run "
            "python -m recipe.data.prepare --train_text FILE --dataset_name DIRECTORY, then name all of it with "
            "--data 'DIRECTORY/*.bin'"
        )
    if changed := next((path for path, digest in recorded.items() if digests.get(path) != digest), None):
        raise common.UserError(f"{changed} is not the shard that its manifest.json describes. Prepare the text again")
    return digests


def shard_windows(
    data: str, sequence_length: int, vocab_size: int = GPT2_TOKENS, limit: int | None = None
) -> tuple[np.ndarray, int, dict[str, str]]:
    """The first `limit` windows (default: all) of the shards of `val_shards`, (N, T + 1), the number of all windows,
    and the first 12 digits of each file's SHA-256. `vocab_size` is that of their tokenizer."""
    digests, T = val_shards(data), sequence_length
    windows, available = [], 0
    for path in digests:
        shard = ShardReader(path, vocab_size)
        starts = range(0, len(shard) - T, T)
        taken = starts if limit is None else starts[: max(0, limit - available)]
        windows.append(shard.spans(np.array(taken, np.int64), T + 1))
        available += len(starts)
    if not available:
        raise common.UserError(f"--data {data}: no shard has {sequence_length + 1:,} tokens. Lower --sequence_length")
    return np.concatenate(windows), available, {path.name: digest[:12] for path, digest in digests.items()}


def check_tokens(data: str, loaded: common.Loaded, windows: np.ndarray) -> None:
    """Raises UserError if the shards' vocabulary is not the model's, by their manifest (if any) and largest token.
    Prints a note if the manifest and the checkpoint name different tokenizers."""
    tokenizer, model_digest = loaded.tokenizer, common.trainer_config(loaded.directory, "tokenizer").get("digest")
    manifest = read_manifest(data)
    shard_vocab, shard_digest = manifest.get("vocab_size"), manifest.get("tokenizer")
    vocab_size, largest = max(tokenizer.get_vocab().values()) + 1, int(windows.max())
    n_added = len(tokenizer.added_tokens_decoder)
    if largest >= vocab_size or (shard_vocab and not 0 <= vocab_size - shard_vocab <= n_added):
        raise common.UserError(
            f"--data {data}: the shards' tokenizer has {shard_vocab or largest + 1:,} tokens, the model's "
            f"{vocab_size:,}. Prepare the text with the model's tokenizer: python -m recipe.data.prepare "
            "--dataset_name TEXT --tokenizer MODEL"
        )
    # GPT-2's tokenizer in a directory has a digest other than "gpt2".
    if shard_digest and model_digest and shard_digest != model_digest:
        names = redact(f"tokenizer {shard_digest}, the model with {model_digest}")
        print(f"note: --data {data} was made with {names}: unless they give the same tokens, the loss is meaningless")


def byte_lengths(tokenizer: PreTrainedTokenizerBase) -> np.ndarray:
    """Bytes of text that each token id stands for, int64 (V,); 0 for end-of-text.

    A byte-level BPE writes each byte as one character of a 256-letter alphabet (Radford et al. 2019, section 2.2), so
    a token's length in characters is its length in bytes; added tokens, such as runs of spaces, are their text.
    SentencePiece writes a space as U+2581, also the one that it puts before a document, and as <0x00> to <0xFF> the
    bytes of what is not in its vocabulary. Raises UserError for other tokenizers.
    """
    vocab = tokenizer.get_vocab()
    added_tokens = tokenizer.added_tokens_decoder
    tokens_by_id = {i: token for token, i in vocab.items() if i not in added_tokens}
    is_byte_level = set("".join(tokens_by_id.values())) <= set(ByteLevel.alphabet())
    bytes_as_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    if not is_byte_level and not bytes_as_tokens <= set(tokens_by_id.values()):
        raise common.UserError("bits per byte need a tokenizer with all bytes, such as GPT-2's or Llama's")

    def bytes_of_text(text: str) -> int:
        return len((text if is_byte_level else text.replace("\u2581", " ")).encode())

    lengths = np.zeros(max(vocab.values()) + 1, np.int64)
    for i, token in tokens_by_id.items():
        if is_byte_level:
            lengths[i] = len(token)
        else:
            lengths[i] = 1 if token in bytes_as_tokens else bytes_of_text(token)
    for i in added_tokens.keys() - {tokenizer.eos_token_id}:
        lengths[i] = bytes_of_text(str(added_tokens[i]))
    return lengths


def window_losses(loaded: common.Loaded, windows: np.ndarray, batch_size: int, desc: str) -> list[float]:
    """The summed negative log-likelihood of each window's tokens after the first, in nats. Takes `batch_size` windows
    at a time; with `desc`, shows a progress bar."""
    model, losses = loaded.lm, []
    batches = [windows[i : i + batch_size] for i in range(0, len(windows), batch_size)]
    for batch in progress_bar(batches, desc):
        tokens = torch.from_numpy(batch.astype(np.int64)).to(loaded.model.device)  # (N, T + 1)
        with torch.no_grad():
            states = model.body(tokens[:, :-1]).flatten(0, 1)  # (N * T, D)
            log_probs = token_log_probs(states, tokens[:, 1:].flatten(), model.head)  # (N * T,)
        losses += (-log_probs.cpu().double().view(len(batch), -1).sum(1)).tolist()
    return losses


def summarize(loaded: common.Loaded, windows: np.ndarray, losses: list[float]) -> dict:
    """{"loss": nats per token, "perplexity", "bits_per_byte", "windows", "tokens", "bytes"} from `window_losses`."""
    targets, total_nats = windows[:, 1:], sum(losses)
    tokens, n_bytes = targets.size, int(byte_lengths(loaded.tokenizer)[targets].sum())
    loss, bits = total_nats / tokens, total_nats / math.log(2) / n_bytes  # bits per byte: arXiv:2101.00027, section 3.1
    metrics = {"loss": loss, "perplexity": float(np.exp(loss)), "bits_per_byte": bits}
    return metrics | {"windows": len(windows), "tokens": tokens, "bytes": n_bytes}


def choose_windows(args: argparse.Namespace, loaded: common.Loaded) -> tuple[np.ndarray, dict]:
    """The windows that the arguments select, and the fields that the result records about them. Raises UserError."""
    config = common.trainer_config(loaded.directory)
    length = args.sequence_length or config.get("sequence_length") or min(1024, loaded.n_positions)
    if not 2 <= length <= loaded.n_positions:
        raise common.UserError(f"--sequence_length {length}: must be from 2 to {loaded.n_positions} for this model")
    source = args.data or config.get("val_data") or config.get("dataset_name")
    if not source:
        raise common.UserError("no data: the model's trainer_state.json names none. Use --data DIR")
    if isinstance(source, list):  # a mixture
        first_name = source[0]["name"]
        raise common.UserError(f"the model was trained on {len(source)} data sets. Name one: --data {first_name}")
    local_source = os.path.expanduser(source)  # trainer_state.json has ~ for the home directory
    limit = args.limit_windows
    if not args.data and not limit and "eval_tokens" in config:
        limit = max(1, config["eval_tokens"] // length)  # as many as a validation during training
    vocab_size = max(loaded.tokenizer.get_vocab().values()) + 1
    windows, available, files = shard_windows(local_source, length, vocab_size, limit)
    data_info = {"data": source, "files": files, "sequence_length": length, "limit_windows": args.limit_windows}
    check_tokens(local_source, loaded, windows)
    return windows, data_info | {"of_windows": available}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that `choose_windows` reads."""
    length = "predicted tokens per window (default: as in training)"
    parser.add_argument("--data", help="directory or glob of shards (default: the training run's validation shards)")
    parser.add_argument("--sequence_length", type=common.positive_int, help=length)
    parser.add_argument(
        "--limit_windows",
        type=common.positive_int,
        help="the first N windows only (default: all of --data; of a run's own, as many as in training)",
    )


def scores_of(result: dict) -> list[dict]:
    """The result as scores for the model card."""
    n_windows, n_available = result["windows"], result["of_windows"]
    digest = hashlib.sha256("".join(result["files"].values()).encode()).hexdigest()[:12]
    method = f"{result['tokens']:,} tokens in windows of {result['sequence_length']:,}, in {result['dtype']}"
    method += f", the first {n_windows:,} of {n_available:,} windows" if n_windows < n_available else ""
    method += f", files {digest}"
    dataset = text_dataset(Path(result["data"]).name, digest)
    metrics = {"loss": "loss, nats per token", "perplexity": "perplexity per token", "bits_per_byte": "bits per byte"}
    return [
        score(dataset, metric, result[metric[0]], method, complete=n_windows == n_available)
        for metric in metrics.items()
    ]


def main() -> None:
    """Evaluates one model on shards, then prints and writes its loss. Raises UserError."""
    parser = common.parser("Loss, perplexity and bits per byte.", batch_size=8, batch_unit="windows")
    add_arguments(parser)
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    windows, data_info = choose_windows(args, loaded)
    part = f"{len(windows):,} of " if len(windows) < data_info["of_windows"] else ""
    count = f"{part}{data_info['of_windows']:,} windows"
    print(f"data {data_info['data']}: {json.dumps(data_info['files'])}, {count}", flush=True)
    byte_lengths(loaded.tokenizer)  # raises before the losses take their time
    result = summarize(loaded, windows, window_losses(loaded, windows, args.batch_size, "perplexity"))
    print(f"\nloss           {result['loss']:14.4f} nats/token")
    print(f"perplexity     {result['perplexity']:14.4f}")
    print(f"bits_per_byte  {result['bits_per_byte']:14.4f} bits/byte")
    print(f"tokens         {result['tokens']:14,}\nbytes          {result['bytes']:14,}\n")
    record = loaded.describe() | data_info | result
    common.write_results(output, "perplexity", record | {"scores": scores_of(record)})


if __name__ == "__main__":
    common.run_main(main)
