"""Command: profiles a step of recipe/train.py, or of a peer, with PyTorch's profiler: the time of each kernel, or on a
CPU of each operator, the time of a step without the profiler, and a GPU's clocks and power meanwhile. Writes
kernels.json.

    python -m benchmarks kernels --micro_batch_size 32 --peer transformers
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks import peer, report
from benchmarks.runs import FIELDS, device, shards
from recipe import train
from recipe.config import parse_config
from recipe.engine import hardware
from recipe.utils.errors import ArgumentParser, UserError

WARMUP_STEPS, PROFILED_STEPS = 6, 10  # of optimizer steps; programs compile during warm-up
SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit")
SMI += ("temperature.gpu", "memory.used", "clocks_event_reasons.active")  # asked for amid the steps
LOGGING_STEPS = 10  # as in the recipes: the device waits for the host only there


class Enough(Exception):
    """All steps have been profiled."""


def main(argv: list[str]) -> int:
    """Profiles the step; returns the exit code."""
    on_cpu = device().type == "cpu"
    parser = ArgumentParser(
        prog="python -m benchmarks kernels", allow_abbrev=False, epilog="Other flags are those of recipe/train.py."
    )
    parser.add_argument("--config", default="shakespeare" if on_cpu else "gpt2", help="recipe whose step is measured")
    parser.add_argument("--micro_batch_size", type=int, default=8 if on_cpu else 32, help="sequences per step")
    parser.add_argument("--peer", default="", help="transformers or a checkout of karpathy/nanoGPT, in a bare loop")
    parser.add_argument("--seconds", type=float, default=0 if on_cpu else 5, help="of steps before those profiled")
    parser.add_argument("--out", default="bench", help="directory of the results")
    arguments, flags = parser.parse_known_args(argv)
    recipe = parse_config([f"--config={arguments.config}", *flags])
    sizes = {"config": recipe.run.config, "micro_batch_size": arguments.micro_batch_size}
    sizes["total_batch_tokens"] = arguments.micro_batch_size * recipe.data.sequence_length
    sizes["precision"] = hardware.resolve_precision(recipe.run.precision, cpu=on_cpu)  # a peer does not resolve it
    results: dict = report.circumstances() | report.measured_model(recipe) | sizes
    results |= {"peer": arguments.peer, "flags": flags}
    results |= profiled(sizes, flags, arguments.peer, arguments.seconds)
    report.write(results, Path(arguments.out) / "kernels.json")
    for name, launches, ms in results["kernels"][:25]:
        print(f"{ms:9.3f} ms {launches:7.1f}  {name[:100]}")
    print(f"{sum(ms for *_, ms in results['kernels']):9.3f} ms per step of {sizes['total_batch_tokens']:,} tokens")
    print(f"{results['step_ms']:9.3f} ms by the clock, not profiled; {results['profiled_step_ms']:.3f} while profiled")
    return 0


def profiled(sizes: dict, flags: list[str], peer_kind: str, seconds: float) -> dict:
    """Takes steps for this many seconds, then profiles some. Raises UserError if the run fails.

    Returns `kernels`, (name, launches, milliseconds) of each in a step, the slowest first; `step_ms`, a step's time
    before they are profiled, and `profiled_step_ms` meanwhile; and `smi`, what nvidia-smi reports during the former,
    since a device may lower its clock under load.
    """
    on_cpu = device().type == "cpu"
    activity = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
    profiler, results = profile(activities=[activity], acc_events=True), {}

    def clock() -> float:
        if not on_cpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def measurements() -> Iterator[None]:
        """Continues after each step."""
        for _ in range(WARMUP_STEPS - 1):
            yield
        start, steps = clock(), 0
        while not steps or time.perf_counter() <= start + seconds:
            yield
            steps += 1
            several_queued = (WARMUP_STEPS + steps) % LOGGING_STEPS == LOGGING_STEPS - 1
            if several_queued and "smi" not in results and time.perf_counter() > start + seconds / 2:
                results["smi"] = hardware.nvidia_smi(*SMI)
        results["step_ms"] = 1e3 * (clock() - start) / steps
        profiler.start()
        start = time.perf_counter()
        for _ in range(PROFILED_STEPS):
            yield
        results["profiled_step_ms"] = 1e3 * (clock() - start) / PROFILED_STEPS
        profiler.stop()
        raise Enough

    after_step = measurements()
    with shards() as directory:
        fields = FIELDS | sizes | {"dataset_name": directory / "shards", "output_dir": directory / "run"}
        fields |= {"logging_steps": LOGGING_STEPS}
        train_args = [*(f"--{name}={value}" for name, value in fields.items()), *flags]
        train_args.append(f"--precision={sizes['precision']}")  # after --precision=auto among the flags
        hook = register_optimizer_step_post_hook(lambda *_: next(after_step))
        try:
            with suppress(Enough):
                if peer_kind:
                    torch.set_float32_matmul_precision("high")
                    peer.bare_loop(parse_config(train_args), peer_kind)
                else:
                    train.main(train_args)
                raise UserError("the run ended before its steps were profiled; it has printed why")
        finally:
            hook.remove()
    attribute = f"self_{'cpu' if activity == ProfilerActivity.CPU else 'device'}_time_total"  # microseconds
    events = profiler.key_averages()
    rows = [(e.key, e.count / PROFILED_STEPS, getattr(e, attribute) / 1e3 / PROFILED_STEPS) for e in events]
    # An operator's own time is its time less its children's, which a clock that steps back can make negative.
    return results | {"kernels": sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])}
