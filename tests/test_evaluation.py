"""Evaluation during training agrees with the checkpoint loaded through transformers."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from eval import hellaswag
from recipe import evaluation
from recipe.config import parse_config
from recipe.engine.factory import open_strategy
from recipe.model.build import build_model
from recipe.model.gpt2 import GPT2LMHeadModel
from tests.conftest import TINY, flags, train
from tests.eval.conftest import load


def test_hellaswag_and_samples_during_training(shards, tmp_path):
    """Two processes share 9 rows; with 64 positions some rows are truncated."""
    settings = {"max_steps": 4, "warmup_steps": 1, "hellaswag_steps": 4, "hellaswag_limit": 9, "sample_steps": 2}
    lines, output = train(shards, tmp_path / "run", processes=2, **settings)
    assert "HellaSwag (9 rows)" in output
    assert {step for step, line in lines.items() if line.get("sample")} == {0, 2, 4}
    for step in (0, 2, 4):
        assert f"step {step}: sample {lines[step]['sample']!r}\n" in output
    loaded = load(tmp_path / "run")
    counts = hellaswag.count_correct(loaded.lm, hellaswag.load_rows(9))
    for name in ("llmc_acc", "llmc_acc_norm", "lmeval_acc", "lmeval_acc_norm"):
        assert lines[4][f"hellaswag_{name}"] == pytest.approx(counts[name] / 9)
    assert lines[4]["hellaswag_rows"] == 9


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_hellaswag_during_training_is_in_the_precision_of_the_run(precision, dtype, monkeypatch):
    """In fp32 it would take a GPU several times as long."""

    def count_correct(model, rows, **_):
        ids = torch.zeros(1, 8, dtype=torch.long)
        logits = model.head(model.body(ids, ids, torch.ones(1, 1, 8, 8, dtype=torch.bool)).flatten(0, 1))
        return {"rows": 1, "in its precision": int(logits.dtype == dtype)}

    monkeypatch.setattr(evaluation, "count_correct", count_correct)
    config, strategy = parse_config(flags(**TINY)), open_strategy(precision)
    metrics = SimpleNamespace(paused=lambda text: nullcontext(lambda *_: None))
    evaluator = evaluation.Evaluator(config, None, strategy, build_model(config), None, metrics)
    assert evaluator.hellaswag() == {"hellaswag_in its precision": 1.0, "hellaswag_rows": 1}


def test_a_run_trains_with_dropout_again_after_hellaswag_and_after_a_sample(monkeypatch):
    monkeypatch.setattr(evaluation, "count_correct", lambda *_, **__: {"rows": 1})
    config, strategy = parse_config(flags(**TINY, dropout=0.1)), open_strategy("fp32")
    metrics = SimpleNamespace(paused=lambda text: nullcontext(lambda *_: None))
    model = build_model(config)
    evaluator = evaluation.Evaluator(config, None, strategy, model, None, metrics)
    for evaluate in (evaluator.hellaswag, lambda: evaluator.sample(0)):
        model.train()
        evaluate()
        assert all(module.training for module in model.modules())


def test_samples_continue_the_prompts_that_the_user_chooses(shards, tmp_path):
    prompts = os.fsdecode(b"ROMEO:\nShall I compare thee\ncaf\xe9")  # the last in Latin-1
    settings = {"max_steps": 4, "warmup_steps": 1, "sample_steps": "end", "sample_prompt": prompts}
    lines, output = train(shards, tmp_path / "run", **settings)
    assert f"step 4: sample {lines[4]['sample']!r}\n" in output
    romeo, sonnet, cafe = lines[4]["sample"].split("\n---\n")
    assert romeo.startswith("ROMEO:")
    assert sonnet.startswith("Shall I compare thee")
    assert cafe.startswith("caf\ufffd")
    assert len(romeo) > len("ROMEO:") + 10


def test_a_sample_is_drawn_from_the_likeliest_tokens_by_its_seed(tiny_gpt2, monkeypatch):
    reference = tiny_gpt2().model
    model = GPT2LMHeadModel(reference.config)
    model.load_weights(reference.state_dict(), "test")
    model.eval()
    prompt = list(range(1000, 1080))  # too long: of 64 positions, 48 are for the sample
    with torch.no_grad():
        samples = [evaluation.continuation(model, prompt, seed) for seed in (1, 1, 2)]
        assert samples[0] == samples[1] != samples[2]
        monkeypatch.setattr(evaluation, "TEMPERATURE", 1e-6)
        cold = evaluation.continuation(model, prompt, seed=1)
        monkeypatch.setattr(evaluation, "TOP_K", 1)
        greedy = evaluation.continuation(model, prompt, seed=1)
    ids = torch.tensor([prompt[-16:]])
    options = {"do_sample": False, "max_new_tokens": 48, "pad_token_id": 0, "eos_token_id": None}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, 16:].tolist()
    assert cold == greedy == expected
