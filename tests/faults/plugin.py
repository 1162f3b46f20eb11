"""Makes a process fail at a chosen point, without any hook in the product.

    RECIPE_FAULT=kill@rename(*/model.safetensors)
    RECIPE_FAULT=enospc@write(*/run/.saving-*):2-
    RECIPE_FAULT=nan@step.loss:3/1

The variable holds ACTION@POINT; :N is the N-th time that a process reaches the point (default: the first; `N-`: the
N-th and all later ones), /RANK one of several processes (default: all). tests/processes.py installs the plugin in the
processes that it forks, load/sitecustomize.py in new interpreters.

Actions: kill, term and int (send that signal to this process), enospc and eio (the call fails), stall (it never
returns), nan and inf (replace a value), record (no fault: log all calls on matching paths, for power.py). Each fault is
appended to the file RECIPE_FAULT_LOG, so that a test can tell a fault that the run survived from one that never
happened.

One kind of point is a system call on a path that matches a pattern, which shim.c intercepts: open (that creates or
truncates), write, truncate, rename (by its target), unlink, mkdir, fsync. The fault comes before the call, but a
process killed in a write has written half. The other points are passed by any implementation:
    step.micro                  after a micro-step's backward pass
    step.loss, step.gradient    values: a micro-step's loss; a gradient before it is averaged across processes
    evaluate.validation, evaluate.hellaswag     before each batch of such an evaluation
The action wrong fakes a broken machine for preflight.py, in one or several places, joined by dots: kernel (attention on
a CPU in bf16), compiled (a block compiled by torch.compile), sum (over processes, on rank 1), saved (a checkpoint's
weights while they are copied).
"""

import ctypes
import os
import re
import shutil
import signal

_fault = None


class _Fault:
    def __init__(self, text: str):
        match = re.fullmatch(r"(\w+)@([\w.]+?|\w*\(.*\))(?::(\d+)(-?))?(?:/(\d+))?", text)
        self.action, self.point = match[1], match[2]
        self.first, self.repeats = int(match[3] or 1), bool(match[4])
        self.on_this_rank = match[5] in (None, os.environ.get("RANK", "0"))
        self.reached = 0

    def is_due(self, point: str) -> bool:
        """Call it each time that the process reaches a point."""
        if point != self.point or not self.on_this_rank:
            return False
        self.reached += 1
        is_due = self.reached == self.first or (self.repeats and self.reached > self.first)
        if is_due and (log := os.environ.get("RECIPE_FAULT_LOG")):
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, f"{self.action}@{point}\n".encode())
            os.close(fd)
        return is_due


def install(text: str) -> None:
    """Patches this process for the fault that `text` names."""
    global _fault
    _fault = _Fault(text)
    if _fault.action == "wrong":
        _break_machine(_fault.point.split("."))
    elif not _fault.point.endswith(")"):
        _patch_model()
    elif _fault.on_this_rank:
        _arm_shim(_fault)


def _at(point: str) -> None:
    """Sends the signal if the fault is due."""
    if _fault.is_due(point):
        os.kill(os.getpid(), getattr(signal, f"SIG{_fault.action.upper()}"))


def _value(point: str, tensor):
    """A tensor, or the NaN or infinity that the fault puts in its place."""
    return tensor * float(_fault.action) if _fault.is_due(point) else tensor


def _arm_shim(fault: _Fault) -> None:
    call, pattern = fault.point.removesuffix(")").split("(")
    words = [text.encode() for text in (fault.action, call, pattern, os.environ["RECIPE_FAULT_LOG"])]
    numbers = ctypes.c_long(fault.first), ctypes.c_long(fault.repeats)
    ctypes.CDLL(None).shim_arm(*words[:3], *numbers, words[3])


def _break_machine(places: list[str]) -> None:
    if "kernel" in places:
        from recipe.engine import device

        attention = device.block_attention
        device.block_attention = lambda *args, **kwargs: attention(*args, **kwargs) * 1.1
    if "sum" in places and os.environ.get("RANK") == "1":
        import torch.distributed as dist

        all_reduce = dist.all_reduce

        def wrong_sum(tensor, *args, **kwargs):
            work = all_reduce(tensor, *args, **kwargs)
            if tensor.numel() > 1:
                tensor[-1] += 1
            return work

        dist.all_reduce = wrong_sum
    if "compiled" in places:
        import torch

        from recipe.model.gpt2 import Block

        forward = Block.forward

        def miscompiled(self, x, *args):
            y = forward(self, x, *args)
            return 2 * x - y if torch.compiler.is_compiling() else y

        Block.forward = miscompiled
    if "saved" in places:
        copytree = shutil.copytree

        def damaging_copytree(source, target, **kwargs):
            copytree(source, target, **kwargs)
            weights = target / "model.safetensors"
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)

        shutil.copytree = damaging_copytree


def _patch_model() -> None:
    import torch

    from recipe.estimate import speed
    from recipe.model import gpt2

    speed.cpu_flops = lambda precision, model: 1e11  # it runs a model for half a second, and its passes do not count
    forward, transform, backward = gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward, torch.autograd.backward
    has_hook = False

    def faulty_forward(self, input_ids, targets=None):
        nonlocal has_hook
        if not self.training:
            if targets is not None:
                _at("evaluate.validation")
            return forward(self, input_ids, targets)
        if not has_hook:
            next(self.parameters()).register_hook(lambda gradient: _value("step.gradient", gradient))
            has_hook = True
        return _value("step.loss", forward(self, input_ids, targets))

    def faulty_transform(self, ids, *positions_and_mask):
        if positions_and_mask and not self.training:
            _at("evaluate.hellaswag")
        return transform(self, ids, *positions_and_mask)

    def faulty_backward(*args, **kwargs) -> None:
        backward(*args, **kwargs)
        _at("step.micro")

    gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward = faulty_forward, faulty_transform
    torch.autograd.backward = faulty_backward
