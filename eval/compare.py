"""Two models side by side: `python -m eval.compare MODEL --other MODEL_OR_ID [--limit N]`.

The loss on the validation shards of the first model's run (with one tokenizer only), HellaSwag in both published ways,
and a sample of each. Both models see the same text, so each difference has a paired interval.
"""

import argparse

import numpy as np

from eval import common, hellaswag, perplexity, sample
from eval.published import ACCURACIES, HELLASWAG_ROWS
from eval.scores import comparison_row
from recipe.utils.redaction import redact

GPT2 = "openai-community/gpt2"
BLOCKS = 20  # of consecutive windows; the means of blocks are all but independent, unlike neighboring windows
T_95 = 2.093  # Student's t for 95 %, with one degree of freedom fewer than there are blocks


def compare_means(metric: str, values: np.ndarray, other_values: np.ndarray) -> dict:
    """A row of the table: both models' means over the same n rows or windows, and their difference with its 95 %
    interval. For accuracies (bool), half a row is added to each of a pair's four outcomes, so that the interval is not
    empty where no row differs (Agresti and Min 2005, "Simple improved confidence intervals for comparing matched
    proportions"). For losses it is that of the means of BLOCKS blocks, None for fewer windows than two a block:
    windows of one document are not independent."""
    differences, n = values.astype(float) - other_values, len(values)
    means = {"ours": float(values.mean()), "theirs": float(other_values.mean())}
    row = {"metric": metric, "n": n} | means | {"difference": float(differences.mean()), "ci95": None}
    if values.dtype == bool:
        center = differences.sum() / (n + 2)
        variance = ((differences**2).sum() + 1) / (n + 2) - center**2
        half_width = 1.96 * (variance / (n + 2)) ** 0.5
    elif n >= 2 * BLOCKS:
        block_means = [block.mean() for block in np.array_split(differences, BLOCKS)]
        center, half_width = differences.mean(), T_95 * np.std(block_means, ddof=1) / BLOCKS**0.5
    else:
        return row
    return row | {"ci95": [float(center - half_width), float(center + half_width)]}


def validation(args: argparse.Namespace, model: common.Loaded, other: common.Loaded) -> list[dict]:
    """The row for the validation loss; no row but a note if the tokenizers differ or the data are missing."""
    is_explicit = args.data or args.sequence_length
    args.sequence_length = args.sequence_length or min(
        common.trainer_config(model.directory).get("sequence_length", 1024), model.n_positions, other.n_positions
    )
    try:
        if model.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise common.UserError("the tokenizers differ; compare the bits per byte of make eval-val instead")
        if (length := args.sequence_length) > (limit := other.n_positions):
            raise common.UserError(f"--sequence_length {length}: must be from 2 to {limit} for the second model")
        windows, _ = perplexity.choose_windows(args, model)
    except common.UserError as error:
        if is_explicit:
            raise
        print(redact(f"note: no validation loss: {error}"))
        return []
    losses = [perplexity.window_losses(loaded, windows, args.batch_size, "validation") for loaded in (model, other)]
    return [compare_means("validation loss, nats per token", *(np.array(losses) / (windows.shape[1] - 1)))]


def table(rows: list[dict], name: str, other_name: str) -> str:
    """The rows as a table for the terminal."""
    cells = [("", "first", "second", "difference, 95 % interval"), *map(comparison_row, rows)]
    width = max(len(row[0]) for row in cells)
    lines = [f"{metric:<{width}} {first:>8} {second:>8}  {change}" for metric, first, second, change in cells]
    return "\n".join([f"first: {name}", f"second: {other_name}", "", *lines])


def main() -> None:
    """Compares two models, prints the table and writes it beside the first model. Raises UserError."""
    parser = common.parser("Two models side by side.", batch_size=16, batch_unit="rows or windows")
    parser.add_argument("--other", default=GPT2, metavar="MODEL", help=f"the second model (default: {GPT2})")
    parser.add_argument(
        "--limit", type=common.positive_int, help="N evenly spaced rows of HellaSwag (default: all 10,042)"
    )
    parser.add_argument("--prompt", type=common.utf8, default="The", help="text that both models continue")
    perplexity.add_arguments(parser)
    args = parser.parse_args()
    model = common.load(args)
    output = common.results_path(args.output, model)
    other = common.load(argparse.Namespace(**vars(args) | {"model": args.other}), "WITH")
    rows = validation(args, model, other)
    examples = hellaswag.load_rows(args.limit)
    correct_rows = [
        hellaswag.correct(hellaswag.score_rows(m.lm, examples, batch_size=args.batch_size, desc=m.name), examples)
        for m in (model, other)
    ]
    part = "" if len(examples) == HELLASWAG_ROWS else f", {len(examples):,} rows"
    for name, text in ACCURACIES.items():
        rows.append(compare_means(f"HellaSwag {text}{part}", *(correct[name] for correct in correct_rows)))
    print(f"\n{table(rows, model.name, other.name)}\n")
    print("The intervals are over the evaluated text only: another seed of the training makes a difference, too.\n")
    sample_args = sample.arguments().parse_args([])
    texts = []
    for name, loaded in (("first", model), ("second", other)):
        print(f"--- sample of the {name}")
        texts += sample.generate(loaded, args.prompt, sample_args)
    # Only the last two parts of the path, since the model card is public.
    other_name = "/".join(other.directory.resolve().parts[-2:]) if other.directory else other.name
    result = {"other": other_name, "limit": args.limit, "rows": rows, "prompt": args.prompt, "samples": texts}
    common.write_results(output, "compare", model.describe() | result)


if __name__ == "__main__":
    common.run_main(main)
