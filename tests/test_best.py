"""recipe/best.py: text and time in, a recipe and its run out."""

import json
import math
import re
import shutil
import signal
import subprocess
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import yaml

from recipe import best
from recipe.config import parse_config
from recipe.config.catalog import text_files
from recipe.config.fields import FIELDS, RunConfig
from recipe.data.producer import open_text
from recipe.data.survey import OWN_VOCAB_SIZE, Text
from recipe.data.tokenizer import open_tokenizer
from recipe.engine.factory import open_strategy
from recipe.estimate import forecast, scaling
from recipe.estimate.forecast import Forecaster, fields_for
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, launch, metrics, ok, refused


def call(directory, *argv, script=ROOT / "recipe/best.py"):
    return programs.run(script, *argv, cwd=directory)


@pytest.fixture
def call_here(tmp_path, monkeypatch, capsys):
    """A function that calls best.py's main in a directory with a text.txt of 100 kB, as if it had just been started on
    an H100. It cannot train."""

    def run(*argv):
        code = best.main([str(argument) for argument in argv])
        return subprocess.CompletedProcess(argv, code, *capsys.readouterr())

    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(SHAKESPEARE.read_text()[:100_000])
    monkeypatch.setattr(best, "open_strategy", lambda precision, name, **_: open_strategy(precision, name or "h100"))
    monkeypatch.setattr("psutil.Process.create_time", lambda self: time.time())
    return run


@pytest.fixture(scope="module")
def searched(once):
    """A directory in which best.py has written a recipe for 1.8 minutes, and what it printed."""

    def search(directory):
        directory.mkdir()
        (directory / "my.txt").write_text(4 * SHAKESPEARE.read_text())  # a fast processor reads it once in this time
        return ok(call(directory, "--text", "my.txt", "--hours", "0.03", "--dry_run", "--seed", "7")).stdout

    return once("best", search)


def test_the_recipe_gives_a_reason_for_each_value_and_the_loss_to_expect(searched):
    directory, printed = searched
    text = (directory / "runs/my-0.03h/recipe.yaml").read_text()
    head, lines = text.split("dataset_name", 1)
    values = yaml.safe_load(text)
    assert all(re.fullmatch(r"(dataset_name)?\w*: .+  # \w.+", line) for line in lines.splitlines())
    assert values.keys() <= FIELDS.keys()
    assert (values["dataset_name"], values["seed"]) == ("my.txt", 7)
    assert 0.01 < values["train_hours"] < 0.028, "the time that the search has left"
    expected = float(re.search(r"loss to expect: (\d\.\d+), give or take \d+ %", head)[1])
    assert re.search(rf"^best  .* layers, \d+ wide: loss {expected:.3f} ", printed, re.MULTILINE)
    assert len(re.findall(r"^speed  .* tokens/s", printed, re.MULTILINE)) in range(1, 7)
    assert re.search(r"^limit      the time; ", printed, re.MULTILINE)
    assert len(re.findall(r"^trial      training .* wide for \d", printed, re.MULTILINE)) == 2
    assert not list(directory.glob("runs/*/.trial")), "trials are deleted"
    assert {path.name for path in (directory / "data/my-0.03h").iterdir()} == {".preparing.lock", "tokenizer"}
    (directory / "data/words.txt").write_text("some words")
    assert text_files(str(directory / "data")).files == [directory / "data/words.txt"], "the tokenizer is not text"


def test_its_recipe_is_trained_like_any_other_and_the_same_command_continues_the_run(searched, call_here, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory, _ = searched
    monkeypatch.chdir(directory)
    run, text, short = Path("runs/my-0.03h"), ["--text", "my.txt"], ["--max_steps", "20", "--warmup_steps", "2"]
    config = parse_config(["--config", f"{run}/recipe.yaml"])
    ok(call(directory, "--config", run / "recipe.yaml", *short, script=ROOT / "recipe/train.py"))
    model = AutoModelForCausalLM.from_pretrained(run / "step_00000020")
    assert (model.config.n_layer, model.config.n_embd) == (config.model.n_layer, config.model.n_embd)
    assert AutoTokenizer.from_pretrained(run / "step_00000020").vocab_size <= OWN_VOCAB_SIZE
    plan = ok(call_here(*text, "--hours", "0.03", "--dry_run"))
    assert re.search(f"recipe     {run}/recipe.yaml exists\n +Validation loss to expect: ", plan.stdout)
    continued = ok(call(directory, *text, "--hours", "0.03", *short))
    assert f"recipe     {run}/recipe.yaml exists: continuing its run" in continued.stdout
    assert f"finished ({run}/step_00000020)" in continued.stdout
    Path("my.txt").write_text(SHAKESPEARE.read_text()[::-1])
    error = refused(call(directory, *text, "--hours", "0.03", *short))
    assert "is complete, but my.txt has changed since then" in error
    error = refused(call_here(*text, "--hours", "0.04", "--run_name", run.name, "--dry_run"))
    assert "was written for another request; give another --run_name" in error


def fake_measurements(monkeypatch, speed: float) -> None:
    """Gives the search the speed of a small size in tokens/s, and the losses that the law predicts."""

    def measure_speed(forecaster, *_):
        forecaster.rates[forecaster.flops((4, 128))] = speed

    def measure_loss(forecaster, forecast, seconds, flags):
        forecaster.losses.append(2 * (best.law(forecast.size, speed * seconds),))
        return 0.0  # seconds that the last trial takes beside its training

    monkeypatch.setattr(best, "measure_speed", measure_speed)
    monkeypatch.setattr(best, "measure_loss", measure_loss)


def fake_runs(monkeypatch, speed, losses=()) -> list[RunConfig]:
    """Lets every run of the search end at once, at `speed(size, batch)` tokens/s, the trials with these losses; returns
    the configuration of each."""
    runs, trials = [], iter(losses)

    def train_and_delete(strategy, fields, flags):
        runs.append(forecast.config_of(fields, *flags).run)
        rate = speed((fields["n_layer"][0], fields["n_embd"][0]), fields["total_batch_tokens"][0])
        tokens, loss = next(trials, (1e6, 5.0)) if runs[-1].train_hours else (1e6, None)
        return [{"step": 10, "tokens": tokens, "seconds": 1.0, "val_loss": loss, "tokens_per_second": rate}]

    monkeypatch.setattr(best, "train_and_delete", train_and_delete)
    return runs


ENDLESS = Text("acme/text", "gpt2", math.inf, 4.4)


def forecaster_of(text: Text = ENDLESS, device: str = "h200", vocab_size: int = 50257) -> Forecaster:
    return Forecaster(open_strategy("auto", device), text, vocab_size)


def searched_run(forecaster, seconds, runs, each=0.0):
    """The run that is best for the seconds that the search has left, its batch, and these seconds: without the trials'
    own, and `each` run's start."""

    def left(reserve=0.0):
        return seconds - reserve - sum(each + 3600 * run.train_hours for run in runs)

    best.try_sizes(forecaster, left, [])
    run = forecaster.best(left())
    return run, fields_for(run.size, forecaster.text, run.tokens, 1)["total_batch_tokens"][0], left()


@pytest.mark.parametrize(("speed", "length"), [(6_000, "train_hours"), (7_500, "train_hours"), (100_000, "max_steps")])
def test_only_a_text_that_is_read_four_times_well_before_the_time_ends_a_run(speed, length, call_here, monkeypatch):
    """At all speeds the text is too small for a larger model. At the lowest there is no time for four epochs; at the
    next just enough, if the speed does not change."""
    fake_measurements(monkeypatch, speed)
    result = ok(call_here("--text", SHAKESPEARE, "--hours", "0.05", "--run_name", "read", "--dry_run"))
    values = yaml.safe_load(Path("runs/read/recipe.yaml").read_text())
    assert values["n_embd"] == 128
    assert {"train_hours", "max_steps"} & values.keys() == {length}
    if length == "max_steps":  # the search counts a text's tokens by its sample
        assert re.search(r"^time       about \d\d s of the \d min( \d+ s)? that are left", result.stdout, re.MULTILINE)
        steps, save_steps = values["max_steps"], values["save_steps"]
        assert values["eval_steps"] == save_steps, "otherwise the best checkpoint may not be saved"
        assert steps < 3.9 * save_steps < 1.1 * steps, "the last two checkpoints are not close together"


@pytest.mark.parametrize("seconds", [180, 360, 3600])
@pytest.mark.parametrize("text", [ENDLESS, Text("my.txt", "gpt2", 5e7, 4.4)], ids=lambda text: text.name)
def test_a_gpu_whose_smallest_step_takes_ten_milliseconds_gets_a_model_that_fills_it(seconds, text, monkeypatch):
    """Such steps made 2 x 64 seem the best on an H200, which then ran at 0.2 % of its peak."""
    forecaster = forecaster_of(text)

    def speed(size, batch):
        return batch / max(0.01, batch * forecaster.flops(size) / 4e14)

    run, batch, seconds = searched_run(forecaster, seconds, fake_runs(monkeypatch, speed))
    rate = speed(run.size, batch)
    assert rate * forecaster.flops(run.size) > 0.9 * 4e14
    assert run.limit == "text" or run.tokens == pytest.approx(rate * seconds, rel=0.1)


@pytest.mark.parametrize(
    ("device", "rate"), [("h200", 4e14), ("t4", 2e13), ("t4", 2e11)]
)  # FLOP/s; a GPU's, and a CPU's
def test_more_time_never_makes_a_smaller_model(device, rate, monkeypatch):
    """An earlier version changed its law at 1e15 FLOPs: four hours of a laptop got a model of a tenth of one hour's."""
    monkeypatch.setattr(forecast, "expected_flops", lambda *_, **__: (rate, rate, "guessed"))
    forecaster = forecaster_of(device=device)
    bests = [forecaster.best(90 * 1.5**n) for n in range(26)]  # to a month
    assert bests == sorted(bests, key=lambda best: (best.size, -best.loss))
    assert len({best.size for best in bests}) > 3


def test_more_time_is_not_said_to_make_a_larger_model_than_the_largest(call_here):
    argv = ["--text", "fineweb", "--device", "8xh100"]
    assert "limit      the time; with more, a larger model." in ok(call_here(*argv, "--hours", "1")).stdout
    tokens = ok(call_here(*argv, "--tokens", "1e9", "--run_name", "tokens")).stdout
    assert "limit      the tokens; with more, a larger model." in tokens
    result = ok(call_here(*argv, "--hours", "720"))
    assert re.search(r"^best       48 layers, 1600 wide \(XL\)", result.stdout, re.MULTILINE)
    assert "limit      the time; no model is larger." in result.stdout


@pytest.mark.parametrize(("tokens", "reason"), [("3e5", "as requested"), ("3e6", "more epochs would not lower")])
def test_a_recipe_says_whether_it_takes_as_many_tokens_as_were_requested(tokens, reason, call_here):
    ok(call_here("--text", SHAKESPEARE, "--device", "h100", "--tokens", tokens, "--run_name", "tokens"))
    assert re.search(rf"^max_steps: \d+  # {reason}", Path("runs/tokens/recipe.yaml").read_text(), re.MULTILINE)


def test_the_speed_is_measured_with_the_batch_of_the_recipe(monkeypatch):
    """Half the batch has twice the steps, whose optimizer takes a fifth of the time on a CPU. And less time, after the
    trials, may have a smaller size as its best."""
    monkeypatch.setattr(forecast, "expected_flops", lambda *_, **__: (1.8e11, 1.8e11, "guessed"))
    forecaster = forecaster_of(Text("my.txt", "tokenizer", 13.3e6, 3.0), vocab_size=4096)

    def speed(size, batch):
        return batch / (0.17 + batch * forecaster.flops(size) / 1.8e11)

    runs = fake_runs(monkeypatch, speed)
    for time_given in range(600, 3600, 60):
        forecaster.rates.clear(), runs.clear()
        run, batch, seconds = searched_run(forecaster, time_given, runs)
        assert run.tokens == pytest.approx(seconds * speed(run.size, batch), rel=0.02), (seconds, run, batch)


def test_the_speed_of_a_size_that_only_the_trials_make_the_best_is_measured(monkeypatch):
    """On an H200, in three minutes, 8 x 384 was expected to read 67 M tokens of books and read 8 M."""
    forecaster = forecaster_of(Text("books.jsonl", "tokenizer", 31.5e6, 3.3), vocab_size=4096)

    def speed(size, batch):
        return {(12, 768): 498_496, (10, 512): 846_492}.get(size, batch / 0.033)

    runs = fake_runs(monkeypatch, speed, [(379e3, 5.199), (4.01e6, 4.347)])
    run, batch, seconds = searched_run(forecaster, 180, runs, each=15)
    assert run.tokens == pytest.approx(seconds * speed(run.size, batch), rel=0.02), run


@pytest.mark.parametrize(
    ("argv", "speed", "timed", "trained"),
    [
        ("--hours=0.05", 500, False, False),
        ("--hours=0.15", 500, False, True),
        ("--hours=0.3", 500, True, True),
        ("--hours=1", 1e5, True, False),  # its text ends early
        ("--hours=0.3 --torch_compile=false", 500, False, False),  # where the compiler is broken
    ],
)
def test_a_run_on_a_gpu_is_compiled_from_five_minutes_on(argv, speed, timed, trained, call_here, monkeypatch):
    """And from a quarter of an hour on when its speed is measured, too, which takes a minute or two of compiling."""
    runs = fake_runs(monkeypatch, lambda size, batch: speed)
    ok(call_here("--text", SHAKESPEARE, *argv.split(), "--run_name", "gpu", "--dry_run"))
    values = yaml.safe_load(Path("runs/gpu/recipe.yaml").read_text())
    assert {run.torch_compile for run in runs if not run.train_hours} == {timed}
    assert values["torch_compile"] is trained
    assert ("max_steps" in values) == (speed == 1e5)
    assert 3600 * max(run.train_hours for run in runs) < 301, "no trial takes more than five minutes"


def test_a_run_gets_what_the_search_leaves_without_its_own_start_and_last_checkpoint(call_here, monkeypatch):
    """Which take as long as the second trial's, also where the system's clock is set back meanwhile."""
    fake_measurements(monkeypatch, 6_000)
    clock = SimpleNamespace(now=1e6, set_back=0)
    monkeypatch.setattr(best.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(best.time, "time", lambda: 1e9 - clock.set_back)
    measure_loss = best.measure_loss

    def measure_loss_slowly(*arguments):
        clock.now, clock.set_back = clock.now + 30, 3600
        return measure_loss(*arguments) + 12

    monkeypatch.setattr(best, "measure_loss", measure_loss_slowly)
    ok(call_here("--text", SHAKESPEARE, "--hours", "0.05", "--run_name", "rest", "--dry_run"))
    hours = yaml.safe_load(Path("runs/rest/recipe.yaml").read_text())["train_hours"]
    assert 3600 * hours == pytest.approx(180 - 2 * 30 - 12, abs=0.2)


def test_time_that_reading_the_text_has_used_up_is_an_error_of_one_line(call_here, monkeypatch):
    fake_runs(monkeypatch, lambda size, batch: 1e5)
    monkeypatch.setattr("psutil.Process.create_time", lambda self: time.time() - 200)
    error = refused(call_here("--text", SHAKESPEARE, "--hours", "0.05", "--dry_run"))
    assert "the search has used up the time; give more --hours" in error


def measured(output: str) -> tuple[float, float]:
    """Tokens of a text, and bytes a token, as printed."""
    tokens, unit, size = re.search(
        r"^text .*: ([\d.]+) ([kM]) tokens to train on, ([\d.]+) bytes", output, re.M
    ).groups()
    return float(tokens) * {"k": 1e3, "M": 1e6}[unit], float(size)


def test_a_loss_is_given_in_bits_per_byte_too_and_a_byte_is_not_a_character(call_here):
    latin, cyrillic = "abcdefghijklmnopqrstuvwxyz", "абвгдежзийклмнопрстуфхцчшщ"
    text = SHAKESPEARE.read_text()[:300_000].translate(str.maketrans(latin, cyrillic))
    Path("text.txt").write_text(text)
    output = ok(call_here("--text", "text.txt", "--device", "h100")).stdout
    size = len(text.encode()) / len(open_tokenizer("data/text-0.1h/tokenizer").encode([text])[0])
    assert measured(output)[1] == pytest.approx(size, abs=0.06)
    loss, bits = map(float, re.search(r"^best .*: loss (\S+) \((\S+) bits per byte\)", output, re.MULTILINE).groups())
    assert bits == pytest.approx(loss / math.log(2) / size, abs=0.006)


@pytest.mark.parametrize("new_writer", [None, pa.ipc.new_file, pa.ipc.new_stream])
def test_a_text_that_is_too_long_to_read_is_counted_by_its_beginning(call_here, monkeypatch, new_writer):
    """Here by half of it, less the last buffers. polars writes 100,000 rows and more at once."""
    text = 32 * SHAKESPEARE.read_text()
    Path("text.txt").write_text(text)
    if new_writer:
        batch = pa.record_batch({"text": [text[i : i + 1000] for i in range(0, len(text), 1000)]})
        with new_writer("text.arrow", batch.schema) as writer:
            writer.write_batch(batch)
    name = "text.arrow" if new_writer else "text.txt"
    monkeypatch.setattr("recipe.data.survey.READ_RATE", len(text) / 2 / 360)
    tokens, size = measured(ok(call_here("--text", name, "--device", "h100", "--tokenizer", "gpt2")).stdout)
    recipe = yaml.safe_load(Path("runs/text-0.1h/recipe.yaml").read_text())
    assert recipe["dataset_name"] == name, "all of it"
    assert tokens * size == pytest.approx((1 - recipe["val_fraction"]) * len(text), rel=0.15)


def test_of_a_text_longer_than_the_run_needs_every_nth_document_is_trained_on(call_here):
    """Also by a run of a few milliseconds, which has no time to read. Here of a subset of a data set."""
    documents = [f"{i}: {SHAKESPEARE.read_text()[i * 200 : i * 200 + 190]}" for i in range(5500)]
    Path("text").mkdir()
    Path("text/en.jsonl").write_text("".join(f"{json.dumps({'text': document})}\n" for document in documents))
    Path("text/README.md").write_text("---\nconfigs:\n- {config_name: en, data_files: en*}\n---\n")
    ok(call_here("--text", "text", "--dataset_config", "en", "--device", "h100", "--tokens", "20000"))
    recipe = Path("runs/text-20000-tokens/recipe.yaml")
    stride = int(re.search(r"every-(\d+)\.txt\".*, one of every \1 pieces", recipe.read_text())[1])
    assert stride > 2
    text = open_text(parse_config(["--config", str(recipe)]).data)
    assert [piece.content for piece in text.pieces()] == documents[::stride]


def test_a_trial_is_validated_on_as_many_tokens_as_the_run_will_be(monkeypatch):
    """Or their losses could not be compared."""
    runs, forecaster = fake_runs(monkeypatch, lambda size, batch: 1e5), forecaster_of()
    run = forecaster.best(3600)
    overhead = best.measure_loss(forecaster, run, 60, [])
    assert -1 <= overhead < 0, "without the second of training that the trial reports"
    assert runs[0].eval_tokens == forecaster.fields_for(run.size, run.tokens)["eval_tokens"][0]


def test_a_speed_is_the_median_without_the_first_steps_which_compile(monkeypatch):
    lines = [{"step": 5 * i, "tokens_per_second": rate} for i, rate in enumerate((10.0, 100.0, 200.0, 300.0), 1)]
    monkeypatch.setattr(best, "train_and_delete", lambda *_: lines)
    forecaster = forecaster_of()
    best.measure_speed(forecaster, run := forecaster.best(3600), [], torch_compile=False)
    assert forecaster.tokens_per_second(run.size) == 200.0


def test_main_gives_the_signals_back(in_process, tmp_path, monkeypatch):
    """Which a notebook needs afterwards, also where there is an error: `in_process` compares them."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)

    def read_text(*_):
        assert signal.getsignal(signal.SIGINT) != handler
        raise UserError("unreadable")

    monkeypatch.setattr(best, "read_text", read_text)
    assert best.main(["--hours", "0.1"]) == 2


def test_a_loss_below_zero_is_not_forecast(call_here, monkeypatch):
    """Of one repeated line, whose loss falls faster than the law's."""
    fake_measurements(monkeypatch, speed=6_000)
    losses = iter([(9.0, 0.9), (8.0, 0.01)])
    monkeypatch.setattr(best, "measure_loss", lambda forecaster, *_: forecaster.losses.append(next(losses)) or 0.0)
    result = ok(call_here("--text", "text.txt", "--hours", "0.05", "--dry_run"))
    assert re.search(r"^best +\d layers, \d+ wide: loss 0.000 \(0.00 bits", result.stdout, re.MULTILINE), result.stdout
    assert "loss -" not in result.stdout


def test_a_trial_is_neither_uploaded_nor_tracked_nor_scored_and_can_be_stopped(call_here, monkeypatch):
    trials = []

    def stop(config, strategy):
        trials.append(config.run)
        raise KeyboardInterrupt

    monkeypatch.setattr(best, "run", stop)
    fields = "--push_to_hub true --hub_model_id acme/gpt2 --report_to wandb --hellaswag_steps 100 --sample_steps 100"
    fields += " --milestone_steps 100 --save_steps 100 --eval_steps 100"
    result = call_here("--text", "text.txt", *fields.split())
    (trial,) = trials
    assert (trial.push_to_hub, trial.report_to, trial.hellaswag_steps, trial.sample_steps) == (False, "none", 0, 0)
    assert (trial.milestone_steps, trial.save_steps, trial.eval_steps) == (0, "end", "end")
    assert "stopped before the recipe was written; the same command searches again" in result.stderr


def test_ctrl_c_during_the_search_promises_no_checkpoint(tmp_path):
    """Nor does it leave anything, though an earlier search was killed amid a trial."""
    trial = tmp_path / "runs" / "tiny_shakespeare-0.1h" / ".trial"
    (trial / "step_00000007").mkdir(parents=True)
    search = programs.Running(ROOT / "recipe/best.py", "--text", SHAKESPEARE, cwd=tmp_path)
    search.until("trial  ")
    deadline = time.monotonic() + 60
    while not (trial / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    search.send_signal(signal.SIGINT)
    assert search.wait(60) == 75
    assert "checkpoint" not in search.output
    assert not trial.parent.exists()
    assert search.stderr.endswith("stopped before the recipe was written; the same command searches again\n")


def test_of_two_searches_for_one_run_the_second_ends_before_it_measures_anything(call_here, monkeypatch):
    argv, seconds = ["--text", "text.txt"], []

    def search_again(*_):
        seconds.append(call_here(*argv))
        return 1e9

    monkeypatch.setattr(best, "try_sizes", search_again)
    monkeypatch.setattr("recipe.checkpoint.run_dir.LOCK_TIMEOUT_S", 0.1)
    assert "the search has used up the time; give more --hours" in refused(call_here(*argv))
    (second,) = seconds
    assert "runs/text-0.1h: another run is writing there (process " in refused(second)


@pytest.mark.slow
def test_a_run_ends_within_the_time_given_with_the_loss_announced(tmp_path):
    """On Python's library, more text than a processor reads four times in the time."""
    (tmp_path / "library").mkdir()
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        (tmp_path / "library" / f"{file.stem}.txt").write_bytes(file.read_bytes())
    start = time.monotonic()
    result = ok(call(tmp_path, "--text", "library/*.txt", "--hours", "0.05", "--run_name", "timed"))
    seconds = time.monotonic() - start
    decay_start = int(re.search(r"^decay .* after step ([\d,]+);", result.stdout, re.MULTILINE)[1].replace(",", ""))
    seconds_at = {line["step"]: line["seconds"] for line in metrics(tmp_path / "runs/timed")}
    stable_seconds = seconds_at[min(seconds_at, key=lambda step: abs(step - decay_start))]
    slowdown = seconds_at[max(seconds_at)] - stable_seconds - stable_seconds * 0.6 / 0.4  # of the decay's steps
    assert 0.9 * 180 < seconds - slowdown < 1.1 * 180, "1.03 on a quiet machine"
    head = (tmp_path / "runs/timed/recipe.yaml").read_text()
    expected, percent = re.search(r"loss to expect: (\d\.\d+), give or take (\d+) %", head).groups()
    number, unit = re.search(r"^best .* after ([\d.]+) ([kM]) tokens", result.stdout, re.MULTILINE).groups()
    layers_and_width = re.search(r"^best       (.*): loss", result.stdout, re.MULTILINE)[1]
    tokens_per_second = re.search(rf"^speed      {layers_and_width}: ([\d,]+) tokens/s", result.stdout, re.MULTILINE)[1]
    trained = seconds_at[max(seconds_at)] - slowdown  # whose tokens depend on what else the machine does meanwhile
    tokens = float(number) * {"k": 1e3, "M": 1e6}[unit]
    assert trained * int(tokens_per_second.replace(",", "")) == pytest.approx(tokens, rel=0.25)  # validation takes time
    assert metrics(tmp_path / "runs/timed")[-1]["val_loss"] == pytest.approx(float(expected), rel=0.02 * int(percent))


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_search_together(engine, tmp_path):
    argv = ["--text", SHAKESPEARE, "--hours", "0.026", "--dry_run"]
    result = ok(launch(engine, 2, ROOT / "recipe/best.py", *argv, cwd=tmp_path))
    assert len(re.findall(r"^best  ", result.stdout, re.MULTILINE)) == 1
    head = (tmp_path / "runs/tiny_shakespeare-0.026h/recipe.yaml").read_text()
    launcher = f"# ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/{engine}.yaml"
    assert head.startswith(f"{launcher} --num_processes 2 recipe/train.py --config runs/")


def test_the_directory_of_another_run_is_refused_before_the_search(call_here):
    """It would have taken its time, and left a recipe beside that run's checkpoints."""
    Path("runs/mine/step_00000006").mkdir(parents=True)
    argv = ["--text", "text.txt", "--device", "h100", "--run_name", "mine"]
    assert "runs/mine holds another run; give another --run_name, or --fresh" in refused(call_here(*argv))
    assert [path.name for path in Path("runs/mine").iterdir()] == ["step_00000006"]
    ok(call_here(*argv, "--fresh"))
    assert Path("runs/mine.old-1/step_00000006").exists()


@pytest.mark.parametrize(
    ("text", "size", "length"),
    [("fineweb", "24 layers, 1024 wide .medium.", "train_hours"), ("text.txt", r"\d+ layers, \d+ wide", "max_steps")],
)
def test_a_plan_by_dollars_for_other_devices(text, size, length, tmp_path, call_here):
    """Chinchilla's 20 tokens a parameter would be 260 M parameters; and money does not lengthen a short text."""
    argv = ["--text", text, "--device", "8xh100", "--dollars", "20", "--price_per_hour", "28", "--run_name", "rich"]
    result = ok(call_here(*argv))
    assert re.search(f"^best       {size}: loss ", result.stdout, re.MULTILINE)
    recipe = (tmp_path / "runs/rich/recipe.yaml").read_text()
    assert re.search(f"^{length}: ", recipe, re.MULTILINE)
    for change in (["--device", ""], ["--price_per_hour", "2"], ["--device", "h100"]):
        assert "was written for another request" in call_here(*argv, *change, "--dry_run").stderr
    if text == "text.txt":
        seconds = float(re.search(r"^time       about ([\d.]+) s of ", result.stdout, re.MULTILINE)[1])
        steps = int(re.search(r"^max_steps: (\d+)", recipe, re.MULTILINE)[1])
        assert seconds == pytest.approx(0.01 * steps, abs=0.06), "the least that a step takes on a GPU"
        result = ok(call_here(*argv, "--fresh"))
        assert f"fresh      moved the earlier run to {tmp_path}/runs/rich.old-1" in result.stdout
        assert (tmp_path / "runs/rich/recipe.yaml").read_text() == recipe
        assert (tmp_path / "runs/rich.old-1/recipe.yaml").read_text() == recipe


@pytest.mark.parametrize(
    ("argv", "name", "directory", "directory_of_copy"),
    [
        ([], "text-0.1h", "runs/text-0.1h", "runs/mine"),
        (["--run_name", "other"], "other", "runs/other", "runs/mine"),
        (["--output_dir", "else where/there"], "there", "else where/there", "else where/there"),  # refused by its name
        (["--output_dir", "there", "--run_name", "other"], "other", "there", "there"),
    ],
)
def test_its_recipe_is_that_of_its_run_and_a_copy_that_of_another(argv, name, directory, directory_of_copy, call_here):
    ok(call_here("--text", "text.txt", "--device", "h100", *argv))
    run = parse_config(["--config", f"{directory}/recipe.yaml"]).run
    assert (run.run_name, run.output_dir) == (name, directory)
    shutil.copy(f"{directory}/recipe.yaml", "mine.yaml")
    run = parse_config(["--config", "mine.yaml"]).run
    assert (run.run_name, run.output_dir) == ("other" if name != Path(directory).name else "mine", directory_of_copy)


def test_its_recipe_names_a_validation_text_as_given_and_not_its_shards(call_here):
    """Which a tokenizer of the text's own makes: they are not those of the tokenizer that the flags name. All of the
    text is for training then."""
    Path("val.txt").write_text(SHAKESPEARE.read_text()[200_000:220_000])
    ok(call_here("--text", "text.txt", "--device", "h100", "--val_data", "val.txt"))
    recipe = yaml.safe_load(Path("runs/text-0.1h/recipe.yaml").read_text())
    assert (recipe["val_data"], recipe.get("val_fraction", 0)) == ("val.txt", 0)
    ok(call(".", "--config", "runs/text-0.1h/recipe.yaml", "--dry_run", "h100", script=ROOT / "recipe/train.py"))


@pytest.mark.parametrize(
    ("device", "hours", "file"),
    [
        ("v3-8", "0.1", "tpu.yaml"),  # one process with eight devices, among which a small batch must divide, too
        ("8xv5e", "24", "tpu.yaml"),  # DDP's gradients beside its buckets leave no room for the next size
        ("8xh100", "0.1", "ddp.yaml --num_processes 8"),
        ("h100", "0.1", "single.yaml"),
    ],
)
def test_a_plan_for_a_device_passes_its_dry_run(device, hours, file, call_here):
    ok(call_here("--text", SHAKESPEARE, "--device", device, "--hours", hours, "--run_name", "plan"))
    ok(call_here("--text", "fineweb", "--device", device, "--hours", hours, "--run_name", "big", "--tokenizer", "gpt2"))
    for name in ("plan", "big"):
        command = Path(f"runs/{name}/recipe.yaml").read_text().partition("\n")[0]
        launcher = f"# accelerate launch --config_file accelerate_configs/{file} recipe/train.py"
        assert command == f"{launcher} --config runs/{name}/recipe.yaml"
        ok(call(".", "--config", f"runs/{name}/recipe.yaml", "--dry_run", device, script=ROOT / "recipe/train.py"))


def test_the_batch_grows_with_the_run_and_muons_rate_only_above_what_was_measured():
    text = Text("my.txt", "gpt2", 1e12, 4.4)
    fields = [fields_for((12, 768), text, tokens, 1) for tokens in (1e6, 5e6, 3e7, 1e10)]
    values = [(f["total_batch_tokens"][0], f["muon_learning_rate"][0]) for f in fields]
    assert values == [(1024, 0.01), (4096, 0.01), (8192, 0.014), (524_288, 0.02)]
    assert fields_for((12, 768), text, 1500, 1)["warmup_steps"][0] == 0  # of one step
    limits = [{f[name][0] for f in fields} for name in ("warmup_steps", "eval_tokens")]
    assert 256 in limits[0]
    assert {32_768, 10_485_760} <= limits[1]
    assert "256 at most" in fields[-1]["warmup_steps"][1]
    assert "from 32,768 to 10,485,760" in fields[0]["eval_tokens"][1]


def test_a_recipe_does_not_name_the_home_directory(tmp_path, call_here, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MY_TOKEN", "text.txt")  # a word of the path that looks like a secret
    argv = ["--text", tmp_path / "text.txt", "--device", "h100"]
    ok(call_here(*argv))
    assert str(tmp_path) not in Path("runs/text-0.1h/recipe.yaml").read_text()
    assert parse_config(["--config", "runs/text-0.1h/recipe.yaml"]).data.train_text == str(tmp_path / "text.txt")
    assert "recipe.yaml exists" in ok(call_here(*argv)).stdout


@pytest.mark.parametrize(
    ("length", "name"), [("--hours=2", "2h"), ("--tokens=1e9", "1e9-tokens"), ("--tokens=300000", "300000-tokens")]
)
def test_print_run_prints_the_directory_of_the_run_after_its_length(length, name, call_here):
    """The Makefile samples from it: another run may be newer. A billion was once named 1e-09."""
    for text in ("a/my text.txt", "a/my text/**/*.py"):
        assert call_here("--text", text, length, "--print_run").stdout == f"runs/my-text-{name}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--hours", "0.001"], "0.001 hours: give 0.025, the fewest possible, or more"),
        (["--hours", "nan"], "nan hours: give 0.025, "),
        (["--tokens", "-5"], "--tokens -5: give how many to train on"),
        (["--dollars", "20"], "--dollars needs --price_per_hour"),
        (["--dollars", "0", "--price_per_hour", "28"], "0 hours: give 0.025, "),
        (["--text", "empty.txt"], "--text empty.txt holds no text"),
        (["--max_steps", "500"], "--max_steps needs an existing recipe; for a new one give --hours, --tokens or"),
        (["--n_embd", "80"], "--n_embd: best.py chooses the shape and the batch; change them in a copy of its recipe"),
        (["--text", "few.txt"], " in 1,050 bytes, too few to train on; give 20,000 or more, about 88,000"),
        (["--txt=few.txt"], "unknown '--txt'; did you mean 'text'?"),
        (["--text", "src/main.c", "src/my.txt"], "unexpected argument: 'src/my.txt'; write --NAME VALUE, and"),
        (["--text", "my", "notes.txt"], "error: unexpected argument; write --NAME VALUE, and quote a glob"),
        (["--optim", "adamw"], "--optim: best.py needs Muon and wsd; edit a copy of its recipe"),
        (["--config", "gpt2-fast"], "--config: best.py needs Muon and wsd"),
        (["--dataset_name", "few.txt"], "--dataset_name: name the text with --text"),
        (["--dry_run", "8xh100"], "--dry_run takes no devices here; use --device 8xh100"),
        (["--device", "abacus"], "is not a known device; use one of "),
        (["--output_dir", "src"], "output_dir src is not the directory of a run: it holds main.c"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: no such file, directory or data set"),
    ],
)
def test_a_mistake_is_named_with_a_way_out_before_anything_is_measured(argv, message, call_here, monkeypatch):
    monkeypatch.setattr(best, "try_sizes", None)
    Path("few.txt").write_text("To be, or not to be. " * 50)
    Path("empty.txt").touch()
    Path("src").mkdir()
    Path("src/main.c").touch()
    Path("src/my.txt").touch()
    error = refused(call_here(*argv))
    assert message in error
    assert error.count("\n") <= 2


def test_the_law_predicts_the_runs_that_it_was_fitted_to():
    """The runs on the first text by itself; on each text, the longest run of a larger model from two short ones. Three
    runs on a GPU and three published ones, up to 50 billion tokens, are near a line in the law's value."""
    runs_and_law = scaling.SCALING
    for text in ("books-and-wikipedia-h200", "openwebtext"):
        runs = [run for run in runs_and_law["runs"] if run["text"] == text]
        values = [scaling.law(tuple(r["size"]), r["tokens"], r["unique"]) for r in runs]
        losses = [r["loss"] for r in runs]
        assert np.polyval(np.polyfit(values, losses, 1), values) == pytest.approx(losses, rel=0.025)
    texts = [text for text in runs_and_law["held_out"] if text not in ("books-and-wikipedia-h200", "openwebtext")]
    errors = []
    for text in texts:
        runs = [run for run in runs_and_law["runs"] if run["text"] == text]
        points = [(scaling.law(tuple(r["size"]), r["tokens"], r["unique"]), r["loss"]) for r in runs]
        if text == texts[0]:
            assert [value for value, _ in points] == pytest.approx([loss for _, loss in points], rel=0.02)
        value, loss = points[3]
        errors.append([abs(scaling.line_through(points[i : i + 2])(value) / loss - 1) for i in (0, 1)])
        stated_errors = [scaling.error_of(points[i][0] - value) for i in (1, 2)]
        assert all(error <= stated for error, stated in zip(errors[-1], stated_errors, strict=True))
    worst = [np.max(errors[:6], 0), np.max(errors[6:], 0)]
    assert np.array(worst) == pytest.approx(np.array([[0.061, 0.014], [0.023, 0.038]]), abs=6e-4)  # as in docs/log.md


def test_the_log_says_how_far_the_law_holds_for_a_text_that_it_was_not_fitted_to():
    """It once named only the errors of the texts fitted."""
    page = " ".join((ROOT / "docs/log.md").read_text().split())
    constants, held_out = scaling.SCALING["law"], scaling.SCALING["held_out"]
    assert f"with a = {constants['a']:.3f} and c = {constants['c']:.4f}" in page
    within, forecasts = (sum(text[key] for text in held_out.values()) for key in ("within", "forecasts"))
    assert f"fitted without the text it is {within} of {forecasts} forecasts" in page
    on_gpu = held_out["books-and-wikipedia-h200"]
    excess = f"{100 * on_gpu['worst']:.0f} % too high"
    assert f"without them it is {on_gpu['a']:.3f}, and the third is forecast {excess}" in page


@pytest.mark.parametrize(
    ("size", "tokens", "unique", "token_bytes", "loss"),
    [
        ((12, 768), 10.26e9, math.inf, 4.4, 3.272),  # llm.c on FineWeb, eval/data/published.yaml
        ((12, 768), 50e9, 9e9, 4.4, 2.901),  # OpenWebText
        ((10, 512), 201.7e6, 40.4e6, 4.2, 3.957),  # books and Wikipedia on an H200
        ((4, 128), 1.02e6, 6.39e6, 3.3, 4.739),  # Linux's documentation, as in scaling.json
        ((4, 128), 1.02e6, 0.31e6, 3.3, 4.396),  # tiny Shakespeare
    ],
)
def test_what_a_plan_without_trials_expects_is_within_its_error(size, tokens, unique, token_bytes, loss):
    forecaster = forecaster_of(Text("text", "gpt2", unique, token_bytes))
    assert forecaster.loss(size, tokens) == pytest.approx(loss, rel=forecast.UNTRIED_ERROR)


@pytest.mark.parametrize("processes", [1, 4])
def test_a_size_is_compared_if_it_fits_each_processs_share_of_the_memory_with_a_margin(processes, monkeypatch):
    """On CPUs, of whose memory 92 % may be used, or of a container's (tests/monitor/test_summary.py)."""
    monkeypatch.setattr("recipe.utils.machine.CGROUP", Path("no container"))
    strategy, size = open_strategy("fp32"), (12, 768)
    strategy.runtime.processes = Processes(world_size=processes, local_world_size=processes)
    needed = forecast.memory_of(size, 50257, strategy)
    for share, largest in ((0.91, size), (0.93, (10, 512))):
        memory = SimpleNamespace(available=processes * needed / share)
        monkeypatch.setattr("psutil.virtual_memory", lambda memory=memory: memory)
        *_, last = Forecaster(strategy, ENDLESS, 50257).forecasts(3600)
        assert (last.size, last.limit) == (largest, "memory")


@pytest.mark.parametrize(("rate", "power"), [(100.0, 1), (1e7, 0)])
def test_a_larger_size_is_expected_to_be_slower_but_not_by_more_than_its_flops(rate, power):
    """Whatever two measurements are, of which other work on the machine may slow one."""
    forecaster = forecaster_of()
    small, middle, large = scaling.SIZES[3:6]
    forecaster.rates = {forecaster.flops(small): 1e5, forecaster.flops(middle): rate}
    expected = rate * (forecaster.flops(middle) / forecaster.flops(large)) ** power
    assert forecaster.tokens_per_second(large) == pytest.approx(expected, rel=1e-9)


def test_the_error_of_a_forecast_grows_from_the_longer_trial_on():
    """By 6 % per nat."""
    forecaster = forecaster_of()
    forecaster.losses, run = [(6.0, 6.5), (5.0, 5.5)], forecaster.best(3600)
    distance = 5.0 - scaling.law(run.size, run.tokens)
    assert forecaster.relative_error(run) == pytest.approx(0.03 + 0.06 * distance, rel=1e-6)


def test_a_fresh_run_begins_with_the_recipe_that_its_search_has_written(call_here, monkeypatch):
    """Which a second --fresh, of the run, would move away."""
    fake_measurements(monkeypatch, speed=6_000)
    monkeypatch.setattr(best, "run", lambda config, strategy: print(f"fresh: {config.run.fresh}") or 0)
    monkeypatch.setattr("recipe.engine.runtime.Runtime.close", lambda self: None)
    assert "fresh: False" in ok(call_here("--text", "text.txt", "--hours", "0.05", "--fresh")).stdout
