"""Parameters, FLOPs, memory and disk of a run, by arithmetic. Nothing here builds a model."""

from recipe.config import BatchPlan, Config, ModelConfig
from recipe.optim.muon import share_of

_ZERO_BUCKET, _ZERO3_LIVE = 50_000_000, 1_000_000_000  # numbers, as ds_configs/ and DeepSpeed have them
ACCURACY = 0.25  # of memory_estimate, for any model
HEADROOM = 0.92  # of a device's memory that tensors may take: the rest is for what memory_estimate does not count
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


def memory_estimate(
    config: Config, batch: BatchPlan, *, precision: str, sharding: str = "", compiled: bool = False
) -> int:
    """Bytes that the allocator of a device holds at the peak of a step: within a tenth of it for the recipes that ship,
    within a quarter for other models.

    The largest of three moments, each beside `state_bytes` and what is kept for backward: the loss, the first block's
    backward, and, compiled, the end of backward, where all its gradients come out at once beside those that they are
    added to (DDP compiles bucket by bucket). Muon's update (`update_bytes`), or under FSDP HellaSwag or a sample, which
    hold the full weights, may take more.

    Attention is assumed to be a kernel that keeps no scores. Measured in tests/estimate/test_memory.py with PyTorch's
    allocator on a CPU and CUDA's autocast (docs/log.md has the table, with ZeRO on two processes). Not included: what a
    GPU holds beside PyTorch's tensors (context, cuBLAS's and NCCL's buffers) and what fragmentation loses, for which
    HEADROOM is; and, on a CPU in bf16, the L B H T (T + 128) bytes of probabilities in recipe/model/attention.py.
    """
    model, run = config.model, config.run
    N, D, L, V = parameter_count(model), model.n_embd, model.n_layer, model.vocab_size
    n = batch.micro // batch.devices * config.data.sequence_length  # tokens
    half, checkpointed = precision in ("bf16", "fp16"), bool(run.gradient_checkpointing)
    autocast = half and not sharding.startswith("fsdp" if precision == "bf16" else "zero")
    compiled = compiled and not sharding.startswith("fsdp")  # which compiles blocks, whose tensors are counted alike
    w = 2 if half else 4  # bytes a number

    # A block keeps 16 numbers a token and channel; CUDA's autocast keeps layer norm's input and output in fp32.
    block = n * D * ((36 if autocast and not compiled else 32) if half else 64)
    stream = n * D * (2 if precision == "bf16" or (half and not autocast) else 4)  # the input of a block
    kept = L * (stream if checkpointed else block)
    casts = 2 * 12 * L * D * D if autocast else 0  # autocast's copies of the weights, kept until they are used
    head = w * V * D
    if run.loss_chunk_size:  # a chunk's softmax while the one before is not dropped yet, and the head's gradient
        chunk = min(run.loss_chunk_size, n)
        logits = chunk * V * ((8 if chunk < n else 4) + 2 * w) + 4 * V * D + head
    elif compiled or run.fused_loss is True:
        logits = n * V * w + head
    else:
        logits = 12 * n * V  # log-softmax, its gradient and the gradient of its result, in fp32
    loss = head + logits + n * D * (2 if compiled else 8) + (0 if checkpointed and compiled else casts)

    # The gradient of the head waits for that of the embedding, which it shares.
    in_block = 9 * n * D * w + 4 * V * D + (block if checkpointed else 0)
    backward = in_block + (0 if checkpointed else casts)
    if compiled and (batch.world_size == 1 or sharding):
        backward = max(backward, (4 if autocast or not half else 2) * N + in_block - kept)
    if batch.world_size == batch.accumulation == 1 and not sharding:  # gradients come one by one, as backward goes on
        kept -= 4 * N

    evaluates = sharding.startswith("fsdp") and (run.hellaswag_steps or run.sample_steps)
    unsharded = 4 * (N - N // batch.world_size) if evaluates else 0  # the weights, while there are no gradients
    state = state_bytes(config, batch.world_size, sharding, precision)
    return state + max(kept + max(loss, backward), unsharded, update_bytes(config, batch.world_size, precision))


def checkpoint_bytes(config: Config) -> int:
    """A checkpoint: weights and the optimizer's moments in fp32, and 2.5 MB of tokenizer."""
    return 12 * parameter_count(config.model) - 4 * _moved_by_muon(config) + 2_500_000


REMEDIES = (
    "--gradient_checkpointing true (about a quarter slower), --loss_chunk_size 1024, or FSDP or ZeRO on several GPUs "
    "(accelerate_configs/fsdp.yaml, zero1.yaml to zero3.yaml) or FSDP on TPUs (tpu-fsdp.yaml); docs/memory.md has the "
    "figures, and --dry_run shows what a run needs with them"
)
