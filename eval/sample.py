"""Text from a model: `python eval/sample.py MODEL --prompt "..."`, through transformers' generate."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch
from transformers import GenerationConfig, TextStreamer, set_seed

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


def generate(loaded: common.Loaded, prompt_ids: list[int], args: argparse.Namespace) -> list[str]:
    """`args.num_samples` continuations by transformers' generate, on the screen as they come."""
    end_of_text = loaded.tokenizer.eos_token_id
    flags = {"do_sample": False}
    if not args.greedy and args.temperature > 0:
        flags = {"do_sample": True, "temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p}
    prompt_ids, n_new = fit(prompt_ids, args.max_new_tokens, loaded.n_positions)
    config = GenerationConfig(**flags, max_new_tokens=n_new, eos_token_id=end_of_text, pad_token_id=end_of_text)
    ids = torch.tensor([prompt_ids], device=loaded.device)  # (1, T)
    texts = []
    for number in range(args.num_samples):
        if args.num_samples > 1:
            print(f"--- sample {number + 1} of {args.num_samples}")
        set_seed(args.seed + number)
        streamer = TextStreamer(loaded.tokenizer, skip_special_tokens=True)
        out = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=config, streamer=streamer
        )  # (1, T + new)
        texts.append(loaded.tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True))
    return texts


def arguments() -> argparse.ArgumentParser:
    parser = common.parser("Text from a model.")
    parser.add_argument("--prompt", default="The", help='default "The"; "" starts from <|endoftext|>')
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
    loaded = common.load(args)
    output = common.results_path(args.output, loaded)
    prompt_ids = loaded.tokenizer.encode(args.prompt, add_special_tokens=False) or [loaded.tokenizer.eos_token_id]
    kept, n_new = fit(prompt_ids, args.max_new_tokens, loaded.n_positions)
    if n_new < args.max_new_tokens:
        print(
            f"note: {n_new} new tokens instead of {args.max_new_tokens}: the model has {loaded.n_positions} positions"
        )
    if len(kept) < len(prompt_ids):
        print(f"note: of the prompt's {len(prompt_ids)} tokens the last {len(kept)} are used: no more positions")
    print()
    texts = generate(loaded, prompt_ids, args)
    print()
    flags = ("prompt", "max_new_tokens", "temperature", "top_k", "top_p", "seed", "greedy")
    settings = {flag: getattr(args, flag) for flag in flags}
    common.write_results(output, "sample", loaded.describe() | settings | {"texts": texts})


if __name__ == "__main__":
    common.run_main(main)
