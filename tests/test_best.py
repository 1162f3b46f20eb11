"""recipe/best.py: text and time in, a recipe and its run out."""

import math
import re
import sysconfig
import time
from pathlib import Path

import pytest
import yaml

from recipe import best
from recipe.config import parse_config
from recipe.config.catalog import text_files
from recipe.config.fields import FIELDS
from recipe.data.survey import VOCAB_SIZE, Text
from recipe.engine.factory import open_strategy
from recipe.estimate import scaling
from recipe.estimate.forecast import Forecaster, recipe
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, launch, metrics, ok


def call(at, *words, script=ROOT / "recipe/best.py"):
    return programs.run(script, *words, cwd=at)


@pytest.fixture(scope="module")
def searched(once):
    """A directory in which the search has written a recipe for 1.8 minutes, and what it printed."""

    def search(at):
        at.mkdir()
        (at / "my.txt").write_text(4 * SHAKESPEARE.read_text())  # a fast processor reads it once in this time
        return ok(call(at, "--text", "my.txt", "--hours", "0.03", "--dry_run", "--seed", "7")).stdout

    return once("best", search)


def test_it_writes_a_recipe_that_a_person_reads_and_says_what_to_expect(searched):
    at, printed = searched
    text = (at / "runs/my-0.03h/recipe.yaml").read_text()
    head, lines = text.split("dataset_name", 1)
    values = yaml.safe_load(text)
    assert all(re.fullmatch(r"(dataset_name)?\w*: .+  # \w.+", line) for line in lines.splitlines()), "each says why"
    assert values.keys() <= FIELDS.keys()
    assert (values["dataset_name"], values["seed"]) == ("my.txt", 7)
    assert 0.01 < values["train_hours"] < 0.028, "what the search has left"
    expected = float(re.search(r"loss to expect: (\d\.\d+), give or take \d+%", head)[1])
    assert re.search(rf"^best  .* layers, \d+ wide: loss {expected:.3f} ", printed, re.MULTILINE)
    assert len(re.findall(r"^speed  .* tokens/s", printed, re.MULTILINE)) in (1, 2, 3)
    assert re.search(r"^limit      the time; ", printed, re.MULTILINE)
    assert len(re.findall(r"^trial  .* wide, for \d", printed, re.MULTILINE)) == 2, "before each, how long"
    assert not list(at.glob("runs/.best-*")), "trials leave nothing"
    assert sorted(path.name for path in (at / "data/my-0.03h").iterdir()) == [".preparing.lock", "tokenizer"]
    (at / "data/words.txt").write_text("some words")
    assert text_files(str(at / "data"))[0] == [at / "data/words.txt"], "what the search has made is no text"


def test_its_recipe_is_trained_like_any_other_and_its_model_loads(searched, monkeypatch):
    """The same command goes on with the run, since the recipe is there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    at, _ = searched
    recipe = at / "runs/my-0.03h/recipe.yaml"
    monkeypatch.chdir(at)
    config = parse_config(["--config", str(recipe)])
    short = ["--config", recipe, "--max_steps", "20", "--warmup_steps", "2"]
    ok(call(at, *short, script=ROOT / "recipe/train.py"))
    model = AutoModelForCausalLM.from_pretrained(at / "runs/my-0.03h/step_00000020")
    assert (model.config.n_layer, model.config.n_embd) == (config.model.n_layer, config.model.n_embd)
    assert AutoTokenizer.from_pretrained(at / "runs/my-0.03h/step_00000020").vocab_size <= VOCAB_SIZE
    again = call(at, "--text", "my.txt", "--hours", "0.03", "--dry_run")
    assert re.search("recipe     runs/my-0.03h/recipe.yaml is there\n +Validation loss to expect: ", again.stdout)
    whole = call(at, "--text", "my.txt", "--hours", "0.03", "--max_steps", "20", "--warmup_steps", "2")
    assert "recipe     runs/my-0.03h/recipe.yaml is there: its run goes on" in whole.stdout
    assert (whole.returncode, "finished (runs/my-0.03h/step_00000020)" in whole.stdout) == (0, True), whole.stderr
    (at / "my.txt").write_text(SHAKESPEARE.read_text()[::-1])
    changed = call(at, "--text", "my.txt", "--hours", "0.03", "--max_steps", "20", "--warmup_steps", "2")
    assert (changed.returncode, "is complete, and my.txt has changed since" in changed.stderr) == (2, True)
    other = call(at, "--text", "my.txt", "--hours", "0.04", "--run_name", "my-0.03h", "--dry_run")
    assert (other.returncode, "is for something else; give another --run_name" in other.stderr) == (2, True)


TRIED = """
import sys
from recipe import best

def measure_speed(forecaster, *_):
    forecaster.rates[forecaster.flops((4, 128))] = speed

def measure_loss(forecaster, forecast, seconds, flags):
    forecaster.losses.append(2 * (best.law(forecast.size, speed * seconds),))  # a text for which the law is right
    return 200.0 if speed == 1 else 0.0

speed, best.measure_speed, best.measure_loss = float(sys.argv[1]), measure_speed, measure_loss
sys.exit(best.main(sys.argv[2:]))
"""


CASES = [(6_000, "train_hours"), (7_500, "train_hours"), (100_000, "max_steps")]


@pytest.mark.parametrize(("speed", "length"), CASES)
def test_only_a_text_that_was_read_four_times_well_before_the_time_ends_a_run(speed, length, tmp_path):
    """At all speeds the text forbids a larger model; at the lowest there is no time to read it so often, at the next
    just enough, if the speed stays as it is."""
    words = ["--text", SHAKESPEARE, "--hours", "0.05", "--run_name", "read", "--dry_run"]
    (tmp_path / "tried.py").write_text(TRIED)
    done = ok(call(tmp_path, speed, *words, script=tmp_path / "tried.py"))
    values = yaml.safe_load((tmp_path / "runs/read/recipe.yaml").read_text())
    assert values["n_embd"] == 128
    assert {"train_hours", "max_steps"} & values.keys() == {length}
    if length == "max_steps":  # the search counts a text's tokens by its sample
        assert re.search(r"^time       about \d\d s of the \d min \d+ s that are left", done.stdout, re.MULTILINE)
        assert values["max_steps"] < 3.9 * values["save_steps"] < 1.1 * values["max_steps"], (
            "no two checkpoints together"
        )


@pytest.mark.parametrize("seconds", [180, 360, 3600])
@pytest.mark.parametrize("tokens", [5e7, math.inf])
def test_a_gpu_that_takes_ten_milliseconds_for_the_smallest_step_gets_a_model_that_fills_it(
    seconds, tokens, monkeypatch
):
    """Such steps made 2 x 64 seem the best on an H200, which then ran at 0.2 % of its peak."""
    text = Text("acme/text" if tokens == math.inf else "my.txt", "gpt2", tokens, 4.4)
    forecaster = Forecaster(open_strategy("auto", "h200"), text, 50257, scaling.published_law)

    def speed(size, batch):
        return batch / max(0.01, batch * forecaster.flops(size) / 4e14)

    def train_and_delete(strategy, fields, flags):
        rate = speed((fields["n_layer"][0], fields["n_embd"][0]), fields["total_batch_tokens"][0])
        return [{"step": 10, "tokens": 1e6, "seconds": 1.0, "val_loss": 5.0, "tokens_per_second": rate}]

    monkeypatch.setattr(best, "train_and_delete", train_and_delete)
    best.try_sizes(forecaster, seconds, [], torch_compile=True)
    forecast = forecaster.best(seconds)
    rate = speed(forecast.size, recipe(forecast.size, text, forecast.tokens, 1)["total_batch_tokens"][0])
    assert rate * forecaster.flops(forecast.size) > 0.9 * 4e14
    assert forecast.limit == "text" or forecast.tokens == pytest.approx(rate * seconds, rel=0.1)


def test_a_search_that_takes_all_of_the_time_says_so(tmp_path):
    (tmp_path / "tried.py").write_text(TRIED)
    done = call(tmp_path, 1, "--text", SHAKESPEARE, "--hours", "0.05", script=tmp_path / "tried.py")
    assert (done.returncode, "has taken all of the time; give more --hours" in done.stderr) == (2, True), done.stderr


STOPPED = """
import sys
from recipe import best

def run(config, strategy):
    print("trial:", config.run.push_to_hub, config.run.report_to, config.run.hellaswag_steps, config.run.sample_steps)
    raise KeyboardInterrupt

best.run = run
sys.exit(best.main(sys.argv[1:]))
"""


def test_a_trial_is_neither_uploaded_nor_tracked_nor_scored(tmp_path):
    (tmp_path / "stopped.py").write_text(STOPPED)
    words = "--push_to_hub true --hub_model_id acme/gpt2 --report_to wandb --hellaswag_steps 100 --sample_steps 100"
    done = call(tmp_path, "--text", SHAKESPEARE, *words.split(), script=tmp_path / "stopped.py")
    assert "trial: False none 0 0" in done.stdout, done.stderr
    assert "stopped before there was a recipe; the same command searches again" in done.stderr


@pytest.mark.slow
def test_it_ends_within_the_time_given_with_the_loss_it_announced(tmp_path):
    """On Python's library, more text than a processor reads four times in the time."""
    (tmp_path / "library").mkdir()
    for file in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        (tmp_path / "library" / f"{file.stem}.txt").write_bytes(file.read_bytes())
    begun = time.monotonic()
    done = ok(call(tmp_path, "--text", "library/*.txt", "--hours", "0.05", "--run_name", "timed"))
    seconds = time.monotonic() - begun
    decay_start = int(re.search(r"^decay .* after step ([\d,]+);", done.stdout, re.MULTILINE)[1].replace(",", ""))
    trained = {line["step"]: line["seconds"] for line in metrics(tmp_path / "runs/timed")}
    before = trained[min(trained, key=lambda step: abs(step - decay_start))]
    later = trained[max(trained)] - before - before * 0.6 / 0.4
    assert 0.9 * 180 < seconds - later < 1.1 * 180, "but for a decay slower than the steps before; alone 1.03"
    head = (tmp_path / "runs/timed/recipe.yaml").read_text()
    expected, percent = re.search(r"loss to expect: (\d\.\d+), give or take (\d+)%", head).groups()
    million = float(re.search(r"^best .* after ([\d.]+) M tokens", done.stdout, re.MULTILINE)[1])
    assert metrics(tmp_path / "runs/timed")[-1]["tokens"] == pytest.approx(1e6 * million, rel=0.25)
    assert metrics(tmp_path / "runs/timed")[-1]["val_loss"] == pytest.approx(float(expected), rel=0.02 * int(percent))


@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_several_processes_search_together(engine, tmp_path):
    words = ["--text", SHAKESPEARE, "--hours", "0.026", "--dry_run"]
    done = ok(launch(engine, 2, ROOT / "recipe/best.py", *words, cwd=tmp_path))
    assert len(re.findall(r"^best  ", done.stdout, re.MULTILINE)) == 1
    assert (tmp_path / "runs/tiny_shakespeare-0.026h/recipe.yaml").exists()


@pytest.mark.parametrize(
    ("text", "size", "length"),
    [
        ("fineweb", "12 layers, 768 wide \\(GPT-2\\)", "train_hours"),
        (SHAKESPEARE, "\\d+ layers, \\d+ wide", "max_steps"),
    ],
)
def test_a_plan_by_dollars_for_devices_that_are_not_here(text, size, length, tmp_path):
    """llm.c trained 124M for $20 on as many A100s; and little text does not become more by money."""
    words = ["--device", "8xh100", "--dollars", "20", "--price_per_hour", "28", "--run_name", "rich"]
    done = ok(call(tmp_path, "--text", text, *words))
    assert re.search(f"^best       {size}: loss ", done.stdout, re.MULTILINE)
    recipe = (tmp_path / "runs/rich/recipe.yaml").read_text()
    assert re.search(f"^{length}: ", recipe, re.MULTILINE)
    for others in (words[2:], [*words, "--price_per_hour", "2"], ["--device", "h100", *words[2:]]):
        assert "is for something else" in call(tmp_path, "--text", text, *others, "--dry_run").stderr, "it is a plan"
    if text == SHAKESPEARE:
        again = call(tmp_path, "--text", text, *words, "--fresh")
        assert "fresh      the earlier run is kept in runs/rich.old-1" in again.stdout, again.stderr
        assert (tmp_path / "runs/rich/recipe.yaml").read_text() == recipe
        assert (tmp_path / "runs/rich.old-1/recipe.yaml").read_text() == recipe


def test_the_batch_grows_with_the_run_and_muons_rate_only_above_what_was_measured():
    text = Text("my.txt", "gpt2", 1e12, 4.4)
    fields = [recipe((12, 768), text, tokens, 1) for tokens in (1e6, 5e6, 3e7, 1e10)]
    values = [(one["total_batch_tokens"][0], one["muon_learning_rate"][0]) for one in fields]
    assert values == [(1024, 0.01), (4096, 0.01), (8192, 0.014), (524_288, 0.02)]


def test_it_says_where_its_run_is(tmp_path):
    """Which the Makefile samples from: another run may be newer."""
    assert call(tmp_path, "--text", "a/my text.txt", "--hours", "2", "--print_run").stdout == "runs/my-text-2h\n"


def test_mistakes_are_named_with_the_number_that_would_do(tmp_path):
    (tmp_path / "few.txt").write_text("To be, or not to be. " * 50)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/main.c").touch()
    for words, message in (
        (["--hours", "0.001"], "0.001 hours: starting takes as long; give 0.025 or more"),
        (["--hours", "nan"], "nan hours: starting takes as long; give 0.025 or more"),
        (["--tokens", "-5"], "--tokens -5: give how many to train on"),
        (["--dollars", "20"], "--dollars needs --price_per_hour"),
        (["--dollars", "20", "--price_per_hour", "-1"], "--dollars needs --price_per_hour"),
        (["--dollars", "0", "--price_per_hour", "28"], "0 hours: starting takes as long"),
        (["--text", "empty.txt"], "--text empty.txt holds no text"),
        (["--max_steps", "500"], "--max_steps is for a recipe that is there; for a new one give --hours, --tokens or"),
        (["--n_embd", "80"], "--n_embd: best.py chooses the shape and the batch; change them in a copy of its recipe"),
        (["--total_batch_tokens", "4096"], "--total_batch_tokens: best.py chooses the shape"),
        (["--text", "few.txt"], "--text few.txt has 1,050 bytes, too few to train on; give about"),
        (["--device", "abacus"], "is not a known device; use one of "),
        (["--output_dir", "src"], "output_dir src is not the directory of a run: it holds main.c"),
        (["--text", "nowhere.txt"], "--text nowhere.txt: no such file, directory or data set"),
    ):
        done = call(tmp_path, *words)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
        assert done.stderr.count("\n") <= 2
        assert not re.search("^(speed|trial) ", done.stdout, re.MULTILINE), "before anything is tried"


def test_the_law_predicts_the_runs_that_it_was_fitted_to():
    """Of the first text by itself; of each, the longest run of a larger model by two short ones."""
    runs_and_law = scaling.SCALING
    texts = list(runs_and_law["errors"])
    assert len(texts) == 9
    for text in texts:
        runs = [run for run in runs_and_law["runs"] if run["text"] == text]
        points = [(scaling.law(tuple(r["size"]), r["tokens"], r["unique"]), r["loss"]) for r in runs]
        if text == texts[0]:
            assert [value for value, _ in points] == pytest.approx([loss for _, loss in points], rel=0.02)
        value, loss = points[3]
        predicted = [scaling.line_through(points[i : i + 2])(value) / loss - 1 for i in (0, 1)]
        assert predicted == pytest.approx(runs_and_law["errors"][text], abs=6e-4)
        errors = [scaling.error_of(points[i][0] - value) for i in (1, 2)]
        assert all(abs(one) <= error for one, error in zip(predicted, errors, strict=True))
