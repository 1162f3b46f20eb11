"""What a run says of itself before its first step, which is all that --dry_run says, and after its last."""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipe.cli import emit
from recipe.config import ROOT, Batch, Config
from recipe.data.shards import Shard, unigram_loss
from recipe.engine.base import Engine
from recipe.estimate.memory import (
    HEADROOM,
    MFU,
    checkpoint_bytes,
    duration,
    flops_per_token,
    gb,
    memory_estimate,
    money,
    parameter_count,
    plural,
    price,
    remedies,
    si,
    training_seconds,
)
from recipe.estimate.micro_batch import engine_kind, memory_of
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redacted


@dataclass(frozen=True)
class Result:
    """What came of the loop.

    Attributes:
        val_loss: the last validation loss in nats a token, None where a signal stopped the run before its end.
        saved: whether the last checkpoint was written.
        seconds, pauses: of training, and of validation, saving and the like between; of the whole run, earlier
            processes included.
    """

    val_loss: float | None
    saved: bool
    seconds: float
    pauses: float


def announce(config: Config, batch: Batch, engine: Engine, say: Callable[[str], None], found: str) -> None:
    """The opening panel; `found` is the line that says where an automatic micro-batch is from, or empty."""
    say(f"run        {config.run.run_name} ({config.run.config})")
    lines = describe(
        config,
        batch,
        device=engine.name,
        peak_flops=engine.peak_flops,
        memory=memory_of(config, engine),
        machines=-(-engine.world // engine.local_world),
        found=found,
        **engine_kind(config, engine),
    )
    say("\n".join(lines))
    if engine.idle_gpus:
        say(f"note       {engine.idle_gpus} more GPUs are idle; accelerate_configs/ddp.yaml uses them")
    if config.run.torch_compile and engine.no_compile:
        say(f"note       not compiled: {engine.no_compile}")
    if engine.note:
        say(f"note       {engine.note}")
    if config.run.dry_run:
        say("\n" + "\n".join(f"{k}: {v!r}" for k, v in redacted(config.flat()).items()))


def describe(
    config: Config,
    batch: Batch,
    *,
    device: str,
    precision: str,
    peak_flops: float | None,
    zero_stage: int = 0,
    compiled: bool = False,
    memory: int | None = None,
    machines: int = 1,
    found: str = "",
) -> list[str]:
    """The panel's lines. `device` is the engine's name, `peak_flops` that of a process's devices, `memory` a device's
    in bytes; None where they are not known."""
    model, data, opt, run = config.model, config.data, config.optimizer, config.run
    N, tokens = parameter_count(model), opt.total_batch_tokens * opt.max_steps
    flops = flops_per_token(model, data.sequence_length)
    devices = f"{plural(batch.devices, 'device')} x " if batch.devices > 1 else ""
    shares = f"{plural(batch.world, 'process', 'es')} x {plural(batch.accumulation, 'micro-step')} x {devices}"
    shares += plural(batch.micro // batch.devices, "sequence")
    checkpoints = run.save_total_limit + (opt.max_steps // run.milestone_steps if run.milestone_steps else 0)
    kind = {"precision": precision, "zero_stage": zero_stage, "compiled": compiled}
    needed = memory_estimate(config, batch, **kind)
    streamed = data.streaming or data.train_text.startswith("hf://")
    shards = f"{si(1e9 * data.disk_budget_gb)}B of shards" if streamed else f"{si(2 * tokens)}B for every token once"
    device, _, engine = device.partition(", ")
    where = f" on {plural(machines, 'machine')}" if batch.world > 1 else ""
    made = f", compiled ({run.torch_compile_mode})" if compiled else ""
    lines = [
        f"model      {N:,} parameters: {model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
        f"{flops / 1e6:,.1f} MFLOP a token",
        f"device     {device}, {precision}{' (auto)' if run.precision == 'auto' else ''}{made}",
        f"engine     {engine or 'one device'}{where}",
        f"batch      {opt.total_batch_tokens:,} tokens = {shares} x {data.sequence_length}",
        *([found] if found else []),
        f"length     {opt.max_steps:,} steps, {si(tokens, 'B')} tokens, learning rate {opt.learning_rate:g} after "
        f"{plural(opt.warmup_steps, 'step')} of warm-up, down to {opt.learning_rate * opt.min_lr_fraction:g}",
        f"memory     about {si(needed)}B a device (reckoned){f' of {gb(memory)}' if memory else ''}",
    ]
    if memory and needed > HEADROOM * memory:
        lines.append(
            f"           which does not fit: {gb(HEADROOM * memory)} are left beside what a GPU holds for "
            f"itself. {remedies(config, batch, **kind)}"
        )
    lines.append(
        f"disk       {si(checkpoint_bytes(model))}B a checkpoint, at most {checkpoints + 1} at once, in "
        f"{run.output_dir}; {shards}"
    )
    return [*lines, *_forecast(config, batch, tokens * flops, precision, peak_flops)]


def _forecast(config: Config, batch: Batch, flops: float, precision: str, peak_flops: float | None) -> list[str]:
    """How long the whole run takes, and what it costs: the world of N devices costs N times what one does."""
    run, devices = config.run, batch.world * batch.devices
    each = f"{money(run.price_per_hour)} an hour of {'the device' if devices == 1 else f'each of {devices} devices'}"
    # The peaks of GPUs are those of half precision: what takes anything else by choice has another, unknown one.
    known = peak_flops and (precision in ("bf16", "fp16") or run.precision == "auto")
    if not known:
        why = "the peak of this device is not known" if not peak_flops else f"its peak in {precision} is not known"
        later = [f"price      {each}"] if run.price_per_hour else []
        return [f"time       {why}; the progress tells after the first steps", *later]
    seconds = training_seconds(flops, 1, peak_flops * batch.world)
    lines = [f"time       about {duration(seconds)} at {100 * MFU:.0f} % MFU, assumed; the progress tells more"]
    if run.price_per_hour:
        lines.append(f"price      about {money(price(seconds, devices, run.price_per_hour))}: {each}")
    return lines


def conclude(
    config: Config, batch: Batch, engine: Engine, result: Result, train_shards: list[Shard], val_shards: list[Shard]
) -> None:
    """The closing panel, and commands that work as they stand where the run was started."""
    run_dir = Path(config.run.output_dir)
    baseline = unigram_loss(train_shards, val_shards)
    for line in outcome(config, batch, result, baseline, read_metrics(run_dir / "metrics.jsonl"), engine.peak_flops):
        emit(line)
    final = run_dir / f"step_{config.optimizer.max_steps:08d}"
    emit(f"load       transformers.AutoModelForCausalLM.from_pretrained({str(final)!r})", wrap=False)
    emit("next       text from it, its HellaSwag, pictures of the run, a directory to share:")
    for command in commands(run_dir, final):
        emit(f"  {command}", wrap=False)


def outcome(
    config: Config, batch: Batch, result: Result, baseline: float, lines: Sequence[dict], peak_flops: float | None
) -> list[str]:
    """What the run came to; `lines` are those of metrics.jsonl."""
    opt, run, devices = config.optimizer, config.run, batch.world * batch.devices
    tokens = opt.max_steps * opt.total_batch_tokens
    said = [
        f"\ndone       {si(tokens, 'B')} tokens in {opt.max_steps:,} steps; validation loss {result.val_loss:.4f} "
        f"(unigram baseline {baseline:.4f})"
    ]
    best = min((n for n in lines if n.get("val_loss") is not None), key=lambda n: n["val_loss"], default=None)
    if best and best["val_loss"] < result.val_loss:
        said.append(f"best       validation loss {best['val_loss']:.4f} at step {best['step']:,}")
    if scores := [n for n in lines if n.get("hellaswag_A_acc_norm") is not None]:
        n = scores[-1]
        of = f"{run.hellaswag_limit:,} rows" if run.hellaswag_limit else "all rows"
        said.append(
            f"HellaSwag  acc_norm {n['hellaswag_A_acc_norm']:.4f} (way A), {n['hellaswag_B_acc_norm']:.4f} "
            f"(way B) at step {n['step']:,}, {of}"
        )
    rate = tokens / max(result.seconds, 1e-9)
    flops = flops_per_token(config.model, config.data.sequence_length)
    mfu = f", MFU {100 * rate * flops / (peak_flops * batch.world):.1f} %" if peak_flops else ""
    pauses = f"; {duration(result.pauses)} more for validation, saving and the like" if result.pauses >= 1 else ""
    said.append(f"took       {duration(result.seconds)} of training, {rate:,.0f} tokens/s{mfu}{pauses}")
    if run.price_per_hour:
        whole = result.seconds + result.pauses
        cost = price(whole, devices, run.price_per_hour)
        said.append(
            f"price      {money(cost)}: {duration(whole)} x {plural(devices, 'device')} x "
            f"{money(run.price_per_hour)} an hour, without start-up"
        )
    return said


def commands(run_dir: Path, model: Path) -> list[str]:
    """What one does next with a run's directory and the model in it, by this Python, from where the user is."""
    python = next((name for name in ("python", "python3") if shutil.which(name) == sys.executable), sys.executable)
    python, run, model = (shlex.quote(_from_here(path)) for path in (python, str(run_dir), str(model)))

    def script(name: str) -> str:
        return f"{python} {shlex.quote(_from_here(str(ROOT / 'eval' / name)))}"

    found = [
        f'{script("sample.py")} --model {model} --prompt "The king"',
        f"{script('hellaswag.py')} --model {model} --limit 500",
        f"{script('report.py')} {run}",
    ]
    if Path.cwd() == ROOT:  # from elsewhere `recipe` is not found, unless it is installed
        found.append(f"{python} -m recipe.hub.export {run} --out {run}-model")
    return found


def _from_here(path: str) -> str:
    """Relative to the working directory where it lies in it."""
    here = os.path.join(os.getcwd(), "")
    return path.removeprefix(here) if os.path.isabs(path) else path
