"""Run by tests on a strategy: five or six steps of a tiny model, then what only the process itself can see, as JSON.

python -m tests.engine.probe PRECISION eager|compile
"""

import json
import sys
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from transformers import GPT2Config

from recipe.config import BatchPlan, OptimizerConfig
from recipe.engine import hardware
from recipe.engine.factory import open_strategy
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.optim.optimizer import make_optimizer, steps_taken

precision, mode = sys.argv[1:]
# Smaller than the embedding: compiled DDP splits the graph of this model too, as it does that of a large one.
torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1 << 14
if precision == "fp16" and not torch.cuda.is_available():  # slow on a CPU, but the same code of DeepSpeed
    from deepspeed.accelerator import cpu_accelerator

    hardware.resolve_precision = lambda precision, cpu: precision
    cpu_accelerator.CPU_Accelerator.is_fp16_supported = lambda self: True
strategy = open_strategy(precision)
device, processes = strategy.device, strategy.runtime.processes
generator = torch.Generator().manual_seed(processes.rank)
# 33 wide: no size is divisible by the number of processes.
sizes = {"vocab_size": 515, "n_positions": 16, "n_embd": 33, "n_head": 3, "n_layer": 2}
disabled = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | dict.fromkeys(
    ("bos_token_id", "eos_token_id")
)
model = GPT2LMHeadModel(GPT2Config(**sizes, **disabled), seed=1, gradient_checkpointing=mode == "compile")
initial_weights = {k: v.clone() for k, v in model.state_dict().items()}
strategy.place(model, compile="default" if mode == "compile" else "")
optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-3), **device.optimizer_options(processes))
world_size = processes.world_size
batch = BatchPlan(sequences=4 * world_size, world_size=world_size, micro=2, accumulation=2)
wrapped, optimizer = strategy.prepare(model, optimizer, batch, OptimizerConfig())


def step(factor: float = 1.0, spike_filter=strategy.spike_filter) -> float:
    """The gradient norm of a step whose loss is multiplied by `factor`."""
    for micro_step in range(batch.accumulation):
        rows = torch.randint(0, 515, (batch.micro, 17), generator=generator).to(device.torch_device)
        with strategy.micro_step(wrapped, last=micro_step == batch.accumulation - 1):
            loss = wrapped(rows[:, :-1], rows[:, 1:]) * factor / batch.accumulation
            strategy.backward(loss)
    strategy.spike_filter = spike_filter
    return strategy.update(wrapped, optimizer, loss)[0].item()


def snapshot() -> dict:
    weights, state = strategy.gather(model, optimizer)
    return weights | state | {"steps": torch.tensor(steps_taken(optimizer))}


def changes(since: dict) -> int:
    return sum(not torch.equal(since[k], v) for k, v in snapshot().items())


def state_bytes() -> int:
    tensors = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


weights, _ = strategy.gather(model, optimizer)
saved_state = {
    f"{m}.{k}": torch.rand(v.shape, generator=torch.Generator().manual_seed(2))
    for m in ("exp_avg", "exp_avg_sq")
    for k, v in initial_weights.items()
}
strategy.scatter(model, optimizer, saved_state, 7)
_, state = strategy.gather(model, optimizer)
state_kept = all(torch.equal(state[k], saved_state[k]) for k in state)  # before a step overwrites both
spike_filter = strategy.spike_filter
norms = [step() for _ in range(3)]
result = {
    "rank": processes.rank,
    "weights_kept": all(torch.equal(weights[k], initial_weights[k]) for k in weights),
    "optimizer_state_kept": state_kept,
    "names": [len(weights), len(state)],
    "steps": steps_taken(optimizer),
    "norm": norms[-1],
    "state_bytes": state_bytes(),
    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    "scaler": strategy.grad_scaler.state_dict(),
    "breaks": list(torch._dynamo.utils.counters["graph_break"]),
    # Seconds after which a collective fails, in each group that the engine and its libraries have made.
    "timeouts": [
        group._get_backend(group._device_types[0]).options._timeout.total_seconds()
        for group in torch.distributed.distributed_c10d._world.pg_map
    ],
    # DeepSpeed's own measurement of the speed, which waits for a GPU in every micro-step.
    "timed": hasattr(wrapped, "tput_timer") and wrapped.tput_timer.config.enabled,
}
before = snapshot()
result["norm_of_overflow"], result["changed_by_overflow"] = step(float("inf")), changes(before)
if not strategy.runtime.sharding.startswith("zero"):  # a finite spike is skipped in the same way
    spike = SimpleNamespace(limits={}, should_skip=lambda norm, loss: torch.ones((), device=device.torch_device))
    result["norm_of_spike"], result["changed_by_spike"] = step(spike_filter=spike), changes(before)
result["norm_after"], result["changed_after"] = step(), changes(before)
result["skipped"] = spike_filter.check(0)
sys.stdout.write("PROBE " + json.dumps(result) + "\n")
sys.stdout.flush()
strategy.runtime.close()
