"""Mistakes, made on the command line: exit code 2, no traceback, the field or file and the way out.

The table has one entry or more for each of the 25 kinds of mistake that are promised to end so (25, no token to write
with, is tested where uploads are). They go through main() in this process, which saves the start of one; the tests
below it start processes, several too.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from recipe.checkpoint.format import checkpoints, verify
from recipe.data.prepare.pipeline import PrepareOptions, prepare
from recipe.data.shards import write_shard
from tests.conftest import ROOT, SHAKESPEARE, TINY, environment, flags, launch, run_train
from tests.hub import Hub


def refused(*arguments, processes=1, env=None) -> str:
    result = run_train(*arguments, processes=processes, env=env)
    assert "Traceback" not in result.stderr or processes > 1, result.stderr  # torchrun adds its own
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stdout + result.stderr
    assert result.returncode == (2 if processes == 1 else 1)
    return errors[0]


def tiny(shards, run, **fields):
    return flags(**(TINY | {"dataset_name": shards, "output_dir": run, "max_steps": 6} | fields))


@pytest.fixture
def command(monkeypatch, capsys):
    """argv, main -> (exit code, standard output, standard error) of a command in this process, on the CPU. What it
    changes of the process is put back."""
    import torch
    from accelerate.state import AcceleratorState, PartialState

    for name in [name for name in os.environ if name.startswith("ACCELERATE_") or name.endswith("RANK")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()

    def run(argv, main=None):
        from recipe import train

        code = (main or train.main)([str(word) for word in argv])
        return code, *capsys.readouterr()

    capsys.readouterr()
    yield run
    AcceleratorState._reset_state(True)
    PartialState._reset_state()
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


def header(*numbers: int, order: str = "<") -> bytes:
    return np.array([*numbers] + [0] * (256 - len(numbers)), f"{order}i4").tobytes()


GOOD = np.arange(4000, dtype="<u2")
PREPARE = "python -m recipe.data.prepare"
LOADER = "import datasets\n\nclass Texts(datasets.GeneratorBasedBuilder):\n    pass\n"

# number, what is wrong, the command's words (those of recipe.data.prepare where they have --out), what the error says
TABLE = [
    (1, "empty glob", lambda at: at.train(at.path / "*.bin"), ["*.bin: no such directory, and no .bin file", PREPARE]),
    (1, "no directory", lambda at: at.train(at.path / "none", train_text=""), ["none: no such directory", PREPARE]),
    (
        2,
        "wrong magic",
        lambda at: at.train(at.shard(header(123, 1, 4000) + GOOD.tobytes())),
        ["x_train_0.bin: magic number 123, expected 20240520: this is not a token shard", PREPARE],
    ),
    (
        3,
        "count of the header",
        lambda at: at.train(at.shard(header(20240520, 1, 5000) + GOOD.tobytes())),
        [
            "x_train_0.bin: the header says 5000 tokens (10000 bytes), the file has 8000",
            "cut short",
            "prepare it again",
        ],
    ),
    (
        4,
        "token outside",
        lambda at: at.train(at.shard(np.where(GOOD == 77, 50257, GOOD))),
        ["x_train_0.bin: token 50257 at position 77, GPT-2's vocabulary ends at 50256", PREPARE],
    ),
    (
        5,
        "four bytes",
        lambda at: at.train(at.shard(GOOD.astype("<u4").tobytes())),
        ["4 bytes each, not uint16", PREPARE],
    ),
    (
        5,
        "four bytes, header",
        lambda at: at.train(at.shard(header(20240520, 1, 4000) + GOOD.astype("<u4").tobytes())),
        ["its tokens are 4 bytes each, not uint16", "prepare it again"],
    ),
    (5, "byte order", lambda at: at.train(at.shard((GOOD + 1).astype(">u2").tobytes())), ["big-endian order", PREPARE]),
    (
        5,
        "byte order, header",
        lambda at: at.train(at.shard(header(20240520, 1, 4000, order=">") + GOOD.tobytes())),
        ["the bytes are in big-endian order", PREPARE],
    ),
    (
        5,
        "byte order of tokens",
        lambda at: at.train(at.shard(header(20240520, 1, 4000) + GOOD.byteswap().tobytes())),
        ["another tokenizer, type or byte order", PREPARE],
    ),
    (
        6,
        "short shard",
        lambda at: at.train(at.shard(GOOD[:32])),
        ["x_train_0.bin: 32 tokens, fewer than one sequence of sequence_length + 1 = 33; lower sequence_length"],
    ),
    (6, "short validation", lambda at: at.train(at.shard(GOOD, val=GOOD[:32])), ["x_val_0.bin: 32 tokens, fewer than"]),
    (
        7,
        "validation is training",
        lambda at: at.train(at.shard(GOOD, val=GOOD)),
        ["x_train_0.bin (training)", "x_val_0.bin (validation) hold the same tokens", "give other files"],
    ),
    (
        8,
        "checksum",
        lambda at: at.train(at.changed()),
        ["train_000000.bin: SHA-256", "the manifest says", "delete its directory and prepare it again"],
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
    (
        10,
        "script in a directory",
        lambda at: at.prepare(at.file("texts/texts.py", LOADER).parent),
        ["texts.py is a program", "is not run: run it yourself where you trust it", ".parquet files that it writes"],
    ),
    (10, "script", lambda at: at.prepare(at.file("texts.py", LOADER)), ["texts.py is a program", "is not run"]),
    (
        11,
        "more sequences than windows",
        lambda at: at.train(at.shard(GOOD[:100])),
        ["total_batch_tokens 256 takes 8 sequences a step, the training data have 3 in all; lower total_batch_tokens"],
    ),
    (
        12,
        "unknown flag",
        lambda at: at.train(learning_rat=1),
        ["unknown '--learning_rat'; did you mean 'learning_rate'?"],
    ),
    (
        12,
        "unknown key",
        lambda at: ["--config", at.file("my.yaml", "dataset_name: x\nlearning_rat: 1\n")],
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
        "YAML in another encoding",
        lambda at: ["--config", at.file("my.yaml", b"dataset_name: \xff\n")],
        ["my.yaml: not valid YAML in UTF-8"],
    ),
    (
        13,
        "batch and sequence",
        lambda at: at.train(total_batch_tokens=1000),
        ["total_batch_tokens 1000 is not a multiple of sequence_length 32; nearest valid: 768, 1024, 1280"],
    ),
    (
        13,
        "batch and micro-batch",
        lambda at: at.train(total_batch_tokens=9 * 32),
        ["not a multiple of 1 process x micro_batch_size 8 x sequence_length 32 = 256; nearest valid: 192, 224, 256"],
    ),
    (
        14,
        "long sequences",
        lambda at: at.train(sequence_length=128),
        ["sequence_length 128 is longer than n_positions 64; raise n_positions or shorten the sequences"],
    ),
    (
        15,
        "heads",
        lambda at: at.train(n_embd=33),
        ["n_embd 33 is not a multiple of n_head 2; nearest valid n_embd: 30, 32, 34"],
    ),
    (16, "learning rate 0", lambda at: at.train(learning_rate=0), ["learning_rate is 0.0; it must be above 0"]),
    (16, "learning rate below 0", lambda at: at.train(learning_rate=-1), ["learning_rate is -1.0; it must be above 0"]),
    (16, "learning rate NaN", lambda at: at.train(learning_rate="nan"), ["learning_rate is nan; it must be a finite"]),
    (17, "warm-up", lambda at: at.train(warmup_steps=6), ["warmup_steps 6 leaves nothing of max_steps 6; shorten"]),
    (18, "fp16", lambda at: at.train(precision="fp16"), ["precision fp16 needs a CUDA GPU", "use auto, bf16 or fp32"]),
    (18, "tf32", lambda at: at.train(precision="tf32"), ["precision tf32 needs an Ampere", "use auto or fp32"]),
    (
        21,
        "architecture",
        lambda at: at.resume(n_layer=3, n_embd=64),
        ["run holds a run with other settings: n_layer 2 -> 3, n_embd 32 -> 64. Put those back", "--fresh"],
    ),
    (
        22,
        "another recipe's run",
        lambda at: at.resume(config="recipe/configs/gpt2.yaml"),
        ["holds another run: 'shakespeare', of recipe/configs/shakespeare.yaml, and not 'gpt2'", "another output_dir"],
    ),
    (
        22,
        "no run",
        lambda at: at.train(output_dir=at.file("photos/a.jpg", "x").parent),
        ["photos is not a run's: it holds a.jpg. Choose one that is new or empty"],
    ),
    (
        22,
        "no run, --fresh",
        lambda at: at.train(output_dir=at.file("photos/a.jpg", "x").parent, fresh="true"),
        ["photos is not a run's: it holds a.jpg"],
    ),
    (
        23,
        "nanoGPT's checkpoint",
        lambda at: at.train(output_dir=at.file("nano/ckpt.pt", b"\x80").parent),
        ["nano holds ckpt.pt: a pickle, which can run any code", "save them as safetensors", "init_from"],
    ),
    (
        23,
        "pickled weights to start from",
        lambda at: at.train(init_from=pickled(at)),
        ["old: no model.safetensors; pytorch_model.bin", "pickles, which can run any", ".save_pretrained('converted')"],
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
        "run_name that is a link",
        lambda at: at.linked(),
        ["run_name mine: runs/mine is a link out of runs/, to", "elsewhere; choose another run_name, or give"],
    ),
    (
        24,
        "shard elsewhere",
        lambda at: at.train(at.file("d/manifest.json", manifest("../x.bin")).parent, train_text=""),
        [
            "manifest.json: not a manifest of this recipe (shard '../x.bin' is no name of a file in its directory); delete"  # noqa: E501
        ],
    ),
]


def pickled(at: Place) -> Path:
    from transformers import GPT2Config

    GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=64).save_pretrained(at.path / "old")
    return at.file("old/pytorch_model.bin", b"\x80").parent


def manifest(file: str) -> str:
    shard = {"file": file, "split": "train", "tokens": 10, "sha256": None, "next": {}}
    return json.dumps({"source": {}, "options": {}, "complete": True, "shards": [shard]})


def entry(number: int, name: str):
    return next(pytest.param(*row, id=f"{row[0]}-{row[1]}") for row in TABLE if row[:2] == (number, name))


@pytest.fixture
def place(shards, whole_run, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return Place(tmp_path, shards, whole_run[0])


def main_of(argv: list) -> str:
    return "recipe.data.prepare" if any(str(word).startswith("--out=") for word in argv) else "recipe.train"


@pytest.mark.parametrize(("number", "name", "words", "message"), TABLE, ids=lambda v: v if isinstance(v, str) else "")
def test_bad_input(command, place, monkeypatch, number, name, words, message):
    from recipe.data.prepare import pipeline as preparing

    argv = words(place)
    before = sorted(place.path.rglob("*"))
    monkeypatch.chdir(place.path if name == "run_name that is a link" else ROOT)
    code, _, err = command(argv, preparing.main if main_of(argv) == "recipe.data.prepare" else None)
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert len(err.strip().splitlines()) <= 2, err
    for part in message:
        assert part in err
    if number >= 12:  # found before anything is written
        assert sorted(place.path.rglob("*")) == before


def test_the_table_is_whole():
    elsewhere = {19, 20, 25}
    assert {number for number, *_ in TABLE} | elsewhere == set(range(1, 26))


@pytest.mark.parametrize(
    ("number", "name", "words", "message"),
    [
        entry(4, "token outside"),
        entry(9, "no column, parquet"),
        entry(12, "unknown flag"),
        entry(22, "no run"),
    ],
)
def test_bad_input_as_a_user_makes_it(place, number, name, words, message):
    argv = list(map(str, words(place)))
    result = subprocess.run(
        [sys.executable, "-m", main_of(argv), *argv],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) <= 2
    assert all(part in result.stderr for part in message)


def said_once(result, codes: list[str], starting: bool = False) -> str:
    """The one error of a launch, of which the launcher reports the processes' exit codes."""
    output = result.stdout + result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert result.returncode == 1
    assert 'train.py", line' not in output  # the launcher's own traceback is none of ours
    found = [line.split()[2] for line in output.splitlines() if line.strip().startswith("exitcode")]
    # -15: still starting when the first had found the mistake, which needs no agreement, and the launcher ended all
    assert found == codes or (starting and sorted(found) == ["-15", "2"]), output
    return errors[0]


@pytest.mark.parametrize(
    ("number", "name", "words", "message"),
    [
        entry(8, "checksum"),
        entry(9, "no column, training"),
        entry(22, "no run"),
    ],
)
def test_bad_input_of_two_processes(place, number, name, words, message):
    """Said once, and both end with code 2: when both have met it, when one was to prepare the text for the other, and
    when one has looked for both."""
    result = launch("ddp", 2, "recipe/train.py", *words(place))
    error = said_once(result, ["2", "2"])
    assert all(part in error for part in message)


def test_11_more_processes_than_windows(place):
    data = place.shard(GOOD[:33], val=GOOD[100:133])  # a window each
    result = launch("ddp", 2, "recipe/train.py", *place.train(data, total_batch_tokens=64))
    assert "takes 2 sequences a step, the training data have 1 in all" in said_once(result, ["2", "2"])


@pytest.mark.parametrize(
    ("yaml", "changes", "processes", "message"),
    [
        (
            "mixed_precision: fp16\n",
            {},
            1,  # 19
            "the Accelerate file says mixed_precision beside deepspeed_config_file {file}, and would be ignored; take it out",  # noqa: E501
        ),
        (
            "deepspeed_config:\n  gradient_accumulation_steps: 4\n  zero_stage: 3\n",
            {},
            1,  # 19
            "the Accelerate file says gradient_accumulation_steps, zero_stage beside",
        ),
        (
            "",
            {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}},
            2,  # 20
            "{file}: optimizer is not about sharding and belongs to the recipe; take it out",
        ),
    ],
    ids=["19-mixed_precision", "19-stage and accumulation", "20-optimizer"],
)
def test_19_and_20_files_that_disagree(place, yaml, changes, processes, message):
    shipped = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    file = place.file("zero1.json", json.dumps(shipped | changes))
    text = (ROOT / "accelerate_configs" / "zero1.yaml").read_text().replace("ds_configs/zero1.json", str(file))
    text = text.replace("deepspeed_config:\n", yaml) if yaml.startswith("deepspeed") else text + yaml
    result = launch(place.file("zero1.yaml", text), processes, "recipe/train.py", *place.train())
    assert message.format(file=file) in said_once(result, ["2"] * processes, starting=True)
    assert not place.run.exists()


def test_10_a_hub_data_set_that_is_a_script(place):
    (place.path / "hub" / "a" / "texts").mkdir(parents=True)
    place.file("hub/a/texts/texts.py", LOADER)
    with Hub(place.path / "hub") as hub:
        result = subprocess.run(
            [sys.executable, "-m", "recipe.data.prepare", *place.prepare("a/texts")],
            cwd=ROOT,
            env=environment(hub.environment),
            capture_output=True,
            text=True,
        )
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "a/texts: this data set is a script that wants to run on your machine, which is refused" in result.stderr
    assert "refs/convert/parquet" in result.stderr


def test_24_a_checkpoint_that_leads_elsewhere_is_passed_over(command, place):
    argv = place.resume(max_steps=11, eval_steps=0)
    last, outside = place.run / "step_00000020", place.path / "outside"
    last.rename(outside)
    last.symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    listed = json.loads((outside / "manifest.json").read_text())
    for name in ("../notes.txt", str(place.path / "notes.txt")):  # nor one whose files lie elsewhere, as damaged
        other = shutil.copytree(outside, place.run / "step_00000019", dirs_exist_ok=True)
        (other / "manifest.json").write_text(
            json.dumps({"files": listed["files"] | {name: listed["files"]["config.json"]}})
        )
        shutil.copyfile(outside / "config.json", place.path / "notes.txt")
        from recipe.checkpoint.format import verify

        assert verify(other) == [f"manifest.json names {name!r}, which is not a file of this directory"]
    code, out, err = command([*argv, "--save_total_limit", "1"])
    assert code == 0, err
    assert "step_00000020: it is a link out of the run" in out
    assert "step_00000019: manifest.json names" in out
    assert "from step 10" in out
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_data_that_turn_out_damaged_cost_nothing_that_was_trained(tmp_path):
    """The second of the shards is found out when it is reached; there is a checkpoint of the step before."""
    text, data, run = tmp_path / "text.txt", tmp_path / "data", tmp_path / "run"
    text.write_text(SHAKESPEARE.read_text()[:60_000])
    prepare(PrepareOptions(train_text=str(text), out=str(data), val_fraction=0.2, first_shard_tokens=2000))
    content = bytearray((data / "train_000001.bin").read_bytes())
    content[3000] ^= 1
    (data / "train_000001.bin").write_bytes(content)
    assert "train_000001.bin: SHA-256" in refused(*tiny(data, run, max_steps=20, save_steps=0))
    assert [p.name for p in checkpoints(run)] == ["step_00000007"]
    assert verify(run / "step_00000007") == []


def test_a_hub_data_set_that_is_not_prepared_names_the_command(tmp_path):
    message = refused(
        "--config",
        "recipe/configs/tinystories.yaml",
        "--torch_compile",
        "false",
        "--streaming",
        "false",
        f"--dataset_name={tmp_path}/stories",
        "--train_text=roneneldan/TinyStories",
    )
    assert "not prepared yet; first run: python -m recipe.data.prepare --train_text roneneldan/TinyStories" in message


def test_resuming_with_another_architecture(shards, tmp_path):
    run = tmp_path / "run"
    assert run_train(*tiny(shards, run)).returncode == 0
    message = refused(*tiny(shards, run, n_layer=3, max_steps=8))
    assert f"{run} holds a run with other settings: n_layer 2 -> 3" in message
    shutil.copytree(run, tmp_path / "moved")
    shutil.copytree(shards, tmp_path / "elsewhere")
    result = run_train(*tiny(tmp_path / "elsewhere", tmp_path / "moved", max_steps=7))
    assert result.returncode == 0
    assert "resuming with data" in result.stdout  # the same shards at another path are the same data

    changed = tmp_path / "shards"  # under the same name, another text
    shutil.copytree(shards, changed)
    run2 = tmp_path / "run2"
    shutil.copytree(run, run2)
    shutil.rmtree(changed)
    text = tmp_path / "other.txt"
    text.write_text(SHAKESPEARE.read_text()[-100_000:])
    prepare(PrepareOptions(train_text=str(text), out=str(changed), val_fraction=0.1))
    assert "no longer holds the shards" in refused(*tiny(changed, run2, max_steps=8))

    (run / "step_00000006" / "model.safetensors").write_bytes(b"")
    (run / "step_00000006").rename(run / "step_00000009")
    assert f"{run}: none of its 1 checkpoints is whole; --fresh starts over" in refused(*tiny(shards, run))


def test_a_run_that_diverges_ends_and_keeps_its_last_good_checkpoint(shards, tmp_path):
    run = tmp_path / "run"
    assert run_train(*tiny(shards, run, max_steps=4, warmup_steps=0)).returncode == 0
    broken = {"learning_rate": 1e30, "warmup_steps": 0, "max_steps": 12, "save_steps": 1, "logging_steps": 5}
    assert "the validation loss at step 10 is nan: the weights are spoilt" in refused(*tiny(shards, run, **broken))
    broken["max_skipped_steps"] = 3
    assert "5 steps in a row, by step 10, were left out" in refused(*tiny(shards, run, **broken))
    assert (run / "step_00000004").is_dir()
    for checkpoint in run.glob("step_*"):
        assert all(t.isfinite().all() for t in load_file(checkpoint / "model.safetensors").values()), checkpoint


@pytest.mark.parametrize("environment", [{"ACCELERATE_USE_CPU": "false"}])
def test_processes_that_would_train_alone_are_refused(shards, tmp_path, environment):
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    message = refused(*tiny(shards, tmp_path / "run"), processes=2, env=environment)
    assert "each would train alone" in message
    assert "ACCELERATE_USE_CPU=true" in message


@pytest.mark.skipif(find_spec("torch_xla") is not None, reason="needs an environment without torch_xla")
def test_a_tpu_without_torch_xla():
    """Rather than a run on the machine's CPU, unnoticed."""
    message = refused("--dry_run", env={"PJRT_DEVICE": "TPU"})
    assert "PJRT_DEVICE is set, but torch_xla is not installed: pip install -e '.[tpu]'" in message
