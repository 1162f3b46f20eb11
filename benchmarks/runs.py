"""Training programs in separate processes, timed by their metrics.jsonl: recipe/train.py as a user starts it, and peers
that do the same work."""

import io
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path

import torch

from recipe.config import QUIET, ROOT, DataConfig
from recipe.data.prepare import prepare
from recipe.utils.errors import ExitCode, UserError

# Fields of all runs. The learning rate is constant, and so small that rounding errors do not grow over the compared
# steps.
FIELDS = QUIET | {
    "optim": "adamw",
    "lr_scheduler_type": "cosine",
    "learning_rate": 1e-4,
    "min_lr_fraction": 1.0,
    "warmup_steps": 0,
    "weight_decay": 0.1,
    "max_steps": 10**9,
    "logging_steps": 1,
    "streaming": False,
    "run_name": "bench",
}


class Void(Exception):
    """A run that fails on this device or does different work; the message gives the reason."""


class Run:
    """A program that trains, except while it is paused, until it is closed; `lines` are its steps' lines of
    metrics.jsonl."""

    def __init__(self, program: list, fields: dict, directory: Path, processes: int = 1):
        """`program`, the arguments of a Python command, takes `fields` as flags. `directory` comes from `shards`."""
        output_dir = Path(tempfile.mkdtemp(dir=directory)) / "run"
        self.lines: list[dict] = []
        self._metrics, self._offset = output_dir / "metrics.jsonl", 0  # bytes
        fields = FIELDS | {"dataset_name": directory / "shards"} | fields | {"output_dir": output_dir}
        self._log = output_dir.with_name("log")
        self._line_tokens = int(fields["logging_steps"]) * fields["total_batch_tokens"]
        command = [sys.executable, *map(str, program), *(f"--{name}={value}" for name, value in fields.items())]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(processes)))
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus.split(",")[:processes])}
        if device().type == "cpu" and processes > 1:
            environment["ACCELERATE_USE_CPU"] = "true"
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
            )

    def turn(self, seconds: float, min_steps: int = 1, timeout: float = 600) -> float:
        """Lets the program run for `seconds` of complete lines, of logging_steps steps each, and until it has taken
        `min_steps` in total; pauses it; returns these lines' median tokens per second. Raises Void if it ends, or
        takes fewer steps or completes no line within `timeout` seconds."""
        self._send(signal.SIGCONT)
        self._read_lines()
        # The next line does not count: its steps were interrupted or are the first, which compile, and they refill the
        # caches that the other run has displaced.
        first_line, deadline = len(self.lines) + 1, time.monotonic() + timeout
        while True:
            time.sleep(0.1)
            self._read_lines()
            rates = [line["tokens_per_second"] for line in self.lines[first_line:]]
            is_late, steps = time.monotonic() > deadline, self.lines[-1]["step"] if self.lines else 0
            is_done = is_late or sum(self._line_tokens / rate for rate in rates) >= seconds
            if rates and is_done and steps >= min_steps:
                self.pause()
                return statistics.median(rates)
            if self._process.poll() is not None:
                raise Void(self._error())
            if is_late:
                raise Void(f"too slow: at step {steps} after {timeout:.0f} s")

    def pause(self) -> None:
        """Pauses the program until its next turn."""
        self._send(signal.SIGSTOP)

    def close(self) -> None:
        """Ends the program and its child processes."""
        self._send(signal.SIGKILL)
        self._process.wait()

    def _send(self, signal_number: int) -> None:
        with suppress(ProcessLookupError):  # `turn` will notice
            os.killpg(self._process.pid, signal_number)

    def _read_lines(self) -> None:
        """Reads only the new lines, so that reading does not slow down the measured run."""
        with suppress(FileNotFoundError), open(self._metrics, "rb") as file:
            file.seek(self._offset)
            for text in file:
                if text.endswith(b"\n"):  # else half written
                    self._offset += len(text)
                    if (line := json.loads(text))["step"] > 0:
                        self.lines.append(line)

    def _error(self) -> str:
        """Why the program ended: its error message, or its last line."""
        output = self._log.read_text(errors="replace").strip()
        if "out of memory" in output.lower():
            return "out of memory"
        errors = re.findall(r"^error: (.*)", output, re.MULTILINE)
        return errors[-1] if errors else f"the program ended: {output.rpartition(chr(10))[2]}"


def train_to_end(fields: dict) -> int:
    """Trains a run with these fields to its end. Returns the exit code; raises UserError if that is a failure's."""
    command = [sys.executable, ROOT / "recipe/train.py", *(f"--{name}={value}" for name, value in fields.items())]
    code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if code not in (ExitCode.DONE, ExitCode.RUN_AGAIN):
        raise UserError(f"recipe/train.py ended with exit code {code}; see its message above")
    return code


def speeds_in_turns(our_turn: Callable[[], float], peer_turn: Callable[[], float], rounds: int) -> dict:
    """tokens_per_second of both, whose turns are A B B A in each round; and our speed over the peer's: ratio, the
    median over neighbors in time, in which a drift of the machine's speed cancels, and its range, low and high."""
    ours, peer = [], []
    for _ in range(rounds):
        ours.append(our_turn())
        peer += [peer_turn(), peer_turn()]
        ours.append(our_turn())
    ratios = [rate / peer_rate for rate, peer_rate in zip(ours, peer, strict=True)]
    speeds = {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return speeds | {"tokens_per_second": {"ours": ours, "peer": peer}}


def trainer(processes: int = 1, omitted: Sequence[str] = ()) -> list:
    """The command that starts recipe/train.py in this many processes; in a single one, `omitted` lists optimizations
    that benchmarks/plain.py omits."""
    if omitted:
        return ["-m", "benchmarks.plain", ",".join(omitted)]
    script = ROOT / "recipe/train.py"
    if processes == 1:
        return [script]
    config_file = ROOT / "accelerate_configs/ddp.yaml"
    launcher = ["-m", "accelerate.commands.launch", "--quiet", "--config_file", config_file]
    return [*launcher, "--num_processes", processes, "--main_process_port", 0, script]


def device() -> torch.device:
    """This machine's accelerator, or else its CPU."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


@contextmanager
def shards() -> Generator[Path, None, None]:
    """A temporary directory for the runs, with `shards` of tiny Shakespeare, the text that ships with the project."""
    text = ROOT / "recipe/data/tiny_shakespeare.txt"
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        with redirect_stdout(io.StringIO()):
            prepare(DataConfig(train_text=str(text), dataset_name=f"{name}/shards", val_fraction=0.1))
        yield Path(name)
