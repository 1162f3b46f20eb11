"""A run whose nodes are launched differently does not train."""

import dataclasses
from types import SimpleNamespace

import pytest

from recipe import components
from recipe.components import check_same_launch
from recipe.config import parse_config
from recipe.errors import UserError


class SecondNode:
    """The engine of the second of two nodes; the first was launched with `theirs`, by default alike."""

    optimizers = None

    def __init__(self, theirs=None, *, precision: str = "fp32", others_differ: bool = False):
        self.theirs, self.precision, self.others_differ = theirs, precision, others_differ

    def from_main(self, mine: dict) -> dict:
        sent = [mine]
        if self.theirs is not None:
            main = SimpleNamespace(
                optimizers=None, precision="fp32", from_main=lambda value: sent.append(value) or value, anywhere=bool
            )
            check_same_launch(self.theirs, main)
        return sent[-1]

    def anywhere(self, condition: bool) -> bool:
        return condition or self.others_differ


def test_a_node_that_is_launched_otherwise_is_refused(monkeypatch):
    theirs = parse_config(["--max_steps=60", "--warmup_steps=1", "--output_dir=/mnt/a", "--device_memory_gb=80"])
    # Paths and memory may differ.
    check_same_launch(parse_config(["--max_steps=60", "--warmup_steps=1", "--output_dir=/b"]), SecondNode(theirs))
    mine = parse_config(["--max_steps=50", "--warmup_steps=1", "--seed=3", "--fresh"])
    differing = r"max_steps 50 here, 60 on rank 0; .*seed 3 here, 1337 on rank 0; .*"
    with pytest.raises(UserError, match=differing + "Launch the same command from"):
        check_same_launch(mine, SecondNode(theirs))
    with pytest.raises(UserError, match="precision 'bf16' here, 'fp32' on rank 0"):
        check_same_launch(theirs, SecondNode(theirs, precision="bf16"))
    with pytest.raises(UserError, match="another node differs from rank 0's"):  # the one that is right
        check_same_launch(theirs, SecondNode(others_differ=True))


def test_a_node_with_other_code_is_refused(monkeypatch, tmp_path):
    """A file changes between the digests of the two nodes."""
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(components, "ROOT", tmp_path)

    class Changing(SecondNode):
        def from_main(self, mine: dict) -> dict:
            (tmp_path / "recipe" / "data" / "b.py").write_text("y")
            return super().from_main(mine)

    with pytest.raises(UserError, match=r"code of recipe/ '[0-9a-f]{8}' here, '[0-9a-f]{8}' on rank 0"):
        check_same_launch(parse_config([]), Changing(parse_config([])))


def test_fresh_and_restarts_are_refused_together(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh = dataclasses.replace(config, run=dataclasses.replace(config.run, fresh=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_same_launch(config, SecondNode())
    with pytest.raises(UserError, match=r"--fresh would start over at each of the 3 restarts .* move runs/mine away"):
        check_same_launch(fresh, SecondNode())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_same_launch(fresh, SecondNode())
