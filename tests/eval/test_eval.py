"""Perplexity, sampling, and what the evaluation commands share: finding models, results, errors."""

import io
import json
import math
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, GPT2TokenizerFast

from eval import common, hellaswag, perplexity, sample, wikitext
from tests import processes
from tests.conftest import environment

REPOSITORY = Path(__file__).resolve().parents[2]
BPE = REPOSITORY / "recipe" / "data" / "gpt2_bpe"
END_OF_TEXT = 50256


@pytest.fixture(scope="module")
def tokenizer():
    return GPT2TokenizerFast(vocab=str(BPE / "encoder.json"), merges=str(BPE / "vocab.bpe"))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, tokenizer):
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = GPT2Config(n_positions=64, n_layer=2, n_embd=32, n_head=2, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def loaded(model_dir):
    return common.load(common.parser("").parse_args([str(model_dir), "--device", "cpu"]))


def main_of(module, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


# Perplexity


def test_shards_equal_the_models_own_loss(loaded, tmp_path):
    rng = np.random.default_rng(0)
    shards = [rng.integers(0, 50257, size=n) for n in (3 * 32 + 1, 2 * 32 + 20)]
    for i, tokens in enumerate(shards):
        write_shard(tmp_path / f"text_val_{i:06d}.bin", tokens)
    write_shard(tmp_path / "text_train_000000.bin", shards[0])

    windows, files = perplexity.shard_windows(str(tmp_path), 32)
    assert sorted(files) == ["text_val_000000.bin", "text_val_000001.bin"]
    assert len(perplexity.shard_windows(str(tmp_path / "text_*_000000.bin"), 32)[0]) == 6
    expected = [tokens[i * 32 : i * 32 + 33] for tokens, n in zip(shards, (3, 2), strict=True) for i in range(n)]
    np.testing.assert_array_equal(windows, expected)

    result = perplexity.evaluate_windows(loaded, windows, batch_size=2)
    ids = torch.tensor(np.stack(expected))
    with torch.no_grad():  # transformers shifts the labels itself: of 33 tokens 32 are predicted
        loss = loaded.model(ids, labels=ids).loss.item()
    assert result["loss"] == pytest.approx(loss, abs=1e-5)
    assert result["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert (result["windows"], result["tokens"]) == (5, 160)


def test_text_counts_the_files_bytes(loaded, tmp_path):
    # Characters of one to four bytes, a carriage return, and a literal that must stay text.
    text = "First Citizen:\r\nWe are accounted poor, héllo 漢字 🙂 <|endoftext|> the end.\n" * 9
    path = tmp_path / "play.txt"
    path.write_bytes(text.encode())
    windows, files = perplexity.text_windows(path, loaded.encode, END_OF_TEXT, 50)
    ids = [END_OF_TEXT, *loaded.encode(text)]
    assert END_OF_TEXT not in ids[1:]
    assert [token for window in windows for token in window[1:]] == ids[1:]
    assert {len(window) for window in windows[:-1]} == {51}
    assert list(files) == ["play.txt"]

    result = perplexity.evaluate_windows(loaded, windows, batch_size=4)
    assert result["bytes"] == len(text.encode())
    with torch.no_grad():
        total = sum(
            loaded.model(t := torch.tensor(np.stack([w])), labels=t).loss.item() * (len(w) - 1) for w in windows
        )
    assert result["loss"] == pytest.approx(total / (len(ids) - 1), abs=1e-5)
    assert result["bits_per_byte"] == pytest.approx(total / math.log(2) / len(text.encode()), rel=1e-5)


def test_bytes_of_tokens(tokenizer):
    table = perplexity.byte_lengths(tokenizer)
    assert len(table) == 50257
    assert table[END_OF_TEXT] == 0
    assert table[tokenizer.encode(" the")[0]] == 4
    assert sum(table[tokenizer.encode("漢字🙂")]) == 10


def test_perplexity_metric_by_hand():
    metric = common.load_metric("token_perplexity")
    metric.add_batch(nlls=[2.0], token_counts=[1], byte_counts=[2])
    metric.add_batch(nlls=[4.0], token_counts=[2], byte_counts=[6])
    # 6 nats over 3 tokens and 8 bytes.
    expected = {"loss": 2.0, "perplexity": math.e**2, "bits_per_byte": 6 / (8 * math.log(2))}
    assert metric.compute() == pytest.approx(expected, rel=1e-12)


def test_perplexity_takes_data_and_length_from_the_checkpoint(model_dir, tmp_path, monkeypatch):
    run_dir = tmp_path / "step_00000010"
    run_dir.mkdir()
    for file in model_dir.iterdir():
        (run_dir / file.name).symlink_to(file)
    write_shard(tmp_path / "val_000000.bin", np.arange(200))
    (run_dir / "trainer_state.json").write_text(
        json.dumps(
            {"config": {"dataset_name": str(tmp_path), "val_data": "", "sequence_length": 40, "eval_tokens": 130}}
        )
    )
    (run_dir / "results.json").write_text('{"hellaswag": {"rows": 7}}')
    main_of(perplexity, monkeypatch, run_dir, "--device", "cpu")
    results = json.loads((run_dir / "results.json").read_text())
    assert results["hellaswag"] == {"rows": 7}  # merged, not replaced
    assert results["perplexity"]["sequence_length"] == 40
    assert results["perplexity"]["tokens"] == 120  # 130 tokens are 3 windows, of the 4 there are
    assert len(results["perplexity"]["files"]["val_000000.bin"]) == 12
    assert not list(run_dir.glob(".results*"))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"short", "not a token shard"), (np.array([20240520, 1, 5] + [0] * 253, "<i4").tobytes(), "promises 5 tokens")],
)
def test_broken_shards_are_named(content, message, tmp_path):
    (tmp_path / "val.bin").write_bytes(content)
    with pytest.raises(common.UserError, match=message):
        perplexity.shard_windows(str(tmp_path), 8)


# Sampling


def greedy(loaded, prompt_ids, n):
    ids = torch.tensor([prompt_ids])
    out = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=n, pad_token_id=END_OF_TEXT
    )
    return out[0, len(prompt_ids) :].tolist()


def test_greedy_equals_generate(loaded, model_dir, monkeypatch, tmp_path, capfd):
    prompt_ids = loaded.tokenizer.encode("A man is")
    expected = greedy(loaded, prompt_ids, 20)
    assert len(set(expected)) > 5
    options = {"max_new_tokens": 20, "n_positions": 64, "temperature": 0, "seed": 1, "device": "cpu"}
    shapes = set()

    def logits_fn(ids):
        shapes.add(tuple(ids.shape))
        return loaded.model(ids).logits

    assert sample.sample_live(logits_fn, prompt_ids, **options) == expected
    assert shapes == {(1, len(prompt_ids) + 20)}

    output = tmp_path / "out.json"
    flags = ["--prompt", "A man is", "--greedy", "--max_new_tokens", "20", "--output", output]
    main_of(sample, monkeypatch, model_dir, *flags)
    text = loaded.tokenizer.decode(expected, skip_special_tokens=True)
    assert json.loads(output.read_text())["sample"]["texts"] == [text]
    assert "A man is" + text in capfd.readouterr().out


def test_seed_and_top_k(loaded):
    options = {"max_new_tokens": 12, "n_positions": 64, "device": "cpu"}

    def live(**more):
        return sample.sample_live(lambda ids: loaded.model(ids).logits, [END_OF_TEXT], **options, **more)

    assert live(seed=1) == live(seed=1) != live(seed=2)
    assert live(seed=1, top_k=1) == live(seed=2, top_k=1) == live(seed=3, temperature=0)
    assert len(live(seed=1, top_k=0)) == 12


def test_no_room_for_prompt(loaded):
    assert sample.fit([1, 2, 3, 4], max_new_tokens=2, n_positions=5) == ([2, 3, 4], 2)
    assert sample.fit([1, 2], max_new_tokens=99, n_positions=5) == ([2], 4)
    prompt = list(range(1000, 1300))
    options = {"max_new_tokens": 4, "n_positions": 64, "temperature": 0, "seed": 1, "device": "cpu"}
    out = sample.sample_live(lambda ids: loaded.model(ids).logits, prompt, **options)
    assert out == greedy(loaded, prompt[-60:], 4)


def test_sample_command_is_quiet_and_says_what_it_cut(model_dir, tmp_path):
    command = [REPOSITORY / "eval" / "sample.py", model_dir, "--prompt", "", "--max_new_tokens", "300"]
    out = processes.run(*command, "--output", "out.json", env=environment(), cwd=tmp_path)
    assert (out.returncode, out.stderr) == (0, "")
    assert "63 new tokens instead of 300: the model has 64 positions" in out.stdout
    assert json.loads((tmp_path / "out.json").read_text())["sample"]["prompt"] == ""


def test_generate_leaves_nothing_to_warn_about(loaded, caplog):
    transformers.logging.set_verbosity_warning()
    transformers.logging.enable_propagation()
    try:
        for flags in (["--greedy"], ["--top_k", "7", "--top_p", "0.9"]):
            args = sample.arguments().parse_args(["--max_new_tokens", "3", *flags])
            sample.generate(loaded, [END_OF_TEXT], args, seed=1)
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity_error()
    assert [record.getMessage() for record in caplog.records] == []


def drawn(loaded, capsys, *flags: str, seed: int, prompt: str = "A man is") -> tuple[list[str], str]:
    """The texts and the screen of `generate`."""
    args = sample.arguments().parse_args(["--max_new_tokens", "6", *flags])
    texts = sample.generate(loaded, loaded.tokenizer.encode(prompt), args, seed)
    return texts, capsys.readouterr().out


def test_a_sample_is_its_seeds_whatever_is_drawn_beside_it(loaded, capsys):
    alone = [drawn(loaded, capsys, seed=seed)[0][0] for seed in range(5, 8)]
    assert len(set(alone)) == 3
    together, screen = drawn(loaded, capsys, "--num_samples", "3", seed=5)
    assert together == alone
    assert drawn(loaded, capsys, "--num_samples", "3", "--batch_size", "2", seed=5) == (together, screen)
    # All are on the screen, in order, each under its seed.
    parts = screen.split("--- sample ")[1:]
    assert parts == [f"{i + 1} of 3 (seed {5 + i})\nA man is{text}\n" for i, text in enumerate(together)]


def test_draws_follow_softmax():
    logits = torch.tensor([1.0, 0.0, -torch.inf, 2.0])
    n = 4000
    rows = sample.SeededNoise(range(n))(None, logits.expand(n, 4)).argmax(-1)
    shares = torch.bincount(rows, minlength=4) / n
    assert shares[2] == 0
    assert shares.tolist() == pytest.approx(logits.softmax(-1).tolist(), abs=0.03)  # four standard errors


def test_temperature_top_k_and_top_p_are_at_work(loaded, capsys):
    greedy = drawn(loaded, capsys, "--greedy", seed=1)[0]
    for flags in (["--top_k", "1"], ["--top_p", "1e-6"], ["--temperature", "1e-4"], ["--temperature", "0"]):
        assert drawn(loaded, capsys, *flags, "--num_samples", "2", seed=2)[0] == greedy * 2
    plain = ["--top_k", "0", "--temperature", "1"]
    free = drawn(loaded, capsys, *plain, seed=2)[0]
    assert free != greedy
    for flags in (["--top_k", "2"], ["--top_p", "0.5"], ["--temperature", "0.3"]):
        assert drawn(loaded, capsys, *plain, *flags, seed=2)[0] != free


def test_a_text_that_ends_early_is_cut_there(loaded, capsys, monkeypatch):
    """A row that is done is filled up while the others go on; the filling is not text."""
    steps = []

    def processors(args, seeds):
        def force(input_ids, scores):
            steps.append(len(scores))
            token = torch.tensor([END_OF_TEXT if len(steps) == 3 else 1000, 1000])
            return torch.nn.functional.one_hot(token, scores.shape[1]).float()

        return transformers.LogitsProcessorList([force])

    monkeypatch.setattr(sample, "processors", processors)
    texts, screen = drawn(loaded, capsys, "--num_samples", "2", seed=0)
    word = loaded.tokenizer.decode([1000])
    assert steps == [2] * 6
    assert texts == [word * 2, word * 6]
    assert f"A man is{word * 2}\n" in screen


def test_interactive_continues_what_is_piped_in(loaded, model_dir, tmp_path, monkeypatch, capsys):
    """tests/test_docs.py runs the command itself."""
    flags = ["--max_new_tokens", "6", "--seed", "3", "--num_samples", "2"]
    piped = b"A man is\n \n\nA man is\n\xff no UTF-8"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(piped), encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    main_of(sample, monkeypatch, model_dir, "--interactive", "--device", "cpu", *flags)
    out, err = capsys.readouterr()
    assert err == ""
    assert "does not answer questions" in out
    assert "> " not in out
    for seed in (3, 5):  # the second line goes on where the first one's seeds end
        assert drawn(loaded, capsys, *flags, seed=seed)[1] in out
    assert out.count("--- sample") == 6
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("end", ["", EOFError, KeyboardInterrupt])
def test_interactive_on_a_terminal(end, loaded, monkeypatch, capsys):
    typed, stopped = iter(["one", "two", end, "three"]), []

    def type_line(prompt):
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, type):
            raise line
        return line

    def generate(loaded, ids, args, seed):
        stopped.append((loaded.tokenizer.decode(ids), seed))
        if len(stopped) == 1:
            raise KeyboardInterrupt  # ends this text alone
        return []

    class Terminal:
        isatty = staticmethod(lambda: True)
        reconfigure = staticmethod(lambda errors: None)

    monkeypatch.setattr("builtins.input", type_line)
    monkeypatch.setattr(sys, "stdin", Terminal)
    monkeypatch.setattr(sample, "generate", generate)
    sample.interact(loaded, sample.arguments().parse_args(["--seed", "7"]))
    assert stopped == [("one", 7), ("two", 8)]
    assert "(stopped)" in capsys.readouterr().out
    assert next(typed) == "three"


# Finding models, results, errors


def checkpoint(path: Path, age: int) -> Path:
    path.mkdir(parents=True)
    for name in (*common.MODEL_FILES, "tokenizer.json"):
        (path / name).touch()
    os.utime(path / "model.safetensors", (1e9 - age, 1e9 - age))
    return path


def test_newest_run_and_step(tmp_path):
    checkpoint(tmp_path / "old" / "step_00000900", age=50)
    checkpoint(tmp_path / "new" / "step_00000020", age=40)
    newest = checkpoint(tmp_path / "new" / "step_00000100", age=30)
    checkpoint(tmp_path / "new" / "step_00000300.tmp", age=1)
    (tmp_path / "new" / "step_00000400").mkdir()  # cut off: no files
    assert common.resolve_model(None, runs=tmp_path) == (str(newest), newest)
    assert common.resolve_model(str(tmp_path / "new")) == (str(newest), newest)
    assert common.resolve_model("openai-community/gpt2") == ("openai-community/gpt2", None)


def test_absent_weights_are_refused(model_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(common.UserError, match=r"lacks 1 of .*h\.1\.mlp\.c_fc\.weight"):
        common.load(common.parser("").parse_args(["--model", str(tmp_path), "--device", "cpu"]))


def test_results_that_are_not_ours_stay(tmp_path):
    path = tmp_path / "results.json"
    path.write_text("[1, 2]")
    with pytest.raises(common.UserError, match="not a JSON object"):
        common.write_results(path, "sample", {})
    assert path.read_text() == "[1, 2]"


def silent_hub(monkeypatch) -> None:
    """A Hub that accepts connections and never answers, as behind a firewall; the libraries' own retries would take
    minutes."""
    server = socket.create_server(("127.0.0.1", 0))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(common, "HUB_PATIENCE", 0.5)
    monkeypatch.setattr(common, "_silent", server, raising=False)  # kept open


def test_without_a_network_a_hub_id_fails_within_seconds(monkeypatch, capsys):
    silent_hub(monkeypatch)
    begun = time.monotonic()
    with pytest.raises(SystemExit) as stopped:
        common.run_main(lambda: main_of(sample, monkeypatch, "somebody/some-model"))
    assert stopped.value.code == 2
    assert time.monotonic() - begun < 15
    printed = capsys.readouterr()
    assert "somebody/some-model is no directory here: asking the Hub for it" in printed.out
    assert "the Hub does not answer" in printed.err
    assert "MODEL=runs/NAME" in printed.err
    assert printed.err.count("\n") == 1


def test_without_a_network_a_data_set_fails_within_seconds(monkeypatch):
    silent_hub(monkeypatch)
    begun = time.monotonic()
    with pytest.raises(common.UserError, match=r"the Hub does not answer .* Use --text FILE"):
        wikitext.joined_text(None)
    assert time.monotonic() - begun < 15


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        (hellaswag, ["--model", "runs/absent"], "model runs/absent: no such directory"),
        (perplexity, [], "Use --data DIR or --text FILE"),
        (perplexity, ["--text", "absent.txt"], "absent.txt"),
        (perplexity, ["--sequence_length", "65", "--text", "absent.txt"], "the model has 64 positions"),
        (sample, ["--top_p", "0"], "--top_p lies in"),
        (sample, ["--interactive", "--prompt", "The"], "remove --prompt"),
        (sample, ["--output", "absent/results.json"], "absent: not a directory"),
    ],
)
def test_wrong_arguments_exit_2(module, arguments, message, model_dir, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        common.run_main(lambda: main_of(module, monkeypatch, model_dir, "--device", "cpu", *arguments))
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_directories_without_a_model_or_tokenizer(model_dir, tmp_path):
    with pytest.raises(common.UserError, match="nor a complete step_<number> directory"):
        common.resolve_model(str(tmp_path))
    for name in common.MODEL_FILES:
        (tmp_path / name).symlink_to(model_dir / name)
    with pytest.raises(common.UserError, match="no tokenizer files"):
        common.resolve_model(str(tmp_path))
