"""Command: the speed of training on this machine, the effect of each optimization, and the speed of peers.

python -m benchmarks scoreboard --help
"""

import argparse
import signal
import sys
from importlib import import_module

from recipe.utils.errors import ArgumentParser, UserError

# Modules whose main takes the remaining arguments and returns the exit code.
COMMANDS = {
    "scoreboard": "What each optimization, micro-batch, process and size brings",
    "peers": "The step, compared with transformers and nanoGPT",
    "kernels": "The time of each kernel in a step, ours or a peer's",
    "ceiling": "What bounds a step: products, copies, attention, clocks",
    "proof": "All of it on a GPU in ten minutes, the most valuable first",
    "scaling": "The law by which recipe/best.py chooses a size",
    "optimizers": "How many tokens Muon needs for AdamW's loss",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark that the command line names; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description="How fast training is. Each command has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:<12} {text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    try:
        command = parser.parse_args(argv[:1]).command
        return import_module(f"benchmarks.{command}").main(argv[1:])
    except (UserError, OSError, ModuleNotFoundError) as error:  # a lent GPU's Python may lack pytest, for one
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # closes the runs on the way out
    sys.exit(main())
