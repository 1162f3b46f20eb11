"""Trains GPT-2: `accelerate launch --config_file accelerate_configs/single.yaml recipe/train.py`, or plain python.

`run` is the table of contents; `train` is the loop, the only one, to be read from top to bottom. components.py builds
what the loop drives.
"""

import logging
import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run listens; the imports take seconds
if __package__ in (None, ""):  # as a script: import from the repository, not from recipe/ with its `data`, `optim`...
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    if find_spec("accelerate") is None:
        print(
            f"error: {sys.executable} has no Accelerate; use .venv/bin/python, set up by `make train`", file=sys.stderr
        )
        sys.exit(2)
# Read when torch loads OpenMP: a thread that waits for the others soon gives up its core. By default it spins, and two
# trainings on the same cores take a sixth of the steps that are possible (docs/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from recipe.components import (
    Components,
    check_inputs,
    check_same_launch,
    is_complete,
    open_components,
    open_run_directory,
    with_steps,
    with_vocabulary,
)
from recipe.config import BatchPlan, Config, batch_arithmetic, due_at, parse_config
from recipe.engine.factory import open_strategy
from recipe.engine.launch import fail, is_local_main_process
from recipe.engine.shutdown import Interrupted
from recipe.engine.strategy import Strategy
from recipe.estimate.fused_loss import fused_loss
from recipe.estimate.micro_batch import micro_batch
from recipe.hub.upload import Uploads, open_uploads
from recipe.monitor.summary import announce, summarize
from recipe.monitor.trackers import check_tracker
from recipe.optim.schedule import set_lr
from recipe.utils.errors import ExitCode, UserError
from recipe.utils.log import set_up_logging

logger = logging.getLogger("recipe.train")  # as a script, too


def main(argv: list[str] | None = None) -> int:
    """Trains as the command line says, and returns the exit code (see ExitCode)."""
    try:
        try:
            config = parse_config(argv)
            check_tracker(config.run.report_to)
            precision, plan_device = config.run.precision, config.run.plan_device
            strategy = open_strategy(precision, plan_device, deterministic=config.run.deterministic)
            set_up_logging(main=strategy.runtime.processes.is_main)
            code = run(config, strategy)
            strategy.runtime.close()
            return code
        except (UserError, OSError, RuntimeError) as error:  # the last where another process is gone
            return fail(error)  # in which a signal can come, too: the launcher's, after another process's error
    except KeyboardInterrupt:
        if is_local_main_process():
            print("\nstopped before a step was taken; there is nothing to save", file=sys.stderr)
        return ExitCode.RUN_AGAIN


def run(config: Config, strategy: Strategy) -> ExitCode:
    """A run from its configuration to its last line."""
    processes, stop = strategy.runtime.processes, strategy.runtime.stop
    check_same_launch(config, strategy)
    config = with_steps(with_vocabulary(config, processes), processes)
    config, loss = fused_loss(config, strategy)
    config, micro = micro_batch(config, strategy)
    batch = batch_arithmetic(config, processes.world_size, strategy.device.count)
    announce(config, batch, strategy, [loss, micro])
    if config.run.dry_run or config.run.fresh:  # before an earlier run is moved
        check_inputs(config, batch, processes)
    if config.run.dry_run:
        return ExitCode.DONE
    if config.run.max_hours:
        stop.stop_after(config.run.max_hours)
    while (code := pretrain(config, batch, strategy)) is None:  # of train_hours so many are over that the decay is due
        config = with_steps(config.replace(fresh=False), processes, due=True)
        start, steps = config.optimizer.decay_start, config.optimizer.max_steps
        logger.info("decay      begins after step %s; the run has %s steps", f"{start:,}", f"{steps:,}")
    return code


def pretrain(config: Config, batch: BatchPlan, strategy: Strategy) -> ExitCode | None:
    """Trains from the run's newest checkpoint to its last step. None if the run was stopped, with a checkpoint, because
    it is time to decide how many steps it has."""
    processes, stop = strategy.runtime.processes, strategy.runtime.stop
    with open_run_directory(config, processes) as (directory, checkpoint):
        uploads, code = open_uploads(config, processes), ExitCode.DONE
        if not is_complete(config, processes, checkpoint):
            with open_components(config, batch, strategy, directory, checkpoint) as parts:
                if config.undecided and processes.is_main:  # whose clock a checkpoint keeps
                    stop.decay_when(parts.metrics.time_to_decay)
                val_loss, saved = train(config, batch, parts, uploads)
            if saved and val_loss is None and strategy.runtime.agreement.to_decay(processes):
                return None
            code = summarize(config, parts.metrics, val_loss, saved)
        if code == ExitCode.DONE:
            stop.heartbeat()  # from now on Ctrl-C leaves the uploads for later
            code = uploads.wait(stopped=lambda: stop.requested)
    return code


def train(config: Config, batch: BatchPlan, parts: Components, uploads: Uploads) -> tuple[float | None, bool]:
    """Trains to max_steps, or until all processes have agreed to stop. Returns the last validation loss in nats per
    token, None where the run was stopped, and whether the last checkpoint was written."""
    strategy, model, optimizer, metrics = parts.strategy, parts.model, parts.optimizer, parts.metrics
    step, stopping = parts.first_step, False
    model.train()

    while True:
        due = due_at(step, config)

        # once in a while: read what the device has gathered, which waits for it
        record = metrics.record(step, read=due.log or due.eval)
        due = due.without(record)  # a resumed run measures nothing twice
        # once in a while: a checkpoint. Not while step after step is skipped: the weights are those of a spike.
        if due.last or (due.save and not strategy.spike_filter.skipping):
            parts.checkpoints.save(step, record)

        try:
            # once in a while: validation loss, HellaSwag, a sample, all on the live model
            if due.eval:
                record |= parts.evaluator.validate(model, step)
            if due.hellaswag or due.sample:
                parts.checkpoints.wait()  # a kill in a long evaluation must not cost the checkpoint
            if due.hellaswag:
                record |= parts.evaluator.hellaswag()
            if due.sample:
                record |= parts.evaluator.sample(step)
            metrics.write(step, record)
            uploads.start()  # a checkpoint goes to the Hub with its evaluations
            if due.last:
                break
            # no process starts a step that another cannot finish
            strategy.runtime.agreement.wait_for_batches(parts.batches)
        except Interrupted:  # raised on all processes, between two steps
            stopping = True
            break

        # a single training step
        set_lr(optimizer, step, config.optimizer)
        if config.model.dropout:
            strategy.seed_dropout(config.run.seed, step)
        for micro_step in range(batch.accumulation):
            sequences = next(parts.batches)  # (micro, T + 1)
            with strategy.micro_step(model, last=micro_step == batch.accumulation - 1):
                loss = model(sequences[:, :-1], sequences[:, 1:]) / batch.accumulation
                strategy.backward(loss)
                metrics.loss.add(loss.detach())
        grad_norm, skipped = strategy.update(model, optimizer, metrics.loss.step)
        metrics.end_step(grad_norm, skipped)
        strategy.device.flush()
        step += 1

    if stopping:
        parts.checkpoints.save(step, record)  # a resumed run does what else is due at this step
    saved = parts.checkpoints.finish()
    parts.check_data_errors(saved)
    val_loss = None if stopping else record["val_loss"]
    return val_loss, saved


if __name__ == "__main__":
    sys.exit(main())
