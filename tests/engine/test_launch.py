"""What several processes are told where one of them is gone, or was launched otherwise."""

import dataclasses
from types import SimpleNamespace

import pytest

from recipe import components as start
from recipe.components import check_alike
from recipe.config import parse_config
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
    assert f"or its machine, is gone or does not answer {seen}; what it says there is the cause" in said
    assert "The same command, without --fresh, on every machine goes on from the last checkpoint" in said


@pytest.mark.parametrize(
    ("used", "said"),
    [
        ("0", "at most 3 more times, and"),
        ("2", "at most 1 more time, and"),
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


class TwoMachines:
    """The second of two: the first was launched with `theirs`."""

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
        check_alike(self.theirs, main)
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
def test_a_machine_that_is_launched_with_other_settings_is_refused(flags, named):
    theirs = parse_config(["--max_steps=60", "--warmup_steps=1"])
    with pytest.raises(UserError) as refused:
        check_alike(parse_config([*flags, "--warmup_steps=1"]), TwoMachines(theirs))
    assert f"than the main process: {named}. Launch the same command from the same code" in str(refused.value)


def test_what_may_differ_from_machine_to_machine_does():
    theirs = parse_config(["--dataset_name=/a/shards", "--output_dir=/mnt/a", "--device_memory_gb=80"])
    check_alike(parse_config(["--dataset_name=/b/shards", "--val_data=/c", "--output_dir=/mnt/b"]), TwoMachines(theirs))


def test_other_code_or_another_precision_is_refused(monkeypatch):
    config = parse_config([])
    engine = TwoMachines(config)
    engine.precision = "bf16"
    with pytest.raises(UserError, match="precision 'bf16', there 'fp32'"):
        check_alike(config, engine)
    digests = iter(["mine", "theirs"])
    monkeypatch.setattr(start, "_digest_of_code", lambda: next(digests))
    with pytest.raises(UserError, match="code of recipe/ 'mine', there 'theirs'"):
        check_alike(config, TwoMachines(config))


def test_a_digest_of_the_code_is_of_all_of_it(monkeypatch, tmp_path):
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(start, "ROOT", tmp_path)
    found = set()
    for path in ("recipe/a.py", "recipe/data/b.py"):
        (tmp_path / path).write_text("x")
        found.add(start._digest_of_code())
    (tmp_path / "recipe" / "data" / "b.py").write_text("y")
    assert len(found | {start._digest_of_code()}) == 3


def test_the_machine_that_was_launched_right_points_to_the_other():
    with pytest.raises(UserError, match="another machine was launched otherwise"):
        check_alike(parse_config([]), TwoMachines(others_differ=True))


def test_fresh_and_restarts_are_refused_together(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh = dataclasses.replace(config, run=dataclasses.replace(config.run, fresh=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_alike(config, TwoMachines())
    with pytest.raises(UserError, match=r"--fresh would start over at each of the 3 restarts .* move runs/mine away"):
        check_alike(fresh, TwoMachines())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_alike(fresh, TwoMachines())
