"""The model card: valid, true to what was recorded, and nothing in it that was not or that is private."""

import getpass
import hashlib
import json
import math
import platform
import shutil
import socket
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from huggingface_hub import EvalResult, ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eval import harness, wikitext
from recipe.checkpoint import provenance as about
from recipe.checkpoint.format import checkpoints
from recipe.config import parse_config
from recipe.data.catalog import LICENSES
from recipe.errors import UserError
from recipe.hub import export, package
from recipe.hub.model_card import card_of, model_card
from recipe.monitor.metrics import read_metrics
from recipe.redaction import redacted
from tests import canary
from tests.conftest import ROOT, SHAKESPEARE
from tests.hub.card_spec import problems

HUB_DATA = {
    "train_text": "HuggingFaceFW/fineweb-edu",
    "dataset_config": "sample-10BT",
    "dataset_split": "train",
    "dataset_revision": None,
    "text_column": "text",
    "commit": "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9",
}
PART = {
    "from_step": 0,
    "device": "NVIDIA A100-SXM4-80GB",
    "engine": "NVIDIA A100-SXM4-80GB, DDP over 8 processes",
    "processes": 8,
    "machines": 2,
    "precision": "bf16",
    "compiled": True,
    "python": "3.11.7",
    "packages": {"torch": "2.13.0"},
    "recipe": "0.1.0",
    "commit": "0" * 40 + "+",
    "data": HUB_DATA,
}
STATE = {
    "step": 100,
    "tokens": 52_428_800,
    "seconds": 61.5,
    "engine": "x",
    "about": [PART],
    "config": {
        "n_layer": 12,
        "n_head": 12,
        "n_embd": 768,
        "n_positions": 1024,
        "init_from": "",
        "max_steps": 19073,
        "run_name": "gpt2",
        "learning_rate": 6e-4,
        "eval_tokens": 10_485_760,
        "hellaswag_limit": 0,
        "train_text": "HuggingFaceFW/fineweb-edu",
        "dataset_name": "~/shards",
        "config": "~/mine/gpt2.yaml",
        "output_dir": "~/runs/gpt2",
    },
    "data": {"shards": [["train_000000.bin", 10_000_000, "a" * 64]], "complete": False},
}
# As lm_eval.simple_evaluate returns them.
HARNESS = {
    "results": {"arc_easy": {"alias": "arc_easy", "sample_len": 2376, "acc,none": 0.4, "acc_stderr,none": 0.01}},
    "versions": {"arc_easy": 1.0},
}
LINES = [
    {"step": 90, "loss": 4.0, "val_loss": 3.9, "tokens_per_second": 800_000.0, "mfu": 0.4},
    {
        "step": 100,
        "loss": 3.5,
        "val_loss": 3.4,
        "tokens_per_second": 900_000.0,
        "mfu": 0.5,
        "hellaswag_A_acc": 0.26,
        "skipped_steps": 2,
    },
    {"step": 110, "loss": 3.1, "val_loss": 3.1, "tokens_per_second": 1.0, "mfu": 0.1},
]
RESULTS = {
    "hellaswag": {
        "model": "~/x",
        "device": "cpu",
        "dtype": "float32",
        "rows": 500,
        "A": {"acc": 0.2612, "acc_ci95": 0.0385, "acc_norm": 0.27, "acc_norm_ci95": 0.0389},
        "B": {"acc": 0.2633, "acc_ci95": 0.0386, "acc_norm": 0.28, "acc_norm_ci95": 0.0394},
    },
    "perplexity": {
        "loss": 3.41,
        "perplexity": 30.27,
        "bits_per_byte": 1.09,
        "windows": 10_240,
        "tokens": 10_485_760,
        "data": "~/shards",
        "files": {"val_000000.bin": "abc"},
        "sequence_length": 1024,
        "dtype": "bfloat16",
    },
    "wikitext2": {
        "perplexity": 60.5,
        "word_perplexity": 98.25,
        "bits_per_byte": 1.2,
        "stride": 512,
        "sequence_length": 1024,
        "tokens": 287_644,
        "sha256": wikitext.SHA256,
        "dtype": "float32",
        "data": "~/wiki.txt",
        "data_set": "Salesforce/wikitext",
    },
    "lambada": {
        "acc": 0.2,
        "acc_ci95": 0.011,
        "perplexity": 55.0,
        "rows": 5153,
        "dtype": "float32",
        "data": "~/rows.jsonl",
        "data_set": "EleutherAI/lambada_openai",
    },
    "lm_eval": {"tasks": harness.summary(HARNESS), "version": "0.4.13", "limit": None, "dtype": "float32"},
    "sample": {"prompt": "secret", "texts": ["a text"]},
}


class OneProcess:
    """What of an engine is recorded."""

    name, world, local_world, precision, no_compile = "GPU", 1, 1, "bf16", ""
    device = torch.device("meta")


def parsed(text: str) -> ModelCard:
    assert problems(text) == []
    return ModelCard(text)


def figures(card: ModelCard) -> dict[tuple[str, str], float]:
    return {(e.dataset_name, e.metric_name): e.metric_value for e in card.data.eval_results or []}


def test_all_that_was_measured_stands_in_the_card_with_its_way(tmp_path):
    (tmp_path / "README.md").write_text(model_card(STATE, LINES, RESULTS, repo="acme/gpt2"))
    card = ModelCard.load(tmp_path / "README.md")
    assert problems(card.content) == []
    assert card.content == (tmp_path / "README.md").read_text()  # nothing is lost on the way through ModelCardData
    assert {k: card.data.get(k) for k in ("language", "license", "library_name", "pipeline_tag", "datasets")} == {
        "language": "en",
        "license": "mit",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["HuggingFaceFW/fineweb-edu"],
    }
    held_out = "HuggingFaceFW/fineweb-edu, held out"
    assert figures(card) == {
        (held_out, "validation loss, nats a token"): 3.4,
        ("HellaSwag", "acc, way A, during training"): 0.26,
        ("HellaSwag", "acc, way A"): 0.2612,
        ("HellaSwag", "acc_norm, way A"): 0.27,
        ("HellaSwag", "acc, way B"): 0.2633,
        ("HellaSwag", "acc_norm, way B"): 0.28,
        (held_out, "loss, nats a token"): 3.41,
        (held_out, "perplexity, of a token"): 30.27,
        (held_out, "bits a byte"): 1.09,
        ("WikiText-2", "perplexity, of a token"): 60.5,  # and not of wiki.txt, which is the test split
        ("WikiText-2", "perplexity, of a word"): 98.25,
        ("WikiText-2", "bits a byte"): 1.2,
        ("LAMBADA", "acc"): 0.2,
        ("LAMBADA", "perplexity"): 55.0,
        ("arc_easy", "acc, lm-evaluation-harness"): 0.4,
    }
    assert all(isinstance(e, EvalResult) and e.task_type == "text-generation" for e in card.data.eval_results)
    ours = next(e for e in card.data.eval_results if e.metric_name == "validation loss, nats a token")
    assert (ours.dataset_config, ours.dataset_revision) == ("sample-10BT", HUB_DATA["commit"])
    for line in (
        "| HellaSwag, validation | acc_norm, way A | 0.2700 ± 0.0389 | way A, as llm.c and build-nanogpt score, the "
        "first 500 of 10,042 rows; in float32 |",
        "| acc, way A, during training | 0.2600 | way A, as llm.c and build-nanogpt score; by the run, in its",
        "way B, as lm-evaluation-harness (hellaswag v1) scores, the first 500 of 10,042 rows",
        "| WikiText-2, test | perplexity, of a word | 98.2500 | 1,024 at once, stride 512, 287,644 tokens; in float",
        "| arc_easy | acc, lm-evaluation-harness | 0.4000 ± 0.0196 | lm-evaluation-harness 0.4.13, 2,376 rows; in",
        "124 M parameters (12 layers, 12 heads, 768 wide, 1,024 positions), trained from scratch on 52,428,800",
        "the weights after step 100. It is a checkpoint of a run of 19,073 steps.",
        "| commit of the data set | 87f09149ef4734204d70ed1d046ddc9ca3f2b8f9 |",
        "| shards | 1 of 10,000,000 tokens, of those made so far |",
        "| hardware | NVIDIA A100-SXM4-80GB, DDP over 8 processes, on 2 machines |",
        "| precision | bf16, compiled; weights and moments in fp32 |",
        "| tokens a second, median of the log | 850,000 |",
        "| MFU, median of the log | 45.0% |",
        "| steps left out | 2 |",
        f"| commit | {'0' * 40}, with changes that it does not hold |",
        "| torch | 2.13.0 |",
        "| recipe | gpt2.yaml |",
        'pipeline("text-generation", model="acme/gpt2")',
    ):
        assert line in card.text, line
    assert "epochs" not in card.text  # of a stream that has not come to its end
    assert "~" not in card.content
    assert "secret" not in card.content


def test_what_was_not_measured_is_left_out():
    bare = parsed(model_card({"step": 7}, [], {}))
    assert bare.data.eval_results is None
    assert bare.data.get("language") is bare.data.get("datasets") is bare.data.get("base_model") is None
    assert "None was measured." in bare.text
    for word in ("nan", "None |", "validation", "hardware", "tokens a second", "MFU", "Shakespeare", "HellaSwag"):
        assert word not in bare.text, word
    # the evaluation of another step says nothing of these weights
    other = parsed(model_card(STATE | {"step": 95}, LINES, {}))
    assert other.data.eval_results is None
    broken = {"hellaswag": {"rows": 9, "A": {"acc": math.nan}}, "perplexity": None, "lambada": {"acc": "0.5"}}
    assert parsed(model_card(STATE | {"step": 95}, LINES, broken)).data.eval_results is None
    assert not {"limit", "rows", "alias"} & {
        e.metric_type
        for e in parsed(
            model_card(STATE, [], {"lm_eval": {"tasks": {"t": {"acc": 0.5, "version": 1, "sample_len": 5}}}})
        ).data.eval_results
    }


@pytest.mark.parametrize(
    ("changes", "datasets", "base", "text"),
    [
        (
            {"about": [PART | {"data": {"uri": "hf://datasets/kjj0/finewebedu10B-gpt2@v1/*.bin", "commit": "abc"}}]},
            ["kjj0/finewebedu10B-gpt2"],
            None,
            "| commit of the data set | abc |",
        ),
        (
            {"about": [PART | {"data": {"files": [{"name": "a|b.txt", "sha256": "f00"}], "of": 1}}]},
            None,
            None,
            "| SHA-256 of the text | f00 |",
        ),
        ({"about": [PART | {"data": {"files": [{"name": "a.txt"}], "of": 31}}]}, None, None, "a.txt and 30 more files"),
        (
            {"about": [PART | {"data": None}], "config": {"dataset_name": "texts/mine", "train_text": ""}},
            None,
            None,
            "tokens of mine:",
        ),
        (
            {"about": None, "config": {"train_text": "roneneldan/TinyStories", "dataset_name": "data/mine/"}},
            None,
            None,
            "tokens of mine:",
        ),  # of shards that were there the run does not know what they were made from
        ({"about": [PART | {"data": {"shards": "mine"}}]}, None, None, "tokens of mine:"),
        (
            {"about": [PART | {"init_from": "openai-community/gpt2"}]},
            ["HuggingFaceFW/fineweb-edu"],
            "openai-community/gpt2",
            "trained on from openai-community/gpt2",
        ),
        ({"about": [PART | {"init_from": ""}]}, ["HuggingFaceFW/fineweb-edu"], None, "trained on from other weights"),
        ({"about": None, "config": {"init_from": "mine/start"}}, None, None, "trained on from other weights"),
        (
            {"about": [PART, PART | {"from_step": 40, "device": "EPYC", "engine": "CPU"}]},
            ["HuggingFaceFW/fineweb-edu"],
            None,
            "| hardware from step 40 | EPYC, CPU, on 2",
        ),
    ],
)
def test_data_and_beginnings_are_named_by_what_they_are(changes, datasets, base, text):
    card = parsed(model_card(STATE | changes, LINES, {}))
    assert card.data.datasets == datasets
    assert card.data.base_model == base
    assert text in card.text


def test_the_card_of_a_run(whole_run, tmp_path):
    run, lines, _ = whole_run
    text = card_of(run / "step_00000020")
    card = parsed(text)
    assert figures(card) == {("text.txt, held out", "validation loss, nats a token"): round(lines[20]["val_loss"], 6)}
    assert figures(parsed(card_of(run / "step_00000010"))).popitem()[1] == round(lines[10]["val_loss"], 6)
    state = json.loads((run / "step_00000020" / "trainer_state.json").read_text())
    assert [part["from_step"] for part in state["about"]] == [0]
    assert f"| torch | {version('torch')} |" in card.text  # torch.__version__ may have +cu130 behind it
    assert "| precision | fp32;" in card.text
    assert "| epochs | 0.154 |" in card.text  # 5,120 of 33,160 tokens
    assert "of a run of" not in card.text  # it is the last step
    assert not [path for path in (run.parent, ROOT, Path.home()) if len(str(path)) > 3 and str(path) in text]
    assert read_metrics(run / "metrics.jsonl", tail=1000) == read_metrics(run / "metrics.jsonl")[-2:]


def test_neither_user_nor_machine_is_named(shards, monkeypatch):
    """Names that are no words of a card, which those of this machine may be."""
    for variable in ("USER", "LOGNAME", "LNAME", "USERNAME", "HOSTNAME"):
        monkeypatch.setenv(variable, "ada-of-the-tests")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-of-the-tests")
    monkeypatch.setattr(platform, "node", lambda: "host-of-the-tests")
    assert getpass.getuser() == "ada-of-the-tests"
    config = parse_config([f"--dataset_name={shards}", "--output_dir=/home/ada-of-the-tests/runs/x"])
    parts = about.about(config, OneProcess, 0, None)
    state = STATE | {"about": parts, "config": redacted(config.flat())}
    text = model_card(state, LINES, RESULTS)
    assert problems(text) == []
    assert not [name for name in ("ada-of-the-tests", "host-of-the-tests") if name in json.dumps(parts) + text]


def test_no_secret_reaches_a_card(monkeypatch):
    for name, value in canary.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/ada")
    config = STATE["config"] | {"train_text": canary.URL, "dataset_name": "/home/ada/x", "init_from": "/home/ada/w"}
    config |= {"run_name": canary.HUB_TOKEN, "config": f"/home/ada/{canary.ENVIRONMENT['MY_PASSWORD']}.yaml"}
    data = HUB_DATA | {"dataset_config": canary.HUB_TOKEN, "dataset_split": canary.ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]}
    results = {"perplexity": RESULTS["perplexity"] | {"files": {canary.HUB_TOKEN: "x"}, "data": "/home/ada/shards"}}
    results["lm_eval"] = {"tasks": {canary.WANDB_KEY: {"acc,none": 0.5}}, "version": canary.HUB_TOKEN}
    for part in (PART | {"data": data, "engine": "/home/ada/gpu"}, PART | {"data": None}):
        text = model_card(STATE | {"config": config, "about": [part]}, LINES, results)
        assert problems(text) == []
        assert not [s for s in (*canary.EVERYWHERE, "/home/ada") if s in text]


# What was measured on what


def test_a_part_of_a_task_or_a_text_is_not_shown_as_the_whole():
    few = HARNESS | {"results": {"arc_easy": HARNESS["results"]["arc_easy"] | {"sample_len": 100}}}
    results = {
        "lm_eval": RESULTS["lm_eval"] | {"tasks": harness.summary(few), "limit": 100},
        "wikitext2": RESULTS["wikitext2"] | {"limit_windows": 3},
        "lambada": RESULTS["lambada"] | {"rows": 20},
    }
    card = parsed(model_card(STATE, [], results))
    for line in (
        "| arc_easy | acc, lm-evaluation-harness | 0.4000 ± 0.0196 | lm-evaluation-harness 0.4.13, 100 rows, limit 100",
        "| WikiText-2, test | perplexity, of a token | 60.5000 | 1,024 at once, stride 512, the first 3 windows, 2",
        "| LAMBADA, test | acc | 0.2000 ± 0.0110 | the first 20 of 5,153 rows; in float32 |",
    ):
        assert line in card.text, line
    args = {e.dataset_name: e.metric_args for e in card.data.eval_results}
    assert args["arc_easy"] == {"rows": 100, "limit": 100}
    assert args["WikiText-2"]["limit_windows"] == 3
    whole = parsed(model_card(STATE, [], RESULTS))
    assert "| 5,153 rows; in float32 |" in whole.text
    assert "limit" not in whole.text


def test_two_filters_of_a_task_are_two_metrics():
    found = {"exact_match,strict": 0.1, "exact_match,flexible": 0.2, "exact_match_stderr,flexible": 0.01}
    card = parsed(model_card(STATE, [], {"lm_eval": {"tasks": {"gsm8k": found}}}))
    assert figures(card) == {
        ("gsm8k", "exact_match (strict), lm-evaluation-harness"): 0.1,
        ("gsm8k", "exact_match (flexible), lm-evaluation-harness"): 0.2,
    }
    assert "| 0.2000 ± 0.0196 |" in card.text


def test_other_texts_are_named_by_their_files_and_stay_apart():
    """In the YAML as it is read back, where figures that differ in the name alone would be one group."""
    loss = RESULTS["perplexity"] | {"data": "~/mine/diary.txt", "files": {"diary.txt": "abc"}}
    results = {
        "perplexity": loss,
        "wikitext2": RESULTS["wikitext2"]
        | {"dataset_name": "~/mine/wiki.txt", "data_set": "wiki.txt", "sha256": "abc"},
        "lambada": {k: v for k, v in RESULTS["lambada"].items() if k != "data_set"} | {"rows": 20},  # as once written
    }
    part = PART | {"data": {"files": [{"name": "a.txt"}], "of": 1}}
    card = parsed(model_card(STATE | {"about": [part]}, LINES, results))
    assert {(name, metric): value for (name, metric), value in figures(card).items() if name != "HellaSwag"} == {
        ("a.txt, held out", "validation loss, nats a token"): 3.4,
        ("diary.txt", "loss, nats a token"): 3.41,
        ("diary.txt", "perplexity, of a token"): 30.27,
        ("diary.txt", "bits a byte"): 1.09,
        ("wiki.txt", "perplexity, of a token"): 60.5,
        ("wiki.txt", "perplexity, of a word"): 98.25,
        ("wiki.txt", "bits a byte"): 1.2,
        ("rows.jsonl", "acc"): 0.2,
        ("rows.jsonl", "perplexity"): 55.0,
    }
    assert "mine" not in card.content
    assert "| rows.jsonl | acc | 0.2000 ± 0.0110 | 20 rows; in float32 |" in card.text  # and not of LAMBADA's 5,153
    assert not {"Salesforce/wikitext", "EleutherAI/lambada_openai"} & {e.dataset_type for e in card.data.eval_results}


@pytest.mark.parametrize(
    ("config", "measured", "validation", "evaluated"),
    [
        ({"dataset_name": "~/shards/"}, "~/shards", "held out", "held out"),
        ({"dataset_name": "~/shards", "val_data": "~/shards"}, "~/shards", "held out", "held out"),
        ({"dataset_name": "~/shards"}, "~/elsewhere/of_news", "held out", "of_news"),
        ({"dataset_name": "~/shards"}, "~/elsewhere/shards", "held out", "shards"),
        ({"dataset_name": "~/shards"}, None, "held out", "a local text"),
        ({"dataset_name": "~/x/train*.bin", "val_data": "~/x/val*.bin"}, "~/x/val*.bin", "val*.bin", "val*.bin"),
        ({"dataset_name": "~/shards", "val_data": "~/of_news/"}, "~/shards", "of_news", "shards"),
    ],
)
def test_a_loss_is_of_what_it_was_measured_on(config, measured, validation, evaluated):
    """And of the training data's held-out part only where that is what was scored."""
    state = STATE | {"config": STATE["config"] | {"val_data": ""} | config}
    found = RESULTS["perplexity"] | {"data": measured}
    card = parsed(model_card(state, [{"step": 100, "val_loss": 3.4}], {"perplexity": found}))
    names = {e.metric_name: (e.dataset_type, e.dataset_name) for e in card.data.eval_results}
    held_out = ("HuggingFaceFW/fineweb-edu", "HuggingFaceFW/fineweb-edu, held out")
    for metric, name in (("validation loss, nats a token", validation), ("loss, nats a token", evaluated)):
        assert names[metric] == (held_out if name == "held out" else ("text", name))
    assert "elsewhere" not in card.content


@pytest.mark.parametrize(
    "odd",
    [
        {"hellaswag": {"rows": None, "A": {"acc": 0.5}}},
        {"hellaswag": {"A": None, "B": {"acc": 0.5}}},
        {"lambada": {"acc": 0.5, "rows": None}},
        {"wikitext2": {"perplexity": 0.5, "tokens": None, "stride": "x"}},
        {"lm_eval": {"tasks": {"t": {"acc": 0.5, "sample_len": None}, "u": None}}},
    ],
)
def test_a_number_that_is_none_is_left_out(odd):
    card = parsed(model_card(STATE, [], odd))
    assert [e.metric_value for e in card.data.eval_results] == [0.5]
    assert "rows" not in card.text


def test_results_that_make_no_sense_are_named(whole_run, tmp_path, capsys):
    shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020")
    results = tmp_path / "step_00000020" / "results.json"
    results.write_text(json.dumps({"perplexity": {"loss": 1.0, "data": 5}, "lambada": {"acc": 0.5, "data_set": []}}))
    assert export.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{results} holds what eval/ does not write" in line
    assert "move it away, evaluate again" in line


# Data and checkpoints by their true names


def test_shards_of_another_program_are_not_called_by_the_recipes_source(shards, tmp_path):
    """The default recipe names a text; whoever brings shards of his own has trained on something else."""
    mine = tmp_path / "of_letters"
    mine.mkdir()
    for path in shards.glob("*.bin"):
        shutil.copy(path, mine)
    recipe = str(ROOT / "recipe" / "configs" / "shakespeare.yaml")
    for flags, name in (
        ([f"--dataset_name={mine}"], "of_letters"),
        ([f"--dataset_name={mine}/train*.bin", f"--val_data={mine}"], "train*.bin"),
    ):
        config = parse_config(["--config", recipe, *flags])
        assert config.data.train_text.endswith("tiny_shakespeare.txt")
        parts = about.about(config, OneProcess, 0, None)
        assert parts[0]["data"] == {"shards": name}
        state = {"step": 5, "config": redacted(config.flat()), "about": parts}
        for old in (state, state | {"about": [parts[0] | {"dataset_name": None}]}, state | {"about": None}):
            card = parsed(model_card(old, [], {}))
            assert f"| text | {name} |" in card.text
            assert "shakespeare.txt" not in card.content
            assert card.data.get("language") is None
            assert str(tmp_path) not in card.content


def test_a_text_is_english_where_that_is_known():
    sha256 = hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest()

    def language(*files: dict, of: int = 1) -> str | None:
        data = {"files": list(files), "of": of}
        return parsed(model_card(STATE | {"about": [PART | {"data": data}]}, [], {})).data.get("language")

    ours = {"name": "tiny_shakespeare.txt", "sha256": sha256}
    assert language(ours) == "en"
    assert language(ours | {"sha256": "f00"}) is None  # another text of that name
    assert language(ours, of=2) is None
    assert language(ours, {"name": "b.txt", "sha256": "f00"}, of=2) is None


def test_what_was_left_out_is_what_the_manifest_says(shards):
    """And not what the recipe asks for: shards that are there are used, however they were made."""
    config = parse_config([f"--dataset_name={shards}", "--dedup=true"])
    parts = about.about(config, OneProcess, 0, None)
    assert parts[0]["data"]["options"]["dedup"] is False
    state = {"step": 5, "config": redacted(config.flat()), "about": parts}
    assert "left out" not in model_card(state, [], {}).partition("## Data")[2].partition("## Training")[0]
    made = json.loads(json.dumps(state))
    made["about"][0]["data"]["options"]["dedup"] = True
    made["config"]["dedup"] = False
    assert "| left out | documents whose text came before |" in model_card(made, [], {})
    streamed = {"source": HUB_DATA, "options": {"dedup": True}, "shards": []}
    assert "documents whose text came before" in model_card({"step": 5, "data": {"manifest": streamed}}, [], {})


@pytest.mark.parametrize("name", ["best", "latest", "."])
def test_a_checkpoint_is_exported_whatever_it_is_called(whole_run, tmp_path, monkeypatch, name):
    """As a copy, as a link to it, from within it."""
    run, checkpoint = whole_run[0], whole_run[0] / "step_00000010"
    if name == "best":
        checkpoint = Path(shutil.copytree(checkpoint, tmp_path / name))
    elif name == "latest":
        checkpoint = tmp_path / name
        checkpoint.symlink_to(run / "step_00000010")
    else:
        monkeypatch.chdir(checkpoint)
        checkpoint = Path(name)
    assert export.main([str(checkpoint), "--out", str(tmp_path / "out")]) == 0
    card = parsed((tmp_path / "out" / "README.md").read_text())
    assert "the weights after step 10." in card.text
    loss = round(whole_run[1][10]["val_loss"], 6)
    assert list(figures(card).values()) == ([] if name == "best" else [loss])  # a copy is away from its run's metrics


def test_each_part_of_a_run_has_its_code_and_hardware():
    later = {"from_step": 40, "commit": "1" * 40, "packages": {"torch": "2.13.0", "datasets": "4.0"}}
    last = later | {"from_step": 80, "precision": "fp16"}
    text = model_card(STATE | {"about": [PART, PART | later, PART | last]}, [], {})
    assert "commit from step 80" not in text  # which is that of step 40
    assert "| precision from step 80 | fp16, compiled; weights and moments in fp32 |" in text
    for line in (
        f"| commit from step 0 | {'0' * 40}, with changes that it does not hold |\n| commit from step 40 | 1111111",
        "| Python | 3.11.7 |",
        "| torch | 2.13.0 |",
        "| gpt2-recipe | 0.1.0 |",
        "| datasets from step 0 | not recorded |\n| datasets from step 40 | 4.0 |",
        "| hardware from step 0 | NVIDIA",
        "| hardware from step 40 | NVIDIA",
    ):
        assert line in text, line
    text = model_card(STATE | {"about": [PART | {"from_step": 40}]}, [], {})  # begun under an earlier version
    for line in (
        "| hardware from step 40 |",
        "| precision from step 40 |",
        "| commit from step 40 |",
        "| torch from step 40 | 2.13.0 |",
        "| Python from step 40 |",
    ):
        assert line in text, line
    text = model_card(STATE, [], {})
    assert "from step" not in text
    assert "not recorded" not in text


# What goes along with it


def test_an_export_is_what_transformers_loads_and_nothing_else(whole_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole_run[0], run)
    newest = run / "step_00000020"
    (newest / "notes.txt").write_text("of mine")
    (newest / "results.json").write_text(json.dumps({"hellaswag": RESULTS["hellaswag"]}))
    settings = newest / "tokenizer_config.json"  # as earlier versions wrote it
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 1024}))
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"][settings.name] = {
        "bytes": settings.stat().st_size,
        "sha256": hashlib.sha256(settings.read_bytes()).hexdigest(),
    }
    (newest / "manifest.json").write_text(json.dumps(manifest))
    out = tmp_path / "out"
    assert export.main([str(run), "--out", str(out), "--license", "cc-by-4.0"]) == 0
    assert "exported" in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((out / settings.name).read_text())["model_max_length"] == 64
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (50256, 50256)
    card = parsed((out / "README.md").read_text())
    assert card.data.license == "cc-by-4.0"
    assert figures(card)["HellaSwag", "acc_norm, way B"] == 0.28
    assert (out / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
    (newest / "results.json").write_text("[]")
    assert export.main([str(run), "--out", str(tmp_path / "other")]) == 2
    assert "results.json is not a JSON object of results; move it away" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_can_be_halved(whole_run, tmp_path, dtype):
    run, out = whole_run[0], tmp_path / "out"
    export.export(run, out, dtype=dtype)
    halves, whole = load_file(out / "model.safetensors"), load_file(run / "step_00000020" / "model.safetensors")
    assert halves.keys() == whole.keys()
    assert all(torch.equal(halves[k], whole[k].to(getattr(torch, dtype))) for k in whole)
    assert AutoModelForCausalLM.from_pretrained(out).dtype == getattr(torch, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == dtype
    assert f"in float32, rounded to {dtype}." in (out / "README.md").read_text()


def test_mistakes_of_an_export(whole_run, tmp_path, capsys):
    run, out = whole_run[0], tmp_path / "out"

    def refused(*arguments: str) -> str:
        assert export.main([*map(str, arguments), "--out", str(out)]) == 2
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().err

    assert "--license 'cc-by-4' is no licence that the Hub knows" in refused(run, "--license", "cc-by-4")
    assert "no checkpoint there" in refused(tmp_path / "nowhere")
    assert f"name {run}" in refused(run / "step_00000010", "--best")
    with pytest.raises(UserError, match=r"hub_license 'MIT' is no licence that the Hub knows; .*: choose "):
        parse_config(["--hub_license=MIT"])
    assert {"mit", "apache-2.0", "cc-by-nc-2.0", "cc0-1.0", "other"} < LICENSES
    assert not [name for name in LICENSES if name[0] in "-." or name[-1] in "-."]


def test_weights_beyond_the_range_of_fp16_are_refused(tmp_path):
    save_file({"a": torch.tensor([1.0, 7e4])}, tmp_path / "weights")
    with pytest.raises(UserError, match="--dtype float16: a has weights beyond its range"):
        export._cast(tmp_path / "weights", tmp_path / "out", "float16")
    export._cast(tmp_path / "weights", tmp_path / "out", "bfloat16")


def test_the_best_is_the_lowest_validation_loss_of_what_is_whole(whole_run, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole_run[0], run)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 10, "val_loss": 0.5}\n{"step": 15, "val_loss": 0.1}\n{"step": 20, "val_loss": null}\n')
    assert export.best_valid(run) == run / "step_00000010"
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 20, "val_loss": 0.4}\n')
    assert export.best_valid(run) == run / "step_00000020"
    (run / "step_00000020" / "config.json").write_text("{}")
    assert export.export(run, tmp_path / "out", best=True) == run / "step_00000010"
    assert "skipping" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"step_00000020: config\.json has 2 bytes"):
        export.export(run / "step_00000020", tmp_path / "other")
    assert len(checkpoints(run)) == 2


# What a run records for it


def test_a_run_that_goes_on_elsewhere_has_two_parts(shards, monkeypatch):
    class Engine(OneProcess):
        name, world, local_world = "GPU, DDP over 8 processes", 8, 4

    config = parse_config([f"--dataset_name={shards}", "--init_from=openai-community/gpt2"])
    (first,) = about.about(config, Engine, 0, None)
    assert (first["from_step"], first["device"], first["machines"], first["processes"]) == (0, "GPU", 2, 8)
    assert first["data"]["files"][0]["name"] == "text.txt"
    assert first["init_from"] == "openai-community/gpt2"
    assert about.about(config, Engine, 10, json.loads(json.dumps([first]))) == [first]
    Engine.precision = "fp16"
    parts = about.about(config, Engine, 20, [first])
    assert [p["from_step"] for p in parts] == [0, 20]
    assert parts[0] == first
    assert "init_from" not in parts[1]
    config = parse_config(
        [f"--dataset_name={shards}/train*.bin", f"--val_data={shards}/val*.bin", f"--init_from={shards}"]
    )
    (own,) = about.about(config, Engine, 0, None)
    assert (own["init_from"], own["data"]) == ("", {"shards": "train*.bin"})
    monkeypatch.setattr(about, "ROOT", Path("/nowhere"))
    assert about.about(config, Engine, 0, None)[0]["commit"] is None


def test_only_what_the_manifest_lists_is_given_away(whole_run, tmp_path):
    checkpoint = tmp_path / "step_00000020"
    shutil.copytree(whole_run[0] / checkpoint.name, checkpoint)
    (checkpoint / "private.json").write_text("{}")
    files, made = package.package(checkpoint, card=False)
    assert {p.name for p in files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert made == {}
