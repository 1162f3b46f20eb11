"""Command: proves a machine in two minutes, before a long run is trusted to it. It takes train.py's flags.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipe/preflight.py --config gpt2

Prints a line for each check, "ok" or what is wrong and what to do, and writes runs/preflight.json. Exits with 0 if all
is well, else with 1. A check that hangs, or that ends with an error, is the last one.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main listens; the imports take seconds
if __package__ in (None, ""):  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as in train.py

import torch
import torch.nn.functional as F

from recipe.checkpoint.format import checkpoint_path, state_of
from recipe.checkpoint.provenance import versions
from recipe.config import AUTO, ROOT, Config, batch_arithmetic, parse_config
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.engine.launch import EXIT_GRACE_S, fail
from recipe.engine.strategy import Strategy
from recipe.estimate.fused_loss import fused_loss
from recipe.estimate.memory import checkpoint_bytes, step_memory
from recipe.estimate.micro_batch import memory_kind
from recipe.model.gpt2 import causal_attention
from recipe.model.loss import next_token_loss
from recipe.optim.muon import orthogonalize
from recipe.train import run as train
from recipe.utils.checkpoints import checkpoints, manifest_of, read_metrics
from recipe.utils.errors import UserError
from recipe.utils.log import set_up_logging
from recipe.utils.redaction import redact
from recipe.utils.units import duration, gb, si

RESULT = Path("runs/preflight.json")
LIMIT_S = 180  # of one check: what takes longer hangs
TRIAL_LIMIT_S = 900  # of the trial, which compiles the recipe's model, and perhaps tunes each of its kernels
# The fields of twenty steps of a tiny model on the text that ships (48 sequences divide by most numbers of processes),
# and its losses on a CPU in fp32, by optimizer; tests/test_train.py holds every change to them.
GOLDEN = json.loads((ROOT / "recipe" / "golden.json").read_text())
# What is allowed, of a loss in nats and of a kernel's results and gradients relative to the largest number. Measured on
# CPUs: 1e-6 and 1e-3 nats in fp32 and bf16, 3e-6 and 1e-2 of a kernel; on an H200, which adds in another order, as many
# nats, and 6e-3 to 2e-2 of a kernel in bf16.
NATS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
RELATIVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}
SLOW = 0.8  # of the median process's speed, for one whose GPU is too hot or has other work
# NVLink one way, B/s, by a part of the GPU's name: Nvidia's data sheets. A PCIe card may have none.
LINKS = {"A100-SXM": 300e9, "H100 80GB HBM3": 450e9, "H200": 450e9, "B200": 900e9}
Found = tuple[str, str]  # what a check found, and what is wrong: empty where all is well


def main(argv: list[str] | None = None) -> int:
    """Runs all checks and returns the exit code."""
    argv, launched = sys.argv[1:] if argv is None else argv, dict(os.environ)
    try:
        config = parse_config(argv)
        strategy = open_strategy(config.run.precision, deterministic=config.run.deterministic)
        report = Report(config, strategy, launched)
    except (UserError, OSError) as error:
        return fail(error)
    warnings.simplefilter("ignore")
    set_up_logging(main=False)
    torch.manual_seed(0)  # or it is a matter of luck how far rounding takes a kernel
    try:
        for check in (devices, sum_, products, attention, loss, muon, disk):
            right = report.check(check.__name__.rstrip("_"), check, config, strategy)
            if check is sum_ and not right:  # processes that disagree wait for each other for ever
                return report.close()
        chosen = strategy.device.precision
        compiled = {name: getattr(config.run, name) for name in ("torch_compile", "torch_compile_mode")}
        for precision in dict.fromkeys(("fp32", chosen)):
            how = compiled if precision == chosen else {}
            for optim in strategy.runtime.optimizers or ("adamw", "muon"):
                name = f"{optim} {precision}"
                report.check(name, follows_golden, report.place, optim, report.opened(precision), how)
        report.check("resume", resumes, report.place, report.opened(chosen), compiled)
        report.check("trial", trial, config, argv, report.place, report.opened(chosen), limit_s=TRIAL_LIMIT_S)
        strategy.runtime.close()
        return report.close()
    finally:
        report.clean_up()


class Report:
    """Lines and runs/preflight.json, by the main process, and `place`, a directory that is gone whatever happens."""

    def __init__(self, config: Config, strategy: Strategy, launched: dict[str, str]):
        """`launched` is the environment before the strategy was opened."""
        self._launched, self._deterministic = launched, config.run.deterministic
        device, self._processes, self._begun = strategy.device, strategy.runtime.processes, time.monotonic()
        self._facts = {
            "date": date.today().isoformat(),
            "config": config.run.config,
            "device": device.chip,
            "precision": device.precision,
            "processes": self._processes.world_size,
            "engine": str(strategy),
            "versions": versions(),
        }
        self._lines: list[dict[str, str]] = []
        place = ""
        if self._processes.is_main:
            RESULT.parent.mkdir(exist_ok=True)
            RESULT.unlink(missing_ok=True)  # a model card would quote it, were this process killed
            for other in RESULT.parent.glob(".preflight-*"):
                if time.time() - os.path.getmtime(other) > 3600:  # or it may be that of another node's preflight
                    shutil.rmtree(other, ignore_errors=True)
            place = tempfile.mkdtemp(prefix=".preflight-", dir=RESULT.parent)
        self.place = Path(self._processes.broadcast_object(place))
        self._listen()

    def opened(self, precision: str) -> Strategy:
        """A strategy in this precision, as if the process had been launched only now. A collective call."""
        os.environ |= self._launched  # with what FSDP and DeepSpeed have taken out of it
        torch.compiler.reset()  # what earlier runs have compiled counts towards a limit
        strategy = open_strategy(precision, deterministic=self._deterministic)
        self._listen()
        return strategy

    def _listen(self) -> None:
        """From now on a signal ends this process."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda number, _: self._exit(128 + number))

    def check(self, name: str, function: Callable[..., Found | None], *arguments, limit_s: float = LIMIT_S) -> bool:
        """Prints what the function finds, and returns whether that is right. A collective call."""
        timer = threading.Timer(limit_s, self._end, (name, f"it hangs: not finished after {limit_s} s"))
        timer.daemon = True
        timer.start()
        try:
            found = function(*arguments)
        except Exception as error:  # perhaps of this process only: the others may wait for it for ever
            self._end(name, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
        timer.cancel()
        if found and self._processes.is_main:
            self._print(name, *found)
        return not (found and found[1])

    def _print(self, name: str, found: str, wrong: str) -> None:
        wrong = redact(wrong)  # an address in an error may have a token
        print(f"{'WRONG' if wrong else 'ok':<6} {name:<11} {'; '.join(filter(None, (found, wrong)))}", flush=True)
        self._lines.append({"check": name, "found": found, "wrong": wrong})

    def _end(self, name: str, wrong: str) -> NoReturn:
        """Ends all processes: the launcher does, as soon as one has ended."""
        if self._processes.is_main:
            self._print(name, "", wrong)
            self.close()
        else:
            time.sleep(EXIT_GRACE_S)  # in which the main process has ended this one, if it has failed too
            print(f"process {self._processes.rank}: {redact(wrong)}", flush=True)
        self._exit(1)

    def _exit(self, code: int) -> NoReturn:
        self.clean_up()
        os._exit(code)  # a normal exit may wait for other processes

    def close(self) -> int:
        """Prints the verdict and writes the file. Returns the exit code."""
        if not self._processes.is_main:  # the first process that ends with an error would end the main one
            return 0
        passed = not any(line["wrong"] for line in self._lines)
        RESULT.write_text(json.dumps({"passed": passed, **self._facts, "checks": self._lines}, indent=1) + "\n")
        took = duration(time.monotonic() - self._begun)
        print(f"\npreflight {'passed' if passed else 'FAILED'} in {took}; {RESULT} has what was found", flush=True)
        return 0 if passed else 1

    def clean_up(self) -> None:
        """Removes `place`."""
        if self._processes.is_main:
            shutil.rmtree(self.place, ignore_errors=True)


# Training runs.


def config_of(fields: dict, argv: Sequence[str] = ()) -> Config:
    """The configuration with these fields, beside the flags `argv`, of which they override the same ones."""
    return parse_config([*argv, *(f"--{name}={value}" for name, value in fields.items())])


def golden_run(directory: Path, optim: str, strategy: Strategy, how: dict) -> None:
    """Trains the 20 steps, with the fields `how`. Raises UserError where the processes cannot share its sequences."""
    processes, devices = strategy.runtime.processes.world_size, strategy.device.count
    if 48 % (processes * devices):
        raise UserError(f"not tried: 48 sequences do not divide by {processes} processes x {devices}")
    fields = GOLDEN["fields"] | {"micro_batch_size": 48 // processes // devices // 2 or 1, "optim": optim}
    fields |= {"precision": strategy.device.precision, "dataset_name": directory.with_name("data")} | how
    train(config_of(fields | {"output_dir": directory}), strategy)


def golden_losses(directory: Path) -> list[float | None]:
    """Those of a golden run's 20 steps, on the main process; None, which NaN is too, of one that was not taken."""
    losses = {line["step"]: line["loss"] for line in read_metrics(directory / "metrics.jsonl")}
    return [losses.get(step) for step in range(1, 21)]


def apart(losses: list[float | None], expected: list[float | None]) -> list[float]:
    """In nats, step by step."""
    return [math.inf if a is None or b is None else abs(a - b) for a, b in zip(losses, expected, strict=True)]


def follows_golden(place: Path, optim: str, strategy: Strategy, how: dict) -> Found:
    """A golden run beside the CPU's."""
    directory, allowed = place / f"{optim}-{strategy.device.precision}", NATS[strategy.device.precision]
    golden_run(directory, optim, strategy, how)
    if not strategy.runtime.processes.is_main:
        return "", ""
    nats = apart(golden_losses(directory), GOLDEN[optim]["loss"])
    first = next((step for step, one in enumerate(nats, 1) if one > allowed), None)
    wrong = f"they part at step {first}: see the lines above, or NaN in docs/troubleshooting.md" if first else ""
    steps = f"20 {'compiled ' * bool(how.get('torch_compile'))}steps"
    return f"{steps}, losses within {max(nats):.1e} of a CPU's in fp32 ({allowed:g} allowed)", wrong


def resumes(place: Path, strategy: Strategy, how: dict) -> Found:
    """A golden run that begins with the checkpoint of another one's middle, beside that one."""
    directory, allowed = place / f"adamw-{strategy.device.precision}", NATS[strategy.device.precision]
    resumed, main = place / "resumed", strategy.runtime.processes.is_main
    if main:
        shutil.copytree(checkpoint_path(directory, 10), checkpoint_path(resumed, 10))
    golden_run(resumed, "adamw", strategy, how)
    if not main:
        return "", ""
    nats = max(apart(golden_losses(resumed)[10:], golden_losses(directory)[10:]))
    found = f"losses within {nats:.1e} ({allowed:g} allowed)"
    once, again = (manifest_of(checkpoint_path(run, 20)) for run in (directory, resumed))  # with checksums
    if all(once[file] == again[file] for file in ("model.safetensors", "optimizer.safetensors")):
        found = "weights and optimizer state equal to the bit"
    wrong = "" if nats <= allowed else "what is read is not what was saved, or two runs differ"
    return f"saved at step 10, resumed to 20: {found}", wrong


def trial(config: Config, argv: list[str], place: Path, strategy: Strategy) -> Found:
    """Some steps of the recipe itself, on its own data where they are here, saved at the end."""
    data, opt, there = config.data, config.optimizer, Path(config.data.dataset_name)
    device, processes = strategy.device, strategy.runtime.processes
    most = 8 if device.type == "cpu" else 32  # sequences: a GPU is busy with them
    micro = most if opt.micro_batch_size == AUTO else opt.micro_batch_size
    tokens = processes.world_size * device.count * micro * max(1, most // micro) * data.sequence_length
    fields: dict = {"max_steps": 8, "warmup_steps": 2, "logging_steps": 1, "eval_steps": "end", "save_steps": "end"}
    fields |= {"total_batch_tokens": min(tokens, opt.total_batch_tokens), "eval_tokens": tokens, "max_hours": 0.03}
    fields |= {"hellaswag_steps": 0, "sample_steps": 0, "report_to": "none", "push_to_hub": False}
    fields |= {"train_hours": 0, "num_train_epochs": 0, "dry_run": False}  # whatever the flags say
    fields["output_dir"], note = place / "trial", ""
    if not (data.streaming or data.mixture or there.exists()):
        fields |= {name: GOLDEN["fields"][name] for name in ("train_text", "val_fraction")}
        fields |= {"dataset_name": place / "data", "val_data": "", "tokenizer": "gpt2"}
        note = f"; on the text that ships, since {there} is not prepared yet"
    train(config_of(fields, argv), strategy)
    if not processes.is_main:
        return "", ""
    lines = [line for line in read_metrics(fields["output_dir"] / "metrics.jsonl") if line["tokens_per_second"]]
    if len(lines) < 2:
        return "", "not two steps in two minutes: this device is too slow for the recipe"
    later = lines[1:]  # the first step compiles
    middle = {name: statistics.median(line[name] or 0 for line in later) for name in ("tokens_per_second", "data_wait")}
    mfu, memory, wait = lines[-1]["mfu"], lines[-1]["peak_memory_bytes"], middle["data_wait"]
    settled = state_of(checkpoints(fields["output_dir"])[-1])["config"]  # which has what stood on auto
    auto = {name: settled[name] for name in ("micro_batch_size", "gradient_checkpointing", "fused_loss")}
    config = config_of(fields | auto, argv)
    batch = batch_arithmetic(config, processes.world_size, device.count)
    plan = step_memory(config, batch, **memory_kind(config, strategy)).peak
    found = f"{len(lines)} steps of {config.run.run_name}: {middle['tokens_per_second']:,.0f} tokens/s"
    found += f", MFU {100 * mfu:.0f} %" if mfu else ""
    if memory and device.memory:  # on a CPU it is all that this process has ever held
        found += f", {gb(memory)} (the plan: {gb(plan)})"
    wrong = f"{100 * wait:.0f} % of the time it waits for data: a faster disk or network" if wait > 0.05 else ""
    return found + note, wrong


# What is not a training run.


def disk(config: Config, strategy: Strategy) -> Found:
    """Room and speed where checkpoints go."""
    if not strategy.runtime.processes.is_main:
        return "", ""
    directory = Path(config.run.output_dir).absolute()
    there = next(path for path in (directory, *directory.parents) if path.is_dir())
    block = os.urandom(2**24)
    with tempfile.TemporaryFile(dir=there) as file:
        begun = time.perf_counter()
        for _ in range(8):
            file.write(block)
        os.fsync(file.fileno())
        seconds = (time.perf_counter() - begun) / (8 * len(block))
    size, free = checkpoint_bytes(config), shutil.disk_usage(there).free
    needed = (config.run.save_total_limit + 3) * size
    found = f"{gb(free)} free, writing a checkpoint of {si(size)}B takes {duration(size * seconds)}"
    return found, "" if free > needed else f"the run needs {gb(needed)} in {there}; choose another --output_dir"


def devices(config: Config, strategy: Strategy) -> Found:
    """What there is."""
    device, found = strategy.device, hardware.nvidia_smi("driver_version", "power.limit", "clocks.max.sm")
    memory = f", {gb(device.memory)}" if device.memory else ""
    driver = f", driver {', '.join(found.values())}" if found and device.type == "cuda" else ""
    return f"{strategy}{memory}, {device.precision}, torch {torch.__version__}{driver}", ""


def sum_(config: Config, strategy: Strategy) -> Found | None:
    """Whether all processes get the right sum, and how fast: an all-reduce of 64 MB."""
    processes, n = strategy.runtime.processes, strategy.runtime.processes.world_size
    if n == 1:
        return None
    numbers = torch.arange(2**24, device=strategy.device.torch_device, dtype=torch.float32) % 1024  # sums are exact
    total = processes.sum(numbers * (processes.rank + 1))
    right = gathered(strategy, bool(torch.equal(total, numbers * (n * (n + 1) // 2))))
    rate = 2 * (n - 1) / n * numbers.nbytes / hardware.seconds_of(partial(processes.sum, numbers))
    link = next((link for name, link in LINKS.items() if name in strategy.device.name), None)
    beside = f" (NVLink: {si(link)}B/s)" if link and processes.nodes == 1 else ""
    who = ", ".join(str(rank) for rank, fine in enumerate(right) if not fine)
    found = f"over {n} processes, {si(rate)}B/s{beside}"
    return found, f"wrong on process {who}: its link or its memory is broken" if who else ""


def products(config: Config, strategy: Strategy) -> Found:
    """The speed of each process's device at what it does most."""
    device = strategy.device
    size = 8192 if device.memory else 1024
    a, b = (torch.randn(size, size, device=device.torch_device).to(device.dtype) for _ in range(2))
    rates = gathered(strategy, 2 * size**3 / hardware.seconds_of(partial(torch.matmul, a, b)))
    least, median = min(rates), statistics.median(rates)
    peak = f", {100 * least * device.count / device.peak_flops:.0f} % of the peak" if device.peak_flops else ""
    wrong = f"process {rates.index(least)} is slower than the others: its device is too hot, or has other work"
    slow = least < SLOW * median and device.memory is not None  # processes on a CPU take turns
    most = f" to {si(max(rates))}" if len(rates) > 1 else ""
    return f"{si(least)}{most}FLOP/s a process{peak}", wrong if slow else ""


def attention(config: Config, strategy: Strategy) -> Found:
    """The run's attention."""
    model, attend = config.model, strategy.device.attention or causal_attention
    shape = 2, model.n_head, config.data.sequence_length, model.n_embd // model.n_head
    inputs = [torch.randn(shape).to(strategy.device.dtype) for _ in "qkv"]
    return beside_fp64(strategy, partial(attend, dropout=0.0), partial(causal_attention, dropout=0.0), inputs)


def loss(config: Config, strategy: Strategy) -> Found:
    """The run's loss."""
    config, chosen = fused_loss(config.replace(fresh=True), strategy)  # which tries it
    run, D, V = config.run, config.model.n_embd, config.model.vocab_size
    targets = torch.randint(0, V, (1, 256))
    how: dict = {"chunk_size": run.loss_chunk_size, "pad_vocab_to": strategy.device.pad_vocab_to}
    how["fused"] = run.fused_loss

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with strategy.device.autocast():
            return next_token_loss(hidden, weight, targets.to(hidden.device), **how)

    def plain(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((hidden @ weight.T).flatten(0, 1), targets.flatten())

    found, wrong = beside_fp64(strategy, ours, plain, [torch.randn(1, 256, D), torch.randn(V, D) / 8])
    return "; ".join(filter(None, (found, chosen.removeprefix("loss").strip()))), wrong


def muon(config: Config, strategy: Strategy) -> Found:
    """Muon's orthogonalization, whose gradient nobody needs. Its five steps amplify rounding: on a CPU to 2.4e-2 in
    bf16 for matrices 384 wide, and to 4.4e-5 in fp32 for 768; over the TPU's CPU plugin to 8.3e-2 in bf16 for 64."""
    dtype = strategy.device.optimizer_options(strategy.runtime.processes)["muon"]["dtype"]
    matrices = torch.randn(2, config.model.n_embd, 4 * config.model.n_embd).to(dtype)
    return beside_fp64(strategy, orthogonalize, orthogonalize, [matrices], backward=False, amplified=3)


def beside_fp64(
    strategy: Strategy, ours: Callable, plain: Callable, inputs: list, *, backward: bool = True, amplified: int = 1
) -> Found:
    """`ours` on the device, forward and backward, beside `plain` in fp64 on the CPU; `amplified`: how much more than a
    kernel's rounding is allowed. A collective call."""
    results = []
    for function, placed in (ours, {"device": strategy.device.torch_device}), (plain, {"dtype": torch.float64}):
        given = [tensor.to(**placed).requires_grad_() for tensor in inputs]
        result = function(*given)
        gradients = torch.autograd.grad(result.double().pow(2).mean(), given) if backward else ()
        results.append([tensor.detach().cpu().double() for tensor in (result, *gradients)])
    apart = gathered(strategy, max(relative(*pair) for pair in zip(*results, strict=True)))
    worst, allowed = max(apart), amplified * RELATIVE[strategy.device.precision]
    wrong = f"process {apart.index(worst)} computes it wrongly: try another version of torch, or another driver"
    return f"within {worst:.1e} of fp64 ({allowed:g} allowed)", wrong if worst > allowed else ""


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number; infinite if any is NaN."""
    apart = ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return math.inf if math.isnan(apart) else apart


def gathered(strategy: Strategy, value) -> list:
    """The values of all processes. A collective call."""
    processes = strategy.runtime.processes
    values = [value] * processes.world_size
    if processes.hosts is not None:
        torch.distributed.all_gather_object(values, value, group=processes.hosts)
    return values


if __name__ == "__main__":
    sys.exit(main())
