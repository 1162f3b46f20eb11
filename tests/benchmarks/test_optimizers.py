"""AdamW and Muon compared: tuning and shares against values computed by hand, and the command on tiny runs."""

import json
from statistics import mean
from types import SimpleNamespace

import pytest

from benchmarks import optimizers, runs
from recipe.utils.errors import ExitCode, UserError
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, TINY


def test_tuning_ends_where_no_neighbor_is_better():
    def final(optimizer: str, fields: dict) -> float:
        return abs(fields["learning_rate"] - 0.04) + abs(fields["warmup"] - 0.1) + 1

    search = {"adamw": {"learning_rate": (), "warmup": (0.1, 0.2, 0.4)}}
    size = SimpleNamespace(start={"adamw": {"learning_rate": 0.01, "warmup": 0.4}}, search=search)
    best_fields = optimizers.tune(SimpleNamespace(size=size, final=final), "adamw")
    assert best_fields == {"learning_rate": 0.04, "warmup": 0.1}


def test_the_share_of_tokens_lies_between_two_lengths():
    ends = {1.0: 4.0, 0.5: 4.5, 0.25: 5.5}
    assert optimizers.share_of_tokens(ends, 4.5) == pytest.approx(0.5)
    assert optimizers.share_of_tokens(ends, 5.0) == pytest.approx(0.25 * 2**0.5)
    assert optimizers.share_of_tokens(ends, 6.0) is None
    assert optimizers.share_of_tokens(ends, 3.9) is None


def test_the_shares_in_the_documentation_are_those_of_the_runs():
    runs = json.loads((ROOT / "docs/results/cpu-optimizers-own-rate.json").read_text())["runs"]

    def loss(prefix: str, steps: int) -> float:
        names = [name for name in runs if name.startswith(prefix) and name.endswith(f"={steps}")]
        return mean(runs[name][-1][1] for name in names)

    muon = "{}-muon-muon_learning_rate=0.02-learning_rate=0.012-adam_beta1=0.8-adam_beta2=0.99-warmup=0.05-seed"
    best_rates = {
        "4x128": "learning_rate=0.024-matrix_learning_rate=0.0015",
        "6x192": "learning_rate=0.012-matrix_learning_rate=0.00075",
    }
    shares = []
    for size, lengths in ("4x128", (500, 600)), ("6x192", (400, 500)):
        ends = {steps / 1000: loss(muon.format(size), steps) for steps in lengths}
        adamw = loss(f"{size}-adamw-{best_rates[size]}-warmup=0.4-adam_beta2=0.99-weight_decay=0.1-seed", 1000)
        shares.append(f"{optimizers.share_of_tokens(ends, adamw):.2f}")
    assert f"| **{shares[0]}** | **{shares[1]}** |" in (ROOT / "docs/results.md").read_text()
    assert f"with {shares[0]} and {shares[1]} of the tokens" in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_command_compares_and_a_second_run_trains_nothing(tmp_path, monkeypatch, capsys):
    recipe = {k: v for k, v in TINY.items() if k.startswith(("n_", "total", "micro", "sequence", "eval_tok", "prec"))}
    recipe["torch_compile"] = False  # these runs are too short for it
    start = {
        "adamw": {"learning_rate": 3e-3, "warmup": 0.3},
        "muon": {"muon_learning_rate": 0.02, "learning_rate": 1e-2, "warmup": 0.1},
    }
    monkeypatch.setitem(optimizers.SIZES, "tiny", optimizers.Size(recipe, 25, start, search={}))
    arguments = ["--dataset_name", str(SHAKESPEARE), "--sizes", "tiny"]
    arguments += [f"--runs={tmp_path / 'runs'}", f"--out={tmp_path}"]
    monkeypatch.chdir(tmp_path)
    forked = SimpleNamespace(run=lambda command, **_: programs.run(*command[1:]), DEVNULL=None)
    monkeypatch.setattr(runs, "subprocess", forked)
    assert optimizers.main(arguments) == 0
    result = json.loads((tmp_path / "optimizers.json").read_text())
    (size,) = result["sizes"]
    ends = {name: [curve[-1][1] for curve in curves] for name, curves in size["curves"].items()}
    lengths = [float(name.split()[1]) for name in ends if name != "AdamW"]
    low, high = sorted(lengths[-2:])  # AdamW's loss lies between those of these shares
    low_loss, high_loss = (mean(ends[f"Muon, {share:g} of the tokens"]) for share in (low, high))
    assert low_loss > mean(ends["AdamW"]) > high_loss
    assert low < size["share_of_tokens"] < high
    assert 0 < size["seed_noise"] < 0.5
    assert len(result["runs"]) == 2 * len(size["curves"])
    printed = capsys.readouterr().out.split("\n\n")[-1]
    monkeypatch.setattr(runs, "subprocess", None)  # nothing trains a second time
    assert optimizers.main(arguments) == 0
    assert capsys.readouterr().out.strip() == printed.strip()
    with pytest.raises(UserError, match=r"has runs on other data, .*tiny_shakespeare.txt.*; give another --out"):
        optimizers.main([*arguments, "--dataset_name", "other.txt"])


def test_minutes_bounds_all_sizes_together(tmp_path, monkeypatch, capsys):
    seconds = [0.0]
    monkeypatch.setattr(optimizers, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    monkeypatch.setattr(runs, "subprocess", None)  # the second size must not train

    def compare(runs) -> dict:
        if seconds[0]:
            runs.final("adamw", {"warmup": 0.1})
        seconds[0] = 590.0
        return {}

    monkeypatch.setattr(optimizers, "compare", compare)
    arguments = ["--sizes", "4x128", "6x192", "--minutes=10", f"--runs={tmp_path}", f"--out={tmp_path}"]
    assert optimizers.main(arguments) == ExitCode.RUN_AGAIN
    assert "the same command continues" in capsys.readouterr().out
