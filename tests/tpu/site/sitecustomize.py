"""A TPU simulated on this CPU. Python imports this file when it starts with it on PYTHONPATH.

torch_tpu loads XLA's CPU plugin through shim.c. What a machine without a TPU cannot do is replaced here, and nowhere in
the product: torch_tpu counts the chips on the PCI bus (here TPU_CHIPS is their number), connects them by their own
links (here processes use gloo), and computes attention with a kernel for TPUs (here with plain products).
"""

import os
import sys

LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def start() -> None:
    """Gives this process the device "tpu"."""
    # With WORLD_SIZE torch_tpu compiles for a slice of as many chips. Here each process has a client of its own.
    launch = {name: os.environ.pop(name) for name in LAUNCH if name in os.environ}
    try:
        import torch
        import torch_tpu._loader as loader
        from torch_tpu._internal.utils import hardware

        chips = int(os.environ["TPU_CHIPS"])
        hardware.get_tpu_device_count = lambda: chips
        hardware.get_tpu_topology = lambda world_size=None: f"1,{world_size or chips},1"
        loader._init_device("tpu")
        torch.accelerator.device_count = lambda: chips
        torch.accelerator.max_memory_allocated = lambda: 0  # the CPU's client does not measure it
        if launch:
            torch.zeros(1, device="tpu")  # starts its client
    finally:
        os.environ.update(launch)
    from tests.tpu import host_group  # noqa: F401  (registers itself)

    kernel = torch.nn.functional.scaled_dot_product_attention

    def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **kwargs):
        if q.device.type != "tpu":
            return kernel(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **kwargs)
        scores = (q @ k.transpose(-2, -1)).float() * (scale or q.shape[-1] ** -0.5)
        if is_causal:
            positions = torch.arange(q.shape[-2], device=q.device)
            attn_mask = positions[:, None] >= positions
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -1e30)
        p = torch.nn.functional.dropout(torch.softmax(scores, -1), dropout_p).to(v.dtype)
        return p @ v

    torch.nn.functional.scaled_dot_product_attention = attention

    # XLA's CPU compiler of this version aborts on it; transformers calls it for the mask.
    cumsum = torch.Tensor.cumsum
    torch.Tensor.cumsum = lambda x, dim: cumsum(x.cpu(), dim).to(x.device)


if os.environ.get("TPU_CHIPS") and "-c" not in sys.orig_argv[:2]:  # torchrun and a notebook's kernel compute nothing
    start()
