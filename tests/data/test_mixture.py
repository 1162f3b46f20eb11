"""Mixtures: runs that record their shares. test_dataset.py has the order of the data."""

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
from recipe.config import MixtureEntry, batch_arithmetic, data_sets, parse_config
from recipe.data.builder import read_json, reader_path
from recipe.data.dataset import TokenDataset
from recipe.data.mixed import MixedDataset, deal
from recipe.data.open import open_datasets
from recipe.data.prepare import main as prepare
from recipe.data.shards import find_shards
from recipe.hub.model_card import model_card
from recipe.utils.errors import UserError
from recipe.utils.processes import Processes
from tests import processes
from tests.conftest import TINY, by_step, flags, forget_after, ok, refused, run_train
from tests.data import DOCUMENTS, TEXT, streams, write_jsonl


@pytest.mark.slow
def test_a_reader_that_gets_no_window_of_a_stream_does_not_stall_it(prepared, tmp_path):
    """With room for two shards, one of two readers gets all windows of eight shards of the stream."""
    data = streams.config_of(prepared, tmp_path / "s", disk_budget_gb=streams.budget(prepared, 2))
    sets, steps, batch = [MixtureEntry("local", 500, None), MixtureEntry("stream", 500, None)], 75, 32
    dataset, _ = deal(np.arange(steps * batch), (500, 500), 3)
    local, finished = streams.dataset_of(prepared), threading.Event()
    with streams.streaming(data, readers=2) as s:
        readers = [MixedDataset(sets, [local, stream], batch, 3) for stream in s.datasets]

        def read():
            for step, row in np.ndindex(steps, batch):
                readers[1 - dataset[step * batch + row]].sequences(step, row, row + 1)
            finished.set()

        threading.Thread(target=read, daemon=True).start()
        assert finished.wait(60)
        assert read_json(reader_path(s.out, 1)) == {"shard": 7}


def recipe(streaming=False, **fields) -> str:
    """a and c name texts; b names a directory of shards, and its text."""
    mixture = [
        {"name": "a.txt", "weight": 5},
        {"name": "data/b", "weight": 1, "train_text": "b.txt"},
        {"name": "c.jsonl", "weight": 4, "text_column": "text", "val_documents": 10, "streaming": streaming},
    ]
    sizes = {"val_fraction": 0.1, "shard_tokens": 2000, "disk_budget_gb": 1e-4}
    return yaml.safe_dump(TINY | sizes | fields, sort_keys=False) + (yaml.safe_dump({"dataset_name": mixture}))


def train(directory):
    return ok(run_train("--config=mixed.yaml", cwd=directory)).stdout


@pytest.fixture(scope="module")
def mixed_run(once):
    """A directory with the texts, their prepared shards, the recipe, and its run of 20 steps; the run's output."""

    def make(directory):
        directory.mkdir()
        (directory / "a.txt").write_text(TEXT[:30_000])
        (directory / "b.txt").write_text(TEXT[300_000:330_000])
        write_jsonl(directory / "c.jsonl", [text.replace("the", "THE") for text in DOCUMENTS[:100]])
        (directory / "mixed.yaml").write_text(recipe())
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(directory)
            assert prepare(["--config=mixed.yaml"]) == 0
        return train(directory)

    return once("mixture", make)


@pytest.fixture
def copy(mixed_run, tmp_path):
    shutil.copytree(mixed_run[0], tmp_path / "copy")
    return tmp_path / "copy"


def test_a_resumed_run_that_streams_one_data_set_is_equal_to_the_bit(mixed_run, copy):
    """Resumed after 10 of 20 steps, in which all data sets were prepared."""
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


def test_a_run_records_shares_and_losses_of_its_data_sets(mixed_run, tmp_path):
    """In its metrics, its output, the model card and the report; val_loss is the mean weighted by share."""
    run, output = mixed_run[0] / "runs" / "mixed", mixed_run[1]
    assert "mixture    50 % a, 10 % b, 40 % c, exact in every 1,000 sequences" in output
    for line in by_step(run).values():
        if line["val_loss"] is not None:
            losses = [line[f"val_loss/{name}"] for name in "abc"]
            assert line["val_loss"] == pytest.approx(np.dot([0.5, 0.1, 0.4], losses), rel=1e-12)
            assert len(set(losses)) == 3
    assert "val_loss/a" not in by_step(run)[5]
    for name, share in {"a": 0.5, "b": 0.1, "c": 0.4}.items():
        (directory,) = (mixed_run[0] / "data").glob(f"{name}*")
        windows = TokenDataset(find_shards(str(directory), "train"), 16, 1, seed=0).windows
        epochs = re.search(rf"^epochs +(\S+) over data/{directory.name}", output, re.MULTILINE)[1]
        assert float(epochs) == pytest.approx(80 * share / windows, rel=0.01)  # of 20 steps of 4 sequences
    line = by_step(run)[20]
    assert f"validation loss {line['val_loss']:.4f} (a {line['val_loss/a']:.4f}, b {line['val_loss/b']:.4f}" in output

    card = ModelCard(model_card(run / "step_00000020"))
    text = " ".join(card.text.split())
    assert "on 1,280 tokens of a (50.0%), b (10.0%), c (40.0%)" in text
    for passage in ("## Data: a", "| text | c.jsonl |", "| share | 10.0% of every 1,000 sequences |"):
        assert passage in card.text
    results = {(result.dataset_name, result.metric_name): result.metric_value for result in card.data.eval_results}
    name = "validation loss, nats per token"
    assert results["a + b + c, held out", name] == pytest.approx(line["val_loss"], abs=1e-6)
    assert results["b, held out", name] == pytest.approx(line["val_loss/b"], abs=1e-6)

    (findings,) = write_report([read_run(run)], tmp_path)
    assert "No reference curve ships for these data" in findings[0].text
    assert "50.0% data/a-" in dict(summarize([read_run(run)]))["data"]


def test_eval_perplexity_gives_the_runs_loss_of_the_data_set_that_is_named(mixed_run):
    directory, _ = mixed_run
    error = refused(processes.run("-m", "eval.perplexity", "runs/mixed", cwd=directory))
    assert re.search(r"the model was trained on 3 data sets\. Name one: --data data/a-\w+", error)
    windows = TINY["eval_tokens"] // TINY["sequence_length"] // 3
    words = "runs/mixed", "--data=data/b", f"--limit_windows={windows}", f"--output={directory}/b.json"
    ok(processes.run("-m", "eval.perplexity", *words, cwd=directory))
    loss = json.loads((directory / "b.json").read_text())["perplexity"]["loss"]
    assert loss == pytest.approx(by_step(directory / "runs" / "mixed")[20]["val_loss/b"], abs=1e-5)


def test_a_run_with_other_weights_is_refused(copy):
    (copy / "mixed.yaml").write_text(recipe().replace("weight: 5", "weight: 4"))
    message = "holds a run with other settings: dataset_name's weights (of 1,000) [500, 100, 400] -> [445, 111, 444]"
    assert message in refused(run_train("--config=mixed.yaml", cwd=copy))


def test_a_data_set_of_a_mixture_without_a_full_sequence_is_refused(tmp_path, monkeypatch):
    """Also one with so small a share that most steps take nothing of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT[:30_000])
    write_jsonl(tmp_path / "b.jsonl", [TEXT[:500], "short"])
    mixture = "[{name: a.txt, weight: 99}, {name: b.jsonl, weight: 1, val_documents: 1}]"
    config = parse_config(flags(**TINY, dataset_name=mixture, val_fraction=0.1))
    datasets = open_datasets(config, batch_arithmetic(config, 1), Processes())
    with pytest.raises(UserError, match="takes 1 sequences a step, but the training data have only 0"), datasets:
        pass


def test_streams_share_the_disk_budget(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    entries = []
    for i, name in enumerate(("a.txt", "b.txt", "c.txt")):
        (tmp_path / name).write_text("<|endoftext|>".join(TEXT[i * 30_000 + j * 3000 :][:3000] for j in range(10)))
        entries.append({"name": name, "weight": 1, "val_documents": 1, "streaming": i > 0})
    config = parse_config(flags(**TINY, dataset_name=json.dumps(entries), disk_budget_gb=0.5, shard_tokens=2000))
    with open_datasets(config, batch_arithmetic(config, 1), Processes()):
        pass
    budgets = re.findall(r"streaming (\S+) into \S+, at most (\S+) GB", caplog.text)
    assert budgets == [("b.txt", "0.25"), ("c.txt", "0.25")]


def test_a_mixture_on_the_command_line(tmp_path, monkeypatch):
    """Replaces the recipe's data. Each entry has its own subset, and weights have any scale."""
    monkeypatch.chdir(tmp_path)
    words = "[{name: fineweb-edu, weight: 2}, {name: fineweb-edu, weight: 1e0, dataset_config: CC-MAIN-2024-10}]"
    config = parse_config(["--config=gpt2-large", f"--dataset_name={words}", "--streaming=true"])
    sets = data_sets(config.data)
    assert [entry.count for entry in sets] == [667, 333]
    assert [entry.name for entry in sets] == ["fineweb-edu-sample-10BT", "fineweb-edu-CC-MAIN-2024-10"]
    assert [entry.data.train_text for entry in sets] == ["HuggingFaceFW/fineweb-edu"] * 2
    assert all(entry.data.streaming for entry in sets)
    (tmp_path / "a.txt").write_text("text on this disk, which is prepared and not streamed")
    words = "[{name: fineweb-edu, weight: 2}, {name: a.txt, weight: 1}, {name: data/shards, weight: 1}]"
    sets = data_sets(parse_config(["--config=gpt2-large", f"--dataset_name={words}"]).data)
    assert [entry.data.streaming for entry in sets] == [True, False, False]
    expected = parse_config(["--dataset_name=tinystories"]).data.dataset_name
    words = json.dumps([{"name": "tinystories", "weight": 3}])
    assert parse_config([f"--dataset_name={words}"]).data.dataset_name == expected  # a list of one data set is that one


def test_entries_that_differ_in_one_field_have_shards_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entries = [{"name": name} for name in ("alice/wiki", "bob/wiki")]
    for field in ({"dataset_split": "test"}, {"text_column": "title"}, {"dataset_revision": "v2"}):
        entries.append(entries[0] | field)
    words = json.dumps([entry | {"weight": 1} for entry in entries])
    sets = data_sets(parse_config([f"--dataset_name={words}"]).data)
    assert [entry.name for entry in sets] == ["wiki", "wiki-2", "wiki-test", "wiki-4", "wiki-5"]
    assert len({entry.data.dataset_name for entry in sets}) == 5
