"""Configuration, batch arithmetic, the schedule of evaluations and saves, and every recipe in recipe/configs/."""

import dataclasses
import json
import re
import sys

import pytest
import yaml
from transformers import GPT2Config

from recipe.config import FIELDS, BatchPlan, batch_arithmetic, due_at, parse_config
from recipe.config.values import hint
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.errors import UserError
from tests import processes as programs
from tests.conftest import ROOT, flags, ok

RECIPES = sorted((ROOT / "recipe" / "configs").glob("*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    """A function that writes a recipe and returns its --config flag."""

    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return f"--config={path}"

    return write


def test_a_recipe_with_spaces_in_its_name_names_its_run(tmp_path):
    """As a browser's second copy."""
    (tmp_path / "my recipe (1).yaml").write_text("dataset_name: x\n")
    run = parse_config([f"--config={tmp_path}/my recipe (1).yaml"]).run
    assert (run.run_name, run.output_dir) == ("my-recipe-1", "runs/my-recipe-1")


def refused(*argv: str) -> str:
    """The error message for a command line."""
    with pytest.raises(UserError) as error:
        parse_config(list(argv))
    return str(error.value)


def test_a_new_field_is_a_decision():
    """Each is a flag, a key, a line of --help and a choice for every user."""
    assert len(FIELDS) <= 71


def test_a_run_that_others_can_audit_is_deterministic_by_default():
    for *argv, expected in (
        ("--push_to_hub=true", False),
        ("--push_to_hub=state", True),
        ("--push_to_hub=state", "--deterministic=false", False),
    ):
        assert parse_config([*argv, "--hub_model_id=an-org/a-name"]).run.deterministic is expected


def test_the_command_line_overrides_the_recipe(recipe):
    mine = recipe("dataset_name: somewhere\nlearning_rate: 1e-3\ntorch_compile: true\nmax_steps: 1e2\nval_data:\n")
    config = parse_config([mine, "--warmup_steps", "7", "--torch_compile", "false", "--fresh", "--eval_steps=2.5e2"])
    assert config.optimizer.learning_rate == 1e-3  # YAML 1.1 reads 1e-3 as a string
    assert (config.optimizer.max_steps, config.optimizer.warmup_steps, config.run.eval_steps) == (100, 7, 250)
    assert (config.run.torch_compile, config.run.fresh) == (False, True)
    assert config.data.val_data == ""
    assert (config.run.run_name, config.run.output_dir) == ("mine", "runs/mine")
    assert parse_config(["--output_dir", "sweep/lr 1e-3/"]).run.run_name == "lr-1e-3"  # as trackers show it
    assert parse_config(["--config", "gpt2"]).run.run_name == "gpt2"  # a recipe of recipe/configs/, by its name
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 3


def test_another_optimizer_or_schedule_drops_the_values_for_the_default_one():
    default = parse_config([]).optimizer
    assert (default.optim, default.muon_weight_decay, default.decay_fraction) == ("muon", 0.02, 0.6)
    changed = parse_config(["--optim=adamw", "--lr_scheduler_type=cosine"]).optimizer
    assert (changed.muon_weight_decay, changed.decay_fraction) == (0.1, 0.2)
    assert "muon_weight_decay needs optim muon" in refused("--optim=adamw", "--muon_weight_decay=0.02")


def test_another_schedule_does_not_drop_the_length_of_the_run(recipe):
    flag = recipe("dataset_name: x\nlr_scheduler_type: wsd\ntrain_hours: 2")
    assert "train_hours needs lr_scheduler_type wsd, but" in refused(flag, "--lr_scheduler_type=cosine")
    assert parse_config([flag, "--lr_scheduler_type=cosine", "--max_steps=7"]).optimizer.max_steps == 7


def test_an_unknown_name_is_refused_with_a_suggestion(recipe):
    for argument in ("--learning_rat=secret", recipe("dataset_name: x\nlearning_rat: secret")):
        message = refused(argument)
        assert re.search(r"unknown (key )?'(--)?learning_rat'; did you mean 'learning_rate'\?$", message)
    ours = "here: min_lr_fraction, a share of learning_rate (docs/migrating.md)"
    assert refused("--learning_rate_decay_frac=0.1") == f"unknown '--learning_rate_decay_frac'; {ours}"
    assert refused("--batch-size=8").startswith("unknown '--batch-size'; here: micro_batch_size, ")
    assert hint("device", FIELDS).startswith("; nothing to set: the device is found")
    assert refused("--lr=1e-3") == "unknown '--lr'; here: learning_rate (docs/migrating.md)"
    assert "here: micro_batch_size, in sequences a device" in refused("--device-batch-size=8")  # nanochat's
    assert "here: eval_tokens, in tokens, not batches" in refused("--eval.max_iters=8")  # litgpt's
    assert "here: max_grad_norm (" in refused("--gradient_clipping=1")  # DeepSpeed's
    assert hint("bias", FIELDS) == "; here: biases always, as in GPT-2 (docs/migrating.md)"
    assert refused("--init_from=resume") == "init_from resume: omit it; the same command starts a run and resumes it"
    assert refused("--my_rate=1").endswith("; see --help, or docs/migrating.md for the names in other programs")


def test_a_word_without_a_flag_is_shown_only_if_it_is_a_path():
    """It may be a secret."""
    advice = "; write --NAME VALUE, and quote a glob or a name with spaces; docs/migrating.md has the names in other "
    advice += "programs"
    assert refused("--dataset_name", "a.txt", "hf_secret") == f"unexpected argument{advice}"
    assert refused("--dataset_name", "a.txt", __file__) == f"unexpected argument: {__file__!r}{advice}"
    recipe = str(ROOT / "recipe/configs/gpt2.yaml")  # as for nanoGPT
    assert f"{recipe!r}; write --config VALUE" in refused(recipe)


def test_values_of_a_recipe_are_read_as_they_are_written(recipe):
    """In YAML 1.1 `no` and `on` are booleans, 0100 is 64 and 1:03 is 63."""
    config_flag = recipe(
        "dataset_name: wikimedia/wikipedia\nstreaming: true\ndataset_config: no\nmax_steps: 0100\nrun_name: on\n"
        "val_data:\ninit_from: null\nlearning_rate: 1e-3\nseed: 9007199254740993\n"
    )
    config = parse_config([config_flag])
    assert (config.data.dataset_config, config.optimizer.max_steps, config.run.run_name) == ("no", 100, "on")
    assert (config.data.val_data, config.model.init_from, config.optimizer.learning_rate) == ("", "", 1e-3)
    assert (config.run.seed, parse_config(["--seed=1e3"]).run.seed) == (2**53 + 1, 1000)  # no float holds the first
    assert "warmup_steps is '1:03'; it must be INTEGER" in refused(recipe("warmup_steps: 1:03"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("recipe/best.py --hours 2h", "argument --hours: invalid float value: '2h'"),
        ("-m eval.hellaswag --limit abc", "argument --limit: abc is not a positive integer"),
        ("-m recipe.hub.export --boost", "unrecognized arguments: --boost"),
    ],
)
def test_a_mistake_in_any_command_is_one_line(command, message):
    result = programs.run(*command.split())
    assert (result.returncode, result.stderr) == (2, f"error: {message}\n")


MIGRATION = (ROOT / "docs" / "migrating.md").read_text().splitlines()
MIGRATION_ROWS = [line.strip("| ").split("|") for line in MIGRATION if line.startswith("|")]


def test_the_migration_guide_names_fields_that_exist():
    values = {"auto", "cosine", "linear", "wsd", "adamw", "muon", "wandb", "tensorboard", "trackio"}
    names = {name for *_, ours in MIGRATION_ROWS for name in re.findall(r"`([a-z]\w+)`", ours)} - values
    assert len(names) > 30
    assert names - FIELDS.keys() <= {"bf16", "fp16", "tf32", "fp32"}


def test_a_name_of_another_program_is_not_taken_for_a_field_of_another_meaning():
    for *cells, ours in MIGRATION_ROWS:
        for name in {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)} - FIELDS.keys():
            first_word = re.search(r"\w+", ours)[0]
            assert hint(name, FIELDS).removeprefix("; here: ").removeprefix("; ").startswith(first_word), name


def test_help_has_every_field_with_the_recipes_value(capsys):
    with pytest.raises(SystemExit) as end:
        parse_config(["--config=gpt2", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert all(f" --{name} " in text for name in FIELDS)
    assert "transformer blocks (default: 12)" in text
    assert "peak learning rate of AdamW (default: 0.0006)" in text
    assert "(default: )" not in text


def test_help_describes_the_command_that_was_started():
    text = ok(programs.run("-m", "recipe.data.prepare", "--help")).stdout
    assert text.startswith("usage: python -m recipe.data.prepare [--config RECIPE]")
    assert "text files or a Hub data set ->" in text.partition("Model:")[0]


def test_a_command_line_is_read_under_the_debugger(monkeypatch):
    monkeypatch.delattr(sys.modules["__main__"], "__spec__")  # as `python -m pdb recipe/train.py` does
    assert parse_config(["--seed=2"]).run.seed == 2


def test_a_value_beyond_a_limit_is_refused():
    excess = {"min": -1, "above": 0, "max": 1, "below": 0}
    for name, field in FIELDS.items():
        for kind, limit in field.metadata["limits"].items():
            value = type(field.default)(limit + excess[kind])
            assert f"{name} is {value}; it must be " in refused(f"--{name}={value}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_steps: 1.5", "mine.yaml: max_steps is '1.5'; it must be INTEGER"),
        ("max_steps: 0", "mine.yaml: max_steps is 0; it must be at least 1"),
        ("skip_loss_z: 12", "mine.yaml: skip_loss_z is 12.0; it must be at least 0 and at most 11"),
        ("learning_rate: inf", "mine.yaml: learning_rate is inf; it must be a finite number"),
        ("micro_batch_size: automatic", "micro_batch_size is 'automatic'; it must be INTEGER|auto"),
        ("streaming: maybe", "streaming is 'maybe'; it must be true|false"),
        ("precision: fp8", "precision is 'fp8'; it must be auto|fp32|tf32|bf16|fp16"),
        ("max_steps: [1, 2]", "max_steps takes one value, found a list"),
        ("- data", "mine.yaml: expected lines such as `n_layer: 2`, with a space after the colon"),
        ("n_layer:2", "mine.yaml: expected lines such as `n_layer: 2`, with a space after the colon"),
        ("seed: 1\nn_layer:2", "line 2; expected lines such as `n_layer: 2`, with a space after the colon"),
        ("dataset_name: [", "not valid YAML"),
        ("max_steps: 9\nseed: 1\nmax_steps: 8", "mine.yaml, line 3: max_steps is given twice; remove one of them"),
        ("? [a, b]\n: 1", "not valid YAML, line 1"),
        ("n_layer: 2", "dataset_name is empty"),
        ("extends: gpt2", "mine.yaml: extends: a recipe cannot extend another; copy it, or give flags beside --config"),
        ("config: gpt2", "mine.yaml: config: a recipe cannot extend another; copy it, or give flags beside --config"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(recipe, text, message):
    assert message in refused(recipe(text))


@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "../gpt2", "acme/gpt 2"])
def test_a_repository_that_is_not_org_and_name_is_refused(name):
    assert f"hub_model_id '{name}' must be ORG/NAME" in refused(f"--hub_model_id={name}")


def test_batch_arithmetic():
    config = parse_config(["--config=gpt2", "--micro_batch_size", "32"])
    assert batch_arithmetic(config, 8) == BatchPlan(sequences=512, world_size=8, micro=32, accumulation=2)
    assert batch_arithmetic(config, 1).accumulation == 16
    assert batch_arithmetic(config, 64).micro == 8  # a device's whole share
    one_sequence = parse_config(["--config=gpt2", "--total_batch_tokens=1024"])
    assert batch_arithmetic(one_sequence, 1) == BatchPlan(sequences=1, world_size=1, micro=1, accumulation=1)
    with pytest.raises(
        UserError, match=r"3 processes x micro_batch_size 32 .* = 98304; nearest valid: 491520, 589824$"
    ):
        batch_arithmetic(config, 3)
    with pytest.raises(UserError, match=r"1,024 processes x sequence_length 1024 = 1048576; nearest valid: 1048576$"):
        batch_arithmetic(config, 1024)  # more devices than sequences
    with pytest.raises(UserError, match=r"24 processes x sequence_length 1024 = 24576; nearest valid: 516096, 540672$"):
        batch_arithmetic(config, 24)  # 21 sequences for each, fewer than micro_batch_size


def test_adam_and_clipping_are_those_of_gpt3_by_default():
    opt = parse_config(["--config=gpt2"]).optimizer
    assert (opt.adam_beta1, opt.adam_beta2, opt.max_grad_norm) == (0.9, 0.95, 1.0)


def test_parameters_and_flops_of_gpt2s_sizes():
    names = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
    counts = [parameter_count(parse_config([f"--config={name}"]).model) for name in names]
    assert counts == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    config = parse_config(["--config=gpt2"])
    assert flops_per_token(config.model, 1024) == pytest.approx(855.2e6, rel=1e-4)
    small = dataclasses.replace(config.model, n_layer=2, n_embd=48, n_head=3)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=48, n_head=3))
    assert parameter_count(small) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_parses_and_opens_with_its_own_command(path):
    config = parse_config(["--config", str(path)])
    assert batch_arithmetic(config, 1).accumulation >= 1
    if path.stem != "shakespeare":
        assert batch_arithmetic(config, 8).accumulation >= 1
    command = path.read_text().splitlines()[0]
    assert command.startswith("# accelerate launch --config_file accelerate_configs/")
    assert command.endswith(f"recipe/train.py --config recipe/configs/{path.name}")
    assert config.data.streaming == (path.stem != "shakespeare")
    assert config.data.disk_budget_gb <= 20 or "kaggle" not in path.stem  # 40 GB of disk, checkpoints included
    assert config.run.hub_license == ("cc-by-nc-4.0" if path.stem == "climbmix" else "mit")  # what the card states


def test_the_gpt2_recipes_score_hellaswag_and_sample_as_llm_c_does():
    """HellaSwag every 250 steps and at the end; a sample at the end, for GPT-2 124M every 250 steps from step 0 on."""
    for size in ("", "-fineweb", "-medium", "-large", "-xl"):
        config = parse_config([f"--config=gpt2{size}"])
        tasks = [due_at(step, config) for step in (0, 249, 250, config.optimizer.max_steps)]
        assert [due.hellaswag for due in tasks] == [False, False, True, True]
        assert [due.sample for due in tasks] == [not size, False, not size, True]


@pytest.mark.parametrize("task", ["eval", "save", "sample", "hellaswag"])
def test_0_is_never_and_end_is_at_the_end_only(recipe, task):
    """A run needs its last validation and its last checkpoint, so 0 is refused there."""

    def steps(value):
        config_flag = recipe(f"dataset_name: x\nlr_scheduler_type: cosine\n{task}_steps: {value}")
        config = parse_config([config_flag, "--max_steps=9"])
        return [step for step in range(10) if getattr(due_at(step, config), task)]

    assert steps("end") == [9]
    assert steps(4)[-3:] == [4, 8, 9]
    if task in ("eval", "save"):
        assert refused(f"--{task}_steps=0") == f"{task}_steps is 0; it must be at least 1 or end"
    else:
        assert steps(0) == []


def test_the_clock_is_read_before_each_evaluation():
    """A device computes behind the loop: without waiting for it, its steps would count as time of the evaluation."""
    fields = {"logging_steps": 100, "eval_steps": 60, "hellaswag_steps": 70, "sample_steps": 80}
    config = parse_config(["--max_steps=101", *flags(**fields)])
    assert [step for step in range(102) if due_at(step, config).log] == [0, 1, 60, 70, 80, 100, 101]


def test_what_an_earlier_process_measured_after_a_step_is_not_due_again():
    tasks = ("eval", "hellaswag", "sample")
    config = parse_config(["--max_steps=700", *(f"--{task}_steps=end" for task in tasks)])
    for task, column in zip(tasks, ("val_loss", "hellaswag_llmc_acc", "sample"), strict=True):
        due = due_at(700, config).without({"loss": 3.0, column: 0.3})
        assert [due.eval, due.hellaswag, due.sample] == [other != task for other in tasks]
        assert due.save


def test_a_milestone_is_saved_whatever_save_steps_is():
    config = parse_config(["--max_steps=700", "--save_steps=175", "--milestone_steps=200"])
    saved_steps = [step for step in range(701) if due_at(step, config).save and step != config.optimizer.decay_start]
    assert saved_steps == [175, 200, 350, 400, 525, 600, 700]


def test_no_setting_is_in_two_kinds_of_file():
    """A recipe has hyperparameters and precision, Accelerate's file the processes, DeepSpeed's the sharding."""
    recipes = {key for path in RECIPES for key in yaml.safe_load(path.read_text())}
    hardware = set()
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        text = path.read_text()
        assert re.match(rf"# (\w+=\S+ )*accelerate launch --config_file accelerate_configs/{path.name} ", text)
        assert yaml.safe_load(text).get("mixed_precision", "no") == "no"  # Accelerate needs it, the recipe decides
        hardware |= yaml.safe_load(text).keys()
    assert len(recipes) > 10
    assert not (recipes | FIELDS.keys()) & hardware
    for path in (ROOT / "ds_configs").glob("*.json"):
        assert {key for key, value in json.loads(path.read_text()).items() if value != "auto"} == {"zero_optimization"}
