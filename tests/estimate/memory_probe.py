r"""Byte-exact peaks of training steps, for test_memory.py and docs/log.md's table; a line of JSON a configuration.

    python -m tests.estimate.memory_probe --real='--n_layer=2 ...' --fake='--config=gpt2-xl ...'
    accelerate launch --config_file accelerate_configs/zero1.yaml --num_processes 2 \
        -m tests.estimate.memory_probe --real='...'

--real takes two steps of the real engine on the CPU and reads every allocation and release of the second from PyTorch's
profiler: of compiled code's buffers too. --fake does the same on fake tensors, which have sizes but no memory, without
compilation: for models that do not fit here. Both run CUDA's arithmetic: its autocast takes layer norm in fp32, which
the CPU's does not, and the head is padded to a multiple of 128 rows.
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

if __name__ == "__main__":  # before the imports; not in a program that imports this and may run on a GPU
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
from recipe.model.build import build_model
from recipe.model.gpt2 import GPT2LMHeadModel, LayerNorm
from recipe.optim import optimizer as optim

OPTIONS = ["--config=gpt2", "--dataset_name=x", "--warmup_steps=0", "--precision=bf16", "--torch_compile=false"]


def cudas_layer_norm(self, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        x = x.to(self.weight.dtype)  # fp32, except under FSDP
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Allocated(TorchDispatchMode):
    """Bytes of all storages that are alive, `now` and at their `peak`."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.seen = weakref.WeakSet()

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage not in self.seen:
            self.seen.add(storage)
            self.now += storage.nbytes()
            weakref.finalize(storage, self.gone, storage.nbytes())

    def gone(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        self.peak = max(self.peak, self.now)
        return result


def flash_attention(q, k, v, dropout):
    """The kernel that a device chooses; for fake tensors SDPA would be written out, scores and all."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, True)[0]


def profiled(step) -> int:
    """The most bytes that were allocated while `step` ran, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    stack, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]":
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
    first = min(events)
    return max(total for _, total, _ in events) - (first[1] - first[2])


def alive() -> int:
    """Bytes of all tensors there are."""
    gc.collect()
    storages = [o.untyped_storage() for o in gc.get_objects() if type(o) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure(words: str, fake: bool) -> dict:
    torch.compiler.reset()
    AcceleratorState._reset_state(True)
    options, _, vocabulary = words.partition(" of ")  # "--n_layer=4 of 512": with a vocabulary of 512 tokens
    config = parse_config([*OPTIONS, *shlex.split(options)])
    if vocabulary:
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=int(vocabulary)))
    strategy = open_strategy(config.run.precision)
    batch = batch_arithmetic(config, strategy.runtime.processes.world_size)
    LayerNorm.forward = cudas_layer_norm
    opt, shape = config.optimizer, (batch.micro, config.data.sequence_length + 1)

    # The CPU's own attention keeps probabilities, which a GPU's does not.
    attention = flash_attention if fake else None
    strategy.device = device = dataclasses.replace(strategy.device, pad_vocab_to=128, attention=attention)
    with FakeTensorMode() if fake else contextlib.nullcontext():
        if fake:  # the weights are drawn with a generator, which fakes do not take
            GPT2LMHeadModel._init_weights = lambda self, generator: None
            strategy._accelerator.device_placement = False  # they are where they belong, and cannot be moved
        model = build_model(config, load_init_from=False, **device.model_options)
        model.loss = partial(model.loss, by_rows=False)  # as a GPU takes it
        if not fake:
            strategy.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
        optimizer = optim.make_optimizer(model, opt, **device.optimizer_options(strategy.runtime.processes))
        prepared, optimizer = strategy.prepare(model, optimizer, batch, opt)
        prepared.train()

        def micro_steps():
            for number in range(batch.accumulation):
                rows = torch.arange(shape[0] * shape[1]).remainder(config.model.vocab_size).view(shape)
                with strategy.micro_step(prepared, last=number == batch.accumulation - 1):
                    strategy.backward(prepared(rows[:, :-1], rows[:, 1:]) / batch.accumulation)

        def update():
            strategy.update(prepared, optimizer, torch.zeros(()))

        parameters = sum(p.nbytes for p in model.parameters())
        if fake:
            with Allocated() as allocated:
                for p in model.parameters():
                    allocated.see(p)
                micro_steps()
            # AdamW's fused kernel works in place, on two moments as large as the weights.
            peak = allocated.peak + 2 * parameters
        else:
            micro_steps()
            update()
            peak = alive() + profiled(lambda: (micro_steps(), update()))
    kind = {"precision": device.precision, "sharding": strategy.runtime.sharding}
    return {
        "options": words,
        "measured": peak,
        "estimate": step_memory(config, batch, compiled=config.run.torch_compile, **kind).peak,
        "state": state_bytes(
            config, strategy.runtime.processes.world_size, strategy.runtime.sharding, device.precision
        ),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--real", action="append", default=[])
    parser.add_argument("--fake", action="append", default=[])
    args = parser.parse_args()
    for fake, configurations in ((False, args.real), (True, args.fake)):
        for words in configurations:
            line = json.dumps(measure(words, fake))
            if os.environ.get("RANK", "0") == "0":
                print(line, flush=True)
