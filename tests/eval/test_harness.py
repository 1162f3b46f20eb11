"""lm-evaluation-harness on our model: its tasks on local rows, its numbers beside ours, the error if it is missing."""

import importlib.util
import json
import math
import shutil

import pytest

from eval import common, harness, hellaswag
from eval.loglikelihood import Request, score
from recipe.hub.model_card import model_card
from tests.eval.conftest import load

TEXTS = ["the cat sat on the mat", "a word and another word", "one two", "he said that he would not go there again"]
PAGES = [" = Cats = \n\n The cat sat on the mat . \n", " = Dogs = \n\n == Care == \n\n A dog ran . \n"]


def needs_lm_eval():
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")


@pytest.mark.slow
def test_agrees_with_our_own_and_is_quiet(whole_run, tmp_path, command, capfd, caplog):
    needs_lm_eval()
    checkpoint = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020")
    output, rows = checkpoint / "results.json", tmp_path / "rows.jsonl"
    output.write_text('{"perplexity": {"loss": 1.5}}')
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pages = tmp_path / "pages.jsonl"
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    local = [f"lambada_openai={rows}", f"wikitext={pages}"]
    tasks = "hellaswag, lambada_openai,wikitext,hellaswag"
    command(harness, checkpoint, "--tasks", tasks, "--limit", 3, "--rows", *local)
    out, err = capfd.readouterr()
    assert err == ""
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []
    table = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("|")]
    assert [name for name in table[2:] if name] == ["hellaswag", "lambada_openai", "wikitext"]
    assert "bootstrapping" not in out
    results = json.loads(output.read_text())
    assert results["perplexity"] == {"loss": 1.5}
    result = results["lm_eval"]
    assert result["limit"] == 3
    assert result["version"].startswith("0.4")
    assert result["model"].endswith("step_00000020")
    card = model_card(checkpoint)  # which reads what this command writes
    assert card.count(f"lm-evaluation-harness {result['version']}, limit 3, in float32, 3 rows |") == 4
    assert card.count(f"lm-evaluation-harness {result['version']}, limit 3, in float32, 2 rows |") == 3

    loaded = load(whole_run[0])
    scores = {(row["dataset_name"], row["metric_name"]): row for row in result["scores"]}
    ours = hellaswag.count_correct(loaded.lm, hellaswag.load_rows(3))
    assert result["versions"]["hellaswag"] == 1.0
    assert {name: scores["hellaswag", name]["metric_value"] * 3 for name in ("acc", "acc_norm")} == pytest.approx(
        {name: ours[f"lmeval_{name}"] for name in ("acc", "acc_norm")}
    )
    theirs = scores["lambada_openai", "perplexity"]
    found = score(
        loaded.lm, [[Request(loaded.encode(text), 1)] for text in TEXTS[:3]], batch_size=3
    )  # a last word each
    assert theirs["metric_value"] == pytest.approx(math.exp(-sum(nats for (nats,) in found) / 3), rel=1e-3)
    assert theirs["ci95"] > 0


def test_what_cannot_be_run_is_said(tiny_gpt2, command, monkeypatch):
    needs_lm_eval()
    import lm_eval.tasks

    whole, loaded = lm_eval.tasks.TaskManager, tiny_gpt2()
    # Without the harness's thousands of task files, which take seconds to read and have none of this name either.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda include_path, **_: whole(None, include_path, False))
    with pytest.raises(common.UserError, match="--tasks no_such: lm-eval has none of this name"):
        harness.evaluate(loaded, ["no_such", "hellaswag"], {}, limit=1, batch_size=1)
    with pytest.raises(common.UserError, match=r"the data cannot be loaded: .*what --rows names"):
        harness.evaluate(loaded, ["lambada_openai"], {}, limit=1, batch_size=1)
    with pytest.raises(common.UserError, match="--tasks: names none"):
        command(harness, "--tasks", " , ")
    for words in (["lambada_openai"], ["lambada_openai=" + __file__], ["arc_easy=/dev/null"]):
        with pytest.raises(common.UserError, match="--rows"):
            command(harness, "--rows", *words)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(common.UserError, match=r"lm-eval is not installed: pip install -e '.\[eval\]'"):
        command(harness, "--tasks", "hellaswag")
