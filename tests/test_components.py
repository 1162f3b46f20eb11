"""A run whose nodes are launched differently does not train; its streams share the disk."""

import json
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from recipe.checkpoint import provenance
from recipe.components import Components, check_same_launch, check_supported
from recipe.config import batch_arithmetic, parse_config
from recipe.data.open import open_datasets
from recipe.data.prepare import prepare
from recipe.engine.device import Device
from recipe.engine.runtime import Runtime
from recipe.utils.errors import Unreachable, UserError
from recipe.utils.files import sha256_of
from recipe.utils.processes import Processes
from tests.conftest import flags
from tests.data import TEXT, data_of
from tests.engine import cpu_strategy


class Launch(Processes):
    """One process of a launch; the first that broadcasts is rank 0."""

    sent_by_rank_0, others_differ = None, False

    def broadcast_object(self, value: dict) -> dict:
        Launch.sent_by_rank_0 = self.sent_by_rank_0 or value
        return self.sent_by_rank_0

    def anywhere(self, condition: bool) -> bool:
        return condition or self.others_differ


def node(processes: Processes, precision: str = "fp32") -> SimpleNamespace:
    return SimpleNamespace(runtime=Runtime(processes), device=Device("cpu", "CPU", precision))


def test_a_node_that_is_launched_differently_is_refused(monkeypatch, tmp_path):
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    argv = ["--max_steps=60", "--warmup_steps=1"]
    config = parse_config([*argv, "--output_dir=/mnt/a"])
    monkeypatch.setattr(Launch, "sent_by_rank_0", None)
    check_same_launch(config, node(Launch()))  # rank 0
    (tmp_path / "val.txt").write_text("some text")
    paths = "--output_dir=/b", f"--val_data={tmp_path}/val.txt"
    check_same_launch(parse_config([*argv, *paths]), node(Launch()))  # which may differ
    other_config = parse_config(["--max_steps=50", "--warmup_steps=1", "--seed=3", "--fresh"])
    with pytest.raises(UserError, match=r"max_steps 50 here, 60 on rank 0; .*seed 3 here, 1337 on rank 0; .*"):
        check_same_launch(other_config, node(Launch()))
    with pytest.raises(UserError, match="precision 'bf16' here, 'fp32' on rank 0"):
        check_same_launch(config, node(Launch(), precision="bf16"))
    mixture = "--dataset_name=[{name: A, weight: 1}, {name: B, weight: 3}]"
    with pytest.raises(UserError, match=r"dataset_name's weights \[250, 750\] here, \[1000\] on rank 0"):
        check_same_launch(parse_config([*argv, mixture]), node(Launch()))
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "b.py").write_text("y")
    with pytest.raises(UserError, match=r"code '[0-9a-f]{8}' here, '[0-9a-f]{8}' on rank 0"):
        check_same_launch(config, node(Launch()))
    (tmp_path / "eval" / "b.py").rename(tmp_path / "recipe" / "data" / "b.py")
    with pytest.raises(UserError, match="code '"):
        check_same_launch(config, node(Launch()))
    (tmp_path / "recipe" / "data" / "b.py").unlink()
    monkeypatch.setattr(Launch, "others_differ", True)
    with pytest.raises(UserError, match="on another process; see its error message"):
        check_same_launch(config, node(Launch()))


def test_a_node_with_other_shards_is_refused(monkeypatch, tmp_path):
    """Each node may have a disk of its own, on which the same command has prepared a later version of a data set."""
    monkeypatch.setattr(Launch, "sent_by_rank_0", None)
    fields = {"n_positions": 16, "sequence_length": 16, "total_batch_tokens": 32}
    for node, text in (("a", TEXT[:9000]), ("b", TEXT[:9000]), ("c", TEXT[9000:18000])):
        (tmp_path / f"{node}.txt").write_text(text)
        prepare(data_of(tmp_path / f"{node}.txt", tmp_path / node))

    def open_on(node: str) -> None:
        config = parse_config(flags(dataset_name=tmp_path / node, **fields))
        with open_datasets(config, batch_arithmetic(config, 1), Launch()):
            pass

    open_on("a")  # rank 0
    open_on("b")
    with pytest.raises(UserError, match=r"c holds other shards here than on rank 0's node; copy"):
        open_on("c")
    shutil.copytree(tmp_path / "a", tmp_path / "d")
    manifest = json.loads((tmp_path / "d/manifest.json").read_text())
    (entry,) = (entry for entry in manifest["shards"] if entry["split"] == "val")
    shard = tmp_path / "d" / entry["file"]
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\0")
    entry["sha256"] = sha256_of(shard)
    (tmp_path / "d/manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"d holds other shards here than on rank 0's node; copy"):
        open_on("d")


@pytest.mark.parametrize(
    ("step", "error", "ends_as_stopped"),
    [(5, Unreachable("gone"), True), (4, Unreachable("gone"), False), (5, UserError("damaged"), False)],
)
def test_a_run_that_loses_its_data_ends_as_stopped_if_it_has_taken_steps(step, error, ends_as_stopped, caplog):
    """Or a script that repeats the command would do so for ever."""
    batches = SimpleNamespace(error=lambda: error)
    components = SimpleNamespace(batches=batches, strategy=cpu_strategy(), first_step=4)
    with nullcontext() if ends_as_stopped else pytest.raises(UserError, match=f"^{error}$"):
        Components.check_data_errors(components, step, saved=True)
    assert ("data       gone" in caplog.messages) == ends_as_stopped


def test_a_run_from_other_weights_that_resumes_unchanged_is_of_one_part():
    """Or an audit would not replay it across the resume."""
    config = parse_config(["--init_from=openai-community/gpt2"])
    parts = provenance.about(config, cpu_strategy(), 0, [])
    assert provenance.about(config, cpu_strategy(), 5, parts) == parts


@pytest.mark.parametrize("name", ["skip_loss_z", "skip_grad_z"])
def test_skipping_spikes_under_zero_is_refused_in_a_dry_run_too(name):
    """By DeepSpeed's step they would not be skipped. It was once found after --fresh had moved the earlier run."""
    device = Device("cuda", "NVIDIA H100 80GB HBM3", "bf16")
    strategy = SimpleNamespace(runtime=Runtime(Processes(), "zero1"), device=device)
    config = parse_config([f"--{name}=5"])
    with pytest.raises(UserError, match=f"{name} is not supported under ZeRO"):
        check_supported(config, strategy)
    check_supported(config, node(Processes()))


def test_what_a_restart_would_repeat_is_refused(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh_config, timed_config = config.replace(fresh=True), config.replace(max_hours=2.0)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_supported(config, node(Processes()))
    restarts = r"at each automatic restart \(--max_restarts 3"
    with pytest.raises(UserError, match=rf"--fresh would start over {restarts}\); .* move runs/mine away"):
        check_supported(fresh_config, node(Processes()))
    with pytest.raises(UserError, match=rf"max_hours would start counting again {restarts}; .*\); remove one"):
        check_supported(timed_config, node(Processes()))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_supported(fresh_config, node(Processes()))
    check_supported(timed_config, node(Processes()))
