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

import hashlib
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository, not from eval/ with its `common`, `sample`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import numpy as np

from eval import common
from eval.perplexity import Window, choose_length, evaluate_windows

DATA_SET = ("Salesforce/wikitext", "wikitext-2-raw-v1")
SHA256 = "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83"  # of the whole joined test split
# Per token, gpt2-large: (stride, perplexity).
GUIDE = [(1024, 19.44), (512, 16.44)]
# Zero-shot, the column WikiText2 of the paper's table 3.
PAPER = {"GPT-2 117M": 29.41, "GPT-2 345M": 22.76, "GPT-2 762M": 19.93, "GPT-2 1542M": 18.34}


def sliding_windows(tokens: np.ndarray, length: int, stride: int) -> list[Window]:
    """Windows over a text, each at most `length` tokens long and `stride` after the one before; the last one ends with
    the text and may be shorter.

    Needs 1 <= stride <= length, else tokens would be skipped.
    """
    windows, done = [], 0
    for begin in range(0, len(tokens), stride):
        end = min(begin + length, len(tokens))
        if n_scored := min(end - done, end - begin - 1):  # a window's first token has no context
            windows.append(Window(tokens[begin:end], n_scored))
        done = end
        if end == len(tokens):
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
        return common.read_text(path, "--text").replace("\r\n", "\n"), str(path)
    way_out = 'Use --text FILE: the rows of the test split, joined by "\\n\\n"'
    return "\n\n".join(common.load_split(*DATA_SET, "text", way_out)), "/".join(DATA_SET)


def evaluate_text(
    loaded: common.Loaded, text: str, *, length: int, stride: int, batch_size: int, limit: int | None = None
) -> dict:
    """Perplexity by token and by word, bits per byte and what they were counted over; see the module's docstring.

    With `limit`, only the first windows: words are then those of the text that they cover.
    """
    tokens = np.array(loaded.encode(text), dtype=np.int64)
    windows = sliding_windows(tokens, length, stride)[:limit]
    if not windows:
        raise common.UserError("the text has fewer than two tokens: nothing to score")
    covered = stride * (len(windows) - 1) + len(windows[-1].tokens)
    if covered < len(tokens):
        text = loaded.tokenizer.decode(tokens[:covered], clean_up_tokenization_spaces=False)
    result, words = evaluate_windows(loaded, windows, batch_size, "WikiText-2"), count_words(text)
    by_word = float(np.exp(result["loss"] * covered / words))
    return result | {"word_perplexity": by_word, "stride": stride, "sequence_length": length, "words": words}


def table(result: dict, published: bool) -> str:
    """The result, and beside it what is published for OpenAI's models."""
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
    if not published:
        return "\n".join([*lines, "", "Other tokenizers' perplexities per token are no comparison; bits per byte are."])
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


def main() -> None:
    """Evaluates one model on WikiText-2, prints and writes the perplexity. Raises UserError."""
    parser = common.parser("Perplexity on WikiText-2 in sliding windows.", batch_size=8, batch_unit="windows")
    parser.add_argument("--text", type=Path, help="the joined rows (default: the Hub's Salesforce/wikitext)")
    parser.add_argument(
        "--sequence_length", type=common.positive_int, help="tokens a window (default: as in training, 1024 at most)"
    )
    parser.add_argument("--stride", type=common.positive_int, help="tokens between windows (default: half a window)")
    parser.add_argument("--limit_windows", type=common.positive_int, help="the first N windows only (default: all)")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    length = choose_length(args, loaded)
    stride = args.stride or length // 2
    if stride > length:
        raise common.UserError(f"--stride {stride}: tokens would be skipped, a window has {length}. Lower --stride")
    text, source = joined_text(args.text)
    options = {"length": length, "stride": stride, "batch_size": args.batch_size, "limit": args.limit_windows}
    result = evaluate_text(loaded, text, **options)
    result |= {"data": source, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    result["data_set"] = DATA_SET[0] if result["sha256"] == SHA256 else Path(source).name
    if args.limit_windows:
        result["limit_windows"] = args.limit_windows
    print(f"\n{table(result, loaded.has_gpt2_tokens)}\n")
    common.write_results(output, "wikitext2", loaded.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
