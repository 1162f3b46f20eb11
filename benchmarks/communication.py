"""Bytes that DDP and ZeRO send in a step, and the links that carry them.

Bytes a device sends of S that all have: 2 (W-1)/W S to sum them everywhere, (W-1)/W S to sum each part on one device
or to gather the parts (ring algorithms; Thakur et al. 2005, "Optimization of Collective Communication Operations in
MPICH"; NCCL's bus bandwidth counts the same). Over several nodes: first within each, then between devices of the same
place, each with its own adapter, so that a node's adapters together carry (M-1)/M S, twice for a sum everywhere, with M
nodes, and the two phases' times add up. Latency is not counted, which flatters many devices with little to say.
"""

from dataclasses import dataclass

from recipe.config import ModelConfig
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.errors import UserError
from recipe.estimate.memory import parameter_count

# Bytes/s in one direction. A GPU's link within its node, and all network adapters of a node together.
LINKS = {
    "NVLink 3": 300e9,  # A100: 12 links of 25 GB/s each way (Nvidia, A100 data sheet: 600 GB/s both ways)
    "NVLink 4": 450e9,  # H100 SXM: 18 of them (H100 data sheet: 900 GB/s both ways)
    "PCIe 4 x16": 32e9,  # 16 GT/s a lane, before the line code's 1.5 % (PCI-SIG)
    "PCIe 3 x16": 16e9,  # 8 GT/s; between two T4s, which have no other link
    "InfiniBand 8 x 200 Gb/s": 200e9,  # DGX A100's eight HDR adapters (Nvidia, DGX A100 data sheet)
    "InfiniBand 8 x 400 Gb/s": 400e9,  # DGX H100's eight NDR ones (Nvidia, DGX H100 data sheet)
    "Ethernet 100 Gb/s": 12.5e9,
}
# Assumed share of a link's speed that large collectives reach; not measured here. Latency would lower it.
BUS_EFFICIENCY = 0.8
GPUS_A_NODE = 8


@dataclass(frozen=True)
class Collective:
    """`size` bytes that are summed everywhere (all_reduce), summed in parts (reduce_scatter) or gathered (all_gather);
    `hideable` of them can be on their way while the device computes."""

    kind: str
    size: float
    hideable: float = 0.0

    def sent(self, world: int) -> float:
        """Bytes that each of `world` devices sends."""
        return (2 if self.kind == "all_reduce" else 1) * (world - 1) / world * self.size


def collectives(strategy: str, model: ModelConfig, *, half: bool = True, accumulation: int = 1) -> list[Collective]:
    """What a step of `strategy` (ddp, zero1, zero2, zero3, or llm.c's ZeRO-1) communicates.

    DDP sums gradients in fp32. DeepSpeed sends those of the blocks' linear layers in half precision
    and the others in fp32; it sums them everywhere, in stages 1 and 2 too (use_multi_rank_bucket_allreduce, on by
    default in 0.19), stage 2 in every micro-step, and gathers the updated weights in fp32. Stage 3 gathers weights
    before each micro-step's forward and again before its backward, and sums gradients in parts. llm.c holds weights
    and gradients in bf16.

    The tied embedding's gradient is complete only when backward has ended, so it is never hidden; neither is the
    gathering of what has just been updated. UserError for another strategy.
    """
    D, N = model.n_embd, parameter_count(model)
    embeddings = (VOCAB_SIZE + model.n_positions) * D
    linear = model.n_layer * (12 * D * D + 9 * D)  # weights and biases of Conv1D
    mixed = (2 if half else 4) * linear + 4 * (N - linear)
    early = mixed - 4 * embeddings
    if strategy == "ddp":
        return [Collective("all_reduce", 4 * N, 4 * (N - embeddings))]
    if strategy == "zero1":
        return [Collective("all_reduce", mixed, early), Collective("all_gather", 4 * N)]
    if strategy == "zero2":
        return [
            Collective("all_reduce", accumulation * mixed, accumulation * early),
            Collective("all_gather", 4 * N),
        ]
    if strategy == "zero3":
        return [
            Collective("all_gather", 2 * accumulation * mixed, 2 * accumulation * early),
            Collective("reduce_scatter", accumulation * mixed, accumulation * early),
        ]
    if strategy == "llm.c":
        return [Collective("reduce_scatter", 2 * N, 2 * (N - embeddings)), Collective("all_gather", 2 * N)]
    raise UserError(f"strategy {strategy!r} is not known; choose from ddp, zero1, zero2, zero3, llm.c")


def seconds(collective: Collective, world: int, link: float, network: float = 0.0, efficiency: float = 1.0) -> float:
    """Of a collective over `world` devices in nodes of GPUS_A_NODE, with `link` and `network` in bytes/s (see LINKS).
    UserError where the devices do not fill their nodes."""
    inside = min(world, GPUS_A_NODE)
    nodes, rest = divmod(world, inside)
    if rest:
        raise UserError(f"{world} devices do not fill nodes of {GPUS_A_NODE}")
    within = collective.sent(inside) / link
    between = collective.sent(nodes) / network if nodes > 1 else 0.0
    return (within + between) / efficiency
