"""Parameters, FLOPs, memory and disk of a run, by arithmetic. Nothing here builds a model."""

from dataclasses import dataclass

from recipe.config import BatchPlan, Config, ModelConfig
from recipe.optim.muon import share_of
from recipe.utils.units import gb

_ZERO_BUCKET, _ZERO3_LIVE = 50_000_000, 1_000_000_000  # numbers, as ds_configs/ and DeepSpeed have them
ACCURACY = 0.25  # of step_memory, for any model
HEADROOM = 0.92  # of a device's memory that tensors may take: the rest is for what step_memory does not count
TIGHT = 1.05  # a plan says "does not fit" of more than this share of what tensors may take


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters of GPT-2 with a tied head: V D + P D + L (12 D^2 + 13 D) + 2 D."""
    D = model.n_embd
    return model.vocab_size * D + model.n_positions * D + model.n_layer * (12 * D * D + 13 * D) + 2 * D


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of a training step a token: 6 N + 12 L D T (PaLM, Chowdhery et al. 2022, appendix B).

    N excludes the position embeddings, which are looked up, not multiplied, and counts the true vocabulary, not a
    padded one: 855.2 M for the 124M model at T = 1024.
    """
    N = parameter_count(model) - model.n_positions * model.n_embd
    return 6 * N + 12 * model.n_layer * model.n_embd * sequence_length


def state_bytes(config: Config, world_size: int = 1, sharding: str = "", precision: str = "bf16") -> int:
    """Bytes a device holds through a run: weights, gradients and AdamW's two moments in fp32, 16 N; under DDP
    20 N. Muon has one moment instead of two for the matrices that it moves.

    ZeRO keeps a further fp32 copy of the weights with the moments and shards those across processes, at stage 2 the
    gradients too, at 3 the weights; in fp16 weights and gradients beside them have 2 bytes. On top come buckets of
    gradients, as ds_configs/ sizes them, and at stage 3 the weights that DeepSpeed leaves gathered
    (stage3_max_live_parameters). From reading DeepSpeed 0.19; measured with two processes on a CPU in bf16 alone.

    FSDP shards all 16 N, and gathers the embeddings, the block that runs and the next one. Measured with two processes
    on a CPU.
    """
    model, N = config.model, parameter_count(config.model)
    states = 16 * N - 4 * _moved_by_muon(config)
    if sharding == "fsdp":
        root, block = (model.vocab_size + model.n_positions) * model.n_embd, 12 * model.n_embd**2 + 13 * model.n_embd
        return states // world_size + (2 if precision == "bf16" else 4) * (root + 2 * block)
    if not sharding:  # DDP's buckets stay, and the micro-steps before the last gather their gradients beside them
        return states if world_size == 1 else states + 4 * N
    w = 2 if precision == "fp16" else 4
    unsharded = w * {"zero1": 2, "zero2": 1, "zero3": 0}[sharding] * N  # weights and gradients, weights, nothing
    if sharding == "zero3":  # the gathered ones, the largest a second time; a bucket for each type of gradient
        beside = w * (min(N, _ZERO3_LIVE) + model.vocab_size * model.n_embd)
        beside += _ZERO_BUCKET * (6 if precision == "bf16" else w)
    else:  # two for each type
        beside = _ZERO_BUCKET * 2 * w * (2 if precision == "bf16" else 1)
    return unsharded + (states + (2 * w - 4) * N - unsharded) // world_size + beside


def _moved_by_muon(config: Config) -> int:
    """Number of weights that Muon updates: those of the matrices inside the blocks."""
    return config.optimizer.optim == "muon" and 12 * config.model.n_layer * config.model.n_embd**2


def update_bytes(config: Config, world_size: int = 1, precision: str = "bf16") -> int:
    """Temporary bytes of the optimizer's update, beside `state_bytes`: none for AdamW; for Muon those of the matrices
    that it orthogonalizes at once."""
    D, most = config.model.n_embd, 0
    if not _moved_by_muon(config):
        return 0
    for cols, count in ((D, 4 * config.model.n_layer), (4 * D, 2 * config.model.n_layer)):
        share = share_of(count, D * cols, world_size)
        iteration = share * (3 * D * cols + 2 * D * D)  # what goes in, X before and after, X X^T and its polynomial
        gathered = share * (world_size + 1) * D * cols if world_size > 1 else 0
        most = max(most, iteration, gathered)
    return (2 if precision == "bf16" else 4) * most


@dataclass(frozen=True)
class StepMemory:
    """Bytes that the allocator of a device holds in a step, by what holds them.

    Attributes:
        state: weights, optimizer state and gradients, as `state_bytes` counts them; without the gradients in a step of
            one micro-batch on one device, where they come one by one as backward goes on.
        activations: what forward keeps for backward.
        loss: the most that the head and the loss take beside the activations.
        backward: the most that backward takes in a block, and at its end, beside the activations.
        update: what is held beside the state when there are no activations: `update_bytes`, or under FSDP the full
            weights, for HellaSwag or a sample; and the gradients, if the state is without them.
    """

    state: int
    activations: int
    loss: int
    backward: int
    update: int

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return sum(self.at_peak().values())

    def at_peak(self) -> dict[str, int]:
        """Bytes by name at the moment when the most is held."""
        moment = "loss" if self.loss > self.backward else "backward"
        if self.update > self.activations + getattr(self, moment):
            return {"state": self.state, "update": self.update}
        return {"state": self.state, "activations": self.activations, moment: getattr(self, moment)}


def step_memory(
    config: Config, batch: BatchPlan, *, precision: str, sharding: str = "", compiled: bool = False
) -> StepMemory:
    """The memory of a step: its peak is within a tenth of the allocator's for the recipes that ship, within a quarter
    for other models.

    Attention is assumed to be a kernel that keeps no scores. Measured in tests/estimate/test_memory.py with PyTorch's
    allocator on a CPU and CUDA's autocast (docs/log.md has the table, with ZeRO on two processes). Not included: what a
    GPU holds beside PyTorch's tensors (context, cuBLAS's and NCCL's buffers) and what fragmentation loses, for which
    HEADROOM is; and, on a CPU in bf16, the L B H T (T + 128) bytes of probabilities in recipe/model/attention.py.
    """
    model, run = config.model, config.run
    N, D, L, world = parameter_count(model), model.n_embd, model.n_layer, batch.world_size
    n = batch.micro // batch.devices * config.data.sequence_length  # tokens
    half, checkpointed = precision in ("bf16", "fp16"), bool(run.gradient_checkpointing)
    autocast = half and not sharding.startswith("fsdp" if precision == "bf16" else "zero")
    compiled = compiled and not sharding.startswith("fsdp")  # which compiles blocks, whose tensors are counted alike
    w = 2 if half else 4  # bytes a number

    # A block keeps 16 numbers a token and channel; CUDA's autocast keeps layer norm's input and output in fp32.
    block = n * D * ((36 if autocast and not compiled else 32) if half else 64)
    stream = n * D * (2 if precision == "bf16" or (half and not autocast) else 4)  # the input of a block
    activations = L * (stream if checkpointed else block)
    casts = 2 * 12 * L * D * D if autocast else 0  # autocast's copies of the weights, kept until they are used
    hidden = n * D * (2 if compiled else 8)  # what goes into the head, and its gradient
    head = w * model.vocab_size * D  # its weights, as they are multiplied
    loss = head + _logits_bytes(config, n, w, compiled) + hidden + (0 if checkpointed and compiled else casts)

    # The gradient of the head waits for that of the embedding, which it shares.
    in_block = 9 * n * D * w + 4 * model.vocab_size * D + (block if checkpointed else 0)
    backward = in_block + (0 if checkpointed else casts)
    if compiled and (world == 1 or sharding):  # all gradients come out at once; DDP compiles bucket by bucket
        backward = max(backward, (4 if autocast or not half else 2) * N + in_block - activations)
    gradients = 4 * N if world == batch.accumulation == 1 and not sharding else 0  # those that come one by one

    evaluates = sharding.startswith("fsdp") and (run.hellaswag_steps or run.sample_steps)
    unsharded = 4 * (N - N // world) if evaluates else 0  # the weights, while there are no gradients
    return StepMemory(
        state=state_bytes(config, world, sharding, precision) - gradients,
        activations=activations,
        loss=loss,
        backward=backward,
        update=gradients + max(unsharded, update_bytes(config, world, precision)),
    )


def _logits_bytes(config: Config, n: int, w: int, compiled: bool) -> int:
    """Bytes of the logits of `n` tokens and of what the loss makes of them, `w` bytes a number."""
    V, D = config.model.vocab_size, config.model.n_embd
    if config.run.loss_chunk_size:  # a chunk's softmax while the one before is not dropped yet, the head's gradient
        chunk = min(config.run.loss_chunk_size, n)
        return chunk * V * ((8 if chunk < n else 4) + 2 * w) + 4 * V * D + w * V * D
    if compiled or config.run.fused_loss is True:
        return n * V * w + w * V * D
    return 12 * n * V  # log-softmax, its gradient and the gradient of its result, in fp32


def checkpoint_bytes(config: Config) -> int:
    """A checkpoint: weights and the optimizer's moments in fp32, and 2.5 MB of tokenizer."""
    return 12 * parameter_count(config.model) - 4 * _moved_by_muon(config) + 2_500_000


_SHARDING = (
    "FSDP or ZeRO on several GPUs (accelerate_configs/fsdp.yaml, zero1.yaml to zero3.yaml) or FSDP on TPUs "
    "(tpu-fsdp.yaml); docs/memory.md has the figures, and --dry_run shows what a run needs with them"
)
_OPTIONS: dict[str, dict] = {
    "--gradient_checkpointing true (about a quarter slower)": {"gradient_checkpointing": True},
    "--loss_chunk_size 1024": {"loss_chunk_size": 1024},
}


def remedies(config: Config, batch: BatchPlan, limit: float, **kind) -> str:
    """What lowers the estimate, in words, for a step that takes more than `limit` bytes; `kind` is that of
    `step_memory`."""
    now, helps = step_memory(config, batch, **kind), []
    if now.state > limit:
        return f"weights, gradients and optimizer state alone take {gb(now.state)}: {_SHARDING}"
    if batch.micro > batch.devices:
        helps.append("a smaller --micro_batch_size")
    for option, fields in _OPTIONS.items():
        if step_memory(config.replace(**fields), batch, **kind).peak < now.peak:
            helps.append(option)
    return f"what helps: {', '.join([*helps, 'or ' * bool(helps) + _SHARDING])}"
