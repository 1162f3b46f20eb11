"""`fused_loss: auto`: true if a trial on this device shows the kernel to be right and faster than the run's own loss.

A trial takes about a second, plus the compilation of the other loss if the run is compiled. It has no side effects: it
has its own random generator, and frees its memory.
"""

from functools import partial

import torch

from recipe.checkpoint.format import newest_state
from recipe.config import AUTO, Config
from recipe.engine import hardware
from recipe.engine.strategy import Strategy
from recipe.model.loss import IGNORE_INDEX, can_fuse, plain_loss_sum
from recipe.utils.errors import first_line

# Rows of a trial, enough to fill any GPU, and the most logits, for which PyTorch's own loss takes 5 GB in fp32.
ROWS, LOGITS = 4096, 4096 * 50_304
# Relative errors allowed in the loss and in its gradient's norm. Both sides compute in fp32 and round once: with
# Triton's interpreter the loss is within 1e-7, the gradient within 1e-6 in fp32 and 5e-7 in fp16. A kernel that counted
# the padding would be off by 5e-5 of the loss.
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def resolve_fused_loss(config: Config, strategy: Strategy) -> tuple[Config, str]:
    """`config` with a bool in place of `auto`, the same on every process, and the line that explains it.

    It comes from the run's newest checkpoint, if that was saved on the same kind of device; else from a trial, which
    must succeed on every process's device. A dry run expects that it does. False, without a line, where CUDA or Triton
    is missing. A collective call.
    """
    device, processes = strategy.device, strategy.runtime.processes
    if config.run.fused_loss != AUTO:
        return config, ""
    supported = device.type == "cuda" if config.run.plan_device else can_fuse(device.type)
    if processes.anywhere(not supported):
        return config.replace(fused_loss=False), ""
    if config.run.dry_run:
        return config.replace(fused_loss=True), "loss       fused kernel, if a trial finds it correct and faster"
    state = newest_state(config.run) if processes.is_main else {}
    is_same_chip = bool(state) and state["about"][-1]["device"] == device.chip
    fused = processes.broadcast_object(state["config"].get("fused_loss") if is_same_chip else None)
    if fused is not None:
        line = f"loss       {'' if fused else 'not '}fused, as in the run's newest checkpoint"
        return config.replace(fused_loss=fused), line
    result, problem = _try_kernel(config, strategy)
    for rank, reason in enumerate(processes.gather_objects(problem)):
        if reason:
            where = f"process {rank}: " if rank else ""
            return config.replace(fused_loss=False), f"loss       not fused: {where}{reason}"
    return config.replace(fused_loss=True), f"loss       fused kernel, checked on this device: {result}"


def _try_kernel(config: Config, strategy: Strategy) -> tuple[str, str]:
    """The kernel's error and speed on this process's device, and why it must not be used, empty if it may."""
    device, vocab_size, dtype = strategy.device, config.model.vocab_size, strategy.device.dtype
    width = vocab_size + -vocab_size % device.pad_vocab_to
    shape = min(ROWS, LOGITS // width), width
    compiled = config.run.torch_compile and not strategy.runtime.no_compile
    try:
        errors, speedup = compare(device.torch_device, dtype, shape, vocab_size, compiled)
    except Exception as error:  # Triton, ptxas and CUDA raise many types, and a run can do without the kernel
        return "", f"the kernel fails here, {type(error).__name__}: {first_line(error)}"
    finally:
        hardware.reset_peak_memory(device.torch_device)
    result = f"{torch.tensor(errors).max():.0e} from PyTorch's, {speedup:.1f}x as fast"  # of NaN, nan
    is_right = errors[0] <= LOSS_TOLERANCE and errors[1] <= GRADIENT_TOLERANCE[dtype]  # False for NaN
    is_faster = speedup > 1 or config.run.deterministic  # a deterministic run must not depend on a timing
    return result, "" if is_right and is_faster else f"the kernel is {'slow' if is_right else 'wrong'} here: {result}"


def compare(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], vocab_size: int, compiled: bool
) -> tuple[tuple[float, float], float]:
    """The relative errors of the kernel's loss and gradient against PyTorch's operators, on random logits of `shape`
    (N, V and padding), and its speedup over them. `compiled`: compile the operators, as a compiled run does."""
    from recipe.model.loss_kernel import cross_entropy_  # here, because it needs Triton

    plain = torch.compile(plain_loss_sum, dynamic=False, fullgraph=True) if compiled else plain_loss_sum
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, device=device, dtype=dtype, generator=generator).mul_(4)  # some tokens stand out
    targets = torch.randint(vocab_size, shape[:1], device=device, generator=generator)
    targets[::8] = IGNORE_INDEX
    kernel_logits, leaf = logits.clone(), logits.requires_grad_()

    def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy_(logits, targets, vocab_size, True).sum(), logits

    def autograd() -> tuple[torch.Tensor, torch.Tensor]:
        loss = plain(leaf, targets, vocab_size)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
        norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in (value - reference, reference)]
        return (norms[0] / norms[1]).item()

    loss_error, gradient_error = (relative_error(*pair) for pair in zip(kernel(kernel_logits), autograd(), strict=True))
    # The kernel works in place, so the timing runs it on its own gradients; its time does not depend on the values.
    calls = (autograd, partial(kernel, kernel_logits))
    seconds = [hardware.seconds_of(lambda call=call: call()[0]) for call in calls]
    return (loss_error, gradient_error), seconds[0] / seconds[1]
