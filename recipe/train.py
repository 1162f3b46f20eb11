"""Trains GPT-2: `accelerate launch --config_file accelerate_configs/single.yaml recipe/train.py`, or plain python.

`run` is the table of contents; `train` is the loop, the only one, to be read from top to bottom.
"""

import logging
import math
import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the engine hears it: imports take seconds, and tell no more
if __package__ in (None, ""):  # as a script: import from the repository, not from recipe/ with its `data`, `optim`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from recipe import faults
from recipe.checkpoint.format import Checkpoint, Retention
from recipe.checkpoint.manager import CheckpointManager
from recipe.checkpoint.provenance import about
from recipe.cli import emit
from recipe.components import check_alike, find_checkpoint, model_files
from recipe.config import Batch, Config, OptimizerConfig, batch_arithmetic, parse_config
from recipe.data.dataset import TokenDataset, check_same_data
from recipe.data.open import open_datasets
from recipe.data.prefetch import Batches
from recipe.engine.base import Engine
from recipe.engine.factory import open_engine
from recipe.engine.launch import fail, launcher_patience, speaks
from recipe.engine.shutdown import Interrupted
from recipe.errors import ExitCode, UserError
from recipe.estimate.memory import flops_per_token
from recipe.estimate.micro_batch import micro_batch
from recipe.evaluation import hellaswag, sample, validate
from recipe.hub.upload import Uploads, open_uploads
from recipe.log import set_up_logging
from recipe.model.build import build_model
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.monitor.metrics import MetricsLog, RunningLoss, Throughput, read_metrics
from recipe.monitor.progress import Progress
from recipe.monitor.summary import Result, announce, conclude
from recipe.monitor.trackers import Tracker, check_tracker
from recipe.optim.adamw import make_optimizer, steps_taken
from recipe.optim.schedule import lr_at, set_lr
from recipe.optim.spike_filter import WAY_OUT, SpikeFilter
from recipe.redaction import keep_secrets, redacted

logger = logging.getLogger(__name__)


def main(argv: list[str] | None = None) -> int:
    """Trains as the command line says; returns the exit code: 0 done, 2 a mistake of the user's, 74 the last checkpoint
    could not be written, 75 to be run again (a signal, or another process gone); a second Ctrl-C ends it with 130."""
    try:
        config = parse_config(argv)
        check_tracker(config.run.report_to)
        engine = open_engine(config.run.precision)
        set_up_logging(main=engine.is_main)
        say = emit if engine.is_main else lambda line: None
        code = run(config, engine, say)
        engine.close()
        return code
    except (UserError, RuntimeError) as e:  # the latter where another process is gone
        return fail(e)
    except KeyboardInterrupt:
        if speaks():
            print("\nstopped before a step was taken; there is nothing to save", file=sys.stderr)
        return ExitCode.RUN_AGAIN


def run(config: Config, engine: Engine, say: Callable[[str], None]) -> int:
    """A run from its configuration to its last line; returns the exit code."""
    check_alike(config, engine)
    config, found = micro_batch(config, engine)
    batch = batch_arithmetic(config, engine.world, engine.devices)
    announce(config, batch, engine, found)
    if config.run.dry_run:
        return 0
    with ExitStack() as closing:  # what works in the background ends with the run
        checkpoint = find_checkpoint(config, engine, closing)
        uploads = open_uploads(config, engine)
        beyond = checkpoint.step - config.optimizer.max_steps if checkpoint else -1
        if beyond > 0 or (beyond == 0 and engine.from_main(has_finished(config))):
            say(f"complete   {checkpoint.path} holds the whole run; --max_steps trains longer, --fresh starts over")
            engine.stop.begin()  # from now on Ctrl-C leaves the rest for later
            uploads.wait(stopped=lambda: engine.stop.requested)
            return 0
        step, state = (checkpoint.step, checkpoint.state["data"]) if checkpoint else (0, None)
        source, validation = closing.enter_context(open_datasets(config, batch, engine, step, state))
        faults.at("start.model")
        model = build_model(config, load_init_from=checkpoint is None, **engine.model_options)
        result = train(config, batch, engine, model, source, validation, checkpoint, uploads, closing)
        if result.saved and result.val_loss is not None:
            uploads.wait(stopped=lambda: engine.stop.requested)
    if not result.saved:
        say(
            f"NOT SAVED  the last checkpoint could not be written into {config.run.output_dir}; mend that, and the "
            "same command, without --fresh, goes on from the checkpoint before it"
        )
        return ExitCode.NOT_SAVED
    if result.val_loss is None:
        say("stopped    before the end; the same command, without --fresh, goes on from the last checkpoint")
        return ExitCode.RUN_AGAIN
    if engine.is_main:
        conclude(config, batch, engine, result, source.shards, validation.shards)
    return 0


def train(
    config: Config,
    batch: Batch,
    engine: Engine,
    raw_model: GPT2LMHeadModel,
    source: TokenDataset,
    validation: TokenDataset,
    checkpoint: Checkpoint | None,
    uploads: Uploads,
    closing: ExitStack,
) -> Result:
    """Trains to max_steps, from `checkpoint` if there is one."""
    opt, run = config.optimizer, config.run
    run_dir = Path(run.output_dir)
    state = checkpoint.state if checkpoint else {}
    if checkpoint:
        check_same_data(state["data"], source.state(), config.data.dataset_name)
    step = checkpoint.step if checkpoint else 0  # optimizer steps done

    # Weights go in before prepare and moments after it: then every engine and world size can take them.
    if checkpoint:
        raw_model.load_weights(checkpoint.weights, str(checkpoint.path))
    engine.place(raw_model, compile=run.torch_compile_mode if run.torch_compile else "")
    optimizer = make_optimizer(raw_model, opt, **engine.optimizer_options)
    model, optimizer = engine.prepare(raw_model, optimizer, batch, opt.max_grad_norm)
    if checkpoint:
        engine.load_optimizer_state(raw_model, optimizer, checkpoint.optimizer_state, state["optimizer_steps"])
        engine.load_state_dict(state["grad_scaler"])

    running_loss = RunningLoss(engine.device, engine.sum_dtype)
    if checkpoint:
        running_loss.load_state_dict(state["running_loss"])
    spike_filter = SpikeFilter(engine.device, opt)
    if checkpoint:
        spike_filter.load_state_dict(state["spike_filter"])
    throughput = Throughput(state.get("seconds", 0.0), state.get("pauses", 0.0))
    progress = Progress(opt.max_steps, opt.total_batch_tokens, step, show=engine.is_main)
    closing.callback(progress.close)
    log = MetricsLog(run_dir / "metrics.jsonl", step) if engine.is_main else None
    saver = None
    if engine.is_main:
        keep = Retention(run.save_total_limit, run.milestone_steps)
        saver = CheckpointManager(run_dir, keep, log, patience=launcher_patience())
    files = model_files(raw_model) if engine.is_main else {}
    parts = about(config, engine, step, state.get("about")) if engine.is_main else []
    flops = flops_per_token(config.model, config.data.sequence_length)
    tracker = closing.enter_context(Tracker(config, step, state.get("tracker"), active=engine.is_main))
    pin = engine.device.type == "cuda"
    batches = Batches(source, batch, engine.rank, step, opt.max_steps, to_device=engine.to_device, pin=pin)
    saved_at, logged_at = step, step
    unwritten = state.get("record")  # of the step that was saved: its line is written after its evaluations
    grad_norm, val_loss, stopping = None, None, False
    closing.callback(batches.close)
    if saver:
        closing.callback(log.close)
        closing.enter_context(saver)
    if engine.world > 1:
        engine.stop.begin()  # from here on who hears a signal tells the others
    engine.stop.before_leaving = lambda: saver and saver.join(60)

    @contextmanager
    def paused(what: str):
        with throughput.paused(), engine.stop.patient(), progress.during(what):
            yield

    faults.in_gradients(raw_model)
    faults.at("step.compile")
    model.train()

    while True:
        last = step == opt.max_steps

        def due(every: int, step=step, last=last) -> bool:
            return last or (every > 0 and step % every == 0)

        # once in a while: read what the device has gathered (the only place where the loop waits for it)
        record, unwritten = unwritten, None
        if due(run.logging_steps) or due(run.eval_steps):
            record = record or new_record(step, opt)
            if step > logged_at:
                record["loss"] = running_loss.read(engine.mean)
                record["grad_norm"] = grad_norm.item()
                record["learning_rate"] = lr_at(step - 1, opt)
                seconds = throughput.window()
                rate = (step - logged_at) * opt.total_batch_tokens / seconds
                record["tokens_per_second"] = rate
                record["data_wait"] = batches.waited() / seconds
                record["mfu"] = rate * flops / (engine.peak_flops * engine.world) if engine.peak_flops else None
                record["skipped_steps"] = spike_filter.check(step)
                logged_at = step

        # once in a while: a checkpoint. Not while steps are left out: the weights are those of one that was kept.
        if step > saved_at and (stopping or last or (due(run.save_steps) and not spike_filter.skipping)):
            with paused("saving"):
                state = {
                    "config": redacted(config.flat()),
                    "engine": engine.name,
                    "about": parts,
                    "tokens": step * opt.total_batch_tokens,
                    "seconds": throughput.seconds,
                    "pauses": throughput.pauses,
                    "record": record,
                    "running_loss": running_loss.state_dict(engine.mean),
                    "spike_filter": spike_filter.state_dict(),
                    "optimizer_steps": steps_taken(optimizer),
                    "grad_scaler": engine.state_dict(),
                    "data": source.state(),
                    "tracker": tracker.run_id,
                }
                if saver:
                    saver.begin()
                weights, moments = engine.snapshot(raw_model, optimizer)
                if saver:
                    saver.save(step, weights, moments, state, files)
                    if not stopping and any(every and due(every) for every in (run.hellaswag_steps, run.sample_steps)):
                        saver.wait()
                saved_at = step
        if stopping:  # what else was due at this step, a resumed run does
            val_loss = None
            break

        try:
            # once in a while: validation loss, HellaSwag, a sample, all on the live model
            if due(run.eval_steps):
                with paused("validating"):
                    val_loss = record["val_loss"] = validate(config, batch, engine, model, validation, progress.tick)
                if not math.isfinite(val_loss):
                    raise UserError(
                        f"the validation loss at step {step} is {val_loss}: the weights are spoilt. {WAY_OUT}"
                    )
            if run.hellaswag_steps and due(run.hellaswag_steps) and step > 0:
                with paused("HellaSwag"):
                    record = record or new_record(step, opt)
                    record |= hellaswag(config, engine, raw_model, logger.info, progress.tick)
            if run.sample_steps and due(run.sample_steps) and step > 0:
                with paused("sampling"):
                    logger.info(f"step {step}: sample {sample(config, engine, raw_model)!r}")

            if record is not None:
                record["seconds"] = round(throughput.seconds, 3)
                record["save_wait"] = throughput.share(saver.save_wait) if saver else None
                record |= engine.counters()
                if log:
                    log.write(record)
                progress.report(record, saver.failed if saver else "")
                tracker.log(record)
                uploads.start(step)
            if last:
                break
            engine.wait_for_batches(batches)
        except Interrupted:  # here, between two steps: all processes have agreed
            stopping, unwritten = True, record
            continue

        # a single training step
        set_lr(optimizer, lr_at(step, opt))
        if config.model.dropout:
            engine.seed_dropout(run.seed, step)
        faults.at("step.begin")
        for micro_step in range(batch.accumulation):
            rows = next(batches)  # (micro, T + 1)
            with engine.micro_step(model, last=micro_step == batch.accumulation - 1):
                loss = faults.of("step.loss", model(rows[:, :-1], rows[:, 1:]) / batch.accumulation)
                engine.backward(loss)
                running_loss.add(loss.detach())
            faults.at("step.micro")
        grad_norm, skipped = engine.optimizer_step(model, optimizer, opt.max_grad_norm, spike_filter, running_loss.step)
        running_loss.end_step(skipped)
        engine.flush()
        step += 1
        faults.at("step.end")
        engine.stop.begin()  # there is progress that a signal must not cost
        progress.advance()
        if progress.wants_loss and run.logging_steps > 1:  # signs of life, long before the log's next line
            progress.live(running_loss.mean(engine.mean))

    engine.stop.leave()
    with progress.during("saving"):
        saved = engine.from_main(saver.conclude(lambda: engine.stop.requested) if saver else None)
    progress.close()
    if engine.anywhere(batches.error() is not None):  # saved all the same
        cause = batches.error() or "the data of another process have ended; what it says is the cause"
        raise UserError(f"{cause}{'' if saved else '; nor could the last checkpoint be written'}")
    return Result(val_loss, saved, throughput.seconds, throughput.pauses)


def has_finished(config: Config) -> bool:
    """Whether a run whose last step is saved was also evaluated at it."""
    lines = read_metrics(Path(config.run.output_dir) / "metrics.jsonl")
    return bool(lines) and lines[-1]["step"] == config.optimizer.max_steps and lines[-1].get("val_loss") is not None


def new_record(step: int, opt: OptimizerConfig) -> dict:
    """A line of metrics.jsonl; null is what was not measured at this step."""
    unknown = dict.fromkeys(
        ("loss", "val_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "data_wait", "skipped_steps")
    )
    return {"step": step, "tokens": step * opt.total_batch_tokens} | unknown | {"learning_rate": lr_at(step, opt)}


if __name__ == "__main__":
    keep_secrets()
    sys.exit(main())
