"""A run trains on the data that its flags name, or ends with an error."""

import gzip
import math
import os
import re
from pathlib import Path

import numpy as np
import pytest

from eval.curves import read_run
from recipe.config import DataConfig, batch_arithmetic, parse_config
from recipe.config.catalog import text_files
from recipe.data.open import open_datasets
from recipe.data.prepare import prepare
from recipe.data.tokenizer import encode
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests.conftest import flags, ok, run_train
from tests.data import DOCUMENTS, TEXT, data_of, tokens_in, tokens_of, write_jsonl

SMALL = flags(
    n_layer=1,
    n_head=1,
    n_embd=8,
    n_positions=32,
    sequence_length=32,
    max_steps=2,
    total_batch_tokens=64,
    micro_batch_size=2,
    warmup_steps=0,
    eval_tokens=64,
)


def opened(*words):
    """The training and validation tokens of a run with these flags, of its first two sequences, and its data fields."""
    config = parse_config(["--n_positions=16", "--sequence_length=16", "--total_batch_tokens=32", *map(str, words)])
    with open_datasets(config, batch_arithmetic(config, 1), Processes()) as (train, validation):
        train.sequences(0, 0, 2)
        return train, validation, config.data


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flag", ["dataset_name", "train_text"])
@pytest.mark.parametrize("name", ["mine.txt", "texts", "texts/*.jsonl", "mine.txt.gz"])
def test_text_that_is_named_is_trained_on(here, flag, name):
    """With the default recipe, whose own text is Shakespeare; its shards lie in a directory of their own."""
    (here / "texts").mkdir()
    write_jsonl(here / "texts" / "a.jsonl", DOCUMENTS[:20])
    (here / "mine.txt").write_text(TEXT[5000:9000])
    (here / "mine.txt.gz").write_bytes(gzip.compress(TEXT[5000:9000].encode()))
    before = sorted(path.name for path in (here / "texts").iterdir())
    _, _, data = opened(f"--{flag}={name}")
    expected = tokens_of(DOCUMENTS[:20] if "texts" in name else [TEXT[5000:9000]])
    assert tokens_in(data.dataset_name, "train") + tokens_in(data.dataset_name, "val") == expected
    assert re.fullmatch(r"data/(mine|texts)-[0-9a-f]{8}", data.dataset_name)
    assert sorted(path.name for path in (here / "texts").iterdir()) == before
    assert opened(f"--{flag}={name}", "--val_fraction=0.2")[2].dataset_name != data.dataset_name


@pytest.mark.parametrize("name", ["data", "."])
def test_text_may_lie_where_shards_and_runs_are_made(here, name):
    (here / "data").mkdir()
    write_jsonl(here / "data" / "a.jsonl", DOCUMENTS[:20])
    command = [*SMALL, "--config=shakespeare", "--run_name=r", f"--dataset_name={name}"]
    ok(run_train(*command, cwd=here))
    again = ok(run_train(*command, "--max_steps=4", cwd=here)).stdout
    assert "from step 2" in again
    assert "tokenizing" not in again


def test_a_glob_goes_into_subdirectories(here):
    for number, directory in enumerate(("texts", "texts/more", "texts/more/still")):
        (here / directory).mkdir()
        write_jsonl(here / directory / "a.jsonl", DOCUMENTS[10 * number : 10 * number + 10])
    _, _, data = opened("--dataset_name=texts/**/*.jsonl")
    assert tokens_in(data.dataset_name, "train") + tokens_in(data.dataset_name, "val") == tokens_of(DOCUMENTS[:30])


def test_all_of_a_text_is_trained_on_where_the_validation_data_are_others(here, caplog):
    write_jsonl(here / "train.jsonl", DOCUMENTS[:30])
    (here / "val.txt").write_text(TEXT[5000:9000])
    for words, error in (
        (["--val_data=val.txt"], "is text, but must be shards"),
        (["--val_data=no"], "val_data no: no such"),
    ):
        for dry in ([], ["--dry_run"]):
            result = run_train(*SMALL, "--config=shakespeare", "--dataset_name=train.jsonl", *words, *dry, cwd=here)
            assert (result.returncode, error in result.stderr) == (2, True), result.stderr
            assert not (here / "data").exists(), "nothing was tokenized for that"
    prepare(data_of("val.txt", "data/val", val_fraction=0.0))
    train, validation, _ = opened("--dataset_name=train.jsonl", "--val_data=data/val/train_*.bin")
    assert sum(shard.tokens for shard in train.shards) == len(tokens_of(DOCUMENTS[:30]))
    assert sum(shard.tokens for shard in validation.shards) == len(tokens_of([TEXT[5000:9000]]))


def test_text_that_does_not_match_the_prepared_shards_is_an_error(here):
    write_jsonl(here / "d.jsonl", DOCUMENTS[:30])
    (here / "other.txt").write_text(TEXT[:4000])
    prepare(data_of("d.jsonl", "data/mine"))
    with pytest.raises(UserError, match=r"data/mine holds shards of another text .* --train_text ''"):
        opened("--dataset_name=data/mine", "--train_text=other.txt")
    (here / "d.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(UserError, match=r"data/mine holds shards of another text .*: the text files differ\. Delete"):
        opened("--dataset_name=data/mine", "--train_text=d.jsonl")
    with pytest.raises(UserError, match=r"train_text gone\.txt: no such file"):
        opened("--dataset_name=data/mine", "--train_text=gone.txt")
    opened("--dataset_name=data/mine", "--train_text=")  # as they are


def test_single_files_and_globs_of_tokens(here):
    """nanoGPT's train.bin and val.bin, as files, as a directory, and as a glob that takes both."""
    tokens = np.random.default_rng(0).integers(0, 50257, 3000).astype(np.uint16)
    tokens[:2000].tofile(here / "train.bin")
    tokens[2000:].tofile(here / "val.bin")
    for words in (["--dataset_name=train.bin", "--val_data=val.bin"], [f"--dataset_name={here}"]):
        *datasets, _ = opened(*words)
        assert [[shard.tokens for shard in dataset.shards] for dataset in datasets] == [[2000], [1000]]
    for name in ("*.bin", "train.bin"):
        with pytest.raises(UserError, match="name validation files in val_data, or give only the directory"):
            opened(f"--dataset_name={name}")


def test_the_command_line_names_the_data_and_never_inherits_a_recipes_text(here):
    def data(*words) -> DataConfig:
        return parse_config(list(words)).data

    large = data("--config=gpt2-large", "--dataset_name=tinystories")
    assert (large.train_text, large.dataset_config) == ("roneneldan/TinyStories", "")
    for words, stem in (
        (["--dataset_name=tinystories"], "TinyStories"),
        ([], "fineweb-edu-sample-100BT"),
        (["--dataset_config=sample-10BT"], "fineweb-edu-sample-10BT"),
    ):
        assert re.fullmatch(rf"data/{stem}-[0-9a-f]{{8}}", data("--config=gpt2-large", *words).dataset_name)
    hub = data("--dataset_name=HuggingFaceFW/fineweb-edu", "--dataset_config=x")
    assert (hub.train_text, hub.dataset_config) == ("HuggingFaceFW/fineweb-edu", "x")
    assert data("--dataset_name=anywhere").train_text == ""
    assert data("--dataset_name=data/shakespeare").train_text.endswith("tiny_shakespeare.txt")  # the recipe's own
    assert data("--dataset_name=somewhere", "--train_text=a/b").train_text == "a/b"
    (here / "tinystories").mkdir()
    assert data("--dataset_name=tinystories").train_text == ""  # a directory that is there comes first


def test_a_recipe_streams_another_data_set_of_the_hub_too_and_nothing_that_is_here(here):
    def streams(*words) -> bool:
        return parse_config(["--config=gpt2", *words]).data.streaming

    (here / "mine.txt").write_text("text")
    assert streams()
    assert streams("--dataset_name=tinystories")
    assert streams("--dataset_name=some/where")
    assert streams("--dataset_name=local/shards", "--train_text=some/where")
    assert not streams("--dataset_name=mine.txt")
    assert not streams("--dataset_name=shards/*.bin", "--val_data=shards")
    assert streams("--dataset_name=mine.txt", "--streaming=true")


def test_a_run_on_bin_files_declares_what_they_are(here):
    """So that the reference curves and OpenAI's loss for that data set are shown, as for the data set itself."""
    for split, first in (("train", 0), ("val", 1)):
        tokens = np.random.default_rng(first).integers(0, 50257, 3000).astype(np.uint16)
        tokens.tofile(here / f"{split}.bin")
    for number, words in enumerate((["--dataset_name=."], ["--dataset_name=train.bin", "--val_data=val.bin"])):
        run = here / f"run{number}"
        declared = [*words, "--dataset_source=openwebtext", f"--output_dir={run}", *SMALL]
        ok(run_train(*declared, cwd=here))
        assert read_run(run).dataset == "OpenWebText"
    for words, message in (
        (["--dataset_name=fineweb", "--dataset_source=openwebtext"], "dataset_source is for .bin files"),
        (["--dataset_name=.", "--dataset_source=open/web/text"], "dataset_source 'open/web/text' must be ORG/NAME"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_config(words)


@pytest.mark.parametrize("flag", ["dataset_name", "train_text"])
@pytest.mark.parametrize("name", ["code", "empty", "none.txt", "no/none.txt", "*.txt", "wikitext"])
def test_data_that_cannot_be_read_is_an_error_of_two_lines(here, flag, name):
    """What was found, and what to give instead."""
    (here / "code").mkdir()
    (here / "empty").mkdir()
    for file in ("code/a.py", "code/Makefile"):
        (here / file).write_text("text\na")
    problem = (
        "no such file, directory or data set\ngive text or .bin files, .*ORG/NAME on the Hub, or one of fineweb-edu,"
    )
    if name in ("code", "empty"):
        files = r"2 other files \.py Makefile" if name == "code" else "0 other files "
        problem = rf"a directory without text or shards; it holds {files}\ngive \.txt, .*\.zst\) or \.bin .*'{name}/\*'"
    with pytest.raises(UserError, match=rf"^{flag} {re.escape(name)}: {problem}"):
        opened(f"--{flag}={name}")


def test_epochs_of_the_data_decide_the_length_and_are_named(here):
    """In place of the recipe's max_steps; 1.5 epochs of sequences of 32 tokens, two a step."""
    (here / "mine.txt").write_text(TEXT[:9000])
    words = ["--dataset_name=mine.txt", *(word for word in SMALL if not word.startswith("--max_steps"))]

    def run(*more):
        return run_train(*words, *more, cwd=here)

    ran = run("--num_train_epochs=1.5", "--dry_run")
    assert "before the text is prepared" in ran.stderr
    ran = ok(run("--num_train_epochs=1.5"))
    (shards,) = (here / "data").iterdir()
    windows = (len(tokens_in(shards, "train")) - 1) // 32
    steps = math.ceil(1.5 * windows / 2)
    assert f"length     {steps} steps" in ran.stdout
    assert f"epochs     {steps * 2 / windows:.3g} of these data\n" in ran.stdout
    assert f"step_{steps:08d}" in ran.stdout
    assert "training is finished" in run("--num_train_epochs=1.5").stdout
    many = run(f"--max_steps={2 * windows}", "--dry_run")
    assert "epochs     4 of these data; from four on, more text helps more" in many.stdout
    for more, message in (
        (["--max_steps=5", "--num_train_epochs=2"], "num_train_epochs and max_steps set the length"),
        (["--num_train_epochs=2", "--streaming=true", "--val_documents=1"], "the data are a stream (data/mine-"),
        (["--num_train_epochs=0.001", "--warmup_steps=9"], "warmup_steps 9 must be below max_steps 1"),
    ):
        ran = run(*more)
        assert ran.returncode == 2
        assert message in ran.stderr


def test_characters_are_not_trained_on_as_tokens(here):
    """nanoGPT's data/shakespeare_char: 65 characters."""
    ids = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    tokens = np.array([ids[character] for character in TEXT], np.uint16)
    tokens[:1_003_854].tofile(here / "train.bin")
    tokens[1_003_854:].tofile(here / "val.bin")
    for words in (["--dataset_name=."], ["--dataset_name=train.bin", "--val_data=val.bin"]):
        with pytest.raises(UserError, match=r"train\.bin: no token .* above 64, .*docs/data\.md"):
            opened(*words)
    for split, text in (("train", TEXT[:800_000]), ("val", TEXT[800_000:])):  # its data/shakespeare
        encode(text).tofile(here / f"{split}.bin")
    opened("--dataset_name=.")


def test_a_subdirectory_that_cannot_be_read_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    """pathlib would skip it. What is hidden, and lost+found of a disk that is mounted there, is nobody's text."""
    for name in ("part-1", "part-2", ".trash", "lost+found"):
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / "a.txt").write_text(TEXT)
    denied, scandir = {".trash", "lost+found"}, os.scandir

    def refusing(path="."):
        if Path(path).name in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # root may read everything
    assert {path.parent.name for path in text_files(str(tmp_path / "books"))[0]} == {"part-1", "part-2"}
    denied.add("part-2")
    with pytest.raises(UserError, match=r"books/part-2: Permission denied; make it readable, or move it away"):
        parse_config([f"--dataset_name={tmp_path / 'books'}"])
