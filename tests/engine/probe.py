"""Run by tests on a strategy: three steps of a tiny model, then facts that only the process itself can see, as JSON.

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
from recipe.optim.optimizer import MOMENTS, make_optimizer, steps_taken
from recipe.utils.errors import UserError

precision, mode = sys.argv[1:]
if precision == "fp16" and not torch.cuda.is_available():  # slow on a CPU, but DeepSpeed's very path
    from deepspeed.accelerator import cpu_accelerator

    hardware.resolve_precision = lambda precision, cpu: precision
    cpu_accelerator.CPU_Accelerator.is_fp16_supported = lambda self: True
strategy = open_strategy(precision)
device, processes = strategy.device, strategy.runtime.processes
generator = torch.Generator().manual_seed(processes.rank)
# 33 wide: nothing divides by the number of processes.
off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": None, "eos_token_id": None}
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=515, n_positions=16, n_embd=33, n_head=3, n_layer=2, **off),
    seed=1,
    gradient_checkpointing=mode == "compile",
)
initial = {k: v.clone() for k, v in model.state_dict().items()}
strategy.place(model, compile="default" if mode == "compile" else "")
optimizer = make_optimizer(model, OptimizerConfig(learning_rate=1e-3), **device.optimizer_options(processes))
world_size = processes.world_size
batch = BatchPlan(sequences=4 * world_size, world_size=world_size, micro=2, accumulation=2)
refused = ""
if strategy.runtime.sharding.startswith("zero"):
    try:
        strategy.prepare(model, optimizer, batch, OptimizerConfig(skip_loss_z=5.0))
    except UserError as error:
        refused = str(error)
wrapped, optimizer = strategy.prepare(model, optimizer, batch, OptimizerConfig())


def gathered() -> tuple[dict, ...]:
    """Copies of what the next call would overwrite."""
    return tuple({k: v.clone() for k, v in tensors.items()} for tensors in strategy.gather(model, optimizer))


restored, _ = gathered()
given = {
    f"{m}.{k}": torch.rand(v.shape, generator=torch.Generator().manual_seed(2))
    for m in MOMENTS
    for k, v in initial.items()
}
strategy.scatter(model, optimizer, given, 7)
_, kept = gathered()
result = {
    "rank": processes.rank,
    "refused": refused,
    "weights_kept": all(torch.equal(restored[k], initial[k]) for k in restored),
    "optimizer_state_kept": all(torch.equal(kept[k], given[k]) for k in kept),
    "names": [len(restored), len(kept)],
}
spike_filter = strategy.spike_filter
always = SimpleNamespace(limits={}, should_skip=lambda norm, loss: torch.ones((), device=device.torch_device))


def step(factor: float = 1.0, filter=spike_filter) -> float:
    """The gradient norm of a step whose loss is multiplied by `factor`."""
    for micro_step in range(batch.accumulation):
        rows = torch.randint(0, 515, (batch.micro, 17), generator=generator).to(device.torch_device)
        with strategy.micro_step(wrapped, last=micro_step == batch.accumulation - 1):
            loss = wrapped(rows[:, :-1], rows[:, 1:]) * factor / batch.accumulation
            strategy.backward(loss)
    strategy.spike_filter = filter
    return strategy.update(wrapped, optimizer, loss)[0].item()


def everything() -> dict:
    weights, state = gathered()
    return weights | state | {"steps": torch.tensor(steps_taken(optimizer))}


def own(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def timeout_of(group: torch.distributed.ProcessGroup) -> float:
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()


def changes(before: dict) -> int:
    return sum(not torch.equal(before[k], v) for k, v in everything().items())


norms = [step() for _ in range(3)]
state = optimizer.state
result |= {
    "steps": steps_taken(optimizer),
    "norm": norms[-1],
    "state_bytes": sum(own(t).nbytes for s in state.values() for t in s.values() if t.dim() > 0),
    "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
    "scaler": strategy.grad_scaler.state_dict(),
    "breaks": list(torch._dynamo.utils.counters["graph_break"]),
    # Seconds after which a collective fails, in each of the groups that the engine and its libraries have made.
    "timeouts": [timeout_of(group) for group in torch.distributed.distributed_c10d._world.pg_map],
    # DeepSpeed's own measurement of the speed, for which it waits for a GPU in every micro-step.
    "timed": hasattr(wrapped, "tput_timer") and wrapped.tput_timer.config.enabled,
}
before = everything()
result["norm_of_overflow"], result["changed_by_overflow"] = step(float("inf")), changes(before)
# A spike is skipped in the same way, although all of it is finite; ZeRO cannot.
if not refused:
    result["norm_of_spike"], result["changed_by_spike"] = step(filter=always), changes(before)
result["norm_after"], result["changed_after"] = step(), changes(before)
result["skipped"] = spike_filter.check(0)
sys.stdout.write("PROBE " + json.dumps(result) + "\n")
sys.stdout.flush()
processes.anywhere(False)  # all are done
strategy.runtime.close()
