"""A run whose nodes are launched differently does not train."""

import dataclasses

import pytest
import torch

from recipe import components
from recipe.components import check_same_launch
from recipe.config import Config, parse_config
from recipe.engine.base import Engine
from recipe.utils.errors import UserError


class Node(Engine):
    """A node; `main` is what the main one sends, None for the main one itself."""

    def __init__(self, main: dict | None = None, *, precision: str = "fp32", others_differ: bool = False):
        self.device, self.main, self.precision, self.others_differ = torch.device("cpu"), main, precision, others_differ

    def broadcast_object(self, mine: dict) -> dict:
        self.main = self.main or mine
        return self.main

    def anywhere(self, condition: bool) -> bool:
        return condition or self.others_differ


def sent_by_main(config: Config) -> dict:
    node = Node()
    check_same_launch(config, node)
    return node.main


def test_a_node_that_is_launched_differently_is_refused(monkeypatch, tmp_path):
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(components, "ROOT", tmp_path)
    words = ["--max_steps=60", "--warmup_steps=1"]
    config = parse_config([*words, "--output_dir=/mnt/a"])
    main = sent_by_main(config)
    check_same_launch(parse_config([*words, "--output_dir=/b"]), Node(main))  # paths may differ
    differing = parse_config(["--max_steps=50", "--warmup_steps=1", "--seed=3", "--fresh"])
    with pytest.raises(UserError, match=r"max_steps 50 here, 60 on rank 0; .*seed 3 here, 1337 on rank 0; .*"):
        check_same_launch(differing, Node(main))
    with pytest.raises(UserError, match="precision 'bf16' here, 'fp32' on rank 0"):
        check_same_launch(config, Node(main, precision="bf16"))
    with pytest.raises(UserError, match="on another process; its error message has the cause"):  # the one that is right
        check_same_launch(config, Node(main, others_differ=True))
    (tmp_path / "recipe" / "data" / "b.py").write_text("y")
    with pytest.raises(UserError, match=r"code of recipe/ '[0-9a-f]{8}' here, '[0-9a-f]{8}' on rank 0"):
        check_same_launch(config, Node(main))


def test_fresh_and_restarts_are_refused_together(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh = dataclasses.replace(config, run=dataclasses.replace(config.run, fresh=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_same_launch(config, Node())
    with pytest.raises(UserError, match=r"--fresh would start over at each of the 3 restarts .* move runs/mine away"):
        check_same_launch(fresh, Node())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_same_launch(fresh, Node())
