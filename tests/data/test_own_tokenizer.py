"""A tokenizer of one's own: its tokens in the shards, its size in the model, its files beside the weights."""

import hashlib
import json
import math
import re
import shutil

import numpy as np
import pytest
from huggingface_hub import ModelCard
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eval import common
from eval.curves import dataset_of, read_run
from eval.perplexity import byte_lengths, shard_windows, summarize, window_losses
from eval.report import write_report
from recipe.data.prepare import prepare
from recipe.data.shards import Manifest
from recipe.data.tokenizer import open_tokenizer
from recipe.hub.model_card import model_card
from recipe.utils.errors import UserError
from tests import processes
from tests.conftest import ROOT, SHAKESPEARE, TINY, by_step, flags, ok, run_train
from tests.data import TEXT, data_of, tokens_in

VOCABULARY, END = 600, "<|done|>"
# A special token as text, spaces, bytes that the training text never had, and a character of four of them.
ODD = f"He said {END} twice:      naïve\r\n\tif x:日本語 🙂  "


def trained(vocab_size: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of tiny Shakespeare."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": [END], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([TEXT[:100_000]], trainers.BpeTrainer(vocab_size=vocab_size - 1, **options))
    tokenizer.add_tokens([AddedToken("    ", normalized=False)])  # as those of code have
    return tokenizer


def saved(tokenizer: Tokenizer, directory, **special) -> str:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return str(directory)


def words(at, **fields) -> list[str]:
    own = {"dataset_name": at / "text.txt", "tokenizer": at / "own", "output_dir": at / "run", "val_fraction": 0.1}
    return flags(**TINY | own | fields)


@pytest.fixture(scope="module")
def trained_run(once):
    """A directory with a text, a tokenizer, and a run of it; what the run printed."""

    def make(at):
        at.mkdir()
        (at / "text.txt").write_text(ODD + TEXT[:50_000])
        saved(trained(), at / "own", eos_token=END)
        arguments = words(at, sample_steps=20, hellaswag_steps=20, hellaswag_limit=4)
        return ok(run_train(*arguments, cwd=at)).stdout

    return once("own_tokenizer", make)


def test_its_end_of_text_separates_documents_too(tmp_path):
    tokenizer = open_tokenizer(saved(trained(), tmp_path / "own", eos_token=END))
    (tmp_path / "d.txt").write_text(f"one{END}two<|endoftext|>three")
    prepare(data_of(tmp_path / "d.txt", tmp_path / "out", tokenizer=str(tmp_path / "own"), val_fraction=0))
    expected = [[tokenizer.end_of_text, *ids] for ids in tokenizer.encode(["one", "two", "three"])]
    assert tokens_in(tmp_path / "out", "train") == [token for document in expected for token in document]


def test_any_text_comes_back(tmp_path):
    """Special tokens in a text are text, and the bytes of its tokens are the text's."""
    tokenizer = open_tokenizer(saved(trained(), tmp_path, eos_token=END))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (VOCABULARY, theirs.eos_token_id)
    for text in (ODD, TEXT[:5000], "", "    "):
        (ids,) = tokenizer.encode([text])
        assert ids.dtype == np.uint16
        assert tokenizer.decode(ids.tolist()).decode() == text
        assert tokenizer.end_of_text not in ids
        assert ids.tolist() == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert byte_lengths(theirs)[ids].sum() == len(text.encode())


def test_the_checkpoint_is_the_runs_model_with_its_tokenizer(trained_run):
    """As transformers loads it: the same tokens, the same loss, and text that comes from them."""
    at, output = trained_run
    checkpoint = at / "run" / "step_00000020"
    tokenizer, model = AutoTokenizer.from_pretrained(checkpoint), AutoModelForCausalLM.from_pretrained(checkpoint)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == VOCABULARY
    special = {model.config.eos_token_id, model.config.bos_token_id, model.generation_config.eos_token_id}
    assert special == {tokenizer.eos_token_id} == {tokenizer.convert_tokens_to_ids(END)}
    assert tokenizer.model_max_length == TINY["n_positions"]

    (data,) = (at / "data").iterdir()
    tokens = tokens_in(data, "train") + tokens_in(data, "val")
    assert tokens[0] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens[1:], clean_up_tokenization_spaces=False) == (at / "text.txt").read_bytes().decode()
    assert max(tokens) < VOCABULARY
    manifest = Manifest.load(data)
    assert (manifest.vocab_size, manifest.end_of_text) == (VOCABULARY, tokenizer.eos_token_id)

    first, last = by_step(at / "run")[0], by_step(at / "run")[20]
    assert first["val_loss"] == pytest.approx(math.log(VOCABULARY), abs=0.1)
    loaded = common.Loaded("own", checkpoint, model.eval(), tokenizer)
    windows = shard_windows(str(data), TINY["sequence_length"])[0][: TINY["eval_tokens"] // TINY["sequence_length"]]
    scores = summarize(loaded, windows, window_losses(loaded, windows, 4, ""))
    assert scores["loss"] == pytest.approx(last["val_loss"], abs=1e-5)
    text = tokenizer.decode(tokens_in(data, "val")[1 : TINY["eval_tokens"] + 1])
    assert scores["bytes"] == len(text.encode())
    assert scores["bits_per_byte"] == pytest.approx(
        scores["loss"] * scores["tokens"] / math.log(2) / len(text.encode())
    )

    prompt = tokenizer("First Citizen:", return_tensors="pt")
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=20)[0].tolist()
    assert tokenizer.decode(ids).encode() == open_tokenizer(str(at / "own")).decode(ids)
    assert "HellaSwag (4 rows)" in output
    assert "step 20: sample " in output


def test_nothing_published_is_shown_beside_other_tokens(trained_run, tmp_path):
    """Tiny Shakespeare has a reference curve, which is of GPT-2's tokens."""
    at, _ = trained_run
    checkpoint, run = at / "run" / "step_00000020", read_run(at / "run")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    about = [{"data": {"files": [{"sha256": hashlib.sha256(SHAKESPEARE.read_bytes()).hexdigest()}]}}]
    assert dataset_of(state["config"] | {"tokenizer": "gpt2"}, about) == "tiny Shakespeare"
    assert dataset_of(state["config"], about) == ""
    (findings,) = write_report([run], tmp_path)
    assert not [finding for finding in findings if finding.kind == "bad"], findings
    card = ModelCard(model_card(checkpoint))
    assert "| tokenizer | own, a byte-level BPE, 600 tokens |" in card.text
    escaped = r"\<\|done\|\>"  # of what a repository's file says
    assert f"Token {state['tokenizer']['end_of_text']}, {escaped}, preceded each document" in card.text
    assert str(at) not in card.content


# In tokenizer.json and tokenizer_config.json; each changes the tokens of some text.
CHANGES = {
    "merge_removed": lambda own, config: own["model"]["merges"].pop(20),
    "nfkc": lambda own, config: own.update(normalizer={"type": "NFKC"}),
    "no_regex": lambda own, config: own["pre_tokenizer"].update(use_regex=False),
    # Other classes take it from tokenizer.json.
    "prefix_space": lambda own, config: config.update(tokenizer_class="GPT2Tokenizer", add_prefix_space=True),
}


def changed(source, directory, change=lambda own, config: None) -> str:
    """A copy of a tokenizer's directory with a change in its files, which are written in another layout."""
    shutil.copytree(source, directory)
    files = directory / "tokenizer.json", directory / "tokenizer_config.json"
    own, config = (json.loads(file.read_text()) for file in files)
    change(own, config)
    for file, content in zip(files, (own, config), strict=True):
        file.write_text(json.dumps(content, sort_keys=True))
    return str(directory)


def test_the_digest_is_that_of_the_tokens(trained_run, tmp_path):
    """Whatever changes the tokens of some text changes the digest; layout, name and a checkpoint's copy do not."""
    at, _ = trained_run
    digests = [open_tokenizer(changed(at / "own", tmp_path / name, change)).digest for name, change in CHANGES.items()]
    same = [at / "own", changed(at / "own", tmp_path / "same"), at / "run" / "step_00000020"]
    (digest,) = {open_tokenizer(str(directory)).digest for directory in same}
    assert len({digest, *digests}) == 1 + len(CHANGES)


def test_another_tokenizer_is_another_run_and_needs_other_shards(trained_run, tmp_path):
    at, _ = trained_run
    other = saved(trained(VOCABULARY - 1), tmp_path / "other", eos_token=END)
    (data,) = (at / "data").iterdir()

    def refused(**fields):
        result = run_train(*words(at, max_steps=24, **fields), cwd=at)
        assert result.returncode == 2, result.stdout + result.stderr
        return result.stderr

    similar = changed(at / "own", tmp_path / "similar", CHANGES["merge_removed"])
    assert "run with other settings: tokenizer own -> similar; restore those" in refused(tokenizer=similar)
    namesake = changed(at / "own", tmp_path / "else" / "own", CHANGES["merge_removed"])
    assert "tokenizer own -> another of that name; restore those" in refused(tokenizer=namesake)
    message = refused(tokenizer=other, output_dir=tmp_path / "run", dataset_name=data)
    assert f"{data} holds shards of another tokenizer" in message
    message = refused(tokenizer=other, output_dir=tmp_path / "run", dataset_name=data, train_text=at / "text.txt")
    assert "holds shards of another text or with other settings: tokenizer was" in message


def test_tokenizers_that_cannot_make_shards_are_refused(tmp_path):
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), *(f"word{i}" for i in range(65_500)), END]
    large = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    characters = Tokenizer(models.BPE(vocab={"a": 0, END: 1}, merges=[]))
    (tmp_path / "empty").mkdir()
    cases = {
        saved(trained(), tmp_path / "no_end"): "has no eos_token, which precedes each document",
        saved(large, tmp_path / "large", eos_token=END): "has 65,757 tokens; shards store uint16, so at most 65,536",
        saved(characters, tmp_path / "characters", eos_token=END): "is not a byte-level BPE, the only kind supported",
        str(tmp_path / "empty"): "cannot be loaded",
        "acme/none": "is not a directory here, and the Hub cannot be reached",
    }
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            open_tokenizer(name)
        assert str(error.value).startswith(f"tokenizer {name}")


def test_the_documented_way_to_train_one(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "data.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    command = re.search(r"`python (recipe/train\.py [^`]*--tokenizer[^`]*)`", page)[1]
    (tmp_path / "recipe").symlink_to(ROOT / "recipe")
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    result = ok(processes.run(*command.split(), "--dry_run", cwd=tmp_path))
    assert "model      1,833,728 parameters" in result.stdout  # (8,000 + 128) x 128 + 4 blocks
