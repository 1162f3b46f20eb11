"""The default recipe with AdamW in one file of plain transformers, torch and Accelerate: read this first.

    make data                                                # text -> token shards in data/shakespeare
    python examples/minimal.py --steps 30                    # one device
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 examples/minimal.py

It imports nothing from recipe/, and a test compares the two: the same initial weights, the same batches, and in the
first steps the same losses to 1e-5 as `python recipe/train.py --optim adamw --precision fp32`. recipe/train.py adds
Muon, bf16, torch.compile, validation, HellaSwag, checkpoints and resuming, ZeRO, FSDP, TPUs, streaming and the Hub.
"""

import argparse
import math
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

SEED = 1337
SHAPE = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 128}
T = 128  # tokens in a sequence
SEQUENCES = 8  # per step, over all processes: 1,024 tokens
MICRO_BATCH = 8  # maximum number of sequences per device and forward pass
MAX_STEPS, WARMUP_STEPS, DECAY_FRACTION = 700, 50, 0.6
LEARNING_RATE, WEIGHT_DECAY, BETAS, MAX_GRAD_NORM = 5e-3, 0.1, (0.8, 0.99), 1.0
BPE = Path(__file__).parents[1] / "recipe" / "data" / "gpt2_bpe"  # OpenAI's files
HEADER = 256 * 4  # bytes before a shard's tokens, which are uint16 (llm.c's format)


def main() -> None:
    """Trains, prints each step's loss, and saves a model that transformers loads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("data/shakespeare"), help="a directory of token shards")
    parser.add_argument("--steps", type=int, default=MAX_STEPS, help="stop after this many of the run's 700 steps")
    parser.add_argument("--out", type=Path, default=Path("runs/minimal"))
    args = parser.parse_args()
    shards = [np.memmap(path, np.uint16, "r", HEADER) for path in sorted(args.data.glob("train_*.bin"))]
    if not shards:
        parser.error(f"no shards in {args.data}; `make data` prepares tiny Shakespeare")

    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    rank, world_size = accelerator.process_index, accelerator.num_processes
    micro = min(MICRO_BATCH, max(1, SEQUENCES // world_size))
    accumulation, remainder = divmod(SEQUENCES, world_size * micro)
    if remainder:
        parser.error(f"{SEQUENCES} sequences do not divide among {world_size} processes")

    model = GPT2LMHeadModel(GPT2Config(**SHAPE, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    initialize(model)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    for step in range(min(args.steps, MAX_STEPS)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        step_loss = torch.zeros((), device=accelerator.device)
        for micro_step in range(accumulation):
            first = step * SEQUENCES + (micro_step * world_size + rank) * micro
            rows = np.stack([sequence(shards, number) for number in range(first, first + micro)])
            rows = torch.from_numpy(rows).to(accelerator.device)  # (micro, T + 1)
            # Gradients are averaged over processes in the backward pass of the last micro-step.
            with nullcontext() if micro_step == accumulation - 1 else accelerator.no_sync(model):
                logits = model(rows[:, :-1]).logits  # (micro, T, V)
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / accumulation
                accelerator.backward(loss)
            step_loss += loss.detach()
        clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step + 1} loss {accelerator.reduce(step_loss, 'mean').item():.6f}")

    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out)
        GPT2Tokenizer(str(BPE / "encoder.json"), str(BPE / "vocab.bpe")).save_pretrained(args.out)
        print(f"saved {args.out}")
    del model, optimizer
    accelerator.free_memory()  # frees DDP's reducer first: as the last owner of the process group it can hang
    accelerator.end_training()


@torch.no_grad()
def initialize(model: GPT2LMHeadModel) -> None:
    """GPT-2's initialization: N(0, 0.02), residual projections smaller by sqrt(2 layers), biases 0, layer norms 1.
    transformers does the same; here the seed alone determines each weight."""
    generator = torch.Generator().manual_seed(SEED)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            scale = math.sqrt(2 * SHAPE["n_layer"]) if name.endswith("c_proj.weight") else 1.0
            p.normal_(0.0, 0.02 / scale, generator=generator)


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices and embeddings only."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8)


def learning_rate(step: int) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, constant, linear decay to 0 (warm-up, stable, decay)."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    decay_start = MAX_STEPS - round(DECAY_FRACTION * MAX_STEPS)
    return LEARNING_RATE * min(1.0, (MAX_STEPS - step) / (MAX_STEPS - decay_start))


def clip(parameters) -> None:
    """Clips the global gradient norm, summed in fp64, since torch's clip_grad_norm_ is inexact on a CPU."""
    gradients = [p.grad for p in parameters]
    norm = torch.stack([g.to(torch.float64 if g.device.type != "mps" else g.dtype).norm() for g in gradients]).norm()
    for g in gradients:
        g.div_(max(1.0, (norm.item() + 1e-6) / MAX_GRAD_NORM))


# The order of the data is a function of (seed, step); see docs/data.md.


def sequence(shards: list[np.ndarray], number: int) -> np.ndarray:
    """Sequence `number` of the run, (T + 1,) int64. A shard's windows overlap by one token and are permuted in each
    epoch; the shards follow in order."""
    windows = [(len(shard) - 1) // T for shard in shards]
    epoch, window = divmod(number, sum(windows))
    i = 0
    while window >= windows[i]:
        window, i = window - windows[i], i + 1
    start = permutation(windows[i], epoch, i)[window] * T
    return shards[i][start : start + T + 1].astype(np.int64)


@lru_cache(maxsize=2)
def permutation(n: int, epoch: int, shard: int) -> np.ndarray:
    """The order of a shard's `n` windows in an epoch, (n,)."""
    return np.random.RandomState([SEED, 0, epoch, shard]).permutation(n)


if __name__ == "__main__":
    main()
