"""The configuration of a run: frozen dataclasses filled from a recipe YAML and the command line, and batch arithmetic.

Every field is a flag (`--learning_rate 1e-3`) and a key of the YAML; the command line wins. What describes the
hardware (processes, nodes, sharding) is not here: that is Accelerate's file.
"""

import dataclasses
import json
import math
import os
import re
import sys
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from huggingface_hub.utils import HFValidationError, validate_repo_id

from recipe.catalog import DATASETS, is_on_hub, resolve, short_name
from recipe.cli import Help, Parser, Sequences, Switch, flags_of, yaml_flags
from recipe.errors import UserError
from recipe.mixture import BLOCK, counts_of, entries

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_RECIPE = ROOT / "recipe" / "configs" / "shakespeare.yaml"


def _opt(default, help: str):
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ModelConfig:
    """The model's architecture, with GPT-2 124M as the default."""

    _argument_group_name = "Model"  # of --help

    n_layer: int = _opt(12, "transformer blocks")
    n_head: int = _opt(12, "attention heads; must divide n_embd")
    n_embd: int = _opt(768, "width of the residual stream")
    n_positions: int = _opt(1024, "longest sequence the model has position embeddings for, in tokens")
    vocab_size: int = _opt(50257, "tokens of the vocabulary, as many as `tokenizer` has")
    dropout: float = _opt(0.0, "dropout on embeddings, attention and residual branches (GPT-2 used 0.1)")
    init_from: str = _opt("", "directory or Hub id whose weights start the run (empty: random weights)")


@dataclass(frozen=True)
class DataConfig:
    """The text or shards to train on, and how shards are made of text."""

    _argument_group_name = "Data"  # of --help

    dataset_name: str = _opt(
        "",
        f"{', '.join(DATASETS)}; a Hub data set of text (ORG/NAME) or of shards (hf://datasets/ORG/NAME/*.bin); a "
        "file, directory or quoted glob of text; a directory of shards; .bin files (then give val_data too); or a list "
        "of these with weights (docs/data.md)",
    )
    val_data: str = _opt("", "validation shards: directory, file or glob (empty: those of `dataset_name`)")
    train_text: str = _opt(
        "", "text from which the shards in the directory `dataset_name` are made: file, directory, glob or Hub data set"
    )
    dataset_config: str = _opt("", "subset of a Hub data set, such as sample-10BT")
    dataset_split: str = _opt("train", "split of a Hub data set")
    dataset_revision: str = _opt(
        "", "branch, tag or commit of a Hub data set (empty: the newest commit; a run keeps it)"
    )
    dataset_source: str = _opt(
        "", "the data set that .bin files without a manifest are from, for validation too, by its name as above"
    )
    text_column: str = _opt("text", "column, or key of the JSON objects, that holds the text")
    tokenizer: str = _opt(
        "gpt2", "gpt2, or another byte-level BPE of at most 65,536 tokens: a directory, or ORG/NAME on the Hub"
    )
    streaming: bool = _opt(
        False, "make the shards while the model trains, a few ahead, and delete those that it has read"
    )
    disk_budget_gb: float = _opt(10.0, "disk space for streamed shards on each node, in 10^9 bytes")
    val_fraction: float = _opt(0.01, "share of local text that is held out for validation: the end of it")
    val_documents: int = _opt(
        0,
        "hold out this many documents at the start for validation (0: 10,000 of a Hub data set, else val_fraction)",
    )
    shard_tokens: int = _opt(
        100_000_000, "tokens in a shard; the first has a tenth of them, and each one after it twice as many as before"
    )
    sequence_length: int = _opt(1024, "tokens in a sequence")


@dataclass(frozen=True)
class OptimizerConfig:
    """The batch, the optimizer, its schedule and the spike filter."""

    _argument_group_name = "Optimizer"  # of --help

    max_steps: int = _opt(1000, "optimizer steps in the whole run")
    total_batch_tokens: int = _opt(524288, "tokens per optimizer step, over all processes and micro-steps")
    micro_batch_size: Sequences = field(
        default=8,
        metadata={
            "help": "most sequences that a device holds at once; the rest of the batch is accumulated. auto: as many "
            "as fit, found on a GPU with a few trial steps"
        },
    )
    optim: Literal["adamw", "muon"] = _opt("adamw", "muon: for the matrices inside the blocks, AdamW for the rest")
    learning_rate: float = _opt(6e-4, "peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "wsd"] = _opt(
        "cosine", "after the warm-up: a cosine, a straight line, or (wsd) constant and then a straight line"
    )
    decay_fraction: float = _opt(0.2, "share of the steps over which wsd decays, at the end")
    min_lr_fraction: float = _opt(0.0, "the schedule ends at this fraction of the peak")
    warmup_steps: int = _opt(0, "optimizer steps of linear warm-up, of AdamW only: Muon needs none")
    weight_decay: float = _opt(0.1, "AdamW's weight decay, on tensors of two or more dimensions only")
    adam_beta1: float = _opt(0.9, "AdamW's first-moment decay")
    adam_beta2: float = _opt(0.95, "AdamW's second-moment decay")
    adam_epsilon: float = _opt(1e-8, "AdamW's epsilon")
    muon_learning_rate: float = _opt(0.02, "peak learning rate of Muon")
    muon_momentum: float = _opt(0.95, "Muon's momentum; it rises from 0.85 over the first 300 steps")
    muon_weight_decay: float = _opt(0.1, "Muon's weight decay")
    max_grad_norm: float = _opt(1.0, "clip the global gradient norm to this (0: measure it, never clip)")
    skip_loss_z: float = _opt(
        0.0, "skip steps whose loss is this many standard deviations above the last 128 (0: skip none)"
    )
    skip_grad_z: float = _opt(0.0, "the same for the gradient norm")
    max_skipped_steps: int = _opt(
        20,
        "end the run after this many skipped steps in a row (spikes, or gradients that are not finite); checked at "
        "logged steps",
    )

    @property
    def decay_start(self) -> int:
        """The last step of wsd's constant phase, whose checkpoint a longer run can start from; else 0."""
        if self.lr_scheduler_type != "wsd":
            return 0
        return max(self.warmup_steps, self.max_steps - round(self.decay_fraction * self.max_steps))


@dataclass(frozen=True)
class RunConfig:
    """Where and how the run computes, and what it logs, evaluates, saves and uploads."""

    _argument_group_name = "Run"  # of --help

    config: str = _opt(str(DEFAULT_RECIPE.relative_to(ROOT)), "recipe YAML")
    run_name: str = _opt("", "name of the run (empty: the recipe's file name)")
    output_dir: str = _opt("", "directory of the run (empty: runs/<run_name>)")
    seed: int = _opt(1337, "seed of the initial weights, the data order and dropout; below 2^63")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = _opt(
        "auto", "arithmetic of a step (weights and optimizer state stay fp32); auto takes the best that the device has"
    )
    torch_compile: bool = _opt(False, "torch.compile the model")
    torch_compile_mode: Literal["default", "regional", "max-autotune"] = _opt(
        "default",
        "the whole model as one graph; one block, used for all (quick to compile); or the whole model with every "
        "kernel tuned (takes minutes more)",
    )
    gradient_checkpointing: Switch = field(
        default=False,
        metadata={
            "nargs": "?",
            "const": True,
            "help": "recompute activations in the backward pass: less memory, about a quarter slower. auto: unless "
            "micro-batches of 8,192 tokens fit a GPU without",
        },
    )
    loss_chunk_size: int = _opt(0, "positions whose logits are held at once (0: the whole micro-batch)")
    fused_loss: bool = _opt(
        False, "compute the loss and its gradient in one Triton kernel, on CUDA; not yet measured on a GPU"
    )
    logging_steps: int = _opt(10, "steps between lines of metrics.jsonl")
    eval_steps: int = _opt(250, "steps between validations (0: at the end only)")
    eval_tokens: int = _opt(10_485_760, "most tokens in a validation (the same ones every time)")
    save_steps: int = _opt(1000, "steps between checkpoints (0: at the end only)")
    save_total_limit: int = _opt(
        2,
        "how many of the newest checkpoints to keep, besides the best one, milestones and the last before wsd's decay",
    )
    milestone_steps: int = _opt(0, "checkpoints at multiples of this step are never pruned (0: none)")
    push_to_hub: bool = _opt(False, "upload milestones and the final checkpoint to hub_model_id during training")
    hub_model_id: str = _opt("", "ORG/NAME of the repository on the Hub for push_to_hub")
    hub_private_repo: bool = _opt(False, "push_to_hub creates a private repository, and uploads to no public one")
    hub_license: str = _opt("mit", "license of the weights for the model card: the Hub's name for it, or other")
    sample_steps: int = _opt(0, "steps between printed samples of the live model (0: never)")
    sample_prompt: str = _opt("\n", "prompt of the samples during training")
    hellaswag_steps: int = _opt(0, "steps between HellaSwag evaluations of the live model (0: never)")
    hellaswag_limit: int = _opt(0, "rows of HellaSwag in such an evaluation (0: all 10,042)")
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = _opt(
        "none", "tracker that also gets each line of metrics.jsonl"
    )
    fresh: bool = _opt(False, "move an earlier run in output_dir aside and start over")
    device_memory_gb: float = _opt(0.0, "memory that the run may take on a device, in 10^9 bytes (0: all of it)")
    price_per_hour: float = _opt(
        0.0, "dollars per hour for one device, to estimate the price of the run (0: not shown)"
    )
    max_hours: float = _opt(
        0.0, "stop after this many hours (and one step) with a checkpoint; the same command continues (0: no limit)"
    )
    plan_device: str = _opt("", "plan the run for these devices, such as 8xh100, instead of those here, with dry_run")
    dry_run: bool = _opt(False, "print what the run would do and take, and stop")


@dataclass(frozen=True)
class Config:
    """The configuration of a run; `parse_config` makes one and checks it."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    run: RunConfig

    def flat(self) -> dict:
        """All fields as one flat dict of scalars, in the order of their declaration."""
        return {k: v for part in dataclasses.asdict(self).values() for k, v in part.items()}


_PATHS = ("dataset_name", "val_data", "train_text", "tokenizer", "init_from", "output_dir")
_PARTS = (ModelConfig, DataConfig, OptimizerConfig, RunConfig)
FIELDS = {f.name: f for part in _PARTS for f in dataclasses.fields(part)}


def parse_config(argv: list[str] | None = None) -> Config:
    """The run's configuration from `--config FILE` and flags. Raises UserError for whatever is wrong with them."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = Parser(
        _PARTS,
        description="Train GPT-2.",
        usage="%(prog)s [--config RECIPE] [--FIELD VALUE ...]",
        allow_abbrev=False,
        formatter_class=Help,
    )
    words = [word for word in argv if word not in ("-h", "--help")]
    path = _resolve(parser.parse_known_args(words)[0].config)
    recipe = yaml_flags(path, FIELDS.keys() - {"config"})
    parser.parse(recipe, f"{path}: ")
    if words != argv:
        parser.set_defaults(**vars(parser.parse_known_args([*recipe, f"--config={path}"])[0]))
        parser.print_help()
        raise SystemExit(0)
    its, given = parser.parse_known_args(recipe)[0], parser.parse_known_args(argv)[0]
    recipe = _without_replaced_data(recipe, its, given, argv)
    recipe = _without_replaced_choices(recipe, its, given, argv)
    parts = parser.parse([*recipe, *argv])
    return _validated(_with_defaults(Config(*parts), path))


# What a recipe says about its own data set, and about no other.
_OF_ONE_DATA_SET = (
    "dataset_name",
    "val_data",
    "train_text",
    "dataset_config",
    "dataset_split",
    "dataset_revision",
    "dataset_source",
    "text_column",
)


def _without_replaced_data(recipe: list[str], its: Namespace, given: Namespace, argv: list[str]) -> list[str]:
    """The recipe's flags without those about its data set, where the command line names another one."""
    flags = {word.partition("=")[0] for word in argv}
    replaced = [
        getattr(given, name) not in ("", getattr(its, name))
        for name in ("dataset_name", "train_text")
        if f"--{name}" in flags
    ]
    if not any(replaced):
        return recipe
    dropped = set(_OF_ONE_DATA_SET)
    if not (name := given.train_text or given.dataset_name).startswith("[") and not is_on_hub(name):
        dropped.add("streaming")  # what is on this disk is prepared at once
    return [word for word in recipe if word.partition("=")[0].removeprefix("--") not in dropped]


# What an entry of a mixture may say about its data set; the run's own fields hold where it does not.
_OF_AN_ENTRY = (*_OF_ONE_DATA_SET[1:], "streaming", "val_fraction", "val_documents")


@dataclass(frozen=True)
class DataSet:
    """One of the data sets of a run.

    Attributes:
        name: short, and like no other of the run; empty where there is no other.
        count: how many of each 1,000 sequences come from it.
        data: the run's fields, as they are for this data set.
    """

    name: str
    count: int
    data: DataConfig


def data_sets(data: DataConfig) -> list[DataSet]:
    """The data sets of a mixture in its order, or the only one. Raises UserError for a mixture that cannot be one."""
    found = entries(data.dataset_name)
    if found is None:
        return [DataSet("", BLOCK, data)]
    sets: list[DataSet] = []
    for number, (entry, count) in enumerate(zip(found, counts_of(found), strict=True), 1):
        where = f"dataset_name, entry {number} ({entry['name']})"
        parser = Parser((DataConfig,))
        parser.set_defaults(**vars(data))
        (its,) = parser.parse(_flags_of_entry(entry, where), f"{where}: ")
        name = short_name(its.dataset_name)
        unique = f"{name}-{number}" if name in [other.name for other in sets] else name
        sets.append(DataSet(unique, count, its))
    return sets


def _flags_of_entry(entry: dict, where: str) -> list[str]:
    words = flags_of(entry, ("name", "weight", *_OF_AN_ENTRY), where)
    own = [word for word in words if not word.startswith(("--name=", "--weight="))]
    return [f"--dataset_name={entry['name']}", *own]


# What belongs to one value of a field, and to no other.
_OF_A_CHOICE = {
    ("optim", "muon"): ("muon_learning_rate", "muon_momentum", "muon_weight_decay"),
    ("lr_scheduler_type", "wsd"): ("decay_fraction",),
}


def hyperparameters(values: dict) -> list[str]:
    """The fields that, with the data, decide what a run with these `values` (Config.flat) learns; none of an optimizer
    or a schedule that it does not use."""
    unused = [name for (choice, value), names in _OF_A_CHOICE.items() if values.get(choice) != value for name in names]
    of_parts = [f.name for part in (ModelConfig, OptimizerConfig) for f in dataclasses.fields(part)]
    return [name for name in (*of_parts, "sequence_length", "seed") if name not in ("init_from", *unused)]


def _without_replaced_choices(recipe: list[str], its: Namespace, given: Namespace, argv: list[str]) -> list[str]:
    """The recipe's flags without those about an optimizer or a schedule that the command line has replaced."""
    flags, dropped = {word.partition("=")[0] for word in argv}, []
    for (choice, value), names in _OF_A_CHOICE.items():
        if f"--{choice}" in flags and getattr(its, choice) == value != getattr(given, choice):
            dropped += names
    return [word for word in recipe if word.partition("=")[0].removeprefix("--") not in dropped]


def _resolve(config: str) -> Path:
    """A recipe's path, from the working directory or, for those that ship, from anywhere and by name alone."""
    for path in (Path(config), ROOT / config, DEFAULT_RECIPE.parent / f"{config}.yaml"):
        if path.is_file():
            return path
    shipped = ", ".join(sorted(p.stem for p in DEFAULT_RECIPE.parent.glob("*.yaml")))
    raise UserError(f"--config {config}: no such file; recipe/configs/ has {shipped}")


def _with_defaults(config: Config, path: Path) -> Config:
    name = config.run.run_name or path.stem
    output_dir = config.run.output_dir or f"runs/{name}"
    run = dataclasses.replace(config.run, run_name=name, output_dir=output_dir, config=str(path))
    return Config(_with_home(config.model), _located(config.data), config.optimizer, _with_home(run))


def _located(data: DataConfig) -> DataConfig:
    """The data's configuration with the directories of the shards, in a mixture too, instead of names."""
    found = entries(data.dataset_name)
    if found is None:
        data = _with_home(data)
        if data.train_text and not Path(data.train_text).exists() and (ROOT / data.train_text).exists():
            data = dataclasses.replace(data, train_text=str(ROOT / data.train_text))  # text that ships, from anywhere
        source = DATASETS.get(data.dataset_source, (data.dataset_source,))[0]
        return resolve(dataclasses.replace(data, dataset_source=source))
    sets, mixture = data_sets(data), []
    if len(sets) == 1:
        return _located(sets[0].data)
    for entry, its in zip(found, sets, strict=True):
        its = _located(its.data)
        own = {field: getattr(its, field) for field in _OF_AN_ENTRY if getattr(its, field) != getattr(data, field)}
        mixture.append({"name": its.dataset_name, "weight": entry["weight"]} | own)
    return dataclasses.replace(data, dataset_name=json.dumps(mixture))


def _with_home(part):
    """Expands ~ in paths, which a shell does not do in --val_data=~/shards."""
    return dataclasses.replace(part, **{k: os.path.expanduser(v) for k, v in vars(part).items() if k in _PATHS})


_POSITIVE = (
    "n_layer",
    "n_head",
    "n_embd",
    "n_positions",
    "vocab_size",
    "sequence_length",
    "max_steps",
    "total_batch_tokens",
    "logging_steps",
    "eval_tokens",
    "save_total_limit",
    "max_skipped_steps",
    "shard_tokens",
)
_NOT_NEGATIVE = (
    "loss_chunk_size",
    "eval_steps",
    "save_steps",
    "milestone_steps",
    "sample_steps",
    "hellaswag_steps",
    "hellaswag_limit",
    "warmup_steps",
    "weight_decay",
    "muon_weight_decay",
    "max_grad_norm",
    "skip_loss_z",
    "skip_grad_z",
    "seed",
    "val_documents",
    "device_memory_gb",
    "price_per_hour",
    "max_hours",
)
_FRACTIONS = ("dropout", "adam_beta1", "adam_beta2", "muon_momentum", "val_fraction")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise UserError(message)


def _validated(config: Config) -> Config:
    """`config` as it is. Raises UserError for a value that no run can have, and for values that exclude each other."""
    sets = data_sets(config.data)
    _check_mixture(config.data, sets)
    each = [dataclasses.replace(config, data=one.data) for one in sets]
    for its in each:
        _check_ranges(its)
    _check_architecture_and_schedule(config)
    for its in each:
        _check_names(its)
    return config


def _check_mixture(data: DataConfig, sets: list[DataSet]) -> None:
    if len(sets) < 2:
        return
    for name in _OF_ONE_DATA_SET[1:]:
        _require(
            getattr(data, name) == FIELDS[name].default,
            f"{name} applies to one data set, but dataset_name lists {len(sets)}; move it into an entry",
        )
    seen: set[Path] = set()
    for one in sets:
        name = one.data.dataset_name
        _require(
            (path := Path(name).resolve()) not in seen,
            f"dataset_name lists {name} twice; remove one of the two, and give the other their weight",
        )
        seen.add(path)


def _check_ranges(config: Config) -> None:
    values = config.flat()
    for name, value in values.items():
        _require(not isinstance(value, float) or math.isfinite(value), f"{name} is {value}; it must be a finite number")
        _require(not isinstance(value, int) or value < 2**63, f"{name} is {value}; it must be below 2^63")
    for name in _POSITIVE:
        _require(values[name] > 0, f"{name} is {values[name]}; it must be at least 1")
    for name in _NOT_NEGATIVE:
        _require(values[name] >= 0, f"{name} is {values[name]}; it must not be negative")
    for name in ("learning_rate", "muon_learning_rate", "disk_budget_gb"):
        _require(values[name] > 0, f"{name} is {values[name]}; it must be above 0")
    for name in _FRACTIONS:
        _require(0 <= values[name] < 1, f"{name} is {values[name]}; it must be at least 0 and below 1")
    rate = config.optimizer.min_lr_fraction
    _require(0 <= rate <= 1, f"min_lr_fraction is {rate}; it must be between 0 and 1")
    share = config.optimizer.decay_fraction
    _require(0 < share <= 1, f"decay_fraction is {share}; it must be above 0, and at most 1")


def _check_architecture_and_schedule(config: Config) -> None:
    model, data, opt = config.model, config.data, config.optimizer
    _require(
        model.n_embd % model.n_head == 0,
        f"n_embd {model.n_embd} is not a multiple of n_head {model.n_head}; nearest valid n_embd: "
        + _listed((max(2, model.n_embd // model.n_head) + k) * model.n_head for k in (-1, 0, 1)),
    )
    _require(
        data.sequence_length <= model.n_positions,
        f"sequence_length {data.sequence_length} is longer than n_positions {model.n_positions}; raise n_positions "
        "or shorten the sequences",
    )
    _require(
        opt.warmup_steps < opt.max_steps,
        f"warmup_steps {opt.warmup_steps} must be below max_steps {opt.max_steps}; shorten the warm-up",
    )
    for (choice, value), names in _OF_A_CHOICE.items():
        for name in names:
            _require(
                getattr(opt, choice) == value or getattr(opt, name) == FIELDS[name].default,
                f"{name} is for {choice} {value}, but {choice} is {getattr(opt, choice)}; remove {name}, or set "
                f"{choice} to {value}",
            )
    if opt.total_batch_tokens % data.sequence_length:
        raise UserError(
            f"total_batch_tokens {opt.total_batch_tokens} is not a multiple of sequence_length {data.sequence_length}; "
            f"nearest valid: {_nearest_batches(config, int(os.environ.get('WORLD_SIZE', 1)))}"
        )


def _check_names(config: Config) -> None:
    data, run = config.data, config.run
    for name in _PATHS:  # a URL would become the name of a directory
        value = config.flat()[name]
        _require(
            "://" not in value or (name in ("dataset_name", "train_text") and value.startswith("hf://")),
            f"{name} {value} is a URL, which is not read; download it and give the path, or name a Hub repository",
        )
    _require(bool(data.dataset_name), "dataset_name is empty; give a directory of shards or a glob of .bin files")
    if data.dataset_source:
        check_repo_name(data.dataset_source, "dataset_source")
        _require(
            not data.train_text, f"dataset_source is for .bin files, and the data are {data.train_text}; remove it"
        )
    names_text = bool(data.train_text) and not set("*?[") & set(data.dataset_name)
    _require(
        names_text or not data.streaming,
        f"streaming needs text, and dataset_name {data.dataset_name} is not text; name a data set, or give train_text",
    )
    _require(
        re.fullmatch(r"[\w][\w.-]*", run.run_name) is not None,
        f"run_name {run.run_name!r} must be letters, digits, '.', '_' and '-' only; use output_dir for a path",
    )
    _require(run.dry_run or not run.plan_device, "plan_device is for a plan of a run; pass --dry_run too")
    _require(bool(run.hub_model_id) or not run.push_to_hub, "push_to_hub needs hub_model_id, ORG/NAME on the Hub")
    if run.hub_model_id:
        check_repo_name(run.hub_model_id, "hub_model_id")


def check_repo_name(name: str, field: str) -> None:
    """Raises UserError where `name` cannot be the ORG/NAME of a repository on the Hub."""
    try:
        validate_repo_id(name)
        ok = re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII) is not None
    except HFValidationError:
        ok = False
    if not ok:
        raise UserError(f"{field} {name!r} must be ORG/NAME: letters, digits, '.', '_' and '-', with one slash")


@dataclass(frozen=True)
class Due:
    """What is due at a step boundary, after so many optimizer steps."""

    last: bool
    log: bool
    eval: bool
    save: bool
    hellaswag: bool
    sample: bool


def due_at(step: int, config: Config) -> Due:
    """What is due after `step` optimizer steps. Everything that the run does at all is due after the last one; nothing
    is saved before the first, nor is HellaSwag scored, which would only show chance. The first step is logged too, so
    that a user sees early that the run trains."""
    run, last = config.run, step == config.optimizer.max_steps

    def every(steps: int) -> bool:
        return last or (steps > 0 and step % steps == 0)

    return Due(
        last=last,
        log=step == 1 or every(run.logging_steps),
        eval=every(run.eval_steps),
        save=step > 0 and (every(run.save_steps) or step == config.optimizer.decay_start),
        hellaswag=step > 0 and run.hellaswag_steps > 0 and every(run.hellaswag_steps),
        sample=run.sample_steps > 0 and every(run.sample_steps),
    )


@dataclass(frozen=True)
class Batch:
    """How an optimizer step's sequences are divided: sequences = world x accumulation x micro.

    `micro` is what a process takes at once; it divides that evenly over its `devices`.
    """

    sequences: int
    world: int
    micro: int
    accumulation: int
    devices: int = 1

    def slice(self, micro_step: int, rank: int) -> tuple[int, int]:
        """[lo, hi) of the step's sequences that `rank` takes in `micro_step`."""
        lo = (micro_step * self.world + rank) * self.micro
        return lo, lo + self.micro


def batch_arithmetic(config: Config, world: int, devices: int = 1) -> Batch:
    """Derives accumulation for `world` processes that feed `devices` devices each; the only place that does.

    A device whose share of the step is smaller than micro_batch_size takes that share at once. Raises UserError,
    with the nearest valid batches, where the step does not divide.
    """
    opt, length = config.optimizer, config.data.sequence_length
    sequences = opt.total_batch_tokens // length
    replicas = world * devices
    micro = _micro(config, sequences, replicas)
    accumulation, rest = divmod(sequences, replicas * micro)
    if rest:
        unit = replicas * micro * length
        noun = "process" if devices == 1 else "device"
        ending = {"process": "es", "device": "s"}[noun] if replicas > 1 else ""
        raise UserError(
            f"total_batch_tokens {opt.total_batch_tokens} is not a multiple of {replicas} {noun}{ending} x "
            f"micro_batch_size {micro} x sequence_length {length} = {unit}; "
            f"nearest valid: {_nearest_batches(config, replicas)}"
        )
    return Batch(sequences, world, micro * devices, accumulation, devices)


def _micro(config: Config, sequences: int, replicas: int) -> int:
    wanted = config.optimizer.micro_batch_size or 1  # auto that estimate/micro_batch.py has not resolved yet
    return min(wanted, max(1, sequences // replicas))


def _nearest_batches(config: Config, replicas: int) -> str:
    """The three nearest total_batch_tokens that divide, and for which nothing else is wrong afterwards."""
    value, length = config.optimizer.total_batch_tokens, config.data.sequence_length
    center, reach = value // length, 3 * replicas * (config.optimizer.micro_batch_size or 1)
    near = range(max(1, center - reach), center + reach + 1)
    valid = [n * length for n in near if n % (replicas * _micro(config, n, replicas)) == 0]
    return _listed(sorted(sorted(valid, key=lambda tokens: abs(tokens - value))[:3]))


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


if __name__ == "__main__":  # for the Makefile, which samples from the run that it has just made
    print(parse_config().run.output_dir)
