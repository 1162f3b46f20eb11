"""Exports: of the right checkpoint, complete, and without overwriting other files."""

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from eval.published import ACCURACIES
from eval.scores import hellaswag_scores
from recipe.checkpoint.format import checkpoints
from recipe.config import parse_config
from recipe.hub import export
from recipe.utils.errors import UserError

FILES = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
FILES |= {"tokenizer.json", "tokenizer_config.json"}


def test_an_export_is_what_transformers_loads_and_nothing_else(whole_run, tmp_path, capsys):
    run, out = shutil.copytree(whole_run[0], tmp_path / "run"), tmp_path / "out"
    newest = run / "step_00000020"
    (newest / "notes.txt").write_text("of mine")
    scores = hellaswag_scores(dict.fromkeys(ACCURACIES, 0.28), 10042, "in float32")
    (newest / "results.json").write_text(json.dumps({"hellaswag": {"scores": scores}}))
    assert export.main([str(run), "--out", str(out), "--license", "cc-by-4.0"]) == 0
    assert "exported" in capsys.readouterr().out
    assert {p.name for p in out.iterdir()} == FILES
    assert (out / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert (config["n_positions"], config["n_ctx"]) == (64, 64)  # llama.cpp's converter reads the latter
    generation = json.loads((out / "generation_config.json").read_text())
    assert [generation[k] for k in ("max_length", "bos_token_id", "eos_token_id", "pad_token_id")] == [64] + 3 * [50256]
    tokenizer = json.loads((out / "tokenizer_config.json").read_text())
    assert (tokenizer["model_max_length"], tokenizer["pad_token"]) == (64, "<|endoftext|>")
    card = ModelCard.load(out / "README.md")
    assert card.data.license == "cc-by-4.0"
    assert {e.metric_value for e in card.data.eval_results} > {0.28}
    (newest / "results.json").write_text("[]")
    assert export.main([str(run), "--out", str(tmp_path / "other")]) == 2
    assert "results.json: not the results of an evaluation (it is []). Move it away" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_an_export_replaces_nothing(whole_run, tmp_path, capsys):
    run, out, project = shutil.copytree(whole_run[0], tmp_path / "run"), tmp_path / "out", tmp_path / "project"
    project.mkdir()
    (project / "README.md").write_text("of mine")
    out.mkdir()
    assert export.main([str(run), "--out", str(out)]) == 0  # an empty directory
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for other in (out, run / "step_00000020", run, project, project / "README.md"):
        assert export.main([str(run), "--out", str(other)]) == 2
        message = f"--out {other} exists already; move it away, or name another directory (make export OUT=NAME)"
        assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_an_export_that_fails_can_be_repeated(whole_run, tmp_path, monkeypatch, capsys):
    run, out, copyfile, error = whole_run[0], tmp_path / "out", shutil.copyfile, None

    def fill_the_disk(source: Path, target: Path, **options) -> None:
        copyfile(source, target, **options)
        raise error

    for exception, code in ((OSError(28, "No space left on device"), 2), (KeyboardInterrupt(), 75)):
        error = exception
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "copyfile", fill_the_disk)
            assert export.main([str(run), "--out", str(out)]) == code
    assert export.main([str(run), "--out", str(out)]) == 0, capsys.readouterr().err


def test_the_best_is_the_intact_checkpoint_with_the_lowest_validation_loss(whole_run, tmp_path):
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 10, "val_loss": 0.5}\n{"step": 15, "val_loss": 0.1}\n{"step": 20, "val_loss": 0.6}\n')
    assert export.choose(run, best=True) == run / "step_00000010"
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"step": 20, "val_loss": 0.4}\n')
    assert export.choose(run, best=True) == run / "step_00000020"
    (run / "step_00000020" / "config.json").write_text("{}")
    assert export.export(run, tmp_path / "out", best=True) == run / "step_00000010"
    with pytest.raises(UserError, match=r"step_00000020: config\.json has 2 bytes"):
        export.export(run / "step_00000020", tmp_path / "other")


def test_an_export_does_not_need_the_optimizer_state(whole_run, tmp_path, capsys):
    """Nor does its error propose to start the run over. A push with the state takes a checkpoint that has it."""
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    for checkpoint in reversed(checkpoints(run)):
        assert export.choose(run, False, to_resume=True) == checkpoint
        (checkpoint / "optimizer.safetensors").unlink()
    for out, arguments in (("newest", [run]), ("best", [run, "--best"]), ("step", [run / "step_00000010"])):
        assert export.main([*map(str, arguments), "--out", str(tmp_path / out)]) == 0, capsys.readouterr().err
        assert {p.name for p in (tmp_path / out).iterdir()} == FILES
    for checkpoint in checkpoints(run):
        (checkpoint / "model.safetensors").unlink()
    assert export.main([str(run), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "none of its 2 checkpoints is intact. The newest is step_00000020: model.safetensors is missing" in error
    assert "--fresh" not in error


def test_mistakes_of_an_export(whole_run, tmp_path, capsys):
    run, out = whole_run[0], tmp_path / "out"

    def refused(*arguments: str | Path) -> str:
        assert export.main([*map(str, arguments), "--out", str(out)]) == 2
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().err

    assert "no checkpoint there" in refused(tmp_path / "nowhere")
    assert f"name {run}" in refused(run / "step_00000010", "--best")
    with pytest.raises(UserError, match="push_to_hub needs hub_model_id, ORG/NAME on the Hub"):
        parse_config(["--push_to_hub"])
