"""What a run will be, by arithmetic alone: parameters, FLOPs, tokens, memory, disk. Nothing here builds a model."""

from recipe.config import Batch, Config, ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE


def parameter_count(model: ModelConfig) -> int:
    """Trainable parameters of GPT-2 with a tied head: V D + P D + L (12 D^2 + 13 D) + 2 D."""
    D = model.n_embd
    return VOCAB_SIZE * D + model.n_positions * D + model.n_layer * (12 * D * D + 13 * D) + 2 * D


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of a training step a token: 6 N + 12 L D T (PaLM, Chowdhery et al. 2022, appendix B).

    N leaves out the position embeddings, which are looked up, not multiplied, and counts the true vocabulary, not a
    padded one: 855.2 M for the 124M model at T = 1024.
    """
    N = parameter_count(model) - model.n_positions * model.n_embd
    return 6 * N + 12 * model.n_layer * model.n_embd * sequence_length


def memory_estimate(config: Config, batch: Batch, half: bool, zero_stage: int = 0) -> int:
    """Bytes a device holds at the peak of a step, to within a fifth or so: a reckoning, not a measurement.

    Weights, gradients and two moments in fp32 (16 N; 2 N more for bf16 copies), of which ZeRO cuts the moments (and its
    own fp32 weights, 4 N more), from stage 2 the gradients and at 3 the weights over the processes; per token and block
    the tensors kept for backward (Korthikanti et al. 2022 without the attention matrix, which SDPA does not keep), one
    block's worth and the block inputs when recomputing; the logits with their gradient, or one chunk of them.
    """
    model, run = config.model, config.run
    N, D, L = parameter_count(model), model.n_embd, model.n_layer
    tokens = batch.micro // batch.devices * config.data.sequence_length
    width = 2 if half else 4
    block = tokens * D * (17 * width)
    activations = L * tokens * D * width + block if run.recompute else L * block
    positions = min(run.loss_chunk_size or tokens, tokens)
    logits = positions * VOCAB_SIZE * (4 + 4 + width)
    head = 4 * VOCAB_SIZE * D if run.loss_chunk_size else 0
    shared = (8 + 4, 4, 4)[:zero_stage]  # bytes a parameter
    kept = 16 + 4 * (zero_stage > 0) - sum(shared) + sum(shared) / batch.world
    return int((kept + 2 * half) * N + activations + logits + head)


def checkpoint_bytes(model: ModelConfig) -> int:
    """A checkpoint: weights and two moments in fp32, and 2.5 MB of tokenizer."""
    return 12 * parameter_count(model) + 2_500_000


def describe(
    config: Config, batch: Batch, *, device: str, precision: str, peak_flops: float | None, zero_stage: int = 0
) -> list[str]:
    """The lines a run opens with, and all that --dry_run prints beside the configuration."""
    model, data, opt, run = config.model, config.data, config.optimizer, config.run
    N, tokens = parameter_count(model), opt.total_batch_tokens * opt.max_steps
    flops = flops_per_token(model, data.sequence_length)
    devices = f"{plural(batch.devices, 'device')} x " if batch.devices > 1 else ""
    shares = f"{plural(batch.world, 'process', 'es')} x {plural(batch.accumulation, 'micro-step')} x {devices}"
    shares += plural(batch.micro // batch.devices, "sequence")
    checkpoints = run.keep_last + (opt.max_steps // run.milestone_every if run.milestone_every else 0)
    memory = memory_estimate(config, batch, half=precision in ("bf16", "fp16"), zero_stage=zero_stage)
    streamed = data.streaming or data.source.startswith("hf://")
    shards = f"{si(1e9 * data.disk_budget_gb)}B of shards" if streamed else f"{si(2 * tokens)}B for every token once"
    lines = [
        f"model      {N:,} parameters: {model.n_layer} layers, {model.n_head} heads, {model.n_embd} wide, "
        f"{flops / 1e6:,.1f} MFLOP a token",
        f"device     {device}, {precision}{' (auto)' if run.precision == 'auto' else ''}",
        f"batch      {opt.total_batch_tokens:,} tokens = {shares} x {data.sequence_length}",
        f"length     {opt.max_steps:,} steps, {si(tokens, 'B')} tokens, learning rate {opt.learning_rate:g} after "
        f"{opt.warmup_steps} steps of warm-up, down to {opt.learning_rate * opt.min_lr_fraction:g}",
        f"memory     about {si(memory)}B a device (reckoned)",
        f"disk       {si(checkpoint_bytes(model))}B a checkpoint, at most {checkpoints + 1} at once, in "
        f"{run.output_dir}; {shards}",
    ]
    if peak_flops:
        at_half = tokens * flops / (0.5 * peak_flops * batch.world)
        lines.append(f"time       about {at_half / 3600:.1f} h at 50 % MFU")
    return lines


def plural(n: int, noun: str, ending: str = "s") -> str:
    return f"{n} {noun}{ending if n != 1 else ''}"


def si(value: float, billion: str = "G") -> str:
    """1234567 -> '1.23 M'; a billion bytes are a G, a billion tokens a B."""
    for unit, size in (("T", 1e12), (billion, 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
