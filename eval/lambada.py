"""LAMBADA's last words: `python eval/lambada.py MODEL [--rows FILE.jsonl] [--limit N]`.

Scored as lm-evaluation-harness's `lambada_openai` (version 1): the context is the text up to its last space, the
target that space and the last word, encoded as one string; acc counts rows where each token of the target is the
model's likeliest, perplexity is exp of the mean negative log-likelihood of a target. The rows are OpenAI's variant of
the test split, 5,153 of them (Paperno et al., arXiv:1606.06031), which do not ship with the project.
"""

import dataclasses
import hashlib
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # as a script: import from the repository, not from eval/ with its `common`, `sample`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval import common
from eval.loglikelihood import Request, ci95, score
from eval.metrics.last_word.last_word import LastWord

DATA_SET = "EleutherAI/lambada_openai"
N_ROWS = 5153
SHA256 = "0a3d9ce1f9060df6fdd70e423e28a219a8982819355fd117bfaf72a5d0772882"  # of all rows, joined by newlines
# OpenAI's models on all rows: (acc, perplexity), None where it was not published for that way.
HARNESS = {"GPT-2 124M": (0.3256, 40.0554), "GPT-2 1558M": (None, 10.63)}
PAPER = {
    "GPT-2 117M": (0.4599, 35.13),
    "GPT-2 345M": (0.5548, 15.60),
    "GPT-2 762M": (0.6012, 10.87),
    "GPT-2 1542M": (0.6324, 8.63),
}


def read_rows(path: Path) -> list[str]:
    """The texts of a JSON lines file, each line with "text", or with "context" and "continuation" (a space between).

    Raises UserError if a line holds something else.
    """
    wanted = 'one JSON object a line, with "text" or with "context" and "continuation"'
    texts = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            text = row["text"] if "text" in row else f"{row['context']} {row['continuation']}"
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str) or not text.strip():
            raise common.UserError(f"--rows {path}, line {number}: {wanted}")
        texts.append(text)
    if not texts:
        raise common.UserError(f"--rows {path}: empty")
    return texts


def load_texts(path: Path | None) -> tuple[list[str], str]:
    """(texts of all rows, where they are from): of a file (`read_rows`), or of the Hub's data set."""
    if path:
        return read_rows(path), str(path)
    way_out = 'Use --rows FILE: JSON lines with "text"'
    return common.load_split(DATA_SET, "default", "text", way_out), DATA_SET


def digest(texts: list[str]) -> str:
    """SHA-256 of the texts, by which a copy of the data set is recognized."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()


def encode_text(loaded: common.Loaded, text: str) -> Request:
    """Context and target as one string. A text of one word is predicted from end-of-text, as in the harness."""
    context, _, word = text.rpartition(" ")
    if not context.strip():
        tokens = loaded.encode(" " + word)
        return Request([loaded.tokenizer.eos_token_id, *tokens], len(tokens))
    # As in the harness (_encode_pair in its api/model.py), spaces at the context's end belong to the target.
    tokens = loaded.encode(text)
    return Request(tokens, len(tokens) - len(loaded.encode(context.rstrip())))


def evaluate_texts(loaded: common.Loaded, texts: list[str], *, batch_size: int, desc: str = "") -> dict:
    """{"rows", "acc", "acc_ci95", "perplexity"}, from `batch_size` texts a forward pass; with `desc` behind a progress
    bar.

    Texts longer than the model's positions and one lose tokens on the left, as in the harness. A target that alone is
    longer loses its first tokens too, where the harness gives up.
    """
    model = dataclasses.replace(loaded.lm, shares_contexts=False)  # a text has one continuation
    found = [scores[0] for scores in score(model, [[encode_text(loaded, text)] for text in texts], batch_size, desc)]
    result = LastWord(keep_in_memory=True).compute(
        log_likelihoods=[score.log_likelihood for score in found], greedy=[score.greedy for score in found]
    )
    return {"rows": len(texts), "acc_ci95": ci95(result["acc"], len(texts))} | result


def table(result: dict) -> str:
    """The result beside what is published for OpenAI's models, way by way."""

    def line(name: str, acc: float | None, perplexity: float) -> str:
        return f"   {name:<30} {'-' if acc is None else f'{acc:.4f}':<18} {perplexity:.2f}"

    ours = f"{result['acc']:.4f} +- {result['acc_ci95']:.4f}"
    lines = [
        f"LAMBADA (OpenAI's variant), {result['rows']:,} rows (+- is the 95 % interval)",
        "",
        f"   {'lm-evaluation-harness v1':<30} {'acc':<18} perplexity",
        f"   {'this model':<30} {ours:<18} {result['perplexity']:.2f}",
        *(line(f"{model}, harness", *numbers) for model, numbers in HARNESS.items()),
        "   (issues 2159 and 911 of EleutherAI/lm-evaluation-harness)",
        "",
        "   scored differently: the last token instead of the last word (not comparable)",
        *(line(f"{model}, paper", *numbers) for model, numbers in PAPER.items()),
        "   (table 3 of GPT-2's paper, Radford et al. 2019; EleutherAI/lm-evaluation-harness issue 356)",
    ]
    if result["rows"] != N_ROWS:
        lines += ["", f"Published numbers are on all {N_ROWS:,} rows, where the interval is about +- 0.013."]
    return "\n".join(lines)


def main() -> None:
    """Scores one model, prints and writes accuracy and perplexity. Raises UserError."""
    parser = common.parser("LAMBADA, as lm-evaluation-harness scores it.", batch_size=16, batch_unit="rows")
    parser.add_argument("--rows", type=Path, help=f'JSON lines with "text" (default: the Hub\'s {DATA_SET})')
    parser.add_argument("--limit", type=common.positive_int, help=f"the first N rows only (default: all {N_ROWS:,})")
    args = parser.parse_args()
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    texts, source = load_texts(args.rows)
    whole = digest(texts) == SHA256
    texts = texts[: args.limit]
    start = time.monotonic()
    result = evaluate_texts(loaded, texts, batch_size=args.batch_size, desc="LAMBADA")
    seconds = time.monotonic() - start
    print(f"\n{table(result)}\n\n{seconds:.1f} s, {len(texts) / seconds:.1f} rows/s")
    about = {"data": source, "data_set": DATA_SET if whole else Path(source).name, "sha256": digest(texts)}
    common.write_results(output, "lambada", loaded.describe() | result | about | {"seconds": round(seconds, 1)})


if __name__ == "__main__":
    common.run_main(main)
