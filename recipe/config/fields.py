"""The fields of a run's configuration, as frozen dataclasses: each with its help text, its unit and its limits.

Every field is a flag (`--learning_rate 1e-3`) and a key of a recipe's YAML (parse.py). The hardware, such as the number
of processes, is configured in Accelerate's file.
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
UNDECIDED = 10**9  # max_steps of a run of train_hours until its decay begins
MIXTURE_PERIOD = 1000  # sequences over which the shares of a mixture are exact


def setting(
    default, help_text: str, *, path: bool = False, requires: tuple[str, str | bool] | None = None, **limits: float
):
    """A field that users set.

    `limits` are min, above, max and below (values.py). `path`: the value may be a path, so ~ is expanded. `requires` is
    (other field, its value): with another value there, this field has no effect, and setting it is an error.
    """
    metadata = {"help": help_text, "path": path, "requires": requires, "limits": limits}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelConfig:
    """The model's architecture, with GPT-2 124M as the default."""

    n_layer: int = setting(12, "transformer blocks", min=1)
    n_head: int = setting(12, "attention heads; must divide n_embd", min=1)
    n_embd: int = setting(768, "width of the residual stream", min=1)
    n_positions: int = setting(1024, "position embeddings: the upper limit of sequence_length", min=1)
    dropout: float = setting(0.0, "dropout on embeddings, attention and residuals (GPT-2 used 0.1)", min=0, below=1)
    init_from: str = setting("", "directory or Hub id of weights to start from (empty: random weights)", path=True)
    vocab_size: int = 50257  # derived from the tokenizer


@dataclass(frozen=True)
class DataConfig:
    """The text or shards to train on, and how shards are made from text."""

    dataset_name: str = setting(
        "",
        f"{', '.join(DATASETS)}, a Hub data set (ORG/NAME), a path of text or shards, or a list of these with weights "
        "(docs/data.md)",
        path=True,
    )
    val_data: str = setting(
        "", "validation text or shards: directory, file or glob (empty: from dataset_name)", path=True
    )
    train_text: str = setting("", "path or Hub data set to tokenize into the directory dataset_name", path=True)
    dataset_config: str = setting("", "subset of a Hub data set, such as sample-10BT")
    dataset_split: str = setting("train", "split of a Hub data set")
    dataset_revision: str = setting("", "branch, tag or commit on the Hub (empty: the newest; fixed for a run)")
    dataset_source: str = setting(
        "", "data set that .bin files without a manifest are from, named as above; for the report and the model card"
    )
    text_column: str = setting("text", "column, or key of JSON objects, that holds the text or its token ids")
    tokenizer: str = setting("gpt2", "gpt2, or the directory or Hub id of a tokenizer that keeps all text", path=True)
    streaming: bool = setting(False, "make shards during training, a few ahead, and delete those already read")
    disk_budget_gb: float = setting(10.0, "disk space for streamed shards on each node, in GB", above=0)
    val_fraction: float = setting(0.01, "fraction of local text held out for validation", min=0, below=1)
    val_documents: int = setting(
        0, "first documents held out for validation (0: 10,000 of a Hub data set, val_fraction of local text)", min=0
    )
    shard_tokens: int = setting(100_000_000, "tokens per shard; the first shards are smaller", min=1, below=2**31)
    sequence_length: int = setting(1024, "tokens per sequence", min=1)
    mixture: tuple["MixtureEntry", ...] = ()  # derived from a dataset_name that is a list, which is then empty
    val_text: str = ""  # derived from a val_data that is text, which then names the shards made of it


# The fields that decide the shapes of a model's tensors, under the names that transformers gives them.
SHAPE_FIELDS = ("n_layer", "n_head", "n_embd", "n_positions", "vocab_size")
# Fields that, like dataset_name, describe one data set and do not apply to another.
DATA_SET_FIELDS = (
    *("val_data", "train_text", "dataset_config", "dataset_split", "dataset_revision", "dataset_source"),
    "text_column",
)
# Fields that an entry of a mixture may set for its data set; otherwise it has the run's values.
ENTRY_FIELDS = (*DATA_SET_FIELDS, "streaming", "val_fraction", "val_documents")


@dataclass(frozen=True)
class Entry:
    """The fields that an entry of a mixture must have."""

    name: str = setting("", "the data set, as in dataset_name", path=True)
    weight: float = setting(0.0, "relative to the other weights", min=0)


@dataclass(frozen=True)
class MixtureEntry:
    """One of the data sets of a run.

    Attributes:
        name: short, and unique within the run; empty if there is only one data set.
        count: how many of each 1,000 sequences come from it.
        data: the run's fields, with the values for this data set.
    """

    name: str
    count: int
    data: DataConfig

    @property
    def share(self) -> float:
        """The fraction of the run's sequences that come from it."""
        return self.count / MIXTURE_PERIOD


def data_sets(data: DataConfig) -> list[MixtureEntry]:
    """The data sets of a mixture in order, or the only data set."""
    return list(data.mixture) or [MixtureEntry("", MIXTURE_PERIOD, data)]


@dataclass(frozen=True)
class OptimizerConfig:
    """The batch size, the optimizer, the schedule and the spike filter."""

    max_steps: int = setting(1000, "optimizer steps in the run", min=1)
    total_batch_tokens: int = setting(524288, "tokens per optimizer step, over all processes and micro-steps", min=1)
    micro_batch_size: int | Literal["auto"] = setting(8, "sequences per device at once; auto: as many as fit", min=1)
    optim: Literal[
        "adamw",
        "muon",
    ] = setting("adamw", "muon: Muon for matrices inside the blocks, AdamW for the rest")
    learning_rate: float = setting(6e-4, "peak learning rate of AdamW", above=0)
    matrix_learning_rate: float = setting(
        0.0, "AdamW's peak rate for matrices inside the blocks (0: learning_rate)", requires=("optim", "adamw"), min=0
    )
    lr_scheduler_type: Literal["cosine", "linear", "wsd"] = setting(
        "cosine", "learning rate after the warm-up; wsd: constant, then a linear decay"
    )
    decay_fraction: float = setting(
        0.2, "fraction of steps, at the end, in which wsd decays", requires=("lr_scheduler_type", "wsd"), above=0, max=1
    )
    min_lr_fraction: float = setting(0.0, "final learning rate, as a fraction of the peak", min=0, max=1)
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up, for AdamW only: Muon needs none", min=0)
    weight_decay: float = setting(0.1, "AdamW's weight decay, on tensors of two or more dimensions only", min=0)
    adam_beta1: float = setting(0.9, "AdamW's decay rate of the first moment", min=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW's decay rate of the second moment", min=0, below=1)
    muon_learning_rate: float = setting(0.02, "peak learning rate of Muon", requires=("optim", "muon"), above=0)
    muon_weight_decay: float = setting(0.1, "Muon's weight decay", requires=("optim", "muon"), min=0)
    max_grad_norm: float = setting(1.0, "clip the global gradient norm to this (0: measure it only)", min=0)
    # Among 128 values none is more than sqrt(127) = 11.3 standard deviations above the mean.
    skip_loss_z: float = setting(
        0.0,
        "skip a step whose loss is this many standard deviations above the mean of the last 128 (0: never)",
        min=0,
        max=11,
    )
    skip_grad_z: float = setting(
        0.0,
        "skip a step whose gradient norm is this many standard deviations above the mean of the last 128 (0: never)",
        min=0,
        max=11,
    )

    def ending_after(self, step: int) -> int:
        """The max_steps with which wsd's decay starts at `step`, or at the end of the warm-up if that is later."""
        step = max(step, self.warmup_steps)
        candidates = count(int(step / (1 - self.decay_fraction)))
        return next(n for n in candidates if n - round(self.decay_fraction * n) >= step)

    @property
    def decay_start(self) -> int:
        """The last step of wsd's constant phase, from whose checkpoint a longer run can continue; 0 without wsd."""
        if self.lr_scheduler_type != "wsd":
            return 0
        return max(self.warmup_steps, self.max_steps - round(self.decay_fraction * self.max_steps))


@dataclass(frozen=True)
class RunConfig:
    """Where and how the run computes, and what it logs, evaluates, saves and uploads."""

    config: str = setting(str(DEFAULT_RECIPE.relative_to(ROOT)), "recipe: a YAML file, or a name in recipe/configs")
    run_name: str = setting("", "name of the run (empty: --output_dir's, the recipe's, or NAME for NAME/recipe.yaml)")
    output_dir: str = setting("", "directory of the run (empty: runs/<run_name>)", path=True)
    seed: int = setting(1337, "seed of the initial weights, the data order and dropout", min=0, below=2**63)
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = setting(
        "auto", "arithmetic of a step (weights and optimizer state stay fp32); auto: the fastest that is supported"
    )
    deterministic: bool = setting(
        False,
        "repeated runs on a GPU are bit-identical, but slower (on a CPU they always are); true with push_to_hub state",
    )
    torch_compile: bool = setting(False, "compile the model with torch.compile")
    torch_compile_mode: Literal["default", "regional", "max-autotune"] = setting(
        "default",
        "default: the model; regional: one block, reused for all (quick); max-autotune: tunes kernels (slow)",
        requires=("torch_compile", True),
    )
    gradient_checkpointing: bool | Literal["auto"] = setting(
        False, "recompute activations in the backward pass: less memory, slower; auto: unless 8,192 tokens fit without"
    )
    loss_chunk_size: int = setting(0, "positions whose logits are held at once (0: all of a micro-batch)", min=0)
    fused_loss: bool | Literal["auto"] = setting(
        "auto", "one Triton kernel for the loss and its gradient, on CUDA; auto: if a trial finds it correct and faster"
    )
    logging_steps: int = setting(10, "steps between lines of metrics.jsonl", min=1)
    eval_steps: int | Literal["end"] = setting(250, "steps between validations; end: only the one at the end", min=1)
    eval_tokens: int = setting(10_485_760, "maximum tokens per validation (always the same ones)", min=1)
    save_steps: int | Literal["end"] = setting(
        1000, "steps between checkpoints; end: only the one at the end, wsd's before the decay, and milestones", min=1
    )
    save_total_limit: int = setting(
        2, "newest checkpoints to keep, besides the best one, milestones and wsd's before the decay", min=1
    )
    milestone_steps: int = setting(0, "steps between checkpoints that are never deleted (0: none)", min=0)
    push_to_hub: bool | Literal["state"] = setting(
        False,
        "upload milestones and the final checkpoint to hub_model_id during training; state: with the optimizer state "
        "and metrics.jsonl, so that others can audit the run",
    )
    hub_model_id: str = setting("", "repository on the Hub for push_to_hub, ORG/NAME")
    hub_private_repo: bool = setting(False, "create the repository as private, and refuse to upload to a public one")
    hub_license: str = setting("mit", "license of the weights for the model card: the Hub's id of a license, or other")
    sample_steps: int | Literal["end"] = setting(0, "steps between printed samples (0: never, end: at the end)", min=0)
    sample_prompt: str = setting("", "prompt for the samples; several prompts on separate lines (empty: a line break)")
    hellaswag_steps: int | Literal["end"] = setting(
        0, "steps between HellaSwag evaluations (0: never, end: at the end)", min=0
    )
    hellaswag_limit: int = setting(0, "rows per HellaSwag evaluation (0: all 10,042)", min=0, max=10_042)
    report_to: Literal["none", "tensorboard", "wandb", "trackio"] = setting("none", "experiment tracker of the metrics")
    num_train_epochs: float = setting(0.0, "passes over the prepared training data, instead of max_steps", min=0)
    train_hours: float = setting(
        0.0,
        "hours of training, validation and saving, over all resumes, instead of max_steps; the decay starts in time",
        requires=("lr_scheduler_type", "wsd"),
        min=0,
    )
    fresh: bool = setting(False, "move an earlier run in output_dir aside and start over")
    max_hours: float = setting(0.0, "stop with a checkpoint this many hours after each start (0: no limit)", min=0)
    price_per_hour: float = setting(0.0, "price of all devices per hour, in dollars, for the cost estimate", min=0)
    dry_run: bool | str = setting(
        False, "check the inputs, print batch, memory, disk and time, and stop; here, or for devices such as 8xh100"
    )

    @property
    def plan_device(self) -> str:
        """The devices for which a dry run estimates; empty for those of this machine."""
        return self.dry_run if isinstance(self.dry_run, str) else ""


PARTS = {"Model": ModelConfig, "Data": DataConfig, "Optimizer": OptimizerConfig, "Run": RunConfig}  # --help's groups
FIELDS = {field.name: field for part in PARTS.values() for field in dataclasses.fields(part) if field.metadata}
LENGTH_FIELDS = ("num_train_epochs", "max_steps", "train_hours")  # alternatives: a run sets one of them
DEFAULTS = {name: field.default for name, field in FIELDS.items()}
# A run that measures something: no evaluation on the way, and nothing leaves this machine.
QUIET: dict = {"eval_steps": "end", "save_steps": "end", "milestone_steps": 0, "hellaswag_steps": 0, "sample_steps": 0}
QUIET |= {"report_to": "none", "push_to_hub": False, "dry_run": False}
REQUIRES = {name: field.metadata["requires"] for name, field in FIELDS.items() if field.metadata["requires"]}


@dataclass(frozen=True)
class Config:
    """The configuration of a run; `parse_config` makes one and checks it."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig
    run: RunConfig

    @property
    def undecided(self) -> bool:
        """Whether the run has `train_hours` that have not yet decided its number of steps."""
        return self.run.train_hours > 0 and self.optimizer.max_steps == UNDECIDED

    def replace(self, **values) -> "Config":
        """A copy with new values of these fields, whichever part they are in."""
        parts = {}
        for name, part in vars(self).items():
            changes = {field: values.pop(field) for field in vars(part) if field in values}
            parts[name] = dataclasses.replace(part, **changes)
        assert not values, values
        return Config(**parts)

    def flat(self) -> dict:
        """All fields as one flat dict for JSON. The `dataset_name` of a mixture is a list of {"name": directory,
        "weight": share, and the fields that differ from the run's}."""
        values = {name: value for part in vars(self).values() for name, value in vars(part).items()}
        if not values["val_text"]:
            del values["val_text"]
        if mixture := values.pop("mixture"):
            values["dataset_name"] = [self._flat_entry(entry) for entry in mixture]
        return values

    def _flat_entry(self, entry: MixtureEntry) -> dict:
        values = {name: getattr(entry.data, name) for name in (*ENTRY_FIELDS, "val_text")}
        changes = {name: value for name, value in values.items() if value != getattr(self.data, name)}
        return {"name": entry.data.dataset_name, "weight": entry.share} | changes


def hyperparameters(values: dict) -> list[str]:
    """The fields that, with the data, decide what a run with these `values` (Config.flat) learns, without those of an
    optimizer or a schedule that it does not use."""
    names = [f.name for part in (ModelConfig, OptimizerConfig) for f in dataclasses.fields(part) if f.metadata]
    unused = [name for name, (other, value) in REQUIRES.items() if values.get(other) != value]
    return [name for name in (*names, "sequence_length", "seed") if name not in ("init_from", *unused)]
