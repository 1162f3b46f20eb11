"""Makes a process fail at a chosen point; the product knows nothing of it.

    RECIPE_FAULT=kill@save.model.safetensors.during
    RECIPE_FAULT=enospc@save.rename.before:2-
    RECIPE_FAULT=nan@step.loss:3/1

The variable holds ACTION@POINT, with :N for the N-th time that a process reaches the point (default: the first time;
`N-`: that and all later ones), and /RANK for one of several processes (default: all). tests/processes.py installs the
plugin in the processes it forks, load/sitecustomize.py in others.

Actions: kill, term (that signal, to this process), enospc (OSError), stall (an hour of sleep), nan and inf (of a
value). What has happened is appended to the file that RECIPE_FAULT_LOG names, so that a test can tell a fault
that was survived from one that never came.

Points, those that any implementation passes:
    step.micro                  after a micro-step's backward pass
    step.loss, step.gradient    values: a micro-step's loss; a gradient before it is averaged across processes
    evaluate.validation, evaluate.hellaswag     before each batch of such an evaluation
    save.FILE.during            FILE of a checkpoint is half on the disk
    save.rename.before, save.rename.after       a checkpoint is written, and gets its name
    save.prune                  an old checkpoint has lost its name and is about to be deleted
    data.shard                  a shard is written, but does not have its name yet
"""

import errno
import os
import pathlib
import re
import signal
import time

_SAVED_FILE = re.compile(r"/\.[^/]*step_\d{8,}[^/]*/([^/]+)$")  # of a checkpoint without its final name
_CHECKPOINT = re.compile(r"step_\d{8,}$")
_SHARD = re.compile(r"(train|val)_\d+\.bin$")

_fault = None


class _Fault:
    def __init__(self, text: str):
        match = re.fullmatch(r"(\w+)@([\w.]+?)(?::(\d+)(-?))?(?:/(\d+))?", text)
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
    _patch_files()
    if _fault.point.startswith(("step.", "evaluate.")):
        _patch_model()


def _at(point: str, as_if_killed=lambda: None) -> None:
    """Has the fault happen if it is due; before a kill, `as_if_killed` makes the disk what it is in the middle."""
    if not _fault.due(point):
        return
    if _fault.action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif _fault.action == "kill":
        as_if_killed()
        os.kill(os.getpid(), signal.SIGKILL)
    elif _fault.action == "stall":
        time.sleep(3600)
    else:
        number = getattr(errno, _fault.action.upper())
        raise OSError(number, os.strerror(number), point)


def _value(point: str, tensor):
    """A tensor, or the NaN or infinity that the fault puts in its place."""
    return tensor * float(_fault.action) if _fault.due(point) else tensor


def _patch_files() -> None:
    fsync = os.fsync

    def faulty_fsync(fd) -> None:
        path = os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")
        if match := _SAVED_FILE.search(path):
            _at(f"save.{match[1]}.during", lambda: os.truncate(path, os.path.getsize(path) // 2))
        fsync(fd)

    def faulty(rename):
        def renamed(source, target, **options) -> None:
            old, new = os.path.basename(os.fspath(source)), os.path.basename(os.fspath(target))
            commits = old.startswith(".") and _CHECKPOINT.fullmatch(new)
            if commits:
                _at("save.rename.before")
            elif _SHARD.fullmatch(new):
                _at("data.shard")
            rename(source, target, **options)
            if commits:
                _at("save.rename.after")
            elif _CHECKPOINT.fullmatch(old) and new.startswith("."):
                _at("save.prune")

        return renamed

    os.fsync, os.rename, os.replace = faulty_fsync, faulty(os.rename), faulty(os.replace)
    if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10's pathlib holds functions of its own
        pathlib._NormalAccessor.rename = staticmethod(os.rename)
        pathlib._NormalAccessor.replace = staticmethod(os.replace)


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
