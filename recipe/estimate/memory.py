"""Parameters, FLOPs, memory and disk of a run, by arithmetic. Nothing here builds a model."""

from dataclasses import dataclass

from recipe.config import BatchPlan, Config, ModelConfig
from recipe.model.loss import FP16_CHUNK
from recipe.optim.muon import share_of
from recipe.utils.units import gb

_ZERO_BUCKET, _ZERO3_LIVE = 50_000_000, 1_000_000_000  # elements; set in ds_configs/, and DeepSpeed's default
HEADROOM = 0.92  # share of a device's memory that tensors may take: the rest is for what step_memory does not count
TIGHT = 1.05  # the panel prints "does not fit" above this multiple of what tensors may take


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters of GPT-2 with a tied head: V D + P D + L (12 D^2 + 13 D) + 2 D."""
    D = model.n_embd
    return model.vocab_size * D + model.n_positions * D + model.n_layer * (12 * D * D + 13 * D) + 2 * D


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs per token of a training step: 6 N + 12 L D T (PaLM, Chowdhery et al. 2022, appendix B).

    N excludes the position embeddings, which are looked up, not multiplied, and counts the true vocabulary, not a
    padded one: 855.2 M for the 124M model at T = 1024.
    """
    N = parameter_count(model) - model.n_positions * model.n_embd
    return 6 * N + 12 * model.n_layer * model.n_embd * sequence_length


def state_bytes(config: Config, batch: BatchPlan, sharding: str = "", precision: str = "bf16") -> int:
    """The most bytes that a device holds besides activations: weights, gradients and AdamW's two moments in fp32, 16 N;
    under DDP 20 N, with accumulation 24 N. Muon keeps one moment instead of two for the matrices that it updates.

    ZeRO shards the moments and another fp32 copy of the weights across processes, at stage 2 the gradients too, at 3
    the weights; in fp16 the gradients and the first copy of the weights take 2 bytes a number. In addition there are
    gradient buckets, sized in ds_configs/, and at stage 3 the weights that DeepSpeed keeps gathered
    (stage3_max_live_parameters). From the source of DeepSpeed 0.19; measured with two processes on a CPU, only in bf16.

    FSDP shards all 16 N, and gathers the embeddings, the running block and the next. Measured with two processes on a
    CPU.
    """
    model, N, world_size = config.model, parameter_count(config.model), batch.world_size
    weights = gradients = 4 * N
    moments = 8 * N - 4 * _muon_parameters(config)
    if not sharding:
        # DDP replaces its buckets in the second step, when a collective may still hold the first ones; under
        # accumulation the gradients of earlier micro-steps lie outside them (docs/log.md).
        copies = 1 if world_size == 1 else 2 if batch.accumulation == 1 else 3
        return weights + copies * gradients + moments
    if sharding == "fsdp":
        root, block = (model.vocab_size + model.n_positions) * model.n_embd, 12 * model.n_embd**2 + 13 * model.n_embd
        gathered = (2 if precision == "bf16" else 4) * (root + 2 * block)
        return (weights + gradients + moments) // world_size + gathered
    w = 2 if precision == "fp16" else 4  # bytes a number of the weights and gradients that a step computes with
    computed = 2 * w * N
    unsharded = {"zero1": computed, "zero2": computed // 2, "zero3": 0}[sharding]  # the weights at stage 2
    if sharding == "zero3":  # gathered weights, the largest a second time; a bucket for each dtype of gradients
        buffers = w * (min(N, _ZERO3_LIVE) + model.vocab_size * model.n_embd)
        buffers += _ZERO_BUCKET * (6 if precision == "bf16" else w)
    else:  # two buckets for each dtype
        buffers = _ZERO_BUCKET * 2 * w * (2 if precision == "bf16" else 1)
    return unsharded + (weights + moments + computed - unsharded) // world_size + buffers


def _muon_parameters(config: Config) -> int:
    """Number of weights that Muon updates: those of the matrices inside the blocks."""
    return 12 * config.model.n_layer * config.model.n_embd**2 if config.optimizer.optim == "muon" else 0


def update_bytes(config: Config, world_size: int = 1, precision: str = "bf16") -> int:
    """Temporary bytes of the optimizer's update, on top of `state_bytes`: none for AdamW; for Muon those of the
    matrices that it orthogonalizes at once."""
    D, peak, size = config.model.n_embd, 0, 2 if precision == "bf16" else 4
    if not _muon_parameters(config):
        return 0
    for cols, count in ((D, 4 * config.model.n_layer), (4 * D, 2 * config.model.n_layer)):
        share = share_of(count, D * cols, world_size)
        iteration = share * (3 * D * cols + 2 * D * D)  # the input, X before and after, X X^T and its polynomial
        gather = share * (world_size + 1) * D * cols if world_size > 1 else 0
        # In fp32: the matrices' updates, the same in the parameters' layout, new weights, and those beside the old.
        update = (4 if precision == "fp16" else 3) * share * world_size * D * cols
        peak = max(peak, size * iteration, size * gather, 4 * update)
    return peak


@dataclass(frozen=True)
class StepMemory:
    """Bytes that a device's allocator holds in a step, by purpose.

    Attributes:
        state: weights, optimizer state and gradients, as `state_bytes` counts them; in a step of one micro-batch on one
            device without the gradients, which backward allocates one by one.
        activations: what forward keeps for backward.
        loss: the peak of the head and the loss on top of the activations.
        backward: the peak of backward, in a block or at its end, on top of the activations.
        update: the peak without activations, on top of the state: `update_bytes`, or the unsharded weights for
            HellaSwag or a sample under FSDP; and the gradients where `state` does not contain them.
    """

    state: int
    activations: int
    loss: int
    backward: int
    update: int

    @property
    def peak(self) -> int:
        """Peak bytes."""
        return sum(self.at_peak().values())

    def at_peak(self) -> dict[str, int]:
        """Bytes by purpose at the peak."""
        name, size = max(("backward", self.backward), ("loss", self.loss), key=lambda phase: phase[1])
        if self.update > self.activations + size:
            return {"state": self.state, "update": self.update}
        return {"state": self.state, "activations": self.activations, name: size}


def step_memory(
    config: Config, batch: BatchPlan, *, precision: str, sharding: str = "", compiled: bool = False
) -> StepMemory:
    """The memory of a step: its peak is within a tenth of the allocator's for the recipes that ship, within a quarter
    for other models.

    Attention is assumed to be a kernel that keeps no scores. Measured in tests/estimate/test_memory.py with PyTorch's
    allocator on a CPU and CUDA's autocast (docs/log.md has the table, with ZeRO on two processes). Not included: what a
    GPU holds besides PyTorch's tensors (context, cuBLAS's and NCCL's buffers) and fragmentation, which HEADROOM covers;
    and, on a CPU in bf16, the L B H T (T + 128) bytes of probabilities in recipe/model/attention.py.
    """
    model, run = config.model, config.run
    N, D, L, world = parameter_count(model), model.n_embd, model.n_layer, batch.world_size
    n = batch.micro // batch.devices * config.data.sequence_length  # tokens
    is_half, checkpointed = precision in ("bf16", "fp16"), bool(run.gradient_checkpointing)
    autocast = is_half and not sharding.startswith("fsdp" if precision == "bf16" else "zero")
    compiled = compiled and not sharding.startswith("fsdp")  # FSDP compiles single blocks, which take the same memory
    w = 2 if is_half else 4  # bytes a number

    # A block keeps 16 numbers a token and channel; CUDA's autocast keeps layer norm's input and output in fp32.
    block = n * D * ((36 if autocast and not compiled else 32) if is_half else 64)
    stream = n * D * (2 if precision == "bf16" or (is_half and not autocast) else 4)  # the input of a block
    activations = L * (stream if checkpointed else block)
    casts = 2 * 12 * L * D * D if autocast else 0  # autocast's copies of the weights, kept until they are used
    hidden = n * D * (2 if compiled else 8)  # the head's input and its gradient
    head = w * model.vocab_size * D  # the head's weights in the precision of the product
    loss = head + _logits_bytes(config, n, precision, compiled) + hidden + (0 if checkpointed and compiled else casts)

    # The head's gradient is held until the embedding's, since they share their weights.
    in_block = 9 * n * D * w + 4 * model.vocab_size * D + (block if checkpointed else 0)
    backward = in_block + (0 if checkpointed else casts)
    if compiled and (world == 1 or sharding):  # all gradients come out at once; DDP compiles bucket by bucket
        backward = max(backward, (4 if autocast or not is_half else 2) * N + in_block - activations)
    gradients = 4 * N if world == batch.accumulation == 1 and not sharding else 0  # if allocated one by one

    is_gathered = sharding.startswith("fsdp") and (run.hellaswag_steps or run.sample_steps)
    unsharded = 4 * (N - N // world) if is_gathered else 0  # the weights, while there are no gradients
    return StepMemory(
        state=state_bytes(config, batch, sharding, precision) - gradients,
        activations=activations,
        loss=loss,
        backward=backward,
        update=gradients + max(unsharded, update_bytes(config, world, precision)),
    )


def _logits_bytes(config: Config, n: int, precision: str, compiled: bool) -> int:
    """Bytes of the logits of `n` tokens and of the loss's other tensors."""
    V, D, fused = config.model.vocab_size, config.model.n_embd, config.run.fused_loss is True
    w = 2 if precision in ("bf16", "fp16") else 4  # bytes a number
    chunk = min(config.run.loss_chunk_size or (FP16_CHUNK if fused and precision == "fp16" else n), n)
    if chunk < n or config.run.loss_chunk_size:  # a chunk's softmax, the previous one's; the head's gradient
        softmax = 0 if fused else 8 if chunk < n else 4
        return chunk * V * (softmax + 2 * w) + 4 * V * D + w * V * D
    if compiled or fused:
        return n * V * w + w * V * D
    return 12 * n * V  # log-softmax, its gradient and the gradient of its result, in fp32


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: weights and optimizer state in fp32, and 3.6 MB for GPT-2's tokenizer and the rest."""
    return 12 * parameter_count(config.model) - 4 * _muon_parameters(config) + 3_600_000


def checkpoint_count(config: Config) -> int:
    """The largest number of checkpoints on disk at once, without the milestones of a run of unknown length: those that
    are kept, the milestones, the best one, the one before wsd's decay, and the one being written."""
    run, opt = config.run, config.optimizer
    milestones = opt.max_steps // run.milestone_steps if run.milestone_steps and not config.undecided else 0
    return run.save_total_limit + milestones + 2 + (opt.decay_start > 0)


_FIGURES = "; docs/memory.md has the figures, and --dry_run shows what a run needs with them"
_SHARDING = {
    "cuda": f"FSDP or ZeRO on several GPUs (accelerate_configs/fsdp.yaml, zero1.yaml to zero3.yaml){_FIGURES}",
    "tpu": f"FSDP on several chips (accelerate_configs/tpu-fsdp.yaml){_FIGURES}",
}
_OPTIONS: dict[str, dict] = {
    "--gradient_checkpointing true (about a quarter slower)": {"gradient_checkpointing": True},
    "--loss_chunk_size 1024": {"loss_chunk_size": 1024},
}


def remedies(config: Config, batch: BatchPlan, limit: float, device_type: str, **kind) -> str:
    """A sentence about what lowers the estimate, for a step that takes more than `limit` bytes of a device of this
    type; `kind` are further arguments of `step_memory`."""
    memory, options, others = step_memory(config, batch, **kind), [], _SHARDING.get(device_type, "a smaller model")
    if memory.state > limit:
        return f"weights, gradients and optimizer state alone take {gb(memory.state)}: what helps is {others}"
    if batch.micro > batch.devices:
        options.append("a smaller --micro_batch_size")
    for option, fields in _OPTIONS.items():
        if step_memory(config.replace(**fields), batch, **kind).peak < memory.peak:
            options.append(option)
    return f"what helps: {', '.join([*options, 'or ' * bool(options) + others])}"
