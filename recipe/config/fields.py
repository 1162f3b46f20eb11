"""The fields of a run's configuration, as frozen dataclasses: each with its help, its unit and its limits.

Every field is a flag (`--learning_rate 1e-3`) and a key of a recipe's YAML (parse.py). Accelerate's file has the rest.
"""

import dataclasses
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = ROOT / "recipe" / "configs" / "shakespeare.yaml"
AUTO = "auto"
# name: (Hub data set, subset)
DATASETS = {
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
    "fineweb": ("HuggingFaceFW/fineweb", "sample-10BT"),
    "openwebtext": ("Skylion007/openwebtext", ""),
    "tinystories": ("roneneldan/TinyStories", ""),
}
UNDECIDED = 10**9  # max_steps of a run of train_hours whose decay has not begun
MIXTURE_PERIOD = 1000  # sequences over which the shares of a mixture are exact


def setting(default, help: str, *, path: bool = False, only: tuple[str, str] | None = None, **limits: float):
    """A field that users set.

    `limits` are min, above, max and below (values.py). `path`: it may be that of a file, so ~ is expanded. `only` is
    the other field, with its value, without which this one has no meaning.
    """
    return dataclasses.field(default=default, metadata={"help": help, "path": path, "only": only, "limits": limits})


@dataclass(frozen=True)
class ModelConfig:
    """The model's architecture, with GPT-2 124M as the default."""

    n_layer: int = setting(12, "transformer blocks", min=1)
    n_head: int = setting(12, "attention heads; must divide n_embd", min=1)
    n_embd: int = setting(768, "width of the residual stream", min=1)
    n_positions: int = setting(1024, "longest sequence that has position embeddings, in tokens", min=1)
    dropout: float = setting(0.0, "dropout on embeddings, attention and residuals (GPT-2 used 0.1)", min=0, below=1)
    init_from: str = setting("", "directory or Hub id of weights to start from (empty: random ones)", path=True)
    vocab_size: int = 50257  # derived from the tokenizer


@dataclass(frozen=True)
class DataConfig:
    """The text or shards to train on, and how shards are made of text."""

    dataset_name: str = setting(
        "",
        f"{', '.join(DATASETS)}, a Hub data set (ORG/NAME), text or shards on this disk, or a list of these with "
        "weights (docs/data.md)",
        path=True,
    )
    val_data: str = setting("", "validation shards: directory, file or glob (empty: dataset_name's)", path=True)
    train_text: str = setting("", "text for the shards in the directory dataset_name, if it is elsewhere", path=True)
    dataset_config: str = setting("", "subset of a Hub data set, such as sample-10BT")
    dataset_split: str = setting("train", "split of a Hub data set")
    dataset_revision: str = setting("", "branch, tag or commit on the Hub (empty: the newest; a run keeps it)")
    dataset_source: str = setting("", "the data set that .bin files without a manifest are from, by its name as above")
    text_column: str = setting("text", "column, or key of the JSON objects, that holds the text, or ids of its tokens")
    tokenizer: str = setting("gpt2", "gpt2, or the directory or Hub id of a byte-level BPE", path=True)
    streaming: bool = setting(False, "make shards while the model trains, a few ahead, and delete those it has read")
    disk_budget_gb: float = setting(10.0, "disk space for streamed shards on each node, in 10^9 bytes", above=0)
    val_fraction: float = setting(0.01, "share of local text that is held out for validation: its end", min=0, below=1)
    val_documents: int = setting(
        0, "validate on this many documents at the start (0: 10,000 of a Hub data set, else val_fraction)", min=0
    )
    shard_tokens: int = setting(100_000_000, "tokens in a shard; the first ones have fewer", min=1, below=2**31)
    sequence_length: int = setting(1024, "tokens in a sequence", min=1)
    mixture: tuple["MixtureEntry", ...] = ()  # derived from dataset_name where that is a list; it is then empty


# The fields that decide the shapes of a model's tensors, under the names that transformers gives them.
SHAPE_FIELDS = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
# What a recipe says, besides dataset_name, about its own data set, and about no other.
OF_ONE_DATA_SET = (
    *("val_data", "train_text", "dataset_config", "dataset_split", "dataset_revision", "dataset_source"),
    "text_column",
)
# What an entry of a mixture may say about its data set; the run's own fields hold where it does not.
OF_AN_ENTRY = (*OF_ONE_DATA_SET, "streaming", "val_fraction", "val_documents")


@dataclass(frozen=True)
class Entry:
    """How an entry of a mixture names its data set, and how much of the mixture that is."""

    name: str = setting("", "as dataset_name", path=True)
    weight: float = setting(0.0, "in proportion to the other weights", min=0)


@dataclass(frozen=True)
class MixtureEntry:
    """One of the data sets of a run.

    Attributes:
        name: short, and unique within the run; empty where there is only one data set.
        count: how many of each 1,000 sequences come from it.
        data: the run's fields, as they are for this data set.
    """

    name: str
    count: int
    data: DataConfig

    @property
    def share(self) -> float:
        """Which part of the run's sequences come from it."""
        return self.count / MIXTURE_PERIOD


def data_sets(data: DataConfig) -> list[MixtureEntry]:
    """The data sets of a mixture in its order, or the only one."""
    return list(data.mixture) or [MixtureEntry("", MIXTURE_PERIOD, data)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The batch, the optimizer, its schedule and the spike filter."""

    max_steps: int = setting(1000, "optimizer steps in the run", min=1)
    total_batch_tokens: int = setting(524288, "tokens per optimizer step, over all processes and micro-steps", min=1)
    micro_batch_size: int | Literal["auto"] = setting(8, "sequences on a device at once; auto: as many as fit", min=1)
    optim: Literal["adamw", "muon"] = setting("adamw", "muon: for the matrices inside the blocks, AdamW for the rest")
    learning_rate: float = setting(6e-4, "peak learning rate of AdamW", above=0)
    matrix_learning_rate: float = setting(
        0.0, "the same for the matrices inside the blocks (0: learning_rate)", only=("optim", "adamw"), min=0
    )
    lr_scheduler_type: Literal["cosine", "linear", "wsd"] = setting(
        "cosine", "after the warm-up; wsd is constant and then linear"
    )
    decay_fraction: float = setting(
        0.2, "share of the steps over which wsd decays, at the end", only=("lr_scheduler_type", "wsd"), above=0, max=1
    )
    min_lr_fraction: float = setting(0.0, "the schedule ends at this fraction of the peak", min=0, max=1)
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up, of AdamW only: Muon needs none", min=0)
    weight_decay: float = setting(0.1, "AdamW's weight decay, on tensors of two or more dimensions only", min=0)
    adam_beta1: float = setting(0.9, "AdamW's first-moment decay", min=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW's second-moment decay", min=0, below=1)
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon", only=("optim", "muon"), above=0)
    muon_weight_decay: float = setting(0.1, "Muon's weight decay", only=("optim", "muon"), min=0)
    max_grad_norm: float = setting(1.0, "clip the global gradient norm to this (0: measure it, never clip)", min=0)
    skip_loss_z: float = setting(
        0.0, "skip steps whose loss is this many standard deviations above the last 128 (0: none)", min=0
    )
    skip_grad_z: float = setting(0.0, "the same for the gradient norm", min=0)

    def ending_after(self, step: int) -> int:
        """The max_steps with which wsd's decay begins at `step`, or at the end of the warm-up."""
        step = max(step, self.warmup_steps)
        steps = count(int(step / (1 - self.decay_fraction)))
        return next(n for n in steps if n - round(self.decay_fraction * n) >= step)

    @property
    def decay_start(self) -> int:
        """The last step of wsd's constant phase, whose checkpoint a longer run can start from; else 0."""
        if self.lr_scheduler_type != "wsd":
            return 0
        return max(self.warmup_steps, self.max_steps - round(self.decay_fraction * self.max_steps))


@dataclass(frozen=True)
class RunConfig:
    """Where and how the run computes, and what it logs, evaluates, saves and uploads."""

    config: str = setting(str(DEFAULT_RECIPE.relative_to(ROOT)), "recipe YAML")
    run_name: str = setting("", "name of the run (empty: the recipe's file name)")
    output_dir: str = setting("", "directory of the run (empty: runs/<run_name>)", path=True)
    seed: int = setting(1337, "seed of the initial weights, the data order and dropout", min=0, below=2**63)
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = setting(
        "auto", "arithmetic of a step (weights and optimizer state stay fp32); auto: the best that the device has"
    )
    deterministic: bool = setting(
        False,
        "two runs on one GPU are equal to the bit, at some cost; on a CPU they always are (push_to_hub state: true)",
    )
    torch_compile: bool = setting(False, "torch.compile the model")
    torch_compile_mode: Literal["default", "regional", "max-autotune"] = setting(
        "default", "compile the model; one block, used for all (quick); or the model with every kernel tuned (slow)"
    )
    gradient_checkpointing: bool | Literal["auto"] = setting(
        False, "recompute activations in the backward pass: less memory, slower. auto: only where it helps to fit"
    )
    loss_chunk_size: int = setting(0, "positions whose logits are held at once (0: all of the micro-batch)", min=0)
    fused_loss: bool | Literal["auto"] = setting(
        "auto", "one Triton kernel for the loss and its gradient, on CUDA; auto: where a trial finds it right and fast"
    )
    logging_steps: int = setting(10, "steps between lines of metrics.jsonl", min=1)
    eval_steps: int | Literal["end"] = setting(250, "steps between validations; the last step has one, too", min=1)
    eval_tokens: int = setting(10_485_760, "most tokens in a validation (the same ones every time)", min=1)
    save_steps: int | Literal["end"] = setting(1000, "steps between checkpoints; the last step has one, too", min=1)
    save_total_limit: int = setting(2, "newest checkpoints to keep, besides the best and milestones", min=1)
    milestone_steps: int = setting(0, "checkpoints at multiples of this step are never pruned (0: none)", min=0)
    push_to_hub: bool | Literal["state"] = setting(
        False,
        "upload milestones and the final checkpoint to hub_model_id during training; state: all their files "
        "and metrics.jsonl, so that others can audit the run",
    )
    hub_model_id: str = setting("", "ORG/NAME of the repository on the Hub for push_to_hub")
    hub_private_repo: bool = setting(False, "push_to_hub creates a private repository, and uploads to no public one")
    hub_license: str = setting("mit", "license of the weights for the model card: the Hub's name for it, or other")
    sample_steps: int | Literal["end"] = setting(0, "steps between printed samples of the live model (0: never)", min=0)
    sample_prompt: str = setting("", "what the samples continue, several prompts on a line each (empty: a line break)")
    hellaswag_steps: int | Literal["end"] = setting(
        0, "steps between HellaSwag evaluations of the live model (0: never)", min=0
    )
    hellaswag_limit: int = setting(0, "rows of HellaSwag in such an evaluation (0: all 10,042)", min=0)
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = setting("none", "tracker of the logged metrics")
    num_train_epochs: float = setting(0.0, "passes over the prepared training data, in place of max_steps", min=0)
    train_hours: float = setting(
        0.0,
        "train, validate and save for so long, stops not counted, in place of max_steps: the decay begins in time",
        only=("lr_scheduler_type", "wsd"),
        min=0,
    )
    fresh: bool = setting(False, "move an earlier run in output_dir aside and start over")
    max_hours: float = setting(0.0, "stop with a checkpoint after this many hours (0: no limit)", min=0)
    price_per_hour: float = setting(0.0, "dollars an hour of all devices, for the cost in the plan", min=0)
    dry_run: bool | str = setting(False, "print what the run would do and take, here or on devices such as 8xh100")

    @property
    def plan_device(self) -> str:
        """The devices that a dry run plans for; empty for those here."""
        return self.dry_run if isinstance(self.dry_run, str) else ""


PARTS = {"Model": ModelConfig, "Data": DataConfig, "Optimizer": OptimizerConfig, "Run": RunConfig}  # --help's groups
FIELDS = {field.name: field for part in PARTS.values() for field in dataclasses.fields(part) if field.metadata}
LENGTHS = ("num_train_epochs", "max_steps", "train_hours")  # each says how long a run is
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
ONLY = {name: field.metadata["only"] for name, field in FIELDS.items() if field.metadata["only"]}


@dataclass(frozen=True)
class Config:
    """The configuration of a run; `parse_config` makes one and checks it."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    run: RunConfig

    @property
    def undecided(self) -> bool:
        """Whether `train_hours` have not decided yet how many steps the run has."""
        return self.run.train_hours > 0 and self.optimizer.max_steps == UNDECIDED

    def replace(self, **values) -> "Config":
        """A copy with other values of these fields, whichever part they are in."""
        parts = {}
        for name, part in vars(self).items():
            own = {field: values.pop(field) for field in vars(part) if field in values}
            parts[name] = dataclasses.replace(part, **own)
        assert not values, values
        return Config(**parts)

    def flat(self) -> dict:
        """All fields as one flat dict for JSON. `dataset_name` of a mixture is a list of {"name": directory, "weight":
        share, and the fields that are other than the run's}."""
        values = {name: value for part in vars(self).values() for name, value in vars(part).items()}
        if mixture := values.pop("mixture"):
            values["dataset_name"] = [self._entry(one) for one in mixture]
        return values

    def _entry(self, one: MixtureEntry) -> dict:
        own = {name: getattr(one.data, name) for name in OF_AN_ENTRY}
        own = {name: value for name, value in own.items() if value != getattr(self.data, name)}
        return {"name": one.data.dataset_name, "weight": one.share} | own


def hyperparameters(values: dict) -> list[str]:
    """The fields that, with the data, decide what a run with these `values` (Config.flat) learns; none of an optimizer
    or a schedule that it does not use."""
    names = [f.name for part in (ModelConfig, OptimizerConfig) for f in dataclasses.fields(part) if f.metadata]
    unused = [name for name, (other, value) in ONLY.items() if values.get(other) != value]
    return [name for name in (*names, "sequence_length", "seed") if name not in ("init_from", *unused)]
