"""Text from a model: `python eval/sample.py MODEL --prompt "..."`, through transformers' generate.

Several samples are drawn in batches, of which the first sample appears as it is drawn. Sample i (from 0) is the text of
seed + i, whatever the number of samples, their batches and the device (up to rounding: where two tokens are as good as
equal, another batch or device may take the other). `--interactive` continues one line after the other.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TextStreamer,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eval import common


def fit(prompt_ids: list[int], max_new_tokens: int, n_positions: int) -> tuple[list[int], int]:
    """Prompt and number of new tokens that fit the model's positions together; the prompt loses tokens on the left.

    At least one token of the prompt stays, so at most n_positions - 1 are new.
    """
    n_new = min(max_new_tokens, n_positions - 1)
    return prompt_ids[-(n_positions - n_new) :], n_new


def sample_live(
    logits_fn: Callable,
    prompt_ids: list[int],
    *,
    max_new_tokens: int,
    n_positions: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int,
    device: torch.device | str,
) -> list[int]:
    """The new token ids after a prompt: for a trainer's live module, which has no key-value cache.

    Calls `logits_fn`: ids (1, T) -> logits (1, T, V) once a token, always with the same T, so that nothing is compiled
    twice. Always draws the full number of tokens, past end-of-text too, so that all ranks make the same calls. Draws
    happen on the CPU: one seed gives one text on any device. Temperature 0 takes the likeliest token; top_k 0 keeps
    all tokens. A prompt that leaves no room in `n_positions` is cut on the left (`fit`).
    """
    prompt_ids, n_new = fit(prompt_ids, max_new_tokens, n_positions)
    ids = torch.zeros(1, len(prompt_ids) + n_new, dtype=torch.long)  # (1, T); causal: the zeros ahead are not seen
    ids[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
    generator = torch.Generator().manual_seed(seed)
    for position in range(len(prompt_ids), ids.shape[1]):
        with torch.no_grad():
            # Off the device first: one that compiles would compile a program for each position.
            logits = logits_fn(ids.to(device))[0].cpu()[position - 1].float()  # (V,)
        if temperature == 0:
            ids[0, position] = logits.argmax()
            continue
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
        ids[0, position] = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator).item()
    return ids[0, len(prompt_ids) :].tolist()


class SeededNoise(LogitsProcessor):
    """Adds Gumbel noise to each row's logits, from a generator of its own, so that the largest is a draw from softmax.

    The Gumbel-max trick (Maddison et al., arXiv:1411.0030): -log E is Gumbel for an exponential E. One
    generator for the batch, as in transformers' sampling, would make a text depend on how many others are drawn beside
    it. The noise is drawn on the CPU: one seed gives one text on any device.
    """

    def __init__(self, seeds: Sequence[int]):
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """ids (N, T), logits (N, V) of which some are -inf -> (N, V)"""
        noise = torch.stack([torch.empty(scores.shape[1]).exponential_(generator=g) for g in self.generators])
        return scores - noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().to(scores.device)


class FirstRow(TextStreamer):
    """Prints a batch's first text as it is drawn."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value[:1])


def processors(args: argparse.Namespace, seeds: Sequence[int]) -> LogitsProcessorList:
    """transformers' own temperature, top-k and top-p in its order, then the draw; nothing for --greedy."""
    if args.greedy or args.temperature == 0:
        return LogitsProcessorList()
    steps = [TemperatureLogitsWarper(args.temperature)] if args.temperature != 1 else []
    steps += [TopKLogitsWarper(args.top_k)] if args.top_k else []
    steps += [TopPLogitsWarper(args.top_p)] if args.top_p < 1 else []
    return LogitsProcessorList([*steps, SeededNoise(seeds)])


def generate(loaded: common.Loaded, prompt_ids: list[int], args: argparse.Namespace, seed: int) -> list[str]:
    """`args.num_samples` continuations, of seeds from `seed` on, `args.batch_size` at a time, all on the screen.

    The first of a batch is printed while they are drawn, the others when they are all there.
    """
    end_of_text = loaded.tokenizer.eos_token_id
    prompt_ids, n_new = fit(prompt_ids, args.max_new_tokens, loaded.n_positions)
    # Greedy, that is: the likeliest token, which SeededNoise makes a draw.
    config = GenerationConfig(do_sample=False, max_new_tokens=n_new, eos_token_id=end_of_text, pad_token_id=end_of_text)

    def title(number: int) -> None:
        if args.num_samples > 1:
            print(f"--- sample {number + 1} of {args.num_samples} (seed {seed + number})", flush=True)

    texts = []
    for first in range(0, args.num_samples, args.batch_size):
        numbers = range(first, min(first + args.batch_size, args.num_samples))
        ids = torch.tensor([prompt_ids] * len(numbers), device=loaded.device)  # (N, T)
        title(first)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            logits_processor=processors(args, [seed + number for number in numbers]),
            streamer=FirstRow(loaded.tokenizer, skip_special_tokens=True),
        )  # (N, T + new)
        for number, row in zip(numbers, out, strict=True):
            if number > first:
                title(number)
                print(loaded.tokenizer.decode(row, skip_special_tokens=True))
            texts.append(loaded.tokenizer.decode(row[len(prompt_ids) :], skip_special_tokens=True))
    return texts


def continue_prompt(loaded: common.Loaded, prompt: str, args: argparse.Namespace, seed: int) -> list[str]:
    """`generate` from text, with a note of what of it, or of what follows it, had no room."""
    prompt_ids = loaded.tokenizer.encode(prompt, add_special_tokens=False) or [loaded.tokenizer.eos_token_id]
    kept, n_new = fit(prompt_ids, args.max_new_tokens, loaded.n_positions)
    if n_new < args.max_new_tokens:
        print(
            f"note: {n_new} new tokens instead of {args.max_new_tokens}: the model has {loaded.n_positions} positions"
        )
    if len(kept) < len(prompt_ids):
        print(f"note: of the prompt's {len(prompt_ids)} tokens the last {len(kept)} are used: no more positions")
    print()
    texts = generate(loaded, prompt_ids, args, seed)
    print()
    return texts


def interact(loaded: common.Loaded, args: argparse.Namespace) -> None:
    """Continue each line of stdin until it ends. The seed goes on from line to line, so the same line differs.

    On a terminal an empty line ends too, and Ctrl-C ends a text first; elsewhere empty lines are passed over.
    """
    terminal = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")
    if terminal:
        with contextlib.suppress(ImportError):  # not on Windows; with it, input() edits lines and remembers them
            import readline  # noqa: F401
    print("Each line is a prompt, which the model continues: it was trained on text and does not answer questions.")
    if terminal:
        print("Ctrl-C stops a text; an empty line, Ctrl-D or Ctrl-C at the prompt ends.")
    seed = args.seed
    while True:
        try:
            line = input("> " if terminal else "")
        except (EOFError, KeyboardInterrupt):
            break
        if not line.strip():
            if terminal:
                return
            continue
        try:
            continue_prompt(loaded, line, args, seed)
        except KeyboardInterrupt:
            if not terminal:
                raise
            print("\n(stopped)\n")
        seed += args.num_samples
    if terminal:
        print()


def arguments() -> argparse.ArgumentParser:
    parser = common.parser("Text from a model.", batch_size=16, batch_unit="samples")
    parser.add_argument("--prompt", help='default "The"; "" starts from <|endoftext|>')
    parser.add_argument("--interactive", action="store_true", help="continue what you type, or what is piped in")
    parser.add_argument("--max_new_tokens", type=common.positive_int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is --greedy")
    parser.add_argument("--top_k", type=int, default=50, help="likeliest tokens to draw from; 0 is all")
    parser.add_argument("--top_p", type=float, default=1.0, help="smallest probability mass to draw from")
    parser.add_argument("--num_samples", type=common.positive_int, default=1)
    parser.add_argument("--seed", type=int, default=42, help="of the first sample; the next one takes the next number")
    parser.add_argument("--greedy", action="store_true", help="always the likeliest token")
    return parser


def main() -> None:
    args = arguments().parse_args()
    if args.temperature < 0 or args.top_k < 0 or not 0 < args.top_p <= 1:
        raise common.UserError("--temperature and --top_k must not be negative, --top_p lies in (0, 1]")
    if args.interactive and (args.prompt is not None or args.output):
        raise common.UserError(
            "--interactive takes its prompts from the terminal and writes no results: remove "
            f"--{'output' if args.output else 'prompt'}"
        )
    loaded = common.load(args)
    if args.interactive:
        interact(loaded, args)
        return
    output = common.results_path(args.output, loaded)
    args.prompt = "The" if args.prompt is None else args.prompt
    texts = continue_prompt(loaded, args.prompt, args, args.seed)
    flags = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "greedy")
    settings = {flag: getattr(args, flag) for flag in flags}
    common.write_results(output, "sample", loaded.describe() | settings | {"texts": texts})


if __name__ == "__main__":
    common.run_main(main)
