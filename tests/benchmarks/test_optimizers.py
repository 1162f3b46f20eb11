"""AdamW beside Muon: the share of tokens beside a value computed by hand, and the command on tiny runs."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from benchmarks import optimizers
from recipe.utils.errors import ExitCode
from tests import processes as programs
from tests.conftest import SHAKESPEARE, TINY, environment


def test_the_tokens_to_reach_a_loss_lie_between_two_validations():
    curve = {0: 10.0, 100: 6.0, 200: 5.0, 300: 4.0}
    assert optimizers.tokens_to_reach(curve, 5.5) == pytest.approx(150)
    assert optimizers.tokens_to_reach(curve, 3.9) is None


def test_a_sweep_goes_on_until_the_best_rate_is_not_at_its_edge():
    def curve(optimizer: str, rate: float, seed: int) -> dict[int, float]:
        return {100: abs(rate - 0.04)}

    swept = {"adamw": (0.005, 0.01, 0.02), "muon": (0.1, 0.2, 0.4)}
    runs = SimpleNamespace(size=SimpleNamespace(rates=swept, seeds=(1,)), curve=curve)
    assert list(optimizers.sweep(runs, "adamw")) == [0.005, 0.01, 0.02, 0.04, 0.08]
    assert list(optimizers.sweep(runs, "muon")) == [0.025, 0.05, 0.1, 0.2, 0.4]


@pytest.mark.slow
def test_the_command_compares_and_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    size = dataclasses.replace(optimizers.SIZES["2x32"], steps=24, seeds=(1,))
    recipe = {k: v for k, v in TINY.items() if k.startswith(("n_", "total", "micro", "sequence", "eval_tok", "prec"))}
    monkeypatch.setitem(
        optimizers.SIZES, "tiny", dataclasses.replace(size, recipe=recipe, rates={"adamw": (1e-3,), "muon": (0.02,)})
    )
    arguments = [
        "--dataset_name",
        str(SHAKESPEARE),
        "--sizes",
        "tiny",
        f"--runs={tmp_path / 'runs'}",
        f"--out={tmp_path}",
    ]
    monkeypatch.chdir(tmp_path)
    forked = SimpleNamespace(run=lambda command, **_: programs.run(*command[1:], env=environment()), DEVNULL=None)
    monkeypatch.setattr(optimizers, "subprocess", forked)
    assert optimizers.main(arguments) == 0
    (result,) = json.loads((tmp_path / "optimizers.json").read_text())["sizes"]
    assert result["final"]["muon"][0] < result["final"]["adamw"][0]
    assert len(result["curves"]["muon, half"][0]) == 13
    assert (tmp_path / "optimizers.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    monkeypatch.setattr(optimizers, "subprocess", None)  # nothing trains a second time
    assert optimizers.main(arguments) == 0
    assert capsys.readouterr().out == printed


def test_without_time_left_the_command_asks_to_be_run_again(tmp_path, capsys):
    assert optimizers.main([f"--runs={tmp_path}", f"--out={tmp_path}", "--minutes=0"]) == ExitCode.RUN_AGAIN
    assert "the same command goes on" in capsys.readouterr().out
