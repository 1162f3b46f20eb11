"""The panels that a run prints before its first step (all that --dry_run prints) and after its last."""

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eval.published import WAYS
from recipe.config import BLOCK, ROOT, BatchPlan, Config, OptimizerConfig, data_sets
from recipe.data.mixed import Dataset
from recipe.data.shards import unigram_loss
from recipe.engine.base import Engine
from recipe.estimate.cost import ASSUMED_MFU, cpu_flops, mfu_of
from recipe.estimate.memory import (
    HEADROOM,
    REMEDIES,
    checkpoint_bytes,
    flops_per_token,
    memory_estimate,
    parameter_count,
)
from recipe.estimate.micro_batch import engine_kind
from recipe.monitor.metrics import read_metrics
from recipe.utils.errors import ExitCode
from recipe.utils.units import duration, gb, plural, si

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """The outcome of the training loop.

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


def announce(config: Config, batch: BatchPlan, engine: Engine, found: str) -> None:
    """Logs the opening panel; `found` is the line about an automatic micro-batch, or empty."""
    logger.info("run        %s (%s)", config.run.run_name, config.run.config)
    sets = data_sets(config.data)
    if len(sets) > 1:
        shares = ", ".join(f"{100 * one.count / BLOCK:g} % {one.name}" for one in sets)
        logger.info("mixture    %s, exact in every %s sequences", shares, f"{BLOCK:,}")
    for line in describe(config, batch, engine, found):
        logger.info(line)
    if engine.idle_gpus:
        logger.info("note       %d more GPUs are idle; accelerate_configs/ddp.yaml uses them", engine.idle_gpus)
    if config.run.torch_compile and engine.no_compile:
        logger.info("note       not compiled: %s", engine.no_compile)
    if engine.note:
        logger.info("note       %s", engine.note)


def describe(config: Config, batch: BatchPlan, engine: Engine, found: str = "") -> list[str]:
    """The lines of the opening panel on this engine; `found` as for `announce`."""
    model, opt, run = config.model, config.optimizer, config.run
    flops = flops_per_token(model, config.data.sequence_length)
    devices = f"{plural(batch.devices, 'device')} x " if batch.devices > 1 else ""
    shares = f"{plural(batch.world_size, 'process', 'es')} x {plural(batch.accumulation, 'micro-step')} x {devices}"
    shares += plural(batch.micro // batch.devices, "sequence")
    device, _, how = engine.name.partition(", ")
    where = f" on {plural(-(-engine.world_size // engine.local_world_size), 'node')}" if batch.world_size > 1 else ""
    kind = engine_kind(config, engine)
    compiled = f", compiled ({run.torch_compile_mode})" if kind["compiled"] else ""
    return [
        f"model      {parameter_count(model):,} parameters: {model.n_layer} layers, {model.n_head} heads, "
        f"{model.n_embd} wide, {flops / 1e6:,.1f} MFLOP a token",
        f"device     {device}, {engine.precision}{' (auto)' if run.precision == 'auto' else ''}{compiled}",
        f"engine     {how or 'one device'}{where}",
        f"batch      {opt.total_batch_tokens:,} tokens = {shares} x {config.data.sequence_length}",
        *([found] if found else []),
        f"length     {opt.max_steps:,} steps, {si(opt.max_steps * opt.total_batch_tokens, 'B')} tokens",
        f"optimizer  {_optimizer(opt)}",
        *_memory(config, batch, engine.memory, kind),
        _disk(config),
        _forecast(config, batch, engine),
    ]


def _optimizer(opt: OptimizerConfig) -> str:
    muon = f"Muon {opt.muon_learning_rate:g}, AdamW for the rest " if opt.optim == "muon" else "AdamW "
    shape = opt.lr_scheduler_type
    if shape == "wsd":
        shape = f"constant, decaying from step {opt.decay_start:,}"
    return (
        f"{muon}{opt.learning_rate:g} after {plural(opt.warmup_steps, 'step')} of warm-up; {shape} down to "
        f"{f'{opt.min_lr_fraction:.0%} of that' if opt.min_lr_fraction else '0'}"
    )


def _memory(config: Config, batch: BatchPlan, there_is: int | None, kind: dict) -> list[str]:
    needed = memory_estimate(config, batch, **kind)
    lines = [f"memory     about {si(needed)}B a device (estimate){f' of {gb(there_is)}' if there_is else ''}"]
    if there_is and needed > HEADROOM * there_is:
        lines.append(
            f"           which does not fit: {gb(HEADROOM * there_is)} are for tensors, the rest for the GPU itself. "
            f"{REMEDIES}"
        )
    return lines


def _disk(config: Config) -> str:
    data, run, steps = config.data, config.run, config.optimizer.max_steps
    milestones = steps // run.milestone_steps if run.milestone_steps else 0
    # Two more are that of the best validation loss and that before wsd's decay.
    checkpoints = run.save_total_limit + 1 + milestones + (config.optimizer.decay_start > 0)
    if any(one.data.streaming or one.data.train_text.startswith("hf://") for one in data_sets(data)):
        shards = f"{si(1e9 * data.disk_budget_gb)}B of shards"
    else:
        most = si(2 * steps * config.optimizer.total_batch_tokens)
        shards = f"up to {most}B of shards (less where the text is read more than once)"
    return (
        f"disk       {si(checkpoint_bytes(config))}B a checkpoint, at most {checkpoints + 1} at once, in "
        f"{run.output_dir}; {shards}"
    )


def _forecast(config: Config, batch: BatchPlan, engine: Engine) -> str:
    """How long the whole run takes."""
    run, opt, devices = config.run, config.optimizer, batch.world_size * batch.devices
    flops = opt.max_steps * opt.total_batch_tokens * flops_per_token(config.model, config.data.sequence_length)
    # The peaks of GPUs are those of half precision; another precision, unless it is the best the device has, has
    # another peak, which is not known.
    if engine.peak_flops and (engine.precision in ("bf16", "fp16") or run.precision == "auto"):
        peak = engine.peak_flops * batch.world_size
        mfu, basis = mfu_of(engine.name.partition(", ")[0], devices, parameter_count(config.model))
        basis = f"at {basis}"
    elif engine.device.type == "cpu":
        peak, mfu = cpu_flops(engine.precision) * batch.world_size, ASSUMED_MFU
        basis = f"if a step reaches {100 * mfu:.0f} % of the {si(peak)}FLOP/s that a matrix product reaches here now"
    else:
        why = "the peak of this device" if not engine.peak_flops else f"its peak in {engine.precision}"
        return f"time       {why} is not known; the progress shows it after the first steps"
    return f"time       about {duration(flops / (peak * mfu))} {basis}"


def summarize(
    config: Config, batch: BatchPlan, engine: Engine, result: Result, train: Dataset, val: Dataset
) -> ExitCode:
    """Logs how the run has ended, with commands to copy, and returns the exit code that says so too."""
    run_dir = Path(config.run.output_dir)
    if not result.saved:
        logger.warning(
            "NOT SAVED  the last checkpoint could not be written into %s; the same command, without --fresh, continues "
            "from the checkpoint before it",
            run_dir,
        )
        return ExitCode.NOT_SAVED
    if result.val_loss is None:
        logger.info("stopped    before the end; the same command, without --fresh, continues from the last checkpoint")
        return ExitCode.RUN_AGAIN
    both = zip(train.parts, val.parts, strict=True)
    baseline = sum(
        share * unigram_loss(its.shards, held_out.shards, config.model.vocab_size)
        for (_, share, its), (_, _, held_out) in both
    )
    for line in outcome(config, batch, result, baseline, read_metrics(run_dir / "metrics.jsonl"), engine.peak_flops):
        logger.info(line)
    final = run_dir / f"step_{config.optimizer.max_steps:08d}"
    logger.info("next       load it, continue a text, see the curves, or make a directory to share:")
    logger.info("  transformers.AutoModelForCausalLM.from_pretrained(%r)", str(final))
    for command in commands(run_dir):
        logger.info("  %s", command)
    return ExitCode.DONE


def outcome(
    config: Config, batch: BatchPlan, result: Result, baseline: float, lines: Sequence[dict], peak_flops: float | None
) -> list[str]:
    """The results of the run; `lines` are those of metrics.jsonl, `peak_flops` is that of a process."""
    opt, run = config.optimizer, config.run
    tokens = opt.max_steps * opt.total_batch_tokens
    panel = [
        f"done       {si(tokens, 'B')} tokens in {opt.max_steps:,} steps; validation loss {result.val_loss:.4f} "
        f"(unigram baseline {baseline:.4f})"
    ]
    best = min((n for n in lines if n.get("val_loss") is not None), key=lambda n: n["val_loss"], default=None)
    if best and best["val_loss"] < result.val_loss:
        panel.append(f"best       validation loss {best['val_loss']:.4f} at step {best['step']:,}")
    if scores := [n for n in lines if n.get("hellaswag_llmc_acc_norm") is not None]:
        n = scores[-1]
        of = f"{run.hellaswag_limit:,} rows" if run.hellaswag_limit else "all rows"
        found = ", ".join(f"{n[f'hellaswag_{way}_acc_norm']:.4f} ({style})" for way, style in WAYS.items())
        panel.append(f"HellaSwag  acc_norm {found} at step {n['step']:,}, {of}")
    rate = tokens / max(result.seconds, 1e-9)
    flops = flops_per_token(config.model, config.data.sequence_length)
    mfu = f", MFU {100 * rate * flops / (peak_flops * batch.world_size):.1f} %" if peak_flops else ""
    pauses = f"; {duration(result.pauses)} more for validation, saving and the like" if result.pauses >= 1 else ""
    panel.append(f"took       {duration(result.seconds)} of training, {rate:,.0f} tokens/s{mfu}{pauses}")
    return panel


def commands(run_dir: Path) -> list[str]:
    """What to do next with a run, as commands that work from the current directory."""
    here = Path.cwd() == ROOT
    make = "make" if here else f"make -C {shlex.quote(str(ROOT))}"
    run = shlex.quote(str(run_dir if here else run_dir.resolve()))
    return [f"{make} sample MODEL={run}", f"{make} report RUN={run}", f"{make} export RUN={run}"]
