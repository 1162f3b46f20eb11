"""Does my loss look right? Pictures and a page of one run or several: `python eval/report.py [RUN ...] [--out DIR]`.

Writes report.html, which holds all that it shows, and each picture as a PNG beside it, into DIR (default: `report` in
the first run's directory). Reads metrics.jsonl and, where there are any, the checkpoints' trainer_state.json and
results.json.
"""

import argparse
import base64
import html
import io
import math
import re
import sys
from pathlib import Path

if __name__ == "__main__" and not __package__:
    # Run as a file, Python puts eval/ first on the path, where `eval` is not found and our files shadow other packages.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import matplotlib
import numpy as np

from eval import common, style
from eval.curves import Run, find_reference, load_references, newest_run, read_runs
from eval.diagnosis import Finding, judge, tokens
from eval.figures import Picture, pictures
from eval.known_data import SHOWN

WORDS = {"good": "ok", "bad": "look", "note": "note"}
WIDE = ("loss_tokens", "loss_time", "hellaswag")  # the others stand two beside each other where there is room
CSS = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --line: #d9d9d9; --page: #ffffff; --card: #f6f6f6;
  --good: #009E73; --bad: #D55E00; --note: #0072B2; }
@media (prefers-color-scheme: dark) { :root { --ink: #ececec; --soft: #a8a8a8; --line: #3c3c3c; --page: #161616;
  --card: #212121; --note: #56B4E9; --bad: #f08a3c; --good: #3ec39a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 62rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; } h3 { font-size: 1rem; margin: 1rem 0 .4rem; }
.finding { display: grid; grid-template-columns: 3rem 1fr; margin: .4rem 0; padding: .5rem .8rem;
  background: var(--card);
  border-left: 4px solid var(--note); }
.finding b { color: var(--note); }
.good { border-color: var(--good); } .good b { color: var(--good); }
.bad { border-color: var(--bad); } .bad b { color: var(--bad); }
.scroll { overflow-x: auto; overflow-wrap: normal; } table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { color: var(--soft); font-weight: 600; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; } .wide { grid-column: 1 / -1; }
.wide img { min-width: 40rem; }
figure img { display: block; width: 100%; height: auto; background: #fff; border-radius: 6px; padding: .5rem; }
figcaption, .soft { color: var(--soft); font-size: .88rem; } figcaption { margin-top: .4rem; }
figcaption b { color: var(--ink); }
details { margin: .6rem 0; } summary { cursor: pointer; } td.text { text-align: left; white-space: normal; }
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures and a page of one training run or several.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories (default: the newest under runs/)")
    parser.add_argument(
        "--out", type=Path, help="where report.html and the PNGs go (default: `report` in the first run)"
    )
    args = parser.parse_args()
    if not args.runs:
        args.runs = [str(newest_run())]
        print(f"no run given: the newest is {args.runs[0]}")
    runs = read_runs(args.runs)
    out = (args.out or runs[0].directory / "report").expanduser()
    if out.exists() and not out.is_dir():
        raise common.UserError(f"--out {out}: a file stands there. Name a directory")
    out.mkdir(parents=True, exist_ok=True)
    findings, drawn = write_report(runs, out)
    for run in runs:
        print(run.name)
        for finding in findings[run.name]:
            print(f"  {WORDS[finding.kind]:<5} {finding.text}")
    names = ", ".join(f"{picture.name}.png" for picture in drawn)
    print(f"wrote {out / 'report.html'}" + (f"; beside it {names}" if names else ""))


def write_report(runs: list[Run], out: Path, dpi: int = 200) -> tuple[dict[str, list[Finding]], list[Picture]]:
    """Writes the pictures as PNG and the page, into a directory that exists; returns what it found and drew."""
    from eval.published import HELLASWAG

    references = load_references()
    findings = {run.name: judge(run, references) for run in runs}
    used = [find_reference(run, references)[0] for run in runs if not run.config.get("init_from")]
    used = [reference for reference in references if any(reference is other for other in used)]
    drawn, left_out = pictures(runs, used, HELLASWAG)
    images = {}
    with matplotlib.rc_context(style.RC):
        for picture in drawn:
            picture.figure.savefig(out / f"{picture.name}.png", dpi=dpi, pil_kwargs={"optimize": True})
            buffer = io.BytesIO()
            picture.figure.savefig(buffer, format="svg", dpi=dpi, metadata={"Date": None, "Creator": None})
            images[picture.name] = base64.b64encode(buffer.getvalue()).decode()
    text = page(runs, findings, drawn, images, left_out)
    (out / "report.html").write_text(text, encoding="utf-8")
    return findings, drawn


def page(
    runs: list[Run],
    findings: dict[str, list[Finding]],
    drawn: list[Picture],
    images: dict[str, str],
    left_out: list[str],
) -> str:
    """The page. `images` are SVG files in base 64, by the picture's name."""
    title = shown("Training report: " + ", ".join(run.name for run in runs))
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{CSS}</style></head><body>",
        f"<h1>{title}</h1>",
        "<h2>Does the loss look right?</h2>",
    ]
    for run in runs:
        parts += [f"<h3>{shown(run.name)}</h3>"] if len(runs) > 1 else []
        parts += [
            f'<p class="finding {finding.kind}"><b>{WORDS[finding.kind]}</b><span>{shown(finding.text)}</span></p>'
            for finding in findings[run.name]
        ]
    parts += ["<h2>Summary</h2>", table(summary(runs)), "<h2>Curves</h2>", '<div class="pictures">']
    for picture in drawn:
        parts.append(
            f"<figure{' class=wide' if picture.name in WIDE else ''}>"
            f'<div class="scroll"><img alt="{shown(picture.title)}" '
            f'src="data:image/svg+xml;base64,{images[picture.name]}"></div>'
            f"<figcaption><b>{shown(picture.title)}.</b> {shown(picture.caption)}</figcaption></figure>"
        )
    parts.append("</div>")
    parts += [f'<p class="soft">Not drawn. {shown(sentence)}</p>' for sentence in left_out]
    parts.append("<h2>Settings and results</h2>")
    for run in runs:
        rows = [[name, "" if value is None else value] for name, value in run.config.items()]
        note = "Its settings stand in its first checkpoint, which is not there yet."
        parts.append(f"<details><summary>Settings of {shown(run.name)}</summary>")
        parts.append((table([["setting", "value"], *rows], text=True) if rows else f"<p>{note}</p>") + "</details>")
        for step, results in sorted(run.results.items()):
            if rows := numbers(results):
                parts.append(f"<details><summary>results.json of {shown(run.name)}, step {step:,}</summary>")
                parts.append(table([["result", "value"], *rows]) + "</details>")
    return "\n".join([*parts, "</body></html>", ""])


def summary(runs: list[Run]) -> list[list[str]]:
    """A row a run, under a row of headings."""
    heads = [
        "run",
        "parameters",
        "data",
        "tokens",
        "training loss",
        "validation loss",
        "HellaSwag A",
        "HellaSwag B",
        "tokens/s",
        "MFU",
        "peak memory",
        "training time",
        "hardware",
    ]
    rows = []
    for run in runs:
        time, unit = run.last("seconds"), style.unit_of_time(run.last("seconds"))
        rate, mfu, memory = (run.series(c)[1] for c in ("tokens_per_second", "mfu", "peak_memory_bytes"))
        rows.append(
            [
                run.name,
                f"{run.parameters / 1e6:,.4g} M" if run.parameters else "",
                SHOWN.get(run.dataset, str(run.config.get("dataset_name", ""))),
                tokens(run.tokens),
                _fixed(run.last("loss"), 4),
                _fixed(run.last("val_loss"), 4),
                *(_accuracy(run.hellaswag[way]) for way in ("A", "B")),
                f"{np.median(rate):,.0f}" if len(rate) else "",
                f"{np.median(mfu):.1%}" if len(mfu) else "",
                f"{memory.max() / 1e9:.2f} GB" if len(memory) else "",
                f"{time / unit[0]:.3g} {unit[1]}" if math.isfinite(time) else "",
                run.engine,
            ]
        )
    filled = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    return [[row[i] for i in filled] for row in [heads, *rows]]


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else ""


def _accuracy(points: list[tuple[float, float, int]]) -> str:
    """The last one, with its 95 % interval (normal approximation)."""
    if not points:
        return ""
    _, p, n = points[-1]
    return f"{p:.4f} ± {1.96 * math.sqrt(p * (1 - p) / n):.4f} ({n:,} rows)"


def numbers(results: dict, prefix: str = "") -> list[list[str]]:
    """The numbers of a results.json, by their dotted names."""
    rows = []
    for name, value in results.items():
        if isinstance(value, dict):
            rows += numbers(value, f"{prefix}{name}.")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            rows.append([f"{prefix}{name}", f"{value:,}" if isinstance(value, int) else f"{value:.6g}"])
    return rows


def table(rows: list[list], text: bool = False) -> str:
    """An HTML table, the first row its head; `text`: values at the left."""
    head = "".join(f"<th>{shown(cell)}</th>" for cell in rows[0])
    kind = ' class="text"' if text else ""
    body = "\n".join("<tr>" + "".join(f"<td{kind}>{shown(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def shown(value: object) -> str:
    """A value as HTML text, with ~ for home directories: a report is passed on."""
    text = str(value)
    home = str(Path.home()).rstrip("/")
    for start in filter(None, (re.escape(home), r"/(?:home|Users)/[^/\s'\"]+", "/root")):
        text = re.sub(rf"(?<![\w./~-]){start}(?![\w.-])", "~", text)
    return html.escape(text)


if __name__ == "__main__":
    common.run_main(main)
