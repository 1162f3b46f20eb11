"""Exported models in the programs that people use, by the code of docs/elsewhere.md as it stands there."""

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


@pytest.fixture(scope="module")
def exported(whole_run, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    export(whole_run[0], out)
    return out


@pytest.fixture(scope="module")
def scattered(exported, tmp_path_factory) -> Path:
    """The model with random weights, so that every token before matters: after 20 steps hardly any does."""
    out = shutil.copytree(exported, tmp_path_factory.mktemp("scattered") / "model")
    model, weights = AutoModelForCausalLM.from_pretrained(out), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3, generator=weights)
    model.save_pretrained(out)
    return out


@pytest.fixture
def beside(tmp_path, monkeypatch):
    """model -> the working directory becomes one where docs/elsewhere.md's code finds it as my-model."""

    def enter(model: Path) -> Path:
        (tmp_path / "my-model").symlink_to(model)
        (tmp_path / "recipe").symlink_to(ROOT / "recipe")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
        return tmp_path

    return enter


def code(section: str, language: str) -> str:
    """The code in `language` of a section of docs/elsewhere.md, with this model's positions, STEPS, and less text."""
    (block,) = re.findall(rf"```{language}\n(.*?)```", SECTIONS[section], re.DOTALL)
    for long, short in {"128": "64", "max_steps=100": "**STEPS", 'split="train"': 'split="train[:100]"'}.items():
        block = block.replace(long, short)
    return block


def needs(*modules: str):
    missing = [name for name in modules if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {missing}: pip install -e '.[downstream]'")


def greedy(model: GPT2LMHeadModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    """`count` more tokens behind `ids` (1, T), each the likeliest, all of them recomputed for each."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    return ids


def test_the_page_on_generating(exported, beside, capsys):
    beside(exported)
    exec(code("Generate", "python"), {})
    assert capsys.readouterr().out.startswith("ROMEO:")


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


def test_the_cards_own_lines_warn_of_nothing(exported, capsys, caplog, monkeypatch):
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "propagate", True)
    monkeypatch.setattr(transformers.logging.get_logger("transformers"), "level", logging.WARNING)
    (lines,) = re.findall("```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(lines.replace("path/to/this/directory", str(exported)), {})
    assert 20 < len(AutoTokenizer.from_pretrained(exported)(capsys.readouterr().out).input_ids) < 300
    assert caplog.messages == []


@torch.no_grad()
def test_generating_with_the_cache_agrees_with_this_projects_own_model_without(scattered):
    theirs = AutoModelForCausalLM.from_pretrained(scattered).eval()
    ours = own_model(scattered).eval()
    tokenizer = AutoTokenizer.from_pretrained(scattered)
    ids = tokenizer("First Citizen:\nBefore we proceed any further,", return_tensors="pt").input_ids
    expected = greedy(ours, ids, 24)
    for cache in (True, False):
        options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 50256}
        assert torch.equal(theirs.generate(ids, use_cache=cache, **options), expected)
    assert len(set(expected[0, ids.shape[1] :].tolist())) > 3  # or any cache would do


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
@needs("trl")
def test_trl_fine_tunes_it(exported, beside):
    """With the max_length that the card names; its default is 1,024, whatever the model's positions are."""
    assert "SFTConfig(max_length=64)" in (exported / "README.md").read_text()
    at, names = beside(exported), {"STEPS": STEPS}
    exec(code("Fine-tune with TRL", "python"), names)
    assert falls(names["trainer"].state.log_history)
    assert same(at / "my-tuned", names["trainer"].model, exported)
    started = build_model(parse_config(flags(**TINY, init_from=at / "my-tuned"))).state_dict()
    assert torch.equal(started["transformer.wte.weight"], names["trainer"].model.transformer.wte.weight)
    assert AutoTokenizer.from_pretrained(at / "my-tuned").eos_token_id == 50256


@pytest.mark.slow
@needs("trl", "peft")
def test_peft_adapts_it_and_merges_what_it_learned(scattered, beside):
    from peft import PeftModel

    at, names = beside(scattered), {"STEPS": STEPS}
    exec(code("Fine-tune with TRL", "python").split("trainer =")[0] + code("LoRA with PEFT", "python"), names)
    ids = AutoTokenizer.from_pretrained(at / "my-merged")("First Citizen:", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(scattered)
    merged = own_model(at / "my-merged").eval()
    with torch.no_grad():
        before, after = base(ids).logits, merged(ids)
        adapted = PeftModel.from_pretrained(base, at / "my-lora")(ids).logits
    torch.testing.assert_close(after, adapted, rtol=0, atol=1e-4)
    assert (after - before).abs().max() > 0.1  # it has learned something


@pytest.mark.slow
@needs("onnx", "onnxscript", "onnxruntime", "transformers.exporters")
def test_onnx_runtime_computes_its_logits(scattered, beside):
    beside(scattered)
    names = {}
    exec(code("ONNX", "python"), names)
    ids = torch.randint(0, 50257, (3, 64), generator=torch.Generator().manual_seed(1))  # another batch and length
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = names["model"](**inputs).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(names["onnx"](**inputs).logits, expected, rtol=1e-5, atol=1e-4)


def continuation(model: Path, count: int) -> str:
    """The likeliest `count` tokens behind "ROMEO:", as text."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer("ROMEO:", return_tensors="pt").input_ids
    out = model.generate(ids, do_sample=False, max_new_tokens=count)[0, ids.shape[1] :]
    assert len(set(out.tolist())) > 3
    return tokenizer.decode(out, skip_special_tokens=True)


@pytest.mark.slow
@needs("fastapi", "uvicorn", "openai")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_transformers_serves_it(scattered, beside):
    at = beside(scattered)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    serve, ask = (shlex.split(line) for line in code("Serve", "bash").replace("8000", str(port)).splitlines())
    command = [sys.executable, "-m", "transformers.cli.transformers", *serve[1:]]
    with open(at / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment())
    try:
        for _ in range(600):
            answer = subprocess.run(ask, capture_output=True, text=True)
            if answer.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.2)
    finally:
        server.terminate()
        server.wait(30)
    assert answer.returncode == 0, (at / "log").read_text()
    assert json.loads(answer.stdout)["choices"][0]["text"] == continuation(scattered, 30)


@pytest.mark.slow
@needs("xllamacpp")
@pytest.mark.skipif(not CONVERTER.is_dir(), reason="needs a clone of llama.cpp here, or where LLAMA_CPP is")
def test_llama_cpp_generates_the_same(scattered, beside):
    at = beside(scattered)
    (at / "llama.cpp").symlink_to(CONVERTER)
    clone, convert = code("GGUF for llama.cpp", "bash").splitlines()
    assert clone.startswith("git clone ")
    command = shlex.split(convert, comments=True)
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, env=environment())
    names = {}
    exec(code("GGUF for llama.cpp", "python"), names)
    assert names["answer"]["choices"][0]["text"] == continuation(scattered, 30)


def test_each_section_with_code_is_run():
    sections = {title for title, text in SECTIONS.items() if "```python" in text or "```bash" in text}
    assert sections == set(re.findall(r'code\("(.*?)"', Path(__file__).read_text()))
