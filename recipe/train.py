"""Trains GPT-2: `accelerate launch --config_file accelerate_configs/single.yaml recipe/train.py`, or plain python.

`run` is the table of contents, `train` the training loop. components.py builds what the loop uses.
"""

import logging
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until StopSignal handles both; the imports take seconds
    signal.signal(signal.SIGTERM, lambda *_: os._exit(75))  # ExitCode.RUN_AGAIN
if __package__ in (None, ""):  # as a script: import from the repository root, not from recipe/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from recipe.utils.errors import check_packages

    check_packages()
# Set before torch loads OpenMP: a thread that waits for others soon yields its core. By default it spins, and two runs
# that share cores reach a sixth of their possible throughput (docs/log.md).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from recipe.components import (
    Components,
    check_initial_weights,
    check_inputs,
    check_same_launch,
    check_supported,
    log_if_complete,
    open_components,
    open_run_directory,
    with_steps,
    with_vocabulary,
)
from recipe.config import BatchPlan, Config, batch_arithmetic, due_at, parse_config
from recipe.engine.factory import open_strategy
from recipe.engine.launch import fail, is_local_main_process
from recipe.engine.shutdown import Interrupted, StopSignal
from recipe.engine.strategy import Strategy
from recipe.estimate.fused_loss import resolve_fused_loss
from recipe.estimate.micro_batch import resolve_micro_batch
from recipe.hub.upload import Uploads, open_uploads
from recipe.monitor.summary import describe, summarize
from recipe.monitor.trackers import check_tracker
from recipe.optim.schedule import set_lr
from recipe.utils.errors import ExitCode, UserError
from recipe.utils.log import print_error, set_up_logging
from recipe.utils.processes import exit_process

logger = logging.getLogger("recipe.train")  # as a script, too


def main(argv: list[str] | None = None) -> int:
    """Runs the training that the command line describes; returns the exit code (see ExitCode)."""
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
        except (UserError, OSError, RuntimeError) as error:  # RuntimeError: another process died
            return fail(error)  # in the outer `try`: the launcher may send a signal meanwhile
    except KeyboardInterrupt:
        if is_local_main_process():
            print_error("\nstopped before the first step; there is nothing to save")
        return ExitCode.RUN_AGAIN
    finally:
        if __name__ != "__main__":  # a notebook goes on; in a script another signal would interrupt Python's exit
            StopSignal.release()


def run(config: Config, strategy: Strategy) -> ExitCode:
    """Checks a configuration, prints the opening panel, trains and prints the closing one; or is a dry run."""
    processes, stop = strategy.runtime.processes, strategy.runtime.stop
    check_same_launch(config, strategy)
    check_supported(config, strategy)
    config = with_vocabulary(config, processes)
    check_initial_weights(config, processes)
    config = with_steps(config, processes)
    config, loss_line = resolve_fused_loss(config, strategy)
    config, micro_batch_line = resolve_micro_batch(config, strategy)
    batch = batch_arithmetic(config, processes.world_size, strategy.device.count)
    for line in describe(config, batch, strategy, [loss_line, micro_batch_line]):
        logger.info(line)
    if config.run.dry_run or config.run.fresh:  # before --fresh moves an earlier run
        check_inputs(config, batch, processes)
    if config.run.dry_run:
        if not (config.run.fresh or config.run.plan_device):  # other devices may have another disk
            with open_run_directory(config, processes) as (_, checkpoint):
                log_if_complete(config, processes, checkpoint)
        return ExitCode.DONE
    if config.run.max_hours:
        stop.stop_after(config.run.max_hours)
    while True:
        code = pretrain(config, batch, strategy)
        strategy.release()  # on a GPU there may be no room for the next one beside it
        if code is not None:
            return code
        # train_hours: it is time to fix the number of steps
        config = with_steps(config.replace(fresh=False), processes, decay_due=True)
        start, steps = config.optimizer.decay_start, config.optimizer.max_steps
        logger.info("decay      begins after step %s; the run will end at step %s", f"{start:,}", f"{steps:,}")


def pretrain(config: Config, batch: BatchPlan, strategy: Strategy) -> ExitCode | None:
    """Trains from the run's newest checkpoint to its last step. Returns None if a run of train_hours has saved a
    checkpoint and stopped because its decay is due and its number of steps is to be fixed."""
    processes, stop = strategy.runtime.processes, strategy.runtime.stop
    uploads, code = open_uploads(config, processes), ExitCode.DONE  # before --fresh moves an earlier run
    with open_run_directory(config, processes) as (descriptor, checkpoint):
        if not log_if_complete(config, processes, checkpoint):
            with open_components(config, batch, strategy, descriptor, checkpoint) as components:
                if config.undecided and processes.is_main:  # checkpoints keep the main process's clock
                    stop.decay_when(components.metrics.time_to_decay)
                val_loss, saved = train(config, batch, components, uploads)
            if saved and val_loss is None and strategy.runtime.decay_due:
                return None
            code = summarize(config, components.metrics, val_loss, saved)
        if code == ExitCode.DONE:
            stop.complete = True
            stop.heartbeat()  # from here on Ctrl-C ends the wait instead of raising KeyboardInterrupt
            code = uploads.wait(stop_requested=lambda: stop.requested)
    return code


def train(config: Config, batch: BatchPlan, components: Components, uploads: Uploads) -> tuple[float | None, bool]:
    """Trains to max_steps, or until all processes have agreed to stop. Returns the last validation loss in nats per
    token, None where the run was stopped, and whether the last checkpoint was written."""
    strategy, metrics, checkpoints = components.strategy, components.metrics, components.checkpoints
    model, optimizer, batches = components.model, components.optimizer, components.batches
    step, interrupted = components.first_step, False
    model.train()

    while True:
        due = due_at(step, config)

        # now and then: read the metrics from the device, which synchronizes
        record = metrics.record(step, read=due.log)
        due = due.without(record)  # a resumed run does not repeat its evaluations
        # now and then: a checkpoint, but not during a loss spike, while steps are skipped
        if due.last or (due.save and not strategy.spike_filter.skipping):
            checkpoints.save(step, record)

        try:
            # now and then: validation loss, HellaSwag and a sample
            if due.eval:
                record |= components.evaluator.validate(model, step)
            if due.hellaswag or due.sample:
                checkpoints.wait()  # a kill during a long evaluation must not lose the checkpoint
            if due.hellaswag:
                record |= components.evaluator.hellaswag()
            if due.sample:
                record |= components.evaluator.sample(step)
            metrics.write(step, record)
            uploads.start()  # after the evaluations, which the model card shows
            if due.last:
                break
            # no process starts a step that another cannot finish
            strategy.runtime.wait_for_batches(batches)
        except Interrupted:  # raised on all processes, between two steps
            interrupted = True
            break

        # a single training step
        set_lr(optimizer, step, config.optimizer)
        if config.model.dropout:
            strategy.seed_dropout(config.run.seed, step)
        for micro_step in range(batch.accumulation):
            sequences = next(batches)  # (micro, T + 1)
            with strategy.micro_step(model, last=micro_step == batch.accumulation - 1):
                loss = model(sequences[:, :-1], sequences[:, 1:]) / batch.accumulation
                strategy.backward(loss)
                metrics.loss.add(loss.detach())
        grad_norm, skipped = strategy.update(model, optimizer, metrics.loss.step)
        metrics.end_step(grad_norm, skipped)
        strategy.device.flush()
        step += 1

    if interrupted:
        checkpoints.save(step, record)  # the resumed run does the evaluations still due at this step
    saved = checkpoints.finish()
    components.check_data_errors(step, saved)
    val_loss = None if interrupted else record["val_loss"]
    return val_loss, saved


if __name__ == "__main__":
    exit_process(main())
