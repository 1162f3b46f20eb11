"""`python -m recipe.audit` on honest runs, and on runs that did not compute what they claim."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save

from recipe import audit
from recipe.checkpoint.format import load_checkpoint
from recipe.monitor.metrics import sha256_before
from recipe.utils.checkpoints import checkpoints
from tests import processes as programs
from tests.checkpoint import change_state, flip_bit, replace_files
from tests.conftest import ROOT, SHAKESPEARE, TINY, forget_after, launch, metrics, ok, run_train, tiny_flags, train

KEPT = {"save_steps": 5, "save_total_limit": 9, "logging_steps": 2, "sample_steps": 10}
STEPS = [f"step_{step:08d}" for step in (5, 10, 15, 20)]
WEIGHT = "transformer.h.1.mlp.c_fc.weight"
BIAS, KEYS = "transformer.h.1.attn.c_attn.bias", TINY["n_embd"]  # the keys' part begins after the queries'
ELSEWHERE = ("--flags", "--micro_batch_size 2")  # not the run's: equal within rounding


def audited(capsys, *arguments) -> tuple[int, list[str]]:
    """The exit code, and the sentence about each interval."""
    code = audit.main([str(argument) for argument in arguments])
    return code, [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def modification_times(directory: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


@pytest.mark.parametrize("option", [("--last", 0), ("--random", -1)])
def test_an_audit_needs_at_least_one_interval(option, tmp_path, capsys):
    assert audit.main([str(tmp_path), *map(str, option)]) == 2
    assert "--last and --random take a number of intervals, 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--launch", "--flags"])
def test_a_quote_that_is_not_closed_is_named(option, tmp_path, capsys):
    """As in --flags "--dataset_name /data/Bob's"."""
    assert audit.main([str(tmp_path), f"{option}=x /data/Bob's"]) == 2
    error = f"error: argument {option}: No closing quotation in x /data/Bob's: close the quote, or put a backslash"
    assert capsys.readouterr().err.startswith(error)


@pytest.fixture(scope="module")
def resumed_run(shards, once):
    """A run that was killed after step 13 and resumed from its checkpoint of step 10."""

    def make(run):
        train(shards, run, **KEPT)
        forget_after(10, run)
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(lines[:-5]) + lines[-5][:40])
        train(shards, run, **KEPT)

    return once("resumed", make)[0]


@pytest.fixture
def run(resumed_run, tmp_path):
    """A copy of the resumed run."""
    return shutil.copytree(resumed_run, tmp_path / "run")


@pytest.fixture
def forked(monkeypatch):
    """Forks the replays, so that they need not import torch."""
    monkeypatch.setattr(audit, "subprocess", programs.forking)


REPLAYS: dict[tuple, Path] = {}


@pytest.fixture
def replayed_once(forked, monkeypatch, tmp_path_factory):
    """Shares the replays of an interval with the same flags among the tests."""
    replay = audit.replay

    def cached_replay(interval, run, command):
        key = (interval.first, *command[command.index("--config") + 2 :])
        if key not in REPLAYS:
            checkpoint = replay(interval, run, command)
            copy = shutil.copytree(checkpoint.path.parent, tmp_path_factory.mktemp("replays") / "run")
            REPLAYS[key] = copy / checkpoint.path.name
        return load_checkpoint(REPLAYS[key])

    monkeypatch.setattr(audit, "replay", cached_replay)


def change_weight(checkpoint, value=None, name=WEIGHT, index=7) -> None:
    """Sets one weight to `value`, or flips one bit of it."""
    weights = load_file(checkpoint / "model.safetensors")
    if value is None:
        weights[name].view(-1).view(torch.int32)[index] ^= 1
    else:
        weights[name].view(-1)[index] = value
    replace_files(checkpoint, {"model.safetensors": save(weights, {"format": "pt"})})


def write_lines(run, lines) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_line(step: int, **changes):
    """run -> changes the line of a step in its metrics.jsonl."""
    return lambda run: write_lines(run, [n | (changes if n["step"] == step else {}) for n in metrics(run)])


def change_config(run) -> None:
    config = json.loads((run / "step_00000020/config.json").read_text()) | {"layer_norm_epsilon": 0.5}
    replace_files(run / "step_00000020", {"config.json": json.dumps(config, indent=2).encode()})


def change_record(change, *names):
    """run -> changes the trainer state of its checkpoints with these names; by default the last one's."""
    return lambda run: [change_state(run / name, change) for name in names or ("step_00000020",)]


def drop_field(state) -> None:
    """A field that had its default, from the record by which the replay is configured."""
    for part in state["about"]:
        del part["config"]["max_grad_norm"]
    if state["step"] == 20:
        state["config"]["max_grad_norm"] = 0.5


FORGERIES = {  # functions of the run, and what the audit prints
    "val_loss": (change_line(20, val_loss=5.0), "val_loss of step 20 is 5"),
    "val_loss removed": (change_line(20, val_loss=None), "val_loss of step 20 is missing"),
    "another sentence": (change_line(20, loss="\x1b[K\r\n\ud800step 15"), "of step 20 is \\x1b[K \\ud800step 15, and "),
    "NaN": (change_line(20, loss=float("nan")), "loss of step 20 is nan"),
    "invented": (change_line(20, hellaswag_llmc_acc=0.99), "hellaswag_llmc_acc of step 20 is 0.99"),
    "start damaged": (  # rather than the checkpoint at the end of the interval
        lambda run: flip_bit(run / STEPS[2] / "model.safetensors"),
        f"{STEPS[2]} is damaged: model.safetensors does not match its checksum in manifest.json",
    ),
    "gradient norm": (change_line(20, grad_norm=0.1), "grad_norm of step 20 is 0.1"),
    "learning rate": (change_line(20, learning_rate=1e-4), "learning_rate of step 20 is 0.0001"),
    "more tokens than a float holds": (change_line(20, tokens=10**400), "tokens of step 20 is 1000000"),
    "a loss before": (change_line(18, loss=2.0), "the lines of metrics.jsonl before step 20"),
    "no log": (lambda run: (run / "metrics.jsonl").unlink(), "the lines of metrics.jsonl before step 20"),
    "line twice": (lambda run: write_lines(run, [*metrics(run), metrics(run)[-1]]), "lines of step 20 is 2, and 1 in"),
    "NaN weight": (lambda run: change_weight(run / "step_00000020", float("nan")), WEIGHT),
    "a weight": (lambda run: change_weight(run / "step_00000020", 1.0), WEIGHT),
    # It has no effect while it is small; with this one all losses are NaN.
    "the keys' bias": (lambda run: change_weight(run / "step_00000020", 3e38, BIAS, KEYS), BIAS),
    "state": (
        change_record(lambda state: state["metrics"]["running_loss"].update(sum=9.0)),
        "the checkpoint's sum of step 20 is 9",
    ),
    "step": (change_record(lambda state: state.update(step=2 * 10**7)), "trainer_state.json records step 20,000"),
    "tokenizer": (change_record(lambda state: state["tokenizer"].update(name="acme")), "records another tokenizer"),
    "shards": (change_record(lambda state: state["data"]["shards"][0].__setitem__(1, 10**9)), "records other shards"),
    # The model card and transformers would use these.
    "config.json": (change_config, "different: config.json of step 20 differs from the replay's"),
    "data": (
        change_record(lambda state: state["about"][-1]["data"].update(train_text="HuggingFaceFW/fineweb"), *STEPS),
        "different: the checkpoint records other data than it was trained on",
    ),
    "configuration": (
        change_record(lambda state: state["config"].update(learning_rate=123.0)),
        "different: the configuration records learning_rate 123.0, but training used 0.0",
    ),
    "a default": (change_record(drop_field, *STEPS), "records max_grad_norm 0.5, but training used 1.0"),
}


@pytest.mark.parametrize("elsewhere", [(), ELSEWHERE], ids=["here", "elsewhere"])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_found(run, capsys, replayed_once, forgery, elsewhere):
    forge, difference = FORGERIES[forgery]
    forge(run)
    code, sentences = audited(capsys, run, *elsewhere)
    assert code == 1
    assert sentences[0].startswith("step 15 to 20: different: ")
    assert difference in sentences[0]


def test_a_record_of_other_shards_is_found_where_the_data_are_elsewhere(run, shards, capsys, replayed_once):
    flags = ("--flags", f"--dataset_name {shutil.copytree(shards, run.parent / 'elsewhere')}")
    assert audited(capsys, run, *flags) == (0, ["step 15 to 20: 5 steps equal to the bit"])
    FORGERIES["shards"][0](run)
    code, sentences = audited(capsys, run, *flags)
    assert code == 1
    assert sentences == ["step 15 to 20: different: the checkpoint records other shards than it was trained on"]


def test_a_forgery_of_the_first_step_is_found(run, capsys, replayed_once):
    forget_after(5, run)
    change_line(0, val_loss=1.0)(run)
    digest = sha256_before((run / "metrics.jsonl").read_bytes(), 5)
    change_state(run / STEPS[0], lambda state: state["metrics"].update(lines_sha256=digest))
    assert "val_loss of step 0" in audited(capsys, run, "--random", 9)[1][0]


def test_a_run_whose_last_line_is_missing_is_not_accused(run, capsys, replayed_once):
    write_lines(run, metrics(run)[:-1])
    assert audited(capsys, run)[0] == 69


def test_one_interval_that_is_different_makes_the_run_different(monkeypatch, resumed_run, capsys):
    verdicts = [audit.NotComparable("a"), audit.Different("b"), audit.NotComparable("c")]
    monkeypatch.setattr(audit, "audit", Mock(side_effect=verdicts))
    assert audited(capsys, resumed_run, "--last", 3)[0] == 1


@pytest.mark.parametrize(
    ("name", "rounding", "limit"),
    [
        ("loss", 1e-5, 8e-5),  # eight times what rounding does here
        ("loss", 1e-8, 8e-6),
        ("loss", 1e-4, 0.05),  # errors that have grown by themselves
        ("loss", 0.1, 0.8),
        ("transformer.wte.weight", 0.01, 0.5),
        ("grad_norm", 0.01, 1.0),
    ],
)
def test_a_run_may_differ_by_a_few_times_the_rounding_and_no_more(name, rounding, limit):
    replay, replay_2 = {(20, name): 2.0}, {(20, name): 2.0 * (1 + rounding)}
    for size, difference in ((0.95, ""), (1.05, f"{name} of step 20 is ")):
        sentence, _ = audit.compare({(20, name): 2.0 * (1 + size * limit)}, replay, replay_2, {}, 15)
        assert sentence.startswith(difference), (size, sentence)
        assert bool(sentence) == bool(difference)


def test_rounding_counts_up_to_twice_as_far_from_the_start():
    """Up to step 5 of 8 for step 2, and up to step 3 for step 1."""
    replay = {(step, "loss"): 3.0 for step in range(1, 9)}
    _, tightness = audit.compare(replay, replay, replay | {(5, "loss"): 3.0 + 1e-6}, {}, 0)
    assert tightness == ["7 losses within 0e+00, rounding here is 3e-07"]


def test_an_interval_of_many_lines_is_compared_in_seconds():
    lines = range(1, 5001)
    replay, replay_2 = ({(step, "loss"): 3.0 + error for step in lines} for error in (0.0, 1e-6))
    start = time.process_time()
    sentence, tightness = audit.compare(replay, replay, replay_2, {}, 0)
    assert (sentence, tightness) == ("", ["5000 losses within 0e+00, rounding here is 3e-07"])
    assert time.process_time() - start < 1  # each line was compared with all others: 4 s


def test_what_differs_after_a_change_of_the_code_accuses_nobody(run, capsys, replayed_once):
    change_line(20, loss=2.0)(run)
    change_record(lambda state: state["about"][-1].update(code="0" * 64), *STEPS)(run)
    code, sentences = audited(capsys, run)
    assert code == 69
    assert "step 15 to 20: cannot be compared here: loss of step 20 is 2.0, and " in sentences[0]
    assert "(code '0000" in sentences[0]


def test_what_is_not_compared_with_other_packages_is_named(run, capsys, replayed_once):
    change_config(run)
    change_record(lambda state: state["about"][-1]["packages"].update(tiktoken="0.1"), *STEPS)(run)
    code, sentences = audited(capsys, run)
    sentence = "step 15 to 20: 5 steps equal to the bit; configuration and tokenizer files not compared (packages {"
    assert code == 0
    assert sentences[0].startswith(sentence)


def test_a_flipped_bit_is_found(run, capsys, replayed_once):
    change_weight(run / "step_00000020")
    code, sentences = audited(capsys, run)
    assert (code, sentences) == (1, [f"step 15 to 20: different: {WEIGHT} of step 20 differs from the replay's"])


def test_an_interval_begins_at_the_checkpoint_from_which_the_run_resumed_with_other_settings(run):
    """Not before it: an audit does not replay a change of settings."""
    part = {"from_step": 10, "micro_batch_size": 2}
    change_state(run / "step_00000015", lambda state: state["about"].append(state["about"][-1] | part))
    interval = audit.interval_to(run / "step_00000015", checkpoints(run), "")
    assert (interval.first, interval.last) == (10, 15)


def test_an_honest_run_holds_to_the_bit_and_is_only_read(resumed_run, capsys, replayed_once):
    times = modification_times(resumed_run)
    code, sentences = audited(capsys, resumed_run, "--last", 4)
    assert (code, sentences) == (0, [f"step {n} to {n + 5}: 5 steps equal to the bit" for n in (0, 5, 10, 15)])
    assert modification_times(resumed_run) == times


def test_a_column_that_the_replay_lacks_is_named(run, capsys, replayed_once):
    """Here invented in the line of a checkpoint from which the run continued."""
    change_line(10, hellaswag_llmc_acc=0.99)(run)
    for step in (15, 20):
        lines = sha256_before((run / "metrics.jsonl").read_bytes(), step)
        change_state(run / f"step_{step:08d}", lambda state, lines=lines: state["metrics"].update(lines_sha256=lines))
    code, sentences = audited(capsys, run, "--last", 3)
    sentence = "step 5 to 10: 5 steps equal to the bit, not checked: hellaswag_llmc_acc of step 10"
    assert (code, sentences[0]) == (0, sentence)


def test_a_run_continued_from_a_copied_checkpoint_holds(shards, resumed_run, tmp_path, capsys, replayed_once):
    """Although its metrics.jsonl lacks the lines before that checkpoint."""
    shutil.copytree(resumed_run / "step_00000010", tmp_path / "run" / "step_00000010")
    train(shards, tmp_path / "run", **KEPT)
    assert audited(capsys, tmp_path / "run") == (0, ["step 15 to 20: 5 steps equal to the bit"])


def test_a_terminated_audit_deletes_its_files(whole_run, tmp_path):
    """By SIGTERM to the audit alone, as from `timeout`: the trainer has its own session."""
    running = programs.Running("-m", "recipe.audit", whole_run[0], env={"TMPDIR": str(tmp_path)})
    while not list(tmp_path.glob("audit-*/*/replay.log")) and running.codes == [None]:
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    assert running.wait(60) == 130, running.output
    assert "stopped; the run is unchanged" in running.stderr
    assert not list(tmp_path.glob("audit-*"))


@pytest.mark.parametrize("end", [5, 20])
def test_a_run_holds_within_rounding_under_another_micro_batch(run, capsys, replayed_once, end):
    """From step 0 on, the weights' update is relative to the initial weights."""
    forget_after(end, run)
    code, sentences = audited(capsys, run, *ELSEWHERE)
    assert sentences[0].startswith(f"step {end - 5} to {end}: holds: ")
    assert re.search(r"losses within \de-0[789], rounding .* weights by their update within \de-0[4567],", sentences[0])
    assert sentences[0].endswith("; sample not compared (micro_batch_size 4 in the run, 2 here)")
    assert code == 0


def test_a_wsd_run_extended_with_another_micro_batch_holds(shards, tmp_path, capsys, forked):
    """It was extended from before its decay, and has its decayed checkpoint beside the others, as on the Hub. Without
    the checkpoint of the change it cannot be compared."""
    run, fields = tmp_path / "run", KEPT | {"lr_scheduler_type": "wsd", "decay_fraction": 0.5, "save_steps": 100}
    train(shards, run, **fields, max_steps=8)
    train(shards, run, **fields, max_steps=12, micro_batch_size=2)
    shutil.copytree(run / "decayed_00000008" / "step_00000008", run / "step_00000008")
    code, sentences = audited(capsys, run)
    assert (code, sentences) == (0, ["step 6 to 12: 6 steps equal to the bit"])
    for step in (4, 6, 8):
        shutil.rmtree(run / f"step_{step:08d}")
    code, sentences = audited(capsys, run)
    assert code == 69
    assert "step 0 to 12: cannot be compared here: settings, code or processes changed" in sentences[0]
    assert "at step 4, of which there is no checkpoint" in sentences[0]


def test_runs_with_other_dropout_masks_are_not_comparable(whole_run, capsys, forked):
    code, sentences = audited(capsys, whole_run[0], *ELSEWHERE)
    assert code == 69
    assert "cannot be compared here: two replays here already differ too much in losses (micro_batch" in sentences[0]


@pytest.mark.parametrize("mixed", [False, True])
def test_an_audit_of_a_stream_only_reads_its_directory(shards, tmp_path, capsys, forked, mixed):
    text, file = SHAKESPEARE.read_text(), tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": text[i : i + 1000]}) + "\n" for i in range(0, 300_000, 1000)))
    name, data = tmp_path / "data", {"train_text": str(file), "streaming": "true", "val_documents": 5}
    if mixed:
        mixture = [{"name": str(name), "weight": 0.5} | data, {"name": str(shards), "weight": 0.5}]
        name, data = json.dumps(mixture), {}
    train(name, tmp_path / "run", **data, shard_tokens=4000, disk_budget_gb=5e-5, max_steps=5)
    times = modification_times(tmp_path / "data")
    code, sentences = audited(capsys, tmp_path / "run")
    assert (code, sentences) == (0, ["step 0 to 5: 5 steps equal to the bit"])
    assert modification_times(tmp_path / "data") == times


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dataset_name", "/"),
        ("dataset_name", [{"name": "ORG/NAME", "weight": 0.5}, {"name": "/", "weight": 0.5}]),
        *((field, "/") for field in ("train_text", "val_data", "init_from", "tokenizer")),
    ],
)
def test_no_path_of_another_author_is_read(resumed_run, capsys, monkeypatch, field, value):
    def download(repo, run):
        shutil.copytree(resumed_run, run)
        for checkpoint in checkpoints(run):
            shutil.copy(run / "metrics.jsonl", checkpoint)
        change = {"dataset_name": "ORG/NAME", field: value}
        change_state(checkpoints(run)[-1], lambda state: state["about"][-1]["config"].update(change))
        return checkpoints(run)

    monkeypatch.setattr(audit, "checkpoints_on_the_hub", download)
    monkeypatch.setattr(audit, "step_of_main", lambda *_: 0)
    assert audit.main(["--repo", "acme/gpt2"]) == 2
    name = field.replace("train_text", "dataset_name")
    problem = f"{name} '/' is a path on the computer of acme/gpt2's author"
    assert f"error: {problem}; name your copy: --flags '--{name} PATH'" in capsys.readouterr().err


def test_a_replay_reads_the_commit_of_a_data_set_that_the_run_read(run, tmp_path):
    """The data set may have newer ones."""

    def change(state):
        state["config"]["dataset_name"] = state["about"][-1]["config"]["dataset_name"] = "ORG/NAME"
        state["about"][-1]["data"]["commit"] = "c" * 40

    change_state(run / STEPS[0], change)
    _, recipe = audit.options_of(audit.Interval(None, run / STEPS[0], 0, 5, False), tmp_path, "acme/gpt2", [])
    assert yaml.safe_load(Path(recipe).read_text())["dataset_revision"] == "c" * 40


def test_a_replay_that_does_not_stop_is_killed(resumed_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(audit, "EXIT_GRACE_S", 0.5)
    program, pid = tmp_path / "deaf.py", tmp_path / "pid"
    program.write_text(
        "import os, pathlib, shutil, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
        "run = next(word for word in sys.argv if word.startswith('--output_dir=')).partition('=')[2]\n"
        f"shutil.copytree({str(resumed_run)!r}, run, dirs_exist_ok=True)\n"
        "time.sleep(100)\n"
    )
    code, sentences = audited(capsys, resumed_run, "--launch", f"{shlex.quote(sys.executable)} {program}")
    assert (code, sentences) == (0, ["step 15 to 20: 5 steps equal to the bit"])
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


DDP_YAML = f"{ROOT}/accelerate_configs/ddp.yaml"
LAUNCHER = shlex.join([sys.executable, "-m", "accelerate.commands.launch", "--config_file", DDP_YAML])
DDP = ("--launch", f"{LAUNCHER} --num_processes 2")
FSDP = tuple(word.replace("ddp", "fsdp") for word in DDP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "processes", "options", "sentence"),
    [
        ({}, 1, DDP, "holds: "),
        ({}, 1, FSDP, "holds: "),
        ({}, 2, (), "holds: "),
        ({"precision": "bf16"}, 1, DDP, "cannot be compared here: two replays here already differ too much in weights"),
        ({"precision": "bf16"}, 1, FSDP, "cannot be compared here: half precision rounds differently here"),
        ({"learning_rate": 0.1, "max_steps": 100}, 1, DDP, "cannot be compared here: two replays here already differ"),
        ({"torch_compile": "true", "n_layer": 1}, 1, (), "to the bit"),
        ({}, 1, ("--launch", f"env ATEN_CPU_CAPABILITY=default {shlex.quote(sys.executable)}"), "holds: "),
    ],
)
def test_honest_runs_are_never_different(shards, tmp_path, capsys, monkeypatch, fields, processes, options, sentence):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    train(shards, tmp_path / "run", processes, **KEPT | {"save_steps": 100} | fields)
    code, sentences = audited(capsys, tmp_path / "run", *options)
    assert sentence in sentences[0]
    assert code == (69 if "cannot" in sentence else 0)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "options"), [("ddp", DDP), ("fsdp", ())])
@pytest.mark.parametrize("is_forged", [False, True])
def test_a_forgery_on_two_processes_is_found(shards, once, tmp_path, capsys, monkeypatch, engine, options, is_forged):
    """The replay takes two processes as the training did, or one."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")

    def make(run):
        ok(launch(engine, 2, "recipe/train.py", *tiny_flags(shards, run, **KEPT)))

    run = shutil.copytree(once(f"audited {engine}", make)[0], tmp_path / "run")
    if is_forged:
        change_line(20, val_loss=metrics(run)[-1]["val_loss"] - 0.5)(run)
    code, sentences = audited(capsys, run, *options)
    assert code == is_forged
    honest = "to the bit" if options else "holds: "
    assert ("different: val_loss of step 20 is " if is_forged else honest) in sentences[0]


def test_a_text_for_validation_is_tokenized_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("val.txt").write_text(SHAKESPEARE.read_text()[:9000])
    ok(run_train(*tiny_flags(SHAKESPEARE, "run", val_data="val.txt"), cwd=tmp_path))
    shutil.rmtree("data")
    code, sentences = audited(capsys, "run")
    assert (code, sentences) == (0, ["step 10 to 20: 10 steps equal to the bit"])


def test_altered_data_are_found_at_their_step(shards, tmp_path, capsys, forked):
    data, run = shutil.copytree(shards, tmp_path / "data"), tmp_path / "run"
    (data / "manifest.json").unlink()  # its checksums would stop the run
    files = {"shards": data / "train_*.bin", "val_data": data / "val_*.bin"}
    train(**files, run=run, **KEPT)
    forget_after(15, run)
    tokens = data / "train_000000.bin"
    original = tokens.read_bytes()
    altered = np.frombuffer(original, np.uint16).copy()
    altered[128:] = altered[128:][::-1]
    tokens.write_bytes(altered.tobytes())
    change_state(run / "step_00000015", lambda state: state["data"]["shards"][0].__setitem__(2, None))  # and this
    train(**files, run=run, **KEPT)
    tokens.write_bytes(original)
    code, sentences = audited(capsys, run)
    assert code == 1
    assert sentences[0].startswith("step 15 to 20: different: ")
    assert " of step 16 is " in sentences[0]


@pytest.mark.parametrize(
    ("run", "replay", "is_other"),
    [
        ({"train_text": "a/b", "dataset_config": "x"}, {"train_text": "a/b", "dataset_config": "y"}, True),
        ({"train_text": "a/b"}, {"train_text": "a/b", "dataset_split": "y"}, True),
        ({"train_text": "a/b", "commit": "12"}, {"train_text": "a/b", "commit": "34"}, False),  # prepared again
        ({"files": [{"name": "a.txt", "sha256": "12"}]}, {"files": [{"name": "b.txt", "sha256": "12"}]}, True),
        ({"files": [{"name": "a.txt", "mtime_ns": 1}]}, {"files": [{"name": "a.txt", "mtime_ns": 2}]}, False),
        ({"train_text": "a/b"}, {"shards": "data/b"}, False),  # prepared elsewhere, without a manifest
        ({"mixture": [{"files": []}, {"train_text": "b"}]}, {"mixture": [{"files": []}, {"train_text": "c"}]}, True),
    ],
)
def test_the_names_of_the_data_are_those_of_the_replay_as_far_as_it_knows_them(run, replay, is_other):
    assert audit.names_other_data({"data": run}, {"data": replay, "config": {"streaming": False}}) == is_other


def test_the_commit_of_a_stream_is_that_of_its_replay():
    streams = [{"data": {"commit": commit}, "config": {"streaming": True}} for commit in "aab"]
    assert [audit.names_other_data(streams[0], other) for other in streams[1:]] == [False, True]
