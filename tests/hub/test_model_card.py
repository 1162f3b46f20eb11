"""The model card is valid, and contains what was recorded: nothing else, and nothing private."""

import json
import math
import re
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard

from eval import perplexity
from eval.scores import hellaswag_scores, score, text_dataset
from recipe.config import UNDECIDED, parse_config
from recipe.data.tokenizer import GPT2
from recipe.hub.model_card import model_card
from tests import canary
from tests.conftest import ROOT, flags

# As a run records them.
HUB_DATA = {"train_text": "HuggingFaceFW/fineweb-edu", "dataset_config": "sample-10BT", "dataset_split": "train"}
HUB_DATA |= {"dataset_revision": "", "text_column": "text", "commit": "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"}
CONFIG = parse_config(["--config=gpt2"]).flat() | {"dataset_name": "~/shards", "config": "~/mine/gpt2.yaml"}
PART = {"from_step": 0, "device": "NVIDIA A100-SXM4-80GB", "engine": "NVIDIA A100-SXM4-80GB, DDP over 8 processes"}
PART |= {"processes": 8, "nodes": 2, "precision": "bf16", "compiled": True, "data": HUB_DATA, "config": CONFIG}
PART |= {"python": "3.11.7", "packages": {"torch": "2.13.0"}, "recipe": "0.1.0"}
PART |= {"commit": "0" * 40 + "+", "code": "0" * 64}
STATE = {  # the other keys come from a tiny run
    "step": 100,
    "tokens": 52_428_800,
    "about": [PART],
    "config": CONFIG,
    "tokenizer": {"name": GPT2, "digest": GPT2, "end_of_text": 50256, "end_of_text_token": "<|endoftext|>"},
    "data": {"shards": [["train_000000.bin", 10_000_000, "a" * 64]], "complete": False},
}
KEYS = ("language", "license", "library_name", "pipeline_tag", "datasets")
LINES = [
    {"step": 80, "loss": 4.1, "tokens_per_second": 1000.0},  # while it compiled
    {"step": 90, "loss": 4.0, "val_loss": 3.9, "tokens_per_second": 800_000.0, "mfu": 0.4},
    {"step": 100, "val_loss": 3.4, "tokens_per_second": 900_000.0, "mfu": 0.5, "hellaswag_llmc_acc": 0.26}
    | {"skipped_steps": 2},
    {"step": 110, "loss": 3.1, "val_loss": 3.1, "tokens_per_second": 1.0, "mfu": 0.1},
]
HELLASWAG = {"llmc_acc": 0.2612, "llmc_acc_norm": 0.27, "lmeval_acc": 0.2633, "lmeval_acc_norm": 0.28}
ARC = {"dataset_type": "arc_easy", "dataset_name": "arc_easy"}
SHARDS = {"data": "~/of_news/", "sequence_length": 1024, "limit_windows": None, "windows": 4, "of_windows": 4}
SHARDS |= {"files": {"val_000000.bin": "5f3e"}}
SHARDS |= {"tokens": 10_485_760, "loss": 3.41, "perplexity": 30.27, "bits_per_byte": 1.09, "dtype": "bfloat16"}
RESULTS = {
    "hellaswag": {"scores": hellaswag_scores(HELLASWAG, 10_042, "in float32")},
    "perplexity": SHARDS | {"scores": perplexity.scores_of(SHARDS)},
    "lm_eval": {"scores": [score(ARC, ("accuracy", "acc"), 0.4, "lm-evaluation-harness 0.4.13", ci95=0.0196)]},
}


@pytest.fixture
def card(tmp_path, whole_run):
    """state, lines of metrics.jsonl, results.json -> the card of such a checkpoint."""
    tiny = json.loads((whole_run[0] / "step_00000020" / "trainer_state.json").read_text())

    def make(state=STATE, lines=LINES, results=None, kind="gpt2", **options) -> ModelCard:
        checkpoint = tmp_path / "run" / "step_00000100"
        shutil.rmtree(checkpoint.parent, ignore_errors=True)
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(json.dumps(tiny | state))
        (checkpoint / "config.json").write_text(json.dumps({"model_type": kind}))
        (checkpoint.parent / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if results is not None:
            (checkpoint / "results.json").write_text(json.dumps(results))
        return ModelCard(model_card(checkpoint, **options))

    return make


def figures(card: ModelCard) -> dict[tuple[str, str], float]:
    """The metrics in model-index."""
    return {(e.dataset_name, e.metric_name): e.metric_value for e in card.data.eval_results or []}


def test_the_card_has_every_result_and_how_it_was_measured(card):
    card = card(results=RESULTS, repo="acme/gpt2")
    assert card.data.to_dict().keys() - {"model-index"} == {*KEYS, "metrics", "tags"}
    values = ["en", "mit", "transformers", "text-generation", ["HuggingFaceFW/fineweb-edu"]]
    assert [card.data.get(key) for key in KEYS] == values
    assert figures(card) == {
        ("HuggingFaceFW/fineweb-edu, held out", "validation loss, nats per token"): 3.4,
        ("HellaSwag", "acc, llm.c-style, during training"): 0.26,
        ("HellaSwag", "acc, llm.c-style"): 0.2612,
        ("HellaSwag", "acc_norm, llm.c-style"): 0.27,
        ("HellaSwag", "acc, lm-eval-style"): 0.2633,
        ("HellaSwag", "acc_norm, lm-eval-style"): 0.28,
        ("of_news", "loss, nats per token"): 3.41,  # without the directory's path
        ("of_news", "perplexity per token"): 30.27,
        ("of_news", "bits per byte"): 1.09,
        ("arc_easy", "acc"): 0.4,
    }
    assert all(isinstance(e, EvalResult) and e.task_type == "text-generation" for e in card.data.eval_results)
    val_loss = next(e for e in card.data.eval_results if e.metric_name == "validation loss, nats per token")
    assert (val_loss.dataset_config, val_loss.dataset_revision) == ("sample-10BT", HUB_DATA["commit"])
    for line in (
        "| HellaSwag, validation | acc_norm, llm.c-style | 0.2700 ± 0.0087 | 10,042 rows, in float32 |",
        "| acc, llm.c-style, during training | 0.2600 ± 0.0086 | 10,042 rows, by the run, in its precision |",
        "| of_news | loss, nats per token | 3.4100 | 10,485,760 tokens in windows of 1,024, in bfloat16, files f91b64e",
        "124 M parameters (12 layers, 12 heads, 768 wide, 1,024 positions), trained from scratch on 52,428,800",
        "weights after step 100. It is a checkpoint of a run of 19,073 steps.",
        "| shards | 1 with 10,000,000 tokens so far |",
        "| hardware | NVIDIA A100-SXM4-80GB, DDP over 8 processes, on 2 nodes |",
        "| precision | bf16, compiled; weights and optimizer state fp32 |",
        "| tokens per second, median of the log | 800,000 |",
        "| MFU, median of the log | 45.0% |",
        "| steps skipped | 2 |",
        f"| commit | {'0' * 40}, with local changes |",
        'pipeline("text-generation", model="acme/gpt2")',
    ):
        assert line in card.text, line
    assert "epochs" not in card.text  # the stream has not ended


def test_the_card_of_the_largest_model_counts_billions_as_such(card):
    xl = parse_config(["--config=gpt2-xl"]).flat()
    text = card(state=STATE | {"config": xl, "about": [PART | {"config": xl}]}).text
    assert "A GPT-2 language model with 1.56 B parameters (48 layers, 25 heads, 1600 wide" in text


MUON = {"optim": "muon", "muon_learning_rate": 0.03, "muon_weight_decay": 0.2}
WSD = {"lr_scheduler_type": "wsd", "decay_fraction": 0.4}


@pytest.mark.parametrize(
    "overrides", [{"optim": "adamw", "skip_loss_z": 5.0}, MUON | {"lr_scheduler_type": "linear"}, WSD]
)
def test_a_run_can_be_repeated_from_the_settings_in_its_card(card, tmp_path, overrides):
    (tmp_path / "mine.yaml").write_text("dataset_name: x\n")
    start = [f"--config={tmp_path / 'mine.yaml'}"]
    values = {"n_head": 6, "adam_beta2": 0.99, "warmup_steps": 7, "seed": 3, "sequence_length": 512} | overrides
    config = parse_config(start + flags(**values))
    rows = dict(re.findall(r"^\| (\w+) \| (.*) \|$", card(STATE | {"config": config.flat()}).text, re.MULTILINE))
    fields = {*vars(config.model), *vars(config.optimizer), "sequence_length", "seed"}
    assert parse_config(start + flags(**{name: value for name, value in rows.items() if name in fields})) == config
    shown, expected = ([name for name in names if name.startswith(("muon_", "decay_"))] for names in (rows, overrides))
    assert sorted(shown) == sorted(expected)


def test_a_card_has_no_result_of_another_step_and_no_nan(card):
    empty_card = card(STATE | {"step": 95})
    assert empty_card.data.eval_results is None
    assert "No results were recorded." in empty_card.text
    scores = [score(ARC, ("accuracy", "acc"), value, "by hand") for value in (math.nan, 0.5)]
    results = {"lm_eval": {"scores": scores}}
    assert [e.metric_value for e in card(lines=[], results=results).data.eval_results] == [0.5]


def test_partial_evaluations_are_not_in_model_index(card):
    """They are in the table, with their size, but on no leaderboard."""
    card = card(
        STATE | {"config": CONFIG | {"hellaswag_limit": 72}},
        [{"step": 100, "hellaswag_llmc_acc": 0.26}],
        {
            "hellaswag": {"scores": hellaswag_scores(HELLASWAG, 20, "in float32")},
            "perplexity": {"scores": perplexity.scores_of(SHARDS | {"limit_windows": 2, "windows": 2})},
        },
    )
    assert card.data.eval_results is None
    for words in ("| 72 of 10,042 rows", "| 20 of 10,042 rows", "the first 2 of 4 windows"):
        assert words in card.text, words


FINEWEB = ["HuggingFaceFW/fineweb-edu"]
AFTER = PART | {"from_step": 40, "device": "EPYC", "engine": "CPU", "nodes": 1}


@pytest.mark.parametrize(
    ("parts", "datasets", "base", "text"),
    [
        ([PART | {"data": {"train_text": "a/b", "commit": "abc"}}], ["a/b"], None, "| commit of the data set | abc |"),
        ([PART | {"data": {"files": [{"name": "a.txt"}] * 2, "of": 31}}], None, None, "a.txt and 30 more files"),
        ([PART | {"data": {"shards": "mine", "train_text": "a/b"}}], ["a/b"], None, "| text | a/b |"),
        ([PART | {"init_from": "acme/gpt2"}], FINEWEB, "acme/gpt2", "trained from acme/gpt2"),
        ([PART | {"init_from": ""}], FINEWEB, None, "trained from other weights"),  # of a path, which is private
        ([PART, AFTER], FINEWEB, None, "DDP over 8 processes, on 2 nodes; EPYC, CPU |"),
        ([PART, AFTER | {"commit": "1" * 40}], FINEWEB, None, f"| commit | {'1' * 40} |"),
        ([PART | {"data": {"files": [{"name": "caf\udce9.txt"}], "of": 1}}], None, None, "caf\ufffd.txt"),  # not UTF-8
    ],
)
def test_the_card_names_the_data_the_initial_weights_and_the_hardware(card, parts, datasets, base, text):
    card = card(STATE | {"about": parts})
    assert card.data.datasets == datasets
    assert card.data.base_model == base
    assert text in " ".join(card.content.encode().decode().split())


@pytest.mark.parametrize(("other", "language"), [("Skylion007/openwebtext", "en"), ("acme/french", None)])
def test_a_mixture_is_in_english_if_all_of_its_data_sets_are(card, other, language):
    """fineweb-edu and openwebtext are, by their pages on the Hub."""
    mixture = [HUB_DATA | {"name": "a", "share": 0.5}, HUB_DATA | {"name": "b", "share": 0.5, "train_text": other}]
    state = STATE | {"about": [PART | {"data": {"mixture": mixture}}], "data": {"mixture": 2 * [STATE["data"]]}}
    data = card(state | {"config": CONFIG | {"dataset_name": [{"name": name, "weight": 0.5} for name in "ab"]}}).data
    assert (data.language, data.datasets) == (language, [*FINEWEB, other])


def test_hyperparameters_that_a_resume_changed_have_their_steps(card):
    later = PART | {"from_step": 40, "config": CONFIG | {"learning_rate": 5e-3, "max_steps": 999}}
    text = card(STATE | {"about": [PART, later], "config": later["config"]}).text
    assert f"| learning_rate | {CONFIG['learning_rate']} from step 0; 0.005 from step 40 |" in text
    assert "| max_steps | 999 |" in text


def test_an_epoch_is_that_of_the_trainers_windows(card):
    """Not of the tokens: from shards of 31 tokens it takes one window of 16."""
    config = CONFIG | {"sequence_length": 16}
    data = {"shards": [["train_000000.bin", 31, "a" * 64]] * 8, "complete": True}
    assert "| epochs | 8 |" in card(STATE | {"config": config, "data": data, "tokens": 1024}).text


@pytest.mark.parametrize(
    ("config", "data"),
    [
        ({"dataset_name": "~/shards/"}, ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb-edu, held out")),
        ({"dataset_name": "~/x/train*.bin", "val_data": "~/val-1a2b3c4d/train_*.bin"}, ("text", "val")),
        ({"dataset_name": "~/shards", "val_data": "~/of_news/"}, ("text", "of_news")),
    ],
)
def test_the_validation_loss_names_its_data_set(card, config, data):
    (entry,) = card(STATE | {"config": CONFIG | config}, [{"step": 100, "val_loss": 3.4}]).data.eval_results
    assert (entry.dataset_type, entry.dataset_name) == data


def test_recorded_names_are_escaped(card):
    """Names of text files and data sets, train_text, and the tokenizer's end-of-text token are no markup in a card."""
    text = "acme/x|](http://evil.example)\n---\nlicense: other\n---\n<img src=x onerror=alert(1)>`b`"
    escaped = "acme/x\\|\\](http://evil.example) --- license: other --- \\<img src=x onerror=alert(1)\\>\\`b\\`"
    row = {"metric": text, "ours": 0.5, "theirs": 0.25, "difference": 0.25, "ci95": None}
    results = {"lm_eval": {"scores": [score(text_dataset(text), ("accuracy", "acc"), 0.5, "by hand")]}}
    results["compare"] = {"other": text, "rows": [row], "prompt": text, "samples": [text, text]}
    state = STATE | {"tokenizer": STATE["tokenizer"] | {"end_of_text_token": text}}
    files = {"files": [{"name": text, "sha256": "f00"}], "of": 1}
    for source in (HUB_DATA | {"train_text": text}, {"train_text": text, "shards": "x"}, files):
        config = CONFIG | {"run_name": text}
        made = card(state | {"config": config, "about": [PART | {"data": source}]}, results=results)
        assert "\nlicense: other" not in made.content
        assert made.data.datasets is None
        preceded = "" if "shards" in source else " preceded each document in training; it"  # of others' shards unknown
        assert f"Token 50256, {escaped},{preceded} ends generation. " in made.text
        assert f"| {escaped} | acc | 0.5000 | by hand |" in made.text
        assert f"\n# {escaped}\n" in made.text
        assert f"\n## Compared with {escaped}\n" in made.text
        assert f"| metric | this model | {escaped} | difference" in made.text
        assert f"| {escaped} | 0.5000 | 0.2500 | +0.2500 (too little text for an interval) |" in made.text
        assert f"| a sample | {2 * f'{escaped} ... {escaped} | '}|" in made.text
        assert made.text.count("img src") == made.text.count("\\<img src") > 0
        assert text in {entry.dataset_name for entry in made.data.eval_results}  # in YAML it is a string


@pytest.mark.parametrize(
    ("changes", "is_named"),
    [
        ({}, True),
        ({"passed": False}, False),
        ({"device": "NVIDIA A100 80GB PCIe"}, False),
        ({"engine": "NVIDIA A100-SXM4-80GB, FSDP over 8 processes"}, False),
    ],
)
def test_a_passed_preflight_of_the_same_devices_is_named(card, tmp_path, changes, is_named):
    report = {"passed": True, "date": "2026-11-24", "versions": {"torch": "2.13.0", "accelerate": "1.15.0"}}
    report |= {name: PART[name] for name in ("device", "engine", "processes")} | changes
    (tmp_path / "preflight.json").write_text(json.dumps(report))
    row = "| preflight | passed on 8 x NVIDIA A100-SXM4-80GB, 2026-11-24, torch 2.13.0, accelerate 1.15.0 |"
    assert (row in card().text) is is_named


def test_the_card_of_a_run_by_the_clock_knows_no_steps_before_the_decay(card):
    text = card(STATE | {"config": CONFIG | {"max_steps": UNDECIDED, "train_hours": 2.0}}).text
    assert "It is a checkpoint of a run of 2 hours." in text
    assert "| max_steps |" not in text


def test_a_checkpoint_that_lacks_a_newer_field_has_a_card(card):
    config = {name: value for name, value in CONFIG.items() if name != "hub_license"}
    assert card(STATE | {"config": config}).data.license == "mit"


def test_the_card_of_a_changed_model_does_not_call_it_a_gpt2_that_transformers_loads(card):
    changed = card(kind="gpt2-rope")
    assert "A gpt2-rope language model (12 layers" in changed.text
    assert "transformers has no model of the type gpt2-rope" in changed.text
    assert "from_pretrained" not in changed.text
    assert (changed.data.library_name, changed.data.tags[0]) == (None, "gpt2-rope")
    assert "from_pretrained" in card().text


def test_the_card_of_a_run(whole_run):
    run, lines, _ = whole_run
    card = ModelCard(model_card(run / "step_00000020"))
    assert figures(card) == {("text.txt, held out", "validation loss, nats per token"): round(lines[20]["val_loss"], 6)}
    older_card = ModelCard(model_card(run / "step_00000010"))
    assert figures(older_card).popitem()[1] == round(lines[10]["val_loss"], 6)
    assert f"| torch | {version('torch')} |" in card.text  # torch.__version__ may have +cu130 behind it
    assert "| precision | fp32;" in card.text
    assert "| epochs | 0.0386 |" in card.text  # 1,280 of 33,160 tokens
    assert "of a run of" not in card.text  # it is the last step
    assert not [path for path in (run.parent, ROOT, Path.home()) if len(str(path)) > 3 and str(path) in card.content]


def test_no_secret_reaches_a_card(card, monkeypatch):
    for name, value in canary.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/ada")
    config = CONFIG | {"train_text": canary.URL, "dataset_name": "/home/ada/x", "run_name": canary.HUB_TOKEN}
    config |= {"config": f"/home/ada/{canary.ENVIRONMENT['MY_PASSWORD']}.yaml"}
    data = HUB_DATA | {"name": canary.HUB_TOKEN, "split": canary.ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]}
    method = f"by {canary.WANDB_KEY} in /home/ada/shards"
    results = {"lm_eval": {"scores": [score(text_dataset(canary.HUB_TOKEN), ("accuracy", "acc"), 0.5, method)]}}
    part = PART | {"data": data, "engine": "/home/ada/gpu"}
    text = card(STATE | {"config": config, "about": [part]}, LINES, results).content
    assert not [secret for secret in (*canary.EVERYWHERE, "/home/ada") if secret in text]
