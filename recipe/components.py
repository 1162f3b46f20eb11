"""The components of the training loop: built, restored from a checkpoint, and closed."""

import logging
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

import torch

from recipe.checkpoint.format import Checkpoint, load_checkpoint, newest_state, verify
from recipe.checkpoint.manager import CheckpointManager
from recipe.checkpoint.provenance import code_sha256
from recipe.checkpoint.run_dir import check_same_run, continue_from, run_directory, set_aside
from recipe.config import DEFAULTS, UNDECIDED, BatchPlan, Config, data_sets, entries_in, hyperparameters
from recipe.config.catalog import SHARD_FIELDS, is_text
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
from recipe.monitor.metrics import Metrics, time_to_decay
from recipe.optim.optimizer import make_optimizer
from recipe.utils.checkpoints import checkpoints, manifest_of, step_of, val_losses
from recipe.utils.errors import Unreachable, UserError, is_transient
from recipe.utils.processes import Processes
from recipe.utils.redaction import redacted

logger = logging.getLogger(__name__)

_SHARED = "output_dir must be on a file system that all nodes share"
# Paths, which may differ between nodes, and the run's name, which may be output_dir's.
_PATH_FIELDS = {"config", "dataset_name", "val_data", "val_text", "train_text", "init_from", "output_dir", "run_name"}


@dataclass(frozen=True)
class Components:
    """What the training loop uses, ready to run."""

    strategy: Strategy  # device, processes, how a step is taken
    model: torch.nn.Module  # prepared
    optimizer: torch.optim.Optimizer  # prepared
    batches: BatchLoader  # this process's micro-batches from `first_step` on, (micro, T + 1), int64, on the device
    metrics: Metrics  # loss, throughput, metrics.jsonl, progress bar, tracker
    evaluator: Evaluator  # validation loss, HellaSwag and samples
    checkpoints: CheckpointManager  # saves the state of all of these
    first_step: int  # optimizer steps already taken, 0 in a new run

    def check_data_errors(self, step: int, saved: bool) -> None:
        """Raises UserError, on all processes, if the run stopped because one of them could not read its data. If a
        restart may help, and the run has taken steps since its start, the error is only logged, and the run ends like
        one that was stopped: the same command continues. A collective call."""
        error = self.batches.error()
        report = error and (str(error), is_transient(error))
        reports = [r for r in self.strategy.runtime.processes.gather_objects(report) if r]
        if reports and step > self.first_step and all(may_pass for _, may_pass in reports):
            logger.warning("data       %s", reports[0][0])
        elif reports:
            cause = error or "another process cannot read its data; see its error message"
            raise UserError(f"{cause}{'' if saved else '; the last checkpoint could not be written either'}")


@contextmanager
def open_components(
    config: Config, batch: BatchPlan, strategy: Strategy, descriptor: int, checkpoint: Checkpoint | None
) -> Generator[Components, None, None]:
    """Builds the components from the configuration, or restores them from `checkpoint`; `descriptor` is that of
    `run_directory`, on the main process. A collective call. Raises UserError."""
    step, state = (checkpoint.step, checkpoint.state) if checkpoint else (0, {})
    with ExitStack() as stack:
        processes = strategy.runtime.processes
        datasets = open_datasets(config, batch, processes, step, state.get("data"))
        train_data, val_data = stack.enter_context(datasets)
        if checkpoint:
            check_same_data(state["data"], train_data.state_dict(), config.data.dataset_name)
        raw_model, model, optimizer = _model_and_optimizer(config, batch, strategy, checkpoint)
        steps, device = range(step, config.optimizer.max_steps), strategy.device
        batches = BatchLoader(train_data, batch, processes.rank, steps, to_device=device.put, pin=device.type == "cuda")
        is_rewound = checkpoint is not None and processes.is_main and set_aside(checkpoint)
        metrics = Metrics(config, strategy, batches, step, is_rewound=is_rewound)
        stateful = {
            "data": train_data,
            "metrics": metrics,
            "tracker": metrics.tracker,
            "spike_filter": strategy.spike_filter,
            "grad_scaler": strategy.grad_scaler,
        }
        if is_rewound:
            state = state | {"tracker": {}}  # a tracker accepts each step once: log the repeated steps as a new run
        for name, component in stateful.items():
            if state.get(name):  # empty without a loss scale, and in a new run
                component.load_state_dict(state[name])
        stack.enter_context(batches)  # starts prefetching, which verifies files against the restored checksums
        stack.enter_context(metrics.open())
        trained = raw_model, optimizer
        checkpoints = CheckpointManager(config, strategy, trained, stateful, metrics, descriptor, checkpoint)
        stack.callback(checkpoints.join)
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
    """The model, the prepared model and its prepared optimizer. Weights are loaded before `prepare` and optimizer state
    after it, so that a checkpoint loads under any strategy and number of processes."""
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
        # They are mapped from its files: one that is pruned would keep its disk space.
        checkpoint.weights.clear()
        checkpoint.optimizer_state.clear()
    return raw_model, model, optimizer


def check_initial_weights(config: Config, processes: Processes) -> None:
    """Raises UserError, on all processes, if a new run could not start from its `init_from`: before its text is
    prepared, which may take hours. A dry run checks it with its other inputs. A collective call."""
    with processes.shared_error("init_from cannot be loaded"):
        if processes.is_main and not (config.run.dry_run or newest_state(config.run)):
            check_init_from(config)


def check_inputs(config: Config, batch: BatchPlan, processes: Processes) -> None:
    """Raises UserError, on all processes, if the run could not open its data or `init_from`. What is on the Hub is not
    checked without a network. A collective call."""
    steps = 0 if config.undecided else config.optimizer.max_steps
    checks: list[Callable[[], None]] = [partial(check_dataset, entry, batch, steps) for entry in data_sets(config.data)]
    if config.run.dry_run:  # else check_initial_weights has done it
        checks.append(partial(check_init_from, config))
    with processes.shared_error("the inputs cannot be read"):
        for check_input in checks if processes.is_main else []:
            try:
                check_input()
            except Unreachable as error:
                logger.warning("note       not checked: %s", error)


@contextmanager
def open_run_directory(config: Config, processes: Processes) -> Generator[tuple[int, Checkpoint | None], None, None]:
    """Context: the run's directory, locked by the main process unless it is a dry run. Yields its descriptor, on the
    main process, and the checkpoint from which the run continues, which the main process chooses and verifies
    for all. A collective call. Raises UserError, on all processes."""
    run_dir, flat = Path(config.run.output_dir), redacted(config.flat())
    with ExitStack() as stack:
        descriptor, path, sums, newest = -1, None, {}, -1  # on the other processes, and in a dry run
        with processes.shared_error("the run's directory cannot be opened"):
            if processes.is_main:
                if not config.run.dry_run:
                    descriptor = stack.enter_context(run_directory(run_dir, fresh=config.run.fresh))
                path = continue_from(run_dir, flat, locked=not config.run.dry_run)
                sums = manifest_of(path) if path else {}
                newest = max(map(step_of, checkpoints(run_dir)), default=-1)
        path, sums, newest = processes.broadcast_object((path, sums, newest))
        with processes.shared_error(f"{path or run_dir} cannot be used"):
            if not processes.is_main and processes.local_rank == 0:
                # Where each node has its own directory, this node may have been the first one before a restart.
                newer = [] if config.run.fresh else [p for p in checkpoints(run_dir) if step_of(p) > newest]
                if newer:
                    raise Unreachable(f"{newer[-1]} is not on rank 0's node: {_SHARED}")
                if path:
                    _check_same_checkpoint(path, sums)
        if path is None:
            yield descriptor, None
            return
        checkpoint = load_checkpoint(path)
        check_same_run(checkpoint.state, flat, open_tokenizer(config.data.tokenizer), run_dir)
        if checkpoint.step < config.optimizer.max_steps:
            logger.info("resume     from step %d (%s)", checkpoint.step, path)
        yield descriptor, checkpoint


def _check_same_checkpoint(path: Path, sums: dict) -> None:
    """Raises UserError if this node does not see, at `path`, the intact checkpoint whose checksums are `sums`."""
    if not path.exists():  # Unreachable: a restart may find it, where a file system shows a new file late
        raise Unreachable(f"{path} is not on every node: {_SHARED}")
    if manifest_of(path) != sums:
        raise UserError(f"{path} is another one on this node: {_SHARED}")
    if problems := verify(path):
        raise UserError(f"{path} is damaged on this node: {problems[0]}")


def log_if_complete(config: Config, processes: Processes, checkpoint: Checkpoint | None) -> bool:
    """Logs that training is finished if the last step is saved and evaluated; returns whether it is. A collective call.
    Raises UserError if the run was trained with other hyperparameters or on other data."""
    if checkpoint is None or checkpoint.step < config.optimizer.max_steps:
        return False
    is_evaluated = checkpoint.step in val_losses(Path(config.run.output_dir))
    complete = checkpoint.step > config.optimizer.max_steps or processes.broadcast_object(is_evaluated)
    if complete:
        with processes.shared_error("the complete run differs"):
            if difference := _difference(config, checkpoint.state):
                raise UserError(
                    f"the run in {config.run.output_dir} is complete, but {difference}; choose another run_name, or "
                    "start over with --fresh"
                )
        length = "train_hours" if config.run.train_hours else "max_steps or --num_train_epochs"
        message = "complete   training is finished (%s); raise --%s to train longer, or start over with --fresh"
        logger.info(message, checkpoint.path, length)
    return complete


def _difference(config: Config, state: dict) -> str:
    """How the hyperparameters or the data of a complete run, by its trainer state, differ from the configuration's;
    empty if they do not. Compares the names of the data or, since shards may move, the shards; for local text also its
    files, by size and checksum or time. Prepares and streams nothing."""
    entries = data_sets(config.data)
    saved, flat = DEFAULTS | state["config"], redacted(config.flat())
    changes = {name: f"{name} {saved[name]!r}, not {flat[name]!r}" for name in DEFAULTS if saved[name] != flat[name]}
    # More steps would continue it, fewer it has taken; the micro-batch changes nothing but rounding.
    names = {*hyperparameters(flat)} - {"max_steps", "micro_batch_size"}
    if changed := sorted(names & changes.keys()):
        return f"was trained with {', '.join(changes[name] for name in changed)}"
    split = [name for name in (*SHARD_FIELDS, "val_data") if name in changes]
    # With val_data, whatever it names, nothing of a text is held out.
    same_split = not {*split} - {"val_data"} and bool(saved["val_data"]) == bool(flat["val_data"])
    is_same_text = _texts(saved) == _texts(flat) and same_split
    if "dataset_name" not in changes or is_same_text:  # whatever its shards are called now
        for entry, source in zip(entries, entries_in(state["about"][-1]["data"]), strict=True):
            if source.get("files") and is_text(entry.data.train_text):
                identity = redacted(open_text(entry.data).identity())
                if any(identity.get(name) != source.get(name) for name in ("files", "files_sha256")):
                    return f"{entry.data.train_text} has changed since then"
        return ""
    try:
        check_same_data(state["data"], state_on_disk(config.data), "")
    except UserError:
        if "train_text" not in changes and split:  # another split of the same text
            return f"was trained with {', '.join(changes[name] for name in split)}"
        names = ", ".join(entry.data.train_text or entry.data.dataset_name for entry in entries)
        return f"was trained on {saved['dataset_name']}, not on {names}"
    return ""


def _texts(config: dict) -> list[dict]:
    """The data sets of a flat configuration: those of a text without the name of their shards."""
    name = config["dataset_name"]
    entries = [{"name": name, "train_text": config["train_text"]}] if isinstance(name, str) else name
    return [entry | {"name": ""} if entry.get("train_text") else entry for entry in entries]


def with_vocabulary(config: Config, processes: Processes) -> Config:
    """The configuration with the vocabulary size of its tokenizer, which each node's first process loads first. A
    collective call. Raises UserError, on all processes."""
    tokenizer = processes.in_turns(lambda: open_tokenizer(config.data.tokenizer), "the tokenizer cannot be loaded")
    return config.replace(vocab_size=tokenizer.vocab_size)


def with_steps(config: Config, processes: Processes, *, decay_due: bool = False) -> Config:
    """The configuration with its max_steps: from `num_train_epochs`, for which the data are prepared, or from
    `train_hours`, UNDECIDED until its decay is due. `decay_due`: the run's clock has stopped it for the decay. A
    collective call. Raises UserError, on all processes."""
    if config.run.train_hours:
        steps = processes.broadcast_object(_steps_of_hours(config, decay_due) if processes.is_main else None)
        return config.replace(max_steps=steps)
    if not (epochs := config.run.num_train_epochs):
        return config
    windows = processes.in_turns(lambda: training_windows(config), "the data cannot be prepared")
    steps = max(1, ceil(epochs * windows / (config.optimizer.total_batch_tokens // config.data.sequence_length)))
    config = config.replace(max_steps=steps, num_train_epochs=0.0)
    check(config)
    return config


def _steps_of_hours(config: Config, decay_due: bool) -> int:
    """The max_steps of a run of train_hours: UNDECIDED until the decay is due, by the clock in the newest checkpoint
    or, since an evaluation may have followed that save, by `decay_due`. Every checkpoint after the decision has it."""
    state, hours = newest_state(config.run), config.run.train_hours
    saved_hours, saved_steps = (state.get("config", {}).get(name, 0) for name in ("train_hours", "max_steps"))
    if hours <= saved_hours and saved_steps != UNDECIDED:  # a shorter train_hours changes nothing now
        return saved_steps
    if hours == saved_hours and (decay_due or time_to_decay(state["metrics"], config)):
        return config.optimizer.ending_after(state["step"])
    return UNDECIDED


def check_same_launch(config: Config, strategy: Strategy) -> None:
    """Raises UserError, on all processes, if one was launched with a configuration or code that differs from rank 0's.
    A collective call."""
    settings = {k: v for k, v in redacted(config.flat()).items() if k not in _PATH_FIELDS}
    settings["dataset_name's weights"] = [entry.count for entry in data_sets(config.data)]
    launch = strategy.runtime.method
    settings |= {"launch": launch, "precision": strategy.device.precision, "torch": torch.__version__}
    settings["code"] = code_sha256()[:8]
    rank0 = strategy.runtime.processes.broadcast_object(settings)
    differences = [f"{k} {v!r} here, {rank0.get(k)!r} on rank 0" for k, v in settings.items() if v != rank0.get(k)]
    with strategy.runtime.processes.shared_error("the configuration differs"):
        if differences:
            raise UserError(
                f"the configuration differs from rank 0's: {'; '.join(differences)}. Launch the same command from the "
                "same code on every node"
            )


def check_supported(config: Config, strategy: Strategy) -> None:
    """Raises UserError if the optimizer, its spike filter or the fused loss is not supported here, or if an automatic
    restart would start the run or its max_hours over."""
    run, optim, supported = config.run, config.optimizer.optim, strategy.runtime.optimizers
    z_limits = [name for name in ("skip_loss_z", "skip_grad_z") if getattr(config.optimizer, name)]
    if z_limits and strategy.runtime.sharding.startswith("zero"):
        raise UserError(
            f"{z_limits[0]} is not supported under ZeRO, whose step computes the norm and updates the weights in one "
            "call; remove it, or launch with accelerate_configs/ddp.yaml"
        )
    if supported and optim not in supported:
        raise UserError(
            f"optim {optim} is not supported on {strategy}; launch with accelerate_configs/ddp.yaml or single.yaml, or "
            f"choose --optim {' or '.join(supported)} and its learning rate"
        )
    has_kernel = strategy.device.type == "cuda" if run.plan_device else can_fuse(strategy.device.type)
    if run.fused_loss is True and not has_kernel:
        raise UserError("fused_loss true needs a CUDA GPU and Triton; use auto")
    restarts = max_restarts()
    if run.fresh and restarts:
        raise UserError(
            f"--fresh would start over at each automatic restart (--max_restarts {restarts}); remove one of the two, "
            f"or move {run.output_dir} away"
        )
    if run.max_hours and restarts:  # a run that stops ends with an exit code that torchrun takes for a failure
        raise UserError(
            f"max_hours would start counting again at each automatic restart (--max_restarts {restarts}; RESTARTS in "
            "slurm.sbatch); remove one of the two"
        )
