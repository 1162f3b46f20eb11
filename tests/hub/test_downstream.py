"""Exported models in other programs, by the code of docs/elsewhere.md."""

import json
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from recipe.config import parse_config
from recipe.hub.export import export
from recipe.model.build import build_model
from recipe.model.gpt2 import GPT2LMHeadModel
from tests.conftest import ROOT, TINY, environment, flags, own_model

PAGE = re.split(r"^## (.*)$", (ROOT / "docs" / "elsewhere.md").read_text(), flags=re.MULTILINE)
SECTIONS = dict(zip(PAGE[1::2], PAGE[2::2], strict=True))
CONVERTER = Path(os.environ.get("LLAMA_CPP", ROOT / "llama.cpp"))

STEPS = {"max_steps": 5, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
STEPS |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "seed": 0}


@pytest.fixture(scope="module")
def exported(whole_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export(whole_run[0], out)
    return out


@pytest.fixture(scope="module")
def random_model(exported, tmp_path_factory) -> Path:
    """The model with random weights, so that every token depends on those before it: after 20 steps hardly any does."""
    out = shutil.copytree(exported, tmp_path_factory.mktemp("random") / "model")
    model, weights = AutoModelForCausalLM.from_pretrained(out), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3, generator=weights)
    model.save_pretrained(out)
    return out


@pytest.fixture
def enter_directory(tmp_path, monkeypatch):
    """model -> the new working directory, where docs/elsewhere.md's code finds it as my-model."""

    def enter(model: Path) -> Path:
        (tmp_path / "my-model").symlink_to(model)
        (tmp_path / "recipe").symlink_to(ROOT / "recipe")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        return tmp_path

    return enter


def code(section: str, language: str) -> str:
    """The code in `language` of a section of docs/elsewhere.md, with this model's n_positions, STEPS, and less text."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)
    for old, new in {"128": "64", "max_steps=100": "**STEPS", 'split="train"': 'split="train[:100]"'}.items():
        block = block.replace(old, new)
    return block


def needs(*modules: str):
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}: pip install -e '.[downstream]'")


def greedy(model: GPT2LMHeadModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Appends `count` tokens to `ids` (1, T), each the likeliest next one, without a cache."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def test_the_page_generates_text(exported, enter_directory, capsys):
    enter_directory(exported)
    exec(code("Generate", "python"), {})
    assert capsys.readouterr().out.startswith("ROMEO:")


def test_a_pipeline_generates_text_with_all_its_defaults(exported):
    generate = pipeline("text-generation", model=str(exported), device="cpu")
    (answer,) = generate("ROMEO:")
    assert answer["generated_text"].startswith("ROMEO:")
    (tokens,) = generate("ROMEO:", return_tensors=True)
    assert len(tokens["generated_token_ids"]) <= 64  # without max_length it would go on to 256, beyond the positions
    answers = generate(["KING", "First Citizen:"], batch_size=2, max_new_tokens=12, do_sample=False)  # padded
    assert answers[0][0]["generated_text"].startswith("KING")
    assert answers[1][0]["generated_text"] != "First Citizen:"
    with pytest.raises(ValueError, match="`max_length` is set to 64"):  # a longer prompt; and no IndexError
        generate("First Citizen:\n" * 40)
    (answer,) = generate("First Citizen:\n" * 40, handle_long_generation="hole", max_new_tokens=10)  # as the card says
    assert len(answer["generated_text"]) > 40 * len("First Citizen:\n")


def test_the_code_in_the_card_runs_without_warnings(exported, capsys, caplog, monkeypatch):
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "level", logging.WARNING)
    (block,) = re.findall("```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(block.replace("path/to/this/directory", str(exported)), {})
    assert 20 < len(AutoTokenizer.from_pretrained(exported)(capsys.readouterr().out).input_ids) < 300
    assert caplog.messages == []


@torch.no_grad()
def test_transformers_generates_what_this_projects_model_does_with_and_without_its_cache(random_model):
    model = AutoModelForCausalLM.from_pretrained(random_model).eval()
    tokenizer = AutoTokenizer.from_pretrained(random_model)
    ids = tokenizer("First Citizen:\nBefore we proceed any further,", return_tensors="pt").input_ids
    expected = greedy(own_model(random_model).eval(), ids, 24)
    for cache in (True, False):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 50256}
        assert torch.equal(model.generate(ids, use_cache=cache, **options), expected)
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 3  # or any cache would do


@pytest.mark.slow
@needs("trl")
def test_trl_fine_tunes_an_export(exported, enter_directory):
    """With the max_length that the card names; TRL's default is 1,024, whatever the model's n_positions."""
    assert "SFTConfig(max_length=64)" in (exported / "README.md").read_text()
    directory, names = enter_directory(exported), {"STEPS": STEPS}
    exec(code("Fine-tune with TRL", "python"), names)
    losses = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
    assert len(losses) == STEPS["max_steps"]
    assert losses[-1] < losses[0] - 0.1
    paths, trained = (directory / "my-tuned", exported), names["trainer"].model.state_dict()
    saved, initial = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in paths)
    assert all(torch.equal(saved[name], tensor) for name, tensor in trained.items())
    assert not torch.equal(saved["transformer.wte.weight"], initial["transformer.wte.weight"])
    model = build_model(parse_config(flags(**TINY, init_from=directory / "my-tuned")))
    assert torch.equal(model.transformer.wte.weight, names["trainer"].model.transformer.wte.weight)
    assert AutoTokenizer.from_pretrained(directory / "my-tuned").eos_token_id == 50256


@pytest.mark.slow
@needs("trl", "peft")
def test_peft_trains_an_adapter_and_merges_it(random_model, enter_directory):
    from peft import PeftModel

    directory, names = enter_directory(random_model), {"STEPS": STEPS}
    exec(code("Fine-tune with TRL", "python").split("trainer =")[0] + code("LoRA with PEFT", "python"), names)
    ids = AutoTokenizer.from_pretrained(directory / "my-merged")("First Citizen:", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(random_model)
    merged = own_model(directory / "my-merged").eval()
    with torch.no_grad():
        base_logits, merged_logits = base(ids).logits, merged(ids)
        adapter_logits = PeftModel.from_pretrained(base, directory / "my-lora")(ids).logits
    torch.testing.assert_close(merged_logits, adapter_logits, rtol=0, atol=1e-4)
    assert (merged_logits - base_logits).abs().max() > 0.1  # it has learned something


@pytest.mark.slow
@needs("transformer_lens")
def test_transformer_lens_computes_the_same_logits_and_shows_attention(random_model, enter_directory):
    enter_directory(random_model)
    names = {}
    exec(code("Look inside with TransformerLens", "python"), names)
    model = AutoModelForCausalLM.from_pretrained(random_model)
    text = "<|endoftext|>ROMEO: what light"  # as TransformerLens puts it
    ids = AutoTokenizer.from_pretrained(random_model)(text, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = model(ids).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(names["logits"], expected, rtol=1e-5, atol=1e-4)
    pattern = names["cache"]["pattern", -1]
    assert pattern.shape == (1, model.config.n_head, ids.shape[1], ids.shape[1])
    torch.testing.assert_close(pattern.sum(-1), torch.ones_like(pattern[..., 0]))


@pytest.mark.slow
@needs("onnx", "onnxscript", "onnxruntime", "transformers.exporters")
def test_onnx_runtime_computes_the_same_logits(random_model, enter_directory):
    enter_directory(random_model)
    names = {}
    exec(code("ONNX", "python"), names)
    ids = torch.randint(0, 50257, (3, 64), generator=torch.Generator().manual_seed(1))  # another batch and length
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = names["model"](**inputs).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(names["onnx"](**inputs).logits, expected, rtol=1e-5, atol=1e-4)


def continuation(model: Path, count: int) -> str:
    """The greedy continuation of "ROMEO:" by `count` tokens, as text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer("ROMEO:", return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :]
    assert len(set(out.tolist())) > 3
    return tokenizer.decode(out, skip_special_tokens=True)


@pytest.mark.slow
@needs("fastapi", "uvicorn", "openai")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_transformers_serves_an_export(random_model, enter_directory):
    directory = enter_directory(random_model)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    serve, request = (shlex.split(line) for line in code("Serve", "bash").replace("8000", str(port)).splitlines())
    command = [sys.executable, "-m", "transformers.cli.transformers", *serve[1:]]
    with open(directory / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    try:
        for _ in range(600):
            answer = subprocess.run(request, capture_output=True, text=True)
            if answer.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(30)
    assert answer.returncode == 0, (directory / "log").read_text()
    assert json.loads(answer.stdout)["choices"][0]["text"] == continuation(random_model, 30)


@pytest.mark.slow
@needs("xllamacpp")
@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs a clone of llama.cpp here, or where LLAMA_CPP is")
def test_llama_cpp_generates_the_same(random_model, enter_directory):
    directory = enter_directory(random_model)
    (directory / "llama.cpp").symlink_to(CONVERTER)
    clone, convert = code("GGUF for llama.cpp", "bash").splitlines()
    assert clone.startswith("git clone ")
    command = shlex.split(convert, comments=True)
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, env=environment())
    names = {}
    exec(code("GGUF for llama.cpp", "python"), names)
    assert names["answer"]["choices"][0]["text"] == continuation(random_model, 30)


@pytest.mark.slow
@needs("mlx", "mlx_lm")
def test_mlx_generates_the_same(random_model, enter_directory):
    directory, names = enter_directory(random_model), {}
    exec(code("MLX, on a Mac", "python"), names)
    expected = continuation(random_model, 30)
    assert names["text"] == expected.lstrip(" ")  # mlx-lm strips the first blank
    assert continuation(directory / "my-mlx", 30) == expected


def test_each_section_with_code_is_run():
    sections = {title for title, text in SECTIONS.items() if "```python" in text or "```bash" in text}
    assert sections == set(re.findall(r'code\("(.*?)"', Path(__file__).read_text()))
