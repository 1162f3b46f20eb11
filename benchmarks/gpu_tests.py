"""Command: runs the GPU tests for some minutes; run again, it continues with those that have not passed.

    python -m benchmarks gpu_tests --minutes 8 --out bench

Writes gpu_tests.json after every test.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest

from benchmarks import report as results  # pytest requires a hook's argument to be called report
from recipe.config import ROOT


class Record:
    """A pytest plugin: skips tests recorded as passed in `path`, writes each outcome there, and stops at `ends`."""

    def __init__(self, path: Path, ends: float):
        self._path, self._ends = path, ends
        self.outcomes = json.loads(path.read_text())["outcomes"] if path.exists() else {}

    def pytest_collection_modifyitems(self, session, items) -> None:
        """Deselects tests that have passed."""
        self._session, self.collected = session, len(items)
        items[:] = [item for item in items if self.outcomes.get(item.name) != "passed"]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Writes the outcome of a test, or of a fixture that failed."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid.partition("::")[2]] = report.outcome
            results.write(results.circumstances() | {"outcomes": self.outcomes}, self._path)
        if time.monotonic() > self._ends:
            self._session.shouldstop = "the time is up; the same command goes on"


def main(argv: list[str]) -> int:
    """Runs the tests and returns pytest's exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_tests", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=8, help="start no test later than this")
    parser.add_argument("--out", type=Path, default=Path("bench"), help="directory of the results")
    arguments, words = parser.parse_known_args(argv)
    record = Record(arguments.out / "gpu_tests.json", time.monotonic() + 60 * arguments.minutes)
    tests = str(ROOT / "tests/engine/test_gpu.py")
    code = pytest.main([tests, f"--rootdir={ROOT}", "-p", "no:cacheprovider", *words], plugins=[record])
    passed = list(record.outcomes.values()).count("passed")
    print(f"{passed} of {record.collected} tests have passed; {arguments.out}/gpu_tests.json has them")
    return int(code)
