r"""Byte-exact memory peaks of training steps, for test_memory.py and the table in docs/log.md; prints a line of JSON
per configuration.

    python -m tests.estimate.memory_probe --real='--n_layer=2 ...' --fake='--config=gpt2-xl ...'
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 2 \
        -m tests.estimate.memory_probe --real='...'

--real takes two steps of the real engine on the CPU and reads every allocation and release of the second from PyTorch's
profiler, including the buffers of compiled code. --fake does the same, without compilation, on fake tensors, which have
sizes but no memory: for models that do not fit here. Both compute as on CUDA: autocast computes layer norm in fp32,
unlike the CPU's, and the head is padded to a multiple of 128 rows.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import shlex
import weakref
from functools import partial

if __name__ == "__main__":  # before the imports; a program that imports this may run on a GPU
    os.environ["ACCELERATE_USE_CPU"] = "true"

import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recipe.config import batch_arithmetic, parse_config
from recipe.engine.factory import open_strategy
from recipe.estimate.memory import state_bytes, step_memory
from recipe.model import loss
from recipe.model.build import build_model
from recipe.model.gpt2 import GPT2LMHeadModel, LayerNorm
from recipe.optim import optimizer as optim

OPTIONS = ["--config=gpt2", "--dataset_name=x", "--warmup_steps=0", "--precision=bf16", "--torch_compile=false"]


def cuda_layer_norm(self, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        x = x.to(self.weight.dtype)  # fp32, except under FSDP
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class AllocationCounter(TorchDispatchMode):
    """The bytes of all live storages: now, and their peak."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.seen:
            self.seen.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.release, storage.nbytes())

    def release(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        self.peak = max(self.peak, self.now)
        return result


def flash_attention(q, k, v, dropout):
    """The kernel that a GPU uses; on fake tensors SDPA would compute the scores too."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, True)[0]


def profiled(step) -> int:
    """The peak of allocated bytes while `step` runs, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    stack, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]":
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
    _, first_total, first_size = min(events)
    return max(total for _, total, _ in events) - (first_total - first_size)


def tensor_bytes() -> int:
    """The bytes of all tensors in this process."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(options: str, fake: bool) -> dict:
    torch.compiler.reset()
    AcceleratorState._reset_state(True)
    flags, _, vocab_size = options.partition(" of ")  # "--n_layer=4 of 512": with a vocabulary of 512 tokens
    config = parse_config([*OPTIONS, *shlex.split(flags)])
    if vocab_size:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=int(vocab_size)))
    strategy = open_strategy(config.run.precision)
    batch = batch_arithmetic(config, strategy.runtime.processes.world_size)
    LayerNorm.forward = cuda_layer_norm
    loss._KERNELS["fused"] = lambda logits, *_: logits[0, 0].float()  # like the kernel, it works in place
    opt, shape = config.optimizer, (batch.micro, config.data.sequence_length + 1)

    # The CPU's own attention keeps the probabilities, a GPU's does not.
    attention = flash_attention if fake else None
    strategy.device = device = dataclasses.replace(strategy.device, pad_vocab_to=128, attention=attention)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        if fake:  # fake tensors take no generator
            GPT2LMHeadModel._init_weights = lambda self, generator: None
            strategy._accelerator.device_placement = False  # fake tensors cannot be moved
        model = build_model(config, load_init_from=False, **device.model_options)
        model.loss = partial(model.loss, by_rows=False)  # as on a GPU
        if not fake:
            strategy.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
        optimizer = optim.make_optimizer(model, opt, **device.optimizer_options(strategy.runtime.processes))
        wrapped_model, optimizer = strategy.prepare(model, optimizer, batch, opt)
        wrapped_model.train()

        def micro_steps():
            for number in range(batch.accumulation):
                rows = torch.arange(shape[0] * shape[1]).remainder(config.model.vocab_size).view(shape)
                with strategy.micro_step(wrapped_model, last=number == batch.accumulation - 1):
                    strategy.backward(wrapped_model(rows[:, :-1], rows[:, 1:]) / batch.accumulation)

        def update():
            strategy.update(wrapped_model, optimizer, torch.zeros(()))

        parameters = sum(p.nbytes for p in model.parameters())
        if fake:
            with AllocationCounter() as counter:
                for p in model.parameters():
                    counter.add(p)
                micro_steps()
            # AdamW's fused kernel works in place, on two moments of the weights' size.
            peak = counter.peak + 2 * parameters
        else:
            micro_steps()
            update()
            peak = tensor_bytes() + profiled(lambda: (micro_steps(), update()))
    precision, sharding = device.precision, strategy.runtime.sharding
    compiled = config.run.torch_compile
    return {
        "options": options,
        "measured": peak,
        "estimate": step_memory(config, batch, precision=precision, sharding=sharding, compiled=compiled).peak,
        "state": state_bytes(config, batch, sharding, precision),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="append", default=[])
    parser.add_argument("--fake", action="append", default=[])
    args = parser.parse_args()
    for fake, configurations in ((False, args.real), (True, args.fake)):
        for options in configurations:
            line = json.dumps(measure(options, fake))
            if os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
