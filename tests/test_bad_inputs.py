"""Mistakes of users: exit code 2, no traceback, and an error that names the field or file and the way out.

Those that only one package can meet are in tests/data/, tests/engine/ and test_config.py. The table goes through main()
in this process; the tests below it need a process of their own, or several.
"""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
import venv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, verify
from recipe.config import DataConfig
from recipe.data.prepare import prepare
from tests import processes as programs
from tests.checkpoint import flip_bit
from tests.conftest import ROOT, SHAKESPEARE, TINY, files_of_at_most, flags, ok, refused, run_train, tiny_flags
from tests.data import write_shard

GOOD = np.arange(4000, dtype="<u2")


@dataclass
class Sandbox:
    """A directory to make a mistake in: `shards` are intact, `finished` has 20 steps, `run` does not exist yet."""

    path: Path
    shards: Path
    finished: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def train(self, dataset_name=None, **fields) -> list[str]:
        """Flags of a run on a data set, by default the intact shards."""
        return tiny_flags(dataset_name or self.shards, self.run, **{"max_steps": 6} | fields)

    def mixture(self, entries: str, **fields) -> list[str]:
        return self.train(f"[{entries}]", **fields)

    def resume(self, **fields) -> list[str]:
        """Flags of a run that resumes a copy of the finished one."""
        shutil.copytree(self.finished, self.run)
        return self.train(**({"dropout": 0.1, "max_steps": 24} | fields))

    def shard(self, train_tokens, val_tokens=GOOD[::-1]) -> Path:
        """The directory, with a training shard and a validation shard."""
        write_shard(self.path / "x_train_0.bin", train_tokens)
        write_shard(self.path / "x_val_0.bin", val_tokens)
        return self.path

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def broken_link(self, name: str) -> Path:
        """A directory with a text and a broken link of this name."""
        directory = self.file("texts/a.txt", "a text").parent
        (directory / name).symlink_to("elsewhere")
        return directory


# The mistake: the command's arguments ("prepare" first for the command that prepares data), and parts of the error.
MISTAKES = {
    "mistyped path": (  # it looks like ORG/NAME; the Hub is not asked here
        lambda box: flags(dataset_name="mytext/poems", output_dir=box.run),
        "error: mytext/poems (on the Hub: this disk has no such path) is not prepared in data/poems-",
        "yet; run python -m recipe.data.prepare with the same flags first, or pass --streaming true",
    ),
    "nothing to prepare": (lambda box: ["prepare", "--dataset_name=nothere"], "dataset_name nothere: no such file, "),
    "broken link beside text": (  # as git-annex and DVC leave it
        lambda box: box.train(box.path / "new", train_text=box.broken_link("b.txt")),
        "texts/b.txt cannot be read (No such file or directory); fetch what it links to, or remove it",
    ),
    "token outside the vocabulary": (
        lambda box: box.train(box.shard(np.where(GOOD % 9 == 0, 50257, GOOD))),
        "x_train_0.bin: holds token 50257, but GPT-2's vocabulary ends at 50256",
        "another tokenizer",
    ),
    "text column": (
        lambda box: box.train(box.path / "new", train_text=box.file("a.jsonl", '{"title": "a", "body": "b"}\n')),
        "line 1: no column 'text'; there are: title, body. Choose with --text_column",
    ),
    "too few words": (
        lambda box: box.train(
            box.path / "new", train_text=box.file("short.txt", "ten words are too few, however they are divided")
        ),
        "give more text, hold out more of it (val_fraction, val_documents or val_data), or lower sequence_length",
    ),
    "not UTF-8": (lambda box: ["--config", box.file("my.yaml", b"data: \xff\n")], "my.yaml: not valid YAML in UTF-8"),
    "streamed shards": (lambda box: box.train(streaming="true"), "streaming needs text, and dataset_name "),
    "mixture, all weights 0": (
        lambda box: box.mixture("{name: A, weight: 0}, {name: B, weight: 0.0}"),
        "dataset_name has no entry with a weight above 0; write a mixture as",
    ),
    "mixture, a weight that rounds to no sequence": (
        lambda box: box.mixture("{name: A, weight: 3}, {name: B, weight: 0.001}"),
        "dataset_name gives B less than one of 1,000 sequences; raise its weight 0.001 above 0.003001, or make it 0",
    ),
    "mixture, one data set twice": (
        lambda box: box.mixture("{name: A, weight: 1}, {name: ./A, weight: 2}"),
        "dataset_name lists ./A twice; remove one of the two",
    ),
    "mixture, unknown key": (
        lambda box: box.mixture("{name: A, weight: 1}, {name: B, weight: 1, text_colum: x}"),
        "entry 2 (B): unknown key 'text_colum'; did you mean 'text_column'?",
    ),
    "mixture, list in a list": (
        lambda box: ["--config", box.file("my.yaml", "dataset_name:\n- [A, B]\n- {name: B, weight: 1}\n")],
        "dataset_name, entry 1, is not a data set with a name and a weight; write a mixture as [",
    ),
    "mixture, val_data beside it": (
        lambda box: box.mixture("{name: A, weight: 1}, {name: B, weight: 1}", val_data="C"),
        "val_data applies to one data set, but dataset_name is a list; move it into an entry",
    ),
    "sequence length": (lambda box: box.train(sequence_length=128), "sequence_length 128 is longer than n_positions"),
    "heads": (lambda box: box.train(n_embd=33), "n_embd 33 is not a multiple of n_head 2; nearest valid n_embd: 32"),
    "warm-up": (lambda box: box.train(warmup_steps=6), "must be below max_steps 6; add --warmup_steps 0"),
    "fused loss": (lambda box: box.train(fused_loss=True), "fused_loss true needs ", "; use auto"),
    "resumed run, other data": (
        lambda box: box.resume(dataset_name=box.shard(GOOD)),
        "does not hold the shards that the checkpoint was trained on (train_000000.bin differs); choose another ",
    ),
    "complete run, other data": (
        lambda box: box.resume(max_steps=20, dataset_name=box.shard(GOOD)),
        "run is complete, but was trained on ",
        ", not on ",
        "choose another run_name, or start over with --fresh",
    ),
    "complete run, another rate": (
        lambda box: box.resume(max_steps=20, learning_rate=0.5),
        "run is complete, but was trained with learning_rate ",
        ", not 0.5; choose another run_name, or start over with --fresh",
    ),
    "not a run's directory": (
        lambda box: box.train(output_dir=box.file("photos/a.jpg", "x").parent, fresh="true"),
        "photos is not the directory of a run: it holds a.jpg",
    ),
    "a split of shards": (
        lambda box: box.train(val_fraction=0.2),
        "error: --val_fraction applies to text, but dataset_name ",
        " holds shards; remove it",
    ),
    "a split of what is not there": (
        lambda box: box.train(box.path / "typo.txt", val_fraction=0.2),
        "typo.txt: no such file, directory or data set",
    ),
    "how to compile what is not compiled": (
        lambda box: box.train(torch_compile_mode="regional"),
        "torch_compile_mode needs torch_compile True, but torch_compile is False; remove torch_compile_mode, or set",
    ),
    "weights of a run, for a text that is not prepared": (
        lambda box: box.train(box.path / "new", train_text=SHAKESPEARE, init_from=box.finished),
        "whole is a run; name a checkpoint of it, such as ",
    ),
    "weights of another shape, for epochs of a text that is not prepared": (
        lambda box: flags(
            **{k: v for k, v in TINY.items() if k not in ("max_steps", "n_layer")},
            n_layer=1,
            num_train_epochs=1,
            dataset_name=box.path / "new",
            train_text=SHAKESPEARE,
            init_from=box.finished / "step_00000020",
            output_dir=box.run,
        ),
        "step_00000020 has n_layer 2 (recipe: 1); add --n_layer 2",
    ),
    "run_name": (lambda box: box.train(run_name="../x"), "run_name '../x' must be letters", "output_dir"),
}


# Mistakes that show only after the data directory or the run is created.
SHOWN_BY_THE_DATA = {"token outside the vocabulary", "text column", "too few words"}


@pytest.fixture
def box(shards, whole_run, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Sandbox(tmp_path, shards, whole_run[0])


@pytest.mark.parametrize("name", MISTAKES)
def test_bad_input(in_process, box, monkeypatch, name):
    make_argv, *message_parts = MISTAKES[name]
    argv = make_argv(box)
    paths = sorted(box.path.rglob("*"))
    monkeypatch.chdir(ROOT)
    err = refused(in_process(argv))
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert len(err.strip().splitlines()) <= 2, err
    for part in message_parts:
        assert part in err
    if name not in SHOWN_BY_THE_DATA:
        assert sorted(box.path.rglob("*")) == paths  # it writes nothing


def test_a_python_without_the_dependencies_is_told_which_one_has_them(tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin" / "python"
    for script in ("train", "best", "preflight"):
        command = [python, f"recipe/{script}.py"]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr == f"error: {python} lacks Accelerate; use .venv/bin/python, which `make train` sets up\n"


def refused_on_two(argv: list, env: dict | None = None) -> str:
    """The error of a run of two processes, which is printed once; neither rank trains."""
    ranks = programs.Running("recipe/train.py", *argv, env=env, processes=2)
    assert ranks.wait(120) == 2, ranks.output
    # Rank 1 stopped by itself, or at the launcher's SIGTERM: while starting, or before its first step (75).
    assert ranks.codes in ([2, 2], [2, -signal.SIGTERM], [2, 75]), ranks.output
    assert "Traceback" not in ranks.stderr
    (error,) = [line for line in ranks.stderr.splitlines() if line.startswith("error: ")]
    return error


@pytest.mark.parametrize("name", ["token outside the vocabulary", "text column", "not a run's directory"])
def test_two_processes_print_one_error(box, name):
    """If both meet it, if rank 0 prepares the text for both, and if rank 0 checks the directory for both."""
    make_argv, *message_parts = MISTAKES[name]
    error = refused_on_two(make_argv(box))
    assert all(part in error for part in message_parts)


def test_a_checkpoint_that_is_a_link_is_skipped_and_its_target_is_kept(in_process, box):
    argv = box.resume(max_steps=11, eval_steps="end", save_total_limit=1)
    link, target = box.run / "step_00000020", box.path / "outside"
    link.rename(target)
    link.symlink_to(target)
    contents = {path: path.read_bytes() for path in target.iterdir()}
    output = ok(in_process(argv)).stdout
    assert "step_00000020: it is a link" in output
    assert "from step 10" in output
    assert {path: path.read_bytes() for path in target.iterdir()} == contents


def test_a_full_disk_is_named(in_process, box, monkeypatch):
    """While a shard is written, and tokenizer.json."""
    monkeypatch.setenv("TMPDIR", str(box.path))
    with files_of_at_most(200_000):
        preparation = in_process(["prepare", *flags(train_text=SHAKESPEARE, dataset_name=box.path / "out")])
        error = refused(in_process(box.train()))
    assert "out/train.part cannot be written (File too large); " in refused(preparation)
    assert f"{box.path} cannot be written (File too large" in error
    assert "set TMPDIR to another directory" in error


def test_a_run_that_reaches_a_damaged_shard_saves_its_last_step(in_process, tmp_path):
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text(SHAKESPEARE.read_text()[:60_000])
    prepare(DataConfig(train_text=str(text), dataset_name=str(data), val_fraction=0.2, shard_tokens=5000))
    flip_bit(data / "train_000001.bin", 3000)
    assert "train_000001.bin: its SHA-256 is" in refused(in_process(tiny_flags(data, run, save_steps="end")))
    assert [path.name for path in checkpoints(run)] == ["step_00000007"]
    assert verify(run / "step_00000007") == []


def test_files_without_a_manifest_that_change_between_stop_and_resume_are_refused(in_process, box):
    """By the SHA-256 that the checkpoint has of them: other tokens in a file of the same length."""
    data = box.shard(GOOD)
    ok(in_process(box.train(data)))
    ok(in_process(box.train(data, max_steps=12)))  # the same tokens
    (file,) = data.glob("*train*.bin")
    tokens = np.fromfile(file, "<u2", offset=1024)
    file.write_bytes(file.read_bytes()[:1024] + np.roll(tokens, 1).tobytes())
    (error,) = re.findall("^error:.*", refused(in_process(box.train(data, max_steps=18))), re.MULTILINE)
    assert f"{file}: its SHA-256 is " in error


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_run_whose_shard_is_truncated_while_it_is_read_keeps_its_checkpoints(box, split):
    data, checkpoint = box.shard(np.tile(GOOD, 50), np.tile(GOOD, 5)), box.run / "step_00000003"

    def truncate():
        while not checkpoint.exists():
            time.sleep(0.01)
        os.truncate(data / f"x_{split}_0.bin", 1100)

    threading.Thread(target=truncate, daemon=True).start()
    result = run_train(*box.train(data, max_steps=3000, save_steps=3, eval_steps=9), timeout=60)
    assert f"x_{split}_0.bin was cut short while it was read" in refused(result)
    assert verify(checkpoints(box.run)[-1]) == []


def test_the_same_shards_elsewhere_are_the_same_data(in_process, box):
    elsewhere = {"dataset_name": shutil.copytree(box.shards, box.path / "elsewhere"), "dropout": 0.1}
    for argv, printed in (
        (box.resume(max_steps=20, **elsewhere), "training is finished"),
        (box.train(max_steps=21, **elsewhere), "from step 20"),
    ):
        assert printed in ok(in_process(argv)).stdout


def test_a_run_that_diverges_ends_and_keeps_finite_checkpoints(in_process, box):
    broken = {"learning_rate": 1e30, "max_steps": 32, "save_steps": 1, "logging_steps": 5}
    assert "the validation loss at step 30 is nan" in refused(in_process(box.resume(**broken)))
    argv = box.train(dropout=0.1, **broken | {"max_steps": 52, "eval_steps": "end"})
    assert "steps in a row" in refused(in_process(argv))
    assert (box.run / "step_00000020").is_dir()
    assert checkpoints(box.run)[-1].name == "step_00000023"  # step 24 is the third in a row to be skipped
    for checkpoint in checkpoints(box.run):
        assert all(t.isfinite().all() for t in load_file(checkpoint / "model.safetensors").values()), checkpoint


def test_processes_that_would_train_alone_are_refused(shards, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    error = refused_on_two(tiny_flags(shards, tmp_path / "run"), {"ACCELERATE_USE_CPU": "false"})
    assert "each would train alone" in error
    assert "ACCELERATE_USE_CPU=true" in error
