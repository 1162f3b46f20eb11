"""Faults on purpose: the one place through which tests make a run fail at a chosen point of its code.

    RECIPE_FAULT=kill@save.model.safetensors.during python recipe/train.py ...
    RECIPE_FAULT=nan@step.loss:3-4/1,enospc@log.write:2 ...

The variable holds ACTION@POINT, with :N or :N-M for the N-th to M-th time that a process comes by (the first time where
it is left out, :N- for ever after), and /RANK for one process of several (all where it is left out); several are parted
by commas. Unset, which is always but in tests, a point is one look at an empty dict.

Actions: kill, term, int (that signal, to this process), enospc, eacces, eio (OSError), stall (an hour of sleep), nan,
inf (of a value). Points: see POINTS.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the process that uploads has no use for it
    import torch

_FILES = ("model.safetensors", "optimizer.safetensors", "trainer_state.json", "manifest.json")

# Where the code calls `at`, and what stands there. tests/test_faults.py holds the two together.
POINTS = {
    "start.model": "the data are open, the model is about to be built",
    "step.compile": "the model is about to be called for the first time",
    "step.begin": "before a step's first micro-step",
    "step.micro": "between two micro-steps",
    "step.loss": "a micro-step's loss, a value",
    "step.gradient": "a gradient before it is averaged over the processes, a value",
    "step.end": "after the weights have changed",
    "evaluate.validation": "before each batch of a validation",
    "evaluate.hellaswag": "before each batch of a HellaSwag evaluation",
    "save.begin": "before anything of a checkpoint is written",
    **{
        f"save.{name}.{when}": f"{when} the writing of {name}"
        for name in _FILES
        for when in ("before", "during", "after")
    },
    "save.rename.before": "all is written, nothing is committed",
    "save.rename.after": "the checkpoint is committed",
    "save.prune": "an old checkpoint has lost its name, and is about to be deleted",
    "log.write": "before a line of metrics.jsonl",
    "data.shard": "the tokens of a shard are written, its header and its name are not",
    "upload.begin": "a checkpoint is queued, and its upload about to begin",
    "upload.during": "a file of a checkpoint is about to go up",
    "upload.after": "a checkpoint is uploaded, and still in the queue",
}

_ERRORS = {"enospc": errno.ENOSPC, "eacces": errno.EACCES, "eio": errno.EIO}
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}
_VALUES = {"nan": float("nan"), "inf": float("inf")}


@dataclass
class _Fault:
    action: str
    first: int
    last: float
    passed: int = 0

    def comes_by(self) -> bool:
        self.passed += 1
        return self.first <= self.passed <= self.last


def at(point: str) -> None:
    """What RECIPE_FAULT wants to happen here. Raises the OSError that it names."""
    for fault in _FAULTS.get(point, ()):
        if not fault.comes_by():
            continue
        if fault.action in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[fault.action])
        elif fault.action in _ERRORS:
            number = _ERRORS[fault.action]
            raise OSError(number, os.strerror(number), point)
        elif fault.action == "stall":
            time.sleep(3600)


def of(point: str, value: torch.Tensor) -> torch.Tensor:
    """`value`, or the NaN or infinity that RECIPE_FAULT wants in its place."""
    for fault in _FAULTS.get(point, ()):
        if fault.comes_by():
            value = value * _VALUES[fault.action]
    return value


def in_gradients(model: torch.nn.Module) -> None:
    """Has the first gradient of each backward pass through `of`, where RECIPE_FAULT names step.gradient."""
    if "step.gradient" in _FAULTS:
        next(model.parameters()).register_hook(lambda gradient: of("step.gradient", gradient))


def _parse(text: str, rank: str) -> dict[str, list[_Fault]]:
    faults: dict[str, list[_Fault]] = {}
    for word in filter(None, text.split(",")):
        match = re.fullmatch(r"(\w+)@([\w.]+?)(?::(\d+)(-(\d*))?)?(?:/(\d+))?", word)
        known = {*_ERRORS, *_SIGNALS, *_VALUES, "stall"}
        if not match or match[1] not in known or match[2] not in POINTS:
            raise ValueError(f"RECIPE_FAULT: {word!r} is not ACTION@POINT[:N[-M]][/RANK]; see recipe/faults.py")
        action, point, first, span, last, only = match.groups()
        first = int(first or 1)
        if only in (None, rank):
            end = int(last) if last else float("inf") if span else first
            faults.setdefault(point, []).append(_Fault(action, first, end))
    return faults


_FAULTS = _parse(os.environ.get("RECIPE_FAULT", ""), os.environ.get("RANK", "0"))
