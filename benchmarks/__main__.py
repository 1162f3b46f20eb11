"""Command: measures the speed of training on this machine, the effect of each optimization, and the speed of peers.

python -m benchmarks scoreboard --help
"""

import argparse
import signal
import sys
from importlib import import_module

from recipe.utils.errors import ArgumentParser, ExitCode, UserError

# Modules whose main takes the remaining arguments and returns the exit code.
COMMANDS = {
    "scoreboard": "Speed by optimization, micro-batch, number of processes and model size",
    "peers": "The training step compared with transformers and nanoGPT",
    "kernels": "Time of each kernel in a step, ours or a peer's, and the clocks meanwhile",
    "ceiling": "What bounds a step: matrix products, copies, attention",
    "proof": "Full GPU benchmark in ten minutes, the most valuable steps first",
    "scaling": "Fits the scaling law by which recipe/best.py chooses a size",
    "optimizers": "How many tokens Muon needs to reach AdamW's loss",
}


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark that the command line names; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = ArgumentParser(
        prog="python -m benchmarks",
        description="Measures training speed. Each command has its own --help.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name:<12} {text}" for name, text in COMMANDS.items()),
    )
    parser.add_argument("command", choices=COMMANDS)
    try:
        command = parser.parse_args(argv[:1]).command
        return import_module(f"benchmarks.{command}").main(argv[1:])
    except (UserError, OSError, ModuleNotFoundError) as error:  # a rented GPU's Python may lack pytest, for example
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; what was measured so far is in its file", file=sys.stderr)
        return ExitCode.INTERRUPTED


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # unwinds, which ends the runs
    sys.exit(main())
