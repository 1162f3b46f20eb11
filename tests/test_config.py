"""Configuration, batch arithmetic, what is due when, every shipped YAML, and the errors for mistakes."""

import dataclasses
import json
import re

import pytest
import yaml
from transformers import GPT2Config

from recipe.config import FIELDS, Batch, batch_arithmetic, due_at, parse_config
from recipe.errors import UserError
from recipe.estimate.memory import flops_per_token, parameter_count
from recipe.model.gpt2 import GPT2LMHeadModel
from tests.conftest import ROOT, flags

RECIPES = sorted((ROOT / "recipe" / "configs").glob("*.yaml"))
GPT2 = ROOT / "recipe" / "configs" / "gpt2.yaml"


@pytest.fixture
def recipe(tmp_path):
    def write(text: str):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def refused(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        parse_config(list(argv))
    return str(error.value)


def test_yaml_then_command_line(recipe):
    path = recipe("dataset_name: somewhere\nlearning_rate: 1e-3\ntorch_compile: true\nmax_steps: 100\nval_data:\n")
    config = parse_config(["--config", path, "--max_steps", "7", "--torch_compile", "false"])
    assert config.optimizer.learning_rate == 1e-3  # YAML 1.1 reads 1e-3 as a string
    assert config.optimizer.max_steps == 7
    assert config.run.torch_compile is False
    assert config.data.val_data == ""
    assert config.run.run_name == "mine"
    assert parse_config(["--config", "gpt2"]).run.run_name == "gpt2"  # a shipped one, by its name
    assert config.run.output_dir == "runs/mine"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 3


def test_a_whole_number_may_be_written_as_a_power_of_ten(recipe):
    path = recipe("dataset_name: x\nmax_steps: 1e3\n")
    assert parse_config(["--config", path]).optimizer.max_steps == 1000
    assert parse_config(["--config", path, "--eval_steps=2.5e2"]).run.eval_steps == 250
    for word in ("1.5", "1e400", "nan", "1e-3"):
        assert f"invalid int value: '{word}'" in refused("--config", path, f"--max_steps={word}")


def test_unknown_keys_are_refused_with_the_nearest_name(recipe):
    message = refused("--config", recipe("dataset_name: x\nlearning_rat: 1"))
    assert "mine.yaml: unknown key 'learning_rat'; did you mean 'learning_rate'?" in message
    assert "unknown '--warmup_step'; did you mean 'warmup_steps'?" in refused("--warmup_step", "3")
    assert "unknown '--warmup_step'; did you mean 'warmup_steps'?" in refused("--warmup_step=3")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_iters", "max_steps"),
        ("min_lr", "min_lr_fraction"),
        ("eval_iters", "eval_tokens"),
        ("eval_only", "eval/perplexity.py"),
        ("device", "ACCELERATE_USE_CPU"),
        ("lr_decay_iters", "max_steps"),
        ("bias", "as in GPT-2"),
        ("wandb_project", "WANDB_PROJECT"),
        ("num_train_epochs", "max_steps"),
        ("bf16", "precision"),
        ("eval_strategy", "eval_steps"),
        ("model_name_or_path", "init_from"),
        ("resume_from_checkpoint", "resumes by itself"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("val_loss_every", "eval_steps"),
    ],
)
def test_names_of_other_programs_are_refused_with_what_there_is_here(theirs, ours, recipe):
    given = refused(f"--{theirs}=1")
    assert re.search(rf"^unknown '--{theirs}'; here: .*{ours}", given)
    assert given.partition("; ")[2] in refused("--config", recipe(f"dataset_name: x\n{theirs}: 1"))


def test_the_table_of_other_programs_names_covers_nanogpts_and_names_fields_that_exist():
    page = (ROOT / "docs" / "migrating.md").read_text()
    nanogpt = re.findall(
        r"\w+",
        """out_dir eval_interval log_interval eval_iters eval_only always_save_checkpoint init_from wandb_log
        wandb_project wandb_run_name dataset gradient_accumulation_steps batch_size block_size n_layer n_head n_embd
        dropout bias learning_rate max_iters weight_decay beta1 beta2 grad_clip decay_lr warmup_iters lr_decay_iters
        min_lr backend device dtype compile""",
    )  # train.py, commit 3adf61e
    assert [name for name in nanogpt if f"`{name}`" not in page] == []
    here = [line.strip("| ").split("|")[-1] for line in page.splitlines() if line.startswith("|")]
    values = {"auto", "cosine", "linear", "wsd", "adamw", "muon", "wandb", "tensorboard", "trackio"}
    named = {name for cell in here for name in re.findall(r"`([a-z]\w+)`", cell)} - values
    assert named - FIELDS.keys() <= {"bf16", "fp16", "tf32", "fp32"}
    assert refused("-d", "524288").startswith("unknown '-d'; here: total_batch_tokens")


def test_help_shows_the_recipes_values_in_groups(capsys):
    def shown(*argv: str) -> str:
        with pytest.raises(SystemExit) as end:
            parse_config([*argv, "--help"])
        assert end.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    default, gpt2 = shown(), shown("--config=gpt2")
    groups = [default.index(f" {name}: --") for name in ("Model", "Data", "Optimizer", "Run")]
    assert groups == sorted(groups)
    assert "transformer blocks (default: 4)" in default
    assert "peak learning rate of AdamW (default: 0.005)" in default
    assert "transformer blocks (default: 12)" in gpt2
    assert "(default: auto)" in gpt2
    assert "(default: )" not in default + gpt2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset_name: x\nmax_steps: many", "invalid int value: 'many'"),
        ("dataset_name: x\nmax_steps: [1, 2]", "max_steps takes one value, found a list"),
        ("- data", "expected `key: value` lines, found a list"),
        ("dataset_name: [", "not valid YAML"),
        ("dataset_name: x\nprecision: fp8", "invalid choice: 'fp8'"),
        ("max_steps: 3", "dataset_name is empty"),
    ],
)
def test_a_recipe_that_cannot_be_read(recipe, text, message):
    assert message in refused("--config", recipe(text))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("learning_rate", 0, "learning_rate is 0.0; it must be above 0"),
        ("total_batch_tokens", 524289, "nearest valid: 523264, 524288, 525312"),
        ("min_lr_fraction", 1.5, "min_lr_fraction is 1.5"),
        ("adam_beta2", 1, "adam_beta2 is 1.0"),
        ("max_steps", 0, "max_steps is 0"),
        ("eval_steps", -1, "eval_steps is -1"),
        *(
            ("hub_model_id", name, f"hub_model_id '{name}' must be ORG/NAME")
            for name in ("gpt2", "a/b/c", "/acme/gpt2", "acme/", "../gpt2", "acme/..", "acme/gpt 2", "acmé/gpt2")
        ),
        ("config", "nowhere.yaml", "--config nowhere.yaml: no such file"),
    ],
)
def test_bad_values_are_refused_with_the_way_out(field, value, message):
    assert message in refused("--config", str(GPT2), *flags(**{field: value}))


def test_batch_arithmetic():
    config = parse_config(["--config", str(GPT2), "--micro_batch_size", "32"])
    assert batch_arithmetic(config, 8) == Batch(sequences=512, world=8, micro=32, accumulation=2)
    assert batch_arithmetic(config, 1).accumulation == 16
    assert batch_arithmetic(config, 64) == Batch(sequences=512, world=64, micro=8, accumulation=1)  # its whole share
    with pytest.raises(UserError, match=r"3 processes x micro_batch_size 32 .* = 98304; nearest valid: 393216, 491520"):
        batch_arithmetic(config, 3)
    for world, micro in [(1, 8), (2, 4), (4, 1)]:
        batch = Batch(32, world, micro, 32 // (world * micro))
        taken = [i for m in range(batch.accumulation) for r in range(world) for i in range(*batch.slice(m, r))]
        assert taken == list(range(32))


def test_parameters_and_flops_of_gpt2s_sizes():
    found = [
        parameter_count(parse_config(["--config", f"gpt2{size}"]).model) for size in ("", "-medium", "-large", "-xl")
    ]
    assert found == [124_439_808, 354_823_168, 774_030_080, 1_557_611_200]
    config = parse_config(["--config", str(GPT2)])
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


@pytest.mark.parametrize("size", ["", "-fineweb", "-medium", "-large", "-xl"])
def test_a_gpt2_recipe_scores_hellaswag_and_samples_as_llm_c_does(size):
    """HellaSwag every 250 steps and at the end, a sample at the end; a sample of the untrained model too."""
    config = parse_config([f"--config=gpt2{size}"])
    due = {step: due_at(step, config) for step in (0, 249, 250, config.optimizer.max_steps)}
    assert [at.hellaswag for at in due.values()] == [False, False, True, True]
    assert [at.sample for at in due.values()] == [True, False, not size, True]


def test_no_name_stands_in_two_kinds_of_file():
    """A recipe owns hyperparameters and precision, Accelerate's file the processes: nothing may be said twice."""
    recipes = {key for path in RECIPES for key in yaml.safe_load(path.read_text())}
    hardware = set()
    for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")):
        text = path.read_text()
        assert re.match(rf"# (\w+=\S+ )*accelerate launch --config_file accelerate_configs/{path.name} ", text)
        assert yaml.safe_load(text).get("mixed_precision", "no") == "no"  # Accelerate asks for it, the recipe decides
        hardware |= yaml.safe_load(text).keys()
    assert len(recipes) > 10
    assert not (recipes | FIELDS.keys()) & hardware
    for path in (ROOT / "ds_configs").glob("*.json"):  # how to shard; what else it must name, the recipe decides
        assert {key for key, value in json.loads(path.read_text()).items() if value != "auto"} == {"zero_optimization"}


def test_streaming_needs_text(tmp_path):
    (tmp_path / "shards").mkdir()
    for name in (tmp_path / "shards", tmp_path / "*.bin"):
        assert "streaming needs text" in refused(f"--dataset_name={name}", "--streaming", "true")
