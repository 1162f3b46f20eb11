"""Whole runs of recipe/train.py as a user starts them: golden curve, resume to the bit, world sizes, bad inputs."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.checkpoint.format import checkpoints
from tests.conftest import ROOT, TINY, by_step, environment, flags, metrics, run_train, train

GOLDEN = ROOT / "tests" / "golden_loss.json"
GOLDEN_CONFIG = {"sequence_length": 32, "total_batch_tokens": 256, "micro_batch_size": 8, "eval_tokens": 1024}


def losses(lines: dict) -> list[float]:
    return [line["loss"] for line in lines.values() if line["loss"] is not None]


def tensors(checkpoint):
    return load_file(checkpoint / "model.safetensors") | load_file(checkpoint / "optimizer.safetensors")


def test_golden_loss_curve(shards, tmp_path, pytestconfig):
    """20 steps of the tiny configuration. A change of numerics updates the file and says so in its commit:
    python -m pytest tests/test_train.py -k golden --update_golden"""
    lines, _ = train(shards, tmp_path / "run", **GOLDEN_CONFIG)
    found = {"loss": losses(lines), "val_loss": lines[20]["val_loss"]}
    if pytestconfig.getoption("update_golden"):
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    assert len(found["loss"]) == 20
    assert found["loss"] == pytest.approx(golden["loss"], abs=1e-4)
    assert found["val_loss"] == pytest.approx(golden["val_loss"], abs=1e-4)


def test_a_run_learns_and_reports(whole_run):
    run, lines, output = whole_run
    assert list(lines) == list(range(21))
    assert lines[0]["val_loss"] == pytest.approx(np.log(50257), abs=0.05)  # uniform at the start
    assert lines[20]["val_loss"] < lines[10]["val_loss"] < lines[0]["val_loss"] - 1
    assert [s for s, line in lines.items() if line["val_loss"] is not None] == [0, 10, 20]
    keys = {"step", "tokens", "loss", "val_loss", "learning_rate", "grad_norm", "tokens_per_second", "mfu", "seconds"}
    assert keys <= lines[20].keys()
    assert lines[20]["tokens"] == 20 * 256
    assert lines[1]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert lines[4]["learning_rate"] == pytest.approx(1e-2)
    assert lines[20]["grad_norm"] > 0
    assert lines[20]["tokens_per_second"] > 0
    assert lines[20]["mfu"] is None  # no peak is known for a CPU
    assert "unigram baseline" in output
    assert f"from_pretrained('{run}/step_00000020')" in output


def test_the_checkpoint_is_a_transformers_model_with_its_tokenizer(whole_run):
    run, lines, _ = whole_run
    checkpoint = run / "step_00000020"
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "lm_head.weight" not in load_file(checkpoint / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(tokenizer("First Citizen: hear me").input_ids) == "First Citizen: hear me"
    assert tokenizer.model_max_length == 64  # the model's positions, and not GPT-2's
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert generation["eos_token_id"] == generation["bos_token_id"] == 50256
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (config["dtype"], config["vocab_size"], config["tie_word_embeddings"]) == ("float32", 50257, True)
    # its loss, by transformers, on the shards' validation windows, is the one the trainer reported
    from recipe.data.dataset import LocalSource
    from recipe.data.shards import find_shards

    settings = json.loads((checkpoint / "trainer_state.json").read_text())["config"]
    source = LocalSource(find_shards(settings["dataset_name"], "val"), 32, 8, 1337)
    rows = torch.from_numpy(source.validation_rows(0, 1024 // 32))
    with torch.no_grad():
        loss = model.eval()(rows, labels=rows).loss.item()
    assert loss == pytest.approx(lines[20]["val_loss"], abs=1e-5)


@pytest.mark.parametrize("processes", [1, 2])
def test_stop_and_resume_equals_never_stopping_bit_for_bit(shards, whole_run, tmp_path, processes):
    """Weights, moments and metrics, dropout on; steps 1 to 10, then a new process for 11 to 20."""
    expected, lines = whole_run[:2]
    if processes > 1:
        expected = tmp_path / "expected"
        lines, _ = train(shards, expected, processes, dropout=0.1)
    run = tmp_path / "run"
    shutil.copytree(expected, run)
    shutil.rmtree(run / "step_00000020")
    resumed, output = train(shards, run, processes, dropout=0.1)
    assert "from step 10" in output
    a, b = tensors(run / "step_00000020"), tensors(expected / "step_00000020")
    assert a.keys() == b.keys()
    assert len(a) == 3 * 28
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert list(resumed) == list(lines)
    for step, line in lines.items():
        for key in ("tokens", "loss", "val_loss", "learning_rate", "grad_norm"):
            assert resumed[step][key] == line[key], (step, key)


def test_a_signal_stops_with_a_checkpoint_and_the_run_ends_as_if_it_had_not(shards, whole_run, tmp_path):
    expected, lines, _ = whole_run
    run = tmp_path / "run"
    settings = TINY | {"dataset_name": shards, "output_dir": run, "dropout": 0.1}
    process = subprocess.Popen(
        [sys.executable, "recipe/train.py", *flags(**settings)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
    )
    for line in process.stdout:
        if line.startswith("step 3 "):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stdout.read()
    assert process.wait() == 75
    assert "stopping after this step" in rest
    assert len(checkpoints(run)) >= 1
    assert 3 <= int(checkpoints(run)[-1].name[5:]) < 20
    resumed, _ = train(shards, run, dropout=0.1)
    a, b = tensors(run / "step_00000020"), tensors(expected / "step_00000020")
    assert all(torch.equal(a[k], b[k]) for k in b)
    assert [resumed[s]["loss"] for s in lines] == [lines[s]["loss"] for s in lines]


def test_dropout_changes_the_run(shards, whole_run, tmp_path):
    """Or the test above would prove nothing about its random numbers."""
    without, _ = train(shards, tmp_path / "run", max_steps=5)
    assert losses(without)[1] != losses(whole_run[1])[1]


def test_one_process_and_two_take_the_same_steps(shards, tmp_path):
    one, _ = train(shards, tmp_path / "one", micro_batch_size=2)  # accumulation 4
    two, output = train(shards, tmp_path / "two", processes=2, micro_batch_size=2)  # 2 ranks x accumulation 2
    assert "2 processes x 2 micro-steps x 2 sequences" in output
    # At a rate of 1e-2 the order of sums grows into the fifth digit; test_engines.py holds 50 steps at 1e-3 to 1e-4.
    assert losses(two) == pytest.approx(losses(one), abs=5e-5)
    assert two[20]["val_loss"] == pytest.approx(one[20]["val_loss"], abs=5e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_batches_hash_alike_however_the_step_is_cut(shards, world, micro):
    """What the engine's reader hands to each rank, put together, for steps 3 to 6."""
    from recipe.config import Batch
    from recipe.data.dataset import LocalSource
    from recipe.data.shards import find_shards
    from recipe.engine.base import Engine

    source = LocalSource(find_shards(str(shards), "train"), 32, 32, 1337)
    batch = Batch(sequences=32, world=world, micro=micro, accumulation=32 // (world * micro))
    reader = Engine.__new__(Engine)  # the reader alone: no Accelerator
    reader.device = torch.device("cpu")
    ranks = []
    for rank in range(world):
        reader.rank = rank
        ranks.append(list(reader.batches(source, batch, 3, 6)))
    digest = hashlib.sha256()
    for micro_batches in zip(*ranks, strict=True):
        for rows in micro_batches:
            digest.update(rows.numpy().tobytes())
    expected = hashlib.sha256(b"".join(source.rows(step, 0, 32).tobytes() for step in range(3, 6)))
    assert digest.hexdigest() == expected.hexdigest()


def test_running_again_says_that_the_run_is_complete_and_fresh_keeps_the_old_one(shards, tmp_path):
    run = tmp_path / "run"
    first, _ = train(shards, run, max_steps=6, save_steps=0)
    before = (run / "metrics.jsonl").read_bytes()
    _, output = train(shards, run, max_steps=6, save_steps=0)
    assert "holds the whole run" in output
    assert (run / "metrics.jsonl").read_bytes() == before
    again, output = train(shards, run, max_steps=6, save_steps=0, fresh="true")
    assert losses(again) == losses(first)
    assert (tmp_path / "run.old-1" / "step_00000006").is_dir()


def test_checkpoints_are_pruned_to_the_last_ones_and_the_milestones(shards, tmp_path):
    train(shards, tmp_path / "run", max_steps=12, save_steps=2, save_total_limit=2, milestone_steps=6, eval_steps=0)
    assert [p.name for p in checkpoints(tmp_path / "run")] == ["step_00000006", "step_00000010", "step_00000012"]


def test_bf16_recomputation_and_chunks_follow_the_fp32_curve(shards, whole_run, tmp_path):
    plain, _ = train(shards, tmp_path / "fp32", max_steps=8)
    other, _ = train(
        shards, tmp_path / "bf16", max_steps=8, precision="bf16", gradient_checkpointing="true", loss_chunk_size=100
    )
    assert losses(other) == pytest.approx(losses(plain), abs=2e-2)
    assert losses(other) != losses(plain)
    weight = load_file(tmp_path / "bf16" / "step_00000008" / "model.safetensors")["transformer.wte.weight"]
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.bfloat16().float())  # master weights have bits that bf16 has not


def test_compiling_changes_neither_the_numbers_nor_the_names(shards, tmp_path):
    settings = {"max_steps": 4, "warmup_steps": 1, "eval_steps": 2, "n_layer": 1}
    plain, _ = train(shards, tmp_path / "plain", **settings)
    whole = TINY | settings | {"dataset_name": shards, "output_dir": tmp_path / "compiled", "torch_compile": "true"}
    whole |= {"loss_chunk_size": 100, "hellaswag_steps": 2, "hellaswag_limit": 20, "sample_steps": 2}
    result = run_train(*flags(**whole), env={"TORCH_LOGS": "recompiles"})
    assert result.returncode == 0, result.stdout + result.stderr
    # Training and the validation that needs no gradients are two programs; nothing else is compiled for an evaluation.
    reasons = re.findall(r"- \d+/\d+: (.+)", result.stdout + result.stderr)
    assert {reason.strip() for reason in reasons} == {"GLOBAL_STATE changed: grad_mode"}
    compiled = by_step(tmp_path / "compiled")
    assert losses(compiled) == pytest.approx(losses(plain), abs=1e-4)
    assert compiled[4]["val_loss"] == pytest.approx(plain[4]["val_loss"], abs=1e-4)
    a, b = tensors(tmp_path / "compiled" / "step_00000004"), tensors(tmp_path / "plain" / "step_00000004")
    assert a.keys() == b.keys()


def test_hellaswag_and_samples_during_training(shards, tmp_path):
    lines, output = train(
        shards,
        tmp_path / "run",
        processes=2,
        max_steps=4,
        warmup_steps=1,
        hellaswag_steps=4,
        hellaswag_limit=9,
        sample_steps=2,
    )
    for name in ("A_acc", "A_acc_norm", "B_acc", "B_acc_norm"):
        correct = lines[4][f"hellaswag_{name}"] * 9
        assert correct == pytest.approx(round(correct), abs=1e-5)
    assert "HellaSwag (9 rows)" in output
    assert output.count(": sample ") == 2


def test_a_checkpoint_is_committed_before_its_step_is_evaluated_at_length(shards, tmp_path):
    """By HellaSwag or a sample, also where writing takes a second; a validation goes on beside the writing."""
    code = """
import sys, threading, time
from recipe.checkpoint import manager as saver
from recipe import train
save, validate, sample = saver.save_checkpoint, train.validate, train.sample
validated, steps = [threading.Event() for _ in range(5)], iter(range(5))  # a validation a step
def slowly(run, step, *rest):
    time.sleep(1) if step % 2 == 0 else validated[step].wait(30)
    return save(run, step, *rest)
def telling(what, evaluate):
    def told(config, *rest):
        print(what, [path.name for path in saver.checkpoints(saver.Path(config.run.output_dir))])
        validated[next(steps)].set() if what == "validation" else None
        return evaluate(config, *rest)
    return told
saver.save_checkpoint = slowly
train.validate, train.sample = telling("validation", validate), telling("sample", sample)
sys.exit(train.main(sys.argv[1:]))
"""
    settings = TINY | {"dataset_name": shards, "output_dir": tmp_path / "run", "max_steps": 4, "warmup_steps": 1}
    settings |= {"eval_steps": 1, "save_steps": 1, "sample_steps": 2, "n_layer": 1, "save_total_limit": 9}
    command = [sys.executable, "-c", code, *flags(**settings)]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = [f"step_{n:08}" for n in range(1, 5)]
    for what, counts in ("validation", [0, 0, 2, 2, 4]), ("sample", [2, 4]):
        found = [line for line in result.stdout.splitlines() if line.startswith(f"{what} [")]
        assert found == [f"{what} {steps[:n]}" for n in counts]
    assert metrics(tmp_path / "run")[-1]["save_wait"] > 0.2  # and the seconds are told as what training waited


def test_fine_tuning_starts_from_given_weights(shards, whole_run, tmp_path):
    run, lines, _ = whole_run
    start = run / "step_00000020"
    tuned, _ = train(shards, tmp_path / "run", max_steps=2, warmup_steps=0, init_from=start, learning_rate=1e-6)
    assert tuned[0]["val_loss"] == pytest.approx(lines[20]["val_loss"], abs=1e-5)
