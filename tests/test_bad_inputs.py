"""Mistakes of users: exit code 2, no traceback, and an error that names the field or file and the way out.

Numbers are those of 25 kinds of mistake; tests/data/, tests/engine/ and test_config.py have those that are not here.
The table goes through main() in this process; the tests below it are for what needs a process, or several.
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import venv
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import GPT2Config

from recipe.checkpoint.format import checkpoints, verify
from recipe.config import DataConfig
from recipe.data.prepare import prepare
from tests import processes as programs
from tests.conftest import ROOT, SHAKESPEARE, TINY, files_of_at_most, flags, run_train
from tests.data import write_shard

GOOD = np.arange(4000, dtype="<u2")


def tiny(shards, run, **fields):
    return flags(**(TINY | {"dataset_name": shards, "output_dir": run, "max_steps": 6} | fields))


@pytest.fixture
def command(monkeypatch, capsys):
    """argv -> (exit code, standard output, standard error) of a command in this process, on the CPU. What it changes of
    the process is put back."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name.endswith("RANK")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()

    def run(argv):
        AcceleratorState._reset_state(True)  # an earlier test may have left one of another precision
        name, words = ("recipe.data.prepare", argv[1:]) if argv[0] == "prepare" else ("recipe.train", argv)
        code = import_module(name).main([str(word) for word in words])
        return code, *capsys.readouterr()

    AcceleratorState._reset_state(True)  # of a test before that has opened an engine
    capsys.readouterr()
    yield run
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)


@dataclass
class Place:
    """Where a mistake is made: `run` is for the run, `shards` are good ones, `finished` is a run of 20 steps."""

    path: Path
    shards: Path
    finished: Path

    @property
    def run(self) -> Path:
        return self.path / "run"

    def train(self, dataset_name=None, **fields) -> list[str]:
        """Flags of a run on a data set, by default the good shards."""
        return tiny(dataset_name or self.shards, self.run, **fields)

    def mixture(self, entries: str, **fields) -> list[str]:
        return self.train(f"[{entries}]", **fields)

    def resume(self, **fields) -> list[str]:
        """Flags of a run that goes on from a copy of the finished one."""
        shutil.copytree(self.finished, self.run)
        return self.train(**({"dropout": 0.1, "max_steps": 24} | fields))

    def prepare(self, source, **fields) -> list[str]:
        return ["prepare", *flags(train_text=source, dataset_name=self.path / "out", **fields)]

    def shard(self, tokens, val=GOOD) -> Path:
        """A directory of a training shard, of tokens or of bytes, and a validation shard."""
        for split, content in (("train", tokens), ("val", val)):
            path = self.path / f"x_{split}_0.bin"
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                write_shard(path, content)
        return self.path

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def link(self, name: str, beside: str) -> Path:
        """A directory with a text and a link that leads nowhere."""
        link = self.path / name
        self.file(f"{link.parent.name}/{beside}", "a text")
        link.symlink_to("elsewhere")
        return link.parent

    def weights(self) -> Path:
        """A model whose safetensors are cut short."""
        GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64).save_pretrained(self.path / "old")
        weights = (self.finished / "step_00000020" / "model.safetensors").read_bytes()
        return self.file("old/model.safetensors", weights[:-100]).parent


PREPARE = "python -m recipe.data.prepare"
NO_COLUMN = "no column 'text'; there are: title, body. Choose with --text_column"
STORIES = {"config": "tinystories", "streaming": "false", "train_text": "roneneldan/TinyStories"}

# The mistake with its number: the command's words ("prepare" first where it is not a run's), and what the error says.
TABLE = {
    "1 empty glob": (lambda at: at.train(at.path / "*.bin"), "*.bin: no such file, directory", ".bin file"),
    "1 not prepared": (
        lambda at: flags(**STORIES, dataset_name=at.path / "stories"),
        "roneneldan/TinyStories, on the Hub because this disk has no such path, is not prepared in ",
        f"stories yet; first run {PREPARE} with the same flags",
    ),
    "1 mistyped path": (  # it looks like ORG/NAME; the Hub is not asked here
        lambda at: flags(dataset_name="mytext/poems", output_dir=at.run),
        "error: mytext/poems, on the Hub because this disk has no such path, is not prepared in data/poems-",
        "--streaming true",
    ),
    "1 offline": (
        lambda at: flags(
            config="gpt2",
            train_text="HuggingFaceFW/fineweb-edu",
            dataset_name=at.path / "x",
            output_dir=at.run,
            streaming=True,
        ),
        "error: data set fineweb-edu: no such path on this disk, and the Hub reports",
    ),
    "1 nothing to prepare": (
        lambda at: ["prepare", "--dataset_name=nothere"],
        "dataset_name nothere: no such file, directory or data set",
    ),
    "1 a link to nothing, beside text": (  # as git-annex and DVC leave it
        lambda at: at.train(at.path / "new", train_text=at.link("texts/b.txt", beside="a.txt")),
        "texts/b.txt cannot be read (No such file or directory); fetch what it links to, or remove it",
    ),
    "4 token outside": (
        lambda at: at.train(at.shard(np.where(GOOD % 9 == 0, 50257, GOOD))),
        "x_train_0.bin: holds token 50257, but GPT-2's vocabulary ends at 50256",
        "another tokenizer",
    ),
    "9 column": (
        lambda at: at.train(at.path / "new", train_text=at.file("a.jsonl", '{"title": "a", "body": "b"}\n')),
        "line 1: " + NO_COLUMN,
    ),
    "11 few windows": (
        lambda at: at.train(at.shard(GOOD[:50])),
        "total_batch_tokens takes 4 sequences a step",
        "lower total_batch_tokens, or prepare more text",
    ),
    "11 few words": (
        lambda at: at.train(
            at.path / "new", train_text=at.file("short.txt", "ten words are too few, however they are divided")
        ),
        "give more text (these are 11 tokens in all)",
    ),
    "12 not UTF-8": (lambda at: ["--config", at.file("my.yaml", b"data: \xff\n")], "my.yaml: not valid YAML in UTF-8"),
    "12 streamed shards": (lambda at: at.train(streaming="true"), "streaming needs text, and dataset_name "),
    "12 mixture, all weights 0": (
        lambda at: at.mixture("{name: A, weight: 0}, {name: B, weight: 0.0}"),
        "dataset_name has no entry with a weight above 0; write a mixture as",
    ),
    "12 mixture, a weight that rounds to no sequence": (
        lambda at: at.mixture("{name: A, weight: 3}, {name: B, weight: 0.001}"),
        "dataset_name gives B less than one of 1,000 sequences; raise its weight 0.001 above 0.003001, or make it 0",
    ),
    "12 mixture, twice": (
        lambda at: at.mixture("{name: A, weight: 1}, {name: ./A, weight: 2}"),
        "dataset_name lists ./A twice; remove one of the two",
    ),
    "12 mixture, unknown key": (
        lambda at: at.mixture("{name: A, weight: 1}, {name: B, weight: 1, text_colum: x}"),
        "entry 2 (B): unknown key 'text_colum'; did you mean 'text_column'?",
    ),
    "12 mixture, list in a list": (
        lambda at: ["--config", at.file("my.yaml", "dataset_name:\n- [A, B]\n- {name: B, weight: 1}\n")],
        "dataset_name, entry 1, is not a data set with a name and a weight; write a mixture as [",
    ),
    "12 mixture, one val_data": (
        lambda at: at.mixture("{name: A, weight: 1}, {name: B, weight: 1}", val_data="C"),
        "val_data applies to one data set, but dataset_name is a list; move it into an entry",
    ),
    "14 length": (lambda at: at.train(sequence_length=128), "sequence_length 128 is longer than n_positions"),
    "15 heads": (
        lambda at: at.train(n_embd=33),
        "n_embd 33 is not a multiple of n_head 2; nearest valid n_embd: 32, 34",
    ),
    "16 learning rate": (lambda at: at.train(learning_rate="nan"), "learning_rate is nan; it must be a finite"),
    "16 wsd's decay": (
        lambda at: at.train(decay_fraction=0.3),
        "decay_fraction is for lr_scheduler_type wsd, but lr_scheduler_type is cosine; remove decay_fraction",
    ),
    "17 warm-up": (lambda at: at.train(warmup_steps=6), "warmup_steps 6 must be below max_steps 6"),
    "18 fused loss": (lambda at: at.train(fused_loss=True), "fused_loss", "remove fused_loss"),
    "22 complete, other data": (
        lambda at: at.resume(max_steps=20, dataset_name=at.shard(GOOD)),
        "run is complete, and was trained on ",
        ", not on ",
        "choose another run_name, or start over with --fresh",
    ),
    "22 complete, not prepared": (
        lambda at: at.resume(max_steps=20, train_text=at.file("mine.txt", "text"), dataset_name=at.path / "mine"),
        "mine.txt; choose another run_name, or",
    ),
    "22 no run": (
        lambda at: at.train(output_dir=at.file("photos/a.jpg", "x").parent, fresh="true"),
        "photos is not the directory of a run: it holds a.jpg",
    ),
    "23 weights cut short": (
        lambda at: at.train(init_from=at.weights()),
        "old/model.safetensors cannot be read (Error while deserializing header: ",
        "copy or download it again",
    ),
    "24 run_name": (lambda at: at.train(run_name="../x"), "run_name '../x' must be letters", "output_dir"),
}


@pytest.fixture
def place(shards, whole_run, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Place(tmp_path, shards, whole_run[0])


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(command, place, monkeypatch, name):
    words, *message = TABLE[name]
    argv = words(place)
    before = sorted(place.path.rglob("*"))
    monkeypatch.chdir(ROOT)
    code, _, err = command(argv)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert len(err.strip().splitlines()) <= 2, err
    for part in message:
        assert part in err
    if int(name.split()[0]) >= 12:  # found before anything is written
        assert sorted(place.path.rglob("*")) == before


def test_a_python_without_the_dependencies_is_told_which_one_has_them(tmp_path):
    venv.create(tmp_path, with_pip=False, symlinks=True)
    python = tmp_path / "bin" / "python"
    result = subprocess.run([python, "recipe/train.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == f"error: {python} has no Accelerate; use .venv/bin/python, set up by `make train`\n"


def refused(argv: list, env: dict | None = None) -> str:
    """The error of a run of two processes: printed once, before the launcher ends the other; no process trains."""
    ranks = programs.Running("recipe/train.py", *argv, env=env, processes=2)
    assert ranks.wait(120) == 2, ranks.output
    # The second was ended while it was starting, or heard that before its first step.
    assert ranks.codes in ([2, 2], [2, -signal.SIGTERM], [2, 75]), ranks.output
    assert "Traceback" not in ranks.stderr
    errors = [line for line in ranks.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ranks.stderr
    return errors[0]


@pytest.mark.parametrize("name", ["4 token outside", "9 column", "22 no run"])
def test_bad_input_of_two_processes(place, name):
    """When both meet it, when one was to prepare the text for the other, and when one looks for both."""
    words, *message = TABLE[name]
    error = refused(words(place))
    assert all(part in error for part in message)


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is installed on Linux only")
@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ("mixed_precision,zero_stage", {}, "sets mixed_precision, zero_stage beside deepspeed_config_file"),
        ("", {"optimizer": {"type": "Adam"}}, "zero1.json: optimizer is not about sharding"),
    ],
    ids=["19", "20"],
)
def test_19_and_20_files_that_disagree(place, fields, changes, message):
    """The launcher passes on which fields its file has beside the sharding file's."""
    shipped = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    file = place.file("zero1.json", json.dumps(shipped | changes))
    env = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file),
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_CONFIG_DS_FIELDS": ",".join(filter(None, ("deepspeed_config_file,zero3_init_flag", fields))),
    }
    assert message in refused(place.train(), env)
    assert not place.run.exists()


def test_24_a_checkpoint_that_leads_elsewhere_is_skipped(command, place):
    argv = place.resume(max_steps=11, eval_steps="end", save_total_limit=1)
    last, outside = place.run / "step_00000020", place.path / "outside"
    last.rename(outside)
    last.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    code, out, err = command(argv)
    assert code == 0, err
    assert "step_00000020: it is a link" in out
    assert "from step 10" in out
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_a_full_disk_is_named(command, place, monkeypatch):
    """Under a shard, and under tokenizer.json."""
    monkeypatch.setenv("TMPDIR", str(place.path))
    with files_of_at_most(200_000):
        (code, _, preparing), (again, _, training) = command(place.prepare(SHAKESPEARE)), command(place.train())
    assert (code, again) == (2, 2)
    assert "out/train.part cannot be written (File too large); " in preparing
    assert f"{place.path} cannot be written (File too large" in training
    assert "set TMPDIR to another directory" in training


def test_data_that_turn_out_damaged_cost_nothing_that_was_trained(command, tmp_path):
    """The damage of the second shard is found when it is reached; there is a checkpoint of the step before."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text(SHAKESPEARE.read_text()[:60_000])
    prepare(DataConfig(train_text=str(text), dataset_name=str(data), val_fraction=0.2, shard_tokens=5000))
    content = bytearray((data / "train_000001.bin").read_bytes())
    content[3000] ^= 1
    (data / "train_000001.bin").write_bytes(content)
    code, _, err = command(tiny(data, run, max_steps=20, save_steps="end"))
    assert code == 2
    assert "train_000001.bin: its SHA-256 is" in err
    assert [p.name for p in checkpoints(run)] == ["step_00000007"]
    assert verify(run / "step_00000007") == []


@pytest.mark.parametrize("manifest", ["lost", "never"])
def test_files_without_a_manifest_that_change_between_stop_and_resume_are_refused(command, place, manifest):
    """The checkpoint knows the SHA-256 of what it has read; of a file of the same length, other tokens."""
    data = place.shard(GOOD) if manifest == "never" else shutil.copytree(place.shards, place.path / "data")
    assert command(place.train(data))[0] == 0
    (data / "manifest.json").unlink(missing_ok=True)
    assert command(place.train(data, max_steps=12))[0] == 0  # the same tokens
    (file,) = data.glob("*train*.bin")
    tokens = np.fromfile(file, "<u2", offset=1024)
    file.write_bytes(file.read_bytes()[:1024] + np.roll(tokens, 1).tobytes())
    code, _, err = command(place.train(data, max_steps=18))
    assert code == 2
    (error,) = [line for line in err.splitlines() if line.startswith("error:")]
    assert f"{file}: its SHA-256 is " in error


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_shard_that_is_cut_short_while_it_is_read_costs_nothing_that_was_trained(place, split):
    data, first = place.shard(np.tile(GOOD, 50), np.tile(GOOD, 5)), place.run / "step_00000003"

    def cut():
        while not first.exists():
            time.sleep(0.01)
        os.truncate(data / f"x_{split}_0.bin", 1100)

    threading.Thread(target=cut, daemon=True).start()
    result = run_train(*place.train(data, max_steps=3000, save_steps=3, eval_steps=9), timeout=60)
    assert result.returncode == 2, result.stdout[-1000:] + result.stderr
    assert f"x_{split}_0.bin was cut short while it was read" in result.stderr
    assert verify(checkpoints(place.run)[-1]) == []


def test_22_the_same_shards_elsewhere_are_the_same_data(command, place):
    elsewhere = {"dataset_name": shutil.copytree(place.shards, place.path / "elsewhere"), "dropout": 0.1}
    for argv, printed in (
        (place.resume(max_steps=20, **elsewhere), "training is finished"),
        (place.train(max_steps=21, **elsewhere), "from step 20"),
    ):
        code, out, err = command(argv)
        assert code == 0, err
        assert printed in out


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(command, place):
    broken = {"learning_rate": 1e30, "max_steps": 32, "save_steps": 1, "logging_steps": 5}
    code, _, err = command(place.resume(**broken))
    assert code == 2
    assert "the validation loss at step 30 is nan" in err
    code, _, err = command(place.train(dropout=0.1, **broken | {"max_steps": 52, "eval_steps": "end"}))
    assert code == 2
    assert "steps in a row" in err
    assert (place.run / "step_00000020").is_dir()
    for checkpoint in checkpoints(place.run):
        assert all(t.isfinite().all() for t in load_file(checkpoint / "model.safetensors").values()), checkpoint


def test_processes_that_would_train_alone_are_refused(shards, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    error = refused(tiny(shards, tmp_path / "run"), {"ACCELERATE_USE_CPU": "false"})
    assert "each would train alone" in error
    assert "ACCELERATE_USE_CPU=true" in error
