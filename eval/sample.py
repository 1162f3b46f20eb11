"""Text from a model: `python -m eval.sample MODEL --prompt "..."`, through transformers' generate.

Sample i (from 0) is drawn with seed + i, whatever the number of samples, and is printed while it is drawn.
`--interactive` continues each line of input.
"""

import argparse
import contextlib
import io
import math
import sys

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerBase, TextStreamer

from eval import common
from recipe.utils.redaction import redact


class _Streamer(TextStreamer):
    """Prints all tokens but end-of-text: others that are special, such as <|user|>, are text for a custom tokenizer."""

    def put(self, value: torch.Tensor) -> None:
        super().put(_without_end(value, self.tokenizer))

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(redact(text), stream_end)  # any model may emit control characters


def _without_end(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    return ids if tokenizer.eos_token_id is None else ids[ids != tokenizer.eos_token_id]


def generate(loaded: common.Loaded, prompt: str, args: argparse.Namespace) -> list[str]:
    """`args.num_samples` continuations, each printed after the prompt while it is drawn.

    A prompt that leaves at least one position is used in full and followed by as many tokens as fit. A longer prompt is
    truncated on the left to make room for the new tokens, at most half of the positions. Both cases print a note.
    """
    tokenizer, positions = loaded.tokenizer, loaded.n_positions
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False, verbose=False)
    if not prompt_ids and tokenizer.eos_token_id is None:
        raise common.UserError("the prompt is empty, and the tokenizer has no eos_token to start from")
    prompt_ids = prompt_ids or [tokenizer.eos_token_id]
    room = positions - len(prompt_ids)
    n_new = min(args.max_new_tokens, room if room > 0 else positions // 2)
    context_ids = prompt_ids[-(positions - n_new) :]
    if n_new < args.max_new_tokens:
        print(f"note: {n_new} new tokens instead of {args.max_new_tokens}: the model has {positions} positions")
    if len(context_ids) < len(prompt_ids):
        print(f"note: only the last {len(context_ids)} of the prompt's {len(prompt_ids)} tokens fit")
    loaded.model.generation_config = GenerationConfig()  # otherwise the model's do_sample and penalties apply
    options = {"max_new_tokens": n_new, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    if args.temperature:
        options |= {"do_sample": True} | {key: getattr(args, key) for key in ("temperature", "top_k", "top_p")}
    ids = torch.tensor([context_ids], device=loaded.model.device)  # (1, T)
    texts = []
    assert isinstance(loaded.model, GenerationMixin)
    print()
    for number in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {number + 1} of {args.num_samples} (seed {args.seed + number})", flush=True)
        torch.manual_seed(args.seed + number)
        out = loaded.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=GenerationConfig(**options),
            streamer=_Streamer(tokenizer),
        )  # (1, T + new)
        # Not of the new tokens alone, whose first space some tokenizers drop
        context, text = (tokenizer.decode(_without_end(i, tokenizer)) for i in (ids[0], out[0]))
        texts.append(str(text).removeprefix(str(context)))
    print()
    return texts


def interact(loaded: common.Loaded, args: argparse.Namespace) -> None:
    """Continues each line of stdin until it ends. The seed advances, so a repeated line gets another continuation."""
    print("Each line is a prompt that the model continues: it was trained on text and does not answer questions.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # as in common.utf8
    terminal = sys.stdin.isatty()
    if terminal:
        print("Ctrl-C stops a text; Ctrl-D or Ctrl-C at the prompt ends.")
        with contextlib.suppress(ImportError):  # not on Windows; with it, input() edits lines and remembers them
            import readline  # noqa: F401
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            if (line := input("> " if terminal else "")).strip():
                with contextlib.suppress(KeyboardInterrupt):
                    generate(loaded, line, args)
                args.seed += args.num_samples


def arguments() -> argparse.ArgumentParser:
    """The command's parser."""
    parser = common.parser("Text from a model.")
    parser.add_argument("--prompt", type=common.utf8, help='default "The"; "" starts from <|endoftext|>')
    parser.add_argument("--interactive", action="store_true", help="continue each line of input, typed or piped")
    parser.add_argument("--max_new_tokens", type=common.positive_int, default=100)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 always takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=50, help="number of likeliest tokens to draw from; 0 is all")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="draw from the smallest set of tokens with at least this probability"
    )
    parser.add_argument("--num_samples", type=common.positive_int, default=1)
    parser.add_argument("--seed", type=int, default=42, help="of the first sample; each further one adds 1")
    return parser


def main() -> None:
    """Prints samples, or starts the interactive loop. Raises UserError."""
    args = arguments().parse_args()
    if not (args.temperature == 0 or 1e-3 <= args.temperature < math.inf):
        raise common.UserError(f"--temperature {args.temperature:g}: must be 0 or at least 0.001")
    if args.top_k < 0 or not 0 < args.top_p <= 1:
        raise common.UserError("--top_k must not be negative, and --top_p must lie in (0, 1]")
    if args.interactive and args.prompt is not None:
        raise common.UserError("--interactive reads its prompts: remove --prompt")
    loaded = common.load(args)
    if args.interactive:
        interact(loaded, args)
    else:
        generate(loaded, "The" if args.prompt is None else args.prompt, args)


if __name__ == "__main__":
    common.run_main(main)
