"""A user's own tokenizer: its tokens in the shards, its vocabulary in the model, its files beside the weights."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from eval import common, sample
from eval.curves import read_run
from eval.perplexity import byte_lengths, shard_windows, summarize, window_losses
from eval.report import write_report
from recipe.config import DataConfig, parse_config
from recipe.data.documents import Column, tokenized
from recipe.data.hub_text import HubText
from recipe.data.prepare import prepare
from recipe.data.shards import Manifest, check_tokenizer, find_shards
from recipe.data.tokenizer import open_tokenizer
from recipe.hub.model_card import model_card
from recipe.model.build import build_model
from recipe.utils.errors import UserError
from tests import processes
from tests.conftest import ROOT, SHAKESPEARE, TINY, by_step, flags, ok, refused, run_train, tiny_flags
from tests.data import TEXT, data_of, tokens_in, write_jsonl

VOCABULARY, END = 600, "<|done|>"
# A special token as text, spaces, and characters of up to four bytes that the training text does not have
ODD = f"He said {END} twice:      naïve\r\n\tif x:日本語 🙂  "


def train_tokenizer(vocab_size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of tiny Shakespeare."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT[:100_000]], trainers.BpeTrainer(vocab_size=vocab_size - 1, **options))
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])  # as tokenizers of code have
    return tokenizer


def save(tokenizer: Tokenizer, directory, eos_token: str | None = END) -> str:
    """Saves it as transformers does; returns the directory's name."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token).save_pretrained(directory)
    return str(directory)


def run_flags(root, **fields) -> list[str]:
    text_fields = {} if "dataset_name" in fields else {"val_fraction": 0.1}
    return tiny_flags(root / "text.txt", root / "run", **{"tokenizer": root / "own"} | text_fields | fields)


@pytest.fixture(scope="module")
def trained_run(once):
    """A directory with a text, a tokenizer and a run on it; the run's output."""

    def make(root):
        root.mkdir()
        (root / "text.txt").write_text(ODD + TEXT[:50_000])
        save(train_tokenizer(), root / "own")
        arguments = run_flags(root, sample_steps=20, hellaswag_steps=20, hellaswag_limit=4)
        return ok(run_train(*arguments, cwd=root)).stdout

    return once("own_tokenizer", make)


def test_its_end_of_text_separates_documents_too(tmp_path):
    tokenizer = open_tokenizer(save(train_tokenizer(), tmp_path / "own"))
    (tmp_path / "d.txt").write_text(f"one{END}two<|endoftext|>three")
    prepare(data_of(tmp_path / "d.txt", tmp_path / "out", tokenizer=str(tmp_path / "own"), val_fraction=0))
    documents = tokenizer.encode(["one", "two", "three"])
    assert tokens_in(tmp_path / "out", "train") == [t for ids in documents for t in (tokenizer.end_of_text, *ids)]


def test_any_text_has_transformers_ids_and_comes_back(tmp_path):
    """End-of-text in a text is text, and the lengths of its tokens add up to its bytes. What its file says of
    truncation and padding, which are for batches of other programs, does not apply."""
    trained = train_tokenizer()
    trained.enable_truncation(20)
    trained.enable_padding(length=20, pad_token=END)
    tokenizer = open_tokenizer(save(trained, tmp_path))
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (VOCABULARY, hf_tokenizer.eos_token_id)
    for text in (ODD, TEXT[:5000], "", "    "):
        (ids,) = tokenizer.encode([text])
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids.tolist()).decode() == text
        assert tokenizer.end_of_text not in ids
        assert ids.tolist() == hf_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert byte_lengths(hf_tokenizer)[[*ids, tokenizer.end_of_text]].sum() == len(text.encode())


def sentencepiece_bpe() -> Tokenizer:
    """With a space before each text, as of Llama 2: whether or not the text has one."""
    bytes_and_end = [f"<0x{byte:02X}>" for byte in range(256)] + [END, "\u2581", *"ROME:abc", "\u2581R", "\u2581a"]
    vocabulary = {token: i for i, token in enumerate(bytes_and_end)}
    merges = [("\u2581", "R"), ("\u2581", "a")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([END])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    parts = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([*parts])
    return tokenizer


def sentencepiece_unigram() -> Tokenizer:
    """With a space before a text that has none."""
    pieces = [
        ("<unk>", 0),
        (END, 0),
        *((f"<0x{byte:02X}>", -9) for byte in range(256)),
        ("\u2581", -2),
        ("\u2581R", -2),
    ]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((letter, -3) for letter in "ROME:abc")], 0, byte_fallback=True))
    tokenizer.add_special_tokens([END])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    parts = decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Sequence([*parts])
    return tokenizer


@pytest.mark.parametrize("make", [sentencepiece_bpe, sentencepiece_unigram])
def test_a_text_comes_back_from_sentencepieces_tokens(tmp_path, monkeypatch, make):
    """With the ids of transformers, however long it is; in training its pieces are tokenized by themselves."""
    monkeypatch.setattr("recipe.data.documents.PIECE", 50)
    own = save(make(), tmp_path / "own")
    hf_tokenizer, tokenizer = AutoTokenizer.from_pretrained(own), open_tokenizer(own)
    texts = ["ROMEO: a b\n" * 30 + ODD.replace(END, "it") + "ab", "ROMEO:\n\nab " * 30, "ab"]
    write_jsonl(tmp_path / "d.jsonl", texts)
    prepare(data_of(tmp_path / "d.jsonl", tmp_path / "out", tokenizer=own, val_fraction=0))
    tokens = tokens_in(tmp_path / "out", "train")
    ids = [hf_tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert tokens == [token for i in ids for token in (tokenizer.end_of_text, *i)]
    assert [hf_tokenizer.decode(i) for i in ids] == texts
    monkeypatch.setattr(HubText, "_rows", lambda self, stream: ((i, {"text": t}, None) for i, t in enumerate(texts)))
    pieces = HubText(DataConfig(train_text="a/b"), Column("text", tokenizer)).pieces()
    assert np.concatenate([i for _, i in tokenized(pieces, tokenizer)]).tolist() == [token for i in ids for token in i]
    spaces = len(texts)  # one is put before each text
    assert byte_lengths(hf_tokenizer)[tokens].sum() == len("".join(texts).encode()) + spaces
    assert tokenizer.decode(tokenizer.encode([" ab"], continuing=True)[0].tolist()) == b" ab", "as of a sample"


def test_the_tokenizer_of_a_gpt2_splits_text_as_its_file_says(tmp_path):
    """In the data, in an evaluation and in a checkpoint: transformers 5 alone splits it as GPT-2 does (as OLMo 2's)."""
    trained, text = train_tokenizer(), "ROMEO: 1594"
    trained.add_special_tokens(["<|endoftext|>"])  # named in no file: a default of the class
    trained.normalizer = normalizers.Lowercase()
    digits = pre_tokenizers.Digits(individual_digits=True)
    trained.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=VOCABULARY + 1)).save_pretrained(tmp_path)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_tokenizer(str(tmp_path))
    saved = shutil.copytree(tmp_path, tmp_path / "saved")
    tokenizer.save(saved, max_length=64)
    models = [common.load(common.parser("").parse_args([str(path), "--device=cpu"])) for path in (tmp_path, saved)]
    ids = [encode(text) for encode in (lambda text: tokenizer.encode([text])[0].tolist(), *(m.encode for m in models))]
    assert ids == [trained.encode(text).ids] * 3
    assert {tokenizer.end_of_text_token, *(m.tokenizer.eos_token for m in models)} == {"<|endoftext|>"}


def test_its_special_tokens_in_a_text_are_the_ids_that_a_prompt_has(tmp_path, capsys):
    """Those of chats, that is. End-of-text is not: it separates documents."""
    trained = train_tokenizer()
    trained.add_special_tokens(["<|user|>", "<|bot|>"])
    tokenizer = open_tokenizer(save(trained, tmp_path))
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = "<|user|>What is 0 plus one? <|bot|>One.    "
    (ids,) = tokenizer.encode([chat])
    assert ids.tolist() == hf_tokenizer.encode(chat, add_special_tokens=False)
    assert ids[0] == hf_tokenizer.convert_tokens_to_ids("<|user|>") >= VOCABULARY
    assert tokenizer.decode(ids.tolist()).decode() == chat
    assert tokenizer.end_of_text not in tokenizer.encode([f"<|user|>{END}"])[0]
    end, shape = hf_tokenizer.eos_token_id, {"n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(hf_tokenizer), **shape, bos_token_id=end, eos_token_id=end))
    loaded = common.Loaded("own", None, model, hf_tokenizer)
    assert loaded.encode(chat) == ids.tolist()
    assert byte_lengths(hf_tokenizer)[ids].sum() == len(chat)
    sample.generate(loaded, chat, sample.arguments().parse_args(["--max_new_tokens", "1"]))
    assert chat in capsys.readouterr().out, "a sample shows them"
    torch.nn.init.zeros_(model.transformer.ln_f.weight)
    model.transformer.ln_f.bias.data, model.transformer.wte.weight.data[end] = torch.ones(8), 9 * torch.ones(8)
    options = ["--max_new_tokens", "4", "--temperature", "0"]
    assert sample.generate(loaded, chat, sample.arguments().parse_args(options)) == [""]
    assert END not in capsys.readouterr().out, "but not the end of the text"


def test_transformers_loads_model_and_tokenizer_from_the_checkpoint(trained_run):
    """With the run's tokens and loss; what the model generates can be decoded."""
    root, output = trained_run
    checkpoint = root / "run" / "step_00000020"
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == VOCABULARY
    special_ids = {model.config.eos_token_id, model.config.bos_token_id, model.generation_config.eos_token_id}
    assert special_ids == {tokenizer.eos_token_id} == {tokenizer.convert_tokens_to_ids(END)}
    assert tokenizer.model_max_length == TINY["n_positions"]

    (data,) = (root / "data").iterdir()
    tokens = tokens_in(data, "train") + tokens_in(data, "val")
    assert tokens[0] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens[1:], clean_up_tokenization_spaces=False) == (root / "text.txt").read_bytes().decode()
    assert max(tokens) < VOCABULARY
    manifest = Manifest.load(data)
    assert (manifest.vocab_size, manifest.end_of_text) == (VOCABULARY, tokenizer.eos_token_id)

    lines = by_step(root / "run")
    assert lines[0]["val_loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    loaded = common.Loaded("own", checkpoint, model.eval(), tokenizer)
    windows = shard_windows(str(data), TINY["sequence_length"])[0][: TINY["eval_tokens"] // TINY["sequence_length"]]
    scores = summarize(loaded, windows, window_losses(loaded, windows, 4, ""))
    assert scores["loss"] == pytest.approx(lines[20]["val_loss"], abs=1e-5)
    text = tokenizer.decode(tokens_in(data, "val")[1 : TINY["eval_tokens"] + 1])
    assert scores["bytes"] == len(text.encode())
    bits = scores["loss"] * scores["tokens"] / math.log(2)
    assert scores["bits_per_byte"] == pytest.approx(bits / len(text.encode()))

    prompt = tokenizer("First Citizen:", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0].tolist()
    assert tokenizer.decode(ids).encode() == open_tokenizer(str(root / "own")).decode(ids)
    assert "HellaSwag (4 rows)" in output
    assert "step 20: sample " in output


def test_its_padding_token_is_the_models_too(tmp_path):
    """By it, transformers finds the last token of a text that it classifies. Without one, end-of-text pads."""
    trained = train_tokenizer()
    for special, pad in ({}, END), ({"pad_token": "<|pad|>"}, "<|pad|>"):
        directory = tmp_path / pad
        PreTrainedTokenizerFast(tokenizer_object=trained, eos_token=END, **special).save_pretrained(directory)
        model = build_model(parse_config(flags(**TINY, tokenizer=directory)))
        model.save_config(tmp_path)
        open_tokenizer(str(directory)).save(tmp_path, max_length=64)
        configs = (GPT2Config.from_pretrained(tmp_path), GenerationConfig.from_pretrained(tmp_path))
        tokenizer = AutoTokenizer.from_pretrained(tmp_path)
        assert tokenizer.pad_token == pad
        assert {config.pad_token_id for config in configs} == {tokenizer.pad_token_id}


START = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", VOCABULARY)])
START_AND_END = processors.RobertaProcessing(("<s>", VOCABULARY), ("<s>", VOCABULARY), add_prefix_space=False)


@pytest.mark.parametrize(
    ("template", "tokenizer_class"), [(START, "PreTrainedTokenizerFast"), (START_AND_END, "RobertaTokenizer")]
)
def test_a_prompt_has_no_token_that_training_did_not(tmp_path, template, tokenizer_class):
    """In transformers, with the tokenizer of a checkpoint; that of Llama 3 adds a start to each text, RoBERTa's an end
    too."""
    trained = train_tokenizer()
    trained.add_special_tokens(["<s>"])
    trained.post_processor = template
    save(trained, tmp_path / "own")
    config = tmp_path / "own" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tokenizer_class": tokenizer_class}))
    assert len(AutoTokenizer.from_pretrained(tmp_path / "own")("ROMEO:").input_ids) > len("ROMEO:")
    tokenizer = open_tokenizer(str(tmp_path / "own"))
    tokenizer.save(tmp_path / "saved", max_length=64)
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert saved("ROMEO:").input_ids == tokenizer.encode(["ROMEO:"])[0].tolist()
    assert (saved.eos_token, saved.model_max_length) == (END, 64)
    assert open_tokenizer(str(tmp_path / "saved")).digest == tokenizer.digest


def test_a_chat_template_by_name_is_not_saved(tmp_path):
    """The name, such as a path, would be that of a file; versions of transformers write it anywhere."""
    save(train_tokenizer(), tmp_path / "own")
    config = tmp_path / "own" / "tokenizer_config.json"
    templates = [{"name": name, "template": name} for name in ("default", "tools", "../../../outside")]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": templates}))
    open_tokenizer(str(tmp_path / "own")).save(tmp_path / "saved", max_length=64)
    assert {path.name for path in tmp_path.iterdir()} == {"own", "saved"}
    assert all(path.is_file() for path in (tmp_path / "saved").iterdir())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == "default"


def test_published_losses_are_not_shown_beside_those_of_other_tokens(trained_run, tmp_path):
    """Tiny Shakespeare has a reference curve, but of GPT-2's tokens."""
    root, _ = trained_run
    checkpoint, run = root / "run" / "step_00000020", read_run(root / "run")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    provenance = [{"data": {"files": [{"sha256": hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest()}]}}]
    with_gpt2 = state["config"] | {"tokenizer": "gpt2"}
    assert dataclasses.replace(run, config=with_gpt2, about=provenance).dataset == "tiny Shakespeare"
    assert dataclasses.replace(run, about=provenance).dataset == ""
    (findings,) = write_report([run], tmp_path)
    assert not [finding for finding in findings if finding.kind == "bad"], findings
    card = ModelCard(model_card(checkpoint))
    assert "| tokenizer | own, 600 tokens |" in card.text
    escaped = r"\<\|done\|\>"  # the tokenizer's files may hold markup
    assert f"Token {state['tokenizer']['end_of_text']}, {escaped}, preceded each document" in card.text
    assert str(root) not in card.content


# Changes of tokenizer.json and tokenizer_config.json that change the tokens of some text
CHANGES = {
    "merge_removed": lambda definition, config: definition["model"]["merges"].pop(20),
    "letters_swapped": lambda definition, config: (ids := definition["model"]["vocab"]).update(a=ids["b"], b=ids["a"]),
    "nfkc": lambda definition, config: definition.update(normalizer={"type": "NFKC"}),
    "no_regex": lambda definition, config: definition["pre_tokenizer"].update(use_regex=False),
    # Other classes than this one take it from tokenizer.json.
    "prefix_space": lambda definition, config: config.update(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
}


def changed_copy(source, directory, change=lambda definition, config: None) -> str:
    """A copy of a tokenizer's directory with a change in its files, and with another layout of their JSON."""
    shutil.copytree(source, directory)
    files = directory / "tokenizer.json", directory / "tokenizer_config.json"
    contents = [json.loads(file.read_text()) for file in files]
    change(*contents)
    for file, content in zip(files, contents, strict=True):
        file.write_text(json.dumps(content, sort_keys=True))
    return str(directory)


def test_the_digest_identifies_the_tokens(trained_run, tmp_path):
    """It changes with the tokens of any text, and not with the files' layout or names, or in a checkpoint's copy."""
    root, _ = trained_run
    changed = [changed_copy(root / "own", tmp_path / name, change) for name, change in CHANGES.items()]
    unchanged = [root / "own", changed_copy(root / "own", tmp_path / "copy"), root / "run" / "step_00000020"]
    (digest,) = {open_tokenizer(str(directory)).digest for directory in unchanged}
    assert len({digest, *(open_tokenizer(directory).digest for directory in changed)}) == 1 + len(CHANGES)


def test_a_run_or_shards_of_another_tokenizer_are_refused(trained_run, tmp_path):
    root, _ = trained_run
    other = save(train_tokenizer(VOCABULARY - 1), tmp_path / "other")
    (data,) = (root / "data").iterdir()

    def error(**fields):
        return refused(run_train(*run_flags(root, max_steps=24, **fields), cwd=root))

    similar = changed_copy(root / "own", tmp_path / "similar", CHANGES["merge_removed"])
    assert "run with other settings: tokenizer own -> similar; restore those" in error(tokenizer=similar)
    namesake = changed_copy(root / "own", tmp_path / "else" / "own", CHANGES["merge_removed"])
    assert "tokenizer own -> another of that name; restore those" in error(tokenizer=namesake)
    message = error(tokenizer=other, output_dir=tmp_path / "run", dataset_name=data)
    assert f"{data} holds shards of another tokenizer" in message
    files = f"{data}/train_*.bin"
    message = error(tokenizer=similar, output_dir=tmp_path / "run", dataset_name=files, val_data=f"{data}/val_*.bin")
    assert f"{files} holds shards of another tokenizer" in message
    copies = shutil.copytree(data, tmp_path / "a" / "data").parent
    (copies / "data" / "manifest.json").write_text('{"by": "another program"}')
    files = f"{copies}/data/train_*.bin"  # taken as they are
    check_tokenizer(files, find_shards(files, "train"), open_tokenizer(similar))
    shutil.copytree(data, copies / "made")
    files = f"{copies}/*/train_*.bin"  # in two directories, of which the second has a manifest
    with pytest.raises(UserError, match="holds shards of another tokenizer"):
        check_tokenizer(files, find_shards(files, "train"), open_tokenizer(similar))
    message = error(tokenizer=other, output_dir=tmp_path / "run", dataset_name=data, train_text=root / "text.txt")
    assert "holds shards of another text or with other settings: tokenizer was" in message


def large_tokenizer(vocab_size: int) -> Tokenizer:
    """Bytes, words that no merge makes, and at the end END."""
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), *(f"word{i}" for i in range(vocab_size - 257)), END]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize("streaming", [False, True])
def test_a_vocabulary_that_uint16_cannot_hold_trains_like_any_other(tmp_path, streaming):
    """As that of Llama 3 or Qwen: text prepared, ids in a column streamed, validated, loaded by transformers."""
    large, n = large_tokenizer(70_000), 70_001
    large.add_special_tokens(["<|user|>"])
    name, texts = save(large, tmp_path / "large"), [TEXT[i * 900 : (i + 1) * 900] for i in range(10)]
    rows = [[n - 1, *ids.tolist()] for ids in open_tokenizer(name).encode(texts)]
    contents = rows if streaming else [f"<|user|>{text}" for text in texts]
    write_jsonl(tmp_path / "chat.jsonl", contents)
    held_out = {"val_documents": 1, "streaming": True} if streaming else {"val_fraction": 0.1}
    fields = {"tokenizer": name, "max_steps": 2, "warmup_steps": 0, "shard_tokens": 2000} | held_out
    command = tiny_flags(tmp_path / "chat.jsonl", tmp_path / "run", **fields)
    if streaming:  # 22.7 kB, and 14.7 if its tokens had two bytes
        error = refused(run_train(*command, "--disk_budget_gb=2e-5", cwd=tmp_path))
        assert "two training shards need 2.27e-05 GB" in error
    ok(run_train(*command, cwd=tmp_path))
    lines, checkpoint = by_step(tmp_path / "run"), tmp_path / "run" / "step_00000002"
    assert math.isclose(lines[1]["loss"], math.log(n), rel_tol=0.02)
    (shards,) = (tmp_path / "data").glob("chat*")
    assert json.loads((shards / "manifest.json").read_text())["dtype"] == "uint32"
    train, validation = (tokens_in(shards, split) for split in ("train", "val"))
    documents = [token for row in rows for token in (n - 2, *row)]
    assert (validation + train if streaming else train + validation)[: len(documents)] == documents
    ok(processes.run("-m", "eval.perplexity", checkpoint, cwd=tmp_path))
    scored = json.loads((checkpoint / "results.json").read_text())["perplexity"]["loss"]
    assert math.isclose(scored, lines[2]["val_loss"], rel_tol=1e-5)
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.vocab_size == n


def test_nanogpts_files_of_a_vocabulary_larger_than_gpt2s_are_read(tmp_path):
    """Tokens alone, with no header that names a format; a run trains on them, and eval/perplexity.py reads them."""
    tokenizer, rng = save(large_tokenizer(60_000), tmp_path / "large"), np.random.default_rng(0)
    ids = rng.integers(50_257, 60_000, (2, 1000))
    for split, row in zip(("train", "val"), ids, strict=True):
        row.astype(np.uint16).tofile(tmp_path / f"{split}.bin")
    command = run_flags(tmp_path, tokenizer=tokenizer, dataset_name=tmp_path, max_steps=1, warmup_steps=0)
    assert "step 1:" in ok(run_train(*command, cwd=tmp_path)).stdout
    windows, *_ = shard_windows(str(tmp_path / "val.bin"), 32, 60_000)
    assert windows[0].tolist() == ids[1][:33].tolist()
    command = tiny_flags(tmp_path, tmp_path / "gpt2")
    assert "train.bin: not a shard of llm.c" in refused(run_train(*command, cwd=tmp_path))


def test_weights_of_another_vocabulary_are_refused(trained_run, tmp_path):
    """Of the same size or not; GPT-2's is the same by any name and from any directory."""
    root, _ = trained_run
    checkpoint, exported = root / "run" / "step_00000020", tmp_path / "exported"
    similar = changed_copy(root / "own", tmp_path / "similar", CHANGES["letters_swapped"])  # of the same size
    GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64).save_pretrained(exported)
    open_tokenizer("gpt2").save(exported, 64)
    (exported / "model.safetensors").touch()

    def start(tokenizer: str, init_from, *options: str) -> subprocess.CompletedProcess:
        paths = {"tokenizer": tokenizer, "init_from": init_from, "output_dir": tmp_path / "run"}
        return run_train(*run_flags(root, **paths), *options, cwd=tmp_path)

    for tokenizer in (similar, "gpt2"):
        error = refused(start(tokenizer, checkpoint))
        assert f"init_from {checkpoint} was trained with another tokenizer than " in error
        assert f"; add --tokenizer {checkpoint}" in error
        assert not (tmp_path / "data").exists()  # nothing was tokenized
    other_shape = "--n_layer=1", "--n_positions=128", "--sequence_length=128", "--total_batch_tokens=512"
    error = start("gpt2", checkpoint, *other_shape).stderr.strip()
    assert " than gpt2 and has n_layer 2 (recipe: 1), n_positions 64 (recipe: 128); add --tokenizer " in error
    ok(start("gpt2", checkpoint, *other_shape, *error.partition("; add ")[2].split(), "--dry_run"))
    old = shutil.copytree(exported, tmp_path / "old")  # as transformers saved a tokenizer in 2020
    (old / "tokenizer.json").unlink()
    ids = open_tokenizer("gpt2").vocabulary()
    for vocabulary, is_other in ((dict(zip(ids, reversed(ids.values()), strict=True)), True), (ids, False)):
        (old / "vocab.json").write_text(json.dumps(vocabulary))
        assert ("was trained with another tokenizer" in start("gpt2", old, "--dry_run").stderr) == is_other
    (old / "vocab.json").unlink()
    note = f"note       not checked: init_from {old} has no tokenizer.json, so it must be a model of tokenizer gpt2"
    assert note in ok(start("gpt2", old, "--dry_run")).stdout
    padded = shutil.copytree(exported, tmp_path / "padded")
    GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64, vocab_size=50_304).save_pretrained(padded)
    assert "has 50,304 embeddings, and tokenizer gpt2 50,257 tokens" in start("gpt2", padded).stderr
    for tokenizer, init_from in ((str(root / "own"), checkpoint), ("gpt2", exported), (str(exported), exported)):
        ok(start(tokenizer, init_from, "--dry_run"))


def test_tokenizers_that_cannot_make_shards_are_refused(tmp_path, monkeypatch):
    characters = Tokenizer(models.BPE(vocab={"a": 0, END: 1}, merges=[]))
    words, broken, random = train_tokenizer(), train_tokenizer(), train_tokenizer()
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # loses blanks, and bytes beyond ASCII
    broken.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])
    random.model.dropout = 0.1
    (tmp_path / "empty").mkdir()
    (tmp_path / "pieces").mkdir()  # as of rinna's Japanese GPT-2s
    (tmp_path / "pieces" / "spiece.model").write_bytes(b"\n\x0e\n\x05<unk>")
    (tmp_path / "pieces" / "tokenizer_config.json").write_text('{"tokenizer_class": "T5Tokenizer"}')
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    cases = {
        str(tmp_path / "pieces"): r"cannot be loaded \(it needs the package sentencepiece: pip install sentencepiece\)",
        save(train_tokenizer(), tmp_path / "no_end", eos_token=None): "has no eos_token, which precedes each document",
        save(characters, tmp_path / "characters"): "loses text: of 'One .*', its tokens give back ''",
        save(words, tmp_path / "words"): "loses text: of .*; give it ByteLevel as its last pre_tokenizer",
        save(broken, tmp_path / "broken"): "loses text: of ",
        save(random, tmp_path / "random"): 'has a dropout of 0.1, .* set "dropout" to null in its tokenizer.json',
        str(tmp_path / "empty"): "cannot be loaded",
        "acme/none": "is not a directory here, and the Hub cannot be reached",
        "data/text-1a2b3c4d/tokenizer": r"name on the Hub; give .* such as a run's checkpoint: --tokenizer runs/",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            open_tokenizer(name)
        assert str(error.value).startswith(f"tokenizer {name}")


def test_the_documented_way_to_train_a_tokenizer(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "data.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    command = re.search(r"`python (recipe/train\.py [^`]*--tokenizer[^`]*)`", page)[1]
    (tmp_path / "recipe").symlink_to(ROOT / "recipe")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    result = ok(processes.run(*command.split(), "--dry_run", cwd=tmp_path))
    assert "model      1,833,728 parameters" in result.stdout  # (8,000 + 128) x 128 + 4 blocks
