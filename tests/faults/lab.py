"""Starts tiny runs that fail on purpose, and compares how they end with runs that did not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from recipe.checkpoint.format import checkpoints, newest_whole, step_of, verify
from recipe.config import DataConfig
from recipe.data.prepare import prepare
from tests import processes as programs
from tests.conftest import LAUNCHED, SHAKESPEARE, environment, flags, metrics
from tests.hub import Hub

HANG = 60  # seconds after which a run that should have ended counts as hung
MARK = "RECIPE_FAULTS_CASE"  # in the environment of whatever a case starts: its directory
WORLD = {"one": 1, "ddp": 2}

# The smallest run with everything in it: accumulation with two processes too, dropout, three saves of which the first
# two are pruned, validations, HellaSwag.
TINY = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "n_positions": 64,
    "sequence_length": 8,
    "total_batch_tokens": 64,
    "micro_batch_size": 2,
    "max_steps": 6,
    "lr_scheduler_type": "cosine",  # with wsd another checkpoint is kept
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "dropout": 0.1,
    "seed": 1,
    "precision": "fp32",
    "logging_steps": 1,
    "eval_steps": 2,
    "eval_tokens": 64,
    "hellaswag_steps": 3,
    "hellaswag_limit": 2,
    "save_steps": 2,
    "save_total_limit": 1,
}
DATA = {"val_fraction": 0.1, "val_documents": 5, "shard_tokens": 10_000}  # 1,000 in the first


@dataclass
class Result:
    """How a run ended."""

    directory: Path
    codes: list[int]  # of the ranks; negative: the signal it died of
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    @property
    def steps(self) -> list[int]:
        """Optimizer steps that the output reports as done."""
        return [int(n) for n in re.findall(r"^step (\d+)  ", self.stdout, re.MULTILINE)]

    def expect(self, *codes: int) -> Result:
        """Fails unless each process ended with one of `codes`, without a traceback."""
        assert set(self.codes) <= set(codes), f"exit codes {self.codes}, expected {codes}\n{self.output}"
        assert "Traceback" not in self.output, self.output
        return self


class Run(programs.Ranks):
    """A run under way in `directory`."""

    def __init__(self, directory: Path, engine: str, fault: str, fields: dict, hub: Hub | None):
        self.directory, self.faults = directory, [re.split("[:/]", word)[0] for word in fault.split(",") if word]
        self.log = directory / "faults.log"
        faults = {"RECIPE_FAULT": fault, "RECIPE_FAULT_LOG": str(self.log)} if fault else {}
        token = {"HUB_TOKEN": hub.token} if hub else {}
        variables = environment({MARK: str(directory)} | faults | token)
        variables |= LAUNCHED if WORLD[engine] > 1 else {}
        words = (*(("tests/hub/with_hub.py", hub.url) if hub else ()), "recipe/train.py", *flags(**fields))
        super().__init__(WORLD[engine], *words, env=variables, alone=WORLD[engine] == 1)

    def end(self, *, together: bool = True, timeout: float = HANG) -> Result:
        """Waits; a run that hangs, or that never reached a fault it was to meet, is a failure."""
        try:
            self.wait(timeout, together=together, grace=3)  # a survivor in a collective only ever waits
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hung for {timeout} s\n{self.stdout}{self.stderr}") from None
        result = Result(self.directory, self.codes, self.stdout, self.stderr)
        reached = self.log.read_text().split() if self.log.exists() else []
        assert set(self.faults) <= set(reached), f"injected: {reached}, not {self.faults}\n{result.output}"
        return result

    def until(self, text: str) -> None:
        """Waits for a text in the output."""
        deadline = time.monotonic() + HANG
        while text not in self.stdout + self.stderr:
            assert time.monotonic() < deadline, f"{text!r} did not come\n{self.stdout}{self.stderr}"
            assert None in self.codes, f"ended before {text!r} came\n{self.stdout}{self.stderr}"
            time.sleep(0.02)

    def leftovers(self, patience: float = 30) -> list[str]:
        """Command lines of processes that this run left behind, after `patience` seconds at most."""
        deadline = time.monotonic() + patience
        while (found := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return found

    def _alive(self) -> list[str]:
        pids, found = {rank.pid for rank in self.ranks}, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                marked = process.environ().get(MARK) == str(self.directory)
                if marked or process.pid in pids or os.getsid(process.pid) in pids:
                    found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        return found


class Lab:
    """Where cases are run: shards, runs to compare with. `once` is the fixture of tests/conftest.py."""

    def __init__(self, once):
        self._once = once
        made = once("faults", self._prepare)[0]
        self.text, self.data = made / "text.jsonl", made / "shards"

    @staticmethod
    def _prepare(directory: Path) -> None:
        """Sixty documents of tiny Shakespeare, and their shards."""
        directory.mkdir()
        words = SHAKESPEARE.read_text()
        lines = (json.dumps({"text": words[i * 900 : (i + 1) * 900]}) for i in range(60))
        (directory / "text.jsonl").write_text("\n".join(lines) + "\n")
        prepare(DataConfig(train_text=str(directory / "text.jsonl"), dataset_name=str(directory / "shards"), **DATA))

    def start(self, directory: Path, engine: str, fault: str = "", hub: Hub | None = None, **changes) -> Run:
        """Starts a run in `directory`/run."""
        fields = TINY | DATA | {"dataset_name": self.data, "train_text": self.text, "output_dir": directory / "run"}
        return Run(directory, engine, fault, fields | changes, hub)

    def run(self, directory: Path, engine: str, fault: str = "", **changes) -> Result:
        return self.start(directory, engine, fault, **changes).end()

    def reference(self, engine: str, **changes) -> Path:
        """The directory of an uninterrupted run, which those that ask for the same one share."""
        name = "-".join(["reference", engine, *(f"{k}={v}" for k, v in sorted(changes.items()))])

        def make(directory: Path) -> None:
            self.run(directory, engine, **changes).expect(0)

        return self._once(name, make)[0]

    def same_end(self, directory: Path, engine: str, *, tidy: bool = True, lost: int = 0, **changes) -> None:
        """Fails unless the run ended with the weights, optimizer state and losses of the uninterrupted one, but for
        `lost` lines of metrics; `tidy`: and without temporary directories."""
        expected = self.reference(engine, **changes)
        found, wanted = (checkpoints(d / "run")[-1] for d in (directory, expected))
        assert found.name == wanted.name
        assert verify(found) == []
        assert digests(found) == digests(wanted), "differs from the uninterrupted run"
        lines, others = curve(directory), curve(expected)
        assert lines == [other for other in others if not lost or other in lines]
        assert len(lines) == len(others) - lost
        left = [p.name for p in (directory / "run").iterdir() if re.match(r"\..*step_", p.name)]
        assert not (tidy and left), f"left behind: {left}"


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of weights and optimizer state."""
    names = ("model.safetensors", "optimizer.safetensors")
    return {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in names}


def curve(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl without what is measured by the clock."""
    clock = {"tokens_per_second", "mfu", "seconds", "data_wait", "peak_memory_bytes", "save_wait"}
    return [{k: v for k, v in line.items() if k not in clock} for line in metrics(directory / "run")]


def newest_step(directory: Path, *, at_least: int = 0) -> int:
    """The step of the newest checkpoint, 0 where there is none. Fails where one that has its name is not whole, or
    where there are fewer than `at_least`."""
    found = checkpoints(directory / "run")
    for path in found:
        assert verify(path) == [], f"{path.name} is committed and not whole"
    assert len(found) >= at_least, f"{len(found)} valid checkpoints, expected {at_least}"
    newest = newest_whole(directory / "run")
    return step_of(newest) if newest else 0
