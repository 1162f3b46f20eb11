"""Command: results of several commands as one, with their charts.

    python -m benchmarks merge first/*.json second/*.json --out docs/results --name h200

Files of the same name become NAME-<file>: the rows of all, and of two of the same row the later one that has a result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks import optimizers, report
from recipe.utils.errors import UserError

_CHARTS = {"peers": report.peers_chart, "scoreboard": report.scoreboard_chart}
_SAME = (
    "device",
    "torch",
    "model",
    "sequence_length",
    "micro_batch_size",
    "precision",
)  # or rows mean different things


def merged(paths: list[Path]) -> dict:
    """One result of several. Raises UserError where they are of different devices, versions or models."""
    results, rows = [json.loads(path.read_text()) for path in paths], {}
    for path, result in zip(paths, results, strict=True):
        if differs := [field for field in _SAME if result.get(field) != results[0].get(field)]:
            raise UserError(f"{path} and {paths[0]} differ in {', '.join(differs)}; give a --name to each")
        for row in result.get("rows", []):
            key = (row["name"], row.get("environment"))
            measured = row.get("ratio") or row.get("tokens_per_second") or row.get("outcome") in ("passed", "failed")
            if measured or key not in rows:
                rows[key] = row
    return results[-1] | ({"rows": list(rows.values())} if rows else {})


def main(argv: list[str] | None = None) -> int:
    """Writes the merged results, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks merge", description=__doc__.split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("files", nargs="+", type=Path, help="peers.json, gpu_tests.json, ... of any directories")
    parser.add_argument("--name", default="gpu", help="what the merged files' names begin with")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="directory of the results")
    arguments = parser.parse_args(argv)
    try:
        for stem in dict.fromkeys(path.stem for path in arguments.files):
            result = merged([path for path in arguments.files if path.stem == stem])
            target = arguments.out / f"{arguments.name}-{stem}.json"
            report.write(result, target)
            print(f"{target}")
            if stem in _CHARTS:
                _CHARTS[stem](result, target.with_suffix(".png"))
            if stem == "optimizers":
                optimizers.picture(result["sizes"], target.with_suffix(".png"))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
