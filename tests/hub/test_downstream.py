"""Exported models in the libraries that people use: transformers, TRL and others."""

from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

from recipe.hub.export import export
from recipe.model.gpt2 import GPT2LMHeadModel
from tests.conftest import SHAKESPEARE

STEPS = {
    "max_steps": 5,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 0,
}


@pytest.fixture(autouse=True)
def one_thread():
    """A model this small gains nothing from more, and waits for them where others work too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def exported(whole_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export(whole_run[0], out)
    return out


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """Speeches that the run did not train on."""
    return [text for text in SHAKESPEARE.read_text()[200_000:].split("\n\n") if len(text) > 200][:20]


def greedy(model: GPT2LMHeadModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` more tokens behind `ids` (1, T), each the likeliest, all of them recomputed for each."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def test_a_pipeline_generates_text_with_all_its_defaults(exported):
    generate = pipeline("text-generation", model=str(exported), device="cpu")
    (answer,) = generate("ROMEO:")
    assert answer["generated_text"].startswith("ROMEO:")
    (tokens,) = generate("ROMEO:", return_tensors=True)
    assert len(tokens["generated_token_ids"]) <= 64  # without max_length it would go on to 256, beyond the positions
    one, two = generate(["KING", "First Citizen:"], batch_size=2, max_new_tokens=12, do_sample=False)  # padded
    assert two[0]["generated_text"] != "First Citizen:"
    assert one[0]["generated_text"].startswith("KING")
    with pytest.raises(ValueError, match="`max_length` is set to 64"):  # a longer prompt; and no IndexError
        generate("First Citizen:\n" * 40)
    (answer,) = generate("First Citizen:\n" * 40, handle_long_generation="hole", max_new_tokens=10)  # as the card says
    assert len(answer["generated_text"]) > 40 * len("First Citizen:\n")


@torch.no_grad()
def test_generating_with_the_cache_agrees_with_this_projects_own_model_without(exported):
    theirs = AutoModelForCausalLM.from_pretrained(exported).eval()
    ours = GPT2LMHeadModel.from_pretrained(str(exported)).eval()
    tokenizer = AutoTokenizer.from_pretrained(exported)
    ids = tokenizer("First Citizen:\nBefore we proceed any further,", return_tensors="pt").input_ids
    weights = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():  # so that every token before matters: after 20 steps hardly any does
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.3, generator=weights)
    theirs.load_state_dict(ours.state_dict(), strict=False)  # the head is tied
    expected = greedy(ours, ids, 24)
    for cache in (True, False):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 50256}
        assert torch.equal(theirs.generate(ids, use_cache=cache, **options), expected)
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 3  # or any cache would do


def test_generation_ends_at_end_of_text(exported):
    model = AutoModelForCausalLM.from_pretrained(exported)
    assert (model.generation_config.eos_token_id, model.generation_config.bos_token_id) == (50256, 50256)
    with torch.no_grad():  # end-of-text is now what comes next, whatever came before
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(model.transformer.wte.weight[50256])
        model.transformer.wte.weight[50256] *= 100
    ids = model.generate(torch.tensor([[464]]), max_new_tokens=5, do_sample=False, pad_token_id=50256)
    assert ids.tolist() == [[464, 50256]]


def falls(history: list[dict]) -> bool:
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return len(losses) == STEPS["max_steps"] and losses[-1] < losses[0] - 0.1


def same(directory: Path, model: torch.nn.Module, exported: Path) -> bool:
    """Whether `directory` holds the weights of `model`, which are no more the exported ones."""
    loaded, before = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (directory, exported))
    trained = model.state_dict()
    return all(torch.equal(loaded[k], trained[k]) for k in trained) and not torch.equal(
        loaded["transformer.wte.weight"], before["transformer.wte.weight"]
    )


@pytest.mark.slow
def test_transformers_trainer_fine_tunes_it(exported, lines, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(exported), AutoTokenizer.from_pretrained(exported)
    rows = []
    for line in lines:
        ids = tokenizer(line, truncation=True, max_length=48).input_ids
        rows.append({"input_ids": ids, "labels": ids} if len(ids) == 48 else None)
    trainer = Trainer(model, TrainingArguments(str(tmp_path / "runs"), **STEPS), train_dataset=[r for r in rows if r])
    trainer.train()
    assert falls(trainer.state.log_history)
    trainer.save_model(str(tmp_path / "tuned"))
    tokenizer.save_pretrained(tmp_path / "tuned")
    assert same(tmp_path / "tuned", trainer.model, exported)
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").model_max_length == 64
    assert GPT2LMHeadModel.from_pretrained(str(tmp_path / "tuned"))  # and this project trains on from there


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="needs TRL: pip install -e '.[trl]'")
def test_trl_fine_tunes_it(exported, lines, tmp_path):
    """With the max_length that the card names; its default is 1,024, whatever the model's positions are."""
    from trl import SFTConfig, SFTTrainer

    assert "SFTConfig(max_length=64)" in (exported / "README.md").read_text()
    settings = SFTConfig(str(tmp_path / "runs"), max_length=64, bf16=False, **STEPS)
    rows = datasets.Dataset.from_dict({"text": [*lines, SHAKESPEARE.read_text()[:2_400]]})  # the last of 600 tokens
    trainer = SFTTrainer(str(exported), args=settings, train_dataset=rows)
    trainer.train()
    assert falls(trainer.state.log_history)
    trainer.save_model(str(tmp_path / "tuned"))
    assert same(tmp_path / "tuned", trainer.model, exported)
    assert AutoTokenizer.from_pretrained(tmp_path / "tuned").eos_token_id == 50256
