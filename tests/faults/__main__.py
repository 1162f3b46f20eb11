"""python -m tests.faults [--group NAME ...] [--quick] [--case TEXT] [--out faults.json]

Runs the table, prints what was injected, survived and lost, and how to see each loss again; exits 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from tqdm import tqdm

from tests.conftest import ROOT
from tests.faults.groups import GROUPS
from tests.faults.runner import ENGINES, HOW, Case, Lab, Lost

PACKAGES = ("torch", "accelerate", "transformers", "deepspeed", "safetensors", "huggingface_hub", "datasets")


def run_case(lab: Lab, case: Case, number: int) -> dict:
    """Its outcome. The directory of a lost one is kept."""
    directory, start = lab.base / "cases" / f"{number:04d}", time.monotonic()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    lost = None
    try:
        case.check(lab, directory)
    except Lost as e:
        lost = str(e)
    except Exception:
        lost = traceback.format_exc()
    how = (directory / HOW).read_text().splitlines() if (directory / HOW).exists() else []
    outcome = {
        "group": case.group,
        "name": case.name,
        "survived": lost is None,
        "seconds": round(time.monotonic() - start, 2),
        "commands": how,
    }
    if lost is None:
        shutil.rmtree(directory, ignore_errors=True)
        return outcome
    return outcome | {"lost": lost, "directory": str(directory)}


def surroundings() -> dict:
    """What the outcomes were seen on."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "commit": commit or None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": psutil.cpu_count(logical=False),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": versions,
    }


def table(outcomes: list[dict], seconds: dict[str, float], groups: list[str]) -> str:
    rows = [("group", "injected", "survived", "lost", "seconds")]
    for group in groups:
        mine = [o for o in outcomes if o["group"] == group]
        survived = sum(o["survived"] for o in mine)
        rows.append((group, len(mine), survived, len(mine) - survived, f"{seconds.get(group, 0):.0f}"))
    rows.append(("all", *(sum(row[i] for row in rows[1:]) for i in (1, 2, 3)), f"{sum(seconds.values()):.0f}"))
    return "\n".join(f"{r[0]:<14}{r[1]:>10}{r[2]:>10}{r[3]:>8}{r[4]:>10}" for r in rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[2])
    parser.add_argument("--group", action="append", choices=GROUPS, help="one group (repeatable; default: all)")
    parser.add_argument("--case", default="", help="injections whose name contains this")
    parser.add_argument("--quick", action="store_true", help="the sample of each group that `make test` runs")
    parser.add_argument("--jobs", type=int, default=psutil.cpu_count(logical=False) or 1, help="runs side by side")
    parser.add_argument("--out", type=Path, default=Path("faults.json"), help="where every outcome is written")
    parser.add_argument("--list", action="store_true", help="name the injections, and stop")
    options = parser.parse_args()

    groups = options.group or list(GROUPS)
    cases = {group: GROUPS[group]() for group in groups}
    cases = {
        group: [c for c in those if options.case in c.name and (c.quick or not options.quick)]
        for group, those in cases.items()
    }
    if options.list:
        print("\n".join(f"{case.group}: {case.name}" for those in cases.values() for case in those))
        return 0
    base = Path(tempfile.mkdtemp(prefix="recipe-faults-"))
    lab, start = Lab(base), time.monotonic()
    outcomes, seconds = [], {}
    try:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(lab.compare_with_launchers, ENGINES))
        print(f"forked runs end as launched ones do, to the bit: {', '.join(ENGINES)}", flush=True)
        every = 0.1 if sys.stderr.isatty() else 30  # seconds
        number = sum(map(len, cases.values()))
        with tqdm(total=number, desc="faults", smoothing=0.02, mininterval=every, dynamic_ncols=True) as bar:
            for group, those in cases.items():
                began = time.monotonic()
                with ThreadPoolExecutor(options.jobs, initializer=lab.pin) as pool:
                    numbered = enumerate(those, len(outcomes))
                    pending = [pool.submit(run_case, lab, case, number) for number, case in numbered]
                    for future in as_completed(pending):
                        outcome = future.result()
                        outcomes.append(outcome)
                        bar.set_postfix_str(f"{group}, {sum(not o['survived'] for o in outcomes)} lost", refresh=False)
                        bar.update()
                        if not outcome["survived"]:
                            bar.write(f"lost: {group}: {outcome['name']}: {outcome['lost'].splitlines()[0]}")
                if those:
                    seconds[group] = time.monotonic() - began
    finally:
        lab.close()
    report = {
        "surroundings": surroundings() | {"jobs": options.jobs},
        "seconds": round(time.monotonic() - start, 1),
        "injections": outcomes,
    }
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(outcomes, seconds, groups))
    lost = [o for o in outcomes if not o["survived"]]
    for outcome in lost:
        print(f"\nlost: {outcome['group']}: {outcome['name']}\n  {outcome['lost']}")
        print(f"  again:     python -m tests.faults --group '{outcome['group']}' --case '{outcome['name']}'")
        print(f"  directory: {outcome['directory']}")
        print("\n".join(f"  as a user: {command}" for command in outcome["commands"]))
    if not lost:
        shutil.rmtree(base, ignore_errors=True)
    print(f"\n{len(outcomes)} injections, {len(lost)} lost, in {time.monotonic() - start:.0f} s; {options.out}")
    return 1 if lost or not outcomes else 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
