"""lm-evaluation-harness on our models: its numbers against ours, on local rows, and its errors."""

import importlib.util
import json
import math
import shutil
from pathlib import Path

import pytest

from eval import common, harness, hellaswag
from eval.loglikelihood import Request, score_groups
from recipe.hub.model_card import model_card
from tests.eval.conftest import load, local_tasks

TEXTS = ["the cat sat on the mat", "a word and another word", "one two", "he said that he would not go there again"]
PAGES = [" = Cats = \n\n The cat sat on the mat . \n", " = Dogs = \n\n == Care == \n\n A dog ran . \n"]


def needs_lm_eval():
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")


@pytest.mark.slow
def test_the_harness_agrees_with_our_scores(whole_run, tmp_path, command, capfd):
    needs_lm_eval()
    checkpoint = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020")
    output = checkpoint / "results.json"
    output.write_text('{"perplexity": {"loss": 1.5}}')
    rows = {"lambada_openai": [{"text": text} for text in TEXTS], "wikitext": [{"page": page} for page in PAGES]}
    local = local_tasks(tmp_path / "tasks", hellaswag=hellaswag.load_rows(3), **rows)
    tasks = "hellaswag, lambada_openai,wikitext,hellaswag"
    command(harness, checkpoint, "--tasks", tasks, "--limit", 3, "--include_path", local)
    out = capfd.readouterr().out
    table = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert [name for name in table[2:] if name] == ["hellaswag", "lambada_openai", "wikitext"]
    results = json.loads(output.read_text())
    assert results["perplexity"] == {"loss": 1.5}
    result = results["lm_eval"]
    assert result["limit"] == 3
    assert result["version"].startswith("0.4")
    assert result["model"].endswith("step_00000020")
    card = model_card(checkpoint)
    assert card.count(f"lm-evaluation-harness {result['version']}, limit 3, in float32, 3 rows |") == 4
    assert card.count(f"lm-evaluation-harness {result['version']}, limit 3, in float32, 2 rows |") == 3

    loaded = load(whole_run[0])
    scores = {(row["dataset_name"], row["metric_name"]): row for row in result["scores"]}
    counts = hellaswag.count_correct(loaded.lm, hellaswag.load_rows(3))
    assert result["versions"]["hellaswag"] == 1.0
    assert {name: scores["hellaswag", name]["metric_value"] * 3 for name in ("acc", "acc_norm")} == pytest.approx(
        {name: counts[f"lmeval_{name}"] for name in ("acc", "acc_norm")}
    )
    lambada = scores["lambada_openai", "perplexity"]
    last_words = [[Request(loaded.encode(text), 1)] for text in TEXTS[:3]]
    sums = score_groups(loaded.lm, last_words, batch_size=3)
    assert lambada["metric_value"] == pytest.approx(math.exp(-sum(nats for (nats,) in sums) / 3), rel=1e-3)
    assert lambada["ci95"] > 0


@pytest.mark.parametrize("limit", [None, 5])
def test_a_score_has_its_95_percent_interval_and_one_on_a_part_of_a_task_is_not_complete(limit):
    arc = {"acc,none": 0.25, "acc_stderr,none": 0.01, "exact_match,strict": 0.5, "exact_match_stderr,strict": "N/A"}
    acc, match = harness.scores_of({"results": {"arc": {"alias": "arc", "sample_len": 5} | arc}}, "by hand", limit)
    assert (acc["metric_type"], acc["metric_name"], acc["how"]) == ("accuracy", "acc", "by hand, 5 rows")
    assert (match["metric_name"], match["metric_value"], match["ci95"]) == ("exact_match (strict)", 0.5, None)
    assert acc["ci95"] == pytest.approx(0.0196, abs=1e-6)
    assert acc["complete"] is match["complete"] is (limit is None)


def test_a_task_that_cannot_run_is_named(model_dir, command, error_of, monkeypatch):
    needs_lm_eval()
    import lm_eval.tasks

    # TaskManager's index of all tasks takes seconds to build; this one has those that are named here.
    folders = [str(Path(lm_eval.tasks.__file__).parent / name) for name in ("hellaswag", "lambada")]
    manager = lm_eval.tasks.TaskManager

    def of_these(*, include_path=None):
        return manager(include_path=[*folders, *filter(None, [include_path])], include_defaults=False)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", of_these)
    with pytest.raises(common.UserError, match="--tasks no_such: lm-eval has no such task"):
        command(harness, model_dir, "--tasks", "no_such,hellaswag")
    with pytest.raises(common.UserError, match="--include_path absent: no such directory"):
        command(harness, model_dir, "--tasks", "hellaswag", "--include_path", "absent")
    assert "lambada_openai" in error_of(harness, model_dir, "--tasks", "lambada_openai")  # without a network

    def too_long(*_, **__):
        raise AssertionError("max_gen_toks: 256 >= max_length: 64")

    monkeypatch.setattr("lm_eval.simple_evaluate", too_long)
    with pytest.raises(common.UserError, match=r"--tasks hellaswag: lm-eval refuses a model of .* positions:"):
        command(harness, model_dir, "--tasks", "hellaswag")

    with pytest.raises(common.UserError, match="--tasks names no task"):
        command(harness, "--tasks", " , ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(common.UserError, match=r"lm-eval is not installed: pip install -e '.\[eval\]'"):
        command(harness, "--tasks", "hellaswag")
