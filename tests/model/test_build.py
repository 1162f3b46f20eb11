"""The model that a configuration describes."""

import time

import httpx
import pytest
from huggingface_hub import HfApi

from recipe.config import parse_config
from recipe.model.build import build_model
from recipe.utils.errors import UserError


def test_init_from_without_a_network_fails_at_once_and_says_so(monkeypatch):
    def unreachable(self, name, timeout):
        assert timeout <= 10
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    started = time.monotonic()
    with pytest.raises(UserError, match=r"init_from openai-community/gpt2 .* Is this machine offline"):
        build_model(parse_config(["--init_from=openai-community/gpt2", "--n_embd=32", "--n_head=2", "--n_layer=1"]))
    assert time.monotonic() - started < 20
