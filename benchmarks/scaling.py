"""What communication costs DDP and ZeRO-1 on 8, 64 and 512 GPUs: a prediction from bytes, links and published speeds.

Bytes that a device sends of S that all have: 2 (W-1)/W S to sum them everywhere, (W-1)/W S to sum each part on one
device or to gather the parts (ring algorithms; Thakur et al. 2005, "Optimization of Collective Communication Operations
in MPICH"; NCCL's bus bandwidth counts the same). Over several nodes: first within each node, then between devices of
the same place, each with its own adapter, so that a node's adapters together carry (M-1)/M S, or twice that for a sum
everywhere, with M nodes. The two phases' times add up. Latency is not counted, which flatters many devices that have
little to send.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from recipe.config import ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine.device import DEVICES
from recipe.estimate.cost import mfu_of
from recipe.estimate.memory import flops_per_token, parameter_count

BUS_EFFICIENCY = 0.8  # assumed share of a link's speed that large collectives reach; not measured here
BACKWARD = 2 / 3  # assumed share of a micro-step's time that is its backward pass: two of three products
GPUS_A_NODE = 8
TOTAL_SEQUENCES, SEQUENCE_LENGTH = 512, 1024  # 524,288 tokens a step


@dataclass(frozen=True)
class Gpu:
    """Bytes/s in one direction of a GPU's link within a node, and of a node's adapters."""

    link: float
    network: float


# Nvidia's data sheets of A100, H100 SXM, DGX A100 and DGX H100: 12 and 18 links of 25 GB/s each way; eight adapters of
# 200 and of 400 Gb/s.
GPUS = {"A100": Gpu(300e9, 200e9), "H100": Gpu(450e9, 400e9)}
MODELS = {"124M": ModelConfig(), "1558M": ModelConfig(n_layer=48, n_head=25, n_embd=1600)}
# Sequences at once at which the runs below were measured; a device whose share is smaller takes its share at once.
MICRO_BATCH = {"124M": 64, "1558M": 16}


@dataclass(frozen=True)
class Collective:
    """`size` bytes that are summed everywhere (`factor` 2), or summed in parts or gathered (1); `hideable` of them can
    be on their way while the device computes."""

    factor: int
    size: float
    hideable: float = 0.0

    def seconds(self, gpu: Gpu, world: int) -> float:
        """Over `world` devices, which fill their nodes."""
        inside = min(world, GPUS_A_NODE)
        nodes = world // inside
        a_byte = (inside - 1) / inside / gpu.link + (nodes - 1) / nodes / gpu.network
        return self.factor * self.size * a_byte / BUS_EFFICIENCY


def collectives(strategy: str, model: ModelConfig) -> list[Collective]:
    """What a step of `strategy` (ddp, zero1, or llm.c's ZeRO-1) communicates.

    DDP sums gradients in fp32. DeepSpeed's stage 1 sends those of the blocks' linear layers in half precision and the
    others in fp32, sums them everywhere (use_multi_rank_bucket_allreduce, on by default in 0.19), and gathers the
    updated weights in fp32. llm.c holds weights and gradients in bf16. The tied embedding's gradient is complete only
    when backward has ended, so it is never hidden; neither is gathering what has just been updated.
    """
    D, N = model.n_embd, parameter_count(model)
    embeddings = (VOCAB_SIZE + model.n_positions) * D
    linear = model.n_layer * (12 * D * D + 9 * D)  # weights and biases of Conv1D
    mixed = 2 * linear + 4 * (N - linear)
    return {
        "ddp": [Collective(2, 4 * N, 4 * (N - embeddings))],
        "zero1": [Collective(2, mixed, mixed - 4 * embeddings), Collective(1, 4 * N)],
        "llm.c": [Collective(1, 2 * N, 2 * (N - embeddings)), Collective(1, 2 * N)],
    }[strategy]


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step: computing, communicating, and those of the latter that are `exposed` if as much as possible
    hides behind the last micro-step's backward. All without latency."""

    micro_batch: int
    compute: float
    communication: float
    exposed: float

    def tokens_per_second(self, hidden: bool) -> float:
        """Of all processes together; `hidden`: with as much communication as possible behind the backward."""
        return TOTAL_SEQUENCES * SEQUENCE_LENGTH / (self.compute + (self.exposed if hidden else self.communication))


def predict(gpu: str, model: str, strategy: str, world: int, mfu: float | None = None) -> Prediction:
    """A step of TOTAL_SEQUENCES on `world` GPUs, which compute at `mfu`, by default that of the published run nearest
    to one GPU. (All but the H100's 124M had eight GPUs, so that their communication is in it and counts twice here.)"""
    share = TOTAL_SEQUENCES // world
    micro = min(MICRO_BATCH[model], share)
    flops = share * SEQUENCE_LENGTH * flops_per_token(MODELS[model], SEQUENCE_LENGTH)
    mfu = mfu or mfu_of(gpu, 1, parameter_count(MODELS[model]))[0]
    compute = flops / (mfu * DEVICES[gpu].peak)
    communication = hideable = 0.0
    for collective in collectives(strategy, MODELS[model]):
        seconds = collective.seconds(GPUS[gpu], world)
        communication += seconds
        hideable += seconds * collective.hideable / collective.size
    hidden = min(hideable, BACKWARD * compute / (share // micro))
    return Prediction(micro, compute, communication, communication - hidden)


# Published runs: name, what `predict` takes, whose computing speed that is, tokens/s. Only where the speed is from
# another run is the comparison more than a check of the bytes.
ANCHORS = (
    ("journal, 124M, 8 x H100, DDP", ("H100", "124M", "ddp", 8, 0.362), "its run on one H100", 3.05e6),
    ("llm.c 124M, 8 x H100", ("H100", "124M", "llm.c", 8, 0.419), "a model of the step: 484 K a GPU", 3.75e6),
    ("llm.c 124M, 8 x A100, 300 ms", ("A100", "124M", "llm.c", 8, 0.599), "this very run", 1.75e6),
    ("llm.c 1558M, 8 x H100", ("H100", "1558M", "llm.c", 8, 0.487), "this very run", 374e3),
)


def lines() -> list[str]:
    """Predictions for every model, GPU, strategy and number of devices, then the published runs, for the terminal."""
    out = [
        f"scaling    predicted, not measured: {TOTAL_SEQUENCES * SEQUENCE_LENGTH:,} tokens a step, links at "
        f"{BUS_EFFICIENCY:.0%} of their speed, no latency, published MFU",
        "           tokens/s: nothing hidden / hidden behind the last backward as far as it goes",
        "  model  GPUs          strategy  micro  compute ms  communication ms (exposed)  exposed  M tokens/s",
    ]
    for model, gpu, strategy, world in product(MODELS, GPUS, ("ddp", "zero1"), (8, 64, 512)):
        p = predict(gpu, model, strategy, world)
        out.append(
            f"  {model:6} {world:3} x {gpu:6} {strategy:8} {p.micro_batch:5}"
            f"{'*' if p.micro_batch < MICRO_BATCH[model] else ' '} {1e3 * p.compute:10.1f} "
            f"{1e3 * p.communication:14.2f} ({1e3 * p.exposed:8.2f}) {p.exposed / (p.compute + p.exposed):9.1%} "
            f"{p.tokens_per_second(hidden=False) / 1e6:6.2f} / {p.tokens_per_second(hidden=True) / 1e6:.2f}"
        )
    out.append("  * fewer sequences at once than in the published run, whose MFU it will not reach: not modeled")
    out.append("anchors    tokens/s of all GPUs, predicted (nothing hidden) beside published")
    for name, arguments, basis, published in ANCHORS:
        predicted = predict(*arguments).tokens_per_second(hidden=False)
        out.append(
            f"  {name:31} {predicted / 1e6:6.3f} M, published {published / 1e6:5.3f} M "
            f"({predicted / published:.2f}x); computing as in {basis}"
        )
    return out
