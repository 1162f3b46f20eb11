"""Mixtures: exact shares, and runs that record what they were mixed of; test_dataset.py has the order of the data."""

import itertools
import json
import re
import shutil
import threading

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from eval.curves import read_run
from eval.report import summarize, write_report
from recipe.config import MixtureEntry, data_sets, parse_config
from recipe.data.builder import read_json, reader_path
from recipe.data.mixed import MixedDataset, dealt, windows_before
from recipe.data.prepare import main as prepare
from recipe.hub.model_card import model_card
from recipe.utils.errors import UserError
from tests import processes
from tests.conftest import TINY, by_step, forget_after, ok, run_train
from tests.data import DOCUMENTS, TEXT, streams, write_jsonl


@pytest.mark.parametrize("counts", [(700, 295, 5), (1000,), (0, 1000), (333, 333, 334), (1, 999)])
def test_shares_are_exact_in_every_thousand_sequences(counts):
    g = np.arange(7_000, dtype=np.int64)
    dataset, window = dealt(g, counts, seed=1337)
    for block in dataset.reshape(7, 1000):
        assert np.bincount(block, minlength=len(counts)).tolist() == list(counts)
    for k, count in enumerate(counts):  # each data set gives its own windows one after the other
        assert window[dataset == k].tolist() == list(range(7 * count))
    for at in (0, 1, 999, 1000, 4321):
        assert windows_before(at, counts, 1337) == [(dataset[:at] == k).sum() for k in range(len(counts))]


@pytest.mark.slow
def test_a_reader_that_gets_nothing_of_a_stream_holds_nobody_up(prepared, tmp_path):
    """Two readers, room for two shards of the stream: one gets all that comes from it, through eight shards."""
    data = streams.config_of(prepared, tmp_path / "s", disk_budget_gb=streams.budget(prepared, 2))
    sets, steps, batch = [MixtureEntry("local", 500, None), MixtureEntry("stream", 500, None)], 75, 32
    dataset, _ = dealt(np.arange(steps * batch), (500, 500), 3)
    local, done = streams.dataset_of(prepared), threading.Event()
    with streams.streaming(data, readers=2) as s:
        readers = [MixedDataset(sets, [local, stream], batch, 3) for stream in s.datasets]

        def read():
            for step, row in np.ndindex(steps, batch):
                readers[1 - dataset[step * batch + row]].sequences(step, row, row + 1)
            done.set()

        threading.Thread(target=read, daemon=True).start()
        assert done.wait(60)
        assert read_json(reader_path(s.out, 1)) == {"shard": 7}


def recipe(streaming=False, **fields) -> str:
    """a and c are texts of their own, and b a directory of which the recipe says the text."""
    mixture = [
        {"name": "a.txt", "weight": 5},
        {"name": "data/b", "weight": 1, "train_text": "b.txt"},
        {"name": "c.jsonl", "weight": 4, "text_column": "text", "val_documents": 10, "streaming": streaming},
    ]
    sizes = {"val_fraction": 0.1, "shard_tokens": 2000, "disk_budget_gb": 1e-4}
    return yaml.safe_dump(TINY | sizes | fields, sort_keys=False) + (yaml.safe_dump({"dataset_name": mixture}))


def write_texts(directory):
    (directory / "a.txt").write_text(TEXT[:30_000])
    (directory / "b.txt").write_text(TEXT[300_000:330_000])
    write_jsonl(directory / "c.jsonl", [text.replace("the", "THE") for text in DOCUMENTS[:100]])


def train(at, *words):
    return ok(run_train("--config=mixed.yaml", *words, cwd=at)).stdout


@pytest.fixture(scope="module")
def mixed_run(once):
    """A directory with the texts, their prepared shards, the recipe, and its run of 20 steps."""

    def make(at):
        at.mkdir()
        write_texts(at)
        (at / "mixed.yaml").write_text(recipe())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(at)
            assert prepare(["--config=mixed.yaml"]) == 0
        return train(at)

    return once("mixture", make)


@pytest.fixture
def copy(mixed_run, tmp_path):
    shutil.copytree(mixed_run[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_resumed_and_streamed_is_the_same_run(mixed_run, copy):
    """Stopped after 10 steps, and then with one of the three streamed, to the bit."""
    forget_after(10, copy / "runs" / "mixed")
    (copy / "mixed.yaml").write_text(recipe(streaming=True))
    (streamed,) = (copy / "data").glob("c-*")
    shutil.rmtree(streamed)
    output = train(copy)
    assert "data       streaming c.jsonl" in output
    assert "from step 10" in output
    lines, expected = by_step(copy / "runs" / "mixed"), by_step(mixed_run[0] / "runs" / "mixed")
    assert list(lines) == list(expected) == list(range(21))
    columns = "tokens", "loss", "val_loss", "val_loss/a", "val_loss/b", "val_loss/c", "grad_norm"
    for step, column in itertools.product(lines, columns):
        assert lines[step].get(column) == expected[step].get(column), (step, column)


def test_what_the_run_records(mixed_run, tmp_path):
    """The loss of each data set and in all, by shares; the shares in the card, the panel and the report."""
    at, output = mixed_run
    run = at / "runs" / "mixed"
    assert "mixture    50 % a, 10 % b, 40 % c, exact in every 1,000 sequences" in output
    for line in by_step(run).values():
        if line["val_loss"] is not None:
            each = [line[f"val_loss/{name}"] for name in "abc"]
            assert line["val_loss"] == pytest.approx(np.dot([0.5, 0.1, 0.4], each), rel=1e-12)
            assert len(set(each)) == 3
            assert [line[f"share/{name}"] for name in "abc"] == [0.5, 0.1, 0.4]
    assert "val_loss/a" not in by_step(run)[5]
    last = by_step(run)[20]
    assert f"validation loss {last['val_loss']:.4f} (a {last['val_loss/a']:.4f}, b {last['val_loss/b']:.4f}" in output

    card = ModelCard(model_card(run / "step_00000020"))
    text = " ".join(card.text.split())
    assert "on 1,280 tokens of a (50.0%), b (10.0%), c (40.0%)" in text
    for line in ("## Data: a", "| text | c.jsonl |", "| share | 10.0% of every 1,000 sequences |"):
        assert line in card.text
    figures = {(e.dataset_name, e.metric_name): e.metric_value for e in card.data.eval_results}
    name = "validation loss, nats per token"
    assert figures["a + b + c, held out", name] == pytest.approx(last["val_loss"], abs=1e-6)
    assert figures["b, held out", name] == pytest.approx(last["val_loss/b"], abs=1e-6)

    (findings,) = write_report([read_run(run)], tmp_path)
    assert "No reference curve ships for these data" in findings[0].text
    assert "50.0% data/a-" in dict(summarize([read_run(run)]))["data"]


def test_validation_by_eval_is_of_one_data_set(mixed_run):
    """And gives the loss of that one in the run."""
    at, _ = mixed_run
    ran = processes.run("-m", "eval.perplexity", "runs/mixed", cwd=at)
    assert ran.returncode == 2
    assert re.search(r"the model was trained on 3 data sets\. Name one: --data data/a-\w+", ran.stderr)
    windows = TINY["eval_tokens"] // TINY["sequence_length"] // 3
    words = "runs/mixed", "--data=data/b", f"--limit_windows={windows}", f"--output={at}/b.json"
    ran = ok(processes.run("-m", "eval.perplexity", *words, cwd=at))
    loss = json.loads((at / "b.json").read_text())["perplexity"]["loss"]
    assert loss == pytest.approx(by_step(at / "runs" / "mixed")[20]["val_loss/b"], abs=1e-5)


def test_other_weights_are_another_run(copy):
    (copy / "mixed.yaml").write_text(recipe().replace("weight: 5", "weight: 4"))
    result = run_train("--config=mixed.yaml", cwd=copy)
    assert result.returncode == 2
    assert "holds a run with other settings: dataset_name's weights (of 1,000) [500, 100, 400] -> [445, 111, 444]" in (
        result.stderr
    )


def test_a_mixture_on_the_command_line(tmp_path, monkeypatch):
    """Replaces the recipe's data; entries have their own subset, and the weights any scale."""
    monkeypatch.chdir(tmp_path)
    words = "[{name: fineweb-edu, weight: 2}, {name: fineweb-edu, weight: 1e0, dataset_config: CC-MAIN-2024-10}]"
    config = parse_config(["--config=gpt2-large", f"--dataset_name={words}", "--streaming=true"])
    sets = data_sets(config.data)
    assert [one.count for one in sets] == [667, 333]
    assert [one.name for one in sets] == ["fineweb-edu-sample-10BT", "fineweb-edu-CC-MAIN-2024-10"]
    assert [one.data.train_text for one in sets] == ["HuggingFaceFW/fineweb-edu"] * 2
    assert all(one.data.streaming for one in sets)
    (tmp_path / "a.txt").write_text("text on this disk, which is prepared at once")
    words = "[{name: fineweb-edu, weight: 2}, {name: a.txt, weight: 1}, {name: data/shards, weight: 1}]"
    sets = data_sets(parse_config(["--config=gpt2-large", f"--dataset_name={words}"]).data)
    assert [one.data.streaming for one in sets] == [True, False, False]
    alone = parse_config(["--dataset_name=tinystories"]).data.dataset_name
    words = json.dumps([{"name": "tinystories", "weight": 3}])
    assert parse_config([f"--dataset_name={words}"]).data.dataset_name == alone  # a list of one is that one


def test_data_sets_of_one_name_splits_and_columns_are_mixed(tmp_path, monkeypatch):
    """Each has shards of its own; only the same one twice is refused."""
    monkeypatch.chdir(tmp_path)
    entries = [{"name": name} for name in ("alice/wiki", "bob/wiki")]
    for field in ({"dataset_split": "test"}, {"text_column": "title"}, {"dataset_revision": "v2"}):
        entries.append(entries[0] | field)
    sets = data_sets(parse_config([f"--dataset_name={json.dumps([e | {'weight': 1} for e in entries])}"]).data)
    assert [one.name for one in sets] == ["wiki", "wiki-2", "wiki-test", "wiki-4", "wiki-5"]
    assert len({one.data.dataset_name for one in sets}) == 5
    with pytest.raises(UserError, match="twice; remove one"):
        parse_config([f"--dataset_name={json.dumps([e | {'weight': 1} for e in [entries[0], *entries]])}"])
