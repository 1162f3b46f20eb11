"""All nodes of a run are launched alike, or none trains."""

import dataclasses
from types import SimpleNamespace

import pytest

from recipe import components
from recipe.components import check_same_launch
from recipe.config import parse_config
from recipe.errors import UserError


class TwoNodes:
    """The engine of the second of two nodes; the first was launched with `theirs`."""

    precision = "fp32"

    def __init__(self, theirs=None, others_differ: bool = False):
        self.theirs, self.others_differ = theirs, others_differ

    def from_main(self, mine: dict) -> dict:
        if self.theirs is None:
            return mine
        sent = []
        main = SimpleNamespace(
            precision="fp32", from_main=lambda value: sent.append(value) or value, anywhere=lambda condition: condition
        )
        check_same_launch(self.theirs, main)
        return sent[0]

    def anywhere(self, condition: bool) -> bool:
        return condition or self.others_differ


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max_steps=50"], "max_steps 50, there 60"),
        (["--max_steps=50", "--seed=3"], "max_steps 50, there 60; seed 3, there 1337"),
        (["--max_steps=60", "--fresh"], "fresh True, there False"),
    ],
)
def test_a_node_with_other_settings_is_refused(flags, named):
    theirs = parse_config(["--max_steps=60", "--warmup_steps=1"])
    with pytest.raises(UserError) as refused:
        check_same_launch(parse_config([*flags, "--warmup_steps=1"]), TwoNodes(theirs))
    assert f"rank 0's: {named}. Launch the same command from the same code" in str(refused.value)


def test_paths_and_memory_may_differ_between_nodes():
    theirs = parse_config(["--dataset_name=/a/shards", "--output_dir=/mnt/a", "--device_memory_gb=80"])
    check_same_launch(
        parse_config(["--dataset_name=/b/shards", "--val_data=/c", "--output_dir=/mnt/b"]), TwoNodes(theirs)
    )


def test_other_code_or_another_precision_is_refused(monkeypatch):
    config = parse_config([])
    engine = TwoNodes(config)
    engine.precision = "bf16"
    with pytest.raises(UserError, match="precision 'bf16', there 'fp32'"):
        check_same_launch(config, engine)
    digests = iter(["mine", "theirs"])
    monkeypatch.setattr(components, "_digest_of_code", lambda: next(digests))
    with pytest.raises(UserError, match="code of recipe/ 'mine', there 'theirs'"):
        check_same_launch(config, TwoNodes(config))


def test_a_digest_of_the_code_is_of_all_of_it(monkeypatch, tmp_path):
    (tmp_path / "recipe" / "data").mkdir(parents=True)
    monkeypatch.setattr(components, "ROOT", tmp_path)
    found = set()
    for path in ("recipe/a.py", "recipe/data/b.py"):
        (tmp_path / path).write_text("x")
        found.add(components._digest_of_code())
    (tmp_path / "recipe" / "data" / "b.py").write_text("y")
    assert len(found | {components._digest_of_code()}) == 3


def test_the_node_that_is_right_points_to_the_other():
    with pytest.raises(UserError, match="another node differs from rank 0's"):
        check_same_launch(parse_config([]), TwoNodes(others_differ=True))


def test_fresh_and_restarts_are_refused_together(monkeypatch):
    config = parse_config(["--output_dir=runs/mine"])
    fresh = dataclasses.replace(config, run=dataclasses.replace(config.run, fresh=True))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    check_same_launch(config, TwoNodes())
    with pytest.raises(UserError, match=r"--fresh would start over at each of the 3 restarts .* move runs/mine away"):
        check_same_launch(fresh, TwoNodes())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    check_same_launch(fresh, TwoNodes())


# Launches that would not train what the recipe describes


def refused(config, processes: int, *arguments, env: dict | None = None) -> str:
    result = launch(config, processes, "recipe/train.py", *arguments, env=env, real=True)
    assert result.returncode != 0
    errors = [line for line in (result.stdout + result.stderr).splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.stdout + result.stderr
    return errors[0]


def file_like(tmp_path, config: str, *replacements: tuple[str, str]):
    text = (ROOT / "accelerate_configs" / f"{config}.yaml").read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path = tmp_path / f"{config}.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_one_process_where_two_were_asked_for_is_refused(tmp_path):
    path = file_like(tmp_path, "ddp", ("MULTI_GPU", "MULTI_CPU"))
    message = refused(path, 2, "--dry_run")
    assert "asks for several processes, but its distributed_type starts only one" in message
    assert "accelerate_configs/ddp.yaml" in message


def test_a_model_without_its_wrapper_is_refused():
    engine = Engine.__new__(Engine)
    engine.world = 2
    engine.accelerator = SimpleNamespace(prepare=lambda *objects: objects)
    with pytest.raises(UserError, match="without DDP; launch with accelerate_configs/ddp"):
        engine.prepare(None, None, None, 1.0)


def test_zero_refuses_an_optimizer_that_it_would_resume_as_another():
    from recipe.engine.deepspeed import ZeroEngine

    for kind in (torch.optim.RAdam, torch.optim.Adam):
        with pytest.raises(UserError, match=rf"ZeRO supports AdamW only, not {kind.__name__}; launch with accelerate_"):
            ZeroEngine.__new__(ZeroEngine).prepare(None, kind([torch.zeros(1)]), None, 1.0)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP is not supported; accelerate_configs/zero3.yaml"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "the Accelerate file sets mixed_precision bf16, the recipe fp32"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "start DeepSpeed with accelerate launch"),
    ],
)
def test_an_environment_that_would_change_the_run_is_refused(variables, message):
    result = run_train("--precision", "fp32", "--dry_run", env=variables)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.slow
def test_zero_without_a_gpu_wants_to_be_told(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    message = refused("zero1", 2, "--dry_run", env={"ACCELERATE_USE_CPU": "false"})
    assert "no GPU was found; for ZeRO on the CPU set ACCELERATE_USE_CPU=true" in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"train_micro_batch_size_per_gpu": 3},
            "train_micro_batch_size_per_gpu is 3, but the recipe makes it 8; remove it or",
        ),
        ({"train_batch_size": 64}, "zero.json: train_batch_size is 64, but the recipe makes it 16"),
        ({"optimizer": {"type": "Adam"}}, "optimizer is not about sharding and belongs to the recipe; remove it"),
        ({"bf16": {"enabled": True}}, "bf16 is not about sharding"),
        ({"zero_optimization": {"stage": 0}}, "zero_optimization.stage is 0; 1, 2 and 3 are supported"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types is not about sharding"),
    ],
)
def test_a_sharding_file_that_decides_more_than_sharding_is_refused(change, message):
    from recipe.engine.deepspeed import check_sharding_only

    ours = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
    }
    shipped = json.loads((ROOT / "ds_configs" / "zero1.json").read_text())
    check_sharding_only(shipped | {"gradient_clipping": 1.0, "fp16": {"enabled": False}}, ours, "zero.json")
    with pytest.raises(UserError, match=message):
        check_sharding_only(shipped | change, ours, "zero.json")


def test_kaggles_address_of_the_tpu_is_dropped_before_torch_xla_starts(monkeypatch):
    """The image's TPU_PROCESS_ADDRESSES=local names no host, and libtpu would wait for it."""
    found = []
    engine = ModuleType("recipe.engine.xla")
    engine.XlaEngine = lambda precision: found.append(os.environ.get("TPU_PROCESS_ADDRESSES"))
    monkeypatch.setitem(sys.modules, "recipe.engine.xla", engine)
    monkeypatch.setattr(factory, "check_launch", lambda: None)
    monkeypatch.setattr(factory, "wants_xla", lambda: True)
    for value in ("local", "10.0.0.1:8476"):
        monkeypatch.setenv("TPU_PROCESS_ADDRESSES", value)
        factory.open_engine()
    assert found == [None, "10.0.0.1:8476"]


@pytest.mark.parametrize(
    ("launched", "launchers_environment", "threads"),
    [
        (False, {}, 1),  # python recipe/train.py: the variable is the user's
        (True, {"OMP_NUM_THREADS": "1"}, 1),
        (True, {}, 2),  # accelerate launch has set it to 1 itself
    ],
)
def test_the_users_number_of_threads_stands(monkeypatch, launched, launchers_environment, threads):
    class Process:
        def parent(self):
            return self

        def environ(self):
            return launchers_environment

        def cmdline(self):
            return ["accelerate", "launch"]

    found = []
    monkeypatch.setattr(device.psutil, "Process", Process)
    monkeypatch.setattr(device.psutil, "cpu_count", lambda logical: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    else:
        monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    device.tune_cpu(local_world=1)
    assert (found or [1]) == [threads]
