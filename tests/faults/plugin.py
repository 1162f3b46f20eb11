"""Makes a process fail at a chosen point; the product knows nothing of it.

    RECIPE_FAULT=kill@save.model.safetensors.during
    RECIPE_FAULT=nan@step.loss:3-4/1,enospc@log.write:2

The variable holds ACTION@POINT, with :N or :N-M for the N-th to M-th time that a process reaches the point (default:
the first time; `N-`: the N-th and all later ones), and /RANK for one of several processes (default: all). Commas
separate several faults. tests/processes.py installs the plugin in the processes it forks, load/sitecustomize.py in
others.

Actions: kill, term (that signal, to this process), enospc, eacces, eio (OSError), stall (an hour of sleep), nan
and inf (of a value), note (nothing; for a test that counts). Each appends ACTION@POINT to the file that
RECIPE_FAULT_LOG names, so that a test can tell a fault that was survived from one that never happened.

The patched functions are those that any implementation calls: os.fsync, os.rename and os.replace for a durable file,
open() for metrics.jsonl, the model's forward() and torch.autograd.backward() for a step.
"""

import builtins
import errno
import functools
import io
import os
import pathlib
import re
import signal
import sys
import time

POINTS = {
    "step.begin": "before a step's first micro-step",
    "step.micro": "after a micro-step's backward pass",
    "step.loss": "a micro-step's loss, a value",
    "step.gradient": "a gradient before it is averaged across processes, a value",
    "evaluate.validation": "before each batch of a validation",
    "evaluate.hellaswag": "before each batch of a HellaSwag evaluation",
    "save.model.safetensors.during": "the first large file is half on the disk",
    "save.optimizer.safetensors.during": "the second one is half on the disk",
    "save.manifest.json.after": "all files are on the disk, still without the checkpoint's name",
    "save.rename.before": "a checkpoint is written, but does not have its name yet",
    "save.rename.after": "a checkpoint has its name",
    "save.prune": "an old checkpoint has lost its name and is about to be deleted",
    "log.write": "before a line of metrics.jsonl",
    "data.shard": "a shard is written, but does not have its name yet",
}
_ERRORS = {"enospc": errno.ENOSPC, "eacces": errno.EACCES, "eio": errno.EIO}
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM}
_VALUES = {"nan": float("nan"), "inf": float("inf")}
_ACTIONS = {*_ERRORS, *_SIGNALS, *_VALUES, "stall", "note"}

_SAVED_FILE = re.compile(r"/\.[^/]*step_\d{8,}[^/]*/([^/]+)$")  # of a checkpoint without its final name
_CHECKPOINT = re.compile(r"step_\d{8,}$")
_SHARD = re.compile(r"(train|val)_\d+\.bin$")

_faults: dict[str, list["_Fault"]] = {}


class _Fault:
    def __init__(self, action: str, first: int, last: float):
        self.action, self.first, self.last, self.reached = action, first, last, 0

    def due(self, point: str) -> bool:
        self.reached += 1
        due = self.first <= self.reached <= self.last
        if due and (log := os.environ.get("RECIPE_FAULT_LOG")):
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, f"{self.action}@{point}\n".encode())
            os.close(fd)
        return due


def install(text: str) -> None:
    """Patches this process for the faults that `text` names. Raises ValueError where it names none that exist."""
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(\w+)@([\w.]+?)(?::(\d+)(-(\d*))?)?(?:/(\d+))?", word)
        if not match or match[1] not in _ACTIONS or match[2] not in POINTS:
            raise ValueError(f"RECIPE_FAULT: {word!r} is not ACTION@POINT[:N[-M]][/RANK]; see tests/faults/plugin.py")
        action, point, first, span, last, rank = match.groups()
        first = int(first or 1)
        if rank in (None, os.environ.get("RANK", "0")):
            end = int(last) if last else float("inf") if span else first
            _faults.setdefault(point, []).append(_Fault(action, first, end))
    _patch_files()
    if any(point.startswith(("step.", "evaluate.")) for point in _faults):
        _patch_model()


def _at(point: str, as_if_killed=lambda: None) -> None:
    """Has the faults of a point happen. `as_if_killed` makes the disk what it would be had the process died earlier."""
    for fault in _faults.get(point, ()):
        if not fault.due(point):
            continue
        if fault.action == "kill":
            as_if_killed()
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.action])
        elif fault.action in _ERRORS:
            raise OSError(_ERRORS[fault.action], os.strerror(_ERRORS[fault.action]), point)
        elif fault.action == "stall":
            time.sleep(3600)


def _of(point: str, value):
    """A tensor, or the NaN or infinity that a fault puts in its place."""
    for fault in _faults.get(point, ()):
        if fault.due(point):
            value = value * _VALUES.get(fault.action, 1.0)
    return value


def _patch_files() -> None:
    fsync, opened = os.fsync, io.open

    def faulty_fsync(fd) -> None:
        path = os.readlink(f"/proc/self/fd/{fd if isinstance(fd, int) else fd.fileno()}")
        match = _SAVED_FILE.search(path)
        if match is None:
            return fsync(fd)
        _at(f"save.{match[1]}.during", lambda: os.truncate(path, os.path.getsize(path) // 2))
        fsync(fd)
        _at(f"save.{match[1]}.after")

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

    def faulty_open(file, mode="r", *arguments, **options):
        stream = opened(file, mode, *arguments, **options)
        name = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        return _MetricsLog(stream) if "a" in mode and str(name).endswith("/metrics.jsonl") else stream

    os.fsync, os.rename, os.replace = faulty_fsync, faulty(os.rename), faulty(os.replace)
    io.open = builtins.open = faulty_open
    if hasattr(pathlib, "_NormalAccessor"):  # Python 3.10's pathlib holds functions of its own
        pathlib._NormalAccessor.rename = staticmethod(os.rename)
        pathlib._NormalAccessor.replace = staticmethod(os.replace)


class _MetricsLog:
    """A file whose write() is a point."""

    def __init__(self, file):
        self._file = file

    def write(self, data):
        _at("log.write")
        return self._file.write(data)

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def _patch_model() -> None:
    import torch

    from recipe.model import gpt2

    forward, evaluate, backward = gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward, torch.autograd.backward
    taken = 0

    def faulty_forward(self, input_ids, targets=None):
        nonlocal taken
        if not self.training:
            if targets is not None:
                _at("evaluate.validation")
            return forward(self, input_ids, targets)
        if taken == 0:
            next(self.parameters()).register_hook(lambda gradient: _of("step.gradient", gradient))
        if taken % _micro_steps_per_step() == 0:
            _at("step.begin")
        taken += 1
        return _of("step.loss", forward(self, input_ids, targets))

    def faulty_evaluate(self, ids, *positions_and_mask):
        if positions_and_mask and not self.training:
            _at("evaluate.hellaswag")
        return evaluate(self, ids, *positions_and_mask)

    def faulty_backward(*arguments, **options) -> None:
        backward(*arguments, **options)
        _at("step.micro")

    gpt2.GPT2LMHeadModel.forward, gpt2.Transformer.forward = faulty_forward, faulty_evaluate
    torch.autograd.backward = faulty_backward


@functools.cache
def _micro_steps_per_step() -> int:
    """Gradient accumulation, by the fields of the command line."""
    fields = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv)
    sequences = int(fields["total_batch_tokens"]) // int(fields["sequence_length"])
    return sequences // int(fields["micro_batch_size"]) // int(os.environ.get("WORLD_SIZE", 1))
