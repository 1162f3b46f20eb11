"""Whole runs of recipe/train.py: golden losses, resuming, world sizes, what a run prints and writes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint.format import checkpoints
from recipe.data.tokenizer import encode
from recipe.evaluation import Evaluator
from recipe.hub.model_card import model_card
from recipe.monitor.summary import summarize
from tests.checkpoint import change_state
from tests.conftest import (
    ROOT,
    SHAKESPEARE,
    TINY,
    assert_equal_tensors,
    by_step,
    environment,
    flags,
    forget_after,
    metrics,
    ok,
    refused,
    run_train,
    tensors,
    tiny_flags,
    train,
)

GOLDEN = ROOT / "recipe" / "golden.json"


def losses(lines: dict) -> list[float]:
    return [line["loss"] for line in lines.values() if line["loss"] is not None]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_golden_loss_curve(tmp_path, pytestconfig, optim):
    """20 steps of a tiny configuration, which recipe/preflight.py takes on a user's machine too. A commit that changes
    the numerics says so and updates the file: python -m pytest tests/test_train.py -k golden --update_golden"""
    curves = json.loads(GOLDEN.read_text())
    fields = curves["fields"] | {"dataset_name": tmp_path / "data", "output_dir": tmp_path / "run", "optim": optim}
    ok(run_train(*flags(**fields)))
    lines = by_step(tmp_path / "run")
    run = {"loss": losses(lines), "val_loss": lines[20]["val_loss"]}
    if pytestconfig.getoption("update_golden"):
        GOLDEN.write_text(json.dumps(curves | {optim: run}, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())[optim]
    assert len(run["loss"]) == 20
    assert run["loss"] == pytest.approx(golden["loss"], abs=1e-4)
    assert run["val_loss"] == pytest.approx(golden["val_loss"], abs=1e-4)


def test_a_run_learns_and_reports(whole_run):
    _, lines, _ = whole_run
    assert list(lines) == list(range(21))
    assert lines[0]["val_loss"] == pytest.approx(np.log(50257), abs=0.05)  # uniform at the start
    assert lines[20]["val_loss"] < lines[10]["val_loss"] < lines[0]["val_loss"] - 1
    assert [step for step, line in lines.items() if line["val_loss"] is not None] == [0, 10, 20]
    assert lines[20]["tokens"] == 20 * TINY["total_batch_tokens"]
    assert lines[1]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert lines[4]["learning_rate"] == pytest.approx(1e-2)
    assert lines[20]["grad_norm"] > 0
    assert lines[20]["tokens_per_second"] > 0
    assert lines[20]["seconds"] > 0
    assert lines[20]["mfu"] is None  # no peak is known for a CPU


def test_the_checkpoint_is_a_transformers_model_with_its_tokenizer(whole_run):
    checkpoint = whole_run[0] / "step_00000020"
    _, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    text = SHAKESPEARE.read_text()[:5000] + "  naïve\n\n\t日本 it's 2²"
    assert tokenizer(text).input_ids == encode(text).tolist()
    assert (tokenizer.eos_token_id, len(tokenizer)) == (50256, 50257)
    assert tokenizer.model_max_length == 64  # n_positions of the model, not GPT-2's 1,024
    assert not {"is_local", "local_files_only"} & {*json.loads((checkpoint / "tokenizer_config.json").read_text())}
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["bos_token_id"] == 50256
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (config["dtype"], config["vocab_size"], config["tie_word_embeddings"]) == ("float32", 50257, True)


@pytest.mark.parametrize(("processes", "sample_steps"), [(1, 15), (2, 0)])
def test_stop_and_resume_equals_never_stopping_bit_for_bit(shards, whole_run, tmp_path, processes, sample_steps):
    """Weights, optimizer state and metrics, dropout on, also after a sample; steps 1 to 10, then a new process for 11
    to 20."""
    expected, lines = whole_run[:2]
    if processes > 1:
        expected = tmp_path / "expected"
        lines, _ = train(shards, expected, processes, dropout=0.1)
    run = forget_after(10, shutil.copytree(expected, tmp_path / "run"))
    resumed, output = train(shards, run, processes, dropout=0.1, sample_steps=sample_steps)
    assert "from step 10" in output
    assert ("step 15: sample " in output) is bool(sample_steps)
    assert_equal_tensors(run / "step_00000020", expected / "step_00000020")
    assert list(resumed) == list(lines)
    for step, line in lines.items():
        for key in ("tokens", "loss", "val_loss", "learning_rate", "grad_norm"):
            assert resumed[step][key] == line[key], (step, key)


def test_a_signal_stops_a_run_with_a_checkpoint_from_which_it_resumes_bit_for_bit(shards, whole_run, tmp_path):
    """SIGINT, which is ignored when the process starts, as in background jobs of a shell and commands of make."""
    expected, lines, _ = whole_run
    run = tmp_path / "run"
    command = [sys.executable, "recipe/train.py", *tiny_flags(shards, run, dropout=0.1)]
    options = {"cwd": ROOT, "env": environment({"PYTHONUNBUFFERED": "1"}), "text": True, "stdout": subprocess.PIPE}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stderr=subprocess.STDOUT, **options)
    try:
        for line in process.stdout:
            if line.startswith("step 3 "):
                process.send_signal(signal.SIGINT)
                break
        output = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 75, output
    assert "stopping at the next step boundary" in output
    assert 3 <= int(checkpoints(run)[-1].name[5:]) < 20
    resumed, _ = train(shards, run, dropout=0.1)
    assert_equal_tensors(run / "step_00000020", expected / "step_00000020")
    assert losses(resumed) == losses(lines)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists a process's files on Linux only")
def test_a_resumed_run_keeps_no_file_of_a_checkpoint_open(shards, whole_run, tmp_path, monkeypatch, in_process):
    """A deleted one would keep its space on the disk, and on NFS its directory."""
    run, kept = forget_after(10, shutil.copytree(whole_run[0], tmp_path / "run")), []

    def look_and_summarize(*arguments):
        kept.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(run) in line)
        return summarize(*arguments)

    monkeypatch.setattr("recipe.train.summarize", look_and_summarize)
    ok(in_process(tiny_flags(shards, run, dropout=0.1)))
    assert kept == []


@pytest.fixture(scope="module")
def short_run(shards, once):
    """The directory of 6 steps of the tiny run, without dropout, in fp32."""
    return once("short", lambda run: train(shards, run, max_steps=6)[1])[0]


def test_a_complete_run_stays_as_it_is_and_fresh_moves_it_aside(shards, short_run, tmp_path):
    run = shutil.copytree(short_run, tmp_path / "run")
    _, output = train(shards, run, max_steps=6)
    assert "training is finished" in output
    assert metrics(run) == metrics(short_run)
    lines, _ = train(shards, run, max_steps=6, fresh="true")
    assert losses(lines) == losses(by_step(short_run))
    assert (tmp_path / "run.old-1" / "step_00000006").is_dir()
    refused(run_train(*tiny_flags(tmp_path / "mistyped", run, fresh="true")))
    assert (run / "step_00000006").is_dir(), "an error in the command moves nothing"
    assert not (tmp_path / "run.old-2").exists()


@pytest.mark.parametrize("saved", [{"code": "0123456789", "commit": "abc+"}, {"commit": None}])
def test_a_resume_after_a_change_of_the_code_says_so(shards, short_run, tmp_path, in_process, saved):
    """Half of the run would have another model, for example. An older checkpoint does not name its code at all, and
    code that is not a clone has no commit."""
    run, commits = shutil.copytree(short_run, tmp_path / "run"), []

    def change(state: dict) -> None:
        commits.append(state["about"][-1]["commit"])
        del state["about"][-1]["code"]
        state["about"][-1] |= saved

    change_state(run / "step_00000006", change)
    output = ok(in_process(tiny_flags(shards, run, max_steps=8))).stdout
    change_of_commit = f" (commit abc+, then {commits[0]})" if saved["commit"] and commits[0] else ""
    assert f"code       has changed since step 6 was saved{change_of_commit}\n" in output


def test_an_extended_run_keeps_its_validation_losses_and_its_best_checkpoint(shards, tmp_path):
    """The last step is evaluated whatever eval_steps; then the run diverges at a constant learning rate."""
    run, settings = tmp_path / "run", {"eval_steps": 20, "save_total_limit": 1}
    lines, _ = train(shards, run, **settings, max_steps=65, learning_rate=2e-3, sample_steps=40)
    extended, output = train(shards, run, **settings, max_steps=90, learning_rate=1, min_lr_fraction=1)
    assert "the learning rate at step 65 was 0 and is" in output
    val_losses = {step: line["val_loss"] for step, line in extended.items() if line["val_loss"] is not None}
    assert list(val_losses) == [0, 20, 40, 60, 65, 80, 90]
    assert min(val_losses, key=val_losses.get) == 65
    of_this_process = dict.fromkeys(("seconds", "peak_memory_bytes"))
    assert extended[65] | of_this_process == lines[65] | of_this_process
    assert extended[65]["sample"]
    assert [p.name for p in checkpoints(run)] == ["step_00000065", "step_00000090"]
    lines, _ = train(shards, run, max_steps=92, eval_steps=9)  # due at step 90 too, which is not evaluated again
    assert [step for step, line in lines.items() if line["val_loss"] is not None] == [*val_losses, 92]
    assert [line["step"] for line in metrics(run)] == list(range(93))


def test_a_step_is_saved_before_its_long_evaluation_which_a_resume_does_not_repeat(
    shards, tmp_path, in_process, monkeypatch
):
    """On a slow disk, a kill during the evaluation would lose the step."""
    run, steps, were_saved, fsync = tmp_path / "run", [], [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.05), fsync(descriptor)))

    def validate(evaluator, model, step) -> dict:
        steps.append(step)
        return {"val_loss": 1.0}

    def hellaswag(evaluator) -> dict:
        were_saved.append((run / f"step_{steps[-1]:08d}").exists())
        return {}

    monkeypatch.setattr(Evaluator, "validate", validate)
    monkeypatch.setattr(Evaluator, "hellaswag", hellaswag)
    for max_steps in (4, 8):
        settings = {"max_steps": max_steps, "warmup_steps": 0, "save_steps": 4, "eval_steps": 4, "hellaswag_steps": 4}
        ok(in_process(tiny_flags(shards, run, **settings)))
    assert steps == [0, 4, 8]
    assert were_saved[-2:] == [True, True]


def test_bf16_gradient_checkpointing_and_chunks_follow_the_fp32_curve(shards, short_run, tmp_path):
    features = {"precision": "bf16", "gradient_checkpointing": "true", "loss_chunk_size": 50}
    lines, _ = train(shards, tmp_path / "bf16", max_steps=6, **features)
    expected = losses(by_step(short_run))
    assert losses(lines) == pytest.approx(expected, abs=2e-2)
    assert losses(lines) != expected
    weight = load_file(tmp_path / "bf16" / "step_00000006" / "model.safetensors")["transformer.wte.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())  # master weights have bits that bf16 lacks


def test_a_compiled_run_resumes_bit_for_bit(shards, tmp_path):
    """With two threads, which add to the same rows of the embedding's gradient."""
    settings = {"torch_compile": "true", "max_steps": 8, "save_steps": 4, "eval_steps": "end"}
    settings |= {"n_layer": 1, "total_batch_tokens": 512, "micro_batch_size": 32}

    def output_of(run) -> str:
        return ok(run_train(*tiny_flags(shards, run, **settings), env={"OMP_NUM_THREADS": "2"})).stdout

    run = tmp_path / "run"
    output_of(run)
    resumed = forget_after(4, shutil.copytree(run, tmp_path / "resumed"))
    assert "from step 4" in output_of(resumed)
    assert_equal_tensors(resumed / "step_00000008", run / "step_00000008")
    assert losses(by_step(resumed)) == losses(by_step(run))


@pytest.mark.slow
def test_compiling_works_where_the_path_of_pytorch_has_a_space(shards, tmp_path):
    """As below /mnt/c/Users/First Last under WSL, or of uv's Python on macOS."""
    (tmp_path / "Ann's files").symlink_to(sys.prefix)
    command = tiny_flags(shards, tmp_path / "run", torch_compile="true", max_steps=1, warmup_steps=0, n_layer=1)
    python, env = tmp_path / "Ann's files/bin/python", environment({"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/cache"})
    ok(subprocess.run([python, "recipe/train.py", *command], cwd=ROOT, env=env, capture_output=True, text=True))


@pytest.mark.slow
@pytest.mark.parametrize("gradient_checkpointing", ["false", "true"])  # compiles the model, or each block by itself
def test_compiling_changes_neither_the_numbers_nor_the_names(shards, tmp_path, gradient_checkpointing):
    settings = {"max_steps": 4, "warmup_steps": 1, "eval_steps": 2, "n_layer": 1}
    settings |= {"gradient_checkpointing": gradient_checkpointing}
    eager, _ = train(shards, tmp_path / "eager", **settings)
    settings |= {"torch_compile": "true", "loss_chunk_size": 100}
    settings |= {"hellaswag_steps": 2, "hellaswag_limit": 20, "sample_steps": 2}
    command = tiny_flags(shards, tmp_path / "compiled", **settings)
    result = ok(run_train(*command, env={"TORCH_LOGS": "recompiles"}))
    # Training is one program, and validation, which needs no gradients, another; other evaluations compile none.
    reasons = re.findall(r"- \d+/\d+: (.+)", result.stdout + result.stderr)
    assert {reason.strip() for reason in reasons} == {"GLOBAL_STATE changed: grad_mode"}
    compiled = by_step(tmp_path / "compiled")
    assert losses(compiled) == pytest.approx(losses(eager), abs=1e-4)
    assert compiled[4]["val_loss"] == pytest.approx(eager[4]["val_loss"], abs=1e-4)
    names, expected_names = (tensors(tmp_path / run / "step_00000004").keys() for run in ("compiled", "eager"))
    assert names == expected_names


def test_fine_tuning_starts_from_given_weights(shards, whole_run, tmp_path):
    run, lines, _ = whole_run
    settings = {"init_from": run / "step_00000020", "max_steps": 2, "warmup_steps": 0, "learning_rate": 1e-6}
    tuned, _ = train(shards, tmp_path / "run", **settings)
    assert tuned[0]["val_loss"] == pytest.approx(lines[20]["val_loss"], abs=1e-5)
    card = model_card(tmp_path / "run" / "step_00000002")
    assert "trained from other weights on" in " ".join(card.split())
    assert str(run) not in card, "a path is private"
    resumed, _ = train(shards, tmp_path / "run", **settings | {"init_from": tmp_path / "gone", "max_steps": 3})
    assert 3 in resumed


@pytest.mark.parametrize(
    ("fields", "code", "output"),
    [
        ({}, 0, r"data .* tokens in .*; validation .* tokens in "),
        ({"dataset_name": "nowhere"}, 2, "dataset_name nowhere: no such file, directory or data set"),
        ({"dataset_name": "{tmp}/*.bin", "val_data": "{tmp}/*.bin"}, 2, "short.bin: "),
        ({"total_batch_tokens": 2**30}, 2, "total_batch_tokens takes .* sequences a step"),
        ({"dataset_name": "ORG/NAME", "streaming": "true"}, 0, "note +not checked: data set ORG/NAME: .*the Hub "),
        ({"dataset_name": "{run}/step_00000020/model.safetensors"}, 2, "model.safetensors cannot be read .not UTF-8"),
        ({"dataset_name": "{tmp}/empty.txt"}, 2, "empty.txt: holds no text"),
        ({"init_from": "{tmp}"}, 2, "no model.safetensors"),
        ({"init_from": "{run}/step_00000020"}, 0, "\nweights    initialized from .*step_00000020\n"),
        ({"init_from": "{run}/step_00000020", "n_embd": 64}, 2, r"init_from .* has n_embd \d+ \(recipe: 64\)"),
        ({"init_from": "ORG/NAME"}, 0, "note +not checked: init_from ORG/NAME .*Is this machine offline"),
        ({"output_dir": "{run}", "seed": 2}, 0, "validation"),  # the earlier run is not on those devices
    ],
)
def test_a_dry_run_for_other_devices_checks_the_inputs(
    shards, whole_run, tmp_path, in_process, monkeypatch, fields, code, output
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.bin").write_bytes(b"x")
    (tmp_path / "empty.txt").touch()
    argv = [f.format(tmp=tmp_path, run=whole_run[0]) for f in tiny_flags(shards, tmp_path / "run", **fields)]
    result = in_process([*argv, "--dry_run=h100"])
    assert re.search(output, refused(result) if code else ok(result).stdout)
    assert {path.name for path in tmp_path.iterdir()} == {"short.bin", "empty.txt"}


@pytest.mark.parametrize(
    ("fields", "code", "output"),
    [
        ({"dropout": 0.1}, 0, "finished .*; raise --max_steps or --num_train_epochs to train longer, "),
        ({"max_steps": 30}, 0, "resume +from step 20 "),
        ({"seed": 2}, 2, "holds a run with other settings: seed "),
        ({"seed": 2, "fresh": "true"}, 0, "validation"),
    ],
)
def test_a_dry_run_prints_from_where_the_run_would_continue(shards, whole_run, in_process, fields, code, output):
    run = whole_run[0]
    metrics = (run / "metrics.jsonl").read_bytes()
    result = in_process([*tiny_flags(shards, run, **fields), "--dry_run"])
    assert re.search(output, refused(result) if code else ok(result).stdout)
    assert (run / "metrics.jsonl").read_bytes() == metrics
