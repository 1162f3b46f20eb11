"""`fused_loss: auto`: true where the kernel, tried on this device, is right and faster than what a run does without it.

A trial takes about a second, and some more to compile what it is compared with, if the run is compiled. It has no side
effects: its random numbers are its own, and its memory is freed.
"""

from functools import partial

import torch

from recipe.checkpoint.format import newest_state
from recipe.config import AUTO, Config
from recipe.engine import hardware
from recipe.engine.device import Device
from recipe.engine.strategy import Strategy
from recipe.model.loss import IGNORE_INDEX, can_fuse, plain_loss_sum
from recipe.utils.errors import first_line

ROWS = 4096  # of 50,304 logits: enough to fill any GPU; of fp32 PyTorch's own loss takes 5 GB
# Allowed of the loss, relative, and of its gradient by the norm. Both sides compute in fp32 and round once: by Triton's
# interpreter they are within 1e-7, and 1e-6 in fp32 and 5e-7 in fp16. Counting the padding would be 5e-5 of the loss.
LOSS, GRADIENT = 1e-5, {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-3}


def fused_loss(config: Config, strategy: Strategy) -> tuple[Config, str]:
    """`config` with a bool in place of `auto`, the same on every process, and the line that explains it.

    It comes from the run's newest checkpoint, if that was saved on such a device; else from a trial on the devices of
    all processes, none of which uses a kernel that fails on one. A dry run expects it to succeed. False, without a
    line, where there is no CUDA or no Triton. A collective call.
    """
    device, processes = strategy.device, strategy.runtime.processes
    if config.run.fused_loss != AUTO:
        return config, ""
    able = device.type == "cuda" if config.run.plan_device else can_fuse(device.type)
    if processes.anywhere(not able):
        return config.replace(fused_loss=False), ""
    if config.run.dry_run:
        return config.replace(fused_loss=True), "loss       fused kernel, if the run finds it right and faster"
    kept = processes.broadcast_object(_of_checkpoint(config, device.chip) if processes.is_main else None)
    if kept is not None:
        line = f"loss       {'' if kept else 'not '}fused, as in the run's newest checkpoint"
        return config.replace(fused_loss=kept), line
    measured, wrong = _tried(config, device)
    if processes.anywhere(bool(wrong)):
        why = wrong or "the kernel fails on another process"
        return config.replace(fused_loss=False), f"loss       not fused: {why}"
    return config.replace(fused_loss=True), f"loss       fused kernel, checked here: {measured}"


def _of_checkpoint(config: Config, chip: str) -> bool | None:
    """What the newest checkpoint of this run has, if it was saved on the same kind of device."""
    state = newest_state(config.run)
    return state["config"].get("fused_loss") if state and state["about"][-1]["device"] == chip else None


def _tried(config: Config, device: Device) -> tuple[str, str]:
    """What the kernel does on this process's device, and why it is not to be used, empty where it is."""
    vocab_size, dtype = config.model.vocab_size, device.dtype
    shape = ROWS, vocab_size + -vocab_size % device.pad_vocab_to
    compiled = config.run.torch_compile and not device.no_compile
    try:
        apart, times = compare(device.torch_device, dtype, shape, vocab_size, compiled)
    except Exception as error:  # Triton, ptxas and CUDA raise many types, and a run can do without the kernel
        return "", f"the kernel fails here, {type(error).__name__}: {first_line(error)}"
    finally:
        hardware.reset_peak_memory(device.torch_device)
    measured = f"{max(apart):.0e} from PyTorch's, {times:.1f}x its speed"
    right = apart[0] <= LOSS and apart[1] <= GRADIENT[dtype]  # NaN is not
    faster = times > 1 or config.run.deterministic  # of which two runs could measure the time differently
    return measured, "" if right and faster else f"the kernel is {'slow' if right else 'wrong'} here: {measured}"


def compare(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int], vocab_size: int, compiled: bool
) -> tuple[tuple[float, float], float]:
    """How far the kernel's loss and gradient of random logits, (N, V and padding), are from those of PyTorch's own
    operators, relative, and how many times as fast it is. `compiled`: as those operators are then."""
    from recipe.model.loss_kernel import cross_entropy_  # here, because it needs Triton

    plain = torch.compile(plain_loss_sum, dynamic=False, fullgraph=True) if compiled else plain_loss_sum
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, device=device, dtype=dtype, generator=generator).mul_(4)  # some tokens stand out
    targets = torch.randint(vocab_size, shape[:1], device=device, generator=generator)
    targets[::8] = IGNORE_INDEX
    own, leaf = logits.clone(), logits.requires_grad_()

    def kernel(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cross_entropy_(logits, targets, vocab_size, True).sum(), logits

    def autograd() -> tuple[torch.Tensor, torch.Tensor]:
        loss = plain(leaf, targets, vocab_size)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in (ours - theirs, theirs)]
        return (norms[0] / norms[1]).item()

    loss, gradient = (apart(*pair) for pair in zip(kernel(own), autograd(), strict=True))
    # In place, of its own results: what the numbers are makes no difference.
    seconds = [hardware.seconds_of(lambda call=call: call()[0]) for call in (autograd, partial(kernel, own))]
    return (loss, gradient), seconds[0] / seconds[1]
