"""The first request to the Hub."""

import contextlib
import socket
import threading
import time

import pytest

from recipe.config import DataConfig, parse_config
from recipe.data.hub_text import HubText
from recipe.hub import access, download
from recipe.model.build import check_init_from
from recipe.utils.download import HUB_TIMEOUT_S, local_copy
from recipe.utils.errors import Unreachable, UserError
from tests.eval.conftest import load
from tests.hub import REPO, Fault
from tests.hub.server import Model

REQUESTS = {
    "an evaluation": lambda: load("acme/gpt2"),
    "init_from, tokenizer": lambda: local_copy("acme/gpt2", "init_from", [], "x"),
    "train_text": lambda: HubText(DataConfig(train_text="acme/text"), None).newest(),
    "an audit": lambda: download.checkpoints_on_the_hub("acme/gpt2", None),
    "push_to_hub": lambda: access.check_access("acme/gpt2", False, "", "hub_model_id"),
}


@pytest.mark.parametrize("request_of", REQUESTS)
def test_a_hub_that_answers_byte_by_byte_is_given_up_on(request_of, hub, monkeypatch, caplog, capsys):
    """A timeout between two bytes would never expire."""
    caplog.set_level("INFO")
    server = socket.create_server(("127.0.0.1", 0))

    def drip():
        with contextlib.suppress(OSError):
            connection, _ = server.accept()
            threading.Thread(target=drip, daemon=True).start()
            connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            for _ in range(300):
                connection.sendall(b"x")
                time.sleep(0.1)

    threading.Thread(target=drip, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for limit in ("eval.common.HUB_TIMEOUT_S", "recipe.utils.download.HUB_TIMEOUT_S", "recipe.data.hub_text.ANSWER_S"):
        monkeypatch.setattr(limit, 0.5)
    for module in (access, download):
        monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.5)
    assert HUB_TIMEOUT_S <= 10  # seconds in which a machine without a network knows it
    start = time.monotonic()
    try:
        message = str(REQUESTS[request_of]()) + caplog.text
    except ValueError as error:  # a UserError
        message = str(error)
    assert time.monotonic() - start < 10
    assert "no complete answer in 0.5 s" in message or "the Hub does not answer" in message
    if request_of == "an evaluation":
        assert "acme/gpt2 is not a local directory: looking for it on the Hub" in capsys.readouterr().out
        assert message.endswith("MODEL=runs/NAME")
    server.close()


@pytest.mark.parametrize("status", [429, 503])
def test_a_hub_that_refuses_every_request_for_a_while_is_not_a_mistake(hub, status):
    """As a data set that it does not have is."""
    text = HubText(DataConfig(train_text="acme/text"), None)
    hub.faults.append(Fault(path="*/acme/text*", status=status, times=100))
    with pytest.raises(Unreachable, match=f"the Hub reports HfHubHTTPError: .*{status}"):
        text.newest()
    hub.faults.clear()
    with pytest.raises(UserError, match="the Hub reports RepositoryNotFoundError: ") as error:
        text.newest()
    assert not isinstance(error.value, Unreachable)


def test_weights_of_a_model_that_has_only_pickles_are_refused_before_text_is_prepared(hub):
    """As many models of 2020 are. The way out keeps their tokenizer."""
    hub.models[REPO] = Model()
    hub.files(REPO, "main").update({"config.json": b"{}", "pytorch_model.bin": b""})
    error = r"acme/gpt2: no model\.safetensors; .*\(hf download acme/gpt2 --local-dir converted\).*\('converted'\)$"
    with pytest.raises(UserError, match=error):
        check_init_from(parse_config([f"--init_from={REPO}"]))
