"""Starts tiny runs that fail on purpose, and compares how they end with uninterrupted runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from recipe.checkpoint.format import checkpoints, step_of, verify
from recipe.config import DataConfig
from recipe.data.prepare import prepare
from tests import processes as programs
from tests.conftest import SHAKESPEARE, TINY, assert_equal_tensors, flags, metrics
from tests.faults.shim import built as shim

HANG = 60  # seconds after which a run that should have ended counts as hung

# The smallest run with every feature: gradient accumulation (four micro-steps, or two on two processes), dropout,
# validations, HellaSwag, and three saves, of which the first two are pruned.
SMALLEST = TINY | {"n_layer": 1, "n_embd": 16, "sequence_length": 8, "micro_batch_size": 2, "dropout": 0.1}
SMALLEST |= {"max_steps": 6, "warmup_steps": 2, "save_steps": 2, "save_total_limit": 1}
SMALLEST |= {"eval_steps": 2, "eval_tokens": 64, "hellaswag_steps": 3, "hellaswag_limit": 2}
DATA = {"val_fraction": 0.1, "val_documents": 5, "shard_tokens": 10_000}


class Run(programs.Running):
    """A training run in `directory`/run, under way or ended."""

    def __init__(self, directory: Path, processes: int, fault: str, fields: dict):
        self.directory, self.fault, self.log = directory, fault, directory / "faults.log"
        variables = {"RECIPE_FAULT": fault, "RECIPE_FAULT_LOG": str(self.log)}
        ranks = processes if processes > 1 else 0
        super().__init__("recipe/train.py", *flags(**fields), env=variables, processes=ranks)

    @property
    def last_step(self) -> int:
        """The last optimizer step that the output reports."""
        return max(map(int, re.findall(r"^step (\d+)  ", self.stdout, re.MULTILINE)), default=0)

    def end(self, *codes: int, together: bool = True) -> Run:
        """Waits for the end. Fails if the run hangs, if its fault did not happen, if a process ends with a code that is
        not in `codes` (if any are given), and for a traceback."""
        try:
            self.wait(HANG, together=together, grace=3)  # a survivor waits in a collective
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hung for {HANG} s\n{self.output}") from None
        assert not self.fault or self.log.exists(), f"{self.fault} did not happen\n{self.output}"
        assert not codes or set(self.codes) <= set(codes), f"exit codes {self.codes}, expected {codes}\n{self.output}"
        assert "Traceback" not in self.output, self.output
        return self

    def leftovers(self) -> list[psutil.Process]:
        """Processes of this run that still exist after 30 seconds."""
        deadline = time.monotonic() + 30
        while (processes := list(filter(self._is_ours, psutil.process_iter()))) and time.monotonic() < deadline:
            time.sleep(0.2)
        return processes

    def _is_ours(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                in_session = os.getsid(process.pid) in {rank.pid for rank in self.ranks}
                return in_session or process.environ().get("RECIPE_FAULT_LOG") == str(self.log)
        return False


class Lab:
    """The shards, and the uninterrupted runs to compare with. `once` is the fixture of tests/conftest.py."""

    def __init__(self, once):
        self._once = once
        data = once("faults", self._prepare)[0]
        self._fields = SMALLEST | DATA | {"train_text": data / "text.jsonl", "dataset_name": data / "shards"}

    @staticmethod
    def _prepare(directory: Path) -> None:
        """Sixty documents of tiny Shakespeare, and their shards."""
        directory.mkdir()
        text = SHAKESPEARE.read_text()
        lines = (json.dumps({"text": text[i * 900 : (i + 1) * 900]}) for i in range(60))
        (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
        prepare(DataConfig(train_text=str(directory / "text.jsonl"), dataset_name=str(directory / "shards"), **DATA))

    def start(self, directory: Path, processes: int, fault: str = "", **changes) -> Run:
        """Starts a run in `directory`/run. Skips the test if its fault needs a compiler and there is none."""
        if "(" in fault and not shim():
            pytest.skip("the shim of system calls needs a C compiler, Linux, and a path without spaces")
        return Run(directory, processes, fault, self._fields | {"output_dir": directory / "run"} | changes)

    def reference(self, processes: int, **changes) -> Path:
        """The directory of an uninterrupted run, shared by all tests with the same arguments."""
        name = "-".join(["reference", str(processes), *(f"{k}={v}" for k, v in sorted(changes.items()))])
        return self._once(name, lambda directory: self.start(directory, processes, **changes).end(0) and None)[0]

    def check_same_end(self, directory: Path, processes: int, **changes) -> None:
        """Fails unless the run ended with the weights, optimizer state and metrics of the uninterrupted one."""
        reference = self.reference(processes, **changes)
        actual, expected = (checkpoints(d / "run")[-1] for d in (directory, reference))
        assert actual.name == expected.name
        assert verify(actual) == []
        assert_equal_tensors(actual, expected)
        assert curve(directory) == curve(reference)


def curve(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl without what differs from run to run: times and memory."""
    measured = {"tokens_per_second", "mfu", "seconds", "data_wait", "peak_memory_bytes"}
    return [{k: v for k, v in line.items() if k not in measured} for line in metrics(directory / "run")]


def newest_step(directory: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none. Fails if any checkpoint is not intact."""
    paths = checkpoints(directory / "run")
    for path in paths:
        assert verify(path) == [], f"{path.name} is committed and not intact"
    return step_of(paths[-1]) if paths else 0
