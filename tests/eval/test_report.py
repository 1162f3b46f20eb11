"""`make report`: the plots show the log, and the diagnosis is right for runs whose health is known."""

import hashlib
import json
import math
import re
from types import SimpleNamespace

import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_hex

from eval import common, curves, plots, report
from eval.diagnosis import Finding, diagnose
from eval.scores import ci95, score, text_dataset
from recipe.config import FIELDS, parse_config
from recipe.config.catalog import DATASETS
from tests.conftest import SHAKESPEARE, metrics

SHA256 = next(key for key, name in curves.DATASETS.items() if name == "tiny Shakespeare")
SHIPPED = [{"data": {"files": [{"name": SHAKESPEARE.name, "sha256": SHA256}]}}]
ABOUT = {
    "tiny Shakespeare": SHIPPED,
    "FineWeb-Edu": [{"data": {"train_text": "HuggingFaceFW/fineweb-edu"}}],
    "OpenWebText": [{"data": {"train_text": "Skylion007/openwebtext"}}],
    "FineWeb": [{"data": {"shards": "x", "train_text": "kjj0/fineweb10B-gpt2"}}],
}
# Recipe -> the curve that ships for it.
PRESETS = {
    "shakespeare": "this project's own run",
    "gpt2": "build-nanogpt, reproduced August 2026",
    "kaggle-tpu": "build-nanogpt, reproduced August 2026",
    "gpt2-fineweb": "llm.c, October 2024",
    "gpt2-medium": "llm.c, 350M",
    "openwebtext": "nanoGPT, January 2023",
    "openwebtext-tpu": "windmaple in JAX, July 2025",
}
# The flags with which a recipe repeats the run of its curve (docs/evaluation.md).
REFERENCE_FLAGS = {
    "gpt2": ["--min_lr_fraction=0.1", "--warmup_steps=715"],
    "kaggle-tpu": ["--min_lr_fraction=0.1", "--warmup_steps=715"],
    "openwebtext": ["--max_steps=600000", "--total_batch_tokens=491520"],
}
REFERENCES = {preset: r for preset, name in PRESETS.items() for r in curves.load_references() if r.name == name}


def lines_of(preset: str = "shakespeare", upto: float = math.inf) -> list[dict]:
    """The log of a run with the reference's validation losses, and a line at each fiftieth of the run."""
    reference = REFERENCES[preset]
    batch, val = reference.settings["total_batch_tokens"], dict(reference.val_loss.tolist())
    logged_at = np.linspace(0, reference.val_loss[-1, 0], 51)[1:] // batch * batch
    later_losses = reference.val_loss[1:]
    lines = []
    for tokens in sorted(t for t in {0.0, *val, *logged_at} if t <= upto):
        loss = float(np.interp(tokens, [0, *later_losses[:, 0]], [10.8, *later_losses[:, 1]])) if tokens else None
        step_metrics = {"grad_norm": 0.5, "tokens_per_second": 1000.0, "data_wait": 0.001, "skipped_steps": 0}
        line = {"step": round(tokens / batch), "tokens": int(tokens), "loss": loss, "val_loss": val.get(tokens)}
        line |= step_metrics if tokens else dict.fromkeys(step_metrics)
        lines.append(line | {"learning_rate": 1e-3, "mfu": None, "seconds": tokens / 1000})
    return lines


def config_of(preset: str = "shakespeare", **changes) -> dict:
    return parse_config(["--config", preset]).flat() | REFERENCES[preset].settings | changes


def write_run(directory, lines, config=None, results=None, about=SHIPPED):
    """A run directory as the trainer leaves it, but without weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config:
        checkpoint = directory / f"step_{lines[-1]['step']:08d}"
        checkpoint.mkdir()
        state = {"config": config, "engine": "CPU", "about": [{"from_step": 0} | part for part in about]}
        for name, content in {"trainer_state": state, "results": results or {}, "config": {}}.items():
            (checkpoint / f"{name}.json").write_text(json.dumps(content))
        (checkpoint / "model.safetensors").touch()
    return directory


def diagnosed(directory) -> list[Finding]:
    return diagnose(curves.read_run(directory), curves.load_references())


def drawn(*directories) -> dict[str, plots.Plot]:
    runs = [curves.read_run(directory) for directory in directories]
    references = [r for r in curves.load_references() if any(curves.find_reference(run, [r]) for run in runs)]
    return {picture.name: picture for picture in plots.draw_plots(runs, references)}


def line(axes, gid: str) -> list[list[float]]:
    (curve,) = [line for line in axes.lines if line.get_gid() == gid]
    return np.array(curve.get_xydata()).tolist()


@pytest.fixture
def healthy(tmp_path):
    return write_run(tmp_path / "healthy", lines_of(), config_of())


# The plots and the page


def test_the_plots_show_what_the_trainer_wrote(whole_run):
    pictures, log = drawn(whole_run[0]), metrics(whole_run[0])
    for column in ("loss", "val_loss"):
        expected = [[line["tokens"], line[column]] for line in log if line[column] is not None]
        assert len(expected) >= 3
        for axes in pictures["loss"].figure.axes:
            assert line(axes, f"0-{column}") == expected


def test_runs_and_their_reference_share_a_plot(healthy, tmp_path):
    picture = drawn(healthy, write_run(tmp_path / r"$\run$", lines_of(upto=61_440), config_of()))["loss"]
    axes = picture.figure.axes[0]
    assert np.allclose(line(axes, "reference"), REFERENCES["shakespeare"].val_loss[1:])
    assert len({next(x for x in axes.lines if x.get_gid() == f"{i}-val_loss").get_color() for i in (0, 1)}) == 2
    legend = {text.get_text() for text in picture.figure.legends[0].get_texts()}
    assert {"healthy, training", r"$\run$, validation", "reference: this project's own run, validation"} <= legend
    end_axes = picture.figure.axes[1]
    (low, high), (bottom, top) = end_axes.get_xlim(), end_axes.get_ylim()
    is_visible = [low <= x <= high and bottom <= y <= top for x, y in line(end_axes, "1-loss")]
    assert any(is_visible)  # although it ends before the other run's last four fifths
    legend = drawn(write_run(tmp_path / "_draft", lines_of(), config_of()))["training"].figure.legends[0]
    assert [text.get_text().strip() for text in legend.get_texts()] == ["_draft"]


SWEEP = [(optim, rate, seed) for optim in ("adamw", "muon") for rate in (1e-3, 3e-3) for seed in (1, 2)]


def write_sweep(directory, **changes) -> list:
    """The directories of eight runs: two optimizers, two rates and two seeds."""
    directories = []
    for i, setting in enumerate(SWEEP):
        config = config_of(**dict(zip(("optim", "learning_rate", "seed"), setting, strict=True)), **changes)
        (lines := lines_of())[-1]["val_loss"] = 5 + 0.1 * (i // 2) + 0.02 * (i % 2)
        about = [SHIPPED[0] | {"from_step": 0, "config": config, "code": "f" * 64}]
        directories.append(write_run(directory / f"run-{i}", lines, config, about=about))
    return directories


def test_more_runs_than_colors_can_be_told_apart(tmp_path):
    with matplotlib.style.context(plots.STYLE):  # in which "C6" is the first color again
        pictures = drawn(*write_sweep(tmp_path))
        for axes in (*pictures["loss"].figure.axes, pictures["training"].figure.axes[0]):
            lines = [line for line in axes.lines if re.match(r"\d-val_loss", line.get_gid() or "")]
            looks = {(to_hex(line.get_color()), line.get_linestyle(), line.get_marker()) for line in lines}
            assert len(looks) == len(lines) == 8


def test_the_settings_of_a_sweep_and_its_losses_over_seeds(tmp_path, command, capsys):
    """A run without a checkpoint, whose settings are unknown, hides nothing, and one given twice is one."""
    directories = [*write_sweep(tmp_path), tmp_path / "run-0", write_run(tmp_path / "new", lines_of()[:2])]
    rows = report.differing_settings([curves.read_run(directory) for directory in directories])
    assert rows[0] == ["run", *(f"run-{i}" for i in range(8)), "run-0", "new"]
    columns = {name: [*values] for name, *values in rows[1:]}
    assert columns.keys() == {"optim", "learning_rate", "seed"}
    assert columns["seed"] == ["1", "2"] * 4 + ["1", ""]
    command(report, *directories[:9], "--out", tmp_path / "report")
    printed, page = capsys.readouterr().out, (tmp_path / "report" / "report.html").read_text()
    for loss, (optim, rate, _) in zip(("5.0100", "5.1100", "5.2100", "5.3100"), SWEEP[::2], strict=True):
        row = ["2", loss, "0.0141", f"learning_rate {rate}, optim {optim}"]
        assert re.search("^" + " +".join(map(re.escape, row)) + "\n", printed, re.MULTILINE), row
        assert all(cell in page for cell in row)


@pytest.mark.filterwarnings("error:constrained_layout not applied")
def test_the_curves_of_16_runs_have_room_below_their_legend(tmp_path):
    runs = [write_run(tmp_path / f"lr1e-2-wd0.1-{i:02}", lines_of()[:30]) for i in range(16)]
    with matplotlib.style.context(plots.STYLE):
        figure = drawn(*runs)["loss"].figure
        figure.draw_without_rendering()
    assert all(axes.get_position().height * figure.get_figheight() > 1.5 for axes in figure.axes)  # inches


def test_runs_in_directories_of_one_name_are_called_by_their_paths(tmp_path, command, monkeypatch, capsys):
    for parent in ("sweep-1", "sweep-2"):
        write_run(tmp_path / parent / "a", lines_of())
    monkeypatch.chdir(tmp_path)
    for runs, names in ((["sweep-1/a"], ["a"]), (["sweep-1/a", "sweep-2/a"], ["sweep-1/a", "sweep-2/a"])):
        command(report, *runs, "--out", "report")
        lines = [line.split(": validation loss ") for line in capsys.readouterr().out.splitlines()]
        loss = f"{lines_of()[-1]['val_loss']:.4f} after "
        assert [line[0] for line in lines if line[1:] and line[1].startswith(loss)] == names


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        (
            {"save_steps": 7},
            [["settings", "seeds", "validation loss", "deviation"], ["all runs", "2", "5.0100", "0.0141"]],
        ),
        ({"seed": 1}, []),
        ({"learning_rate": 2e-3}, []),
        ({"dataset_name": "data/other"}, []),
        ({"val_data": "data/other"}, []),
        ({"code": "0" * 64}, []),
    ],
)
def test_only_runs_that_differ_in_nothing_but_the_seed_are_taken_together(changes, table, tmp_path):
    first, second, *_ = write_sweep(tmp_path)
    state = json.loads((path := next(second.glob("step_*")) / "trainer_state.json").read_text())
    state["config"] |= changes
    state["about"][0]["config"] |= {name: value for name, value in changes.items() if name != "save_steps"}
    state["about"][0] |= {name: value for name, value in changes.items() if name == "code"}
    if "dataset_name" in changes:
        state["about"][0]["data"] = {"shards": "other"}
    path.write_text(json.dumps(state))
    runs = [curves.read_run(directory) for directory in (first, second)]
    runs[0].about[0]["config"].pop("save_steps")  # the trainer does not record it there
    runs[1].about[0]["config"].pop("save_steps")
    assert report.over_seeds(runs) == table


def test_a_seed_without_a_loss_at_the_end_is_not_averaged_away(tmp_path):
    first, second, *_ = write_sweep(tmp_path)
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["val_loss"] = None
    (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.over_seeds([*map(curves.read_run, (first, second))])[1] == ["all runs", "2", "nan", "nan"]


def test_settings_that_a_resume_has_changed_are_named(tmp_path):
    config = config_of()
    parts = [{"from_step": 0, "config": config | {"learning_rate": 3e-3}}, {"from_step": 56, "config": config}]
    parts[0]["config"].pop("fused_loss")  # of an older version
    run = write_run(tmp_path / "run", lines_of(), config, about=[SHIPPED[0] | part for part in parts])
    text = f"It was resumed from step 56 with other settings: learning_rate 0.003 -> {config['learning_rate']}."
    assert Finding("note", text) in diagnosed(run)
    assert curves.read_run(run).settings["learning_rate"] == f"0.003; {config['learning_rate']} from step 56"


def test_time_speed_rate_and_norm_are_drawn(healthy):
    log = [line for line in metrics(healthy) if line["loss"] is not None]
    time_axes, *token_axes = drawn(healthy)["training"].figure.axes
    val = [[x["seconds"] / 60, x["val_loss"]] for x in metrics(healthy) if x["val_loss"] is not None]
    assert np.allclose(line(time_axes, "0-val_loss-by-time"), val)  # 717 seconds
    assert time_axes.get_xlabel() == "minutes of training"
    for axes, column in zip(token_axes, ("tokens_per_second", "learning_rate", "grad_norm"), strict=True):
        assert line(axes, f"0-{column}")[-len(log) :] == [[x["tokens"], x[column]] for x in log]


def test_hellaswag_beside_openais(tmp_path):
    lines = lines_of("gpt2", upto=2e9)
    for i, record in enumerate(lines[1:]):
        record |= {"hellaswag_llmc_acc_norm": 0.26 + i / 1000, "hellaswag_lmeval_acc_norm": 0.27 + i / 1000}
    config = config_of("gpt2", hellaswag_limit=1000)
    picture = drawn(write_run(tmp_path / "gpt2", lines, config, about=ABOUT["FineWeb-Edu"]))["hellaswag"]
    for axes, style, published in zip(picture.figure.axes, ("llmc", "lmeval"), (0.2955, 0.3114), strict=True):
        expected = [[line["tokens"], line[f"hellaswag_{style}_acc_norm"]] for line in lines[1:]]
        assert line(axes, "0-hellaswag") == expected
        assert line(axes, "openai")[0][1] == published
        assert f"{published:.1%}" in {text.get_text() for text in axes.texts}
    assert "OpenAI's GPT-2 124M" in {text.get_text() for text in picture.figure.legends[0].get_texts()}
    assert "1,000 of 10,042" in picture.caption
    assert "karpathy/build-nanogpt" in picture.caption


def test_an_interval_is_that_of_the_rows_that_were_scored(tmp_path):
    """A resume may score other rows than before."""
    lines = lines_of("gpt2", upto=2e9)
    for number, record in enumerate(lines[1:]):
        record |= {f"hellaswag_{style}_acc_norm": 0.25 for style in ("llmc", "lmeval")}
        record["hellaswag_rows"] = 1000 if number else 40
    run = write_run(tmp_path / "gpt2", lines, config_of("gpt2", hellaswag_limit=40), about=ABOUT["FineWeb-Edu"])
    picture = drawn(run)["hellaswag"]
    assert "on 40 or 1,000 of 10,042 validation rows" in picture.caption
    band = picture.figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert max(band) == pytest.approx(0.25 + ci95(0.25, 40))
    assert min(band[band > 0.25]) == pytest.approx(0.25 + ci95(0.25, 1000))
    assert f"0.2500 ± {ci95(0.25, 1000):.4f} (1,000 rows)" in str(report.summarize([curves.read_run(run)]))


def test_the_page_is_self_contained_and_has_no_active_content(tmp_path, command, capsys):
    hostile = '"><script src=https://example.org/x.js></script>'
    scores = [score(text_dataset(hostile), ("loss", "loss, nats per token"), 4.25, "by hand")]
    results = {"perplexity": {"scores": scores}}
    lines = lines_of()
    lines[-1] |= {"hellaswag_llmc_acc_norm": 0.3, "hellaswag_lmeval_acc_norm": 0.31, "sample": f"Hark, {hostile}"}
    run = write_run(tmp_path / "<b>run", lines, config_of(run_name=hostile, hellaswag_limit=100), results)
    command(report, run)
    text = (run / "report" / "report.html").read_text()
    tags = re.findall(r"<(\w[^\s>]*)([^>]*)", text)
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "base", "b>run"}
    assert not [attributes for _, attributes in tags if re.search(r"\s(on\w+|href)=", attributes)]
    assert all(a.count('src="') == a.count('src="data:image/png;base64,') for _, a in tags)
    assert not re.search(r"url\(|@import", text)
    passages = ["&lt;b&gt;run", "0.3000 ± 0.0887 (100 rows)", "4.5850", "4.2500", "follows the reference"]
    passages += ["11 min 57 s", "step 700</summary>", "Hark, "]
    assert [passage for passage in passages if passage not in text] == []
    # The summary has a row for each quantity, so that its width does not grow with their number.
    rows = re.findall(r"<tr>.*", text[text.index("Summary") : text.index("Curves")])
    assert [row.count("<td>") for row in rows] == [1] * 10
    assert f"wrote {run}/report/report.html; beside it hellaswag.png, loss.png, training.png" in capsys.readouterr().out
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (run / "report").glob("*.png"))


def test_a_run_from_others_reaches_neither_the_terminal_nor_a_file_outside(tmp_path, command, capsys):
    (mine := tmp_path / "mine").write_text("mine")
    run = write_run(tmp_path / "run", lines_of(), config_of(optim="\x1b[2J"))  # clears a terminal
    (run / "report").mkdir()
    for name in ("report.html", "loss.png"):
        (run / "report" / name).symlink_to(mine)
    command(report, run)
    assert mine.read_text() == "mine"
    assert "at equal steps: optim \\x1b[2J (reference: muon)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lines",
    [lines_of()[:1], lines_of()[:2], [{"step": i, "tokens": i, "loss": 4.0, "seconds": i} for i in range(1, 9)]],
    ids=["just begun", "one line", "nothing changes"],
)
@pytest.mark.filterwarnings("error")
def test_a_short_run_is_drawn_as_far_as_it_goes(lines, tmp_path):
    runs = [curves.read_run(write_run(tmp_path / "run", lines))]
    report.write_report(runs, tmp_path, dpi=20)
    assert "no comparison yet" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("name", ["trainer_state", "results"])
@pytest.mark.parametrize("text", ["{", "[1]", '{"config": {}, "engine": "", "about": [{}]}'])
def test_a_damaged_file_is_an_error_of_one_line(name, text, tmp_path, error_of):
    run = write_run(tmp_path / "run", lines_of()[:9], config_of(), {"hellaswag": {"scores": []}})
    (path,) = run.glob(f"step_*/{name}.json")
    path.write_text(text)
    message = rf"error: {path} cannot be read \(.+\); .+\n|error: {path}: not .+\n"
    assert re.fullmatch(message, error_of(report, run))


# The diagnosis


@pytest.mark.parametrize("preset", ["shakespeare", "gpt2", "gpt2-fineweb", "gpt2-medium"])
def test_no_alarm_at_any_time_of_a_run_like_its_reference(preset, tmp_path):
    """A run as noisy as its reference, diagnosed while it is in progress."""
    rng = np.random.default_rng(1)
    lines, about = lines_of(preset), ABOUT[REFERENCES[preset].dataset]
    for record in lines[1:]:
        for column in ("loss", "val_loss"):
            record[column] = record[column] and record[column] + 0.3 * REFERENCES[preset].noise * rng.normal()
    for share in (0.02, 0.2, 0.5, 1):
        part = lines[: max(2, round(share * len(lines)))]
        findings = diagnosed(write_run(tmp_path / f"{share}", part, config_of(preset), about=about))
        assert "bad" not in [finding.kind for finding in findings], findings
    assert "follows" in findings[0].text


def test_before_its_first_checkpoint_a_run_is_not_accused_of_a_vocabulary_that_it_does_not_have(tmp_path):
    """With a tokenizer of its own, as make best trains one, the first loss is lower."""
    lines = lines_of(upto=61_440)
    lines[0]["val_loss"] = math.log(4096)
    findings = diagnosed(write_run(tmp_path / "run", lines))
    assert "bad" not in [finding.kind for finding in findings], findings


@pytest.mark.parametrize(("shift", "text"), [(0.4, "Usual causes"), (-0.4, "Lower is suspicious too")])
def test_a_departure_from_the_reference_is_reported_with_its_start_and_size(shift, text, tmp_path):
    lines = lines_of()
    for record in lines:
        if record["tokens"] > 400_000 and record["val_loss"]:
            record["val_loss"] += shift
    finding = diagnosed(write_run(tmp_path / "run", lines, config_of()))[0]
    assert finding.kind == "bad"
    assert f"since 538 k tokens: 0.40 nats {'above' if shift > 0 else 'below'} it at 717 k" in finding.text
    assert text in finding.text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"max_steps": 60, "warmup_steps": 10}, "cannot be compared with .* max_steps 60 .reference: 700.; warmup"),
        ({"optim": "adamw"}, "at equal steps: optim adamw .reference: muon."),
        ({"matrix_learning_rate": 3e-4}, "matrix_learning_rate 0.0003 .reference: 0.0."),  # in no reference's settings
        ({"n_layer": 5}, r"No reference curve ships for tiny Shakespeare and this model \(5 layers of 128\)"),
        ({"init_from": "openai-community/gpt2"}, "starts from other weights"),
    ],
)
def test_a_run_of_other_settings_is_not_judged_by_a_reference(changes, sentence, tmp_path):
    """A shorter schedule has a lower loss at the same step, which is no sign of leaked validation text."""
    lines = lines_of()
    for record in lines[1:]:
        record["val_loss"] = record["val_loss"] and record["val_loss"] - 1
    run = write_run(tmp_path / "run", lines, config_of(**changes))
    finding = diagnosed(run)[0]
    assert finding.kind == "note"
    assert re.search(sentence, finding.text)
    if "max_steps" in changes:  # the same data and model, yet not drawn
        report.write_report([curves.read_run(run)], tmp_path, dpi=30)
        assert "Reference:" not in (tmp_path / "report.html").read_text()


def changed(column, value, first=0, last=None):
    """Damages a column of a log: `value` is a number, or a function of the old one."""

    def damage(lines):
        for record in lines[first:last]:
            if record[column] is not None:
                record[column] = value(record[column]) if callable(value) else value

    return damage


def both(*damages):
    return lambda lines: [damage(lines) for damage in damages]


diverging, without_validation = changed("loss", lambda loss: loss + 3, 31), changed("val_loss", None, 1)


@pytest.mark.parametrize(
    ("damage", "kind", "sentence"),
    [
        (changed("val_loss", 13.0, 0, 1), "bad", "The loss begins at 13.00"),
        (changed("loss", 10.6), "bad", "It hardly learns"),
        (changed("skipped_steps", 30, 20), "bad", "30 of 700 steps were skipped"),
        (changed("skipped_steps", 10, 20), "note", "10 of 700 steps were skipped"),
        (
            changed("val_loss", 4.5, 20, 30),
            "bad",
            "4.58, above its minimum of 4.50 at .*, while the training loss falls",
        ),
        (both(changed("val_loss", 4.5, 20, 30), diverging), "bad", "training loss is not lower: it div"),
        (changed("val_loss", 13.0, 1), "bad", "above its minimum of 10.83 at 0 tokens, and the training loss is not"),
        (
            both(
                changed("val_loss", 4.4, 13, 14),
                changed("loss", lambda x: x + 1, 1, 20),
                changed("loss", lambda x: x + 1, 44),
            ),  # lower than at the minimum
            "bad",
            "training loss is not lower: it diverges",
        ),
        (both(without_validation, diverging), "bad", r"The training loss has risen from \d\.\d\d to \d\.\d\d: it div"),
        (without_validation, "good", "^Nothing else stands out"),
        (both(without_validation, changed("loss", None, 1)), "good", "^Nothing else"),
    ],
)
def test_problems_are_found_without_a_reference(damage, kind, sentence, tmp_path):
    lines = lines_of()
    damage(lines)
    findings = diagnosed(write_run(tmp_path / "run", lines, config_of(n_layer=5)))
    assert [finding.kind for finding in findings if re.search(sentence, finding.text)] == [kind], findings


def test_the_noise_of_a_few_batches_is_no_divergence(tmp_path):
    lines = lines_of()[:31]
    both(changed("val_loss", None, 1), changed("loss", lambda loss: loss + 1, 28))(lines)
    assert not [finding for finding in diagnosed(write_run(tmp_path / "run", lines)) if "diverges" in finding.text]


def test_a_run_that_starts_from_other_weights_may_begin_at_a_low_loss(tmp_path):
    lines = lines_of()
    changed("val_loss", 4.4, 0, 1)(lines)
    for init_from, kinds in (("openai-community/gpt2", []), ("", ["bad"])):
        run = write_run(tmp_path / f"run-{init_from[:4]}", lines, config_of(n_layer=5, init_from=init_from))
        assert [finding.kind for finding in diagnosed(run) if "begins at 4.40" in finding.text] == kinds
        assert any("overfitting" in finding.text for finding in diagnosed(run)) == bool(init_from)


@pytest.mark.parametrize(
    ("earlier", "kinds"), [({}, ["bad"]), ({"eval_tokens": 4096}, []), ({"val_data": "data/other"}, [])]
)
def test_a_rise_between_losses_on_other_tokens_is_none(earlier, kinds, tmp_path):
    """They were validated on other tokens before a resume."""
    lines, config = lines_of(), config_of(n_layer=5, eval_tokens=65536)
    changed("val_loss", lambda loss: loss + 2, 20)(lines)
    step = lines[20]["step"] - 1
    parts = [{"from_step": 0, "config": config | earlier}, {"from_step": step, "config": config}]
    run = write_run(tmp_path / "run", lines, config, about=[part | SHIPPED[0] for part in parts])
    assert [finding.kind for finding in diagnosed(run) if "above its minimum" in finding.text] == kinds


# Runs and references


def test_a_directory_without_a_log_is_an_error(tmp_path):
    with pytest.raises(common.UserError, match=rf"run {tmp_path}: no metrics\.jsonl"):
        curves.read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('null\n[1]\n{}\n{"step": 1e999}\n7\n{"step": 1, "tok')
    with pytest.raises(common.UserError, match=f"run {tmp_path}: .* no complete line"):
        curves.read_run(tmp_path)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_recipes_settings_are_those_of_its_reference(preset):
    reference = REFERENCES[preset]
    config = parse_config(["--config", preset, *REFERENCE_FLAGS.get(preset, [])]).flat()
    assert set(reference.settings) <= set(FIELDS)
    assert reference.dataset in curves.DATASETS.values()
    assert (np.diff(reference.val_loss[:, 0]) > 0).all()
    run = SimpleNamespace(config=config, dataset=reference.dataset)
    assert reference.differences(run) == []
    config["adam_beta2"] = 0.5 + config["adam_beta2"] / 2  # an average over twice as many steps
    assert [sentence.partition(" ")[0] for sentence in reference.differences(run)] == ["adam_beta2"]
    assert curves.find_reference(run, curves.load_references()).name == reference.name


@pytest.mark.parametrize(
    ("about", "dataset"),
    [
        ([{"data": {"files": [{"name": "tiny_shakespeare.txt", "sha256": "0" * 64}]}}], ""),
        ([*SHIPPED, {"data": {"train_text": "HuggingFaceFW/fineweb"}}], ""),
        ([{"data": {"train_text": "huggingfacefw/FineWeb"}}], "FineWeb"),
        ([{"data": {"train_text": "somebody/fineweb"}}], ""),
        ([{"data": {"shards": "x"}}, {"data": {"shards": "x", "train_text": "Skylion007/openwebtext"}}], "OpenWebText"),
    ],
)
def test_a_manifest_names_the_text_that_was_trained_on(about, dataset, tmp_path):
    run = write_run(tmp_path / "run", lines_of()[:1], config_of(val_data=""), about=about)
    assert curves.read_run(run).dataset == dataset


def test_the_shipped_text_and_the_recipes_datasets_have_names():
    assert hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest() == SHA256
    names = {curves.DATASETS.get(DATASETS[name][0].lower()) for name in ("fineweb-edu", "fineweb", "openwebtext")}
    assert names == {"FineWeb-Edu", "FineWeb", "OpenWebText"}
