"""`make compare`: two models on the same text, with paired intervals."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from eval import common, compare, hellaswag
from eval.published import ACCURACIES
from eval.scores import comparison_row
from recipe.hub.model_card import model_card
from tests.data import write_shard
from tests.eval.conftest import load


def test_a_run_is_compared_with_gpt2_on_the_same_text(whole_run, model_dir, tmp_path, command, capsys):
    checkpoint = shutil.copytree(whole_run[0], tmp_path / "run") / "step_00000020"
    command(compare, checkpoint, "--other", model_dir, "--limit", 7, "--prompt", "A man is")
    out = capsys.readouterr().out
    comparison = json.loads((checkpoint / "results.json").read_text())["compare"]
    loss, *accuracies = comparison["rows"]
    recorded = [json.loads(line) for line in (checkpoint.parent / "metrics.jsonl").open()][-1]
    assert loss["metric"] == "validation loss, nats per token"
    assert loss["ours"] == pytest.approx(recorded["val_loss"], abs=1e-5)
    assert loss["difference"] == pytest.approx(loss["ours"] - loss["theirs"], abs=1e-9)
    assert loss["difference"] < 0  # trained beside random weights
    rows = hellaswag.load_rows(7)
    results = [hellaswag.accuracies(hellaswag.score_rows(load(x).lm, rows), rows) for x in (checkpoint, model_dir)]
    expected = [[result[name] for result in results] for name in ACCURACIES]
    assert [[row["ours"], row["theirs"]] for row in accuracies] == expected
    assert all(text.strip() for text in comparison["samples"])
    card = " ".join(model_card(checkpoint).split())
    for text in (f"{loss['ours']:.4f}", f"{loss['difference']:+.4f}", "HellaSwag acc_norm, llm.c-style"):
        assert text in out
        assert text in card
    retokenized = dataclasses.replace(load(model_dir), tokenizer=SimpleNamespace(get_vocab=dict))
    arguments = SimpleNamespace(sequence_length=None, data=None)
    assert compare.validation(arguments, load(checkpoint), retokenized) == []
    assert "note: no validation loss: the tokenizers differ" in capsys.readouterr().out
    assert f"Compared with {model_dir.parent.name}/{model_dir.name}" in card
    assert str(model_dir.parent) not in card


def test_without_validation_data_only_hellaswag_is_compared(model_dir, shards, tiny_gpt2, tmp_path, command, capsys):
    output, model = tmp_path / "results.json", shutil.copytree(model_dir, tmp_path / "model")
    (model / "trainer_state.json").write_text(json.dumps({"config": {"dataset_name": "\x1b[2J"}}))  # from others
    command(compare, model, "--other", model_dir, "--limit", 2, "--output", output)
    rows = json.loads(output.read_text())["compare"]["rows"]
    half_width = 1.96 / 4  # two rows and the two that are added: one of four differs
    assert [(row["difference"], row["ci95"]) for row in rows] == [(0.0, [-half_width, half_width])] * 4
    assert "note: no validation loss: --data \\x1b[2J: no .bin" in capsys.readouterr().out
    command(compare, model, "--other", model_dir, "--limit", 1, "--output", output)
    assert f"note: replacing the earlier compare in {output}" in capsys.readouterr().out
    with pytest.raises(common.UserError, match="no data"):
        command(compare, model_dir, "--other", model_dir, "--sequence_length", 32, "--output", output)
    with pytest.raises(common.UserError, match="--data absent"):
        command(compare, model_dir, "--other", model_dir, "--data", "absent", "--output", output)
    write_shard(val := tmp_path / "val_000000.bin", np.arange(20 * 32 + 1))
    short_model = tiny_gpt2(32)
    short_model.model.save_pretrained(tmp_path / "short")
    short_model.tokenizer.save_pretrained(tmp_path / "short")
    pair = load(model_dir), load(tmp_path / "short")
    for models in (pair, pair[::-1]):
        arguments = SimpleNamespace(sequence_length=None, data=str(val), limit_windows=None, batch_size=20)
        assert compare.validation(arguments, *models)[0]["n"] == 20, "windows as long as the shorter model's context"
    too_long = ("--data", shards, "--sequence_length", 64, "--output", output)
    for models in ((model_dir, "--other", tmp_path / "short"), (tmp_path / "short", "--other", model_dir)):
        with pytest.raises(common.UserError, match="--sequence_length 64: must be from 2 to 32"):
            command(compare, *models, *too_long)


@pytest.mark.parametrize(("only_ours", "only_theirs"), [(0.03, 0.01), (0.1, 0.1), (0.15, 0.05)])
def test_the_paired_interval_covers_where_few_rows_differ(only_ours, only_theirs):
    """1,000 draws of 40 rows. Parameters: the shares of rows that only one of the models gets right."""
    rng, n_covered = np.random.default_rng(1), 0
    for _ in range(1000):
        draw = rng.random(40)
        ours, theirs = draw < only_ours, (draw >= only_ours) & (draw < only_ours + only_theirs)
        low, high = compare.compare_means("", ours, theirs)["ci95"]
        n_covered += low <= only_ours - only_theirs <= high
    assert n_covered / 1000 >= 0.94


def test_the_paired_intervals_by_hand():
    """Of 40 rows 4 are right in the first model only and 1 in the second only; half a row is added to each outcome."""
    ours, theirs = np.arange(40) < 4, np.arange(40) == 39
    center = (4.5 - 1.5) / 42
    half_width = 1.96 * ((4.5 + 1.5 - 42 * center**2) / 42**2) ** 0.5
    assert compare.compare_means("", ours, theirs)["ci95"] == pytest.approx([center - half_width, center + half_width])
    half_width = 2.093 * (4 * 20 * 21 / 12 / 20) ** 0.5  # 20 means of pairs, two apart; 2.093 is t's quantile for 19
    assert (
        "(too little text for an interval)"
        in comparison_row(compare.compare_means("", np.arange(39.0), np.ones(39)))[3]
    )
    losses = compare.compare_means("", np.arange(40.0), np.zeros(40))
    assert losses["ci95"] == pytest.approx([19.5 - half_width, 19.5 + half_width])


def test_the_interval_of_losses_covers_where_neighboring_windows_are_alike():
    """1,000 draws of 500 differences, a fifth of whose variance is that of documents of 8 windows. As if all were
    independent, the interval would cover in 80 %."""
    rng, n_covered = np.random.default_rng(1), 0
    for _ in range(1000):
        documents = np.repeat(rng.normal(size=63), 8)[:500]
        low, high = compare.compare_means("", rng.normal(size=500) * 2 + documents, np.zeros(500))["ci95"]
        n_covered += low <= 0 <= high
    assert n_covered / 1000 >= 0.92
