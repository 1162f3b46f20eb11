"""The report: what it draws is what the file says, and its verdict is right about runs that are known."""

import base64
import hashlib
import json
import math
import os
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
from safetensors import safe_open

from eval import common, curves, figures, known_data, report, style
from eval import diagnosis as verdict
from eval.published import HELLASWAG
from recipe.config import FIELDS, parse_config
from recipe.data.catalog import DATASETS
from tests.conftest import SHAKESPEARE, metrics

FINEWEB = {"train_text": "HuggingFaceFW/fineweb", "dataset_name": "data/fineweb-sample-10BT"}
REFERENCES = {reference.presets[0]: reference for reference in curves.load_references()}


def lines_of(preset: str, upto: float = math.inf) -> list[dict]:
    """A run's log that is a reference's curve: a line at each of its points."""
    reference = REFERENCES[preset]
    batch = reference.settings["total_batch_tokens"]
    val, loss = (dict(points.tolist()) for points in (reference.val_loss, reference.loss))
    lines = []
    for at in sorted({0.0, *val, *loss}):
        if at <= upto:
            measured = {"grad_norm": 0.5, "tokens_per_second": 1000.0, "data_wait": 0.001, "skipped_steps": 0}
            measured = measured if at in loss else dict.fromkeys(measured)
            lines.append(
                {"step": round(at / batch), "tokens": int(at), "loss": loss.get(at), "val_loss": val.get(at)}
                | measured
                | {"learning_rate": 1e-3, "mfu": None, "seconds": at / 1000, "save_wait": 0.001}
            )
    return lines


def config_of(preset: str, **changes) -> dict:
    return (
        parse_config(["--config", preset]).flat()
        | {"train_text": parse_config(["--config", preset]).data.train_text}
        | changes
    )


def write_run(directory, lines, config=None, results=None, about=None):
    """A run directory as the trainer leaves it, but for weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if config:
        checkpoint = directory / f"step_{lines[-1]['step']:08d}"
        checkpoint.mkdir()
        state = {"config": config, "engine": "CPU"} | ({} if about is None else {"about": about})
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        if results:
            (checkpoint / "results.json").write_text(json.dumps(results))
    return directory


def judged(directory) -> list[verdict.Finding]:
    return verdict.judge(curves.read_run(directory), curves.load_references())


def draw(*directories, published=HELLASWAG) -> dict[str, figures.Picture]:
    runs = curves.read_runs([str(directory) for directory in directories])
    used = [curves.find_reference(run, curves.load_references())[0] for run in runs]
    drawn, _ = figures.pictures(runs, [reference for reference in used[:1] if reference], published)
    return {picture.name: picture for picture in drawn}


def drawn_line(axes, gid: str) -> list[list[float]]:
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    return np.array(line.get_xydata()).tolist()


@pytest.fixture
def healthy(tmp_path):
    return write_run(tmp_path / "healthy", lines_of("shakespeare"), config_of("shakespeare"))


# --- what is drawn


def test_what_is_drawn_is_what_the_trainer_wrote(whole_run):
    run = whole_run[0]
    pictures, log = draw(run), metrics(run)
    for column in ("loss", "val_loss"):
        expected = [[line["tokens"], line[column]] for line in log if line[column] is not None]
        assert len(expected) >= 3
        for axes in pictures["loss_tokens"].figure.axes:
            assert drawn_line(axes, f"0-{column}") == expected
        in_seconds = [[line["seconds"], line[column]] for line in log if line[column] is not None]
        assert np.allclose(drawn_line(pictures["loss_time"].figure.axes[0], f"0-{column}"), in_seconds)
    for column in ("learning_rate", "grad_norm", "tokens_per_second"):
        expected = [[line["tokens"], line[column]] for line in log if line[column] is not None]
        assert drawn_line(pictures[column].figure.axes[0], f"0-{column}") == expected
    assert "mfu" not in pictures  # null on a CPU


def test_a_long_log_is_drawn_whole_and_its_mean_stays_within_it(tmp_path):
    rng = np.random.default_rng(0)
    noise = rng.normal(size=400)
    lines = [
        {"step": 10 * i, "tokens": 10240 * i, "loss": 4 + 0.1 * noise[i - 1], "seconds": float(i)}
        for i in range(1, 401)
    ]
    axes = draw(write_run(tmp_path / "long", lines))["loss_tokens"].figure.axes[1]
    assert drawn_line(axes, "0-loss") == [[line["tokens"], line["loss"]] for line in lines]
    mean = np.array(drawn_line(axes, "0-loss-mean"))
    width = curves.smoothing_width(400)
    assert width == 11
    assert mean[200, 1] == pytest.approx(np.mean([line["loss"] for line in lines[195:206]]))
    assert mean[0, 1] == lines[0]["loss"]  # no later, lower losses in the first points
    assert mean[-1, 1] == pytest.approx(np.mean([line["loss"] for line in lines[-6:]]))


def test_runs_lie_over_each_other_each_with_its_own_look(healthy, tmp_path):
    other = write_run(tmp_path / r"_$\run$", lines_of("shakespeare", upto=600_000), config_of("shakespeare"))
    picture = draw(healthy, other)["loss_tokens"]
    axes = picture.figure.axes[0]
    first, second = (next(line for line in axes.lines if line.get_gid() == f"{i}-val_loss") for i in (0, 1))
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()
    labels = [text.get_text() for text in picture.figure.legends[0].get_texts()]
    assert labels[:2] == ["healthy", r" _$\run$"]
    assert any("reference" in label for label in labels)
    with style_of_report():
        picture.figure.savefig(tmp_path / "x.png", dpi=30)  # $ is no formula


def style_of_report():
    return matplotlib.rc_context(style.RC)


def test_the_legend_covers_no_axes(healthy, tmp_path):
    names = ["a" * 30, "b" * 40, "c"]
    others = [write_run(tmp_path / name, lines_of("shakespeare"), config_of("shakespeare")) for name in names]
    picture = draw(healthy, *others)["loss_tokens"]
    with style_of_report():
        picture.figure.savefig(tmp_path / "x.png", dpi=30)
        box = picture.figure.legends[0].get_window_extent()
        assert box.x1 <= picture.figure.bbox.x1 + 1
        assert all(box.y0 >= axes.get_window_extent().y1 for axes in picture.figure.axes)


def test_hellaswag_of_training_and_of_a_checkpoint_beside_openais(tmp_path):
    lines = lines_of("gpt2", upto=2e9)
    for i, line in enumerate(lines[1:]):
        line |= {"hellaswag_A_acc_norm": 0.26 + i / 1000, "hellaswag_B_acc_norm": 0.27 + i / 1000}
    scores = {"A": {"acc_norm": 0.281}, "B": {"acc_norm": 0.291}}
    config = config_of("gpt2", hellaswag_limit=1000)
    run = write_run(tmp_path / "gpt2", lines, config, {"hellaswag": {"rows": 10042} | scores})
    picture = draw(run)["hellaswag"]
    axes = picture.figure.axes
    for panel, way in zip(axes, "AB", strict=True):
        expected = [[line["tokens"], line[f"hellaswag_{way}_acc_norm"]] for line in lines[1:]]
        expected[-1][1] = scores[way]["acc_norm"]  # of all rows, at the same step
        assert drawn_line(panel, f"0-hellaswag_{way}") == expected
        assert drawn_line(panel, f"openai-{way}-124M")[0][1] == HELLASWAG[way]["GPT-2 124M, OpenAI"][1]
    assert [point[2] for point in curves.read_run(run).hellaswag["A"]] == [1000] * (len(lines) - 2) + [10042]
    a = "A: 124M, 1558M: docstring of karpathy/build-nanogpt hellaswag.py; 350M, 774M: karpathy/llm.c dev/vislog.ipynb."
    b = "B: harness numbers quoted in the docstring of karpathy/build-nanogpt hellaswag.py."
    assert picture.caption.endswith(f"OpenAI's models, on all 10,042 rows: {a} {b}")
    assert "eval/" not in picture.caption  # which who is sent the page does not have
    half = 1.96 * math.sqrt(0.2955 * 0.7045 / 1000)
    (band,) = axes[0].patches
    assert [band.get_y(), band.get_y() + band.get_height()] == pytest.approx([0.2955 - half, 0.2955 + half])


@pytest.mark.parametrize(
    ("preset", "changes", "expected"),
    [
        ("gpt2", {}, 3.2924),
        ("gpt2-fineweb", {}, 3.424958),
        ("gpt2", {"train_text": "", "dataset_name": "hf://datasets/kjj0/fineweb10B-gpt2/*.bin"}, 3.424958),
        ("gpt2", {"train_text": "texts/*.jsonl", "dataset_name": "data/mine"}, None),
        ("gpt2", {"val_data": "data/other"}, None),
        ("gpt2-medium", {}, None),
        ("shakespeare", {}, None),
    ],
)
def test_openais_loss_is_drawn_on_its_own_data_and_size_only(preset, changes, expected, tmp_path):
    run = write_run(tmp_path / "run", lines_of("shakespeare"), config_of(preset, **changes))
    axes = draw(run)["loss_time"].figure.axes[0]
    assert [line.get_ydata()[0] for line in axes.lines if str(line.get_gid()).startswith("openai")] == (
        [expected] if expected else []
    )


# --- does it look right


def test_a_healthy_run_follows_and_nothing_stands_out(healthy):
    findings = judged(healthy)
    assert [finding.kind for finding in findings] == ["good", "good"]
    assert "follows the reference (this project's own run, tiny Shakespeare)" in findings[0].text
    assert "at 0.778 M tokens" in findings[0].text


@pytest.mark.parametrize("preset", sorted(REFERENCES))
def test_no_alarm_at_any_time_of_a_run_like_its_reference(preset, tmp_path):
    """A run with the noise of its reference, looked at while it goes on."""
    rng = np.random.default_rng(1)
    config = config_of(preset, **REFERENCES[preset].settings)
    config |= FINEWEB if preset == "gpt2-medium" else {}
    lines = lines_of(preset)
    for line in lines[1:]:
        for column in ("loss", "val_loss"):
            line[column] = line[column] and line[column] + 0.3 * REFERENCES[preset].noise * rng.normal()
    for share in (0.02, 0.2, 0.5, 1):
        part = lines[: max(2, round(share * len(lines)))]
        findings = judged(write_run(tmp_path / f"{share}", part, config))
        assert "bad" not in [finding.kind for finding in findings], findings
    assert "follows" in findings[0].text


def losses_of_steps(preset: str, noise: float) -> np.ndarray:
    """A training loss for every step, (steps,): through the middles of the reference's windows, and a batch's noise."""
    reference = REFERENCES[preset]
    ends = reference.loss[:, 0] / reference.settings["total_batch_tokens"]
    middles = (np.insert(ends[:-1], 0, 0.0) + ends) / 2
    steps = np.arange(int(ends[-1])) + 0.5
    loss = np.interp(steps, [0, *middles], [reference.val_loss[0, 1], *reference.loss[:, 1]])
    return loss + noise * np.random.default_rng(5).normal(size=len(loss))


def log_of_steps(preset: str, loss: np.ndarray, every: int, upto: int) -> curves.Run:
    """A run of such losses that logs each `every` steps, as the trainer does, and validates where the reference did."""
    batch = REFERENCES[preset].settings["total_batch_tokens"]
    val, lines, before = {tokens // batch: loss for tokens, loss in REFERENCES[preset].val_loss}, [], 0
    for step in range(upto + 1):
        if step % every == 0 or step in val:
            mean = float(loss[before:step].mean()) if step else None
            lines.append({"step": step, "tokens": step * batch, "loss": mean, "val_loss": val.get(step)})
            before = step
    return curves.Run("run", None, lines, config_of(preset, **REFERENCES[preset].settings))


# Noise of a step's loss: between neighbouring steps of the log that gpt2-fineweb.json is made from; of a run with
# logging_steps 1 for tiny Shakespeare, whose batches are of 1,024 tokens.
@pytest.mark.parametrize(("preset", "noise"), [("gpt2-fineweb", 0.05), ("shakespeare", 0.2)])
@pytest.mark.parametrize("every", [1, 10, 20, 100])
def test_no_alarm_however_many_steps_a_line_is_the_mean_of(preset, noise, every):
    loss = losses_of_steps(preset, noise)
    for upto in (*range(20, 700, 40), 760, *range(1000, min(len(loss), 2001), 500)):
        findings = verdict.judge(log_of_steps(preset, loss, every, upto), curves.load_references())
        assert "bad" not in [finding.kind for finding in findings], (upto, findings)
    loss[300:] += 0.6  # what it must see, after 150 such steps, or 300 where it has a line each 100
    text = verdict.judge(log_of_steps(preset, loss, every, 450 if every < 100 else 600), curves.load_references())[
        0
    ].text
    assert "training loss departs" in text


@pytest.mark.parametrize("preset", sorted(REFERENCES))
def test_no_alarm_however_often_it_validates(preset):
    """Between the reference's validations lies a straight line in the logarithm of the tokens, and a loss that bends
    is held against it: here one that goes through the same points smoothly, in the logarithm of both."""
    reference = REFERENCES[preset]
    config = config_of(preset, **reference.settings)
    config |= FINEWEB if preset == "gpt2-medium" else {}
    x, y = np.log(reference.val_loss[1:]).T
    at = np.linspace(x[0], x[-1], 300)
    slopes = np.gradient(y, x)
    cell = np.clip(np.searchsorted(x, at) - 1, 0, len(x) - 2)
    width = x[cell + 1] - x[cell]
    u = (at - x[cell]) / width
    smooth = y[cell] * (1 + 2 * u) * (1 - u) ** 2 + y[cell + 1] * u**2 * (3 - 2 * u)
    smooth += width * (slopes[cell] * u * (1 - u) ** 2 + slopes[cell + 1] * u**2 * (u - 1))
    batch = reference.settings["total_batch_tokens"]
    lines = [{"step": 0, "tokens": 0, "val_loss": reference.val_loss[0, 1]}]
    lines += [{"step": round(t / batch), "tokens": t, "val_loss": v} for t, v in np.exp([at, smooth]).T]
    for n in range(3, len(lines) + 1, 7):
        finding = verdict.judge(curves.Run("run", None, lines[:n], config), curves.load_references())[0]
        assert finding.kind == "good", finding


@pytest.mark.parametrize("every", [1, 7, 10, 50, 100])
def test_a_line_is_held_against_the_reference_over_the_same_steps(every):
    """An early loss falls by more within a line than a run may be away."""
    loss = 3.5 + 7.5 * np.exp(-np.arange(1000) / 120)
    ends = np.array([*range(10, 201, 10), *range(300, 1001, 100)])
    means = [loss[a:b].mean() for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    points = {"loss": np.array([ends, means]).T, "val_loss": np.array([[0, 11.0]]), "loss_noise": 0.0}
    reference = curves.Reference("x", [], "", "", "", "", 0.0, "", {}, **points)
    lines = [{"step": 0, "tokens": 0}]
    lines += [{"step": s, "tokens": s, "loss": loss[s - every : s].mean()} for s in range(every, 1001, every)]
    found = verdict.training_distance(curves.Run("x", None, lines), reference)
    assert np.abs(found.above).max() < 0.06
    assert (found.tolerance[(found.tokens > 40) & (found.tokens < 300)] > 0.1).all()  # a tenth of the tokens
    assert found.tokens[0] == max(every, -(-10 // every) * every)
    assert np.diff(found.tokens)[-1] >= 100  # no noisier than a point of the reference
    cut = verdict.training_distance(curves.Run("x", None, lines[1:]), reference)  # without its beginning
    assert cut.above.tolist()[1:] == pytest.approx(found.above.tolist()[2:], abs=0.06)


@pytest.mark.parametrize(
    ("shift", "word", "hint"), [(0.4, "above", "Usual causes"), (-0.4, "below", "Lower is suspicious too")]
)
def test_a_run_that_departs_is_told_since_when_and_how_far(shift, word, hint, tmp_path):
    lines = lines_of("shakespeare")
    for line in lines:
        if line["tokens"] > 400_000 and line["val_loss"]:
            line["val_loss"] += shift
    finding = judged(write_run(tmp_path / "run", lines, config_of("shakespeare")))[0]
    assert finding.kind == "bad"
    assert f"since 0.584 M tokens: 0.40 nats {word} at 0.778 M" in finding.text
    assert hint in finding.text


def test_a_run_that_came_back_follows_and_says_so(tmp_path):
    lines = lines_of("shakespeare")
    next(line for line in lines if line["val_loss"] and line["tokens"] > 300_000)["val_loss"] += 0.5
    finding = judged(write_run(tmp_path / "run", lines, config_of("shakespeare")))[0]
    assert finding.kind == "good"
    assert "after it was 0.50 nats away at 0.389 M" in finding.text


def test_the_training_loss_tells_between_validations(tmp_path):
    lines = lines_of("shakespeare", upto=560_000)
    for line in lines:
        if line["tokens"] > 400_000:
            line["loss"] += 0.8
    finding = judged(write_run(tmp_path / "run", lines, config_of("shakespeare")))[0]
    assert finding.kind == "bad"
    assert "validation loss follows" in finding.text
    assert "The training loss departs" in finding.text


def test_other_settings_are_named_and_make_it_a_guide(tmp_path):
    lines = lines_of("shakespeare")
    for line in lines:
        line["val_loss"] = line["val_loss"] and line["val_loss"] + 0.3 * (line["tokens"] > 0)
    finding = judged(write_run(tmp_path / "run", lines, config_of("shakespeare", warmup_steps=50, seed=7)))[0]
    assert finding.kind == "note"
    assert "departs" in finding.text
    assert finding.text.endswith("only a guide: warmup_steps 50, there 250.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_layer": 5}, "No reference curve ships for tiny Shakespeare and this model (5 layers of 128)"),
        ({"train_text": "mine.txt"}, "No reference curve ships for these data"),
        ({"init_from": "openai-community/gpt2"}, "goes on from other weights"),
        ({"val_data": "elsewhere"}, "No reference curve ships for these data"),
    ],
)
def test_no_reference_is_held_against_what_it_is_not_for(changes, sentence, tmp_path):
    finding = judged(write_run(tmp_path / "run", lines_of("shakespeare"), config_of("shakespeare", **changes)))[0]
    assert finding.kind == "note"
    assert sentence in finding.text


def test_before_the_first_checkpoint_the_recipes_name_and_batch_tell(tmp_path):
    finding = judged(write_run(tmp_path / "shakespeare", lines_of("shakespeare", upto=150_000)))[0]
    assert "training loss follows" in finding.text
    assert "no checkpoint yet" in finding.text
    other = [line | {"tokens": line["step"] * 4096} for line in lines_of("shakespeare")]
    assert "nor is it called after a recipe" in judged(write_run(tmp_path / "b" / "shakespeare", other))[0].text


def changed(lines, column, value, first=0, last=None):
    """`value` may be a number or what a number becomes."""
    for line in lines[first:last]:
        if line[column] is not None:
            line[column] = value(line[column]) if callable(value) else value


def overfit(lines):
    changed(lines, "val_loss", 4.5, 20, 30)


def diverge(lines):
    changed(lines, "val_loss", 4.5, 20, 30)
    changed(lines, "loss", lambda loss: loss + 3, 31)


def spike(first, last):
    return lambda lines: changed(lines, "loss", lambda loss: loss + 2, first, last)


@pytest.mark.parametrize(
    ("damage", "kind", "sentence"),
    [
        (lambda lines: changed(lines, "val_loss", 13.0, 0, 1), "bad", "The loss begins at 13.00"),
        (lambda lines: changed(lines, "loss", 10.6), "bad", "It hardly learns"),
        (lambda lines: changed(lines, "loss", None, 25, 27), "bad", "not finite by step 480 and at 1 later lines"),
        (lambda lines: changed(lines, "skipped_steps", 30, 20), "bad", "30 of 760 steps were left out"),
        (lambda lines: changed(lines, "skipped_steps", 2, 20), "note", "2 of 760 steps were left out"),
        (overfit, "bad", "rises since 0.389 M tokens, from 4.50 to 4.97, while the training loss falls"),
        (diverge, "bad", "and the training loss does not fall"),
        (spike(25, 26), "note", "spikes once, by 1.89 at 0.492 M tokens, and comes back"),
        (spike(36, None), "bad", "has not come back"),
        (lambda lines: changed(lines, "tokens_per_second", 500, 28), "note", "500 tokens/s in its last quarter, 1,000"),
        (lambda lines: changed(lines, "data_wait", 0.2), "note", "20% of its time it waits for data"),
        (lambda lines: changed(lines, "save_wait", 0.2), "note", "20% of its time it waits for checkpoints"),
    ],
)
def test_what_needs_no_reference_is_seen(damage, kind, sentence, tmp_path):
    lines = lines_of("shakespeare")
    damage(lines)
    findings = judged(write_run(tmp_path / "run", lines, config_of("shakespeare", n_layer=5)))
    assert [finding.kind for finding in findings if sentence in finding.text] == [kind], findings


def fp16_run(steps, every, left_out):
    """The lines of a run that leaves out these steps, as the trainer writes them."""
    lines = [{"step": 0, "tokens": 0, "loss": None, "tokens_per_second": None, "skipped_steps": None}]
    for step in range(every, steps + 1, every):
        kept = [s for s in range(step - every + 1, step + 1) if s not in left_out]
        line = {"step": step, "tokens": step, "loss": 6.0 if kept else None, "tokens_per_second": 9.0}
        lines.append(line | {"skipped_steps": len([s for s in left_out if s <= step])})
    return curves.Run("run", None, lines)


@pytest.mark.parametrize(
    ("steps", "every", "left_out", "kinds"),
    [
        (5, 1, [1, 2], ["note"]),  # the first lines have no loss, since fp16's scale was too high
        (20, 1, [1, 9], ["note"]),
        (150, 10, [1, 2], ["note"]),
        (100, 10, [*range(1, 11)], ["note"]),
        (100, 10, [*range(1, 12)], ["bad"]),
        (2000, 100, [*range(1, 21)], ["note"]),
        (2000, 100, [*range(1, 22)], ["bad"]),
        (40, 10, [], []),
    ],
)
def test_fp16_may_leave_out_steps(steps, every, left_out, kinds):
    assert [finding.kind for finding in verdict.finite(fp16_run(steps, every, left_out))] == kinds


@pytest.mark.parametrize("left_out", [[1, 2], [1, 2, 15]])
def test_a_loss_that_is_no_number_is_seen_beside_steps_left_out(left_out):
    run = fp16_run(20, 2, left_out)
    run.records[8]["loss"] = None  # of steps 15 and 16
    findings = [*verdict.finite(run)]
    assert [finding.kind for finding in findings] == ["bad", "note"]
    assert "not finite by step 16." in findings[0].text


# --- reading


def test_a_damaged_and_resumed_log_is_read_as_far_as_it_is_whole(tmp_path):
    directory = write_run(tmp_path / "run", [{"step": s, "tokens": 10 * s, "loss": 5.0} for s in (0, 10, 20, 30)])
    log = directory / "metrics.jsonl"
    resumed = [{"step": 20, "tokens": 200, "loss": 4.0}, {"step": 30, "tokens": 300, "loss": None, "val_loss": "x"}]
    text = log.read_text() + "".join(json.dumps(line) + "\n" for line in resumed)
    log.write_text(text + '[1]\n{"step": true}\n{"step": 40, "tok')
    run = curves.read_run(directory)
    assert [line["step"] for line in run.records] == [0, 10, 20, 30]
    assert [values.tolist() for values in run.series("loss")] == [[0, 100, 200], [5.0, 5.0, 4.0]]
    assert len(run.series("val_loss")[0]) == 0
    assert run.damaged == 3
    assert "3 lines of metrics.jsonl could not be read" in judged(directory)[1].text


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    paths = [str(write_run(tmp_path / side / "run", [{"step": 0, "tokens": 0}])) for side in ("a", "b")]
    assert [run.name for run in curves.read_runs(paths)] == ["a/run", "b/run"]
    third = write_run(tmp_path / "c" / "a" / "run", [{"step": 0, "tokens": 0}])
    three = [paths[0], str(third), paths[0]]  # of one name and one parent's name: the findings go by it
    assert [run.name for run in curves.read_runs(three)] == ["a/run", "a/run (2)", "a/run (3)"]
    other = str(write_run(tmp_path / "other", [{"step": 0, "tokens": 0}]))
    assert [run.name for run in curves.read_runs([*three, other])][3] == "other"
    assert curves.read_run(tmp_path / "a" / "run").name == "run"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such directory"),
        (lambda path: path.write_text(""), "no such directory"),
        (lambda path: path.mkdir(), r"no metrics\.jsonl"),
        (lambda path: write_run(path, []), "not a whole line"),
    ],
)
def test_what_is_no_run_is_one_line_and_exit_code_2(make, message, tmp_path, monkeypatch, capsys):
    make(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as error:
        common.run_main(report.main)
    assert error.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"error: run {tmp_path / 'run'}: ")
    assert len(printed.splitlines()) == 1
    assert re.search(message, printed)


def test_without_a_run_it_is_the_newest_and_without_any_an_error(tmp_path):
    with pytest.raises(common.UserError, match="no run given and none under"):
        curves.newest_run(tmp_path)
    for name, time in (("old", 1), ("new", 3), ("other", 2)):
        log = write_run(tmp_path / name, [{"step": 0, "tokens": 0}]) / "metrics.jsonl"
        os.utime(log, (time, time))
    assert curves.newest_run(tmp_path) == tmp_path / "new"


@pytest.mark.parametrize("lines", [1, 3])
def test_a_run_that_has_just_begun_is_reported(lines, tmp_path):
    directory = write_run(tmp_path / "run", lines_of("shakespeare")[:lines])
    (tmp_path / "out").mkdir()
    findings, drawn = report.write_report([curves.read_run(directory)], tmp_path / "out", dpi=20)
    assert "bad" not in [finding.kind for finding in findings["run"]]
    assert "loss_tokens" in [picture.name for picture in drawn]
    assert "not there yet" in (tmp_path / "out" / "report.html").read_text()


NONSENSE = {
    "numbers that are none": [
        {"step": 0, "tokens": "x", "loss": "y"},
        {"step": 9, "tokens": None, "val_loss": math.inf},
    ],
    "out of range": [
        {"step": 9, "tokens": -5, "loss": -4.0, "seconds": -3, "grad_norm": -1},
        {"step": 10, "loss": 1e308},
    ],
    "nothing changes": [{"step": i, "tokens": i, "loss": 4.0, "grad_norm": 0.0, "mfu": 0.0} for i in range(99)],
}


@pytest.mark.parametrize("lines", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.filterwarnings("error")
def test_nonsense_is_drawn_as_far_as_it_goes(lines, tmp_path):
    odd = {
        "n_layer": [1],
        "n_embd": "x",
        "max_grad_norm": "y",
        "max_steps": {},
        "hellaswag_limit": "all",
        "train_text": 3,
    }
    results = {"hellaswag": {"rows": 0, "A": {"acc_norm": 0.3}, "B": 3}, "perplexity": None}
    directory = write_run(tmp_path / "run", lines, odd, results)
    report.write_report([curves.read_run(directory)], tmp_path, dpi=20)
    assert "</html>" in (tmp_path / "report.html").read_text()


# --- the page


class Page(HTMLParser):
    """Every tag with its attributes, and which are still open."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_holds_all_it_shows_and_nothing_private_or_active(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    hostile = '"><script src=https://example.org/x.js></script>'
    config = config_of("shakespeare", run_name=hostile, n_head="4")
    config |= {"init_from": f"{tmp_path}/home/weights", "tracker": "/home/somebody/logs and /Users/else/x"}
    scores = {"hellaswag": {"rows": 100, "A": {"acc_norm": 0.3}, "B": {"acc_norm": 0.31}}, "wikitext2": {"loss": 4.25}}
    scores |= {hostile: {"value": 1.5}, "sample": {"texts": ["a secret"]}}
    run = write_run(tmp_path / "home" / "<b>run", lines_of("shakespeare"), config, scores)
    monkeypatch.setattr("sys.argv", ["report.py", str(run)])
    report.main()
    out = run / "report"
    text = (out / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "base", "b>run")
        assert not [name for name in attributes if name.startswith("on") or name == "href"]
        assert attributes.get("src", "data:").startswith("data:image/svg+xml;base64,") or "src" not in attributes
    assert "url(" not in text
    assert "@import" not in text
    images = [attributes for tag, attributes in page.tags if tag == "img"]
    assert len(images) == len(list(out.glob("*.png"))) == 6
    for image in images:
        ET.fromstring(base64.b64decode(image["src"].partition(",")[2]))
    for private in (str(tmp_path), "somebody", "/Users/else", "a secret"):
        assert private not in text, private
    for shown in (
        "~/weights",
        "~/logs and ~/x",
        "&lt;b&gt;run",
        "0.3000 ± 0.0898 (100 rows)",
        "4.9739",
        "wikitext2.loss",
    ):
        assert shown in text, shown
    printed = capsys.readouterr().out
    assert "goes on from other weights" in printed
    assert f"wrote {out}/report.html; beside it loss_tokens.png" in printed
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in out.glob("*.png"))


def test_a_file_in_the_place_of_the_directory_is_named(healthy, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("sys.argv", ["report.py", str(healthy), "--out", str(tmp_path / "file")])
    with pytest.raises(common.UserError, match="a file stands there"):
        report.main()


# --- references and names


@pytest.mark.parametrize("preset", sorted(REFERENCES))
def test_a_reference_is_for_the_recipes_it_names(preset):
    reference = REFERENCES[preset]
    assert set(reference.settings) <= set(FIELDS)
    for points in (reference.val_loss, reference.loss, reference.hellaswag_A_acc_norm):
        assert points is None or (np.diff(points[:, 0]) > 0).all()
    assert 5 <= len(reference.val_loss) <= 400
    for name in reference.presets:
        config = parse_config(["--config", name]).flat()
        for key in (
            "n_layer",
            "n_head",
            "n_embd",
            "sequence_length",
            "total_batch_tokens",
            "learning_rate",
            "weight_decay",
        ):
            assert config[key] == reference.settings[key], (name, key)


@pytest.mark.parametrize(
    ("preset", "dataset"),
    [
        ("gpt2", "fineweb-edu"),
        ("gpt2-xl", "fineweb-edu"),
        ("kaggle-tpu", "fineweb-edu"),
        ("gpt2-fineweb", "fineweb"),
        ("openwebtext", "openwebtext"),
        ("tinystories", "tinystories"),
        ("shakespeare", "tiny-shakespeare"),
    ],
)
def test_a_recipes_data_are_known(preset, dataset):
    assert known_data.dataset_of(config_of(preset)) == dataset


SHIPPED = {"files": [{"name": "tiny_shakespeare.txt", "sha256": known_data.SHAKESPEARE_SHA256}], "text_column": "text"}


@pytest.mark.parametrize(
    ("data", "dataset"),
    [
        ("hf://datasets/kjj0/finewebedu10B-gpt2/*.bin", "fineweb-edu"),
        ("hf://datasets/kjj0/fineweb10B-gpt2@v1/x/*.bin", "fineweb"),
        ("shards/edu_fineweb_train_*.bin", "fineweb-edu"),
        ("finewebedu10B/finewebedu_train_*.bin", "fineweb-edu"),
        ("dev/data/fineweb10B/fineweb_train_*.bin", "fineweb"),
        ("dev/data/fineweb10B/", "fineweb"),
        ("dev/data/tinystories/TinyStories_train.bin", "tinystories"),
        ("/scratch/fineweb-edu-sample-10BT", "fineweb-edu"),
        ("data/fineweb10B-gpt2", "fineweb"),
        ("/data/fineweb_edu_exp/tinystories", "tinystories"),
        ("/data/fineweb_edu/books_train_*.bin", ""),
        ("data/fineweb-edu-tools", ""),
        ("data/my-fineweb", ""),
        ("hf://datasets/somebody/fineweb/*.bin", ""),
        ("data/fineweb-2", ""),
        ("data/FineWeb-HQ", ""),
        ("dev/data/tinyshakespeare/tiny_shakespeare_train.bin", ""),  # holds out another part than the recipe
        ("data/mine", ""),
    ],
)
def test_shards_are_known_by_their_names(data, dataset):
    assert known_data.dataset_of({"dataset_name": data, "train_text": ""}) == dataset
    about = [{"data": None}]  # made by another program: it is all that is known, whatever the recipe's source
    assert (
        known_data.dataset_of({"dataset_name": data, "train_text": "recipe/data/tiny_shakespeare.txt"}, about)
        == dataset
    )


@pytest.mark.parametrize(
    ("source", "dataset"),
    [
        ("HuggingFaceFW/fineweb-edu", "fineweb-edu"),
        ("huggingfacefw/FineWeb", "fineweb"),
        ("roneneldan/TinyStories", "tinystories"),
        ("hf://datasets/kjj0/fineweb10B-gpt2@v1/*.bin", "fineweb"),
        ("opencsg/Fineweb-Edu-Chinese-V2.1", ""),
        ("HuggingFaceFW/fineweb-edu-score-2", ""),
        ("HuggingFaceFW/fineweb-2", ""),
        ("HuggingFaceTB/fineweb-edu-llama3-annotations", ""),
        ("epfml/FineWeb-HQ", ""),
        ("somebody/fineweb-edu", ""),
    ],
)
def test_a_data_set_on_the_hub_is_known_by_its_whole_name(source, dataset):
    at = "hf://" in source
    config = parse_config(
        ["--config", "gpt2", "--dataset_name", source, *([] if at else ["--dataset_config", ""])]
    ).flat()
    manifest = {"uri": source} if at else {"train_text": source, "dataset_config": "", "dataset_split": "train"}
    for data in (config["dataset_name"], "data/mine"):
        assert known_data.dataset_of(config | {"dataset_name": data}, [{"data": manifest}]) == dataset
    if dataset:  # of a checkpoint that does not say: where the recipe makes it, else by the directory's name
        assert known_data.dataset_of(config) == dataset
    assert known_data.dataset_of(config | {"dataset_name": "data/mine"}) == ""
    assert known_data.dataset_of({"dataset_name": "data/x", "train_text": "~/fineweb-tools/books.txt"}) == ""


@pytest.mark.parametrize(
    ("changes", "about", "dataset"),
    [
        ({}, None, "tiny-shakespeare"),
        ({}, [{"engine": "CPU"}], "tiny-shakespeare"),  # of a version that did not write it down
        ({}, [{"data": SHIPPED}], "tiny-shakespeare"),
        ({"dataset_name": "data/x"}, [{"data": SHIPPED}, {"data": SHIPPED}], "tiny-shakespeare"),
        ({"dataset_name": "data/x", "train_text": "~/another/name.txt"}, [{"data": SHIPPED}], "tiny-shakespeare"),
        ({"dataset_name": "data/x"}, None, ""),
        ({"dataset_name": "data/x/train*.bin"}, None, ""),
        ({"dataset_name": "data/x/train*.bin", "val_data": "data/x/val*.bin"}, [{"data": None}], ""),
        ({"dataset_name": "data/fineweb10B"}, None, "fineweb"),
        ({}, [{"data": None}], ""),
        ({}, [{"data": {"files": [{"name": "tiny_shakespeare.txt", "sha256": "0" * 64}]}}], ""),
        ({}, [{"data": {"files": SHIPPED["files"] * 2}}], ""),
        ({}, [{"data": {"files": "x"}}], ""),
        ({}, [{"data": SHIPPED}, {"data": {"train_text": "HuggingFaceFW/fineweb"}}], ""),
        ({}, ["x", {"data": {"train_text": "HuggingFaceFW/fineweb"}}], "fineweb"),
    ],
)
def test_the_default_recipe_on_other_shards_is_not_tiny_shakespeare(changes, about, dataset, tmp_path):
    run = write_run(tmp_path / "run", lines_of("shakespeare"), config_of("shakespeare", **changes), about=about)
    assert curves.read_run(run).dataset == dataset
    assert ("follows the reference (this" in judged(run)[0].text) == (dataset == "tiny-shakespeare")


def test_the_text_that_ships_and_the_recipes_repositories_are_known():
    assert SHAKESPEARE.name == known_data.SHAKESPEARE
    assert hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest() == known_data.SHAKESPEARE_SHA256
    for source, _ in DATASETS.values():
        assert source.lower() in [repository for _, known, _ in known_data.DATASETS.values() for repository in known]


def test_parameters_are_those_of_the_models(whole_run):
    sizes = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
    for preset, parameters in sizes.items():
        assert curves.Run("x", None, [], config_of(preset)).parameters == parameters
    run = curves.read_run(whole_run[0])
    with safe_open(common.steps_of(whole_run[0])[-1] / "model.safetensors", "np") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    assert run.parameters == stored
