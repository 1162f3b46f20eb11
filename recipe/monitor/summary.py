"""The panels printed before the first step, which are the only output of --dry_run, and after the last step."""

import logging
import math
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import torch

from recipe.checkpoint.format import checkpoint_path, checkpoints
from recipe.config import MIXTURE_PERIOD, ROOT, BatchPlan, Config, data_sets
from recipe.engine.launch import has_torch_tpu, has_tpu, unused_gpu
from recipe.engine.strategy import Strategy
from recipe.estimate.memory import (
    HEADROOM,
    TIGHT,
    checkpoint_bytes,
    checkpoint_count,
    flops_per_token,
    parameter_count,
    remedies,
    step_memory,
)
from recipe.estimate.micro_batch import memory_kind
from recipe.estimate.speed import expected_flops
from recipe.monitor.metrics import Metrics
from recipe.utils.checkpoints import val_losses
from recipe.utils.errors import ExitCode
from recipe.utils.files import nearest_directory
from recipe.utils.machine import usable_cores, usable_memory
from recipe.utils.redaction import home_as_tilde
from recipe.utils.units import duration, gb, plural, si

logger = logging.getLogger(__name__)

UNUSED_WITHOUT = {"hub_model_id": "push_to_hub", "sample_prompt": "sample_steps", "hellaswag_limit": "hellaswag_steps"}
# What make runs for a target.
_MODULES = {"sample": "eval.sample", "report": "eval.report", "export": "recipe.hub.export"}
_MODULES |= {"push": "recipe.hub.export push"}


def describe(config: Config, batch: BatchPlan, strategy: Strategy, auto_lines: Sequence[str]) -> Iterator[str]:
    """The lines of the opening panel for these devices; `auto_lines`, of which some may be empty, explain the fields
    that were `auto`."""
    yield f"run        {config.run.run_name} ({config.run.config})"
    yield from _mixture(config)
    yield _model(config)
    if config.model.init_from:
        yield f"weights    initialized from {config.model.init_from}"
    yield _device(config, strategy)
    yield _engine(config, strategy)
    yield _batch(config, batch)
    yield from filter(None, auto_lines)
    yield _length(config)
    yield _optimizer(config)
    yield from _memory(config, batch, strategy)
    yield _disk(config)
    if not config.undecided:
        yield _forecast(config, batch, strategy)
    notes = (*_position_notes(config), *_best_notes(config), *disk_notes(config))
    notes += (*_launch_notes(strategy), *_device_notes(config, strategy))
    yield from (f"note       {note}" for note in notes)


def _mixture(config: Config) -> Iterator[str]:
    if len(entries := data_sets(config.data)) > 1:
        shares = ", ".join(f"{100 * entry.share:g} % {entry.name}" for entry in entries)
        yield f"mixture    {shares}, exact in every {MIXTURE_PERIOD:,} sequences"


def _model(config: Config) -> str:
    model = config.model
    size = f"{plural(model.n_layer, 'layer')}, {plural(model.n_head, 'head')}, {model.n_embd} wide"
    flops = flops_per_token(model, config.data.sequence_length)
    return f"model      {parameter_count(model):,} parameters: {size}, {flops / 1e6:,.1f} MFLOP a token"


def _device(config: Config, strategy: Strategy) -> str:
    run, device = config.run, strategy.device
    compiled = f", compiled ({run.torch_compile_mode})" if run.torch_compile and not strategy.runtime.no_compile else ""
    return f"device     {device.name}, {device.precision}{' (auto)' if run.precision == 'auto' else ''}{compiled}"


def _engine(config: Config, strategy: Strategy) -> str:
    processes = strategy.runtime.processes
    known = not (config.run.plan_device and strategy.device.type == "tpu")  # hosts have 1 to 8 chips, by the slice
    nodes = f" on {plural(processes.nodes, 'node')}" if processes.world_size > 1 and known else ""
    return f"engine     {strategy.runtime.how or 'one device'}{nodes}"


def _batch(config: Config, batch: BatchPlan) -> str:
    factors = [plural(batch.world_size, "process", "es"), plural(batch.accumulation, "micro-step")]
    factors += [plural(batch.devices, "device")] * (batch.devices > 1)
    factors += [plural(batch.micro // batch.devices, "sequence"), str(config.data.sequence_length)]
    return f"batch      {config.optimizer.total_batch_tokens:,} tokens = {' x '.join(factors)}"


def _length(config: Config) -> str:
    steps, hours = config.optimizer.max_steps, config.run.train_hours
    parts = [f"{duration(3600 * hours)} in all (train_hours)"] if hours else []
    if not config.undecided:
        parts.append(f"{plural(steps, 'step')}, {si(steps * config.optimizer.total_batch_tokens, 'B')} tokens")
    return f"length     {': '.join(parts)}"


def _optimizer(config: Config) -> str:
    opt = config.optimizer
    names = {"adamw": "AdamW", "muon": f"Muon {opt.muon_learning_rate:g} and AdamW"}
    matrices = f" (matrices {opt.matrix_learning_rate:g})" if opt.matrix_learning_rate else ""
    schedule = opt.lr_scheduler_type
    if opt.decay_start and config.undecided:
        schedule += f", decaying over the last {100 * opt.decay_fraction:g} %"
    elif opt.decay_start:
        schedule += f", decaying from step {opt.decay_start:,}"
    warmup = f"after {plural(opt.warmup_steps, 'step')} of warm-up"
    return f"optimizer  {names.get(opt.optim, opt.optim)} {opt.learning_rate:g}{matrices} {warmup}; {schedule}"


def _memory(config: Config, batch: BatchPlan, strategy: Strategy) -> Iterator[str]:
    kind, available = memory_kind(config, strategy), strategy.device.memory
    memory = step_memory(config, batch, **kind)
    parts = ", ".join(f"{name} {si(part)}B" for name, part in memory.at_peak().items())
    total = f" of {gb(available)}" if available else ""
    yield f"memory     about {si(memory.peak)}B a device (estimate){total}: {parts}"
    if strategy.device.type in ("cpu", "mps") and not config.run.plan_device:  # which share the machine's memory
        available = usable_memory() / strategy.runtime.processes.local_world_size
    if available and memory.peak > (limit := HEADROOM * available):
        verdict = "tight, but it may fit" if memory.peak <= TIGHT * limit else "it does not fit"
        advice = remedies(config, batch, limit, strategy.device.type, **kind)
        yield f"           {verdict}: {gb(limit)} are left for tensors; {advice}"


def _disk(config: Config) -> str:
    run, milestones = config.run, " and the milestones" * bool(config.run.milestone_steps and config.undecided)
    count = f"{checkpoint_count(config)}{milestones}"
    return f"disk       {si(checkpoint_bytes(config))}B a checkpoint, at most {count} at once, in {run.output_dir}"


def _stream_bytes(config: Config, directory: Path) -> float:
    """Bytes that streams may still take on the disk of this directory."""
    outs = [Path(entry.data.dataset_name) for entry in data_sets(config.data) if entry.data.streaming]
    outs = [out for out in outs if nearest_directory(out).stat().st_dev == directory.stat().st_dev]
    used = sum(path.stat().st_size for out in outs for path in out.glob("*.bin"))
    return max(0.0, config.data.disk_budget_gb * 1e9 - used) if outs else 0.0


def _position_notes(config: Config) -> Iterator[str]:
    """Positions that no sequence reaches; in a model from `init_from` they may have been trained before."""
    length = config.data.sequence_length
    if length < config.model.n_positions and not config.model.init_from:
        yield (
            f"positions above sequence_length {length} stay untrained, so longer texts come out as nonsense; "
            f"--n_positions {length} makes a model without them"
        )


def _best_notes(config: Config) -> Iterator[str]:
    """Steps that are both validated and saved, if those are few: the best checkpoint is one of them."""
    evaluated, saved = config.run.eval_steps, config.run.save_steps
    if isinstance(evaluated, int) and isinstance(saved, int) and saved % evaluated and evaluated % saved:
        yield (
            f"only every {math.lcm(evaluated, saved):,} steps a checkpoint is validated too, and the best of those is "
            f"kept: let one of eval_steps {evaluated} and save_steps {saved} divide the other"
        )


def disk_notes(config: Config) -> Iterator[str]:
    """A disk that is too small for the checkpoints."""
    if config.run.plan_device:
        return
    directory, size = nearest_directory(Path(config.run.output_dir)), checkpoint_bytes(config)
    free = shutil.disk_usage(directory).free
    if free < size:
        problem = f"{si(free)}B free in {directory}, but a checkpoint takes {si(size)}B"
        yield f"{problem}: no step can be saved; free some space, or choose another output_dir"
        return
    saved = [] if config.run.fresh else checkpoints(Path(config.run.output_dir))  # --fresh moves them on this disk
    missing, stream = max(0, checkpoint_count(config) - len(saved)) * size, _stream_bytes(config, directory)
    if free < missing + stream:
        problem = f"{si(free)}B free in {directory}, but checkpoints may take {si(missing)}B"
        problem += f" and the stream {si(stream)}B (disk_budget_gb)" if stream else ""
        yield f"{problem}: free some space, lower save_total_limit, or choose another output_dir"


def _launch_notes(strategy: Strategy) -> Iterator[str]:
    """Processes that were meant to train together, but each train alone."""
    tasks = max(int(os.environ.get(name, 1)) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    if tasks > 1 and strategy.runtime.processes.world_size == 1:
        yield f"mpirun or srun has started {tasks} processes, each of which trains alone; use accelerate launch"


def _device_notes(config: Config, strategy: Strategy) -> Iterator[str]:
    """Hardware that is busy or idle, and what this run does not use of it."""
    device, cores = strategy.device, os.cpu_count() or 1
    if device.type == "cpu":
        busy = cores * psutil.cpu_percent(interval=0.2) / 100  # while this program sleeps
        if busy > cores - usable_cores() + 0.5:  # fewer cores are idle than this process may use
            yield f"other programs use {busy:.1f} of {cores} cores, which slows this run"
        if has_tpu() or has_torch_tpu():
            yield "this machine's TPU is idle; accelerate_configs/tpu.yaml uses it"
        if vendor := unused_gpu():
            yield f"this machine's {vendor} GPU is idle: PyTorch {torch.__version__} cannot use it (docs/hardware.md)"
    if config.run.torch_compile and strategy.runtime.no_compile:
        yield f"not compiled: {strategy.runtime.no_compile}"
    for name, other in UNUSED_WITHOUT.items():
        if getattr(config.run, name) and not getattr(config.run, other):
            yield f"{name} has no effect without {other}"
    if device.note:
        yield device.note


def _forecast(config: Config, batch: BatchPlan, strategy: Strategy) -> str:
    """How long the run takes."""
    run, opt, device = config.run, config.optimizer, strategy.device
    flops = opt.total_batch_tokens * flops_per_token(config.model, config.data.sequence_length)  # of a step
    expected = expected_flops(device, batch.world_size, config.model, flops, auto=run.precision == "auto")
    if not expected:
        unknown_value = "the peak of this device" if not device.peak_flops else f"its peak in {device.precision}"
        return f"time       unknown, as is {unknown_value}; the progress shows it after the first steps"
    low, high, basis = expected
    times = [opt.max_steps * flops / speed for speed in dict.fromkeys((high, low))]
    estimate = " to ".join(map(duration, times))
    if run.price_per_hour:
        costs = [seconds / 3600 * run.price_per_hour for seconds in times]
        estimate += f", {' to '.join(f'${cost:,.{2 if cost < 10 else 0}f}' for cost in costs)},"
    return f"time       about {estimate} {basis}"


def summarize(config: Config, metrics: Metrics, val_loss: float | None, saved: bool) -> ExitCode:
    """Logs how the run ended, with commands to copy, and returns the matching exit code. `train` returns `val_loss` and
    `saved`."""
    run_dir = Path(config.run.output_dir)
    if not saved:
        logger.warning(
            "NOT SAVED  the last checkpoint could not be written into %s, for the reason above; once that is mended, "
            "the same command, without --fresh, continues from the checkpoint before it, if there is one",
            run_dir,
        )
        return ExitCode.NOT_SAVED
    if val_loss is None:
        way_out = "continues from the last checkpoint" if checkpoints(run_dir) else "starts again: no step was taken"
        logger.info("stopped    before the end; the same command, without --fresh, %s", way_out)
        if config.run.push_to_hub and checkpoints(run_dir):
            logger.info("upload     %s uploads that checkpoint", _command("push", run_dir, config.run.hub_model_id))
        return ExitCode.RUN_AGAIN
    for line in outcome(config, metrics, val_loss):
        logger.info(line)
    return ExitCode.DONE


def outcome(config: Config, metrics: Metrics, val_loss: float) -> Iterator[str]:
    """The lines of the closing panel; `val_loss` is that of the last step."""
    steps, run_dir = config.optimizer.max_steps, Path(config.run.output_dir)
    losses = val_losses(run_dir)
    tokens = steps * config.optimizer.total_batch_tokens
    yield f"done       {si(tokens, 'B')} tokens in {plural(steps, 'step')}; validation loss {val_loss:.4f}"
    best_step = min(losses, key=lambda step: losses[step], default=steps)
    if best_step < steps:
        not_saved = "" if checkpoint_path(run_dir, best_step).is_dir() else " (not saved)"
        yield f"best       validation loss {losses[best_step]:.4f} at step {best_step:,}{not_saved}"
    pauses = f"; {duration(metrics.pauses)} more for validation, saving and the like" if metrics.pauses >= 1 else ""
    rate = tokens / max(metrics.seconds, 1e-9)
    yield f"took       {duration(metrics.seconds)} of training, {rate:,.0f} tokens/s{pauses}"
    yield "next       load it, continue a text, see the curves, or make a directory to share:"
    path = str(checkpoint_path(run_dir, steps))
    if home_as_tilde(path) != path:  # as it would be printed, and Python does not expand ~
        path = os.path.relpath(path)
    yield f"  transformers.AutoModelForCausalLM.from_pretrained({path!r})"
    yield from (f"  {_command(target, run_dir)}" for target in ("sample", "report", "export"))


def _command(target: str, run_dir: Path, repo: str = "") -> str:
    """The command of make for a run, with the directory of the Makefile where that is another one; where there is no
    Makefile, as beside an installed wheel, the one that make would run."""
    in_root = Path.cwd() == ROOT
    run = shlex.quote(str(run_dir if in_root else run_dir.resolve()))
    if not (ROOT / "Makefile").exists():
        return f"python -m {_MODULES[target]} {run}" + (f" --repo {repo}" if repo else "")
    make = "make" if in_root else f"make -C {shlex.quote(str(ROOT))}"
    return f"{make} {target} RUN={run}" + (f" REPO={repo}" if repo else "")
