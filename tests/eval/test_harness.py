"""lm-evaluation-harness on our model: its tasks on local rows, its numbers beside ours, the error if it is missing."""

import dataclasses
import importlib.util
import json
import math
import shutil
import sys

import pytest
import torch

from benchmarks import libraries
from eval import common, harness, hellaswag
from recipe.hub.model_card import model_card

TEXTS = ["the cat sat on the mat", "a word and another word", "one two", "he said that he would not go there again"]
PAGES = [" = Cats = \n\n The cat sat on the mat . \n", " = Dogs = \n\n == Care == \n\n A dog ran . \n"]
DETOKENIZED = " = Cats =\n\nThe cat sat on the mat.\n"  # the first page, as the harness's task reads it


def command(monkeypatch, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", ["harness", *map(str, arguments)])
    harness.main()


def needs_lm_eval():
    pytest.importorskip("lm_eval", reason="needs lm-eval (pip install -e '.[eval]')")


def log_likelihood(loaded, text: str, after: str = "") -> float:
    """Of `text` after `after`, or after end-of-text, by transformers itself."""
    context = loaded.encode(after) or [loaded.tokenizer.eos_token_id]
    target = loaded.encode(after + text)[len(loaded.encode(after)) :]
    with torch.no_grad():
        log_probs = loaded.model(torch.tensor([context + target])).logits[0].double().log_softmax(-1)
    return sum(log_probs[len(context) + i - 1, token].item() for i, token in enumerate(target))


@pytest.mark.slow
def test_agrees_with_our_own_and_is_quiet(whole_run, tmp_path, monkeypatch, capfd, caplog):
    needs_lm_eval()
    checkpoint = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020")
    output, rows = checkpoint / "results.json", tmp_path / "rows.jsonl"
    output.write_text('{"perplexity": {"loss": 1.5}}')
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    pages = tmp_path / "pages.jsonl"
    pages.write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    local = [f"lambada_openai={rows}", f"wikitext={pages}"]
    flags = [checkpoint, "--device", "cpu", "--rows", *local, "--limit", 3]
    command(monkeypatch, *flags, "--tasks", "hellaswag, lambada_openai,wikitext,hellaswag")
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

    loaded = common.load(common.parser("").parse_args([str(whole_run[0]), "--device", "cpu"]))
    scores = {(score["dataset_name"], score["metric_name"]): score for score in result["scores"]}
    ours = hellaswag.count_correct(loaded.lm, hellaswag.load_rows(3))
    assert result["versions"]["hellaswag"] == 1.0
    assert {name: scores["hellaswag", name]["metric_value"] * 3 for name in ("acc", "acc_norm")} == pytest.approx(
        {name: ours[f"lmeval_{name}"] for name in ("acc", "acc_norm")}
    )
    theirs = scores["lambada_openai", "perplexity"]
    words = [text.rpartition(" ") for text in TEXTS[:3]]
    found = [log_likelihood(loaded, " " + word, after=context) for context, _, word in words]
    assert theirs["metric_value"] == pytest.approx(math.exp(-sum(found) / 3), rel=1e-3)
    assert theirs["ci95"] > 0
    found = harness.evaluate(loaded, ["wikitext"], {"wikitext": [{"page": PAGES[0]}]}, limit=1, batch_size=1)
    bits = -log_likelihood(loaded, DETOKENIZED) / math.log(2)
    assert found["results"]["wikitext"]["bits_per_byte,none"] == pytest.approx(bits / len(PAGES[0]), rel=1e-3)


def test_what_cannot_be_run_is_said(tiny_gpt2, monkeypatch):
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
        command(monkeypatch, "--tasks", " , ")
    for words in (["lambada_openai"], ["lambada_openai=" + __file__], ["arc_easy=/dev/null"]):
        with pytest.raises(common.UserError, match="--rows"):
            command(monkeypatch, "--rows", *words)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(common.UserError, match=r"lm-eval is not installed: pip install -e '.\[eval\]'"):
        command(monkeypatch, "--tasks", "hellaswag")


@pytest.mark.slow
def test_speed_beside_the_harness(tiny_gpt2):
    """On the same rows both find the same."""
    needs_lm_eval()
    loaded = tiny_gpt2()
    config = type(loaded.model.config).from_dict(
        loaded.model.config.to_dict() | {"activation_function": "gelu_pytorch_tanh"}
    )
    fused = type(loaded.model)(config).eval()
    fused.load_state_dict(loaded.model.state_dict())
    loaded = dataclasses.replace(loaded, model=fused)
    rows = hellaswag.load_rows()[::5000]
    ours_both, ours, theirs = libraries.compare(
        libraries.hellaswag_ways(loaded, rows, 4), 1, len(rows), "rows"
    ).values()
    for accuracies in (ours_both, ours):
        assert {name: accuracies[name] for name in theirs} == pytest.approx(theirs)


def test_speed_is_told_as_ratios_of_neighboring_turns(capsys):
    turns = {"ours": iter([0.0, 2.0, 4.0]), "theirs": iter([0.0, 4.0, 6.0])}  # the first is not timed
    libraries.compare({name: lambda its=its: (next(its), None) for name, its in turns.items()}, 1, 30, "rows")
    ours, theirs = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert ours[1:] == ["11.25", "rows/s", "1.75", "times", "(1.50", "to", "2.00)"]
    assert theirs[1:] == ["6.25", "rows/s"]
