"""Perplexity, sampling, and what all evaluation commands do: find models, refuse unsafe ones, keep results."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import math
import os
import re
import resource
import shutil
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertConfig, BloomConfig, GPT2Config

from eval import common, compare, hellaswag, perplexity, sample, scores
from recipe.data.shards import ShardReader, find_shards
from recipe.hub.model_card import model_card
from recipe.model.gpt2 import GPT2LMHeadModel
from recipe.utils.files import sha256_of
from tests.checkpoint import flip_bit
from tests.conftest import ROOT, SHAKESPEARE, ok
from tests.data import write_shard
from tests.eval.conftest import load

END_OF_TEXT = 50256


@pytest.fixture(scope="module")
def loaded(model_dir):
    return load(model_dir)


# Perplexity


def test_shards_equal_the_models_own_loss(model_dir, loaded, tmp_path, command, monkeypatch, capsys):
    """The command finds the training's validation data and length in the checkpoint."""
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 50257, size=n) for n in (3 * 32 + 1, 2 * 32 + 20)]
    for i, tokens in enumerate(shards):
        write_shard(tmp_path / f"text_val_{i:06d}.bin", tokens)
    write_shard(tmp_path / "text_train_000000.bin", shards[0])
    checkpoint = tmp_path / "step_00000010"
    checkpoint.mkdir()
    for file in model_dir.iterdir():
        (checkpoint / file.name).symlink_to(file)
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    config = {"dataset_name": f"~/{tmp_path.name}", "val_data": "", "sequence_length": 32, "eval_tokens": 130}
    (checkpoint / "trainer_state.json").write_text(json.dumps({"config": config}))
    (checkpoint / "results.json").write_text('{"hellaswag": {"rows": 7}}')

    command(perplexity, checkpoint, "--batch_size", 3)
    results = json.loads((checkpoint / "results.json").read_text())
    assert results["hellaswag"] == {"rows": 7}  # merged, not replaced
    result = results["perplexity"]
    expected = [tokens[i * 32 : i * 32 + 33] for tokens, n in zip(shards, (3, 2), strict=True) for i in range(n)]
    ids = torch.tensor(np.stack(expected[:4]))  # 130 tokens are 4 windows, of the 5 there are
    with torch.no_grad():  # transformers shifts the labels itself: of 33 tokens 32 are predicted
        loss = loaded.model(ids, labels=ids).loss.item()
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    size = perplexity.byte_lengths(loaded.tokenizer)[ids[:, 1:]].sum()
    assert result["bytes"] == size
    assert result["bits_per_byte"] == pytest.approx(loss * 128 / math.log(2) / size, rel=1e-4)
    assert {score["metric_name"]: score["metric_value"] for score in result["scores"]} == {
        "loss, nats per token": result["loss"],
        "perplexity per token": result["perplexity"],
        "bits per byte": result["bits_per_byte"],
    }
    assert (result["windows"], result["tokens"], result["sequence_length"]) == (4, 128, 32)
    assert sorted(result["files"]) == ["text_val_000000.bin", "text_val_000001.bin"]
    assert not list(checkpoint.glob(".results*"))
    assert len(perplexity.shard_windows(str(tmp_path / "text_*_000000.bin"), 32)[0]) == 6
    assert "the first 4 of 5 windows" in result["scores"][0]["how"]
    command(perplexity, checkpoint, "--data", tmp_path, "--output", tmp_path / "named.json")
    assert json.loads((tmp_path / "named.json").read_text())["perplexity"]["windows"] == 5  # all of data that are named
    with pytest.raises(
        common.UserError, match=r"tiny_shakespeare\.txt: no \.bin or \.npy file there.* recipe\.data\.prepare"
    ):
        perplexity.shard_windows(str(SHAKESPEARE), 32)  # whose bytes would be read as tokens
    monkeypatch.chdir(tmp_path)  # the same model by another path, and then in another place
    command(perplexity, checkpoint, "--data", tmp_path)
    full_scores = json.loads((checkpoint / "results.json").read_text())["perplexity"]["scores"]
    capsys.readouterr()
    for windows, options in ((4, ()), (1, ("--limit_windows", 1))):
        (name,) = Path().glob("step_*")
        command(perplexity, name, *options)
        rerun = json.loads((name / "results.json").read_text())["perplexity"]
        assert (rerun["windows"], rerun["scores"]) == (windows, full_scores)
        assert "note: earlier scores in " in capsys.readouterr().out
        name.rename("step_00000020")


def test_an_added_token_counts_the_bytes_of_its_text(model_dir):
    """Not its characters, as those of other tokens, which stand for a byte each."""
    tokenizer = copy.deepcopy(AutoTokenizer.from_pretrained(str(model_dir)))
    tokenizer.add_tokens(["naïve café"])
    (token,) = tokenizer.encode("naïve café")
    lengths = perplexity.byte_lengths(tokenizer)
    assert (lengths[token], lengths[END_OF_TEXT]) == (12, 0)


def test_all_of_a_text_is_evaluated_by_the_commands_that_an_error_names(model_dir, tmp_path, command, in_process):
    (text := tmp_path / "my.txt").write_text(SHAKESPEARE.read_text()[:5000])
    with pytest.raises(common.UserError) as error:
        command(perplexity, model_dir, "--data", text)
    prepare = re.search(r"python -m recipe\.data\.prepare (.*?), then", str(error.value))[1]
    words = prepare.replace("FILE", str(text)).replace("DIRECTORY", str(tmp_path / "shards")).split()
    ok(in_process(["prepare", *words]))
    (pattern,) = re.findall(r"--data '(.*?)'", str(error.value))
    pattern = pattern.replace("DIRECTORY", str(tmp_path / "shards"))
    command(perplexity, model_dir, "--data", pattern, "--sequence_length", 16, "--output", tmp_path / "results.json")
    result = json.loads((tmp_path / "results.json").read_text())["perplexity"]
    assert result["bytes"] > 4900


def test_a_glob_is_read_as_the_trainer_reads_it(model_dir, tmp_path, command):
    """At all levels, and in the trainer's order."""
    for number, directory in enumerate(("a", "a/b", "a-b")):
        (tmp_path / directory).mkdir()
        write_shard(tmp_path / directory / f"val_{number}.bin", np.full(33, number))
    pattern, output = str(tmp_path / "**" / "val_*.bin"), tmp_path / "results.json"
    command(perplexity, model_dir, "--data", pattern, "--sequence_length", 32, "--output", output)
    assert json.loads(output.read_text())["perplexity"]["windows"] == 3
    trained_on = [ShardReader(shard.path).read()[0] for shard in find_shards(pattern, "val")]
    assert [window[0] for window in perplexity.shard_windows(pattern, 32)[0]] == trained_on


def test_build_nanogpts_arrays_are_read_as_the_trainer_reads_them(tmp_path):
    for split in ("train", "val"):
        np.save(tmp_path / f"edu_fineweb_{split}_000000.npy", np.arange(600, dtype=np.uint16))
    windows, _, files = perplexity.shard_windows(str(tmp_path), 32)
    assert (len(windows), list(files)) == (18, ["edu_fineweb_val_000000.npy"])
    assert [shard.path.name for shard in find_shards(str(tmp_path), "val")] == [*files]


def test_the_memory_of_an_evaluation_is_that_of_its_windows(tmp_path):
    """OpenWebText's train.bin has 17 GB; a limit takes the first windows of the files together."""
    for number in range(2):
        write_shard(shard := tmp_path / f"val_{number}.bin", np.arange(65, dtype=np.uint16) + 100 * number)
        if number:
            with shard.open("r+b") as file:
                file.seek(8)
                file.write(np.array([50_000_000], "<i4").tobytes())
                file.truncate(1024 + 100_000_000)
    tracemalloc.start()
    windows, available, _ = perplexity.shard_windows(str(tmp_path), 32, limit=3)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ([window[0] for window in windows], available) == ([0, 32, 100], 2 + 49_999_999 // 32)
    assert peak < 5e6


def test_more_shards_are_evaluated_than_files_may_be_open(tmp_path):
    for number in range(100):
        write_shard(tmp_path / f"val_{number:03}.bin", np.full(33, number))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        windows, available, _ = perplexity.shard_windows(str(tmp_path), 32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (len(windows), available) == (100, 100)


def test_prepared_shards_are_those_of_the_manifest(model_dir, tmp_path, command):
    """As for the trainer, whatever lies beside them."""
    write_shard(tmp_path / "val_000000.bin", np.full(33, 1))
    write_shard(tmp_path / "other_val.bin", np.full(33, 2))
    entry = {"file": "val_000000.bin", "split": "val", "sha256": sha256_of(tmp_path / "val_000000.bin")}
    (tmp_path / "manifest.json").write_text(json.dumps({"shards": [entry]}))
    (window,), _, files = perplexity.shard_windows(str(tmp_path), 32)
    assert (window[0], list(files)) == (1, ["val_000000.bin"])
    write_shard(tmp_path / "val_000000.bin", np.full(33, 3))
    with pytest.raises(common.UserError, match=r"val_000000\.bin is not the shard that its manifest\.json describes"):
        command(perplexity, model_dir, "--data", tmp_path, "--sequence_length", 32)


def test_a_partial_evaluation_replaces_neither_full_scores_nor_other_tasks(tmp_path, capsys):
    def write(task, value, complete, model="a"):
        data, metrics = {"dataset_type": task, "dataset_name": task}, ("acc", "acc_norm")
        entries = [scores.score(data, ("accuracy", name), value, "", complete=complete) for name in metrics]
        common.write_results(path, "lm_eval", {"model": model, "scores": entries})
        stored = json.loads(path.read_text())["lm_eval"]["scores"]
        values = [{e["dataset_name"]: e["metric_value"] for e in stored if e["metric_name"] == m} for m in metrics]
        assert values[0] == values[1]
        return values[0]

    path = tmp_path / "results.json"
    assert write("arc", 0.2, False) == {"arc": 0.2}
    (tmp_path / "README.md").write_text("of the project, in whose directory the command runs")
    assert write("arc", 0.3, True) == {"arc": 0.3}
    assert write("arc", 0.3, True) == {"arc": 0.3}
    assert "note" not in capsys.readouterr().out
    assert write("arc", 0.4, False) == {"arc": 0.3}
    assert "note: earlier scores in " in capsys.readouterr().out
    assert write("piqa", 0.5, True) == {"arc": 0.3, "piqa": 0.5}
    assert write("arc", 0.6, True) == {"arc": 0.6, "piqa": 0.5}
    assert write("arc", 0.1, False, "b") == {"arc": 0.1}
    assert "note: replacing the results of a in" in capsys.readouterr().out
    (tmp_path / "config.json").write_text("{}")  # now the README.md is a model's
    write("arc", 0.1, True)
    assert f"note: {tmp_path}/README.md does not show this; evaluate the run and export it" in capsys.readouterr().out


def test_texts_of_one_name_have_a_score_each(model_dir, tmp_path, command, capsys):
    """They had replaced one another, and a part of the second was recorded with the first's loss."""
    output, losses = tmp_path / "results.json", {}
    for name, token in (("a", 5), ("b", 7)):
        (tmp_path / name / "text").mkdir(parents=True)
        write_shard(tmp_path / name / "text/val_000000.bin", np.full(65, token))
        for limit in ([], ["--limit_windows", 1])[name == "b" :]:
            arguments = "--data", tmp_path / name / "text", "--sequence_length", 32, "--output", output
            command(perplexity, model_dir, *arguments, *limit)
        result = json.loads(output.read_text())["perplexity"]
        losses[name] = result["loss"]
    shown = [entry["metric_value"] for entry in result["scores"] if entry["metric_name"].startswith("loss")]
    assert shown == [*losses.values()]
    assert losses["a"] != losses["b"]


def test_a_model_whose_predictions_depend_on_later_tokens_is_refused(model_dir, tmp_path):
    config = BertConfig(
        vocab_size=50257, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    with pytest.raises(common.UserError, match="a token changes the predictions before it"):
        load(tmp_path)


def test_a_model_that_is_not_gpt2_is_scored_each_ending_separately(model_dir, tmp_path):
    """BLOOM has no table of positions."""
    config = BloomConfig(vocab_size=50257, hidden_size=32, n_layer=1, n_head=2, initializer_range=0.5)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path)
    loaded, rows = load(tmp_path), hellaswag.load_rows(1)
    assert loaded.n_positions == common.DEFAULT_POSITIONS
    (scored,), _ = hellaswag.score_rows(loaded.lm, rows)["llmc"]
    request = hellaswag.encode_row(loaded.encode, rows[0], "llmc")[0][2]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    scored_positions = range(len(request.tokens) - request.n_scored, len(request.tokens))
    assert scored[2] == pytest.approx(sum(logits[t - 1, request.tokens[t]].item() for t in scored_positions), abs=1e-3)


def test_temperature_0_takes_the_likeliest_whatever_the_generation_config_says(loaded, model_dir, tmp_path):
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "repetition_penalty": 5.0}')
    configured, texts = load(tmp_path), set()
    for model, seed in ((loaded, 1), (configured, 1), (configured, 2)):
        options = ["--temperature", "0", "--seed", str(seed), "--max_new_tokens", "8"]
        texts |= {*sample.generate(model, "The", sample.arguments().parse_args(options))}
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("largest", "manifest", "message"),
    [
        (4095, {"vocab_size": 4096}, "tokenizer has 4,096 tokens, the model's 50,257"),
        (60_000, {"shards": []}, "tokenizer has 60,001 tokens"),
    ],
)
def test_shards_of_another_tokenizer_are_refused(model_dir, tmp_path, command, largest, manifest, message):
    write_shard(tmp_path / "a_val_000000.bin", np.full(40, largest))
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(common.UserError, match=message):
        command(perplexity, model_dir, "--data", tmp_path, "--sequence_length", 32)


@pytest.mark.parametrize("digest", ["gpt2", "0123456789abcdef"])
def test_shards_of_another_tokenizer_of_the_same_size_are_noted(whole_run, tmp_path, command, capsys, digest):
    write_shard(tmp_path / "a_val_000000.bin", np.arange(40))
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": 50257, "tokenizer": digest}))
    command(perplexity, whole_run[0], "--data", tmp_path, "--output", tmp_path / "results.json")
    assert ("note: " in (out := capsys.readouterr().out)) == (digest != "gpt2")
    assert ("was made with tokenizer 0123456789abcdef, the model with gpt2: " in out) == ("note: " in out)


def test_the_hellaswag_metric_by_hand(tmp_path):
    import evaluate

    metric = evaluate.load(str(ROOT / "eval" / "metrics" / "hellaswag"), cache_dir=str(tmp_path))
    accuracies = metric.compute(
        log_likelihoods=[[-4, -6, -9, -9], [-9, -9, -1, -9], [-3] * 4],
        lengths=[[1, 3, 1, 1], [2] * 4, [1] * 4],
        labels=[1, 2, 0],
    )
    # Row 1: the sum picks 0, per length 1 (-6/3); row 2: both pick 2; row 3: a tie goes to the first.
    assert accuracies == pytest.approx({"acc": 2 / 3, "acc_norm": 1.0}, rel=1e-12)


# Sampling


def sampled(loaded, capsys, *flags: str, prompt: str = "A man is") -> tuple[list[str], str]:
    """What `generate` returns and prints."""
    args = sample.arguments().parse_args(["--max_new_tokens", "6", *flags])
    return sample.generate(loaded, prompt, args), capsys.readouterr().out


def test_a_sample_depends_on_its_seed_and_not_on_the_number_of_samples(loaded, capsys):
    alone = [sampled(loaded, capsys, "--seed", str(seed))[0][0] for seed in range(-1, 2)]
    assert len(set(alone)) == 3
    together, screen = sampled(loaded, capsys, "--num_samples", "3", "--seed", "-1")
    assert together == alone
    printed = [part.strip() for part in screen.split("--- sample ")[1:]]
    assert printed == [f"{i + 1} of 3 (seed {i - 1})\nA man is{t}" for i, t in enumerate(together)]


def test_temperature_top_k_and_top_p_take_effect(loaded, capsys):
    ids = torch.tensor([loaded.tokenizer.encode("A man is")])
    options = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": END_OF_TEXT}
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    greedy = [loaded.tokenizer.decode(out[0, ids.shape[1] :])]
    for flags in (["--top_k", "1"], ["--top_p", "1e-6"], ["--temperature", "0"]):
        assert sampled(loaded, capsys, *flags, "--num_samples", "2", "--seed", "2")[0] == greedy * 2
    assert sampled(loaded, capsys, "--top_k", "0", "--temperature", "1", "--seed", "2")[0] != greedy


def test_a_prompt_that_fits_is_used_in_full_and_a_longer_one_is_truncated_on_the_left(loaded, capsys):
    words = [f" {word}" for word in ("one", "two", "three", "four") * 25]
    flags = ["--max_new_tokens", "4", "--temperature", "0"]
    long, screen = sampled(loaded, capsys, *flags, prompt="".join(words))
    assert "only the last 60 of the prompt's 100 tokens fit" in screen
    assert long == sampled(loaded, capsys, *flags, prompt="".join(words[-60:]))[0]
    screen = sampled(loaded, capsys, "--max_new_tokens", "100", prompt="".join(words))[1]
    assert "only the last 32 of the prompt's 100 tokens fit" in screen
    flags[1] = "50"
    text, screen = sampled(loaded, capsys, *flags, prompt="".join(words[:60]))
    assert "only the last" not in screen
    assert "note: 4 new tokens instead of 50: the model has 64 positions" in screen
    assert text == sampled(loaded, capsys, "--temperature", "0", "--max_new_tokens", "4", prompt="".join(words[:60]))[0]


def test_a_text_starts_from_end_of_text_without_a_prompt_and_ends_at_one(loaded, capsys):
    """Which is not shown."""
    tokenizer = copy.deepcopy(loaded.tokenizer)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 50, "max_new_tokens": 6, "pad_token_id": END_OF_TEXT}
    torch.manual_seed(42)
    ids = torch.tensor([[END_OF_TEXT]])
    drawn = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)[0, 1:]
    assert sampled(loaded, capsys, prompt="")[0] == [tokenizer.decode(drawn)]
    assert len(set(drawn[:3].tolist())) == 3
    start, ending = tokenizer.encode("A"), dataclasses.replace(loaded, tokenizer=tokenizer)
    torch.manual_seed(42)
    ids = torch.tensor([start])
    drawn = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options)[0, 1:]
    assert len(set(drawn[:3].tolist())) == 3
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(drawn[2].item())
    texts, screen = sampled(ending, capsys, prompt="A")
    assert texts == [loaded.tokenizer.decode(drawn[:2])]
    assert screen == f"\nA{texts[0]}\n\n"
    tokenizer.eos_token = None  # as of Chinese models with BERT's tokenizer, and of KoGPT2
    assert sampled(ending, capsys, prompt="A")[0] == [loaded.tokenizer.decode(drawn)]
    with pytest.raises(common.UserError, match="the prompt is empty, and the tokenizer has no eos_token to start from"):
        sampled(ending, capsys, prompt="")


def test_interactive_continues_what_is_piped_in(loaded, model_dir, command, tmp_path, monkeypatch, capsys):
    """tests/test_docs.py runs the command itself."""
    flags = ["--max_new_tokens", "6", "--num_samples", "2"]
    typed = io.BytesIO(b"A man is\n \n\nA man is\ncaf\xe9\n")  # the last in Latin-1
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(typed, encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    command(sample, model_dir, "--interactive", "--seed", "3", *flags)
    out = capsys.readouterr().out
    for seed in ("3", "5"):  # the second line goes on where the first one's seeds end
        assert sampled(loaded, capsys, *flags, "--seed", seed)[1] in out
    assert out.count("--- sample") == 6
    assert out.count("\ncaf\ufffd") == 2
    assert not list(tmp_path.iterdir())


def test_what_a_terminal_cannot_show_is_printed_as_escapes(model_dir, command, monkeypatch):
    screen = io.TextIOWrapper(written := io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", screen)
    common.run_main(lambda: command(sample, model_dir, "--prompt", "schön 今天", "--max_new_tokens", 2))
    screen.flush()
    assert b"sch\xf6n \\u4eca\\u5929" in written.getvalue()


def test_bytes_of_a_prompt_that_are_not_utf8_are_replaced(model_dir, command, tmp_path, capsys):
    prompt, output = os.fsdecode(b"caf\xe9"), tmp_path / "results.json"
    command(sample, model_dir, "--prompt", f"{prompt}\x0e", "--max_new_tokens", 2)
    assert "\ncaf\ufffd\\x0e" in capsys.readouterr().out  # which would change a terminal's letters
    command(sample, model_dir, "--max_new_tokens", 2)
    assert "\nThe" in capsys.readouterr().out  # without a prompt
    command(compare, model_dir, "--other", model_dir, "--prompt", prompt, "--limit", 1, "--output", output)
    assert json.loads(output.read_text())["compare"]["prompt"] == "caf\ufffd"


# Finding models, results, errors


def file_of(age: int, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (1e9 - age, 1e9 - age))
    return path.parent


def test_newest_run_and_step(tmp_path, capsys):
    """By the times of the manifests, not of directories, or of logs and results, which are written later."""
    with pytest.raises(common.UserError, match="no run given, and none under"):
        common.newest_run(tmp_path)
    first = file_of(60, tmp_path / "logs" / "metrics.jsonl")
    assert common.newest_run(tmp_path) == first  # as none has a checkpoint yet
    file_of(40, tmp_path / "new" / "step_00000020" / "manifest.json")
    newest = file_of(30, tmp_path / "new" / "step_00000100" / "manifest.json")
    file_of(1, tmp_path / "new" / ".saving-step_00000300" / "manifest.json")
    file_of(1, tmp_path / ".best-x1" / "step_00000020" / "manifest.json")  # a trial
    old = file_of(50, tmp_path / "old" / "step_00000900" / "manifest.json")
    for later in (old / "results.json", old.parent / "metrics.jsonl", first / "results.json"):
        later.touch()
    assert common.resolve_model(None, runs=tmp_path) == (str(newest), newest)
    assert f"no run given: the newest is {tmp_path / 'new'}\n" in capsys.readouterr().out
    assert common.resolve_model(str(tmp_path / "new")) == (str(newest), newest)
    assert common.resolve_model("openai-community/gpt2") == ("openai-community/gpt2", None)


class Payload:
    """Creates a file when its pickle is loaded."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_hostile_model_neither_unpickles_nor_runs_code(model_dir, tmp_path, error_of, monkeypatch):
    """SECURITY.md: a pickle is refused with the way out; code that the files name is neither run nor asked about."""
    model, created = tmp_path / "model", tmp_path / "created"
    shutil.copytree(model_dir, model)
    weights = (model / "model.safetensors").rename(tmp_path / "kept")
    config = json.loads((model / "config.json").read_text())
    for name in ("pytorch_model.bin", "adapter_model.bin"):
        torch.save(Payload(created), model / name)
    named = config | {"transformers_weights": "adapter_model.bin"}
    for module, settings in itertools.product((sample, perplexity, hellaswag), (config, named)):
        (model / "config.json").write_text(json.dumps(settings))
        error = error_of(module, model)
        assert f"error: {model}: no model.safetensors; pytorch_model.bin, ckpt.pt and the like are pickles" in error
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "other/model", "peft_type": "LORA"}')
    with pytest.raises(common.UserError, match="an adapter, not a model: merge it"):  # PEFT loads adapter_model.bin
        load(model)
    (model / "adapter_config.json").unlink()
    code = f"from pathlib import Path\nPath({str(created)!r}).touch()\nfrom transformers import GPT2Config as C\n"
    (model / "theirs.py").write_text(code + "from transformers import GPT2LMHeadModel as M, GPT2Tokenizer as T\n")
    mapped = {"AutoConfig": "theirs.C", "AutoModelForCausalLM": "theirs.M", "AutoTokenizer": ["theirs.T", "theirs.T"]}
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": mapped, "tokenizer_class": "Theirs"}))
    monkeypatch.setattr("builtins.input", None)
    index = {"weight_map": dict.fromkeys(load_file(weights), "pytorch_model.bin")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(common.UserError, match="lists files that are not safetensors in its own directory"):
        load(model)
    (model / "model.safetensors.index.json").unlink()
    weights.rename(model / "model.safetensors")
    for settings in (config | {"auto_map": mapped}, config | {"auto_map": mapped, "model_type": "theirs"}):
        (model / "config.json").write_text(json.dumps(settings))
        with contextlib.suppress(common.UserError):
            load(model)
    shutil.copy(model_dir / "tokenizer_config.json", model)
    (model / "config.json").write_text(json.dumps(config | {"attn_implementation": "acme/kernel"}))
    assert load(model).lm.shares_contexts  # not with acme's code, which the package kernels would download and run
    assert not created.exists()


def test_a_model_with_a_flipped_bit_is_refused(whole_run, tmp_path, error_of):
    checkpoint = shutil.copytree(whole_run[0] / "step_00000020", tmp_path / "step_00000020")
    flip_bit(checkpoint / "model.safetensors")
    for module in (sample, perplexity):
        message = f"model {checkpoint}: model.safetensors does not match its checksum in manifest.json"
        assert message in error_of(module, checkpoint)
    assert not (checkpoint / "results.json").exists()


def test_an_incomplete_or_damaged_model_is_refused(model_dir, tmp_path, capsys):
    with pytest.raises(common.UserError, match=r"no config\.json and no step_<number> directory"):
        load(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model_dir / name).read_bytes())
    with pytest.raises(common.UserError, match=r"model .*: no tokenizer files, such as tokenizer\.json"):
        load(tmp_path)
    shutil.copytree(model_dir, tmp_path, dirs_exist_ok=True)
    weights, name = load_file(model_dir / "model.safetensors"), "transformer.h.1.mlp.c_fc.weight"

    def load_with(weights: dict) -> None:
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        load(tmp_path)

    with pytest.raises(common.UserError, match=r"lacks 1 of .*h\.1\.mlp\.c_fc\.weight"):
        load_with({key: tensor for key, tensor in weights.items() if key != name})
    load_with(weights | {"score.weight": torch.ones(2)})
    assert "note: not used by the model: 1 weight in the file, such as score.weight" in capsys.readouterr().out
    with pytest.raises(common.UserError, match=r"h\.1\.mlp\.c_fc\.weight has values that are NaN or infinite"):
        load_with(weights | {name: torch.full_like(weights[name], math.nan)})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 500}))
    with pytest.raises(common.UserError, match="it has 500 embeddings, and its tokenizer 50,257 tokens"):
        load_with(weights | {"transformer.wte.weight": weights["transformer.wte.weight"][:500]})


def test_the_conversion_that_an_error_names_keeps_the_tokenizer(model_dir, tmp_path, error_of):
    model = shutil.copytree(model_dir, tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    code = re.search(r"with transformers: (.*)\n", error_of(sample, model))[1]
    exec(code, {"AutoModelForCausalLM": AutoModelForCausalLM})
    converted = load(model)
    assert all(torch.equal(weights[name], tensor) for name, tensor in load_file(model / "model.safetensors").items())
    assert converted.encode("ROMEO:") == load(model_dir).encode("ROMEO:")


class RopeConfig(GPT2Config):
    model_type = "gpt2-rope"


def test_a_changed_model_is_refused_by_its_type(model_dir, tmp_path):
    """As CONTRIBUTING.md tells those who change the model to write it: transformers would compute it as GPT-2's."""
    model = shutil.copytree(model_dir, tmp_path / "model")
    changed = RopeConfig(**AutoConfig.from_pretrained(model_dir).to_diff_dict())
    GPT2LMHeadModel(changed).save_config(model)
    with pytest.raises(common.UserError, match=r"a gpt2-rope model, which transformers .* does not have; what its run"):
        load(model)


def test_logits_equal_those_of_transformers(tiny_gpt2, loaded):
    """Although the GELU is one operation instead of seven."""
    ids, activation = torch.arange(60).view(2, 30), loaded.model.config.activation_function
    assert activation == "gelu_pytorch_tanh"
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, tiny_gpt2(64).model(ids).logits, atol=1e-4, rtol=1e-5)


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(common.UserError, match=r"--device tpu: not available on this machine\. Use (cpu|cuda|mps)$"):
        common.choose_device("tpu", "auto")


def test_a_head_of_its_own_is_evaluated(model_dir, tmp_path):
    """Although the configuration says that it is tied, by which transformers loads the file's own."""
    shutil.copytree(model_dir, tmp_path / "model")
    weights = load_file(model_dir / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["transformer.wte.weight"]
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(load(tmp_path / "model").model.lm_head.weight, weights["lm_head.weight"])


def test_a_file_of_something_else_is_not_overwritten_with_results(tmp_path):
    path = tmp_path / "results.json"
    for content in ("x", '{"loss": 3.1}', '{"compare": {}}', '{"a": {"scores": [{}]}}'):
        path.write_text(content)
        with pytest.raises(common.UserError, match="not the results of an evaluation"):
            common.write_results(path, "perplexity", {})
        assert path.read_text() == content


def test_the_scores_of_a_checkpoint_that_its_run_deletes_meanwhile_are_printed(
    model_dir, tmp_path, command, monkeypatch, capsys
):
    checkpoint, score_rows = shutil.copytree(model_dir, tmp_path / "run/step_00000010"), hellaswag.score_rows

    def slow_scores(*arguments, **options):
        scores = score_rows(*arguments, **options)
        shutil.rmtree(checkpoint)
        return scores

    monkeypatch.setattr(hellaswag, "score_rows", slow_scores)
    way_out = f"{checkpoint} was deleted meanwhile.*save_total_limit.*name a file with --output"
    with pytest.raises(common.UserError, match=way_out):
        command(hellaswag, tmp_path / "run", "--limit", 4)
    assert "this model" in capsys.readouterr().out
    assert not checkpoint.exists()


def test_results_of_other_weights_are_not_shown(whole_run, tmp_path, command, capsys):
    """By the SHA-256 that the manifest has, also where the weights that had these results are gone."""
    run = shutil.copytree(whole_run[0], tmp_path / "run")
    checkpoint = run / "step_00000020"
    command(hellaswag, checkpoint, "--limit", "4")
    assert "HellaSwag" in model_card(checkpoint)
    moved = checkpoint.rename(tmp_path / "step_00000020")
    assert "HellaSwag" in model_card(moved)
    (tmp_path / "manifest.json").write_text("{")  # of an older checkpoint, without results
    assert common.own_results(tmp_path) == {}
    results = json.loads((moved / "results.json").read_text())
    results["hellaswag"]["weights"] = "0" * 64
    (moved / "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert "HellaSwag" not in model_card(moved)
    assert capsys.readouterr().out == (
        f"note: not showing hellaswag in {moved}/results.json: it was measured on another model\n"
    )


def test_results_of_another_directory_without_checksums_are_not_shown(tmp_path, capsys):
    """Unless it is gone: then it may be this one, which was moved."""
    ours, others = tmp_path / "ours", tmp_path / "others"
    ours.mkdir()
    others.mkdir()
    (ours / "results.json").write_text(json.dumps({"hellaswag": {"model": str(others), "weights": None, "scores": []}}))
    assert common.own_results(ours) == {}
    assert "it was measured on another model" in capsys.readouterr().out
    others.rmdir()
    assert "hellaswag" in common.own_results(ours)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt, 130, ""),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), 2, "out of memory; lower --batch_size, use"),
    ],
)
def test_an_interrupt_and_out_of_memory_print_no_traceback(error, code, message, capsys):
    def main():
        raise error

    with pytest.raises(SystemExit) as exit_info:
        common.run_main(main)
    assert exit_info.value.code == code
    stderr = capsys.readouterr().err
    assert message in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (hellaswag, ["runs/absent"], "runs/absent"),
        (perplexity, ["MODEL"], "--data DIR"),
        (perplexity, ["MODEL", "--sequence_length", "65"], "must be from 2 to 64"),
        (sample, ["MODEL", "--top_p", "1.1"], "--top_p must lie in (0, 1]"),
        (sample, ["MODEL", "--top_k", "-1"], "--top_k must not be negative"),
        (sample, ["MODEL", "--interactive", "--prompt", "x"], "--interactive reads its prompts: remove --prompt"),
        (sample, ["MODEL", "--temperature", "1e-45"], "must be 0 or at least 0.001"),
        (sample, ["MODEL", "--output", "results.json"], "--output"),
        (hellaswag, ["MODEL", "--output", "absent/results.json"], "absent: not a directory"),
        (hellaswag, ["MODEL", "hf_" + 30 * "a"], "arguments: ***"),
    ],
)
def test_wrong_arguments_exit_2(module, arguments, message, model_dir, error_of):
    assert message in error_of(module, *(model_dir if word == "MODEL" else word for word in arguments))
