"""Mistakes of users: exit code 2, no traceback, and an error that names the field or file and the way out.

The table has a row or more for each of 25 kinds of mistake. They go through main() in this process; the tests below the
table are for what needs a process, or several.
"""

import json
import os
import shutil
import signal
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, verify
from recipe.config import DataConfig
from recipe.data.prepare.pipeline import prepare
from recipe.data.shards import write_shard
from tests import processes as programs
from tests.conftest import LAUNCHED, ROOT, SHAKESPEARE, TINY, environment, flags
from tests.hub.server import Hub


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
        code = import_module(module_of(argv)).main([str(word) for word in argv])
        AcceleratorState._reset_state(True)
        return code, *capsys.readouterr()

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
        """Flags of a run on `data`, by default the good shards."""
        return tiny(dataset_name or self.shards, self.run, **fields)

    def resume(self, **fields) -> list[str]:
        """Flags of a run that goes on from a copy of the finished one."""
        shutil.copytree(self.finished, self.run)
        return self.train(**({"dropout": 0.1, "max_steps": 24} | fields))

    def prepare(self, source, **fields) -> list[str]:
        return flags(train_text=source, out=self.path / "out", **fields)

    def shard(self, tokens, val=None) -> Path:
        """A directory of a training shard, of tokens or of bytes, and a good validation shard or `val`."""
        for split, content in (("train", tokens), ("val", np.arange(2000) if val is None else val)):
            path = self.path / f"x_{split}_0.bin"
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                write_shard(path, np.asarray(content, np.uint16))
        return self.path

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def raw(self, head: bytes, tokens: np.ndarray) -> list[str]:
        """Flags of a run on a training shard of just these bytes."""
        return self.train(self.shard(head + tokens.tobytes()))

    def photos(self) -> Path:
        """A directory that is no run's."""
        return self.file("photos/a.jpg", "x").parent

    def changed(self) -> Path:
        """The good shards, a bit of them flipped."""
        shutil.copytree(self.shards, self.path / "changed")
        shard = self.path / "changed" / "train_000000.bin"
        data = bytearray(shard.read_bytes())
        data[5000] ^= 1
        return self.file("changed/train_000000.bin", bytes(data)).parent

    def parquet(self) -> Path:
        pq.write_table(pa.table({"title": ["a"], "body": ["b"]}), self.path / "a.parquet")
        return self.path / "a.parquet"

    def linked(self) -> list[str]:
        """A run by name, where runs/mine leads elsewhere."""
        (self.path / "runs").mkdir()
        (self.path / "elsewhere").mkdir()
        (self.path / "runs" / "mine").symlink_to(self.path / "elsewhere")
        return [word for word in self.train(run_name="mine") if not word.startswith("--output_dir")]


def module_of(argv: list) -> str:
    """The program that takes these words: prepare has --out."""
    return "recipe.data.prepare.pipeline" if any(str(word).startswith("--out=") for word in argv) else "recipe.train"


def header(*numbers: int, order: str = "<") -> bytes:
    return np.array([*numbers] + [0] * (256 - len(numbers)), f"{order}i4").tobytes()


GOOD = np.arange(4000, dtype="<u2")
PREPARE = "python -m recipe.data.prepare"
LOADER = "import datasets\n\nclass Texts(datasets.GeneratorBasedBuilder):\n    pass\n"

# number of the mistake, what is wrong, the command's words (prepare's where they have --out), what the error says
TABLE = [
    (1, "empty glob", lambda at: at.train(at.path / "*.bin"), ["*.bin: no such directory, and no .bin file", PREPARE]),
    (1, "no directory", lambda at: at.train(at.path / "none", train_text=""), ["none: no such directory", PREPARE]),
    (2, "wrong magic", lambda at: at.raw(header(123, 1, 4000), GOOD), ["x_train_0.bin: magic number 123", PREPARE]),
    (3, "count of the header", lambda at: at.raw(header(20240520, 1, 5000), GOOD), ["says 5000 tokens", "prepare it"]),
    (
        4,
        "token outside",
        lambda at: at.train(at.shard(np.where(GOOD == 77, 50257, GOOD))),
        ["x_train_0.bin: token 50257 at position 77, GPT-2's vocabulary ends at 50256", PREPARE],
    ),
    (5, "four bytes", lambda at: at.raw(b"", GOOD.astype("<u4")), ["4 bytes each, not uint16", PREPARE]),
    (
        5,
        "four bytes, header",
        lambda at: at.raw(header(20240520, 1, 4000), GOOD.astype("<u4")),
        ["its tokens are 4 bytes each, not uint16", "prepare it again"],
    ),
    (5, "byte order", lambda at: at.raw(b"", (GOOD + 1).astype(">u2")), ["big-endian order", PREPARE]),
    (5, "header's byte order", lambda at: at.raw(header(20240520, 1, 4000, order=">"), GOOD), ["big-endian", PREPARE]),
    (5, "tokens' byte order", lambda at: at.raw(header(20240520, 1, 4000), GOOD.byteswap()), ["byte order", PREPARE]),
    (6, "short shard", lambda at: at.train(at.shard(GOOD[:16])), ["x_train_0.bin: 16 tokens", "lower sequence_length"]),
    (6, "short validation", lambda at: at.train(at.shard(GOOD, val=GOOD[:16])), ["x_val_0.bin: 16 tokens, fewer than"]),
    (
        7,
        "validation is training",
        lambda at: at.train(at.shard(GOOD, val=GOOD)),
        ["x_train_0.bin (training)", "x_val_0.bin (validation) hold the same tokens"],
    ),
    (
        8,
        "checksum",
        lambda at: at.train(at.changed()),
        ["train_000000.bin: its SHA-256 is", "delete its directory and prepare it again"],
    ),
    (
        9,
        "no column, JSON",
        lambda at: at.prepare(at.file("a.jsonl", '{"title": "a", "body": "b"}\n')),
        ["a.jsonl, line 1: no column 'text'; there are: title, body. Choose with --text_column"],
    ),
    (
        9,
        "no column, parquet",
        lambda at: at.prepare(at.parquet()),
        ["a.parquet: no column 'text'; there are: title, body. Choose with --text_column"],
    ),
    (
        9,
        "no column, training",
        lambda at: at.train(at.path / "new", train_text=at.parquet()),
        ["a.parquet: no column 'text'; there are: title, body. Choose with --text_column"],
    ),
    (10, "script", lambda at: at.prepare(at.file("texts.py", LOADER)), ["texts.py is a program", "run it yourself"]),
    (10, "its directory", lambda at: at.prepare(at.file("texts/texts.py", LOADER).parent), ["texts.py is a program"]),
    (
        11,
        "more sequences than windows",
        lambda at: at.train(at.shard(GOOD[:50])),
        ["total_batch_tokens 64 takes 4 sequences a step", "lower total_batch_tokens"],
    ),
    (12, "unknown flag", lambda at: at.train(learning_rat=1), ["'--learning_rat'; did you mean 'learning_rate'?"]),
    (
        12,
        "unknown key",
        lambda at: ["--config", at.file("my.yaml", "learning_rat: 1\n")],
        ["my.yaml: unknown key 'learning_rat'; did you mean 'learning_rate'?"],
    ),
    (
        12,
        "unknown flag of prepare",
        lambda at: at.prepare(SHAKESPEARE, shard_token=9),
        ["unknown '--shard_token'; did you mean 'shard_tokens'?"],
    ),
    (
        12,
        "not UTF-8",
        lambda at: ["--config", at.file("my.yaml", b"data: \xff\n")],
        ["my.yaml: not valid YAML in UTF-8"],
    ),
    (13, "batch and sequence", lambda at: at.train(total_batch_tokens=1000), ["nearest valid: 960, 1024, 1088"]),
    (13, "batch and micro-batch", lambda at: at.train(total_batch_tokens=9 * 16), ["nearest valid: 64, 128, 192"]),
    (
        14,
        "long sequences",
        lambda at: at.train(sequence_length=128),
        ["sequence_length 128 is longer than n_positions"],
    ),
    (
        15,
        "heads",
        lambda at: at.train(n_embd=33),
        ["n_embd 33 is not a multiple of n_head 2; nearest valid n_embd: 30"],
    ),
    (16, "learning rate 0", lambda at: at.train(learning_rate=0), ["learning_rate is 0.0; it must be above 0"]),
    (16, "learning rate NaN", lambda at: at.train(learning_rate="nan"), ["learning_rate is nan; it must be a finite"]),
    (17, "warm-up", lambda at: at.train(warmup_steps=6), ["warmup_steps 6 leaves nothing of max_steps 6"]),
    (18, "fp16", lambda at: at.train(precision="fp16"), ["precision fp16 needs a CUDA GPU", "use auto, bf16 or fp32"]),
    (18, "tf32", lambda at: at.train(precision="tf32"), ["precision tf32 needs an Ampere", "use auto or fp32"]),
    (
        21,
        "architecture",
        lambda at: at.resume(n_layer=3, n_embd=64),
        ["run holds a run with other settings: n_layer 2 -> 3, n_embd 32 -> 64", "--fresh"],
    ),
    (
        22,
        "another recipe's run",
        lambda at: at.resume(config="recipe/configs/gpt2.yaml"),
        ["holds another run: 'shakespeare'", "another output_dir"],
    ),
    (22, "no run", lambda at: at.train(output_dir=at.photos()), ["photos is not a run's: it holds a.jpg"]),
    (22, "fresh", lambda at: at.train(output_dir=at.photos(), fresh="true"), ["photos is not a run's: it holds a.jpg"]),
    (
        23,
        "nanoGPT's checkpoint",
        lambda at: at.train(output_dir=at.file("nano/ckpt.pt", b"\x80").parent),
        ["nano holds ckpt.pt: a pickle, which can run any code", "init_from"],
    ),
    (
        23,
        "pickled weights to start from",
        lambda at: at.train(init_from=pickled(at)),
        ["old: no model.safetensors; pytorch_model.bin", ".save_pretrained('converted')"],
    ),
    (
        24,
        "run_name that leaves",
        lambda at: at.train(run_name="../x"),
        ["run_name '../x' must be letters", "output_dir"],
    ),
    (24, "absolute run_name", lambda at: at.train(run_name="/x"), ["run_name '/x' must be letters", "output_dir"]),
    (
        24,
        "linked run_name",
        lambda at: at.linked(),
        ["run_name mine: runs/mine is a link out of runs/", "choose another"],
    ),
    (
        24,
        "shard elsewhere",
        lambda at: at.train(at.file("d/manifest.json", manifest("../x.bin")).parent, train_text=""),
        ["manifest.json: not a manifest of this recipe (shard '../x.bin' is not the name of a file in its directory)"],
    ),
]


def pickled(at: Place) -> Path:
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64).save_pretrained(at.path / "old")
    return at.file("old/pytorch_model.bin", b"\x80").parent


def manifest(file: str) -> str:
    shard = {"file": file, "split": "train", "tokens": 10, "sha256": None, "next": {}}
    return json.dumps({"source": {}, "options": {}, "complete": True, "shards": [shard]})


@pytest.fixture
def place(shards, whole_run, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Place(tmp_path, shards, whole_run[0])


def row(number: int, name: str) -> tuple:
    return next(row for row in TABLE if row[:2] == (number, name))


@pytest.mark.parametrize(("number", "name", "words", "message"), TABLE, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input(command, place, monkeypatch, number, name, words, message):
    argv = words(place)
    before = sorted(place.path.rglob("*"))
    monkeypatch.chdir(place.path if name == "linked run_name" else ROOT)
    code, _, err = command(argv)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert len(err.strip().splitlines()) <= 2, err
    for part in message:
        assert part in err
    if number >= 12:  # found before anything is written
        assert sorted(place.path.rglob("*")) == before


def test_the_table_is_whole():
    """19 and 20 (files that disagree), and 25 (no token to write with), are tested below and with the uploads."""
    assert {number for number, *_ in TABLE} | {19, 20, 25} == set(range(1, 26))


@pytest.mark.parametrize(("number", "name"), [(4, "token outside"), (12, "unknown flag of prepare")])
def test_bad_input_in_a_process_of_its_own(place, number, name):
    _, _, words, message = row(number, name)
    argv = words(place)
    program = ("recipe/train.py",) if module_of(argv) == "recipe.train" else ("-m", "recipe.data.prepare")
    result = programs.run(*program, *argv, env=environment())
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) <= 2
    assert all(part in result.stderr for part in message)


def refused(argv: list, env: dict | None = None) -> str:
    """The error of a run of two processes: printed once, before the launcher ends the other; no process trains."""
    ranks = programs.Ranks(2, "recipe/train.py", *argv, env=LAUNCHED | environment(env))
    assert ranks.wait(120) == 2, ranks.stdout + ranks.stderr
    assert ranks.codes in ([2, 2], [2, -signal.SIGTERM]), ranks.stdout + ranks.stderr  # ended while it was starting
    assert "Traceback" not in ranks.stderr
    errors = [line for line in ranks.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, ranks.stderr
    return errors[0]


@pytest.mark.parametrize(("number", "name"), [(8, "checksum"), (9, "no column, training"), (22, "no run")])
def test_bad_input_of_two_processes(place, number, name):
    """When both meet it, when one was to prepare the text for the other, and when one looks for both."""
    _, _, words, message = row(number, name)
    error = refused(words(place))
    assert all(part in error for part in message)


def test_11_more_processes_than_windows(place):
    data = place.shard(GOOD[:17], val=GOOD[100:117])  # a window each
    error = refused(place.train(data, total_batch_tokens=32, micro_batch_size=1))
    assert "takes 2 sequences a step, the training data have 1 in all" in error


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed, which is installed on Linux only")
@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ("mixed_precision", {}, "the Accelerate file sets mixed_precision beside deepspeed_config_file"),  # 19
        ("gradient_accumulation_steps,zero_stage", {}, "sets gradient_accumulation_steps, zero_stage beside"),  # 19
        (
            "",
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
            "zero1.json: optimizer is not about sharding",
        ),  # 20
    ],
    ids=["19-mixed_precision", "19-stage and accumulation", "20-optimizer"],
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


@pytest.mark.slow  # a new interpreter, because the Hub's address is read while a library is imported
def test_10_a_hub_data_set_that_is_a_script(place):
    (place.path / "hub" / "a" / "texts").mkdir(parents=True)
    place.file("hub/a/texts/texts.py", LOADER)
    with Hub(place.path / "hub") as hub:
        words = place.prepare("a/texts")
        result = programs.run("-m", "recipe.data.prepare", *words, env=environment(hub.environment))
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "a/texts: this data set is a script that wants to run on your machine, which is refused" in result.stderr
    assert "refs/convert/parquet" in result.stderr


def test_24_a_checkpoint_that_leads_elsewhere_is_skipped(command, place):
    argv = place.resume(max_steps=11, eval_steps=0, save_total_limit=1)
    last, outside = place.run / "step_00000020", place.path / "outside"
    last.rename(outside)
    last.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    listed = json.loads((outside / "manifest.json").read_text())
    other = shutil.copytree(outside, place.run / "step_00000019")  # and one whose manifest names a file elsewhere
    files = listed["files"] | {"../notes.txt": listed["files"]["config.json"]}
    (other / "manifest.json").write_text(json.dumps({"files": files}))
    shutil.copyfile(outside / "config.json", place.path / "notes.txt")
    code, out, err = command(argv)
    assert code == 0, err
    assert "step_00000020: it is a link" in out
    assert "step_00000019: manifest.json names '../notes.txt'" in out
    assert "from step 10" in out
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_data_that_turn_out_damaged_cost_nothing_that_was_trained(command, tmp_path):
    """The damage of the second shard is found when it is reached; there is a checkpoint of the step before."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text(SHAKESPEARE.read_text()[:60_000])
    prepare(DataConfig(train_text=str(text), dataset_name=str(data), val_fraction=0.2, first_shard_tokens=500))
    content = bytearray((data / "train_000001.bin").read_bytes())
    content[3000] ^= 1
    (data / "train_000001.bin").write_bytes(content)
    code, _, err = command(tiny(data, run, max_steps=20, save_steps=0))
    assert code == 2
    assert "train_000001.bin: its SHA-256 is" in err
    assert [p.name for p in checkpoints(run)] == ["step_00000007"]
    assert verify(run / "step_00000007") == []


def test_a_hub_data_set_that_is_not_prepared_names_the_command(command, tmp_path):
    fields = {"torch_compile": "false", "streaming": "false", "dataset_name": tmp_path / "stories"}
    fields |= {"config": "recipe/configs/tinystories.yaml", "train_text": "roneneldan/TinyStories"}
    code, _, err = command(flags(**fields))
    assert code == 2
    assert "python -m recipe.data.prepare --train_text roneneldan/TinyStories" in err


def test_22_the_same_shards_elsewhere_are_the_same_data_and_others_are_not(command, place):
    argv = place.resume(max_steps=21, dataset_name=shutil.copytree(place.shards, place.path / "elsewhere"))
    code, out, err = command(argv)
    assert code == 0, err
    assert "from step 20" in out
    other = place.path / "other"
    (place.path / "other.txt").write_text(SHAKESPEARE.read_text()[-100_000:])
    prepare(DataConfig(train_text=str(place.path / "other.txt"), dataset_name=str(other), val_fraction=0.1))
    code, _, err = command(place.train(other, dropout=0.1, max_steps=22))
    assert code == 2
    assert "no longer holds the shards" in err


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(command, place):
    argv = place.resume()
    for checkpoint in checkpoints(place.run):
        (checkpoint / "model.safetensors").write_bytes(b"")
    code, _, err = command(argv)
    assert code == 2
    assert f"{place.run}: none of its 2 checkpoints is whole; --fresh starts over" in err


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(command, place):
    broken = {"learning_rate": 1e30, "max_steps": 32, "save_steps": 1, "logging_steps": 5}
    code, _, err = command(place.resume(**broken))
    assert code == 2
    assert "the validation loss at step 30 is nan" in err
    code, _, err = command(place.train(dropout=0.1, **broken, max_skipped_steps=3))
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


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="needs an environment without torch_xla")
def test_a_tpu_without_torch_xla(command, monkeypatch):
    """Rather than a run on the machine's CPU that nobody notices."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    code, _, err = command(["--dry_run"])
    assert code == 2
    assert "PJRT_DEVICE is set, but torch_xla is not installed: pip install -e '.[tpu]'" in err
