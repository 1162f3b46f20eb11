"""Command: the tests that need a GPU, for some minutes; started again, it goes on with those that have not passed.

    python -m benchmarks gpu_tests --minutes 8 --out bench

Writes gpu_tests.json after every test.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks import report
from recipe.config import ROOT
from recipe.utils.errors import UserError


class Record:
    """A plugin of pytest: skips what `path` has as passed, writes each outcome there, and stops at `ends`."""

    def __init__(self, path: Path, ends: float):
        self._path, self._ends = path, ends
        self.rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}

    def pytest_collection_modifyitems(self, session, items) -> None:
        """Those that have passed are not collected."""
        self._session, self.collected = session, len(items)
        items[:] = [item for item in items if self.rows.get(item.name, {}).get("outcome") != "passed"]

    def pytest_runtest_logreport(self, report) -> None:
        """Writes the outcome of a test, or of a fixture that failed."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.partition("::")[2]
            why = getattr(report.longrepr, "reprcrash", report.longrepr) or ""
            row = {"name": name, "outcome": report.outcome, "seconds": round(report.duration, 1)}
            self.rows[name] = row | {"note": str(why).partition("\n")[0]}
            self._write()
        if time.monotonic() > self._ends:
            self._session.shouldstop = "the time is up; the same command goes on"

    def _write(self) -> None:
        report.write(report.circumstances() | {"rows": list(self.rows.values())}, self._path)


def main(argv: list[str]) -> int:
    """Runs the tests and returns pytest's exit code. Raises UserError without pytest."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu_tests", allow_abbrev=False)
    parser.add_argument("--minutes", type=float, default=8, help="start no test later than this")
    parser.add_argument("--out", default="bench", help="directory of the results")
    arguments, words = parser.parse_known_args(argv)
    if not find_spec("pytest"):
        raise UserError("pytest is not installed; make .venv/installed-dev installs it")
    import pytest

    record = Record(Path(arguments.out) / "gpu_tests.json", time.monotonic() + 60 * arguments.minutes)
    tests = str(ROOT / "tests/engine/test_gpu.py")
    code = pytest.main([tests, f"--rootdir={ROOT}", "-p", "no:cacheprovider", *words], plugins=[record])
    passed = sum(row["outcome"] == "passed" for row in record.rows.values())
    print(f"{passed} of {record.collected} tests have passed; {arguments.out}/gpu_tests.json has them")
    return int(code)
