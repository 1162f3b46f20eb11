"""What the loop drives: built, restored from a checkpoint, and closed."""

import hashlib
import logging
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

import torch

from recipe.checkpoint.format import Checkpoint, load_checkpoint, newest_state, state_of
from recipe.checkpoint.manager import CheckpointManager
from recipe.checkpoint.run_dir import RunDirectory, check_same_run, continue_from, run_directory, set_aside
from recipe.config import ROOT, UNDECIDED, BatchPlan, Config, data_sets
from recipe.config.catalog import is_text
from recipe.config.parse import check
from recipe.data.dataset import check_same_data
from recipe.data.open import check_dataset, open_datasets, state_on_disk, training_windows
from recipe.data.prefetch import BatchLoader
from recipe.data.producer import open_text
from recipe.data.tokenizer import open_tokenizer
from recipe.engine.launch import max_restarts
from recipe.engine.strategy import Strategy
from recipe.evaluation import Evaluator
from recipe.model.build import build_model, check_init_from
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.model.loss import can_fuse
from recipe.monitor.metrics import Metrics, time_to_decay, val_losses
from recipe.optim.optimizer import make_optimizer
from recipe.utils.errors import Unreachable, UserError
from recipe.utils.processes import Processes
from recipe.utils.redaction import redacted

logger = logging.getLogger(__name__)

_COMPLETE = "complete   %s holds the whole run; --max_steps trains longer, --fresh starts over"
# Fields of a node rather than of the run: where files are.
_OF_A_NODE = {"config", "dataset_name", "val_data", "train_text", "init_from", "output_dir"}


@dataclass(frozen=True)
class Components:
    """What `train` drives."""

    strategy: Strategy  # device, processes, how a step is taken
    model: torch.nn.Module  # prepared
    optimizer: torch.optim.Optimizer  # prepared
    batches: BatchLoader  # this process's micro-batches from `first_step` on, (micro, T + 1), int64, on the device
    metrics: Metrics  # loss, throughput, metrics.jsonl, progress bar, tracker
    evaluator: Evaluator  # validation loss, HellaSwag and a sample of the live model
    checkpoints: CheckpointManager  # saves the state of all of these
    first_step: int  # optimizer steps done before

    def check_data_errors(self, saved: bool) -> None:
        """Raises UserError, on all processes, where one process could not read its data, which stopped the run. A
        collective call."""
        error = self.batches.error()
        if self.strategy.runtime.processes.anywhere(error is not None):
            cause = error or "the data of another process cannot be read; its error message has the cause"
            raise UserError(f"{cause}{'' if saved else '; the last checkpoint could not be written either'}")


@contextmanager
def open_components(
    config: Config, batch: BatchPlan, strategy: Strategy, directory: RunDirectory, checkpoint: Checkpoint | None
) -> Generator[Components, None, None]:
    """Builds everything from the configuration, or restores it from `checkpoint`; `directory` is the run's. A
    collective call. Raises UserError."""
    step, state = (checkpoint.step, checkpoint.state) if checkpoint else (0, {})
    with ExitStack() as closing:
        processes = strategy.runtime.processes
        opened = open_datasets(config, batch, processes, step, state.get("data"))
        train_data, val_data = closing.enter_context(opened)
        if checkpoint:
            check_same_data(state["data"], train_data.state_dict(), config.data.dataset_name)
        raw_model, model, optimizer = _model_and_optimizer(config, batch, strategy, checkpoint)
        batches = BatchLoader(
            train_data,
            batch,
            processes.rank,
            step,
            config.optimizer.max_steps,
            to_device=strategy.device.put,
            pin=strategy.device.type == "cuda",
        )
        rewound = checkpoint is not None and processes.is_main and set_aside(directory, checkpoint)
        metrics = Metrics(config, strategy, batches, step)
        stateful = {
            "data": train_data,
            "metrics": metrics,
            "tracker": metrics.tracker,
            "spike_filter": strategy.spike_filter,
            "grad_scaler": strategy.grad_scaler,
        }
        if rewound:
            state = state | {"tracker": {}}  # it takes each step once: rewound steps are a new run there
        for name, component in stateful.items() if checkpoint else []:
            if state[name]:  # of a loss scale there may be none
                component.load_state_dict(state[name])
        closing.enter_context(batches)  # reads ahead, and verifies files by what was restored
        closing.enter_context(metrics)
        trained = raw_model, optimizer
        checkpoints = CheckpointManager(config, strategy, trained, stateful, metrics, directory, checkpoint)
        closing.callback(checkpoints.join)
        yield Components(
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            batches=batches,
            metrics=metrics,
            evaluator=Evaluator(config, batch, strategy, raw_model, val_data, metrics),
            checkpoints=checkpoints,
            first_step=step,
        )


def _model_and_optimizer(
    config: Config, batch: BatchPlan, strategy: Strategy, checkpoint: Checkpoint | None
) -> tuple[GPT2LMHeadModel, torch.nn.Module, torch.optim.Optimizer]:
    """The model, the prepared model and its prepared optimizer. The weights are loaded before `prepare` and the
    optimizer state after it, so that every strategy and number of processes can take them."""
    opt, run = config.optimizer, config.run
    raw_model = build_model(config, load_init_from=checkpoint is None, **strategy.device.model_options)
    if checkpoint:
        raw_model.load_weights(checkpoint.weights, str(checkpoint.path))
    strategy.place(raw_model, compile=run.torch_compile_mode if run.torch_compile else "")
    optimizer = make_optimizer(raw_model, opt, **strategy.device.optimizer_options(strategy.runtime.processes))
    model, optimizer = strategy.prepare(raw_model, optimizer, batch, opt)
    if checkpoint:
        steps = checkpoint.state["optimizer_steps"]
        strategy.scatter(raw_model, optimizer, checkpoint.optimizer_state, steps)
    return raw_model, model, optimizer


def check_inputs(config: Config, batch: BatchPlan, processes: Processes) -> None:
    """For a plan: raises UserError, on all processes, where the run could not open its data, `init_from` or its
    directory; what only the Hub knows is not checked without a network. A collective call."""
    steps = 0 if config.undecided else config.optimizer.max_steps
    data = [partial(check_dataset, one, batch, steps) for one in data_sets(config.data)]
    checks = [*data, partial(check_init_from, config.model), partial(_check_run_directory, config)]
    with processes.shared_error("the inputs cannot be read"):
        for check in checks if processes.is_main else []:
            try:
                check()
            except Unreachable as error:
                logger.warning("note       not checked: %s", error)


def _check_run_directory(config: Config) -> None:
    """Logs from where the run would continue. Raises UserError where it could not. A plan for other devices says
    nothing of what is on this disk."""
    run_dir, flat = Path(config.run.output_dir), redacted(config.flat())
    new = config.run.fresh or config.run.plan_device
    chosen, rewound = (None, False) if new else continue_from(run_dir, flat)
    if chosen is None:
        return
    state = state_of(chosen)
    check_same_run(state, flat, open_tokenizer(config.data.tokenizer), run_dir)
    if state["step"] < config.optimizer.max_steps:
        before = ", before the decay; what is newer is set aside" if rewound else ""
        logger.info("resume     it would continue from step %d (%s)%s", state["step"], chosen, before)
    else:
        _check_trained_on(config, state)
        logger.info(_COMPLETE, chosen)


@contextmanager
def open_run_directory(
    config: Config, processes: Processes
) -> Generator[tuple[RunDirectory, Checkpoint | None], None, None]:
    """The run's directory, locked for this run, and the checkpoint in it from which the run continues, chosen and
    verified by the main process for all of them. A collective call. Raises UserError, on all processes."""
    run_dir, flat = Path(config.run.output_dir), redacted(config.flat())
    with ExitStack() as closing:
        directory, chosen = RunDirectory(run_dir), None
        with processes.shared_error("the run's directory cannot be opened"):
            if processes.is_main:
                directory = closing.enter_context(run_directory(run_dir, fresh=config.run.fresh))
                chosen, _ = continue_from(run_dir, flat, locked=True)
        chosen = processes.broadcast_object(chosen)
        if chosen is None:
            yield directory, None
            return
        if processes.anywhere(not chosen.exists()):
            raise UserError(f"{chosen} is not on every node: output_dir must be on a file system that all of them see")
        checkpoint = load_checkpoint(chosen)
        check_same_run(checkpoint.state, flat, open_tokenizer(config.data.tokenizer), run_dir)
        if checkpoint.step < config.optimizer.max_steps:
            logger.info("resume     from step %d (%s)", checkpoint.step, chosen)
        yield directory, checkpoint


def is_complete(config: Config, processes: Processes, checkpoint: Checkpoint | None) -> bool:
    """Whether there is nothing left to do, which it logs: the last step is saved, and was evaluated. A collective
    call."""
    if checkpoint is None or checkpoint.step < config.optimizer.max_steps:
        return False
    evaluated = checkpoint.step in val_losses(Path(config.run.output_dir))
    complete = checkpoint.step > config.optimizer.max_steps or processes.broadcast_object(evaluated)
    if complete:
        with processes.shared_error("the data cannot be read"):
            _check_trained_on(config, checkpoint.state)
        logger.info(_COMPLETE, checkpoint.path)
    return complete


def _check_trained_on(config: Config, state: dict) -> None:
    """Raises UserError where a complete run, with this trainer state, was trained on other data than those that are
    named now: by their names or, since shards may move, by the shards themselves; text on this disk by what it was.
    Nothing is prepared or streamed."""
    before, now = (flat["dataset_name"] for flat in (state["config"], redacted(config.flat())))
    if before == now:
        last, sets = state["about"][-1]["data"], data_sets(config.data)
        for one, part in zip(sets, last.get("mixture", [last]), strict=True):
            if (files := part.get("files")) and is_text(one.data.train_text):
                here = redacted(open_text(one.data).identity())["files"]
                if (here[: len(files)], len(here)) != (files, part["of"]):
                    raise UserError(
                        f"{config.run.output_dir} is complete, and {one.data.train_text} was another text then; choose "
                        "another run_name, or start over with --fresh"
                    )
        return
    try:
        check_same_data(state["data"], state_on_disk(config.data), "")
    except UserError:
        names = ", ".join(one.data.train_text or one.data.dataset_name for one in data_sets(config.data))
        raise UserError(
            f"{config.run.output_dir} is complete, and was trained on {before} and not on {names}; choose another "
            "run_name, or start over with --fresh"
        ) from None


def with_vocabulary(config: Config, processes: Processes) -> Config:
    """The configuration with the vocabulary of its tokenizer, which each node's first process loads first. A collective
    call. Raises UserError, on all processes."""
    with processes.shared_error("the tokenizer cannot be loaded"), processes.main_process_first():
        tokenizer = open_tokenizer(config.data.tokenizer)
    return config.replace(vocab_size=tokenizer.vocab_size)


def with_steps(config: Config, processes: Processes, *, due: bool = False) -> Config:
    """The configuration with the max_steps that make `num_train_epochs` of the data, which are prepared for that, or
    `train_hours`; `due`: of these so many are over that the decay begins. A collective call. Raises UserError, on all
    processes."""
    if config.run.train_hours:
        steps = processes.broadcast_object(_decided(config, due) if processes.is_main else None)
        return config.replace(max_steps=steps)
    if not (epochs := config.run.num_train_epochs):
        return config
    with processes.shared_error("the data cannot be prepared"), processes.main_process_first():
        windows = training_windows(config)
    steps = max(1, ceil(epochs * windows / (config.optimizer.total_batch_tokens // config.data.sequence_length)))
    config = config.replace(max_steps=steps, num_train_epochs=0.0)
    check(config)
    return config


def _decided(config: Config, due: bool) -> int:
    """The max_steps of a run of train_hours: UNDECIDED until the newest checkpoint was saved when it was time to decay,
    or after that, or the decay is `due`: in an evaluation after that save. Which checkpoint it is does not matter: all
    after the decision have the same."""
    state = newest_state(config.run)
    hours, steps = (state["config"].get(name, 0) for name in ("train_hours", "max_steps")) if state else (0, UNDECIDED)
    if hours and steps != UNDECIDED and config.run.train_hours <= hours:  # less time than it had takes nothing back
        return steps
    if hours != config.run.train_hours:
        return UNDECIDED
    due = due or time_to_decay(state["metrics"], config)
    return config.optimizer.ending_after(state["step"]) if due else UNDECIDED


def check_same_launch(config: Config, strategy: Strategy) -> None:
    """Raises UserError, on all processes, where one was launched with another configuration or other code than the main
    one, where a restart would start over, and where the run cannot have its optimizer or loss. A collective
    call."""
    run, optim, supported = config.run, config.optimizer.optim, strategy.runtime.optimizers
    if supported and optim not in supported:
        raise UserError(
            f"optim {optim} is not supported on {strategy}; launch with accelerate_configs/ddp.yaml or single.yaml, or "
            f"choose --optim {' or '.join(supported)} and its learning rate"
        )
    if run.fused_loss is True and not (run.plan_device or can_fuse(strategy.device.type)):
        raise UserError("fused_loss needs a GPU with CUDA, and Triton; remove fused_loss")
    if run.fresh and (limit := max_restarts()):
        raise UserError(
            f"--fresh would start over at each of the {limit} restarts that --max_restarts allows; remove one of them, "
            f"or move {run.output_dir} away"
        )
    here = {k: v for k, v in redacted(config.flat()).items() if k not in _OF_A_NODE}
    here["dataset_name's weights"] = [one.count for one in data_sets(config.data)]
    _check_same_everywhere(here | {"precision": strategy.device.precision}, strategy.runtime.processes)


def _check_same_everywhere(here: dict, processes: Processes) -> None:
    code = b"".join(path.read_bytes() for path in sorted((ROOT / "recipe").rglob("*.py")))
    here |= {"torch": torch.__version__, "code of recipe/": hashlib.sha256(code).hexdigest()[:8]}
    main = processes.broadcast_object(here)
    differing = [f"{k} {v!r} here, {main.get(k)!r} on rank 0" for k, v in here.items() if v != main.get(k)]
    with processes.shared_error("the configuration is not the same"):
        if differing:
            raise UserError(
                f"the configuration differs from rank 0's: {'; '.join(differing)}. Launch the same command from the "
                "same code on every node"
            )
