"""Does my loss look right? Plots and a page about one or more runs: `python -m eval.report [RUN ...] [--out DIR]`.

Writes report.html, which is self-contained, and each plot as a PNG, from metrics.jsonl and the checkpoints' results.
"""

import base64
import io
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import jinja2
import matplotlib.style
import numpy as np

from eval import common, plots
from eval.curves import Run, find_reference, load_references, read_run
from eval.diagnosis import Finding, diagnose
from eval.published import STYLES
from eval.scores import ci95
from recipe.utils.checkpoints import newest_run
from recipe.utils.errors import ArgumentParser, writing
from recipe.utils.files import replace_file
from recipe.utils.redaction import redact
from recipe.utils.units import duration, si

TEMPLATE = Path(__file__).resolve().parent / "report.html.jinja"
LABELS = {"good": "ok", "bad": "check", "note": "note"}


def main() -> None:
    """Writes the report of one or more runs and prints the findings. Raises UserError."""
    parser = ArgumentParser(prog="python -m eval.report", description="Plots and a page about training runs.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: the newest under runs/)")
    parser.add_argument("--out", type=Path, help="directory of report.html and the PNGs (default: RUN/report)")
    args = parser.parse_args()
    runs = [read_run(path) for path in args.runs or [newest_run()]]
    if len({run.name for run in runs}) < len(runs):  # sweep-1/a and sweep-2/a
        runs = [replace(run, name=common.utf8(str(run.directory))) for run in runs]
    out = (args.out or runs[0].directory / "report").expanduser()
    with writing(out, "name another directory with --out"):
        out.mkdir(parents=True, exist_ok=True)
    for run, findings in zip(runs, write_report(runs, out), strict=True):
        tokens, losses = run.series("val_loss")
        loss = f": validation loss {losses[-1]:.4f} after {si(tokens[-1], 'B')} tokens" if len(losses) else ""
        print(redact(f"{run.name}{loss}"))
        for finding in findings:
            print(redact(f"  {LABELS[finding.kind]:<5} {finding.text}"))
    for settings, *numbers in over_seeds(runs):
        print(redact("  ".join([*(f"{number:<15}" for number in numbers), settings])))
    pictures = ", ".join(path.name for path in sorted(out.glob("*.png")))
    print(f"wrote {out / 'report.html'}; beside it {pictures}")


def write_report(runs: list[Run], out: Path, dpi: int = 150) -> list[list[Finding]]:
    """Writes the page and its plots into a directory; returns the findings of each run."""
    references = load_references()
    findings = [diagnose(run, references) for run in runs]
    comparable = [r for r in references if any(find_reference(run, [r]) and not r.differences(run) for run in runs)]
    images = []
    with matplotlib.style.context(plots.STYLE):
        for picture in plots.draw_plots(runs, comparable):
            picture.figure.savefig(buffer := io.BytesIO(), dpi=dpi)
            replace_file(out / f"{picture.name}.png", buffer.getvalue(), flush=False)
            images.append((picture, base64.b64encode(buffer.getvalue()).decode()))
    template = jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE.read_text())
    page = template.render(
        title="Training report: " + ", ".join(run.name for run in runs),
        runs=list(zip(runs, findings, strict=True)),
        labels=LABELS,
        summary=summarize(runs),
        differences=differing_settings(runs),
        over_seeds=over_seeds(runs),
        pictures=images,
    )
    replace_file(out / "report.html", page.encode(), flush=False)
    return findings


def summarize(runs: list[Run]) -> list[list[str]]:
    """The table: one row per quantity, one column per run. Quantities that no run has are not shown."""
    columns = []
    for run in runs:
        rate, mfu, memory = (run.series(column)[1] for column in ("tokens_per_second", "mfu", "peak_memory_bytes"))
        cells = {
            "run": run.name,
            "data": run.dataset or run.data,
            "tokens": si(run.tokens, "B"),
            "training loss": _four_digits(run.last("loss")),
            "validation loss": _four_digits(run.last("val_loss")),
            **{f"HellaSwag, {name}": _accuracy(run, style) for style, name in STYLES.items()},
            "tokens/s": f"{np.median(rate):,.0f}" if len(rate) else "",
            "MFU": f"{np.median(mfu):.1%}" if len(mfu) else "",
            "peak memory": f"{memory.max() / 1e9:.2f} GB" if len(memory) else "",
            "training time": duration(run.seconds),
            "hardware": run.engine,
        }
        columns.append(cells)
    return [[key, *(cells[key] for cells in columns)] for key in columns[0] if any(cells[key] for cells in columns)]


def differing_settings(runs: list[Run]) -> list[list[str]]:
    """A table like `summarize`'s, of the settings in which the runs differ; empty if there are none."""
    settings = [run.settings for run in runs]
    names = sorted({name for s in settings for name in s})
    rows = [[n, *(s.get(n, "") for s in settings)] for n in names if len({s[n] for s in settings if n in s}) > 1]
    return [["run", *(run.name for run in runs)], *rows] if rows else []


def over_seeds(runs: list[Run]) -> list[list[str]]:
    """A table of groups of runs that differ in nothing but their seed: settings, number of seeds, and the mean and the
    standard deviation of their validation losses at the last step (nan where a run has none). Empty if there are no
    such runs."""
    rows = [row for row in differing_settings(runs)[1:] if row[0] != "seed"]
    if len({*(lengths := [si(run.tokens, "B") for run in runs])}) > 1:
        rows.append(["tokens", *lengths])
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for i, run in enumerate(runs):
        if seed := run.settings.get("seed"):
            label = ", ".join(f"{name} {values[i]}" for name, *values in rows) or "all runs"
            loss = run.records[-1].get("val_loss")
            groups[label][seed] = math.nan if loss is None else loss
    table = [
        [settings, str(len(losses)), f"{np.mean([*losses.values()]):.4f}", f"{np.std([*losses.values()], ddof=1):.4f}"]
        for settings, losses in groups.items()
        if len(losses) > 1
    ]
    return [["settings", "seeds", "validation loss", "deviation"], *table] if table else []


def _four_digits(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else ""


def _accuracy(run: Run, style: str) -> str:
    """The last accuracy measured during training, with its 95 % interval."""
    _, accuracies, rows = run.hellaswag(style)
    return f"{accuracies[-1]:.4f} ± {ci95(accuracies[-1], rows[-1]):.4f} ({rows[-1]:,.0f} rows)" if len(rows) else ""


if __name__ == "__main__":
    common.run_main(main)
