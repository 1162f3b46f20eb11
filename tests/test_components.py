"""All nodes of a run are launched alike, or none trains."""

import dataclasses
from types import SimpleNamespace

import pytest

from recipe import components
from recipe.components import check_same_launch
from recipe.config import parse_config
from recipe.errors import UserError


class TwoNodes:
    """The engine of the second of two nodes; the first was launched with `theirs`."""

    precision = "fp32"

    def __init__(self, theirs=None, others_differ: bool = False):
        self.theirs, self.others_differ = theirs, others_differ

    def from_main(self, mine: dict) -> dict:
        if self.theirs is None:
            return mine
        sent = []
        main = SimpleNamespace(
            precision="fp32", from_main=lambda value: sent.append(value) or value, anywhere=lambda condition: condition
        )
        check_same_launch(self.theirs, main)
        return sent[0]

    def anywhere(self, condition: bool) -> bool:
        return condition or self.others_differ


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max_steps=50"], "max_steps 50, there 60"),
        (["--max_steps=50", "--seed=3"], "max_steps 50, there 60; seed 3, there 1337"),
        (["--max_steps=60", "--fresh"], "fresh True, there False"),
    ],
)
def test_a_node_with_other_settings_is_refused(flags, named):
    theirs = parse_config(["--max_steps=60", "--warmup_steps=1"])
    with pytest.raises(UserError) as refused:
        check_same_launch(parse_config([*flags, "--warmup_steps=1"]), TwoNodes(theirs))
    assert f"rank 0's: {named}. Launch the same command from the same code" in str(refused.value)


def test_paths_and_memory_may_differ_between_nodes():
    theirs = parse_config(["--dataset_name=/a/shards", "--output_dir=/mnt/a", "--device_memory_gb=80"])
    check_same_launch(
        parse_config(["--dataset_name=/b/shards", "--val_data=/c", "--output_dir=/mnt/b"]), TwoNodes(theirs)
    )


def test_other_code_or_another_precision_is_refused(monkeypatch):
    config = parse_config([])
    engine = TwoNodes(config)
    engine.precision = "bf16"
    with pytest.raises(UserError, match="precision 'bf16', there 'fp32'"):
        check_same_launch(config, engine)
    digests = iter(["mine", "theirs"])
    monkeypatch.setattr(components, "_digest_of_code", lambda: next(digests))
    with pytest.raises(UserError, match="code of recipe/ 'mine', there 'theirs'"):
        check_same_launch(config, TwoNodes(config))


def test_a_digest_of_the_code_is_of_all_of_it(monkeypatch, tmp_path):
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(components, "ROOT", tmp_path)
    found = set()
    for path in ("recipe/a.py", "recipe/data/b.py"):
        (tmp_path / path).write_text("x")
        found.add(components._digest_of_code())
    (tmp_path / "recipe" / "data" / "b.py").write_text("y")
    assert len(found | {components._digest_of_code()}) == 3


def test_the_node_that_is_right_points_to_the_other():
    with pytest.raises(UserError, match="another node differs from rank 0's"):
        check_same_launch(parse_config([]), TwoNodes(others_differ=True))


def test_fresh_and_restarts_are_refused_together(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh = dataclasses.replace(config, run=dataclasses.replace(config.run, fresh=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_same_launch(config, TwoNodes())
    with pytest.raises(UserError, match=r"--fresh would start over at each of the 3 restarts .* move runs/mine away"):
        check_same_launch(fresh, TwoNodes())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_same_launch(fresh, TwoNodes())


# Launches that would not train what the recipe describes
