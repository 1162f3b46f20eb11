"""How much of a step two processes of this machine talk: the recipe's engine with its communication and without.

Two GPUs where there are as many, else two processes on the CPU. Without is, under DDP, a step whose last micro-step is
like the others; under ZeRO-1 and 2, one whose collectives return at once. A step's other costs are the same, so the
difference is what communication adds to it after whatever hides behind backward.

`measure_two` starts this file through `accelerate launch`, as `-m benchmarks.comm_overhead TASK`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch

from benchmarks.communication import collectives
from recipe.config import ROOT, ModelConfig, batch_arithmetic, parse_config
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine import device as hardware
from recipe.engine.factory import open_engine
from recipe.errors import UserError
from recipe.estimate.memory import parameter_count, si
from recipe.model.build import build_model
from recipe.optim import adamw as optim
from recipe.optim.spike_filter import SpikeFilter

SMALL = ModelConfig(n_layer=4, n_head=4, n_embd=128, n_positions=128)
FILES = {"ddp": "ddp.yaml", "zero1": "zero1.yaml", "zero2": "zero2.yaml"}
_PATIENCE = 600  # seconds, for a measurement


def measure_two(
    strategies: tuple[str, ...] = ("ddp", "zero1"),
    model: ModelConfig = SMALL,
    *,
    sequence_length: int = 128,
    micro_batch: int = 4,
    accumulation: int = 2,
    precision: str = "auto",
    rounds: int = 3,
    steps: int = 1,
) -> dict:
    """Times `rounds` times `steps` steps with communication, twice as many without, and as many with it again.

    Returns:
        by strategy, a dict for JSON: `seconds_with` and `seconds_without` a step (medians), `share` of the step that
        communication adds (the rounds' median, `shares` of each: noise can make one negative), and beside it
        `predicted_share`, from the bytes of benchmarks/communication.py and the speed of a sum of all gradients
        timed alone (`bus_bandwidth`, bytes/s each way), nothing hidden; of ZeRO also `left_out`, the bytes of the
        collectives in a step without. {"note": why} where a strategy cannot run.
    Raises:
        UserError: a strategy is not ddp, zero1 or zero2, or its processes failed, with what they said.
    """
    found = {}
    for strategy in strategies:
        if strategy not in FILES:
            raise UserError(f"{strategy!r} cannot be measured; choose from {', '.join(FILES)}")
        flags = {
            **{name: getattr(model, name) for name in ("n_layer", "n_head", "n_embd", "n_positions")},
            "sequence_length": sequence_length,
            "micro_batch_size": micro_batch,
            "precision": precision,
            "total_batch_tokens": 2 * accumulation * micro_batch * sequence_length,
        }
        task = {"flags": [f"--{name}={value}" for name, value in flags.items()], "rounds": rounds, "steps": steps}
        figures = _launch(strategy, task)
        if "note" not in figures:
            figures |= _predicted(strategy, model, figures, accumulation)
        found[strategy] = figures
    return found


def _launch(strategy: str, task: dict) -> dict:
    """Two processes that do `task`, and what the first found."""
    if strategy != "ddp" and not hardware.has_deepspeed():
        return {"note": "DeepSpeed is not installed: pip install -e '.[deepspeed]'"}
    variables = dict(os.environ)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    if torch.accelerator.device_count() < 2:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
        variables |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": str(max(1, cores // 2))} | hardware.hide_gpus()
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--quiet",
        "--config_file",
        f"{ROOT}/accelerate_configs/{FILES[strategy]}",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        "--module",
        "benchmarks.comm_overhead",
        json.dumps(task),
    ]
    try:
        ran = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        raise UserError(f"two processes of {strategy} took more than {_PATIENCE} s; fewer --rounds?") from None
    lines = [line.removeprefix(_RESULT) for line in ran.stdout.splitlines() if line.startswith(_RESULT)]
    if ran.returncode or len(lines) != 1:
        said = [line for line in ran.stderr.splitlines() if line.strip()][-3:] or ["without a word"]
        raise UserError(f"two processes of {strategy} failed: " + " | ".join(said))
    return json.loads(lines[0])


def _predicted(strategy: str, model: ModelConfig, figures: dict, accumulation: int) -> dict:
    half = figures["precision"] in ("bf16", "fp16")
    world = figures["world"]
    sent = sum(c.sent(world) for c in collectives(strategy, model, half=half, accumulation=accumulation))
    bandwidth = 2 * (world - 1) / world * figures["link_bytes"] / figures["link_seconds"]
    talk = sent / bandwidth
    return {
        "bytes_sent": sent,
        "bus_bandwidth": bandwidth,
        "predicted_seconds": talk,
        "predicted_share": talk / (figures["seconds_without"] + talk),
    }


_RESULT = "TWO "


def work(task: dict) -> dict:
    """One of the processes: builds the engine's step, and times it in turns with communication and without."""
    config = parse_config(task["flags"])
    engine = open_engine(config.run.precision)
    batch = batch_arithmetic(config, engine.world)
    model = build_model(config, **engine.model_options)
    engine.place(model, compile="")
    optimizer = optim.make_optimizer(model, config.optimizer, **engine.optimizer_options)
    max_norm = config.optimizer.max_grad_norm
    wrapped, optimizer = engine.prepare(model, optimizer, batch, max_norm)
    spike_filter = SpikeFilter(engine.device, config.optimizer)
    torch.manual_seed(engine.rank)
    rows = engine.to_device(torch.randint(0, VOCAB_SIZE, (batch.micro, config.data.sequence_length + 1)))
    zero = engine.zero_stage > 0
    silenced: list[tuple[str, int]] = []  # of the last step without communication

    def step(talking: bool) -> None:
        with nullcontext() if talking or not zero else engine.unconnected() as left_out:
            for micro_step in range(batch.accumulation):
                last = micro_step == batch.accumulation - 1
                with engine.micro_step(wrapped, last=last and (talking or zero)):
                    engine.backward(wrapped(rows[:, :-1], rows[:, 1:]) / batch.accumulation)
            engine.optimizer_step(wrapped, optimizer, max_norm, spike_filter)
        if left_out is not None:
            silenced[:] = left_out

    def timed(call: Callable[[], object], times: int) -> float:
        """Seconds a call, from when all processes begin until all have ended: the slower one's, with it or without."""
        engine.anywhere(False)
        hardware.synchronize(engine.device)
        start = time.perf_counter()
        for _ in range(times):
            call()
        engine.anywhere(False)  # it waits for the device
        return (time.perf_counter() - start) / times

    def agree() -> bool:
        """Whether all processes hold the same weights, by their sum."""
        own = torch.stack([p.detach().double().abs().sum() for p in model.parameters()]).sum()
        return not engine.anywhere(bool(engine.mean(own.clone()) != own))

    agreed = {}
    for talking, name in ((True, "with"), (False, "without")):  # warms up, and sees that the switch does what it says
        step(talking)
        agreed[name] = agree()
    if agreed != {"with": True, "without": False}:
        raise UserError(f"steps with communication and without cannot be told apart: {agreed}")
    step(True)
    turns: dict[bool, list[float]] = {True: [], False: []}
    shares = []
    for _ in range(task["rounds"]):
        here = {True: [], False: []}
        for talking in (True, False, False, True):
            here[talking].append(timed(partial(step, talking), task["steps"]))
        shares.append(1 - sum(here[False]) / sum(here[True]))
        turns = {talking: turns[talking] + here[talking] for talking in turns}
    gradients = torch.zeros(parameter_count(config.model), device=engine.device)
    sums = [timed(partial(torch.distributed.all_reduce, gradients), 1) for _ in range(6)][1:]
    result = {
        "device": engine.name,
        "precision": engine.precision,
        "world": engine.world,
        "batch": f"{batch.accumulation} micro-steps of {batch.micro} x {config.data.sequence_length}",
        "parameters": parameter_count(config.model),
        "processes_agree": agreed,
        "left_out": {kind: sum(size for name, size in silenced if name == kind) for kind, _ in silenced},
        "seconds_with": statistics.median(turns[True]),
        "seconds_without": statistics.median(turns[False]),
        "share": statistics.median(shares),
        "shares": shares,
        "link_bytes": gradients.numel() * gradients.element_size(),
        "link_seconds": statistics.median(sums),
    }
    if engine.is_main:
        print(_RESULT + json.dumps(result), flush=True)
    engine.anywhere(False)  # none ends before the others
    engine.close()
    return result


def lines(found: dict) -> list[str]:
    """The figures of `measure_two` for the terminal."""
    out = ["measured   two processes, steps with communication and without in turns; its share of a step"]
    for strategy, figures in found.items():
        if "note" in figures:
            out.append(f"  {strategy:6} {figures['note']}")
            continue
        shares = figures["shares"]
        out.append(
            f"  {strategy:6} {100 * figures['share']:5.1f} % ({100 * min(shares):.1f} to {100 * max(shares):.1f}), "
            f"predicted {100 * figures['predicted_share']:.1f} % with nothing hidden; "
            f"{1e3 * figures['seconds_without']:.1f} ms a step without, {1e3 * figures['seconds_with']:.1f} ms with"
        )
        out.append(
            f"         {figures['device']}, {figures['precision']}, {si(figures['parameters'])} parameters, "
            f"{figures['batch']}; link {figures['bus_bandwidth'] / 1e9:.3g} GB/s each way, measured alone"
        )
    return out


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
