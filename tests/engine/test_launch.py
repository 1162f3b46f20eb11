"""What is refused before a run starts, and what several processes print where one is gone or launched differently."""

import pytest

from recipe.engine.launch import check_launch, fail
from recipe.errors import UserError

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
CLOSED = GLOO + "pair.cc:553] Connection closed by peer [10.0.0.2]:5555. This is typically caused by a remote crash."


def ended(monkeypatch, error: str) -> int:
    """The exit code of a process of two, the one that speaks, for an error of torch's."""

    def leave(code: int):
        raise SystemExit(code)

    for name, value in {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("recipe.engine.launch.os._exit", leave)
    with pytest.raises(SystemExit) as left:
        fail(RuntimeError(error))
    return left.value.code


def test_one_process_alone_has_lost_no_other(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="Connection reset by peer"):  # a download's
        fail(RuntimeError("Connection reset by peer"))


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (CLOSED, "(Connection closed by peer [10.0.0.2]:5555)"),
        (
            GLOO + "unbound_buffer.cc:81] Timed out waiting 2400000ms for recv operation to complete",
            "(Timed out waiting 2400000ms for recv operation to complete)",
        ),
        (
            "NCCL error in: nccl.cpp:1\nncclRemoteError: A call failed.\nLast error:\nConnection closed by remote peer n2<1>",  # noqa: E501
            "(ncclRemoteError)",
        ),
    ],
)
def test_who_has_lost_another_process_says_so_in_a_line(monkeypatch, capsys, error, seen):
    monkeypatch.delenv("TORCHELASTIC_MAX_RESTARTS", raising=False)
    assert ended(monkeypatch, error) == 75
    said = capsys.readouterr().err
    assert said.count("\n") == 2  # of which one ends the progress bar
    assert f"or its node, is gone or does not answer {seen}; its own output has the cause" in said
    assert "The same command, without --fresh, on every node continues from the last checkpoint" in said


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ("0", "at most 3 more times; once"),
        ("2", "at most 1 more time; once"),
        ("3", "The same command"),
    ],
)
def test_restarts_that_are_left_are_named(monkeypatch, capsys, used, said):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", used)
    ended(monkeypatch, CLOSED)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "Gloo connectFullMesh failed with [/x/gloo/transport/tcp/pair.cc:152] timed out connecting: Connection refused",
    ],
)
def test_any_other_error_keeps_its_traceback(message):
    with pytest.raises(RuntimeError, match=r"^(CUDA out|Gloo connect)"):
        fail(RuntimeError(message))


def test_restarts_by_which_the_living_look_for_the_dead_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")  # at every one of them, the last too
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(UserError, match=r"it needs --rdzv_backend c10d, and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        check_launch()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    check_launch()
