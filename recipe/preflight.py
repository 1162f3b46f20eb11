"""Command: proves a machine in two minutes, before a long run is trusted to it. It takes train.py's flags.

    accelerate launch --config_file accelerate_configs/ddp.yaml recipe/preflight.py --config gpt2

Prints a line for each check, "ok" or what is wrong and what to do, and writes runs/preflight.json. Exits with 0 if all
is well, else with 1. Each process of the launch starts the same programs one after the other, mostly recipe/train.py
itself, so that whatever fails or hangs in one of them is named and the next one is started.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until main listens; the imports take seconds
if __package__ in (None, ""):  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoint_path, checkpoints, state_of
from recipe.checkpoint.provenance import versions
from recipe.config import AUTO, ROOT, BatchPlan, Config, parse_config
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.engine.launch import fail
from recipe.engine.strategy import Strategy
from recipe.estimate.fused_loss import fused_loss
from recipe.estimate.memory import checkpoint_bytes, step_memory
from recipe.estimate.micro_batch import memory_kind
from recipe.model.gpt2 import causal_attention
from recipe.model.loss import next_token_loss
from recipe.monitor.metrics import read_metrics
from recipe.optim.muon import orthogonalize
from recipe.utils.errors import UserError
from recipe.utils.units import duration, gb, si

IS_MAIN = os.environ.get("RANK", "0") == "0"
RESULT = Path("runs/preflight.json")
LIMIT_S = 180  # of one program: what takes longer hangs
# The fields of twenty steps of a tiny model on the text that ships (48 sequences divide by most numbers of processes),
# and its losses on a CPU in fp32, by optimizer; tests/test_train.py holds every change to them.
GOLDEN = json.loads((ROOT / "recipe" / "golden.json").read_text())
# What is allowed, of a loss in nats and of a kernel's results and gradients relative to the largest number. Measured on
# CPUs: 1e-6 and 1e-3 nats in fp32 and bf16, 3e-6 and 1e-2 of a kernel. A GPU adds in another order.
NATS = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 1e-2, "fp16": 1e-2}
RELATIVE = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 3e-2, "fp16": 5e-3}
SLOW = 0.8  # of the median process's speed, for one whose GPU is too hot or has other work
LINKS = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9}  # NVLink one way, B/s: Nvidia's data sheets
Line = tuple[str, str, str]  # a check, what it found, and what is wrong: empty where all is well


def main(argv: list[str] | None = None) -> int:
    """Runs all checks and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["--machine"]:
            return machine(parse_config(argv[2:]), Path(argv[1]))
        config = parse_config(argv)
    except UserError as error:
        return fail(error)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # which ends the program that runs, too
    programs = Programs()
    if not IS_MAIN:  # these only take part: the first process that ends with an error would end the main one
        list(checks(programs, config, argv, {}))
        return 0
    begun, facts, lines = time.monotonic(), {"date": date.today().isoformat(), "config": config.run.config}, []
    try:
        for name, found, wrong in checks(programs, config, argv, facts):
            print(f"{'WRONG' if wrong else 'ok':<6} {name:<10} {'; '.join(filter(None, (found, wrong)))}", flush=True)
            lines.append({"check": name, "found": found, "wrong": wrong})
    finally:
        shutil.rmtree(programs.place, ignore_errors=True)
    passed = not any(line["wrong"] for line in lines)
    RESULT.write_text(json.dumps({"passed": passed, **facts, "checks": lines}, indent=1) + "\n")
    verdict = "passed" if passed else "FAILED"
    print(f"\npreflight {verdict} in {duration(time.monotonic() - begun)}; {RESULT} has what was found")
    return 0 if passed else 1


def checks(programs: Programs, config: Config, argv: list[str], facts: dict) -> Iterator[Line]:
    """All lines in turn, which only the main process's are to be read; `facts` of the machine are added as they
    become known. A collective call."""
    with tempfile.TemporaryDirectory() as directory:
        error = programs.run("preflight.py", "--machine", directory, *argv)
        file = lines_of(directory)
        written = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    lines = [line for line in written if isinstance(line, list)]
    yield from ((name, found, wrong) for name, found, wrong in lines if found)
    if error:
        yield lines[-1][0] if lines else "start", "not finished", error
    for known in written:
        facts |= known if isinstance(known, dict) else {}
    if "device" not in facts or any(name == "sum" and wrong for name, _, wrong in lines):
        return  # processes that disagree wait for each other for ever
    yield "disk", *disk(config)
    share, devices = 48 // facts["processes"], facts["devices"]
    if share * facts["processes"] != 48 or share % devices:
        yield "training", "not tried", f"48 sequences do not divide by {facts['processes']} processes x {devices}"
        return
    place, golden = programs.place, GOLDEN["fields"] | {"micro_batch_size": share // devices // 2 or 1}
    golden["dataset_name"] = place / "data"
    for precision in dict.fromkeys(("fp32", facts["precision"])):
        for optim in facts["optimizers"]:
            run = place / f"{optim}-{precision}"
            error = programs.train(golden, precision=precision, optim=optim, output_dir=run)
            yield f"{optim} {precision}", *(follows_golden(run, optim, precision) if not error else ("", error))
    run = place / "adamw-fp32"
    if IS_MAIN and checkpoint_path(run, 20).exists():  # each is a process's own life: it finds what was saved
        shutil.copytree(checkpoint_path(run, 10), checkpoint_path(place / "resumed", 10))
    error = programs.train(golden, optim="adamw", output_dir=place / "resumed")
    yield "resume", *(resumes(run, place / "resumed") if not error else ("", error))
    yield "trial", *trial(programs, config, argv, facts)


class Programs:
    """The programs that each process of the launch starts in turn, with its own environment."""

    def __init__(self):
        self._started, self._store = 0, None
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun's store, or one of our own
            hosts_it = IS_MAIN and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
            address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            self._store = torch.distributed.TCPStore(*address, is_master=hosts_it, wait_for_workers=False)

        RESULT.parent.mkdir(exist_ok=True)
        self.place = Path(self._agreed("place", lambda: tempfile.mkdtemp(prefix=".preflight-", dir=RESULT.parent)))

    def _agreed(self, name: str, make: Callable[[], str]) -> str:
        """What the main process makes, in every process."""
        if self._store is None:
            return make()
        if IS_MAIN:
            self._store.set(f"preflight/{name}", make())
        return self._store.get(f"preflight/{name}").decode()

    def _meeting_point(self) -> dict[str, str]:
        """Variables of a program: where it meets those of the other processes, at a port of its own."""
        self._started += 1
        if self._store is None:
            return {}
        return {"MASTER_PORT": self._agreed(str(self._started), free_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}

    def run(self, program: str, *words: str) -> str:
        """What went wrong, in a line, or empty."""
        environment = os.environ | self._meeting_point()
        with tempfile.TemporaryFile("w+") as output:
            child = subprocess.Popen(
                [sys.executable, ROOT / "recipe" / program, *words], env=environment, stdout=output, stderr=output
            )
            try:
                code = child.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                code = f"it hangs: killed after {LIMIT_S} s"
            finally:
                child.kill()
                child.wait()
            output.seek(0)
            printed = [line.strip() for line in output if line.strip()]
        if not code:
            return ""
        said = next((line for line in reversed(printed) if "rror" in line), printed[-1] if printed else "no output")
        return f"{said.removeprefix('error: ')} ({f'exit code {code}' if isinstance(code, int) else code})"

    def train(self, fields: dict, *words: str, **more) -> str:
        """The same for a training run with the flags `words`, and then the fields."""
        return self.run("train.py", *words, *(f"--{name}={value}" for name, value in (fields | more).items()))


def free_port() -> str:
    """A port that no program uses."""
    with socket.socket() as free:
        free.bind(("", 0))
        return str(free.getsockname()[1])


def follows_golden(run: Path, optim: str, precision: str) -> tuple[str, str]:
    """A golden run beside the CPU's."""
    if not IS_MAIN:
        return "", ""
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl") if line["step"]]
    apart = [math.inf if a is None else abs(a - b) for a, b in zip(losses, GOLDEN[optim]["loss"], strict=True)]
    allowed = NATS[precision]
    first = next((step for step, nats in enumerate(apart, 1) if nats > allowed), None)
    wrong = f"they part at step {first}: see the lines above, or NaN in docs/troubleshooting.md" if first else ""
    return f"20 steps, losses within {max(apart):.1e} of a CPU's in fp32 ({allowed:g} allowed)", wrong


def resumes(run: Path, resumed: Path) -> tuple[str, str]:
    """A run that was resumed halfway beside the one that never stopped."""
    worst = 0.0
    for file in ("model.safetensors", "optimizer.safetensors") if IS_MAIN else ():
        expected, found = (load_file(checkpoint_path(one, 20) / file) for one in (run, resumed))
        worst = max(worst, *(relative(found[name], tensor) for name, tensor in expected.items()))
    same = f"within {worst:.1e}" if worst else "equal to the bit"
    wrong = "" if worst <= RELATIVE["fp32"] else "what is read is not what was saved, or two runs differ"
    return f"saved at step 10, resumed to 20: weights and optimizer state {same}", wrong


def disk(config: Config) -> tuple[str, str]:
    """Room and speed where checkpoints go."""
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


def trial(programs: Programs, config: Config, argv: list[str], facts: dict) -> tuple[str, str]:
    """Some steps of the recipe itself, on its own data where they are here, saved at the end. A collective call."""
    data, opt, there = config.data, config.optimizer, Path(config.data.dataset_name)
    most = 8 if facts["type"] == "cpu" else 32  # sequences: a GPU is busy with them
    micro = most if opt.micro_batch_size == AUTO else opt.micro_batch_size
    tokens = facts["processes"] * facts["devices"] * micro * max(1, most // micro) * data.sequence_length
    run: dict = {
        "output_dir": programs.place / "trial",
        "max_steps": 8,
        "total_batch_tokens": min(tokens, opt.total_batch_tokens),
    }
    run |= {"warmup_steps": 2, "logging_steps": 1, "eval_steps": "end", "eval_tokens": tokens, "save_steps": "end"}
    run |= {"hellaswag_steps": 0, "sample_steps": 0, "report_to": "none", "push_to_hub": False, "max_hours": 0.01}
    note = ""
    if not (data.streaming or data.mixture or there.exists()):
        run |= {name: GOLDEN["fields"][name] for name in ("train_text", "val_fraction")}
        run |= {"dataset_name": programs.place / "data", "tokenizer": "gpt2"}
        note = f"; on the text that ships, since {there} is not prepared yet"
    error = programs.train(run, *argv)  # of fields given twice the last counts
    lines = read_metrics(run["output_dir"] / "metrics.jsonl") if IS_MAIN else []
    lines = [line for line in lines if line["tokens_per_second"]][1:]  # the first step compiles
    if not lines:
        return "", error or "not two steps in half a minute: this device is too slow for the recipe"
    middle = {name: statistics.median(line[name] or 0 for line in lines) for name in ("tokens_per_second", "data_wait")}
    mfu, memory, wait = lines[-1]["mfu"], lines[-1]["peak_memory_bytes"], middle["data_wait"]
    batch = BatchPlan(tokens // data.sequence_length, facts["processes"], micro * facts["devices"], 1, facts["devices"])
    if saved := checkpoints(run["output_dir"]):  # which has what stood on auto
        settled = state_of(saved[-1])["config"]
        ours = {name: settled[name] for name in ("gradient_checkpointing", "fused_loss")}
        config = replace(config, run=replace(config.run, **ours))
    plan = step_memory(config, batch, **facts["memory_kind"]).peak
    found = f"{len(lines) + 1} steps of {config.run.run_name}: {middle['tokens_per_second']:,.0f} tokens/s"
    found += f", MFU {100 * (mfu or 0):.0f} %" * bool(mfu) + f", {gb(memory or 0)} (the plan: {gb(plan)})" * bool(
        memory
    )
    wrong = f"{100 * wait:.0f} % of the time it waits for data: a faster disk or network" if wait > 0.05 else ""
    return found + note, wrong


# What one program finds out on the devices themselves.


def lines_of(directory: Path | str) -> Path:
    """Where this process writes, or reads, what was found. On a TPU one preflight starts the processes of all chips."""
    return Path(directory) / f"{os.environ.get('RANK', '0')}.jsonl"


def machine(config: Config, directory: Path) -> int:
    """Writes what it finds to `lines_of(directory)`: {facts}, and for each check [name, "", ""] before it and its line
    after it. A collective call."""
    strategy = open_strategy(config.run.precision)
    device, runtime = strategy.device, strategy.runtime
    facts: dict = {"device": device.chip, "type": device.type, "precision": device.precision, "devices": device.count}
    facts |= {"processes": runtime.processes.world_size, "engine": str(strategy), "versions": versions()}
    facts |= {"optimizers": runtime.optimizers or ["adamw", "muon"], "memory_kind": memory_kind(config, strategy)}
    with lines_of(directory).open("w") as out:
        print(json.dumps(facts), file=out)
        for check in (devices, sum_, products, attention, loss, muon):
            name = check.__name__.rstrip("_")
            print(json.dumps([name, "", ""]), file=out, flush=True)
            if found := check(config, strategy):
                print(json.dumps([name, *found]), file=out, flush=True)
    runtime.close()
    return 0


def devices(config: Config, strategy: Strategy) -> tuple[str, str]:
    """What there is."""
    device, driver = strategy.device, ""
    if device.type == "cuda":
        command = ["nvidia-smi", "--query-gpu=driver_version,power.limit,clocks.max.sm", "--format=csv,noheader"]
        with suppress(OSError, subprocess.SubprocessError):
            output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            driver = f", driver {output.splitlines()[0]}"
    memory = f", {gb(device.memory)}" if device.memory else ""
    return f"{strategy}{memory}, {device.precision}, torch {torch.__version__}{driver}", ""


def sum_(config: Config, strategy: Strategy) -> tuple[str, str] | None:
    """Whether all processes get the right sum, and how fast: an all-reduce of 64 MB."""
    processes, n = strategy.runtime.processes, strategy.runtime.processes.world_size
    if n == 1:
        return None
    numbers = torch.arange(2**24, device=strategy.device.torch_device, dtype=torch.float32) % 1024  # sums are exact
    total = processes.sum(numbers * (processes.rank + 1))
    right = gathered(strategy, bool(torch.equal(total, numbers * (n * (n + 1) // 2))))
    rate = 2 * (n - 1) / n * numbers.nbytes / hardware.seconds_of(partial(processes.sum, numbers))
    link = LINKS.get(strategy.device.name.split()[1]) if strategy.device.name.startswith("NVIDIA ") else None
    beside = f" (NVLink: {si(link)}B/s)" if link and processes.nodes == 1 else ""
    who = ", ".join(str(rank) for rank, fine in enumerate(right) if not fine)
    found = f"over {n} processes, {si(rate)}B/s{beside}"
    return found, f"wrong on process {who}: its link or its memory is broken" if who else ""


def products(config: Config, strategy: Strategy) -> tuple[str, str]:
    """The speed of each process's device at what it does most."""
    device, dtype = strategy.device, dtype_of(strategy)
    size = 8192 if device.memory else 1024
    a, b = (torch.randn(size, size, device=device.torch_device).to(dtype) for _ in range(2))
    rates = gathered(strategy, 2 * size**3 / hardware.seconds_of(partial(torch.matmul, a, b)))
    least, median = min(rates), statistics.median(rates)
    peak = f", {100 * least * device.count / device.peak_flops:.0f} % of the peak" if device.peak_flops else ""
    wrong = f"process {rates.index(least)} is slower than the others: its device is too hot, or has other work"
    slow = least < SLOW * median and device.memory is not None  # processes on a CPU take turns
    most = f" to {si(max(rates))}" if len(rates) > 1 else ""
    return f"{si(least)}{most}FLOP/s a process{peak}", wrong if slow else ""


def attention(config: Config, strategy: Strategy) -> tuple[str, str]:
    """The run's attention."""
    model, attend = config.model, strategy.device.attention or causal_attention
    shape = 2, model.n_head, config.data.sequence_length, model.n_embd // model.n_head
    inputs = [torch.randn(shape).to(dtype_of(strategy)) for _ in "qkv"]
    return beside_fp64(strategy, partial(attend, dropout=0.0), partial(causal_attention, dropout=0.0), inputs)


def loss(config: Config, strategy: Strategy) -> tuple[str, str]:
    """The run's loss."""
    config, chosen = fused_loss(replace(config, run=replace(config.run, fresh=True)), strategy)  # which tries it
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


def muon(config: Config, strategy: Strategy) -> tuple[str, str]:
    """Muon's orthogonalization, whose gradient nobody needs. Its five steps amplify rounding: on a CPU to 2.4e-2 in
    bf16 for matrices 384 wide, and to 4.4e-5 in fp32 for 768."""
    dtype = strategy.device.optimizer_options(strategy.runtime.processes)["muon"]["dtype"]
    matrices = torch.randn(2, config.model.n_embd, 4 * config.model.n_embd).to(dtype)
    return beside_fp64(strategy, orthogonalize, orthogonalize, [matrices], backward=False, amplified=3)


def beside_fp64(
    strategy: Strategy, ours: Callable, plain: Callable, inputs: list, *, backward: bool = True, amplified: int = 1
) -> tuple[str, str]:
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


def dtype_of(strategy: Strategy) -> torch.dtype:
    """What products are computed in."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(strategy.device.precision, torch.float32)


def gathered(strategy: Strategy, value) -> list:
    """The values of all processes. A collective call."""
    processes = strategy.runtime.processes
    values = [value] * processes.world_size
    if processes.hosts is not None:
        torch.distributed.all_gather_object(values, value, group=processes.hosts)
    return values


if __name__ == "__main__":
    sys.exit(main())
