"""Where a training step's time goes, by torch.profiler: matrix products, attention, elementwise and so on.

    python -m benchmarks.profile --n_layer 4 --n_head 4 --n_embd 128 --sequence_length 128

On a GPU by the time of kernels on the device, on a CPU by the time of operators without those they call. A kernel that
torch.compile has fused counts where its most telling part belongs: a sum that is fused into a layer norm is no group
of its own.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from recipe.config import batch_arithmetic, parse_config
from recipe.data.tokenizer import VOCAB_SIZE
from recipe.engine import device as hardware
from recipe.engine.factory import open_engine
from recipe.errors import UserError
from recipe.estimate.micro_batch import micro_batch
from recipe.model.build import build_model
from recipe.optim import adamw as optim
from recipe.optim.spike_filter import SpikeFilter

# Group: what its names contain; the first that fits counts, so the telling comes before the general (attention's
# kernels are made with cutlass, copies are elementwise kernels). The names are those of torch 2.9 to 2.13 with NCCL,
# cuBLAS and cuDNN on V100 to H100, and of ATen's operators on a CPU.
_RULES = (
    ("communication", r"nccl|gloo:|c10d::|all_?reduce|all_?gather|reduce_?scatter|(^|:)broadcast$"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|efficient_attention|mem_?eff|flex_attention"),
    ("optimizer", r"adamw?|multi_tensor_apply|_foreach_|norm_?two_?ops|lpnorm|vector_norm|optimizer\.|_amp_"),
    ("loss", r"log_?softmax|nll_?loss|cross_entropy|logsumexp|softmax_online|losssum|(^|::)(gather|scatter_add)_?$"),
    ("attention", r"softmax"),  # GPT-2's only other one, where attention is not one kernel
    (
        "gemm",
        r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|s(884|1688|16816)|triton_(tem|mm|bmm|addmm)|mkl|_linear_"
        r"|(^|::)(addmm|mm|bmm|baddbmm|matmul|linear)$",
    ),
    (
        "embedding",
        r"embedding|indexselect|index_select|vectorized_gather|grad_weight|partials_per_segment|radixsort"
        r"|sum_and_scatter|arange",
    ),
    ("elementwise", r"layer_?norm|gammabeta|gelu|tanh|dropout|bernoulli"),
    (
        "copies",
        r"memcpy|memset|copy|catarray|fillfunctor|(^|::)(to|clone|contiguous|cat|zero_|zeros|zeros_like|fill_"
        r"|ones|ones_like|full|full_like|pad|constant_pad_nd|pin_memory|lift_fresh)$",
    ),
    (
        "elementwise",
        r"elementwise|reduce_kernel|(^|::)(add|sub|rsub|mul|div|neg|abs|exp|log|pow|sqrt|rsqrt|reciprocal"
        r"|sum|mean|var|where|clamp|clamp_min|clamp_max|maximum|minimum|isfinite|eq|ne|lt|gt|le|ge|logical_\w+"
        r"|bitwise_\w+|any|all|stack|std|floor_divide|remainder|threshold_backward)_?$",
    ),
    ("compiled", r"compiledfxgraph"),
    (
        "framework",
        r"(^|::)(empty|empty_like|empty_strided|empty_permuted|new_\w+|as_strided|view|_unsafe_view|_reshape"
        r"_alias|reshape|transpose|t|permute|expand|expand_as|slice|select|split|split_with_sizes|unbind|narrow"
        r"|squeeze|unsqueeze|flatten|unflatten|detach|detach_|alias|view_as|view_as_real|resize_|set_|item"
        r"|_local_scalar_dense|is_nonzero|result_type|_has_\w+|chunk|record_stream|\w+_backward_autograd"
        r"|scalar_tensor|tensor|resolve_conj|resolve_neg)$|autograd|accumulategrad|backward\d+$|distributeddataparallel"
        r"|bytecode|^profilerstep|^cuda[A-Z]\w+|^cu[A-Z]\w+|torch-compiled|compiledfunction|dynamo|aot",
    ),
)
_RULES = tuple((group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _RULES)
# "compiled" is code of inductor's on a CPU, whose kernels have no names unless `name_compiled_kernels` came before;
# "framework" is views, allocation and bookkeeping, "other" what no rule knows.
GROUPS = (
    "gemm",
    "attention",
    "elementwise",
    "loss",
    "embedding",
    "optimizer",
    "copies",
    "communication",
    "compiled",
    "framework",
    "other",
)

# A kernel of inductor: kind and fused operators, joined by underscores.
_FUSED = re.compile(r"(?:triton_(?:poi|red|per|for|spl)|(?:graph_\d+_)?cpp)_fused_(.*?)(?:_\d+)?$")
_MOVES = re.compile(
    r"_?_?(to_copy|clone|copy|cat|constant_pad_nd|slice_backward|slice|view|transpose|permute|t|expand|select"
    r"|select_backward|split|unsqueeze|squeeze|zeros_like|zeros|new_zeros|fill|full|empty|select_scatter|as_strided)"
)
_SDPA = {
    "cudnn": r"cudnn\w*sdpa|scaled_dot_product_cudnn",
    "flash": r"flash_(fwd|bwd)|pytorch_flash|flash_attention",
    "efficient": r"fmha_cutlass|efficient_attention|memeffattention",
    "math": r"scaled_dot_product_attention_math",
}


def classify(name: str) -> str:
    """The group, one of GROUPS, of a kernel or operator by its name; "other" where no rule knows it."""
    if fused := _FUSED.match(name):
        return _classify_fused(fused.group(1))
    return next((group for group, pattern in _RULES if pattern.search(name)), "other")


def _classify_fused(parts: str) -> str:
    if re.search(r"log_softmax|nll_loss|logsumexp|softmax_online", parts):
        return "loss"
    if "embedding" in parts:
        return "embedding"
    # What is left after everything that only moves: nothing, or arithmetic.
    return "copies" if not re.sub(r"_|\d", "", _MOVES.sub("", parts)) else "elementwise"


def sdpa_kernels(names: list[str]) -> list[str]:
    """Which of SDPA's implementations these kernels and operators are: cudnn, flash, efficient, math."""
    return [kind for kind, pattern in _SDPA.items() if any(re.search(pattern, n, re.IGNORECASE) for n in names)]


def name_compiled_kernels() -> None:
    """Before a model is compiled for a CPU, has each kernel tell the profiler its name, at a small cost; on a GPU
    all do."""
    torch._inductor.config.cpp.enable_kernel_profile = True


def profile_step(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict:
    """Calls `step` twice to warm up and `steps` times under the profiler.

    Returns:
        a dict for JSON: `shares` of the accounted time by group, which add up to 1; `seconds` a step by group and
        `accounted_seconds`, their sum; `wall_seconds` a step under the profiler, which slows small steps down (what
        is not accounted is Python, or an idle GPU); `top`, the longest kernels of all; `unknown`, the longest of
        "other"; `sdpa`, the implementations of attention that were seen.
    Raises:
        UserError: the profiler sees nothing of this device.
    """
    for _ in range(2):
        step()
    hardware.synchronize(device)
    with profile(activities=supported_activities(), acc_events=True) as profiler:
        start = time.perf_counter()
        for _ in range(steps):
            step()
        hardware.synchronize(device)
        wall = (time.perf_counter() - start) / steps
    averages = profiler.key_averages()
    on_cpu = device.type == "cpu"
    seconds: dict[str, float] = {}
    for event in averages:
        # An annotation spans kernels that are listed themselves; an operator's time on a GPU is that of its kernels.
        if (event.device_type == DeviceType.CPU) != on_cpu or (not on_cpu and event.is_user_annotation):
            continue
        spent = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        if spent > 0:
            seconds[event.key] = seconds.get(event.key, 0.0) + 1e-6 * spent / steps
    if not seconds:
        raise UserError(f"torch's profiler sees nothing of what {device.type} does; profile on a CPU or an Nvidia GPU")
    groups: dict[str, float] = defaultdict(float)
    for name, spent in seconds.items():
        groups[classify(name)] += spent
    total = sum(groups.values())
    longest = sorted(seconds, key=seconds.get, reverse=True)

    def table(names: list[str]) -> list[dict]:
        return [{"name": n, "group": classify(n), "share": seconds[n] / total} for n in names]

    return {
        "device": str(device),
        "steps": steps,
        "shares": {group: groups[group] / total for group in GROUPS},
        "seconds": {group: groups[group] for group in GROUPS},
        "accounted_seconds": total,
        "wall_seconds": wall,
        "top": table(longest[:12]),
        "unknown": table([n for n in longest if classify(n) == "other"][:6]),
        "sdpa": sdpa_kernels([event.key for event in averages]),
    }


def lines(figures: dict) -> list[str]:
    """The figures of `profile_step` for the terminal."""
    out = [
        f"profile    {figures['steps']} steps on {figures['device']}, {1e3 * figures['wall_seconds']:.2f} ms each "
        f"under the profiler, {1e3 * figures['accounted_seconds']:.2f} ms accounted for"
    ]
    out += [
        f"  {group:14} {100 * share:5.1f} %  {1e3 * figures['seconds'][group]:9.3f} ms"
        for group, share in sorted(figures["shares"].items(), key=lambda item: -item[1])
    ]
    out.append(f"attention  {', '.join(figures['sdpa']) or 'no kernel of SDPA was seen'}")
    out.append("longest")
    out += [f"  {100 * line['share']:5.1f} %  {line['group']:14} {line['name'][:90]}" for line in figures["top"]]
    if figures["unknown"]:
        out.append("not known to any group")
        out += [f"  {100 * line['share']:5.1f} %  {line['name'][:90]}" for line in figures["unknown"]]
    return out


def recipe_step(argv: list[str]) -> tuple[Callable[[], None], torch.device]:
    """A step of the recipe that these arguments of recipe/train.py describe, on random tokens, and its device. Raises
    UserError, as a run would."""
    config = parse_config(argv)
    engine = open_engine(config.run.precision)
    config, _ = micro_batch(config, engine, lambda line: None)
    batch = batch_arithmetic(config, engine.world, engine.devices)
    model = build_model(config, **engine.model_options)
    if config.run.torch_compile:
        name_compiled_kernels()
    engine.place(model, compile=config.run.torch_compile_mode if config.run.torch_compile else "")
    optimizer = optim.make_optimizer(model, config.optimizer, **engine.optimizer_options)
    model, optimizer = engine.prepare(model, optimizer, batch, config.optimizer.max_grad_norm)
    spike_filter = SpikeFilter(engine.device, config.optimizer)
    rows = torch.randint(0, VOCAB_SIZE, (batch.micro, config.data.sequence_length + 1))
    rows = engine.to_device(rows)

    def step() -> None:
        loss = torch.zeros((), device=engine.device)
        for micro_step in range(batch.accumulation):
            with engine.micro_step(model, last=micro_step == batch.accumulation - 1):
                loss = model(rows[:, :-1], rows[:, 1:]) / batch.accumulation
                engine.backward(loss)
        engine.optimizer_step(model, optimizer, config.optimizer.max_grad_norm, spike_filter, loss.detach())
        engine.flush()

    return step, engine.device


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Where a step's time goes. All other arguments are those of recipe/train.py.", allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=3, help="under the profiler")
    parser.add_argument("--output", default="", help="JSON file for the figures")
    arguments, rest = parser.parse_known_args(argv)
    try:
        step, device = recipe_step(rest)
        figures = profile_step(step, device, arguments.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(figures)))
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
