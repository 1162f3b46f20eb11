"""Two models side by side: `python -m eval.compare MODEL --other MODEL_OR_ID [--limit N]`.

The loss on the validation shards of the first model's run (with one tokenizer only), HellaSwag in both published ways,
and a sample of each. Both models see the same text, so each difference has a paired interval.
"""

import argparse

import numpy as np

from eval import common, hellaswag, perplexity, sample
from eval.published import ACCURACIES, HELLASWAG_ROWS
from eval.scores import comparison_row

GPT2 = "openai-community/gpt2"


def compare_means(metric: str, ours: np.ndarray, theirs: np.ndarray) -> dict:
    """A row of the table: the means of both models' numbers for the same n rows or windows, and the difference with its
    95 % interval by the normal approximation. For accuracies (bool), half a row is added to each of a pair's four
    outcomes, so that the interval is not empty where no row differs (Agresti and Min 2005, "Simple improved confidence
    intervals for comparing matched proportions")."""
    apart, n = ours.astype(float) - theirs, len(ours)
    center, square = apart.sum(), (apart**2).sum()
    if ours.dtype == bool:
        n, square = n + 2, square + 1
    mean = center / n
    half = 1.96 * ((square / n - mean**2) / n) ** 0.5
    means = {"ours": float(ours.mean()), "theirs": float(theirs.mean())}
    ends = {"difference": float(apart.mean()), "ci95": [float(mean - half), float(mean + half)]}
    return {"metric": metric, "n": len(apart)} | means | ends


def validation(args: argparse.Namespace, ours: common.Loaded, theirs: common.Loaded) -> list[dict]:
    """The row for the validation loss; none, with a note, if the tokenizers differ or the data are missing."""
    args.sequence_length = args.sequence_length or min(
        common.trainer_config(ours.directory).get("sequence_length", 1024), ours.n_positions, theirs.n_positions
    )
    try:
        if ours.tokenizer.get_vocab() != theirs.tokenizer.get_vocab():
            raise common.UserError("the tokenizers differ; make eval-val has each model's bits per byte")
        if (length := args.sequence_length) > (most := theirs.n_positions):
            raise common.UserError(f"--sequence_length {length}: from 2 to {most}, the second model's positions")
        windows, _ = perplexity.choose_windows(args, ours)
    except common.UserError as error:
        if args.data:
            raise
        print(f"note: no validation loss: {error}")
        return []
    losses = [perplexity.window_losses(model, windows, args.batch_size, "validation") for model in (ours, theirs)]
    return [compare_means("validation loss, nats per token", *(np.array(losses) / (len(windows[0]) - 1)))]


def table(rows: list[dict], ours: str, theirs: str) -> str:
    """The rows as a table for the terminal."""
    cells = [("", "first", "second", "difference, 95 % interval"), *map(comparison_row, rows)]
    width = max(len(row[0]) for row in cells)
    lines = [f"{metric:<{width}} {a:>8} {b:>8}  {change}" for metric, a, b, change in cells]
    return "\n".join([f"first: {ours}", f"second: {theirs}", "", *lines])


def main() -> None:
    """Compares two models, prints the table and writes it beside the first. Raises UserError."""
    parser = common.parser("Two models side by side.", batch_size=16, batch_unit="rows or windows")
    parser.add_argument("--other", default=GPT2, metavar="MODEL", help=f"the second model (default: {GPT2})")
    parser.add_argument("--limit", type=common.positive_int, help="the first N rows of HellaSwag (default: all 10,042)")
    parser.add_argument("--prompt", type=common.utf8, default="The", help="that both models continue")
    perplexity.add_arguments(parser)
    args = parser.parse_args()
    ours = common.load(args)
    output = common.results_path(args.output, ours)
    theirs = common.load(argparse.Namespace(**vars(args) | {"model": args.other}))
    rows = validation(args, ours, theirs)
    examples = hellaswag.load_rows(args.limit)
    right = [
        hellaswag.correct(hellaswag.score_rows(x.lm, examples, batch_size=args.batch_size, desc=x.name), examples)
        for x in (ours, theirs)
    ]
    part = "" if len(examples) == HELLASWAG_ROWS else f", first {len(examples):,} rows"
    rows += [compare_means(f"HellaSwag {text}{part}", *(x[name] for x in right)) for name, text in ACCURACIES.items()]
    print(f"\n{table(rows, ours.name, theirs.name)}\n")
    options = sample.arguments().parse_args([])
    texts = []
    for name, loaded in (("first", ours), ("second", theirs)):
        print(f"--- sample of the {name}")
        texts += sample.generate(loaded, args.prompt, options)
    # Only the names of a directory and its parent, since the model card is public.
    other = "/".join(theirs.directory.resolve().parts[-2:]) if theirs.directory else theirs.name
    result = {"other": other, "limit": args.limit, "rows": rows, "prompt": args.prompt, "samples": texts}
    common.write_results(output, "compare", ours.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
