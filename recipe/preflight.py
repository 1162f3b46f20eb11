"""Command: checks a machine in two minutes, before you trust it with a long run. It takes train.py's flags.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipe/preflight.py --config gpt2

Prints a line for each check, "ok" or what is wrong and what to do, and writes runs/preflight.json. Exits with 0 if all
is well, with 2 if the command is wrong, else with 1. A check that hangs, or that ends with an error, is the last one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from datetime import date
from functools import partial
from glob import glob
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main listens; the imports take seconds
if __package__ in (None, ""):  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from recipe.utils.errors import check_packages

    check_packages()
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py

import torch
import torch.nn.functional as F

from recipe.checkpoint.format import checkpoint_path
from recipe.checkpoint.provenance import versions
from recipe.components import with_vocabulary
from recipe.config import QUIET, ROOT, Config, DataConfig, batch_arithmetic, parse_config
from recipe.data.survey import SHIPPED_TEXT
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.engine.launch import EXIT_GRACE_S, fail, unused_gpu
from recipe.engine.strategy import Strategy
from recipe.estimate.fused_loss import resolve_fused_loss
from recipe.estimate.memory import checkpoint_bytes, step_memory
from recipe.estimate.micro_batch import memory_kind, resolve_micro_batch
from recipe.model.gpt2 import causal_attention
from recipe.model.loss import next_token_loss
from recipe.monitor.summary import disk_notes
from recipe.optim.muon import orthogonalize
from recipe.train import run
from recipe.utils.checkpoints import manifest_of, read_metrics
from recipe.utils.errors import UserError
from recipe.utils.files import nearest_directory, replace_file
from recipe.utils.log import set_up_logging
from recipe.utils.processes import exit_process
from recipe.utils.redaction import redact
from recipe.utils.units import duration, gb, si

RESULT = Path("runs/preflight.json")
LIMIT_S = 180  # of a check: one that takes longer hangs
TRIAL_S = 108  # after which the trial takes no further step
TRIAL_LIMIT_S = 900  # of the trial, which compiles the recipe's model and perhaps tunes each of its kernels
# Twenty steps of a tiny model on the text that ships: their fields, and their losses on a CPU in fp32, by optimizer.
# tests/test_train.py holds every change to them.
GOLDEN = json.loads((ROOT / "recipe" / "golden.json").read_text())
SEQUENCES = 48  # in each of these steps: divides by most numbers of devices
# Tolerances: of a loss in nats, and of a kernel's results and gradients relative to the largest number. Measured on
# CPUs: 1e-6 nats in fp32 and 1e-3 in bf16, and of a kernel 3e-6 and 1e-2; on an H200, which adds in another order, as
# many nats, and of a kernel in bf16 6e-3 to 2e-2.
NATS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
RELATIVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}
SLOW = 0.8  # of the median process's speed: below it a GPU is too hot or has other work
# NVLink one way, B/s, by a part of the GPU's name: Nvidia's data sheets. A PCIe card may have none.
LINKS = {"A100-SXM": 300e9, "H100 80GB HBM3": 450e9, "H200": 450e9, "B200": 900e9}
Finding = tuple[str, str]  # what a check has measured, and the problem with it, empty where there is none


def main(argv: list[str] | None = None) -> int:
    """Runs all checks and returns the exit code."""
    environment = dict(os.environ)
    try:
        config = parse_config(argv)
        strategy = open_strategy(config.run.precision, deterministic=config.run.deterministic)
        config = with_vocabulary(config, strategy.runtime.processes)
        report = Report(config, strategy, environment)
    except (UserError, OSError) as error:
        return fail(error)
    warnings.simplefilter("ignore")
    set_up_logging(main=False)
    torch.manual_seed(0)  # or how far rounding takes a kernel would vary from call to call
    try:
        for check in (devices, sum_, products, attention, loss, muon, disk):
            report.check(check.__name__.rstrip("_"), check, config, strategy)
        compile_fields = {name: getattr(config.run, name) for name in ("torch_compile", "torch_compile_mode")}
        run_precision = strategy.device.precision
        devices_in_all = strategy.device.count * strategy.runtime.processes.world_size
        if SEQUENCES % devices_in_all:
            skipped = f"skipped: its {SEQUENCES} sequences cannot be divided among {devices_in_all} devices", ""
            report.check("golden run", lambda: skipped)
        else:
            for precision in dict.fromkeys(("fp32", run_precision)):
                strategy = report.reopened(precision)
                fields = compile_fields if precision == run_precision else {}
                for optim in strategy.runtime.optimizers or ("adamw", "muon"):
                    report.check(f"{optim} {precision}", follows_golden, report.directory, optim, strategy, fields)
            report.check("resume", resumes, report.directory, strategy, compile_fields)
        strategy = report.reopened(run_precision)
        report.check("trial", trial, config, report.directory, strategy, limit_s=TRIAL_LIMIT_S)
        strategy.runtime.close()
        return report.close()
    finally:
        report.clean_up()


class Report:
    """The lines and runs/preflight.json, which the main process writes, and `directory`, a temporary one that all
    processes share; it is deleted however the command ends."""

    def __init__(self, config: Config, strategy: Strategy, environment: dict[str, str]):
        """`environment` is that of the process before the strategy was opened."""
        self._environment, self._processes, self._started = environment, strategy.runtime.processes, time.monotonic()
        device = strategy.device
        self._facts = {
            "date": date.today().isoformat(),
            "config": redact(config.run.config),
            "device": device.chip,
            "precision": device.precision,
            "processes": self._processes.world_size,
            "engine": str(strategy),
            "versions": versions(),
        }
        self._lines: list[dict[str, str]] = []
        directory = ""
        if self._processes.is_main:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.unlink(missing_ok=True)  # or a model card would quote it, were this process killed
            an_hour_ago = time.time() - 3600  # a newer directory may belong to another node's preflight
            for leftover in RESULT.parent.glob(".preflight-*"):
                if os.path.getmtime(leftover) < an_hour_ago:
                    shutil.rmtree(leftover, ignore_errors=True)
            directory = tempfile.mkdtemp(prefix=".preflight-", dir=RESULT.parent)
        self.directory = Path(self._processes.broadcast_object(directory))
        self._exit_on_signals()

    def reopened(self, precision: str) -> Strategy:
        """A strategy in this precision, as if the process had just been launched. A collective call."""
        os.environ |= self._environment  # FSDP and DeepSpeed remove some of it
        strategy = open_strategy(precision)  # which stays deterministic
        self._exit_on_signals()
        return strategy

    def _exit_on_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, _: self._exit(128 + number))

    def check(self, name: str, function: Callable[..., Finding | None], *arguments, limit_s: float = LIMIT_S) -> None:
        """Prints what the function finds. If it raises an error, the command ends. A collective call."""
        timer = threading.Timer(limit_s, self._end, (name, f"no result after {limit_s} s: it hangs"))
        timer.daemon = True
        timer.start()
        torch.compiler.reset()  # what earlier checks have compiled counts towards a limit
        try:
            finding = function(*arguments)
        except Exception as error:  # perhaps on this process only: the others may wait for it for ever
            self._end(name, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        timer.cancel()
        if finding and self._processes.is_main:
            self._print(name, *finding)

    def _print(self, name: str, measured: str, problem: str) -> None:
        problem = redact(problem)  # an address in an error may contain a token
        text = "; ".join(filter(None, (measured, problem)))
        print(f"{'WRONG' if problem else 'ok':<6} {name:<11} {text}", flush=True)
        self._lines.append({"check": name, "found": measured, "wrong": problem})

    def _end(self, name: str, problem: str) -> NoReturn:
        """Ends this process, and thereby all: the launcher ends the others."""
        if not self._processes.is_main:
            time.sleep(EXIT_GRACE_S)  # in which the main process ends this one, if it has failed too
            name = f"{name} of process {self._processes.rank}"
        self._print(name, "", problem)
        self.close()
        self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        self.clean_up()
        os._exit(code)  # a normal exit may wait for other processes

    def close(self) -> int:
        """Prints the verdict and writes the file. Returns the exit code."""
        if not self._processes.is_main:  # the launcher would end the main process as soon as another one fails
            return 0
        passed = not any(line["wrong"] for line in self._lines)
        result = {"passed": passed, **self._facts, "checks": self._lines}
        replace_file(RESULT, (json.dumps(result, indent=1) + "\n").encode())
        seconds = duration(time.monotonic() - self._started)
        print(f"\npreflight {'passed' if passed else 'FAILED'} in {seconds}; details in {RESULT}", flush=True)
        return 0 if passed else 1

    def clean_up(self) -> None:
        """Deletes `directory`."""
        if self._processes.is_main:
            shutil.rmtree(self.directory, ignore_errors=True)


# Checks that train.


def golden_losses(directory: Path, optim: str, strategy: Strategy, fields: dict) -> list[float]:
    """Takes the 20 steps with these further fields in `directory`. Returns their losses."""
    devices = strategy.runtime.processes.world_size * strategy.device.count
    fields = GOLDEN["fields"] | fields | {"optim": optim, "precision": strategy.device.precision}
    fields |= {"micro_batch_size": SEQUENCES // devices // 2 or 1, "output_dir": directory}
    fields["dataset_name"] = directory.with_name("data")
    run(parse_config([f"--{name}={value}" for name, value in fields.items()]), strategy)
    return losses_in(directory)


def losses_in(directory: Path) -> list[float]:
    """The losses of a golden run's 20 steps; infinite where one is NaN, or its step was not taken."""
    losses = {line["step"]: line["loss"] for line in read_metrics(directory / "metrics.jsonl")}
    return [losses.get(step) or math.inf for step in range(1, 21)]


def follows_golden(directory: Path, optim: str, strategy: Strategy, fields: dict) -> Finding:
    """Compares a golden run with the CPU's."""
    precision = strategy.device.precision
    losses, tolerance = golden_losses(directory / f"{optim}-{precision}", optim, strategy, fields), NATS[precision]
    nats = [abs(loss - expected) for loss, expected in zip(losses, GOLDEN[optim]["loss"], strict=True)]
    first = next((step for step, difference in enumerate(nats, 1) if difference > tolerance), None)
    way_out = "see the lines above, or NaN in docs/troubleshooting.md"
    problem = f"the losses differ at step {first}: {way_out}" if first else ""
    steps = f"20 {'compiled ' * bool(fields.get('torch_compile'))}steps"
    return f"{steps}, losses within {max(nats):.1e} of a CPU's in fp32 ({tolerance:g} allowed)", problem


def resumes(directory: Path, strategy: Strategy, fields: dict) -> Finding | None:
    """Compares a golden run resumed at step 10 with one that was not interrupted."""
    complete, tolerance = directory / f"adamw-{strategy.device.precision}", NATS[strategy.device.precision]
    resumed, is_main = directory / "resumed", strategy.runtime.processes.is_main
    if is_main:
        shutil.copytree(checkpoint_path(complete, 10), checkpoint_path(resumed, 10))
    losses = golden_losses(resumed, "adamw", strategy, fields)
    if not is_main:  # another node may not see the files yet
        return None
    nats = max(abs(loss - expected) for loss, expected in zip(losses[10:], losses_in(complete)[10:], strict=True))
    measured = f"losses within {nats:.1e} ({tolerance:g} allowed)"
    sums, resumed_sums = (manifest_of(checkpoint_path(run, 20)) for run in (complete, resumed))
    if all(sums[file] == resumed_sums[file] for file in ("model.safetensors", "optimizer.safetensors")):
        measured = "weights and optimizer state equal to the bit"
    problem = "" if nats <= tolerance else "the state was not restored exactly, or runs here are not repeatable"
    return f"saved at step 10, resumed to 20: {measured}", problem


def trial(config: Config, directory: Path, strategy: Strategy) -> Finding:
    """Some steps of the recipe itself, on its own data if they are here, saved at the end."""
    data, device, processes = config.data, strategy.device, strategy.runtime.processes
    fields = QUIET | {"max_steps": 8, "warmup_steps": 2, "logging_steps": 1, "output_dir": str(directory / "trial")}
    fields |= dict.fromkeys(("train_hours", "num_train_epochs", "max_hours"), 0.0)  # whatever the flags say
    config, note = config.replace(**fields), ""
    config, _ = resolve_fused_loss(config, strategy)
    config, _ = resolve_micro_batch(config, strategy)  # of the run, which may take all of the memory
    micro = batch_arithmetic(config, processes.world_size, device.count).micro  # of a process
    sequences = device.count * (8 if device.type == "cpu" else 32)  # of a process in a step, which keep it busy
    tokens = processes.world_size * micro * max(1, sequences // micro) * data.sequence_length
    tokens = min(tokens, config.optimizer.total_batch_tokens)
    config = config.replace(total_batch_tokens=tokens, eval_tokens=tokens)
    if not (data.streaming or data.mixture or Path(data.dataset_name).exists() or glob(data.dataset_name)):
        note = f"; on the text that ships, since {data.dataset_name} is not prepared yet"
        text, shipped = directory / "text.txt", SHIPPED_TEXT.read_bytes()
        copies = 1 + tokens // (len(shipped) // 6)  # GPT-2's tokens have 3.3 bytes on average, others' less than 6
        processes.in_turns(lambda: text.exists() or text.write_bytes(copies * shipped), f"{text} cannot be written")
        shards = DataConfig(str(directory / "text"), train_text=str(text), val_fraction=0.1)
        shards = dataclasses.replace(shards, tokenizer=data.tokenizer, sequence_length=data.sequence_length)
        config = dataclasses.replace(config, data=shards)
    strategy.runtime.stop.stop_after(TRIAL_S / 3600)
    run(config, strategy)
    lines = [line for line in read_metrics(directory / "trial" / "metrics.jsonl") if line["tokens_per_second"]]
    if len(lines) < 2:
        return "", "fewer than two steps in two minutes: this device is too slow for the recipe"
    speed, data_wait = (  # without the first step, which compiles
        statistics.median(line[name] or 0 for line in lines[1:]) for name in ("tokens_per_second", "data_wait")
    )
    mfu, memory = lines[-1]["mfu"], lines[-1]["peak_memory_bytes"]
    measured = f"{len(lines)} steps of {config.run.run_name}: {speed:,.0f} tokens/s"
    measured += f", MFU {100 * mfu:.0f} %" if mfu else ""
    if memory and device.memory:  # on a CPU it is the most that this process has ever held
        batch = batch_arithmetic(config, processes.world_size, device.count)
        estimate = step_memory(config, batch, **memory_kind(config, strategy)).peak
        measured += f", {gb(memory)} (estimate: {gb(estimate)})"
    slow_data = f"{100 * data_wait:.0f} % of the time goes into waiting for data: use a faster disk or network"
    return measured + note, slow_data if data_wait > 0.05 else ""


# Checks without training.


def disk(config: Config, strategy: Strategy) -> Finding | None:
    """Free space and write speed of the disk for checkpoints."""
    if not strategy.runtime.processes.is_main:
        return None
    directory = nearest_directory(Path(config.run.output_dir))
    size, free = checkpoint_bytes(config), shutil.disk_usage(directory).free
    if problem := next(disk_notes(config), ""):
        return "", problem
    block = os.urandom(2**27)
    with tempfile.TemporaryFile(dir=directory) as file:
        started = time.perf_counter()
        file.write(block)
        os.fsync(file.fileno())
        seconds = (time.perf_counter() - started) * size / len(block)
    return f"{gb(free)} free, writing a checkpoint of {si(size)}B takes {duration(seconds)}", ""


def devices(config: Config, strategy: Strategy) -> Finding:
    """The devices, their precision and the versions of torch and of the driver."""
    device, gpu = strategy.device, hardware.nvidia_smi("driver_version", "power.limit", "clocks.max.sm")
    memory = f", {gb(device.memory)}" if device.memory else ""
    driver = f", driver {', '.join(gpu.values())}" if gpu and device.type == "cuda" else ""
    vendor = unused_gpu() if device.type == "cpu" else ""
    problem = f"this PyTorch cannot use the {vendor} GPU: docs/hardware.md has another (One GPU)" if vendor else ""
    return f"{strategy}{memory}, {device.precision}, torch {torch.__version__}{driver}", problem


def sum_(config: Config, strategy: Strategy) -> Finding | None:
    """Whether all processes get the right sum, and how fast: an all-reduce of 64 MB. Raises UserError on all if one
    does not: processes that disagree would wait for each other for ever."""
    processes, n = strategy.runtime.processes, strategy.runtime.processes.world_size
    if n == 1:
        return None
    numbers = torch.arange(2**24, device=strategy.device.torch_device, dtype=torch.float32) % 1024  # sums are exact
    total = processes.sum(numbers * (processes.rank + 1))
    correct = processes.gather_objects(bool(torch.equal(total, numbers * (n * (n + 1) // 2))))
    if ranks := ", ".join(str(rank) for rank, is_correct in enumerate(correct) if not is_correct):
        raise UserError(f"wrong on process {ranks}: its link or its memory is broken")
    rate = 2 * (n - 1) / n * numbers.nbytes / hardware.seconds_of(partial(processes.sum, numbers))
    link = next((link for name, link in LINKS.items() if name in strategy.device.name), None)
    reference = f" (NVLink: {si(link)}B/s)" if link and processes.nodes == 1 else ""
    return f"over {n} processes, {si(rate)}B/s{reference}", ""


def products(config: Config, strategy: Strategy) -> Finding:
    """The speed of each process's device at what it does most: matrix products."""
    device = strategy.device
    size = 8192 if device.memory else 1024
    a, b = (torch.randn(size, size, device=device.torch_device).to(device.dtype) for _ in range(2))
    rates = strategy.runtime.processes.gather_objects(2 * size**3 / hardware.seconds_of(partial(torch.matmul, a, b)))
    slowest, median = min(rates), statistics.median(rates)
    share = f", {100 * slowest * device.count / device.peak_flops:.0f} % of the peak" if device.peak_flops else ""
    fastest = f" to {si(max(rates))}" if len(rates) > 1 else ""
    problem = f"process {rates.index(slowest)} is slower than the others: its device is too hot, or has other work"
    is_slow = slowest < SLOW * median and device.memory is not None  # processes on a CPU take turns
    return f"{si(slowest)}{fastest}FLOP/s a process{share}", problem if is_slow else ""


def attention(config: Config, strategy: Strategy) -> Finding:
    """The run's attention."""
    model, attend = config.model, strategy.device.attention or causal_attention
    shape = 2, model.n_head, config.data.sequence_length, model.n_embd // model.n_head
    inputs = [torch.randn(shape).to(strategy.device.dtype) for _ in "qkv"]
    return compared_in_fp64(strategy, partial(attend, dropout=0.0), partial(causal_attention, dropout=0.0), inputs)


def loss(config: Config, strategy: Strategy) -> Finding:
    """The run's loss."""
    config, kernel_line = resolve_fused_loss(config.replace(fresh=True), strategy)  # which tries the kernel
    run, D, V = config.run, config.model.n_embd, config.model.vocab_size
    targets = torch.randint(0, V, (1, 256))
    options: dict = {"chunk_size": run.loss_chunk_size, "pad_vocab_to": strategy.device.pad_vocab_to}
    options["fused"] = run.fused_loss

    def run_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with strategy.device.autocast():
            return next_token_loss(hidden, weight, targets.to(hidden.device), **options)

    def reference_loss(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())

    inputs = [torch.randn(1, 256, D), torch.randn(V, D) / 8]
    measured, problem = compared_in_fp64(strategy, run_loss, reference_loss, inputs)
    return "; ".join(filter(None, (measured, kernel_line.removeprefix("loss").strip()))), problem


def muon(config: Config, strategy: Strategy) -> Finding:
    """Muon's orthogonalization, whose gradient is never needed. Its five steps amplify rounding: on a CPU to 2.4e-2 in
    bf16 for matrices 384 wide, and to 4.4e-5 in fp32 for 768; over the TPU's CPU plugin to 8.3e-2 in bf16 for 64."""
    dtype = strategy.device.optimizer_options(strategy.runtime.processes)["muon"]["dtype"]
    matrices = torch.randn(2, config.model.n_embd, 4 * config.model.n_embd).to(dtype)
    return compared_in_fp64(strategy, orthogonalize, orthogonalize, [matrices], backward=False, tolerance_factor=3)


def compared_in_fp64(
    strategy: Strategy,
    function: Callable,
    reference: Callable,
    inputs: list[torch.Tensor],
    *,
    backward: bool = True,
    tolerance_factor: int = 1,
) -> Finding:
    """`function` on the device, forward and backward, compared with `reference` in fp64 on the CPU.
    `tolerance_factor`: how many times a kernel's rounding is allowed. A collective call."""
    results = []
    for call, device_or_dtype in (function, strategy.device.torch_device), (reference, torch.float64):
        leaves = [tensor.to(device_or_dtype).requires_grad_() for tensor in inputs]
        result = call(*leaves)
        mean_square = result.cpu().double().pow(2).mean()  # MPS has no fp64
        gradients = torch.autograd.grad(mean_square, leaves) if backward else ()
        results.append([tensor.detach().cpu().double() for tensor in (result, *gradients)])
    errors = strategy.runtime.processes.gather_objects(
        max(relative_error(*pair) for pair in zip(*results, strict=True))
    )
    worst, tolerance = max(errors), tolerance_factor * RELATIVE[strategy.device.precision]
    problem = f"process {errors.index(worst)} gives a wrong result: try another version of torch, or another driver"
    return f"within {worst:.1e} of fp64 ({tolerance:g} allowed)", problem if worst > tolerance else ""


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number; infinite if any is NaN."""
    error = ((result - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return math.inf if math.isnan(error) else error


if __name__ == "__main__":
    exit_process(main())
