"""Figures that others published are in eval/data/published.yaml, with their sources, and nowhere else."""

import json
import re
import statistics
from itertools import zip_longest

from benchmarks.scoreboard import published_rows
from eval import published
from eval.published import SLOWER, SPEEDS, STYLES
from tests.conftest import ROOT

# A line with one of these names is about what others published.
OTHERS = r"llm\.c|journal|Emani|Kaggle|windmaple|MARS|nanoGPT|nanogpt|nanochat|litgpt|OpenAI|Levanter|NeMo|torchtitan"

H200 = json.loads((ROOT / "docs/results/h200.json").read_text())
# Our own figures in such lines: a version, losses of nanoGPT's example, the speed-ups expected on an H100, and those
# measured on an H200.
IN_BF16 = next(value["row"] for name, value in H200["2026-11-28"].items() if name.startswith("peers, nanoGPT"))
PEERS = [IN_BF16, *(row for peers in H200["peers"] for row in peers["rows"])]
OURS = {"5.17", "5.23", "1.591", "1.601", "1.881", "1.898", "1.20", "1.32"} | {f"{row['ratio']:.2f}" for row in PEERS}


def tables() -> list[str]:
    """docs/results.md's tables of what others published."""
    lines = ["| data | model | run | B tokens | loss | source |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in published.LOSSES]
    for data, losses in published.OPENAI_LOSS.items():
        sizes, values = ", ".join(losses), ", ".join(f"{loss:.4g}" for loss in losses.values())
        lines.append(f"| {data} | {sizes} | OpenAI's weights | | {values} | {published.OPENAI_LOSS_SOURCE[data]} |")
    lines += ["| HellaSwag | style | acc | acc_norm |", "|---|---|---|---|"]
    for style, models in published.HELLASWAG.items():
        for model, pair in models.items():
            lines.append(f"| {model} | {STYLES[style]} | " + " | ".join(f"{p:.4f}" if p else "" for p in pair) + " |")
    lines += [f"- {STYLES[style]}: {source}." for style, source in published.SOURCES.items()]
    lines += ["| machine | model | run | tokens/s | x first | MFU |", "|---|---|---|---|---|---|"]
    for row in published_rows():  # of the scoreboard
        run, speed = row["source"].removeprefix("published: "), f"{row['tokens_per_second']:,.0f}"
        speedup, mfu = (f"{row['gain']:,.1f}" if row["gain"] else ""), (f"{row['mfu']:.1%}" if row["mfu"] else "")
        lines.append(f"| {row['machine']} | {row['size']} | {run}: {row['name']} | {speed} | {speedup} | {mfu} |")
    return [*lines, *(f"- {run}: {source}." for run, source in published.SPEED_SOURCES.items())]


def test_the_page_has_every_published_figure_with_its_source():
    assert {run.run for run in (*SLOWER, *SPEEDS)} == published.SPEED_SOURCES.keys()
    page = (ROOT / "docs" / "results.md").read_text()
    section = re.sub(r"\n  (?=\S)", " ", page.split("## Published by others")[1].split("\n## ")[0])  # unwrapped
    assert [line for line in section.splitlines() if line.startswith(("|", "- "))] == tables(), "\n".join(tables())


def test_no_page_quotes_a_figure_that_is_not_in_the_file():
    sources = (ROOT / "eval" / "data" / "published.yaml").read_text() + "\n".join(tables())
    unsourced = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name in ("log.md", "elsewhere.md"):  # measurements of this project
            continue
        for line in page.read_text().splitlines():
            if re.search(OTHERS, line):
                text = re.sub(r"`[^`]*`|https?:\S*", "", line)  # no names of files and links
                numbers = re.findall(r"(?<![\w./#-])(?:[1-9]\d*\.\d{2,}|0\.\d{4}|\d+(?:,\d{3})+|\$\d+)(?![\w/-])", text)
                unsourced += [f"{page.name}: {n} in {line}" for n in numbers if n not in sources and n not in OURS]
    assert not unsourced, "\n".join(unsourced)


def test_the_pages_have_the_measurements_of_the_h200():
    page = (ROOT / "docs" / "performance.md").read_text().split("## On an H200, measured")[1].split("\n## ")[0]
    rows = {
        "64, one a step": H200["micro_batch_size"][0],
        "128, one a step": H200["micro_batch_size"][1],
        "32 with `deterministic`": H200["deterministic"][0],
    }
    for name, row in rows.items():
        speed = f"{row['tokens_per_second']:,.0f} | {row['mfu']:.1%} | {row['memory_gb']:.1f}"
        assert f"| {name} | {speed.replace('%', ' %')} |" in page
    xl = next(value for name, value in H200["2026-11-28"].items() if name.startswith("gpt2-xl"))[2:]
    speed, mfu = (statistics.median(line[field] for line in xl) for field in ("tokens_per_second", "mfu"))
    assert f"| {speed:,.0f} | {100 * mfu:.1f} % | {xl[-1]['peak_memory_bytes'] / 1e9:.1f} |" in page
    memory, ratio = IN_BF16["peak_memory_bytes"][1] / 1e9, IN_BF16["ratio"]
    assert f"took {memory:.1f} GB, and ours was {ratio:.2f} times as fast" in page
    peers = [{row["name"]: row for row in peers["rows"]} for peers in H200["peers"]]
    for measurements in (peers[:2], peers[2:]):
        rows = [row for measurement in measurements for row in measurement.values()]
        ours = [rate for row in rows for rate in row["tokens_per_second"]["ours"]]
        assert f"| {min(ours):,.0f} to {max(ours):,.0f} |" in page
    lines = re.findall(r"^\| .* 1\.\d\d \|.* \d\d\.\d \|$", page, re.MULTILINE)
    for line, name in zip_longest(lines, dict.fromkeys(name for measurement in peers for name in measurement)):
        rows = [measurement.get(name) for measurement in peers]
        ratios = "".join(f" {row['ratio']:.2f} |" if row else " |" for row in rows)
        memory = next(row["peak_memory_bytes"][1] for row in reversed(rows) if row)
        assert line.endswith(f" |{ratios} {memory / 1e9:.1f} |")
    loaded = H200["kernels after 8 seconds of steps, 32 x 1,024 tokens, AdamW included"]
    assert f"| {32 * 1024 / loaded['step_ms'] * 1e3:,.0f} | 49.1 % |" in page
    times = f"kernels took {loaded['kernels_ms']:.1f} ms and a step {loaded['step_ms']:.1f}"
    idle = f"idles for {loaded['step_ms'] - loaded['kernels_ms']:.1f} ms between its more than 740 launches"
    assert times in " ".join(page.split())
    assert idle in " ".join(page.split())
    assert 740 < sum(launches for _, launches, _ in loaded["kernels"]) < 750
    warm = [row["step_ms"] for row in H200["2026-11-28"]["kernels after 8 seconds of steps"].values()]
    assert f"took {warm[1]:.1f} ms, 64.7 of them in kernels, beside our {warm[0]:.1f}" in " ".join(page.split())
    curve = H200["best.py, 0.1 hours, 41 M tokens of books and Wikipedia"]["curve"]
    fastest = max(line["tokens_per_second"] or 0 for line in curve)
    assert f"at up to {round(fastest, -3):,.0f} tokens/s" in (ROOT / "docs/results.md").read_text()
    kernels = next(value for name, value in H200.items() if name.startswith("kernels"))
    together = [sum(ms for _, _, ms in rows) for rows in kernels.values()]
    assert "| **together** | " + " | ".join(f"**{ms:.1f}**" for ms in together) + " |" in page
    readme, large = (ROOT / "README.md").read_text(), H200["micro_batch_size"][0]
    assert f"{large['tokens_per_second']:,.0f} tokens/s, {large['mfu']:.0%} MFU".replace("%", " %") in readme
    latest = {name: row for measurement in peers for name, row in measurement.items()}
    shown = [row for name, row in reversed(latest.items()) if "compiled" in name]  # Trainer, transformers, nanoGPT
    assert ", ".join(f"{row['ratio']:.2f}x" for row in shown) in readme
