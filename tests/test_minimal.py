"""examples/minimal.py, which imports nothing of recipe/, is the default recipe with AdamW."""

import re
import runpy
from types import SimpleNamespace

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT, SHAKESPEARE, by_step, flags, launch, ok, run_train

STEPS = 25  # at step 30 this data order has a spike of 4 nats, which amplifies rounding to 3e-3


@pytest.fixture(scope="module")
def recipe_run(tmp_path_factory):
    """(shards, losses of recipe/train.py): the first steps, in the warm-up, which do not depend on max_steps."""
    directory = tmp_path_factory.mktemp("minimal")
    fields = {"dataset_name": directory / "shards", "output_dir": directory / "run"}
    fields |= {"train_text": SHAKESPEARE, "max_steps": 51}
    fields |= {"optim": "adamw", "precision": "fp32", "logging_steps": 1, "eval_tokens": 1024}
    ok(run_train(*flags(**fields)))
    lines = by_step(directory / "run")
    return directory / "shards", [lines[step]["loss"] for step in range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("config", "processes"), [("single", 1), ("ddp", 2)])
def test_the_losses_are_those_of_the_recipe(recipe_run, tmp_path, config, processes):
    shards, expected = recipe_run
    # As a user runs it: no variable asks for the CPU.
    env = {"ACCELERATE_USE_CPU": "false", "CUDA_VISIBLE_DEVICES": ""}
    command = ("examples/minimal.py", f"--data={shards}", f"--steps={STEPS}", f"--out={tmp_path}")
    result = ok(launch(config, processes, *command, env=env))
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (.*)", result.stdout, re.MULTILINE)]
    assert losses == pytest.approx(expected, abs=1e-5)  # rounding: 2.2e-6 on one processor
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() > 7e6
    assert AutoTokenizer.from_pretrained(tmp_path)("First Citizen").input_ids == [5962, 22307]


def test_it_ends_where_its_learning_rate_is_zero(shards, tmp_path, monkeypatch, capsys):
    """More steps once had negative rates."""
    main = runpy.run_path(str(ROOT / "examples" / "minimal.py"))["main"]
    monkeypatch.setitem(main.__globals__, "MAX_STEPS", 3)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr("sys.argv", ["minimal.py", f"--data={shards}", f"--out={tmp_path}", "--steps=5"])
    main()
    assert re.findall(r"^step (\d+) ", capsys.readouterr().out, re.MULTILINE) == ["1", "2", "3"]


def test_more_processes_than_sequences_are_refused(shards, monkeypatch, capsys):
    main = runpy.run_path(str(ROOT / "examples" / "minimal.py"))["main"]
    accelerator = SimpleNamespace(process_index=0, num_processes=9)
    monkeypatch.setitem(main.__globals__, "Accelerator", lambda **_: accelerator)
    monkeypatch.setattr("sys.argv", ["minimal.py", f"--data={shards}"])
    with pytest.raises(SystemExit):
        main()
    assert "8 sequences do not divide among 9 processes" in capsys.readouterr().err


def test_the_example_imports_nothing_of_the_recipe_and_stays_short():
    lines = (ROOT / "examples" / "minimal.py").read_text().splitlines()
    assert not [line for line in lines if re.match(r"\s*(from|import) (recipe|eval|benchmarks)\b", line)]
    assert len(lines) <= 150
