"""A run trains on the data that its flags name, or ends with an error."""

import gzip
import json
import math
import os
import re
import shlex
import subprocess
from pathlib import Path

import datasets
import numpy as np
import pytest

from eval.common import trainer_config
from eval.curves import read_run
from eval.perplexity import shard_windows
from recipe.config import DataConfig, batch_arithmetic, parse_config
from recipe.config.catalog import is_text, text_files
from recipe.data.documents import Column, TextFiles
from recipe.data.open import open_datasets
from recipe.data.prepare import must_prepare, prepare
from recipe.data.producer import open_text
from recipe.data.shards import Manifest, open_shard
from recipe.data.tokenizer import encode, open_tokenizer, train_tokenizer
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests.conftest import flags, ok, refused, run_train
from tests.data import DOCUMENTS, TEXT, data_of, tokens_in, tokens_of, write_jsonl, write_shard

SMALL = flags(n_layer=1, n_head=1, n_embd=8, n_positions=32, sequence_length=32)
SMALL += flags(total_batch_tokens=64, micro_batch_size=2, max_steps=2, warmup_steps=0, eval_tokens=64)


def opened(*words):
    """The training and validation data of a run with these flags, after reading two sequences, and its DataConfig."""
    config = parse_config(["--n_positions=16", "--sequence_length=16", "--total_batch_tokens=32", *map(str, words)])
    with open_datasets(config, batch_arithmetic(config, 1), Processes()) as (train, validation):
        train.sequences(0, 0, 2)
        return train, validation, config.data


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("flag", ["dataset_name", "train_text"])
@pytest.mark.parametrize("name", ["mine.txt", "texts", "texts/*.jsonl", "mine.txt.gz"])
def test_a_run_trains_on_the_text_that_is_named(workdir, flag, name):
    """Although the default recipe has a text. The shards go into a directory that depends on text and settings."""
    (workdir / "texts").mkdir()
    write_jsonl(workdir / "texts" / "a.jsonl", DOCUMENTS[:20])
    (workdir / "mine.txt").write_text(TEXT[5000:9000])
    (workdir / "mine.txt.gz").write_bytes(gzip.compress(TEXT[5000:9000].encode()))
    files = sorted((workdir / "texts").iterdir())
    _, _, data = opened(f"--{flag}={name}")
    expected = tokens_of(DOCUMENTS[:20] if "texts" in name else [TEXT[5000:9000]])
    assert tokens_in(data.dataset_name, "train") + tokens_in(data.dataset_name, "val") == expected
    assert re.fullmatch(r"data/(mine|texts)-[0-9a-f]{8}", data.dataset_name)
    assert sorted((workdir / "texts").iterdir()) == files
    assert opened(f"--{flag}={name}", "--val_fraction=0.2")[2].dataset_name != data.dataset_name


@pytest.mark.parametrize("name", ["data", "."])
def test_text_may_be_in_the_directory_of_shards_or_of_runs(workdir, name):
    (workdir / "data").mkdir()
    write_jsonl(workdir / "data" / "a.jsonl", DOCUMENTS[:20])
    command = [*SMALL, "--config=shakespeare", "--run_name=r", f"--dataset_name={name}"]
    ok(run_train(*command, cwd=workdir))
    output = ok(run_train(*command, "--max_steps=4", cwd=workdir)).stdout
    assert "from step 2" in output
    assert "tokenizing" not in output


def test_with_val_data_all_of_the_text_is_trained_on(workdir, in_process):
    """Whether val_data names shards or text."""
    write_jsonl(workdir / "train.jsonl", DOCUMENTS[:30])
    (workdir / "val.txt").write_text(TEXT[5000:9000])
    (workdir / "empty.txt").touch()
    for val_data, message in (
        ("no", "val_data no: no such file or directory\ngive text or .bin files"),
        ("empty.txt", "empty.txt: holds no text"),
    ):
        command = [*SMALL, "--dataset_name=train.jsonl", f"--val_data={val_data}"]
        for extra in ([], ["--dry_run"], ["--val_documents=5", "--streaming=true"]):
            assert message in refused(in_process([*command, *extra]))
            assert not (workdir / "data").exists()  # nothing was tokenized
        assert message in refused(in_process(["prepare", "--dataset_name=train.jsonl", f"--val_data={val_data}"]))
        assert not [*workdir.glob("data/train*")]
    prepare(data_of("val.txt", "data/val", val_fraction=0.0))
    for val_data in ("data/val/train_*.bin", "val.txt"):
        for fields in ([], ["--val_documents=5"], ["--val_documents=5", "--streaming=true"]):
            _, validation, data = opened("--dataset_name=train.jsonl", f"--val_data={val_data}", *fields)
            assert tokens_in(data.dataset_name, "train") == tokens_of(DOCUMENTS[:30])
            tokens = np.concatenate([open_shard(shard).read() for shard in validation.shards]).tolist()
            assert tokens == tokens_of([TEXT[5000:9000]])


def test_a_text_for_validation_alone(workdir, in_process):
    """Beside shards, and in an entry of a mixture; `prepare` makes its shards, which evaluation reads."""
    write_shard(workdir / "train.bin", tokens_of(DOCUMENTS[:30]))
    write_jsonl(workdir / "train.jsonl", DOCUMENTS[:30])
    (workdir / "val.txt").write_text(TEXT[5000:9000])
    fields = ["--dataset_name=train.bin", "--val_data=val.txt"]
    plan = ok(in_process([*SMALL, *fields, "--dry_run"])).stdout
    assert "val.txt, to be prepared as shards in data/val-" in plan
    ok(in_process(["prepare", *fields]))
    output = ok(in_process([*SMALL, *fields, "--run_name=r"])).stdout
    assert "tokenizing" not in output
    assert "validation 1,131 tokens in 1 shard of val.txt" in output
    output = ok(in_process([*SMALL, *fields, "--run_name=r", "--max_steps=4"])).stdout
    assert ("from step 2" in output, "resuming with val" in output) == (True, False), output
    (checkpoint,) = workdir.glob("runs/r/step_*4")
    windows, *_ = shard_windows(trainer_config(checkpoint)["val_data"], 32)
    assert windows[0].tolist() == tokens_of([TEXT[5000:9000]])[:33], "make eval-val finds them"
    (workdir / "val.jsonl").write_text(json.dumps({"content": TEXT[5000:9000]}))
    fields = ["--dataset_name=train.bin", "--val_data=val.jsonl", "--text_column=content"]
    assert opened(*fields)[1].shards[0].tokens == len(tokens_of([TEXT[5000:9000]]))
    (workdir / "other.txt").write_text(TEXT[9000:12000])
    ok(in_process(["prepare", "--dataset_name=train.jsonl", "--val_data=other.txt"]))
    assert {path.name.partition("-")[0] for path in Path("data").iterdir()} == {"train", "val", "other"}
    entries = "[{name: train.bin, weight: 1, val_data: val.txt}, {name: train.jsonl, weight: 1, val_data: val.txt}]"
    ok(in_process([*SMALL, f"--dataset_name={entries}", "--run_name=mixed"]))


@pytest.mark.parametrize("extra", ["--dry_run", "--max_steps=2", "--num_train_epochs=1", "--streaming=true"])
def test_text_of_which_nothing_is_held_out_is_refused_before_it_is_tokenized(workdir, in_process, extra):
    """Not after hours of preparing it: a run needs a validation loss."""
    (workdir / "my.txt").write_text(TEXT[:9000])
    words = [word for word in SMALL if "epochs" not in extra or not word.startswith("--max_steps")]
    error = refused(in_process([*words, "--dataset_name=my.txt", "--val_fraction=0", extra]))
    assert "val_fraction 0 holds out nothing of my.txt for validation; set it above 0, or " in error
    assert not (workdir / "data").exists()


def test_text_that_does_not_match_the_prepared_shards_is_an_error(workdir):
    write_jsonl(workdir / "d.jsonl", DOCUMENTS[:30])
    (workdir / "other.txt").write_text(TEXT[:4000])
    prepare(data_of("d.jsonl", "data/mine"))
    with pytest.raises(UserError, match=r"data/mine holds shards of another text .* --train_text ''"):
        opened("--dataset_name=data/mine", "--train_text=other.txt")
    (workdir / "d.jsonl").write_text('{"text": "changed"}\n')
    with pytest.raises(UserError, match=r"data/mine holds shards of another text .*: the text files differ\. Delete"):
        opened("--dataset_name=data/mine", "--train_text=d.jsonl")
    with pytest.raises(UserError, match=r"train_text gone\.txt: no such file"):
        opened("--dataset_name=data/mine", "--train_text=gone.txt")
    opened("--dataset_name=data/mine", "--train_text=")  # as they are


def test_shards_of_a_text_that_has_changed_can_be_trained_on_with_the_flags_that_the_error_names(workdir):
    """Also where the run names the text, whose shards are in a directory of their own."""
    (workdir / "my.txt").write_text(TEXT[:4000])
    opened("--dataset_name=my.txt")
    (workdir / "my.txt").write_text(TEXT[:3000])
    with pytest.raises(UserError, match="as they are with ") as error:
        opened("--dataset_name=my.txt")
    proposed = shlex.split(str(error.value).partition("as they are with ")[2])
    train, _, _ = opened("--dataset_name=my.txt", *proposed)
    assert sum(shard.tokens for shard in train.shards) > len(tokens_of([TEXT[:3000]])) * 0.99


def test_a_run_whose_validation_text_has_changed_continues_with_the_flag_that_the_error_names(workdir, in_process):
    (workdir / "train.txt").write_text(TEXT[:40_000])
    (workdir / "val.txt").write_text(TEXT[:4000])
    command = [*SMALL, "--dataset_name=train.txt", "--run_name=r"]
    ok(in_process([*command, "--val_data=val.txt"]))
    (workdir / "val.txt").write_text(TEXT[:3000])
    error = refused(in_process([*command, "--val_data=val.txt", "--max_steps=4"]))
    proposed = shlex.split(error.partition("validate on them as they are with ")[2])
    output = ok(in_process([*command, *proposed, "--max_steps=4"])).stdout
    assert ("from step 2" in output, "cannot be compared" in output) == (True, False), output


@pytest.mark.parametrize(("name", "problem"), [("my.txt", "is a file"), ("texts", r"holds other files \(a\.txt\)")])
def test_a_text_in_the_place_of_the_shards_of_another_is_refused(workdir, name, problem):
    """As in a copy of the default recipe of which only dataset_name was edited; a dry run checks it too."""
    (workdir / "texts").mkdir()
    for path in ("my.txt", "texts/a.txt", "other.txt"):
        (workdir / path).write_text(TEXT[:4000])
    (workdir / "mine.yaml").write_text(f"dataset_name: {name}\ntrain_text: other.txt\n")
    for data_check in (prepare, must_prepare):
        with pytest.raises(UserError, match=f"{name} is to hold .* other.txt, but {problem}; .* remove train_text"):
            data_check(parse_config(["--config=mine.yaml"]).data)
    (workdir / "mine.yaml").write_text(f"dataset_name: {name}\n")
    opened("--config=mine.yaml", "--val_fraction=0.1")


def test_text_beside_a_foreign_bin_file_in_a_subdirectory_is_read_where_it_is_named_as_text(workdir):
    """Which once was 'a directory without text'."""
    (workdir / "texts" / "model").mkdir(parents=True)
    (workdir / "texts" / "a.txt").write_text(TEXT[:4000])
    (workdir / "texts" / "model" / "pytorch_model.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match=r"texts: holds text, but also .bin files .*; to read text alone,") as error:
        opened("--dataset_name=texts")
    pattern = str(error.value).split("'")[1]
    assert tokens_in(opened(f"--dataset_name={pattern}", "--val_fraction=0.1")[2].dataset_name, "train")


def test_nanogpts_files_are_read_and_a_glob_of_both_is_refused(workdir):
    """train.bin and val.bin, named as files or by their directory."""
    tokens = np.random.default_rng(0).integers(0, 50257, 3000).astype(np.uint16)
    tokens[:2000].tofile(workdir / "train.bin")
    tokens[2000:].tofile(workdir / "val.bin")
    for words in (["--dataset_name=train.bin", "--val_data=val.bin"], [f"--dataset_name={workdir}"]):
        *datasets, _ = opened(*words)
        assert [[shard.tokens for shard in dataset.shards] for dataset in datasets] == [[2000], [1000]]
    for name in ("*.bin", "train.bin"):
        with pytest.raises(UserError, match="name validation files in val_data, or give only the directory"):
            opened(f"--dataset_name={name}")


def test_a_data_set_on_the_command_line_never_inherits_the_recipes_text(workdir):
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
    known = data("--dataset_name=somewhere", "--train_text=fineweb-edu")
    assert known.dataset_name == "somewhere"
    assert (known.train_text, known.dataset_config) == ("HuggingFaceFW/fineweb-edu", "sample-10BT")
    (workdir / "tinystories").mkdir()
    assert data("--dataset_name=tinystories").train_text == ""  # a directory comes before a known name


def test_a_streaming_recipe_streams_data_of_the_hub_and_not_of_this_disk(workdir):
    def streams(*words) -> bool:
        return parse_config(["--config=gpt2", *words]).data.streaming

    (workdir / "mine.txt").write_text("text")
    assert streams()
    assert streams("--dataset_name=tinystories")
    assert streams("--dataset_name=some/where")
    assert streams("--dataset_name=local/shards", "--train_text=some/where")
    assert not streams("--dataset_name=mine.txt")
    assert not streams("--dataset_name=shards/*.bin", "--val_data=shards")
    assert streams("--dataset_name=mine.txt", "--streaming=true")


def test_dataset_source_declares_what_bin_files_are(workdir):
    """So that the report compares them with the published losses of that data set."""
    for seed, split in enumerate(("train", "val")):
        tokens = np.random.default_rng(seed).integers(0, 50257, 3000).astype(np.uint16)
        tokens.tofile(workdir / f"{split}.bin")
    for number, words in enumerate((["--dataset_name=."], ["--dataset_name=train.bin", "--val_data=val.bin"])):
        run = workdir / f"run{number}"
        ok(run_train(*words, "--dataset_source=openwebtext", f"--output_dir={run}", *SMALL, cwd=workdir))
        assert read_run(run).dataset == "OpenWebText"
    for words, message in (
        (["--dataset_name=fineweb", "--dataset_source=openwebtext"], "dataset_source is for .bin files"),
        (["--dataset_name=.", "--dataset_source=open/web/text"], "dataset_source 'open/web/text' must be ORG/NAME"),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            parse_config(words)


@pytest.mark.parametrize("flag", ["dataset_name", "train_text"])
@pytest.mark.parametrize("name", ["code", "empty", "none.txt", "no/none.txt", "*.txt", "wikitext"])
def test_data_that_cannot_be_read_is_an_error_of_two_lines(workdir, flag, name):
    """One says what is there, the other what to give instead."""
    (workdir / "code").mkdir()
    (workdir / "empty").mkdir()
    for file in ("code/a.py", "code/Makefile"):
        (workdir / file).write_text("text\na")
    problem = "no such file, directory or data set\ngive text or .bin files, .*ORG/NAME on the Hub, or one of fineweb"
    if name in ("code", "empty"):
        files = r"; it holds 2 other files \.py Makefile" if name == "code" else ""
        problem = rf"a directory without text or shards{files}\ngive \.txt, .*\.zst\) or \.bin .*'{name}/\*'"
    with pytest.raises(UserError, match=rf"^{flag} {re.escape(name)}: {problem}"):
        opened(f"--{flag}={name}")


def test_a_working_directory_may_move(workdir, monkeypatch, in_process):
    """With its text, tokenizer, shards and runs: a clone that is moved, or mounted in a container. Nothing is tokenized
    again, and a complete run is complete, unless the text has changed."""
    (workdir / "old").mkdir()
    (workdir / "old/mine.txt").write_text(TEXT[:9000])
    train_tokenizer([TEXT[:9000]], str(workdir / "old/own"), vocab_size=300)

    def run(directory: str, *words: str) -> subprocess.CompletedProcess:
        monkeypatch.chdir(workdir / directory)
        paths = flags(dataset_name=Path("mine.txt").absolute(), tokenizer=Path("own").absolute())
        return in_process([*paths, *SMALL, "--run_name=mine", *words])

    ok(run("old"))
    (workdir / "old").rename(workdir / "new")
    assert "training is finished" in ok(run("new")).stdout
    ok(run("new", "--max_steps=9"))
    assert len([*(workdir / "new/data").iterdir()]) == 1
    (workdir / "new/mine.txt").write_text(TEXT[1:9001])
    assert "mine.txt has changed since then" in refused(run("new", "--max_steps=9"))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_complete_run_is_complete_where_the_shards_of_its_text_have_another_name(workdir, in_process, mixed):
    """By its command, or by a newer version; but not if any file of its text has changed: a checkpoint names the first
    ten of twelve."""
    (workdir / "texts").mkdir()
    for number in range(12):
        (workdir / f"texts/{number:02d}.txt").write_text(TEXT[1000 * number :][:1000])
    (workdir / "more.txt").write_text(TEXT[12_000:21_000])

    def run(directory: str) -> subprocess.CompletedProcess:
        if mixed:
            entry = f"train_text: texts, weight: 1, name: {directory}"
            argv = [f"--dataset_name=[{{{entry}}}, {{name: more.txt, weight: 1}}]"]
        else:
            argv = flags(train_text="texts", dataset_name=directory)
        return in_process([*argv, *SMALL, "--val_fraction=0.1", "--run_name=mine"])

    ok(run("old"))
    assert "training is finished" in ok(run("new")).stdout
    (workdir / "texts/11.txt").write_text(TEXT[:1000])
    assert "is complete, but texts has changed since then" in refused(run("new"))


def test_a_complete_run_that_is_repeated_with_another_split_of_its_text_is_told_which(workdir, in_process):
    (workdir / "mine.txt").write_text(TEXT[:9000])
    ok(in_process(["--dataset_name=mine.txt", *SMALL, "--val_fraction=0.1"]))
    error = refused(in_process(["--dataset_name=mine.txt", *SMALL, "--val_fraction=0.2"]))
    assert "is complete, but was trained with val_fraction 0.1, not 0.2; choose" in error
    (workdir / "other.txt").write_text(TEXT[9000:18000])
    prepare(data_of("other.txt", "data/val", val_fraction=0.0))
    argv = ["--dataset_name=mine.txt", *SMALL, "--val_fraction=0.1", "--val_data=data/val/train_*.bin"]
    error = refused(in_process(argv))  # trains on all of mine.txt
    assert "is complete, but was trained with val_data '', not 'data/val" in error


def test_a_text_and_a_tokenizer_give_the_same_shards_however_their_paths_are_written(workdir, monkeypatch):
    """Relative, absolute, with `..`, and through a link to the working directory, as /home often is."""
    (workdir / "work").mkdir()
    (workdir / "link").symlink_to(workdir / "work")
    for name in ("work/inside.txt", "outside.txt"):
        (workdir / name).write_text(TEXT[:9000])
    train_tokenizer([TEXT[:9000]], str(workdir / "work/own"), vocab_size=300)
    monkeypatch.chdir(workdir / "work")

    def shards_of(text, tokenizer="own") -> str:
        return parse_config(flags(dataset_name=text, tokenizer=tokenizer)).data.dataset_name

    inside, outside = shards_of("inside.txt"), shards_of(workdir / "outside.txt")
    assert inside != outside
    for place in (".", "../work", workdir / "work", workdir / "link"):
        assert shards_of(f"{place}/inside.txt", f"{place}/own") == inside
        assert shards_of(f"{place}/../outside.txt") == outside
    assert shards_of("inside.txt", "gpt2") not in (inside, outside)


def test_num_train_epochs_replaces_max_steps(workdir):
    """Sequences have 32 tokens, and a step has two."""
    (workdir / "mine.txt").write_text(TEXT[:9000])
    words = ["--dataset_name=mine.txt", *(word for word in SMALL if not word.startswith("--max_steps"))]

    def run(*length):
        return run_train(*words, *length, cwd=workdir)

    assert "before the text is prepared" in run("--num_train_epochs=1.5", "--dry_run").stderr
    output = ok(run("--num_train_epochs=1.5")).stdout
    (shards,) = (workdir / "data").iterdir()
    windows = (len(tokens_in(shards, "train")) - 1) // 32
    steps = math.ceil(1.5 * windows / 2)
    assert f"length     {steps} steps" in output
    assert f"epochs     {steps * 2 / windows:.3g} over data/" in output
    assert f"step_{steps:08d}" in output
    assert "training is finished" in run("--num_train_epochs=1.5").stdout
    dry_run = run(f"--max_steps={2 * windows}", "--dry_run")
    assert "; from four on, more text helps more" in dry_run.stdout
    with pytest.raises(UserError, match="num_train_epochs and max_steps set the length"):
        parse_config(["--max_steps=5", "--num_train_epochs=2"])
    for length, message in (
        (["--num_train_epochs=2", "--streaming=true", "--val_documents=1"], "the data are a stream (data/mine-"),
        (["--num_train_epochs=0.001", "--warmup_steps=9"], "warmup_steps 9 must be below max_steps 1"),
        (["--num_train_epochs=1", "--total_batch_tokens=16"], "total_batch_tokens 16 is less than one sequence of 32"),
    ):
        assert message in refused(run(*length))


def test_tokens_of_characters_are_refused(workdir):
    """nanoGPT's data/shakespeare_char: 65 characters."""
    ids = {character: i for i, character in enumerate(sorted(set(TEXT)))}
    tokens = np.array([ids[character] for character in TEXT], np.uint16)
    tokens[:1_003_854].tofile(workdir / "train.bin")
    tokens[1_003_854:].tofile(workdir / "val.bin")
    for words in (["--dataset_name=."], ["--dataset_name=train.bin", "--val_data=val.bin"]):
        with pytest.raises(UserError, match=r"train\.bin: no token .* above 64, .*docs/data\.md"):
            opened(*words)
    for split, text in (("train", TEXT[:800_000]), ("val", TEXT[800_000:])):  # its data/shakespeare
        encode(text).tofile(workdir / f"{split}.bin")
    opened("--dataset_name=.")


def test_tokens_that_may_be_of_a_smaller_vocabulary_are_a_warning(workdir, caplog):
    """As llama2.c's, of 32,000 tokens: a text of sums has no larger ones of GPT-2's."""
    rng = np.random.default_rng(0)
    for vocab_size, is_warning in ((32_000, True), (50_257, False)):
        for split in ("train", "val"):
            rng.integers(0, vocab_size, 200_000).astype(np.uint16).tofile(workdir / f"{split}.bin")
        opened("--dataset_name=.")
        warning = "train.bin: no token of its first 200,000 is above 31,999, and GPT-2's text usually"
        assert (warning in caplog.text) == is_warning
        caplog.clear()


def test_tokens_beyond_the_vocabulary_are_refused_before_the_run(workdir):
    for split in ("train", "val"):
        write_shard(workdir / f"{split}_0.bin", np.full(200_000, 60_000))
    with pytest.raises(UserError, match=r"train_0\.bin: holds token 60000, but GPT-2's vocabulary ends at 50256"):
        opened("--dataset_name=.")


@pytest.mark.parametrize(
    ("names", "held_out"),
    [
        (["data/test-0-of-1.parquet", "data/train-0-of-1.parquet"], ["data/test-0-of-1.parquet"]),
        (["Dev/a.txt", "TRAIN/test.txt"], ["Dev/a.txt"]),
        (["wiki.test.txt", "wiki.train.txt", "wiki.valid.txt"], ["wiki.test.txt", "wiki.valid.txt"]),
        (["test.txt", "notes.txt", "contest-2.txt"], []),
        (["guide/training.md", "guide/testing.md"], []),
    ],
)
def test_a_split_beside_a_training_split_is_not_trained_on(tmp_path, caplog, names, held_out):
    """As load_dataset reads a directory. A glob says what its writer wants."""
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = TextFiles(str(tmp_path), Column("text", open_tokenizer("gpt2")))
    text.pin(Manifest({}, {}))
    assert {os.path.relpath(path, tmp_path) for path in text.paths} == {*names} - {*held_out}
    more = f" and {len(held_out) - 1} more" if held_out[1:] else ""
    warnings = [f"beside a training split: {tmp_path / held_out[0]}{more}; val_data"] if held_out else []
    assert len(caplog.messages) == len(warnings)
    assert all(warning in caplog.text for warning in warnings)
    assert len(TextFiles(f"{tmp_path}/**/*.*", text.column).paths) == len(names)


def test_the_training_split_that_save_to_disk_wrote_is_trained_on(tmp_path, caplog):
    splits = {name: datasets.Dataset.from_dict({"text": [name]}) for name in ("test", "train")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    text = open_text(parse_config([f"--dataset_name={tmp_path / 'saved'}"]).data)
    assert [piece.content for piece in text.pieces()] == ["train"]
    text.pin(Manifest({}, {}))
    assert f"beside a training split: {tmp_path}/saved/test/data-00000-of-00001.arrow;" in caplog.text


def test_a_copy_of_a_hub_data_set_is_read_as_load_dataset_reads_it(workdir):
    """Of subsets in one repository, such as wikitext's, and of files beside them, such as TinyStories' .txt, only what
    README.md gives; none of them mixed with another."""
    card = "---\nlicense: mit\nconfigs:\n"
    for number, subset in enumerate(("raw", "tokenized")):
        card += f"- config_name: {subset}\n  data_files:\n"
        for split, start in (("train", 0), ("test", 20)):
            card += f"  - split: {split}\n    path: {subset}/{split}-*\n"
            (path := workdir / f"copy/{subset}/{split}-0.jsonl").parent.mkdir(parents=True, exist_ok=True)
            write_jsonl(path, DOCUMENTS[100 * number + start :][:20])
    card += "- config_name: all\n  data_dir: raw\n- config_name: none\n  data_files: [none/*.jsonl, ../d.jsonl, 'http://[::1]/d']\n"
    (workdir / "copy/README.md").write_text(f"{card}---\n# Text\n")
    write_jsonl(workdir / "copy/raw-train.jsonl", DOCUMENTS[200:220])

    def tokens(*words) -> list[int]:
        directory = opened(*words)[2].dataset_name
        return tokens_in(directory, "train") + tokens_in(directory, "val")

    (workdir / "val.txt").write_text(TEXT[5000:9000])
    subset = ["--dataset_name=copy", "--dataset_config=tokenized"]
    assert tokens(*subset) == tokens_of(DOCUMENTS[100:120])
    assert tokens(*subset, "--dataset_split=test") == tokens_of(DOCUMENTS[120:140])
    text = opened(*subset, "--val_data=val.txt")[2].dataset_name
    assert tokens_in(text, "train") == tokens_of(DOCUMENTS[100:120])
    for words in (["copy", "--dataset_config=all"], ["copy/raw/train*"]):
        assert tokens(f"--dataset_name={words[0]}", *words[1:]) == tokens_of(DOCUMENTS[:20])
    write_jsonl(workdir / "d.jsonl", DOCUMENTS[:20])
    for words, message in (
        (
            ["copy"],
            "copy/README.md: choose one of its subsets with --dataset_config: raw, tokenized, all, none; or name",
        ),
        (
            ["copy", "--dataset_config=none"],
            r"README.md: no text of none train is there \(none/\*.jsonl, ../d.jsonl, http://\[::1\]/d\); or",
        ),
        (
            ["copy", "--dataset_config=raw", "--dataset_split=dev"],
            "choose a split of raw with --dataset_split: train, test",
        ),
        (["d.jsonl", "--dataset_config=raw"], "d.jsonl: no README.md there says which files are 'raw train'"),
        (["copy/raw", "--dataset_split=test"], "copy/raw: .* which files are 'test'; .* name files by a quoted glob"),
    ):
        with pytest.raises(UserError, match=message):
            opened(f"--dataset_name={words[0]}", *words[1:])


def test_a_subdirectory_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """pathlib would skip it. Hidden directories and lost+found are skipped, since they hold no text of the user's."""
    for name in ("part-1", "part-2", ".trash", "lost+found"):
        (tmp_path / "books" / name).mkdir(parents=True)
        (tmp_path / "books" / name / "a.txt").write_text(TEXT)
    denied, scandir = {".trash", "lost+found"}, os.scandir

    def refusing(path="."):
        if Path(path).name in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)  # root may read everything
    assert {path.parent.name for path in text_files(str(tmp_path / "books")).files} == {"part-1", "part-2"}
    denied.add("part-2")
    with pytest.raises(UserError, match=r"books/part-2: Permission denied; make it readable, or move it away"):
        parse_config([f"--dataset_name={tmp_path / 'books'}"])


def test_no_text_is_skipped_silently_or_read_twice(tmp_path):
    """READMEs, unless they describe a repository, text beside a metrics.jsonl, and links that lead in a circle."""
    names = ["README.md", "a/README.md", "b/guide.md", "logs/metrics.jsonl", "logs/log.txt", "hub/README.md"]
    for name in (*names, "hub/.gitattributes", "hub/vectors.npy"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "b/aa").symlink_to(".")
    (tmp_path / "b/same.md").symlink_to("guide.md")
    links = {tmp_path / "b/same.md": tmp_path / "b/guide.md"}
    others = [tmp_path / name for name in ("b/aa", "hub/vectors.npy", "logs")]
    assert text_files(str(tmp_path)) == ([tmp_path / "a/README.md", tmp_path / "b/guide.md"], links, [], others)
    assert text_files(f"{tmp_path}/b/**/*.md") == ([tmp_path / "b/guide.md"], links, [], [])
    assert is_text(str(tmp_path))


def test_names_with_brackets_and_long_ones_are_those_of_files(tmp_path):
    (tmp_path / "a [1]").mkdir()
    for name in ("words.txt", "b [2].txt", f"{'語' * 83}.txt"):
        (tmp_path / "a [1]" / name).write_text(TEXT)
    assert text_files(f"{tmp_path}/a [1]/w*.txt").files == [tmp_path / "a [1]/words.txt"]
    for name, start in (("b [2].txt", "b-2-"), ("w*.txt", "a-1-"), (f"{'語' * 83}.txt", "語" * 66 + "-")):
        data = parse_config([f"--dataset_name={tmp_path}/a [1]/{name}"]).data
        assert Path(data.dataset_name).name.startswith(start)
        assert len(os.fsencode(Path(data.dataset_name).name)) < 255
    data = parse_config([f"--dataset_name={tmp_path}/*/words.txt"]).data
    assert Path(data.dataset_name).name.startswith("words-")


@pytest.mark.parametrize("name", ["texts", "texts/*.txt"])
def test_a_link_to_a_text_that_is_read_anyway_is_a_warning_and_not_more_text(workdir, caplog, name):
    """Its second copy would be trained on, although the first is held out, or the other way round."""
    (workdir / "texts").mkdir()
    (workdir / "texts/2024.txt").write_text(TEXT[:4000])
    (workdir / "elsewhere").write_text(TEXT[4000:6000])
    (workdir / "texts/latest.txt").symlink_to("2024.txt")
    (workdir / "texts/other.txt").symlink_to(workdir / "elsewhere")
    _, _, data = opened(f"--dataset_name={name}")
    expected = tokens_of([TEXT[:4000], TEXT[4000:6000]])
    assert tokens_in(data.dataset_name, "train") + tokens_in(data.dataset_name, "val") == expected
    warning = "1 link skipped, since each file is read only once: texts/latest.txt is texts/2024.txt"
    assert caplog.text.count("skipped") == caplog.text.count(warning) == 1
