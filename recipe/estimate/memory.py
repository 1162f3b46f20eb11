"""Parameters, FLOPs, memory and disk of a run, by arithmetic. Nothing here builds a model."""

from recipe.config import BatchPlan, Config, ModelConfig
from recipe.optim.muon import share_of

_ZERO_BUCKET, _ZERO3_LIVE = 50_000_000, 1_000_000_000  # numbers, as ds_configs/ and DeepSpeed have them
ACCURACY = 0.1  # of memory_estimate
HEADROOM = 0.92  # of a device's memory that tensors may take: the rest is for what memory_estimate does not count


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
    """Bytes a device holds through a whole run: weights, gradients and AdamW's two moments in fp32, 16 N; under DDP
    20 N. Muon has one moment instead of two for the matrices that it moves.

    ZeRO keeps a further fp32 copy of the weights with the moments and shards those across processes, at stage 2 the
    gradients too, at 3 the weights; in fp16 weights and gradients beside them have 2 bytes. On top come buckets of
    gradients, as ds_configs/ sizes them, and at stage 3 the weights that DeepSpeed leaves gathered
    (stage3_max_live_parameters). From reading DeepSpeed 0.19; measured with two processes on a CPU in bf16 alone.

    FSDP shards all 16 N, and gathers the embeddings, the block that runs and the next one, or with `fsdp_gathered` all
    weights. Measured with two processes on a CPU.
    """
    model, N = config.model, parameter_count(config.model)
    if sharding.startswith("fsdp"):
        root, block = (model.vocab_size + model.n_positions) * model.n_embd, 12 * model.n_embd**2 + 13 * model.n_embd
        gathered = N if sharding == "fsdp_gathered" else root + 2 * block
        return (16 * N - 4 * _moved_by_muon(config)) // world_size + (2 if precision == "bf16" else 4) * gathered
    if not sharding:  # DDP's buckets stay, and the micro-steps before the last gather their gradients beside them
        return (16 if world_size == 1 else 20) * N - 4 * _moved_by_muon(config)
    w = 2 if precision == "fp16" else 4
    whole = w * {"zero1": 2, "zero2": 1, "zero3": 0}[sharding] * N  # weights and gradients, weights, nothing
    if sharding == "zero3":  # the gathered ones, the largest a second time; a bucket for each type of gradient
        beside = w * (min(N, _ZERO3_LIVE) + model.vocab_size * model.n_embd) + _ZERO_BUCKET * (
            6 if precision == "bf16" else w
        )
    else:  # two for each type
        beside = _ZERO_BUCKET * 2 * w * (2 if precision == "bf16" else 1)
    return whole + ((2 * w + 12) * N - 4 * _moved_by_muon(config) - whole) // world_size + beside


def _moved_by_muon(config: Config) -> int:
    """Weights, those of the matrices inside the blocks."""
    return config.optimizer.optim == "muon" and 12 * config.model.n_layer * config.model.n_embd**2


def update_bytes(config: Config, world_size: int = 1, precision: str = "bf16") -> int:
    """Bytes that the optimizer's update takes for a moment beside `state_bytes`: AdamW's none, Muon's those of the
    matrices that it orthogonalizes at once."""
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
    """Bytes that the allocator of a device holds at the peak of a step, to within a tenth.

    The largest of three moments, each beside `state_bytes` (n tokens, D wide, V the vocabulary, w bytes a number):

    - the loss, when all blocks' tensors for backward are kept: 36 n D a block in 16 bits and 64 n D in fp32, since
      CUDA's autocast keeps layer norm's input and output in fp32; compiled 32 n D and 64 n D; with checkpointing only
      the block's input. In 16 bits also 2 bytes a weight of autocast's copies. The logits take 12 n V (in fp32:
      log-softmax, its gradient and the gradient of its result), compiled or fused w n V, in chunks what
      next_token_loss holds;
    - the first block's backward, with the gradient of the head waiting for that of the embedding, which it shares;
    - compiled, the end of backward: all its gradients come out at once, beside those that they are added to. DDP
      compiles bucket by bucket.

    Muon's update (`update_bytes`), or under FSDP HellaSwag or a sample, which hold the whole weights, may take more.

    Attention is assumed to be a kernel that keeps no scores. Measured in tests/estimate/test_memory.py with PyTorch's
    allocator on a CPU and CUDA's autocast (docs/log.md has the table, with ZeRO on two processes). Not included: what a
    GPU holds beside PyTorch's tensors (context, cuBLAS's and NCCL's buffers) and what fragmentation loses, for which
    HEADROOM is; and, on a CPU in bf16, the L B H T (T + 128) bytes of probabilities in recipe/model/attention.py.
    """
    model, run = config.model, config.run
    N, D, L, V = parameter_count(model), model.n_embd, model.n_layer, model.vocab_size
    n = batch.micro // batch.devices * config.data.sequence_length
    half = precision in ("bf16", "fp16")
    native = half and sharding.startswith("fsdp" if precision == "bf16" else "zero")  # without autocast
    compiled = compiled and not sharding.startswith("fsdp")  # which compiles blocks, whose tensors are counted alike
    w = 2 if half else 4
    stream = 2 if precision == "bf16" or native else 4  # of the residual stream
    casts = 2 * (N - (V + model.n_positions) * D) if half and not native else 0
    block = n * ((32 if compiled or native else 36) * D if half else 64 * D) + 4 * n * (model.n_head + 4)
    block += 2 * n * D * (model.dropout > 0)  # masks
    kept = L * (n * D * stream if run.gradient_checkpointing else block)
    held_casts = 0 if run.gradient_checkpointing else casts
    last = n * D * ((2 if compiled else 6) if half else 8)
    head = w * V * D  # its 16-bit copy, or the padded one

    if run.loss_chunk_size:  # the gradients of the head; a chunk's softmax while the one before is not dropped yet
        c = min(run.loss_chunk_size, n)
        fp32 = 4 * V * D
        chunk = max(c * V * ((4 + w) + (4 + w + w if c < n else 0)), c * V * (4 + 2 * w) + w * V * D)
        forward = (casts if not compiled or not run.gradient_checkpointing else 0) + head + fp32 + chunk
        loss = last + n * D * w + max(forward, held_casts + 2 * fp32 + head)
    elif compiled or run.fused_loss:
        loss = last + held_casts + head + w * n * V + w * V * D
    else:
        loss = last + held_casts + head + 12 * n * V
    if run.gradient_checkpointing and half and not (compiled or run.fused_loss or run.loss_chunk_size):
        loss = max(loss, last + casts + head + 10 * n * V)  # still in the forward, where autocast holds its copies

    in_block = 18 * n * D * w // 2 + (block + casts // L if run.gradient_checkpointing else 0)
    backward = held_casts + in_block + 4 * V * D
    end = (4 + (w if compiled else 4)) * V * D + in_block - kept
    if compiled and (batch.world_size == 1 or sharding):
        end += (2 if native else 4) * N

    state = state_bytes(config, batch.world_size, sharding, precision)
    if batch.world_size == batch.accumulation == 1 and not sharding:  # gradients come one by one, as backward goes on
        loss, backward = loss - 4 * N, backward - 4 * N
        end -= 4 * V * D + 4 * N * compiled
    evaluates = sharding.startswith("fsdp") and (run.hellaswag_steps or run.sample_steps)
    whole = 4 * (N - N // batch.world_size) if evaluates else 0  # the weights, while there are no gradients
    return state + max(kept + max(loss, backward, end), whole, update_bytes(config, batch.world_size, precision))


def checkpoint_bytes(config: Config) -> int:
    """A checkpoint: weights and the optimizer's moments in fp32, and 2.5 MB of tokenizer."""
    return 12 * parameter_count(config.model) - 4 * _moved_by_muon(config) + 2_500_000


REMEDIES = (
    "What helps: a smaller --micro_batch_size, --gradient_checkpointing true (about a quarter slower), "
    "--loss_chunk_size 1024, or FSDP or ZeRO on several GPUs (accelerate_configs/fsdp.yaml, zero1.yaml to zero3.yaml); "
    "docs/memory.md has the figures, and --dry_run shows what a run needs with them"
)
