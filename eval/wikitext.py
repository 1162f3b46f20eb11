"""WikiText-2 in sliding windows: `python eval/wikitext.py MODEL [--text FILE] [--stride N]`.

The text is the raw test split, its rows joined by blank lines, and the windows are those of transformers' guide
"Perplexity of fixed-length models" (https://huggingface.co/docs/transformers/perplexity): as long as the model has
positions, each starting `stride` tokens after the one before and scoring the tokens that none has scored. A window's
first token is never scored, since nothing in the window stands before it: with stride < window that skips the
text's first token alone, with stride = window (no overlap) one in each window, as in the guide.

Counting. `perplexity` is exp of the mean over all scored tokens, each of the same weight. The guide, as it stands
today, takes the mean over windows weighted by their labels less one, which for windows after the first is one token
too few (511 instead of 512): the same within a few parts in 10^5. Its first edition (2020) divided by the length of
the text, first tokens included, and gave the first window `stride` tokens; its figures were 19.64 and 16.53.
`word_perplexity` divides the text's nats by its words, the canonical unit of GPT-2's paper (section 3.1): a word is a
run of characters without whitespace, and each row's end counts as one: 241,211 + 4,358 = 245,569, the test split's size
in table 1 of arXiv:1609.07843. Nats of the text are the mean of the scored tokens times all tokens.
"""

import argparse
import hashlib
import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import numpy as np
import torch

from eval import common
from eval.perplexity import byte_lengths

DATA_SET = ("Salesforce/wikitext", "wikitext-2-raw-v1")
SHA256 = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"  # of the whole joined test split
# Per token, gpt2-large: (stride, perplexity).
GUIDE = [(1024, 19.44), (512, 16.44)]
# Zero-shot, the column WikiText2 of the paper's table 3.
PAPER = {"GPT-2 117M": 29.41, "GPT-2 345M": 22.76, "GPT-2 762M": 19.93, "GPT-2 1542M": 18.34}


@dataclass(frozen=True)
class Window:
    """Tokens begin to end (exclusive) of the text, of which the last `n_scored` are scored."""

    begin: int
    end: int
    n_scored: int


def sliding_windows(n_tokens: int, length: int, stride: int) -> list[Window]:
    """Windows over `n_tokens` tokens, each at most `length` long; the last one ends with the text and may be shorter.

    Needs 1 <= stride <= length, else tokens would be skipped.
    """
    windows, done = [], 0
    for begin in range(0, n_tokens, stride):
        end = min(begin + length, n_tokens)
        n_scored = min(end - done, end - begin - 1)  # a window's first token has no context
        if n_scored:
            windows.append(Window(begin, end, n_scored))
        done = end
        if end == n_tokens:
            break
    return windows


def count_words(text: str) -> int:
    """Words and row ends of rows that were joined by blank lines: the units of WikiText's published perplexities.

    A row is empty or ends in one newline, so between two rows there are two newlines that are not a row's own.
    """
    return len(text.split()) + text.count("\n\n") + 1


def joined_text(path: Path | None) -> tuple[str, str]:
    """(the joined rows, where they are from): a UTF-8 file, or the Hub's data set, which is kept in its cache.

    A file's "\\r\\n" is read as "\\n": the data set has no carriage return, a copy made on Windows does.
    """
    if path:
        try:
            return path.read_text(encoding="utf-8"), str(path)
        except UnicodeDecodeError as error:
            raise common.UserError(f"--text {path}: not UTF-8 at byte {error.start}") from None
    way_out = 'Use --text FILE: the rows of the test split, joined by "\\n\\n"'
    return "\n\n".join(common.load_split(*DATA_SET, "text", way_out)), "/".join(DATA_SET)


def score_windows(loaded: common.Loaded, tokens: np.ndarray, windows: list[Window], *, batch_size: int) -> list[float]:
    """Summed negative log-likelihood in nats of each window's scored tokens, `batch_size` windows of a shape a pass."""
    body, head = common.body_and_head(loaded.model)
    same_shape = itertools.groupby(windows, key=lambda window: (window.end - window.begin, window.n_scored))
    groups = [list(group) for _, group in same_shape]
    batches = [group[i : i + batch_size] for group in groups for i in range(0, len(group), batch_size)]
    sums = []
    for batch in common.track(batches, "WikiText-2", "windows"):
        ids = torch.from_numpy(np.stack([tokens[window.begin : window.end] for window in batch])).to(loaded.device)
        n = batch[0].n_scored
        with torch.no_grad():
            states = body(ids[:, :-1])[:, -n:]  # (N, n, D)
            log_probs = common.token_log_probs(states.flatten(0, 1), ids[:, -n:].flatten(), head)  # (N * n,)
        sums += (-log_probs.cpu().double().view(len(batch), n).sum(1)).tolist()
    return sums


def evaluate_text(
    loaded: common.Loaded, text: str, *, length: int, stride: int, batch_size: int, limit: int | None = None
) -> dict:
    """Perplexity by token and by word, bits per byte and what they were counted over; see the module's docstring.

    With `limit`, only the first windows: words are then those of the text that they cover.
    """
    tokens = np.array(loaded.encode(text), dtype=np.int64)
    windows = sliding_windows(len(tokens), length, stride)[:limit]
    if not windows:
        raise common.UserError("the text has fewer than two tokens: nothing to score")
    if (covered := windows[-1].end) < len(tokens):
        text = loaded.tokenizer.decode(tokens[:covered], clean_up_tokenization_spaces=False)
    table, metric = byte_lengths(loaded.tokenizer), common.load_metric("token_perplexity")
    scored = [tokens[window.end - window.n_scored : window.end] for window in windows]
    metric.add_batch(
        nlls=score_windows(loaded, tokens, windows, batch_size=batch_size),
        token_counts=[len(part) for part in scored],
        byte_counts=[int(table[part].sum()) for part in scored],
    )
    result, words = metric.compute(), count_words(text)
    return result | {
        "word_perplexity": float(np.exp(result["loss"] * covered / words)),
        "stride": stride,
        "sequence_length": length,
        "windows": len(windows),
        "tokens": sum(map(len, scored)),
        "words": words,
        "bytes": sum(int(table[part].sum()) for part in scored),
    }


def table(result: dict) -> str:
    """The result beside what is published for OpenAI's models."""
    by_token, by_word = "perplexity per token", "per word"
    length, stride = result["sequence_length"], result["stride"]
    overlap = " (no overlap)" if stride == length else ""
    lines = [
        f"WikiText-2 raw, test, windows of {length:,} tokens every {stride:,}{overlap}",
        f"{result['tokens']:,} tokens scored, {result['words']:,} words, {result['bytes']:,} bytes",
        "",
        f"{'':<40} {by_token:>20} {by_word:>10} {'bits per byte':>14}",
        f"{'this model':<40} {result['perplexity']:>20.2f} {result['word_perplexity']:>10.2f}"
        f" {result['bits_per_byte']:>14.4f}",
    ]
    for their_stride, perplexity in GUIDE:
        lines.append(f"{f'GPT-2 774M, 1,024 tokens every {their_stride:,}':<40} {perplexity:>20.2f}")
    lines.append("   (gpt2-large in transformers' guide, https://huggingface.co/docs/transformers/perplexity)")
    lines += [f"{model + ', paper':<40} {perplexity:>20.2f}" for model, perplexity in PAPER.items()]
    lines += [
        "   (table 3 of GPT-2's paper, Radford et al. 2019, column WikiText2: met per token without overlap, that is",
        f"   with --stride {length}: 29.94 for its 29.41, transformers issue 13761; its words are not the raw text's)",
    ]
    if result["sha256"] != SHA256 or "limit_windows" in result:
        part = f"the first {result['windows']:,} windows" if result["sha256"] == SHA256 else "another text"
        lines += ["", f"Published numbers are on the whole test split; this is {part}."]
    return "\n".join(lines)


def arguments() -> argparse.ArgumentParser:
    parser = common.parser("Perplexity on WikiText-2 in sliding windows.", batch_size=8, batch_unit="windows")
    parser.add_argument("--text", type=Path, help="the joined rows (default: the Hub's Salesforce/wikitext)")
    parser.add_argument(
        "--sequence_length", type=common.positive_int, help="tokens a window (default: as in training, 1024 at most)"
    )
    parser.add_argument("--stride", type=common.positive_int, help="tokens between windows (default: half a window)")
    parser.add_argument("--limit_windows", type=common.positive_int, help="the first N windows only (default: all)")
    return parser


def main() -> None:
    args = arguments().parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    trained = common.trainer_config(loaded.directory).get("sequence_length")
    length = args.sequence_length or trained or min(1024, loaded.n_positions)
    stride = args.stride or max(1, length // 2)
    if length > loaded.n_positions or length < 2:
        raise common.UserError(f"--sequence_length {length}: from 2 to {loaded.n_positions}, the model's positions")
    if stride > length:
        raise common.UserError(f"--stride {stride}: tokens would be skipped, a window has {length}. Lower --stride")
    text, source = joined_text(args.text)
    options = {"length": length, "stride": stride, "batch_size": args.batch_size, "limit": args.limit_windows}
    result = evaluate_text(loaded, text, **options)
    result |= {"data": source, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    result["data_set"] = DATA_SET[0] if result["sha256"] == SHA256 else Path(source).name
    if args.limit_windows:
        result["limit_windows"] = args.limit_windows
    print(f"\n{table(result)}\n")
    common.write_results(output, "wikitext2", loaded.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
