"""Command: the full GPU benchmark in ten minutes, the most valuable steps first. Needs no network, no git, no .venv.

    python -m benchmarks proof --out bench/h100 --nanogpt DIRECTORY --text SHARDS

Each step is a process of its own with a time limit, and its result is written at once to OUT/NN-NAME.json: a step that
fails, hangs or is killed costs only itself. Run again, the command repeats the steps that have not succeeded, and keeps
their earlier results as `before`. Steps run in OUT-work/NN-NAME, where a failed one leaves its files.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import report
from recipe.config import ROOT
from recipe.utils.checkpoints import read_metrics
from recipe.utils.errors import ArgumentParser, UserError
from recipe.utils.files import replace_file

GRACE_S = 10  # between terminating and killing a step
MIN_STEP_S = 15  # no step starts with less time left
TIMED_OUT = 124  # the exit code recorded for a step that exceeds its limit


class Step(NamedTuple):
    """A Python command, which runs in a directory of its own, with its time limit."""

    name: str
    limit: float  # seconds
    arguments: list[str]


def steps(nanogpt: str, text: str) -> list[Step]:
    """All steps in order. The first ones fill ten minutes; the others are less important."""
    data = {"dataset_name": "data", "train_text": ROOT / "recipe/data/tiny_shakespeare.txt", "val_fraction": 0.1}
    fields = {"max_steps": 30, "warmup_steps": 2, "total_batch_tokens": 131072, "logging_steps": 1, "eval_steps": "end"}
    fields |= {"eval_tokens": 16384, "save_steps": "end", "hellaswag_steps": 0, "sample_steps": 0, "streaming": False}
    auto = [f"--{name}={value}" for name, value in (data | fields | {"output_dir": "run"}).items()]
    gpu_tests = ["-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfE", str(ROOT / "tests/engine/test_gpu.py")]
    peers = ["peers", "--config=gpt2", "--rounds=1", "--seconds=1.5", *([f"--nanogpt={nanogpt}"] if nanogpt else [])]
    rows = ["scoreboard", "--config=gpt2", "--seconds=3", "--processes", "--sequences"]

    def benchmark(name: str, limit: float, *arguments: str) -> Step:
        return Step(name, limit, ["-m", "benchmarks", *arguments, "--out=."])

    all_steps = [
        Step("fused-loss", 60, [*gpu_tests, "-k", "computes_the_fused_loss"]),
        Step("auto", 150, [str(ROOT / "recipe/train.py"), "--config=gpt2", *auto]),
        benchmark("peers", 240, *peers, "--micro_batch_size=32", "--only=fused loss|(nanoGPT|loop).*compiled"),
        benchmark("kernels", 90, "kernels"),
        benchmark("ceiling", 30, "ceiling"),
        Step("preflight", 120, [str(ROOT / "recipe/preflight.py"), "--config=gpt2", "--streaming=false"]),
        Step("accuracy", 180, [*gpu_tests, "-n=8"]),
        benchmark("trainer", 120, *peers, "--micro_batch_size=32", "--only=Trainer.*compiled"),
        benchmark("micro-batch", 90, *rows, "128", "--sweep=micro_batch_size=64,128", "--only=micro_batch_size"),
        benchmark("deterministic", 60, *rows, "32", "--sweep=deterministic=true", "--only=deterministic"),
        benchmark("max-autotune", 120, *rows, "32", "--sweep=torch_compile_mode=max-autotune", "--only=compile_mode"),
        benchmark("xl", 300, *rows, "8", "--sizes=gpt2-xl", "--only=gpt2-xl"),
        benchmark("eager-peers", 180, *peers, "--micro_batch_size=16", "--only=(bf16|fp16|fp32)$"),
        benchmark("scoreboard", 480, *rows, "64", "--minutes=7"),
    ]
    if text:  # the text that ships with the project is too short for these
        best = [str(ROOT / "recipe/best.py"), f"--text={text}", "--hours=0.1", "--output_dir=run"]
        all_steps.append(Step("best", 420, best))
        flags = ["--sizes=gpt2", f"--dataset_name={text}", "--minutes=8", "--runs=runs"]
        all_steps.append(benchmark("optimizers", 540, "optimizers", *flags))
    return all_steps


def prove(steps: list[Step], out: Path, minutes: float) -> int:
    """Runs the steps that have not succeeded yet, until the time is up; returns the number that still have not."""
    deadline, n_missing, conditions = time.monotonic() + 60 * minutes, 0, report.circumstances()
    out.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(steps, 1):
        path = out / f"{number:02}-{step.name}.json"
        before = json.loads(path.read_text()) if path.exists() else None
        if before and before["rc"] == 0:
            print(f"done   {path.stem}", flush=True)
            continue
        seconds_left = deadline - time.monotonic()
        if seconds_left < MIN_STEP_S:
            print(f"LATE   {path.stem}: not started, time is up", flush=True)
            n_missing += 1
            continue
        print(f"...    {path.stem}", flush=True)
        work_dir = out.with_name(f"{out.name}-work") / path.stem
        outcome = run(step, work_dir, min(step.limit, seconds_left))
        # Unlike report.write, this accepts non-finite numbers.
        record = {**conditions, "step": step.name, **outcome, "before": before}
        replace_file(path, (json.dumps(record, indent=1) + "\n").encode())
        n_missing += outcome["rc"] != 0
        verdict = "ok    " if outcome["rc"] == 0 else "KILLED" if outcome["rc"] == TIMED_OUT else "FAILED"
        print(f"{verdict} {path.stem} in {outcome['seconds']:.0f} s: {headline(outcome['result'])}", flush=True)
    print(f"\n{len(steps) - n_missing} of {len(steps)} steps have succeeded; run again for the others: {out}")
    return n_missing


def run(step: Step, work_dir: Path, limit: float) -> dict:
    """Runs a step; returns its command, rc, seconds, limit and result."""
    work_dir.mkdir(parents=True, exist_ok=True)
    start_time, clock_start, command = time.time(), time.monotonic(), [sys.executable, *step.arguments]
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Unbuffered: output comes before a later error and is not lost if the step is killed.
    variables = {"PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    with open(work_dir / "output", "w") as output:
        process = psutil.Popen(
            command, stdout=output, stderr=output, cwd=work_dir, env=os.environ | variables, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except psutil.TimeoutExpired:
            code = TIMED_OUT
        finally:
            end(process)
    result = result_of(work_dir, start_time)
    return {"command": command, "rc": code, "seconds": time.monotonic() - clock_start, "limit": limit, "result": result}


def end(process: psutil.Popen) -> None:
    """Ends a step and all its descendants, which may be paused and in sessions of their own."""
    family = [process]
    with suppress(psutil.NoSuchProcess):
        family += process.children(recursive=True)
        process.terminate()
    _, survivors = psutil.wait_procs(family[:1], GRACE_S)
    for member in [*survivors, *family[1:]]:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, GRACE_S)


def result_of(work_dir: Path, start_time: float) -> dict:
    """The JSON files that a step has written since its start, the figures of its run, and its first and last lines."""
    result: dict = {}
    for path in (*work_dir.glob("*.json"), *work_dir.glob("runs/*.json")):
        if path.stat().st_mtime >= start_time:
            with suppress(ValueError):  # half written
                result[path.stem] = json.loads(path.read_text())
    metrics = work_dir / "run" / "metrics.jsonl"
    if metrics.exists() and len(lines := [line for line in read_metrics(metrics) if line["step"]]) > 2:
        for name in ("tokens_per_second", "mfu", "peak_memory_bytes"):
            result[name] = statistics.median(line.get(name) or 0 for line in lines[2:])  # the first ones compile
        result["losses"] = [line["loss"] and round(line["loss"], 4) for line in lines]  # null if not finite
    output = (work_dir / "output").read_text(errors="replace").splitlines()
    lines = [line.strip() for line in output if line.strip()]
    return result | {"output": lines[:30] + lines[30:][-30:]}  # a run's first lines show its configuration


def headline(result: dict) -> str:
    """A step's measurements in one line, as far as it got; without any, its last line of output."""
    parts = []
    for row in result.get("peers", {}).get("rows", []):
        parts.append(f"{row['ratio']:.2f}x {row['name']}" if row["ratio"] else f"{row['name']}: {row['void']}")
    for row in result.get("scoreboard", {}).get("rows", []):
        speed = row["tokens_per_second"]
        parts.append(f"{row['name']}: {f'{speed:,.0f} tokens/s' if speed else row['source']}")
    if speed := result.get("tokens_per_second"):
        parts.append(f"{speed:,.0f} tokens/s, MFU {result['mfu']:.1%}, losses to {result['losses'][-1]}")
    return "; ".join(parts) or (result["output"][-1:] or ["no output"])[0][:150]


def main(argv: list[str]) -> int:
    """Runs the benchmark; returns the exit code, 0 if all steps have succeeded."""
    parser = ArgumentParser(prog="python -m benchmarks proof", allow_abbrev=False)
    parser.add_argument("--out", default="bench/proof", help="directory of the results")
    parser.add_argument("--nanogpt", default="", help="checkout of karpathy/nanoGPT, as another peer")
    parser.add_argument("--text", default="", help="text or shards for recipe/best.py and the optimizers")
    parser.add_argument("--minutes", type=float, default=10, help="time limit of all steps together")
    arguments = parser.parse_args(argv)
    nanogpt, text = (path and str(Path(path).absolute()) for path in (arguments.nanogpt, arguments.text))
    if nanogpt and not (Path(nanogpt) / "model.py").is_file():
        raise UserError(f"--nanogpt {nanogpt}: no model.py there; give a checkout of karpathy/nanoGPT")
    return 1 if prove(steps(nanogpt, text), Path(arguments.out).absolute(), arguments.minutes) else 0
