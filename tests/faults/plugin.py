"""Makes a process fail at a chosen point; the product knows nothing of it.

    RECIPE_FAULT=kill@rename(*/model.safetensors)
    RECIPE_FAULT=enospc@write(*/run/.saving-*):2-
    RECIPE_FAULT=nan@step.loss:3/1

The variable holds ACTION@POINT, with :N for the N-th time that a process reaches the point (default: the first time;
`N-`: that and all later ones), and /RANK for one of several processes (default: all). tests/processes.py installs the
plugin in the processes it forks, load/sitecustomize.py in others.

Actions: kill, term (that signal, to this process), enospc and eio (the call fails), stall (it never ends), nan and inf
(of a value), record (no fault: the log gets all calls that change what matches, for power.py). What has happened is
appended to the file that RECIPE_FAULT_LOG names, so that a test can tell a fault that was survived from one that never
came.

Points are a system call on a path that matches a pattern, before it (a rename has the path of its target; what is
killed in a write has written half), which shim.c intercepts: open (that creates or truncates), write, truncate, rename,
unlink, mkdir, fsync. And those that any implementation passes:
    step.micro                  after a micro-step's backward pass
    step.loss, step.gradient    values: a micro-step's loss; a gradient before it is averaged across processes
    evaluate.validation, evaluate.hellaswag     before each batch of such an evaluation
The action wrong breaks a machine for preflight.py, in one or several places, joined by dots: kernel (attention on a CPU
in bf16), compiled (a block, where torch.compile has made a program of it), sum (over processes, on rank 1), saved (a
checkpoint's weights, as they are copied).
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
        self.first, self.go_on = int(match[3] or 1), bool(match[4])
        self.here = match[5] in (None, os.environ.get("RANK", "0"))
        self.reached = 0

    def due(self, point: str) -> bool:
        if point != self.point or not self.here:
            return False
        self.reached += 1
        due = self.reached == self.first or (self.go_on and self.reached > self.first)
        if due and (log := os.environ.get("RECIPE_FAULT_LOG")):
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, f"{self.action}@{point}\n".encode())
            os.close(fd)
        return due


def install(text: str) -> None:
    """Patches this process for the fault that `text` names."""
    global _fault
    _fault = _Fault(text)
    if _fault.action == "wrong":
        _break_machine(_fault.point.split("."))
    elif not _fault.point.endswith(")"):
        _patch_model()
    elif _fault.here:
        _arm_shim(_fault)


def _at(point: str) -> None:
    """Has the fault happen if it is due."""
    if _fault.due(point):
        os.kill(os.getpid(), {"term": signal.SIGTERM, "kill": signal.SIGKILL}[_fault.action])


def _value(point: str, tensor):
    """A tensor, or the NaN or infinity that the fault puts in its place."""
    return tensor * float(_fault.action) if _fault.due(point) else tensor


def _arm_shim(fault: _Fault) -> None:
    call, pattern = fault.point.removesuffix(")").split("(")
    words = [text.encode() for text in (fault.action, call, pattern, os.environ["RECIPE_FAULT_LOG"])]
    numbers = ctypes.c_long(fault.first), ctypes.c_long(fault.go_on)
    ctypes.CDLL(None).shim_arm(*words[:3], *numbers, words[3])


def _break_machine(places: list[str]) -> None:
    if "kernel" in places:
        from recipe.engine import device

        right = device.block_attention
        device.block_attention = lambda *arguments, **named: right(*arguments, **named) * 1.1
    if "sum" in places and os.environ.get("RANK") == "1":
        import torch.distributed as dist

        all_reduce = dist.all_reduce

        def wrong_sum(tensor, *arguments, **named):
            done = all_reduce(tensor, *arguments, **named)
            if tensor.numel() > 1:
                tensor[-1] += 1
            return done

        dist.all_reduce = wrong_sum
    if "compiled" in places:
        import torch

        from recipe.model.gpt2 import Block

        forward = Block.forward

        def miscompiled(self, x, *arguments):
            y = forward(self, x, *arguments)
            return 2 * x - y if torch.compiler.is_compiling() else y

        Block.forward = miscompiled
    if "saved" in places:
        copytree = shutil.copytree

        def damaged(source, target, **named):
            copytree(source, target, **named)
            weights = target / "model.safetensors"
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)

        shutil.copytree = damaged


def _patch_model() -> None:
    import torch

    from recipe.model import gpt2

    forward, evaluate, backward = gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward, torch.autograd.backward
    hooked = False

    def faulty_forward(self, input_ids, targets=None):
        nonlocal hooked
        if not self.training:
            if targets is not None:
                _at("evaluate.validation")
            return forward(self, input_ids, targets)
        if not hooked:
            next(self.parameters()).register_hook(lambda gradient: _value("step.gradient", gradient))
            hooked = True
        return _value("step.loss", forward(self, input_ids, targets))

    def faulty_evaluate(self, ids, *positions_and_mask):
        if positions_and_mask and not self.training:
            _at("evaluate.hellaswag")
        return evaluate(self, ids, *positions_and_mask)

    def faulty_backward(*arguments, **options) -> None:
        backward(*arguments, **options)
        _at("step.micro")

    gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward = faulty_forward, faulty_evaluate
    torch.autograd.backward = faulty_backward
